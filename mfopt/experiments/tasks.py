"""The work behind tables and figures: optimize a C, find its σ, measure its error.

Every function takes JSON-able settings and the results it needs, and returns a
:class:`~mfopt.experiments.cache.Result`; it runs in a worker process. All numbers are for one
unit under add-remove adjacency, of prefix sums unless a schedule is given, σ relative to the clip
norm.
"""

from __future__ import annotations

import math
from typing import Any

from mfopt import _check, query_error, strategies
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.unamplified import bands as column_bands
from mfopt.calibration import calibrate, release
from mfopt.experiments.cache import Result, Task
from mfopt.noise.choice import choose
from mfopt.optimize import kinds, optimize, unamplified
from mfopt.optimize.time_scale import Scaling
from mfopt.sampling import BallsInBins, BinScheme, CyclicPoisson, FixedOrder, FreshBins, Poisson
from mfopt.strategies import Strategy
from mfopt.workloads import Momentum, PrefixSums, Workload, linear_cooldown

UNAMPLIFIED, POISSON, BALLS, FRESH = "unamplified", "poisson", "balls-in-bins", "fresh-bins"
_SAMPLED: dict[str, type[BinScheme]] = {
    BALLS: BallsInBins,
    FRESH: FreshBins,
}  # whose C is optimized under the sampling
# of a search in fixed order: a quarter fewer steps, and 1e-5 of RMSE, which no table prints
_TOLERANCE = 1e-7
_FEW = 2**11  # samples where σ is known already
# (momentum, first step of the cooldown, its last step, last rate over the first); None: prefix sums
Schedule = tuple[float, int, int, float]


def workload_of(schedule: Schedule | None, n: int) -> Workload:
    """What C is optimized for and measured on: prefix sums, or momentum with a linear cooldown."""
    if schedule is None:
        return PrefixSums()
    momentum, start, stop, final = schedule
    return Momentum(float(momentum), linear_cooldown(n, int(start), int(stop), float(final)))


def _given(schedule: Schedule | None) -> dict[str, Any]:
    return {} if schedule is None else {"schedule": list(schedule)}


def _thrown(sampling: str, rethrow: int) -> dict[str, Any]:
    return {"rethrow": rethrow} if sampling == FRESH and rethrow > 1 else {}


def _bins(sampling: str, bins: int, epochs: int, rethrow: int) -> BinScheme:
    """The scheme of bins by name."""
    return _SAMPLED[sampling](bins, epochs, **_thrown(sampling, rethrow))


def fixed_task(kind: str, bands: int = 1) -> Task:
    """A C in closed form."""
    return Task.of("fixed", kind=kind, bands=bands)


def unamplified_task(
    kind: str,
    bins: int,
    epochs: int,
    bands: int = 0,
    *,
    buffers: int = 0,
    equal_columns: bool = True,
    schedule: Schedule | None = None,
) -> Task:
    """The C with the least error in fixed order, without amplification.

    Args:
      kind: kind of strategy.
      bins: iterations of an epoch.
      epochs: passes over the data.
      bands: bands of C; 0 where there are none.
      buffers: of a BLT.
      equal_columns: whether all columns have one norm, as cyclic Poisson sampling needs.
      schedule: of the workload; prefix sums if left out.
    """
    needs: tuple[Task, ...] = ()
    if kind == "dense":
        needs = (unamplified_task("banded", bins, epochs, min(32, bins), schedule=schedule),)
    return Task.of(
        "unamplified",
        needs,
        kind=kind,
        bins=bins,
        epochs=epochs,
        bands=bands,
        buffers=buffers,
        equal_columns=equal_columns,
        **_given(schedule),
    )


def amplified_task(
    kind: str,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    *,
    sampling: str = BALLS,
    rethrow: int = 1,
    scaled: bool = False,
    bands: int = 1,
    buffers: int = 0,
    seed: int = 0,
    samples: int | None = None,
    schedule: Schedule | None = None,
) -> Task:
    """The C with the least error under the amplification of balls-in-bins or fresh bins at (ε, δ).

    It needs what the optimizer begins from, each a task of its own: kinds and schemes share them.

    Args:
      kind: kind of strategy.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      sampling: scheme by name; what C begins from is optimized under balls-in-bins.
      rethrow: epochs between two throws of fresh bins.
      scaled: whether C is put between two diagonals that vary with time.
      bands: bands of a banded C.
      buffers: buffers of a BLT; 0 for other kinds.
      seed: pins the random choices.
      samples: Monte Carlo samples.
      schedule: of the workload; prefix sums if left out.
    """
    entry = kinds.find(kind)
    stage = kinds.Stage(
        kinds.scaled(entry, Scaling()) if scaled else entry,
        kinds.Size(bins * epochs, bins, min(bands, bins * epochs), buffers),
    )

    def task(stage: kinds.Stage, samples: int | None, sampling: str = BALLS) -> Task:
        before = [] if stage.kind.starts(stage.size) else stage.kind.after(stage.size)
        return Task.of(
            "amplified",
            tuple(task(needed, None) for needed in before),
            kind=stage.kind.plain,
            bins=bins,
            epochs=epochs,
            epsilon=float(epsilon),
            delta=delta,
            scaled=stage.kind.scaling is not None,
            bands=stage.size.bands,
            buffers=stage.size.buffers,
            seed=seed,
            samples=samples,
            **({} if sampling == BALLS else {"sampling": sampling}),
            **_thrown(sampling, rethrow),
            **_given(schedule),
        )

    return task(stage, samples, sampling)


def sigma_task(
    source: Task,
    sampling: str,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    *,
    rethrow: int = 1,
    seed: int = 0,
    samples: int = 2**15,
    schedule: Schedule | None = None,
) -> Task:
    """σ and RMSE of the C of ``source`` under a sampling scheme.

    Args:
      source: task (or its result) that holds C.
      sampling: scheme by name.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      rethrow: epochs between two throws of fresh bins.
      seed: pins the random choices.
      samples: Monte Carlo samples.
      schedule: of the workload; prefix sums if left out.
    """
    extra = {"seed": seed, "samples": samples} if sampling in _SAMPLED else {}
    return Task.of(
        "sigma",
        (source,),
        sampling=sampling,
        bins=bins,
        epochs=epochs,
        epsilon=float(epsilon),
        delta=delta,
        **extra,
        **_thrown(sampling, rethrow),
        **_given(schedule),
    )


def certified_task(estimate: Task) -> Task:
    """The least σ that is certified for the C of an :func:`amplified_task`, under its scheme.

    Args:
      estimate: the :func:`sigma_task` of that C.
    """
    (source,) = estimate.needs
    return Task.of("certified", (source, estimate), **_target(source))


def _target(source: Task) -> dict[str, Any]:
    given = source.arguments
    names = ("bins", "epochs", "epsilon", "delta", "seed", "sampling", "rethrow")
    return {name: given[name] for name in names if name in given}


def strategy_of(result: Result) -> Strategy:
    """The C that a result holds."""
    arrays = {k.removeprefix("C/"): v for k, v in result.arrays.items() if k.startswith("C/")}
    return strategies.from_description(result.record["strategy"], arrays)


def _with_strategy(strategy: Strategy, **record: Any) -> Result:
    arrays = {f"C/{name}": value for name, value in strategy.arrays().items()}
    return Result({"strategy": strategy.describe(), **record}, arrays)


def run_fixed(kind: str, bands: int) -> Result:
    return _with_strategy(kinds.fixed(kind, bands=bands))


def run_unamplified(
    start: Result | None = None,
    *,
    kind: str,
    bins: int,
    epochs: int,
    bands: int,
    buffers: int,
    equal_columns: bool,
    schedule: Schedule | None = None,
) -> Result:
    """Optimize C in fixed order, without amplification.

    Args:
      start: result that holds the C to start from.
      kind: kind of strategy.
      bins: iterations of an epoch.
      epochs: passes over the data.
      bands: bands of C; 0 where there are none.
      buffers: of a BLT.
      equal_columns: whether all columns have one norm.
      schedule: of the workload; prefix sums if left out.
    """
    found = unamplified.optimize(
        FixedOrder(bins, epochs),
        strategy=kind,
        bands=max(bands, 1),
        buffers=max(buffers, 1),
        workload=workload_of(schedule, bins * epochs),
        init=None if start is None else strategy_of(start),
        equal_columns=equal_columns,
        tolerance=_TOLERANCE,
    )
    return _with_strategy(
        found.strategy, evaluations=len(found.trace.history), status=found.trace.status
    )


def run_amplified(
    *starts: Result,
    kind: str,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    scaled: bool,
    bands: int,
    buffers: int,
    seed: int,
    samples: int | None,
    sampling: str = BALLS,
    rethrow: int = 1,
    schedule: Schedule | None = None,
) -> Result:
    """Optimize C under the amplification of balls-in-bins or fresh bins.

    Args:
      starts: results that hold each a C to start from.
      kind: kind of strategy.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      scaled: whether C is put between two diagonals that vary with time.
      bands: bands of a banded C.
      buffers: buffers of a BLT; 0 for other kinds.
      seed: pins the random choices.
      samples: Monte Carlo samples.
      sampling: scheme by name.
      rethrow: epochs between two throws of fresh bins.
      schedule: of the workload; prefix sums if left out.
    """
    found = optimize(
        _bins(sampling, bins, epochs, rethrow),
        epsilon,
        delta,
        strategy=kind,
        bands=max(bands, 1),
        buffers=max(buffers, 1),
        workload=workload_of(schedule, bins * epochs),
        time_scale=scaled,
        seed=seed,
        samples=samples,
        init=[strategy_of(start) for start in starts] or None,
    )
    return _with_strategy(
        found.strategy,
        evaluations=len(found.history),
        status=found.status,
        start_sigma=found.noise_multiplier,
    )


def run_sigma(
    source: Result,
    *,
    sampling: str,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    rethrow: int = 1,
    seed: int = 0,
    samples: int = 0,
    schedule: Schedule | None = None,
) -> Result:
    """σ and RMSE of C under a sampling scheme.

    Args:
      source: task (or its result) that holds C.
      sampling: scheme by name.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      rethrow: epochs between two throws of fresh bins.
      seed: pins the random choices.
      samples: Monte Carlo samples.
      schedule: of the workload; prefix sums if left out.
    """
    strategy = strategy_of(source)
    n = bins * epochs
    at_one = float(query_error.rmse(workload_of(schedule, n), strategy, n))
    recursion = choose(strategy, n)
    relative_error = 0.0
    scheme = scheme_of(sampling, strategy, bins, epochs, rethrow)
    sampled = law(scheme).loss(strategy) if sampling in _SAMPLED else None
    if sampled is not None and not any(bound.exact for bound in sampled.free_bounds()):
        found = calibrate(
            sampled,
            epsilon,
            delta,
            samples=samples,
            seed=seed,
            near=_near(source),
        )
        sigma, relative_error, status = found.noise_multiplier, found.relative_error, "estimate"
    else:
        guarantee = account(Mechanism(scheme, strategy), epsilon=epsilon, delta=delta)
        sigma, status = guarantee.noise_multiplier, guarantee.status
    return Result(
        {
            "noise_multiplier": sigma,
            "rmse": sigma * at_one,
            "rmse_at_one": at_one,
            "relative_error": relative_error,
            "status": status,
            "memory": recursion.slots,
            "draws": recursion.draws(n),
            "strategy": strategy.describe(),
        }
    )


def run_certified(
    source: Result,
    estimate: Result,
    *,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    seed: int,
    sampling: str = BALLS,
    rethrow: int = 1,
) -> Result:
    """The least σ that is certified for C, and the RMSE of prefix sums with it.

    Args:
      source: task (or its result) that holds C.
      estimate: of σ for it.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      seed: pins the random choices.
      sampling: scheme by name.
      rethrow: epochs between two throws of fresh bins.
    """
    strategy = strategy_of(source)
    certificate, _ = release(
        law(_bins(sampling, bins, epochs, rethrow)).loss(strategy),
        epsilon,
        delta,
        near=estimate.record["noise_multiplier"],
        calibrate_samples=_FEW,
        seed=seed,
    )
    guarantee = certificate.guarantee("example")
    at_one = float(query_error.rmse(PrefixSums(), strategy, bins * epochs))
    return Result(
        {
            "guarantee": guarantee.describe(),
            "rmse": guarantee.noise_multiplier * at_one,
            "estimated_noise_multiplier": estimate.record["noise_multiplier"],
            "estimate_relative_error": estimate.record["relative_error"],
        }
    )


def _near(source: Result) -> float | None:
    """σ of C on the samples that it was found with, where there is one: no pilot is then taken."""
    sigma = source.record.get("start_sigma")
    return sigma if sigma is not None and math.isfinite(sigma) else None


def scheme_of(sampling: str, strategy: Strategy, bins: int, epochs: int, rethrow: int = 1) -> Any:
    """The scheme that C is run under: cyclic Poisson sampling for as many groups as C has bands.

    Args:
      sampling: by name.
      strategy: C, whose bands are counted.
      bins: iterations of an epoch.
      epochs: passes over the data.
      rethrow: epochs between two throws of fresh bins.
    """
    n = bins * epochs
    if sampling == UNAMPLIFIED:
        return FixedOrder(bins, epochs)
    if sampling in _SAMPLED:
        return _bins(sampling, bins, epochs, rethrow)
    if sampling != POISSON:
        known = f"{UNAMPLIFIED}, {POISSON}, {BALLS} or {FRESH}"
        raise _check.reject("sampling", sampling, f"must be {known}")
    bands = column_bands(strategy, n)
    # a group of 1/bands of the units gives the same expected batch at bands times the rate; with
    # more bands than that leaves a rate for, the accountant of plain Poisson sampling says no
    grouped = 1 < bands <= bins
    return CyclicPoisson(bands / bins, bands, n) if grouped else Poisson(1 / bins, n)
