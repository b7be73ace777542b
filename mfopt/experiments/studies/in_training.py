"""Base of studies of noise in whole training runs: mechanisms, runs, rows and plot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mfopt.experiments.mechanisms import BALLS, FRESH
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs import training
from mfopt.experiments.runs.training import CHOSEN_ON, REPORTED
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.fine_tuning import OfText
from mfopt.experiments.studies.rows import about, level, spread

LOSS = "loss on held-out users (nats per token)"
# kinds of C, with what they are run under where this is not balls-in-bins
LABELS = {
    "identity": "independent noise",
    "blt": "BLT noise",
    "toeplitz": "Toeplitz noise",
    f"identity+{FRESH}": "independent noise, fresh bins",
    f"banded-toeplitz+{FRESH}": "banded noise, fresh bins",
}
ALGORITHMS = {"uls": "ULS", "fedavg": "DP-FedAvg"}
EVALUATIONS, EVALUATED = 4, 500  # of a run after the first, and most records of each


class Way(NamedTuple):
    """One way to train: ``noise`` is a kind of C, +fresh-bins for that sampling."""

    noise: str
    optimizer: str = "adam"
    algorithm: str = "uls"


@dataclasses.dataclass(frozen=True)
class TrainingStudy(OfText):
    """A study of ways to train, each at its own best rate, against the first of them."""

    scale = (
        "2 layers of width 64, {1[_parameters]:,} parameters, {0.epochs} × {0.bins} steps, "
        "{0.pretrain_steps} of pretraining"
    )
    title = "User-level DP, ε = {0.epsilon:g}; bands: least to largest of the seeds"
    plot_columns = 2
    compared: ClassVar[tuple[str, ...]] = ("noise",)  # the columns that ways differ in
    chosen_is: ClassVar[str] = "rate"  # what is chosen for each, and its axis
    axis: ClassVar[str] = "learning rate"
    by_move: ClassVar[bool] = False  # whether a rate is how far the noise moves a parameter

    rates: tuple[float, ...] = option((0.004, 0.012, 0.036), "Learning rates to choose from.")
    epsilon: float = option(8.0, "ε of every statement.", name="--eps")
    bins: int = option(8, "Iterations of an epoch.", name="--iters")
    epochs: int = option(4, "Epochs.")
    records: int = option(2, "Records of a user in one participation.", name="--records-per-user")

    def settings(self, arm: Way) -> dict[str, Any]:
        """Settings of the trainer that arms differ in, beside the noise."""
        return {"optimizer": arm.optimizer, "algorithm": arm.algorithm}

    def cell_at(self, arm: Way, rate: float) -> training.TrainRunCell:
        kind, _, sampling = arm.noise.partition("+")
        at = self.bins, self.epochs, self.epsilon, self.delta, sampling or BALLS
        given = self.settings(arm) | {"records_per_user": self.records}
        given |= {"length": self.length, "evaluate_records": EVALUATED}
        base = training.CorpusCell.at(self.data, self.length, pretrain_steps=self.pretrain_steps)
        mechanism, seeds = training.TrainMechanismCell(kind, *at), tuple(sorted(self.seeds))
        every = max(1, self.bins * self.epochs // EVALUATIONS)
        where = base, mechanism, tuple(given.items())
        return training.TrainRunCell(*where, rate, seeds, self.by_move, every=every)

    def rows(self, found: Found) -> list[Row]:
        """A row for each seed of each arm, at the arm's best rate; losses in nats per token."""
        rows: list[Row] = []
        for arm in self.arms():
            at, result = self.best(found, arm)
            # every evaluation of every run, once: on the row of the first seed
            tried = [(r, found[self.cell_at(arm, r)].record["runs"]) for r in at.tried]
            runs = result.record["runs"]
            sampling = arm.noise.partition("+")[2] or BALLS
            for number, (seed, losses) in enumerate(zip(sorted(self.seeds), runs, strict=True)):
                users, records = (losses[part] for part in (REPORTED, CHOSEN_ON))
                row: Row = {"data": Path(self.data).name, **arm._asdict(), "seed": seed}
                row["_parameters"] = result.record["parameters"]
                row |= {"users_before": users[0][1], "users": users[-1][1]}
                row |= {"records": records[-1][1]}
                row |= {"privacy_unit": "user", "adjacency": "add-remove"}
                row["sampling"] = f"{sampling}, {self.bins} bins, {self.epochs} epochs"
                row |= {"epsilon": self.epsilon, "delta": self.delta}
                row["noise_multiplier"] = result.record["noise_multiplier"]
                row |= {"learning_rate": at.rate, "tried": None if number else tried}
                row["rate_bracketed"] = not at.edge and len(at.tried) > 1
                first = rows[number] if len(rows) >= len(self.seeds) else row
                gains = {f"{part}_gain": first[part] - row[part] for part in ("users", "records")}
                rows.append(row | gains)
        return rows

    def by_arm(self, rows: list[Row]) -> dict[tuple[str, ...], list[Row]]:
        """The rows of each arm, of all seeds, by what arms differ in."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            found.setdefault(tuple(row[name] for name in self.compared), []).append(row)
        return found

    def panels(self, rows: list[Row]) -> list[Panel]:
        """Last loss by rate, and loss by step at the best rate."""
        rated, stepped = [], []
        for name, (row, *_) in self.by_arm(rows).items():
            label = ", ".join((ALGORITHMS | LABELS).get(part, part) for part in name)
            at = {rate: [run[REPORTED] for run in runs] for rate, runs in row["tried"]}
            rated.append(spread(label, list(at), [[run[-1][1] for run in at[r]] for r in at]))
            chosen = [dict(run) for run in at[row["learning_rate"]]]
            by_step = [[run[step] for run in chosen] for step in chosen[0]]
            stepped.append(spread(label, list(chosen[0]), by_step))
        data, before = rows[0]["data"], rows[0]["users_before"]
        label = "pretrained model, before private training"
        every = [rate for row in rows for rate, _ in row["tried"] or ()]
        rated.append(level(label, every, before))
        stepped.append(level(label, (0, self.bins * self.epochs), before))
        title = f"{data}: at the {self.chosen_is} best for each"
        return [
            Panel(rated, f"{data}: after the last step", f"{self.axis} (log scale)", LOSS),
            Panel(stepped, title, "steps", LOSS, log_x=False),
        ]

    def findings(self, rows: list[Row]) -> list[str]:
        said, best, data = [], self.by_arm(rows), rows[0]["data"]
        first, *others = best
        for name in others:
            mine = best[name]
            # each thing that differs from the first arm's, against that and all else alike
            for place in (i for i, part in enumerate(name) if part != first[i]):
                usual = *name[:place], first[place], *name[place + 1 :]
                for part, key in ((REPORTED, "users"), (CHOSEN_ON, "records")):
                    pairs = zip(best[usual], mine, strict=True)
                    gains = np.array([before[key] - after[key] for before, after in pairs])
                    paired = " (95%, paired by seed)" if len(gains) > 1 else ""
                    said.append(
                        f"{data}, {part}: {', '.join(name)} below {', '.join(usual)} in "
                        f"{sum(gains > 0)} of {len(gains)} seeds, by {about(gains)}{paired} nats"
                    )
            fall = mine[0]["users_before"] - mean(row["users"] for row in mine)
            lowered = f"lowers the loss on held-out users by {fall:.3f} nats"
            said.append(f"{data}: {', '.join(name)} {lowered}")
        for name, (row, *_) in best.items():
            if not row["rate_bracketed"]:
                rate = f"the best {self.chosen_is} of {', '.join(name)}, {row['learning_rate']:g}"
                said.append(f"{data}: {rate}, is the last tried")
        return said
