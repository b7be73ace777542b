"""One unit of a sampled privacy loss, alone or composed with others: estimates and bounds.

What it is composed with enters as δ₂, one for each direction: H = E δ₂(ε ∓ Y) (see
:mod:`mfopt.accounting.monte_carlo.importance`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from mfopt._runtime._float64 import float64
from mfopt.accounting.model import Bounds, Found, LossModel, Plan, Side
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.calibrate import Calibration, calibrate, rough
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

_SEARCH_SAMPLES = 4096
_SHARE = 1e-3  # β over δ of a bound that is imagined
# Where σ is found by pilots: of log δ in log σ, about; so many steps of log σ at most, none longer,
# and what is near enough for a certificate to begin at.
_SLOPE, _STEPS, _STEP, _NEAR = -12.0, 3, 0.1, 0.015
_SURE, _FIRM = 0.3, 0.1  # relative standard error of δ̂ on frozen samples up to which it is
# believed, and up to which pilots need not improve on its σ
_SERVES = 0.1  # of log σ and of ε: how far a proposal serves that takes long to choose
_ALONE = 0.5  # a ceiling below this part of the other direction's δ̂ needs no samples
_ENOUGH, _SAFE, _LEAST = 5, 5.0, 8192  # the lesser direction's samples are halved so often at most,
# while its bound stays below the other's by so many standard errors, down to so many


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
        self._near, self._rough = near, rough
        self._tilts: dict[SampledDirection, tuple[Point, Tilt]] = {}  # chosen last, and where

    # --- estimates -------------------------------------------------------------------------------

    @float64
    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        key = chunked.seed_key(0)
        if self._frozen:
            frozen = self.loss.frozen(noise_multiplier, epsilon, _SEARCH_SAMPLES, key)
            log_sigma = math.log(noise_multiplier)
            both = frozen.evaluate(log_sigma), frozen.evaluate_add(log_sigma)
            larger = max(both, key=lambda at: float(at.value))
            if larger.relative_error < _SURE:
                return float(larger.value)
        found: list[float] = []
        for direction in DIRECTIONS[:1] if self._rough else DIRECTIONS:
            point = self._at(direction, noise_multiplier, epsilon)
            tilt = self.loss.least(direction, point)
            # a ceiling below the other direction's estimate is enough
            if not found or self._with_constant(direction, tilt.log_ceiling) > found[0]:
                found.append(self._with_constant(direction, self._glanced(tilt, point, key)))
        return max(found)

    @property
    def _frozen(self) -> bool:
        """False where pilots estimate: the slope is of no use, or design points take long."""
        return self.alone and not self._rough and self.loss.smooth and not self._pilots

    @property
    def _pilots(self) -> bool:
        """True where what a bound will be drawn from finds σ better, or near σ for less."""
        return self.loss.many or (self._near is not None and self.loss.costly)

    def _glanced(self, tilt: Tilt, point: Point, key: jax.Array) -> float:
        """log δ̂ of what is sampled, by the proposal of least ceiling."""
        samples = self.least_samples // 4 if self._rough else _SEARCH_SAMPLES
        return self.loss.pilot(tilt, point, samples, key).log_mean

    def _at(self, direction: SampledDirection, noise_multiplier: float, epsilon: float) -> Point:
        return Point(noise_multiplier, epsilon, self.companions[direction].payoff)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.loss.start(epsilon, delta)

    def find_noise_multiplier(self, epsilon: float, delta: float, key: jax.Array) -> Found:
        if not self.alone:
            return super().find_noise_multiplier(epsilon, delta, key)
        samples, near = self._calibrate_samples, self._near
        if self._pilots and (near is not None or not self.loss.smooth):
            near = near or rough(self.loss, epsilon, delta, chunked.subkey(key, 0))
            by_pilots = self._by_pilots(near, epsilon, delta, key)
            if by_pilots is not None:
                return by_pilots
        try:
            found = calibrate(self.loss, epsilon, delta, samples=samples, near=near, key=key)
        except FailureError:  # one proposal for all σ may serve at none
            return super().find_noise_multiplier(epsilon, delta, key)
        if not found.relative_error * abs(found.slope) < _FIRM:
            by_pilots = self._by_pilots(found.noise_multiplier, epsilon, delta, key)
            if by_pilots is not None:
                return by_pilots
        return Found(found.noise_multiplier, found.slope, found)

    def _by_pilots(self, near: float, epsilon: float, delta: float, key: jax.Array) -> Found | None:
        """σ by what a bound will be drawn from, at a few σ: for a loss of many modes.

        None where that does not lead to it.
        """
        trial = Trial(self.least_samples, delta * _SHARE, chunked.subkey(key, 0))
        log_sigma, point = math.log(near), self._at("remove", near, epsilon)
        taken = self.loss.choose("remove", point, trial)
        self._tilts["remove"] = point, taken.tilt
        value, slope = taken.log_mean - math.log(delta), _SLOPE
        for number in range(1, _STEPS + 1):
            if not math.isfinite(value):  # no sample was above 0
                return None
            step = max(-_STEP, min(value / -slope, _STEP))
            if number > 1 and abs(step) < _NEAR:
                break
            # far enough apart for a slope to be read off
            step = math.copysign(max(abs(step), _NEAR), step) if number == 1 else step
            log_sigma += step
            point = self._at("remove", math.exp(log_sigma), epsilon)
            tilt = self.loss.at(taken.tilt, point)
            # on the same samples from the second step on, for the slope
            taken = self.loss.pilot(tilt, point, taken.samples, trial.key)
            before, value = value, taken.log_mean - math.log(delta)
            slope = min((value - before) / step, _SLOPE / 4)
        if not abs(value) < _STEP * -slope:
            return None
        sigma = math.exp(log_sigma - value / slope)
        error = taken.deviation / math.sqrt(taken.samples) / -slope
        return Found(sigma, slope, Calibration(sigma, error, slope, "remove", taken.samples))

    def require(self, noise_multiplier: float, epsilon: float) -> None:
        self.loss.least("remove", self._at("remove", noise_multiplier, epsilon))

    # --- bounds ----------------------------------------------------------------------------------

    def pilot(self, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        known, key = None, chunked.subkey(trial.key, 0)
        if self._frozen:
            frozen = self.loss.frozen(noise_multiplier, epsilon, _SEARCH_SAMPLES, key)
            at = frozen.evaluate(math.log(noise_multiplier))
            known = at.value if at.relative_error < _SURE else None
        elif self.alone and not self._pilots:
            point = self._at("remove", noise_multiplier, epsilon)
            known = self._glanced(self.loss.least("remove", point), point, key)
        chosen: dict[SampledDirection, Chosen] = {}
        for position, direction in enumerate(DIRECTIONS, 1):
            point = self._at(direction, noise_multiplier, epsilon)
            if direction == "add":
                least = self.loss.least(direction, point)
                remove = self._side("remove", chosen["remove"])
                if least.log_ceiling <= remove.log_mean + math.log(_ALONE):
                    chosen[direction] = Chosen(unseen(least), False)
                    continue
            tilt = self._known_tilt(direction, point)
            if tilt is None:
                key = chunked.subkey(trial.key, position, 0)
                about = known if direction == "remove" else None
                tilt = self.loss.choose(direction, point, trial._replace(key=key), about).tilt
                self._tilts[direction] = point, tilt
            # the choice was the best looking of a few: what it costs is seen on samples of its own
            size, key = max(trial.samples // 2, 256), chunked.subkey(trial.key, position, 1)
            chosen[direction] = Chosen(self.loss.pilot(tilt, point, size, key), True)
        return self._planned(chosen, trial)

    def _known_tilt(self, direction: SampledDirection, point: Point) -> Tilt | None:
        """The proposal that was chosen near here, where to choose takes long."""
        if not self._pilots or direction not in self._tilts:
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
            one = chosen[direction]
            if one.sampled and one.enough is None and size > one.pilot.samples:
                point = self._at(direction, noise_multiplier, epsilon)
                tilt, key = self.loss.at(one.pilot.tilt, point), chunked.subkey(trial.key, position)
                chosen[direction] = Chosen(self.loss.pilot(tilt, point, size, key), True)
        return self._planned(chosen, trial)

    def _planned(self, chosen: dict[SampledDirection, Chosen], trial: Trial) -> Plan:
        """The plan of these proposals: the lesser direction gets no more samples than it needs."""
        chosen = {d: one._replace(enough=None) for d, one in chosen.items()}
        sides = {d: self._side(d, one) for d, one in chosen.items() if one.sampled}
        if self.samples is not None:  # so many were asked for in each direction
            return Plan(tuple(sides.values()), chosen)
        most = max(side.expected(trial.samples, trial.beta, 0.0) for side in sides.values())
        for direction, side in sides.items():
            for halvings in range(_ENOUGH, 0, -1):
                size = trial.samples >> halvings
                if size >= _LEAST and side.expected(size, trial.beta, _SAFE) <= most:
                    chosen[direction] = one = chosen[direction]._replace(enough=size)
                    sides[direction] = self._side(direction, one)
                    break
        return Plan(tuple(sides.values()), chosen)

    def _side(self, direction: SampledDirection, chosen: Chosen) -> Side:
        pilot = chosen.pilot
        log_mean = self._with_constant(direction, pilot.log_mean)
        # a constant takes no samples: its part of δ̂ has no spread
        part = math.exp(min(pilot.log_mean - log_mean, 0.0)) if log_mean > -math.inf else 0.0

        def excess(samples: int, beta: float) -> float:
            return math.log1p(part * math.expm1(min(pilot.expected(samples, beta)[1], 700.0)))

        return Side(log_mean, excess, part * pilot.deviation, pilot.samples, chosen.enough)

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

    def free_bounds(self) -> Sequence[FreeBound]:
        if not self.alone:
            return ()
        slow = self.loss.slow_bounds() if self.deterministic else ()
        return (*self.loss.free_bounds(), *slow)

    def slow_bounds(self) -> Sequence[FreeBound]:
        return self.loss.slow_bounds() if self.alone else ()
