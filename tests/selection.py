"""Which cases of one statement the check makes, and which wait for a release."""

import pytest


def before_release(cases, *kept):
    """``cases`` for ``parametrize``: all but those at the indices ``kept`` are of a release."""
    return [
        case
        if index in kept
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.release
        )
        for index, case in enumerate(cases)
    ]
