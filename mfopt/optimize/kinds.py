"""Registry of the kinds of C that can be optimized.

A custom kind registers one entry; nothing else is edited::

    kinds.register(Kind("mine", starts=..., convert=..., parameterize=..., parameters=...,
                        samples=2**11, steps=100, tolerance=1e-4))

Kinds come after one another: a search from the optimum of a smaller kind cannot end above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mfopt import strategies
from mfopt._runtime import _check, _plugins
from mfopt.optimize import parameterization, starts
from mfopt.optimize.parameterization import Parameterization, Tilted
from mfopt.optimize.starts import Size
from mfopt.strategies import (
    Banded,
    BandedToeplitz,
    Dense,
    Strategy,
    TimeScaled,
    Toeplitz,
    fields,
)

_SHORT_RUN = 512  # iterations: C has several optima there, and a search takes little
_WAVE_RUN = 2048  # a wave has several optima in longer runs too
_WARM_BUFFERS = 4  # of the BLT that other searches begin from
# Between diagonals. To 1e-4 searches ended up to 0.12% lower, to 5e-4 up to 0.33% above the best
# known error (64 × 8, ε = 8; 16 × 128, ε = 0.5; two and three seeds).
_SCALED_SAMPLES, _SCALED_STEPS, _SCALED_TOLERANCE = 2**13, 100, 2e-4


def _none(size: Size) -> list[Any]:
    return []


@dataclasses.dataclass(frozen=True)
class Kind:
    """Optimization of one kind of C.

    Attributes:
      name: what a caller asks for.
      convert: any strategy as a start of this kind, or None where it says nothing about it.
      parameterize: (strategy of this kind, n) -> unconstrained parameters and the way back. The
        way back is differentiable and hashable, and equal for equal shapes, so that one compiled
        objective serves all starts.
      parameters: how many free numbers a C of this size has.
      starts: where to begin without any other strategy.
      prerequisites: what is optimized before, for its optimum to be converted to a start.
      samples: frozen Monte Carlo samples. Few suffice for a handful of parameters; a free
        coefficient for every lag would fit the noise of a small sample.
      steps: evaluations of the objective at most.
      tolerance: relative change of the error at which the search ends: a tenth of what the
        samples can resolve.
      warm_steps: evaluations at most where this kind is the start of another.
      twice: iterations at most for which it is searched twice, from two points.
      scalable: whether diagonals that vary with time make more of it: not where C has them already.
      plain_first: whether a search with diagonals begins from the optimum without them.
      tangents: whether :mod:`mfopt.optimize.search` is preferred: not where one cheap
        evaluation costs as much as the samples.
      stretch: (optimum for few bins, from, to so many iterations) -> a start for as many epochs of
        more bins; None where the kind has no such likeness.
      tilted: C with entry (t, s) times ρ^(t-s), where that is of the same kind: what a slope
        between two diagonals would say a second time (:mod:`mfopt.optimize.parameterization`).
      working: numbers that an evaluation holds beside C's modes and the samples (estimates of
        memory, :mod:`mfopt.optimize.sizes`).
    """

    name: str
    convert: Callable[[Strategy, Size], Strategy | None]
    parameterize: Callable[[Any, int], Parameterization]
    parameters: Callable[[Size], float]
    samples: int
    steps: int
    tolerance: float
    starts: Callable[[Size], list[Strategy]] = _none
    prerequisites: Callable[[Size], list[Stage]] = _none
    warm_steps: int = 60
    twice: int = _SHORT_RUN
    scalable: bool = False
    plain_first: bool = False
    tangents: bool = True
    tilted: Tilted | None = None
    working: Callable[[Size], float] = lambda size: 0.0
    stretch: Callable[[Any, int, int], Strategy] | None = None
    scaled: bool = False  # whether this entry is between two diagonals already

    @property
    def label(self) -> str:
        """Name of the kind for readers, with its diagonals where it has them."""
        return f"{self.name} scaled" if self.scaled else self.name


class Stage(NamedTuple):
    """One kind at one size: a stage of a search."""

    kind: Kind
    size: Size


def stages(kind: Kind, size: Size) -> list[Stage]:
    """Stages that lead to a kind of C, each once and after its prerequisites, its own last."""
    earlier = {
        (stage.kind.label, stage.size): stage
        for prerequisite in kind.prerequisites(size)
        for stage in stages(*prerequisite)
    }
    return [*earlier.values(), Stage(kind, size)]


_KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add an entry; a name that is taken is refused.

    Raises:
      UsageError: no strategy has this kind, the name has an entry already, or the entry says
        nowhere to begin.
    """
    if kind.name not in strategies.registered():
        raise _check.reject("kind", kind.name, "must be the kind of a strategy that is defined")
    registered = _KINDS.get(kind.name)
    if (
        registered is not None
        and registered.parameterize.__module__ != kind.parameterize.__module__
    ):
        raise _check.reject("kind", kind.name, "can be optimized already: take another name")
    if kind.starts is _none and kind.prerequisites is _none:
        raise _check.reject(
            "kind", kind.name, "needs `starts`, or another kind to come before it (`prerequisites`)"
        )
    _KINDS[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """Kinds that can be optimized."""
    return tuple(_KINDS)


def _fixed_names() -> tuple[str, ...]:
    """Kinds of strategies without parameters: known once their size is."""
    return tuple(
        name
        for name, cls in strategies.registered().items()
        if {type(role) for role in fields.roles(cls).values()} <= {fields.Setting}
    )


def all_names() -> tuple[str, ...]:
    """Kinds that can be asked for: optimized, or known once their size is."""
    return tuple(dict.fromkeys((*_KINDS, *_fixed_names())))


def check(name: str) -> str:
    """``name``; installed plugins are loaded where it is not known yet.

    Raises:
      UsageError: no kind of that name can be optimized or is known once its size is.
    """
    if isinstance(name, str):
        if name in _KINDS:
            return name
        if name not in all_names():
            _plugins.load()
    way_out = "" if isinstance(name, str) else "For a matrix of your own, mfopt.calibrate finds σ."
    return _check.choice("strategy", name, all_names(), way_out)


def find(name: str) -> Kind:
    """The entry of that name.

    Raises:
      UsageError: there is none.
    """
    return _KINDS[_check.choice("strategy", check(name), _KINDS)]


def fixed(name: str, **sizes: int) -> Strategy:
    """A strategy without free parameters, by name; of ``sizes`` it takes those it has.

    Raises:
      UsageError: no such kind, or one with parameters.
    """
    cls = strategies.registered()[_check.choice("strategy", check(name), _fixed_names())]
    return cls(**{key: value for key, value in sizes.items() if key in fields.roles(cls)})


def parameterization_of(strategy: Strategy, n: int) -> Parameterization:
    """Parameters of ``strategy`` as an n×n matrix, and the way back.

    Raises:
      UsageError: a kind that cannot be optimized.
    """
    if isinstance(strategy, TimeScaled):
        return scaled(find(strategy.base.kind)).parameterize(strategy, n)
    if strategy.kind not in _KINDS:
        raise _check.reject("strategy", strategy.kind, "has no parameters to optimize")
    return _KINDS[strategy.kind].parameterize(strategy, n)


def scaled(kind: Kind) -> Kind:
    """The entry of a kind between two diagonals that vary with time.

    What it comes after is scaled as well, and hands its diagonals on; or it comes after the kind
    without diagonals (``plain_first``).

    Raises:
      UsageError: diagonals add nothing to this kind.
    """
    if not kind.scalable:
        able = ", ".join(name for name, entry in _KINDS.items() if entry.scalable)
        raise _check.reject("time scale", kind.name, f"only for {able}")

    def convert(strategy: Strategy, size: Size) -> Strategy | None:
        inside = strategy.base if isinstance(strategy, TimeScaled) else strategy
        base = kind.convert(inside, size)
        if base is None:
            return None
        if not isinstance(strategy, TimeScaled):
            return TimeScaled(base)
        return TimeScaled(base, strategy.rows, strategy.columns)

    def parameterize(strategy: TimeScaled, n: int) -> Parameterization:
        return parameterization.scaled(strategy, n, kind.parameterize, kind.tilted)

    def begin(size: Size) -> list[Strategy]:
        if kind.plain_first:
            return []
        return [TimeScaled(start) for start in kind.starts(size)]

    def prerequisites(size: Size) -> list[Stage]:
        if kind.plain_first:
            return [Stage(kind, size)]
        return [
            Stage(scaled(stage.kind) if stage.kind.scalable else stage.kind, stage.size)
            for stage in kind.prerequisites(size)
        ]

    def stretch(strategy: TimeScaled, shorter: int, n: int) -> Strategy:
        assert kind.stretch is not None
        rows, columns = (
            parameterization.stretched(np.asarray(x), n) for x in strategy.diagonals(shorter)
        )
        return TimeScaled(kind.stretch(strategy.base, shorter, n), rows, columns)

    return dataclasses.replace(
        kind,
        stretch=None if kind.stretch is None else stretch,
        convert=convert,
        parameterize=parameterize,
        parameters=lambda size: kind.parameters(size) + 2 * parameterization.KNOTS,
        starts=begin,
        prerequisites=prerequisites,
        samples=max(kind.samples, _SCALED_SAMPLES),
        steps=_SCALED_STEPS,
        warm_steps=_SCALED_STEPS,
        tolerance=_SCALED_TOLERANCE,
        scalable=False,
        scaled=True,
    )


def _few_blts(size: Size) -> list[Strategy]:
    """Starts of a BLT of few buffers: several where a run is short, and has several optima.

    Between diagonals one start in five ends 0.5% high at 2 × 8, ε = 1. In longer runs two starts
    end alike (16 × 128, ε from 0.5 to 8: within 0.1%).
    """
    if size.buffers > _WARM_BUFFERS:
        return []
    limit = None if size.n <= _SHORT_RUN else 1
    spread: list[Strategy] = [*starts.spread_blts(size.buffers, size.bins)]
    return spread[:limit]


def _blt(size: Size, buffers: int = _WARM_BUFFERS) -> Stage:
    return Stage(find("blt"), size._replace(buffers=buffers, bands=1))  # one stage for all bands


def _banded_toeplitz(size: Size, bands: int) -> Stage:
    return Stage(find("banded-toeplitz"), size._replace(bands=min(bands, size.n)))


def _scaled(stage: Stage) -> list[Stage]:
    return [Stage(scaled(stage.kind), stage.size)]


register(
    Kind(
        "blt",
        scalable=True,
        starts=_few_blts,
        # many buffers from a few: spread evenly they end in a worse optimum
        prerequisites=lambda size: (
            [_blt(size, starts.fewer(size.buffers))] if size.buffers > _WARM_BUFFERS else []
        ),
        convert=starts.as_blt,
        parameterize=parameterization.blt,
        tilted=starts.tilted_blt,
        parameters=lambda size: 2 * size.buffers,
        stretch=starts.stretched,
        working=lambda size: 4.0 * size.n * size.buffers,
        samples=2**13,
        steps=150,
        tolerance=1e-4,
    )
)
register(
    Kind(
        "toeplitz",
        scalable=True,
        # at a large ε the optimum is cut at the epoch, where a search from a smooth C ends too soon
        prerequisites=lambda size: [_blt(size), _banded_toeplitz(size, size.bins)],
        convert=lambda strategy, size: starts.of_coefficients(Toeplitz, strategy, size.n),
        parameterize=parameterization.toeplitz,
        tilted=starts.tilted_toeplitz,
        parameters=lambda size: size.n - 1,  # the first coefficient is 1
        samples=2**14,
        steps=100,
        tolerance=2e-5,
        warm_steps=100,
    )
)
register(
    Kind(
        "banded-toeplitz",
        scalable=True,
        prerequisites=lambda size: [_blt(size)],
        convert=lambda strategy, size: starts.of_coefficients(
            BandedToeplitz, strategy, min(size.bands, size.n)
        ),
        parameterize=parameterization.banded_toeplitz,
        tilted=starts.tilted_toeplitz,
        parameters=lambda size: size.bands - 1,
        samples=2**13,
        steps=80,
        tolerance=2e-5,
    )
)
register(
    Kind(
        "cleared-blt",
        scalable=True,
        starts=lambda size: [starts.cleared(size, weight) for weight in starts.CLEARED_WEIGHTS],
        convert=starts.same_cleared,
        parameterize=parameterization.cleared_blt,
        parameters=lambda size: 2 * len(starts.cleared(size).periods),
        working=lambda size: float(size.n) * (size.buffers + 2) ** 2,
        samples=2**13,
        steps=100,
        tolerance=1e-4,
    )
)
register(
    Kind(
        "wave-blt",
        twice=_WAVE_RUN,
        scalable=True,
        # with both free from the start, a wave far from its place ended up to 2.5% above
        plain_first=True,
        starts=starts.waves,
        # as for blt: with own starts six buffers ended 0.3% above four at 16 × 128, ε = 2
        prerequisites=lambda size: (
            [Stage(find("wave-blt"), size._replace(buffers=starts.FEWEST_WAVE))]
            if size.buffers > starts.FEWEST_WAVE
            else []
        ),
        convert=starts.as_wave,
        parameterize=parameterization.wave_blt,
        parameters=lambda size: 2 * size.buffers - 1,
        working=lambda size: float(size.n) * (size.buffers + 2) ** 2,
        samples=2**13,
        steps=100,
        tolerance=2e-5,
    )
)
register(
    Kind(
        "banded",
        tangents=False,
        prerequisites=lambda size: _scaled(_banded_toeplitz(size, size.bands)),
        convert=lambda strategy, size: Banded.from_dense(
            np.asarray(strategy.materialize(size.n)), min(size.bands, size.n)
        ),
        parameterize=parameterization.banded,
        parameters=lambda size: float(size.bands) * size.n,
        samples=2**14,
        steps=120,
        tolerance=2e-5,
    )
)
register(
    Kind(
        "dense",
        tangents=False,
        prerequisites=lambda size: _scaled(Stage(find("toeplitz"), size)),
        convert=lambda strategy, size: Dense(np.asarray(strategy.materialize(size.n))),
        parameterize=parameterization.dense,
        parameters=lambda size: float(size.n) ** 2,
        samples=2**14,
        steps=120,
        tolerance=2e-5,
    )
)
