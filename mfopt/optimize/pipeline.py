"""Optimization from a privacy target to a certified factorization, ready to save."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mfopt._runtime import _check, _signals
from mfopt._runtime._types import JsonObject
from mfopt.accounting.monte_carlo.protocol import is_sampled, law
from mfopt.calibration import calibrate
from mfopt.errors import FailureError
from mfopt.factorization import Factorization, proofs
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.optimize import closed_form, defaults, kinds, sizes
from mfopt.optimize.question import Form, Question, Search, Target
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize
from mfopt.progress import Report, silent
from mfopt.sampling import BinScheme, Scheme
from mfopt.strategies import registered

_BANDED = ("banded-toeplitz", "banded", "banded-sqrt")
# kinds that have a size of each name
_SIZED = {
    "bands": ("banded", "banded-toeplitz", "banded-sqrt", "banded-inverse-sqrt"),
    "buffers": ("blt", "wave-blt", "cleared-blt"),
}


def factorize(
    scheme: Scheme | Sequence[Scheme],
    question: Question,
    *,
    provenance: JsonObject | None = None,
    progress: Report = silent,
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
      question: what is asked. Where several kinds were searched ``provenance["forms"]`` is the loss
        of each on fresh samples (log error for "rmse" and "max"). Without samples only ``steps`` of
        ``search`` has an effect.
      provenance: more to put on record (command, date, ...).
      progress: callback for every evaluation and of the stages of the certificate.

    Raises:
      UsageError: an argument out of range.
      FailureError: no σ could be certified for a C that nothing was spent on.

    >>> from mfopt.optimize import Form, Target
    >>> from mfopt.sampling import BallsInBins
    >>> made = factorize(BallsInBins(bins=8, epochs=2), Question(Target(2.0), Form("identity")))
    >>> print(made.guarantee.status, made.iterations, made.strategy.kind)
    certified 16 identity
    """
    schemes: tuple[Any, ...] = tuple(scheme) if isinstance(scheme, tuple | list) else (scheme,)
    for item in schemes or (None,):
        _check.kind("scheme", item, Scheme, "BallsInBins(bins=128, epochs=16) is one.")
    first_scheme: Scheme = schemes[0]
    objective = question.described_objective
    record = dict(provenance or {})
    form, search = question.form, question.search
    forms = form.strategy or defaults.kinds(first_scheme, question.target.epsilon, form.buffers)
    bands = None if first_scheme.bands_are_groups else form.bands
    _require_effect(forms, {"bands": bands, "buffers": form.buffers}, search)
    if not is_sampled(first_scheme):
        rule = f"has no effect under {first_scheme.kind}, where no samples are drawn"
        _refuse_options(search, ("samples", "init"), rule)
        chosen, best, tried = closed_form.search_first_of(schemes, question, progress)
        record["objective"] = objective.describe()
        if len(tried) > 1:
            record["groups"] = tried
        return on_record(Searched(best, chosen, record), question, progress)
    if len(schemes) > 1 or not isinstance(first_scheme, BinScheme):
        rule = "several are tried in turn only where σ takes no samples"
        raise _check.reject("scheme", [item.kind for item in schemes], rule)
    planned = _planned(first_scheme, forms, question)
    interrupted, searched = False, forms[0] in kinds.names() or len(forms) > 1
    if searched:
        record["objective"] = objective.describe()
        try:
            optimum = optimize(first_scheme, planned, progress)
        except InterruptedOptimization as stopped:
            optimum, interrupted = stopped.best, True
    else:
        optimum = Optimized(kinds.fixed(forms[0], bands=planned.form.bands or 1))
    result = Searched(optimum, first_scheme, record, interrupted, keep=searched)
    return on_record(result, question, progress)


def _require_effect(forms: Sequence[str], numbers: dict[str, int | None], search: Search) -> None:
    """Refuse numbers that no kind has (one of a plugin may), and options of no search."""
    built_in = {name for name, cls in registered().items() if cls.__module__.startswith("mfopt.")}
    for name, value in numbers.items():
        sized = _SIZED[name]
        if value is not None and set(forms) <= built_in and not set(forms) & set(sized):
            rule = f"has no effect with {' or '.join(forms)}"
            way_out = f"Leave it out, or use {', '.join(sized[:-1])} or {sized[-1]}."
            raise _check.reject(name, value, rule, way_out)
    if not set(forms) & set(kinds.names()):
        rule = f"has no effect with {' or '.join(forms)}, where nothing is searched"
        _refuse_options(search, ("samples", "steps", "init"), rule)


def _refuse_options(search: Search, names: Sequence[str], rule: str) -> None:
    """Refuse these options where they were named, and a time scaling that was asked for."""
    values = {name: getattr(search, name) for name in names}
    for name, value in {**values, "time_scale": search.time_scale or None}.items():
        if value is not None:
            raise _check.reject(name, value, rule, "Leave it out.")


def _planned(scheme: BinScheme, forms: Sequence[str], question: Question) -> Question:
    """The question with its defaults under bins, checked before any work."""
    form = question.form
    most_bands = scheme.most_bands
    bands = min(defaults.BANDS, most_bands or scheme.bins) if form.bands is None else form.bands
    if most_bands is not None and bands > most_bands and set(forms) & set(_BANDED):
        rule = f"must be at most {most_bands} with {scheme.kind.replace('-bins', ' bins')}"
        raise _check.reject("bands", bands, rule, "More bands have no account there.")
    scaled = question.search.time_scale
    if scaled is None:
        searched = set(forms) & set(kinds.names())
        scaled = bool(searched) and all(kinds.find(kind).scalable for kind in forms)
    for kind in forms:
        sizes.require(scheme, sizes.Load(kind, 0, bands, form.buffers or 1, scaled))
    return dataclasses.replace(
        question,
        form=Form(forms, bands, form.buffers),
        search=dataclasses.replace(question.search, time_scale=scaled),
    )


class Searched(NamedTuple):
    """C of a search, to be certified and put on record.

    Attributes:
      optimum: the search's result.
      scheme: its sampling.
      record: provenance so far.
      interrupted: whether the search was; C then gets an estimate, where its σ takes samples.
      keep: whether C gets an estimate also where no σ could be certified, and
        ``provenance["not_certified"]`` why.
    """

    optimum: Optimized
    scheme: Scheme
    record: JsonObject
    interrupted: bool = False
    keep: bool = False


def on_record(searched: Searched, question: Question, progress: Report = silent) -> Factorization:
    """Certify the smallest σ of an optimized C and record both, ready to save.

    Args:
      searched: C.
      question: its statement, effort and error.
      progress: callback of the certificate's stages.

    Raises:
      FailureError: no σ could be certified, and C is not to be kept; or it has no estimate either.
    """
    optimized, scheme, record, interrupted, keep = searched
    target, objective = question.target, question.described_objective
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
            searched_sigma = (
                optimized.noise_multiplier if np.isfinite(optimized.noise_multiplier) else None
            )
            # the engine's samples are its own, also where the seed is the optimizer's
            guarantee, facts = proofs.calibrated(
                mechanism,
                target.epsilon,
                target.delta,
                effort=target.effort,
                near=searched_sigma,
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
        objective.workload,
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
        sigma = estimate.value
        details = {"relative_error": estimate.error, "samples": estimate.samples}
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
