"""A chain that draws bins in clusters: the certificate's proposal in the direction of removing.

The chain of :mod:`.importance` draws s + 1 bins one by one. Where the squared norm of a mode is far
above its overlaps with its neighbours, all of its normalizers are large only where one bin has been
drawn again and again: seldom, so that values spread, and so high that the ceiling is many times
what is ever seen. Here such repetitions are drawn as what they are.

Write S = T + diag(d) with any d >= 0, and let n_k(τ) be how often bin k is in τ = (k_0, …, k_s).

    (1) Q e^((1+s)Y) = b^−(1+s) Σ_τ W(τ) N(Σ_l m_{k_l}, σ²I),  W(τ) = e^(Σ_{l<l'} S[k_l, k_l']),

    (2) W(τ) = e^(Σ_{l<l'} T[k_l, k_l']) Π_{l<l', k_l = k_l'} (1 + y_{k_l}),  y_k = e^(d_k) − 1.

(1) is the exponent of Q e^((1+s)Y) completed to a square. Multiply the last product of (2) out:
each term is a graph on {0, …, s} with an edge y for each pair that it takes, and its connected
components are *clusters*, sets of places that share a bin. Collect the graphs with the same
components π:

    (3) Π (1 + y) = Σ_π Π_{B in π} c_|B|(d_{k_B}) 1{τ is constant on B},
        c_m = Σ over connected graphs on m places of y^edges = y^(m−1) I_m(1 + y)

with the polynomials of Mallows and Riordan (1968): I_1 = 1, I_{n+1}(x) = Σ_{i<n} C(n−1, i)
(1 + x + … + x^i) I_{i+1}(x) I_{n−i}(x), sums of numbers >= 0. So a cluster of m places in bin k
counts as w_m(k) = c_m(d_k) e^(T_kk m(m−1)/2), two of m and m' in k and k' as e^(m m' T[k, k']).

Draw π with probability q(π), then the bin of each cluster, the largest first: that of the j-th, of
m_j places, ∝ w_{m_j}(k) e^(m_j Σ_{j'<j} m_j' T[k, k_j']), whose sum over k is b^(m_j) N_j. With
X ~ N(Σ_j m_j m_{k_j}, σ²I), by (1) to (3),

    f = q(π)^−1 (Π_j N_j) e^(−sY) δ₂(ε − Y)

has mean H(P, Q) for every q > 0. With M_j = Σ_{j'<j} m_j' Hölder's inequality gives

    (4) N_j <= b^(−m_j) max_k' Σ_k w_{m_j}(k) e^(m_j M_j T[k, k']),

for one place e^(R(M_j)), R(p) = log max_k' mean_k e^(p T[k, k']), and for more at most
b^(1−m_j) max_k w_{m_j}(k) e^(R(m_j M_j)); the first cluster's N_1 is known. R(p') <= R(p) +
(p' − p) max T beyond the p that it is computed for. With V(π) the product of these bounds and
q(π) = V(π)/Σ_π V,

    (5) 0 <= f <= (Σ_π V(π)) e^(−sε) sup_t e^(st) δ₂(t).

d = 0 is the chain itself. T_kk is taken as half the larger overlap with a neighbour: a lower one
gains nothing more. At 16 × 128, ε = 2 the ceiling over δ falls from 13 to 2.5 at δ = 1e-5 and from
570 to 12 at 1e-12; at 8 × 1,024, 1e-5 from 200 to 23.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mfopt.strategies.fields import Array

MOST = 24  # places: of so many there are 1,575 kinds of partitions; ε = 0.5 or δ = 1e-12 take 22
_SHARE = 0.5  # of the larger overlap with a neighbour that stays on the diagonal


class Clusters(NamedTuple):
    """Tables that the cluster kernel samples from.

    Attributes:
      spikes: d, (bins,).
      log_weights: log w_m(k) − m log b for m = 0, …, MOST places, (MOST + 1, bins).
      sizes: of the clusters of each kind of partition, the largest first, then zeros;
        (kinds, MOST).
      ends: running sums of the kinds' probabilities, (kinds,).
      log_over: log 1/q of one partition of each kind, (kinds,).
      log_sum: log Σ V.
    """

    spikes: Array
    log_weights: Array
    sizes: Array
    ends: Array
    log_over: Array
    log_sum: float


def spikes(diagonal: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """d, (bins,): what a mode has with itself beyond a part of what it has with a neighbour.

    By the diagonal of S, of at least two bins, and the entries beside it, (bins − 1,).
    """
    larger = np.maximum(np.append(beside, -np.inf), np.append(-np.inf, beside))
    return np.maximum(diagonal - _SHARE * larger, 0.0)


def _log_connected(spikes: np.ndarray) -> np.ndarray:
    """log c_m(d) of (3) for m = 1, …, MOST; (MOST, bins), −inf where d = 0 leaves no edge."""
    # log (1 + x + … + x^i) at x = e^d
    powers = [np.zeros_like(spikes)]
    for i in range(1, MOST):
        powers.append(np.logaddexp(powers[-1], i * spikes))
    inversions = [np.zeros_like(spikes)]  # log I_1, log I_2, …
    for n in range(1, MOST):
        parts = [
            math.log(math.comb(n - 1, i)) + powers[i] + inversions[i] + inversions[n - 1 - i]
            for i in range(n)
        ]
        inversions.append(np.logaddexp.reduce(parts))
    with np.errstate(divide="ignore"):
        edge = spikes + np.log(-np.expm1(-spikes))  # log y
    return np.stack(
        [inversion + m * edge if m else inversion for m, inversion in enumerate(inversions)]
    )


def log_weights(spikes: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """log w_m(k) − m log b for m = 0, …, MOST, (MOST + 1, bins), by d and the diagonal of S."""
    places = np.arange(1, MOST + 1)[:, None]
    connected = _log_connected(spikes) + places * (places - 1) / 2 * (diagonal - spikes)
    return np.concatenate([np.zeros((1, len(spikes))), connected - places * math.log(len(spikes))])


def clusters(
    spikes: np.ndarray, weights: np.ndarray, log_normalizers: np.ndarray, order: int, top: float
) -> Clusters:
    """Return the sampling tables of one order.

    Args:
      spikes, weights: d, and :func:`log_weights`.
      log_normalizers: R(1), R(2), …, at least one.
      order, top: s < MOST, and the largest entry of T.
    """
    normalized = len(log_normalizers)
    summed, largest = np.logaddexp.reduce(weights, axis=1), np.max(weights, axis=1)

    # log of (4) for a cluster of each size (rows) after each number of places (columns)
    power = np.arange(MOST + 1)[:, None] * np.arange(MOST)
    excess = np.maximum(power - normalized, 0)
    # mean_k e^(p T) grows by e^T at most from p to p + 1
    ratio = log_normalizers[np.maximum(power - excess, 1) - 1] + excess * top
    bounds = largest[:, None] + math.log(len(spikes)) + ratio
    bounds[:, 0] = summed
    bounds[0] = 0  # no cluster

    kinds = _kinds(order + 1)
    totals = bounds[kinds.sizes, kinds.before].sum(axis=1)
    log_shares = totals + kinds.log_counts
    log_sum = float(np.logaddexp.reduce(log_shares))
    ends = np.cumsum(np.exp(log_shares - log_sum))
    ends[-1] = np.inf  # whatever was rounded
    padding = len(_kinds(MOST).sizes) - len(totals)  # never drawn: one form, one compilation
    return Clusters(
        spikes,
        weights,
        np.pad(kinds.sizes, ((0, padding), (0, 0))),
        np.pad(ends, (0, padding), constant_values=np.inf),
        np.pad(log_sum - totals, (0, padding)),
        log_sum,
    )


class _Kinds(NamedTuple):
    """Partitions of some places: cluster sizes, places before each, log of how many there are.

    Sizes are the largest first, then zeros; (kinds, MOST), (kinds, MOST), (kinds,).
    """

    sizes: Array
    before: Array
    log_counts: Array


@functools.cache
def _kinds(places: int) -> _Kinds:
    kinds = tuple(partitions(places))
    sizes = np.array([kind + (0,) * (MOST - len(kind)) for kind in kinds])
    preceding = np.where(sizes > 0, np.cumsum(sizes, axis=1) - sizes, 0)
    return _Kinds(sizes, preceding, np.array([math.log(count(kind)) for kind in kinds]))


def partitions(places: int) -> Iterator[tuple[int, ...]]:
    """Sizes of the clusters of so many places, the largest first."""
    sizes = [places]
    while True:
        yield tuple(sizes)
        remaining = 1
        while sizes and sizes[-1] == 1:
            remaining += sizes.pop()
        if not sizes:
            return
        sizes[-1] -= 1
        while remaining > sizes[-1]:
            sizes.append(sizes[-1])
            remaining -= sizes[-1]
        sizes.append(remaining)


@functools.cache
def count(kind: tuple[int, ...]) -> int:
    """Number of set partitions with clusters of these sizes."""
    ways = math.factorial(sum(kind))
    for size in kind:
        ways //= math.factorial(size)
    for size in set(kind):
        ways //= math.factorial(kind.count(size))
    return ways
