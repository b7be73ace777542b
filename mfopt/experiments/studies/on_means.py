"""What the studies on users' means share: their population, their sweep, and the checks of both."""

from __future__ import annotations

import dataclasses
from typing import Self

from mfopt import _check
from mfopt.experiments.studies.base import Study, check_number, check_several, flag
from mfopt.experiments.studies.user_means import check_trials


@dataclasses.dataclass(frozen=True)
class MeanStudy(Study):
    """A study that descends to a mean; :class:`.user_means.Descent` says what each setting is."""

    delta: float = flag(1e-6, "δ of every statement.")
    users: int = flag(256, "Users N.")
    examples: int = flag(16, "Examples K of each user.")
    dimension: int = flag(32, "Coordinates d.")
    steps: int = flag(256, "Steps T.")
    trials: int = flag(64, "Independent trials, an even number.")
    clips: tuple[float, ...] = flag((2.0, 8.0), "Clip norms to choose from.")
    lengths: tuple[float, ...] = flag(
        (0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56),
        "Learning rates to choose from, each times the clip norm.",
    )
    seed: int = flag(0, "Pin the randomness of data, batches and noise.")

    def check(self) -> Self:
        for name in ("users", "examples", "dimension", "steps"):
            _check.integer(name, getattr(self, name))
        self._check_positive("clips", "lengths")
        _check.probability("delta", self.delta)
        _check.pinned("seed", self.seed)
        check_trials(self.trials)
        return self

    def _check_positive(self, *names: str) -> None:
        """Refuse fields that are not positive, and lists that are empty or have one value twice."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, tuple):
                check_several(name, value)
            for each in value if isinstance(value, tuple) else (value,):
                check_number(name, each)

    def _check_at_most(self, name: str, most: int, owner: str) -> None:
        """Refuse numbers of which a user, or the population, has only ``most`` ``owner``."""
        value = getattr(self, name)
        for each in value if isinstance(value, tuple) else (value,):
            if _check.integer(name, each) > most:
                rule = f"a user has {most} {owner}" if owner == "examples" else f"there are {most}"
                raise _check.reject(name, each, rule, f"Take less, or more `{owner}`.")
