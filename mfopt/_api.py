"""Top-level functions: optimize C for a target, certify and calibrate it, and compute ε, δ or σ.

Everything here is exported by :mod:`mfopt` itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from mfopt import accounting
from mfopt._runtime import _check
from mfopt.accounting import Effort
from mfopt.calibration.release import AS_NEEDED
from mfopt.errors import InterruptedFactorization, UncertifiedError
from mfopt.factorization import Factorization, proofs
from mfopt.factorization.provenance import provenance
from mfopt.final_model import Schedule, learning_rates
from mfopt.guarantee import CertificateKind, Guarantee
from mfopt.mechanism import Mechanism
from mfopt.optimize import Form, Objective, Question, Search, Target, least_error
from mfopt.optimize import factorize as optimized
from mfopt.optimize.auto import MEMORY
from mfopt.progress import Report, silent
from mfopt.sampling import BallsInBins, FreshBins, Scheme, named_scheme
from mfopt.sampling.named import NAMES, groups
from mfopt.workloads import Workload

SamplingName = Literal[
    "balls-in-bins",
    "fresh-bins",
    "b-min-sep",
    "poisson",
    "cyclic-poisson",
    "random-partition",
    "fixed-order",
    "min-separation",
    "auto",
]


def factorize(
    *,
    epochs: int,
    iterations_per_epoch: int,
    epsilon: float,
    delta: float = 1e-5,
    sampling: SamplingName = "balls-in-bins",
    reassign_every: int | None = None,
    separation: int | None = None,
    max_participations: int | None = None,
    strategy: str | Sequence[str] | None = None,
    buffers: int | None = None,
    bands: int | None = None,
    memory: int | None = None,
    workload: Workload | None = None,
    objective: Literal["robust", "final", "rmse", "max"] | None = None,
    schedule: Schedule | None = None,
    search: Search | None = None,
    privacy_unit: str = "example",
    seed: int | None = None,
    certify_samples: int | None = None,
    certificate: CertificateKind = "monte-carlo",
    progress: Report = silent,
    command: str = "mfopt.factorize",
) -> Factorization:
    """Find the strategy matrix C with the lowest error at (ε, δ) and certify the smallest σ for it.

    The call behind ``mfopt optimize``. The guarantee is (ε, δ)-DP of one ``privacy_unit`` under
    add-remove adjacency, for training that executes ``result.sampling`` (``result.sampler``).

    Args:
      epochs: passes over the data, E.
      iterations_per_epoch: b, the number of bins; the guarantee covers E·b iterations.
      epsilon, delta: target.
      sampling: "balls-in-bins" assigns each unit once to one bin for all epochs, "fresh-bins" in
        each epoch; "b-min-sep" samples independently, with a minimum separation; "poisson" and
        "cyclic-poisson" sample each iteration independently, of all units or of one group in
        turn, with an expected batch of one in ``iterations_per_epoch`` units; "random-partition"
        does so with groups that are drawn, and counts on it; "fixed-order" and
        "min-separation" draw nothing and amplify nothing; "auto" takes the one of the first two
        with the lower error within ``memory``.
      reassign_every: epochs between two assignments of fresh bins; 1 by default.
      separation: minimum number of iterations between two participations under b-min-sep (half an
        epoch, or as many as ``bands``, by default) and min-separation (an epoch by default); groups
        of a random partition (an eighth of an epoch, or as many as ``bands``, by default).
      max_participations: of one unit under min-separation; ``epochs`` by default.
      strategy: kind of C, or several of which the best is kept; by default "blt", for ε of 4 and
        more also "wave-blt"; "cleared-blt" under fresh bins, "banded-toeplitz" under b-min-sep, a
        random partition and cyclic Poisson, and "identity" under Poisson sampling.
      buffers: noise buffers of "blt", "wave-blt" and "cleared-blt"; at most 4 by default.
      bands: bands of banded kinds; at most 16 by default (fewer where the scheme allows no more).
        Cyclic Poisson sampling has as many groups; by default the best of 1, 2, 4, … bands.
      memory: choose the kind of C within this many noise buffers (× model size), in place of
        ``strategy``, ``buffers`` and ``bands``; 15 with ``sampling="auto"`` by default.
      workload: queries whose error is minimized; prefix sums by default.
      objective: error that is minimized. "robust" mixes the errors of prefix sums and of the final
        model under four learning-rate schedules: the default for prefix sums.
        "final" is the final model's alone; "rmse" and "max" are the workload's.
      schedule: learning rates that the model will be trained with, for "robust" and "final":
        "constant", "averaged", "linear", "cosine", "wsd", or one rate for each iteration.
      search: samples, evaluations, start and time scaling of the search.
      privacy_unit: name of the privacy unit.
      seed: pinned seed, for reproduction only; the certificate says so.
      certify_samples: iid samples of the certificate; by default as many as are worth it, and none
        where σ is known in closed form.
      certificate: "deterministic" certifies σ without samples, with failure probability 0.
      progress: callback for stages and evaluations.
      command: what to put on record as the maker.

    Returns:
      C, σ (relative to the clip norm) and the guarantee; ``result.save(path)`` writes the file.

    Raises:
      UsageError: an argument out of range, or options that exclude each other.
      UncertifiedError: no σ could be certified; its ``best`` holds C.
      InterruptedFactorization: at a KeyboardInterrupt, with the best C so far.

    >>> made = factorize(epochs=2, iterations_per_epoch=8, epsilon=2.0, strategy="identity")
    >>> print(made.iterations, made.guarantee.epsilon, made.guarantee.status)
    16 2.0 certified
    """
    of_scheme: dict[str, Any] = {
        "reassign_every": reassign_every,
        "separation": separation,
        "max_participations": max_participations,
    }
    with _check.renamed_arguments(_NAMES):
        epochs = _check.integer("epochs", epochs)
        iterations_per_epoch = _check.integer("iterations_per_epoch", iterations_per_epoch)
        of_scheme = {k: _check.optional(_check.integer, k, v) for k, v in of_scheme.items()}
        memory = _check.optional(_check.integer, "memory", memory, at_least=0)
        auto = _check.choice("sampling", sampling, (*NAMES, "auto")) == "auto"
        _check.optional(_check.kind, "workload", workload, expected=Workload, way_out=_WORKLOADS)
        question = Question(
            Target(epsilon, delta, privacy_unit, certify_samples, seed, certificate),
            Form(strategy, bands, buffers),
            Objective.chosen(objective, schedule, workload),
            _check.kind("search", Search() if search is None else search, Search, _SEARCHES),
        )
        _require_calls(progress, command)
        schemes = _schemes(sampling, epochs, iterations_per_epoch, question.form.bands, of_scheme)
        if schedule is not None and not isinstance(schedule, str):
            learning_rates(schedule, epochs * iterations_per_epoch)
        record = provenance(question.target.seed, command)
        if auto or memory is not None:
            _refuse_choices(question, memory, sampling)
            most_buffers = MEMORY if memory is None else memory
            factorization = least_error(
                schemes, question, most_buffers, provenance=record, progress=progress
            )
        else:
            factorization = optimized(schemes, question, provenance=record, progress=progress)
        return _certified(factorization)


# names inside the library -> arguments of the front door
_NAMES = {
    "bins": "iterations_per_epoch",
    "rethrow": "reassign_every",
    "certify samples": "certify_samples",
    "iterations": "epochs × iterations_per_epoch",
    "n": "epochs × iterations_per_epoch",
}
_PROOF_NAMES = {"certify samples": "samples"}
_SEARCHES = "mfopt.optimize.Search(steps=50) is one."
_WORKLOADS = "mfopt.workloads.ToeplitzWorkload(coefs) makes one of an array."


def _schemes(
    sampling: str, epochs: int, bins: int, bands: int | None, options: dict[str, int | None]
) -> Sequence[Any]:
    """The scheme of that name, or those that are tried in turn or compared."""
    if sampling == "auto":
        for option, value in options.items():
            if value is not None:
                rule = 'belongs to one scheme, and sampling="auto" compares two, at their defaults'
                raise _check.reject(option, value, rule, "Leave it out, or name the sampling.")
        return [BallsInBins(bins, epochs), FreshBins(bins, epochs)]
    scheme = named_scheme(sampling, epochs, bins, bands=1 if bands is None else bands, **options)
    return groups(epochs, bins) if scheme.bands_are_groups and bands is None else [scheme]


def _refuse_choices(question: Question, memory: int | None, sampling: str) -> None:
    """Refuse what names a C that ``memory`` or ``sampling`` is to choose."""
    form, search = question.form, question.search
    chosen = vars(form) | {"samples": search.samples, "steps": search.steps, "init": search.init}
    for name, value in chosen.items():
        if value is not None:
            rule = "has no effect where C is chosen by `memory` or `sampling`"
            typed = ",".join(value) if name == "strategy" else value
            raise _check.reject(name, typed, rule, f"Leave out `{name}`, or these.")
    if sampling not in ("auto", BallsInBins.kind, FreshBins.kind):
        rule = f"has no effect with `sampling={sampling}`"
        raise _check.reject("memory", memory, rule, "Use balls-in-bins, fresh-bins or auto.")


def _require_calls(progress: object, command: object) -> None:
    """Refuse a listener that cannot be called, and a maker that is no text."""
    if not callable(progress):
        rule = "must be a function of a mfopt.progress.Progress"
        raise _check.reject("progress", progress, rule)
    _check.kind("command", command, str)


def _certified(factorization: Factorization) -> Factorization:
    """``factorization``, unless its guarantee is an estimate only."""
    if factorization.provenance.get("interrupted"):
        raise InterruptedFactorization(factorization)
    if factorization.guarantee.proved:
        return factorization
    raise UncertifiedError(factorization.not_certified or "no σ could be certified", factorization)


def account(
    mechanism: Mechanism | Scheme | Factorization,
    *,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    samples: int | None = None,
    seed: int | None = None,
    certificate: CertificateKind = "monte-carlo",
) -> Guarantee:
    """Compute the third of (σ, ε, δ) from two of them, never rounded towards less privacy.

    Args:
      mechanism: sampling with C, unit and adjacency; a scheme alone stands for independent noise
        (C = I), and a factorization for its own mechanism at its own σ, unless both ε and δ are
        given.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      epsilon, delta: statement.
      samples, seed, certificate: of accounts by Monte Carlo, or without ("deterministic").

    Raises:
      UsageError: not exactly two of the three are given, one is out of range, or no accountant
        knows the mechanism.
      FailureError: there is no finite answer.

    >>> from mfopt.sampling import Poisson
    >>> sampled = Poisson(probability=0.01, iterations=1000)
    >>> found = account(sampled, noise_multiplier=1.0, delta=1e-6)
    >>> print(f"{found.epsilon:.4f}", found.status)
    2.1246 exact
    """
    if isinstance(mechanism, Factorization):
        if noise_multiplier is None and (epsilon is None or delta is None):
            noise_multiplier = mechanism.noise_multiplier
        mechanism = mechanism.mechanism
    elif isinstance(mechanism, Scheme):
        mechanism = Mechanism(mechanism)
    way_out = "A scheme of mfopt.sampling and mfopt.load(path) are taken, too."
    _check.kind("mechanism", mechanism, Mechanism, way_out)
    with _check.renamed_arguments(_PROOF_NAMES):
        return accounting.account(
            mechanism,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            delta=delta,
            samples=samples,
            seed=seed,
            certificate=certificate,
        )


def _require_types(factorization: object, effort: object) -> None:
    """Refuse a factorization, or an effort, of another type."""
    _check.kind("factorization", factorization, Factorization, "mfopt.load reads one.")
    _check.kind("effort", effort, Effort)


def certify(
    factorization: Factorization,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    effort: Effort = AS_NEEDED,
    progress: Report = silent,
    command: str = "mfopt.certify",
) -> Factorization:
    """Prove (ε, δ) for the C and σ of a factorization, in tests on fresh samples.

    Args:
      factorization: C, σ and sampling.
      epsilon, delta: statement to prove; by default the factorization's own.
      effort: samples for each direction (by default as many as are needed), their seed, pinned for
        reproduction only, and the kind of certificate.
      progress: callback for stages.
      command: what to put on record as the maker.

    Returns:
      The factorization with the statement that was proved.

    Raises:
      FailureError: the statement could not be proved at this σ.

    >>> made = factorize(epochs=2, iterations_per_epoch=8, epsilon=2.0, strategy="identity")
    >>> certify(made, epsilon=2.5).guarantee.epsilon
    2.5
    """
    _require_calls(progress, command)
    _require_types(factorization, effort)
    stated, sigma = factorization.guarantee, factorization.noise_multiplier
    with _check.renamed_arguments(_PROOF_NAMES):
        goal = Target(
            stated.epsilon if epsilon is None else epsilon,
            stated.delta if delta is None else delta,
            stated.privacy_unit,
            effort.samples,
            effort.seed,
            effort.certificate,
        )
        seed = goal.seed
        target = dataclasses.replace(
            stated, epsilon=goal.epsilon, delta=goal.delta, status="certified"
        )
        proofs.refute(factorization.mechanism, target)
        proof = proofs.prove(
            factorization.mechanism, sigma, target, effort=goal.effort, progress=progress
        )
    guarantee = dataclasses.replace(proof, epsilon=goal.epsilon)  # it may have proved less
    record = {**factorization.provenance, "certified_by": provenance(seed, command)}
    proved = dataclasses.replace(factorization, guarantee=guarantee, provenance=record)
    if seed is None:  # a file may have been made to pass with a seed that was known before
        proofs.note(proved)
        if (guarantee.epsilon, guarantee.delta) == (stated.epsilon, stated.delta):
            proofs.note(factorization, guarantee)
    return proved


def calibrate(
    factorization: Factorization,
    *,
    epsilon: float,
    delta: float = 1e-5,
    effort: Effort = AS_NEEDED,
    progress: Report = silent,
    command: str = "mfopt.calibrate",
) -> Factorization:
    """Find the smallest σ that can be certified at another (ε, δ) for the same C.

    Args:
      factorization: C and sampling.
      epsilon, delta: target.
      effort, progress, command: as for :func:`certify`.

    Returns:
      The factorization with the new σ and its guarantee.

    Raises:
      FailureError: no σ could be certified.

    >>> made = factorize(epochs=2, iterations_per_epoch=8, epsilon=2.0, strategy="identity")
    >>> calibrate(made, epsilon=1.0).noise_multiplier > made.noise_multiplier
    True
    """
    _require_calls(progress, command)
    _require_types(factorization, effort)
    unit = factorization.guarantee.privacy_unit
    with _check.renamed_arguments(_PROOF_NAMES):
        target = Target(epsilon, delta, unit, effort.samples, effort.seed, effort.certificate)
        seed = target.seed
        guarantee, facts = proofs.calibrated(
            factorization.mechanism,
            target.epsilon,
            target.delta,
            effort=target.effort,
            progress=progress,
        )
    record = {**factorization.provenance, "calibrated_by": provenance(seed, command), **facts}
    calibrated = dataclasses.replace(
        factorization,
        noise_multiplier=guarantee.noise_multiplier,
        guarantee=guarantee,
        provenance=record,
    )
    if seed is None:  # a C may have been made to pass with a seed that was known before
        proofs.note(calibrated)
    return calibrated
