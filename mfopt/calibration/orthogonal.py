"""Modes that never overlap (C = I): δ by convolution, without samples and at any δ.

With G = g·I the likelihood ratio is a mean of independent lognormals, whose profile
:class:`~mfopt.accounting.loss_distribution.allocation.AllocationProfile` bounds from above to a
few 1e-5 in ε.
"""

from __future__ import annotations

import math

from mfopt import _check
from mfopt.accounting import solve
from mfopt.accounting.loss_distribution.rounds import FINE
from mfopt.accounting.monte_carlo import balls_in_bins


def log_delta(
    bins: int, squared: float, noise_multiplier: float, epsilon: float
) -> tuple[float, float]:
    """Upper bounds of log H(P, Q) and log H(Q, P) at e^ε for G = ``squared``·I."""
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    profile = balls_in_bins.allocation(bins, squared).profile(sigma, FINE)
    return profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")


def noise_multiplier(bins: int, squared: float, epsilon: float, delta: float) -> float:
    """Smallest σ, to relative 1e-7, at which both bounds are <= δ; it was itself checked.

    Raises:
      UsageError: ε or δ out of range.
    """
    epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
    target = math.log(delta)
    return solve.smallest(
        lambda sigma: max(log_delta(bins, squared, sigma, epsilon)) - target,
        balls_in_bins.allocation(bins, squared).guess(epsilon, delta),
        name="noise multiplier", relative=1e-7,
    )  # fmt: skip
