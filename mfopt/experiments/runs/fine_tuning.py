"""One run of the fine-tuning studies by the real trainer: an arm at one rate and seed."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.runs.means import ELS, ULS

PLAIN = "not private"


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

    @property
    def together(self) -> int:
        """Records of a user that are protected as a group of sampled units."""
        return self.group if self.algorithm == ELS else 1


@dataclasses.dataclass(frozen=True)
class FineTuningCell(Cell):
    """One run; losses before and after are on record, and what the trainer states.

    ``base`` has the corpus and the pretrained model; the rate is that of adam.
    """

    name = "study-fine-tuning"
    base: Cell
    arm: Arm
    delta: float
    steps: int
    rate: float
    seed: int
    length: int
    evaluate_records: int

    def run(self, *needed: Result) -> Result:
        from mfopt.experiments.runs import repeated

        (base,), arm = needed, self.arm
        # units of ELS are at most ``group`` records of each user: a public number
        population = base.record["users"] * arm.together
        sampled = "records" if arm.algorithm == ELS else "users"
        if arm.units > population:
            users = base.record["users"]
            rule = f"there are {users} users, and so at most {population} {sampled}"
            raise _check.reject("units of a step", arm.units, rule, "Take less, or more data.")
        probability = arm.units / population
        private: dict[str, Any] = {}
        if arm.epsilon is not None:
            private = {"epsilon": arm.epsilon, "delta": self.delta}
        runs = repeated.runs_of(
            {"data": base, "model": base},
            sampling=f"poisson:probability={probability!r},iterations={self.steps}",
            algorithm={ELS: "els", ULS: "uls", PLAIN: "none"}[arm.algorithm],
            records_per_user=arm.group,
            clip_norm=arm.clip_norm,
            lora_rank=arm.rank,
            lora_layers="attn/c_attn,attn/c_proj,mlp/c_fc,mlp/c_proj",
            optimizer="adam",
            schedule="constant",
            length=self.length,
            seed=0,
            evaluate_records=self.evaluate_records,
            **private,
        )
        losses, _ = runs.run(rate=self.rate, seed=self.seed, selection=arm.selection)
        prepared = runs.prepared
        account, guarantee = prepared.account, prepared.guarantee
        return Result(
            {
                "before": {part: rows[0][1] for part, rows in losses.items()},
                "after": {part: rows[-1][1] for part, rows in losses.items()},
                "noise_multiplier": None if account is None else account.noise_multiplier,
                "guarantee": None if guarantee is None else guarantee.describe(),
                "parameters": prepared.model.num_params,
                "probability": probability,
                "sampled": sampled,
            }
        )
