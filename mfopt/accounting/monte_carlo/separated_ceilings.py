"""Proven ceilings of the certificate's values under sampling with separation.

**Tilted counts.** Patterns of random size have no useful ceiling where all are drawn alike: one
with as many participations as fit has an N_l far above all others, and is never seen. So the
pattern k^l is drawn with the further factor ψ_l(k) = exp Σ_{t in k} a_l[t], ψ_s = 1:

    k⁰ ∝ ψ_0(k),   k^l ∝ ψ_l(k) e^<m_k, V_l>,   N_l = E_k ψ_l(k) e^<m_k, V_l>  (V_0 = 0),

and the weight e^(−sY) Π_l N_l of :mod:`.importance` becomes e^(−sY) N_0 ··· N_s / Π_{l<s} ψ_l(k^l):
the densities of the k^l over their law are what has changed, and nothing else.

**Ceiling.** Choose any c_l[t], l = 1..s, and a_l = Σ_{l'>l} c_l'/l'. By Hölder over the l patterns
in V_l, N_l <= Π_{l'<l} (E_k ψ_l(k) e^(l <m_k, m_k^l'>))^(1/l), and 1/ψ_l'(k) =
Π_{l>l'} exp(−Σ_{t in k} c_l[t]/l). Collecting the factors of one l,

    N_0 ··· N_s / Π_{l<s} ψ_l(k^l) <= N_0 Π_{l=1..s} J_l,                                       (1)
    J_l = max_k' exp(−Σ_{t in k'} c_l[t]) · E_k ψ_l(k) e^(l <m_k, m_k'>).                       (2)

With c_l[t] near what a participation t of k' adds to the logarithm of that mean, all k' are about
as good as any: the bound is tight whatever their size.

**The mean, for one k'.** Under ψ_l the pattern is a chain too: a unit that is available at t takes
part with p_t = p e^(a_l[t]) h_{t+S}/h_t, where h_t = (1−p) h_{t+1} + p e^(a_l[t]) h_{t+S}, h_t = 1
for t >= n, and the mean in (2) is E ψ_l(k) times the mean of Π_{t in k} e^(l D_t) over that chain,
D_t the overlap of column t with those of k'. Cut the steps into blocks of S. A block holds at most
one participation; let X_q be its place in block q, or "none", and π_q its law. With V_q(X_q) =
e^(l D), V_q(none) = 1, and T_q the transition from X_{q−1} to X_q,

    the mean is π_{−1} y_0,   y_q = T_q (V_q · y_{q+1}),   y = 1 after the last block.

Write y_{q+1} = m + z with m its mean under π_q and |z| <= o, in the norm of L²(π_q); V_q = 1 + h;
U = T_q − 1π_q. Then π_{q−1} y_q = π_q(V y_{q+1}), and by Cauchy's and the triangle inequality

    m_q <= m (1 + π_q h) + o sd_π(h),     o_q <= m |U h| + o (|U| + |U h ·|),                    (3)

where |U h ·|² <= Σ_i h_i² Σ_j π_{q−1}(j) U_ji²/π_q(i), the Hilbert-Schmidt norm of f → U(h f). The
right sides grow in m and o. What is lost against the mean is of the second order in h, and little
where units forget soon when they took part: where S is not near the number of bins.

**The maximum.** V_q depends on the places of k' in blocks q − 1, q and q + 1 alone. So (3), times
e^(−c) of the participation of k' in block q, is a recursion over pairs of places, with the largest
m and the largest o over the places in the next block: an upper bound of J_l/E ψ_l, since every k'
is among those maximized over. All terms are >= 0.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import scipy

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.likelihood import Ceilings, PatternChain, require_range, summed
from mfopt.accounting.monte_carlo.pattern_frozen import squares
from mfopt.accounting.monte_carlo.separated import LONGEST, Separated

_KEPT = 4  # singular values of U that are used one by one
_SPARE = 1e-13  # added to squares of norms: what float64 may have lost of them
_SVD = 1 + 1e-9  # rounding of a singular value
_COST = 1.08  # c_l over its first order, which is a little less than the ceiling takes


class _Chain(NamedTuple):
    """X_q under ψ, block by block: arrays with one row for each.

    Attributes:
      log_mean: log E ψ.
      law: π_q of the places, shape (blocks, S).
      norms: singular values of U, the first few and the next, shape (blocks, _KEPT + 1).
      along: their vectors, times √π_q, shape (blocks, _KEPT, S).
      each: Σ_j π_{q−1}(j) U_ji²/π_q(i), shape (blocks, S).
    """

    log_mean: float
    law: np.ndarray
    norms: np.ndarray
    along: np.ndarray
    each: np.ndarray


def _chain(tilt: np.ndarray, size: int, probability: float) -> _Chain:
    """Raises FloatingPointError where a participation is certain in float64."""
    n = len(tilt)
    logs, waiting, taking = np.zeros(n + size), math.log1p(-probability), math.log(probability)
    for t in range(n - 1, -1, -1):
        logs[t] = np.logaddexp(waiting + logs[t + 1], taking + tilt[t] + logs[t + size])
    chances = np.exp(taking + tilt + logs[size:] - logs[:-size]).reshape(-1, size)
    weights = logs[:size] + np.where(np.arange(size) == 0, 0.0, taking)
    total = scipy.special.logsumexp(weights)
    available = np.exp(weights - total)  # the law of the first step at which a unit is
    levels: list[tuple[np.ndarray, ...]] = []
    for chance in chances:
        waits = np.append(0.0, np.cumsum(np.log1p(-chance)))
        kernel = np.triu(np.exp(np.minimum(waits - waits[:-1, None], 0.0)) * np.append(chance, 1.0))
        law = available @ kernel
        scaled = np.sqrt(available)[:, None] * (kernel - law) / np.sqrt(law)
        if not np.all(np.isfinite(scaled)):
            raise FloatingPointError
        _, norms, rows = np.linalg.svd(scaled, full_matrices=False)
        norms, rows = np.append(norms, np.zeros(_KEPT + 1)), np.pad(rows, ((0, _KEPT), (0, 0)))
        along = rows[:_KEPT, :-1] * np.sqrt(law[:-1])
        squares = np.sum(scaled[:, :-1] ** 2, axis=0)
        levels.append((law[:-1], norms[: _KEPT + 1] * _SVD, along, squares))
        # available from that place of the next block, or from its first step after none
        available = np.append(law[0] + law[-1], law[1:-1])
    log_mean = total - math.log1p((size - 1) * probability)
    return _Chain(log_mean, *map(np.array, zip(*levels, strict=True)))


class _Parts(NamedTuple):
    """Of functions h for pairs of places of k': what (3) needs, in squares that add up.

    Attributes:
      first: π_q h.
      variance: of h.
      along: U h along the first singular vectors, one more axis in front.
      moved: |U h|².
      spread: |U h ·|².
    """

    first: np.ndarray
    variance: np.ndarray
    along: np.ndarray
    moved: np.ndarray
    spread: np.ndarray

    def by_column(self) -> _Parts:
        """The last axis first, for one recursion over all its places at once."""
        return _Parts(*(np.moveaxis(part, -1, 0) for part in self))


@float64
def ceilings(pattern: Separated) -> Ceilings:
    """The ceilings in noise units.

    Raises:
      FailureError: contributions of a unit are longer than the likelihood is known for.
    """
    of_squares = [float(square) for square in squares(pattern)[:3]]
    require_range("the contribution of a unit has a squared norm of", of_squares[0], LONGEST)

    @functools.cache
    def chain(order: int) -> tuple[float, np.ndarray]:
        gram = np.asarray(pattern.gram)
        tilts, total = np.zeros((MAX_ORDER + 1, pattern.dimension)), 0.0
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
                for l in range(order, 0, -1):
                    log_value, cost = log_largest(
                        gram, pattern.separation, pattern.probability, l, tilts[l]
                    )
                    total += log_value
                    tilts[l - 1] = tilts[l] + cost / l
                    if not math.isfinite(total):
                        raise FloatingPointError
                past_end = -pattern.dimension % pattern.separation
                start_chain = _chain(
                    np.pad(tilts[0], (0, past_end)), pattern.separation, pattern.probability
                )
        except FloatingPointError:
            return math.inf, np.zeros_like(tilts)
        return total + start_chain.log_mean, tilts

    return Ceilings({"chain": PatternChain(chain, MAX_ORDER)}, *of_squares)


@float64
def estimated(pattern: Separated) -> Ceilings:
    """The same with tilts and ceilings to first order, which prove nothing: for estimates."""
    gram = np.asarray(pattern.gram)

    @functools.cache
    def cost(l: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            raised = np.expm1(l * gram)
        return _COST * firsts(raised, np.ones(pattern.dimension)) / pattern.bins

    log_product = summed(lambda l: float(np.sum(cost(l)) / pattern.bins))

    def chain(order: int) -> tuple[float, np.ndarray]:
        tilts = np.zeros((MAX_ORDER + 1, pattern.dimension))
        for l in range(order, 0, -1):
            tilts[l - 1] = tilts[l] + cost(l) / l
        return log_product(order)[0], tilts

    return Ceilings({"chain": PatternChain(chain, MAX_ORDER)}, *map(float, squares(pattern)[:3]))


def firsts(raised: np.ndarray, law: np.ndarray) -> np.ndarray:
    """Σ_t π_t (e^(l <c_t, c_j>) − 1) for each step j."""
    total: np.ndarray = raised[0] * law
    for lag in range(1, min(len(raised), len(law))):
        total[:-lag] += raised[lag, :-lag] * law[lag:]
        total[lag:] += raised[lag, :-lag] * law[:-lag]
    return total


def log_largest(
    gram: np.ndarray,
    separation: int,
    probability: float,
    order: int,
    tilt: np.ndarray,
    cost: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """(log of an upper bound of J_l, c_l), see (2) of the module.

    Args:
      gram: overlaps in noise units, shape (bands, n), bands <= S: [d, j] = <c_j, c_{j+d}>.
      separation, probability, order: S, p and l.
      tilt, cost: a_l and c_l, shape (n,); by default a little more than what a participation adds
        to first order.
    """
    size, (bands, n) = separation, gram.shape
    past_end = -n % size  # units go on there, and no column is there
    raised = np.expm1(order * np.pad(gram, ((0, size + 1 - bands), (size, past_end))))
    chain = _chain(np.pad(tilt, (0, past_end)), size, probability)
    if cost is None:
        cost = _COST * firsts(raised[:, size:][:bands], chain.law.ravel())[:n]
    prices = np.exp(-np.pad(cost, (0, past_end))).reshape(-1, size)
    t, k = np.arange(size)[None, :], np.arange(size)[:, None]  # t of a block, k of k'
    # places of k' in the block before (0 for none, then p + 1) and in the next that are S from c
    precedes, follows = np.arange(size + 1) < k + 2, np.arange(size + 1) >= k
    # (m, o) by the places of k' in a block (0 for none, then p + 1) and the next (c, or S for none)
    largest = np.stack([np.ones((size + 1, size + 1)), np.zeros((size + 1, size + 1))])
    for q in range(len(prices) - 1, -1, -1):
        begin = size * (1 + q)
        past = raised[np.clip(size + t - k, 0, size), begin - size + k]  # (p, t)
        between = raised[np.abs(t - k), begin + np.minimum(t, k)]  # (c, t)
        ahead = raised[np.clip(size + k - t, 0, size), begin + t]  # (next, t)
        past, ahead = np.pad(past, ((1, 0), (0, 0))), np.pad(ahead, ((0, 1), (0, 0)))
        # k' is in the block at c: steps before c see the block before too, those after it the next
        left_parts = _parts(chain, q, past, np.where(t < k, between, 0.0)).by_column()  # (c, p)
        right = _parts(chain, q, ahead, np.where(t >= k, between, 0.0)).by_column()  # (c, next)
        grown = _grown(left_parts, right, chain.norms[q, 0], largest[:, 1:], precedes, follows)
        new = np.empty_like(largest)
        new[:, :, :size] = np.where(precedes, prices[q][:, None] * grown, 0.0).swapaxes(1, 2)
        # or not in it: a step may see both
        outer_parts = _parts(chain, q, ahead, past).by_column()  # (p, next)
        nothing = _Parts(*(np.zeros_like(part[..., :1]) for part in outer_parts))
        new[:, :, size] = _grown(nothing, outer_parts, chain.norms[q, 0], largest[:, :1])[:, :, 0]
        largest = new
    return chain.log_mean + math.log(np.max(largest[0, 0])), cost


def _grown(
    one: _Parts,
    other: _Parts,
    norm: float,
    later: np.ndarray,
    own: np.ndarray | bool = True,
    known: np.ndarray | bool = True,
) -> np.ndarray:
    """(m, o) of (3) for h_i + h_j, the largest over j, shape (2, c, places i).

    √x <= (x/r + r)/2 with any r > 0: products of matrices, where the roots of all pairs would take
    ten times as long.

    Args:
      one, other: of h_i and of h_j, shapes (c, i) and (c, j), ``along`` with its own axis second.
      norm: |U|.
      later: (m, o) of the next block for each j, shape (2, c, j) or (2, 1, j).
      own, known: which i and which j there are for each c.
    """
    mean, variation = later
    r, moved, spread = (
        _between(getattr(one, name), getattr(other, name), own, known)
        for name in ("variance", "moved", "spread")
    )
    with_mean = np.stack([1 + one.first, one.variance / (2 * r)], axis=2)
    own_mean = other.first * mean + (other.variance / r + r) / 2 * variation
    with_rest = np.stack([one.moved / (2 * moved), norm + one.spread / (2 * spread)], axis=2)
    with_rest = np.concatenate([with_rest, np.moveaxis(one.along, 1, 2)], axis=2)
    stacked = np.stack(np.broadcast_arrays(mean, variation, own_mean)[:2], axis=1)
    crossed = np.concatenate([stacked, other.along * (mean / moved)[:, None]], axis=1)
    own_variation = (other.moved / moved + moved) / 2 * mean + (
        other.spread / spread + spread
    ) / 2 * variation
    grown = with_mean @ stacked + own_mean[:, None], with_rest @ crossed + own_variation[:, None]
    is_known = np.broadcast_to(known, own_mean.shape)[:, None]
    return np.array([np.max(part, axis=2, where=is_known, initial=-np.inf) for part in grown])


def _between(
    one: np.ndarray, other: np.ndarray, own: np.ndarray | bool, known: np.ndarray | bool
) -> np.ndarray:
    """r for the roots of all x_i + x_j of each c: the larger ones are at most 1.25 times as large.

    Shape (c, 1). Arguments are as for :func:`_grown`.
    """

    def ends(part: np.ndarray, is_known: np.ndarray | bool) -> tuple[np.ndarray, np.ndarray]:
        highest_value = np.max(part, axis=1, keepdims=True, where=is_known, initial=-np.inf)
        return highest_value, np.min(part, axis=1, keepdims=True, where=is_known, initial=np.inf)

    highest, lowest = zip(ends(one, own), ends(other, known), strict=True)
    upper_end, lower_end = highest[0] + highest[1] + _SPARE, lowest[0] + lowest[1]
    result: np.ndarray = (upper_end * np.maximum(lower_end, upper_end / 16)) ** 0.25
    return result


def _parts(chain: _Chain, q: int, one: np.ndarray, other: np.ndarray) -> _Parts:
    """h = one + other + one·other for each pair of their rows, in block q."""
    shifted = 1 + other

    def mean(weight: np.ndarray) -> np.ndarray:
        return one @ (weight * shifted).T + other @ weight

    def square(weight: np.ndarray) -> np.ndarray:
        cross = 2 * one @ (weight * other * shifted).T
        return one**2 @ (weight * shifted**2).T + cross + other**2 @ weight

    norms, means, squares = chain.norms[q], mean(chain.law[q]), square(chain.law[q])
    vectors = zip(norms, chain.along[q], strict=False)
    along = np.stack([norm * mean(weight) for norm, weight in vectors])
    moved = np.sum(along**2, axis=0) + norms[-1] ** 2 * squares + _SPARE
    variance = np.maximum(squares - means**2, 0) + _SPARE
    return _Parts(means, variance, along, moved, square(chain.each[q]))
