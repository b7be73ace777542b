"""Tests of the participations and of the noise of a run against what was accounted for.

Participations are compared with those under other secrets, with neighbouring units (at distances up
to 64) and with the scheme's law; C times the noise, in units of σ, must be independent normal
variables of variance 1 over steps, coordinates and secrets. Each test gives the probability, under
a correct trainer, of a deviation as large as the one found, or an upper bound on it; no limit
theorem is used. One below ``LEVEL`` is a fault. An audit has at most ``OF_CANARIES`` tests, and
``OF_RUN`` of a run that happened, so that it calls a correct trainer faulty with probability at
most ``FALSE_ALARM``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from mfopt.sampling import Scheme, UnitSampler
from mfopt.training import attack

FALSE_ALARM = 1e-4  # of all tests of one audit together
OF_CANARIES, OF_RUN = 40, 20
LEVEL = FALSE_ALARM / (OF_CANARIES + OF_RUN)
_UNITS = 4000  # examined one by one
_LAGS = 64
_COORDINATES = 1000  # compared pair by pair
_TAILS = (1.0, 2.0, 3.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One test: the ``chance`` that a correct trainer deviates as far; 0 if it never does."""

    name: str
    chance: float

    @property
    def deviation(self) -> float:
        """Standard deviations by which a normal variable is off as rarely."""
        return float(stats.norm.isf(capped(self.chance) / 2))

    @property
    def fault(self) -> bool:
        """True if the deviation is beyond chance."""
        return not self.chance >= LEVEL


def capped(chance: float) -> float:
    """At most 1; what is not a number stays so, and is a fault."""
    return float(np.minimum(1.0, chance))


def certain(name: str, holds: object) -> Finding:
    """Finding about what always holds in a correct trainer."""
    return Finding(name, 1.0 if holds else 0.0)


def participations_of(sampler: UnitSampler) -> np.ndarray:
    """Participations that a run's sampler draws, (population, n) of bool."""
    matrix = np.zeros((sampler.population, sampler.scheme.length), dtype=bool)
    for step in range(matrix.shape[1]):
        matrix[sampler[step], step] = True
    return matrix


def compare(
    scheme: Scheme, executed: np.ndarray, twins: Sequence[np.ndarray], rng: np.random.Generator
) -> list[Finding]:
    """Run the tests of a run's participations.

    Args:
        scheme, rng: what was accounted for, and randomness of units simulated for comparison.
        executed: participations of the run, (units, n) of bool.
        twins: those of runs with other secrets.
    """
    if scheme.public_order:
        expected = participations_of(UnitSampler(scheme, len(executed), 0))
        return [certain("order is the public one", np.array_equal(expected, executed))]
    samples = executed, attack.participations(scheme, 4 * _UNITS, rng)
    # common steps of each unit with itself in other runs, against random pairs of units
    paired = np.array([_paired(executed, twin) for twin in twins])
    common = _permuted(paired[:, 0].sum(), paired[:, 1].sum(), paired[:, 2].max())
    return [
        Finding("participations follow another secret", common),
        Finding("participations of neighbouring units", _neighbours(executed)),
        Finding("number of participations", _law(*(x.sum(axis=1) for x in samples))),
        Finding("first participation", _law(*map(_first, samples))),
        Finding("gaps between participations", _law(*map(_gap, samples))),
        Finding("batch sizes", _sizes(scheme, executed)),
    ]


def compare_noise(
    white: np.ndarray, arrays: Sequence[slice], independent: np.ndarray
) -> list[Finding]:
    """Run the tests of a run's noise.

    ``white``: C times the noise of the run, in units of σ, (n, coordinates); ``arrays``: places of
    each array's coordinates; ``independent``: the noise of step 0 under another secret,
    (coordinates,).
    """
    n, m = white.shape
    if not (np.all(np.isfinite(white)) and np.all(np.any(white, axis=1)) and np.any(independent)):
        return [certain("noise is drawn in every step", False)]
    squares = np.stack([np.sum(white[:, part] ** 2, axis=1) for part in arrays], axis=1)
    counts = np.array([part.stop - part.start for part in arrays])
    law = [
        _two_sided(stats.binom(n * m, 2 * stats.norm.sf(tail)), np.sum(np.abs(white) > tail))
        for tail in _TAILS
    ]
    earlier, later = np.tril_indices(n, -1)[::-1]
    by_step = _two_sided(stats.chi2(m), squares.sum(axis=1))
    by_array = _two_sided(stats.chi2(n * counts), squares.sum(axis=0))
    p_values = _two_sided(stats.chi2(counts), squares)
    return [
        Finding("size of the noise", _worst(_two_sided(stats.chi2(n * m), squares.sum()))),
        Finding("size of the noise over the steps", _worst(by_step, p_values)),
        Finding("size of the noise over the arrays", _worst(by_array)),
        Finding("law of the noise", _worst(np.array(law))),
        Finding("noise of different steps", _worst(_products(white)[later, earlier])),
        Finding("noise of different coordinates", _coordinates(white)),
        Finding("noise of different arrays", _arrays(white, arrays)),
        Finding("noise under another secret", _worst(_normal(independent @ white.T, independent))),
    ]


def compare_signal(white: np.ndarray, signal: np.ndarray, arrays: Sequence[slice]) -> Finding:
    """Test that nothing is left of the sums, all arrays together and each alone.

    The part of a step's noise along its sum, which follows from earlier steps, is standard normal.

    ``white``, ``arrays``: as in :func:`compare_noise`; ``signal``: C times the sums, likewise.
    """
    chances = []
    for part in (slice(None), *arrays):
        lengths = np.linalg.norm(signal[:, part], axis=1)
        is_present = lengths != 0  # what is not a number is there, and a fault
        along = (
            np.sum(white[is_present, part] * signal[is_present, part], axis=1) / lengths[is_present]
        )
        chances.append(_normal(along.sum(), np.ones(len(along))))
        # sums that are scaled by what is drawn: too much in one step, too little in another
        chances.append(_two_sided(stats.chi2(max(1, len(along))), np.sum(along**2)))
    return Finding("sums in the noise", _worst(np.array(chances)))


def _two_sided(law: Any, value: Any) -> Any:
    """Chance of a value as far out on either side; ``law``: a frozen distribution of scipy."""
    discrete = isinstance(law.dist, stats.rv_discrete)
    above = law.sf(value - 1) if discrete else law.sf(value)
    return np.minimum(1.0, 2 * np.minimum(law.cdf(value), above))


def _worst(*families: np.ndarray) -> float:
    """Chance of a smallest one as small, of several families of tests."""
    smallest = [np.min(p_values, initial=1.0) * np.size(p_values) for p_values in families]
    return capped(len(families) * np.min(smallest))


def _normal(products: np.ndarray, expected: np.ndarray) -> Any:
    """Chances of inner products of ``expected`` vectors (..., m) with standard normal ones."""
    sizes = np.maximum(np.linalg.norm(expected, axis=-1), 1e-300)
    return 2 * stats.norm.sf(np.abs(products) / sizes)


def _products(rows: np.ndarray) -> np.ndarray:
    """Chances of the products of any two rows, [later, given]."""
    return _normal(rows @ rows.T, rows)


def _coordinates(white: np.ndarray) -> float:
    """Means over coordinates, any two of some coordinates, and those at every small distance."""
    m = white.shape[1]
    means = _normal(white.sum(axis=1), np.ones(m))
    some = np.unique(np.linspace(0, m - 1, _COORDINATES).astype(int))
    pairs = _products(white[:, some].T)[np.tril_indices(len(some), -1)]
    lagged = []
    for lag in range(1, min(_LAGS, m // 2) + 1):
        left_places, right_places = _apart(m, lag)
        product = np.sum(white[:, left_places] * white[:, right_places])
        lagged.append(_normal(product, white[:, left_places].reshape(-1)))
    return _worst(means, pairs, np.array(lagged))


def _arrays(white: np.ndarray, arrays: Sequence[slice]) -> float:
    """Any two arrays of parameters, entry by entry as far as the smaller one goes."""
    chances = []
    for i, later in enumerate(arrays):
        for earlier in arrays[:i]:
            size = min(later.stop - later.start, earlier.stop - earlier.start)
            a, b = (white[:, part.start : part.start + size].ravel() for part in (earlier, later))
            chances.append(_normal(a @ b, a))
    return _worst(np.array(chances)) if chances else 1.0


def _apart(count: int, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of numbers below ``count`` with the distance ``lag``, no number in two pairs."""
    begins = np.flatnonzero(np.arange(count - lag) // lag % 2 == 0)
    return begins, begins + lag


def _permuted(total: float, expected: float, largest: float) -> float:
    """Bound on the chance of a sum Σ a(i, π(i)) so far from its mean over random pairings π.

    2 exp(-t² / (4 mean + 2 t)) for entries in [0, 1] (Chatterjee 2007, proposition 1.1); for
    independent pairings, of the sum of their sums.
    """
    if largest == 0:
        return 1.0
    away = abs(total - expected) / largest
    mean = expected / largest
    return float(min(1.0, 2 * np.exp(-(away**2) / (4 * mean + 2 * away)))) if away else 1.0


def _paired(upper: np.ndarray, lower: np.ndarray) -> tuple[float, float, int]:
    """(common steps of the rows of two runs, their mean over pairings, most of one pair)."""
    steps = upper.sum(axis=0, dtype=float) @ lower.sum(axis=0, dtype=float)
    largest = min(upper.sum(axis=1).max(initial=0), lower.sum(axis=1).max(initial=0))
    return float(np.count_nonzero(upper & lower)), steps / len(upper), int(largest)


def _neighbours(matrix: np.ndarray) -> float:
    """The worst distance between units, of all distances up to ``_LAGS``."""
    matrix = matrix[:_UNITS]
    chances = []
    for lag in range(1, min(_LAGS, len(matrix) // 2) + 1):
        upper, lower = _apart(len(matrix), lag)
        chances.append(_permuted(*_paired(matrix[upper], matrix[lower])))
    return _worst(np.array(chances))


def _first(matrix: np.ndarray) -> np.ndarray:
    return np.where(matrix.any(axis=1), matrix.argmax(axis=1), matrix.shape[1])


def _gap(matrix: np.ndarray) -> np.ndarray:
    """Steps from the first participation to the second, n if there is none."""
    begins = _first(matrix)
    later = matrix & (np.arange(matrix.shape[1]) > begins[:, None])
    return np.where(later.any(axis=1), _first(later) - begins, matrix.shape[1])


def _law(mine: np.ndarray, theirs: np.ndarray) -> float:
    """Two samples of one whole number a unit: Fisher's exact test of each value's frequency."""
    values = np.arange(max(mine.max(initial=0), theirs.max()) + 2)
    a = np.histogram(mine, values)[0]
    b = np.histogram(theirs, values)[0]
    law = stats.hypergeom(len(mine) + len(theirs), a + b, len(mine))
    return _worst(_two_sided(law, a))


def _sizes(scheme: Scheme, executed: np.ndarray) -> float:
    """The worst of all steps' batch sizes."""
    units, n = executed.shape
    sizes = executed.sum(axis=0)
    return _worst(np.array([_two_sided(scheme.batch_sizes(t, units), sizes[t]) for t in range(n)]))
