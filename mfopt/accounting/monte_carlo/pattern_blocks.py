"""The add direction where bins are thrown more than once: each throw tilted on its own.

Notation of :mod:`.pattern_tilts`, in noise units: K throws, modes M_g, m̄ = E_k m_k, ρ = |m̄|²,
ḡ = E_k |m_k|², Y = log P/Q, and H(Q, P) = E_Q δ₂(ε + Y). The proposal "mean" there rests on
Y >= <m̄, X> - ḡ/2, which Jensen's inequality gives for all bins at once. Here most bins are kept
under the logarithm. Call the last c = bands - 1 bins of a throw *late*: only their modes reach
beyond the rows of their own throw. The others are *early*, a part 1 - λ = (b - c)/b. With

    u_g[k] = <M_g[:, k], X> - |M_g[:, k]|²/2 - h_g[k],   h_g[k] = mean_i <M_{g-1}[:, i], M_g[:, k]>,
    ℓ = Σ_g (1/b) Σ_{late k} u_g[k] + (1 - λ) log mean_{early k} e^{u_g[k]}                     (1)

we have Y >= ℓ.                                                                                 (2)

Proof. e^Y is the mean over patterns of e^F with F = Σ_g <M_g[:, k_g], X> - |M_g[:, k_g]|²/2 -
<M_{g-1}[:, k_{g-1}], M_g[:, k_g]>. Let D say of each throw whether its bin is early, and which one
if it is late. By Jensen Y >= E_D log E[e^F | D]. Given D the early bins are independent and
uniform, and an overlap with the throw before is not 0 only where that one's bin is late, hence
known: F is a sum of terms that depend on one early bin each, and log E[e^F | D] is a sum over
throws, of v - o where the bin is late and of log mean_{early k} e^{v[k] - o[k]} where it is early,
o being the overlaps with the bin of the throw before (0 where that is early) and h its mean. D is
independent between throws and log-mean-exp is convex in its exponents, so taking the mean of o
inside does not raise it (Jensen again). What is left is the mean over D_g alone: (1).            ∎

For t >= 0 let R have the density e^{-tℓ}/N over Q, N = E_Q e^{-tℓ}. Under R

    f = N e^{tℓ} δ₂(ε + Y)  has mean H(Q, P), and                                               (3)
    0 <= f <= N e^{tY} δ₂(ε + Y) <= N e^{-tε} sup_u e^{tu} δ₂(u) =: B        by (2).             (4)

Sampling R. With L = N(-t m̄, I), whose density over Q is e^{-t(<m̄, X> - ḡ/2)} over its mean
e^{tḡ/2 + t²ρ/2} (Σ_g mean_k u_g[k] = <m̄, X> - ḡ/2, since ḡ = Σ_g mean_k (|M_g[:, k]|² + 2 h_g[k])),

    R = L Π_g a_g/A_g,   A_g = E_L a_g,   N = e^{tḡ/2 + t²ρ/2} Π_g A_g,
    log a_g = -t (1 - λ) (log mean_{early k} e^{u_g[k]} - mean_{early k} u_g[k]),                (5)

where 0 < a_g <= 1 (Jensen) depends on the rows of throw g alone, since the modes of early bins lie
in them; rows are independent under L, and so is the product's mean in (5). So the rows of throw g
are drawn from L until they are kept, which they are with probability a_g, throw by throw. The ones
that are kept are iid whatever the pattern of keeping is, and the draws end by that pattern alone.

The normalizer is not known, only bounded. For any κ_g > 0 that are fixed beforehand, by the
inequality of arithmetic and geometric means,

    Π_g A_g = Π_g κ_g⁻¹ · Π_g κ_g A_g <= Π_g κ_g⁻¹ · ((1/K) Σ_g κ_g A_g)^K,                      (6)

with little loss where κ_g is near 1/A_g; (1/K) Σ_g κ_g a_g lies in [0, mean κ] and is bounded from
its iid values by the same bet against it as f is. Each of the two bounds fails with probability at
most β/2, and H <= (bound of N) · (bound of E f/N): together β, in whatever way they depend.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import betting, chunked
from mfopt.accounting.monte_carlo.evidence import (
    Pilot,
    Point,
    Sums,
    Tilt,
    Trial,
    UpperBound,
    sums,
    upper_bound,
)
from mfopt.accounting.monte_carlo.pattern_ceilings import Ceilings
from mfopt.accounting.monte_carlo.pattern_common import Rest
from mfopt.accounting.monte_carlo.patterns import corners, noise, squared_norms

KIND = "blocks"
_ROUNDS = 256  # of candidates, at most: a throw that is not kept by then leaves no bound
_GLANCE = 1024  # candidates that κ is taken from
_ROUNDING = 1e-9  # relative, of sums over throws and bins, as in :mod:`.evidence`
_LEAST_KEPT = 0.02  # of the candidates of a throw
_STEP, _STEPS = 1.3, 12  # of orders that are tried, around that of "mean"


class Kept(NamedTuple):
    """What is known of the candidates that are kept, by throw.

    Attributes:
      log_parts: log of an estimate of A_g: -log κ_g.
      spread: relative standard deviation of (1/K) Σ_g κ_g a_g.
    """

    log_parts: tuple[float, ...]
    spread: float


class _Seen(NamedTuple):
    """Sums over samples: of f/B, of (1/K) Σ κ_g a_g over its largest value, and of a_g by throw."""

    values: Sums
    normalizer: Sums
    kept: jax.Array


class BlocksPilot(Pilot):
    """A pilot whose bound also has to bound the normalizer."""

    def expected(self, samples: int, beta: float) -> tuple[int, float]:
        bet, excess = super().expected(samples, beta / 2)
        throws, spread = len(self.tilt.detail.log_parts), self.tilt.detail.spread
        # of a bet against values of this spread, to the power K
        return bet, excess + throws * spread * math.sqrt(2 * math.log(2 / beta) / samples)


@float64
def tilt(rest: Rest, ceilings: Ceilings, order: float, point: Point) -> Tilt:
    """R of order t at a point; its ceiling is an estimate until :func:`bound` proves one.

    Args:
      rest: what is sampled of C, for σ = 1.
      ceilings: at the point's σ.
      order: t.
      point: σ, ε and payoff.
    """
    scaled = rest.scaled(point.noise_multiplier)
    parts = np.asarray(_glance(scaled, float(order), chunked.seed_key(0)))
    return _tilt(ceilings, order, point, _kept(np.mean(parts, axis=0), parts))


def choose(
    rest: Rest,
    ceilings: Ceilings,
    start: float,
    point: Point,
    trial: Trial,
    samples: int,
) -> BlocksPilot | None:
    """The pilot of the order whose bound should be the least; None where no order is of use.

    Args:
      rest: what is sampled of C, for σ = 1.
      ceilings: at the point's σ.
      start: t of the "mean" proposal: the best order lies mostly above it.
      point: σ, ε and payoff.
      trial: what the bound will be drawn with; the key is of the pilots.
      samples: of one pilot.
    """

    def at(step: int) -> tuple[float, BlocksPilot | None]:
        found = tilt(rest, ceilings, start * _STEP**step, point)
        if min(found.detail.log_parts) < math.log(_LEAST_KEPT):
            return math.inf, None
        key = chunked.subkey(trial.key, step + _STEPS)
        taken = pilot(rest, ceilings, found, point, samples, key)
        return taken.expected(trial.samples, trial.beta)[1], taken

    if not start > 0:
        return None
    step, (least, best) = 3, at(3)
    for way in (1, -1):
        while abs(step + way) < _STEPS:
            value, taken = at(step + way)
            if taken is None or (value >= least and least < math.inf):
                break
            step, least, best = step + way, value, taken
        if step > 3 and least < math.inf:
            break  # upwards it fell
    return best if least < math.inf else None


@float64
def pilot(
    rest: Rest, ceilings: Ceilings, tilt: Tilt, point: Point, samples: int, key: jax.Array
) -> BlocksPilot:
    """What samples of R look like; with it κ from all their candidates.

    Args:
      rest: what is sampled of C, for σ = 1.
      ceilings: at the point's σ.
      tilt: as :func:`tilt` gives it at this point.
      point: σ, ε and payoff.
      samples: at least so many.
      key: randomness.
    """
    seen, used = _total(rest, tilt, point, samples, key)
    means = np.asarray(seen.kept) / used
    mean, square = (float(x) / used for x in seen.normalizer[:2])
    spread = math.sqrt(max(square - mean**2, 0.0)) / mean if mean > 0 else math.inf
    kept = Kept(tuple(float(x) for x in np.log(means)), spread)
    return BlocksPilot(_tilt(ceilings, tilt.order, point, kept), seen.values, used)


@float64
def bound(
    rest: Rest, ceilings: Ceilings, tilt: Tilt, point: Point, bet: int, trial: Trial
) -> UpperBound:
    """H(Q, P) is at most this, except with the trial's β.

    Args:
      rest: what is sampled of C, for σ = 1.
      ceilings: at the point's σ.
      tilt: the proposal at this point; κ comes from it.
      point: σ, ε and payoff.
      bet: against f/B, chosen without the trial's samples.
      trial: samples, β and key.
    """
    seen, used = _total(rest, tilt, point, trial.samples, trial.key)
    log_parts = np.array(tilt.detail.log_parts)
    log_largest = _log_largest(log_parts)
    # the bet that is best for the spread that was expected
    mean = math.exp(-log_largest)
    deviation = max(tilt.detail.spread, 1e-6) * mean
    ideal = math.sqrt(2 * math.log(2 / trial.beta) / used) / deviation
    against = int(np.argmin(np.abs(np.log(np.array(betting.BETS) / (ideal / (1 + ideal * mean))))))
    scaled = betting.upper_bound(
        float(seen.normalizer.log_wealth[against]), against, used, trial.beta / 2
    )
    if not scaled > 0:  # no number either
        log_normalizer = math.nan
    else:
        average = min(math.log(min(scaled, 1.0)) + log_largest + _ROUNDING, log_largest)
        log_normalizer = float(np.sum(log_parts)) + len(log_parts) * average
    # each A_g <= 1
    proven = _log_ceiling(ceilings, tilt.order, point) + min(log_normalizer, 0.0)
    if math.isnan(log_normalizer):
        proven = math.nan
    found = upper_bound(
        tilt._replace(log_ceiling=proven),
        seen.values,
        used,
        bet=bet,
        beta=trial.beta / 2,
        uniforms=1 + len(log_parts),
    )
    return found._replace(value=found.value if math.isfinite(proven) else math.nan)


def _tilt(ceilings: Ceilings, order: float, point: Point, kept: Kept) -> Tilt:
    log_ceiling = _log_ceiling(ceilings, order, point) + sum(kept.log_parts)
    return Tilt(KIND, float(order), log_ceiling, kept)


def _log_ceiling(ceilings: Ceilings, order: float, point: Point) -> float:
    """log B without Π A_g."""
    half, square = ceilings.mean_square / 2, ceilings.square_of_mean
    return order * half + order**2 * square / 2 + _log_peak(order, point)


def _log_peak(order: float, point: Point) -> float:
    return float(point.payoff.log_peak(order) - order * point.epsilon)


def _kept(means: np.ndarray, parts: np.ndarray) -> Kept:
    """κ from values of a_g, shape (candidates, K)."""
    with np.errstate(divide="ignore", invalid="ignore"):  # none of a throw's: of no use, and seen
        average = np.mean(parts / means, axis=1)
        return Kept(tuple(float(x) for x in np.log(means)), float(np.std(average)))


def _log_largest(log_parts: np.ndarray) -> float:
    """log of mean κ."""
    return float(np.logaddexp.reduce(-log_parts) - math.log(len(log_parts)))


def _total(rest: Rest, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> tuple[_Seen, int]:
    log_parts = np.array(tilt.detail.log_parts)
    weights = np.exp(-log_parts - _log_largest(log_parts)) / len(log_parts)
    seen: _Seen
    seen, used = chunked.total(
        _blocks,
        key,
        samples,
        rest.patterns.iterations,
        rest.scaled(point.noise_multiplier),
        float(point.epsilon),
        float(tilt.order),
        _log_peak(tilt.order, point),
        point.payoff,
        weights,
    )
    return seen, used


# --- kernels -------------------------------------------------------------------------------------


class _Throws:
    """ℓ and a of X, by throw.

    Args:
      rest: in noise units.
    """

    def __init__(self, rest: Rest) -> None:
        self.rest, self.patterns = rest, rest.patterns
        patterns, corner = self.patterns, corners(self.patterns)
        late = corner.shape[-1]
        self.early = patterns.bins - late
        self.part = self.early / patterns.bins
        self.half = squared_norms(patterns) / 2
        means = jnp.sum(corner, axis=1) / patterns.bins  # h: (K - 1, early bins)
        self.before = jnp.pad(means, ((1, 0), (0, patterns.bins - late)))

    def parts(self, products: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """By throw (samples, K): log mean e^u and mean u of early bins, sum of u of late ones.

        Args:
          products: <M, X>, shape (samples, K·b).
        """
        u = (products - self.half).reshape(-1, *self.before.shape) - self.before
        early = u[:, :, : self.early]
        log_means = jax.scipy.special.logsumexp(early, axis=2) - math.log(self.early)
        return log_means, jnp.mean(early, axis=2), jnp.sum(u[:, :, self.early :], axis=2)

    def keeping(self, x: jax.Array, order: jax.Array) -> jax.Array:
        """a_g, shape (samples, K)."""
        log_means, means, _ = self.parts(noise(self.patterns, x))  # which M' would not change
        return jnp.exp(jnp.minimum(-order * self.part * (log_means - means), 0.0))

    def bound_and_loss(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """ℓ and Y."""
        products = self.rest.noise(x)
        log_means, _, late = self.parts(products)
        below = jnp.sum(late / self.patterns.bins + self.part * log_means, axis=1)
        return below + self.rest.shift**2 / 2, self.rest.ratio(products)


@_quick.jit
def _glance(scaled: Rest, order: jax.Array, key: jax.Array) -> jax.Array:
    """a_g of a few candidates, always the same: shape (candidates, K)."""
    z = jax.random.normal(key, (_GLANCE, scaled.patterns.iterations))
    return _Throws(scaled).keeping(z - order * scaled.mean_row(), order)


def _blocks(
    key: jax.Array,
    size: int,
    rest: Rest,
    epsilon: jax.Array,
    order: jax.Array,
    log_peak: jax.Array,
    payoff: Any,
    weights: jax.Array,
) -> _Seen:
    throws, patterns = _Throws(rest), rest.patterns
    count = patterns.throws
    centre = -order * rest.mean_row()

    def candidates(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        noise_key, coin_key = jax.random.split(jax.random.fold_in(key, number))
        x = centre + jax.random.normal(noise_key, (size, patterns.iterations))
        chance = throws.keeping(x, order)
        keep = jax.random.uniform(coin_key, chance.shape) < chance
        return x.reshape(size, count, -1), chance, keep

    def put(rows: jax.Array, filled: jax.Array, x: jax.Array, keep: jax.Array) -> Any:
        place = filled + jnp.cumsum(keep, axis=0) - 1
        place = jnp.where(keep, place, size)  # beyond the end: dropped
        rows = rows.at[place, jnp.arange(count)].set(x, mode="drop")
        return rows, filled + jnp.sum(keep, axis=0)

    def more(state: Any) -> jax.Array:
        number, _, filled = state
        result: jax.Array = (jnp.min(filled) < size) & (number < _ROUNDS)
        return result

    def another(state: Any) -> Any:
        number, rows, filled = state
        x, _, keep = candidates(number)
        return number + 1, *put(rows, filled, x, keep)

    # those of the first round are as many as the samples: the normalizer is bounded by them
    x, chance, keep = candidates(jnp.zeros((), int))
    empty = jnp.full(x.shape, jnp.nan)
    start = jnp.ones((), int), *put(empty, jnp.zeros(count, int), x, keep)
    _, rows, _ = jax.lax.while_loop(more, another, start)
    below, loss = throws.bound_and_loss(rows.reshape(size, -1))
    value = jnp.exp(order * below + payoff.log_value(epsilon + loss) - log_peak)
    return _Seen(sums(value), sums(chance @ weights), jnp.sum(chance, axis=0))
