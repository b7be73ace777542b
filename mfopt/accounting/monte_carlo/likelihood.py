"""The interface of a scheme's likelihood ratio, and the part of it that all patterns share.

A *pattern* says in which steps a unit takes part. It has a public law, m_k is the sum of the
columns of C that pattern k picks (its *mode*), and in noise units (divided by σ)

    P = E_k N(m_k, I)   against   Q = N(0, I),    Y = log P/Q (X) = log E_k e^(<m_k, X> − |m_k|²/2).

A pattern picks *entries*: bins, steps, whatever a scheme's recursion runs over. X enters through
the numbers <m, X> of the entries alone, called *exponents* here: a pattern's <m_k, X> is the sum of
those that it picks. A scheme gives a :class:`Likelihood` (the recursion of Y, a draw of patterns
and white noise) and its :class:`Ceilings`; :mod:`.importance` has estimates and bounds for all.

**The shared component.** Let û be a unit vector and a_e = <m_e, û> for each entry e such that every
pattern has Σ_{e in k} a_e = r > 0. With 0 < q < 1, θ² = 1 − q and c = q r², take

    m'_e = m_e − (1 − θ) a_e û,

what is left of an entry with a little of it along û, so that the mean pattern is not 0.

(1) Off û nothing has changed, and along it θ a_e is left: <m'_k, m'_l> = <m_k, m_l> − c.
(2) P = N(√c, 1) × P' and Q = N(0, 1) × Q' up to a rotation, P' and Q' those of m': the Gram matrix
    of the patterns is c·11ᵀ plus that of the m'_k. So Y = Y₂ + Y', the first of a Gaussian release
    of shift √c, independent of the other under P and under Q, and
    H(P, Q) = E_P' δ₂(ε − Y'), H(Q, P) = E_Q' δ₂(ε + Y'), δ₂(t) = H_{e^t}(N(√c, 1), N(0, 1)).
(3) Y' = log E_k e^(<m'_k, X> − |m_k|²/2) + c/2: the scheme's recursion at the exponents of m',
    with the norms and overlaps of the m_e themselves.
(4) No proof of :mod:`.importance` asks for the sign of an overlap. With l patterns in V all
    <m_k, V> are less by l c: patterns are drawn as before, each log N_l is less by l c, and so is
    its ceiling; the squares of the longest and of the mean pattern and the mean square are less by
    c.

What is exact in δ₂ need not be sampled, and the ceiling loses the peak of the hockey-stick payoff.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _quick
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._types import PyTree
from mfopt.errors import FailureError
from mfopt.strategies.fields import Array

_PART = 0.999  # q: of the squared length along û
_LEFT = math.sqrt(1 - _PART)  # θ
_WORTH = 1e-3  # of the largest squared norm of a pattern: a smaller c gains nothing
_ROUNDING = 1e-9  # relative: the products of û with the entries of a round against each other


class Drawn(NamedTuple):
    """Patterns drawn one after another, by the sum V of their modes, in noise units.

    Attributes:
      products: <m, V> for every entry, shape (size, entries).
      along, square, log_normalizers: <noise, V>, |V|² and Σ_l log N_l, shape (size,).
    """

    products: jax.Array
    along: jax.Array
    square: jax.Array
    log_normalizers: jax.Array

    @classmethod
    def nothing(cls, noise: jax.Array) -> Drawn:
        """Empty patterns, for ``noise`` of shape (size, entries)."""
        return cls(jnp.zeros_like(noise), *(jnp.zeros(len(noise)),) * 3)


class Likelihood(Protocol):
    """P against Q by the recursion of a scheme, a JAX pytree, in noise units.

    Attributes:
      dimension: length of X, or of what stands for it.
      work: numbers that one sample takes; chunks are made by it.
    """

    @property
    def dimension(self) -> int: ...

    @property
    def work(self) -> int: ...

    def scaled(self, noise_multiplier: Scalar) -> Likelihood:
        """Divide all modes by σ."""

    def noise(self, normal: jax.Array) -> jax.Array:
        """<m, z> of every entry for rows z: (size, dimension) -> (size, entries)."""

    def log_ratio(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        """log E_k e^(p <m_k, X> − p² |m_k|²/2): Y at p = 1; (size, entries) -> (size,)."""

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        """1 + ``order`` patterns for each row of ``noise``; one compilation for any order.

        The first follows the pattern's law; of the l-th the density over that law is e^<m_k, V>/N_l
        with V the sum of the modes before it. Where ``plan`` is given, patterns may be drawn in any
        other way for which X ~ N(V, I) and Π N_l keep their meaning in :mod:`.importance`.

        Args:
          keys: two keys.
          noise: :meth:`noise` of the samples.
          order: s, whole.
          plan: what the ceiling's :class:`PatternChain` gave for this order.
        """

    def average(self, exponents: jax.Array) -> jax.Array:
        """E_k <m_k, X>: (size, entries) -> (size,)."""

    def mean(self) -> tuple[jax.Array, jax.Array]:
        """(<m, m̄> of every entry, |m̄|²) of the mean mode m̄ = E_k m_k: shapes (entries,), ()."""


class PatternChain(NamedTuple):
    """A way to draw patterns one after another, with its ceiling.

    Attributes:
      ceiling: s -> (log of an upper bound of Π_{l<=s} N_l, what :meth:`Likelihood.draw` takes).
      most: the largest s that is known.
    """

    ceiling: Callable[[int], tuple[float, PyTree]]
    most: int


def summed(log_largest: Callable[[int], float]) -> Callable[[int], tuple[float, None]]:
    """s -> (Σ_{l<=s} log R_l, None), for a :class:`PatternChain`; each R_l is found once.

    log R_l is convex in l, a maximum over k' of some log E e^(l x) + l y. So beyond l = 8 every
    second is found, beyond 16 every fourth and so on, and the others are taken on the chords, which
    are above: an upper bound at both ends is one between.
    """
    cached = functools.cache(log_largest)

    def largest(l: int) -> float:
        step = 1 << max((l - 1).bit_length() - 3, 0)
        part = l % step / step
        if part == 0:
            return cached(l)
        low = l - l % step
        return (1 - part) * cached(low) + part * cached(low + step)

    @functools.cache
    def ceiling(order: int) -> float:
        return ceiling(order - 1) + largest(order) if order else 0.0

    return lambda order: (ceiling(order), None)


def require_range(subject: str, value: float, limit: float) -> None:
    """Refuse a σ at which float64 loses patterns.

    Raises:
      FailureError: ``value``, in noise units, is not at most ``limit``.
    """
    if not value <= limit:
        raise FailureError(
            f"σ is beyond numerical range: {subject} {value:.3g} in noise units, and the "
            f"likelihood is known up to {limit:g}. Ask for a larger σ, or a smaller ε."
        )


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Maxima over all patterns at one σ, in noise units.

    Attributes:
      chains: ways to draw patterns by kind, the one to prefer first; a later one is examined where
        the best order of the one before is the largest that is known of it.
      largest_square: max_k |m_k|².
      mean_square, square_of_mean: ḡ = E_k |m_k|² and ρ = |m̄|².
      common: c, which all <m_k, m_l> are less by.
      lengths: s -> (log E_k e^(s|m_k|²/2), what :meth:`Likelihood.draw` takes to draw the first
        pattern with that factor), of the patterns as they are, ``common`` included; None where no
        more is known than the longest of them.
    """

    chains: Mapping[str, PatternChain]
    largest_square: float
    mean_square: float
    square_of_mean: float
    common: float = 0.0
    lengths: Callable[[float], tuple[float, PyTree]] | None = dataclasses.field(
        default=None, kw_only=True
    )

    def without(self, common: float) -> Ceilings:
        """Ceilings of what is left of the patterns beside a shared component of square c."""
        return dataclasses.replace(
            self,
            largest_square=self.largest_square - common,
            mean_square=self.mean_square - common,
            square_of_mean=self.square_of_mean - common,
            common=self.common + common,
        )

    def chain(self, kind: str, order: int) -> tuple[float, PyTree]:
        """(log of an upper bound of Π N_l, how it is drawn) of one kind and order."""
        value, plan = self.chains[kind].ceiling(order)
        return value - self.common * order * (order + 1) / 2, plan


class SharedGaussianComponent(NamedTuple):
    """û and a of the module's docstring, for σ = 1.

    Attributes:
      toward, parts, length: û, shape (dimension,), a, shape (entries,), and r.
    """

    toward: Array
    parts: Array
    length: Scalar

    @property
    def shift(self) -> Scalar:
        """√c, of the Gaussian release accounted for exactly."""
        return math.sqrt(_PART) * self.length


@_quick.jit
def _noise(likelihood: Likelihood, normal: jax.Array) -> jax.Array:
    return likelihood.noise(normal)


def shared_component(
    likelihood: Likelihood, toward: np.ndarray, rounds: int, largest_square: float
) -> SharedGaussianComponent | None:
    """The component along a direction; None where patterns share none, or too little.

    Args:
      likelihood: of entries in rounds of equally many, of each of which a pattern picks one.
      toward: the direction, of any length.
      rounds: how many.
      largest_square: max_k |m_k|².
    """
    length = float(np.linalg.norm(toward))
    if not 0 < length < math.inf:
        return None
    toward = toward / length
    products = np.asarray(_noise(likelihood, toward[None]))[0].reshape(rounds, -1)
    parts = np.mean(products, axis=1)
    total = float(np.sum(parts))
    uneven = float(np.sum(np.max(np.abs(products - parts[:, None]), axis=1)))
    if not (total > 0 and uneven <= _ROUNDING * total and total**2 >= _WORTH * largest_square):
        return None
    return SharedGaussianComponent(toward, np.repeat(parts, products.shape[1]), total)


class Residual(NamedTuple):
    """The likelihood ratio of m' beside a shared component, both in noise units."""

    whole: Likelihood
    shared: SharedGaussianComponent

    @property
    def dimension(self) -> int:
        return int(self.whole.dimension)

    @property
    def work(self) -> int:
        return int(self.whole.work)

    def scaled(self, noise_multiplier: Scalar) -> Residual:
        toward, parts, length = self.shared
        lengths = parts / noise_multiplier, length / noise_multiplier
        shared = SharedGaussianComponent(toward, *lengths)
        return Residual(self.whole.scaled(noise_multiplier), shared)

    def noise(self, normal: jax.Array) -> jax.Array:
        along = (1 - _LEFT) * (normal @ jnp.asarray(self.shared.toward))
        return self.whole.noise(normal) - along[:, None] * self.shared.parts

    def log_ratio(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        passed = self.whole.log_ratio(exponents, power)
        return passed + power**2 * self.shared.shift**2 / 2

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        drawn = self.whole.draw(keys, noise, order, plan)
        count, square = 1 + order, self.shared.shift**2
        return Drawn(
            drawn.products - _PART * count * self.shared.length * self.shared.parts,
            drawn.along,
            drawn.square - count**2 * square,
            drawn.log_normalizers - order * count / 2 * square,
        )

    def average(self, exponents: jax.Array) -> jax.Array:
        return self.whole.average(exponents)

    def mean(self) -> tuple[jax.Array, jax.Array]:
        products, square = self.whole.mean()
        less = _PART * self.shared.length * self.shared.parts
        return products - less, square - self.shared.shift**2
