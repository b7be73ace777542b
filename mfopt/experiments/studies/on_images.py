"""Base of studies on images: schedule, sweep, mechanisms, and a row of a mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments import families
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import Cooldown
from mfopt.experiments.options import from_0_to_1, option
from mfopt.experiments.runs.images import AS_ACCOUNTED, ImagesCell
from mfopt.experiments.studies.engine import Found, Row, Swept
from mfopt.experiments.studies.rows import interval

SCHEDULE, PREFIX = "schedule", "prefix"


class TrainedPoint(NamedTuple):
    """One mechanism at one ε on one data set; ``workload`` is what C was optimized for."""

    data: str
    epsilon: float
    family: str
    workload: str
    execution: str = AS_ACCOUNTED


def _below_1(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise _check.reject(name, value, "must lie in [0, 1)")


@dataclasses.dataclass(frozen=True)
class ImageStudy(Swept):
    """Base of studies on images: schedule, sweep and what each mechanism is run for."""

    data: str | tuple[str, ...]
    mechanisms: tuple[str, ...]
    epsilons: tuple[float, ...] = option((0.5, 1.0, 4.0), "Values of ε.", name="--eps")
    rates: tuple[float, ...] = option(
        (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28), "Learning rates to choose from."
    )
    extend: int = option(3, "Most rates to add beyond an end that is best.", least=0)
    seeds: int = option(10, "Runs at each rate.", least=2)
    bins: int = option(16, "Iterations of an epoch.", name="--iters")
    epochs: int = option(8, "Passes over the data.")
    delta: float = option(1e-5, "δ of every statement.")
    momentum: float = option(0.9, "Momentum of the optimizer.", rule=_below_1)
    constant: float = option(0.25, "Share of the run before the rate cools down.", rule=from_0_to_1)
    final: float = option(0.05, "Last rate over the first.")
    widths: tuple[int, ...] = option((1, 2, 4, 8, 16), "Numbers of bands to choose from.")
    clip: float = option(1.0, "Clip norm of an example's gradient.")
    hidden: int = option(16, "Width of the hidden layer.")
    held_out: int = option(400, "Examples for validation and test.")

    scale = "{0.trained_on}, {0.epochs} × {0.bins} iterations, {0.seeds} seeds"
    columns = (
        "mechanism; epsilon=ε; accuracy; accuracy_half95=±; loss; rmse=RMSE; rate; "
        "noise_multiplier=σ; privacy_unit=unit; adjacency; sampling"
    )

    @property
    def trained_on(self) -> str:
        """The names of the data in words."""
        return self.data if isinstance(self.data, str) else " and ".join(self.data)

    def check_together(self) -> None:
        for name in self.mechanisms:
            families.find(name, "mechanisms")
        self.comparison(SCHEDULE).check()

    @property
    def schedule(self) -> Cooldown:
        """Momentum and cooldown of every run."""
        n = self.bins * self.epochs
        return Cooldown(self.momentum, min(round(self.constant * n), n - 1), n, self.final)

    def comparison(self, workload: str) -> Comparison:
        """The setting of mechanisms optimized for the schedule, or for prefix sums."""
        at = self.bins, self.epochs, self.epsilons, self.delta, self.mechanisms, self.widths
        return Comparison(*at, schedule=self.schedule if workload == SCHEDULE else None)

    def runs(self, arm: TrainedPoint, rate: float) -> list[ImagesCell]:
        source = self.comparison(arm.workload).proven(arm.family, arm.epsilon)
        # one program serves the rates of the grid
        rates, seeds = self.rates if rate in self.rates else (rate,), tuple(range(self.seeds))
        what = {"source": source, "data": arm.data, "execution": arm.execution, "rates": rates}
        return [ImagesCell.of(self, **what, seeds=seeds)]

    def cells(self) -> Iterable[Cell]:
        every = list(super().cells())
        return [*dict.fromkeys(cell.source for cell in every), *every]

    def judged(self, results: list[Result], rate: float) -> float:
        return float(_at(results[0], rate, "validation_loss").mean())

    def row(self, found: Found, arm: TrainedPoint, **names: Any) -> Row:
        """Row of a mechanism: its run, its quality at its best rate, and its privacy."""
        at, (result,) = self.best(found, arm)
        record = result.record
        values = {name: _at(result, at.rate, f"test_{name}") for name in ("accuracy", "loss")}
        accuracy, accuracy_half = interval(values["accuracy"])
        loss, loss_half = interval(values["loss"])
        return {
            **names,
            "accuracy": accuracy,
            "accuracy_half95": accuracy_half,
            "loss": loss,
            "loss_half95": loss_half,
            "rate": at.rate,
            "rate_at_end": at.edge,
            "rmse": record["rmse"],
            "last_error": record["last_error"],
            **record["privacy"],
            "_accuracy": values["accuracy"],
            "_loss": values["loss"],
        }


def _at(result: Result, rate: float, name: str) -> np.ndarray:
    """(seeds,) values of a measure at one rate."""
    return result.arrays[name][:, result.record["rates"].index(rate)]
