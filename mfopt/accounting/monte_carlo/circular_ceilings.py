"""Proven ceilings under k of n sampling on a circle: those of b-min-sep, with marks that cost more.

All patterns have k participations, and N_l <= R_l = max_k' E_k e^(l <m_k, m_k'>) as in
:mod:`.importance` (3). With D_t the overlap of column t with those of k' and h_t = e^(l D_t) − 1

    E_k Π_{t in k} (1 + h_t) = Σ_A Pr(A ⊂ k) Π_{t in A} h_t,                                    (1)

over sets A of steps, the *marks*; h >= 0. Below, A = {t_1 < … < t_a} with gaps d_1, …, d_a around
the circle, d_a from t_a on to t_1, and b, S, n, k as in :mod:`.circular`.

**Against b-min-sep.** Let p = 1/(b − S + 1), x = p/(1−p)^S, L_d(x) = Σ_j binom(d − 1 −
(j+1)(S−1), j) x^j the sum over the patterns between two participations that are d apart, u(d) =
p (1−p)^(d−S) L_d(x), and J_d the number of participations of such a pattern, drawn ∝ x^j. Under
b-min-sep u(d) is the chance of a participation d steps after another, and each step has the chance
1/b, so Pr'(A ⊂ k) = Π_{i<a} u(d_i)/b. On the circle k − a participations are left for the gaps:

    Pr(A ⊂ k) = [x^(k−a)] Π L_{d_i}(x) / Z = Pr'(A ⊂ k) · b u(d_a) · Pr(Σ J_{d_i} = k − a)/D,   (2)

D = Z p^k (1−p)^(n−kS). For a = 0 and a = 1 both chances are the same, 1 and 1/b.

**The count.** L_d is the independence polynomial of a graph without claws (steps are joined that
are less than S apart), so its roots are real (Chudnovsky and Seymour 2007) and J_d is a sum of
independent coins. A coin of variance v has a characteristic function of at most e^(−v (1−cos θ)),
so that Pr(Σ J = j) <= I_0(V) e^(−V) with V the variance of the sum. The same holds of J_d tilted by
e^(λj), with K_d = log E e^(λ J_d):

    Pr(Σ J_{d_i} = k − a) <= e^(Σ K_{d_i} − λ (k−a)) I_0(V) e^(−V)                              (3)

for any λ. With K_d <= κ d + τ and Var J_d >= α d − β for all d, and Σ d_i = n, the right side is at
most a number for each a. For a = 2 the largest over d_1 + d_2 = n is found exactly. Let ζ >= 1 be
such that these numbers over D are at most ζ^a.

**The gap across the ends** is at least t_1, and at least n − t_a. Let G(d) >= 1 be the largest
b u(d') over d' >= d; then b u(d_a) <= (G(t_1) G(n − t_a))^(1/2). In all

    Pr(A ⊂ k) <= Pr'(A ⊂ k) Π_{t in A} ζ_t,   ζ_t = ζ (G(t) G(n − t))^(1/2),                    (4)

so the mean in (1) is at most that of Π (1 + ζ_t h_t) under b-min-sep. A participation of k' changes
the overlaps of steps near it alone, and with h = (1 + h')(1 + h'') − 1 of two of them ζ_t h <=
(1 + ζ_t h')(1 + ζ_t h'') − 1; so :mod:`.separated_ceilings` bounds it for all k' at once. There
each participation of k' has a cost; one cost c for all gives max_k' <= e^(kc) J_l, whatever c is.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import scipy

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import separated_ceilings
from mfopt.accounting.monte_carlo.circular import Circular
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.likelihood import Ceilings, PatternChain, require_range, summed
from mfopt.accounting.monte_carlo.separated import LONGEST

_TILTS = np.linspace(-3.0, 2.0, 26)  # λ
_ROUNDING = 1e-8  # of log ζ: of logs of binomials
_OVER = 1.03  # c over what a participation adds where they are as near as can be


@float64
def ceilings(at: Circular) -> Ceilings:
    """The ceilings in noise units.

    Raises:
      FailureError: contributions of a unit are longer than the likelihood is known for.
    """
    of_squares = separated_ceilings.squares(at)
    require_range("the contribution of a unit has a squared norm of", of_squares[0], LONGEST)
    gram, n = np.asarray(at.gram), at.dimension
    marks = weights(at.bins, at.separation, at.times)

    def log_largest(order: int) -> float:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            cost = _cost(at, order, marks)
            if not math.isfinite(cost):
                return math.inf
            given = at.separation, at.probability, order, np.zeros(n), np.full(n, cost)
            found = separated_ceilings.log_largest(gram, *given, marks)[0] + at.times * cost
        return found if math.isfinite(found) else math.inf

    return Ceilings({"chain": PatternChain(summed(log_largest), MAX_ORDER)}, *of_squares)


def _cost(at: Circular, order: int, marks: np.ndarray) -> float:
    """c: what the last of k participations of k' adds to log E Π (1 + ζ_t h_t), S from the one
    before it, where steps have most overlaps. Any c is valid."""
    size, k, n, p = at.separation, at.times, at.dimension, at.probability
    gram = np.asarray(at.gram)
    raised = np.expm1(order * gram)
    sums = np.append(0.0, np.cumsum(separated_ceilings.firsts(raised, marks)))
    start = int(np.argmax(sums[k * size :] - sums[: n + 1 - k * size]))
    logs = []
    for count in (k, k - 1):
        h = np.zeros(n + len(gram))
        for step in range(start, start + count * size, size):
            for lag in range(len(gram)):
                h[step + lag] = (1 + h[step + lag]) * (1 + raised[lag, step]) - 1
                if lag and step >= lag:
                    h[step - lag] = (1 + h[step - lag]) * (1 + raised[lag, step - lag]) - 1
        f = np.ones(n + size)
        scale = 0.0
        for t in range(n - 1, -1, -1):
            f[t] = (1 - p) * f[t + 1] + p * (1 + marks[t] * h[t]) * f[t + size]
            if f[t] > 1e100:
                f[t : t + size + 1] *= 1e-100
                scale += math.log(1e100)
        mean = (f[0] + p * np.sum(f[1:size])) / (1 + (size - 1) * p)
        logs.append(math.log(mean) + scale)
    return _OVER * (logs[0] - logs[1])


@functools.lru_cache(maxsize=16)
@float64
def weights(bins: int, separation: int, times: int) -> np.ndarray:
    """ζ_t of (4), shape (n,).

    Args:
      bins: b.
      separation: S.
      times: k.
    """
    n, p, k = bins * times, 1 / (bins - separation + 1), times
    if k == 1:  # (4) is for two marks or more: of one, both chances are alike
        return np.ones(n)
    log_x = math.log(p) - separation * math.log1p(-p)
    d = np.arange(separation, n + 1)[:, None]
    j = np.arange(n // separation + 1)
    log_terms = _log_binomial(d - 1 - (j + 1) * (separation - 1), j) + j * log_x  # of L_d
    log_sums = scipy.special.logsumexp(log_terms, axis=1)
    log_gaps = math.log(bins * p) + (d[:, 0] - separation) * math.log1p(-p) + log_sums  # b u(d)
    patterns = float(_log_binomial(np.array(n - k * (separation - 1) - 1), np.array(k - 1)))
    log_d = math.log(n / k) + patterns + k * math.log(p) + (n - k * separation) * math.log1p(-p)
    log_most = np.full(k + 1, np.inf)  # by a, of the chances in (2) over D
    a, middle = np.arange(k + 1), len(d) // 2
    for tilt in _TILTS:
        tilted = log_terms + tilt * j
        sums = scipy.special.logsumexp(tilted, axis=1)
        law = np.exp(tilted - sums[:, None])
        mean = law @ j
        variance = np.maximum(law @ j**2 - mean**2, 0)
        logs = sums - log_sums
        width = d[-1, 0] - d[middle, 0]
        slope = (logs[-1] - logs[middle]) / width if width else 0.0
        rise = (variance[-1] - variance[middle]) / width if width else 0.0
        above = np.max(logs - slope * d[:, 0])
        below = np.max(rise * d[:, 0] - variance)
        least = np.maximum(rise * n - below * a, 0)
        log_here = slope * n + above * a - tilt * (k - a) + np.log(scipy.special.i0e(least)) - log_d
        log_most = np.minimum(log_most, log_here)
    law = np.exp(log_terms - log_sums[:, None])[: n - 2 * separation + 1, : k - 1]
    pairs = np.sum(law * law[::-1, ::-1], axis=1)  # counts j and k − 2 − j, gaps d and n − d
    log_most[2] = min(log_most[2], math.log(np.max(pairs)) - log_d)
    log_each = max(0.0, float(np.max(log_most[2:] / a[2:]))) + _ROUNDING
    largest = np.maximum.accumulate(np.maximum(log_gaps, 0)[::-1])[::-1]  # log G(d), d >= S
    largest = np.concatenate([np.full(separation, largest[0]), largest])
    t = np.arange(n)
    result: np.ndarray = np.exp(log_each + (largest[t] + largest[n - t]) / 2)
    result.flags.writeable = False
    return result


def _log_binomial(n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """log of binom(n, k), −∞ where there is none but for k = 0."""
    n, k = np.broadcast_arrays(n, k)
    known = np.maximum(n, k)
    logs = scipy.special.gammaln(known + 1.0) - scipy.special.gammaln(k + 1.0)
    logs = logs - scipy.special.gammaln(known - k + 1.0)
    return np.where(n >= k, logs, np.where(k == 0, 0.0, -np.inf))
