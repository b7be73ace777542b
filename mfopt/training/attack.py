"""The audit's attacker: what it knows of a unit's participations under each sampling scheme.

Two tables, by scheme: the likelihood ratio of a released sequence with and without a unit, and the
participations of a unit, to simulate with. A third party adds a scheme by registering both::

    @attack.log_likelihood_ratio.register
    def _(scheme: MyScheme, strategy, white, noise_multiplier): ...
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import special

from mfopt import _check
from mfopt.sampling import BallsInBins, CyclicPoisson, FixedBatch, FixedOrder, Poisson, Scheme
from mfopt.strategies import Strategy


@functools.singledispatch
def log_likelihood_ratio(
    scheme: Scheme, strategy: Strategy, white: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    """log P(C y | unit present) / P(C y | absent) for each unit, up to a constant.

    Exact for balls-in-bins and fixed order; for schemes that draw afresh in each iteration, exact
    where the columns of C that one unit can use are orthogonal.

    Args:
        scheme: the sampling; picks the entry of this table.
        strategy: C.
        white: (n, m), C times the released sums in units of the bound; column i for unit i.
        noise_multiplier: σ.

    Returns:
        (m,).

    Raises:
        UsageError: nothing is registered for the scheme.
    """
    raise _unknown(scheme)


@functools.singledispatch
def participations(scheme: Scheme, units: int, rng: np.random.Generator) -> np.ndarray:
    """Participations of simulated units, shape (units, n) of bool; unit i alike in both tables.

    Raises:
        UsageError: nothing is registered for the scheme.
    """
    raise _unknown(scheme)


def _unknown(scheme: Scheme) -> Exception:
    known = sorted(
        cls.kind
        for cls in log_likelihood_ratio.registry
        if issubclass(cls, Scheme) and cls != Scheme
    )
    return _check.reject(
        "sampling",
        scheme,
        "no attack is known on this scheme, so a run of it cannot be audited",
        f"Register one with mfopt.training.attack. Registered: {', '.join(known)}.",
    )


def _of_modes(
    strategy: Strategy, scheme: BallsInBins | FixedOrder, white: np.ndarray, sigma: float
) -> np.ndarray:
    """log ratio for each bin that a unit could be in, shape (bins, m)."""
    modes = np.asarray(strategy.modes(BallsInBins(scheme.bins, scheme.epochs)))
    result: np.ndarray = (modes.T @ white - 0.5 * np.sum(modes**2, axis=0)[:, None]) / sigma**2
    return result


@log_likelihood_ratio.register
def _(
    scheme: BallsInBins, strategy: Strategy, white: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    each = _of_modes(strategy, scheme, white, noise_multiplier)
    result: np.ndarray = special.logsumexp(each, axis=0) - np.log(scheme.bins)
    return result


@log_likelihood_ratio.register
def _(
    scheme: FixedOrder, strategy: Strategy, white: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    unit = np.arange(white.shape[1])
    return _of_modes(strategy, scheme, white, noise_multiplier)[unit % scheme.bins, unit]


@participations.register(BallsInBins)
@participations.register(FixedOrder)
def _(scheme: BallsInBins | FixedOrder, units: int, rng: np.random.Generator) -> np.ndarray:
    # every bin equally often: balls-in-bins without the noise of throwing
    result: np.ndarray = (
        np.arange(scheme.iterations) % scheme.bins == (np.arange(units) % scheme.bins)[:, None]
    )
    return result


def _independent(
    strategy: Strategy, white: np.ndarray, sigma: float, chance: float, groups: int
) -> np.ndarray:
    """A coin of ``chance`` in every iteration of the unit's group, which is one of ``groups``."""
    columns = np.asarray(strategy.materialize(len(white)))
    each = (columns.T @ white - 0.5 * np.sum(columns**2, axis=0)[:, None]) / sigma**2
    with np.errstate(divide="ignore"):
        steps = np.logaddexp(np.log1p(-chance), np.log(chance) + each)
    by_group = np.stack([steps[group::groups].sum(axis=0) for group in range(groups)])
    result: np.ndarray = special.logsumexp(by_group, axis=0) - np.log(groups)
    return result


def _coins(n: int, units: int, rng: np.random.Generator, chance: float, groups: int) -> np.ndarray:
    chosen = rng.random((units, n)) < chance
    result: np.ndarray = chosen & (np.arange(n) % groups == (np.arange(units) % groups)[:, None])
    return result


@log_likelihood_ratio.register
def _(
    scheme: Poisson, strategy: Strategy, white: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    return _independent(strategy, white, noise_multiplier, scheme.probability, 1)


@log_likelihood_ratio.register
def _(
    scheme: CyclicPoisson, strategy: Strategy, white: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    return _independent(strategy, white, noise_multiplier, scheme.probability, scheme.bands)


@log_likelihood_ratio.register
def _(
    scheme: FixedBatch, strategy: Strategy, white: np.ndarray, noise_multiplier: float
) -> np.ndarray:
    chance = scheme.batch_size / scheme.population
    return _independent(strategy, white, noise_multiplier, chance, 1)


@participations.register
def _(scheme: Poisson, units: int, rng: np.random.Generator) -> np.ndarray:
    return _coins(scheme.iterations, units, rng, scheme.probability, 1)


@participations.register
def _(scheme: CyclicPoisson, units: int, rng: np.random.Generator) -> np.ndarray:
    return _coins(scheme.iterations, units, rng, scheme.probability, scheme.bands)


@participations.register
def _(scheme: FixedBatch, units: int, rng: np.random.Generator) -> np.ndarray:
    return _coins(scheme.iterations, units, rng, scheme.batch_size / scheme.population, 1)
