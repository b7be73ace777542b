"""Which statements were proved on this machine, by this user.

A factorization file carries its guarantee as text, and whoever writes a file can write any. What
no file can bring along is that *this* machine ran the certificate. So each certificate made here
(``mfopt optimize``, ``calibrate``, ``certify``) is noted (:mod:`mfopt._notes`), one note a
statement. A statement is C, σ, the sampling and (ε, δ), as proved by one version of mfopt: copies
of a file, and files that differ in words alone, share it. What another version has proved is proved
again, since one of the two may have mended a proof.

A note adds nothing to a certificate's own probability of failing.
"""

from __future__ import annotations

import datetime
from typing import Any, Protocol

from mfopt import _notes
from mfopt._version import __version__
from mfopt.accounting import account
from mfopt.accounting.monte_carlo.protocol import SampledLoss, law
from mfopt.accounting.verify import BETA_SHARE, MOST_WORK
from mfopt.calibration import certify
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism, content_digest
from mfopt.progress import Progress, Report, silent

_PROVED = ("certified", "exact", "bound")
_MORE = 2**21  # samples of a second attempt


class Stated(Protocol):
    """A mechanism at one σ with its statement: a factorization, or the account of a run."""

    @property
    def mechanism(self) -> Mechanism: ...
    @property
    def noise_multiplier(self) -> float: ...
    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def digest(self) -> str: ...


def note(factorization: Stated) -> bool:
    """Put on record that this process has just proved the guarantee of ``factorization``.

    Only for the code that ran the proof: what was read from a file is never noted.

    Returns:
      Whether it could be written; a read-only home is no reason to lose a result.
    """
    if factorization.guarantee.status not in _PROVED:
        return False
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return _notes.write(statement(factorization), {"mfopt": __version__, "date": date})


def is_known(factorization: Stated) -> bool:
    """Whether the guarantee of ``factorization`` was proved on this machine by this user."""
    return _notes.read(statement(factorization)) is not None


def ensure(factorization: Stated, *, progress: Report = silent) -> Guarantee:
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


def _prove(factorization: Stated, progress: Report) -> None:
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
) -> Guarantee:
    """Prove what is stated of a mechanism with fresh randomness; what was proved.

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
        return found
    try:
        proof = certify(loss, noise_multiplier, stated.epsilon, stated.delta, progress=progress)
    except FailureError:
        # the first attempt may have failed by bad luck; what it could have erred with is paid for
        rest = stated.delta * (1 - BETA_SHARE)
        more = min(_MORE, MOST_WORK // loss.work)
        proof = certify(
            loss, noise_multiplier, stated.epsilon, rest, samples=more, progress=progress
        )
    return proof.guarantee(mechanism.privacy_unit)


def _sampled(mechanism: Mechanism) -> SampledLoss | None:
    """One unit's sampled loss; None where the scheme has none.

    The statement itself is certified then: a search for the least ε ends above it too often.
    """
    if law.dispatch(type(mechanism.sampling)) is law.dispatch(object):
        return None
    return law(mechanism.sampling).loss(mechanism.strategy)


def statement(factorization: Stated) -> str:
    """The name that a proof of the guarantee of ``factorization`` is noted under."""
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
