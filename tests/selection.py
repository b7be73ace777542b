"""Which cases of one statement each `pytest` makes, and which wait for the whole check."""

from collections.abc import Sequence
from typing import Any

import pytest


def few(cases: Sequence[Any], *kept: int) -> list[Any]:
    """``cases`` for ``parametrize``: all but those at the indices ``kept`` are marked ``ci``."""
    return [
        case
        if index in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.ci)
        for index, case in enumerate(cases)
    ]
