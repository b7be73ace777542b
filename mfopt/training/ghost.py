"""Norms of per-unit gradients, and their clipped sum, without the gradients themselves.

Where a parameter's gradient is G = Σ_t u_tᵀ v_t (:mod:`mfopt.training.taps`), its squared norm is
Σ_{s,t} (u_s·u_t)(v_s·v_t), and the sum over units of c G is one product of all u with all c v: a
unit's G is never formed (Goodfellow 2015; Li et al. 2022, section 4, for positions that share a
matrix; Bu et al. 2023, "book-keeping", for one backward pass instead of two).
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from mfopt._runtime._pytree import STATIC, pytree
from mfopt.training import mesh as meshes
from mfopt.training.taps import Taps, Use

# all products in full float32: what is summed has to have the norm that was computed
_EXACT = jax.lax.Precision.HIGHEST
_SIGMAS, _LARGE = 6.0, 2**28  # of a bound for rounding; parameters


@pytree
@dataclasses.dataclass(frozen=True)
class Part:
    """Contribution of one use to a unit's gradient: Σ_t u_tᵀ v_t.

    ``u``: (T, rows) activations, or (T,) numbers of rows; ``v``: (T, columns) float32 gradients of
    what came out; ``turned``: the leaf's first half of axes are the use's columns.
    """

    u: jax.Array
    v: jax.Array
    turned: bool = dataclasses.field(metadata=STATIC)

    @property
    def sides(self) -> tuple[jax.Array, jax.Array]:
        """The factors by the leaf's own halves of axes."""
        return (self.v, self.u) if self.turned else (self.u, self.v)


def parts(uses: list[tuple[Use, jax.Array, jax.Array]], wide: bool) -> list[Part]:
    """The uses of one leaf, of one unit of G records.

    ``uses``: each with what went in, (G, positions, rows) or (G, positions), and the gradient of
    its tap, (G, *shape). ``wide``: all in float32; else products of bfloat16 stay such.
    """
    rows, pieces = uses[0][0].rows, []
    for use, u, gradient in uses:
        v = jax.vmap(use.matrix)(gradient)
        narrow = u.dtype == jnp.bfloat16 and not (wide or use.picked)
        v = v.astype(u.dtype if narrow else jnp.float32).reshape(-1, v.shape[-1])
        u = u.reshape(-1) if use.picked else u.astype(v.dtype).reshape(-1, u.shape[-1])
        pieces.append(Part(u, v, use.rows != rows))
    return pieces


def square(pieces: list[Part]) -> jax.Array:
    """||G||² of one unit and one leaf, not below its true value for rounding; scalar float32.

    The terms of the double sum can cancel. A product of n numbers in float32 is off by more than
    λ √n 2⁻²⁴ times its terms' size with probability 2 exp(-λ²/2) each (Higham and Mary 2019, thm.
    3.1, for independent rounding); λ = 6 times the root of the sum of the squared errors is added.
    """
    total, spread = jnp.float32(0), jnp.float32(0)
    for a, b in itertools.combinations_with_replacement(pieces, 2):
        gram = _gram(a.sides[0], b.sides[0]) * _gram(a.sides[1], b.sides[1])
        total += (1 if a is b else 2) * jnp.sum(jnp.sum(gram, axis=-1))
    for part in pieces:
        spread += jnp.sum(_lengths(part.u) * _lengths(part.v))
    length = sum(side.shape[-1] if side.ndim > 1 else 1 for side in pieces[0].sides)
    length += 2 * sum(part.v.shape[0] for part in pieces)
    slack = 2 * _SIGMAS * math.sqrt(length) * 2.0**-24 * len(pieces)
    return jnp.maximum(total, 0.0) + slack * spread


def weighted(pieces: list[Part], factor: jax.Array) -> list[Part]:
    """The unit's parts with ``factor`` on them; exactly 0 where it is 0, whatever they hold."""
    kept = factor > 0
    scaled = []
    for part in pieces:
        v = jnp.where(kept, factor * part.v, 0.0)
        u = part.u if part.u.ndim == 1 else jnp.where(kept, part.u, 0.0)
        scaled.append(dataclasses.replace(part, u=u, v=v))
    return scaled


def total(uses: list[Use], pieces: list[Part], leaf: jax.Array) -> jax.Array:
    """Σ over units of the weighted G, or G of one unit, float32, in the shape of ``leaf``.

    ``pieces``: the part of each of the leaf's ``uses``, with a leading axis of units; without one,
    products are rounded as the model's are.
    """
    result = jnp.zeros(leaf.shape, jnp.float32)
    for use, part in zip(uses, pieces, strict=True):
        v = part.v.reshape(-1, part.v.shape[-1])
        if use.picked:
            rows = v.reshape(-1, *leaf.shape[1:])
            result = result.at[part.u.reshape(-1)].add(rows, mode="drop")
            continue
        u = part.u.reshape(-1, part.u.shape[-1])
        product = jnp.matmul(u.T, v, precision=_EXACT if part.v.ndim > 2 else None)
        axes = (*use.rows, *use.columns)
        product = product.astype(jnp.float32).reshape([leaf.shape[axis] for axis in axes])
        result += product.transpose([axes.index(axis) for axis in range(leaf.ndim)])
    return result


def pays(positions: int, size: int, trained: float) -> bool:
    """True if the positions' products are fewer than the matrix (Bu et al. 2022, section 4).

    They must be in full float32, which is slow on an accelerator. Those of a gradient that is
    formed need not, as its norm is that of what is summed: one of up to a gibibyte is formed there.
    """
    return 2 * positions**2 <= size and (trained > _LARGE or meshes.on_cpu())


def chosen(taps: Taps, leaves: list[jax.Array], records: int) -> Taps:
    """``taps`` of those parameters for which they pay, with ``records`` in a unit."""
    positions = dict.fromkeys(taps.leaves, 0)
    for use in taps.uses:
        positions[use.leaf] += records * use.positions
    sizes = [leaf.size for leaf in leaves]
    return taps.keep([i for i, uses in positions.items() if pays(uses, sizes[i], sum(sizes))])


def _gram(a: jax.Array, b: jax.Array) -> jax.Array:
    """Inner products of the rows of ``a`` and ``b``; numbers stand for unit vectors."""
    if a.ndim == 1 and b.ndim == 1:
        return (a[:, None] == b[None, :]).astype(jnp.float32)
    if a.ndim == 1:
        return jnp.take(b, a, axis=1, mode="fill", fill_value=0).T
    if b.ndim == 1:
        return jnp.take(a, b, axis=1, mode="fill", fill_value=0)
    return jnp.matmul(a, b.T, precision=_EXACT)


def _lengths(rows: jax.Array) -> jax.Array:
    """Squared norms of the rows."""
    return jnp.float32(1) if rows.ndim == 1 else jnp.sum(jnp.square(rows), axis=-1)
