"""Optimization from a privacy target to a certified factorization, ready to save."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfopt._runtime import _check, _signals
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.verify import check_delta
from mfopt.calibration import calibrate, release
from mfopt.errors import FailureError
from mfopt.factorization import Factorization, proofs
from mfopt.final_model import Schedule
from mfopt.guarantee import CertificateKind, Guarantee, is_deterministic
from mfopt.optimize import defaults, kinds, sizes
from mfopt.optimize.memory import options as within_memory
from mfopt.optimize.objective import Objective
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize
from mfopt.optimize.time_scale import Scaling
from mfopt.progress import Report, silent
from mfopt.sampling import BinScheme, Scheme
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums, Workload


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of a search of one kind of C; None stands for the kind's own default.

    Attributes:
      time_scale: whether C is put between two diagonals that vary with time, and how they may.
      samples: frozen Monte Carlo samples.
      optimizer, steps: see :func:`mfopt.optimize.optimize`.
      init: strategy to start from.
    """

    time_scale: bool | Scaling | None = None
    samples: int | None = None
    optimizer: str | None = None
    steps: int | None = None
    init: Strategy | None = None

    def of_one_kind(self) -> dict[str, Any]:
        """Options that only a search of one kind can have, by name."""
        return {name: getattr(self, name) for name in ("samples", "optimizer", "steps", "init")}


_BANDED = ("banded-toeplitz", "banded", "banded-sqrt")


def factorize(
    scheme: BinScheme,
    epsilon: float,
    delta: float = 1e-5,
    *,
    strategy: str | Sequence[str] | None = None,
    bands: int | None = None,
    memory: int | None = None,
    workload: Workload | None = None,
    objective: str | None = None,
    schedule: Schedule | None = None,
    time_scale: bool | Scaling | None = None,
    certify_samples: int | None = None,
    seed: int | None = None,
    certificate: CertificateKind = "monte-carlo",
    privacy_unit: str = "example",
    provenance: dict[str, Any] | None = None,
    progress: Report = silent,
    **options: Any,
) -> Factorization:
    """Optimize C (or take a fixed one) and certify the smallest σ for it.

    The guarantee is (ε, δ)-DP of one ``privacy_unit``, add-remove adjacency, certified by
    estimate-verify-release. An interrupt (KeyboardInterrupt) keeps the best C so far and returns
    it with an *estimate* for a guarantee; ``provenance["interrupted"]`` is then true. So does a
    search whose C has no certificate, and ``provenance["not_certified"]`` says why.

    Args:
      scheme, epsilon, delta, workload, seed: as for :func:`mfopt.optimize.optimize`, which also
        takes ``options``.
      bands: of banded kinds; by default :func:`mfopt.optimize.defaults.bands`.
      objective, schedule: what is minimized, see :class:`mfopt.optimize.objective.Objective`; by
        default "robust", and "rmse" of a workload other than prefix sums.
      strategy: as there, or one of the fixed kinds; by default those of
        :func:`mfopt.optimize.defaults.kinds`. Where several were searched
        ``provenance["forms"]`` is the loss of each on fresh samples (log error for "rmse"
        and "max").
      memory: take the best of the kinds that keep at most this many noise buffers, in
        place of ``strategy``, ``bands`` and ``options`` (:mod:`mfopt.optimize.memory`);
        ``provenance["memory"]`` then says what one array fewer and one more would give.
      time_scale: as for ``optimize``; by default, time-scaled where that makes more of the kind.
      certify_samples: iid samples of the certificate; by default as many as are worth it.
      certificate: "deterministic" draws no samples for σ and has failure probability 0.
      privacy_unit: what the guarantee protects, by name.
      provenance: more to put on record (command, date, ...).
      progress: callback for every evaluation and of the stages of the certificate.

    Raises:
      UsageError: an argument out of range.
      FailureError: no σ could be certified for a C that nothing was spent on.

    >>> from mfopt.sampling import BallsInBins
    >>> made = factorize(BallsInBins(bins=8, epochs=2), 2.0, strategy="identity")
    >>> print(made.guarantee.status, made.iterations, made.strategy.kind)
    certified 16 identity
    """
    asked = None if strategy is None else kinds.asked(strategy)
    _check.epsilon("epsilon", epsilon)
    check_delta(delta)
    check_proof(certify_samples, seed, privacy_unit, certificate)
    _check.kind("scheme", scheme, Scheme, "BallsInBins(bins=128, epochs=16) is one.")
    workload = _check.kind("workload", PrefixSums() if workload is None else workload, Workload)
    if memory is not None and options:
        raise _check.reject("memory", memory, f"leaves no choice of {', '.join(sorted(options))}")
    buffers = _check.integer("buffers", options.get("buffers", defaults.buffers(scheme)))
    bands = defaults.bands(scheme) if bands is None else _check.integer("bands", bands)
    loss = Objective.chosen(objective, schedule, workload)
    forms = asked or defaults.kinds(scheme, epsilon, buffers)
    searched = memory is not None or len(forms) > 1 or forms[0] in kinds.names()
    if time_scale is None:
        time_scale = memory is not None or (
            searched and all(kinds.find(form).scalable for form in forms)
        )
    most = scheme.most_bands
    if most is not None and bands > most and set(forms) & set(_BANDED):
        rule = f"must be at most {most} with {scheme.kind.replace('-bins', ' bins')}"
        raise _check.reject("bands", bands, rule, "More bands have no account there.")
    for form in forms:
        sizes.require(
            form,
            scheme,
            samples=0,
            bands=bands,
            buffers=options.get("buffers", 1),
            scaled=bool(time_scale),
        )
    interrupted, bounds = False, {}
    if searched:
        try:
            if memory is not None:
                bounds = within_memory(
                    scheme,
                    epsilon,
                    delta,
                    memory,
                    workload=workload,
                    loss=loss,
                    time_scale=time_scale,
                    seed=seed,
                    progress=progress,
                )
                found = bounds[memory].found
            else:
                found = optimize(
                    scheme,
                    epsilon,
                    delta,
                    strategy=forms,
                    bands=bands,
                    workload=workload,
                    loss=loss,
                    time_scale=time_scale,
                    seed=seed,
                    progress=progress,
                    **options,
                )
        except InterruptedOptimization as stopped:
            found, interrupted = stopped.best, True
    else:
        found = Optimized(kinds.fixed(forms[0], bands=bands))
    record = dict(provenance or {})
    if searched:
        record["objective"] = loss.describe()
    if memory is not None and bounds:
        record["memory"] = {
            "at_most": memory,
            "kept": bounds[memory].memory,
            "estimated_error": {str(bound): option.error for bound, option in bounds.items()},
        }
    return on_record(
        found,
        scheme,
        epsilon,
        delta,
        workload=workload,
        certify_samples=certify_samples,
        seed=seed,
        certificate=certificate,
        privacy_unit=privacy_unit,
        provenance=record,
        progress=progress,
        interrupted=interrupted,
        keep=searched,
    )


def check_proof(
    certify_samples: int | None,
    seed: int | None,
    privacy_unit: str,
    certificate: CertificateKind = "monte-carlo",
) -> None:
    """Refuse, before a search, a target whose certificate would be refused.

    Args:
      certify_samples, seed, privacy_unit, certificate: as for :func:`factorize`.
    """
    is_deterministic(certificate, certify_samples)
    if certify_samples is not None:
        _check.integer("certify samples", certify_samples, at_least=256)
    if seed is not None:
        _check.seed("seed", seed)
    _check.word("privacy_unit", privacy_unit)


def on_record(
    found: Optimized,
    scheme: BinScheme,
    epsilon: float,
    delta: float,
    *,
    workload: Workload,
    certify_samples: int | None = None,
    seed: int | None = None,
    certificate: CertificateKind = "monte-carlo",
    privacy_unit: str = "example",
    provenance: dict[str, Any] | None = None,
    progress: Report = silent,
    interrupted: bool = False,
    keep: bool = False,
) -> Factorization:
    """Certify the smallest σ of an optimized C and record both, ready to save.

    Args:
      found: the search's result.
      scheme, epsilon, delta, workload: as for :func:`factorize`.
      certify_samples, seed, certificate, progress: as for :func:`factorize`.
      privacy_unit, provenance: as for :func:`factorize`.
      interrupted: whether the search was; C then gets an estimate, as at an interrupt here.
      keep: whether C gets an estimate also where no σ could be certified, and
        ``provenance["not_certified"]`` why.

    Raises:
      FailureError: no σ could be certified, and C is not to be kept; or it has no estimate either.
    """
    record = {
        **(provenance or {}),
        "optimizer_status": found.status,
        "optimizer_seconds": round(found.seconds, 3),
        "evaluations": len(found.history),
    }
    if found.forms:
        record["forms"] = found.forms
    guarantee = None
    if not interrupted:
        try:
            loss = law(scheme).loss(found.strategy)
            record["mode_norm"] = loss.sensitivity  # for the report: of many bins it takes long
            proof, estimate = release(
                # the engine's samples are its own, also where the seed is the optimizer's
                loss,
                epsilon,
                delta,
                samples=certify_samples,
                near=found.noise_multiplier if np.isfinite(found.noise_multiplier) else None,
                seed=seed,
                certificate=certificate,
                progress=_signals.heard(progress),
            )
            guarantee = proof.guarantee(privacy_unit)
            record["estimated_noise_multiplier"] = estimate.noise_multiplier
            record["estimate_relative_error"] = estimate.relative_error
        except KeyboardInterrupt:
            interrupted = True
        except FailureError as problem:
            if not keep:
                raise
            record["not_certified"] = [*record.get("not_certified", []), str(problem)]
    if guarantee is None:
        why = "interrupted" if interrupted else "no certificate"
        guarantee = _estimate(found, scheme, epsilon, delta, privacy_unit, why)
    record["interrupted"] = interrupted
    made = Factorization(
        found.strategy,
        guarantee.noise_multiplier,
        scheme,
        workload,
        guarantee,
        found.history,
        record,
    )
    proofs.note(made)
    return made


def _estimate(
    found: Optimized, scheme: BinScheme, epsilon: float, delta: float, privacy_unit: str, why: str
) -> Guarantee:
    """The uncertified statement of a run without certificate, from a quick fresh estimate of σ."""
    sampled = law(scheme).loss(found.strategy)
    sigma, details = found.noise_multiplier, {}
    # where not even that can be sampled, the search's own σ says what it was
    with contextlib.suppress(FailureError):
        estimate = calibrate(sampled, epsilon, delta, samples=2**13)
        sigma = estimate.noise_multiplier
        details = {"relative_error": estimate.relative_error, "samples": estimate.samples}
    if not np.isfinite(sigma):
        raise FailureError(f"{why}, and no usable strategy was found; nothing to keep")
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=sigma,
        privacy_unit=privacy_unit,
        adjacency="add-remove",
        method=f"{sampled.name} Monte Carlo, importance sampling ({why}, not certified)",
        status="estimate",
        details={**details},
    )
