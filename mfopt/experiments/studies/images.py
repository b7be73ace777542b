"""Mechanisms against each other on images: section 5.2 of Choquette-Choo et al. 2024."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mfopt._runtime import _check
from mfopt.experiments import families
from mfopt.experiments.mechanisms import BALLS
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.images import AS_ACCOUNTED, EXECUTIONS
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.on_images import PREFIX, SCHEDULE, ImageStudy, TrainedPoint
from mfopt.experiments.studies.rows import ends, interval, intervals, pick

BASELINE = "banded+poisson"


@dataclasses.dataclass(frozen=True)
class Images(ImageStudy):
    """Accuracy of each mechanism at equal ε, each at its best learning rate."""

    name = "images"
    summary = "Mechanisms and their sampling on images, at equal ε."
    source = "Choquette-Choo et al. 2024, section 5.2, Figures 6 and 7"
    default_size = "digits, 8 epochs × 16 iterations, 8 mechanisms at 3 ε, 7 rates × 10 seeds"
    time = "about 7 CPU-minutes"
    plot_columns = 3
    title = "Images: each mechanism at its best rate, δ = {0.delta:g}, one example, 95% over seeds"

    data: str = option("digits", "Data set to train on.", choices=("digits", "made"))
    mechanisms: tuple[str, ...] = option(
        (
            BASELINE,
            "banded+balls-in-bins",
            "blt-4",
            "blt-4-scaled",
            "toeplitz",
            "dpsgd+poisson",
            "banded+unamplified",
            "dpsgd+unamplified",
        ),
        "Mechanisms, by their names in mfopt compare.",
    )
    workload: str = option(
        PREFIX,
        "Workload that C is optimized for: the run's own, or prefix sums.",
        choices=(SCHEDULE, PREFIX),
    )
    executed: str = option(
        "blt-4-scaled", "Mechanism also run with truncated and shuffled batches."
    )

    def check_together(self) -> None:
        super().check_together()
        if self.executed not in self.mechanisms or families.find(self.executed).sampling != BALLS:
            rule = "must be one of the mechanisms, run with balls-in-bins"
            raise _check.reject("executed", self.executed, rule)

    def arms(self) -> Iterator[TrainedPoint]:
        for epsilon in self.epsilons:
            for family in self.mechanisms:
                for execution in EXECUTIONS if family == self.executed else (AS_ACCOUNTED,):
                    yield TrainedPoint(self.data, epsilon, family, self.workload, execution)

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for arm in self.arms():
            how = "" if arm.execution == AS_ACCOUNTED else f": {arm.execution}"
            names = {"family": arm.family, "execution": arm.execution, "target": arm.epsilon}
            label = f"{families.label(arm.family)}{how}"
            rows.append(self.row(found, arm, mechanism=label, **names))
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        axis = "test error (%, log scale)\nlower is better"
        names = [row["mechanism"] for row in pick(rows, target=self.epsilons[0])]
        panels = []
        for epsilon in self.epsilons:
            each = [row | {"error": 1 - row["accuracy"]} for row in pick(rows, target=epsilon)]
            drawn = [intervals(each, "error", "accuracy_half95", 100)]
            panels.append(Panel(drawn, f"ε = {epsilon:g}", axis, "", lines=False, names=names))
        return panels

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            here = pick(rows, target=epsilon)
            (ours,) = pick(here, family=self.executed, execution=AS_ACCOUNTED)
            for row in pick(here, execution=AS_ACCOUNTED):
                if row is not ours:
                    mean, half = interval(100 * (ours["_accuracy"] - row["_accuracy"]))
                    loss, loss_half = interval(ours["_loss"] - row["_loss"])
                    said.append(
                        f"ε = {epsilon:g}: {ours['mechanism']} over {row['mechanism']}: accuracy "
                        f"{mean:+.2f} ± {half:.2f} points, loss {loss:+.4f} ± {loss_half:.4f} "
                        f"(95%, paired by seed)"
                    )
            for execution in EXECUTIONS[1:]:
                (row,) = pick(here, execution=execution)
                mean, half = interval(100 * (row["_accuracy"] - ours["_accuracy"]))
                said.append(
                    f"σ of ε = {epsilon:g}, {execution}: accuracy {mean:+.2f} ± {half:.2f}, "
                    f"and what runs is ({row['epsilon']:.3g}, {row['delta']:.3g})-DP"
                )
        return [*said, *ends(rows)]
