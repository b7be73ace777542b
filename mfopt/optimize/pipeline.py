"""Optimization from a privacy target to a certified factorization, ready to save."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfopt._runtime import _check, _signals
from mfopt.accounting.account import Effort
from mfopt.accounting.monte_carlo.protocol import is_sampled, law
from mfopt.accounting.verify import check_delta
from mfopt.calibration import calibrate
from mfopt.errors import FailureError
from mfopt.factorization import Factorization, proofs
from mfopt.final_model import Schedule
from mfopt.guarantee import CertificateKind, Guarantee, is_deterministic
from mfopt.mechanism import Mechanism
from mfopt.optimize import closed_form, defaults, kinds, sizes
from mfopt.optimize.memory import WithinMemory
from mfopt.optimize.memory import options as within_memory
from mfopt.optimize.objective import Objective
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize
from mfopt.progress import Report, silent
from mfopt.sampling import BinScheme, Scheme
from mfopt.strategies import Strategy, registered
from mfopt.workloads import PrefixSums, Workload


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of a search of one kind of C; None stands for the kind's own default.

    Attributes:
      time_scale: whether C is put between two diagonals that vary with time.
      samples: frozen Monte Carlo samples.
      steps: see :func:`mfopt.optimize.optimize`.
      init: strategy to start from.
    """

    time_scale: bool | None = None
    samples: int | None = None
    steps: int | None = None
    init: Strategy | None = None

    def __post_init__(self) -> None:
        _check.optional(_check.kind, "time_scale", self.time_scale, expected=bool)
        for name, least in (("samples", 64), ("steps", 1)):
            if (value := getattr(self, name)) is not None:
                number = _check.integer(name, value, at_least=least)
                object.__setattr__(self, name, number)
        if self.init is not None:
            _check.kind("init", self.init, Strategy, "mfopt.load(path).strategy is one.")

    def of_one_kind(self) -> dict[str, Any]:
        """Options that only a search of one kind can have, by name."""
        return {name: getattr(self, name) for name in ("samples", "steps", "init")}


_BANDED = ("banded-toeplitz", "banded", "banded-sqrt")
# kinds that have a size of each name
_SIZED = {
    "bands": ("banded", "banded-toeplitz", "banded-sqrt", "banded-inverse-sqrt"),
    "buffers": ("blt", "wave-blt", "cleared-blt"),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Statement that a σ is certified for, and effort that is put into it.

    Attributes:
      epsilon, delta: of one unit, add-remove adjacency.
      privacy_unit: what the statement protects, by name.
      samples: iid samples of the certificate; None for as many as are worth it.
      seed: pinned seed of all samples, or None for the operating system's entropy.
      certificate: "deterministic" draws no samples for σ and has failure probability 0.

    Raises:
      UsageError: a field out of range.
    """

    epsilon: float
    delta: float = 1e-5
    privacy_unit: str = "example"
    samples: int | None = None
    seed: int | None = None
    certificate: CertificateKind = "monte-carlo"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _check.epsilon("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check_delta(self.delta))
        samples = _check.optional(_check.integer, "certify samples", self.samples, at_least=256)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "seed", _check.optional(_check.seed, "seed", self.seed))
        _check.word("privacy_unit", self.privacy_unit)
        is_deterministic(self.certificate, self.samples)

    @property
    def effort(self) -> Effort:
        """Effort of an account or certificate."""
        return Effort(self.samples, self.seed, certificate=self.certificate)


def factorize(
    scheme: Scheme | Sequence[Scheme],
    epsilon: float,
    delta: float = 1e-5,
    *,
    strategy: str | Sequence[str] | None = None,
    bands: int | None = None,
    memory: int | None = None,
    workload: Workload | None = None,
    objective: str | None = None,
    schedule: Schedule | None = None,
    time_scale: bool | None = None,
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

    Under a scheme whose σ takes no samples C is found by :mod:`mfopt.optimize.closed_form`, and
    its guarantee is that of the account.

    Args:
      scheme: sampling; or several for which no samples are drawn, which are tried in turn until
        the error rises.
      epsilon, delta, workload, seed: as for :func:`mfopt.optimize.optimize`, which also takes
        ``options``; without samples ``buffers`` and ``steps`` are those that have an effect.
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
    named_kinds = None if strategy is None else kinds.asked(strategy)
    target = Target(
        epsilon, delta, privacy_unit, certify_samples, seed=seed, certificate=certificate
    )
    schemes: tuple[Any, ...] = tuple(scheme) if isinstance(scheme, tuple | list) else (scheme,)
    for item in schemes or (None,):
        _check.kind("scheme", item, Scheme, "BallsInBins(bins=128, epochs=16) is one.")
    first_scheme: Scheme = schemes[0]
    workload = _check.kind("workload", PrefixSums() if workload is None else workload, Workload)
    loss = Objective.chosen(objective, schedule, workload)
    record = dict(provenance or {})
    forms = named_kinds or default_kinds(first_scheme, target.epsilon, options.get("buffers"))
    if memory is None:
        _require_sized(
            forms, None if first_scheme.bands_are_groups else bands, options.get("buffers")
        )
        _require_searched(forms, {**options, "time_scale": time_scale or None})
    if not is_sampled(first_scheme):
        unused = {**options, "memory": memory, "time_scale": time_scale or None}
        steps, buffers = unused.pop("steps", None), unused.pop("buffers", None)
        _refuse_unused(unused, first_scheme)
        question = closed_form.Question(
            target.epsilon,
            target.delta,
            forms,
            functools.partial(loss.loss, workload),
            bands,
            buffers,
            steps,
        )
        chosen, best, tried = question.first_of(schemes, progress)
        record["objective"] = loss.describe()
        if len(tried) > 1:
            record["groups"] = tried
        return on_record(Searched(best, chosen, record), target, workload, progress)
    if len(schemes) > 1 or not isinstance(first_scheme, BinScheme):
        rule = "several are tried in turn only where σ takes no samples"
        raise _check.reject("scheme", [item.kind for item in schemes], rule)
    plan = _Plan.of(first_scheme, forms, bands, memory, time_scale, options)
    interrupted = False
    bounds: dict[int, WithinMemory] = {}
    shared: dict[str, Any] = {
        "workload": workload,
        "loss": loss,
        "time_scale": plan.time_scale,
        "seed": seed,
        "progress": progress,
    }
    if not plan.searched:
        searched_c = Optimized(kinds.fixed(plan.forms[0], bands=plan.bands))
    else:
        try:
            if memory is not None:
                bounds = within_memory(first_scheme, epsilon, delta, memory, **shared)
                searched_c = bounds[memory].found
            else:
                searched_c = optimize(
                    first_scheme,
                    epsilon,
                    delta,
                    strategy=plan.forms,
                    bands=plan.bands,
                    **shared,
                    **options,
                )
        except InterruptedOptimization as stopped:
            searched_c, interrupted = stopped.best, True
    if plan.searched:
        record["objective"] = loss.describe()
    if memory is not None and bounds:
        record["memory"] = {
            "at_most": memory,
            "kept": bounds[memory].memory,
            "estimated_error": {str(bound): option.error for bound, option in bounds.items()},
        }
    searched = Searched(searched_c, first_scheme, record, interrupted, keep=plan.searched)
    return on_record(searched, target, workload, progress)


def default_kinds(scheme: Scheme, epsilon: float, buffers: int | None = None) -> tuple[str, ...]:
    """Kinds of C that are searched under a scheme if none is named, the best of which is kept.

    Args:
      scheme: sampling.
      epsilon: of the target.
      buffers: of a BLT, where they are named.

    >>> from mfopt.sampling import FixedOrder, Poisson
    >>> default_kinds(Poisson(0.1, 20), 8.0), default_kinds(FixedOrder(bins=8, epochs=4), 8.0)
    (('identity',), ('blt',))
    """
    if not is_sampled(scheme):
        return closed_form.default_kinds(scheme)
    assert isinstance(scheme, BinScheme)
    return defaults.kinds(scheme, epsilon, defaults.buffers(scheme) if buffers is None else buffers)


def _require_sized(forms: tuple[str, ...], bands: int | None, buffers: int | None) -> None:
    """Refuse a size that none of the kinds has; kinds of a plugin may have either."""
    built_in = {name for name, cls in registered().items() if cls.__module__.startswith("mfopt.")}
    for name, value in (("bands", bands), ("buffers", buffers)):
        sized = _SIZED[name]
        if value is not None and set(forms) <= built_in and not set(forms) & set(sized):
            rule = f"has no effect with {' or '.join(forms)}"
            way_out = f"Leave it out, or use {', '.join(sized[:-1])} or {sized[-1]}."
            raise _check.reject(name, value, rule, way_out)


def _require_searched(forms: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Refuse options of a search where no kind has free parameters."""
    if set(forms) & set(kinds.names()):
        return
    for name, value in options.items():
        if value is not None and name != "buffers":
            rule = f"has no effect with {' or '.join(forms)}, where nothing is searched"
            raise _check.reject(name, value, rule, "Leave it out.")


def _refuse_unused(options: Mapping[str, Any], scheme: Scheme) -> None:
    """Refuse options of a search by samples."""
    for name, value in options.items():
        if value is not None:
            rule = f"has no effect under {scheme.kind}, where no samples are drawn"
            raise _check.reject(name, value, rule, "Leave it out.")


class _Plan(NamedTuple):
    """What is searched under bins, checked before any work.

    Attributes:
      forms: kinds of C, one of which is kept.
      bands: of banded kinds.
      time_scale: whether C is put between two diagonals.
      searched: whether there is anything to search.
    """

    forms: tuple[str, ...]
    bands: int
    time_scale: bool
    searched: bool

    @classmethod
    def of(
        cls,
        scheme: BinScheme,
        forms: tuple[str, ...],
        bands: int | None,
        memory: int | None,
        time_scale: bool | None,
        options: Mapping[str, Any],
    ) -> _Plan:
        """The plan for these arguments of :func:`factorize`; None stands for a default."""
        if memory is not None and options:
            rule = f"leaves no choice of {', '.join(sorted(options))}"
            raise _check.reject("memory", memory, rule)
        _check.integer("buffers", options.get("buffers", 1))
        bands = defaults.bands(scheme) if bands is None else _check.integer("bands", bands)
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
                scaled=time_scale,
            )
        return cls(forms, bands, time_scale, searched)


class Searched(NamedTuple):
    """C of a search, to be certified and put on record.

    Attributes:
      found: the search's result.
      scheme: its sampling.
      record: provenance so far.
      interrupted: whether the search was; C then gets an estimate, where its σ takes samples.
      keep: whether C gets an estimate also where no σ could be certified, and
        ``provenance["not_certified"]`` why.
    """

    found: Optimized
    scheme: Scheme
    record: dict[str, Any]
    interrupted: bool = False
    keep: bool = False


def on_record(
    searched: Searched, target: Target, workload: Workload, progress: Report = silent
) -> Factorization:
    """Certify the smallest σ of an optimized C and record both, ready to save.

    Args:
      searched: C.
      target: statement and effort.
      workload: A.
      progress: callback of the certificate's stages.

    Raises:
      FailureError: no σ could be certified, and C is not to be kept; or it has no estimate either.
    """
    optimized, scheme, record, interrupted, keep = searched
    record = {
        **record,
        "optimizer_status": optimized.status,
        "optimizer_seconds": round(optimized.seconds, 3),
        "evaluations": len(optimized.history),
    }
    if optimized.forms:
        record["forms"] = optimized.forms
    guarantee = None
    mechanism = Mechanism(scheme, optimized.strategy, privacy_unit=target.privacy_unit)
    if not interrupted or not is_sampled(scheme):
        try:
            near = optimized.noise_multiplier if np.isfinite(optimized.noise_multiplier) else None
            # the engine's samples are its own, also where the seed is the optimizer's
            guarantee, facts = proofs.calibrated(
                mechanism,
                target.epsilon,
                target.delta,
                effort=target.effort,
                near=near,
                progress=_signals.heard(progress),
            )
            record |= facts
        except KeyboardInterrupt:
            interrupted = True
        except FailureError as problem:
            if not keep:
                raise
            record["not_certified"] = [*record.get("not_certified", []), str(problem)]
    if guarantee is None:
        why = "interrupted" if interrupted else "no certificate"
        guarantee = _estimate(optimized, scheme, target, why)
    record["interrupted"] = interrupted
    factorization = Factorization(
        optimized.strategy,
        guarantee.noise_multiplier,
        scheme,
        workload,
        guarantee,
        optimized.history,
        record,
    )
    if target.seed is None or not is_sampled(scheme):  # known samples could be fitted
        proofs.note(factorization)
    return factorization


def _estimate(optimized: Optimized, scheme: Scheme, target: Target, why: str) -> Guarantee:
    """The uncertified statement of a run without certificate, from a quick fresh estimate of σ."""
    sampled = law(scheme).loss(optimized.strategy)
    sigma, details = optimized.noise_multiplier, {}
    # where not even that can be sampled, the search's own σ says what it was
    with contextlib.suppress(FailureError):
        estimate = calibrate(sampled, target.epsilon, target.delta, samples=2**13)
        sigma = estimate.noise_multiplier
        details = {"relative_error": estimate.relative_error, "samples": estimate.samples}
    if not np.isfinite(sigma):
        raise FailureError(f"{why}, and no usable strategy was found; nothing to keep")
    return Guarantee(
        epsilon=target.epsilon,
        delta=target.delta,
        noise_multiplier=sigma,
        privacy_unit=target.privacy_unit,
        adjacency="add-remove",
        method=f"{sampled.name} Monte Carlo, importance sampling ({why}, not certified)",
        status="estimate",
        details={**details},
    )
