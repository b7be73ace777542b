"""White Gaussian noise that is a pure function of (key, step, leaf, element).

The 256-bit key of a run makes, with one ChaCha20 block for each step and leaf (Bernstein 2008, RFC
8439), the twelve subkeys of Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw 2011); this
makes 64 bits for each element, and one inversion of the normal law uses all of them. So within one
run no draw occurs twice, a past draw can be regenerated instead of being stored, and the numbers do
not depend on how the parameters are laid out over devices.

The rounds are written out instead of calling ``jax.random.normal``: XLA then fuses the draw into
one pass with the arithmetic that uses it, without a temporary array. ``jax.random`` runs the same
rounds in a loop on CPU, about three times slower there, and keeps 23 bits of them.

**The tails.** 2⁶⁴ inputs cannot give all values: a generator that stops at a largest |z| leaves
room that only data reaches, and a unit spread thinly over P parameters is found there with
probability about P · steps · (probability beyond the end). For 24 bits (|z| <= 5.42) that is
certainty at P = 10⁷. Here one bit is the sign, and the other 63, m, with an offset u in (0, 1) that
is secret and fresh for each step and leaf, give the tail probability (m + u) 2⁻⁶⁴. Each single
draw then has the normal law as far out as |z| = 11.3 (u has 32 bits), the outermost cell m = 0
included. What is left there, and :func:`check_sizes` keeps it below 2⁻⁴⁰ whatever the sizes:

- two of the P draws of one step and leaf in their outermost cells, where they share u: probability
  at most P² 2⁻¹²⁷ for each step and leaf;
- a draw beyond 11.3: 2⁻⁹⁶ each.

Both are added to δ of whoever counts that far (:func:`slack`). Not counted are the rounding to the
type of the noise, of the sum that it is added to, and of the offsets' grid inside the range
(Mironov 2012): for a proof against these see the stream's ``secure``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array, Step

KEY_WORDS = 8  # 256 bits
SUBKEYS = 12  # two before the first of five groups of four rounds and two after each
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
_WORD = 2**32
_SLACK = 2.0**-40


class _Inversion(NamedTuple):
    """z/x for x = 1 - 2p and the tail probability p, by w = -log 4p(1-p), as two polynomials in t.

    Attributes:
      split: below this w, ``center`` is z/x, t = 2w/split - 1.
      center: coefficients, from the constant one on.
      tail: of z/(x √w), t = scale/√w + shift, up to w = 68 (p = 2⁻¹⁰⁰).
    """

    split: float
    center: tuple[float, ...]
    tail: tuple[float, ...]
    scale: float
    shift: float


# fmt: off
# Least relative error, by Lawson's iteration on Chebyshev nodes: 2.4e-7, in the tail 1.8e-7.
_SINGLE = _Inversion(
    5.75,
    (
        2.25319644, 0.988107144, -0.0632060042, -0.0314969939, 0.0196492293, -0.00292574935,
        -0.00188426222, 0.000801243043, 4.408205e-05,
    ),
    (
        1.35224925, 0.0406749205, 0.00346475462, -0.00251834412, 0.000216524604, -0.00100102739,
        0.000312648917, 0.000190364227, -0.000133755738,
    ),
    -6.762216433,
    1.820039194,
)
# By interpolation at Chebyshev nodes: 6.4e-14, in the tail 7.7e-12.
_DOUBLE = _Inversion(
    6.5,
    (
        2.3809397712604513, 1.0967276795804505, -0.094020493211124387, -0.031534109790505963,
        0.028047698274509711, -0.0075742675570424047, -0.0016803093643558799,
        0.0021249702392876945, -0.00058050278127973918, -0.00016295788769105063,
        0.00017945316964806241, -4.2869467527491418e-5, -1.7518123122481043e-5,
        1.5992722081837451e-5, -2.80121564548516e-6, -2.342257913739608e-6, 1.2176850879115732e-6,
        1.3238797778282544e-7, -1.5040947785744767e-7,
    ),
    (
        1.3556821071268341, -0.037749917876493222, 0.0023876736024117439, 0.0019504883500863214,
        -0.00017297144528803307, 0.0004497604818213003, 0.00037168352303890412,
        0.00010276427562172593, -0.00022254886902977477, -0.00017894980366413318,
        9.8934300470700833e-5, 0.00013520013884501821, -4.815397580998876e-5,
        -7.2119054222422437e-5, 2.3451246598944121e-5, 2.5064227523193847e-5,
        -8.3697764917461839e-6, -4.1315823131039171e-6, 1.4362587934490689e-6,
    ),
    7.3810418404937974,
    -1.8950827981017443,
)
# fmt: on


@jax.jit  # traced once for each shape, however many programs use it
def chacha20(key: Array, counter: Array) -> jax.Array:
    """The block of ChaCha20 (RFC 8439, section 2.3): 16 words for each counter.

    ``key``: 8 words, uint32; ``counter``: (4, blocks), uint32: the block count and the nonce.
    """
    columns = (_CONSTANTS, key[:4], key[4:], counter)
    start = jnp.stack(
        [jnp.broadcast_to(jnp.reshape(x, (4, -1)), counter.shape) for x in columns]
    ).astype(jnp.uint32)

    def double_round(i: jax.Array, state: jax.Array) -> jax.Array:
        a, b, c, d = _quarter_rounds(*state)
        # the diagonals: row k, turned by k, stands in columns again
        a, b, c, d = _quarter_rounds(a, jnp.roll(b, -1, 0), jnp.roll(c, -2, 0), jnp.roll(d, -3, 0))
        state = jnp.stack([a, jnp.roll(b, 1, 0), jnp.roll(c, 2, 0), jnp.roll(d, 3, 0)])
        # added in here: what comes after the loop, XLA would compute again for every element
        return state + jnp.where(i == 9, start, np.uint32(0))

    return lax.fori_loop(0, 10, double_round, start).reshape(16, -1)


def _quarter_rounds(
    a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The quarter round on every column of four rows."""
    for upper_bits, lower_bits in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, upper_bits)
        c = c + d
        b = _rotated(b ^ c, lower_bits)
    return a, b, c, d


def _rotated(word: Any, bits: int) -> Any:
    return (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))


def threefry(subkeys: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """The rounds of Threefry-2x32-20 on (low, high), elementwise; all words are uint32.

    The published generator fills the 12 ``subkeys`` from a key of 64 bits, within reach of an
    exhaustive search; here they are independent. Works on numpy and on JAX arrays. Not a cipher
    by proof: its quality is statistical, as for every generator in JAX and PyTorch.
    """
    low, high = low + subkeys[0], high + subkeys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            low = low + high
            high = _rotated(high, rotation) ^ low
        low = low + subkeys[2 * i + 2]
        high = high + subkeys[2 * i + 3]
    return low, high


def seeds(key: Array, step: Step, leaves: Array) -> tuple[jax.Array, jax.Array]:
    """(subkeys of :func:`threefry`, (12, leaves) uint32; offsets u in (0, 1), (leaves,)) of a step.

    ``leaves``: an integer array of shape (leaves,).
    """
    leaves = jnp.asarray(leaves).astype(jnp.uint32)
    zero = jnp.zeros_like(leaves)
    step = zero + jnp.asarray(step).astype(jnp.uint32)
    words = chacha20(jnp.asarray(key), jnp.stack([zero, step, leaves, zero]))
    offset = (words[SUBKEYS].astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return words[:SUBKEYS], offset


def standard_normal(low: Array, high: Array, offset: Array, dtype: np.dtype) -> jax.Array:
    """N(0, 1) from two random words per element, by inversion; float32 or float64.

    The top bit of ``high`` is the sign, set for minus; the other 63, those of ``high`` inverted
    for plus, are m, and the tail probability is (m + offset) 2⁻⁶⁴. Relative error for float32
    below 1e-6, except within 2⁻³² of 0, and for float64 below 1e-11.
    """
    wide = dtype == jnp.float64
    kind, to = (_DOUBLE if wide else _SINGLE), np.dtype(dtype).type
    signed = lax.bitcast_convert_type(high, jnp.int32)
    upper = (signed ^ ((signed >> 31) ^ np.int32(0x7FFFFFFF))).astype(dtype)
    lower = low.astype(dtype) + jnp.asarray(offset, dtype)
    tail = upper * to(2.0**32) + lower  # p 2⁶⁴
    # from the signed word, (1 - 2p) 2³¹ with its sign comes without cancellation
    inside = to(0.5)
    if wide:
        inside = lower * to(2.0**-32)
        inside = jnp.where(signed < 0, inside, to(1) - inside)
    x = signed.astype(dtype) + inside
    w = -jnp.log((tail * to(2.0**-62)) * (to(1) - to(2.0**-64) * tail))
    root = lax.rsqrt(w)
    center = w < to(kind.split)

    def choose(central: float, outer: float) -> jax.Array:
        return jnp.where(center, to(central), to(outer))

    t = jnp.where(center, w * to(2 / kind.split) - to(1), root * to(kind.scale) + to(kind.shift))
    # 2⁻³¹ of x is in the coefficients
    value = choose(2.0**-31 * kind.center[-1], 2.0**-31 * kind.tail[-1])
    for central, outer in zip(kind.center[-2::-1], kind.tail[-2::-1], strict=True):
        value = value * t + choose(2.0**-31 * central, 2.0**-31 * outer)
    return x * jnp.where(center, value, value * (w * root))


@functools.partial(jax.jit, static_argnames="dtype")
def normal(subkeys: Array, low: Array, high: Array, offset: Array, dtype: np.dtype) -> jax.Array:
    """:func:`standard_normal` of :func:`threefry`; ``offset`` as broadcast to ``low``.

    Some 200 operations, so a function of its own: a program that draws in many places, in both
    branches of a condition or for several steps, has it traced once and lowered once. XLA inlines
    it everywhere and fuses it as before.
    """
    return standard_normal(*threefry(subkeys, low, high), offset, dtype)


def counters(
    shape: tuple[int, ...], block: tuple[int, ...], offset: tuple[Step, ...]
) -> tuple[jax.Array, jax.Array]:
    """(element, its group) as uint32 of each element of a block of a leaf.

    A leaf of this ``shape`` has several groups if it has 2³² elements or more; the block, of shape
    ``block``, starts at index ``offset``.
    """
    high = jnp.zeros((), jnp.uint32)
    low = jnp.zeros(block, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(block))):
        index = lax.broadcasted_iota(jnp.uint32, block, axis)
        index = index + jnp.asarray(offset[axis]).astype(jnp.uint32)
        if axis == 0 and math.prod(shape) > _WORD:
            high = index // np.uint32(_WORD // stride)
            index = index - high * np.uint32(_WORD // stride)
        low = low + index * np.uint32(stride)
        stride *= shape[axis]
    return low, high


def slack(shapes: tuple[tuple[int, ...], ...], iterations: int) -> float:
    """Upper bound on the δ added by the finite range of the draws; see the module's docstring."""
    sizes = [math.prod(shape) for shape in shapes]
    pairs = sum(size * size for size in sizes) * iterations
    return pairs * 2.0**-127 + sum(sizes) * iterations * 2.0**-96


def check_sizes(shapes: tuple[tuple[int, ...], ...], iterations: int) -> None:
    """Refuse leaves of these shapes that the counters or the draws' range do not suffice for.

    Raises:
      UsageError: more than 2³² steps, a leaf whose slices have more than 2³² elements, or so many
        draws that :func:`slack` exceeds 2⁻⁴⁰.
    """
    if iterations > _WORD:
        raise _check.reject("iterations", iterations, "must be at most 2**32")
    for shape in shapes:
        if math.prod(shape) > _WORD and math.prod(shape[1:]) > _WORD:
            rule = f"one slice of its first axis has {math.prod(shape[1:])} elements"
            way_out = "Split the parameter: slices of more than 2**32 elements are not supported."
            raise _check.reject("parameter shape", shape, rule, way_out)
    added_delta = slack(shapes, iterations)
    if not added_delta <= _SLACK:
        rule = "with these parameters the ends of the draws' range could "
        rule += f"add {added_delta:.2g} to δ, and at most {_SLACK:.2g} is let pass"
        way_out = "Split the parameters into more arrays, or take fewer iterations."
        raise _check.reject("iterations", iterations, rule, way_out)
