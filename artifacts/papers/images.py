"""Mechanisms against each other on images: section 5.2 of Choquette-Choo et al. 2024."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
from common import (
    Intervals,
    ProvenCell,
    Results,
    Row,
    Swept,
    ends,
    interval,
    intervals_figure,
    main,
    pick,
    proven,
    studies,
)
from image_runs import (
    RunMechanism,
    charged_delta,
    displacement_probability,
    load,
    model,
    smallest_batch_size,
    train,
)
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from mfopt import query_error, sampling
from mfopt.accounting import Mechanism, account
from mfopt.experiments import families
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import strategy_of
from mfopt.sampling import FixedOrder
from mfopt.workloads import Momentum, linear_cooldown

# how a mechanism's batches are made: as accounted for, cut where that costs little δ or at their
# mean size, or by shuffling, which its account does not cover
AS_ACCOUNTED, CUT, CUT_AT_MEAN, SHUFFLED = "as accounted", "cut", "cut at the mean", "shuffled"
EXECUTIONS = (AS_ACCOUNTED, CUT, CUT_AT_MEAN, SHUFFLED)
_SHARE = 0.1  # of δ that cutting batches may cost


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """Data, model and optimizer: options of a study, and settings of its cells."""

    # Folder with the binary version of CIFAR-10, for a VGG; none: digits, for a hidden layer.
    cifar: str | None = None
    held_out: int = 400  # Examples for validation and test; of CIFAR-10 for validation.
    hidden: int = 16  # Width of the hidden layer.
    momentum: float = 0.9  # Momentum of the optimizer.
    constant: float = 0.25  # Share of the run before the rate cools down.
    final: float = 0.05  # Last rate over the first.
    clip: float = 1.0  # Clip norm of an example's gradient.
    microbatch: int = 0  # Examples at work at once in a run; 0: a whole batch.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagesCell(ImageTask, Cell):
    """Runs over rates and seeds; σ is the mechanism's, however it is executed.

    ``execution`` says how batches are made; a seed pins model, batches and noise. C is optimized
    for prefix sums, whatever the optimizer does.
    """

    name = "study-images"
    source: ProvenCell
    execution: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def run(self, *needed: Result) -> Result:
        (source,), loaded = needed, load(self.cifar, self.held_out)
        strategy = strategy_of(source)
        scheme = sampling.from_description(source.record["scheme"])
        sigma = source.record["guarantee"]["noise_multiplier"]
        population, shape = len(loaded.train.y), loaded.train.x.shape[1:]
        privacy, batch_size = self.stated(source, scheme, population)
        mechanism = RunMechanism(
            strategy, sigma, scheme, batch_size, shuffled=self.execution == SHUFFLED
        )
        n = scheme.length
        rates = linear_cooldown(n, min(round(self.constant * n), n - 1), n, self.final)
        workload = Momentum(self.momentum, rates)
        measured = train(
            loaded,
            mechanism,
            workload,
            rates=self.rates,
            seeds=self.seeds,
            clip_norm=self.clip,
            hidden=self.hidden,
            microbatch=self.microbatch,
        )
        errors = sigma**2 * np.asarray(query_error.row_variances(workload, strategy, n))
        record = {
            "privacy": {"privacy_unit": "example", **privacy, "noise_multiplier": sigma},
            "rates": list(self.rates),
            "population": population,
            "parameters": optax.tree.size(model(shape, self.hidden, seed=0)[0]),
            "batch_size": batch_size,
            # on the workload of the run, whatever C was optimized for: of all iterates, of the last
            "rmse": float(np.sqrt(np.mean(errors))),
            "last_error": float(np.sqrt(errors[-1])),
        }
        return Result(record, measured)

    def stated(
        self, source: Result, scheme: Any, population: int
    ) -> tuple[dict[str, Any], int | None]:
        """(adjacency, sampling, ε and δ of what is executed; the size that batches are cut to)."""
        guarantee = source.record["guarantee"]
        epsilon, delta, sigma = (guarantee[k] for k in ("epsilon", "delta", "noise_multiplier"))
        strategy, size = strategy_of(source), None
        if self.execution == SHUFFLED:
            # in equal batches every order is one of fixed order, and that is all that is known
            scheme = FixedOrder(scheme.bins, scheme.epochs)
            fixed = Mechanism(scheme, strategy)
            epsilon = account(fixed, noise_multiplier=sigma, delta=delta).epsilon
        elif self.execution == CUT:
            allowed = _SHARE * delta / (1 + np.exp(epsilon))
            size = smallest_batch_size(scheme, population, allowed)
            pushed_out = displacement_probability(scheme, population, size)
            delta = charged_delta(epsilon, delta, pushed_out)
        elif self.execution == CUT_AT_MEAN:
            # one unit may push out another in each of its batches: twice the sensitivity
            size = max(1, round(scheme.expected_batch(population)))
            epsilon = account(
                Mechanism(scheme, strategy),
                noise_multiplier=sigma / 2,
                delta=delta,
                seed=self.source.goal.seed,
                samples=self.source.samples,
            ).epsilon
        words = scheme.words() + (f", cut to {size}" if size else "")
        stated = {
            "adjacency": scheme.executed_adjacency(guarantee["adjacency"]),
            "sampling": (
                f"shuffled, accounted as {words}" if self.execution == SHUFFLED else words
            ),
            "epsilon": float(epsilon),
            "delta": float(delta),
            "status": guarantee["status"],
        }
        return stated, size


@dataclasses.dataclass(frozen=True)
class Images(ImageTask, Swept):
    """Mechanisms and their sampling on images, at equal ε."""

    name = "images"
    source = "Choquette-Choo et al. 2024, section 5.2, Figures 6 and 7"

    epsilons: tuple[float, ...] = (0.5, 1.0, 4.0)  # Values of ε.
    # Mechanisms, by their names in mfopt compare.
    mechanisms: tuple[str, ...] = (
        *("banded+poisson", "banded+balls-in-bins", "blt-4", "blt-4-scaled", "toeplitz"),
        *("dpsgd+poisson", "banded+unamplified", "dpsgd+unamplified"),
    )
    executed: str = "blt-4-scaled"  # Also run with truncated and shuffled batches.
    # Learning rates to choose from.
    rates: tuple[float, ...] = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
    extend: int = 3  # Most rates to add beyond an end that is best.
    seeds: int = 10  # Runs at each rate.
    bins: int = 16  # Iterations of an epoch.
    epochs: int = 8  # Passes over the data.
    delta: float = 1e-5  # δ of every statement.
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)  # Numbers of bands to choose from.

    def title(self, rows: list[Row]) -> str:
        trained = f"{self.trained}, {rows[0]['_parameters']:,} parameters"
        here = f"{trained}, {self.epochs} × {self.bins} iterations, {self.seeds} seeds"
        return (
            f"Images: each mechanism at its best rate, δ = {self.delta:g}, one example, 95% over "
            f"seeds\n{here}; in the paper: CIFAR-10, 550,570 parameters, 20 × 100, 100 seeds"
        )

    @property
    def trained(self) -> str:
        """Data in words."""
        return "digits" if self.cifar is None else "CIFAR-10"

    @property
    def comparison(self) -> Comparison:
        """The setting that the mechanisms are optimized in."""
        at = self.bins, self.epochs, self.epsilons, self.delta, self.mechanisms, self.widths
        return Comparison(*at)

    def arms(self) -> Iterator[tuple[float, str, str]]:
        """(ε, mechanism, how its batches are made)."""
        for epsilon in self.epsilons:
            for family in self.mechanisms:
                for execution in EXECUTIONS if family == self.executed else (AS_ACCOUNTED,):
                    yield epsilon, family, execution

    def cell_at(self, arm: tuple[float, str, str], rate: float) -> ImagesCell:
        (epsilon, family, execution), rates = arm, self.rates if rate in self.rates else (rate,)
        source = proven(self.comparison, family, epsilon, samples=2**17)
        task = {field.name: getattr(self, field.name) for field in dataclasses.fields(ImageTask)}
        return ImagesCell(
            **task,
            source=source,
            execution=execution,
            rates=rates,
            seeds=tuple(range(self.seeds)),
        )

    def judged(self, result: Result, rate: float) -> float:
        return float(_at(result, rate, "validation_loss").mean())

    def rows(self, results: Results) -> list[Row]:
        rows = []
        for arm in self.arms():
            (epsilon, family, execution), (at, result) = arm, self.best(results, arm)
            how = "" if execution == AS_ACCOUNTED else f": {execution}"
            row: Row = {"mechanism": f"{families.label(family)}{how}", "family": family}
            row |= {"execution": execution, "target": epsilon}
            row["_parameters"] = result.record["parameters"]
            for name in ("accuracy", "loss"):
                row[f"_{name}"] = _at(result, at.rate, f"test_{name}")
                row[name], row[f"{name}_half95"] = interval(row[f"_{name}"])
            row |= {"rate": at.rate, "rate_at_end": at.edge, **result.record["privacy"]}
            rows.append(row | {name: result.record[name] for name in ("rmse", "last_error")})
        return rows

    def figure(self, rows: list[Row]) -> Figure:
        panels = []
        for epsilon in self.epsilons:
            here = pick(rows, target=epsilon)
            errors = [100 * (1 - row["accuracy"]) for row in here]
            halves = [100 * row["accuracy_half95"] for row in here]
            panels.append(Intervals(f"ε = {epsilon:g}", errors, halves))
        names = [row["mechanism"] for row in pick(rows, target=self.epsilons[0])]
        label = "test error (%, log scale)\nlower is better"
        return intervals_figure(panels, names, label, self.title(rows), log=True)

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            here = pick(rows, target=epsilon)
            (ours,) = pick(here, family=self.executed, execution=AS_ACCOUNTED)
            others = [row for row in pick(here, execution=AS_ACCOUNTED) if row is not ours]
            for row in others:
                mean, half = interval(100 * (ours["_accuracy"] - row["_accuracy"]))
                loss, loss_half = interval(ours["_loss"] - row["_loss"])
                said.append(
                    f"ε = {epsilon:g}: {ours['mechanism']} over {row['mechanism']}: accuracy "
                    f"{mean:+.2f} ± {half:.2f} points, loss {loss:+.4f} ± {loss_half:.4f} "
                    f"(95%, paired by seed)"
                )
            if len(others) > 1:
                rank = spearmanr(*([r[k] for r in (ours, *others)] for k in ("rmse", "loss")))[0]
                said.append(f"ε = {epsilon:g}: rank correlation of RMSE and loss {rank:.2f}")
            for execution in EXECUTIONS[1:]:
                (row,) = pick(here, execution=execution)
                mean, half = interval(100 * (row["_accuracy"] - ours["_accuracy"]))
                said.append(
                    f"σ of ε = {epsilon:g}, {execution}: accuracy {mean:+.2f} ± {half:.2f}, "
                    f"and what runs is ({row['epsilon']:.3g}, {row['delta']:.3g})-DP"
                )
        return [*said, *ends(rows)]


def _at(result: Result, rate: float, name: str) -> np.ndarray:
    """(seeds,) values of a measure at one rate."""
    return result.arrays[name][:, result.record["rates"].index(rate)]


STUDIES = studies(__file__, Images())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
