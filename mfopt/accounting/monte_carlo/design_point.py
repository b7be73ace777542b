"""Design-point importance sampling: δ of a search, at any size from a few thousand samples.

P is replaced by R = (1/J) Σ_j N(v_j, σ²I), where each v_j is a smallest shift of a mode that brings
the privacy loss to ε: samples fall where the integrand of the hockey-stick divergence lives.
Every mode gives two components: the shift found from itself, along few modes, and the
one found from all modes together. Strategies whose modes overlap partly have mass at both, and an
optimizer would exploit a proposal that misses one of them.

The estimator is unbiased for every choice of shifts; no bound on the weights is proven, so it
optimizes but never certifies (that is :mod:`.importance`). A sample costs some b² operations: more
than :data:`MOST` bins are searched in groups.

With x = 1/σ every exponent is x²·(a table row) ± x·(a Gaussian), so for frozen samples one
evaluation at another σ costs one exponential for each Gaussian, and no matrix product.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime._arrays import Scalar
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair, coloured, log_hinge
from mfopt.strategies import Array

MOST = 128  # bins of a search, or groups of them
# Pairs of samples whose exponents are held at once, near the processor: so many, and more where so
# many exponents are not reached.
_BLOCK, _EXPONENTS = 256, 2**14
_FAR = 300.0  # powers of e whose squares are within double precision
# Damped fixed point on p, and Newton on λ inside, whose next step is about the square of the last.
_OUTER, _INNER, _SETTLED = 8, 8, 1e-7


class Draws(NamedTuple):
    """Frozen randomness: component index (pairs,) and standard normals (pairs, bins).

    Components are stratified and come in cycles: that of pair i + J is that of pair i, which
    :func:`log_values` relies on. Each row z stands for an antithetic pair of samples, z and −z:
    samples i and i + pairs. The estimator stays unbiased.
    """

    component: jax.Array
    normal: jax.Array


class _Exponents(NamedTuple):
    """x²·square[component of the pair] ± x·linear, x = 1/σ: + for the draw z, − for −z.

    Attributes:
      linear: (pairs, modes).
      square: row = component, (J, modes).
      top: where each row is largest, (J,).
      own: of each row of ``linear``, what it has there, (pairs,).
    """

    linear: jax.Array
    square: Array
    top: Array
    own: jax.Array


class Terms(NamedTuple):
    """Exponents of Y and of log R/Q (see :func:`exponents`).

    Attributes:
      component: (pairs,).
      loss: of every mode.
      proposal: of every component.
    """

    component: jax.Array
    loss: _Exponents
    proposal: _Exponents


@np.errstate(all="ignore")  # a trial σ may give NaN, which is then refused
def placed(gram: Array, noise_multiplier: Scalar, epsilon: Scalar) -> np.ndarray:
    """W, shape (J, bins), J = 2b: v_j = Σ_k W[j, k] m_k is a design point of mode j (mod b).

    By NumPy: compiling it would cost more than a search saves.

    Args:
      gram: G, (bins, bins).
      noise_multiplier, epsilon: σ near the one that is sought, and ε, the design points' loss.

    Damped fixed point p_j = softmax(u(v_j)), once from p_j on mode j alone and once from p_j
    uniform; along each direction Σ_k p_jk m_k the loss is convex and increasing, so Newton from
    the right of its root decreases to it.
    """
    scaled = np.asarray(gram) / float(noise_multiplier) ** 2
    bins = len(scaled)
    modes = np.tile(np.eye(bins), (2, 1))
    at_modes = np.tile(scaled - np.diagonal(scaled) / 2, (2, 1))  # row j: u at mode j
    p = np.concatenate([np.eye(bins), np.full((bins, bins), 1 / bins)])
    for _ in range(_OUTER):
        move = p @ scaled  # row j: what the direction p_j adds to <m_k, X>/σ²
        step = _step_lengths(modes, at_modes, move, float(epsilon))
        powers, mass, _ = _powers_of_mean(at_modes + step[:, None] * move)
        p = (p + powers / mass[:, None]) / 2
    length = _step_lengths(modes, at_modes, p @ scaled, float(epsilon))
    return modes + length[:, None] * p


def _step_lengths(
    modes: np.ndarray, at_modes: np.ndarray, move: np.ndarray, epsilon: float
) -> np.ndarray:
    """λ_j >= 0 with Y(m_j + λ_j Σ_k p_jk m_k) = ε; 0 where the mode itself is beyond ε."""
    exponent, speed = np.sum(modes * at_modes, axis=1), np.sum(modes * move, axis=1)
    # Y >= u_j - log b, so the root of that line lies to the right of the root of Y
    length = np.maximum(
        (epsilon + math.log(modes.shape[1]) - exponent) / np.maximum(speed, 1e-300), 0
    )
    for _ in range(_INNER):
        powers, mass, log_mean = _powers_of_mean(at_modes + length[:, None] * move)
        slope = np.einsum("jk,jk->j", powers, move) / mass
        previous, length = length, np.maximum(length - (log_mean - epsilon) / slope, 0)
        if np.max(previous - length) < _SETTLED:
            break
    return length


def _powers_of_mean(u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e^u of each row over its largest, their sum, and log of the mean of e^u."""
    top = np.max(u, axis=1)
    powers = np.exp(u - top[:, None])
    mass = np.sum(powers, axis=1)
    return powers, mass, top + np.log(mass / u.shape[1])


def draw(key: jax.Array, samples: int, modes: int) -> Draws:
    """Frozen draws by NumPy: compiling JAX's sampler would cost more than it saves.

    Float64, because the gradient through the factor of a nearly singular G amplifies rounding:
    searches on float32 draws ended up to 0.2% above the optimum in σ.
    """
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    pairs = (samples + 1) // 2
    component = components(rng.integers(2 * modes), pairs, modes)
    normal = rng.normal(size=(pairs, modes))
    return Draws(*jax.device_put((component, normal)))


def components(offset: np.integer, count: int, modes: int) -> PyTree:
    """Component indices of samples from ``offset`` on, (count,), nearly equally often each."""
    # a stride near the golden ratio and coprime to 2b spreads a part cycle evenly
    stride = next(k for k in range(round(1.236 * modes), 4 * modes) if math.gcd(k, 2 * modes) == 1)
    return (offset + stride * np.arange(count)) % (2 * modes)


def exponents(pair: DominatingPair, weights: Array, draws: Draws) -> Terms:
    """Everything that does not depend on σ; ``weights`` are those of :func:`placed`."""
    gram = pair.gram
    shifted = weights @ gram  # products of size J×b×b, then of size pairs×b×J
    overlaps = shifted @ weights.T
    noise = coloured(draws.normal, pair.factor)
    of_loss = noise, shifted - gram.diagonal() / 2
    of_proposal = noise @ weights.T, overlaps - overlaps.diagonal() / 2
    return joined(draws.component, of_loss, of_proposal)


def joined(
    component: jax.Array,
    of_loss: tuple[jax.Array, Array],
    of_proposal: tuple[jax.Array, Array],
) -> Terms:
    """The terms, by what multiplies x and x² in the exponents.

    Args:
      component: of each pair, shape (pairs,).
      of_loss: factors of x, shape (pairs, bins), and of x², shape (J, bins).
      of_proposal: the same of log R/Q, shapes (pairs, J) and (J, J).
    """

    def part(linear: jax.Array, square: Array) -> _Exponents:
        top = jnp.argmax(square, axis=1)
        at_top = linear[jnp.arange(len(linear)), top[component]]
        # sums do not depend on what they are taken over
        return _Exponents(linear, square, top, jax.lax.stop_gradient(at_top))

    return Terms(component, part(*of_loss), part(*of_proposal))


def log_values(terms: Terms, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
    """log f for each sample (−inf where the loss is below ε), f = (P/R)(1 − e^(ε−Y))₊."""
    x = jnp.exp(-log_sigma)
    pairs, period = len(terms.component), len(terms.loss.square)
    size = min(max(max(_BLOCK, _EXPONENTS // period) // period, 1) * period, pairs)
    # of every block, since components come in cycles: their transpose is a sum over blocks
    rows = terms.component[:size]
    of_loss, of_proposal = (_powers(x, part, rows) for part in (terms.loss, terms.proposal))

    def in_blocks(part: jax.Array) -> jax.Array:
        padded = jnp.pad(part, [(0, -pairs % size)] + [(0, 0)] * (part.ndim - 1))
        return padded.reshape(-1, size, *part.shape[1:])

    parts = terms.loss, terms.proposal
    blocks = jax.tree.map(in_blocks, [(part.linear, part.own) for part in parts])

    @jax.checkpoint  # a backward pass makes the exponents of a block again
    def block(parts: PyTree) -> jax.Array:
        at_modes, at_components = parts
        losses = _log_means(x, of_loss, *at_modes)
        ratios = _log_means(x, of_proposal, *at_components)
        signs = zip(losses, ratios, strict=True)
        return jnp.stack([loss - ratio + log_hinge(loss - epsilon) for loss, ratio in signs])

    values = jax.lax.map(block, blocks)
    return jnp.swapaxes(values, 0, 1).reshape(2, -1)[:, :pairs].reshape(-1)


class _Powers(NamedTuple):
    """Per pair of a block: log of the largest e^(x²·square), and all of them divided by it."""

    log_largest: jax.Array
    over: jax.Array


def _powers(x: jax.Array, part: _Exponents, rows: jax.Array) -> _Powers:
    table = x**2 * part.square
    largest = jax.lax.stop_gradient(table[jnp.arange(len(table)), part.top])
    return _Powers(largest[rows], jnp.exp(table - largest[:, None])[rows])


def _log_means(
    x: jax.Array, known: _Powers, linear: jax.Array, own: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log of the mean of e^(a_k ± b_k) over modes, for the draws z and for −z; each (size,).

    With t the mode of the largest a it is a_t ± b_t + log mean_k e^(a_k − a_t) e^(±(b_k − b_t)):
    one exponential serves both draws, and the term of t is 1, so that no sum is 0. Powers end at
    e^(±:data:`_FAR`), which nothing is seen of: where modes k and t are √d apart b_k − b_t is some
    √d, and near a shift of t a_k − a_t is about −d/2, so that a term that is cut is 0 both ways.
    """
    # else XLA would make them once for each of their uses
    powers = jax.lax.optimization_barrier(_power(x * (linear - own[:, None])))
    over, log_modes = known.over, jnp.log(linear.shape[1])
    plus = known.log_largest + x * own + jnp.log(jnp.sum(over * powers, axis=1)) - log_modes
    minus = known.log_largest - x * own + jnp.log(jnp.sum(over / powers, axis=1)) - log_modes
    return plus, minus


@jax.custom_jvp
def _power(exponents: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(exponents, -_FAR, _FAR))


@_power.defjvp
def _power_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    power = _power(*primals)  # where it is cut it counts for nothing, and so does its slope
    return power, power * tangents[0]


def log_delta(terms: Terms, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
    """log δ̂ = log mean f: smooth and decreasing in log σ for frozen ``terms``."""
    values = log_values(terms, log_sigma, epsilon)
    return jax.scipy.special.logsumexp(values) - jnp.log(values.shape[0])
