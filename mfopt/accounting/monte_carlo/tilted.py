"""The certificate's estimator: importance sampling whose weights have a proven ceiling.

With Y = log P/Q and δ₂ a payoff (of the mechanism alone the hinge, δ₂(t) = (1 − e^t)₊), what is
sampled is H(P, Q) = E_P δ₂(ε − Y) and H(Q, P) = E_Q δ₂(ε + Y), by one of these proposals. S is
the Gram matrix in noise units and a_k = <m_k, X>/σ².

"chain", remove. Take an integer order s >= 1. Bins k_0, …, k_s are drawn one at a time, k_0 uniform
and k_{l+1} ∝ exp(Σ_{l'<=l} S[k, k_l']); then X ~ N(Σ_l m_{k_l}, σ²I). With
N_l = mean_k exp(Σ_{l'<l} S[k, k_l']) the value

    f = (Π_{l=1..s} N_l) · e^(−sY) · δ₂(ε − Y)

has mean H(P, Q): extend P by s indices drawn from the posterior softmax(u(X)); its density over
the proposal's is Π N_l · e^(−sY). And 0 <= f <= B, since
e^(−sy) δ₂(ε − y) <= e^(−sε) sup_t e^(st) δ₂(t) and N_l <= max_k mean_i e^(l·S[i,k]) by Hölder.

"clusters", remove. The same with bins drawn in clusters (:mod:`.clusters`, with the proof): taken
wherever there are two bins, unless an s beyond what is tabulated for it has a lower ceiling.

"shift", remove. For any real s >= 0, k uniform and X ~ N((1+s) m_k, σ²I). The proposal's density
over Q is R = mean_k e^((1+s) a_k − (1+s)² S_kk/2) >= e^(−s(1+s) g/2) e^((1+s)Y), g = max_k S_kk,
by the mean of powers, so f = (e^Y/R) δ₂(ε − Y) lies below e^(s(1+s) g/2 − sε) sup_t e^(st) δ₂(t).
It serves where little is amplified and a whole order is too coarse; s = 0 is plain sampling from P.

"mean", add. With Jensen's bound Y >= <m̄, X>/σ² − ḡ/2, sampling X ~ N(−t m̄, σ²I) gives values
f = e^(t·mean_i a_i + t²ρ/2) δ₂(ε + Y) in [0, e^(−t(ε−ḡ/2) + t²ρ/2) sup_u e^(tu) δ₂(u)].

"clipped", add. The same with values clipped far below that ceiling, and what is above them bounded
on samples of its own (:mod:`.gap`, with the proof), where bins are many.

One sample is the mean of f over several points of X along the direction in which the proposal is
shifted (:mod:`mfopt.accounting.monte_carlo.proposals`): it lies in [0, B] and has the same mean.

Where modes have a part in common, the pair is that of the rest (:mod:`.common_part`), whose S may
have negative entries: nothing above asks for their sign.

The upper confidence bound is that of :mod:`mfopt.accounting.monte_carlo.betting` on f/B in [0, 1].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo import chunked, clusters, gap, overlaps, proposals
from mfopt.accounting.monte_carlo.clusters import Clusters
from mfopt.accounting.monte_carlo.dominating_pair import (
    DominatingPair,
    add_tilt,
    privacy_loss,
)
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER, Hinge, Point, Sums, Tilt
from mfopt.accounting.monte_carlo.nested import coloured
from mfopt.accounting.monte_carlo.overlaps import Gram
from mfopt.accounting.monte_carlo.plain import scale
from mfopt.accounting.monte_carlo.proposals import Asked, Drawn

PILOT = 4096
_ORDERS = clusters.MOST  # normalizers that one look at S gives
# From so many bins on only overlaps of bins that are at most so far apart are looked at one by one;
# of all others the largest of each square of so many bins a side.
_MANY, _NEAR, _SIDE = 2048, 256, 8
_RISING = 3  # orders of higher ceilings after which none is lower


# --- proposals -----------------------------------------------------------------------------------


class Smooth(NamedTuple):
    """What ceilings of clusters take of S, for every order.

    Attributes:
      spikes: d of :mod:`.clusters`, (bins,).
      log_weights: of clusters of every size, (MOST + 1, bins).
      log_normalizers: R(1), R(2), … or above them, (MOST,).
      top: at least the largest entry of T = S − diag(d).
    """

    spikes: np.ndarray
    log_weights: np.ndarray
    log_normalizers: np.ndarray
    top: float


@float64
def smooth(pair: DominatingPair, noise_multiplier: float) -> Smooth:
    """It for a pair of at least two bins, at this σ: one look at S, whose b² entries it takes."""
    gram, _ = scale(pair, noise_multiplier)
    spikes, diagonal = clusters.spikes(gram), np.asarray(overlaps.diagonal(gram))
    log_normalizers, beside = _log_normalizers(gram, 1, spikes)
    # T is at most what S is beside the diagonal, or what it keeps of it
    top = max(float(beside), float(np.max(diagonal - spikes)))
    log_weights = clusters.log_weights(spikes, diagonal)
    return Smooth(spikes, log_weights, np.asarray(log_normalizers), top)


@float64
def tilt(
    kind: str,
    order: float,
    pair: DominatingPair,
    point: Point,
    clip: gap.Gap | None = None,
    known: Smooth | None = None,
) -> Tilt:
    """The proposal of this kind and order, with its ceiling at a point.

    Args:
      kind: "chain", "clusters", "shift", "mean" or "clipped".
      order: s, whole for a chain and for clusters, or t.
      pair: the dominating pair.
      point: σ, ε and payoff.
      clip: where the values of "clipped" are.
      known: :func:`smooth` at this σ, where somebody has it already.
    """
    if kind in ("mean", "clipped"):
        square, squared_norm = _mean_squares(pair, point)
        log_ceiling = _mean_ceiling(square, squared_norm, order, point)
        if clip is not None:
            log_ceiling -= order * squared_norm * clip.cut
        return Tilt(kind, order, log_ceiling, clip)
    gram, _ = scale(pair, point.noise_multiplier)
    if kind == "chain":
        log_normalizers = _log_normalizer(gram, int(order))
        return Tilt(kind, int(order), _chain_ceiling(log_normalizers, int(order), point))
    if kind == "clusters":
        return _clusters_tilt(known or smooth(pair, point.noise_multiplier), int(order), point)
    return Tilt(kind, order, _shift_ceiling(gram, order, point))


@float64
def remove_tilts(pair: DominatingPair, point: Point, known: Smooth | None = None) -> list[Tilt]:
    """The proposal of least ceiling of each kind that may be best; the least of all first.

    Args:
      pair: the dominating pair.
      point: σ, ε and payoff.
      known: :func:`smooth` at this σ, where somebody has it already.
    """
    gram, chain = scale(pair, point.noise_multiplier)[0], None
    if pair.bins > 1:
        chain = _least_clusters(known or smooth(pair, point.noise_multiplier), point)
    if chain is None or chain.order == clusters.MOST - 1:
        plain = _least_chain(gram, point)
        chain = plain if chain is None or plain.log_ceiling < chain.log_ceiling else chain
    top = float(np.max(overlaps.diagonal(gram)))

    def shift(order: float) -> Tilt:
        return Tilt("shift", order, _shift_ceiling(gram, order, point))

    return proposals.worth_a_pilot(chain, shift, top, point.epsilon)


@float64
def mean_tilt(pair: DominatingPair, point: Point, cut: float = 0.0) -> Tilt:
    """The add direction's proposal of (about) the least ceiling.

    Args:
      pair: the dominating pair.
      point: σ, ε and payoff.
      cut: part of ḡ by which the values' exponents over t are less: where they will be clipped.
    """

    square, squared_norm = _mean_squares(pair, point)
    squared_norm *= 1 - 2 * cut

    def log_ceiling(log_order: float) -> float:
        return _mean_ceiling(square, squared_norm, math.exp(log_order), point)

    if isinstance(point.payoff, Hinge):
        best = float(add_tilt(square, squared_norm, point.epsilon, np))
    else:
        # convex in the order, as log_peak is: a supremum of what is linear in it
        best = math.exp(solve.lowest(log_ceiling, math.log(1e-2), math.log(1e3), width=1e-2))
    return min(
        (Tilt("mean", t, _mean_ceiling(square, squared_norm, t, point)) for t in (0.0, best)),
        key=lambda one: one.log_ceiling,
    )


@float64
def clipped_tilt(pair: DominatingPair, point: Point, key: jax.Array) -> Tilt | None:
    """The add direction's proposal with values clipped; None where that gains nothing.

    Args:
      pair: the dominating pair.
      point: σ, ε and payoff.
      key: randomness of a glance at Jensen's gap.
    """
    first = mean_tilt(pair, point)
    if not first.order > 0:
        return None

    def glance(edges: tuple[float, float], path: int) -> tuple[GapSums, int]:
        own = chunked.subkey(key, path)
        return _gaps(pair, point, first.order, np.array(edges), gap.GLANCE, own)

    sums, samples = glance((0.0, 0.0), 0)
    mean = float(sums.total) / samples
    deviation = math.sqrt(max(float(sums.square) / samples - mean**2, 0.0))
    edges = gap.edges(mean, deviation)
    sums, samples = glance(edges, 1)
    shares = float(sums.below) / samples, float(sums.half) / samples
    squared_norm = _mean_squares(pair, point)[1]
    found, order = gap.chosen(edges, shares, squared_norm, first.order), first.order
    if found is not None:  # with a lower ceiling goes another order, and with that another cut
        order = mean_tilt(pair, point, found.cut).order
        found = gap.chosen(edges, shares, squared_norm, order)
    return None if found is None else tilt("clipped", order, pair, point, found)


@float64
def beyond(pair: DominatingPair, tilt: Tilt, point: Point, beta: float, key: jax.Array) -> float:
    """What lies above the clipped values, over their ceiling, except with probability ``beta``.

    Args:
      pair: the dominating pair.
      tilt: "clipped".
      point: σ, ε and payoff.
      beta: failure probability.
      key: randomness; what the tilt was chosen by may not depend on it.
    """
    squared_norm = _mean_squares(pair, point)[1]
    edges = squared_norm * np.array([tilt.detail.low, tilt.detail.high])
    sums, samples = _gaps(pair, point, tilt.order, edges, gap.SAMPLES, key)
    counts = int(sums.below), int(sums.half)
    return gap.beyond(tilt.detail, squared_norm, tilt.order, counts, samples, beta)


def _gaps(
    pair: DominatingPair,
    point: Point,
    order: float,
    edges: np.ndarray,
    samples: int,
    key: jax.Array,
) -> tuple[GapSums, int]:
    gram, factor = scale(pair, point.noise_multiplier)
    known = overlaps.means(gram), overlaps.diagonal(gram)
    found: tuple[GapSums, int] = chunked.total(
        _gap_kernel, key, samples, pair.bins, known, factor, float(order), edges
    )
    return found


def _mean_squares(pair: DominatingPair, point: Point) -> tuple[float, float]:
    """|m̄|² and the mean of |m_i|², in noise units."""
    unit = point.noise_multiplier**2
    means, diagonal = overlaps.means(pair.gram), overlaps.diagonal(pair.gram)
    return float(np.mean(means)) / unit, float(np.mean(diagonal)) / unit


def _mean_ceiling(square: float, squared_norm: float, order: float, point: Point) -> float:
    log_ceiling = order * (squared_norm / 2 - point.epsilon) + order**2 * square / 2
    return log_ceiling + point.payoff.log_peak(order)


def _chain_ceiling(log_normalizers: float, order: int, point: Point) -> float:
    return log_normalizers - order * point.epsilon + point.payoff.log_peak(order)


def _shift_ceiling(gram: Gram, order: float, point: Point) -> float:
    top = float(np.max(overlaps.diagonal(gram)))
    return order * (1 + order) * top / 2 - order * point.epsilon + point.payoff.log_peak(order)


def _least_chain(gram: Gram, point: Point) -> Tilt:
    best = Tilt("chain", 1, math.inf)
    before = 0.0
    for first in range(1, MAX_ORDER + 1, _ORDERS):
        ahead = before + np.cumsum(np.asarray(_log_normalizers(gram, first)[0]))
        before = float(ahead[-1])
        for order, value in enumerate(ahead, first):
            log_ceiling = _chain_ceiling(float(value), order, point)
            if log_ceiling < best.log_ceiling:
                best = Tilt("chain", order, log_ceiling)
        if best.order < first:
            break  # the ceiling is convex enough: it rises from here on
    return best


def _least_clusters(known: Smooth, point: Point) -> Tilt:
    best = Tilt("clusters", 1, math.inf)
    for order in range(1, clusters.MOST):
        here = _clusters_tilt(known, order, point)
        best = here if here.log_ceiling < best.log_ceiling else best
        if order > best.order + _RISING:
            break  # the ceiling is convex enough
    return best


def _clusters_tilt(known: Smooth, order: int, point: Point) -> Tilt:
    drawn_by = clusters.clusters(
        known.spikes, known.log_weights, known.log_normalizers, order, known.top
    )
    return Tilt("clusters", order, _chain_ceiling(drawn_by.log_sum, order, point), drawn_by)


@_quick.jit
def _log_normalizers(gram: Gram, first: int, spikes: Any = 0.0) -> tuple[jax.Array, jax.Array]:
    """log max_k mean_i e^(l·T[i,k]), T = S − diag(``spikes``), and the largest S off the diagonal.

    For l = first, …, shape (_ORDERS,); of very many bins numbers that may be larger.
    """
    bins = gram.shape[0]
    orders, parts = first + jnp.arange(_ORDERS), _far if bins >= _MANY else _whole

    def of_rows(rows: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = jnp.arange(len(numbers)), numbers
        own = rows[at] - jnp.broadcast_to(spikes, (bins,))[numbers]
        beside = jnp.max(rows.at[at].set(-jnp.inf))
        exponents = parts(rows.at[at].set(own), numbers)
        top = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x, _ in exponents])
        ratios = [jnp.exp(x - top[:, None]) for x, _ in exponents]

        def add(powers: list[jax.Array], _: None) -> tuple[list[jax.Array], jax.Array]:
            masses = [w * jnp.sum(p, axis=1) for p, (_, w) in zip(powers, exponents, strict=True)]
            following = [power * ratio for power, ratio in zip(powers, ratios, strict=True)]
            return following, functools.reduce(jnp.add, masses)

        # one exponential for all orders
        begin = [ratio**first for ratio in ratios]
        masses = jax.lax.scan(add, begin, None, length=_ORDERS)[1]
        return jnp.max(orders[:, None] * top + jnp.log(masses), axis=1), beside

    largest, beside = overlaps.by_rows(of_rows, gram)
    return jnp.max(largest, axis=0) - jnp.log(bins), jnp.max(beside)


def _whole(rows: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, int]]:
    """Exponents of some rows and how often each counts: all of them, once."""
    return [(rows, 1)]


def _far(rows: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, int]]:
    """The near ones, once; and of each square of the others the largest, as often as it is wide.

    ``numbers`` are of neighbouring rows, in ascending order.
    """
    count, bins = rows.shape
    squares = -(-bins // _SIDE)
    rows = jnp.pad(rows, ((0, 0), (0, squares * _SIDE - bins)), constant_values=-jnp.inf)
    width = (count + 2 * _NEAR) // _SIDE + 1
    begin = jnp.clip((numbers[0] - _NEAR) // _SIDE, 0, squares - width)
    near = jax.lax.dynamic_slice(rows, (0, begin * _SIDE), (count, width * _SIDE))
    largest = jnp.max(rows.reshape(-1, _SIDE, squares, _SIDE), axis=(1, 3))
    place = jnp.arange(squares)
    far = jnp.where((begin <= place) & (place < begin + width), -jnp.inf, largest)
    return [(near, 1), (jnp.repeat(far, _SIDE, axis=0), _SIDE)]


def _log_normalizer(gram: Gram, order: int) -> float:
    """Their sum over l = 1, …, order."""
    parts = [np.asarray(_log_normalizers(gram, l)[0]) for l in range(1, order + 1, _ORDERS)]
    return float(np.sum(np.concatenate(parts)[:order]))


# --- kernels -------------------------------------------------------------------------------------


@float64
def total(
    pair: DominatingPair, tilt: Tilt, point: Point, samples: int, key: jax.Array
) -> tuple[Sums, int]:
    """:class:`Sums` over at least so many samples, and how many they were.

    Args:
      pair: the dominating pair.
      tilt: the proposal, with its ceiling at this point.
      point: σ, ε and payoff.
      samples: iid samples; a part chunk is made whole.
      key: randomness.
    """
    gram, factor = scale(pair, point.noise_multiplier)
    return chunked.total(
        _KERNELS[tilt.kind],
        key,
        samples,
        pair.bins,
        _overlaps(tilt, gram),
        factor,
        float(point.epsilon),
        float(tilt.order),
        tilt.log_ceiling,
        point.payoff,
    )


def _overlaps(tilt: Tilt, gram: Gram) -> Any:
    """What a kernel takes of S; for the mean mode its columns' means and diagonal are enough."""
    if tilt.kind == "clusters":
        return gram, tilt.detail
    if tilt.kind in ("mean", "clipped"):
        return overlaps.means(gram), overlaps.diagonal(gram)
    return gram


def _chain(
    key: jax.Array,
    size: int,
    gram: Gram,
    factor: Any,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
) -> Sums:
    """:class:`Sums` over ``size`` iid samples; one compilation for every order."""
    bins = gram.shape[0]
    first_key, chain_key, noise_key, point_key = jax.random.split(key, 4)
    first = jax.random.randint(first_key, (size,), 0, bins)
    noise = coloured(jax.random.normal(noise_key, (size, bins)), factor)
    rows, squares = jnp.arange(size), overlaps.diagonal(gram)

    # With n the counts of the bins drawn so far: products = S n, along = <noise, n>, square = nᵀS n
    def extend(l: jax.Array, before: Drawn) -> Drawn:
        products, along, square, log_normalizers = before
        chosen, top, mass = proposals.pick(products, jax.random.fold_in(chain_key, l))
        return Drawn(
            products + overlaps.rows(gram, chosen),
            along + noise[rows, chosen],
            square + 2 * products[rows, chosen] + squares[chosen],
            log_normalizers + top + jnp.log(mass / bins),
        )

    begin = Drawn(overlaps.rows(gram, first), noise[rows, first], squares[first], jnp.zeros(size))
    drawn: Drawn = jax.lax.fori_loop(1, order.astype(int) + 1, extend, begin)
    asked = Asked(epsilon, order, log_ceiling, payoff)
    return proposals.chain(point_key, _ratio(overlaps.diagonal(gram)), drawn, noise, asked)


def _clusters(
    key: jax.Array,
    size: int,
    known: tuple[Gram, Clusters],
    factor: Any,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
) -> Sums:
    """:class:`Sums` over ``size`` iid samples; one compilation for every order."""
    gram, given = known
    bins = gram.shape[0]
    kind_key, chain_key, noise_key, point_key = jax.random.split(key, 4)
    kind = jnp.searchsorted(given.ends, jax.random.uniform(kind_key, (size,)), side="right")
    sizes = given.sizes[kind]
    noise = coloured(jax.random.normal(noise_key, (size, bins)), factor)
    place = jnp.arange(bins)

    # with n the counts of the bins drawn so far: smooth = T n
    def extend(
        j: jax.Array, before: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        smooth, counts, log_normalizers = before
        places = sizes[:, j]
        exponents = places[:, None] * smooth + given.log_weights[places]
        chosen, top, mass = proposals.pick(exponents, jax.random.fold_in(chain_key, j))
        log_normalizers += jnp.where(places > 0, top + jnp.log(mass), 0)
        more = jnp.where(place == chosen[:, None], places[:, None], 0.0)
        smooth += places[:, None] * overlaps.rows(gram, chosen) - more * given.spikes
        return smooth, counts + more, log_normalizers

    nothing = jnp.zeros((size, bins))
    steps, begin = order.astype(int) + 1, (nothing, nothing, given.log_over[kind])
    smooth, counts, log_normalizers = jax.lax.fori_loop(0, steps, extend, begin)
    products = smooth + counts * given.spikes
    along, square = jnp.sum(counts * noise, axis=1), jnp.sum(counts * products, axis=1)
    asked = Asked(epsilon, order, log_ceiling, payoff)
    found = Drawn(products, along, square, log_normalizers)
    return proposals.chain(point_key, _ratio(overlaps.diagonal(gram)), found, noise, asked)


def _shift(
    key: jax.Array,
    size: int,
    gram: Gram,
    factor: Any,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
) -> Sums:
    """:class:`Sums` of the shifted mixture over ``size`` iid samples."""
    bins = gram.shape[0]
    mode_key, noise_key, point_key = jax.random.split(key, 3)
    mode = jax.random.randint(mode_key, (size,), 0, bins)
    noise = coloured(jax.random.normal(noise_key, (size, bins)), factor)
    products = overlaps.rows(gram, mode)
    drawn = Drawn(products, noise[jnp.arange(size), mode], overlaps.diagonal(gram)[mode])
    asked = Asked(epsilon, order, log_ceiling, payoff)
    return proposals.shift(point_key, _ratio(overlaps.diagonal(gram)), drawn, noise, asked)


def _mean(
    key: jax.Array,
    size: int,
    known: tuple[jax.Array, jax.Array],
    factor: Any,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
    clipped: bool = False,
) -> Sums:
    """:class:`Sums` of the add direction over ``size`` iid samples."""
    means, diagonal = known
    noise_key, point_key = jax.random.split(key)
    noise = coloured(jax.random.normal(noise_key, (size, len(diagonal))), factor)
    products = jnp.broadcast_to(means, noise.shape)
    drawn = Drawn(products, jnp.mean(noise, axis=1), jnp.full(size, jnp.mean(means)))
    asked = Asked(epsilon, order, log_ceiling, payoff)

    def toward(exponents: jax.Array) -> jax.Array:
        return order * jnp.mean(exponents, axis=1)

    return proposals.mean(point_key, _ratio(diagonal), drawn, noise, asked, toward, clipped)


_clipped = functools.partial(_mean, clipped=True)


class GapSums(NamedTuple):
    """Over iid samples of Jensen's gap F: Σ F, Σ F², and how many lie at or below two edges.

    Both counts err on the side of a proof: upwards at the first edge, downwards at the second.
    """

    total: jax.Array
    square: jax.Array
    below: jax.Array
    half: jax.Array


def _gap_kernel(
    key: jax.Array,
    size: int,
    known: tuple[jax.Array, jax.Array],
    factor: Any,
    order: jax.Array,
    edges: jax.Array,
) -> GapSums:
    """:class:`GapSums` over ``size`` iid samples of N(−t m̄, σ²I)."""
    means, diagonal = known
    noise = coloured(jax.random.normal(key, (size, len(diagonal))), factor)
    exponents = noise - order * means - diagonal / 2
    found = privacy_loss(exponents) - jnp.mean(exponents, axis=1)
    below = ~(found > edges[0] + gap.ROUNDING)  # with what is no number
    half = found <= edges[1] - gap.ROUNDING
    return GapSums(jnp.sum(found), jnp.sum(found**2), jnp.sum(below), jnp.sum(half))


def _ratio(squares: jax.Array) -> proposals.Ratio:
    half = squares / 2

    def ratio(exponents: jax.Array, power: Any = 1) -> jax.Array:
        return privacy_loss(power * exponents - power**2 * half)

    return ratio


_KERNELS: dict[str, Callable[..., Sums]] = {
    "chain": _chain,
    "clusters": _clusters,
    "shift": _shift,
    "mean": _mean,
    "clipped": _clipped,
}
