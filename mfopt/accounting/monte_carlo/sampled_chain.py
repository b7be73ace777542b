"""Groups of K units from the whole profile of one unit, where that is sampled.

A split of ε is chosen by what bounds at its points should come to: by a curve through pilots. The
points of the split are then bounded, each by as many samples as it weighs, and each at its share of
the failure probability. See :mod:`mfopt.accounting.closed_form.group` for the formula.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import scipy

from mfopt.accounting import chain
from mfopt.accounting.model import Bounds, Estimate, LossModel, Plan, Side
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import Point, Trial
from mfopt.accounting.monte_carlo.protocol import (
    DIRECTIONS,
    SampledDirection,
    SampledLoss,
)
from mfopt.accounting.monte_carlo.sampled import Chosen, unseen

_SHARES = np.geomspace(0.25, 2.0, 97)  # of ε/K: that a split may use, fewer of many steps
_FAINT, _DEEP = -1e3, -150.0  # log of an estimate of 0, and of ceilings that need no samples
_MOST_WORK, _AFFORDED = 3 * 2**23, 1024  # numbers of a test of one direction, or samples a point
_MANY, _PARTS = 32, 4  # units whose proposals are of high orders: a chunk of them takes long
_ORDER = 8  # of a proposal: a sample takes twice the time of one of order 0
_LEAST, _LITTLE = 256, math.log(1 / 16)  # samples of a point; what fewer may add to δ


def _mean(chosen: Chosen) -> float:
    """log of the estimate, or of the ceiling where that is enough."""
    return chosen.pilot.log_mean if chosen.sampled else chosen.pilot.tilt.log_ceiling


class _Split(NamedTuple):
    """A split of ε over the K steps.

    Attributes:
      shares: shape (K,), of ε, in the order of the formula; those that occur are m points.
      weights: shape (m,), log Σ e^{ε_1 + … + ε_{j-1}} over the steps of each point.
      chosen: what the bound at each point is drawn from, in the remove direction.
    """

    shares: np.ndarray
    weights: np.ndarray
    chosen: Sequence[Chosen]

    def sizes(self, samples: int, smallest: int, beta: float) -> list[int]:
        """Samples of each point, from ``smallest`` to ``samples``: as few as add little to δ."""
        sizes = [samples] * len(self.chosen)
        log_bounds = self.log_bounds(sizes, beta)
        little = scipy.special.logsumexp(log_bounds) + _LITTLE - math.log(len(sizes))
        log_bounds = np.logaddexp(log_bounds, little)
        while samples // 2 >= smallest:
            samples //= 2
            fewer = self.log_bounds([samples] * len(sizes), beta) <= log_bounds
            sizes = [
                samples if enough and size // 2 == samples else size
                for size, enough in zip(sizes, fewer, strict=True)
            ]
        return sizes

    def log_bounds(self, sizes: Sequence[int], beta: float) -> np.ndarray:
        """Weighed bounds to expect of so many samples at each point, β for all, in log."""
        share = beta / len(sizes)
        pairs = zip(self.chosen, sizes, strict=True)
        return self.weights + [chosen.log_bound(size, share) for chosen, size in pairs]


class SampledChain(LossModel):
    """Groups of K units.

    Args:
      loss: of one unit.
      group_size: K.
      samples: of each bound of the unit's profile, where they are asked for.
    """

    status = "certified"
    least_samples, worth, safe, flatter = 2**12, 0.004, 4.0, 0.65
    # what holds otherwise costs more
    most_slack, most_slack_delta = 4.0, 4.0

    def __init__(self, loss: SampledLoss, group_size: int, samples: int | None = None) -> None:
        self.group_size, self.samples = group_size, samples
        if group_size >= _MANY:
            loss = copy.copy(loss)
            object.__setattr__(loss, "chunk_parts", _PARTS)  # it may be a frozen dataclass
        self.loss, self.work, self.most_work = loss, loss.work, _MOST_WORK
        # a part of a chunk is made whole
        self._least = max(chunked.chunk_size(self.work * loss.chunk_parts), _LEAST)
        self.method = f"group privacy from the whole profile of sampled {loss.name}"
        self.estimator = f"group privacy from the estimated profile of sampled {loss.name}"
        # each that is used takes samples
        step = min(2 ** max(group_size.bit_length() - 3, 0), 8)
        self._shares = np.unique(np.minimum(_SHARES[::step] / group_size, 1.0))
        self._knot = functools.lru_cache(maxsize=256)(self._pilot)  # of σ, and the number of ε

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        # of the remove direction, the larger one as a rule
        return self._best(noise_multiplier, epsilon, _mean)[2]

    def guess(self, epsilon: float, delta: float) -> float:
        return self.loss.start(epsilon / self.group_size, delta / self.group_size)

    def find_epsilon(self, noise_multiplier: float, delta: float, start: float) -> Estimate:
        # what is known without samples is far above, where they take long
        return super().find_epsilon(noise_multiplier, delta, start / 4)

    # --- bounds ----------------------------------------------------------------------------------

    def pilot(self, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        """A plan without a split, by the curve alone."""
        question = noise_multiplier, epsilon
        shares, _, log_mean = self._best(*question, _mean)
        used = len(np.unique(shares))
        middle = self._middle(noise_multiplier, epsilon)
        spread = middle.pilot.deviation if math.isfinite(middle.pilot.deviation) else 0.0

        @functools.cache
        def excess(samples: int, beta: float) -> float:
            best = self._best(*question, lambda chosen: chosen.log_bound(samples, beta / used))
            return max(best[2] - log_mean, 0.0)

        enough = self._affordable([middle] * used)
        side = Side(log_mean, excess, spread, middle.pilot.samples, enough)
        return Plan((side,))

    def widened(self, plan: Plan, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        split = self._split(noise_multiplier, epsilon, trial)
        means = split.weights + np.maximum([_mean(choice) for choice in split.chosen], _FAINT)
        log_mean = float(scipy.special.logsumexp(means))
        spreads = np.array([choice.pilot.deviation for choice in split.chosen])
        # what no pilot has seen has no part in the mean
        parts = np.where(np.isfinite(spreads), spreads, 0.0) * np.exp(means - log_mean)
        enough = self._affordable(split.chosen)

        def excess(samples: int, beta: float) -> float:
            sizes = self._sizes(split, trial._replace(samples=samples, beta=beta))
            log_bound = float(scipy.special.logsumexp(split.log_bounds(sizes, beta)))
            return max(log_bound - log_mean, 0.0)

        sizes = np.array(self._sizes(split, trial))
        deviation = float(np.linalg.norm(parts * np.sqrt(np.max(sizes) / sizes)))
        deviation *= math.exp(-excess(trial.samples, trial.beta))
        pilot = min((choice.pilot.samples for choice in split.chosen if choice.sampled), default=1)
        return Plan((Side(log_mean, excess, deviation, pilot, enough),), split)

    def bounds(
        self, noise_multiplier: float, epsilon: float, plan: Plan | None, trial: Trial
    ) -> Bounds:
        keys = [chunked.subkey(trial.key, part) for part in range(3)]
        split = plan.detail if plan is not None else None
        if split is None:
            split = self._split(noise_multiplier, epsilon, trial._replace(key=keys[2]))
        spent = epsilon * (np.cumsum(split.shares) - split.shares)
        logs: dict[SampledDirection, list[float]] = {direction: [] for direction in DIRECTIONS}
        # a direction holds except with β, together over its points
        beta = trial.beta / len(split.chosen)
        sizes, previous = self._sizes(split, trial), None
        for number, point in enumerate(np.unique(split.shares)):
            size, chosen = sizes[number], split.chosen[number]
            weight = float(scipy.special.logsumexp(spent[split.shares == point]))
            point_at = Point(noise_multiplier, float(point) * epsilon)
            for direction, key in zip(DIRECTIONS, keys[:2], strict=True):
                share = Trial(size, beta, chunked.subkey(key, number, 0))
                if direction == "add":
                    # the split is the other direction's: to be below its bound is enough
                    chosen = previous = self._add(
                        point_at, share, logs["remove"][-1] - weight, previous
                    )
                    share = share._replace(key=chunked.subkey(key, number, 1))
                value = chosen.bound(self.loss, point_at, share).value
                logs[direction].append(weight + math.log(max(value, 1e-300)))
        totals = (float(scipy.special.logsumexp(logs[side])) for side in DIRECTIONS)
        remove, add = (math.exp(min(total, 0.0)) for total in totals)
        return Bounds(remove, add, {})

    def _add(self, point: Point, trial: Trial, enough: float, previous: Chosen | None) -> Chosen:
        """Proposal for a bound of the add direction, with no need to be below ``enough``.

        The proposal of the point ``previous`` where that serves: to choose one takes as long as
        the bound.
        """
        lowest = self.loss.least("add", point)
        if lowest.log_ceiling <= enough:
            return Chosen(unseen(lowest), False)
        pilot = None
        if previous is not None and previous.sampled:
            tilt = self.loss.at(previous.pilot.tilt, point)
            pilot = self.loss.pilot(tilt, point, self._least, chunked.subkey(trial.key, 2))
        if pilot is None or pilot.log_bound(trial.samples, trial.beta / 2)[1] > enough:
            pilot = self.loss.choose("add", point, trial)
        chosen, size = Chosen(pilot, True), trial.samples
        if self.samples is None:
            while size // 2 >= self._least and chosen.log_bound(size // 2, trial.beta) <= enough:
                size //= 2
        return chosen._replace(enough=size)

    def _affordable(self, chosen: Sequence[Chosen]) -> int | None:
        """Samples of each point that take so much time as a test may, for these proposals."""
        if self.samples is not None:
            return None
        cost = sum(1 + choice.pilot.tilt.order / _ORDER for choice in chosen) * self.work
        return max(int(_MOST_WORK / cost), _AFFORDED, self._least)

    def _sizes(self, split: _Split, trial: Trial) -> list[int]:
        if self.samples is not None:  # so many were asked for
            return [self.samples] * len(split.chosen)
        enough = self._affordable(split.chosen) or trial.samples
        return split.sizes(min(trial.samples, enough), self._least, trial.beta)

    def _split(self, noise_multiplier: float, epsilon: float, trial: Trial) -> _Split:
        """The best split by the bounds that such a trial should give."""
        sizes_and_share, question = (
            (trial.samples, trial.beta / self.group_size),
            (noise_multiplier, epsilon),
        )
        shares, spent, _ = self._best(*question, lambda chosen: chosen.log_bound(*sizes_and_share))
        used = np.unique(shares)
        weights = np.array([scipy.special.logsumexp(spent[shares == share]) for share in used])
        middle = self._middle(noise_multiplier, epsilon)
        largest_size = min(trial.samples, self._affordable([middle] * len(used)) or trial.samples)
        chosen = []
        for number, share in enumerate(used):
            point = Point(noise_multiplier, float(share) * epsilon)
            size = max(largest_size // 4, self._least)
            key = chunked.subkey(trial.key, number)
            chosen.append(self._seen(point, size, key))
        return _Split(shares, weights, chosen)

    # --- the curve -------------------------------------------------------------------------------

    def _best(
        self, noise_multiplier: float, epsilon: float, value: Callable[[Chosen], float]
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """The split of least δ on the curve through ``value`` of pilots.

        Returns:
          Its shares of ε, shape (K,), ε_1 + … + ε_{j-1} at each, and log δ.
        """
        question = self._shares, self.group_size, epsilon
        return chain.best_split(*question, lambda knot: value(self._knot(noise_multiplier, knot)))

    def _middle(self, noise_multiplier: float, epsilon: float) -> Chosen:
        return self._knot(noise_multiplier, chain.middle(self.group_size, epsilon))

    def _pilot(self, noise_multiplier: float, knot: int) -> Chosen:
        point = Point(noise_multiplier, chain.epsilon_at(knot))
        return self._seen(point, self._least, chunked.seed_key(0))

    def _seen(self, point: Point, samples: int, key: jax.Array) -> Chosen:
        """A pilot of the remove direction, with the proposal of least ceiling."""
        tilt = self.loss.least("remove", point)
        if tilt.log_ceiling < _DEEP:
            return Chosen(unseen(tilt), False)
        return Chosen(self.loss.pilot(tilt, point, samples, key), True)
