"""Noise on a grid with a proven law: the draws and the privacy cost of ``secure=True``.

**Draws.** One ChaCha20 block (256-bit key) for each element and step gives five samples of the
discrete Gaussian of deviation σ₀ = 450, by inversion of its distribution function to 96 bits in
integer arithmetic; x₀ + k x₁ + … + k⁴ x₄, k = 256, is then a discrete Gaussian K of deviation
S = σ₀ √((k¹⁰ - 1)/(k² - 1)) ≈ 2⁴⁰·⁸ (Peikert 2010, Theorem 3.1; Micciancio and Walter 2017: each
addition is exact up to a factor 1 ± 2 exp(-2π² s²), s >= 1.75). And K differs from the rounding
⌊S z⌉ of a normal z by a factor 1 ± (z² + 1)/(24 S²). Together, tails beyond 12 σ₀ included, the
law of a draw is within 2⁻⁸⁰ of that of a *rounded normal draw*, in total variation.

**Why rounded draws are as good.** What is added up lies on a grid γℤ that depends on no data: the
sum q of clipped gradients is rounded to it, and so is ρ, what the recursion makes of past noise
(this step's gradients do not enter it). With q and ρ on the grid, q + ρ + ⌊w⌉ = ⌊q + ρ + w⌉: the
release is a function of the Gaussian mechanism's, and no property of floating-point noise (Mironov
2012) or of sums (Haney, Desfontaines, Hartman, Shrestha, Hay 2022) is left to attack. Sums of
draws, as in Opacus's secure mode (Holohan and Braghin 2021), make such attacks expensive; that they
are impossible is proven there for no case, so they are not used.

**What is counted** (:class:`SecureCost`). Four laws of all n outputs are compared: R and R', of
what runs on two neighbouring data sets, and I and I', where rounded normals are drawn and each
step's mean, given the outputs so far, is that of exact arithmetic.

1. *I against I'.* In I, step t puts out a rounding of x_t minus a function of earlier outputs, with
   x = C q + σ z: it is computed from what the factorization's mechanism releases and has its
   (ε, δ), whatever the sampling of batches and however q depends on earlier outputs.
2. *R against I.* Same data, same batches, same outputs so far: the means differ by σ d_t, of which
   Σ_t ‖d_t‖² <= r² (:class:`SecureCost`) except with a probability that the distance has room for.
   For each choice of batches the log-likelihood ratio is Σ d_t·z_t ± r²/2 (with a last step that
   uses up what is left of r²), and E exp(iλ Σ d_t·z_t) = exp(-λ² r²/2) since the d_t are functions
   of the past: the law of *one* Gaussian mechanism, as for any adaptive queries of bounded total
   (Smith and Thakurta 2022). So it is (ε₂, δ₂), ε₂ = r (r/2 - Φ⁻¹(δ₂)), and so is I against R.
   Nothing here asks for mechanisms with randomness of their own, as composition theorems do: the
   batches are shared by all four laws. And no noise is spent on it.

From R over I and I' to R', for N draws that are together within τ = 2⁻⁸⁰ N of rounded normals:

    (ε + 2 ε₂, e^ε₂ δ + (1 + e^(ε + ε₂)) δ₂ + (1 + e^(ε + 2 ε₂)) τ).

Since d is bounded whatever the data are, this holds for groups and for every adjacency alike.

**What is not counted.** How the caller formed the sum: the norm of what one unit adds is
``clip_norm`` only up to the float rounding of the caller's own sum, and a sum that is not a number
is put out as such. ChaCha20's output is taken for random bits.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array, Step
from mfopt.noise import _draws, _kernels
from mfopt.noise._kernels import Buffer
from mfopt.noise.recursions import Modal, Recursion, Ring, Rows
from mfopt.strategies import Strategy

BASE = 450  # σ₀
FACTOR = 256  # k
LEVELS = 5
STEPS = BASE * math.sqrt((FACTOR ** (2 * LEVELS) - 1) / (FACTOR**2 - 1))  # S, grid steps in a σ
CUT = 12  # deviations
UNIT = (1 + 2.0**-50) / STEPS  # a grid step in units of σ, rounded up
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

    def halve(i: jax.Array, rank: jax.Array) -> jax.Array:
        tried = rank + (jnp.int32(1) << (bits - 1 - i).astype(jnp.int32))
        index = jnp.minimum(tried, count) - 1
        high, low = upper[index], lower[index]
        below = (high < upper_bits) | ((high == upper_bits) & (low <= lower_bits))
        return jnp.where((tried <= count) & below, tried, rank)

    ranks = lax.fori_loop(0, bits, halve, jnp.zeros(upper_bits.shape, jnp.int32))
    return ranks - CUT * BASE


def integers(key: Array, step: Step, leaf: Array, low: Array, high: Array) -> jax.Array:
    """Discrete Gaussians of deviation S for elements (low, high) of a leaf: float64 integers.

    Args:
      key: 256 bits, uint32 (8,).
      step: of the stream.
      leaf: number of the parameter in its pytree, of each element or of all.
      low: lower half of the index of each element in its leaf, uint32.
      high: upper half of that index, uint32.
    """
    shape, size = low.shape, low.size
    chunk = min(_CHUNK, max(1, size))
    padded = -(-size // chunk) * chunk
    tagged_leaf = jnp.asarray(leaf).astype(jnp.uint32) | np.uint32(_SECURE)
    pieces = [
        jnp.pad(jnp.broadcast_to(x, shape).ravel(), (0, padded - size)).reshape(-1, chunk)
        for x in (low, high, tagged_leaf)
    ]
    step = jnp.asarray(step).astype(jnp.uint32)

    def draw(piece: tuple[jax.Array, ...]) -> jax.Array:
        zero = jnp.zeros_like(piece[0])
        counter = jnp.stack([piece[2], zero + step, piece[0], piece[1]])
        words = _draws.chacha20(jnp.asarray(key), counter)
        wide = words[: 2 * LEVELS].astype(jnp.uint64)
        parts = sample((wide[:LEVELS] << 32) | wide[LEVELS:], words[2 * LEVELS : 3 * LEVELS])
        weights = np.array([float(FACTOR**i) for i in range(LEVELS)])  # exact: sums below 2⁵³
        return jnp.sum(parts.astype(jnp.float64) * weights[:, None], axis=0)

    return lax.map(draw, tuple(pieces)).reshape(-1)[:size].reshape(shape)


def advance(
    recursion: Recursion,
    coefficients: tuple[Array, ...],
    draw: Callable[[Step], jax.Array],
    step: Step,
    buffer: Buffer,
    unit: Array,
) -> tuple[jax.Array, Array, Array | None]:
    """(noise in grid steps, width of a grid step γ, new buffer).

    Args:
      recursion: how C⁻¹z is computed.
      coefficients: of this step.
      draw: the :func:`integers` of any step up to this one.
      step: t.
      buffer: past noise, past draws times ``unit``, or None; float64.
      unit: γ for a draw of weight 1.
    """
    drawn = draw(step)
    if isinstance(recursion, Modal):
        gain, read, decay, feed = coefficients
        past = None if buffer is None else -_kernels.weighted_sum(read, buffer)
    else:
        row = coefficients[0]
        gain, past = row[0], None
        if buffer is not None:
            past = _kernels.ring_sum(row, buffer, step)
        elif isinstance(recursion, Rows):
            oldest = jnp.minimum(step, recursion.window - 1)
            past = lax.fori_loop(
                1,
                oldest + 1,
                lambda lag, total: total + row[lag] * (unit * draw(step - lag)),
                jnp.zeros_like(drawn),
            )
    width = unit * gain
    noise = drawn if past is None else drawn + jnp.round(past / width)
    if buffer is None:
        return noise, width, None
    if isinstance(recursion, Modal):
        column = (-1,) + (1,) * noise.ndim
        return noise, width, decay.reshape(column) * buffer + feed.reshape(column) * (width * noise)
    kept = width * noise if isinstance(recursion, Ring) and recursion.feedback else unit * drawn
    return noise, width, lax.dynamic_update_index_in_dim(buffer, kept, step % buffer.shape[0], 0)


def release(sums: Array, noise: jax.Array, width: Array) -> jax.Array:
    """The sum, rounded to the grid, plus noise on it: float64. Exact up to the last product."""
    rounded = jnp.clip(jnp.round(sums.astype(jnp.float64) / width), -_LARGEST, _LARGEST)
    return (rounded + noise) * width


@dataclasses.dataclass(frozen=True)
class SecureCost:
    """Cost of the grid and the draws in privacy, for a number of parameters and steps.

    Attributes:
      epsilon: 2 ε₂, to be added to ε.
      distance: τ = N 2⁻⁸⁰, of all draws together.
    """

    epsilon: float
    distance: float

    @classmethod
    def of_draws(cls, shift: float, draws: int) -> SecureCost:
        """Cost of this many draws with means off by ``shift`` each: r = shift · √draws."""
        moved = shift * math.sqrt(draws)
        epsilon = moved * (moved / 2 - float(scipy.special.ndtri(_DELTA)))
        return cls(2 * epsilon, draws * DISTANCE)

    def total(self, epsilon: float, delta: float) -> tuple[float, float]:
        """(ε, δ) of what is released, where the factorization has ``epsilon`` and ``delta``."""
        above, half = epsilon + self.epsilon, self.epsilon / 2
        spent = (1 + math.exp(epsilon + half)) * _DELTA + (1 + math.exp(above)) * self.distance
        return above, math.exp(half) * delta + spent


_MOST_STEPS = 8192  # the bounds are read off dense matrices
_LARGEST_DRAW = CUT * 1.01  # of |K|/S: with the sum over the levels it is 12.05


def largest_shift(strategy: Strategy, recursion: Recursion, iterations: int) -> float:
    """Bound on how far a mean as computed is from that of exact arithmetic, in units of σ.

    It holds in any coordinate and step (as a shift of z), for every run and all data, up to a
    probability in :data:`DISTANCE`, with C the ``strategy`` and the ``recursion`` that of C⁻¹z.

    Let à be what the recursion, with the coefficients that it has, makes of unit draws, E = CÃ - I,
    and let everything else go wrong by e: w = Ã z + e, so C w = z + E z + C e (where past outputs
    are fed back, e goes through à first, and the last term is smaller). The mean differs by

    - C times the rounding of q to the grid, γ/2, and of the division before it, γ/4; beyond 2⁵¹
      grid steps q is cut off there, which brings no two sums further apart;
    - C times the rounding of ρ, γ/2, and 2⁻⁵³ of every operation's result before it;
    - E z, of which this step's draw takes no part in a mean: E's diagonal stands for a grid that
      is not quite C⁻¹[t, t] times the unit, and multiplies q and ρ, 2⁵¹ grid steps each.

    A linear combination a·z of draws stays below 12 ‖a‖, and each single one below 12.05.

    Raises:
      UsageError: more than 8,192 steps, or noise beyond what float64 holds exactly.
    """
    if iterations > _MOST_STEPS:
        rule = f"secure noise is for at most {_MOST_STEPS} steps"
        raise _check.reject("iterations", iterations, rule)
    matrix = np.asarray(strategy.materialize(iterations), np.float64)
    inverse = _responses(recursion, iterations)
    norm = math.sqrt(_row_sum(matrix) * _row_sum(matrix.T))
    gains = np.abs(np.diagonal(inverse))
    noise = _LARGEST_DRAW * float(np.max(np.linalg.norm(inverse, axis=1)))
    if not noise / float(np.min(gains)) * STEPS <= _LARGEST:
        rule = "its noise is too large for a grid in float64"
        raise _check.reject("strategy", strategy.kind, rule)
    arithmetic = _EPSILON * _operations(
        recursion, inverse, lambda rows: _LARGEST_DRAW * np.linalg.norm(rows, axis=-1)
    )
    # the responses are themselves computed: their own errors, summed over all unit draws
    unsure = _EPSILON * _operations(recursion, inverse, lambda rows: np.sum(np.abs(rows), axis=-1))
    residual, error = _residual(matrix, inverse)
    error += norm * unsure
    diagonal = float(np.max(np.abs(np.diagonal(residual)))) + 4 * _EPSILON
    shift = norm * (1.26 * float(np.max(gains)) * UNIT + arithmetic)
    shift += _LARGEST_DRAW * (_row_sum(np.tril(residual, -1)) + error)
    return shift + 2.01 * _LARGEST * diagonal * UNIT


_EPSILON = 2.0**-53


def _row_sum(matrix: np.ndarray) -> float:
    return float(np.max(np.sum(np.abs(matrix), axis=1)))


def _residual(matrix: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """C Ã - I, and a bound on how far a row of it is off, in sum: products of halves are exact."""
    n = len(matrix)

    def halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        grid = 2.0 ** (math.frexp(float(np.max(np.abs(values))))[1] - 20)  # n 2⁴⁰ <= 2⁵³
        high = np.round(values / grid) * grid
        return high, values - high

    (high, low), (upper, lower) = halves(matrix), halves(inverse)
    difference = (high @ upper - np.eye(n)) + (high @ lower + low @ inverse)
    size = _row_sum(matrix) * np.max(np.abs(inverse)) + _row_sum(inverse) * np.max(np.abs(matrix))
    return difference, float(n * (n + 2) * _EPSILON * 2.0**-20 * size) + n * _EPSILON * np.max(
        np.abs(difference)
    )


def _responses(recursion: Recursion, n: int) -> np.ndarray:
    """Ã: the outputs of all steps (rows) for a draw of 1 in each step (columns)."""
    responses = np.zeros((n, n))
    if isinstance(recursion, Modal):
        kept = np.zeros((recursion.read.shape[1], n))
        for t in range(n):
            gain, read, decay, feed = (np.asarray(c) for c in recursion.coefficients(t))
            responses[t] = -(read @ kept)
            responses[t, t] = gain
            kept = decay[:, None] * kept + feed[:, None] * responses[t]
        return responses
    feedback = isinstance(recursion, Ring) and recursion.feedback
    for t in range(n):
        row = np.asarray(recursion.coefficients(t)[0], np.float64)[: t + 1]
        if feedback:
            responses[t] = row[:0:-1] @ responses[t + 1 - len(row) : t]
            responses[t, t] = row[0]
        else:
            responses[t, t + 1 - len(row) : t + 1] = row[::-1]
    return responses


def _operations(
    recursion: Recursion, inverse: np.ndarray, size: Callable[[np.ndarray], np.ndarray]
) -> float:
    """Σ of |terms| over the operations of one step, each of which errs by 2⁻⁵³ of it; the most.

    ``size`` bounds what linear combinations of draws, in rows, can be.
    """
    n = len(inverse)
    outputs = size(inverse)
    if isinstance(recursion, Modal):
        largest = 0.0
        kept = np.zeros((recursion.read.shape[1], n))  # what s_k is of z
        error = np.zeros(len(kept))  # of s_k, in units of 2⁻⁵³
        for t in range(n):
            _, read, decay, feed = (np.asarray(c) for c in recursion.coefficients(t))
            terms = (len(read) + 4) * size(kept) + error
            largest = max(largest, float(np.sum(np.abs(read) * terms)))
            error = np.abs(decay) * (error + 3 * size(kept)) + 4 * np.abs(feed) * outputs[t]
            kept = decay[:, None] * kept + feed[:, None] * inverse[t]
        return largest
    if not (isinstance(recursion, Ring) and recursion.feedback):
        outputs = np.full(n, float(size(np.ones(1))))  # the draws themselves
    largest = 0.0
    for t in range(n):
        row = np.abs(np.asarray(recursion.coefficients(t)[0], np.float64))[1 : t + 1]
        largest = max(largest, (len(row) + 5) * float(row @ outputs[t - len(row) : t][::-1]))
    return largest
