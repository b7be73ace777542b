"""Balls-in-bins as a sampled privacy loss: the Gram matrix and the tilts behind it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _float64, _quick
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import float64
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.chain import GroupBound
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import design_point, dominating_pair, kept_bins, multisets, nested
from mfopt.accounting.monte_carlo.count_mixture import CountPair
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.free import Orthogonal
from mfopt.accounting.monte_carlo.group import CountLoss, GroupUnits
from mfopt.accounting.monte_carlo.group import model as group_model
from mfopt.accounting.monte_carlo.kept_bins import KeptBins
from mfopt.accounting.monte_carlo.likelihood import Ceilings, SharedGaussianComponent
from mfopt.accounting.monte_carlo.losses import LikelihoodLoss, remembered
from mfopt.accounting.monte_carlo.protocol import FreeBound, SampledLaw, SampledLoss, law, loss_of
from mfopt.sampling import BallsInBins
from mfopt.strategies import Array, Strategy

_WORTH = 0.005  # of σ, with many bins
_OVERLAP = 1e-6  # relative, far above the rounding of an overlap
_MOST = 2**17  # numbers in a sample of a group: above, samples take too long
_VERY_MANY = 4096  # bins from which on a sample takes so long that less of σ is worth it


@dataclasses.dataclass(frozen=True, eq=False)
class BallsInBinsLoss(LikelihoodLoss):
    """One unit, any C >= 0; the pair is checked: a bound is only as good as its factor."""

    pair: DominatingPair
    name: ClassVar[str] = "balls-in-bins"
    least_samples: ClassVar[int] = 2**14  # clusters spread so little that they are often enough

    def __post_init__(self) -> None:
        object.__setattr__(self, "pair", dominating_pair.check(self.pair))

    @functools.cached_property
    def likelihood(self) -> KeptBins:
        with _float64.scope():
            return KeptBins(*jax.device_put(tuple(self.pair)))

    @functools.cached_property
    def shared(self) -> SharedGaussianComponent | None:  # type: ignore[override]
        return kept_bins.shared(self.pair)

    def ceilings(self, scaled: KeptBins, common: float) -> Ceilings:
        return kept_bins.ceilings(scaled, common)

    @remembered
    def tuples(self, noise_multiplier: float, common: float) -> tuple[float, ...]:
        return kept_bins.tuples(np.asarray(self.pair.gram) / noise_multiplier**2 - common)

    @property
    def _in_pieces(self) -> bool:
        return isinstance(self.pair.factor, nested.HierarchicalLowRank)

    @property
    def work(self) -> int:
        if self._in_pieces:
            return nested.WORK
        # the noise of a sample takes the square of that, which counts where bins are many
        return self.pair.bins * max(1, self.pair.bins // design_point.MOST)

    # with many bins a sample costs so much that the least number is nearly always enough
    @property
    def worth(self) -> float:
        if not self._in_pieces:
            return super().worth
        return _WORTH * math.sqrt(max(1.0, self.pair.bins / _VERY_MANY))

    @property
    def sensitivity(self) -> float:
        """Largest mode norm."""
        return math.sqrt(float(np.max(np.diagonal(np.asarray(self.pair.gram)))))

    def free_bounds(self) -> Sequence[FreeBound]:
        squared = dominating_pair.orthogonal_norm(self.pair)
        exact = () if squared is None else (Orthogonal(self.pair.bins, squared),)
        return *exact, *super().free_bounds()

    def group(self, size: int) -> SampledLoss | None:
        return multisets.MultisetLoss.of(self, size)


loss_of.register(DominatingPair)(BallsInBinsLoss)


@dataclasses.dataclass(frozen=True)
class BallsInBinsLaw(SampledLaw):
    """δ̂ by design points: everything follows from G and a factor of it."""

    scheme: BallsInBins
    divisible: ClassVar[bool] = True

    def loss(self, strategy: Strategy) -> BallsInBinsLoss:
        return BallsInBinsLoss(dominating_pair.exact(strategy, self.scheme))

    def check(self, strategy: Strategy) -> None:
        strategy.check_entries(self.scheme.iterations)

    def coarse(self) -> SampledLaw:
        if self.scheme.bins <= design_point.MOST:
            return self
        return GroupedLaw(self.scheme, -(-self.scheme.bins // design_point.MOST))

    def draws(self, key: jax.Array, samples: int) -> design_point.Draws:
        return design_point.draw(key, samples, self.scheme.bins)

    def quadratic(self, strategy: Strategy) -> jax.Array:
        """G."""
        return jnp.asarray(strategy.gram(self.scheme))

    def product(self, slope: jax.Array, strategy: Strategy) -> jax.Array:
        """<H, G>, by the structure of C where it has one."""
        return strategy.gram_product(slope, self.scheme)

    def prepared(self, quadratic: jax.Array) -> DominatingPair:
        return dominating_pair.jittered(quadratic)

    def log_scale(self, reduced: DominatingPair) -> jax.Array:
        """log of the root mean square norm of the modes."""
        return jnp.log(jnp.mean(jnp.diagonal(reduced.gram))) / 2

    def norm(self, reduced: DominatingPair) -> jax.Array:
        """Largest mode norm."""
        return jnp.sqrt(jnp.max(jnp.diagonal(reduced.gram)))

    def proposal(self, reduced: DominatingPair, noise_multiplier: Scalar, epsilon: Scalar) -> Array:
        return design_point.placed(reduced.gram, noise_multiplier, epsilon)

    def frozen(
        self, reduced: DominatingPair, proposal: jax.Array, draws: design_point.Draws
    ) -> design_point.Terms:
        return design_point.exponents(reduced, proposal, draws)

    def log_delta(self, terms: design_point.Terms, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
        return design_point.log_delta(terms, log_sigma, epsilon)


law.register(BallsInBins)(BallsInBinsLaw)


class Groups(NamedTuple):
    """Moments of the modes of groups of neighbouring bins.

    Attributes:
      means: Gram matrix of the groups' mean modes, (groups, groups).
      squares: mean squared norm of each group's modes, (groups,).
    """

    means: Array
    squares: Array


class _Grouped(NamedTuple):
    """A proposal, and how far a group's mode is from its mean mode.

    Attributes:
      weights: of :func:`.design_point.placed`, for the groups' modes.
      share: of what ``squares`` is above the means' own, (groups,).
    """

    weights: Array
    share: Array


@dataclasses.dataclass(frozen=True)
class GroupedLaw(SampledLaw):
    """Neighbouring bins as one: near balls-in-bins with many bins, at the cost of few.

    Over a group log mean_i e^(u_i) is taken for e^u of one Gaussian mode, with the overlaps of the
    groups' mean modes and, with itself, with what gives the group's likelihood ratio the second
    moment that it has under Q: within a group of s bins let modes overlap by o and have squares
    o + p, in noise units; then mean_ik e^(S_ik) = e^(o + log(1 + (e^p − 1)/s)), of which the mean
    mode alone has o + p/s. (At 8 × 256, ε = 2, groups of 8: σ is 0.35% too small with it, 1.2%
    without.) The share of p is frozen with the proposal. Nothing is proven of this law: searches
    are made with it. Groups have ``size`` bins, the last may have fewer.
    """

    scheme: BallsInBins
    size: int
    divisible: ClassVar[bool] = True

    def loss(self, strategy: Strategy) -> BallsInBinsLoss:
        return BallsInBinsLoss(dominating_pair.exact(strategy, self.scheme))

    def near(self, strategy: Strategy) -> BallsInBinsLoss:
        return BallsInBinsLoss(_mean_pair(self.quadratic(strategy).means))

    def draws(self, key: jax.Array, samples: int) -> design_point.Draws:
        return design_point.draw(key, samples, -(-self.scheme.bins // self.size))

    def quadratic(self, strategy: Strategy) -> Groups:
        return Groups(*strategy.grouped_gram(self.scheme, self.size))

    def product(self, slope: Groups, strategy: Strategy) -> jax.Array:
        return strategy.grouped_product(*slope, self.scheme, self.size)

    def prepared(self, quadratic: Groups) -> Groups:
        return quadratic

    def log_scale(self, reduced: Groups) -> jax.Array:
        """log of the root mean square norm of the modes, or about that."""
        return jnp.log(jnp.mean(reduced.squares)) / 2

    def norm(self, reduced: Groups) -> jax.Array:
        """Largest mode norm, or about that."""
        return jnp.sqrt(jnp.max(reduced.squares))

    def proposal(self, reduced: Groups, noise_multiplier: Scalar, epsilon: Scalar) -> _Grouped:
        gram, share = _merged(reduced, noise_multiplier, self.scheme.bins, self.size)
        return _Grouped(design_point.placed(gram, noise_multiplier, epsilon), share)

    def frozen(
        self, reduced: Groups, proposal: _Grouped, draws: design_point.Draws
    ) -> design_point.Terms:
        pair = dominating_pair.jittered(_with_share(reduced, proposal.share))
        return design_point.exponents(pair, proposal.weights, draws)

    def log_delta(self, terms: design_point.Terms, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
        return design_point.log_delta(terms, log_sigma, epsilon)


@functools.partial(_quick.jit, static_argnums=(2, 3))
def _merged(
    groups: Groups, noise_multiplier: Scalar, bins: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """The Gram matrix of the groups' modes at this σ, and the share of ``squares`` in it."""
    counts = np.minimum(size, bins - size * np.arange(-(-bins // size)))
    above = groups.squares - jnp.diagonal(groups.means)
    own = above / noise_multiplier**2 * counts / np.maximum(counts - 1, 1)  # p
    excess = jnp.log1p(jnp.expm1(own) / counts) - own / counts
    share = jnp.where(above > 0, excess * noise_multiplier**2 / jnp.where(above > 0, above, 1), 0)
    return _with_share(groups, share), share


def _with_share(groups: Groups, share: Array) -> jax.Array:
    above = groups.squares - jnp.diagonal(groups.means)
    return jnp.asarray(groups.means) + jnp.diag(share * above)


@float64
def _mean_pair(gram: Array) -> DominatingPair:
    """The pair of groups' mean modes."""
    return DominatingPair(*map(np.asarray, _jittered(jnp.asarray(gram))))


_jittered = _quick.jit(dominating_pair.jittered)


def orthogonal_norm(mechanism: Any) -> float | None:
    """The squared norm of the modes where all are orthogonal and equally long, else None.

    Raises:
      UsageError: C has negative entries, and its first two modes do not overlap.
    """
    strategy, scheme = mechanism.strategy, mechanism.sampling
    if strategy.is_identity:
        return dominating_pair.rounded_norm(float(scheme.epochs))
    column = strategy.toeplitz_column(scheme.iterations)
    if column is not None and column[0] > 0 and not np.any(column[1:]):
        # a multiple of C = I: without a Gram matrix, for any number of bins
        return dominating_pair.rounded_norm(scheme.epochs * float(column[0]) ** 2)
    two_bins = np.arange(scheme.iterations)[:, None] % scheme.bins == [0, 1]
    mode, second_mode = np.asarray(strategy.widened().multiply(two_bins.astype(float))).T
    if mode @ second_mode > _OVERLAP * (mode @ mode):  # it is refuted without a Gram matrix
        return None
    return dominating_pair.orthogonal_norm(dominating_pair.exact(strategy, scheme))


def whole_profile(mechanism: Any) -> GroupBound:
    """A group by the one-unit profile of orthogonal modes: a bound without samples.

    G <= g·I with g the largest row sum of G >= 0 (Gershgorin), so the pair of any C >= 0 is a
    contraction of that of orthogonal modes of squared norm g, and so dominated by it.
    """
    squared_norm = orthogonal_norm(mechanism)
    if squared_norm is None:
        gram, error = dominating_pair.overlaps(mechanism.strategy, mechanism.sampling)
        rows = float(np.max(np.sum(gram, axis=1))) / (1 - error)
        _check.scale_of_c(math.sqrt(rows))
        squared_norm = dominating_pair.rounded_norm(rows)
    unit = Orthogonal(mechanism.sampling.bins, squared_norm)
    return GroupBound(unit, mechanism.group_size, "balls-in-bins with orthogonal modes")


def is_costly(mechanism: Any) -> bool:
    """True if samples of a group take long: from 6,554 bins on for two units."""
    bins, size = mechanism.sampling.bins, mechanism.group_size
    return size > 1 and not multisets.few(bins, size) and CountPair(bins, size, 1).work > _MOST


def model(
    mechanism: Any, samples: int | None = None, deterministic: bool = False
) -> LossModel | DeterministicBound:
    """The model of a mechanism that is verified rather than computed: a general C, or a group.

    Raises:
      UsageError: C has negative entries (Lemma 3.2 of Choquette-Choo et al. 2024 needs C >= 0).
    """
    size, bins = mechanism.group_size, mechanism.sampling.bins
    # by multisets, where they are few, ceilings are lower than by counts
    if size > 1 and not multisets.few(bins, size):
        squared_norm = orthogonal_norm(mechanism)
        if squared_norm is not None:
            pair = CountPair(bins, size, squared_norm)
            fits = bins > 1 and pair.fits
            return GroupUnits(CountLoss(pair), samples) if fits else whole_profile(mechanism)
    return group_model(mechanism, samples, deterministic)
