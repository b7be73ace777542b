"""Mechanism: sampling, C, adjacency and privacy unit in one record, with one digest.

The accountant proves a mechanism, the loader executes its sampling, the noise stream its C and σ.
That all three mean the same one is checked by comparing digests, and a digest is always computed
from the content, never read from beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import get_args

import numpy as np

from mfopt import sampling
from mfopt._runtime import _check, _page
from mfopt._runtime._types import JsonObject
from mfopt.sampling import Adjacency, Scheme
from mfopt.strategies import Identity, Strategy
from mfopt.words import described


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The release of C x + σ z, where x sums the contributions (norm at most 1) of sampled units.

    Attributes:
      sampling: a scheme of :mod:`mfopt.sampling`, the one that the data loader executes.
      strategy: C; independent noise (C = I) unless given.
      group_size: K, how many units change together: 1 for the unit itself, the most examples
        of one user for user-level privacy with example-level sampling (ELS). With user-level
        sampling (ULS) the units are users and K = 1.
      privacy_unit: name of the unit, for the record.
      adjacency: "add-remove" (one data set is the other and up to K units more), "zero-out" (the
        contributions of up to K units become 0) or "replace" (they become other ones).

    Raises:
      UsageError: for a scheme that a file could not give back, K < 1, an unknown adjacency, or a C
        that does not have the scheme's number of iterations or whose numbers are narrower than
        float32.
    """

    sampling: Scheme
    strategy: Strategy = dataclasses.field(default_factory=Identity)
    group_size: int = 1
    privacy_unit: str = "example"
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        _check.integer("group_size", self.group_size)
        _check.word("privacy_unit", self.privacy_unit)
        _check.choice("adjacency", self.adjacency, get_args(Adjacency))
        sampling.require(self.sampling)
        _check.kind("strategy", self.strategy, Strategy)
        # one C for all who look at it, however narrow the arrays that its numbers came in
        object.__setattr__(self, "strategy", self.strategy.widened())
        self.strategy.check_size(self.sampling.iterations)

    @property
    def iterations(self) -> int:
        """Training iterations n."""
        return self.sampling.length

    def rows(self) -> list[tuple[str, str]]:
        """Names and values that describe it."""
        unit = self.privacy_unit
        if self.group_size > 1:
            unit = f"{unit}, groups of {self.group_size}"
        return [
            ("C", described(self.strategy.describe())),
            ("sampling", self.sampling.words()),
            ("protects", f"{unit}, {self.adjacency} adjacency"),
        ]

    def curve(self) -> str:
        """First column of C as a small drawing in SVG, at most its first 256 entries."""
        impulse = np.eye(1, self.iterations)[0]
        return _page.sparkline(np.abs(self.strategy.multiply(impulse))[:256].tolist())

    def _repr_html_(self) -> str:
        return f"<b>Mechanism</b>{_page.facts(self.rows())}{self.curve()}"

    def digest(self, noise_multiplier: float) -> str:
        """Hex SHA-256 of what is released at σ: C, the sampling and σ.

        Not of the group size, the unit and the adjacency, which are about the statement: one
        release has many statements.
        """
        return release_digest(self.strategy, noise_multiplier, self.sampling)


def release_digest(
    strategy: Strategy,
    noise_multiplier: float,
    scheme: Scheme | None = None,
    *,
    iterations: int | None = None,
) -> str:
    """Hex SHA-256 of a release: equal for two that add the same noise under the same sampling.

    Args:
      strategy: C.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      scheme: the sampling. Noise that is streamed outside of any account has none, and then
      iterations: says how many steps there are.
    """
    description: JsonObject = {
        "strategy": strategy.describe(),
        "noise_multiplier": float(noise_multiplier).hex(),
    }
    if scheme is None:
        description["iterations"] = _check.integer("iterations", iterations)
    else:
        description["sampling"] = scheme.describe()
    return content_digest(description, strategy.arrays())


def content_digest(description: JsonObject, arrays: dict[str, np.ndarray]) -> str:
    """Hex SHA-256 over canonical JSON and the arrays' names, types, shapes and bytes."""
    return stream_digest(
        description,
        (
            (name, value.dtype, value.shape, [np.ascontiguousarray(value).tobytes()])
            for name, value in sorted(arrays.items())
        ),
    )


def stream_digest(
    description: JsonObject,
    arrays: Iterable[tuple[str, np.dtype, tuple[int, ...], Iterable[bytes | memoryview]]],
) -> str:
    """:func:`content_digest` of arrays that come in pieces: (name, type, shape, pieces) by name."""
    sha = hashlib.sha256(json.dumps(description, sort_keys=True, allow_nan=False).encode())
    for name, dtype, shape, pieces in arrays:
        # a number is digested as an array of one
        sha.update(f"\0{name}\0{dtype.str}\0{shape or (1,)}\0".encode())
        for piece in pieces:
            sha.update(piece)
    return sha.hexdigest()
