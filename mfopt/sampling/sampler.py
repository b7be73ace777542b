"""Batches of one run: a scheme, a population and a secret seed, executed step by step.

Everything here is numpy: a data loader imports no JAX. The adapters to frameworks (the trainer's
batches, :mod:`mfopt.torch`) take a :class:`UnitSampler` and draw nothing themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.sampling.base import Scheme, from_description, require


class UnitSampler:
    """Sampler of the units of each iteration of one run.

    ``sampler[t]`` are the units of iteration t, increasing, int64, a pure function of the step: a
    run that resumes at step t draws what an unbroken run draws. Iterating gives all iterations in
    order; :meth:`steps` those from a given one on. A batch may be empty: that step adds noise only,
    and leaving it out would move all later ones.

    **Secret.** Amplification holds while the seed is unknown; ``repr`` does not show it, and
    :meth:`state_dict` does.

    >>> from mfopt.sampling import BallsInBins
    >>> sampler = UnitSampler(BallsInBins(bins=3, epochs=2), population=8, seed=0)
    >>> len(sampler), sampler.expected_batch, sampler.steps_per_epoch
    (6, 2.6666666666666665, 3)
    >>> [units.tolist() for units in sampler.steps(3)] == [sampler[t].tolist() for t in (3, 4, 5)]
    True

    Args:
      scheme: the scheme that was accounted for.
      population: number of units; public, as it enters the normalizer.
      seed: pins the batches, for experiments and tests: nothing is amplified for those who know
        it. The default is a new secret of 256 bits.
      rank: which part of every batch to give, from 0.
      ranks: in how many parts batches are cut. All parts must have one seed: make the sampler once
        and take :meth:`part`, or send its :meth:`state_dict` to the other processes.

    Raises:
      UsageError: there is nothing to draw, a population that the scheme is not for, or parts
        without a common seed.
    """

    def __init__(
        self,
        scheme: Scheme,
        population: int,
        seed: int | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.scheme = require(scheme)
        self.population = _check.integer("population", population)
        self.ranks = _check.integer("ranks", ranks)
        self.rank = _check.integer("rank", rank, at_least=0, at_most=self.ranks - 1)
        if seed is None and self.ranks > 1:
            rule = "every part of a batch must be drawn with the same seed"
            way_out = "Make the sampler in one process and send its state_dict to the others."
            raise _check.reject("seed", None, rule, way_out)
        self.pinned = seed is not None
        self._seed = secrets.randbits(256) if seed is None else _check.seed("seed", seed)
        self.scheme.expected_batch(self.population)  # a population that it is not for is refused
        self._draw = self.scheme.draws(self.population, self._seed)

    def __repr__(self) -> str:
        part = f", part {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        kind = "pinned, not private" if self.pinned else "secret"
        return f"UnitSampler({self.scheme.words()}, population={self.population}{part}, {kind})"

    def __len__(self) -> int:
        return self.scheme.length

    def __getitem__(self, step: int) -> np.ndarray:
        """The units of ``step``; of these, every ``ranks``-th where batches are cut in parts.

        Raises:
          UsageError: a step that the scheme does not have.
        """
        units = np.asarray(self._draw(step), dtype=np.int64)
        return units[self.rank :: self.ranks]

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.steps(0)

    def steps(self, start: int) -> Iterator[np.ndarray]:
        """The batches from step ``start`` to the last one."""
        for step in range(_check.integer("start", start, at_least=0), len(self)):
            yield self[step]

    def padded(self, microbatch: int) -> Padded:
        """The batches in microbatches of one fixed shape, with a mask; for compiled code."""
        return Padded(self, _check.integer("microbatch", microbatch))

    def part(self, rank: int, ranks: int) -> UnitSampler:
        """Shard ``rank`` of the same batches, divided into ``ranks`` shards, one per process."""
        if self.ranks > 1:
            raise _check.reject("ranks", self.ranks, "this sampler is a part itself")
        return self.from_state({**self.state_dict(), "rank": rank, "ranks": ranks})

    @property
    def expected_batch(self) -> float:
        """Mean units of a step over the scheme's own randomness: the public normalizer.

        Of the whole batch, also where this sampler gives a part of it.
        """
        return self.scheme.expected_batch(self.population)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which a unit is drawn once on average, rounded: ``bins`` for balls-in-bins."""
        return min(len(self), max(1, round(self.population / self.expected_batch)))

    def state_dict(self) -> JsonObject:
        """**Secret.** All that :meth:`from_state` needs, JSON-able."""
        return {
            "scheme": self.scheme.describe(),
            "population": self.population,
            "seed": f"{self._seed:x}",
            "pinned": self.pinned,
            "rank": self.rank,
            "ranks": self.ranks,
        }

    @classmethod
    def from_state(cls, state: JsonObject) -> UnitSampler:
        """The sampler of :meth:`state_dict`.

        Raises:
          UsageError: the state is none, or not one of a sampler.
        """
        expected = {"scheme", "population", "seed", "pinned", "rank", "ranks"}
        if not isinstance(state, dict) or set(state) != expected:
            raise _check.reject("state", type(state).__name__, "must come from state_dict")
        for name, kind in (("scheme", dict), ("pinned", bool)):
            if not isinstance(state[name], kind):
                type_name = type(state[name]).__name__
                raise _check.reject(f"state: {name}", type_name, f"must be a {kind.__name__}")
        try:
            seed = int(state["seed"], 16)
        except (TypeError, ValueError):
            raise _check.reject("state: seed", "of this state", "must be hexadecimal") from None
        sampler = cls(
            from_description(state["scheme"]),
            state["population"],
            seed,
            rank=state["rank"],
            ranks=state["ranks"],
        )
        sampler.pinned = state["pinned"]
        return sampler

    def __reduce__(self) -> Any:
        return UnitSampler.from_state, (self.state_dict(),)


class Padded:
    """A sampler's batches as ``(units, mask)``, each of shape (microbatches, microbatch).

    Empty slots have unit 0, so that they can be fetched, and mask False; a batch of no units is one
    microbatch without any. Indexed by the step, with a length: also a source for Grain
    (``grain.MapDataset.source(sampler.padded(32))``).
    """

    def __init__(self, sampler: UnitSampler, microbatch: int) -> None:
        self.sampler, self.microbatch = sampler, microbatch

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        units = pad(self.sampler[step], self.microbatch, fill=-1)
        mask = units >= 0
        return np.where(mask, units, 0), mask

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[step] for step in range(len(self)))


def pad(units: np.ndarray, microbatch: int, *, slots: int = 1, fill: int = 0) -> np.ndarray:
    """``units``, then ``fill``, in rows of ``microbatch``: at least ``slots`` slots and one row.

    Args:
      units: indices of the units that take part.
      microbatch: length of a row.
      slots: minimum number of slots: a fixed public number hides the batch size.
      fill: value of empty slots.
    """
    rows = max(1, -(-max(slots, len(units)) // microbatch))
    padded = np.full(rows * microbatch, fill, dtype=np.int64)
    padded[: len(units)] = units
    return padded.reshape(rows, microbatch)


class Users:
    """Table of the records of each user, for schemes whose units are users.

    >>> users = Users(["ann", "bob", "ann", "cy", "ann"])
    >>> users.population
    3
    >>> records, owner = users.records([0, 2])  # of ann and cy
    >>> records.tolist(), owner.tolist()
    ([0, 2, 4, 3], [0, 0, 0, 1])

    Args:
      user_of_record: the user of each record, shape (records,): names or numbers.

    Attributes:
      names: the users in the order of their numbers.
    """

    def __init__(self, user_of_record: ArrayLike) -> None:
        try:
            users = np.asarray(user_of_record)
            self.names, number = np.unique(users, return_inverse=True)
        except (TypeError, ValueError):
            rule = "all users must be names, or all numbers, one a record (of several: see Owners)"
            raise _check.reject("user_of_record", "of several types", rule) from None
        if users.ndim != 1 or not users.size:
            rule = "must name one user for each record (or see Owners)"
            raise _check.reject("user_of_record", users.shape, rule)
        self._order = np.argsort(number, kind="stable")
        self._border = np.searchsorted(number[self._order], np.arange(len(self.names) + 1))

    @property
    def population(self) -> int:
        """Number of users."""
        return len(self.names)

    def records(self, units: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """(records, owner) of the users ``units``, both of shape (m,).

        ``records`` are numbers of records, in their order for each user; ``owner[i]`` is the place
        in ``units`` of the user of ``records[i]``. Sum the gradients by owner, clip each sum (or
        mean), and add: a user's contribution is then bounded by one clip norm, whatever the number
        of records.
        """
        units = np.asarray(units, dtype=np.int64)
        if units.size and not (units.min() >= 0 and units.max() < self.population):
            raise _check.reject("units", units.tolist(), f"there are {self.population} users")
        by_unit = [self._order[self._border[u] : self._border[u + 1]] for u in units]
        owner = np.repeat(np.arange(len(units)), [len(part) for part in by_unit])
        return np.concatenate([np.zeros(0, np.int64), *by_unit]).astype(np.int64), owner
