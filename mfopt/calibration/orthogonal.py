"""Modes that never overlap (C = I): δ by convolution, without samples and at any δ.

With G = g·I the likelihood ratio is a mean of independent lognormals, whose profile
:class:`~mfopt.accounting.allocation.AllocationProfile` bounds from above to a few 1e-5 in ε.
"""

from __future__ import annotations

import math

import numpy as np

from mfopt import _check
from mfopt.accounting import solve
from mfopt.accounting.allocation import AllocationProfile
from mfopt.accounting.dominating_pair import DominatingPair

_ROUNDING = 1e-9  # relative: norms that differ by less are one norm, the largest


def squared_norm(pair: DominatingPair) -> float | None:
    """g >= every squared norm of a mode, where the modes are orthogonal and of one length."""
    gram = np.asarray(pair.gram, np.float64)
    own = np.diagonal(gram)
    most = float(own.max())
    overlap = float(np.abs(gram - np.diag(own)).max())
    if overlap > 0 or own.min() < most * (1 - _ROUNDING):
        return None
    return most * (1 + 2.0**-44)  # above what the Gram matrix may have rounded


def log_delta(
    bins: int, squared: float, noise_multiplier: float, epsilon: float
) -> tuple[float, float]:
    """Upper bounds of log H(P, Q) and log H(Q, P) at e^ε for G = ``squared``·I."""
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    profile = AllocationProfile(bins, squared / sigma**2)
    return profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")


def noise_multiplier(bins: int, squared: float, epsilon: float, delta: float) -> float:
    """Smallest σ, to relative 1e-7, at which both bounds are <= δ; it was itself checked.

    Raises:
      UsageError: ε or δ out of range.
    """
    epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)
    target = math.log(delta)
    return solve.smallest(
        lambda sigma: max(log_delta(bins, squared, sigma, epsilon)) - target,
        math.sqrt(squared), name="noise multiplier", relative=1e-7, growth=2.0,
    )  # fmt: skip
