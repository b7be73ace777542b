"""Studies of noise, sampling, optimizers and algorithms in whole training runs.

All ways to train of a study run at the same (ε, δ), from the same pretrained model, for as many
steps of as many records, over one grid of learning rates; under one sampling scheme a seed assigns
the users to the same bins for all. Each arm then stands with the rate that is best for *it* on
held-out records of training users, and is reported on those and on users that took no part.
Choosing learning rates in this way is not covered by the guarantee of a run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, NamedTuple

import numpy as np
from common import Results, Row, about, level, main, spread, studies
from fine_tuning import OfText
from training_runs import CHOSEN_ON, REPORTED, CorpusCell, TrainMechanismCell, TrainRunCell

from mfopt.experiments.mechanisms import BALLS, FRESH, POISSON
from mfopt.experiments.plots import Panel

LOSS = "loss on held-out users (nats per token)"
LABELS = {
    "identity": "independent noise",
    f"identity+{POISSON}": "independent noise, Poisson",
    f"identity+{FRESH}": "independent noise, fresh bins",
    "blt": "BLT noise",
    f"banded-toeplitz+{FRESH}": "banded noise, fresh bins",
}
ALGORITHMS = {"uls": "ULS", "fedavg": "DP-FedAvg"}
EVALUATIONS, EVALUATED = 4, 500  # of a run after the first, and most records of each


class Noise(NamedTuple):
    """A kind of C and the sampling that it is run under."""

    kind: str
    sampling: str = BALLS

    def __str__(self) -> str:
        return self.kind if self.sampling == BALLS else f"{self.kind}+{self.sampling}"


INDEPENDENT, BLT, BANDED = Noise("identity"), Noise("blt"), Noise("banded-toeplitz", FRESH)
INDEPENDENT_POISSON, INDEPENDENT_FRESH = Noise("identity", POISSON), Noise("identity", FRESH)


class Way(NamedTuple):
    """One way to train."""

    noise: Noise
    optimizer: str = "adam"
    algorithm: str = "uls"


@dataclasses.dataclass(frozen=True)
class TrainingStudy(OfText):
    """A study of ways to train, each at its own best rate, against the first of them."""

    plot_columns = 2
    compared: ClassVar[tuple[str, ...]] = ("noise",)  # the columns that ways differ in
    chosen_is: ClassVar[str] = "rate"  # what is chosen for each, and its axis
    axis: ClassVar[str] = "learning rate"
    by_move: ClassVar[bool] = False  # whether a rate is how far the noise moves a parameter

    rates: tuple[float, ...] = (0.004, 0.012, 0.036)  # Learning rates to choose from.
    epsilon: float = 8.0  # ε of every statement.
    bins: int = 8  # Iterations of an epoch.
    epochs: int = 4  # Epochs.
    records: int = 2  # Records of a user in one participation.

    def title(self, rows: list[Row]) -> str:
        trained = f"2 layers of width 64, {rows[0]['_parameters']:,} parameters"
        steps = f"{self.epochs} × {self.bins} steps, {self.pretrain_steps} of pretraining"
        heading = f"User-level DP, ε = {self.epsilon:g}; bands: least to largest of the seeds"
        return f"{heading}\n{trained}, {steps}"

    def settings(self, arm: Way) -> dict[str, Any]:
        """Settings of the trainer that arms differ in, beside the noise."""
        return {"optimizer": arm.optimizer, "algorithm": arm.algorithm}

    def cell_at(self, arm: Way, rate: float) -> TrainRunCell:
        kind, sampling = arm.noise
        at = self.bins, self.epochs, self.epsilon, self.delta, sampling
        given = self.settings(arm) | {"records_per_user": self.records}
        given |= {"length": self.length, "evaluate_records": EVALUATED}
        base = CorpusCell.at(self.data, self.length, pretrain_steps=self.pretrain_steps)
        mechanism = None if sampling == POISSON else TrainMechanismCell(kind, *at)
        if mechanism is None:
            given |= {"epsilon": self.epsilon, "delta": self.delta}
            steps = self.bins * self.epochs
            given["sampling"] = f"poisson:probability={1 / self.bins!r},iterations={steps}"
        seeds = tuple(sorted(self.seeds))
        every = max(1, self.bins * self.epochs // EVALUATIONS)
        where = base, mechanism, tuple(given.items())
        return TrainRunCell(*where, rate, seeds, self.by_move, every=every)

    def rows(self, results: Results) -> list[Row]:
        """A row for each seed of each arm, at the arm's best rate; losses in nats per token."""
        rows: list[Row] = []
        for arm in self.arms():
            at, result = self.best(results, arm)
            # every evaluation of every run, once: on the row of the first seed
            tried = [(r, results[self.cell_at(arm, r)].record["runs"]) for r in at.tried]
            runs = result.record["runs"]
            sampling = arm.noise.sampling
            for number, (seed, losses) in enumerate(zip(sorted(self.seeds), runs, strict=True)):
                users, records = (losses[part] for part in (REPORTED, CHOSEN_ON))
                row: Row = {"data": Path(self.data).name, **arm._asdict(), "seed": seed}
                row["noise"] = str(arm.noise)
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
        results: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            results.setdefault(tuple(row[name] for name in self.compared), []).append(row)
        return results

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


@dataclasses.dataclass(frozen=True)
class NoiseInTraining(TrainingStudy):
    """Correlated noise against independent noise under the sampling that needs least of it."""

    name = "noise-in-training"
    source = "McMahan et al. 2024, section 5 (the comparison; on other data)"

    # The first is what the others are measured against.
    noises: tuple[Noise, ...] = (INDEPENDENT_FRESH, INDEPENDENT_POISSON, BLT, BANDED)
    rates: tuple[float, ...] = (0.004, 0.007, 0.012, 0.021, 0.036)  # Learning rates to choose from.

    def arms(self) -> Iterator[Way]:
        yield from map(Way, self.noises)


@dataclasses.dataclass(frozen=True)
class SamplingInTraining(NoiseInTraining):
    """Fresh bins against balls-in-bins, in fine-tuning."""

    name = "sampling-in-training"
    source = "this library, fresh bins"

    noises: tuple[Noise, ...] = (BLT, BANDED)
    rates: tuple[float, ...] = (0.004, 0.012, 0.036)  # Learning rates to choose from.
    epsilon: float = 2.0  # ε of every statement.


@dataclasses.dataclass(frozen=True)
class FedAvgInTraining(NoiseInTraining):
    """DP-FedAvg against user-level sampling: local steps of a user, or one gradient."""

    name = "fedavg-in-training"
    source = "McMahan, Ramage, Talwar and Zhang 2018, Algorithm 1 (in small, on other data)"
    compared = ("algorithm", "noise")

    noises: tuple[Noise, ...] = (INDEPENDENT, BLT)
    rates: tuple[float, ...] = (0.004, 0.012, 0.036)  # Learning rates to choose from.
    extend: int = 1  # Most rates to add beyond an end that is best.
    local_epochs: int = 2  # DP-FedAvg: passes over a user's records.
    local_rate: float = 0.2  # DP-FedAvg: learning rate of a step of one record.

    def arms(self) -> Iterator[Way]:
        for algorithm, noise in itertools.product(ALGORITHMS, self.noises):
            yield Way(noise, algorithm=algorithm)

    def settings(self, arm: Way) -> dict[str, Any]:
        own = {"local_epochs": self.local_epochs, "local_rate": self.local_rate}
        return super().settings(arm) | (own if arm.algorithm == "fedavg" else {})


@dataclasses.dataclass(frozen=True)
class OptimizersInTraining(TrainingStudy):
    """Adam, Adam without the noise's share of its second moment, and momentum.

    Rates are given by how far the noise alone moves a parameter, so that one grid serves every
    optimizer.
    """

    name = "optimizers-in-training"
    source = "Tang, Shpilevskiy and Lécuyer 2024 (DP-AdamBC); Denisov et al. 2022 (momentum)"
    compared = ("optimizer",)
    axis = "move of a parameter by the noise"
    chosen_is = "move"
    by_move = True

    noise: Noise = BLT
    # The first is what the others are measured against.
    optimizers: tuple[str, ...] = ("adam", "adam-bc", "momentum")
    # Moves to choose from: how far the noise alone moves a parameter.
    rates: tuple[float, ...] = (0.012, 0.024, 0.048)

    def arms(self) -> Iterator[Way]:
        for optimizer in self.optimizers:
            yield Way(self.noise, optimizer)


STUDIES = studies(
    __file__, NoiseInTraining(), OptimizersInTraining(), SamplingInTraining(), FedAvgInTraining()
)

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
