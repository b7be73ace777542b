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

from mfopt.experiments.cache import Result
from mfopt.experiments.options import option
from mfopt.experiments.runs import training
from mfopt.experiments.runs.means import ELS, ULS
from mfopt.experiments.runs.training import CHOSEN_ON, REPORTED, check_model, check_parts
from mfopt.experiments.studies.engine import Found, Row, Swept

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

    data: str = option(
        "stdlib-code", "Embedded corpus, or a folder of `mfopt data build`.", rule=check_parts
    )
    delta: float = option(1e-5, "δ of every statement.")
    seeds: tuple[int, ...] = option((0, 1, 2), "One run for each, pinning its randomness.")
    length: int = option(48, "Tokens of a record.")
    pretrain_steps: int = option(120, "Steps on the public part first.", least=0)

    def judged(self, result: Result, rate: float) -> float:
        return float(mean(last(result, CHOSEN_ON)))


@dataclasses.dataclass(frozen=True)
class FineTuning(OfText):
    """A study whose arms are :class:`Arm`."""

    model: str | None = option(
        None,
        "Local Hugging Face folder of a GPT-2 to begin from; none: a new one of these sizes.",
        kind=str,
        rule=check_model,
    )
    steps: int = option(32, "Steps of a run.")
    rates: tuple[float, ...] = option((0.01,), "Learning rates to choose from (adam).")
    extend: int = option(3, "Most rates to add beyond an end of several that is best.", least=0)
    width: int = option(64, "Width of a new model.")
    layers: int = option(2, "Blocks of a new model.")
    evaluate_records: int = option(200, "Most held-out records of an evaluation.")

    scale = "{0.trained} ({1[parameters]:,} parameters), {0.steps:,} steps; in the paper: {0.paper}"
    paper: ClassVar[str] = "125 to 774 million parameters"

    @property
    def trained(self) -> str:
        """The model in words."""
        if self.model is not None:
            return f"GPT-2 of {Path(self.model).name}"
        return f"{self.layers} layers of width {self.width}"

    @functools.cached_property
    def base(self) -> training.CorpusCell:
        """Corpus and pretrained model, shared with every study of these sizes."""
        names = ("length", "width", "layers", "pretrain_steps")
        sizes = {name: getattr(self, name) for name in names}
        return training.CorpusCell.at(self.data, model=self.model or "", **sizes)

    def cell_at(self, arm: Arm, rate: float) -> training.TrainRunCell:
        given = arm.settings(self.delta)
        given |= {name: getattr(self, name) for name in ("length", "evaluate_records")}
        how: Any = {"units": arm.units, "steps": self.steps, "selection": arm.selection}
        return training.TrainRunCell(self.base, None, tuple(given.items()), rate, self.seeds, **how)

    def rows(self, found: Found) -> list[Row]:
        return [self.row(found, arm) for arm in self.arms()]

    def row(self, found: Found, arm: Arm) -> Row:
        """Row of an arm at its best rate; losses in nats per token."""
        at, result = self.best(found, arm)
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
