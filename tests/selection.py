"""Which cases of one statement are made early, and which wait for the whole check or a release."""

from collections.abc import Sequence
from typing import Any

import pytest


def few(cases: Sequence[Any], *kept: int, others: Any = pytest.mark.ci) -> list[Any]:
    """``cases`` for ``parametrize``: all but those at the indices ``kept`` have mark ``others``."""
    return [
        case
        if index in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=others)
        for index, case in enumerate(cases)
    ]


def before_release(cases: Sequence[Any], *kept: int) -> list[Any]:
    """:func:`few` whose other cases are made before a release only."""
    return few(cases, *kept, others=pytest.mark.release)
