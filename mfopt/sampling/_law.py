"""Laws of batch sizes. SciPy's statistics are imported when one is asked for, not with mfopt.

Half a second of start-up otherwise, for commands that never draw a batch.
"""

from __future__ import annotations

from typing import Any


def binomial(count: int, probability: float) -> Any:
    """The binomial law as a frozen distribution of ``scipy.stats``."""
    from scipy import stats

    return stats.binom(count, probability)
