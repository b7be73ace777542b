"""User-wise DP-SGD with a concentration filter (Asi and Liu), and when it adds less noise.

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

from mfopt._runtime import _check
from mfopt.accounting.account import account
from mfopt.mechanism import Mechanism
from mfopt.sampling import FixedOrder, Poisson


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
        share = _check.positive("threshold_over_clip", threshold_over_clip)
        return share * self.filter_noise_per_threshold / self.plain_noise

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
    epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
    users = _check.integer("users", users)
    batch = _check.positive("user_batch", user_batch)
    if batch > users:
        raise _check.reject("user_batch", user_batch, f"there are {users} users")
    sampled = Mechanism(Poisson(batch / users, iterations), privacy_unit="user")
    plain = account(sampled, epsilon=epsilon, delta=delta).noise_multiplier
    full = Mechanism(FixedOrder(bins=1, epochs=iterations), privacy_unit="user")
    filtered = account(full, epsilon=epsilon / 2, delta=delta / 2).noise_multiplier
    log_term = epsilon + math.log(iterations) - math.log(delta)
    noise = math.sqrt(8 * log_term) * filtered / users
    return FilterComparison(plain, filtered, plain / batch, noise)
