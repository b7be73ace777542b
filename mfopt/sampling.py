"""Sampling schemes: frozen public specs of who takes part in which iteration.

The same object is given to the accountant and to the data loader, so what is proven is what
is executed. A spec holds public numbers only, never data. A unit is whatever the privacy unit
is: an example, or a user.

``scheme.sample(step, population, seed)`` gives the units of one iteration. It is a pure
function: the random numbers come from a counter-based generator keyed by ``seed`` with the step
as its counter, so a run that resumes at step t draws exactly what an unbroken run draws. The
amplified guarantees hold while the seed is secret and independent of the data.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mfopt import _check

# Which random choice a stream is for, so that no two choices of a run share their numbers.
_ASSIGNMENT, _STEP = 0, 1


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """What all specs share: a kind, a JSON-able description, checked steps."""

    kind: ClassVar[str]

    @property
    def length(self) -> int:
        """Number of iterations, whether given or derived."""
        return int(self.iterations)  # type: ignore[attr-defined]

    def describe(self) -> dict[str, Any]:
        """JSON-able description; :func:`from_description` reads it back."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def _integer(self, name: str, *, at_least: int = 1) -> None:
        # stored as plain int and float so that the description is JSON-able whatever was given
        value = _check.integer(name, getattr(self, name), at_least=at_least)
        object.__setattr__(self, name, value)

    def _probability(self) -> None:
        value = _check.probability("probability", self.probability, closed=True)  # type: ignore[attr-defined]
        object.__setattr__(self, "probability", value)

    def _step(self, step: int) -> int:
        step = _check.integer("step", step, at_least=0)
        if step >= self.length:
            raise _check.reject(
                "step", step, f"this scheme ends after {self.length} iterations",
                "Steps count from 0; a longer run needs a scheme (and an account) of its own.",
            )  # fmt: skip
        return step


class _BinScheme(_Scheme):
    """Each unit has one of ``bins`` batches, used in every one of ``epochs`` passes."""

    bins: int
    epochs: int

    @property
    def iterations(self) -> int:
        """Training iterations n = bins * epochs."""
        return self.bins * self.epochs


@dataclasses.dataclass(frozen=True)
class BallsInBins(_BinScheme):
    """Each unit is thrown once, uniformly and independently, into one of ``bins`` batches.

    Iteration t (0-based) uses batch ``t % bins``; the assignment is kept for all ``epochs``
    passes (Choquette-Choo et al. 2024, Definition 3.1). A unit therefore takes part in exactly
    ``epochs`` iterations, ``bins`` apart. This is *not* the scheme in which bins are thrown
    afresh in each epoch: the two have very different privacy, and their numbers never mix.

    >>> BallsInBins(bins=128, epochs=16).iterations
    2048
    """

    bins: int
    epochs: int
    kind: ClassVar[str] = "balls-in-bins"

    def __post_init__(self) -> None:
        self._integer("bins")
        self._integer("epochs")

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The bin of each of ``units`` units, shape (units,): the loader's random choice."""
        return rng.integers(0, self.bins, size=_check.integer("units", units, at_least=0))

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call.

        A loader that runs through all steps draws ``assign(population, generator(seed))`` once
        instead: it is the same assignment.
        """
        bin_of_step = self._step(step) % self.bins
        return np.flatnonzero(self.assign(population, generator(seed)) == bin_of_step)


@dataclasses.dataclass(frozen=True)
class FixedOrder(_BinScheme):
    """The same participation pattern as balls-in-bins, but the bins are not random.

    Unit i belongs to batch ``i % bins``. Nothing is amplified: the accountant covers the worst
    bin. The order may be any that was fixed without looking at the data.

    >>> FixedOrder(bins=3, epochs=2).sample(step=4, population=8, seed=0)
    array([1, 4, 7])
    """

    bins: int
    epochs: int
    kind: ClassVar[str] = "fixed-order"

    def __post_init__(self) -> None:
        self._integer("bins")
        self._integer("epochs")

    def assign(self, units: int, rng: np.random.Generator | None = None) -> np.ndarray:
        """The bin of each of ``units`` units, shape (units,); ``rng`` is not used."""
        return np.arange(_check.integer("units", units, at_least=0)) % self.bins

    def sample(self, step: int, population: int, seed: int = 0) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing; ``seed`` is not used."""
        population = _check.integer("population", population, at_least=0)
        return np.arange(self._step(step) % self.bins, population, self.bins)


@dataclasses.dataclass(frozen=True)
class Poisson(_Scheme):
    """Each unit takes part in each iteration independently with ``probability``.

    Batches vary in size: the normalizer must be the fixed ``expected_batch(population)``.
    """

    probability: float
    iterations: int
    kind: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        self._probability()
        self._integer("iterations")

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration."""
        return self.probability * _check.integer("population", population)

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing."""
        population = _check.integer("population", population, at_least=0)
        return _bernoulli(population, self.probability, generator(seed, self._step(step)))


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(_Scheme):
    """Poisson sampling from one of ``bands`` groups in turn, for a C with ``bands`` bands.

    Every unit belongs to one of ``bands`` groups. Iteration t takes each unit of group
    ``t % bands`` independently with ``probability``, the others not at all
    (Choquette-Choo et al. 2023, banded factorizations; section 5.1.1 of the 2024 paper). A
    unit's participations are at least ``bands`` apart, so that a banded C never mixes two of
    them. ``probability`` is the chance *within the group*: ``bands`` times the rate
    batch / population that plain Poisson sampling would have.

    >>> CyclicPoisson.for_batch(batch_size=500, population=50_000, bands=4, iterations=2000)
    CyclicPoisson(probability=0.04, bands=4, iterations=2000)
    """

    probability: float
    bands: int
    iterations: int
    kind: ClassVar[str] = "cyclic-poisson"

    def __post_init__(self) -> None:
        self._probability()
        self._integer("bands")
        self._integer("iterations")

    @classmethod
    def for_batch(
        cls, batch_size: float, population: int, bands: int, iterations: int
    ) -> CyclicPoisson:
        """The scheme with ``batch_size`` expected units in an iteration."""
        batch_size = _check.positive("batch_size", batch_size)
        rate = batch_size / _check.integer("population", population)
        if rate * _check.integer("bands", bands) > 1:
            raise _check.reject(
                "batch_size", batch_size,
                f"a group has only about {population / bands:g} units (population / bands)",
                "Use a smaller batch or fewer bands.",
            )  # fmt: skip
        return cls(rate * bands, bands, iterations)

    @property
    def rounds(self) -> int:
        """Most iterations that a unit can take part in: iterations / bands, rounded up."""
        return -(-self.iterations // self.bands)

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration, over the assignment to groups as well."""
        return self.probability * _check.integer("population", population) / self.bands

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The group of each of ``units`` units, shape (units,), each thrown on its own.

        A unit's group does not depend on the other units, so adding or removing one moves no
        other. The guarantee holds for any assignment with this property.
        """
        return rng.integers(0, self.bands, size=_check.integer("units", units, at_least=0))

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call."""
        step = self._step(step)
        members = np.flatnonzero(self.assign(population, generator(seed)) == step % self.bands)
        return members[_bernoulli(len(members), self.probability, generator(seed, step))]


@dataclasses.dataclass(frozen=True)
class FixedBatch(_Scheme):
    """A uniformly random subset of exactly ``batch_size`` of ``population``, fresh each iteration.

    Drawn without replacement within an iteration, independently across iterations. The account
    (Ganesh 2024, Theorem 3.3) is for adding or removing units at a fixed ``batch_size``, where
    ``population`` is the size of the larger of the two data sets; it also covers larger ones.
    """

    batch_size: int
    population: int
    iterations: int
    kind: ClassVar[str] = "fixed-batch"

    def __post_init__(self) -> None:
        self._integer("batch_size")
        self._integer("population")
        self._integer("iterations")
        if self.batch_size > self.population:
            raise _check.reject(
                "batch_size", self.batch_size, f"the population has {self.population} units"
            )

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing, shape (batch_size,)."""
        if _check.integer("population", population) != self.population:
            raise _check.reject(
                "population", population, f"this scheme is for {self.population} units",
                "A fixed-batch account depends on the size of the data set.",
            )  # fmt: skip
        return _subset(population, self.batch_size, generator(seed, self._step(step)))


@dataclasses.dataclass(frozen=True)
class MinSeparation(_Scheme):
    """Any participation with ``separation`` between: a condition, not a random choice.

    A unit takes part at most ``max_participations`` times and any two of its iterations are at
    least ``separation`` apart (b-min-separation). Who takes part when may depend on anything
    but the data's values (for instance on when devices are idle), so there is nothing to
    sample here; :meth:`check` tells whether a recorded schedule obeys.

    >>> MinSeparation(iterations=100, separation=40, max_participations=9).participations
    3
    """

    iterations: int
    separation: int
    max_participations: int
    kind: ClassVar[str] = "min-separation"

    def __post_init__(self) -> None:
        self._integer("iterations")
        self._integer("separation")
        self._integer("max_participations")

    @property
    def participations(self) -> int:
        """Most participations that fit: the smaller of the limit and what the spacing allows."""
        return min(self.max_participations, -(-self.iterations // self.separation))

    def check(self, steps: np.ndarray) -> None:
        """Raise :class:`UsageError` unless a unit may take part in exactly these ``steps``."""
        steps = np.sort(np.asarray(steps, dtype=np.int64))
        if steps.size > self.max_participations:
            raise _check.reject(
                "steps", steps.tolist(), f"at most {self.max_participations} participations"
            )
        if steps.size and (steps[0] < 0 or steps[-1] >= self.iterations):
            raise _check.reject("steps", steps.tolist(), f"must lie in 0..{self.iterations - 1}")
        if np.any(np.diff(steps) < self.separation):
            raise _check.reject(
                "steps", steps.tolist(), f"must be at least {self.separation} iterations apart"
            )


SamplingScheme: TypeAlias = (
    BallsInBins | FixedOrder | Poisson | CyclicPoisson | FixedBatch | MinSeparation
)

_SCHEMES: dict[str, type] = {
    scheme.kind: scheme
    for scheme in (BallsInBins, FixedOrder, Poisson, CyclicPoisson, FixedBatch, MinSeparation)
}


def from_description(description: dict[str, Any]) -> Any:
    """The scheme that ``describe()`` gave; unknown or malformed descriptions are refused."""
    fields = dict(description)
    kind = fields.pop("kind", None)
    if kind not in _SCHEMES:
        raise _check.reject("sampling kind", kind, f"must be one of {sorted(_SCHEMES)}")
    try:
        return _SCHEMES[kind](**fields)
    except TypeError as error:
        raise _check.reject(
            "sampling", description, f"does not describe a scheme ({error})"
        ) from None


def generator(seed: int, step: int | None = None) -> np.random.Generator:
    """The random numbers of iteration ``step``, or of the run's assignment where None.

    Philox is a counter-based generator: seed makes the key, and the step is the counter's
    highest word, so streams of different steps are 2^192 draws apart.
    """
    seed = _check.integer("seed", seed, at_least=0)
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    purpose = _ASSIGNMENT if step is None else _STEP
    counter = np.array([0, 0, purpose, step or 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def _bernoulli(population: int, probability: float, rng: np.random.Generator) -> np.ndarray:
    # a binomial count, then a uniform subset of that size: the law of independent coin flips
    # at a cost that does not grow with the population when the probability is small
    return _subset(population, int(rng.binomial(population, probability)), rng)


def _subset(population: int, size: int, rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.choice(population, size=size, replace=False, shuffle=False))
