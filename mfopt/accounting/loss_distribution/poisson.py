"""Sampling schemes with independent rounds, as mixture-of-Gaussians rounds.

Poisson sampling with independent noise (DP-SGD), a group of K under it (Ganesh 2024, Theorem
3.1; Charles et al. 2024, Theorem 1), a banded C under cyclic Poisson sampling, and fixed batches
(Ganesh 2024, Theorem 3.3). In all of them an iteration touches a unit with fresh randomness and
the iterations' contributions do not overlap, so the account is a composition of rounds, each at
the noise multiplier σ / |c| of its column c. A unit knows its group of iterations: what dominates
every group is the one that has as its j-th longest column the longest j-th of any group, since
noise multipliers only have to fall for a round to dominate, and the order of rounds does not
matter. It is a group itself wherever one has the longest columns throughout. Where
the number of units stays ("replace", and fixed batches under "zero-out") a round is an
:class:`~mfopt.accounting.loss_distribution.exchange.ReplacementRound`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt.accounting import unamplified
from mfopt.accounting.loss_distribution.exchange import PublicMixture, ReplacementRound
from mfopt.accounting.loss_distribution.grid import RepeatedRound
from mfopt.accounting.loss_distribution.mixture import Mixture, Round
from mfopt.accounting.loss_distribution.rounds import FINE, RoundsProfile
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

_NORMS = 32  # different norms of columns, beyond which close ones are taken as one
_ALIKE = 1e-12  # norms that differ by rounding

Columns = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Composition of rounds of one mixture, each at noise multiplier σ over its column's norm.

    Attributes:
      mixture: one round: its random sensitivity, in units of the clip norm, or another pair.
      columns: (number of rounds, norm of their columns of C), the shortest first.
      exact: whether some data attains the account, up to discretization.
    """

    mixture: Round
    columns: Columns
    exact: bool

    @property
    def rounds(self) -> int:
        """Number of compositions."""
        return sum(count for count, _ in self.columns)

    @property
    def longest(self) -> float:
        """Largest norm of a column."""
        return self.columns[-1][1]

    @property
    def length(self) -> float:
        """Norm of all columns together: of a contribution of norm 1 in every round."""
        return math.sqrt(sum(count * norm**2 for count, norm in self.columns))

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> RoundsProfile:
        """The privacy profile at this σ, for C as stored."""
        return RoundsProfile.of(self.at(noise_multiplier), accuracy)

    def at(self, noise_multiplier: float) -> list[RepeatedRound]:
        """The rounds of each norm at this σ."""
        return [
            RepeatedRound(self.mixture, count, noise_multiplier / norm)
            for count, norm in self.columns
        ]


def independent(
    strategy: Strategy, scheme: Scheme, group_size: int, adjacency: Adjacency = "add-remove"
) -> Rounds:
    """The rounds of a scheme of :data:`MIXTURES`.

    A unit can take part only in its group of iterations (one of them all but under cyclic Poisson
    sampling, of which every ``scheme.bands``-th iteration is one), where the columns of C must not
    overlap (Choquette-Choo et al. 2023, Theorem 4): given what was released before, the rows from
    one of its iterations to the next are one subsampled Gaussian mechanism that the unit moves by
    its contribution times one column, in both directions and with any signs in C.

    Args:
      strategy, scheme: C, and who takes part.
      group_size, adjacency: K, and how neighbours differ; units of a cyclic scheme take part in the
        same group of iterations.

    Raises:
      UsageError: C has more bands than the scheme has groups of iterations, or the scheme has no
        such group of units.
    """
    n, groups = scheme.iterations, getattr(scheme, "bands", 1)
    width = unamplified.bands(strategy, n)
    if width > groups:
        rule = f"C has {width} bands; {scheme.kind} is accounted for at most {groups}, where a "
        way_out = f"Use cyclic-poisson with bands >= {width}, or balls-in-bins for any C >= 0."
        rule += "unit's participations do not overlap in C x"
        raise _check.reject("strategy", strategy.kind, rule, way_out)
    mixture = MIXTURES[type(scheme)](scheme, group_size, adjacency)
    rounds, attained = (Rounds(mixture, columns, True) for columns in _columns(strategy, n, groups))
    # only a group that has the longest columns throughout attains the account
    exact = attained.length >= rounds.length * (1 - 4 * _ALIKE)
    cut = isinstance(scheme, TruncatedPoisson) and scheme.full * scheme.kept > 0
    return dataclasses.replace(rounds, exact=exact and not cut)


def _poisson_batch(scheme: Any, group_size: int, adjacency: Adjacency) -> Round:
    """Units drawn independently of each other and of others (a Poisson or a cyclic scheme)."""
    counts = Mixture.binomial(group_size, scheme.probability)
    return ReplacementRound.replaced_in_poisson_batch(counts) if adjacency == "replace" else counts


def _fixed_batch(scheme: FixedBatch, group_size: int, adjacency: Adjacency) -> Round:
    """A hypergeometric number of the group's units, in others' places.

    The two data sets differ by the group; the larger has ``scheme.population`` units, so that
    the account also covers data sets that are larger.
    """
    if group_size > scheme.population:
        raise _check.reject("group_size", group_size, f"the data set has {scheme.population} units")
    remaining = scheme.population - group_size
    if adjacency == "add-remove" and scheme.batch_size > remaining:
        rule = f"without the group {remaining} units are left to draw from"
        raise _check.reject("batch_size", scheme.batch_size, rule)
    counts = Mixture.hypergeometric(group_size, scheme.batch_size, scheme.population)
    return _IN_PLACE[adjacency](counts)


def _cut_batch(scheme: TruncatedPoisson, group_size: int, adjacency: Adjacency) -> Round:
    """One unit under Poisson sampling with batches that are cut.

    Where the others leave room, it is as without the cut. Where they alone fill the batch, which
    the unit does not move, the batch is a uniform one of the others, and the unit, if it is kept,
    has the place of one of them: a fixed batch. How many others were drawn is not told, so that
    the unit's chance there is the mean over them, ``scheme.kept``. (dp_accounting has the same two
    cases, the second as a replacement.)
    """
    if group_size > 1:
        rule = "batches that are cut are accounted for one unit"
        way_out = "Use Poisson sampling, whose account covers groups."
        raise _check.reject("group_size", group_size, rule, way_out)
    plain, full, kept = _poisson_batch(scheme, 1, adjacency), scheme.full, scheme.kept
    if not full * kept > 0:
        return plain
    replacement = _IN_PLACE[adjacency](Mixture.binomial(1, kept))
    return replacement if full == 1 else PublicMixture(plain, replacement, full)


# by exact class: a subclass may let units take part otherwise
MIXTURES: dict[type[Scheme], Callable[[Any, int, Adjacency], Round]] = {
    Poisson: _poisson_batch,
    CyclicPoisson: _poisson_batch,
    FixedBatch: _fixed_batch,
    TruncatedPoisson: _cut_batch,
}
# rounds in which units, whose number has this law, are in others' places
_IN_PLACE: dict[Adjacency, Callable[[Mixture], Round]] = {
    "add-remove": lambda counts: dataclasses.replace(
        counts, sensitivities=2 * counts.sensitivities
    ),
    "zero-out": ReplacementRound.zeroed_in_fixed_batch,
    "replace": ReplacementRound.replaced_in_fixed_batch,
}


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
    return Rounds(Mixture.binomial(1, 1.0), ((1, moved * times),), exact)


def attack(
    strategy: Strategy, scheme: Scheme, group_size: int, adjacency: Adjacency
) -> Rounds | None:
    """Rounds that some data sets attain: an account is at least theirs. None for other schemes.

    The group's units contribute one vector throughout, in the group of iterations of the longest
    columns; under "replace" its opposite in the other data set. Others contribute nothing, in
    fixed batches that opposite: a unit takes the place of one of them. Without sampling all units
    contribute in one explicit pattern.

    Args:
      strategy, scheme: C, and who takes part.
      group_size, adjacency: K, and how neighbours differ.
    """
    if isinstance(scheme, FixedOrder | MinSeparation):
        return public(strategy, scheme, group_size, adjacency, below=True)
    if type(scheme) not in MIXTURES:
        return None
    if isinstance(scheme, TruncatedPoisson) and scheme.full < 1:
        probability = (1 - scheme.full) * scheme.probability + scheme.full * scheme.kept
        scheme = Poisson(probability, scheme.iterations)
    _, below = _columns(strategy, scheme.iterations, getattr(scheme, "bands", 1))
    account = independent(strategy, scheme, group_size, adjacency)
    return dataclasses.replace(account, columns=below, exact=True)


@functools.lru_cache(maxsize=4)  # an account asks for the same C several times
def _columns(strategy: Strategy, n: int, groups: int) -> tuple[Columns, Columns]:
    """Columns that dominate those of any group of iterations, and those of the longest group."""
    norms, count = unamplified.column_norms(strategy, n), -(-n // groups)
    if not norms.strides[0]:  # one number for all columns, however many
        norm = float(norms[0])
        return ((count, norm * (1 if norm == 1 else 1 + _ALIKE)),), ((count, norm),)
    of_groups = np.sort(
        np.append(norms, np.zeros(count * groups - n)).reshape(count, groups), axis=0
    )
    longest = of_groups[:, np.argmax(np.sum(of_groups**2, axis=0))]
    above, below = (_levels(columns) for columns in (np.max(of_groups, axis=1), longest))
    return (
        tuple((size, high if high == 1 else high * (1 + _ALIKE)) for size, high, _ in above),
        tuple((size, low * (1 - _ALIKE)) for size, _, low in below),
    )


def _levels(norms: np.ndarray) -> list[tuple[int, float, float]]:
    """(how many, largest, least) of increasing ``norms`` that are taken as one; none of 0."""
    norms = norms[norms > 0]
    cuts = np.diff(norms, prepend=-1.0) > _ALIKE * norms[-1]
    if np.count_nonzero(cuts) > _NORMS:
        level = np.floor(norms / norms[-1] * (_NORMS - 1))
        cuts = np.diff(level, prepend=-1.0) > 0
    parts = np.split(norms, np.flatnonzero(cuts)[1:])
    return [(part.size, float(part[-1]), float(part[0])) for part in parts]
