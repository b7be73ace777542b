"""One unit of a sampled privacy loss, alone or composed with others: estimates and bounds.

What it is composed with enters as δ₂, one for each direction: H = E δ₂(ε ∓ Y) (see
:mod:`mfopt.accounting.monte_carlo.importance`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from mfopt.accounting import solve
from mfopt.accounting.model import Bounds, Estimate, LossModel, Plan, Side
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import (
    HockeyStickPayoff,
    Payoff,
    Pilot,
    Point,
    Sums,
    Tilt,
    Trial,
    UpperBound,
    ceiling_alone,
)
from mfopt.accounting.monte_carlo.protocol import (
    DIRECTIONS,
    FreeBound,
    SampledDirection,
    SampledLoss,
)
from mfopt.errors import FailureError
from mfopt.guarantee import Status

_SEARCH_SAMPLES, _FIRST_SAMPLES = 4096, 1024  # of an estimate of log δ; of one that starts another
_FALL, _REFINED = 12.0, 1e-3  # of log δ̂ in log σ, about; relative accuracy of a first σ
_FALL_ERROR, _PART = 0.05, 0.25  # of a fall between equal samples; of σ's error, its accuracy
_DECISIVE = 4.0  # standard errors below δ at which a direction is met
_ENOUGH_ERROR = 1e-3  # of σ, relative, where a certificate begins: its pilots decide
_SERVES = 0.1  # of log σ and of ε: how far a proposal serves
_ALONE = 0.5  # a ceiling below this part of the other direction's δ̂ needs no samples
_PILOT = 16  # part of a test's samples, that a lower end is planned by
_ENOUGH, _SAFE, _LEAST = 5, 5.0, 8192  # the lesser direction's samples are halved so often at most,
# while its bound stays below the other's by so many standard errors, down to so many
# of ε, in largest norms over σ: a sampled pair may have a Gram matrix up to 3e-9 of the largest
# squared norm above that of C (:func:`.dominating_pair.above`), which moves its loss by √3e-9 of a
# normal number, and those are below 10
_BLUR = 6e-4


class ComposedMechanism(NamedTuple):
    """Other mechanisms on the same data, in one direction.

    Attributes:
      payoff: δ₂ of its finite losses.
      constant: what must be added to δ whatever the loss is.
    """

    payoff: Payoff = HockeyStickPayoff()
    constant: float = 0.0


class Chosen(NamedTuple):
    """One direction's proposal.

    Attributes:
      pilot: the proposal, and what was seen of it.
      sampled: false where its ceiling is enough.
      enough: samples beyond which more gain nothing, since the other direction's bound is larger;
        None where each counts.
    """

    pilot: Pilot
    sampled: bool
    enough: int | None = None

    def log_bound(self, samples: int, beta: float) -> float:
        """log of the bound that is expected of so many samples."""
        if not self.sampled:
            return self.pilot.tilt.log_ceiling
        return self.pilot.log_bound(samples, beta)[1]

    def bound(self, loss: SampledLoss, point: Point, trial: Trial) -> UpperBound:
        """The bound at a point, by the trial's samples or as many as are enough."""
        tilt = loss.at(self.pilot.tilt, point)
        if not self.sampled:
            return ceiling_alone(tilt)
        samples = min(trial.samples, self.enough or trial.samples)
        bet, _ = self.pilot.log_bound(samples, trial.beta)
        return loss.bound(tilt, point, bet, trial._replace(samples=samples))


def unseen(tilt: Tilt) -> Pilot:
    """A proposal whose ceiling is enough, without samples."""
    return Pilot(tilt, Sums(*(jax.numpy.zeros(()),) * 3), 1)


class OneUnit(LossModel):
    """One unit under any sampled loss.

    Args:
      loss: the mechanism's.
      samples: of each direction's test, where they are asked for.
      companions: what it is composed with, by direction; nothing by default.
      calibrate_samples: of the estimate of σ; by default as many as the loss says.
      near: σ within some percent, where it is known.
      deterministic: take every bound that needs no samples, and no other.
      rough: estimate by pilots of few samples of the remove direction, where only neighbourhoods
        are searched for.
    """

    status: Status = "certified"

    def __init__(
        self,
        loss: SampledLoss,
        samples: int | None = None,
        companions: Mapping[SampledDirection, ComposedMechanism] | None = None,
        calibrate_samples: int | None = None,
        near: float | None = None,
        deterministic: bool = False,
        rough: bool = False,
    ) -> None:
        self.loss, self.samples, self.work, self.worth = loss, samples, loss.work, loss.worth
        self.method = f"{loss.name} Monte Carlo, Rényi-tilted, estimate-verify-release"
        self.estimator = f"{loss.name} Monte Carlo, {loss.estimator}"
        self.alone, self.deterministic = companions is None, deterministic
        self.companions = companions or {direction: ComposedMechanism() for direction in DIRECTIONS}
        self.least_samples = loss.least_samples
        self._calibrate_samples = calibrate_samples or loss.calibrate_samples
        self._enough = 0.0 if calibrate_samples else _ENOUGH_ERROR
        self._near, self._rough = near, rough
        self._tilts: dict[SampledDirection, tuple[Point, Tilt]] = {}  # chosen last, and where

    # --- estimates -------------------------------------------------------------------------------

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        removed = self._log_removed(noise_multiplier, epsilon, _SEARCH_SAMPLES)
        if self._rough:
            return removed
        point = self._at("add", noise_multiplier, epsilon)
        tilt = self.loss.least("add", point)
        # a ceiling below the other direction's estimate is enough
        if self._with_constant("add", tilt.log_ceiling) <= removed:
            return removed
        tilt = self.loss.estimator_tilt("add", point)
        log_mean = self._glanced(tilt, point, chunked.seed_key(0)).log_mean
        return max(removed, self._with_constant("add", log_mean))

    def _log_removed(
        self, noise_multiplier: float, epsilon: float, samples: int = _FIRST_SAMPLES
    ) -> float:
        """log δ̂ of the remove direction."""
        point = self._at("remove", noise_multiplier, epsilon)
        tilt = self.loss.least("remove", point)
        pilot = self._glanced(tilt, point, chunked.seed_key(0), samples)
        return self._with_constant("remove", pilot.log_mean)

    def _glanced(
        self, tilt: Tilt, point: Point, key: jax.Array, samples: int = _SEARCH_SAMPLES
    ) -> Pilot:
        """A pilot of what is sampled, by the proposal of least ceiling."""
        searching = min(samples, self.loss.calibrate_samples)
        samples = self.least_samples // 4 if self._rough else searching
        return self.loss.pilot(tilt, point, samples, key)

    def _at(self, direction: SampledDirection, noise_multiplier: float, epsilon: float) -> Point:
        return Point(noise_multiplier, epsilon, self.companions[direction].payoff)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.loss.start(epsilon, delta)

    def find_noise_multiplier(self, epsilon: float, delta: float, key: jax.Array) -> Estimate:
        start = self._near
        if start is None:
            start = self.sought_noise_multiplier(epsilon, delta, self._log_removed).value
        estimate: Estimate | None = None
        for direction in DIRECTIONS[:1] if self._rough else DIRECTIONS:
            solved = self._solved(direction, estimate, start, epsilon, delta, key)
            estimate = solved or estimate
        # the same samples at every σ may see nothing, where fresh proposals at each do
        return estimate or self.sought_noise_multiplier(epsilon, delta)

    def _solved(
        self,
        direction: SampledDirection,
        other: Estimate | None,
        start: float,
        epsilon: float,
        delta: float,
        key: jax.Array,
    ) -> Estimate | None:
        """σ near ``start`` at which one direction is met, or near that of the ``other`` one.

        A quarter of the samples, the same at every σ, finds it and the fall of log δ̂; of all
        samples, where more are needed, one value is then enough. None where they do not lead to it,
        and where the direction is met at the other's σ already.
        """
        sigma, log_delta = start if other is None else other.value, math.log(delta)
        point = self._at(direction, sigma, epsilon)
        tilt = self.loss.least(direction, point)
        if other is not None:
            if self._with_constant(direction, tilt.log_ceiling) <= log_delta:
                return None
            tilt = self.loss.estimator_tilt(direction, point)
            glance = self._glanced(tilt, point, key)
            error = glance.deviation / math.sqrt(glance.samples)
            above = glance.log_mean + math.log1p(_DECISIVE * error)
            if self._with_constant(direction, above) <= log_delta:
                return None
        fall, relative, fall_error = _FALL, _REFINED, math.inf
        pilots: list[Pilot] = []

        def excess(samples: int, sigma: float) -> float:
            at = self._at(direction, sigma, epsilon)
            try:
                moved = self.loss.at(tilt, at)
            except FailureError:  # σ is out of range, and leads nowhere
                return math.nan
            pilots.append(self.loss.pilot(moved, at, samples, key))
            return self._with_constant(direction, pilots[-1].log_mean) - log_delta

        for samples in (max(self._calibrate_samples // 4, _FIRST_SAMPLES), self._calibrate_samples):
            values = functools.cache(functools.partial(excess, samples))
            crossing = solve.about(
                values, sigma, fall=fall, relative=relative, fall_error=fall_error
            )
            if crossing is None or not pilots[-1].deviation < math.inf:
                return None
            sigma, fall = crossing
            error = pilots[-1].deviation / math.sqrt(pilots[-1].samples) / fall
            relative, fall_error = _PART * error, _FALL_ERROR
            if error < self._enough:
                break
        if other is not None and sigma <= other.value:
            return None
        return Estimate(sigma, -fall, error, direction, pilots[-1].samples)

    def require(self, noise_multiplier: float, epsilon: float) -> None:
        self.loss.least("remove", self._at("remove", noise_multiplier, epsilon))

    # --- bounds ----------------------------------------------------------------------------------

    def pilot(self, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        chosen: dict[SampledDirection, Chosen] = {}
        for position, direction in enumerate(DIRECTIONS, 1):
            point = self._at(direction, noise_multiplier, epsilon)
            least = self.loss.least(direction, point)
            if direction == "add":
                remove = self._side("remove", chosen["remove"])
                if least.log_ceiling <= remove.log_mean + math.log(_ALONE):
                    chosen[direction] = Chosen(unseen(least), False)
                    continue
            tilt = self._known_tilt(direction, point)
            if tilt is None:
                about = None
                if direction == "remove":
                    key = chunked.subkey(trial.key, 0)
                    about = self._glanced(least, point, key, self._calibrate_samples // 4).log_mean
                own = trial._replace(key=chunked.subkey(trial.key, position, 0))
                tilt = self.loss.choose(direction, point, own, about).tilt
                self._tilts[direction] = point, tilt
            # the choice was the best looking of a few: what it costs is seen on samples of its own
            # (mostly the add direction's is the lesser: few samples tell, and it is widened if not)
            planned = trial.samples if direction == "remove" else min(trial.samples, _LEAST)
            size, key = max(planned // 2, 256), chunked.subkey(trial.key, position, 1)
            chosen[direction] = Chosen(self.loss.pilot(tilt, point, size, key), True)
        return self._planned(chosen, trial)

    def _known_tilt(self, direction: SampledDirection, point: Point) -> Tilt | None:
        """The proposal that was chosen near here: to choose takes long."""
        if direction not in self._tilts:
            return None
        there, tilt = self._tilts[direction]
        moved = abs(math.log(point.noise_multiplier / there.noise_multiplier))
        if moved > _SERVES or abs(point.epsilon / there.epsilon - 1) > _SERVES:
            return None
        return self.loss.at(tilt, point)

    def widened(self, plan: Plan, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        chosen: dict[SampledDirection, Chosen] = self._planned(plan.detail, trial).detail
        size = max(trial.samples // 2, 256)
        for position, direction in enumerate(DIRECTIONS, 1):
            choice = chosen[direction]
            if choice.sampled and choice.enough is None and size > choice.pilot.samples:
                point = self._at(direction, noise_multiplier, epsilon)
                tilt = self.loss.at(choice.pilot.tilt, point)
                key = chunked.subkey(trial.key, position)
                chosen[direction] = Chosen(self.loss.pilot(tilt, point, size, key), True)
        return self._planned(chosen, trial)

    def _planned(self, chosen: dict[SampledDirection, Chosen], trial: Trial) -> Plan:
        """The plan of these proposals: the lesser direction gets no more samples than it needs."""
        chosen = {d: choice._replace(enough=None) for d, choice in chosen.items()}
        sides = {d: self._side(d, choice) for d, choice in chosen.items() if choice.sampled}
        if self.samples is not None:  # so many were asked for in each direction
            return Plan(tuple(sides.values()), chosen)
        most = max(side.expected(trial.samples, trial.beta, 0.0) for side in sides.values())
        for direction, side in sides.items():
            for halvings in range(_ENOUGH, 0, -1):
                size = trial.samples >> halvings
                if size >= _LEAST and side.expected(size, trial.beta, _SAFE) <= most:
                    chosen[direction] = choice = chosen[direction]._replace(enough=size)
                    sides[direction] = self._side(direction, choice)
                    break
        return Plan(tuple(sides.values()), chosen)

    def _side(self, direction: SampledDirection, chosen: Chosen) -> Side:
        pilot = chosen.pilot
        if direction == "add" and not pilot.log_mean > -math.inf:
            return self._unseen_side(chosen)
        log_mean = self._with_constant(direction, pilot.log_mean)
        # a constant takes no samples: its part of δ̂ has no spread
        part = math.exp(min(pilot.log_mean - log_mean, 0.0)) if log_mean > -math.inf else 0.0

        def excess(samples: int, beta: float) -> float:
            return math.log1p(part * math.expm1(min(pilot.expected(samples, beta)[1], 700.0)))

        return Side(log_mean, excess, part * pilot.deviation, pilot.samples, chosen.enough)

    def _unseen_side(self, chosen: Chosen) -> Side:
        """The add direction where no sample of a pilot was above 0, nor is one of a test.

        The bound of such a test is known; only that of removing says how large δ is.
        """
        pilot = chosen.pilot
        log_mean = pilot.tilt.log_ceiling - math.log(pilot.samples)
        log_mean = self._with_constant("add", log_mean)

        def excess(samples: int, beta: float) -> float:
            log_bound = self._with_constant("add", pilot.log_bound(samples, beta)[1])
            return max(log_bound - log_mean, 0.0)

        return Side(log_mean, excess, 0.0, pilot.samples, chosen.enough)

    def _with_constant(self, direction: SampledDirection, log_value: float) -> float:
        constant = self.companions[direction].constant
        if constant <= 0:
            return log_value
        return min(math.log(math.exp(min(log_value, 0.0)) + constant), 0.0)

    def bounds(
        self, noise_multiplier: float, epsilon: float, plan: Plan | None, trial: Trial
    ) -> Bounds:
        if plan is None:
            first = trial._replace(key=chunked.subkey(trial.key, 0))
            plan = self.pilot(noise_multiplier, epsilon, first)
        found = {
            direction: plan.detail[direction].bound(
                self.loss,
                self._at(direction, noise_multiplier, epsilon),
                trial._replace(key=chunked.subkey(trial.key, position)),
            )
            for position, direction in enumerate(DIRECTIONS, 1)
        }
        remove, add = found["remove"], found["add"]
        numbers = {
            "order": remove.order,
            "samples": remove.samples,
            "add_samples": add.samples,
            "estimate": remove.mean,
        }
        return Bounds(
            remove.value + self.companions["remove"].constant,
            add.value + self.companions["add"].constant,
            numbers,
        )

    def log_below(
        self, noise_multiplier: float, epsilon: float, trial: Trial, enough: float = -math.inf
    ) -> float:
        # of the remove direction; the payoff of a companion is a bound from above
        if not self.alone:
            return -math.inf
        blur = _BLUR * self.loss.sensitivity / noise_multiplier
        point = self._at("remove", noise_multiplier, epsilon + blur)
        tilt = self._known_tilt("remove", point) or self.loss.least("remove", point)
        size, key = max(trial.samples // _PILOT, 1), chunked.subkey(trial.key, 1)
        pilot = self.loss.pilot(tilt, point, size, key)
        # from below no ceiling counts: a higher order, whose values spread less, is better
        while (order := pilot.tilt.next_order) is not None:
            tilt = self.loss.at(pilot.tilt._replace(order=order), point)
            if not (other := self.loss.pilot(tilt, point, size, key)).deviation < pilot.deviation:
                break
            pilot = other

        def suffice(samples: int) -> bool:
            spread = pilot.deviation * math.hypot(samples**-0.5, size**-0.5)
            below = pilot.log_below(pilot, samples, trial.beta)
            return spread < 1 and below + math.log1p(-spread) > enough

        samples = trial.samples
        if not suffice(samples):
            return -math.inf
        # twice what should suffice: another try costs more
        while enough > -math.inf and samples > size and suffice(samples // 4):
            samples //= 2
        drawn = self.loss.pilot(pilot.tilt, point, samples, chunked.subkey(trial.key, 2))
        return drawn.log_below(pilot, drawn.samples, trial.beta)

    def free_bounds(self) -> Sequence[FreeBound]:
        if not self.alone:
            return ()
        slow = self.loss.slow_bounds() if self.deterministic else ()
        return (*self.loss.free_bounds(), *slow)

    def slow_bounds(self) -> Sequence[FreeBound]:
        return self.loss.slow_bounds() if self.alone else ()
