"""Loss against ε at fixed compute: ELS and ULS fine-tuning a language model by the real trainer.

Charles et al. 2024, section 6 (Figures 4 to 8 in small): B records a step in expectation, from the
same pretrained model, as many steps. Each algorithm stands at the learning rate that is best for it
on held-out records of training users; what is reported is the loss on users that took no part.
Choosing learning rates in this way is not covered by a run's guarantee.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, Study, check_several, flag
from mfopt.experiments.studies.user_means import ELS, ULS
from mfopt.experiments.training import (
    CHOSEN_ON,
    REPORTED,
    TrainingComparison,
    base_task,
    unpack,
)

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel


class Arm(NamedTuple):
    """One algorithm at one budget and ε."""

    epsilon: float
    budget: int
    algorithm: str
    group: int

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.algorithm}, G = {self.group}"


@dataclasses.dataclass(frozen=True)
class TrainingBudgets(Study):
    """Loss of ELS and ULS on held-out users, by ε and records a step."""

    name = "els-uls-training"
    summary = "ELS against ULS: fine-tuning a language model at fixed compute."
    source = "Charles et al. 2024, section 6, Figures 4 to 8 in small"
    default_size = "embedded corpus, 2 layers of width 64, 60 steps, 2 ε, 2 budgets, 24 runs"
    time = "about 7 CPU-minutes, by its first runs"
    full: ClassVar[Mapping[str, Any]] = {
        "epsilons": (1.0, 4.0, 16.0, 64.0),
        "budgets": (64, 256, 1024),
        "groups": (1, 4, 16),
        "els_group": 16,
        "steps": 2000,
        "rates": (1e-4, 3e-4, 1e-3, 3e-3),
        "seeds": (0, 1, 2),
        "length": 128,
        "width": 1024,
        "layers": 24,
        "pretrain_steps": 10_000,
    }
    full_size = "2,000 steps of a 350M-parameter model, 4 ε, 3 budgets"
    needs = "a folder of `mfopt data build` with users' text and a public part, and accelerators"

    data: str = flag("stdlib", "Embedded corpus, or a folder of `mfopt data build`.")
    epsilons: tuple[float, ...] = flag((2.0, 16.0), "ε of the runs.", option="--eps")
    budgets: tuple[int, ...] = flag((16, 64), "Records a step to expect.")
    groups: tuple[int, ...] = flag((1, 4), "G of ULS: records of a user in a step.")
    els_group: int = flag(4, "G of ELS: records kept of each user.")
    delta: float = flag(1e-5, "δ of every statement.")
    steps: int = flag(60, "Steps of a run.")
    rates: tuple[float, ...] = flag((2.5e-4, 1e-3), "Learning rates to choose from (adam).")
    seeds: tuple[int, ...] = flag((0,), "One run for each, pinning its randomness.")
    length: int = flag(64, "Tokens of a record.")
    width: int = flag(64, "Of the model.")
    layers: int = flag(2, "Of the model.")
    pretrain_steps: int = flag(300, "Steps on the public part first.")
    evaluate_records: int = flag(500, "Most held-out records of an evaluation.")

    def check(self) -> Self:
        for name in ("els_group", "steps", "length", "width", "layers", "evaluate_records"):
            _check.integer(name, getattr(self, name))
        for name in ("epsilons", "budgets", "groups", "rates", "seeds"):
            values = getattr(self, name)
            check_several(name, values)
            for value in values:
                if name == "seeds":
                    _check.seed(name, value)
                elif name in ("budgets", "groups"):
                    _check.integer(name, value)
                else:
                    _check.positive(name, value)
        _check.probability("delta", self.delta)
        _check.integer("pretrain_steps", self.pretrain_steps, at_least=0)
        return self

    def arms(self) -> Iterator[Arm]:
        """All of them, in the table's order."""
        for epsilon in self.epsilons:
            for budget in self.budgets:
                yield Arm(float(epsilon), budget, ELS, self.els_group)
                for group in self.groups:
                    yield Arm(float(epsilon), budget, ULS, group)

    def base(self) -> Task:
        """Corpus and pretrained model, shared with the comparison of noises."""
        shared = {f.name for f in dataclasses.fields(TrainingComparison)} & {
            f.name for f in dataclasses.fields(self)
        }
        known = {name: getattr(self, name) for name in shared - {"seeds", "delta"}}
        return base_task(TrainingComparison(**known))

    def run(self, arm: Arm, rate: float, seed: int) -> Task:
        """One training run."""
        return Task.of(
            "study-els-uls",
            (self.base(),),
            **arm._asdict(),
            delta=self.delta,
            steps=self.steps,
            rate=rate,
            seed=seed,
            length=self.length,
            evaluate_records=self.evaluate_records,
        )

    def cells(self) -> Iterable[Task]:
        return [self.run(a, r, s) for s in self.seeds for r in self.rates for a in self.arms()]

    def best(self, found: Mapping[Task, Result], arm: Arm) -> tuple[float, list[dict[str, Any]]]:
        """(learning rate, records of its runs): the least mean loss on held-out records."""

        def records(rate: float) -> list[dict[str, Any]]:
            return [found[self.run(arm, rate, seed)].record for seed in self.seeds]

        rate = min(self.rates, key=lambda r: mean(x["after"][CHOSEN_ON] for x in records(r)))
        return rate, records(rate)

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = []
        for arm in self.arms():
            rate, runs = self.best(found, arm)
            losses = [run["after"][REPORTED] for run in runs]
            rows.append(
                {
                    "algorithm": arm.label,
                    "records_a_step": arm.budget,
                    "loss": mean(losses),
                    "least": min(losses),
                    "largest": max(losses),
                    "deviation": stdev(losses) if len(losses) > 1 else None,
                    "pretrained": runs[0]["before"][REPORTED],
                    "privacy_unit": "user",
                    "adjacency": "add-remove",
                    "sampling": f"Poisson, {runs[0]['sampled']}, {runs[0]['probability']:.4g}",
                    "epsilon": arm.epsilon,
                    "delta": self.delta,
                    "noise_multiplier": runs[0]["noise_multiplier"],
                    "learning_rate": rate,
                    "steps": self.steps,
                    "runs": len(runs),
                }
            )
        return Outcome(
            rows,
            {
                "epsilon": "ε",
                "records_a_step": "B",
                "algorithm": "algorithm",
                "loss": "nats/token",
                "least": "least",
                "largest": "largest",
                "pretrained": "pretrained",
                "learning_rate": "rate",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "noise_multiplier": "σ",
            },
            self._panels(rows),
            f"Fine-tuning at fixed compute, {self.steps} steps, user-level DP, δ = {self.delta:g}",
            self._findings(rows),
        )

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        panels = []
        for budget in self.budgets:
            mine = [row for row in rows if row["records_a_step"] == budget]
            curves = []
            for label in dict.fromkeys(row["algorithm"] for row in mine):
                line = [row for row in mine if row["algorithm"] == label]
                x, y = [r["epsilon"] for r in line], [r["loss"] for r in line]
                low, high = [r["least"] for r in line], [r["largest"] for r in line]
                curves.append(Curve(label, x, y, low, high))
            ends = (min(self.epsilons), max(self.epsilons))
            curves.append(Curve("pretrained, no fine-tuning", ends, (mine[0]["pretrained"],) * 2))
            title, axis = f"{budget} records a step", "user-level ε (log scale)"
            panels.append(Panel(curves, title, axis, "loss on held-out users (nats per token)"))
        return panels

    def _findings(self, rows: list[dict[str, Any]]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            for budget in self.budgets:
                mine = [
                    row
                    for row in rows
                    if row["epsilon"] == epsilon and row["records_a_step"] == budget
                ]
                els, *uls = mine
                least = min(uls, key=lambda row: row["loss"])
                said.append(
                    f"ε = {epsilon:g}, {budget} records a step: {least['algorithm']} ends "
                    f"{_apart(least['loss'], els['loss'])} {els['algorithm']}, and "
                    f"{_apart(least['loss'], least['pretrained'])} the pretrained model "
                    f"(nats per token; {len(self.seeds)} run(s) each)"
                )
        return said


def _apart(one: float, other: float) -> str:
    return f"{abs(one - other):.4f} {'below' if one < other else 'above'}"


def run_budget(
    base: Result,
    *,
    epsilon: float,
    budget: int,
    algorithm: str,
    group: int,
    delta: float,
    steps: int,
    rate: float,
    seed: int,
    length: int,
    evaluate_records: int,
) -> Result:
    """Train once; losses before and after are on record, and what was accounted for.

    Args:
      base: result that holds corpus and pretrained model.
      epsilon: ε of the statement.
      budget: B, records a step to expect where every user has G.
      algorithm: "ELS" or "ULS".
      group: G.
      delta: δ of the statement.
      steps: of the run.
      rate: learning rate of adam.
      seed: pins the random choices.
      length: tokens of a row.
      evaluate_records: records of an evaluation.
    """
    from mfopt.training import metrics
    from mfopt.training.config import TrainConfig
    from mfopt.training.execute import execute
    from mfopt.training.prepare import prepare

    # ELS samples at most G · users records, ULS users with G records each: the same probability
    probability = budget / (group * base.record["users"])
    if probability > 1:
        rule = f"there are {base.record['users']} users, of {group} records each"
        raise _check.reject("budgets", budget, rule, "Take less.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(base, folder)
        corpus = folder / "corpus"
        settings = TrainConfig(
            sampling=f"poisson:probability={probability!r},iterations={steps}",
            algorithm=algorithm.lower(),
            epsilon=epsilon,
            delta=delta,
            records_per_user=group,
            data=str(corpus),
            model=str(folder / "pretrained"),
            output=str(folder / "run"),
            optimizer="adam",
            learning_rate=rate,
            length=length,
            seed=seed,
            tensorboard=False,
            evaluate_every=0,
            evaluate_records=evaluate_records,
            checkpoint_every=10**6,
        )
        prepared = prepare(settings)
        assert prepared.account is not None
        sigma = prepared.account.noise_multiplier
        execute(prepared)
        losses: dict[str, list[float]] = {}
        for row in metrics.read_table(folder / "run" / "evaluation.csv"):
            losses.setdefault(row["part"], []).append(float(row["loss"]))
    return Result(
        {
            "before": {part: values[0] for part, values in losses.items()},
            "after": {part: values[-1] for part, values in losses.items()},
            "noise_multiplier": sigma,
            "probability": probability,
            "sampled": "records" if algorithm == ELS else "users",
        }
    )
