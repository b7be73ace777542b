"""What the optimizer knows of each kind of C: the one table of it.

A kind of one's own registers one entry; nothing else is edited::

    kinds.register(Kind("mine", starts=..., convert=..., parameterize=..., samples=2**11,
                        steps=100, tolerance=1e-4))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from mfopt import _check, strategies
from mfopt.optimize import parameterization, starts, time_scale
from mfopt.optimize.parameterization import Parameterization
from mfopt.optimize.time_scale import Scaling
from mfopt.strategies import Strategy, TimeScaled, fields


class Size(NamedTuple):
    """How large a C is wanted.

    Attributes:
      n, bins: iterations, and iterations an epoch.
      bands, buffers: as the caller chose them, for kinds that have such a number.
    """

    n: int
    bins: int
    bands: int
    buffers: int


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to optimize one kind of C.

    Attributes:
      name: what a caller asks for.
      convert: any strategy as a start of this kind, or None where it says nothing about it.
      parameterize: (strategy of this kind, n) -> unconstrained parameters and the way back. The
        way back is differentiable and hashable, and equal for equal shapes, so that one compiled
        objective serves all starts.
      starts: where to begin without any other strategy.
      after: unless there are ``starts``, the kind whose optimum is converted to one.
      samples: frozen Monte Carlo samples. Few suffice for a handful of parameters; a free
        coefficient for every lag would fit the noise of a small sample.
      steps: evaluations of the objective at most.
      tolerance: relative change of the error at which the search ends: a tenth of what the
        samples can resolve.
      warm_steps: evaluations at most where this kind is the start of another.
      scalable: whether diagonals that vary with time make more of it: not where C has them already.
      tangents: whether :mod:`mfopt.optimize.tangent` is the better search: not where one cheap
        evaluation costs as much as the samples.
    """

    name: str
    convert: Callable[[Strategy, Size], Strategy | None]
    parameterize: Callable[[Any, int], Parameterization]
    samples: int
    steps: int
    tolerance: float
    starts: Callable[[Size], list[Strategy]] | None = None
    after: str = "blt"
    warm_steps: int = 60
    scalable: bool = False
    tangents: bool = True
    chain: tuple[Kind, ...] | None = None  # kinds to optimize before this one, instead of ``after``

    def before(self) -> tuple[Kind, ...]:
        """Kinds whose optima lead here, the one with ``starts`` first; none where this one has."""
        if self.chain is not None or self.starts is not None:
            return self.chain or ()
        earlier = find(self.after)
        return (*earlier.before(), earlier)


_KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add an entry; a name that is taken is refused.

    Raises:
      UsageError: the name has an entry already, or ``after`` has none.
    """
    known = _KINDS.get(kind.name)
    if known is not None and known.parameterize.__module__ != kind.parameterize.__module__:
        raise _check.reject("kind", kind.name, "can be optimized already: take another name")
    if kind.starts is None and kind.after not in _KINDS:
        raise _check.reject("after", kind.after, f"must be one of {', '.join(_KINDS)}")
    _KINDS[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """Kinds that can be optimized."""
    return tuple(_KINDS)


def fixed_names() -> tuple[str, ...]:
    """Kinds of strategies without parameters: known once their size is."""
    return tuple(
        name
        for name, cls in strategies.registered().items()
        if all(isinstance(role, fields.Setting) for role in fields.roles(cls).values())
    )


def find(name: str) -> Kind:
    """The entry of that name.

    Raises:
      UsageError: there is none.
    """
    if name not in _KINDS:
        raise _check.reject("strategy", name, f"must be one of {', '.join(_KINDS)}")
    return _KINDS[name]


def fixed(name: str, **sizes: int) -> Strategy:
    """A strategy without free parameters, by name; of ``sizes`` it takes those it has.

    Raises:
      UsageError: no such kind, or one with parameters.
    """
    if name not in fixed_names():
        known = ", ".join(dict.fromkeys((*_KINDS, *fixed_names())))
        raise _check.reject("strategy", name, f"must be one of {known}")
    cls = strategies.registered()[name]
    return cls(**{key: value for key, value in sizes.items() if key in fields.roles(cls)})


def of(strategy: Strategy, n: int) -> Parameterization:
    """Parameters of ``strategy`` as an n×n matrix, and the way back.

    Raises:
      UsageError: a kind that cannot be optimized.
    """
    if isinstance(strategy, TimeScaled):
        return time_scale.scaled(strategy, n, of(strategy.base, n), Scaling())
    if strategy.kind not in _KINDS:
        raise _check.reject("strategy", strategy.kind, "has no parameters to optimize")
    return _KINDS[strategy.kind].parameterize(strategy, n)


def scaled(kind: Kind, scaling: Scaling) -> Kind:
    """The entry of a kind between two diagonals that vary with time.

    A kind without starts of its own begins at the optimum of a scaled BLT, with its diagonals.

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
        return time_scale.scaled(strategy, n, kind.parameterize(strategy.base, n), scaling)

    own, chain = kind.starts, None
    if own is None:
        chain = (scaled(find("blt"), scaling),)
    return dataclasses.replace(
        kind,
        name=f"{kind.name} scaled",
        convert=convert,
        parameterize=parameterize,
        # the first start is enough: the search comes from afar
        starts=None if own is None else lambda size: [TimeScaled(own(size)[0])],
        samples=max(kind.samples, time_scale.SAMPLES),
        steps=time_scale.STEPS,
        warm_steps=time_scale.STEPS,
        tolerance=time_scale.TOLERANCE,
        chain=chain,
        scalable=False,
    )


register(
    Kind(
        "blt",
        scalable=True,
        starts=lambda size: [*starts.spread_blts(size.buffers, size.bins)],
        convert=lambda strategy, size: starts.same_blt(strategy, size.buffers),
        parameterize=parameterization.blt,
        samples=2**13,
        steps=150,
        tolerance=2e-5,
    )
)
register(
    Kind(
        "toeplitz",
        scalable=True,
        convert=lambda strategy, size: starts.as_toeplitz(strategy, size.n),
        parameterize=parameterization.toeplitz,
        samples=2**14,
        steps=100,
        tolerance=1e-5,
        warm_steps=100,
    )
)
register(
    Kind(
        "banded-toeplitz",
        scalable=True,
        convert=lambda strategy, size: starts.as_banded_toeplitz(strategy, size.n, size.bands),
        parameterize=parameterization.banded_toeplitz,
        samples=2**13,
        steps=80,
        tolerance=2e-5,
    )
)
register(
    Kind(
        "banded",
        tangents=False,
        convert=lambda strategy, size: starts.as_banded(strategy, size.n, size.bands),
        parameterize=parameterization.banded,
        samples=2**14,
        steps=60,
        tolerance=2e-5,
    )
)
register(
    Kind(
        "dense",
        tangents=False,
        convert=lambda strategy, size: starts.as_dense(strategy, size.n),
        parameterize=parameterization.dense,
        after="toeplitz",
        samples=2**14,
        steps=120,
        tolerance=2e-5,
    )
)
