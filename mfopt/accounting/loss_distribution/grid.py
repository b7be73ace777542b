"""Grid of a composition of mixture rounds, planned before anything is discretized.

The loss of one round at a few thousand nodes of x gives the saddle point θ of the composed tail,
and from it the error of any grid: mass whose loss lies a fraction f of the spacing h above a grid
point gains variance f (1 - f) h², and near θ a variance v raises ε by (1 + θ) v / 2. So the spacing
follows from ε, δ and the scale of the rounds: losses much smaller than the spacing add little,
however many rounds there are, and losses large enough to exceed ε alone need no grid.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import scipy

from mfopt.accounting import solve
from mfopt.accounting.loss_distribution.mixture import Round
from mfopt.accounting.loss_distribution.tilting import Tilting, dot, log_sum_exp, tilted

_NODES = 0.05  # spacing of the nodes of x, in noise standard deviations
_MOST_POINTS = 1 << 22  # of the composed window
_MOST_CELLS = 1 << 18  # of one round, fewer for many sensitivities
_MOST_MASSES = 1 << 25
_LEAST = 1e-4  # smaller ε are computed to the absolute accuracy that this one has
_ROUNDING = 1e-12  # of the loss, relative to its largest value: no grid is finer


class RepeatedRound(NamedTuple):
    """Rounds of one kind, at one noise multiplier.

    Attributes:
      mixture: one of them.
      rounds: how many.
      noise_multiplier: σ, in clip norms.
    """

    mixture: Round
    rounds: int
    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class _RoundLaw:
    """Law of the loss of one round without a grid, in one direction.

    Attributes:
      losses: shape (N,), increasing: the loss at the nodes.
      log_mass: shape (N,), log of the mass of each.
      slopes: shape (N,), change of the loss with x in noise standard deviations.
      log_infinite: log of the mass of infinite loss.
    """

    losses: np.ndarray
    log_mass: np.ndarray
    slopes: np.ndarray
    log_infinite: float = -math.inf


@dataclasses.dataclass(frozen=True)
class Law(Tilting):
    """Rounds that compose, without a grid, in one direction: for planning only.

    Attributes:
      parts: (law of one round, number of rounds), of each kind.
      add: whether the direction is that of adding.
    """

    parts: tuple[tuple[_RoundLaw, int], ...]
    add: bool = False

    @classmethod
    def of(cls, kinds: Sequence[RepeatedRound], log_tail: float, add: bool) -> Law:
        """The law of all rounds; tails below e^``log_tail`` are left out.

        Args:
          kinds: the rounds.
          log_tail: log of the probability that may be left out of each.
          add: whether the direction is that of adding a unit.
        """
        parts = []
        for mixture, rounds, sigma in kinds:
            loss, normal, slopes = mixture.nodes(sigma, log_tail)
            law = _RoundLaw(loss, normal + loss, slopes)
            if add:
                law = _RoundLaw(-loss[::-1], normal[::-1], slopes[::-1])
            parts.append((law, rounds))
        return cls(tuple(parts), add)

    @property
    def direction(self) -> Literal["remove", "add"]:
        """The adjacency direction, "remove" or "add"."""
        return "add" if self.add else "remove"

    def at(self, epsilon: float) -> Law:
        """The same rounds for questions about ε: losses are capped where they alone decide.

        A loss so large that with it the sum is above ε, whatever the other rounds do, may be
        split over the least such loss and an infinite one: δ(ε) does not change. What is left has
        a saddle point at ε, which the law of rare large losses need not have.
        """
        largest = epsilon - self._low + 0.1 * max(epsilon, _LEAST)
        parts = tuple((_capped(part, largest), count) for part, count in self.parts)
        return dataclasses.replace(self, parts=parts)

    @functools.cached_property
    def _low(self) -> float:
        """A loss, at most 0, below which the sum is hardly ever."""
        return min(self.chernoff(0.0, -1), 0.0)

    def log_delta(self, epsilon: float) -> float:
        """The saddle-point estimate of log δ(ε) for a law that was made for this ε."""
        infinite = min(
            log_sum_exp(
                np.array([part.log_infinite + math.log(count) for part, count in self.parts])
            ),
            0.0,
        )
        if epsilon >= self.largest:
            return infinite
        tilt = self.tilt_for_epsilon(epsilon)
        mean, variance = self.tilted_moments(tilt)
        if tilt == 0:
            above = (mean - epsilon) / math.sqrt(max(variance, 1e-300))
            finite = float(scipy.special.log_ndtr(above))
        else:
            erfcx, root = scipy.special.erfcx, math.sqrt(variance / 2)
            share = 0.5 * (erfcx(tilt * root) - erfcx((1 + tilt) * root))
            finite = self.log_moment(tilt) - tilt * epsilon + math.log(max(share, 1e-300))
        return min(float(np.logaddexp(finite, infinite)), 0.0)

    def epsilon(self, log_delta: float) -> float:
        """The ε >= 0 of the saddle-point estimate, to 1%, for a law as it is."""

        def excess(epsilon: float) -> float:
            return max(self.at(epsilon).log_delta(epsilon), -1e4) - log_delta

        if excess(0.0) <= 0:
            return 0.0
        return solve.smallest(
            excess,
            max(self.tilted_moments(0.0)[0], 1e-3),
            name="epsilon",
            relative=1e-2,
            least=1e-9,
            largest=1e15,
            growth=2.0,
        )

    def added(self, tilt: float, step: float, spacing: float) -> tuple[float, float]:
        """Variance of the sum that a grid and cells of x would add under the law tilted by θ."""
        grid = cells = 0.0
        for part, count in self.parts:
            weight, above = tilted(part, tilt), part.losses / step - np.floor(part.losses / step)
            grid += count * dot(weight, above * (1 - above)) * step**2
            cells += count * dot(weight, part.slopes**2) * spacing**2 / 6
        return grid, cells


def _capped(law: _RoundLaw, largest: float) -> _RoundLaw:
    """The law with losses above ``largest`` split over it and an infinite loss."""
    above = law.losses > largest
    if not np.any(above):
        return law
    # the atom at the largest loss carries the Q-mass of all that is above
    log_p, log_q = law.log_mass[above], law.log_mass[above] - law.losses[above]
    log_atom = log_sum_exp(log_q) + largest
    lost = log_sum_exp(log_p + np.log(-np.expm1(largest - law.losses[above])))
    return _RoundLaw(
        np.append(law.losses[~above], largest),
        np.append(law.log_mass[~above], log_atom),
        np.append(law.slopes[~above], 0.0),
        lost,
    )


@dataclasses.dataclass(frozen=True)
class Grid:
    """Discretization of one round.

    Attributes:
      step: spacing of the grid of losses.
      spacing: width of the cells of x, in noise standard deviations.
      least, largest: losses log P/Q beyond are split over these and infinite ones, which changes
        nothing at ε: they decide alone.
      tilt: θ of the composition.
    """

    step: float
    spacing: float
    least: float
    largest: float
    tilt: float

    @classmethod
    def plan(cls, law: Law, epsilon: float, accuracy: float, sensitivities: int) -> Grid:
        """The coarsest grid that raises ε by no more than ``accuracy`` times ε; ``law`` is at ε.

        Args:
          law: the composed rounds without a grid, tilted to about ``epsilon``.
          epsilon: where the profile is wanted.
          accuracy: relative rise of ε that the grid may cost.
          sensitivities: components of the mixture: what a finer grid costs.
        """
        tilt = law.tilt_for_epsilon(epsilon)
        deviation = math.sqrt(max(law.tilted_moments(tilt)[1], 0.0))
        scale = max(epsilon, 1e-2 * deviation, _LEAST)
        # ε, and δ to fifty times that: log δ changes by θ with ε
        rise = accuracy * min(scale, 50 / max(tilt, 1e-9))
        # below ε of about a deviation log δ falls by one over that, whatever θ is
        share = near(accuracy, tilt * deviation)
        allowed = min(2 * rise / (1 + tilt), share * deviation**2)
        high, low = min(law.chernoff(tilt, +1), law.largest), law.chernoff(tilt, -1)
        window = high - max(low, law.least)
        # with a loss below this the sum stays below ε
        losses = [part.losses for part, _ in law.parts]
        smallest = min(float(part[0]) for part in losses)
        smallest = max(min(epsilon - high, 0.0) - 0.1 * scale, smallest)
        largest = max(float(part[-1]) for part in losses)
        finest = max(
            max(window, largest - smallest) / _MOST_POINTS, _ROUNDING * (largest - smallest)
        )
        step = max(min(scale / 32, 0.5 / (1 + tilt), max(window, 1e-3 * scale) / 16), finest)
        step = _shrink(step, finest, 0.8 * allowed, lambda h: law.added(tilt, h, 0.0)[0])
        cells = max(law.added(tilt, step, 1.0)[1], 1e-300)
        spacing = min(math.sqrt(0.2 * allowed / cells), _NODES)
        span = max(part.size for part in losses) * _NODES
        most_cells = min(_MOST_CELLS, _MOST_MASSES // max(sensitivities, 1))
        spacing = max(spacing, span / most_cells)
        ends = (-largest, -smallest) if law.add else (smallest, largest)
        return cls(step, spacing, *ends, tilt)


def near(accuracy: float, deviations: float) -> float:
    """Relative rise of a variance that raises log δ by no more than 50 times ``accuracy``.

    Of a Gaussian hinge E (s z - t s)₊ the log rises with log s² by φ(t)/2 / (φ(t) - t Φ(-t)),
    which is at most (5 + t²)/2; it begins at t ``deviations``.
    """
    return 100 * accuracy / (5 + deviations**2)


def _shrink(value: float, finest: float, target: float, error_of) -> float:  # type: ignore[no-untyped-def]
    """The first of a falling sequence of values at which ``of`` is at most ``target``."""
    for _ in range(60):
        error = error_of(value)
        if error <= target or value <= finest:
            break
        value = max(value * min(max(math.sqrt(target / error), 0.05), 0.95), finest)
    return value
