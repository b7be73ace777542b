"""Noise on a grid whose law is proven: what a stream with ``secure=True`` draws and counts.

**Draws.** One ChaCha20 block (256-bit key) for each element and step gives five samples of the
discrete Gaussian of deviation σ₀ = 450, by inversion of its distribution function to 96 bits in
integer arithmetic; x₀ + k x₁ + … + k⁴ x₄, k = 256, is then a discrete Gaussian K of deviation
S = σ₀ √((k¹⁰ - 1)/(k² - 1)) ≈ 2⁴⁰·⁸ (Peikert 2010, Theorem 3.1; Micciancio and Walter 2017: each
addition is exact up to a factor 1 ± 2 exp(-2π² s²), s >= 1.75). And K differs from the rounding
⌊S z⌉ of a normal z by a factor 1 ± (z² + 1)/(24 S²). Together, tails beyond 12 σ₀ included, the
law of a draw is within 2⁻⁸⁰ of that of a *rounded normal draw*, in total variation.

**Why rounded draws are as good.** What is added up lies on a grid γℤ that depends on no data: the
sum q of clipped gradients is rounded to it, and so is ρ, what the recursion makes of past noise
(gradients do not enter it). With q and ρ on the grid, q + ρ + ⌊w⌉ = ⌊q + ρ + w⌉: the release is a
function of the Gaussian mechanism's, and no property of floating-point noise (Mironov 2012) or of
sums (Haney, Desfontaines, Hartman, Shrestha, Hay 2022) is left to attack. Sums of draws, as in
Opacus's secure mode (Holohan and Braghin 2021), make such attacks expensive; that they are
impossible is proven there for no case, so they are not used.

**What is counted** (:class:`SecureCost`). The rounding of q and ρ and the float64 arithmetic of the
recursion move the query of the Gaussian mechanism by at most r in all n steps together, whatever
the data. A part θ = 2⁻⁹ of additional variance answers for r as a second Gaussian mechanism, run
concurrently (Vadhan and Zhang 2023): with (ε, δ) for the stream itself, (ε + ε₂, e^ε₂ δ + e^ε δ₂ +
(1 + e^(ε + ε₂)) 2⁻⁸⁰ N) for N draws. What is *not* counted is how the caller formed the sum: the
norm of what one unit adds is ``clip_norm`` only up to the float rounding of the caller's own sum.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from mfopt import _check
from mfopt.noise import _draws, _kernels
from mfopt.noise.recursions import Modal, Recursion, Ring, Rows
from mfopt.strategies import Strategy

BASE = 450  # σ₀
FACTOR = 256  # k
LEVELS = 5
STEPS = BASE * math.sqrt((FACTOR ** (2 * LEVELS) - 1) / (FACTOR**2 - 1))  # S, grid steps in a σ
CUT = 12  # deviations
SHARE = 2.0**-9  # θ
DISTANCE = 2.0**-80  # of one draw, in total variation
_DELTA = 2.0**-60  # δ₂
_LARGEST = 2**51  # grid steps that a float64 adds exactly, with a factor 2 to spare
_CHUNK = 2**13
_SECURE = 1 << 31  # in the block count, so that no block is one of the other draws'


@functools.cache
def table() -> tuple[np.ndarray, np.ndarray]:
    """P(x <= j) for j = -12σ₀ .. 12σ₀ - 1 in units of 2⁻⁹⁶: upper 64 bits, lower 32 bits."""
    with decimal.localcontext() as context:
        context.prec = 60
        half = [(-decimal.Decimal(x * x) / (2 * BASE * BASE)).exp() for x in range(CUT * BASE + 1)]
        law = half[:0:-1] + half
        total = sum(law)
        cumulative, words = decimal.Decimal(0), []
        for weight in law[:-1]:
            cumulative += weight
            words.append(int(cumulative / total * 2**96))
    upper = np.array([word >> 32 for word in words], np.uint64)
    return upper, np.array([word & 0xFFFFFFFF for word in words], np.uint32)


def sample(upper_bits: jax.Array, lower_bits: jax.Array) -> jax.Array:
    """Discrete Gaussians of deviation σ₀ from 96 random bits each (uint64, uint32), by inversion.

    The number of entries of :func:`table` that are at most the random number, by bisection.
    """
    upper, lower = (jnp.asarray(part) for part in table())
    count = len(table()[0])
    bits = count.bit_length()

    def halve(i: Any, found: jax.Array) -> jax.Array:
        tried = found + (jnp.int32(1) << (bits - 1 - i).astype(jnp.int32))
        at = jnp.minimum(tried, count) - 1
        high, low = upper[at], lower[at]
        below = (high < upper_bits) | ((high == upper_bits) & (low <= lower_bits))
        return jnp.where((tried <= count) & below, tried, found)

    found = lax.fori_loop(0, bits, halve, jnp.zeros(upper_bits.shape, jnp.int32))
    result: jax.Array = found - CUT * BASE
    return result


def integers(key: Any, step: Any, leaf: Any, low: Any, high: Any) -> jax.Array:
    """Discrete Gaussians of deviation S for elements (low, high) of a leaf: float64 integers."""
    shape = low.shape
    low, high = low.ravel(), jnp.broadcast_to(high, shape).ravel()
    size = low.shape[0]
    chunk = min(_CHUNK, max(1, size))
    padded = -(-size // chunk) * chunk
    pieces = [jnp.pad(x, (0, padded - size)).reshape(-1, chunk) for x in (low, high)]
    first = jnp.asarray(leaf).astype(jnp.uint32) | np.uint32(_SECURE)
    step = jnp.asarray(step).astype(jnp.uint32)

    def draw(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        zero = jnp.zeros_like(piece[0])
        counter = jnp.stack([zero + first, zero + step, piece[0], piece[1]])
        words = _draws.chacha20(jnp.asarray(key), counter)
        wide = words[: 2 * LEVELS].astype(jnp.uint64)
        parts = sample((wide[:LEVELS] << 32) | wide[LEVELS:], words[2 * LEVELS : 3 * LEVELS])
        weights = np.array([float(FACTOR**i) for i in range(LEVELS)])  # exact: sums below 2⁵³
        return jnp.sum(parts.astype(jnp.float64) * weights[:, None], axis=0)

    result: jax.Array = lax.map(draw, tuple(pieces)).reshape(-1)[:size].reshape(shape)
    return result


def advance(
    recursion: Recursion,
    coefficients: tuple[Any, ...],
    draw: Callable[[Any], jax.Array],
    step: Any,
    buffer: Any,
    unit: Any,
) -> tuple[jax.Array, Any, Any]:
    """(noise in grid steps, width of a grid step γ, new buffer).

    Args:
      recursion: how C⁻¹z is computed.
      coefficients: of this step.
      draw: the :func:`integers` of any step up to this one.
      step: t.
      buffer: past noise, past draws times ``unit``, or None; float64.
      unit: γ for a draw of weight 1.
    """
    made = draw(step)
    if isinstance(recursion, Modal):
        gain, read, decay, feed = coefficients
        past = None if buffer is None else -_kernels._weighted_sum(read, buffer)
    else:
        row = coefficients[0]
        gain, past = row[0], None
        if buffer is not None:
            slots = buffer.shape[0]
            lag = 1 + (step - 1 - jnp.arange(slots)) % slots
            known = lag <= step
            if not (isinstance(recursion, Ring) and recursion.feedback):
                known &= lag < slots  # the slot of this step still holds the oldest draw
            weights = jnp.where(known, row[jnp.minimum(lag, len(row) - 1)], 0)
            past = _kernels._weighted_sum(weights, buffer)
        elif isinstance(recursion, Rows):
            past = _redrawn(recursion, row, draw, step, made, unit)
    width = unit * gain
    noise = made if past is None else made + jnp.round(past / width)
    if buffer is None:
        return noise, width, None
    if isinstance(recursion, Modal):
        column = (-1,) + (1,) * noise.ndim
        return noise, width, decay.reshape(column) * buffer + feed.reshape(column) * (width * noise)
    kept = width * noise if isinstance(recursion, Ring) and recursion.feedback else unit * made
    return noise, width, lax.dynamic_update_index_in_dim(buffer, kept, step % buffer.shape[0], 0)


def _redrawn(
    recursion: Rows, row: Any, draw: Any, step: Any, like: jax.Array, unit: Any
) -> jax.Array:
    def add(lag: Any, total: jax.Array) -> jax.Array:
        result: jax.Array = total + row[lag] * (unit * draw(step - lag))
        return result

    last = jnp.minimum(step, recursion.window - 1)
    result: jax.Array = lax.fori_loop(1, last + 1, add, jnp.zeros_like(like))
    return result


def release(sums: jax.Array, noise: jax.Array, width: Any) -> jax.Array:
    """The sum, rounded to the grid, plus noise on it: float64. Exact up to the last product."""
    rounded = jnp.clip(jnp.round(sums.astype(jnp.float64) / width), -_LARGEST, _LARGEST)
    result: jax.Array = (rounded + noise) * width
    return result


@dataclasses.dataclass(frozen=True)
class SecureCost:
    """What the grid and the draws cost a guarantee, for so many parameters and steps.

    Attributes:
      noise_factor: by which the noise is larger, √(1 + θ).
      epsilon: ε₂, to be added to ε.
      distance: N 2⁻⁸⁰, of all draws together.
    """

    noise_factor: float
    epsilon: float
    distance: float

    def total(self, epsilon: float, delta: float) -> tuple[float, float]:
        """(ε, δ) of what is released, where the factorization has ``epsilon`` and ``delta``."""
        above = epsilon + self.epsilon
        spent = math.exp(epsilon) * _DELTA + (1 + math.exp(above)) * self.distance
        return above, math.exp(self.epsilon) * delta + spent


@dataclasses.dataclass(frozen=True)
class GridBounds:
    """By how much rounding moves what one step asks for, in units of σ and per parameter.

    Attributes:
      shift: bound on the query's move in any coordinate and step, times ‖C‖₂.
      iterations: n.
    """

    shift: float
    iterations: int

    def cost(self, parameters: int) -> SecureCost:
        """See :class:`SecureCost`. r = shift · √(parameters · n), against a deviation of √θ."""
        draws = parameters * self.iterations
        moved = self.shift * math.sqrt(draws) / math.sqrt(SHARE)
        epsilon = moved * (moved / 2 - float(special.ndtri(_DELTA)))
        return SecureCost(math.sqrt(1 + SHARE), epsilon, draws * DISTANCE)


_MOST_STEPS = 8192  # the bounds are read off dense matrices


def bounds(strategy: Strategy, recursion: Recursion, iterations: int, reach: float) -> GridBounds:
    """Bounds that hold for every run, up to a probability that :data:`DISTANCE` covers.

    With A = C⁻¹, |w_t| <= 12 ‖A[t]‖, and likewise what is kept. Between two data sets that give
    the same outputs, rounding moves q by 2γ (its division included) and ρ by γ, arithmetic moves ρ
    by twice 2⁻⁵³ for each of its operations, and the query C(q + ρ) moves by ‖C‖₂ times that.

    Args:
      strategy: C.
      recursion: of C⁻¹z.
      iterations: n.
      reach: most that one unit can change a coordinate of a step's sum by, in units of σ: past
        noise is by so much another for the other data set.

    Raises:
      UsageError: more than 8,192 steps, or noise beyond what float64 holds exactly.
    """
    if iterations > _MOST_STEPS:
        raise _check.reject(
            "iterations", iterations, f"secure noise is for at most {_MOST_STEPS} steps"
        )
    matrix = np.asarray(strategy.materialize(iterations), np.float64)
    inverse = np.asarray(strategy.solve(np.eye(iterations)), np.float64)
    size = np.abs(matrix)
    norm = math.sqrt(np.max(np.sum(size, 0)) * np.max(np.sum(size, 1)))
    gain = float(np.max(np.abs(np.diagonal(inverse))))
    noise = CUT * float(np.max(np.linalg.norm(inverse, axis=1))) * 1.01
    smallest = float(np.min(np.abs(np.diagonal(inverse))))
    if not noise / smallest * STEPS <= _LARGEST:
        raise _check.reject(
            "strategy", strategy.describe(), "its noise is too large for a grid in float64"
        )
    width = gain * math.sqrt(1 + SHARE) / STEPS
    drawn = CUT * 1.01 + reach * float(np.max(np.sum(size, 1)))
    arithmetic = 2.0**-53 * _operations(recursion, inverse, noise, drawn, reach)
    return GridBounds(norm * (3 * width + 2 * arithmetic), iterations)


def _operations(
    recursion: Recursion, inverse: np.ndarray, noise: float, drawn: float, reach: float
) -> float:
    """Σ of |terms| over the operations of one step, each of which errs by 2⁻⁵³ of it.

    ``noise`` and ``drawn`` bound |w| and |z|.
    """
    n = len(inverse)
    steps = range(n)
    if isinstance(recursion, Modal):
        most = 0.0
        kept = np.zeros((recursion.read.shape[1], n))  # what s_k is of z
        error = np.zeros(len(kept))  # of s_k, in units of 2⁻⁵³
        other = np.zeros(len(kept))  # by which s_k differs for the other data set
        for t in steps:
            _, read, decay, feed = (np.asarray(c) for c in recursion.at(t))
            size = 1.01 * CUT * np.linalg.norm(kept, axis=1) + other
            terms = (len(read) + 4) * size + error
            most = max(most, float(np.sum(np.abs(read) * terms)))
            error = np.abs(decay) * error + 3 * size + 4 * np.abs(feed) * (noise + reach)
            other = np.abs(decay) * other + np.abs(feed) * reach
            kept = decay[:, None] * kept + feed[:, None] * inverse[t]
        return most
    rows = [np.abs(np.asarray(recursion.at(t)[0], np.float64))[1 : t + 1] for t in steps]
    feedback = isinstance(recursion, Ring) and recursion.feedback
    largest = noise + reach if feedback else drawn
    return max((len(row) + 5) * float(np.sum(row)) * largest for row in rows)
