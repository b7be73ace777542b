"""Design-point importance sampling: δ of a search, at any size from a few thousand samples.

P is replaced by R = (1/J) Σ_j N(v_j, σ²I), where each v_j is a smallest shift of a mode that brings
the privacy loss to ε: samples fall where the integrand of the hockey-stick divergence lives.
Every mode gives two components: the shift found from itself, along few modes, and the
one found from all modes together. Strategies whose modes overlap partly have mass at both, and an
optimizer would exploit a proposal that misses one of them.

Beyond :data:`MOST` bins only K = MOST modes are taken, *nodes* at a stride b/K. Not P then but
P_K = (1/K) Σ_nodes N(m_i, σ²I) is replaced by R, J = 2K, with Y that of all bins: the mean over
every (b/K)-th value of a smooth function of the bin. R covers P_K as it covers P where all modes
are taken; P itself it would not, where modes overlap little. The cost falls from b³ to J·b².

Where all modes are taken the estimator is unbiased for every choice of shifts; no bound on the
weights is proven, so it optimizes but never certifies (that is :mod:`.importance`).

With x = 1/σ every exponent is x²·(a table row) ± x·(a Gaussian), so for frozen samples one
evaluation at another σ costs one exponential for each Gaussian, and no matrix product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _quick
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair, log_hinge, privacy_loss
from mfopt.accounting.monte_carlo.nested import coloured
from mfopt.strategies import Array

MOST = 128  # modes that get components of their own
# Pairs of samples whose exponents are held at once, near the processor: so many, and more where so
# many exponents are not reached.
_BLOCK, _EXPONENTS = 256, 2**14
_FAR = 300.0  # powers of e whose squares are within double precision
_OUTER, _INNER = 8, 8  # damped fixed point on p; Newton on λ inside


class Placed(NamedTuple):
    """Component means of the proposal R.

    Attributes:
      weights: W (J, bins), component j is N(Σ_k W[j, k] m_k, σ²I), J = 2K.
      nodes: the bins whose modes are sampled, (K,).
    """

    weights: Array
    nodes: Array


class Draws(NamedTuple):
    """Frozen randomness: component index (pairs,) and standard normals (pairs, bins).

    Components are stratified and come in cycles: that of pair i + J is that of pair i, which
    :func:`log_values` relies on. Each row z stands for an antithetic pair of samples, z and −z:
    samples i and i + pairs. The estimator stays unbiased.
    """

    component: jax.Array
    normal: jax.Array


class Exponents(NamedTuple):
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
      nodes: of those at the nodes, where these are not all.
      proposal: of every component.
    """

    component: jax.Array
    loss: Exponents
    nodes: Exponents | None
    proposal: Exponents


def _node_count(bins: int) -> int:
    """K, the number of modes with components of their own."""
    return min(bins, MOST)


def nodes(bins: int) -> jax.Array:
    """The K bins that are sampled, at a stride bins/K."""
    count = _node_count(bins)
    return ((jnp.arange(count) + 0.5) * bins / count).astype(int)


@_quick.jit
def placed(gram: Array, noise_multiplier: jax.Array, epsilon: jax.Array) -> Placed:
    """Components whose v_j = Σ_k W[j, k] m_k is a design point of the mode of node j (mod K).

    Args:
      gram: G, (bins, bins).
      noise_multiplier, epsilon: σ near the one that is sought, and ε, the design points' loss.

    Damped fixed point p_j = softmax(u(v_j)), once from p_j on mode j alone and once from p_j
    uniform; along each direction Σ_k p_jk m_k the loss is convex and increasing, so Newton from
    the right of its root decreases to it.
    """
    bins = gram.shape[0]
    chosen = nodes(bins)
    is_chosen = jnp.eye(bins)[chosen]
    scaled = gram / noise_multiplier**2
    modes = jnp.tile(is_chosen, (2, 1))
    at_modes = jnp.tile(scaled[chosen] - jnp.diagonal(scaled) / 2, (2, 1))  # row j: u at mode j

    def outer(_: int, p: jax.Array) -> jax.Array:
        move = p @ scaled  # row j: what the direction p_j adds to <m_k, X>/σ²
        step = _step_lengths(modes, at_modes, move, epsilon)
        return (p + jax.nn.softmax(at_modes + step[:, None] * move, axis=1)) / 2

    begin = jnp.concatenate([is_chosen, jnp.full(is_chosen.shape, 1 / bins)])
    p = jax.lax.fori_loop(0, _OUTER, outer, begin)
    length = _step_lengths(modes, at_modes, p @ scaled, epsilon)
    return Placed(modes + length[:, None] * p, chosen)


def _step_lengths(
    modes: jax.Array, at_modes: jax.Array, move: jax.Array, epsilon: jax.Array
) -> jax.Array:
    """λ_j >= 0 with Y(m_j + λ_j Σ_k p_jk m_k) = ε; 0 where the mode itself is beyond ε."""
    exponent, speed = jnp.sum(modes * at_modes, axis=1), jnp.sum(modes * move, axis=1)
    # Y >= u_j - log b, so the root of that line lies to the right of the root of Y
    right = (epsilon + jnp.log(modes.shape[1]) - exponent) / jnp.maximum(speed, 1e-300)

    def newton(_: int, length: jax.Array) -> jax.Array:
        u = at_modes + length[:, None] * move
        slope = jnp.sum(jax.nn.softmax(u, axis=1) * move, axis=1)
        return jnp.maximum(length - (privacy_loss(u) - epsilon) / slope, 0)

    return jax.lax.fori_loop(0, _INNER, newton, jnp.maximum(right, 0))


def draw(key: jax.Array, samples: int, modes: int) -> Draws:
    """Frozen draws by NumPy: compiling JAX's sampler would cost more than it saves.

    Float64, because the gradient through the factor of a nearly singular G amplifies rounding:
    searches on float32 draws ended up to 0.2% above the optimum in σ.
    """
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    pairs, count = (samples + 1) // 2, _node_count(modes)
    component = components(rng.integers(2 * count), pairs, count)
    normal = rng.normal(size=(pairs, modes))
    return Draws(*jax.device_put((component, normal)))


def components(offset: Any, count: int, nodes: int) -> PyTree:
    """Component indices of samples from ``offset`` on, (count,), nearly equally often each."""
    # a stride near the golden ratio and coprime to 2K spreads a part cycle evenly
    stride = next(k for k in range(round(1.236 * nodes), 4 * nodes) if math.gcd(k, 2 * nodes) == 1)
    return (offset + stride * np.arange(count)) % (2 * nodes)


def exponents(pair: DominatingPair, proposal: Placed, draws: Draws) -> Terms:
    """Everything that does not depend on σ."""
    gram, weights = pair.gram, proposal.weights
    shifted = weights @ gram  # products of size J×b×b, then of size pairs×b×J
    overlaps = shifted @ weights.T
    noise = coloured(draws.normal, pair.factor)
    of_loss = noise, shifted - gram.diagonal() / 2
    of_proposal = noise @ weights.T, overlaps - overlaps.diagonal() / 2
    return joined(draws.component, proposal.nodes, of_loss, of_proposal)


def joined(
    component: jax.Array,
    nodes: Array,
    of_loss: tuple[jax.Array, Array],
    of_proposal: tuple[jax.Array, Array],
) -> Terms:
    """The terms, by what multiplies x and x² in the exponents.

    Args:
      component: of each pair, shape (pairs,).
      nodes: bins whose modes are sampled, shape (K,).
      of_loss: factors of x, shape (pairs, bins), and of x², shape (J, bins).
      of_proposal: the same of log R/Q, shapes (pairs, J) and (J, J).
    """

    def part(linear: jax.Array, square: Array) -> Exponents:
        top = jnp.argmax(square, axis=1)
        at_top = linear[jnp.arange(len(linear)), top[component]]
        # sums do not depend on what they are taken over
        return Exponents(linear, square, top, jax.lax.stop_gradient(at_top))

    linear, square = of_loss
    is_whole = len(nodes) == square.shape[1]
    at_nodes = None if is_whole else part(linear[:, nodes], square[:, nodes])
    return Terms(component, part(linear, square), at_nodes, part(*of_proposal))


def log_values(terms: Terms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log f for each sample (−inf where the loss is below ε), f = (P_K/R)(1 − e^(ε−Y))₊."""
    x = jnp.exp(-log_sigma)
    pairs, period = len(terms.component), len(terms.loss.square)
    size = min(max(max(_BLOCK, _EXPONENTS // period) // period, 1) * period, pairs)
    # of every block, since components come in cycles: their transpose is a sum over blocks
    rows = terms.component[:size]
    of_loss, of_proposal = (_powers(x, part, rows) for part in (terms.loss, terms.proposal))
    of_nodes = None if terms.nodes is None else _powers(x, terms.nodes, rows)

    def in_blocks(part: jax.Array) -> jax.Array:
        padded = jnp.pad(part, [(0, -pairs % size)] + [(0, 0)] * (part.ndim - 1))
        return padded.reshape(-1, size, *part.shape[1:])

    parts = terms.loss, terms.nodes, terms.proposal
    blocks = jax.tree.map(in_blocks, [part and (part.linear, part.own) for part in parts])

    @jax.checkpoint  # a backward pass makes the exponents of a block again
    def block(parts: list[Any]) -> jax.Array:
        at_modes, at_nodes, at_components = parts
        losses = densities = _log_means(x, of_loss, *at_modes)
        if of_nodes is not None:
            densities = _log_means(x, of_nodes, *at_nodes)
        ratios = _log_means(x, of_proposal, *at_components)
        triples = zip(losses, densities, ratios, strict=True)
        terms = [density - ratio + log_hinge(loss - epsilon) for loss, density, ratio in triples]
        return jnp.stack(terms)

    values = jax.lax.map(block, blocks)
    return jnp.swapaxes(values, 0, 1).reshape(2, -1)[:, :pairs].reshape(-1)


class _Powers(NamedTuple):
    """Per pair of a block: log of the largest e^(x²·square), and all of them divided by it."""

    log_largest: jax.Array
    over: jax.Array


def _powers(x: jax.Array, part: Exponents, rows: jax.Array) -> _Powers:
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


def log_delta(terms: Terms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log δ̂ = log mean f: smooth and decreasing in log σ for frozen ``terms``."""
    values = log_values(terms, log_sigma, epsilon)
    return jax.scipy.special.logsumexp(values) - jnp.log(values.shape[0])
