"""The sampled privacy loss of any scheme that has a likelihood ratio: written once."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from mfopt._runtime._float64 import wide
from mfopt._runtime._types import PyTree, T
from mfopt.accounting.monte_carlo import chunked, convex, importance
from mfopt.accounting.monte_carlo.evidence import (
    HockeyStickPayoff,
    Pilot,
    Point,
    Sums,
    Tilt,
    Trial,
    UpperBound,
    upper_bound,
)
from mfopt.accounting.monte_carlo.free import guess_noise_multiplier
from mfopt.accounting.monte_carlo.hockey import GaussianPayoff, beside
from mfopt.accounting.monte_carlo.likelihood import (
    Ceilings,
    Likelihood,
    Residual,
    SharedGaussianComponent,
)
from mfopt.accounting.monte_carlo.moment_bound import MomentBound, Moments
from mfopt.accounting.monte_carlo.protocol import FreeBound, SampledDirection, SampledLoss

_LOG_CONCAVE = HockeyStickPayoff, GaussianPayoff  # payoffs
_FEW = 256  # samples that show E_Q Y well enough to choose a proposal by


def remembered(method: T) -> T:
    """``method`` with its last eight results: a search asks many questions at few σ.

    Each instance has its own: one cache for all would keep losses, with their Gram matrices, that
    nobody asks any more.
    """
    return functools.cached_property(  # type: ignore[return-value]
        lambda loss: functools.lru_cache(maxsize=8)(functools.partial(method, loss))  # type: ignore[arg-type, misc, operator]
    )


class LikelihoodLoss(SampledLoss):
    """One unit, by the likelihood ratio of its patterns and the ceilings of its chains.

    Attributes:
      glance: samples of a pilot that chooses a proposal.
      likelihood: the ratio at σ = 1, a :class:`.likelihood.Likelihood` of ``bins`` places.
      shared: component that all patterns share, if accounting it exactly pays off; else None.
    """

    glance: ClassVar[int] = 2048
    likelihood: Any
    shared: SharedGaussianComponent | None = None

    @abc.abstractmethod
    def ceilings(self, scaled: PyTree, common: float) -> Ceilings:
        """Maxima over all patterns, in noise units.

        ``common`` is the square of the shared component that is paid apart; 0 for none.
        """

    @property
    def work(self) -> int:
        return int(self.likelihood.work)

    def start(self, epsilon: float, delta: float) -> float:
        return guess_noise_multiplier(self.sensitivity, self.likelihood.bins, epsilon, delta)

    @remembered
    @wide
    def _known(self, noise_multiplier: float, split: bool) -> tuple[Likelihood, Ceilings]:
        scaled = self.likelihood.scaled(noise_multiplier)
        if not split:
            return scaled, self.ceilings(scaled, 0.0)
        assert self.shared is not None
        residual = Residual(self.likelihood, self.shared).scaled(noise_multiplier)
        common = float(residual.shared.shift) ** 2
        return residual, self.ceilings(scaled, common).without(common)

    def _sampled(self, point: Point) -> tuple[Likelihood, Ceilings, Point]:
        """Likelihood, ceilings and point that are sampled: without the shared component, if any."""
        paid = None if self.shared is None else beside(point, float(self.shared.shift))
        return *self._known(point.noise_multiplier, paid is not None), paid or point

    def moments(self, point: Point) -> Moments:
        """Exact moments of the likelihood ratio, with what bounds the others."""
        _, ceilings, beside = self._sampled(point)
        tuples = self.tuples(point.noise_multiplier, ceilings.common)
        return Moments(ceilings, beside, tuples, self.remove_tilts(ceilings, beside)[0])

    def slow_bounds(self) -> Sequence[FreeBound]:
        return (MomentBound(self),)

    def tuples(self, noise_multiplier: float, common: float) -> tuple[float, ...]:
        """E e^(Σ_{l<l'} <m_l, m_l'> − c) of k = 2, 3, … independent patterns, where known."""
        return ()

    def _tilts(self, direction: SampledDirection, point: Point) -> Sequence[Tilt]:
        _, ceilings, point = self._sampled(point)
        if direction == "remove":
            return self.remove_tilts(ceilings, point)
        return (importance.mean_tilt(ceilings, point),)

    def remove_tilts(self, ceilings: Ceilings, point: Point) -> Sequence[Tilt]:
        """Proposals of :func:`.importance.remove_tilts` for the residual that is sampled."""
        return importance.remove_tilts(ceilings, point)

    def least(self, direction: SampledDirection, point: Point) -> Tilt:
        return self._tilts(direction, point)[0]

    def at(self, tilt: Tilt, point: Point) -> Tilt:
        _, ceilings, point = self._sampled(point)
        moved = importance.tilt(tilt.kind, tilt.order, ceilings, point)
        if not (tilt.cut.below and isinstance(point.payoff, _LOG_CONCAVE)):
            return moved
        return moved.lowered(tilt.cut.below)._replace(detail=tilt.detail)

    def estimator_tilt(self, direction: SampledDirection, point: Point) -> Tilt:
        if direction == "remove":
            return self.least(direction, point)
        _, ceilings, paid = self._sampled(point)
        loss = self._mean_loss(point.noise_multiplier, isinstance(paid.payoff, GaussianPayoff))
        return importance.central_tilt(ceilings, paid, loss)

    @remembered
    def _mean_loss(self, noise_multiplier: float, split: bool) -> float:
        """E_Q Y, about; of the residual beside the shared component where it is split off."""
        likelihood, ceilings = self._known(noise_multiplier, split)
        point = Point(noise_multiplier, 0.0)
        point = self._sampled(point)[2] if split else point
        tilt = importance.tilt("mean", 0.0, ceilings, point)
        sums, used = importance.total(likelihood, tilt, point, _FEW, chunked.seed_key(0))
        return float(sums.loss) / used

    def choose(
        self, direction: SampledDirection, point: Point, trial: Trial, log_mean: float | None = None
    ) -> Pilot:
        if direction == "remove":
            return self._best(self._tilts(direction, point), point, trial, log_mean)
        paid = self._sampled(point)[2].payoff
        tilt = self.estimator_tilt(direction, point)
        pilot = self.pilot(tilt, point, self.glance, trial.key)
        square = float(pilot.sums.square) / pilot.samples
        if not (isinstance(paid, _LOG_CONCAVE) and 0 < square < math.inf):
            return self.pilot(self.least(direction, point), point, self.glance, trial.key)
        below = -convex.log_cut(square, trial.samples, trial.beta)
        tilt = tilt.lowered(max(below, -tilt.cut.below))
        pilot = self.pilot(tilt, point, 4 * self.glance, chunked.subkey(trial.key, 1))
        shares = np.asarray(pilot.sums.shares) / pilot.samples
        placed = tilt.cut.placed(shares, pilot.samples, trial.samples, trial.beta)
        return pilot._replace(tilt=tilt._replace(detail=placed))

    def _best(
        self, tilts: Sequence[Tilt], point: Point, trial: Trial, log_mean: float | None
    ) -> Pilot:
        """The pilot whose tilt should bound best.

        Of each kind of tilt, from the order of least ceiling upwards (below it the second moment
        grows too) as long as the bound falls.
        """
        best: tuple[float, Pilot] | None = None
        count = 0
        # no bound is below this part of a ceiling: no value at all would give as much
        share = math.log(-math.log(trial.beta) / trial.samples)
        for start_tilt in tilts:
            current: Tilt | None = start_tilt
            lowest_work, misses = math.inf, 0
            while current is not None and misses < 2:  # one miss may be the pilot's noise
                if best is not None and current.log_ceiling + share >= best[1].log_mean + best[0]:
                    break
                pilot = self.pilot(current, point, self.glance, chunked.subkey(trial.key, count))
                count += 1
                is_informative = pilot.log_mean > -math.inf and (
                    log_mean is None or pilot.agrees(log_mean)
                )
                expected = (
                    pilot.expected(trial.samples, trial.beta)[1] if is_informative else math.inf
                )
                if best is None or expected < best[0]:
                    best = expected, pilot
                misses = 0 if expected < lowest_work else misses + 1
                lowest_work = min(lowest_work, expected)
                order = current.next_order
                current = None if order is None else self.at(current._replace(order=order), point)
        assert best is not None
        return best[1]

    def pilot(self, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> Pilot:
        return Pilot(tilt, *self._total(tilt, point, samples, key))

    def bound(self, tilt: Tilt, point: Point, bet: int, trial: Trial) -> UpperBound:
        sums, used = self._total(tilt, point, trial.samples, trial.key)
        return upper_bound(tilt, sums, used, bet=bet, beta=trial.beta)

    def _total(self, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> tuple[Sums, int]:
        likelihood, _, paid = self._sampled(point)
        return importance.total(likelihood, tilt, paid, samples, key, self.chunk_parts)
