"""Workloads A: which linear queries of the per-step sums the error is measured on.

Training with plain SGD is prefix sums; momentum and learning-rate schedules give other lower-
triangular matrices. A workload is public and frozen. It says what shape it has
(:meth:`Workload.toeplitz_coefs`, :meth:`Workload.recurrence`), so that nobody asks for its class.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mfopt._runtime import _archive, _check, _sizes
from mfopt._runtime._types import JsonObject

_KINDS: dict[str, type[Workload]] = {}


class Workload(abc.ABC):
    """A lower-triangular, invertible A. A subclass, a dataclass with a ``kind``, is known to files.

    Equality and hash are by content, because compiled functions are cached by workload: an
    identity hash would let a new workload find what was compiled for a dead one at the same
    address. Array fields are copied and made read-only, so the content cannot change.

    Attributes:
      kind: the name in files.
      dimensions: those of each array field, by name.
    """

    kind: ClassVar[str]
    dimensions: ClassVar[dict[str, int]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in cls.__dict__:
            return
        registered = _KINDS.get(cls.kind, cls)
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            raise _check.reject(f"{cls.__name__}.kind", cls.kind, "is taken by another workload")
        _KINDS[cls.kind] = cls

    @abc.abstractmethod
    def materialize(self, n: int) -> np.ndarray:
        """Dense A, shape (n, n)."""

    def toeplitz_coefs(self, n: int) -> np.ndarray | None:
        """First column of A, shape (n,), where A is constant along diagonals; else None."""
        return None

    def recurrence(self, n: int) -> tuple[np.ndarray, float] | None:
        """(η, β) where A x = y for m_t = β m_{t-1} + x_t, y_t = y_{t-1} + η_t m_t; else None.

        η has shape (n,). Prefix sums have η = 1 and β = 0.
        """
        return None

    def describe(self) -> JsonObject:
        """JSON-able description: the kind and every field but the arrays."""
        cls: Any = type(self)
        names = [field.name for field in dataclasses.fields(cls)]
        numbers = {name: getattr(self, name) for name in names if name not in self.dimensions}
        return {"kind": self.kind, **numbers}

    def arrays(self) -> dict[str, np.ndarray]:
        """Fields that the description leaves out."""
        return {name: getattr(self, name) for name in self.dimensions}

    def _freeze(self, name: str) -> np.ndarray:
        value = getattr(self, name)
        try:
            frozen = np.array(value, np.float64)
        except (TypeError, ValueError):
            raise _check.reject(name, type(value).__name__, "must be an array of numbers") from None
        frozen.flags.writeable = False
        object.__setattr__(self, name, frozen)
        return frozen

    @functools.cached_property
    def _content(self) -> bytes:
        sha = hashlib.sha256(repr(sorted(self.describe().items())).encode())
        for name, value in sorted(self.arrays().items()):
            sha.update(f"{name}{value.shape}".encode() + value.tobytes())
        return sha.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixSums(Workload):
    """A[t, j] = 1 for j <= t: the partial sums that SGD with a constant learning rate follows."""

    kind = "prefix"

    def toeplitz_coefs(self, n: int) -> np.ndarray:
        return np.ones(n)

    def recurrence(self, n: int) -> tuple[np.ndarray, float]:
        return np.ones(n), 0.0

    def materialize(self, n: int) -> np.ndarray:
        return np.tril(np.ones((n, n)))


@dataclasses.dataclass(frozen=True, eq=False)
class ToeplitzWorkload(Workload):
    """A with A[t, j] = coefs[t - j]; defined for n <= len(coefs)."""

    coefs: np.ndarray
    kind = "toeplitz"
    dimensions: ClassVar[dict[str, int]] = {"coefs": 1}

    def __post_init__(self) -> None:
        coefs = self._freeze("coefs")
        if coefs.ndim != 1 or coefs.size == 0 or not np.all(np.isfinite(coefs)):
            raise _check.reject("coefs", coefs.shape, "must be a vector of finite numbers")
        if coefs[0] == 0:
            raise _check.reject("coefs[0]", 0.0, "must not be 0: A must be invertible")

    def toeplitz_coefs(self, n: int) -> np.ndarray:
        return self.coefs[: _at_most(n, len(self.coefs))]

    def materialize(self, n: int) -> np.ndarray:
        lag = np.subtract.outer(np.arange(n), np.arange(n))
        return np.tril(self.toeplitz_coefs(n)[np.abs(lag)])


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum(Workload):
    """The iterates of SGD with heavy-ball momentum under a learning-rate schedule.

    v_t = momentum·v_{t-1} + x_t and θ_t = θ_{t-1} - learning_rates[t]·v_t, so
    A[t, j] = Σ_{i=j..t} learning_rates[i]·momentum^(i-j) (Denisov et al. 2022, section 4).

    Attributes:
      momentum: in [0, 1).
      learning_rates: η_t > 0 for each step, shape (n_max,). Only ratios matter for choosing C;
        the error is in units of (clip norm × learning rate).
    """

    momentum: float
    learning_rates: np.ndarray
    kind = "momentum"
    dimensions: ClassVar[dict[str, int]] = {"learning_rates": 1}

    def __post_init__(self) -> None:
        momentum = _check.finite("momentum", self.momentum)
        if not 0 <= momentum < 1:
            raise _check.reject("momentum", self.momentum, "must lie in [0, 1)")
        object.__setattr__(self, "momentum", momentum)
        rates = self._freeze("learning_rates")
        if rates.ndim != 1 or rates.size == 0 or not np.all(np.isfinite(rates) & (rates > 0)):
            raise _check.reject("learning_rates", rates.shape, "must be a vector of numbers > 0")

    def materialize(self, n: int) -> np.ndarray:
        rates, _ = self.recurrence(n)
        lag = np.subtract.outer(np.arange(n), np.arange(n))
        velocity = np.tril(self.momentum ** np.abs(lag))
        return np.cumsum(rates[:, None] * velocity, axis=0)

    def recurrence(self, n: int) -> tuple[np.ndarray, float]:
        rates = self.learning_rates[: _at_most(n, len(self.learning_rates))]
        return rates, self.momentum


@dataclasses.dataclass(frozen=True, eq=False)
class DenseWorkload(Workload):
    """Any invertible lower-triangular A, used for n = its size exactly."""

    matrix: np.ndarray
    kind = "dense"
    dimensions: ClassVar[dict[str, int]] = {"matrix": 2}

    def __post_init__(self) -> None:
        matrix = self._freeze("matrix")
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
            raise _check.reject("matrix", matrix.shape, "must be square")
        if not np.all(np.isfinite(matrix)) or np.any(np.triu(matrix, 1)):
            raise _check.reject("matrix", matrix.shape, "must be finite and lower triangular")
        if not np.all(np.diagonal(matrix)):
            raise _check.reject("matrix", matrix.shape, "must have no 0 on its diagonal")

    def materialize(self, n: int) -> np.ndarray:
        n = _at_most(n, len(self.matrix))
        return self.matrix[:n, :n]


SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": np.ones_like,
    "averaged": np.ones_like,
    "linear": np.positive,
    "cosine": lambda remaining: (1 - np.cos(np.pi * remaining)) / 2,
    "wsd": lambda remaining: np.minimum(
        np.minimum(1, 10 * (1 - remaining + 1 / len(remaining))), 4 * remaining
    ),
}
"""Learning-rate schedules by name: rates, shape (n,), of the share of a run that remains."""


def linear_cooldown(n: int, start: int, stop: int, final: float) -> np.ndarray:
    """Learning rates 1 up to step ``start``, then linear down to ``final`` at ``stop``; (n,).

    The CIFAR-10 experiment of Choquette-Choo et al. 2024 (section 5.2) is
    ``linear_cooldown(2000, 500, 2000, 1 / 20)`` with momentum 0.95.

    Args:
      n: iterations.
      start: last step with rate 1.
      stop: step at which the rate has reached ``final``.
      final: last rate.
    """
    start = _check.integer("start", start, at_least=0)
    stop = _check.integer("stop", stop, at_least=start + 1)
    final = _check.positive("final", final)
    return np.interp(np.arange(_sizes.iterations(n)), [start, stop], [1.0, final])


def load(path: str | Path, n: int) -> ToeplitzWorkload | DenseWorkload:
    """A user's own workload from a ``.npy`` file: (n,) Toeplitz coefficients or (n, n) matrix."""
    values = _archive.array(path, "workload")
    if values.ndim not in (1, 2) or len(values) != n:
        rule = f"must have shape ({n},) or ({n}, {n})"
        way_out = "n is epochs × iterations per epoch."
        raise _check.reject("workload", f"{path} {values.shape}", rule, way_out)
    return ToeplitzWorkload(values) if values.ndim == 1 else DenseWorkload(values)


def dimensions(description: JsonObject) -> dict[str, int]:
    """The arrays that a workload with this description has, and their number of dimensions."""
    return _kind_of(description).dimensions


def from_description(description: JsonObject, arrays: dict[str, np.ndarray]) -> Workload:
    """The workload that gave ``describe()`` and ``arrays()``; anything else is refused."""
    fields = {**description, **arrays}
    cls = _kind_of(fields)
    del fields["kind"]
    try:
        return cls(**fields)
    except TypeError as error:
        raise _check.reject("workload", description, f"is not a description ({error})") from None


def _kind_of(description: JsonObject) -> type[Workload]:
    return _KINDS[_check.choice("workload kind", description.get("kind"), sorted(_KINDS))]


def _at_most(n: int, limit: int) -> int:
    if _check.integer("n", n) > limit:
        raise _check.reject("n", n, f"this workload is defined for at most {limit} iterations")
    return n
