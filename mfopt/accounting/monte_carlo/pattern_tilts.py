"""The certificate where bins are thrown more than once: values with a proven ceiling.

Patterns k = (k_1, …, k_K) of K independent throws, modes M_g, m_k = Σ_g M_g[:, k_g], P = E_k
N(m_k, σ²I), Q = N(0, σ²I), Y = log P/Q as in :mod:`.patterns`; <·,·> is in noise units (divided by
σ²). δ₂ is a payoff (of the mechanism alone the hinge, δ₂(t) = (1 - e^t)₊), and what is sampled is
H(P, Q) = E_P δ₂(ε - Y) and H(Q, P) = E_Q δ₂(ε + Y). It generalizes :mod:`.tilted`, which is K = 1.

"chain", remove. Take an integer order s >= 1. Draw a pattern k⁰ uniformly and then k¹, …, k^s one
after another: given the earlier ones, whose modes sum to V_l = Σ_{l'<l} m_{k^l'}, the bins of the
throws are independent, k^l_g ∝ e^{h_g[k]} with h_g[k] = <M_g[:, k], V_l>. With

    N_l = Π_g mean_k e^{h_g[k]} = E_k e^{<m_k, V_l>}                                           (1)

(the second equality since throws are independent and <m_k, V> = Σ_g h_g[k_g]) and
X ~ N(Σ_{l<=s} m_{k^l}, σ²I), the value

    f = (Π_{l=1..s} N_l) · e^{-sY} · δ₂(ε - Y)                                                 (2)

has mean H(P, Q). Proof. Extend P by s patterns drawn independently from the posterior of the
pattern given X, which has density b^(-K) e^{<m_k, X> - |m_k|²/2} e^{-Y}. The extended density of
(k⁰, …, k^s, X) is

    Q(X) · b^{-K(1+s)} · e^{Σ_l (<m_{k^l}, X> - |m_{k^l}|²/2)} · e^{-sY},                        (3)

and the marginal of X is that of P, so H(P, Q) is the mean of δ₂(ε - Y) under (3). The proposal has
density b^(-K) Π_{l>=1} (b^(-K) e^{<m_{k^l}, V_l>}/N_l) · Q(X) e^{<V, X> - |V|²/2}, V = V_{s+1}.
Since |V|² = Σ_l |m_{k^l}|² + 2 Σ_l <m_{k^l}, V_l>, (3) over it is e^{-sY} Π_l N_l.            ∎

Ceiling. By Hölder's inequality over the l patterns in V_l, then term by term,

    N_l = E_k Π_{l'<l} e^{<m_k, m_{k^l'}>} <= Π_{l'<l} (E_k e^{l <m_k, m_{k^l'}>})^{1/l}
        <= max_k' E_k e^{l <m_k, m_k'>} =: R_l,                                                 (4)
    e^{-sy} δ₂(ε - y) <= e^{-sε} sup_t e^{st} δ₂(t)         (with t = ε - y),                   (5)

so 0 <= f <= B = e^{-sε} sup_t e^{st} δ₂(t) Π_{l<=s} R_l. R_l is bounded by one pass over the
throws (:meth:`.pattern_ceilings.Ceilings.log_normalizer`).

"shift", remove. For any real s >= 0, k uniform, X ~ N((1+s) m_k, σ²I). The proposal's density over
Q is R = E_k e^{(1+s) <m_k, X> - (1+s)² |m_k|²/2}, a chain as well, and by the mean of powers

    R >= e^{-s(1+s) g/2} E_k (e^{<m_k, X> - |m_k|²/2})^{1+s} >= e^{-s(1+s) g/2} e^{(1+s) Y},    (6)

g = max_k |m_k|², so f = (e^Y/R) δ₂(ε - Y) <= e^{s(1+s) g/2 - sε} sup_t e^{st} δ₂(t). s = 0 is plain
sampling from P.

"mean", add. By Jensen Y >= <m̄, X> - ḡ/2 with the mean mode m̄ = E_k m_k and ḡ = E_k |m_k|²; so with
X ~ N(-t m̄, σ²I), t >= 0, and ρ = |m̄|² the value f = e^{t <m̄, X> + t²ρ/2} δ₂(ε + Y) has mean H(Q, P)
and

    f <= e^{t (Y + ḡ/2) + t²ρ/2} δ₂(ε + Y) <= e^{-t (ε - ḡ/2) + t²ρ/2} sup_u e^{tu} δ₂(u).       (7)

One sample is the mean of f over several points along the direction of the shift
(:mod:`.proposals`); the mean and the ceiling stay. Where patterns have a part in common, all this
is of what is left of them (:mod:`.pattern_common`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, proposals
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER, Hinge, Point, Sums, Tilt
from mfopt.accounting.monte_carlo.pattern_ceilings import Ceilings
from mfopt.accounting.monte_carlo.pattern_common import Rest
from mfopt.accounting.monte_carlo.patterns import Overlaps, Patterns, entries, toward_mean
from mfopt.accounting.monte_carlo.proposals import Asked, Drawn

_RISES = 3  # orders in a row whose ceiling is above the least: it rises from there on


def tilt(kind: str, order: float, ceilings: Ceilings, point: Point) -> Tilt:
    """The proposal of this kind and order, with its ceiling at a point.

    Args:
      kind: "chain", "shift" or "mean".
      order: s, whole for a chain, or t.
      ceilings: of the patterns at the point's σ.
      point: σ, ε and payoff.
    """
    peak = point.payoff.log_peak(order) - order * point.epsilon
    if kind == "chain":
        return Tilt(kind, int(order), ceilings.log_normalizer(int(order)) + peak)
    if kind == "shift":
        return Tilt(kind, order, order * (1 + order) * ceilings.largest_square / 2 + peak)
    half = ceilings.mean_square / 2
    square = ceilings.square_of_mean
    return Tilt("mean", order, order * half + order**2 * square / 2 + peak)


def remove_tilts(ceilings: Ceilings, point: Point) -> list[Tilt]:
    """The proposal of least ceiling of each kind that may be best; the least of all first."""

    def at(kind: str, order: float) -> Tilt:
        return tilt(kind, order, ceilings, point)

    chain, rises = at("chain", 1), 0
    for order in range(2, MAX_ORDER + 1):
        here = at("chain", order)
        rises = 0 if here.log_ceiling < chain.log_ceiling else rises + 1
        chain = here if rises == 0 else chain
        if rises == _RISES:
            break
    return proposals.worth_a_pilot(
        chain, lambda order: at("shift", order), ceilings.largest_square, point.epsilon
    )


def add_order(mean_square: Any, square_of_mean: Any, epsilon: Any) -> Any:
    """t near the least ceiling of "mean", as :func:`.dominating_pair.add_tilt` has it."""
    crossing = epsilon - mean_square / 2
    middle = crossing - square_of_mean / 2
    inside = jnp.maximum(middle**2 + 4 * square_of_mean * (crossing / 2 + 1), 0)
    return jnp.maximum((middle + jnp.sqrt(inside)) / (2 * square_of_mean), 0)


@float64
def mean_tilt(ceilings: Ceilings, point: Point) -> Tilt:
    """The add direction's proposal of (about) the least ceiling."""
    start = float(add_order(ceilings.mean_square, ceilings.square_of_mean, point.epsilon))
    orders = [0.0, start]
    if not isinstance(point.payoff, Hinge):  # whose start is near the best already
        orders += [start * factor for factor in np.geomspace(0.25, 4, 17)]
        orders += list(np.geomspace(1e-2, 1e3, 31))
    found = [tilt("mean", order, ceilings, point) for order in orders]
    return min(found, key=lambda one: one.log_ceiling)


# --- kernels -------------------------------------------------------------------------------------


@float64
def total(rest: Rest, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> tuple[Sums, int]:
    """:class:`Sums` over at least so many samples, and how many they were.

    Args:
      rest: what is sampled of C, for σ = 1.
      tilt: the proposal, with its ceiling at this point.
      point: σ, ε and payoff.
      samples: iid samples; a part chunk is made whole.
      key: randomness.
    """
    return chunked.total(
        _KERNELS[tilt.kind],
        key,
        samples,
        rest.patterns.iterations,
        rest.scaled(point.noise_multiplier),
        float(point.epsilon),
        float(tilt.order),
        tilt.log_ceiling,
        point.payoff,
    )


def draw(patterns: Patterns, key: jax.Array, noise: jax.Array, order: jax.Array) -> Drawn:
    """1 + ``order`` patterns for each row of ``noise``; one compilation for any order.

    Args:
      patterns: in noise units.
      key: randomness.
      noise: Mᵀz, shape (size, K·b).
      order: s, whole.
    """
    overlaps, size = Overlaps(patterns), noise.shape[0]
    shape = size, patterns.throws
    first_key, chain_key = jax.random.split(key)

    def added(pattern: jax.Array, before: Drawn, log_normalizers: jax.Array) -> Drawn:
        own = overlaps.of(pattern)
        cross = 2 * entries(before.products, pattern) + entries(own, pattern)
        return Drawn(
            before.products + own,
            before.along + entries(noise, pattern),
            before.square + cross,
            log_normalizers,
        )

    def extend(l: jax.Array, before: Drawn) -> Drawn:
        exponents = before.products.reshape(-1, patterns.bins)
        chosen, top, mass = proposals.pick(exponents, jax.random.fold_in(chain_key, l))
        logs = (top + jnp.log(mass / patterns.bins)).reshape(shape)
        return added(chosen.reshape(shape), before, before.log_normalizers + jnp.sum(logs, axis=1))

    nothing = Drawn(jnp.zeros_like(noise), *(jnp.zeros(size),) * 3)
    first = jax.random.randint(first_key, shape, 0, patterns.bins)
    start = added(first, nothing, nothing.log_normalizers)
    result: Drawn = jax.lax.fori_loop(1, order.astype(int) + 1, extend, start)
    return result


def _chain(
    key: jax.Array,
    size: int,
    rest: Rest,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
) -> Sums:
    pattern_key, noise_key, point_key = jax.random.split(key, 3)
    noise = rest.noise(jax.random.normal(noise_key, (size, rest.patterns.iterations)))
    drawn = rest.of(draw(rest.patterns, pattern_key, noise, order), order)
    asked = Asked(epsilon, order, log_ceiling, payoff)
    return proposals.chain(point_key, rest.ratio, drawn, noise, asked)


def _shift(
    key: jax.Array,
    size: int,
    rest: Rest,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
) -> Sums:
    pattern_key, noise_key, point_key = jax.random.split(key, 3)
    noise = rest.noise(jax.random.normal(noise_key, (size, rest.patterns.iterations)))
    drawn = rest.of(draw(rest.patterns, pattern_key, noise, jnp.zeros(())), 0)
    asked = Asked(epsilon, order, log_ceiling, payoff)
    return proposals.shift(point_key, rest.ratio, drawn, noise, asked)


def _mean(
    key: jax.Array,
    size: int,
    rest: Rest,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
    payoff: Any,
) -> Sums:
    noise_key, point_key = jax.random.split(key)
    patterns = rest.patterns
    noise = rest.noise(jax.random.normal(noise_key, (size, patterns.iterations)))
    products, square = toward_mean(patterns)
    along = jnp.sum(noise, axis=1) / patterns.bins
    every = Drawn(jnp.broadcast_to(products, noise.shape), along, jnp.full(size, square))
    asked = Asked(epsilon, order, log_ceiling, payoff)

    def toward(exponents: jax.Array) -> jax.Array:
        return order * jnp.sum(exponents, axis=1) / patterns.bins

    return proposals.mean(point_key, rest.ratio, rest.of(every, 0), noise, asked, toward)


_KERNELS: dict[str, Callable[..., Sums]] = {"chain": _chain, "shift": _shift, "mean": _mean}
