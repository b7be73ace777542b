"""One unit of a sampled privacy loss, alone or composed with something else: estimates and bounds.

What it is composed with enters as δ₂, one for each direction: H = E δ₂(ε ∓ Y) (see
:mod:`mfopt.accounting.monte_carlo.tilted`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from mfopt._float64 import float64
from mfopt.accounting.model import Bounds, Found, LossModel, Plan, Side
from mfopt.accounting.monte_carlo import _chunks, tilted
from mfopt.accounting.monte_carlo.calibrate import calibrate
from mfopt.accounting.monte_carlo.protocol import (
    DIRECTIONS,
    FreeBound,
    SampledDirection,
    SampledLoss,
)
from mfopt.accounting.monte_carlo.tilted import Hinge, Payoff, Pilot
from mfopt.guarantee import Status

CALIBRATE_SAMPLES = 2**15  # of the estimate of σ that a certificate starts from
_SEARCH_SAMPLES = 4096
_ALONE = 0.5  # a ceiling below this part of the other direction's δ̂ needs no samples


class Companion(NamedTuple):
    """What else touches the data, in one direction.

    Attributes:
      payoff: δ₂ of its finite losses.
      constant: what must be added to δ whatever the loss is.
    """

    payoff: Payoff = Hinge()
    constant: float = 0.0


class Chosen(NamedTuple):
    """One direction's proposal; ``sampled`` is false where its ceiling is enough."""

    pilot: Pilot
    sampled: bool


class OneUnit(LossModel):
    """One unit under any sampled loss.

    Args:
      loss: the mechanism's.
      samples: of each direction's test, where they are asked for.
      companions: what it is composed with, by direction; nothing by default.
      calibrate_samples: of the estimate of σ.
    """

    method = "balls-in-bins Monte Carlo, Rényi-tilted, estimate-verify-release"
    estimator = "balls-in-bins Monte Carlo, design-point importance sampling"
    status: Status = "certified"

    def __init__(
        self,
        loss: SampledLoss,
        samples: int | None = None,
        companions: Mapping[SampledDirection, Companion] | None = None,
        calibrate_samples: int = CALIBRATE_SAMPLES,
    ) -> None:
        self.loss, self.samples, self.work = loss, samples, loss.work
        self.alone = companions is None
        self.companions = companions or {direction: Companion() for direction in DIRECTIONS}
        self._calibrate_samples = calibrate_samples

    # --- estimates -------------------------------------------------------------------------------

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        return max(self.log_estimates(noise_multiplier, epsilon))

    @float64
    def log_estimates(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        """log δ̂ of the remove and of the add direction, always from the same random numbers."""
        key = _chunks.seed_key(0)
        if self.alone:
            frozen = self.loss.frozen(noise_multiplier, epsilon, _SEARCH_SAMPLES, key)
            log_sigma = math.log(noise_multiplier)
            return frozen.evaluate(log_sigma).value, frozen.log_delta_add(log_sigma)
        remove, add = (
            self._with_constant(
                direction,
                self.loss.pilot(
                    self.loss.least(direction, noise_multiplier, epsilon, companion.payoff),
                    noise_multiplier,
                    epsilon,
                    samples=_SEARCH_SAMPLES,
                    key=key,
                    payoff=companion.payoff,
                ).log_mean,
            )
            for direction, companion in self.companions.items()
        )
        return remove, add

    def guess(self, epsilon: float, delta: float) -> float:
        return self.loss.start(epsilon, delta)

    def find_noise_multiplier(self, epsilon: float, delta: float, key: jax.Array) -> Found:
        if not self.alone:
            return super().find_noise_multiplier(epsilon, delta, key)
        found = calibrate(self.loss, epsilon, delta, samples=self._calibrate_samples, key=key)
        return Found(found.noise_multiplier, found.slope, found)

    # --- bounds ----------------------------------------------------------------------------------

    def pilot(
        self, noise_multiplier: float, epsilon: float, samples: int, beta: float, key: jax.Array
    ) -> Plan:
        known = None
        if self.alone:
            frozen = self.loss.frozen(
                noise_multiplier, epsilon, _SEARCH_SAMPLES, _chunks.subkey(key, 0)
            )
            known = frozen.evaluate(math.log(noise_multiplier)).value
        chosen: dict[SampledDirection, Chosen] = {}
        sides: list[Side] = []
        for position, direction in enumerate(DIRECTIONS, 1):
            payoff = self.companions[direction].payoff
            if direction == "add":
                least = self.loss.least(direction, noise_multiplier, epsilon, payoff)
                if least.log_ceiling <= sides[0].log_mean + math.log(_ALONE):
                    nothing = tilted.Sums(*(jax.numpy.zeros(()),) * 3)
                    chosen[direction] = Chosen(Pilot(least, nothing, 1), False)
                    continue
            first = self.loss.choose(
                direction,
                noise_multiplier,
                epsilon,
                samples=samples,
                beta=beta,
                key=_chunks.subkey(key, position, 0),
                payoff=payoff,
                log_mean=known if direction == "remove" else None,
            )
            # the choice was the best looking of a few: what it costs is seen on samples of its own
            taken = self.loss.pilot(
                first.tilt,
                noise_multiplier,
                epsilon,
                samples=max(samples // 2, 256),
                key=_chunks.subkey(key, position, 1),
                payoff=payoff,
            )
            chosen[direction] = Chosen(taken, True)
            sides.append(self._side(direction, taken))
        return Plan(tuple(sides), chosen)

    def _side(self, direction: SampledDirection, pilot: Pilot) -> Side:
        log_mean = self._with_constant(direction, pilot.log_mean)
        # a constant takes no samples: its part of δ̂ has no spread
        part = math.exp(min(pilot.log_mean - log_mean, 0.0)) if log_mean > -math.inf else 0.0

        def excess(samples: int, beta: float) -> float:
            return math.log1p(part * math.expm1(min(pilot.expected(samples, beta)[1], 700.0)))

        return Side(log_mean, excess, part * pilot.deviation, pilot.samples)

    def _with_constant(self, direction: SampledDirection, log_value: float) -> float:
        constant = self.companions[direction].constant
        if constant <= 0:
            return log_value
        return min(math.log(math.exp(min(log_value, 0.0)) + constant), 0.0)

    def bounds(
        self,
        noise_multiplier: float,
        epsilon: float,
        plan: Plan | None,
        samples: int,
        beta: float,
        key: jax.Array,
    ) -> Bounds:
        if plan is None:
            plan = self.pilot(noise_multiplier, epsilon, samples, beta, _chunks.subkey(key, 0))
        found = {
            direction: self._bound(
                direction,
                plan.detail[direction],
                noise_multiplier,
                epsilon,
                samples,
                beta,
                _chunks.subkey(key, position),
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

    def _bound(
        self,
        direction: SampledDirection,
        chosen: Chosen,
        sigma: float,
        epsilon: float,
        samples: int,
        beta: float,
        key: jax.Array,
    ) -> tilted.UpperBound:
        payoff = self.companions[direction].payoff
        tilt = self.loss.at(chosen.pilot.tilt, sigma, epsilon, payoff)
        if not chosen.sampled:
            return tilted.ceiling_alone(tilt)
        bet, _ = chosen.pilot.expected(samples, beta)
        return self.loss.bound(
            tilt, sigma, epsilon, bet=bet, samples=samples, beta=beta, key=key, payoff=payoff
        )

    def direction_bound(
        self,
        direction: SampledDirection,
        sigma: float,
        epsilon: float,
        beta: float,
        key: jax.Array,
        samples: int,
    ) -> float:
        """Upper bound of δ in one direction except with probability ``beta``."""
        payoff = self.companions[direction].payoff
        least = self.loss.least(direction, sigma, epsilon, payoff)
        # β is a small part of δ: a ceiling of that size needs no sampling
        if direction == "add" and least.log_ceiling <= math.log(beta):
            return tilted.ceiling_alone(least).value
        pilot = self.loss.choose(
            direction,
            sigma,
            epsilon,
            samples=samples,
            beta=beta,
            key=_chunks.subkey(key, 0),
            payoff=payoff,
        )
        found = self._bound(
            direction, Chosen(pilot, True), sigma, epsilon, samples, beta, _chunks.subkey(key, 1)
        )
        return found.value + self.companions[direction].constant

    def free_bounds(self) -> Sequence[FreeBound]:
        return self.loss.free_bounds() if self.alone else ()
