"""Groups of K units: the one of several accounts that is tightest for a scheme and C.

Where bins are few each multiset of K bins is a pattern (:mod:`.multisets`). With modes of one
length that never overlap (C = I) the likelihood ratio is a coefficient of a product of polynomials,
sampled as it is (:mod:`.count_mixture`, :class:`CountLoss`). Any other group has the whole profile
of one unit (:mod:`.sampled_chain`, or :class:`~mfopt.accounting.chain.GroupBound` where that
profile is known without samples).
"""

from __future__ import annotations

import math

import jax

from mfopt._runtime._float64 import float64
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.chain import GroupBound
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import count_mixture
from mfopt.accounting.monte_carlo.count_mixture import CountPair
from mfopt.accounting.monte_carlo.evidence import Pilot, Point, Tilt, Trial, UpperBound
from mfopt.accounting.monte_carlo.free import ReassignedBins, guess_noise_multiplier
from mfopt.accounting.monte_carlo.protocol import SampledDirection, SampledLoss, law
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.monte_carlo.sampled_chain import SampledChain
from mfopt.mechanism import Mechanism

_ANCHOR = 0.1  # of log σ and log ε: how far they move before another order is sought
_PILOT_SAMPLES = 2048
_SLACK = 0.004  # of σ or ε above which more samples are drawn: each takes long
_EASY, _SHARE = 2**13, 1 / 8  # work up to which all samples are drawn, and the least part of them
CALIBRATE_SAMPLES = 2**12


class CountLoss(SampledLoss):
    """A group of K units under balls-in-bins whose modes are orthogonal and of one length.

    Args:
      pair: number of bins and units, and the squared norm of a mode.
    """

    name = "balls-in-bins"
    estimator = "groups by their bin counts, importance sampling"

    def __init__(self, pair: CountPair) -> None:
        self.pair = pair
        self._orders: dict[tuple[str, int, int], float] = {}

    @property
    def sensitivity(self) -> float:
        return self.pair.group_size * math.sqrt(self.pair.squared_norm)

    @property
    def work(self) -> int:
        return self.pair.work

    @property
    def least_samples(self) -> int:  # type: ignore[override]
        return self.affordable(2**13)

    def affordable(self, samples: int) -> int:
        """Samples in place of the usual number, where each takes long; at least 256."""
        share = max(_SHARE, min(1.0, _EASY / self.work))
        return max(256, 2 ** round(math.log2(samples * share)))  # few sizes: each is compiled

    def start(self, epsilon: float, delta: float) -> float:
        return guess_noise_multiplier(self.sensitivity, self.pair.bins, epsilon, delta)

    @float64
    def least(self, direction: SampledDirection, point: Point) -> Tilt:
        return self._placed(self.pair, direction, point)

    def _placed(self, pair: CountPair, direction: SampledDirection, point: Point) -> Tilt:
        # the best order found near by: any is valid, and evaluating one takes its own tables
        sigma, epsilon = point.noise_multiplier, max(point.epsilon, 1e-3)
        cell = round(math.log(sigma) / _ANCHOR), round(math.log(epsilon) / _ANCHOR)
        if (direction, *cell) not in self._orders:
            self._orders[direction, *cell] = count_mixture.least(pair, direction, point).order
        tilt = count_mixture.tilt(pair, direction, self._orders[direction, *cell], point)
        return tilt._replace(detail=pair)

    def choose(
        self, direction: SampledDirection, point: Point, trial: Trial, log_mean: float | None = None
    ) -> Pilot:
        pair = self.pair._replace(faint=min(trial.beta / 4, 1e-9))
        tilt = self._placed(pair, direction, point)
        return self.pilot(tilt, point, self.affordable(_PILOT_SAMPLES), trial.key)

    def pilot(self, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> Pilot:
        return count_mixture.pilot(tilt.detail, tilt, point, samples, key)

    def at(self, tilt: Tilt, point: Point) -> Tilt:
        direction: SampledDirection = "remove" if tilt.kind == "counts" else "add"
        moved = count_mixture.tilt(tilt.detail, direction, tilt.order, point)
        return moved._replace(detail=tilt.detail)

    def bound(self, tilt: Tilt, point: Point, bet: int, trial: Trial) -> UpperBound:
        return count_mixture.bound(tilt.detail, tilt, point, bet, trial)


class GroupUnits(OneUnit):
    """A group by its exact mixture, estimated, verified and released as one unit is."""

    safe = 2.0

    def __init__(self, loss: SampledLoss, samples: int | None = None) -> None:
        super().__init__(loss, samples, calibrate_samples=CALIBRATE_SAMPLES, rough=True)
        self.worth, self.most_work = _SLACK, loss.most_work
        of = "groups by their bin counts: exact mixture, estimate-verify-release"
        self.method = f"{loss.name}, {of}"


def model(
    mechanism: Mechanism, samples: int | None = None, deterministic: bool = False
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
        free = [bound for bound in loss.free_bounds() if isinstance(bound, ReassignedBins)]
        if free:
            return GroupBound(free[0], size, loss.name)
        return SampledChain(loss, size, samples)
    for bound in loss.free_bounds():
        if bound.exact and isinstance(bound, DeterministicBound):
            return bound
    return OneUnit(loss, samples, deterministic=deterministic)
