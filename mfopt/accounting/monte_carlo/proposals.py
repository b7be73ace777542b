"""What the proposals of every scheme share: the value of a sample, and the points it is a mean of.

A scheme draws where a proposal puts X and knows log P/Q there; the values that follow are the same
for all (:mod:`.tilted` and :mod:`.pattern_tilts` prove their means and ceilings). v is the vector
that a proposal is shifted along, a sum of modes; *exponents* are <m, X>/σ² for every mode m.

One sample is the mean of the value over J = :data:`POINTS` points of X: along v the standard
normal is a systematic sample Φ⁻¹((j + U)/J), with one U; across it there is one draw. Each point
has the normal law, so the mean is unbiased and lies in [0, B] as each value does; samples are iid.
Y moves mostly along that direction, so most of the variance goes: it falls by a factor 3 to 5 where
modes hardly overlap, and by 200 for the square root at 16 × 128, ε = 2, δ = 1e-4. Where a Gaussian
release beside Y is paid exactly, little of that is left to gain: two points are worth most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.evidence import Sums, Tilt, sums
from mfopt.accounting.monte_carlo.hockey import Hockey

POINTS = 8
_SMOOTH_POINTS = 2
_WIDTH = 1e-3  # of the bracket of log order: a ceiling is flat about its least
_SHIFT_WORTH = 3.0  # log: a shift is tried where its ceiling is at most so far above a chain's


class Drawn(NamedTuple):
    """What is drawn one after another, by its sum v of modes, in noise units.

    Attributes:
      products: <m, v>/σ² for every mode, shape (size, modes).
      along: <noise, counts of v>, shape (size,).
      square: |v|²/σ².
      log_normalizers: Σ_l log N_l.
    """

    products: jax.Array
    along: jax.Array
    square: jax.Array
    log_normalizers: Any = 0.0


class Asked(NamedTuple):
    """A :class:`~.evidence.Point` and a :class:`~.evidence.Tilt` inside a kernel."""

    epsilon: jax.Array
    order: jax.Array
    log_ceiling: jax.Array
    payoff: Any


class Ratio(Protocol):
    """log of the mean over modes m of e^(p <m, X>/σ² − p² |m|²/2σ²): log P/Q at p = 1."""

    def __call__(self, exponents: jax.Array, power: Any = 1) -> jax.Array: ...


def chain(key: jax.Array, ratio: Ratio, drawn: Drawn, noise: jax.Array, asked: Asked) -> Sums:
    """f/B of X ~ N(v, σ²I): Π N_l · e^(−sY) · δ₂(ε − Y).

    Args:
      key: of the points.
      ratio: the scheme's.
      drawn: v of each sample.
      noise: <m, z>/σ for every mode, shape (size, modes).
      asked: what for.
    """

    def log_value(exponents: jax.Array) -> jax.Array:
        loss = ratio(exponents)
        result: jax.Array = (
            drawn.log_normalizers
            - asked.order * loss
            + asked.payoff.log_value(asked.epsilon - loss)
            - asked.log_ceiling
        )
        return result

    return _on_points(key, log_value, drawn.products, noise, drawn, asked)


def shift(key: jax.Array, ratio: Ratio, drawn: Drawn, noise: jax.Array, asked: Asked) -> Sums:
    """f/B of X ~ N((1+s) m, σ²I), m drawn as v: e^Y/R · δ₂(ε − Y).

    Args:
      key, ratio, drawn, noise, asked: as for :func:`chain`.
    """
    far = 1 + asked.order

    def log_value(exponents: jax.Array) -> jax.Array:
        loss, proposal = ratio(exponents), ratio(exponents, far)
        result: jax.Array = (
            loss - proposal + asked.payoff.log_value(asked.epsilon - loss) - asked.log_ceiling
        )
        return result

    return _on_points(key, log_value, far * drawn.products, noise, drawn, asked)


def mean(
    key: jax.Array,
    ratio: Ratio,
    drawn: Drawn,
    noise: jax.Array,
    asked: Asked,
    toward: Callable[[jax.Array], jax.Array],
    clipped: bool = False,
) -> Sums:
    """f/B of X ~ N(−t m̄, σ²I), v being the mean mode m̄: e^(t <m̄, X> + t²|m̄|²/2) · δ₂(ε + Y).

    Args:
      key, ratio, drawn, noise, asked: as for :func:`chain`.
      toward: t <m̄, X>/σ² of exponents.
      clipped: whether it is min(f/B, 1).
    """
    order = asked.order

    def log_value(exponents: jax.Array) -> jax.Array:
        log_weight = toward(exponents) + order**2 * drawn.square / 2
        result: jax.Array = (
            log_weight
            + asked.payoff.log_value(asked.epsilon + ratio(exponents))
            - asked.log_ceiling
        )
        return jnp.where(result > 0, 0.0, result) if clipped else result  # NaN stays NaN

    return _on_points(key, log_value, -order * drawn.products, noise, drawn, asked)


def _on_points(
    key: jax.Array,
    log_value: Callable[[jax.Array], jax.Array],
    centre: jax.Array,
    noise: jax.Array,
    drawn: Drawn,
    asked: Asked,
) -> Sums:
    """Systematic points along v of each sample, at exponents = centre + noise.

    The noise's component along v is taken out and put back at each point.
    """
    points = _SMOOTH_POINTS if isinstance(asked.payoff, Hockey) else POINTS
    length = jnp.sqrt(drawn.square)
    direction = drawn.products / length[:, None]
    across = centre + noise - (drawn.along / length)[:, None] * direction
    uniform = jax.random.uniform(key, drawn.along.shape)

    def add(j: jax.Array, total: jax.Array) -> jax.Array:
        share = jnp.clip((j + uniform) / points, 2.0**-53, 1 - 2.0**-53)
        z = jax.scipy.special.ndtri(share)
        return total + jnp.exp(log_value(across + z[:, None] * direction))

    return sums(jax.lax.fori_loop(0, points, add, jnp.zeros(drawn.along.shape)) / points)


def pick(exponents: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A column for each row, drawn ∝ e^``exponents`` (size, bins).

    Returns (columns, tops, masses), each (size,): Σ e^exponents of a row is e^top · mass.
    """
    top = jnp.max(exponents, axis=1)
    uniform = jax.random.uniform(key, (exponents.shape[0],))
    chosen, mass = _column(exponents, top, uniform)
    return chosen, top, mass


def _column(
    exponents: jax.Array, top: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A column for each row, drawn ∝ e^(``exponents`` − ``top``), and the rows' sums (size,).

    First a block of about √bins columns, then a column in it: running sums over all columns are
    what would cost most. Its width is a power of two: most numbers of bins are whole blocks then.
    Exponentials are summed as they are made, and only those of the block are made again: kept, they
    would take the place of the exponents, and XLA makes those one by one, three times slower.
    """
    size, bins = exponents.shape
    width = 2 ** round(math.log2(bins) / 2)
    blocks = -(-bins // width)
    padding = (0, 0), (0, blocks * width - bins)
    parts = jnp.pad(exponents, padding, constant_values=-jnp.inf).reshape(size, blocks, width)
    ends = jnp.cumsum(jnp.sum(jnp.exp(parts - top[:, None, None]), axis=2), axis=1)
    mass = ends[:, -1]
    left = (uniform * mass)[:, None]
    block = jnp.minimum(jnp.sum(ends <= left, axis=1), blocks - 1)
    before = jnp.where(block > 0, ends[jnp.arange(size), block - 1], 0.0)
    inside = jnp.cumsum(jnp.exp(parts[jnp.arange(size), block] - top[:, None]), axis=1)
    column = jnp.sum(before[:, None] + inside <= left, axis=1)
    return jnp.minimum(block * width + jnp.minimum(column, width - 1), bins - 1), mass


def worth_a_pilot(
    chain: Tilt, shift: Callable[[float], Tilt], largest_square: float, epsilon: float
) -> list[Tilt]:
    """A chain and the shift of least ceiling, without one that is far above; the least first.

    Args:
      chain: of least ceiling.
      shift: the shift of an order s >= 0, with its ceiling.
      largest_square: g, the largest |m|²/σ².
      epsilon: ε.
    """
    # without log_peak the least is at (1+2s)g/2 = ε: the search is around it
    near = math.log(max(epsilon / largest_square, 1e-3))
    found = solve.lowest(
        lambda log_order: shift(math.exp(log_order)).log_ceiling,
        min(near, -7.0) - 5,
        near + 5,
        width=_WIDTH,
    )
    best = min((shift(math.exp(found)), shift(0.0)), key=lambda one: one.log_ceiling)
    kept = [chain] if chain.log_ceiling <= best.log_ceiling + _SHIFT_WORTH else []
    kept += [best] if best.log_ceiling <= chain.log_ceiling + _SHIFT_WORTH else []
    return sorted(kept, key=lambda tilt: tilt.log_ceiling)
