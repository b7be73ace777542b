"""Tests of the participations and of the noise of a run against what was accounted for.

The attacker's likelihood cannot see a sampler that forgets to be random: with ``unit % bins`` every
canary still takes part as often as it should, and only somebody who knows the rule gains by it. So
the executed participations are themselves compared with the scheme:

* with another secret a unit must meet its old steps no more often than any other unit's;
* units with neighbouring numbers (at every distance up to 64) no more often than any two;
* participations, the gaps between them, and batch sizes must follow the scheme's own law, neither
  too unlike it nor too even.

Nor can it see noise of the right size that repeats itself. C times the noise of the run must be
white: steps, and coordinates, unrelated and alike in size, and the noise under another secret
unrelated to it.

Each is a number of standard deviations; beyond ``LIMIT`` it is a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import stats

from mfopt.sampling import Scheme, UnitSampler
from mfopt.training import attack
from mfopt.training.batching import Sampler

LIMIT = 6.0
_UNITS = 1000  # examined one by one
_PAIRED = 4000  # compared with themselves under another secret
_LAGS = 64
_RUNS = 100  # of the scheme, for the law of batch sizes


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison: its ``deviation`` from the scheme, in standard deviations."""

    name: str
    deviation: float

    @property
    def fault(self) -> bool:
        """True if the deviation is beyond chance."""
        return not abs(self.deviation) <= LIMIT


def participations_of(sampler: Sampler) -> np.ndarray:
    """Participations before truncation, (population, n) of bool."""
    taken = np.zeros((sampler.population, sampler.scheme.length), dtype=bool)
    for step in range(taken.shape[1]):
        taken[sampler.drawn[step], step] = True
    return taken


def compare(scheme: Scheme, executed: np.ndarray, twin: np.ndarray) -> list[Finding]:
    """Run the tests of a run's participations.

    Args:
        scheme: what was accounted for.
        executed: participations of the run, (units, n) of bool, before truncation.
        twin: those of a run with another secret.
    """
    units = len(executed)
    if scheme.public_order:
        expected = participations_of(Sampler(scheme, units, 0, microbatch=1))
        wrong = float(np.sum(expected != executed))
        return [Finding("order is the public one", np.inf if wrong else 0.0)]
    return [
        Finding("participations follow another secret", _pairing(executed, twin)),
        Finding("participations of neighbouring units", _neighbours(executed)),
        Finding("number of participations", _law(scheme, executed, _numbers)),
        Finding("gaps between participations", _law(scheme, executed, _gaps)),
        Finding("batch sizes", _sizes(scheme, executed)),
    ]


def compare_noise(white: np.ndarray, other: np.ndarray) -> list[Finding]:
    """Run the tests of a run's noise; the size of it is the attacker's to judge.

    Args:
        white: C times the noise of the run, (n, coordinates).
        other: the noise of step 0 under another secret, (coordinates,).
    """
    n, m = white.shape
    sizes = np.sqrt(np.mean(white**2, axis=1, keepdims=True))
    if not (np.all(np.isfinite(white)) and np.all(sizes > 0) and np.any(other)):
        return [Finding("noise is drawn in every step", np.inf)]
    unit = white / sizes
    between = (unit @ unit.T)[np.triu_indices(n, 1)] / np.sqrt(m)
    # each step's sum of squares, in units of all steps' mean, is a chi-square variable
    sums = m * sizes[:, 0] ** 2 / np.mean(sizes**2)
    tails = 2 * np.minimum(stats.chi2.cdf(sums, m), stats.chi2.sf(sums, m))
    again = unit[0] @ other / np.linalg.norm(other)
    return [
        Finding("noise of different steps", _worst(2 * stats.norm.sf(np.abs(between)))),
        Finding("size of the noise over the steps", _worst(tails)),
        Finding(
            "noise of different coordinates",
            _worst(2 * stats.norm.sf(np.abs(unit.sum(axis=1)) / np.sqrt(m))),
        ),
        Finding("noise under another secret", float(again)),
    ]


def _worst(chances: np.ndarray) -> float:
    """Deviation of one normal variable that is as rare as the rarest of several."""
    chance = min(1.0, float(np.min(chances, initial=1.0)) * chances.size)
    return float(stats.norm.isf(chance / 2))


def _pairing(first: np.ndarray, second: np.ndarray) -> float:
    """Common steps of each unit with itself in the other run, against random pairs of units.

    The sum over a random pairing has the mean and variance of Hoeffding (1951).
    """
    common = first[:_PAIRED].astype(np.float32) @ second[:_PAIRED].T.astype(np.float32)
    return _score(common, np.arange(len(common)))


def _neighbours(taken: np.ndarray) -> float:
    """The worst distance between units, of all distances up to ``_LAGS``."""
    taken = taken[:_UNITS].astype(np.float32)
    common = taken @ taken.T
    # a unit is no pair with itself
    np.fill_diagonal(common, common[~np.eye(len(common), dtype=bool)].mean())
    scores = [
        _score(common, np.roll(np.arange(len(common)), lag))
        for lag in range(1, min(_LAGS, len(common) // 2))
    ]
    return max(scores, key=abs)


def _score(common: np.ndarray, partner: np.ndarray) -> float:
    m = len(common)
    centred = common - common.mean(0) - common.mean(1)[:, None] + common.mean()
    spread = float(np.sqrt(np.sum(centred.astype(np.float64) ** 2) / (m - 1)))
    total = float(np.sum(common[np.arange(m), partner].astype(np.float64)))
    difference = total - m * float(common.mean(dtype=np.float64))
    return difference / spread if spread > 1e-9 * m else 0.0


def _numbers(taken: np.ndarray) -> np.ndarray:
    return np.asarray(taken.sum(axis=1))


def _gaps(taken: np.ndarray) -> np.ndarray:
    unit, step = np.nonzero(taken)
    same = unit[1:] == unit[:-1]
    gaps: np.ndarray = (step[1:] - step[:-1])[same]
    return gaps


def _law(scheme: Scheme, executed: np.ndarray, what: Callable[[np.ndarray], np.ndarray]) -> float:
    """Two samples of whole numbers: the largest difference of their frequencies."""
    simulated = attack.participations(scheme, 4 * _UNITS, np.random.default_rng(1))
    mine, theirs = what(executed), what(simulated)
    if not len(mine) or not len(theirs):
        return 0.0 if len(mine) == len(theirs) else float("inf")
    bins = np.arange(max(mine.max(), theirs.max()) + 2)
    a, b = np.histogram(mine, bins)[0], np.histogram(theirs, bins)[0]
    rare = (a + b) * min(len(mine), len(theirs)) < 10 * (len(mine) + len(theirs))
    a, b = (np.append(each[~rare], each[rare].sum()) for each in (a, b))
    both = (a + b) / (len(mine) + len(theirs))
    spread = np.sqrt(both * (1 - both) * (1 / len(mine) + 1 / len(theirs)))
    different = np.abs(a / len(mine) - b / len(theirs))
    return float(np.max(different / np.maximum(spread, 1e-9)))


def _sizes(scheme: Scheme, executed: np.ndarray) -> float:
    """Deviation of the unevenness of batch sizes from runs of the scheme, in standard
    deviations."""
    units, n = executed.shape
    steps = min(n, 64)
    laws = [scheme.batch_sizes(t, units) for t in range(steps)]
    means = np.array([float(law.mean()) for law in laws])
    spreads = np.maximum([float(law.std()) for law in laws], 1e-9)

    def unevenness(sizes: np.ndarray) -> float:
        return float(np.log(np.mean(((sizes - means) / spreads) ** 2) + 1e-6))

    runs = []
    for seed in range(_RUNS):
        drawn = UnitSampler(scheme, units, seed)
        runs.append(unevenness(np.array([len(drawn[t]) for t in range(steps)])))
    found = unevenness(executed[:, :steps].sum(axis=0))
    return (found - float(np.mean(runs))) / max(float(np.std(runs)), 1e-9)
