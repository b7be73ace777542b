"""Base of studies of noise in whole training runs: data, mechanisms, runs, rows and plot."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.mechanisms import BALLS, FRESH
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.training import (
    CHOSEN_ON,
    REPORTED,
    CorpusCell,
    TrainMechanismCell,
    TrainRunCell,
    check_parts,
)
from mfopt.experiments.studies.engine import Found, Row, Swept
from mfopt.experiments.studies.rows import about, level, pick, spread
from mfopt.training.config import SCHEDULES
from mfopt.training.data import EMBEDDED

LOSS = "loss on held-out users (nats per token)"
# kinds of C, with what they are run under where this is not balls-in-bins
LABELS = {
    "identity": "independent noise",
    "blt": "BLT noise",
    "toeplitz": "Toeplitz noise",
    f"identity+{FRESH}": "independent noise, fresh bins",
    f"banded-toeplitz+{FRESH}": "banded noise, fresh bins",
}
EVALUATIONS = 4  # of a run, after the first


class Way(NamedTuple):
    """One way to train: on some data, with the noise of a C, by an optimizer."""

    data: str
    strategy: str
    optimizer: str

    @property
    def sampling(self) -> str:
        """The scheme that the mechanism is run under, by name."""
        return self.strategy.partition("+")[2] or BALLS


@dataclasses.dataclass(frozen=True)
class TrainingStudy(Swept):
    """A study of mechanisms in training runs, each at its own best learning rate."""

    scale = "2 layers of width 64, {0.epochs} × {0.bins} steps, {0.pretrain_steps} of pretraining"
    title = "User-level DP, ε = {0.epsilon:g}; bands: {0.number} seeds"
    plot_columns = 2
    # of a rate: its axis, and what a warning calls it
    axis: ClassVar[str] = "learning rate"
    chosen_is: ClassVar[str] = "rate"

    data: tuple[str, ...] = option(
        ("stdlib-code",), "Embedded corpora, or folders of `mfopt data build`.", rule=check_parts
    )
    strategies: tuple[str, ...] = option(
        ("identity", "blt"),
        "Forms of C; the first is what the others are measured against.",
        choices=tuple(LABELS),
    )
    rates: tuple[float, ...] = option((0.004, 0.012, 0.036), "Learning rates to choose from.")
    schedule: str = option(
        "constant", "Learning-rate schedule, the same for all mechanisms.", choices=SCHEDULES
    )
    seeds: tuple[int, ...] = option((0, 1, 2), "Seeds of batches and noise, one run each.")
    epsilon: float = option(8.0, "ε of every statement.", name="--eps")
    delta: float = option(1e-5, "δ of every statement.")
    bins: int = option(8, "Iterations of an epoch.", name="--iters")
    epochs: int = option(4, "Epochs.")
    records: int = option(2, "Records of a user in one participation.", name="--records-per-user")
    length: int = option(48, "Tokens of a record.")
    pretrain_steps: int = option(120, "Steps on the public part first.", least=0)

    @property
    def number(self) -> int:
        """Runs of an arm at one rate."""
        return len(self.seeds)

    def by_name(self) -> tuple[str, ...]:
        """The optimizers that are run: where there are several, these are what is compared."""
        return ("adam",)

    def compared(self, arm: Way) -> tuple[tuple[str, ...], str]:
        """(what an arm shares with those that it is compared with, what they differ in)."""
        if len(self.by_name()) > 1:
            return (arm.data, arm.strategy), arm.optimizer
        return (arm.data,), arm.strategy

    def rate_and_move(self, rate: float) -> tuple[float, float]:
        """The learning rate of a run, and how far the noise alone moves a parameter where that
        fits the rate: one of the two, the other 0."""
        return rate, 0.0

    def arms(self) -> Iterator[Way]:
        yield from itertools.starmap(
            Way, itertools.product(self.data, self.strategies, self.by_name())
        )

    def runs(self, arm: Way, rate: float) -> list[Cell]:
        at = self.bins, self.epochs, self.epsilon, self.delta, arm.sampling
        base = CorpusCell.at(arm.data, self.length, pretrain_steps=self.pretrain_steps)
        mechanism = TrainMechanismCell(arm.strategy.partition("+")[0], *at)
        every = max(1, self.bins * self.epochs // EVALUATIONS)
        how = arm.optimizer, self.schedule, self.records, self.length, every
        rates = self.rate_and_move(rate)
        return [TrainRunCell(base, mechanism, s, *how, *rates) for s in sorted(self.seeds)]

    def judged(self, results: list[Result], rate: float) -> float:
        return float(mean(result.record["losses"][CHOSEN_ON][-1][1] for result in results))

    def rows(self, found: Found) -> list[Row]:
        """A row for each seed of each arm, at the arm's best rate; losses in nats per token."""
        rows: list[Row] = []
        first: dict[Any, Row] = {}
        for arm in self.arms():
            at, results = self.best(found, arm)
            # every evaluation of every run, once: on the row of the first seed
            tried = [(r, [found[c].record["losses"] for c in self.runs(arm, r)]) for r in at.tried]
            for seed, result in zip(sorted(self.seeds), results, strict=True):
                row = self._row(arm, seed, result) | {"learning_rate": at.rate}
                row["tried"] = tried if result is results[0] else None
                row["rate_bracketed"] = min(self.rates) < at.rate < max(self.rates)
                against = first.setdefault((*self.compared(arm)[0], seed), row)
                rows.append(row | {f"{x}_gain": against[x] - row[x] for x in ("users", "records")})
        return rows

    def _row(self, arm: Way, seed: int, result: Result) -> Row:
        users, records = (result.record["losses"][part] for part in (REPORTED, CHOSEN_ON))
        names = [Path(each).name for each in self.data]
        name = Path(arm.data).name  # the whole path where two folders have one name
        return {
            "data": arm.data if arm.data in EMBEDDED or names.count(name) > 1 else name,
            "noise": arm.strategy,
            "optimizer": arm.optimizer,
            "seed": seed,
            "schedule": self.schedule,
            "users_before": users[0][1],
            "users": users[-1][1],
            "records": records[-1][1],
            "privacy_unit": "user",
            "adjacency": "add-remove",
            "sampling": f"{arm.sampling}, {self.bins} bins, {self.epochs} epochs",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": result.record["noise_multiplier"],
            "_arm": arm,
        }

    def panels(self, rows: list[Row]) -> list[Panel]:
        """Panels per data set: last loss by rate, and loss by step at the best rate."""
        panels = []
        for data, mine in self.by_data(rows).items():
            rated, stepped = [], []
            for strategy, optimizer in itertools.product(self.strategies, self.by_name()):
                row, *_ = pick(mine, noise=strategy, optimizer=optimizer)
                label = LABELS[strategy]
                label = f"{optimizer}, {label}" if len(self.by_name()) > 1 else label
                at = {rate: [run[REPORTED] for run in runs] for rate, runs in row["tried"]}
                last = [[run[-1][1] for run in runs] for runs in at.values()]
                rated.append(spread(label, list(at), last))
                chosen = [dict(run) for run in at[row["learning_rate"]]]
                by_step = [[run[step] for run in chosen] for step in chosen[0]]
                stepped.append(spread(label, list(chosen[0]), by_step))
            before, label = mine[0]["users_before"], "pretrained model, before private training"
            rated.append(level(label, [rate for rate, _ in mine[0]["tried"]], before))
            stepped.append(level(label, (0, self.bins * self.epochs), before))
            axis = f"{self.axis} (log scale)"
            panels.append(Panel(rated, f"{data}: after the last step", axis, LOSS))
            title = f"{data}: at the {self.chosen_is} best for each"
            panels.append(Panel(stepped, title, "steps", LOSS, log_x=False))
        return panels

    def by_data(self, rows: list[Row]) -> dict[str, list[Row]]:
        """The rows of each data set, by its name."""
        return {name: pick(rows, data=name) for name in dict.fromkeys(r["data"] for r in rows)}

    def findings(self, rows: list[Row]) -> list[str]:
        groups: dict[tuple[str, ...], dict[str, list[Row]]] = {}
        for arm in self.arms():
            shared, own = self.compared(arm)
            mine = pick(rows, _arm=arm)
            groups.setdefault((mine[0]["data"], *shared[1:]), {})[own] = mine
        said = []
        for shared, best in groups.items():
            name, (first, *others) = ", ".join(shared), best
            for other in others:
                mine = best[other]
                for part, key in ((REPORTED, "users_gain"), (CHOSEN_ON, "records_gain")):
                    gains = np.array([row[key] for row in mine])
                    paired = " (95%, paired by seed)" if len(gains) > 1 else ""
                    said.append(
                        f"{name}, {part}: {other} below {first} in {sum(gains > 0)} of "
                        f"{len(gains)} seeds, by {about(gains)}{paired} nats"
                    )
                fall = mine[0]["users_before"] - mean(row["users"] for row in mine)
                said.append(f"{name}: {other} lowers the loss on held-out users by {fall:.3f} nats")
            said += [
                f"{name}: the best {self.chosen_is} of {own}, {row['learning_rate']:g}, is the "
                f"last tried"
                for own, (row, *_) in best.items()
                if not row["rate_bracketed"]
            ]
        return said
