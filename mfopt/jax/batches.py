"""Batches of a run as arrays of fixed shape, marked with the step that they are for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt._runtime._pytree import pytree
from mfopt.sampling import UnitSampler
from mfopt.sampling.sampler import pad

_ODD = np.uint32(0x9E3779B9)  # steps through all 32-bit numbers


@pytree
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """Units of one step; a pytree. **Secret**, as the key of the run: who takes part is not public.

    Attributes:
      units: numbers of the units, int32 (m,); (k, m) where a batch comes in k microbatches, and
        with the steps in front where several are stacked.
      mask: True for units that take part; empty slots have unit 0.
      step: that it is for, int32; of the shape of ``units`` without its last axis, as the rest.
      part: place of the microbatch in its step.
      parts: microbatches of the step.
      tag: identifies the batches of a run.
    """

    units: Array
    mask: Array
    step: Array
    part: Array
    parts: Array
    tag: Any


def tag_of(batch: StepBatch, secret: Array, xp: ModuleType = jnp) -> Array:
    """The tag of a microbatch, uint32; one of 2³² mistakes has the right one.

    It tells mistakes, not forgery: whoever trains has the secret.

    Args:
      batch: whose other fields are tagged.
      secret: the key of the run, uint32 (8,).
      xp: numpy or ``jax.numpy``.
    """

    def mixed(words: Array) -> Array:  # every bit of a word moves every other (Wellons' lowbias32)
        words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
        words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
        return words ^ (words >> 16)

    def folded(words: Array) -> Array:
        places = xp.arange(1, words.shape[-1] + 1, dtype=xp.uint32) * _ODD
        # an axis of length 1 until the end: numpy warns where single numbers overflow
        return mixed(mixed(words ^ places).sum(-1, dtype=xp.uint32, keepdims=True))[..., 0]

    units = xp.where(batch.mask, batch.units + 1, 0).astype(xp.uint32)
    numbers = xp.stack([batch.step, batch.part, batch.parts], -1).astype(xp.uint32)
    run = xp.broadcast_to(folded(xp.asarray(secret, xp.uint32)), numbers.shape[:-1])
    return folded(xp.stack([run, folded(units), folded(numbers)], -1))


class Batches:
    """Batches of a run: iterating gives those from the state's step on, once each.

    ``batches[t]`` is that of step t, and ``len(batches)`` the number of steps: a source for Grain
    (``grain.MapDataset.source(run.batches(state))``).

    Args:
      sampler: draws the units.
      key: of the run, uint32 (8,).
      start: first step of an iteration.
      microbatch: units of one microbatch; None for the whole batch at once.
    """

    def __init__(
        self, sampler: UnitSampler, key: np.ndarray, start: int, microbatch: int | None
    ) -> None:
        if sampler.population >= 2**31:
            rule = "units are numbered in 32 bits"
            raise _check.reject("population", sampler.population, rule)
        self._sampler, self._key, self.start = sampler, key, start
        self.microbatch = microbatch
        expected = sampler.expected_batch
        # public, and nearly always enough: one compiled shape
        self._width = microbatch or math.ceil(expected + 4 * expected**0.5)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, step: int) -> StepBatch:
        return self._batch(step, self._sampler[step])

    def __iter__(self) -> Iterator[StepBatch]:
        return (self[step] for step in range(self.start, len(self)))

    def stacked(self, steps: int | None = None) -> StepBatch:
        """The next ``steps`` batches, all that are left if left out, for ``jax.lax.scan``.

        Raises:
          UsageError: so many are not left.
        """
        remaining = len(self) - self.start
        if not remaining:
            rule = f"the guarantee covers {len(self)} steps, and all were taken"
            raise _check.reject("state", f"step {self.start}", rule)
        steps = remaining if steps is None else _check.integer("steps", steps, at_most=remaining)
        numbers = range(self.start, self.start + steps)
        units = [self._sampler[step] for step in numbers]
        largest = max(map(len, units))
        batches = [self._batch(t, u, largest) for t, u in zip(numbers, units, strict=True)]
        return jax.tree.map(lambda *parts: np.stack(parts), *batches)

    def _batch(self, step: int, units: np.ndarray, slots: int = 1) -> StepBatch:
        rows = pad(units, self._width, slots=slots, fill=-1).astype(np.int32)
        if self.microbatch is None:
            rows = rows.reshape(1, -1)
        parts, mask = len(rows), rows >= 0
        number = np.arange(parts, dtype=np.int32)
        scalars = [np.full(parts, x, np.int32) for x in (step, parts)]
        batch = StepBatch(np.where(mask, rows, 0), mask, scalars[0], number, scalars[1], None)
        batch = dataclasses.replace(batch, tag=tag_of(batch, self._key, np))
        whole: StepBatch = batch
        if self.microbatch is None:
            whole = jax.tree.map(lambda x: x[0], batch)
        return whole
