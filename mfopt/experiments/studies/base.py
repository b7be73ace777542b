"""What studies that are no tables yet are made with."""

from __future__ import annotations

import dataclasses
from typing import Any

from mfopt import _check
from mfopt.experiments.plots import Panel
from mfopt.experiments.studies import engine
from mfopt.experiments.studies.engine import PRIVACY as PRIVACY
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.engine import Outcome as Outcome
from mfopt.experiments.studies.engine import check_several as check_several


def flag(default: Any, help: str, *, option: str | None = None, **more: Any) -> Any:
    """An option."""
    return engine.option(default, help, name=option, **more)


@dataclasses.dataclass(frozen=True)
class OldStudy(engine.Study):
    """A study that makes its outcome itself."""

    title = ""

    def rows(self, found: Found) -> list[Row]:
        raise NotImplementedError

    def panels(self, rows: list[Row]) -> list[Panel]:
        raise NotImplementedError

    def findings(self, rows: list[Row]) -> list[str]:
        raise NotImplementedError


Study = OldStudy


def check_number(name: str, value: float) -> None:
    if name in ("epsilon", "epsilons"):
        _check.epsilon(name, value)
    else:
        _check.single(name, value)
