"""The random numbers of sampling: counter-based, so that a step is a function of its number."""

from __future__ import annotations

import numpy as np

from mfopt._runtime import _check

# Which random choice a stream is for, so that no two choices of a run share their numbers.
_ASSIGNMENT, _STEP = 0, 1


def generator(seed: int, step: int | None = None) -> np.random.Generator:
    """The random numbers of iteration ``step``, or of the run's assignment where None.

    Philox is a counter-based generator: seed makes the key, and the step is the counter's
    highest word, so streams of different steps are 2^192 draws apart.
    """
    seed = _check.seed("seed", seed)
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    purpose = _ASSIGNMENT if step is None else _STEP
    counter = np.array([0, 0, purpose, step or 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def bernoulli(population: int, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Indices of the successes among ``population`` independent coin flips, increasing.

    A binomial count, then a uniform subset of that size: the law of independent coin flips at a
    cost that does not grow with the population when the probability is small.
    """
    return subset(population, int(rng.binomial(population, probability)), rng)


def subset(population: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly random subset of ``size`` of ``population``, increasing."""
    return np.sort(rng.choice(population, size=size, replace=False, shuffle=False))
