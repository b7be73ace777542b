"""Laws of batch sizes. SciPy's statistics are imported when one is asked for, not with mfopt.

Half a second of start-up otherwise, for commands that never draw a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def binomial(count: int, probability: float) -> Any:
    """The binomial law as a frozen distribution of ``scipy.stats``."""
    from scipy import stats

    return stats.binom(count, probability)


def binomial_at_most(count: int, probability: float, most: int) -> Any:
    """The law of the smaller of a binomial number and ``most``."""
    from scipy import stats

    most = min(most, count)
    law = stats.binom(count, probability)
    values = np.arange(most + 1)
    chances = np.append(law.pmf(values[:-1]), law.sf(most - 1))
    return stats.rv_discrete(values=(values, chances / chances.sum()))
