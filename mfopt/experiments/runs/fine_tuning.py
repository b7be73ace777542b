"""One way of fine-tuning, as settings of the trainer."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfopt.experiments.runs.means import ELS, ULS

PLAIN = "not private"
_ALGORITHM = {ELS: "els", ULS: "uls", PLAIN: "none"}


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
    def sampled(self) -> str:
        """What a step samples."""
        return "records" if self.algorithm == ELS else "users"

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
