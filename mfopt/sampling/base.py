"""Base classes of sampling schemes, and the registry of those defined.

A scheme is a frozen dataclass of public numbers. Defining it registers it: ``kind`` is its name in
files and on the command line, and its description follows from its fields. A property of a scheme
comes from the scheme itself (its draws, its batch sizes, what an execution protects) or from a
table that schemes are entered in (the accountants); nobody asks which class it is, and what a
scheme does not declare is refused, never assumed.
"""

from __future__ import annotations

import abc
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import scipy

from mfopt._runtime import _check, _plugins
from mfopt._runtime._types import JsonObject, T
from mfopt.sampling._generator import generator

Adjacency = Literal["add-remove", "zero-out", "replace"]
Frozen: TypeAlias = Any
"""A frozen distribution of scipy.stats, which states no types."""

MOST_ITERATIONS = 2**31 - 1  # steps are counted in 32 bits
_LARGE = 2**40  # units of a large population

_SCHEMES: dict[str, type[Scheme]] = {}


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """Sampling scheme: the distribution of the units that take part in each iteration.

    A subclass is a frozen dataclass whose fields are plain numbers, among them or derived from
    them ``iterations``. ``class Mine(Scheme, abstract=True)`` is a base of several and has no kind.

    Attributes:
      kind: name in files and on the command line; no other scheme has it.
      independent: whether every unit is drawn on its own: its participations do not depend on how
        many other units there are, nor on theirs. Two things hang on it. Removing a unit then
        moves no other, so that an account for add-remove adjacency is one about the run; and a
        unit that is cut from a full batch can be charged for without looking at the others.
      prefix_closed: whether the first epochs, or steps where it has none, of a run are drawn as a
        shorter run of the scheme is. A run whose scheme does not declare it is accounted for as a
        whole only.
      executable: whether there is something to draw. A mere condition on participations has not.
      public_order: whether the units of a step follow from their numbers alone.
      run_adjacency: the adjacency that a training run under it is accounted for.
      mistaken_for: an execution near to it that is another mechanism, in words.
      step_name: what its users call an iteration, in words.
      bands_are_groups: whether it has as many groups of units as C has bands.

    Raises:
      TypeError: when the class is defined, for a kind that is missing, inherited or taken, or if
        ``independent`` is not declared.
    """

    kind: ClassVar[str]
    independent: ClassVar[bool]
    prefix_closed: ClassVar[bool] = False
    executable: ClassVar[bool] = True
    public_order: ClassVar[bool] = False
    run_adjacency: ClassVar[Adjacency] = "add-remove"
    mistaken_for: ClassVar[str] = ""
    step_name: ClassVar[str] = "step"
    bands_are_groups: ClassVar[bool] = False

    if typing.TYPE_CHECKING:  # a field of some schemes, derived by others

        @property
        def iterations(self) -> int:
            """Training iterations n."""

    def __init_subclass__(cls, *, abstract: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if abstract:
            return
        kind = cls.__dict__.get("kind")
        if not isinstance(kind, str) or not kind or set(kind) & set(":,= \t\n"):
            raise TypeError(
                f"scheme {cls.__qualname__} must declare a kind of its own: a name without spaces, "
                "':', ',' and '=', for files and the command line"
            )
        earlier = _SCHEMES.get(kind)
        # the same class again: redefined in a notebook, or recreated by dataclass(slots=True)
        if earlier is not None and (
            earlier.__module__,
            earlier.__qualname__,
        ) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise TypeError(
                f"scheme {cls.__qualname__}: the kind {kind!r} is taken by {earlier.__module__}."
                f"{earlier.__qualname__}, and a file could not tell the two apart"
            )
        if not isinstance(getattr(cls, "independent", None), bool):
            raise TypeError(
                f"scheme {cls.__qualname__} must declare whether its units are independent"
            )
        _SCHEMES[kind] = cls

    def __post_init__(self) -> None:
        """Refuse fields that are no whole numbers >= 1, and a ``probability`` outside of [0, 1]."""
        for field in dataclasses.fields(self):
            if field.name == "probability":
                value = _check.probability(field.name, getattr(self, field.name), closed=True)
                object.__setattr__(self, field.name, value)
            elif field.type in (int, "int"):
                # plain int and float, so that the description is JSON-able whatever was given
                largest = MOST_ITERATIONS if field.name == "iterations" else _check.MOST
                value = _check.integer(field.name, getattr(self, field.name), at_most=largest)
                object.__setattr__(self, field.name, value)

    @property
    def length(self) -> int:
        """Number of iterations, whether given or derived."""
        return int(self.iterations)

    @property
    def epoch_ends(self) -> Sequence[int]:
        """Last step of each epoch, increasing, where every unit takes part once in each epoch.

        Empty where units may take part more or less often between two such steps.
        """
        return ()

    def describe(self) -> JsonObject:
        """JSON-able description; :func:`from_description` reads it back."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def words(self) -> str:
        """Human-readable line with the kind and the numbers."""
        numbers = (f"{key} {value}" for key, value in self.describe().items() if key != "kind")
        return f"{self.kind} ({', '.join(numbers)})"

    def condition(self, unit: str) -> str:
        """A sentence, after a space, on which units alone are protected; "" where all are."""
        return ""

    @abc.abstractmethod
    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing, among ``population`` units.

        A pure function: the random numbers come from :func:`mfopt.sampling.generator`.

        Args:
          step: iteration, counted from 0.
          population: number of units.
          seed: secret key of the draws.

        Raises:
          UsageError: for a step that the scheme does not have.
        """

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        """``sample`` as a function of the step alone, for a loader that visits all steps.

        A scheme that draws an assignment once overrides this to keep it.
        """
        return lambda step: self.sample(step, population, seed)

    @abc.abstractmethod
    def batch_sizes(self, step: int, population: int) -> Frozen:
        """Distribution (frozen, of scipy.stats) of the number of units of iteration ``step``.

        Over the scheme's own randomness; a fixed number n is ``scipy.stats.binom(n, 1)``.
        """

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration, over all iterations: a public normalizer."""
        population = _check.integer("population", population)
        means = [float(self.batch_sizes(t, population).mean()) for t in range(self.length)]
        return sum(means) / self.length

    @property
    def expected_share(self) -> float:
        """Mean share of a large population in an iteration."""
        return self.expected_batch(_LARGE) / _LARGE

    def executed_adjacency(self, accounted: Adjacency) -> Adjacency:
        """The adjacency of the statement about a run, from that of the account.

        Where units are independent it is the account's. Where one unit's presence moves the
        others, taking it away would change the batches of the others as well: what the run
        protects is its data ("zero-out"), and whether an account for "add-remove" shows that is
        for the scheme to say.

        Raises:
          UsageError: nothing is known about this adjacency.
        """
        if self.independent or accounted != "add-remove":
            return accounted
        rule = f"removing a unit moves the others under {self.kind} sampling"
        way_out = "Account for 'zero-out'."
        raise _check.reject("adjacency", accounted, rule, way_out)

    def _stated(self, stated: int, population: int) -> int:
        """The population that the scheme states, which whoever asks must have."""
        if _check.integer("population", population) != stated:
            rule = f"this scheme is for {stated} units"
            way_out = "Its account depends on the size of the data set."
            raise _check.reject("population", population, rule, way_out)
        return stated

    def _step(self, step: int) -> int:
        step = _check.integer("step", step, at_least=0)
        if step >= self.length:
            rule = f"this scheme ends after {self.length} iterations"
            way_out = "Steps count from 0; a longer run needs a scheme (and an account) of its own."
            raise _check.reject("step", step, rule, way_out)
        return step


@dataclasses.dataclass(frozen=True)
class BinScheme(Scheme, abstract=True):
    """Scheme in which a unit has one of ``bins`` batches in each of ``epochs`` passes."""

    bins: int
    epochs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations > MOST_ITERATIONS:
            rule = f"their product must be at most {MOST_ITERATIONS}"
            raise _check.reject("bins, epochs", (self.bins, self.epochs), rule)

    @property
    def iterations(self) -> int:
        """Training iterations n = bins * epochs."""
        return self.bins * self.epochs

    def with_bins(self, bins: int) -> Self:
        """The scheme with so many bins."""
        return dataclasses.replace(self, bins=bins)

    @property
    def epoch_ends(self) -> Sequence[int]:
        """Last step of each epoch: every unit has a batch in each."""
        return range(self.bins - 1, self.iterations, self.bins)

    @property
    def most_bands(self) -> int | None:
        """Most bands of a C that is accounted for; None where any C is."""
        return None

    @property
    def throws(self) -> int:
        """Number of draws that a unit's steps take, at most: one in each epoch."""
        return self.epochs

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration."""
        return _check.integer("population", population) / self.bins

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call or more."""
        return self.draws(population, seed)(step)

    def batch_sizes(self, step: int, population: int) -> Frozen:
        self._step(step)
        return scipy.stats.binom(population, 1 / self.bins)


@dataclasses.dataclass(frozen=True)
class SeparatedScheme(BinScheme, abstract=True):
    """Scheme with random participations, any two of a unit ``separation`` iterations apart or more.

    A unit takes part ``epochs`` times on average, and is drawn whatever the others do.

    Attributes:
      separation: S, less than ``bins`` (as many would be balls-in-bins).
    """

    separation: int = 1
    independent = True
    prefix_closed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separation > max(self.bins - 1, 1):
            rule = f"must be less than the number of bins ({self.bins})"
            way_out = "With as many, a unit takes part in a fixed cycle: use balls-in-bins."
            raise _check.reject("separation", self.separation, rule, way_out)

    def with_bins(self, bins: int) -> Self:
        separation = max(1, min(self.separation, bins - 1))
        return dataclasses.replace(self, bins=bins, separation=separation)

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        """None: a unit may take part more or less often than once in an epoch."""
        return ()

    @property
    def most_bands(self) -> int:
        return self.separation

    def words(self) -> str:
        return (
            f"{self.kind}, any two steps of a unit at least {self.separation} apart: {self.epochs} "
            f"epochs × {self.bins} iterations on average = {self.iterations} iterations"
        )


@dataclasses.dataclass(frozen=True)
class AssignedBins(BinScheme, abstract=True):
    """Scheme that assigns every unit, uniformly and independently, to one of ``bins`` batches, once
    or again every few epochs."""

    @property
    def throws(self) -> int:
        """Number of assignments in a run."""
        return 1

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The bin of each of ``units`` units in one assignment, shape (units,)."""
        return rng.integers(0, self.bins, size=_check.integer("units", units, at_least=0))

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        # one assignment is kept, in the order that groups units by bin
        assigned: list[tuple[int, np.ndarray, np.ndarray]] = []
        lasts = self.epochs // self.throws

        def drawn(step: int) -> np.ndarray:
            epoch, bin_index = divmod(self._step(step), self.bins)
            throw = epoch // lasts
            if not assigned or assigned[0][0] != throw:
                bins = self.assign(population, generator(seed, self._stream(throw)))
                order = np.argsort(bins, kind="stable")
                border = np.searchsorted(bins[order], np.arange(self.bins + 1))
                assigned[:] = [(throw, order, border)]
            _, order, border = assigned[0]
            return order[border[bin_index] : border[bin_index + 1]]

        return drawn

    def _stream(self, throw: int) -> int | None:
        """Number of the generator of an assignment; None for that of a run's only one."""
        return None


def registered() -> dict[str, type[Scheme]]:
    """Schemes defined so far, by kind."""
    return dict(_SCHEMES)


def require(scheme: object) -> Scheme:
    """``scheme``, if it is one that a file could hold and give back.

    Raises:
      UsageError: it is no scheme, or its description does not lead back to it.
    """
    if not isinstance(scheme, Scheme):
        rule = "must be a spec of mfopt.sampling"
        way_out = "Make one, for example BallsInBins(bins=128, epochs=16)."
        raise _check.reject("sampling", scheme, rule, way_out)
    if from_description(scheme.describe()) != scheme:
        rule = "its description does not give it back"
        way_out = "A scheme is a frozen dataclass whose fields are plain numbers."
        raise _check.reject("sampling", scheme, rule, way_out)
    return scheme


def from_description(description: JsonObject) -> Scheme:
    """The scheme of a description by ``describe()``; unknown or malformed ones are refused."""
    fields = dict(description)
    scheme = find("sampling", fields.pop("kind", None), _SCHEMES)
    try:
        return scheme(**fields)
    except TypeError as error:
        raise _check.reject(
            "sampling", description, f"does not describe a scheme ({error})"
        ) from None


def parse(text: str) -> Scheme:
    """Parse a scheme from text: ``kind:name=value,...``.

    >>> from mfopt import sampling
    >>> sampling.parse("poisson:probability=0.05,iterations=200")
    Poisson(probability=0.05, iterations=200)
    """
    kind, _, fields_text = text.partition(":")
    scheme = find("sampling", kind.strip(), _SCHEMES)
    types = typing.get_type_hints(scheme)
    fields = dataclasses.fields(scheme)
    names = [field.name for field in fields]
    values: JsonObject = {}
    for item in filter(None, fields_text.split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in names:
            raise _check.reject(
                "sampling", item, f"{scheme.kind} is described by {', '.join(names)}"
            )
        if name in values:
            raise _check.reject("sampling", text, f"gives {name} more than once")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise _check.reject(
                "sampling", item, f"must be name=value with {name} of type {types[name].__name__}"
            ) from None
    missing = [
        field.name
        for field in fields
        if field.name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        rule = f"lacks {', '.join(missing)}"
        way_out = f"For example {scheme.kind}:{','.join(f'{name}=...' for name in names)}."
        raise _check.reject("sampling", text, rule, way_out)
    return scheme(**values)


def find(name: str, kind: object, known: Mapping[str, type[T]], way_out: str = "") -> type[T]:
    """The class of a kind, of a scheme or a strategy.

    Args:
      name: of the argument that errors name.
      kind: what a file or a command names.
      known: class of each registered kind; plugins, loaded for one that is unknown, add to it.
      way_out: for one that is unknown all the same.

    Raises:
      UsageError: there is no such kind, or only an earlier version had it.
    """
    if isinstance(kind, str) and kind not in known:
        _plugins.load()
        if kind not in known:
            _refuse_dropped(name, kind)
    return known[_check.choice(name, kind, sorted(known), way_out)]


# kinds that this version no longer has, and the last that reads them
_LAST_VERSION = {"k-of-n": "0.2.0", "cyclic-blocks": "0.2.0"}


def _refuse_dropped(name: str, kind: str) -> None:
    """Raise :class:`UsageError` for a kind that an earlier version had."""
    if version := _LAST_VERSION.get(kind):
        way_out = f"mfopt {version} reads it: pip install mfopt=={version}"
        raise _check.reject(name, kind, "is not in this version", way_out)
