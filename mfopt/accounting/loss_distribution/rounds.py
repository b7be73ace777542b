"""Privacy profile of repeated mixture-of-Gaussians rounds, to a stated accuracy.

The grid is chosen from the answer's own sensitivity to it. The discretization adds a known
variance to the loss; near the saddle point θ of the tail at ε this raises ε by
(1 + θ)/2 times that variance, so a coarse pass tells how fine the grid must be.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
from scipy import optimize

from mfopt import _check
from mfopt.accounting.loss_distribution import ComposedLosses, Composition
from mfopt.accounting.loss_distribution.mixture import Mixture

Direction = Literal["remove", "add"]
COARSE, FINE = 1e-3, 2e-5  # relative accuracy of ε: inside searches, and for reported numbers
# Truncated probability relative to the δ in question: e^-16 = 1e-7.
_TRUNCATED = 16.0
_WIDEST_SPACING = 0.05
_REFINEMENTS = 4
_LEAST = 1e-4  # smaller ε are computed to the absolute accuracy that this one has


@dataclasses.dataclass(frozen=True)
class RoundsProfile:
    """δ(ε) and ε(δ) of ``rounds`` compositions of one mixture-of-Gaussians round.

    Both directions are covered: "remove" compares the mixture with the plain Gaussian, "add"
    the other way round. All values are upper bounds; ``accuracy`` is the aimed-at relative
    error of ε.

    Attributes:
      mixture: sensitivities of one round.
      rounds: number of compositions.
      noise_multiplier: σ, relative to the clip norm.
      accuracy: relative error of ε that the grid is chosen for.
    """

    mixture: Mixture
    rounds: int
    noise_multiplier: float
    accuracy: float = FINE

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε) for ε >= 0, the larger of both directions unless one is named."""
        epsilon = _check.non_negative("epsilon", epsilon)
        if self.mixture.trivial:
            return -math.inf
        found, composition = self._log_delta(epsilon, direction or "remove")
        if direction is None and not _no_larger(composition.reverse(), epsilon, found):
            found = max(found, self._log_delta(epsilon, "add")[0])
        return found

    def delta(self, epsilon: float) -> float:
        """Upper bound of δ(ε)."""
        return math.exp(self.log_delta(epsilon))

    def epsilon(self, delta: float, direction: Direction | None = None) -> float:
        """Smallest ε >= 0 whose δ, as computed, is at most ``delta``."""
        target = math.log(_check.probability("delta", delta))
        if self.mixture.trivial or self._log_distance() <= target:
            return 0.0
        found, composition = self._epsilon(target, direction or "remove")
        if direction is None and not _no_larger(composition.reverse(), found, target):
            found = max(found, self._epsilon(target, "add")[0])
        return found

    def _log_distance(self) -> float:
        """log of a bound on δ(0) by Pinsker: |P - Q| <= (KL/2)^½, KL <= log(1 + χ²) a round."""
        weights, shift = np.exp(self.mixture.log_weights), self.mixture.sensitivities
        with np.errstate(over="ignore", invalid="ignore"):
            products = np.expm1(np.outer(shift, shift) / self.noise_multiplier**2)
            square = float(weights @ products @ weights)
        if not math.isfinite(square):
            return 0.0
        return 0.5 * math.log(max(self.rounds * math.log1p(square) / 2, 1e-300)) + 1e-9

    def _log_delta(self, epsilon: float, direction: Direction) -> tuple[float, Composition]:
        log_delta = -20.0
        for _ in range(8):
            composition, tilt = self._compose(direction, epsilon, log_delta)
            found = composition.convolve(tilt).log_delta(epsilon)
            # what was truncated must be small against the δ that was found, or it is repeated
            if composition.infinite < 1e-4 * math.exp(max(found, -690.0)):
                break
            finite = composition.log_delta_bound(epsilon, tilt, infinite=False)
            log_delta = max(min(finite, 1.7 * log_delta), -690.0)
        return found, composition

    def _epsilon(self, log_delta: float, direction: Direction) -> tuple[float, Composition]:
        composition, tilt = self._compose(direction, None, log_delta)
        return smallest_epsilon(composition.convolve(tilt), log_delta), composition

    def _compose(
        self, direction: Direction, epsilon: float | None, log_delta: float
    ) -> tuple[Composition, float]:
        """Rounds on a grid that is fine enough at ε, or at the ε of ``log_delta``, and the tilt."""
        sigma, rounds = self.noise_multiplier, self.rounds
        log_tail = log_delta - math.log(rounds) - _TRUNCATED
        step, spacing = _first_grid(self.mixture, sigma, log_tail)
        for _ in range(_REFINEMENTS):
            part = self.mixture.discretize(sigma, step, spacing, log_tail)
            composition = Composition(((part, rounds),))
            if direction == "add":
                composition = composition.reverse()
            tilt = (
                composition.tilt_for_delta(log_delta)
                if epsilon is None
                else composition.tilt_for_epsilon(epsilon)
            )
            mean, variance, added = composition.tilted_moments(tilt)
            at = max(mean if epsilon is None else epsilon, 1e-2 * math.sqrt(variance), _LEAST)
            allowed = 2 * self.accuracy * at / (1 + tilt)
            if added <= 1.2 * allowed:
                break
            from_grid = rounds * step**2 / 6
            from_cells = max(added - from_grid, 0.05 * from_grid)
            # share the allowed variance 4 : 1 between the grid of the loss and the cells of x
            step *= math.sqrt(0.8 * allowed / from_grid)
            spacing = min(spacing * math.sqrt(0.2 * allowed / from_cells), _WIDEST_SPACING)
        return composition, tilt


def _no_larger(composition: Composition, epsilon: float, log_delta: float) -> bool:
    """Whether Chernoff's bound alone shows that log δ(ε) is at most ``log_delta``."""
    tilt = composition.tilt_for_epsilon(epsilon)
    return composition.log_delta_bound(epsilon, tilt) <= log_delta


def _first_grid(mixture: Mixture, noise_multiplier: float, log_tail: float) -> tuple[float, float]:
    """(step, spacing) for the coarse pass: a twentieth of one round's standard deviation."""
    cut, _ = mixture.cut(log_tail)
    spacing = min(_WIDEST_SPACING, 0.1 * noise_multiplier)
    z = np.arange(-9.0, 9.0, spacing)
    density = np.exp(-0.5 * z * z)
    density /= density.sum()
    total = square = 0.0
    for s, log_weight in zip(cut.sensitivities / noise_multiplier, cut.log_weights, strict=True):
        loss = cut.loss(z + s, noise_multiplier)
        total += math.exp(log_weight) * float(density @ loss)
        square += math.exp(log_weight) * float(density @ loss**2)
    return 0.05 * math.sqrt(max(square - total**2, 1e-300)), spacing


def smallest_epsilon(composed: ComposedLosses, log_delta: float) -> float:
    """Smallest ε >= 0 in the window with log δ(ε) <= ``log_delta``, on the private side."""
    low = max(0.0, composed.step * composed.start)
    high = composed.step * (composed.start + composed.law.size)
    if composed.log_delta(low) <= log_delta:
        return low
    if composed.log_delta(high) > log_delta:
        raise _check.FailureError(
            f"no ε up to {high:.4g} reaches δ = {math.exp(log_delta):.3g}: of it "
            f"{composed.infinite:.3g} is truncated probability"
        )
    found = optimize.brentq(
        lambda e: max(composed.log_delta(e), -1e4) - log_delta, low, high, xtol=1e-13, rtol=1e-12
    )
    step = 1e-12
    while composed.log_delta(found) > log_delta:
        found += step * max(found, 1e-3)
        step *= 2
    return float(found)
