"""Record of the statements that this machine proved for this user.

A factorization file carries its guarantee as text, and whoever writes a file can write any. What
no file can bring along is that *this* machine ran the certificate. So each certificate made here
(``mfopt optimize``, ``calibrate``, ``certify``) is noted (:mod:`mfopt._runtime._notes`), one note a
statement: C, σ, the sampling and all words of the guarantee, as proved by one state of the
accounting code. Copies of a file share it; whatever is edited is another statement. What other
accounting code has proved is proved again, since one of the two may have mended a proof.

A note holds the words that were *proved* (status, method, probability of failing), which a file's
own need not be. The name of the privacy unit is the maker's word: no accountant can prove what one
row of somebody's data is.

A note adds nothing to a certificate's own probability of failing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

import mfopt
from mfopt import floor
from mfopt._runtime import _notes, _plugins
from mfopt._runtime._types import JsonObject
from mfopt._version import __version__
from mfopt.accounting import Analysis, DeterministicAnalysis, Effort, account, analysis, attained
from mfopt.accounting.model import Estimate
from mfopt.accounting.monte_carlo.protocol import is_sampled, law
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.calibration import certify, guarantee_of, release
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism, content_digest
from mfopt.progress import Progress, Report, silent

if TYPE_CHECKING:
    from mfopt.factorization.factorization import Factorization

_PROVED = ("certified", "exact", "bound")
WORDS = ("status", "method", "failure_probability", "details")  # of a guarantee, by its proof
# code that no proof runs: a change of any other has statements proved again
_BESIDE = ("experiments/", "jax/", "noise/", "optimize/", "testing/", "torch/", "training/")
_NUMERICS = ("jax", "jaxlib", "numpy", "scipy", "dp_accounting")


def note(factorization: Factorization, proved: Guarantee | None = None) -> bool:
    """Put on record that this process has just proved the guarantee of ``factorization``.

    Only for the code that ran the proof: what was read from a file is never noted.

    Args:
      factorization: the statement.
      proved: the guarantee as the proof words it; None: as stated.

    Returns:
      True if it could be written; a read-only home is no reason to lose a result.
    """
    proved = factorization.guarantee if proved is None else proved
    if proved.status not in _PROVED:
        return False
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    words = {name: getattr(proved, name) for name in WORDS}
    facts = {"mfopt": __version__, "date": date, "proved": words}
    return _notes.write(statement(factorization), facts)


def proved_guarantee(factorization: Factorization) -> Guarantee | None:
    """Stated guarantee in the words that this machine proved; None where it proved nothing.

    Status, method, probability of failing and details are those of the proof.
    """
    noted = _notes.read(statement(factorization))
    return None if noted is None else _worded(factorization.guarantee, noted["proved"])


def is_known(factorization: Factorization) -> bool:
    """True where this machine proved the guarantee, and nothing in it is said to be surer.

    What takes no samples is proved on the spot.
    """
    proved, stated = proved_guarantee(factorization), factorization.guarantee
    if proved is None and stated.proved and not is_sampled(factorization.sampling):
        with contextlib.suppress(FailureError):
            proved = ensure(factorization)
    return (
        proved is not None
        and (proved.status, proved.method) == (stated.status, stated.method)
        and proved.failure_probability <= stated.failure_probability
    )


def _worded(stated: Guarantee, words: JsonObject) -> Guarantee:
    return dataclasses.replace(stated, **{name: words[name] for name in WORDS})


def ensure(factorization: Factorization, *, progress: Report = silent) -> Guarantee:
    """Guarantee of ``factorization`` in the words that were proved, now or earlier on this machine.

    (ε, δ), σ, unit, group size and adjacency are those stated; status, method and the probability
    of failing are those of the proof, whatever the file says. An estimate stays what it is.

    Raises:
      FailureError: it could not be proved.
    """
    stated = factorization.guarantee
    if stated.status not in _PROVED:
        return stated
    proved = proved_guarantee(factorization)
    if proved is not None:
        return proved
    progress(Progress("proving the file's guarantee on this machine"))
    try:
        mechanism, sigma = factorization.mechanism, factorization.noise_multiplier
        answer = prove(mechanism, sigma, stated, progress=progress)
    except (FailureError, UsageError) as problem:
        raise FailureError(
            f"the statement is {stated}, and this machine could not prove it: {problem}"
        ) from None
    note(factorization, answer)
    return _worded(stated, vars(answer))


def refute(mechanism: Mechanism, stated: Guarantee) -> None:
    """Raise where a guarantee is proven false, by the error of its noise or by explicit data sets.

    Args:
      mechanism: C, sampling, unit, group size and adjacency.
      stated: of it, with its σ.

    Raises:
      FailureError: it is false.
    """
    floor.refute(mechanism.strategy, mechanism.sampling, stated)
    attained.refute(mechanism, stated)


def prove(
    mechanism: Mechanism,
    noise_multiplier: float,
    stated: Guarantee,
    *,
    effort: Effort | None = None,
    progress: Report = silent,
) -> Guarantee:
    """Prove what is stated of a mechanism with fresh randomness; what was proved.

    One certificate is asked for, which itself spends more samples where its first are not enough
    and counts each of its rounds in the probability of failing.

    Args:
      mechanism: C, sampling, unit, group size and adjacency.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      stated: the statement.
      effort: samples, seed and kind of certificate; by default of the kind that is stated.
      progress: callback for the samples.

    Raises:
      FailureError: it could not be proved.
      UsageError: no accountant knows the mechanism.
    """
    effort = Effort(certificate=stated.certificate) if effort is None else effort
    plain = stated.group_size == 1 and stated.adjacency == "add-remove"
    if not (plain and is_sampled(mechanism.sampling)):
        return _by_any(analysis(mechanism, **vars(effort)), noise_multiplier, stated)
    proof = certify(
        law(mechanism.sampling).loss(mechanism.strategy),
        noise_multiplier,
        stated.epsilon,
        stated.delta,
        effort=effort,
        progress=progress,
    )
    return guarantee_of(proof, effort.seed, mechanism.privacy_unit)


def calibrated(
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    *,
    effort: Effort,
    near: float | None = None,
    progress: Report = silent,
) -> tuple[Guarantee, JsonObject]:
    """Smallest σ that is proved at (ε, δ), and facts for the record of its factorization.

    Args:
      mechanism: C, sampling and unit; one unit, add-remove adjacency.
      epsilon, delta: target.
      effort: samples, seed and kind of certificate; no effect where σ takes no samples.
      near: σ within some percent, from whoever searched for C.
      progress: callback for each stage.

    Raises:
      FailureError: no σ could be proved.
    """
    if not is_sampled(mechanism.sampling):
        answer = account(mechanism, epsilon=epsilon, delta=delta)
        if not answer.noise_multiplier > 0:
            raise FailureError(f"{answer.method}: there is no mechanism to calibrate")
        norm = answer.details.get("sensitivity", answer.details.get("column_norm"))
        return answer, {} if norm is None else {"mode_norm": norm}
    loss = law(mechanism.sampling).loss(mechanism.strategy)
    proof = release(
        loss,
        epsilon,
        delta,
        effort=effort,
        near=near,
        progress=progress,
    )
    # none where it follows without samples
    estimate = proof.estimate or Estimate(proof.noise_multiplier, slope=0.0)
    return guarantee_of(proof, effort.seed, mechanism.privacy_unit), {
        "mode_norm": loss.sensitivity,  # for the report: of many bins it takes long
        "estimated_noise_multiplier": estimate.value,
        "estimate_relative_error": estimate.error,
    }


def _by_any(subject: Analysis, noise_multiplier: float, stated: Guarantee) -> Guarantee:
    """What the first part of an analysis that proves the statement proves.

    Where samples are drawn the statement itself is certified: a search for the least ε ends above
    it too often.
    """
    sigma, epsilon, delta = noise_multiplier, stated.epsilon, stated.delta
    for part in getattr(subject, "parts", (subject,)):
        try:
            if isinstance(part, VerifiedAnalysis | DeterministicAnalysis):
                answer = part.certified(sigma, epsilon, delta)
            else:
                answer = part.epsilon(sigma, delta)
        except FailureError as problem:
            why = str(problem)
        else:
            if answer.status in _PROVED and answer.epsilon <= epsilon:
                return answer
            why = f"what could be proved is {answer}."
    raise FailureError(why)


def statement(factorization: Factorization) -> str:
    """Name that a proof of the guarantee of ``factorization`` is noted under."""
    facts: JsonObject = {
        "code": code_digest(),
        "mechanism": factorization.digest,
        "guarantee": json.dumps(factorization.guarantee.describe(), sort_keys=True),
    }
    return content_digest(facts, {})


@functools.cache
def code_digest() -> str:
    """Hex SHA-256 of the accounting code, of the numerical packages' versions and of plugins'."""
    home = Path(mfopt.__file__).parent
    sha = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        name = path.relative_to(home).as_posix()
        if not name.startswith(_BESIDE):
            sha.update(f"\0{name}\0".encode() + path.read_bytes())
    for name in _NUMERICS:
        sha.update(f"\0{name} {importlib.metadata.version(name)}".encode())
    for entry in importlib.metadata.entry_points(group=_plugins.GROUP):
        sha.update(f"\0{entry.value} {entry.dist.version if entry.dist else None}".encode())
    return sha.hexdigest()
