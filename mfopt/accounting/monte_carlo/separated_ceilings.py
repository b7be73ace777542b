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

With c_l[t] what a participation t of k' adds to the logarithm of that mean, all k' are about as
good as any: the bound is tight whatever their size.

**The mean, for one k'.** Under ψ_l the pattern is a renewal process too: a unit that is available
at t takes part with p_t = p e^(a_l[t]) h_{t+S}/h_t, where h_t = (1−p) h_{t+1} + p e^(a_l[t])
h_{t+S}, h_t = 1 for t >= n, and the mean in (2) is E ψ_l(k) times the mean E of Π_{t in k} (1+v_t)
over it, 1 + v_t = e^(l D_t), D_t the overlap of column t with those of k'. Let π_t be the chance of
a participation at t, and π_u (1 + κ(t, u)) that of one at u after one at t: κ = −1 for u < t + S.

D_t has at most two terms, since C has at most S bands. With v^j_t = e^(l <c_t, c_s>) − 1 for the
j-th participation s of k' it is v_t = Σ_j (v^j_t + v^j_t v^{j+1}_t); let η^j_t be π_t times the
term of j. Multiplied out, E is a sum over sets of steps with a j for each. The j of later steps are
not less; two steps at most have the same j, and those are S apart. Let G_j be the sum over steps
whose j are not less, r'_t G_{j+1} what G_{j+1} is after a participation at t, and r_t G_{j+1} the
same with, perhaps, a second step of the same j. With H_j = Σ_t η^j_t r_t

    G_j = (1 + H_j) G_{j+1},   E = Π_j (1 + H_j),   r_t = r'_t + Σ_u (1 + κ(t, u)) η^j_u r'_u,
    r'_t = 1 + Σ_{i>j} Σ_u κ(t, u) η^i_u r_u / Π_{j<i'<=i} (1 + H_i').                          (3)

**The maximum.** Let κ_d be the largest κ(t, t + d), or 0. The chance of being available at u after
a participation is an average of those at u − 1 and at u − S, with the weights of the chance
without, so its quotient to that is too: κ_d is at most the largest of any S distances below d, and
all are at most κ_S. With η_d >= η^j_{s+d} for every s, and r >= r'_t for all t, the numerator of i
in (3) is at most K = r Σ_d κ_{x+d} η_d (1 + what a second step adds), x from t to the i-th
participation of k', and at most κ_S H_i. So what all terms from i on add is at most
(K + v)/(1 + K/κ_S), v that of the terms after: a recursion over x, where participations are S
apart. From r = 1 + κ_S it gives lower and lower r, and with the mean of K over t a bound of H_j:

    c_l[s] = log(1 + the bound of H_j)   and   J_l <= E ψ_l(k).

What is lost is what participations of k' at the worst distances add over others: of the second
order in v, and little where units forget soon when they took part: where S is not near the number
of bins.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.likelihood import Ceilings, PatternChain, require_range
from mfopt.accounting.monte_carlo.pattern_frozen import squares
from mfopt.accounting.monte_carlo.separated import LONGEST, Separated

_FLAT = 1e-3  # κ_d of S distances, from which on they all count as the largest of these
_PASSES = 16  # that make r smaller
_COST = 1.08  # c_l over its first order, which is a little less than the ceiling takes


class _Renewal(NamedTuple):
    """Participations of a unit under ψ.

    Attributes:
      log_mean: log E ψ.
      chances, waits: p_t and 1 − p_t, shape (n,).
      free: chances of being available, shape (n,).
    """

    log_mean: float
    chances: np.ndarray
    waits: np.ndarray
    free: np.ndarray


def _renewal(pattern: Separated, tilt: np.ndarray) -> _Renewal:
    n, size, probability = len(tilt), pattern.separation, pattern.probability
    logs, waiting, taking = np.zeros(n + size), math.log1p(-probability), math.log(probability)
    for t in range(n - 1, -1, -1):
        logs[t] = np.logaddexp(waiting + logs[t + 1], taking + tilt[t] + logs[t + size])
    chances = np.exp(taking + tilt + logs[size:] - logs[:-size])
    waits = np.exp(waiting + logs[1 : n + 1] - logs[:n])
    weights = logs[:size] + np.where(np.arange(size) == 0, 0.0, taking)
    total = scipy.special.logsumexp(weights)
    # first the law of the first step at which a unit is available
    free = np.append(np.exp(weights - total), np.zeros(n))[:n]
    for t in range(1, n):
        free[t] += free[t - 1] * waits[t - 1]
        free[t] += free[t - size] * chances[t - size] if t >= size else 0.0
    return _Renewal(total - math.log1p((size - 1) * probability), chances, waits, free)


def _excess(unit: _Renewal, size: int) -> np.ndarray:
    """κ_d, d = 0, …, n − 1: shape (n,)."""
    n = len(unit.free)
    largest = np.zeros(n)
    # by the step of a participation, the chance of being available so many steps later
    past = collections.deque([np.zeros(n)] * size, maxlen=size)
    for lag in range(size, n):
        before = past[-1][: n - lag] * unit.waits[lag - 1 : -1]
        rested = past[0][: n - lag] * unit.chances[lag - size : n - size]
        past.append(before + rested + (lag == size))
        largest[lag] = max(np.max(past[-1] / unit.free[lag:]) - 1, 0.0)
        recent = np.max(largest[lag + 1 - size : lag + 1])
        if recent < _FLAT:
            largest[lag + 1 :] = recent
            break
    return largest


def _added(overlaps: np.ndarray, size: int, limit: float) -> float:
    """v of the module for K of each x: over all sequences of x that are S apart."""
    following = np.zeros(size)
    for block in np.pad(overlaps, (0, -len(overlaps) % size)).reshape(-1, size)[::-1]:
        reached = (block + following) / (1 + block / limit)
        following = np.maximum.accumulate(np.append(reached, following[0])[::-1])[:0:-1]
    return float(following[0])


def _of(
    pattern: Separated, priced: Callable[[int, np.ndarray], tuple[float, np.ndarray]]
) -> Ceilings:
    """Ceilings by (log E ψ_l, c_l) of each l and a_l. Columns of a unit do not overlap."""

    @functools.cache
    def chain(order: int) -> tuple[float, np.ndarray]:
        tilts, total = np.zeros((MAX_ORDER + 1, pattern.dimension)), 0.0
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            for l in range(order, 0, -1):
                log_mean, cost = priced(l, tilts[l])
                total += log_mean
                tilts[l - 1] = tilts[l] + cost / l
            total += _renewal(pattern, tilts[0]).log_mean
        # beyond float64 nothing is known
        return (total, tilts) if math.isfinite(total) else (math.inf, np.zeros_like(tilts))

    def lengths(order: float) -> tuple[float, np.ndarray]:
        tilt = order * np.asarray(pattern.gram)[0] / 2
        return _renewal(pattern, tilt).log_mean, tilt[None]

    of_squares = map(float, squares(pattern)[:3])
    return Ceilings({"chain": PatternChain(chain, MAX_ORDER)}, *of_squares, lengths=lengths)


@float64
def ceilings(pattern: Separated) -> Ceilings:
    """The ceilings in noise units.

    Raises:
      FailureError: contributions of a unit are longer than the likelihood is known for.
    """
    known = _of(pattern, functools.partial(prices, pattern))
    require_range("the contribution of a unit has a squared norm of", known.largest_square, LONGEST)
    return known


@float64
def estimated(pattern: Separated) -> Ceilings:
    """The same with tilts and ceilings to first order, which prove nothing: for estimates."""
    gram, law = np.asarray(pattern.gram), np.full(pattern.dimension, 1 / pattern.bins)

    @functools.cache
    def cost(l: int) -> np.ndarray:
        return _COST * _firsts(np.expm1(l * gram), law)

    return _of(pattern, lambda l, tilt: (float(tilt @ law), cost(l)))


def _firsts(raised: np.ndarray, law: np.ndarray) -> np.ndarray:
    """Σ_t π_t (e^(l <c_t, c_j>) − 1) for each step j."""
    total: np.ndarray = raised[0] * law
    for lag in range(1, min(len(raised), len(law))):
        total[:-lag] += raised[lag, :-lag] * law[lag:]
        total[lag:] += raised[lag, :-lag] * law[:-lag]
    return total


def prices(pattern: Separated, order: int, tilt: np.ndarray) -> tuple[float, np.ndarray]:
    """(log E ψ_l, c_l) with J_l <= E ψ_l, see (2) of the module.

    Args:
      pattern: in noise units, with at most S bands.
      order: l.
      tilt: a_l, shape (n,).
    """
    size, gram = pattern.separation, np.asarray(pattern.gram)
    unit, (bands, n), reach = _renewal(pattern, tilt), gram.shape, len(gram) - 1
    law, excess = unit.chances * unit.free, np.pad(_excess(unit, size), (0, 2 * bands))
    limit = float(np.max(excess)) or 1.0
    raised = np.expm1(order * gram)
    # no less than v of the next participation, which is S or more after this one
    following = np.maximum.accumulate(np.max(raised, axis=1)[::-1])[::-1]
    following = np.pad(following, (0, size + 1 - bands))
    weights = np.zeros((2 * bands - 1, n))  # η^j of d = −reach, …, reach, for each s
    for d in range(bands):
        one = raised[d, : n - d]
        weights[reach - d, d:] = law[: n - d] * one
        weights[reach + d, : n - d] = law[d:] * one * (1 + following[size - d])
    largest = np.max(weights, axis=1)
    second = np.zeros(2 * bands - 1)
    for i in range(2 * bands - 1 - size):
        second[i] = largest[i + size :] @ (1 + excess[size : 2 * bands - 1 - i])
    with_second = largest * (1 + second)
    overlaps = np.correlate(np.pad(excess, reach), with_second, "valid")[max(size - reach, 0) :]
    r = 1 + limit
    for _ in range(_PASSES):
        r = min(r, 1 + _added(r * overlaps, size, limit))
    total = np.sum(largest)
    pairs = np.correlate(with_second, largest, "full") / total
    overlaps = np.correlate(np.pad(excess, 2 * reach), pairs, "valid")[size:]
    added = total * _added(r * overlaps, size, limit)
    once, twice = np.sum(weights, axis=0), second @ weights
    return unit.log_mean, np.log1p(once + np.minimum(added, once * (r - 1)) + twice * r)
