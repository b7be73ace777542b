"""Base of the fine-tuning studies: one base model, runs by the real trainer, and fair choices.

Every run starts from the same model, pretrained on the public part, and stands at the learning rate
that is best for its arm on held-out records of training users; what is reported is the loss on
users that took no part. Choosing learning rates in this way is not covered by a run's guarantee.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, NamedTuple

import numpy as np
from common import Results, Row, Swept
from means import ELS, ULS
from training_runs import CHOSEN_ON, REPORTED, CorpusCell, TrainRunCell

from mfopt.experiments.cache import Result

PLAIN = "not private"
_ALGORITHM = {ELS: "els", ULS: "uls", PLAIN: "none"}
OF_SEEDS = "loss on held-out users\n(nats per token; bands: least to largest)"


class Arm(NamedTuple):
    """One way to train.

    Attributes:
      algorithm: "ELS" (Group Privacy of Chua et al. 2024), "ULS" (User-wise DP-SGD) or "not
        private".
      group: records of a user: kept in all (ELS), in one participation (the others).
      units: expected in a step: records (ELS) or users (the others).
      epsilon: of the statement; None where nothing is private.
      clip_norm: bound on the gradient of a record (ELS) or a user (ULS).
      rank: of adapters; 0 trains all parameters.
    """

    algorithm: str
    group: int
    units: float
    epsilon: float | None
    selection: str = "random"
    clip_norm: float = 1.0
    rank: int = 0

    @property
    def label(self) -> str:
        """Label for tables and plots."""
        return f"{self.algorithm}, G = {self.group}"

    @property
    def records(self) -> float:
        """Expected in a step where every user has ``group``."""
        return self.units * (1 if self.algorithm == ELS else self.group)

    def settings(self, delta: float) -> dict[str, Any]:
        """Of :class:`~mfopt.training.config.TrainConfig`, at this δ where the arm is private."""
        private = {} if self.epsilon is None else {"epsilon": self.epsilon, "delta": delta}
        return private | {
            "algorithm": _ALGORITHM[self.algorithm],
            "records_per_user": self.group,
            "clip_norm": self.clip_norm,
            "lora_rank": self.rank,
            "lora_layers": "attn/c_attn,attn/c_proj,mlp/c_fc,mlp/c_proj",
            "optimizer": "adam",
        }


@dataclasses.dataclass(frozen=True)
class OfText(Swept):
    """A study of runs of the real trainer, judged by held-out records of training users."""

    data: str = "stdlib-code"  # Embedded corpus, or a folder of `mfopt data build`.
    delta: float = 1e-5  # δ of every statement.
    seeds: tuple[int, ...] = (0, 1, 2)  # One run for each, pinning its randomness.
    length: int = 48  # Tokens of a record.
    pretrain_steps: int = 120  # Steps on the public part first.

    def judged(self, result: Result, rate: float) -> float:
        return float(mean(last(result, CHOSEN_ON)))


@dataclasses.dataclass(frozen=True)
class FineTuning(OfText):
    """A study whose arms are :class:`Arm`."""

    # Local Hugging Face folder of a GPT-2 to begin from; none: a new one of these sizes.
    model: str | None = None
    steps: int = 32  # Steps of a run.
    rates: tuple[float, ...] = (0.01,)  # Learning rates to choose from (adam).
    extend: int = 3  # Most rates to add beyond an end of several that is best.
    width: int = 64  # Width of a new model.
    layers: int = 2  # Blocks of a new model.
    evaluate_records: int = 200  # Most held-out records of an evaluation.

    heading: ClassVar[str]  # of the plot
    paper: ClassVar[str] = "125 to 774 million parameters"

    def title(self, rows: list[Row]) -> str:
        trained = f"{self.trained} ({rows[0]['parameters']:,} parameters), {self.steps:,} steps"
        return f"{self.heading}, δ = {self.delta:g}\n{trained}; in the paper: {self.paper}"

    @property
    def trained(self) -> str:
        """The model in words."""
        if self.model is not None:
            return f"GPT-2 of {Path(self.model).name}"
        return f"{self.layers} layers of width {self.width}"

    @functools.cached_property
    def base(self) -> CorpusCell:
        """Corpus and pretrained model, shared with every study of these sizes."""
        names = ("length", "width", "layers", "pretrain_steps")
        sizes = {name: getattr(self, name) for name in names}
        return CorpusCell.at(self.data, model=self.model or "", **sizes)

    def cell_at(self, arm: Arm, rate: float) -> TrainRunCell:
        given = arm.settings(self.delta)
        given |= {name: getattr(self, name) for name in ("length", "evaluate_records")}
        how: Any = {"units": arm.units, "steps": self.steps, "selection": arm.selection}
        return TrainRunCell(self.base, None, tuple(given.items()), rate, self.seeds, **how)

    def rows(self, results: Results) -> list[Row]:
        return [self.row(results, arm) for arm in self.arms()]

    def row(self, results: Results, arm: Arm) -> Row:
        """Row of an arm at its best rate; losses in nats per token."""
        at, result = self.best(results, arm)
        record, losses = result.record, last(result, REPORTED)
        sampled = "records" if arm.algorithm == ELS else "users"
        promised = record["guarantee"] or dict.fromkeys(("privacy_unit", "adjacency"))
        return {
            "algorithm": arm.algorithm,
            "group": arm.group,
            "selection": arm.selection,
            "clip_norm": None if record["guarantee"] is None else arm.clip_norm,
            "rank": arm.rank,
            "parameters": record["parameters"],
            "records_a_step": arm.records,
            "loss": mean(losses),
            "least": min(losses),
            "largest": max(losses),
            "on_records": self.judged(result, at.rate),
            "pretrained": record["runs"][0][REPORTED][0][1],
            "privacy_unit": promised["privacy_unit"],
            "adjacency": promised["adjacency"],
            "sampling": f"Poisson, {sampled}, {record['probability']:.4g}",
            "epsilon": arm.epsilon,
            "delta": None if arm.epsilon is None else self.delta,
            "noise_multiplier": record["noise_multiplier"],
            "learning_rate": at.rate,
            "rate_at_end": at.edge,
            "_losses": np.array(losses),
        }

    def runs_said(self) -> str:
        """The unit of losses, and how many runs there are."""
        return f"nats per token; {len(self.seeds)} run{'s' * (len(self.seeds) > 1)} each"


def last(result: Result, part: str) -> list[float]:
    """Losses of every seed on a held-out part after its run."""
    return [float(run[part][-1][1]) for run in result.record["runs"]]
