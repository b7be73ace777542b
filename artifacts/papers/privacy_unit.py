"""Chua et al. 2024: "Mind the privacy unit!", noise with and without the concentration filter.

The publication does not print the number of users, batch and iterations behind its figures. Here:
N = 10,000 users, 1,024 records a step (1,024/k users of k records each), 1,000 steps, δ = 1e-5,
add-remove adjacency of one user. The noise is the standard deviation on the mean gradient.

Algorithm 3 of Chua et al. 2024 (appendix A; after Asi and Liu 2024): every step uses all N users,
tests privately whether their averaged gradients lie within τ of each other, removes outliers and
adds noise of standard deviation τ √(8 log(e^ε T/δ)) σ_{ε/2, δ/2} / N, half of the budget being
spent on the tests. Plain user-wise DP-SGD with clip norm C and n users a step adds C σ / n. The
noise scale follows the publication; that the algorithm as a whole is (ε, δ)-DP is its authors'
result, which nothing here proves again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from common import Builder, Drawing, Run, figures, main

from mfopt.accounting import Mechanism, account
from mfopt.experiments.plots import Curve, Panel
from mfopt.sampling import FixedOrder, Poisson

USERS, RECORDS, STEPS, DELTA = 10_000, 1024, 1000, 1e-5
PER_USER = (2, 5, 10, 20)
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class FilterComparison(NamedTuple):
    """Standard deviations of the noise on the mean gradient, both at the same user-level (ε, δ).

    Attributes:
      plain_multiplier: σ of user-wise DP-SGD.
      filter_multiplier: σ of full-batch steps at (ε/2, δ/2).
      plain_noise: of user-wise DP-SGD over C: σ / n.
      filter_noise_per_threshold: of the filtered algorithm over τ.
    """

    plain_multiplier: float
    filter_multiplier: float
    plain_noise: float
    filter_noise_per_threshold: float

    def ratio(self, threshold_over_clip: float) -> float:
        """Filtered noise over plain noise at τ/C: linear in it."""
        return threshold_over_clip * self.filter_noise_per_threshold / self.plain_noise

    @property
    def break_even(self) -> float:
        """τ/C below which the filtered algorithm adds less noise."""
        return 1 / self.ratio(1.0)


def compare(
    epsilon: float, delta: float, iterations: int, users: int, user_batch: float
) -> FilterComparison:
    """Noise of Algorithm 3 and of user-wise DP-SGD with ``user_batch`` Poisson-sampled users.

    Args:
      epsilon, delta: the target of either algorithm, user level.
      iterations: T, steps of either.
      users: N, all of whom take part in each step of Algorithm 3.
      user_batch: expected number of users in a step of DP-SGD.
    """
    sampled = Mechanism(Poisson(user_batch / users, iterations), privacy_unit="user")
    plain = account(sampled, epsilon=epsilon, delta=delta).noise_multiplier
    full = Mechanism(FixedOrder(bins=1, epochs=iterations), privacy_unit="user")
    filtered = account(full, epsilon=epsilon / 2, delta=delta / 2).noise_multiplier
    log_term = epsilon + math.log(iterations) - math.log(delta)
    noise = math.sqrt(8 * log_term) * filtered / users
    return FilterComparison(plain, filtered, plain / user_batch, noise)


def noise(*epsilons: float) -> Builder:
    """Figures 3 and 7: the filter's noise grows with τ, that of user-wise DP-SGD does not."""

    def build(run: Run) -> Drawing:
        panels = []
        for epsilon in epsilons:
            results = {k: compare(epsilon, DELTA, STEPS, USERS, RECORDS / k) for k in PER_USER}
            # the filter uses all users in each step, whatever k is: one curve
            slope = results[PER_USER[0]].filter_noise_per_threshold
            curves = [Curve("with filter (all users)", THRESHOLDS, [slope * t for t in THRESHOLDS])]
            for k in PER_USER:
                label = f"user-wise DP-SGD, k = {k} records per user"
                curves.append(Curve(label, THRESHOLDS, [results[k].plain_noise] * len(THRESHOLDS)))
            axis = "concentration over clip norm, τ/C (log scale)"
            label = "noise on the mean gradient\n(clip norms, log scale)"
            panels.append(Panel(curves, f"ε = {epsilon:g}", axis, label, log_y=True))
        title = f"{USERS:,} users, {RECORDS:,} records a step, {STEPS:,} steps, δ = {DELTA:g}"
        return Drawing(panels, title)

    return build


FIGURES = figures({"privacy-unit-3": noise(3.0), "privacy-unit-7": noise(1.0, 3.0, 8.0)})


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
