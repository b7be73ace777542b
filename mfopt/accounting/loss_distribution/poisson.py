"""Sampling schemes with independent rounds, as mixture-of-Gaussians rounds.

Poisson sampling with independent noise (DP-SGD), a group of K under it (Ganesh 2024, Theorem
3.1; Charles et al. 2024, Theorem 1), a banded C under cyclic Poisson sampling, and fixed batches
(Ganesh 2024, Theorem 3.3). In all of them an iteration touches a unit with fresh randomness and
the iterations' contributions do not overlap, so the account is a composition of rounds. Where
the number of units stays ("replace", and fixed batches under "zero-out") a round is an
:class:`~mfopt.accounting.loss_distribution.exchange.ReplacementRound`, known for one unit.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.accounting import unamplified
from mfopt.accounting.loss_distribution.exchange import PublicMixture, ReplacementRound
from mfopt.accounting.loss_distribution.mixture import Mixture, Round
from mfopt.sampling import (
    Adjacency,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    MinSeparation,
    Poisson,
    Scheme,
    TruncatedPoisson,
)
from mfopt.strategies import Strategy

_ATTACKERS = 32  # units of a group that attack together where both data sets have them


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Composition of ``rounds`` copies of one mixture, at noise multiplier σ / ``scale``.

    Attributes:
      mixture: one round: its random sensitivity, in units of the clip norm, or another pair.
      rounds: number of compositions.
      scale: largest norm of a column of C: the rounds have noise multiplier σ / scale.
      exact: whether some data attains the account, up to discretization.
    """

    mixture: Round
    rounds: int
    scale: float
    exact: bool


def poisson(
    strategy: Strategy, scheme: Poisson, group_size: int, adjacency: Adjacency = "add-remove"
) -> Rounds:
    """DP-SGD and its groups: C must be diagonal, iterations then release independent sums.

    Args:
      strategy, scheme: C, and who takes part.
      group_size: K; under "replace" the rounds are of one unit.
      adjacency: how neighbours differ.

    Raises:
      UsageError: C has more than one band: a unit's participations overlap in C x, and no exact
        analysis under plain Poisson sampling is known.
    """
    n = scheme.iterations
    if unamplified.bands(strategy, n) > 1:
        rule = "plain Poisson sampling is accounted for C = I only"
        way_out = "Use cyclic-poisson with as many bands as C has, or balls-in-bins for any C >= 0."
        raise _check.reject("strategy", strategy.kind, rule, way_out)
    scale, even = _scale(strategy, n, 1)
    return Rounds(_drawn(group_size, scheme.probability, adjacency), n, scale, even)


def cyclic_poisson(
    strategy: Strategy, scheme: CyclicPoisson, adjacency: Adjacency = "add-remove"
) -> Rounds:
    """Banded C: iterations / bands rounds at the probability within the group.

    A unit can take part only every ``scheme.bands`` iterations, where the columns of C do not
    overlap (Choquette-Choo et al. 2023, Theorem 4). Columns of unequal norm are all given the
    largest one, an upper bound.

    Raises:
      UsageError: C has more bands than the scheme has groups.
    """
    n = scheme.iterations
    width = unamplified.bands(strategy, n)
    if width > scheme.bands:
        rule = f"C has {width} bands: participations would overlap in C x"
        way_out = f"Use cyclic-poisson with bands >= {width}, or balls-in-bins for any C >= 0."
        raise _check.reject("bands", scheme.bands, rule, way_out)
    scale, even = _scale(strategy, n, scheme.bands)
    return Rounds(_drawn(1, scheme.probability, adjacency), scheme.rounds, scale, even)


def fixed_batch(
    strategy: Strategy, scheme: FixedBatch, group_size: int, adjacency: Adjacency = "add-remove"
) -> Rounds:
    """Batches of fixed size: twice a hypergeometric number of the group's units.

    The two data sets differ by the group; the larger has ``scheme.population`` units, so that
    the account also covers data sets that are larger. Where both have as many, by contributions
    that are taken away or replaced, the rounds are of one unit.

    Args:
      strategy, scheme: C, and who takes part.
      group_size, adjacency: K, and how neighbours differ.

    Raises:
      UsageError: the group is larger than the data set, or a batch cannot be drawn without it.
    """
    if group_size > scheme.population:
        raise _check.reject("group_size", group_size, f"the data set has {scheme.population} units")
    remaining = scheme.population - group_size
    if adjacency == "add-remove" and scheme.batch_size > remaining:
        rule = f"without the group {remaining} units are left to draw from"
        raise _check.reject("batch_size", scheme.batch_size, rule)
    n = scheme.iterations
    if unamplified.bands(strategy, n) > 1:
        rule = "fixed batches are accounted for C = I only"
        way_out = "Use balls-in-bins for any C >= 0."
        raise _check.reject("strategy", strategy.kind, rule, way_out)
    scale, even = _scale(strategy, n, 1)
    chance = scheme.batch_size / scheme.population
    if adjacency == "zero-out":
        return Rounds(ReplacementRound.zeroed_in_fixed_batch(chance), n, scale, even)
    if adjacency == "replace":
        return Rounds(ReplacementRound.replaced_in_fixed_batch(chance), n, scale, even)
    mixture = Mixture.hypergeometric(group_size, scheme.batch_size, scheme.population)
    return Rounds(mixture, n, scale, even)


def truncated_poisson(
    strategy: Strategy, scheme: TruncatedPoisson, adjacency: Adjacency = "add-remove"
) -> Rounds:
    """One unit under Poisson sampling with batches that are cut.

    Where the others leave room, it is as without the cut. Where they alone fill the batch, which
    the unit does not move, the batch is a uniform one of the others, and the unit, if it is kept,
    has the place of one of them: a fixed batch. How many others were drawn is not told, so that
    the unit's chance there is the mean over them, ``scheme.kept``. (dp_accounting has the same two
    cases, the second as a replacement.)

    Raises:
      UsageError: C has more than one band.
    """
    plain = poisson(strategy, Poisson(scheme.probability, scheme.iterations), 1, adjacency)
    full, kept = scheme.full, scheme.kept
    if not full * kept > 0:
        return plain
    places: dict[Adjacency, Round] = {
        "add-remove": Mixture(np.array([0.0, 2.0]), np.log([1 - kept, kept])),
        "zero-out": ReplacementRound.zeroed_in_fixed_batch(kept),
        "replace": ReplacementRound.replaced_in_fixed_batch(kept),
    }
    replacement = places[adjacency]
    mixture = replacement if full == 1 else PublicMixture(plain.mixture, replacement, full)
    return dataclasses.replace(plain, mixture=mixture, exact=False)


def _drawn(group_size: int, probability: float, adjacency: Adjacency) -> Round:
    """One round in which units are drawn independently of each other."""
    if adjacency == "replace" and probability > 0:
        return ReplacementRound.replaced_in_poisson_batch(probability)
    return Mixture.binomial(group_size, probability)


def public(
    strategy: Strategy,
    scheme: Scheme,  # FixedOrder or MinSeparation
    group_size: int,
    adjacency: Adjacency,
    *,
    below: bool = False,
) -> Rounds:
    """One Gaussian release, of participations that are not random.

    Args:
      strategy, scheme, group_size, adjacency: as for :func:`attack`.
      below: whether to take one that some data attain, in place of a bound of all.
    """
    times = group_size * (2 if adjacency == "replace" else 1)
    if below:
        moved, exact = unamplified.attained(strategy, scheme), True
    else:
        sensitivity = unamplified.sensitivity(strategy, scheme)
        moved, exact = sensitivity.value, sensitivity.exact
    return Rounds(Mixture.binomial(1, 1.0), 1, moved * times, exact)


def attack(
    strategy: Strategy, scheme: Scheme, group_size: int, adjacency: Adjacency
) -> Rounds | None:
    """Rounds that some data sets attain: an account is at least theirs. None for other schemes.

    The group's units contribute one vector wherever columns of C are long, and nothing where they
    are shorter; under "replace" its opposite in the other data set. Others contribute nothing, in
    fixed batches that opposite: a unit takes the place of one of them. Without sampling all units
    contribute in one explicit pattern.

    Args:
      strategy, scheme: C, and who takes part.
      group_size, adjacency: K, and how neighbours differ.
    """
    if isinstance(scheme, FixedOrder | MinSeparation):
        return public(strategy, scheme, group_size, adjacency, below=True)
    if not isinstance(scheme, Poisson | CyclicPoisson | FixedBatch | TruncatedPoisson):
        return None
    scale, rounds = _longest(strategy, scheme.iterations, getattr(scheme, "bands", 1))
    size, replaced = group_size, adjacency == "replace"
    if replaced or (isinstance(scheme, FixedBatch) and adjacency == "zero-out"):
        size = min(group_size, _ATTACKERS)
    count, mixture = np.arange(1, size + 1), None
    if isinstance(scheme, FixedBatch):
        law = scipy.stats.hypergeom(scheme.population, size, scheme.batch_size)
        if adjacency == "add-remove":
            mixture = Mixture.hypergeometric(size, scheme.batch_size, scheme.population)
        fixed = ReplacementRound.replaced_in_fixed_batch, ReplacementRound.zeroed_in_fixed_batch
        replacement = fixed[not replaced]
    else:
        probability = scheme.probability
        if isinstance(scheme, TruncatedPoisson):
            if scheme.full == 1:
                whole = truncated_poisson(strategy, scheme, adjacency)
                return dataclasses.replace(whole, scale=scale, rounds=rounds)
            probability = (1 - scheme.full) * probability + scheme.full * scheme.kept
        law = scipy.stats.binom(size, probability)
        if not replaced or probability == 0:
            mixture = Mixture.binomial(size, probability)
        replacement = ReplacementRound.replaced_in_poisson_batch
    # less of it is what both data sets have in common: a lower end, whatever rounding does
    attacked: Round = mixture or replacement(*map(float, law.pmf(count) * (1 - 1e-8)))
    return Rounds(attacked, rounds, scale, True)


@functools.lru_cache(maxsize=4)
def _longest(strategy: Strategy, n: int, groups: int) -> tuple[float, int]:
    """(norm, how many iterations of one group have at least it) of which most is to be gained."""
    norms = unamplified.column_norms(strategy, n)
    if not norms.strides[0]:  # one number for all columns, however many
        return float(norms[0]), -(-n // groups)
    best = (0.0, 1)
    for start in range(min(groups, n)):
        falling = np.sort(norms[start::groups])[::-1]
        gain = falling**2 * np.arange(1, falling.size + 1)
        count = int(np.argmax(gain))
        best = max(
            best,
            (float(falling[count]), count + 1),
            key=lambda candidate: candidate[0] ** 2 * candidate[1],
        )
    return best[0] * (1 - 1e-12), best[1]


@functools.lru_cache(maxsize=4)  # an account asks for the same C several times
def _scale(strategy: Strategy, n: int, groups: int) -> tuple[float, bool]:
    """(largest column norm, whether some group of iterations has it throughout).

    Only then, and if that group has as many iterations as any, is the account attained.
    """
    norms = unamplified.column_norms(strategy, n)
    largest = float(np.max(norms if norms.strides[0] else norms[:1]))
    norm, count = _longest(strategy, n, groups)
    exact = count == -(-n // groups) and norm >= largest * (1 - 3e-12)
    return largest * (1 + (0 if largest == 1 else 1e-12)), exact
