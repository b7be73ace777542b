"""User-wise DP-SGD with a concentration filter (Asi and Liu), and when it adds less noise.

Algorithm 3 of Chua et al. 2024 (appendix A; after Asi and Liu 2024): every step uses all N users,
tests privately whether their averaged gradients lie within τ of each other, removes outliers and
adds noise of standard deviation τ √(8 log(e^ε T/δ)) σ_{ε/2, δ/2} / N, half of the budget being
spent on the tests. Plain user-wise DP-SGD with clip norm C and n users a step adds C σ / n. The
noise scale follows the publication; that the algorithm as a whole is (ε, δ)-DP is its authors'
result, which nothing here proves again.
"""

from __future__ import annotations

import dataclasses
import math

from mfopt._runtime import _check
from mfopt.accounting.account import account
from mfopt.mechanism import Mechanism
from mfopt.sampling import FixedOrder, Poisson


@dataclasses.dataclass(frozen=True)
class FilterComparison:
    """Standard deviations of the noise on the mean gradient, both at the same user-level (ε, δ).

    Attributes:
      plain_noise: C σ / n of user-wise DP-SGD.
      filter_noise_per_threshold: noise of the filtered algorithm over τ.
      clip_norm: C.
      plain_multiplier, filter_multiplier: the σ of either.
    """

    plain_noise: float
    filter_noise_per_threshold: float
    clip_norm: float
    plain_multiplier: float
    filter_multiplier: float

    def ratio(self, threshold_over_clip: float) -> float:
        """Filtered noise over plain noise at τ/C: linear in it."""
        share = _check.positive("threshold_over_clip", threshold_over_clip)
        return share * self.clip_norm * self.filter_noise_per_threshold / self.plain_noise

    @property
    def break_even(self) -> float:
        """τ/C below which the filtered algorithm adds less noise."""
        return 1 / self.ratio(1.0)


def filter_multiplier(epsilon: float, delta: float, iterations: int) -> float:
    """σ of full-batch steps at (ε/2, δ/2): the Gaussian part of Algorithm 3, stage 1."""
    epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
    mechanism = Mechanism(FixedOrder(bins=1, epochs=iterations), privacy_unit="user")
    return account(mechanism, epsilon=epsilon / 2, delta=delta / 2).noise_multiplier


def filter_noise(
    epsilon: float, delta: float, iterations: int, users: int, threshold: float
) -> float:
    """Standard deviation of Algorithm 3's noise on the mean of all ``users``' gradients.

    Args:
      epsilon, delta: the target of the whole algorithm, user level; half of each is left to the
        Gaussian part.
      iterations: T, full-batch steps.
      users: n, all of whom take part in each step.
      threshold: τ, how far apart the gradients of good users may lie, in the units of the
        gradients.
    """
    sigma = filter_multiplier(epsilon, delta, iterations)
    users = _check.integer("users", users)
    threshold = _check.positive("threshold", threshold)
    log_term = epsilon + math.log(iterations) - math.log(delta)
    return threshold * math.sqrt(8 * log_term) * sigma / users


def compare(
    epsilon: float,
    delta: float,
    iterations: int,
    users: int,
    user_batch: float,
    clip_norm: float = 1.0,
) -> FilterComparison:
    """Noise of Algorithm 3 and of user-wise DP-SGD with ``user_batch`` Poisson-sampled users.

    Args:
      epsilon, delta: the target of either algorithm, user level.
      iterations: T, steps of either.
      users: n.
      user_batch: expected number of users in a step of DP-SGD; Algorithm 3 takes all.
      clip_norm: C, most that one user adds to a sum of DP-SGD.
    """
    users = _check.integer("users", users)
    batch = _check.positive("user_batch", user_batch)
    if batch > users:
        raise _check.reject("user_batch", user_batch, f"there are {users} users")
    clip_norm = _check.positive("clip_norm", clip_norm)
    scheme = Poisson(batch / users, iterations)
    plain = account(Mechanism(scheme, privacy_unit="user"), epsilon=epsilon, delta=delta)
    return FilterComparison(
        plain_noise=clip_norm * plain.noise_multiplier / batch,
        filter_noise_per_threshold=filter_noise(epsilon, delta, iterations, users, 1.0),
        clip_norm=clip_norm,
        plain_multiplier=plain.noise_multiplier,
        filter_multiplier=filter_multiplier(epsilon, delta, iterations),
    )
