"""Balls-in-bins with orthogonal modes (C = I): one unit, exactly and without sampling.

With b orthogonal modes of squared norm g (in units of σ²) the likelihood ratio is a mean of
independent lognormals, Λ = P/Q = (1/b) Σ_i X_i, X_i = e^{√g z_i - g/2} with z_i ~ N(0, 1) under Q:

    H_{e^ε}(P, Q) = E_Q (Λ - e^ε)₊    and    H_{e^ε}(Q, P) = E_Q (1 - e^ε Λ)₊.

Both are expectations of a convex function of Λ, so replacing each X_i by a variable on a grid
with the same mean in each cell can only raise them. The sum of b such variables is a convolution,
done by FFT after exponential tilting to the threshold. One epoch of it is the random allocation
of Feldman and Shenfeld 2025; E epochs that repeat the assignment have g = E/σ².
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import scipy
from numpy.typing import ArrayLike

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.closed_form.linear import RESOLVED, NearlyLinear
from mfopt.accounting.loss_distribution import Composition, LossDistribution, distribution
from mfopt.accounting.loss_distribution.convolution import ComposedLosses
from mfopt.accounting.loss_distribution.grid import near
from mfopt.accounting.loss_distribution.rounds import FINE
from mfopt.accounting.loss_distribution.tilting import LOG_WINDOW_TAIL
from mfopt.accounting.profile import Direction, Profile
from mfopt.errors import FailureError

_MOST_CELLS = 1 << 21
_FAINT = 1e-290  # masses below it are no longer accurate
_FARTHEST = 38.0  # standard deviations of log X, beyond which its mass is fainter
_ROUNDING = 1e-14  # of the threshold: no grid is finer
_SLACK = 2e-15  # of the threshold: rounding of X, of its mean in a cell, and of sums of points
_SUMMED = 4 * float(np.finfo(np.float64).eps)  # relative, of a sum, for each point of its window
_LARGEST = 300.0  # up to here by convolution; beyond it the largest X alone decides


@dataclasses.dataclass(frozen=True)
class AllocationProfile(Profile):
    """Privacy profile of one unit in one of ``bins`` orthogonal modes;
    values are upper bounds unless they are called below.

    Attributes:
      bins, gram: b, and g = |m_i|²/σ², the same for all modes.
      accuracy: aimed-at relative error of ε.
    """

    bins: int
    gram: float
    accuracy: float = FINE

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε) for ε >= 0, the larger of both directions unless one is named."""
        epsilon = _check.non_negative("epsilon", epsilon)
        if self.bins == 1:  # every unit in the one bin: the Gaussian mechanism
            return gaussian.log_delta(math.sqrt(self.gram), epsilon)
        if epsilon > _LARGEST and direction is not None:
            return self._far(epsilon) if direction == "remove" else self._add_ceiling(epsilon)
        linear = self._linear.log_delta(epsilon)
        if self._linear.tight(epsilon) or self._linear.deviation < RESOLVED:
            return linear
        if direction is None:
            remove = self.log_delta(epsilon, "remove")
            if min(self._add_ceiling(epsilon), linear) <= remove:
                return remove
            return max(remove, self.log_delta(epsilon, "add"))
        return min(self._log_bound(epsilon, direction), linear)

    def _log_bound(self, epsilon: float, direction: Direction, *, below: bool = False) -> float:
        """Upper bound of log δ(ε) in one direction by the sum of all X; a lower one, ``below``."""
        composed, threshold = self._composed(epsilon, direction, below=below)
        if composed is None:  # add direction: no X is so small
            return -math.inf
        moved = threshold + (_SLACK if below else -_SLACK) * abs(threshold)
        inside, rounding, lost = map(float, log_excess(composed, np.array([moved]))[:, 0])
        allowance = summed_allowance(composed)
        if below:
            wrapped = math.log1p(2 * math.exp(-LOG_WINDOW_TAIL) / composed.rounding)
            left = -math.expm1(min(rounding + wrapped - inside, 0.0)) if inside > rounding else 0.0
            value = inside + math.log(left) - allowance if left > 0 else -math.inf
        else:
            value = float(np.logaddexp.reduce([inside, rounding, lost])) + allowance
        value -= math.log(self.bins)
        if direction == "add":
            return value + epsilon
        tail, error = self.beyond(math.log(self.bins) + epsilon, epsilon)
        # with any X whose mass is left out as faint: E[ΣX/b; one is] <= E[X; X is] + b Pr(X is)
        tail += -error if below else error + _MOST_CELLS * _FAINT * (threshold + self.bins)
        return float(np.logaddexp(value, math.log(tail))) if tail > 0 else value

    def log_delta_below(self, epsilon: float) -> float:
        """Lower bound of log δ(ε), ε >= 0, of both directions."""
        epsilon = _check.non_negative("epsilon", epsilon)
        if self.bins == 1:
            return gaussian.GaussianProfile(math.sqrt(self.gram)).log_delta_below(epsilon)
        if epsilon > _LARGEST:  # what the other bins add can only raise the ratio
            return gaussian.log_delta(math.sqrt(self.gram), epsilon + math.log(self.bins)) - 1e-10
        lower = self._linear.log_delta_below(epsilon)
        if self._linear.tight(epsilon) or self._linear.deviation < RESOLVED:
            return lower
        remove = self._log_bound(epsilon, "remove", below=True)
        add = self._log_bound(epsilon, "add", below=True)
        return min(max(lower, remove, add), 0.0)

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        """Lower bound of the smallest ε >= 0 with δ(ε) <= ``delta``; ``estimate`` is near it."""
        target = math.log(_check.probability("delta", delta))
        upper = self.epsilon(delta) if estimate is None else estimate
        if upper <= 1 and (linear := self._linear.epsilon_below(target)) >= upper * (1 - 1e-4):
            return min(linear, upper)
        for share in (3e-5, 1e-4, 4e-4, 1e-3, 1e-2, 0.1):
            if self.log_delta_below(upper * (1 - share)) > target:
                return upper * (1 - share)
        return 0.0

    @property
    def _linear(self) -> NearlyLinear:
        return NearlyLinear.of_rounds([(1, *linear_part(self.bins, self.gram))])

    def _composed(
        self, epsilon: float, direction: Direction, *, below: bool = False
    ) -> tuple[ComposedLosses | None, float]:
        """The law of the sum of all X (remove) or -X (add), if there is one, and the threshold."""
        for coarser in (1, 8, 64, 512):
            total, tilt, threshold = self._sum(epsilon, direction, coarser, below=below)
            if total is None:
                return None, threshold
            try:
                return total.convolve(tilt), threshold
            except FailureError:  # too wide a window: the grid adds to it, and bins do
                continue
        raise FailureError(
            f"no grid that is affordable covers the losses of {self.bins} bins at "
            f"σ = {1 / math.sqrt(self.gram):g} norms of a mode; use more noise"
        )

    def _sum(
        self, epsilon: float, direction: Direction, coarser: int, *, below: bool
    ) -> tuple[Composition | None, float, float]:
        """The sum of all X (remove) or -X (add) on a grid, its saddle point, and the threshold.

        The finest grid is ``coarser`` by that factor; ``below`` asks for a lower bound.
        """
        sign = 1.0 if direction == "remove" else -1.0
        threshold = self.bins * math.exp(sign * epsilon)
        low, high = self._reach(threshold)
        finest = max(4 * coarser * (high - low) / _MOST_CELLS, _ROUNDING * threshold)
        step = max((high - low) / 64, finest)
        for _ in range(4):
            summand = self._one(threshold, step, direction, below)
            if summand.mass.size == 0:
                return None, 0.0, sign * threshold
            total = Composition(((summand, self.bins),))
            tilt = total.tilt_for_epsilon(sign * threshold)
            deviation = math.sqrt(max(total.tilted_moments(tilt)[1], 0.0))
            allowed = self._step(tilt, max(deviation, step), threshold, epsilon)
            # from below the grid near X = 0, where most X are, can only round down
            allowed = max(min(allowed, threshold / 64) / (16 if below else 1), finest)
            if step <= 1.1 * allowed:
                break
            step = allowed
        return total, tilt, sign * threshold

    def epsilon(self, delta: float) -> float:
        """Smallest ε >= 0, to relative 1e-7, whose δ as computed is at most ``delta``."""
        target = math.log(_check.probability("delta", delta))
        if self.log_delta(0.0) <= target:
            return 0.0
        smallest = functools.partial(
            solve.smallest, lambda epsilon: self.log_delta(epsilon) - target, name="epsilon"
        )
        if self.log_delta(_LARGEST) > target:
            known_bin, low = gaussian.epsilon(math.sqrt(self.gram), delta), _LARGEST * (1 + 1e-9)
            start = known_bin - math.log(self.bins)
            return smallest(start, relative=1e-9, least=low, largest=2 * known_bin, growth=1.001)
        return smallest(1.0, relative=1e-7, least=1e-12, largest=_LARGEST)

    def _add_ceiling(self, epsilon: float) -> float:
        """log of a bound on H_{e^ε}(Q, P): by Jensen, log Λ is at least the mean exponent."""
        half, square = self.gram / 2, self.gram / self.bins
        t = min(max((epsilon - half) / square, 0.0), 1e150)  # any t >= 0 gives a bound
        peak = float(scipy.special.xlogy(t, t) - scipy.special.xlog1py(1 + t, t))
        return min(-t * (epsilon - half) + 0.5 * t**2 * square + peak, 0.0)

    def _step(self, tilt: float, deviation: float, threshold: float, epsilon: float) -> float:
        """Grid spacing h for a sum with saddle point ``tilt`` and that standard deviation there.

        The grid adds at most h²/4 to the variance of each X, which raises ε by
        b · slope · h² / (8 threshold), where the law falls with rate ``slope`` at the threshold.
        Near ε = 0 it raises the sum's variance by b · h²/4.
        """
        slope = max(tilt, 1 / deviation)
        allowed = 8 * self.accuracy * max(epsilon, 1e-3) * threshold / (self.bins * slope)
        by_variance = 4 * near(self.accuracy, tilt * deviation) * deviation**2 / self.bins
        return math.sqrt(min(allowed, by_variance))

    def _reach(self, threshold: float) -> tuple[float, float]:
        """Ends of the X up to the threshold that have mass under P or Q: floats know no others."""
        spread = _FARTHEST * math.sqrt(self.gram)
        low = math.exp(-min(spread + self.gram / 2, 700.0))
        return min(low, threshold), min(math.exp(min(spread + self.gram / 2, 700.0)), threshold)

    def _far(self, epsilon: float) -> float:
        """log of a bound on H_{e^ε}(P, Q) at large ε: one X reaches b e^ε almost by itself.

        With S the sum of the other X, X + S > b e^ε needs X > b e^ε (1 - η) unless S > b e^ε η,
        which has probability at most (b - 1)/(b e^ε η) (Markov); what is left is one Gaussian
        mechanism at ε + log b.
        """
        log_eta = -30.0
        threshold = epsilon + math.log(self.bins) + math.log1p(-math.exp(log_eta))
        alone_delta = gaussian.log_delta(math.sqrt(self.gram), threshold)
        return min(float(np.logaddexp(alone_delta, -epsilon - log_eta)), 0.0)

    def _one(
        self, threshold: float, step: float, direction: Direction, below: bool
    ) -> LossDistribution:
        """X (remove) or -X (add) on a grid that ends at the threshold; larger X are left out.

        For the add direction they contribute nothing; for remove see :meth:`beyond`. Convex
        functions of the sum are raised, or lowered (``below``).
        """
        n = math.ceil(threshold / step)
        step = threshold / n
        low, high = self._reach(threshold)
        lowest, highest = math.floor(low / step), min(math.ceil(high / step), n)
        # beyond those X one cell on either side
        ends = [0] * (lowest > 0), np.arange(lowest, highest + 1), [n] * (highest < n)
        point = np.concatenate(ends).astype(np.int64)
        x = step * point
        width = np.diff(x)
        root = math.sqrt(self.gram)
        with np.errstate(divide="ignore"):
            z = (np.log(x) + self.gram / 2) / root
        mass = distribution.normal_masses(z)
        mean = distribution.normal_masses(z - root)  # E_Q[X; cell]: the law under P
        share = np.clip((mean - x[:-1] * mass) / width, 0.0, mass)  # above the lower grid point
        upper = share
        if below:
            # each X is replaced by a mean over cells, which is a grid point; see from_below
            excess, deficit = share * width, (mass - share) * width
            if direction == "add":
                excess, deficit = deficit[::-1], excess[::-1]
            upward = distribution.upward(excess, deficit, int(np.argmax(excess + deficit)))
            upper = mass * (1 - upward[::-1] if direction == "add" else upward)
        total = np.zeros(point.size)
        total[1:] += upper
        total[:-1] += mass - upper
        kept = total > _FAINT
        index, total = point[kept], total[kept]
        if direction == "add":
            index, total = -index[::-1], total[::-1]
        return LossDistribution(step, index, total, 0.0, 0.0)

    def beyond(self, log_cut: float, epsilons: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """E_Q of Λ - e^ε at each ε where some X_i is above the cut >= b e^ε, where the hinge is
        linear; its rounding."""
        under_p, under_q = self.chances_beyond(np.asarray(log_cut))
        return np.maximum(under_p - np.exp(epsilons) * under_q, 0.0), 1e-13 * under_p

    def chances_beyond(self, log_cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P- and Q-mass of the outcomes in which some X_i is above e^``log_cut``, its shape."""
        root = math.sqrt(self.gram)
        z = (log_cut + self.gram / 2) / root
        tail_q, tail_p = scipy.special.ndtr(-z), scipy.special.ndtr(root - z)
        with np.errstate(divide="ignore"):  # a tail of 1 is the whole law
            in_p, in_q = np.log1p(-tail_p), np.log1p(-tail_q)
        return -np.expm1(in_p + (self.bins - 1) * in_q), -np.expm1(self.bins * in_q)


def linear_part(bins: int, gram: float) -> tuple[float, float]:
    """(variance of the mean of √g z over the bins, upper bound of χ² less that): Λ - 1 is linear in
    the noise but for that, for :meth:`.NearlyLinear.of`."""
    return gram / bins, gram**2 / 2 * math.exp(gram) / bins if gram < 100 else math.inf


def summed_allowance(composed: ComposedLosses) -> float:
    """What transform and running sums may change logs of :func:`log_excess` by."""
    return composed.allowance + _SUMMED * composed.law.size


def log_excess(composed: ComposedLosses, thresholds: np.ndarray) -> np.ndarray:
    """Logs of E (S - t)₊ of the composed sum S at each t, shape (3, N): as the window has it, what
    of that the transform may have rounded, and what is lost beyond the window, at most.

    Between two points of the grid the hinge's mean is linear in t. From the top down every term is
    positive: what lies above a point, and its sum.
    """
    tilt, step, lowest = composed.tilt, composed.step, float(thresholds.min())
    start = min(max(math.floor(lowest / step) - composed.start, 0), composed.law.size)
    points = step * (composed.start + np.arange(start, composed.law.size + 1))
    with np.errstate(under="ignore", over="ignore"):
        ahead = np.maximum(points - lowest, 0.0)  # a point below all thresholds is not counted
        weights = np.append(composed.law[start:], 0.0) * np.exp(-tilt * ahead)
        above = np.append(np.cumsum(weights[::-1])[::-1], 0.0)  # mass at a point and beyond
        # E (S - s_j)₊ = E (S - s_{j+1})₊ + step · mass beyond s_j
        hinge = step * np.append(np.cumsum(above[1:][::-1])[::-1], 0.0)
        cell = np.clip(np.floor((thresholds - points[0]) / step), -1, points.size - 1).astype(int)
        value = hinge[cell + 1] + (points[0] + (cell + 1) * step - thresholds) * above[cell + 1]
    furthest = np.maximum(points[-1] - thresholds, step)
    peak = np.minimum(1 / (math.e * tilt), furthest) if tilt > 0 else furthest
    scale = composed.log_scale - tilt * lowest
    with np.errstate(divide="ignore"):
        rounding = scale + np.log(composed.rounding * peak) - tilt * (thresholds - lowest)
        inside = scale + np.log(np.maximum(value, 0.0))
        # S - t is at most the largest sum there is; above it there is none to count
        left = composed.largest - thresholds
        lost = composed.log_lost + np.log(np.maximum(left, 0.0) + step)
    return np.where(left > 0, [inside, rounding, lost], -math.inf)
