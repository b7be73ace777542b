"""Groups of K units under balls-in-bins, any C >= 0: the mixture over bins, bounded and sampled.

The dominating pair of a group is P = E_k N(m_{k_1} + … + m_{k_K}, σ²I) against Q = N(0, σ²I), the
bins k independent and uniform: the modes of a group are sums of modes, so G tells all. With C = I,
modes of one length that never overlap, the likelihood ratio is a coefficient of a product of
polynomials and :mod:`mfopt.accounting.monte_carlo.count_mixture` samples it as it is. Any other G
is split: for every d >= 0,

    (1) G <= d·I + B,  B = (G − d·I)₊, the positive part of a symmetric matrix.

So with β_k of Gram matrix B the modes are a contraction of the vectors (√d e_k, β_k), and the pair
of G is a post-processing of theirs (apply the contraction, and add what noise is missing): it is
dominated. There X₁ = Σ_j √d e_{k_j} + noise and X₂ = Σ_j β_{k_j} + noise come from the same bins.
Given X₁ the bins have some law, so X₂ is a mixture of Gaussians whose means are at most

    (2) |Σ_j β_{k_j}| <= K max_k |β_k| = K √(max_k B_kk)

long, against N(0, σ²I); by joint convexity it is dominated, both ways and for every X₁, by one
Gaussian release with that shift. By adaptive composition the group is dominated by the count
mixture of d next to that release: what ``count_mixture`` bounds. What all modes have in common is
in B and costs nothing more than it must: no bin hides it. d is chosen by what it gives.

C = I is exact (B = 0). One unit has a better account, which needs no split.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from mfopt._runtime._float64 import float64
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.chain import GroupBound
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import chunked, count_mixture
from mfopt.accounting.monte_carlo.count_mixture import CountPair
from mfopt.accounting.monte_carlo.evidence import Pilot, Point, Tilt, Trial, UpperBound
from mfopt.accounting.monte_carlo.free import ReassignedBins, guess_noise_multiplier
from mfopt.accounting.monte_carlo.protocol import SampledDirection, SampledLoss, law
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.monte_carlo.sampled_chain import SampledChain

_ROUNDING = 1e-9  # relative to the largest eigenvalue: of (1) in floating point
# of log σ and log ε: how far they move before another order, or another split, is sought
_ANCHOR, _ANCHOR_SPLIT = 0.1, 0.8
_GLANCE = 2048  # samples that choose a split
_VERY_MANY = 2048  # bins above which eigenvalues take too long
_USUAL = 2**17
_WORTH = 0.004  # slack of σ or ε above which more samples are drawn: each takes long
_EASY, _SHARE = 2**13, 1 / 8  # work up to which all samples are drawn, and the least part of them
CALIBRATE_SAMPLES = 2**12


def largest_row(gram: np.ndarray, error: float) -> float:
    """Upper bound of the eigenvalues of G (Gershgorin); ``error`` is that of row sums, relative."""
    return float(np.max(np.sum(np.abs(gram), axis=1))) / (1 - error)


def splits(gram: np.ndarray, group_size: int, error: float = 0.0) -> list[tuple[float, float]]:
    """(d, K √(max B_kk)) of some splits, each rounded up so that G <= d·I + B holds.

    ``error`` is that of sums of rows of ``gram``, relatively. With very many bins d is
    :func:`largest_row` alone, and B = 0.
    """
    rows = largest_row(gram, error)
    if len(gram) > _VERY_MANY:
        return [(rows * (1 + _ROUNDING), 0.0)]
    values, vectors = np.linalg.eigh(np.asarray(gram, np.float64))
    nudge = (_ROUNDING + error) * rows
    least, most = max(float(values[0]), nudge), float(values[-1])
    # low eigenvalues lie close together; of those that stand out each may be the best
    at = np.quantile(values, [0, 0.75, 0.9])
    at = np.concatenate([at, values[-min(4, values.size) : -1]])
    found = []
    for d in np.unique(np.clip(at, least, most)):
        positive = np.maximum(values - d, 0.0)
        longest = float(np.max(np.sum(vectors**2 * positive, axis=1)))
        # rounding of the eigenvectors moves d·I + B by less than the nudge; B itself is left out
        # only where all of it is within another one
        shift = group_size * math.sqrt(longest + nudge) if np.max(positive) > nudge else 0.0
        found.append((float(d) + 2 * nudge, shift))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class GroupLoss(SampledLoss):
    """A group of K units.

    Attributes:
      bins, group_size: b and K.
      parts: (d, shift) of the splits to choose from.
      largest: K times the largest mode norm.
    """

    bins: int
    group_size: int
    parts: tuple[tuple[float, float], ...]
    largest: float

    name = "balls-in-bins"
    estimator = "groups by their bin counts, importance sampling"
    most_work = 2**28  # a few CPU seconds

    @property
    def sensitivity(self) -> float:
        return self.largest

    @classmethod
    def of(cls, gram: np.ndarray, group_size: int, error: float = 0.0) -> GroupLoss:
        """Return the loss of a group from the Gram matrix of the modes, shape (bins, bins)."""
        norm = math.sqrt(float(np.max(np.diagonal(gram))) / (1 - error))
        return cls(len(gram), group_size, tuple(splits(gram, group_size, error)), group_size * norm)

    @classmethod
    def orthogonal(cls, bins: int, squared_norm: float, group_size: int) -> GroupLoss:
        """Return the loss of a group for orthogonal modes of equal squared norm."""
        norm = math.sqrt(squared_norm)
        return cls(bins, group_size, ((squared_norm, 0.0),), group_size * norm)

    @property
    def exact(self) -> bool:
        """True if the pair is the group's own, without a split."""
        (d, shift), norm = self.parts[0], self.largest / self.group_size
        return shift == 0.0 and d <= norm**2 * (1 + 4 * _ROUNDING)

    @property
    def mixture(self) -> str:
        """Name of the mixture where it is not exact, for the record."""
        if any(shift for _, shift in self.parts):
            return "mixture and a Gaussian release of what overlaps"
        return "mixture of orthogonal modes above"

    @property
    def fits(self) -> bool:
        """True if the tables for this many units and bins fit."""
        return self.bins > 1 and self._pair(0).fits

    @property
    def work(self) -> int:
        return self._pair(0).work

    @property
    def least_samples(self) -> int:  # type: ignore[override]
        return self._fewer(2**13)

    def _fewer(self, samples: int) -> int:
        """Samples in place of the usual number, where each takes long."""
        share = max(_SHARE, min(1.0, _EASY / self.work))
        return max(256, 2 ** round(math.log2(samples * share)))  # few sizes: each is compiled

    def start(self, epsilon: float, delta: float) -> float:
        return guess_noise_multiplier(self.sensitivity, self.bins, epsilon, delta)

    # --- proposals -------------------------------------------------------------------------------

    def _pair(self, part: int, faint: float | None = None) -> CountPair:
        pair = CountPair(self.bins, self.group_size, *self.parts[part])
        return pair if faint is None else pair._replace(faint=faint)

    @functools.cached_property
    def _chosen(self) -> dict[tuple[int, int], int]:
        return {}

    def _best(self, sigma: float, epsilon: float) -> int:
        """The split expected to bound best near here, as a function of σ and ε alone."""
        if len(self.parts) == 1:
            return 0
        where = _near(sigma, epsilon, _ANCHOR_SPLIT)
        if where not in self._chosen:
            sigma, epsilon = (math.exp(_ANCHOR_SPLIT * step) for step in where)
            about = functools.cache(functools.partial(self._about, point=Point(sigma, epsilon)))
            # from the middle on, as long as the bound falls: d and the shift trade off one way
            part, last = len(self.parts) // 2, len(self.parts) - 1
            for step in (1, -1):
                while 0 <= part + step <= last and about(part + step) < about(part):
                    part += step
            self._chosen[where] = part
        return self._chosen[where]

    def _about(self, part: int, point: Point) -> float:
        """log of the bound expected of usual samples (remove direction), by a small pilot."""
        pair = self._pair(part)
        tilt = count_mixture.least(pair, "remove", point)
        glance, key = self._fewer(_GLANCE), chunked.seed_key(0)
        seen = count_mixture.pilot(pair, tilt, point, glance, key)
        beta = math.exp(max(seen.log_mean, -40.0)) / 1000
        return seen.log_mean + seen.expected(_USUAL, beta)[1] if seen.log_mean > -40 else math.inf

    @float64
    def least(self, direction: SampledDirection, point: Point) -> Tilt:
        part = self._best(point.noise_multiplier, point.epsilon)
        return self._placed(self._pair(part), direction, point)

    @functools.cached_property
    def _orders(self) -> dict[tuple[Any, ...], float]:
        return {}

    def _placed(self, pair: CountPair, direction: SampledDirection, point: Point) -> Tilt:
        # the best order found near by: any is valid, and evaluating one takes its own tables
        near = _near(point.noise_multiplier, point.epsilon, _ANCHOR)
        where = (pair.squared_norm, direction, *near)
        if where not in self._orders:
            self._orders[where] = count_mixture.least(pair, direction, point).order
        found = count_mixture.tilt(pair, direction, self._orders[where], point)
        return found._replace(detail=pair)

    def choose(
        self, direction: SampledDirection, point: Point, trial: Trial, log_mean: float | None = None
    ) -> Pilot:
        part = self._best(point.noise_multiplier, point.epsilon)
        tilt = self._placed(self._pair(part, min(trial.beta / 4, 1e-9)), direction, point)
        return self.pilot(tilt, point, self._fewer(_GLANCE), trial.key)

    def pilot(self, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> Pilot:
        return count_mixture.pilot(tilt.detail, tilt, point, samples, key)

    def at(self, tilt: Tilt, point: Point) -> Tilt:
        direction: SampledDirection = "remove" if tilt.kind == "counts" else "add"
        found = count_mixture.tilt(tilt.detail, direction, tilt.order, point)
        return found._replace(detail=tilt.detail)

    def bound(self, tilt: Tilt, point: Point, bet: int, trial: Trial) -> UpperBound:
        return count_mixture.bound(tilt.detail, tilt, point, bet, trial)


def _near(sigma: float, epsilon: float, step: float) -> tuple[int, int]:
    """The cell of a grid of log σ and log ε."""
    return round(math.log(sigma) / step), round(math.log(max(epsilon, 1e-3)) / step)


class GroupUnits(OneUnit):
    """A group, estimated, verified and released as one unit is."""

    safe = 2.0

    def __init__(self, loss: Any, samples: int | None = None) -> None:
        super().__init__(loss, samples, calibrate_samples=CALIBRATE_SAMPLES, rough=True)
        self.worth, self.most_work = _WORTH, loss.most_work
        of = "exact mixture" if loss.exact else loss.mixture
        self.method = f"{loss.name}, groups by their bin counts: {of}, estimate-verify-release"


def model(
    mechanism: Any, samples: int | None = None, deterministic: bool = False
) -> LossModel | DeterministicBound:
    """The model of a mechanism that is verified: one unit, or a group of them.

    Args:
      mechanism: sampled by a scheme that has a law.
      samples, deterministic: as for :class:`.sampled.OneUnit`.

    Raises:
      UsageError: C has negative entries, or is none that the scheme's law covers.
    """
    loss, size = law(mechanism.sampling).loss(mechanism.strategy), mechanism.group_size
    direct = loss.group(size) if size > 1 else None
    if direct is not None:
        return GroupUnits(direct, samples)
    if size > 1:
        free = [known for known in loss.free_bounds() if isinstance(known, ReassignedBins)]
        if free:
            return GroupBound(free[0], size, loss.name)
        return SampledChain(loss, size, samples)
    return OneUnit(loss, samples, deterministic=deterministic)
