"""Importance sampling with a proven ceiling: the certificate's estimators, for any scheme.

Notation of :mod:`.likelihood`, in noise units. δ₂ is a payoff (of the mechanism alone the
hockey-stick payoff δ₂(t) = (1 − e^t)₊), and sampled is H(P, Q) = E_P δ₂(ε − Y) ("remove") and
H(Q, P) = E_Q δ₂(ε + Y) ("add"), by one of these proposals.

"chain", remove. Take an integer order s >= 1. Draw a pattern k⁰ from the patterns' law and then
k¹, …, k^s one after another, k^l with density e^<m_k, V_l>/N_l over that law, where V_l is the sum
of the modes before it and N_l = E_k e^<m_k, V_l>. With V = V_{s+1} and X ~ N(V, I) the value

    f = (Π_{l=1..s} N_l) · e^(−sY) · δ₂(ε − Y)                                                 (1)

has mean H(P, Q). Proof. Extend P by s patterns drawn independently from the posterior of the
pattern given X, whose density over the law is e^(<m_k, X> − |m_k|²/2) e^(−Y). Over the law of the
patterns and Q, the extended density of (k⁰, …, k^s, X) is

    e^(Σ_l (<m_{k^l}, X> − |m_{k^l}|²/2)) · e^(−sY),                                            (2)

and the marginal of X is that of P, so H(P, Q) is the mean of δ₂(ε − Y) under (2). The proposal has
the density Π_{l>=1} (e^<m_{k^l}, V_l>/N_l) · e^(<V, X> − |V|²/2). Since |V|² = Σ_l |m_{k^l}|² +
2 Σ_l <m_{k^l}, V_l>, (2) over it is e^(−sY) Π_l N_l.                                          ∎

Ceiling. By Hölder's inequality over the l patterns in V_l,

    N_l <= Π_{l'<l} (E_k e^(l <m_k, m_{k^l'}>))^(1/l) <= max_k' E_k e^(l <m_k, m_k'>) =: R_l,   (3)
    e^(−sy) δ₂(ε − y) <= e^(−sε) sup_t e^(st) δ₂(t)         (with t = ε − y),                   (4)

so 0 <= f <= B = e^(−sε) sup_t e^(st) δ₂(t) Π_{l<=s} R_l. A scheme bounds Π R_l
(:class:`.likelihood.Ceilings`), and may know another way to draw with a lower ceiling of Π N_l, as
"clusters" (:mod:`.clusters`, with its proof).

"shift", remove. For any real s >= 0, k from the law and X ~ N((1+s) m_k, I). The proposal's density
over Q is R = E_k e^((1+s) <m_k, X> − (1+s)² |m_k|²/2), and by the mean of powers

    R >= e^(−s(1+s) g/2) E_k (e^(<m_k, X> − |m_k|²/2))^(1+s) >= e^(−s(1+s) g/2) e^((1+s) Y),    (5)

g = max_k |m_k|², so f = (e^Y/R) δ₂(ε − Y) <= e^(s(1+s) g/2 − sε) sup_t e^(st) δ₂(t). It serves
where little is amplified and a whole order is too coarse; s = 0 is plain sampling from P.

Where patterns can be drawn with the further factor e^(s|m_k|²/2), whose mean over the law is N, R =
E_k e^((1+s) <m_k, X> − (1+s+s²) |m_k|²/2)/N, and by Hölder's inequality with 1 + s and (1+s)/s

    e^Y = E_k e^(<m_k, X> − (1+s+s²)/(1+s) |m_k|²/2) · e^(s²/(1+s) |m_k|²/2)
        <= (N R)^(1/(1+s)) N^(s/(1+s)),      f <= N^(1+s) e^(−sε) sup_t e^(st) δ₂(t):           (5')

of a long pattern of probability p, which rules δ at large ε, N^(1+s) has p^(1+s).

"mean", add. By Jensen Y >= <m̄, X> − ḡ/2 with the mean mode m̄ = E_k m_k and ḡ = E_k |m_k|²; so with
X ~ N(−t m̄, I), t >= 0, and ρ = |m̄|² the value f = e^(t <m̄, X> + t²ρ/2) δ₂(ε + Y) has mean H(Q, P)
and

    f <= e^(t (Y + ḡ/2) + t²ρ/2) δ₂(ε + Y) <= e^(−t (ε − ḡ/2) + t²ρ/2) sup_u e^(tu) δ₂(u).       (6)

Y is mostly not so low, and samples fall where f counts at a larger t than that of the least
ceiling: at that of the least (6) with −2 E_Q Y for ḡ. What they exceed a lower ceiling by is
bounded by the convexity of Y (:mod:`.convex`, with its proof).

**Points.** Of a shifted proposal one sample is the mean of f over J points of X: along the vector
that it is shifted by, the standard normal is a systematic sample Φ⁻¹((j + U)/J), with one U; across
it there is one draw, which every second point has the negative of. That draw is independent of U
and symmetric, so one of the J points at random has the normal law: the mean is unbiased, and in
[0, B] as each value is; samples are iid. Y moves mostly along that direction, so most of the
variance goes: it falls by a factor 3 to 5 where modes hardly overlap, and by 200 for the square
root at 16 × 128, ε = 2, δ = 1e-4; the signs make it less again by a factor 1.1 to 5, the most where
patterns have many participations. Where a shared component is exact, little of that is left to
gain: two points are worth most in the remove direction, and one in the other.

The upper confidence bound is that of :mod:`.betting` on f/B in [0, 1].
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import wide
from mfopt._runtime._types import PyTree
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo import chunked, convex
from mfopt.accounting.monte_carlo.betting import ROUNDING
from mfopt.accounting.monte_carlo.evidence import Point, Sums, Tilt, sums
from mfopt.accounting.monte_carlo.hockey import GaussianPayoff
from mfopt.accounting.monte_carlo.likelihood import Ceilings, Drawn, Likelihood

POINTS = 8
_SMOOTH_POINTS = 2
_RISING = 3  # orders of higher ceilings after which none is lower
_WIDTH = 1e-3  # of the bracket of log order: a ceiling is flat about its least
_ORDERS = math.log(1e-3), math.log(1e4)  # of log t that are tried
_FAR = 20.0  # log: what is this far above the usual ceiling does not occur in an estimate
_CEILING = operator.attrgetter("log_ceiling")  # of a tilt
_SHIFT_WORTH = 3.0  # log: a proposal is tried where its ceiling is at most so far above another's


# --- proposals -----------------------------------------------------------------------------------


@wide
def tilt(kind: str, order: float, ceilings: Ceilings, point: Point) -> Tilt:
    """The proposal of this kind and order, with its ceiling at a point.

    Args:
      kind: "shift", "mean" or a chain that the ceilings know.
      order: s, whole for a chain, or t.
      ceilings, point: at the point's σ, and σ, ε and payoff.
    """
    detail: PyTree = None
    if kind in ceilings.chains:
        order = int(order)
        log_largest, detail = ceilings.chain(kind, order)
    elif kind == "shift" and ceilings.lengths is not None:
        log_mean, plan = ceilings.lengths(order)
        log_largest, detail = (1 + order) * log_mean, (plan, log_mean)
    elif kind == "shift":
        log_largest = order * (1 + order) * ceilings.largest_square / 2
    else:
        detail = convex.WHOLE
        log_largest = order * ceilings.mean_square / 2 + order**2 * ceilings.square_of_mean / 2
    log_peak = point.payoff.log_peak(order) - order * point.epsilon
    return Tilt(kind, order, log_largest + log_peak, detail)


def remove_tilts(ceilings: Ceilings, point: Point, chain: Tilt | None = None) -> list[Tilt]:
    """The proposal of least ceiling of each kind that may be best; the least of all first.

    ``chain`` is the chain of least ceiling, where it is known.
    """
    for kind, known in ({} if chain else ceilings.chains).items():
        lowest = least_chain(kind, known.most, ceilings, point)
        chain = lowest if chain is None or lowest.log_ceiling < chain.log_ceiling else chain
        if lowest.order < known.most:
            break
    assert chain is not None

    # without log_peak the least is at (1+2s)g/2 = ε
    ends = -12.0, math.log(max(point.epsilon / ceilings.largest_square, 1e-3)) + 5
    # by Jensen's inequality no ceiling is less than with patterns of the mean square
    alike = dataclasses.replace(ceilings, largest_square=ceilings.mean_square, lengths=None)
    if _lowest("shift", alike, point, *ends).log_ceiling > chain.log_ceiling + _SHIFT_WORTH:
        return [chain]
    tilts = sorted((chain, _lowest("shift", ceilings, point, *ends)), key=_CEILING)
    return [
        candidate
        for candidate in tilts
        if candidate.log_ceiling <= tilts[0].log_ceiling + _SHIFT_WORTH
    ]


def least_chain(kind: str, largest_order: int, ceilings: Ceilings, point: Point) -> Tilt:
    """The chain of this kind of least ceiling.

    Args:
      kind: of a chain of ``ceilings``.
      largest_order: up to which orders are tried.
      ceilings: of the likelihood at one σ.
      point: that the proposal is for.
    """
    best = tilt(kind, 1, ceilings, point)
    for order in range(2, largest_order + 1):
        current = tilt(kind, order, ceilings, point)
        best = current if current.log_ceiling < best.log_ceiling else best
        if order >= best.order + _RISING:
            break  # the ceiling is convex enough
    return best


def mean_tilt(ceilings: Ceilings, point: Point) -> Tilt:
    """The add direction's proposal of (about) the least ceiling.

    Args:
      ceilings, point: at the point's σ, and σ, ε and payoff.
    """

    return _lowest("mean", ceilings, point, *_ORDERS)


def _lowest(kind: str, ceilings: Ceilings, point: Point, low: float, high: float) -> Tilt:
    """The proposal of least ceiling of a kind, by log of its order between these ends."""

    def log_ceiling(log_order: float) -> float:
        return tilt(kind, math.exp(log_order), ceilings, point).log_ceiling

    at = solve.lowest(log_ceiling, low, high, width=_WIDTH)
    return tilt(kind, math.exp(at), ceilings, point)


def central_tilt(ceilings: Ceilings, point: Point, loss: float) -> Tilt:
    """The add direction's proposal whose samples fall where values count.

    Args:
      ceilings, point: as of :func:`mean_tilt`.
      loss: E_Q Y, about.
    """
    usual = dataclasses.replace(ceilings, mean_square=-2 * loss)
    central = mean_tilt(usual, point)
    proven = tilt("mean", central.order, ceilings, point)
    return proven.lowered(max(proven.log_ceiling - central.log_ceiling - _FAR, 0.0))


# --- kernels -------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A :class:`~.evidence.Point` and a :class:`~.evidence.Tilt` inside a kernel."""

    epsilon: Scalar
    order: Any
    log_ceiling: Scalar
    payoff: Any

    @property
    def points(self) -> int:
        """Systematic points of a sample."""
        return _SMOOTH_POINTS if isinstance(self.payoff, GaussianPayoff) else POINTS


@wide
def total(
    likelihood: Likelihood, tilt: Tilt, point: Point, samples: int, key: jax.Array, parts: int = 1
) -> tuple[Sums, int]:
    """:class:`Sums` over at least so many samples, and how many they were.

    Args:
      likelihood: at the point's σ.
      tilt: the proposal, with its ceiling at this point.
      point: σ, ε and payoff.
      samples: iid samples; a part chunk is made whole.
      key: randomness.
      parts: that a usual chunk is made into.
    """
    # of floats alone: a NumPy number would be another program
    asked = float(point.epsilon), float(tilt.order), float(tilt.log_ceiling)
    question = Asked(*asked, point.payoff)
    kernel = KERNELS.get(tilt.kind, _chain)
    work = parts * likelihood.work
    return chunked.total(kernel, key, samples, work, likelihood, question, tilt.detail)


def _drawn(
    key: jax.Array, size: int, likelihood: Likelihood, order: jax.Array, plan: PyTree
) -> tuple[jax.Array, jax.Array, Drawn]:
    """A key for points, <m, z> of white noise z, and patterns."""
    *draw_keys, noise_key, point_key = jax.random.split(key, 4)
    noise = likelihood.noise(jax.random.normal(noise_key, (size, likelihood.dimension)))
    return point_key, noise, likelihood.draw(jnp.stack(draw_keys), noise, order, plan)


def _chain(
    key: jax.Array, size: int, likelihood: Likelihood, question: Asked, detail: PyTree
) -> Sums:
    point_key, noise, drawn = _drawn(key, size, likelihood, question.order, detail)

    def evaluate(exponents: jax.Array) -> tuple[jax.Array, PyTree]:
        loss = likelihood.log_ratio(exponents)
        log_weight = drawn.log_normalizers - question.order * loss
        paid = question.payoff.log_value(question.epsilon - loss)
        return log_weight + paid - question.log_ceiling, ()

    return sums(on_points(point_key, evaluate, noise, 1.0, drawn, question.points)[0])


def _shift(
    key: jax.Array, size: int, likelihood: Likelihood, question: Asked, lengths: PyTree
) -> Sums:
    plan, log_mean = lengths or (None, 0.0)
    point_key, noise, drawn = _drawn(key, size, likelihood, jnp.zeros(()), plan)
    # factors beyond float64 would draw other patterns: there is no bound then
    noise += 0 * drawn.log_normalizers[:, None]
    far = 1 + question.order
    added = 0.0 if plan is None else plan[0] / far  # to exponents: what a pattern's factor is

    def evaluate(exponents: jax.Array) -> tuple[jax.Array, PyTree]:
        loss = likelihood.log_ratio(exponents)
        proposal = likelihood.log_ratio(exponents + added, far) - log_mean
        paid = question.payoff.log_value(question.epsilon - loss)
        return loss - proposal + paid - question.log_ceiling, ()

    return sums(on_points(point_key, evaluate, noise, far, drawn, question.points)[0])


def _mean(
    key: jax.Array, size: int, likelihood: Likelihood, question: Asked, cut: convex.Cut
) -> Sums:
    noise_key, point_key = jax.random.split(key)
    noise = likelihood.noise(jax.random.normal(noise_key, (size, likelihood.dimension)))
    products, square = likelihood.mean()
    drawn = Drawn(
        jnp.broadcast_to(products, noise.shape),
        likelihood.average(noise),
        jnp.full(size, square),
        jnp.zeros(size),
    )
    order, levels = question.order, -convex.STEP * jnp.arange(convex.LEVELS)

    def evaluate(exponents: jax.Array) -> tuple[jax.Array, PyTree]:
        loss = likelihood.log_ratio(exponents)
        log_weight = order * likelihood.average(exponents) + order**2 * square / 2
        paid = question.payoff.log_value(question.epsilon + loss)
        log_scaled = log_weight + paid - question.log_ceiling
        beside = jnp.sum(log_scaled[:, None] >= levels, axis=0, dtype=float), jnp.sum(loss)
        # what exceeds a proven ceiling leaves no proof; NaN stays
        above = (log_scaled > 0) & (log_scaled <= cut.below + ROUNDING)
        return jnp.where(above, 0.0, log_scaled), beside

    points = 1 if isinstance(question.payoff, GaussianPayoff) else POINTS
    value, (shares, loss) = on_points(point_key, evaluate, noise, -order, drawn, points)
    return sums(value)._replace(shares=shares / points, loss=loss / points)


def on_points(
    key: jax.Array,
    evaluate: Callable[[jax.Array], tuple[jax.Array, PyTree]],
    noise: jax.Array,
    far: Scalar,
    drawn: Drawn,
    points: int,
) -> tuple[jax.Array, PyTree]:
    """f/B at systematic points along V of each sample, on both sides of it in turn.

    Args:
      key: of the uniforms.
      evaluate: of exponents, log f/B and what is summed beside it: (size, entries) -> (size,).
      noise: <m, z> of the samples, (size, entries).
      far: times V, what X is shifted by.
      drawn: what V is, with its products and square.
      points: how many.

    Returns:
      Averages over the points, (size,), and the sums beside.
    """
    # a pattern may be empty, and then there is no direction: all points are z or −z
    length = jnp.sqrt(jnp.where(drawn.square > 0, drawn.square, 1.0))
    direction = drawn.products / length[:, None]
    across = noise - (drawn.along / length)[:, None] * direction
    uniform = jax.random.uniform(key, drawn.along.shape)

    def add(j: jax.Array, total: PyTree) -> PyTree:
        share = jnp.clip((j + uniform) / points, 2.0**-53, 1 - 2.0**-53)
        along = far * length + jax.scipy.special.ndtri(share)
        log_scaled, beside = evaluate((-1.0) ** j * across + along[:, None] * direction)
        return jax.tree.map(jnp.add, total, (jnp.exp(log_scaled), beside))

    shapes = jax.eval_shape(evaluate, noise)
    nothing = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes)
    total, beside = jax.lax.fori_loop(0, points, add, nothing)
    return total / points, beside


KERNELS: dict[str, Callable[..., Sums]] = {"shift": _shift, "mean": _mean}


def pick(exponents: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A column for each row, drawn ∝ e^``exponents`` (size, bins).

    Returns (columns, tops, masses), each (size,): Σ e^exponents of a row is e^top · mass.

    First a block of about √bins columns, then a column in it: running sums over all columns are
    what would cost most. Its width is a power of two: most numbers of bins are whole blocks then.
    Exponentials are summed as they are made, and only those of the block are recomputed: kept, they
    would take the place of the exponents, and XLA makes those one by one, three times slower.
    """
    size, bins = exponents.shape
    top = jnp.max(exponents, axis=1)
    uniform = jax.random.uniform(key, (size,))
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
    chosen = jnp.minimum(block * width + jnp.minimum(column, width - 1), bins - 1)
    return chosen, top, mass
