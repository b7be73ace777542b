"""Cells of mechanisms: optimize a C, find its σ, measure its error.

All numbers are for one unit under add-remove adjacency and of prefix sums, σ relative to the clip
norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

from mfopt import final_model, floor, query_error, strategies
from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.unamplified import bands as column_bands
from mfopt.calibration import calibrate
from mfopt.errors import FailureError
from mfopt.experiments.cache import Cell, Result
from mfopt.guarantee import Guarantee
from mfopt.noise.choice import Past, choose
from mfopt.optimize import Form, Objective, Question, Search, Target, kinds, optimize, unamplified
from mfopt.optimize.starts import Size
from mfopt.sampling import (
    BallsInBins,
    BinScheme,
    BMinSep,
    CyclicPoisson,
    FixedOrder,
    FreshBins,
    Poisson,
    RandomPartition,
    Scheme,
)
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums

UNAMPLIFIED, POISSON, BALLS, FRESH = "unamplified", "poisson", "balls-in-bins", "fresh-bins"
B_MIN_SEP, RANDOM_PARTITION = "b-min-sep", "random-partition"
SAMPLED = (BALLS, FRESH)  # whose C is optimized under the sampling
ESTIMATED = (*SAMPLED, B_MIN_SEP, RANDOM_PARTITION)  # whose σ is an estimate from samples
# of a search in fixed order: a quarter fewer steps, and 1e-5 of RMSE, which no table prints
_TOLERANCE = 1e-7


@dataclasses.dataclass(frozen=True)
class Goal:
    """Purpose of a mechanism: length, target and sampling.

    Attributes:
      bins, epochs: iterations an epoch, and epochs.
      epsilon, delta: of the statement.
      sampling: "unamplified", "poisson", "random-partition", "b-min-sep", "balls-in-bins" or
        "fresh-bins".
      rethrow: epochs between two assignments of fresh bins.
      separation: least number of steps between two of a unit, under b-min-sep; groups of a random
        partition, as many as C has bands if 0.
      seed: pins the Monte Carlo samples.
    """

    bins: int
    epochs: int
    epsilon: float
    delta: float
    sampling: str = BALLS
    rethrow: int = 1
    seed: int = 0
    separation: int = 0

    @property
    def iterations(self) -> int:
        """Steps of the whole run, n."""
        return self.bins * self.epochs

    def bin_scheme(self) -> BinScheme:
        """The scheme, where units are assigned to bins."""
        if self.sampling == FRESH:
            return FreshBins(self.bins, self.epochs, self.rethrow)
        return BallsInBins(self.bins, self.epochs)

    def scheme(self, strategy: Strategy) -> Scheme:
        """The scheme that C is run under: cyclic Poisson for as many groups as C has bands."""
        n = self.iterations
        if self.sampling == UNAMPLIFIED:
            return FixedOrder(self.bins, self.epochs)
        if self.sampling in SAMPLED:
            return self.bin_scheme()
        if self.sampling == B_MIN_SEP:
            return BMinSep(self.bins, self.epochs, self.separation)
        bands = column_bands(strategy, n)
        if self.sampling == RANDOM_PARTITION:
            return RandomPartition(self.bins, self.epochs, self.separation or bands)
        _check.choice("sampling", self.sampling, (POISSON, UNAMPLIFIED, *ESTIMATED))
        # a group of 1/bands of the units gives the same expected batch at bands times the rate;
        # with more bands than that leaves a rate for, the accountant of Poisson sampling refuses
        grouped = 1 < bands <= self.bins
        return CyclicPoisson(bands / self.bins, bands, n) if grouped else Poisson(1 / self.bins, n)


@dataclasses.dataclass(frozen=True)
class FixedCell(Cell):
    """A C in closed form."""

    name = "fixed"
    kind: str
    bands: int = 1

    def run(self, *needed: Result) -> Result:
        return with_strategy(kinds.fixed(self.kind, bands=self.bands))


@dataclasses.dataclass(frozen=True)
class UnamplifiedCell(Cell):
    """The C with the lowest error in fixed order, without amplification.

    Bands and buffers are 0 where C has none; cyclic Poisson sampling needs columns of one norm.
    """

    name = "unamplified"
    kind: str
    bins: int
    epochs: int
    bands: int = 0
    buffers: int = 0
    equal_columns: bool = True

    @property
    def needs(self) -> tuple[Cell, ...]:
        if self.kind != "dense":
            return ()
        size = self.bins, self.epochs, min(32, self.bins)
        return (UnamplifiedCell("banded", *size),)

    def run(self, *needed: Result) -> Result:
        outcome = unamplified.optimize(
            FixedOrder(self.bins, self.epochs),
            Form(self.kind, max(self.bands, 1), max(self.buffers, 1)),
            search=Search(init=[strategy_of(start) for start in needed], tolerance=_TOLERANCE),
            equal_columns=self.equal_columns,
        )
        return with_strategy(
            outcome.strategy, evaluations=len(outcome.trace.history), status=outcome.trace.status
        )


@dataclasses.dataclass(frozen=True)
class AmplifiedCell(Cell):
    """The C with the lowest error under the amplification of the goal's bins.

    Under balls-in-bins it needs what the optimizer begins from, each a cell of its own that kinds
    share. Under fresh bins the optimizer begins by itself: from the optimum under balls-in-bins it
    took four times the evaluations at 16 × 128, ε = 0.5, and ended at their limit.

    Attributes:
      goal: whose C.
      scaled: whether C is put between two diagonals that vary with time.
      bands, buffers: of a banded C, of a BLT.
      samples: frozen Monte Carlo samples; as the kind has them if None.
      start: what to begin from in place of the kind's own starts.
    """

    name = "amplified"
    goal: Goal
    kind: str
    scaled: bool = False
    bands: int = 1
    buffers: int = 0
    samples: int | None = None
    start: Cell | None = None

    @property
    def needs(self) -> tuple[Cell, ...]:
        if self.start is not None:
            return (self.start,)
        if self.goal.sampling != BALLS:
            return ()
        entry, n = kinds.find(self.kind), self.goal.iterations
        entry = kinds.scaled(entry) if self.scaled else entry
        size = Size(n, self.goal.bins, min(self.bands, n), self.buffers)
        return tuple(
            AmplifiedCell(
                self.goal,
                stage.kind.name,
                stage.kind.scaled,
                stage.size.bands,
                stage.size.buffers,
            )
            for stage in ([] if entry.starts(size) else entry.prerequisites(size))
        )

    def run(self, *needed: Result) -> Result:
        goal = self.goal
        question = Question(
            Target(goal.epsilon, goal.delta, seed=goal.seed),
            Form(self.kind, max(self.bands, 1), max(self.buffers, 1)),
            Objective("rmse"),
            Search(self.scaled, self.samples, init=[strategy_of(start) for start in needed]),
        )
        outcome = optimize(goal.bin_scheme(), question)
        return with_strategy(
            outcome.strategy,
            evaluations=len(outcome.history),
            status=outcome.status,
            start_sigma=outcome.noise_multiplier,
        )


@dataclasses.dataclass(frozen=True)
class SigmaCell(Cell):
    """σ and RMSE of the C of ``source`` under the goal's sampling, from so many samples."""

    name = "sigma"
    source: Cell
    goal: Goal
    samples: int = 2**15

    def __post_init__(self) -> None:
        if self.goal.sampling not in ESTIMATED:  # exact: what pins samples makes no other cell
            object.__setattr__(self, "samples", 0)
            object.__setattr__(self, "goal", dataclasses.replace(self.goal, seed=0))

    def run(self, *needed: Result) -> Result:
        (source,), goal = needed, self.goal
        strategy = strategy_of(source)
        scheme = goal.scheme(strategy)
        sampled = law(scheme).loss(strategy) if goal.sampling in ESTIMATED else None
        relative_error, stated = 0.0, None
        if sampled is not None and not any(bound.exact for bound in sampled.free_bounds()):
            # σ on the samples that C was found with, where there is one: no pilot is then taken
            start = source.record.get("start_sigma")
            with contextlib.suppress(FailureError):  # the likelihood is beyond numerical range
                outcome = calibrate(
                    sampled,
                    goal.epsilon,
                    goal.delta,
                    samples=self.samples,
                    seed=goal.seed,
                    near=start if start is not None and math.isfinite(start) else None,
                )
                relative_error = outcome.error
                stated = Guarantee(goal.epsilon, goal.delta, outcome.value)
        if stated is None:
            stated = account(
                Mechanism(scheme, strategy),
                epsilon=goal.epsilon,
                delta=goal.delta,
                certificate="deterministic",
            )
        past = source.record.get("past", "auto")
        return Result(
            {
                **measured(strategy, scheme, stated, past),
                "relative_error": relative_error,
                "status": stated.status,
                "strategy": strategy.describe(),
            }
        )


def measured(
    strategy: Strategy, scheme: Scheme, stated: Guarantee, past: Past = "auto"
) -> JsonObject:
    """Errors of prefix sums and costs of C at the σ of a guarantee, by the names of a table.

    Args:
      strategy: C.
      scheme: what it is run under.
      stated: its guarantee.
      past: what is done with past draws, as in :func:`mfopt.noise.choice.choose`.
    """
    n, sigma = scheme.length, stated.noise_multiplier
    recursion = choose(strategy, n, past)
    ends = floor.epoch_ends(PrefixSums(), strategy, scheme, stated)
    return {
        "above_floor": ends and ends.above,
        "final_model_error": final_model.error(strategy, n, sigma),
        "noise_multiplier": sigma,
        "rmse": sigma * float(query_error.rmse(PrefixSums(), strategy, n)),
        "memory": recursion.slots,
        "draws": recursion.draws(n),
    }


def strategy_of(result: Result) -> Strategy:
    """The C that a result holds."""
    arrays = {k.removeprefix("C/"): v for k, v in result.arrays.items() if k.startswith("C/")}
    return strategies.from_description(result.record["strategy"], arrays)


def with_strategy(strategy: Strategy, **record: Any) -> Result:
    """Result that holds C, with other public facts about it."""
    arrays = {f"C/{name}": value for name, value in strategy.arrays().items()}
    return Result({"strategy": strategy.describe(), **record}, arrays)
