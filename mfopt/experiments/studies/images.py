"""Mechanisms against each other on images: section 5.2 of Choquette-Choo et al. 2024."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from scipy.stats import spearmanr

from mfopt._runtime import _check
from mfopt.experiments import families
from mfopt.experiments.cache import Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import BALLS
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.images import AS_ACCOUNTED, EXECUTIONS, ImagesCell, ImageTask
from mfopt.experiments.studies.engine import Found, Row, Swept
from mfopt.experiments.studies.rows import ends, interval, intervals, pick


@dataclasses.dataclass(frozen=True)
class Images(ImageTask, Swept):
    """Mechanisms and their sampling on images, at equal ε."""

    name = "images"
    source = "Choquette-Choo et al. 2024, section 5.2, Figures 6 and 7"
    default_size = "digits, 8 epochs × 16 iterations, 8 mechanisms at 3 ε, 7 rates × 10 seeds"
    time = "about 3 CPU-minutes"
    title = "Images: each mechanism at its best rate, δ = {0.delta:g}, one example, 95% over seeds"
    scale = (
        "{0.trained}, {1[_parameters]:,} parameters, {0.epochs} × {0.bins} iterations, "
        "{0.seeds} seeds; in the paper: CIFAR-10, 550,570 parameters, 20 × 100, 100 seeds"
    )
    columns = (
        "mechanism; epsilon=ε; accuracy; accuracy_half95=±; loss; rmse=RMSE; rate; "
        "noise_multiplier=σ; privacy_unit=unit; adjacency; sampling"
    )

    epsilons: tuple[float, ...] = option((0.5, 1.0, 4.0), "Values of ε.", name="--eps")
    mechanisms: tuple[str, ...] = option(
        (
            *("banded+poisson", "banded+balls-in-bins", "blt-4", "blt-4-scaled", "toeplitz"),
            *("dpsgd+poisson", "banded+unamplified", "dpsgd+unamplified"),
        ),
        "Mechanisms, by their names in mfopt compare.",
    )
    executed: str = option("blt-4-scaled", "Also run with truncated and shuffled batches.")
    rates: tuple[float, ...] = option(
        (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28), "Learning rates to choose from."
    )
    extend: int = option(3, "Most rates to add beyond an end that is best.", least=0)
    seeds: int = option(10, "Runs at each rate.", least=2)
    bins: int = option(16, "Iterations of an epoch.", name="--iters")
    epochs: int = option(8, "Passes over the data.")
    delta: float = option(1e-5, "δ of every statement.")
    widths: tuple[int, ...] = option((1, 2, 4, 8, 16), "Numbers of bands to choose from.")

    def check_together(self) -> None:
        for name in self.mechanisms:
            families.find(name, "mechanisms")
        self.comparison.check()
        if self.executed not in self.mechanisms or families.find(self.executed).sampling != BALLS:
            rule = "must be one of the mechanisms, run with balls-in-bins"
            raise _check.reject("executed", self.executed, rule)

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
        source = self.comparison.proven(family, epsilon, samples=2**17)
        how = {"source": source, "execution": execution}
        return ImagesCell.of(self, **how, rates=rates, seeds=tuple(range(self.seeds)))

    def judged(self, result: Result, rate: float) -> float:
        return float(_at(result, rate, "validation_loss").mean())

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for arm in self.arms():
            (epsilon, family, execution), (at, result) = arm, self.best(found, arm)
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

    def panels(self, rows: list[Row]) -> list[Panel]:
        axis = "test error (%, log scale)\nlower is better"
        names = [row["mechanism"] for row in pick(rows, target=self.epsilons[0])]
        panels = []
        for epsilon in self.epsilons:
            here = pick(rows, target=epsilon)
            each = [(100 * (1 - row["accuracy"]), 100 * row["accuracy_half95"]) for row in here]
            drawn = [intervals(each)]
            panels.append(Panel(drawn, f"ε = {epsilon:g}", axis, "", lines=False, names=names))
        return panels

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
