"""K units under balls-in-bins with orthogonal modes: iid values with a proven ceiling.

Modes are √d e_i, i = 1..b, in units where σ is the noise; g = d/σ². A group falls with counts
n = (n_1, …, n_b), multinomial, and z ~ N(√g n, I) is released. With z ~ N(0, I) under Q,

    R(z) = P/Q = (K!/b^K) Σ_n Π_i e^(n_i √g z_i − n_i² g/2)/n_i!
         = c · [x^K] Π_i F_i(x),   F_i(x) = Σ_j (xK/b)^j/j! · e^(j √g z_i − j² g/2),   c = K!/K^K,

and with Y = log R and the hockey-stick payoff δ₂(t) = (1 − e^t)₊,

    H(P, Q) = E_P δ₂(ε − Y),    H(Q, P) = E_Q δ₂(ε + Y).

**At most J to a bin.** Only counts n_i <= J are sampled, R' <= R being what is left of the sum. The
others have probability p <= b·Pr[Bin(K, 1/b) > J], so

    (1) E_Q[R δ₂(ε − log R)] <= E_Q[R' δ₂(ε − log R')] + p, as R δ₂(ε − log R) is convex in R with
        slopes from 0 to 1 (it is (R − e^ε)₊), and E_Q[R − R'] <= p;
    (2) E_Q δ₂(ε + log R) <= E_Q δ₂(ε + log R'), as δ₂ falls and R' <= R.

**Remove.** For θ > 0 and a cap y let G(z) >= min(F(z), e^y)^θ, F = F_i(1), be a step function of z.
The counts are drawn ∝ multinomial(n)·Π_i Z(n_i), Z(n) = E G(N(√g n, 1)), then each z_i from
N(√g n_i, 1) reweighted by G. The density of z over Q is R' Π G(z_i) / 𝒵 with
𝒵 = c [x^K] (Σ_{j<=J} (xK/b)^j/j! Z(j))^b, so on an event A of z

    f = 1_A · 𝒵 · Π_i G(z_i)^(−1) · δ₂(ε − Y)      has mean E_Q[R' 1_A δ₂(ε − log R')],

and what A leaves out costs P'(not A), as in (1). The ceiling: coefficients are >= 0, so

    (3) R' = c Π_i F_i(1) · q, with q the chance that independent counts with laws ∝ F_i add to K;
    (4) q <= κ(s) = e^(−s) I₀(s), s = Σ_i w(z_i), w = Σ_j p_j p_{j+1} for the law p of a count: with
        characteristic functions φ_i, q <= mean_t Π |φ_i(t)|, and |φ_i|² <= 1 − 4 w sin²(t/2)
        <= e^(−4 w sin²(t/2)), as two copies differ by 1 with probability 2w. κ falls;
    (5) F_i(1) >= 1, its term j = 0, so no factor G is below 1.

A is s >= s₀ and Σ_i min(log F_i, τ) >= τ + w₀, τ <= y. By (3), q <= 1, and Chernoff's bound,

    (6) P'(Σ h(z_i) < a) <= c e^(λa) (E_Q F e^(−λh))^b for every λ > 0,

which gives s₀ and w₀ at a probability of our choice. On A, with c' = c κ(s₀),

    (7) Π G >= e^(θ min(y + w₀, Y − log c')): if one F_i is above e^y, the others make up w₀; if
        none is, Π G >= Π F^θ >= (R'/c')^θ by (3) and (4);
    (8) f <= 𝒵 max(e^(−θ(y+w₀)), e^(θ log c' − θε) sup_t e^(θt) δ₂(t)), with t = ε − Y in (7).

The cap is what keeps 𝒵 small: uncapped, it would be a Rényi moment, and those are ruled by groups
that fall into one bin, however rarely they do. y is put where both terms of (8) are equal.

**Add.** With the mean M̄ = (K/b) √g Σ_i e_i, which is that of the counts kept too (bins are alike),
and h the mean of |M|²/2 over all ways to fall, over 1 − p, which is no less than over those kept,
Jensen gives Y >= log(1 − p) + <M̄, z> − h. Drawn from N(−t M̄, I),

    (9) f = e^(t<M̄, z> + t²|M̄|²/2) δ₂(ε + Y)
          <= e^(t(h − log(1−p) − ε) + t²|M̄|²/2) sup_u e^(tu) δ₂(u).

**That P dominates.** Bins are independent of all else, so other units may be taken to contribute
nothing. Row r of C x then moves by at most Σ_j (m_{k_j})_r when the units fall into k_1..k_K
(triangle inequality; C >= 0, contributions of norm <= 1, chosen adaptively), and the mixture of
Gaussians with these movements dominates (Choquette-Choo et al. 2024, proof of Lemma 3.2: the lemma
that it rests on holds for any mixture, here the one over the ways to fall).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import (
    HINGE,
    HockeyStickPayoff,
    Pilot,
    Point,
    Sums,
    Tilt,
    Trial,
    UpperBound,
    sums,
    upper_bound,
)
from mfopt.accounting.monte_carlo.protocol import SampledDirection

CELLS = 4096  # of the step function G
MOST_TABLE = 2**23  # numbers in the table of counts
_FAINT = 1e-18  # probability of more than J units in a bin that is not worth sampling
_LEAST_LEVEL = 1e-6  # of log F in the cells of G
_PART = 1.0  # τ
_NUDGE = 1e-9  # relative, upwards: rounding of δ₂ and of sums of logarithms
_UNDERFLOW = 1e-290  # of a mass, far above what many products below the smallest float add up to


class CountPair(NamedTuple):
    """Pair of distributions to be bounded.

    Attributes:
      bins, group_size: b and K.
      squared_norm: d of each orthogonal mode, before division by σ².
      faint: probability that may be left out of A, twice.
    """

    bins: int
    group_size: int
    squared_norm: float
    faint: float = 1e-18

    @property
    def most(self) -> int:
        """J, the largest count of one bin in event A."""
        return _most(self.bins, self.group_size)

    @property
    def left_out(self) -> float:
        """Upper bound of p, the probability outside event A."""
        if self.most >= self.group_size:
            return 0.0
        return _fuller(self.bins, self.group_size, self.most) * 1.01

    @property
    def work(self) -> int:
        """Numbers that one sample takes as long as."""
        return 2 * self.bins * (self.most + 1) * (self.group_size + 8) // 3

    @property
    def fits(self) -> bool:
        """True if the tables fit into the size limit."""
        return self.bins * (self.group_size + 1) * (self.most + 1) <= MOST_TABLE


@functools.cache
def _most(bins: int, group_size: int) -> int:
    count = 1
    while count < group_size and _fuller(bins, group_size, count) > _FAINT:
        count += 1
    return count


def _fuller(bins: int, group_size: int, largest_count: int) -> float:
    """b·Pr[Bin(K, 1/b) > J]."""
    return bins * float(scipy.special.bdtrc(largest_count, group_size, 1 / bins))


class _Tables(NamedTuple):
    """The remove direction's proposal; arrays only."""

    edges: np.ndarray  # (cells + 1,), from −∞ to ∞
    log_g: np.ndarray  # (cells,)
    cells: np.ndarray  # ((J+1)·cells,): n plus the law of the cell given n, cumulated
    tails: np.ndarray  # (2, (J+1)·cells): the smaller tail at a cell's lower end, how it changes
    counts: np.ndarray  # (b + 1, K + 1, J + 1): law of n given bins and units left, cumulated
    base: np.ndarray  # (J+1,): log (K/b)^j/j! − j² g/2
    empty: np.ndarray  # (K+1,): the polynomial 1
    root: float  # √g
    log_total: float  # log 𝒵
    log_constant: float  # log c
    log_ceiling: float
    least_spread: float  # s₀
    least_sum: float  # τ + w₀


@float64
def tilt(pair: CountPair, direction: SampledDirection, order: float, point: Point) -> Tilt:
    """The proposal of this order, with its ceiling.

    Args:
      pair: what is bounded.
      direction: "remove" or "add".
      order: θ > 0, or t >= 0.
      point: where; of the mechanism alone.
    """
    sigma, epsilon = _alone(point)
    if direction == "remove":
        return Tilt("counts", order, float(_proposal(pair, order, sigma, epsilon).log_ceiling))
    g = pair.squared_norm / sigma**2
    k, b = pair.group_size, pair.bins
    half = 0.5 * g * (k * (1 - 1 / b) + k**2 / b) / (1 - pair.left_out)
    half -= math.log1p(-pair.left_out)
    log_ceiling = order * (half - epsilon) + 0.5 * order**2 * k**2 / b * g
    return Tilt("counts-mean", order, log_ceiling + HINGE.log_peak(order))


def least(pair: CountPair, direction: SampledDirection, point: Point) -> Tilt:
    """The proposal of about the least ceiling."""
    if direction == "add":
        orders = [0.0, *np.geomspace(1e-2, 1e3, 61)]
        tilts = [tilt(pair, "add", float(order), point) for order in orders]
        return min(tilts, key=lambda one: one.log_ceiling)

    def log_ceiling(log_order: float) -> float:
        return tilt(pair, "remove", math.exp(log_order), point).log_ceiling

    # convex enough, and wide at its least
    best_level = solve.lowest(log_ceiling, math.log(0.1), math.log(100.0), width=0.1)
    return tilt(pair, "remove", math.exp(best_level), point)


def _alone(point: Point) -> tuple[float, float]:
    """(σ, ε) of a point whose payoff is the mechanism's own.

    Raises:
      UsageError: it is another's.
    """
    if not isinstance(point.payoff, HockeyStickPayoff):
        payoff_name = type(point.payoff).__name__
        raise _check.reject("payoff", payoff_name, "groups are not accounted with companions")
    return point.noise_multiplier, point.epsilon


def _log_constant(pair: CountPair) -> float:
    k = pair.group_size
    return math.lgamma(k + 1) - k * math.log(k)


class _Shape(NamedTuple):
    """Tables shared by all orders: F on its grid, its cells, and the event A."""

    grid: np.ndarray
    level: np.ndarray  # log F on the grid
    log_constant: float  # log c' = log c κ(s₀)
    least_spread: float
    beyond: float  # w₀


@functools.lru_cache(maxsize=8)
def _shape(pair: CountPair, sigma: float) -> _Shape:
    base, root = _base(pair, sigma)
    top = max(pair.group_size, 1) + 60.0
    grid = np.linspace(min(-10.0, (-20.0 - base[1]) / root), (top - base[1]) / root, 4 * CELLS)
    level, spread = _one_bin(base, root, grid)
    level = np.maximum.accumulate(level)
    # cells of the grid: F's mass in each is known, w and log F are at least so much
    count = np.arange(base.size)
    mass = np.exp(_log_shares(pair)) @ _masses(
        np.concatenate([[-np.inf], grid, [np.inf]]), root, count
    )
    # |w'| = √g |Σ (2j + 1 − 2 E n) p_j p_{j+1}| <= √g (2J − 1) w, where w <= 1/4: of a pair of
    # neighbours one is even and one odd, and (Σ_even p)(Σ_odd p) is no more
    steep = root * base.size * (grid[1] - grid[0])
    inside = np.maximum(np.minimum(spread[1:], spread[:-1]) - steep / 2, 0.0)
    least_spread = _lower_tail(pair, mass, np.concatenate([[0.0], inside, [0.0]]))
    capped = np.minimum(np.concatenate([[0.0], level]), _PART)
    tail = max(_lower_tail(pair, mass, capped) - _PART, 0.0)
    log_constant = _log_constant(pair) + math.log(scipy.special.i0e(least_spread))
    return _Shape(grid, level, log_constant, least_spread, tail)


def _lower_tail(pair: CountPair, mass: np.ndarray, smallest: np.ndarray) -> float:
    """a with P'(Σ h < a) <= faint by (6), h >= ``smallest`` in cells of F's ``mass``; >= 0."""
    if pair.faint <= 0:
        return 0.0
    best, budget, whole = 0.0, math.log(pair.faint) - _log_constant(pair), float(mass.sum())
    mass, smallest = mass[mass > 0], smallest[mass > 0]  # most cells are empty
    for rate in np.geomspace(0.1, 1e3, 30):
        with np.errstate(under="ignore"):
            moment = float(mass @ np.exp(-rate * smallest)) * (1 + _NUDGE)
        moment += _UNDERFLOW * whole  # what floats do not hold of the masses and of the rest
        best = max(best, (budget - pair.bins * math.log(moment)) / rate)
    return best


def _base(pair: CountPair, sigma: float) -> tuple[np.ndarray, float]:
    """log (K/b)^j/j! − j² g/2 for j <= J, and √g."""
    g, count = pair.squared_norm / sigma**2, np.arange(pair.most + 1)
    return _log_shares(pair) - 0.5 * count**2 * g, math.sqrt(g)


def _log_shares(pair: CountPair) -> np.ndarray:
    """log (K/b)^j/j! for j <= J."""
    count = np.arange(pair.most + 1)
    return count * math.log(pair.group_size / pair.bins) - scipy.special.gammaln(count + 1)


def _one_bin(base: np.ndarray, root: float, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log F and w at z."""
    powers = base + np.arange(base.size) * root * z[:, None]
    top = np.max(powers, axis=1)
    terms = np.exp(powers - top[:, None])
    total = np.sum(terms, axis=1)
    small = np.sum(np.exp(np.minimum(powers[:, 1:], 0.0)), axis=1)  # F − 1, where F is near 1
    level = np.where(small < 0.3, np.log1p(small), top + np.log(total))
    return level, np.sum(terms[:, 1:] * terms[:, :-1], axis=1) / total**2


def _masses(edges: np.ndarray, root: float, count: np.ndarray) -> np.ndarray:
    """Masses of cells under N(√g n, 1), shape (counts, cells): differences of the smaller tail."""
    standardized = edges - root * count[:, None]
    tail, head = scipy.special.ndtr(-standardized), scipy.special.ndtr(standardized)
    right = standardized[:, :-1] > 0
    mass = np.where(right, tail[:, :-1] - tail[:, 1:], head[:, 1:] - head[:, :-1])
    return np.maximum(mass, 0.0)


class _Proposal(NamedTuple):
    """Tables of the remove direction's proposal, with its ceiling."""

    edges: np.ndarray
    log_g: np.ndarray
    masses: np.ndarray  # (J+1, cells): of a count's cells, times G, over its largest
    log_law: np.ndarray  # (J+1,): log of (K/b)^j/j! Z(j), over its first
    log_total: float
    log_ceiling: float


@functools.lru_cache(maxsize=8)
def _proposal(pair: CountPair, order: float, sigma: float, epsilon: float) -> _Proposal:
    shape = _shape(pair, sigma)
    k, b = pair.group_size, pair.bins
    (base, root), count = _base(pair, sigma), np.arange(pair.most + 1)
    log_peak = HINGE.log_peak(order)
    cap = max(epsilon - shape.log_constant - log_peak / order - shape.beyond, _PART)
    # F rises with z: cells are ranges of log F, and the upper end of each bounds G there
    levels = np.geomspace(_LEAST_LEVEL, cap, CELLS - 1)
    inner = np.interp(levels, shape.level, shape.grid)
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    ends = np.append(np.minimum(_one_bin(base, root, inner)[0], cap), cap)
    log_g = order * np.maximum.accumulate(ends) * (1 + 1e-12)
    with np.errstate(divide="ignore"):
        logs = np.log(_masses(edges, root, count)) + log_g
    largest = np.max(logs, axis=1)
    masses = np.exp(logs - largest[:, None])
    log_p = _log_shares(pair) + np.log(masses.sum(axis=1)) + largest
    log_law = log_p - log_p[0]
    log_total = _log_power(log_law, b, k) + b * float(log_p[0]) + _log_constant(pair)
    aligned = order * (shape.log_constant - epsilon) + log_peak
    log_ceiling = log_total + max(-order * (cap + shape.beyond), aligned)
    return _Proposal(edges, log_g, masses, log_law, log_total, log_ceiling)


def _log_power(log_law: np.ndarray, bins: int, units: int) -> float:
    """log of the coefficient of x^units of (Σ_j e^(log_law_j) x^j)^bins, by squares.

    In logs throughout: between coefficients lies more than floats hold.
    """
    lag = np.subtract.outer(np.arange(units + 1), np.arange(units + 1))

    def product(first_factor: np.ndarray, second_factor: np.ndarray) -> np.ndarray:
        terms = np.where(lag >= 0, first_factor + second_factor[np.abs(lag)], -np.inf)
        return np.asarray(np.logaddexp.reduce(terms, axis=1))

    law, power = np.full((2, units + 1), -np.inf)
    law[: log_law.size], power[0] = log_law, 0.0
    for digit in f"{bins:b}":
        power = product(power, power)
        power = product(power, law) if digit == "1" else power
    return float(power[units])


@functools.lru_cache(maxsize=8)
def _tables(pair: CountPair, order: float, sigma: float, epsilon: float) -> _Tables:
    shape, proposal = _shape(pair, sigma), _proposal(pair, order, sigma, epsilon)
    k, b, largest_count = pair.group_size, pair.bins, pair.most
    base, root = _base(pair, sigma)
    cells = np.cumsum(proposal.masses, axis=1) / proposal.masses.sum(axis=1)[:, None]
    cells = np.minimum(cells / cells[:, -1:], 1.0) + np.arange(largest_count + 1)[:, None]
    # the counts: coefficients of the power b, from the last bin backwards
    power = np.full(k + 1, -np.inf)
    power[0] = 0.0
    counts = np.ones((b + 1, k + 1, largest_count + 1))
    for m in range(1, b + 1):
        parts = np.full((k + 1, largest_count + 1), -np.inf)
        for j in range(min(largest_count, k) + 1):
            parts[j:, j] = proposal.log_law[j] + power[: k + 1 - j]
        power = np.asarray(np.logaddexp.reduce(parts, axis=1))
        reached = np.isfinite(power)
        cumulated = np.cumsum(np.exp(parts - np.where(reached, power, 0.0)[:, None]), axis=1)
        counts[m] = np.where(reached[:, None], cumulated, 1.0)
    counts[:, :, -1] = 1.0
    # floats, never NumPy's: their types would compile a program again
    scalars = (
        root,
        proposal.log_total,
        _log_constant(pair),
        proposal.log_ceiling,
        shape.least_spread,
        shape.beyond + _PART if shape.beyond > 0 else 0.0,
    )
    # in the smaller tail
    low = proposal.edges[:-1] - root * np.arange(largest_count + 1)[:, None]
    sign = np.where(low > 0, -1.0, 1.0)
    mass = _masses(proposal.edges, root, np.arange(largest_count + 1))
    tails = np.stack([scipy.special.ndtr(sign * low), sign * mass]).reshape(2, -1)
    laws = cells.ravel(), tails, counts, base, np.eye(1, k + 1)[0]
    return _Tables(proposal.edges, proposal.log_g, *laws, *map(float, scalars))


# --- samples -------------------------------------------------------------------------------------


@float64
def pilot(pair: CountPair, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> Pilot:
    """iid values that prove nothing.

    Args:
      pair, tilt: what is bounded, and its proposal, with its ceiling at the point.
      point, samples, key: where, at least how many, and randomness.
    """
    return Pilot(tilt, *_total(pair, tilt, point, samples, key))


@float64
def bound(pair: CountPair, tilt: Tilt, point: Point, bet: int, trial: Trial) -> UpperBound:
    """Upper bound of the tilt's direction, except with probability β over fresh samples.

    Args:
      pair, tilt: what is bounded, and its proposal, with its ceiling at the point.
      point: where.
      bet, trial: index of λ, chosen without these samples; samples, β and key.
    """
    sums, used = _total(pair, tilt, point, trial.samples, trial.key)
    result = upper_bound(tilt, sums, used, bet=bet, beta=trial.beta, uniforms=3 * pair.bins)
    aside = 2 * pair.faint if tilt.kind == "counts" else 0.0  # what A leaves out
    return result._replace(value=result.value + pair.left_out + aside)


def _total(
    pair: CountPair, tilt: Tilt, point: Point, samples: int, key: jax.Array
) -> tuple[Sums, int]:
    sigma, epsilon = _alone(point)
    # chunks of one size, as small as the fewest samples asked for, share their compiled code
    row = 128 * min(max(2 ** round(math.log2(pair.work / 2**13)), 1), 8)
    row = max(pair.group_size + pair.most + 2, row)
    if tilt.kind == "counts":
        tables = _tables(pair, tilt.order, sigma, epsilon)
        return chunked.total(_remove, key, samples, row, tables, float(epsilon))
    base, root = _base(pair, sigma)
    bins, empty = np.zeros(pair.bins), np.eye(1, pair.group_size + 1)[0]
    constants = (bins, base, empty, root, _log_constant(pair))
    return chunked.total(
        _add, key, samples, row, constants, float(epsilon), tilt.order, tilt.log_ceiling
    )


def _times(
    state: tuple[jax.Array, jax.Array], exponent: jax.Array, base: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """The polynomial (K+1, samples) times one bin's F(x)/F(1), its log scale; log F and w."""
    polynomial, log_scale = state
    powers = base[:, None] + jnp.arange(base.shape[0])[:, None] * exponent
    top = jnp.max(powers, axis=0)
    factors = jnp.exp(powers - top)
    following = polynomial * factors[0]
    for j in range(1, min(base.shape[0], polynomial.shape[0])):
        following = following.at[j:].add(polynomial[:-j] * factors[j])
    total = jnp.sum(factors, axis=0)
    log_f = top + jnp.log(total)
    spread = jnp.sum(factors[1:] * factors[:-1], axis=0) / total**2
    return (following / total, log_scale + log_f), log_f, spread


def _log_last(state: tuple[jax.Array, jax.Array]) -> jax.Array:
    """log of the last coefficient; NaN where it is below the smallest float.

    It would hide a loss: what is no number is never accepted.
    """
    coefficient = jnp.where(state[0][-1] > 0, state[0][-1], jnp.nan)
    return jnp.log(coefficient) + state[1]


def _remove(key: jax.Array, size: int, tables: _Tables, epsilon: jax.Array) -> Sums:
    bins, width, root = tables.counts.shape[0] - 1, tables.log_g.shape[0], tables.root
    empty = tables.empty

    def draw_bin(i: jax.Array, state: PyTree) -> PyTree:
        left, log_weight, level, spread, polynomial = state
        uniform = jax.random.uniform(jax.random.fold_in(key, i), (3, size))
        law = tables.counts[bins - i, left]  # (size, J+1)
        n = jnp.sum(law[:, :-1] <= uniform[0][:, None], axis=1)
        at = jnp.searchsorted(tables.cells, n + uniform[1], side="right")
        cell = jnp.clip(at - n * width, 0, width - 1)
        low, high = tables.edges[cell] - root * n, tables.edges[cell + 1] - root * n
        start, more = tables.tails[:, n * width + cell]
        sign = jnp.where(low > 0, -1.0, 1.0)
        share = start + more * uniform[2]
        z = sign * jax.scipy.special.ndtri(jnp.clip(share, 1e-300, 1 - 2.0**-53))
        z = jnp.clip(z, low, high) + root * n
        polynomial, log_f, w = _times(polynomial, root * z, jnp.asarray(tables.base))
        level = level + jnp.minimum(log_f, _PART)
        return left - n, log_weight - tables.log_g[cell], level, spread + w, polynomial

    zero = jnp.zeros(size)
    start = jnp.broadcast_to(empty[:, None], (empty.shape[0], size)), zero
    begin = jnp.full(size, empty.shape[0] - 1), zero, zero, zero, start
    _, log_weight, level, spread, state = jax.lax.fori_loop(0, bins, draw_bin, begin)
    loss = _log_last(state) + tables.log_constant
    log_value = tables.log_total + log_weight + HINGE.log_value(epsilon - loss)
    value = jnp.exp(log_value - tables.log_ceiling)
    inside = (spread >= tables.least_spread) & (level >= tables.least_sum)
    return sums(jnp.where(inside | jnp.isnan(loss), value, 0.0))


def _add(
    key: jax.Array,
    size: int,
    constants: tuple[jax.Array, ...],
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
) -> Sums:
    zeros, base, empty, root, log_constant = constants
    bins, mean = zeros.shape[0], (empty.shape[0] - 1) / zeros.shape[0] * root

    def draw_bin(i: jax.Array, state: PyTree) -> PyTree:
        log_weight, polynomial = state
        z = jax.random.normal(jax.random.fold_in(key, i), (size,)) - order * mean
        log_weight = log_weight + order * mean * z + order**2 * mean**2 / 2
        return log_weight, _times(polynomial, root * z, jnp.asarray(base))[0]

    start = jnp.broadcast_to(empty[:, None], (empty.shape[0], size)), jnp.zeros(size)
    log_weight, state = jax.lax.fori_loop(0, bins, draw_bin, (jnp.zeros(size), start))
    loss = _log_last(state) + log_constant
    return sums(jnp.exp(log_weight + HINGE.log_value(epsilon + loss) - log_ceiling))
