"""Base of the studies on users' means: their population, their sweep, and the checks of both."""

from __future__ import annotations

import dataclasses

from mfopt._runtime import _check, _sizes
from mfopt.experiments.options import option
from mfopt.experiments.runs.means import MeanTask
from mfopt.experiments.studies.engine import Study


@dataclasses.dataclass(frozen=True)
class MeanStudy(MeanTask, Study):
    """A study whose cells are :class:`~mfopt.experiments.runs.means.Descent`."""

    scale = "{0.users:,} users, {0.dimension} dimensions, {0.steps} steps, {0.trials} trials"

    clips: tuple[float, ...] = option((2.0, 8.0), "Clip norms to choose from.")
    lengths: tuple[float, ...] = option(
        (0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56),
        "Learning rates to choose from, in multiples of the clip norm.",
    )

    def check_together(self) -> None:
        for cell in self.cells():
            _sizes.require("users", self.users, cell.bytes)

    def at_most(self, name: str, owner: str) -> None:
        """Refuse numbers of which a user, or the population, has only so many: ``owner``."""
        value, most = getattr(self, name), getattr(self, owner)
        for each in value if isinstance(value, tuple) else (value,):
            if each > most:
                rule = f"a user has {most} {owner}" if owner == "examples" else f"there are {most}"
                raise _check.reject(name, each, rule, f"Take less, or more `{owner}`.")
