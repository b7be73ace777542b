"""Interface of a mechanism whose statements are verified: estimates, pilots and bounds."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from mfopt._runtime._types import JsonObject
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.protocol import FreeBound
from mfopt.errors import FailureError
from mfopt.guarantee import Status

_NEAR_ONE = 1e-2  # least -log δ of a search
LARGEST_EPSILON = 1e4  # that a search looks at


def largest(bounds: Iterable[float]) -> float:
    """The largest of the directions' bounds; infinite, so never accepted, where one is no bound."""
    bounds = list(bounds)
    fair = bool(bounds) and all(math.isfinite(bound) and bound >= 0 for bound in bounds)
    return max(bounds) if fair else math.inf


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Upper bounds of both directions, each except with the same probability β.

    Attributes:
      remove, add: of H(P, Q) and H(Q, P).
      numbers: public numbers about them.
    """

    remove: float
    add: float
    numbers: JsonObject

    @property
    def both(self) -> tuple[float, float]:
        """The two bounds."""
        return self.remove, self.add


@dataclasses.dataclass(frozen=True)
class Side:
    """Expected bound in one direction, from a pilot.

    Attributes:
      log_mean: log δ̂.
      excess: (samples, β) -> log of what the bound will be over δ̂.
      deviation: relative standard deviation of one sample.
      samples: the pilot's.
      enough: no more samples than these are taken, however many are asked for; None for no limit.
    """

    log_mean: float
    excess: Callable[[int, float], float]
    deviation: float
    samples: int
    enough: int | None = None

    def expected(self, samples: int, beta: float, errors: float, pilot: int = 0) -> float:
        """log of the expected bound, ``errors`` standard errors on the conservative side.

        Args:
          samples, beta: of the bound.
          errors: standard errors of the bound's samples and the pilot's together.
          pilot: samples of the pilot, where it is yet to be :meth:`LossModel.widened` to so many.
        """
        if not math.isfinite(self.deviation):
            return math.inf
        samples = samples if self.enough is None else min(samples, self.enough)
        pilot = max(self.samples, pilot)
        spread = self.deviation * math.hypot(1 / math.sqrt(samples), 1 / math.sqrt(pilot))
        return self.log_mean + self.excess(samples, beta) + math.log1p(errors * spread)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pilot: the sides that will be sampled, and what the model needs to bound them."""

    sides: tuple[Side, ...]
    detail: Any = None

    def expected(self, samples: int, beta: float, errors: float = 0.0, *, pilot: int = 0) -> float:
        """log of the larger bound that so many samples should give.

        Args:
          samples, beta, errors, pilot: as for :meth:`Side.expected`.
        """
        return max(side.expected(samples, beta, errors, pilot) for side in self.sides)

    @property
    def log_mean(self) -> float:
        """log δ̂."""
        return max(side.log_mean for side in self.sides)

    @property
    def error(self) -> float:
        """Relative standard error of δ̂."""
        return max(side.deviation / math.sqrt(side.samples) for side in self.sides)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of σ or ε to begin a search with; it proves nothing.

    Attributes:
      value: where log δ̂ = log δ.
      slope: of log δ̂ there, in the logarithm of the value.
      error: relative standard error of the value; 0 where it is unknown.
      direction: the direction that decides, "remove" or "add"; "both" where it is unknown.
      samples: of the last evaluation; 0 where it is unknown.
    """

    value: float
    slope: float
    error: float = 0.0
    direction: str = "both"
    samples: int = 0


class LossModel(abc.ABC):
    """A mechanism whose δ is estimated for searching and bounded for reporting.

    Attributes:
      method, status: of what ``bounds`` gives.
      estimator: what ``log_estimate`` is.
      work: numbers that one sample takes.
      most_work: samples times work, at most, that are taken without being asked for.
      samples: samples of a test, where they were asked for; else as many as are worth it.
      least_samples: of the last test, where nothing else was asked for.
      worth: slack, relative to x, above which a test of usual size is made larger.
      safe: standard errors beyond what a pilot expects that a test allows for: at 3, one in 700 is
        refused, and made again on fresh samples.
      deterministic: whether only what ``free_bounds`` show is released, and nothing is sampled.
      most_slack: of x, relative, that a bound may cost; beyond it none is taken from samples.
      flatter: slope of a bound in log x, over that of δ̂: its ceiling may fall more slowly.
      most_slack_delta: of log δ, where δ is asked for.
      details: what else a guarantee says about the mechanism.
    """

    method: str
    status: Status
    estimator: str
    work: int = 1
    most_work: int = 2**31
    samples: int | None = None
    least_samples: int = 2**16
    worth: float = 0.001
    safe: float = 3.0
    deterministic: bool = False
    most_slack: float = 0.25
    most_slack_delta: float = 0.5
    flatter: float = 1.0
    details: Mapping[str, Any] = MappingProxyType({})

    @abc.abstractmethod
    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        """log δ̂, the larger of both directions: the same number at each call. Proves nothing."""

    @abc.abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """Initial σ of a search."""

    @abc.abstractmethod
    def bounds(
        self, noise_multiplier: float, epsilon: float, plan: Plan | None, trial: Trial
    ) -> Bounds:
        """Upper bounds of δ in both directions, each except with the trial's probability β.

        Args:
          noise_multiplier, epsilon: σ, for C as stored, and ε.
          plan: from :meth:`pilot`, on other samples; None to make one on the way.
          trial: samples, β and key. Deterministic models ignore it, and the plan.
        """

    def require(self, noise_multiplier: float, epsilon: float) -> None:  # noqa: B027 - most can
        """Raise :class:`FailureError` where no bound can be drawn at this σ or a smaller one."""

    def pilot(self, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        """Return a plan for bounds near this point, which a sampled model is asked for.

        Args:
          noise_multiplier, epsilon: the middle of where they will be asked for.
          trial: samples and β of the bounds to come; the key is the pilot's, not theirs.
        """
        raise NotImplementedError

    def widened(self, plan: Plan, noise_multiplier: float, epsilon: float, trial: Trial) -> Plan:
        """The same plan from a pilot of half the trial's samples; by default the plan unchanged.

        Args:
          plan: from :meth:`pilot`, near here.
          noise_multiplier, epsilon: the middle of where bounds will be asked for.
          trial: samples and β of the bounds to come; the key is the pilot's, not theirs.
        """
        return plan

    def find_noise_multiplier(self, epsilon: float, delta: float, key: jax.Array) -> Estimate:
        """An estimate of σ."""
        return self.sought_noise_multiplier(epsilon, delta)

    def find_epsilon(self, noise_multiplier: float, delta: float, start: float) -> Estimate:
        """An estimate of ε.

        Args:
          noise_multiplier, delta: σ and δ.
          start: an ε to begin at.
        """
        return self.sought_epsilon(noise_multiplier, delta, start, near=1e-2)

    def sought_noise_multiplier(
        self,
        epsilon: float,
        delta: float,
        log_estimate: Callable[[float, float], float] | None = None,
    ) -> Estimate:
        """σ at which an estimate of log δ at (σ, ε) is log δ; by default :meth:`log_estimate`."""
        estimate = log_estimate or self.log_estimate

        def log_delta(sigma: float) -> float:
            try:
                return estimate(sigma, epsilon)
            except FailureError:  # beyond numerical range: far too little noise
                if sigma < start:
                    return 0.0
                raise

        start = self.guess(epsilon, delta)
        return self._find(log_delta, start, delta, near=1e-2, name="noise multiplier")

    def sought_epsilon(
        self, noise_multiplier: float, delta: float, start: float = 2.0, near: float = 0.0
    ) -> Estimate:
        """ε at which :meth:`log_estimate` is log δ.

        Args:
          noise_multiplier, delta: σ and δ.
          start: an ε to begin at.
          near: relative width, where a pilot moves the estimate; 0 for that of an answer.
        """
        return self._find(
            lambda epsilon: self.log_estimate(noise_multiplier, epsilon),
            start,
            delta,
            near,
            name="epsilon",
            least=1e-4,
            largest=LARGEST_EPSILON,
        )

    @staticmethod
    def _find(
        log_delta: Callable[[float], float],
        start: float,
        delta: float,
        near: float,
        **search: Any,
    ) -> Estimate:
        target = math.log(delta)
        log_delta = functools.cache(log_delta)  # the slope begins at the answer

        def excess(x: float) -> float:
            return log_delta(x) - target

        def height(x: float) -> float:  # nearly straight in log x, as a Gaussian tail's is
            # -inf where the estimate underflows, which ends the search by secants
            return math.log(-target) - math.log(-min(log_delta(x), -_NEAR_ONE))

        if near:
            crossing = solve.about(height, start, fall=2.0, relative=near)
            if crossing is not None:
                return Estimate(crossing[0], crossing[1] * target)
        value = solve.smallest(excess, start, relative=1e-3, **search)
        slope = (log_delta(value * 1.02) - log_delta(value)) / math.log(1.02)
        # a Gaussian tail's is twice log δ or steeper
        return Estimate(
            value, slope if math.isfinite(slope) and slope < 0 else min(2 * target, -1.0)
        )

    def log_below(
        self, noise_multiplier: float, epsilon: float, trial: Trial, enough: float = -math.inf
    ) -> float:
        """log of a lower bound of δ except with the trial's β; by default none is known.

        Args:
          noise_multiplier, epsilon: where.
          trial: samples, β and key.
          enough: of the logarithm: below it a bound is of no use, and none is sampled for.
        """
        return -math.inf

    def free_bounds(self) -> Sequence[FreeBound]:
        """Deterministic bounds in closed form."""
        return ()

    def slow_bounds(self) -> Sequence[FreeBound]:
        """Deterministic bounds that are asked for only where samples say little."""
        return ()
