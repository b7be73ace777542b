"""Mechanisms against each other on images: section 5.2 of Choquette-Choo et al. 2024."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mfopt import _check
from mfopt.experiments import families
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import Cooldown
from mfopt.experiments.studies import cifar, image_cells
from mfopt.experiments.studies.base import Outcome, Study, check_number, check_several, flag
from mfopt.experiments.studies.image_cells import (
    AS_ACCOUNTED,
    EXECUTIONS,
    Best,
    Data,
    interval,
)

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

BASELINE = "banded+poisson"
SCHEDULE, PREFIX = "schedule", "prefix"
COLUMNS = {
    "mechanism": "mechanism",
    "epsilon": "ε",
    "accuracy": "accuracy",
    "accuracy_half95": "±",
    "loss": "loss",
    "rmse": "RMSE",
    "rate": "rate",
    "noise_multiplier": "σ",
    "privacy_unit": "unit",
    "adjacency": "adjacency",
    "sampling": "sampling",
}


@dataclasses.dataclass(frozen=True)
class ImageStudy(Study):
    """What studies on images share: data, schedule, sweep and mechanisms."""

    folder: Path | None = flag(None, "Folder with CIFAR-10's python batches.", kind=Path)  # noqa: RUF009
    epsilons: tuple[float, ...] = flag((0.5, 1.0, 4.0), "Values of ε.", option="--eps")
    rates: tuple[float, ...] = flag(
        (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28), "Learning rates to choose from."
    )
    extend: int = flag(3, "Most rates to add beyond an end that is best.")
    seeds: int = flag(10, "Runs at each rate.")
    per_cell: int = flag(10, "Runs of one cell: what is lost when it is stopped.")
    bins: int = flag(16, "Iterations of an epoch.", option="--iters")
    epochs: int = flag(8, "Passes over the data.")
    delta: float = flag(1e-5, "δ of every statement.")
    momentum: float = flag(0.9, "Momentum of the optimizer.")
    constant: float = flag(0.25, "Share of the run before the rate cools down.")
    final: float = flag(0.05, "Last rate over the first.")
    widths: tuple[int, ...] = flag((1, 2, 4, 8, 16), "Numbers of bands to choose from.")
    clip: float = flag(1.0, "Clip norm of an example's gradient.")
    hidden: int = flag(16, "Width of the hidden layer (digits and made data).")
    held_out: int = flag(400, "Examples for validation and test; of CIFAR-10 for validation.")
    microbatch: int = flag(0, "Examples at work at once in a run; 0: a whole batch.")

    def check(self) -> Self:
        for name in ("seeds", "per_cell", "bins", "epochs", "hidden", "held_out"):
            _check.integer(name, getattr(self, name))
        _check.integer("seeds", self.seeds, at_least=2)
        for name in ("microbatch", "extend"):
            _check.integer(name, getattr(self, name), at_least=0)
        for name in ("clip", "final"):
            check_number(name, getattr(self, name))
        _check.probability("delta", self.delta)
        _check.probability("constant", self.constant, closed=True)
        if not 0 <= self.momentum < 1:
            raise _check.reject("momentum", self.momentum, "must lie in [0, 1)")
        for name in ("epsilons", "rates", "widths"):
            values = getattr(self, name)
            check_several(name, values)
        for rate in self.rates:
            check_number("rates", rate)
        for width in self.widths:
            _check.integer("widths", width)
        for name in self.families():
            families.find(name, "mechanisms")
        self.comparison(SCHEDULE).check()
        for name in self.data_sets():
            if name == "cifar10":
                missing = [
                    f for f in cifar.FILES if not (self.folder and (self.folder / f).is_file())
                ]
                if missing:
                    rule = f"must hold CIFAR-10's python batches; {missing[0]} is not there"
                    raise _check.reject("folder", str(self.folder), rule, "Unpack them there.")
        return self

    def data_sets(self) -> tuple[str, ...]:
        """Names of the data."""
        return ("digits",)

    def families(self) -> tuple[str, ...]:
        """Names of the mechanisms."""
        raise NotImplementedError

    @property
    def schedule(self) -> Cooldown:
        """Momentum and cooldown of every run."""
        n = self.bins * self.epochs
        return Cooldown(self.momentum, min(round(self.constant * n), n - 1), n, self.final)

    def comparison(self, workload: str) -> Comparison:
        """The setting of mechanisms optimized for the schedule, or for prefix sums."""
        return Comparison(
            self.bins,
            self.epochs,
            tuple(map(float, self.epsilons)),
            self.delta,
            self.families(),
            self.widths,
            schedule=self.schedule if workload == SCHEDULE else None,
        )

    def runs(
        self,
        family: str,
        epsilon: float,
        *,
        data: str,
        workload: str = SCHEDULE,
        execution: str = AS_ACCOUNTED,
    ) -> list[Task]:
        """The cells of one curve at one ε.

        Args:
          family: of :mod:`mfopt.experiments.families`.
          epsilon: that σ is chosen for.
          data: by name.
          workload: what C is optimized for.
          execution: how batches are made.
        """
        source = image_cells.mechanism_task(family, self.comparison(workload), epsilon)
        seeds = range(self.seeds)
        folder = "" if data != "cifar10" else str(self.folder)
        return [
            image_cells.run_task(
                source,
                Data(data, folder, self.held_out),
                self.schedule,
                execution=execution,
                rates=self.rates,
                seeds=tuple(seeds[first : first + self.per_cell]),
                clip_norm=self.clip,
                hidden=self.hidden,
                microbatch=self.microbatch,
            )
            for first in range(0, self.seeds, self.per_cell)
        ]

    def row(
        self, found: Mapping[Task, Result], cells: Sequence[Task], **names: Any
    ) -> dict[str, Any]:
        """One row: what was run, how well it does at its best rate, and what it protects."""
        at = self.best(found, cells)
        mechanism, record = found[cells[0].needs[0]].record, found[cells[0]].record
        accuracy, accuracy_half = interval(at.accuracy)
        loss, loss_half = interval(at.loss)
        return {
            **names,
            "accuracy": accuracy,
            "accuracy_half95": accuracy_half,
            "loss": loss,
            "loss_half95": loss_half,
            "rate": at.rate,
            "rate_at_end": at.edge,
            "rmse": record["rmse"],
            "rmse_prefix": mechanism["rmse_prefix"],
            "last_error": record["last_error"],
            "size": mechanism["size"],
            "seeds": self.seeds,
            **record["privacy"],
        }

    def best(self, found: Mapping[Task, Result], cells: Sequence[Task]) -> Best:
        """The cells' runs at the best rate."""
        return image_cells.best(found, cells, most=self.extend)[0]

    def curves(self) -> list[list[Task]]:
        """The cells of each mechanism at each ε."""
        raise NotImplementedError

    def cells(self) -> Iterable[Task]:
        every = [task for cells in self.curves() for task in cells]
        return [*dict.fromkeys(task.needs[0] for task in every), *every]

    def more(self, found: Mapping[Task, Result]) -> Iterable[Task]:
        for cells in self.curves():
            yield from image_cells.best(found, cells, most=self.extend)[1]


@dataclasses.dataclass(frozen=True)
class Images(ImageStudy):
    """Accuracy of each mechanism at equal ε, each at its best learning rate."""

    name = "images"
    summary = "Mechanisms and their sampling on images, at equal ε."
    source = "Choquette-Choo et al. 2024, section 5.2, Figures 6 and 7"
    default_size = "digits, 8 epochs × 16 iterations, 8 mechanisms at 3 ε, 7 rates × 10 seeds"
    time = "about 7 CPU-minutes"
    full = {  # noqa: RUF012
        "data": "cifar10",
        "epsilons": (0.5, 1.0, 2.0, 4.0, 8.0),
        "rates": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
        "seeds": 100,
        "per_cell": 2,
        "bins": 100,
        "epochs": 20,
        "momentum": 0.95,
        "widths": (1, 2, 4, 8, 16, 32, 64),
        "held_out": 5000,
        "microbatch": 50,
    }
    full_size = "CIFAR-10, VGG of 550,570 parameters, 20 × 100, 5 ε, 7 rates × 100 seeds"
    needs = "CIFAR-10's python batches (--folder) and a GPU"

    data: str = flag("digits", "What is trained on.", choices=("digits", "made", "cifar10"))
    mechanisms: tuple[str, ...] = flag(
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
    workload: str = flag(
        PREFIX, "What C is optimized for: the run's, or prefix sums.", choices=(SCHEDULE, PREFIX)
    )
    executed: str = flag("blt-4-scaled", "Mechanism whose batches are also cut, and shuffled.")

    def data_sets(self) -> tuple[str, ...]:
        return (self.data,)

    def families(self) -> tuple[str, ...]:
        return self.mechanisms

    def check(self) -> Self:
        super().check()
        if (
            self.executed not in self.mechanisms
            or "balls" not in families.find(self.executed).sampling
        ):
            rule = "must be one of the mechanisms, run with balls-in-bins"
            raise _check.reject("executed", self.executed, rule)
        return self

    def _cells(self) -> dict[tuple[str, float, str], list[Task]]:
        return {
            (family, epsilon, execution): self.runs(
                family, epsilon, data=self.data, workload=self.workload, execution=execution
            )
            for epsilon in map(float, self.epsilons)
            for family in self.mechanisms
            for execution in (EXECUTIONS if family == self.executed else (AS_ACCOUNTED,))
        }

    def curves(self) -> list[list[Task]]:
        return list(self._cells().values())

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        cells = self._cells()
        best = {key: self.best(found, tasks) for key, tasks in cells.items()}
        rows = []
        for (family, epsilon, execution), runs in cells.items():
            named = families.label(family)
            label = named if execution == AS_ACCOUNTED else f"{named}: {execution}"
            rows.append(
                self.row(
                    found, runs, mechanism=label, family=family, execution=execution, target=epsilon
                )
            )
        return Outcome(
            rows,
            COLUMNS,
            self._panels(best),
            f"{self.data}: {self.epochs} × {self.bins}, δ = {self.delta:g}, one example, "
            f"{self.seeds} seeds (bands: 95%)",
            self._findings(best, rows),
            plot_columns=3,
        )

    def _panels(self, best: Mapping[tuple[str, float, str], Best]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        epsilons = [float(e) for e in self.epsilons]

        def curve(label: str, at: Any) -> Curve:
            means, halves = zip(*(interval(100 * at(e)) for e in epsilons), strict=True)
            low, high = np.subtract(means, halves), np.add(means, halves)
            return Curve(label, epsilons, means, low.tolist(), high.tolist())

        def accuracy(family: str, execution: str = AS_ACCOUNTED) -> Any:
            return lambda e: best[family, e, execution].accuracy

        def gain(family: str) -> Any:
            return lambda e: (
                best[family, e, AS_ACCOUNTED].accuracy - best[BASELINE, e, AS_ACCOUNTED].accuracy
            )

        absolute = [curve(families.label(f), accuracy(f)) for f in self.mechanisms]
        panels = [Panel(absolute, "each at its best rate", "ε", "test accuracy (%)")]
        if BASELINE in self.mechanisms:
            near = [f for f in self.mechanisms if "unamplified" not in f]
            relative = [curve(families.label(f), gain(f)) for f in near]
            title = f"against {families.label(BASELINE)}"
            panels.append(Panel(relative, title, "ε", "gain (points)", zero_line=True))
        named = families.label(self.executed)
        executed = [
            curve(named if x == AS_ACCOUNTED else f"{named}: {x}", accuracy(self.executed, x))
            for x in EXECUTIONS
        ]
        free = [f for f in self.mechanisms if "unamplified" in f]
        executed += [curve(families.label(f), accuracy(f)) for f in free]
        title = "executions at the σ of one ε"
        panels.append(Panel(executed, title, "ε that σ is for", "test accuracy (%)"))
        return panels

    def _findings(
        self, best: Mapping[tuple[str, float, str], Best], rows: Sequence[dict[str, Any]]
    ) -> list[str]:
        said = []
        ours = self.executed
        rivals = [f for f in self.mechanisms if f != ours]
        for epsilon in map(float, self.epsilons):
            mine = best[ours, epsilon, AS_ACCOUNTED]
            for family in rivals:
                other = best[family, epsilon, AS_ACCOUNTED]
                mean, half = interval(100 * (mine.accuracy - other.accuracy))
                loss, loss_half = interval(mine.loss - other.loss)
                said.append(
                    f"ε = {epsilon:g}: {families.label(ours)} over {families.label(family)}: "
                    f"accuracy {mean:+.2f} ± {half:.2f} points, loss {loss:+.4f} ± {loss_half:.4f} "
                    f"(95%, paired by seed)"
                )
            for execution in EXECUTIONS[1:]:
                mean, half = interval(
                    100 * (best[ours, epsilon, execution].accuracy - mine.accuracy)
                )
                row = next(
                    r for r in rows if r["target"] == epsilon and r["execution"] == execution
                )
                said.append(
                    f"σ of ε = {epsilon:g}, {execution}: accuracy {mean:+.2f} ± {half:.2f}, "
                    f"and what runs is ({row['epsilon']:.3g}, {row['delta']:.3g})-DP"
                )
        return [*said, *ends(rows)]


def ends(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning where a best rate is an end of those tried."""
    count = sum(bool(row["rate_at_end"]) for row in rows)
    return [f"{count} of {len(rows)} best rates are an end of those tried"] if count else []
