"""Interface of every strategy matrix C, and the shared implementation of Toeplitz matrices.

Conventions: C is n×n, lower triangular, entries >= 0; the mechanism adds C⁻¹z to the per-step
sums, so the sensitivity is that of C x (column side: ``CᵀC``, never ``C Cᵀ``). n is never
inferred: it is given, or follows from the sampling scheme.

A kind of strategy is one class. Defining it registers it: as a frozen dataclass, as a JAX pytree,
and under its ``kind`` for files. Only ``materialize`` (``toeplitz_coefs`` for a Toeplitz C) and
``column_bands`` must be written; the rest has defaults that work on the dense matrix, right for
every C and slow for a large one. What lies above this package (noise recursions, errors, the
optimizer's table) is found by dispatch on the class, so a kind is added without an edit here.

>>> import jax.numpy as jnp
>>> class Geometric(ToeplitzStrategy):
...     \"\"\"C with coefficients 1, r, r², …\"\"\"
...     kind = "doctest-geometric"
...     ratio: Array = parameter(dimensions=0)
...     def toeplitz_coefs(self, n):
...         return jnp.asarray(self.ratio) ** jnp.arange(n)
>>> Geometric(0.5).describe(), Geometric(0.5).arrays()
({'kind': 'doctest-geometric'}, {'ratio': array(0.5)})
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from typing import Any, ClassVar, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from scipy.fft import next_fast_len

from mfopt._runtime import _check
from mfopt._runtime._float64 import MARK, compiled, float64
from mfopt._runtime._pytree import pytree
from mfopt._runtime._types import JsonObject
from mfopt.errors import FailureError
from mfopt.sampling import BallsInBins
from mfopt.sampling.base import find
from mfopt.strategies import fields, series
from mfopt.strategies.fields import Array, Inner, Parameter, inner, parameter, setting

_KINDS: dict[str, type[Strategy]] = {}
# what gives numbers of C: run in float64 without a word in the subclass
_NUMERIC = {
    "materialize",
    "toeplitz_coefs",
    "inverse_coefs",
    "multiply",
    "solve",
    "solve_transposed",
    "modes",
    "gram",
    "tables",
    "diagonals",
}


def registered() -> dict[str, type[Strategy]]:
    """Kinds of strategies defined so far: kind -> class."""
    return dict(_KINDS)


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(parameter, setting, inner)
)
class Strategy(abc.ABC):
    """A strategy matrix: a pytree of parameters (leaves) plus static shape information.

    A subclass with a ``kind`` becomes a frozen dataclass and is registered; its fields are
    declared by :func:`parameter`, :func:`setting` and :func:`inner`. A strategy can be passed
    through ``jax.jit`` and ``jax.grad``: compute with ``jax.numpy``. What gives numbers of C runs
    in float64, also where a subclass writes it; results are numpy arrays outside a trace.

    Raises:
      UsageError: on definition, a kind that is missing, badly spelled or taken, or a field
        without a role; on construction, arguments that do not fit their declarations.
    """

    kind: ClassVar[str]
    scaled_by: ClassVar[str | None] = None  # the parameter that C is proportional to
    described: ClassVar[tuple[str, ...]] = ()  # properties that its description has for readers

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _NUMERIC & cls.__dict__.keys():
            method = cls.__dict__[name]
            if callable(method) and not getattr(method, MARK, False):  # no parameter, no property
                wrapped: Any = float64(method)
                is_static = isinstance(method, staticmethod)
                setattr(cls, name, staticmethod(wrapped) if is_static else wrapped)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        if "kind" in cls.__dict__:
            _register(cls)
        elif hasattr(cls, "kind"):
            rule = "needs a kind of its own"
            way_out = "Two classes of one kind could not be distinguished in a file."
            raise _check.reject(cls.__name__, f"kind {cls.kind!r} inherited", rule, way_out)

    def __post_init__(self) -> None:
        cls = type(self)
        if not hasattr(cls, "kind"):
            raise _check.reject(cls.__name__, cls, "is not registered: give it a kind")
        for name, role in fields.roles(cls).items():
            value = getattr(self, name)
            if isinstance(role, Inner):
                if not isinstance(value, Strategy):
                    raise _check.reject(name, type(value).__name__, "must be a strategy")
            else:
                object.__setattr__(self, name, role.checked(name, value))
        self.check_parameters()

    def check_parameters(self) -> None:  # noqa: B027 - most kinds have nothing to check
        """Raise :class:`UsageError` where parameters do not fit together.

        Called on construction, with tracers too: look at shapes and settings, not at values
        (:meth:`check_entries` does that).
        """

    @abc.abstractmethod
    def materialize(self, n: int) -> Array:
        """Dense C, shape (n, n)."""

    @abc.abstractmethod
    def column_bands(self, n: int) -> int:
        """Upper bound on the number of nonzero diagonals of the n×n C, counted from the main one.

        n is always a valid answer. Accountants compare a smaller one with the matrix.
        """

    def most_bands(self, n: int) -> int:
        """A bound on :meth:`column_bands` from settings and shapes alone, whatever the values."""
        return self.check_size(n)

    @compiled("n", "bands")
    def banded_columns(self, n: int, bands: int) -> Array:
        """The first ``bands`` diagonals: [d, j] = C[j + d, j], 0 below row n; shape (bands, n)."""
        row = jnp.arange(bands)[:, None] + jnp.arange(n)[None, :]
        entries = jnp.asarray(self.materialize(n))[jnp.clip(row, 0, n - 1), jnp.arange(n)]
        return jnp.where(row < n, entries, 0)

    @staticmethod
    def _of_diagonals(columns: Array) -> jax.Array:
        """C (n, n) of its :meth:`banded_columns`, (bands, n): zero below them."""
        columns = jnp.asarray(columns)
        bands, n = columns.shape
        lag = jnp.arange(n)[:, None] - jnp.arange(n)[None, :]
        inside = (lag >= 0) & (lag < bands)
        return jnp.where(inside, columns[jnp.clip(lag, 0, bands - 1), jnp.arange(n)], 0)

    @property
    def of_numbers(self) -> bool:
        """True if no parameter is a JAX array: what NumPy has of C then compiles nothing."""
        return not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(self))

    def toeplitz_column(self, n: int) -> Array | None:
        """First column of C, shape (n,), where its kind makes C Toeplitz; None otherwise."""
        return None

    def scaled_column(self, n: int) -> tuple[Array, Array, Array] | None:
        """(c, r, d), each (n,), where its kind is diag(r) T diag(d), T Toeplitz of column c."""
        return None

    @property
    def is_identity(self) -> bool:
        """True where C is I for every n: noise is independent, and no array is needed to say so."""
        return False

    def rescaled(self, factor: float) -> Self | None:
        """The strategy ``factor`` · C, or None where the definition of the kind fixes the scale.

        The mechanism (C, σ) is that of (factor · C, factor · σ).
        """
        if self.scaled_by is None:
            return None
        strategy: Any = self  # a dataclass, which type checkers do not see
        return dataclasses.replace(
            strategy, **{self.scaled_by: factor * getattr(strategy, self.scaled_by)}
        )

    def widened(self) -> Self:
        """The same C with numpy float64 parameters: what a tree function made narrow is not so.

        Raises:
          UsageError: parameters that are not real numbers, or floats of 16 bits and fewer.
        """
        leaves = jax.tree.leaves(self)
        if all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float64 for leaf in leaves):
            return self  # with what it keeps beside its parameters
        return jax.tree.map(lambda leaf: fields.wide("C", leaf), self)

    def arrays(self) -> dict[str, np.ndarray]:
        """The parameters by name: with :meth:`describe`, all that a file needs to store.

        Those of an inner strategy have its field's name and a slash before their own.
        """
        stored: dict[str, np.ndarray] = {}
        for name, role in fields.roles(type(self)).items():
            value = getattr(self, name)
            if isinstance(role, Inner):
                stored |= {f"{name}/{key}": array for key, array in value.arrays().items()}
            elif isinstance(role, Parameter):
                array = np.asarray(value, np.float64)
                default = _default_of(type(self), name)
                if default is dataclasses.MISSING or not np.array_equal(array, default):
                    stored[name] = array
        return stored

    def describe(self) -> JsonObject:
        """JSON-able description: the kind and its static settings, without the parameters.

        :func:`from_description` compares what is ``described`` for readers.
        """
        facts: JsonObject = {"kind": self.kind}
        for name, role in fields.roles(type(self)).items():
            if isinstance(role, Inner):
                facts[name] = getattr(self, name).describe()
            elif not isinstance(role, Parameter):
                facts[name] = getattr(self, name)
        return facts | {name: getattr(self, name) for name in self.described}

    def inverse_arrays(self, n: int) -> dict[str, np.ndarray]:
        """C⁻¹ for programs that read a file and stream its noise with numpy alone; may be empty."""
        return {}

    def check_inverse(self, n: int) -> None:  # noqa: B027 - most kinds have no such arrays
        """Raise :class:`FailureError` unless :meth:`inverse_arrays` are those of C⁻¹, computed by
        multiplication with C; a kind that has such arrays says how.
        """

    def __eq__(self, other: object) -> bool:
        """Equal kind, settings and parameters."""
        if not isinstance(other, Strategy):
            return NotImplemented
        mine, theirs = self.arrays(), other.arrays()
        return (
            self.describe() == other.describe()
            and mine.keys() == theirs.keys()
            and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        )

    def __hash__(self) -> int:
        content = [(name, array.tobytes()) for name, array in sorted(self.arrays().items())]
        return hash((json.dumps(self.describe(), sort_keys=True), *content))

    def check_size(self, n: int) -> int:
        """``n``, refused where this C is not defined for so many iterations."""
        return _check.integer("n", n)

    def _known_for(self, limit: int, n: int) -> int:
        """``n``, refused beyond the ``limit`` iterations that C is known for."""
        if Strategy.check_size(self, n) > limit:
            rule = f"this {self.kind} strategy is known for {limit} steps"
            way_out = "Use it for at most that many iterations, or optimize one for n."
            raise _check.reject("n", n, rule, way_out)
        return n

    @compiled()
    def multiply(self, x: Array) -> Array:
        """C x for ``x`` of shape (n, ...)."""
        x = jnp.asarray(x)
        return jnp.tensordot(self.materialize(x.shape[0]), x, axes=1)

    @compiled()
    def solve(self, y: Array) -> Array:
        """C⁻¹ y for ``y`` of shape (n, ...): correlated noise from white noise."""
        y = jnp.asarray(y)
        flat = y.reshape(y.shape[0], -1)
        return solve_triangular(self.materialize(y.shape[0]), flat, lower=True).reshape(y.shape)

    @compiled()
    def solve_transposed(self, y: Array) -> Array:
        """C⁻ᵀ y for ``y`` of shape (n, ...)."""
        y = jnp.asarray(y)
        flat, matrix = y.reshape(y.shape[0], -1), self.materialize(y.shape[0])
        return solve_triangular(matrix, flat, lower=True, trans=1).reshape(y.shape)

    @compiled("scheme")
    def modes(self, scheme: BallsInBins) -> Array:
        """Mode i = Σ_j C[:, bins·j + i], shape (n, bins): what a unit in bin i adds to C x."""
        return self.weighted_modes(jnp.ones(scheme.iterations), scheme)

    @compiled("scheme")
    def weighted_modes(self, columns: Array, scheme: BallsInBins) -> Array:
        """Modes of C diag(``columns``), shape (n, bins); ``columns`` has shape (n,)."""
        n = self.check_size(scheme.iterations)
        weighted = jnp.asarray(self.materialize(n)) * jnp.asarray(columns)[None, :]
        return weighted.reshape(n, scheme.epochs, scheme.bins).sum(axis=1)

    @float64  # the program of its modes is enough
    def gram(self, scheme: BallsInBins) -> Array:
        """Gram matrix G[i, k] = <mode i, mode k>, shape (bins, bins)."""
        if self.has_structured_gram(scheme):
            return self.structured_gram(scheme)[0]
        modes = self.modes(scheme)
        return modes.T @ modes

    def gram_product(self, slope: Array, scheme: BallsInBins) -> jax.Array:
        """<H, G> for a ``slope`` H (bins, bins), differentiable in the strategy.

        Where G is MᵀM of the modes M: one product M H for the value and the gradient, 2 M H.
        """
        slope = jnp.asarray(slope)
        if type(self).gram is not Strategy.gram:
            return jnp.sum(slope * jnp.asarray(self.gram(scheme)))
        modes = jnp.asarray(self.modes(scheme))
        value = jnp.sum(modes * jax.lax.stop_gradient(modes @ (slope + slope.T) / 2))
        return 2 * value - jax.lax.stop_gradient(value)

    @compiled("scheme", "size")
    def grouped_gram(self, scheme: BallsInBins, size: int) -> tuple[Array, Array]:
        """Gram matrix of the mean modes of groups of neighbouring bins, and mean squared norms.

        Args:
          scheme: bins and epochs.
          size: bins in a group; the last may have fewer.

        Returns:
          <mean mode, mean mode>, shape (groups, groups), and the mean of |mode|², shape (groups,).
        """
        gram, share = jnp.asarray(self.gram(scheme)), _shares(scheme.bins, size)
        return share.T @ gram @ share, share.T @ jnp.diagonal(gram)

    def grouped_product(
        self, slope: Array, diagonal: Array, scheme: BallsInBins, size: int
    ) -> jax.Array:
        """<``slope``, Gram matrix> + <``diagonal``, norms> of :meth:`grouped_gram`.

        Args:
          slope: shape (groups, groups).
          diagonal: shape (groups,).
          scheme, size: as there.
        """
        share = _shares(scheme.bins, size)
        whole = share @ jnp.asarray(slope) @ share.T + jnp.diag(share @ jnp.asarray(diagonal))
        return self.gram_product(whole, scheme)

    def has_structured_gram(self, scheme: BallsInBins) -> bool:
        """Return True if :meth:`structured_gram` supports this size."""
        return False

    def structured_gram(self, scheme: BallsInBins) -> tuple[Array, float]:
        """G without the modes, C >= 0, and a bound on the relative error of each of its entries."""
        raise NotImplementedError(f"{type(self).__name__} has no Gram matrix by structure")

    def check_entries(self, n: int) -> None:
        """Raise :class:`UsageError` unless C is finite, >= 0, lower triangular and invertible.

        Non-negative entries are the condition of Lemma 3.2 (Choquette-Choo et al. 2024): with a
        negative entry the pair (P, Q) built from the modes need not dominate the mechanism.
        """
        matrix = np.asarray(self.materialize(self.check_size(n)))
        check_values(matrix[np.tril_indices(n)], np.diagonal(matrix))
        check_triangular(matrix)


def _shares(bins: int, size: int) -> np.ndarray:
    """(bins, groups): what each bin is of the mean of its group."""
    group = np.arange(bins) // size
    members = (group[:, None] == np.arange(group[-1] + 1)).astype(float)
    return members / members.sum(axis=0)


def check_triangular(columns: np.ndarray, start: int = 0) -> None:
    """Raise :class:`UsageError` unless C is lower triangular and invertible.

    Noise is made step by step: no loop could add C⁻¹z of any other C.

    Args:
      columns: of C, shape (n, any).
      start: number of the first of them.
    """
    if np.any(np.triu(columns, 1 - start)):
        raise _check.reject("C", "entry above the diagonal", "must be lower triangular")
    if not np.all(np.diagonal(columns, -start)):
        raise _check.reject("C", "0 on the diagonal", "must be invertible")


def check_values(entries: np.ndarray, diagonal: np.ndarray) -> None:
    if not np.all(np.isfinite(entries)):
        raise _check.reject("C", "non-finite entry", "all entries must be finite numbers")
    lowest = float(np.min(entries))
    if lowest < 0:
        rule = "all entries must be >= 0"
        way_out = "With negative entries no dominating pair is known for balls-in-bins batching "
        way_out += "(Lemma 3.2, Choquette-Choo et al. 2024); use a non-negative strategy."
        raise _check.reject("C", lowest, rule, way_out)
    if not np.all(diagonal > 0):
        raise _check.reject("C", float(np.min(diagonal)), "diagonal must be greater than 0")


class ToeplitzStrategy(Strategy):
    """A strategy matrix that is constant along diagonals: everything follows from n numbers."""

    @abc.abstractmethod
    def toeplitz_coefs(self, n: int) -> Array:
        """First column of C, shape (n,)."""

    def toeplitz_column(self, n: int) -> Array:
        return self.toeplitz_coefs(n)

    def inverse_coefs(self, n: int) -> Array:
        """First column of C⁻¹, shape (n,)."""
        return _toeplitz_inverse(self.toeplitz_coefs(n))

    @compiled("n")
    def materialize(self, n: int) -> Array:
        return series.toeplitz(jnp.asarray(self.toeplitz_coefs(n)))

    def column_bands(self, n: int) -> int:
        """Counted in the coefficients, never declared."""
        return int(np.max(np.flatnonzero(np.asarray(self.toeplitz_column(n))), initial=0)) + 1

    @compiled("n", "bands")
    def banded_columns(self, n: int, bands: int) -> Array:
        coefs = jnp.asarray(self.toeplitz_coefs(n))[:bands, None]
        inside = jnp.arange(bands)[:, None] + jnp.arange(n)[None, :] < n
        return jnp.where(inside, coefs, 0)

    def inverse_arrays(self, n: int) -> dict[str, np.ndarray]:
        return {"inverse_coefs": np.asarray(self.inverse_coefs(n))}

    def check_inverse(self, n: int) -> None:
        coefs, inverse = np.asarray(self.toeplitz_coefs(n)), np.asarray(self.inverse_coefs(n))
        excess = series.inverse_error(coefs, inverse)
        if not excess <= 1:  # NaN too
            raise FailureError(
                f"C times its inverse is not the identity: off by {excess:.3g} times what rounding "
                "explains; its inverse cannot be computed in double precision"
            )

    def multiply(self, x: Array) -> Array:
        product: Array = series.convolve(self.toeplitz_coefs(x.shape[0]), x)
        return product

    @compiled()
    def solve(self, y: Array) -> Array:
        y = jnp.asarray(y)
        return series.apply(jnp.asarray(self.inverse_coefs(y.shape[0])), y)

    def solve_transposed(self, y: Array) -> Array:
        # the transpose of a Toeplitz matrix is itself, both its sides reversed
        solution: Array = series.convolve(self.inverse_coefs(y.shape[0]), y[::-1])[::-1]
        return solution

    def modes(self, scheme: BallsInBins) -> Array:
        return _toeplitz_modes(self.toeplitz_coefs(scheme.iterations), scheme)

    def gram(self, scheme: BallsInBins) -> Array:
        """Gram matrix in O(n log n + bins²).

        Mode i is mode 0 shifted down by i and cut at n, so with u = first mode
        G[i, k] = Σ_{t=0}^{n-1-k} u_t u_{t+k-i}. The last column is an autocorrelation; one step
        up a diagonal adds one product from the end of u.
        """
        return _toeplitz_gram(self.toeplitz_coefs(scheme.iterations), scheme)

    def check_entries(self, n: int) -> None:
        coefs = np.asarray(self.toeplitz_coefs(self.check_size(n)))
        check_values(coefs, coefs[:1])


# of coefficients: one program serves all kinds of a size
@compiled()
def _toeplitz_inverse(coefs: Array) -> Array:
    return series.reciprocal(jnp.asarray(coefs))


@compiled("scheme")
def _toeplitz_modes(coefs: Array, scheme: BallsInBins) -> Array:
    return series.toeplitz(_first_mode(coefs, scheme), scheme.bins)


@compiled("scheme")
def _toeplitz_gram(coefs: Array, scheme: BallsInBins) -> Array:
    n, b = scheme.iterations, scheme.bins
    first_mode = _first_mode(coefs, scheme)
    head = n - b + 1
    size = next_fast_len(n + head, real=True)
    spectrum = jnp.conj(jnp.fft.rfft(first_mode[:head], size)) * jnp.fft.rfft(first_mode, size)
    last_column = jnp.fft.irfft(spectrum, size)[:b]  # by lag d: G[b-1-d, b-1]
    tail = first_mode[n - b :][::-1]  # tail[i] = u_{n-1-i}
    i, d = jnp.arange(b)[None, :], jnp.arange(b)[:, None]
    # by lag d and row i: u_{n-1-k} u_{n-1-i} with k = i + d, for every k < b - 1
    steps = jnp.where(i + d < b - 1, tail[i] * tail[jnp.minimum(i + d, b - 1)], 0)
    by_lag = last_column[:, None] + jnp.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
    row, column = jnp.minimum(d, i), jnp.maximum(d, i)
    return by_lag[column - row, row]


def _first_mode(coefs: Array, scheme: BallsInBins) -> jax.Array:
    """Σ_j (column 0 shifted by bins·j): a running sum over the epochs."""
    by_epoch = jnp.asarray(coefs).reshape(scheme.epochs, scheme.bins)
    return jnp.cumsum(by_epoch, axis=0).reshape(-1)


def dimensions(description: JsonObject) -> dict[str, int]:
    """The arrays that a strategy with this description may have, and their number of dimensions.

    Raises:
      UsageError: an unknown kind (the module that defines it must have been imported).
    """
    cls, counts = _kind_of(description), dict[str, int]()
    for name, role in fields.roles(cls).items():
        if isinstance(role, Inner):
            inside = dimensions(_inside(description, name))
            counts |= {f"{name}/{key}": count for key, count in inside.items()}
        elif isinstance(role, Parameter):
            counts[name] = role.dimensions
    return counts


def _kind_of(description: JsonObject) -> type[Strategy]:
    way_out = "A kind of your own is known once its module is imported."
    return find("strategy kind", description.get("kind"), _KINDS, way_out)


def _inside(description: JsonObject, name: str) -> JsonObject:
    inside = description.get(name)
    if not isinstance(inside, dict):
        raise _check.reject(name, inside, f"a {description['kind']} strategy has a strategy here")
    return inside


def from_description(description: JsonObject, arrays: dict[str, np.ndarray]) -> Strategy:
    """The strategy that gave ``describe()`` and ``arrays()``; anything else is refused.

    Raises:
      UsageError: an unknown kind (the module that defines it must have been imported), missing or
        superfluous arrays or settings, arrays of another type or shape than declared.
    """
    cls = _kind_of(description)
    kind = cls.kind
    remaining, values = dict(arrays), dict[str, Any]()
    for name, role in fields.roles(cls).items():
        if isinstance(role, Inner):
            part = {k: remaining.pop(k) for k in list(remaining) if k.startswith(f"{name}/")}
            values[name] = from_description(
                _inside(description, name), {k.removeprefix(f"{name}/"): v for k, v in part.items()}
            )
        elif isinstance(role, Parameter):
            if name in remaining:
                values[name] = value = remaining.pop(name)
                if value.dtype != np.float64:
                    raise _check.reject(name, f"array of {value.dtype}", "must be float64")
        elif name in description:
            values[name] = description[name]
        if name not in values and _default_of(cls, name) is dataclasses.MISSING:
            raise _check.reject(
                "strategy", sorted([*description, *arrays]), f"a {kind} strategy needs {name!r}"
            )
    if remaining:
        raise _check.reject("arrays", sorted(remaining), f"are not part of a {kind} strategy")
    strategy = cls(**values)
    if strategy.describe() != description:
        raise _check.reject(
            "strategy", description, f"its arrays describe {strategy.describe()} instead"
        )
    return strategy


def _register(cls: type[Strategy]) -> None:
    """Note the kind, and make the class a JAX pytree."""
    kind = cls.kind
    if not isinstance(kind, str) or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", kind):
        raise _check.reject(
            f"{cls.__name__}.kind", kind, "must be lower-case words joined by hyphens"
        )
    registered = _KINDS.get(kind)
    # a notebook cell that runs twice redefines the same class
    if registered is not None and _name(registered) != _name(cls):
        raise _check.reject(
            f"{cls.__name__}.kind",
            kind,
            f"is taken by {registered.__module__}.{registered.__qualname__}",
        )
    fields.roles(cls)  # a field without one is refused
    pytree(cls)
    _KINDS[kind] = cls


def _name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _default_of(cls: type, name: str) -> Any:
    """The default of a field, or ``dataclasses.MISSING``."""
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)
