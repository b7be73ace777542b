"""Which statements were proved on this machine, by this user.

A factorization file carries its guarantee as text, and whoever writes a file can write any. What
no file can bring along is that *this* machine ran the certificate. So each certificate made here
(``mfopt optimize``, ``calibrate``, ``certify``) is noted in the user's data folder, one small file
a statement, authenticated (HMAC-SHA256) by a key that is made on first use and readable by its
owner only. A statement is C, σ, the sampling and (ε, δ), as proved by one version of mfopt: copies
of a file, and files that differ in words alone, share it. What another version has proved is proved
again, since one of the two may have mended a proof.

This protects against files from elsewhere that are mistaken, altered or made up, and against notes
copied from another machine. It does not protect against whoever can read this user's files or run
programs as this user, and it adds nothing to a certificate's own probability of failing.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs

from mfopt import _files
from mfopt._version import __version__
from mfopt.accounting import account
from mfopt.accounting.monte_carlo.protocol import SampledLoss, law
from mfopt.accounting.verify import BETA_SHARE, MOST_WORK
from mfopt.calibration import certify
from mfopt.errors import FailureError, UsageError
from mfopt.factorization.record import Record
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism, content_digest
from mfopt.progress import Progress, Report, silent

_PROVED = ("certified", "exact", "bound")
_KEY_BYTES = 32
_MORE = 2**21  # samples of a second attempt


def folder() -> Path:
    """``$MFOPT_DATA``, or ``proofs`` in mfopt's part of the user's data folder."""
    if given := os.environ.get("MFOPT_DATA"):
        return Path(given)
    return platformdirs.user_data_path("mfopt", appauthor=False) / "proofs"


def note(factorization: Record) -> bool:
    """Put on record that this process has just proved the guarantee of ``factorization``.

    Only for the code that ran the proof: what was read from a file is never noted.

    Returns:
      Whether it could be written; a read-only home is no reason to lose a result.
    """
    if factorization.guarantee.status not in _PROVED:
        return False
    statement = _statement(factorization)
    facts = {
        "statement": statement,
        "mfopt": __version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({**facts, "tag": _tag(facts, _key(make=True))}, sort_keys=True)
        _files.write(_place(statement), text, private=True)
    except OSError:
        return False
    return True


def is_known(factorization: Record) -> bool:
    """Whether the guarantee of ``factorization`` was proved on this machine by this user."""
    statement = _statement(factorization)
    try:
        facts = json.loads(_place(statement).read_text(encoding="utf-8"))
        tag = str(facts.pop("tag"))
        expected = _tag(facts, _key(make=False))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False  # no note, or a damaged one: the statement counts as not proved
    return hmac.compare_digest(tag.encode(), expected.encode()) and (
        facts.get("statement") == statement
    )


def ensure(factorization: Record, *, progress: Report = silent) -> Guarantee:
    """The guarantee of ``factorization``, proved again here unless it was already.

    Up to two certificates are run, the second with more samples; both together err with
    at most the share of δ that they count inside it.

    Raises:
      FailureError: it could not be proved.
    """
    stated = factorization.guarantee
    if stated.status not in _PROVED or is_known(factorization):
        return stated
    progress(Progress("proving the file's guarantee on this machine"))
    try:
        _prove(factorization, progress)
    except (FailureError, UsageError) as problem:
        raise FailureError(
            f"the file says {stated}, and this machine could not prove it: {problem} "
            "Run `mfopt calibrate` for a σ that it can prove, or take the file on trust "
            "(`trust=True`)."
        ) from None
    note(factorization)
    return stated


def _prove(factorization: Record, progress: Report) -> None:
    prove(
        factorization.mechanism,
        factorization.noise_multiplier,
        factorization.guarantee,
        progress=progress,
    )


def prove(
    mechanism: Mechanism,
    noise_multiplier: float,
    stated: Guarantee,
    *,
    progress: Report = silent,
) -> None:
    """Prove what is stated of a mechanism with fresh randomness.

    Args:
      mechanism: C, sampling, unit, group size and adjacency.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      stated: the statement.
      progress: told of the samples.

    Raises:
      FailureError: it could not be proved.
      UsageError: no accountant knows the mechanism.
    """
    plain = stated.group_size == 1 and stated.adjacency == "add-remove"
    loss = _sampled(mechanism) if plain else None
    if loss is None:
        found = account(mechanism, noise_multiplier=noise_multiplier, delta=stated.delta)
        if not (found.status in _PROVED and found.epsilon <= stated.epsilon):
            raise FailureError(f"what could be proved is {found}.")
        return
    try:
        certify(loss, noise_multiplier, stated.epsilon, stated.delta, progress=progress)
    except FailureError:
        # the first attempt may have failed by bad luck; what it could have erred with is paid for
        rest = stated.delta * (1 - BETA_SHARE)
        more = min(_MORE, MOST_WORK // loss.work)
        certify(loss, noise_multiplier, stated.epsilon, rest, samples=more, progress=progress)


def _sampled(mechanism: Mechanism) -> SampledLoss | None:
    """One unit's sampled loss; None where the scheme has none.

    The statement itself is certified then: a search for the least ε ends above it too often.
    """
    if law.dispatch(type(mechanism.sampling)) is law.dispatch(object):
        return None
    return law(mechanism.sampling).loss(mechanism.strategy)


def _statement(factorization: Record) -> str:
    stated = factorization.guarantee
    facts: dict[str, Any] = {
        "mfopt": __version__,
        "mechanism": factorization.digest,
        "epsilon": float(stated.epsilon).hex(),
        "delta": float(stated.delta).hex(),
        "group_size": stated.group_size,
        "adjacency": stated.adjacency,
    }
    return content_digest(facts, {})


def _place(statement: str) -> Path:
    return folder() / f"{statement}.json"


def _key(*, make: bool) -> bytes:
    path = folder() / "key"
    if make and not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            _files.write(path, secrets.token_bytes(_KEY_BYTES), force=False, private=True)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES or path.stat().st_mode & 0o077:
        raise OSError(f"{path} is damaged, or can be read by others: remove it")
    return key


def _tag(facts: dict[str, Any], key: bytes) -> str:
    return hmac.digest(key, json.dumps(facts, sort_keys=True).encode(), "sha256").hex()
