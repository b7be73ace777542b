"""Interface of a sampled privacy loss, as calibration, optimizer and release engine use it.

Two objects, both found by dispatch:

* :func:`law` gives the :class:`SampledLaw` of a *scheme*: what the optimizer needs, δ̂ as a smooth
  function of the strategy and of σ on frozen draws, and the way to
* the :class:`SampledLoss` of one *mechanism*: estimates to search with, iid values with a proven
  ceiling in both directions, and the bounds that hold without any sample.

Balls-in-bins is the implementation in :mod:`mfopt.accounting.monte_carlo.balls_in_bins`. Another
scheme registers its own: ``@law.register(MyScheme)`` on a function of the scheme.
:func:`mfopt.testing.check_sampled_law` is the conformance test.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp

from mfopt._runtime import _check
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo.evidence import Pilot, Point, Tilt, Trial, UpperBound
from mfopt.accounting.monte_carlo.free import unamplified
from mfopt.sampling import Scheme
from mfopt.strategies import Strategy

SampledDirection = Literal["remove", "add"]
DIRECTIONS: tuple[SampledDirection, SampledDirection] = ("remove", "add")


class FreeBound(Protocol):
    """A bound on both directions that holds with certainty and costs no sample.

    Attributes:
      method: for the record.
      exact: whether the bound is the truth up to discretization, so that samples gain nothing.
    """

    @property
    def method(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        """Upper bounds of log H(P, Q) and log H(Q, P)."""

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        """Smallest σ at which both are <= log δ, verified by evaluation."""

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        """Smallest ε at which both are <= log δ, verified by evaluation."""


class SampledLoss(abc.ABC):
    """The privacy loss of one mechanism. Add-remove adjacency of one unit; σ for C as stored.

    Attributes:
      name: of the scheme, for the record.
      longest: what :attr:`sensitivity` is the norm of, likewise.
      estimator: what the estimates are, for the record.
      chunk_parts: that a usual chunk of samples is made into, where one sample takes long.
      calibrate_samples: of the estimate of σ that a certificate starts from.
      least_samples: of the last test of a certificate, in each direction.
    """

    name: ClassVar[str] = "sampled"
    longest: ClassVar[str] = "mode"
    estimator: ClassVar[str] = "importance sampling"
    chunk_parts = 1
    calibrate_samples: ClassVar[int] = 2**13
    least_samples: ClassVar[int] = 2**16

    @property
    def worth(self) -> float:
        """Relative slack of σ above which a certificate draws more than the minimum of samples."""
        return 0.001

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """Largest norm that one unit adds to C x, were its participations known."""

    @property
    @abc.abstractmethod
    def work(self) -> int:
        """Numbers that one sample takes: what sample counts are limited by."""

    @property
    def most_work(self) -> int:
        """Samples times work of a group's test, at most: a few CPU seconds."""
        return 2**28

    @abc.abstractmethod
    def start(self, epsilon: float, delta: float) -> float:
        """Initial σ of a search."""

    def group(self, size: int) -> SampledLoss | None:
        """The loss of so many units; None where no more is known than the profile of one."""
        return None

    @abc.abstractmethod
    def choose(
        self, direction: SampledDirection, point: Point, trial: Trial, log_mean: float | None = None
    ) -> Pilot:
        """The proposal that should bound best, and what a pilot saw of it.

        Args:
          direction: of the bound.
          point: where.
          trial: samples and β of the bound to come; the key is the pilots', not its.
          log_mean: log H where it is known about: a pilot that misses it is passed over.
        """

    @abc.abstractmethod
    def least(self, direction: SampledDirection, point: Point) -> Tilt:
        """The proposal of least ceiling."""

    def estimator_tilt(self, direction: SampledDirection, point: Point) -> Tilt:
        """The proposal that estimates use, whatever its ceiling: by default that of the least."""
        return self.least(direction, point)

    @abc.abstractmethod
    def pilot(self, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> Pilot:
        """iid values >= 0 whose mean is the divergence, or less; they choose, and bound from below.

        Args:
          tilt: the proposal, with its ceiling at ``point``.
          point, samples, key: where, at least how many, and randomness.
        """

    @abc.abstractmethod
    def at(self, tilt: Tilt, point: Point) -> Tilt:
        """The same proposal with its proven ceiling at another point."""

    @abc.abstractmethod
    def bound(self, tilt: Tilt, point: Point, bet: int, trial: Trial) -> UpperBound:
        """Upper bound of the tilt's direction except with probability β, on fresh samples.

        Args:
          tilt: the proposal, with its ceiling at ``point``.
          point: where.
          bet: index of λ in :data:`~mfopt.accounting.monte_carlo.betting.BETS`; neither it nor the
            tilt may depend on these samples.
          trial: samples, β and key.
        """

    def free_bounds(self) -> Sequence[FreeBound]:
        """Deterministic bounds in closed form, among them the mechanism without amplification."""
        how = f"bounded without amplification: Gaussian mechanism, largest {self.longest}"
        return (unamplified(self.sensitivity, f"{self.name}, {how}"),)

    def slow_bounds(self) -> Sequence[FreeBound]:
        """Further deterministic bounds, which take seconds."""
        return ()


class SampledLaw(abc.ABC):
    """Interface of a scheme for the optimizer. Hashable: static in compiled code.

    All methods run inside a float64 scope, and all but ``loss``, ``draws`` and ``proposal`` may be
    traced; draws and proposal are constants of the differentiation.

    Attributes:
      divisible: whether draws may be cut along the first axis of every array into equal parts,
        whose δ̂ have the whole's as their mean: a search spreads them over the local devices then.
      disagreement: largest relative difference of σ on frozen samples between two proposals, each
        placed near the solution.
    """

    divisible: ClassVar[bool] = False
    disagreement: ClassVar[float] = 0.002

    @abc.abstractmethod
    def loss(self, strategy: Strategy) -> SampledLoss:
        """The loss of the mechanism of ``strategy``, for proving: no approximation in it.

        Raises:
          UsageError: no dominating pair is known for this C.
        """

    def check(self, strategy: Strategy) -> Any:
        """Raise :class:`UsageError` for a C whose dominating pair is not known: by making it."""
        self.loss(strategy)

    def near(self, strategy: Strategy) -> SampledLoss:
        """A loss to find a first σ with; that of the mechanism, where nothing cheaper is known."""
        return self.loss(strategy)

    def coarse(self) -> SampledLaw:
        """A cheaper law whose optimum is near this one's: itself, where none is known."""
        return self

    def enough_samples(self, parameters: float) -> float:
        """Frozen samples beyond which a search over so many parameters ends no lower."""
        return math.inf

    def surrogate(self) -> SampledLaw | None:
        """A law without samples whose optimum is a start for a search, where one is known."""
        return None

    def surrogate_suffices(self, epsilon: float) -> bool:
        """True where samples would not move the surrogate's optimum: its σ is still a guess."""
        return False

    def check_shape(self, strategy: Strategy) -> None:  # noqa: B027 - most take any C
        """Raise :class:`UsageError` for a form of C that no parameters would make covered."""

    @abc.abstractmethod
    def draws(self, key: jax.Array, samples: int) -> PyTree:
        """Frozen randomness, a pytree."""

    @abc.abstractmethod
    def quadratic(self, strategy: Strategy) -> PyTree:
        """Sufficient statistic of δ, of degree two in C: a pytree, differentiable in the strategy.

        Scaling C by a multiplies it by a², so that σ grows with its square root.
        """

    def product(self, slope: PyTree, strategy: Strategy) -> jax.Array:
        """<slope, quadratic>, differentiable in the strategy; override where that is cheaper."""
        parts = jax.tree.map(lambda h, q: jnp.sum(h * q), slope, self.quadratic(strategy))
        return jax.tree.reduce(jnp.add, parts)

    @abc.abstractmethod
    def prepared(self, quadratic: PyTree) -> PyTree:
        """``quadratic`` with what sampling needs beside it (a factor, say), differentiable."""

    def reduced(self, strategy: Strategy) -> PyTree:
        """Input of the methods below, a pytree."""
        return self.prepared(self.quadratic(strategy))

    @abc.abstractmethod
    def log_scale(self, reduced: PyTree) -> jax.Array:
        """log of a length of C that σ is proportional to when C is multiplied by a constant."""

    @abc.abstractmethod
    def norm(self, reduced: PyTree) -> jax.Array:
        """Sensitivity of C without amplification: what C is normalized by."""

    @abc.abstractmethod
    def proposal(self, reduced: PyTree, noise_multiplier: Scalar, epsilon: Scalar) -> PyTree:
        """Proposal of the frozen draws. Any is unbiased; one near the solution has low variance."""

    @abc.abstractmethod
    def frozen(self, reduced: PyTree, proposal: PyTree, draws: PyTree) -> PyTree:
        """Terms that do not depend on σ, a pytree."""

    @abc.abstractmethod
    def log_delta(self, terms: PyTree, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
        """log δ̂ of the remove direction: smooth and decreasing in log σ."""


@functools.singledispatch
def law(scheme: Scheme) -> SampledLaw:
    """The sampled law of a scheme.

    Raises:
      UsageError: none is registered for this scheme.
    """
    known = sorted(cls.__name__ for cls in law.registry if cls is not object)
    rule = "no sampled privacy loss is known for this scheme"
    raise _check.reject("sampling", scheme, rule, f"There is one for {', '.join(known) or 'none'}.")


def is_sampled(scheme: Scheme) -> bool:
    """True for a scheme with a sampled law: σ of one unit is found by samples, or bounded."""
    return law.dispatch(type(scheme)) is not law.dispatch(object)


@functools.singledispatch
def loss_of(given: object) -> SampledLoss:
    """``given`` as a :class:`SampledLoss`: itself, or a dominating pair.

    Raises:
      UsageError: it is neither.
    """
    if isinstance(given, SampledLoss):
        return given
    raise _check.reject("pair", type(given).__name__, "must be a dominating pair or a SampledLoss")
