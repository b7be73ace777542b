"""What the fine-tuning studies share: one base model, runs by the real trainer, and fair choices.

Every run starts from the same model, pretrained on the public part, and stands at the learning rate
that is best for its arm on held-out records of training users; what is reported is the loss on
users that took no part. Choosing learning rates in this way is not covered by a run's guarantee.
"""

from __future__ import annotations

import abc
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.packing import packed
from mfopt.experiments.studies.base import Study, check_number, check_several, flag
from mfopt.experiments.studies.image_cells import interval
from mfopt.experiments.studies.rates import ChosenRate, choose
from mfopt.experiments.studies.user_means import ELS, ULS
from mfopt.experiments.training import (
    CHOSEN_ON,
    REPORTED,
    TrainingComparison,
    base_task,
    check_parts,
)

if TYPE_CHECKING:
    from mfopt.experiments.plots import Curve, Panel

PLAIN = "not private"
LOSS_LABEL = "loss on held-out users\n(nats per token)"


class Arm(NamedTuple):
    """One way to train.

    Attributes:
      algorithm: "ELS" (Group Privacy of Chua et al. 2024), "ULS" (User-wise DP-SGD) or "not
        private".
      group: records of a user: kept in all (ELS), in one participation (the others).
      units: expected in a step: records (ELS) or users (the others).
      epsilon: of the statement; None where nothing is private.
      selection: which records of a user.
      clip_norm: bound on the gradient of a record (ELS) or a user (ULS).
      rank: of adapters; 0 trains all parameters.
      users: times as many users as there are, as if for ``epsilon``; what the run, which has fewer,
        holds itself is on record.
    """

    algorithm: str
    group: int
    units: float
    epsilon: float | None
    selection: str = "random"
    clip_norm: float = 1.0
    rank: int = 0
    users: float = 1.0

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.algorithm}, G = {self.group}"

    @property
    def records(self) -> float:
        """Expected in a step where every user has ``group``."""
        return self.units * (1 if self.algorithm == ELS else self.group)


@dataclasses.dataclass(frozen=True)
class FineTuning(Study):
    """A study of runs of the real trainer."""

    data: str = flag("stdlib-code", "Embedded corpus, or a folder of `mfopt data build`.")
    delta: float = flag(1e-5, "δ of every statement.")
    steps: int = flag(32, "Steps of a run.")
    rates: tuple[float, ...] = flag(
        (0.01,), "Learning rates to choose from (adam); 0: fitted to the noise."
    )
    extend: int = flag(3, "Most rates to add beyond an end of several that is best.")
    seeds: tuple[int, ...] = flag((0, 1, 2), "One run for each, pinning its randomness.")
    length: int = flag(48, "Tokens of a record.")
    width: int = flag(64, "Of the model.")
    layers: int = flag(2, "Of the model.")
    pretrain_steps: int = flag(120, "Steps on the public part first.")
    evaluate_records: int = flag(200, "Most held-out records of an evaluation.")

    # what a full size shares: GPT-2 small's width and depth, as the publications' smaller models
    PAPER: ClassVar[Mapping[str, Any]] = {
        "steps": 2000,
        "rates": (1e-4, 3e-4, 1e-3, 3e-3),
        "seeds": (0, 1, 2),
        "length": 128,
        "width": 768,
        "layers": 12,
        "pretrain_steps": 10_000,
        "evaluate_records": 2000,
    }
    keeps: ClassVar[bool] = False  # the trained models too
    needs = "a folder of `mfopt data build` with users' text and a public part, and accelerators"

    @abc.abstractmethod
    def arms(self) -> Iterable[Arm]:
        """All ways to train, in the table's order."""

    def cells(self) -> Iterable[Task]:
        return list(self.runs(self.arms()))

    def check(self) -> Self:
        for name in ("steps", "length", "width", "layers", "evaluate_records"):
            _check.integer(name, getattr(self, name))
        for name in ("rates", "seeds"):
            check_several(name, getattr(self, name))
        for rate in self.rates:
            if _check.non_negative("rates", rate):
                check_number("rates", rate)
        for seed in self.seeds:
            _check.pinned("seeds", seed)
        _check.probability("delta", self.delta)
        for name in ("pretrain_steps", "extend"):
            _check.integer(name, getattr(self, name), at_least=0)
        check_parts(self.data)
        return self

    def _check_numbers(self, *names: str) -> None:
        """Refuse lists that are empty or name a value twice, and what is not as it should be."""
        for name in names:
            values = getattr(self, name)
            check_several(name, values)
            for value in values:
                if isinstance(value, int):
                    _check.integer(name, value)
                else:
                    check_number(name, value)

    def base(self) -> Task:
        """Corpus and pretrained model, shared with every study of these sizes."""
        names = ("data", "length", "width", "layers", "pretrain_steps")
        return base_task(TrainingComparison(**{name: getattr(self, name) for name in names}))

    def more(self, found: Mapping[Task, Result]) -> Iterable[Task]:
        for arm in self.arms():
            rate = self._chosen(found, arm).missing
            if rate is not None:
                yield from (self.run(arm, rate, seed) for seed in self.seeds)

    def run(self, arm: Arm, rate: float, seed: int) -> Task:
        """One training run.

        Args:
          arm: what is run.
          rate: learning rate of adam.
          seed: pins the random choices.
        """
        return Task.of(
            "study-fine-tuning",
            (self.base(),),
            **arm._asdict(),
            delta=self.delta,
            steps=self.steps,
            rate=rate,
            seed=seed,
            length=self.length,
            evaluate_records=self.evaluate_records,
            **({"keep": True} if self.keeps else {}),
        )

    def runs(self, arms: Iterable[Arm]) -> Iterator[Task]:
        """All runs of some arms."""
        for arm in arms:
            for rate in self.rates:
                for seed in self.seeds:
                    yield self.run(arm, rate, seed)

    def _chosen(self, found: Mapping[Task, Result], arm: Arm) -> ChosenRate:
        """The arm's rate: the least mean loss on held-out records."""

        def loss(rate: float) -> float | None:
            runs = [found.get(self.run(arm, rate, seed)) for seed in self.seeds]
            losses = [run.record["after"][CHOSEN_ON] for run in runs if run is not None]
            return mean(losses) if len(losses) == len(runs) else None

        return choose(self.rates, loss, most=self.extend)

    def best(self, found: Mapping[Task, Result], arm: Arm) -> tuple[float, list[dict[str, Any]]]:
        """(learning rate, records of its runs): the least mean loss on held-out records.

        Args:
          found: results of the cells.
          arm: whose.
        """
        rate = self._chosen(found, arm).rate
        return rate, [found[self.run(arm, rate, seed)].record for seed in self.seeds]

    def losses(self, found: Mapping[Task, Result], arm: Arm) -> np.ndarray:
        """On held-out users at the arm's best rate, by seed, in nats per token."""
        return np.array([run["after"][REPORTED] for run in self.best(found, arm)[1]])

    def row(self, found: Mapping[Task, Result], arm: Arm) -> dict[str, Any]:
        """What every such study says of an arm at its best rate; losses in nats per token.

        Args:
          found: results of the cells.
          arm: whose.
        """
        rate, runs = self.best(found, arm)
        losses = [run["after"][REPORTED] for run in runs]
        first = runs[0]
        promised = first["guarantee"] or dict.fromkeys(("privacy_unit", "adjacency"))
        return {
            "algorithm": arm.algorithm,
            "group": arm.group,
            "selection": arm.selection,
            "clip_norm": None if first["guarantee"] is None else arm.clip_norm,
            "rank": arm.rank,
            "parameters": first["parameters"],
            "records_a_step": arm.records,
            "loss": mean(losses),
            "least": min(losses),
            "largest": max(losses),
            "deviation": stdev(losses) if len(losses) > 1 else None,
            "perplexity": float(np.exp(mean(losses))),
            "on_records": mean(run["after"][CHOSEN_ON] for run in runs),
            "pretrained": first["before"][REPORTED],
            "privacy_unit": promised["privacy_unit"],
            "adjacency": promised["adjacency"],
            "sampling": f"Poisson, {first['sampled']}, {first['probability']:.4g}",
            "epsilon": arm.epsilon if arm.users == 1 else promised["epsilon"],
            "delta": None if arm.epsilon is None else self.delta,
            "noise_multiplier": first["noise_multiplier"],
            "learning_rate": rate or first["learning_rate"],
            "rate_bracketed": len(self.rates) > 1 and not self._chosen(found, arm).edge,
            "steps": self.steps,
            "runs": len(runs),
        }

    def _ends(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """A warning where a best rate is an end of those tried."""
        ends = [row for row in rows if not row["rate_bracketed"]]
        if not ends or len(self.rates) == 1:
            return []
        return [f"{len(ends)} of {len(rows)} best rates are an end of those tried"]

    def _runs_said(self) -> str:
        return f"nats per token; {len(self.seeds)} run{'s' * (len(self.seeds) > 1)} each"


def curve(label: str, x: str, rows: Sequence[dict[str, Any]], like: str | None = None) -> Curve:
    """Mean loss of rows over one of their columns, with the least and the largest of the runs.

    Args:
      label: in the legend.
      x: name of the column.
      rows: one a point.
      like: label of the curve whose colour this one shares.
    """
    from mfopt.experiments.plots import Curve

    rows = sorted(rows, key=lambda row: row[x])
    y, low, high = ([row[name] for row in rows] for name in ("loss", "least", "largest"))
    return Curve(label, [row[x] for row in rows], y, low, high, like)


def alike(panels: list[Panel]) -> list[Panel]:
    """The panels with one range of losses, so that they can be compared by eye."""
    drawn = [curve for panel in panels for curve in panel.curves]
    values = [y for c in drawn for line in (c.y, c.low, c.high) if line is not None for y in line]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    return [p._replace(y_range=(min(values) - margin, max(values) + margin)) for p in panels]


def apart(one: np.ndarray | float, other: np.ndarray | float) -> str:
    """How far losses lie below or above others, in words: of several, paired, with 95% of the mean.

    >>> apart(2.0, 2.5), apart(np.array([2.5, 2.7]), np.array([2.0, 2.2]))
    ('0.5000 below', '0.5000 ± 0.0000 above')
    """
    gaps = np.atleast_1d(np.subtract(one, other))
    about = f" ± {interval(gaps)[1]:.4f}" if len(gaps) > 1 else ""
    return f"{abs(gaps.mean()):.4f}{about} {'below' if gaps.mean() < 0 else 'above'}"


def _held(
    probability: float, users: float, steps: int, group: int, epsilon: float, delta: float
) -> float:
    """ε of what is run at the σ that ``epsilon`` asks for with ``users`` times as many users."""
    from mfopt.accounting import Mechanism, account
    from mfopt.sampling import Poisson
    from mfopt.strategies import Identity

    fewer, there = (
        Mechanism(Poisson(p, steps), Identity(), group_size=group)
        for p in (probability / users, probability)
    )
    sigma = account(fewer, epsilon=epsilon, delta=delta).noise_multiplier
    return account(there, noise_multiplier=sigma, delta=delta).epsilon


def run_fine_tuning(
    base: Result,
    *,
    algorithm: str,
    group: int,
    units: float,
    epsilon: float | None,
    selection: str,
    clip_norm: float,
    rank: int,
    users: float = 1.0,
    delta: float,
    steps: int,
    rate: float,
    seed: int,
    length: int,
    evaluate_records: int,
    keep: bool = False,
) -> Result:
    """Train once; losses before and after are on record, and what the trainer states.

    Args:
      base: result that holds corpus and pretrained model.
      algorithm, group, units, epsilon, selection, clip_norm, rank, users: of :class:`Arm`.
      delta: δ of the statement.
      steps: of the run.
      rate: learning rate of adam; 0: fitted to the noise.
      seed: pins the random choices.
      length: tokens of a row.
      evaluate_records: records of an evaluation.
      keep: the trained model too, as files.
    """
    from mfopt.experiments import repeated

    # units of ELS are at most ``group`` records of each user: a public number
    population = base.record["users"] * (group if algorithm == ELS else 1)
    if units > population:
        what = "records" if algorithm == ELS else "users"
        rule = f"there are {base.record['users']} users, and so at most {population} {what}"
        raise _check.reject("units of a step", units, rule, "Take less, or more data.")
    probability = units / population
    if epsilon is not None and users != 1:
        epsilon = _held(probability, users, steps, group if algorithm == ELS else 1, epsilon, delta)
    names = {ELS: "els", ULS: "uls", PLAIN: "none"}
    private: dict[str, Any] = {} if epsilon is None else {"epsilon": epsilon, "delta": delta}
    runs = repeated.runs_of(
        {"data": base, "model": base},
        sampling=f"poisson:probability={probability!r},iterations={steps}",
        algorithm=names[algorithm],
        records_per_user=group,
        clip_norm=clip_norm,
        lora_rank=rank,
        lora_layers="attn/c_attn,attn/c_proj,mlp/c_fc,mlp/c_proj",
        optimizer="adam",
        schedule="constant",
        length=length,
        seed=0,
        evaluate_records=evaluate_records,
        **private,
    )
    trained = runs.run(rate=rate, seed=seed, selection=selection)
    arrays = {}
    if keep:
        with tempfile.TemporaryDirectory() as name:
            arrays = packed(runs.export(trained.params, Path(name) / "model"), "model")
    prepared = runs.prepared
    account, guarantee = prepared.account, prepared.guarantee
    return Result(
        {
            "before": trained.first(),
            "after": trained.last(),
            "noise_multiplier": None if account is None else account.noise_multiplier,
            "guarantee": None if guarantee is None else guarantee.describe(),
            "learning_rate": trained.rate,
            "parameters": prepared.model.num_params,
            "probability": probability,
            "sampled": "records" if algorithm == ELS else "users",
        },
        arrays,
    )
