"""Upper tail of values whose logarithm is a concave function of Gaussian noise.

Adding a unit is sampled by "mean" of :mod:`.importance`: at X ~ N(−t m̄, I) the value

    log f = t <m̄, X> + t²ρ/2 + log δ₂(ε + Y),    Y = log E_k e^(<m_k, X> − |m_k|²/2).

Its ceiling by Jensen may be thousands of times its mean. So values are cut off at a lower B, and
what is above it is bounded apart: E f = E min(f, B) + E (f − B)₊.

**f is log-concave.** Y is convex in X, and log δ₂ decreases and is concave: of the hockey-stick
payoff (1 − e^u)₊, and of its convolution with a normal density (Prékopa 1973), which is what a
Gaussian release beside it makes of it. So log δ₂(ε + Y) is concave, and so is log f, which has a
linear function of X more. (Nothing is known of other payoffs: with them nothing is cut off.)

**The tail.** The sets {log f >= l} are convex, and a convex combination of two of them lies in that
of the combined level. X is Gaussian, so by Ehrhard's inequality (1983) ψ(l) = Φ⁻¹(P(log f >= l)) is
concave: from a level on it is at most the line through any upper bound u of it there and any lower
bound v of it at a *farther* one, which is lower. Both are read off the same samples as the mean:
shares of points at a level or above are iid numbers in [0, 1], sample by sample, which Hoeffding's
bound by relative entropy (1963, inequality 2.1) covers. With κ > 0 what the line falls by, near <=
log B and a = u − κ (log B − near),

    E (f − B)₊ = ∫_{l > log B} e^l P(log f >= l) dl <= ∫_{l > log B} e^l Φ(a − κ (l − log B)) dl
               = B E (e^((a − Z)/κ) − 1)₊ = B (e^(τa + τ²/2) Φ(a + τ) − Φ(a)),               (1)

Z ~ N(0, 1) and τ = 1/κ.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import scipy

from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.betting import COARSE, ROUNDING

STEP, LEVELS = 0.25, 32  # of log f, from log B downwards: what shares are counted of
_BLUR = 1e-6  # of log f: more than its rounding, with what payoffs are rounded up by
_SPARE = 1.4  # B over that at which the best bet is 1: a lower one gains no samples


class Cut(NamedTuple):
    """Where values are cut off, and the levels that the tail above is bounded by.

    Attributes:
      below: log of the proven ceiling over B; nothing is cut off at 0.
      near, far: levels, in steps below log B; 0 where they are yet to be chosen.
    """

    below: float = 0.0
    near: int = 0
    far: int = 0

    def above(self, shares: np.ndarray, samples: int, beta: float) -> float:
        """Upper bound of E (f − B)₊/B, except with probability β; infinite where none is shown.

        Args:
          shares: average of points at each level or above, shape (:data:`LEVELS`,).
          samples, beta: how many samples these are of, or will be, and β.
        """
        if self.below <= 0:
            return 0.0
        near, far = (float(shares[level]) for level in (self.near, self.far))
        # the rounding of uniforms may move a share as it may move a mean
        at_near = scipy.special.ndtri(largest_mean(near, samples, beta / 2) + COARSE)
        at_far = scipy.special.ndtri(1 - largest_mean(1 - far, samples, beta / 2) - COARSE)
        fall = (at_far - at_near) / (STEP * (self.far - self.near) + 2 * _BLUR)
        if not (fall > 0 and self.near > 0):
            return math.inf
        at_cut = at_near - fall * (STEP * self.near - _BLUR)
        tau = 1 / fall
        raised = tau * at_cut + tau**2 / 2 + scipy.special.log_ndtr(at_cut + tau)
        # upwards by more than the rounding of a difference
        return float(math.exp(min(raised, 700.0)) * (1 + ROUNDING) - scipy.special.ndtr(at_cut))

    def placed(self, shares: np.ndarray, drawn: int, samples: int, beta: float) -> Cut:
        """The same with the levels that should show least above it.

        Args:
          shares, drawn: of a pilot, and its samples.
          samples, beta: of the bound.
        """
        pairs = itertools.combinations(range(1, LEVELS), 2)
        cuts = [self._replace(near=near, far=far) for near, far in pairs]
        # between both numbers: shares of a pilot are less certain than those of the bound
        middle = math.isqrt(drawn * samples)
        return min(cuts, key=lambda cut: cut.above(shares, middle, beta))


WHOLE = Cut()


def log_cut(square: float, samples: int, beta: float) -> float:
    """log B for values of this mean square, so many samples and β."""
    return math.log(_SPARE) + math.log(-samples * square / (2 * math.log(beta))) / 2


@functools.lru_cache(maxsize=1024)  # of the same shares all pairs are tried
def largest_mean(average: float, samples: int, beta: float) -> float:
    """Upper bound of the mean of iid numbers in [0, 1], except with probability β."""
    reach = -math.log(beta) / samples

    def excess(mean: float) -> float:
        cross = scipy.special.xlogy(average, mean) + scipy.special.xlog1py(1 - average, -mean)
        own = -scipy.special.entr(average) - scipy.special.entr(1 - average)
        return float(own - cross) - reach

    if not average < 1 or not excess(1 - 2.0**-53) > 0:
        return 1.0
    return solve.root(excess, max(average, 2.0**-1000), 1 - 2.0**-53)
