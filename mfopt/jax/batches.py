"""Batches of a run as arrays of fixed shape, marked with the step that they are for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt._runtime._pytree import pytree
from mfopt.noise import uses
from mfopt.sampling import UnitSampler
from mfopt.sampling.sampler import pad


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
      tag: identifies the batches of a run; uint32 (3,) of a microbatch.
    """

    units: Array
    mask: Array
    step: Array
    part: Array
    parts: Array
    tag: Any


def tag_of(batch: StepBatch, secret: Array) -> jax.Array:
    """The tag of one microbatch, uint32 (3,); one of 2³² mistakes has the right one.

    It tells mistakes, not forgery: whoever trains has the secret.

    Args:
      batch: whose other fields are tagged.
      secret: the key of the run, uint32 (8,).
    """
    numbers = jnp.stack([batch.step, batch.part, batch.parts])
    words = jnp.concatenate([jnp.where(batch.mask, batch.units + 1, 0), numbers])
    mixed = threefry_2x32(secret[:2], words.astype(jnp.uint32))
    return uses.fingerprint([jax.lax.bitcast_convert_type(mixed, jnp.float32)])


_tags = jax.jit(jax.vmap(tag_of, (0, None)))


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
        # units are numbered in 32 bits
        _check.integer("population", sampler.population, at_most=2**31 - 1)
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
        remaining = len(self) - self.start or 1  # the sampler refuses one past the last
        steps = remaining if steps is None else _check.integer("steps", steps, at_most=remaining)
        units = [self._sampler[step] for step in range(self.start, self.start + steps)]
        largest = max(map(len, units))
        return jax.tree.map(
            lambda *parts: np.stack(parts),
            *(self._batch(t, u, largest) for t, u in enumerate(units, self.start)),
        )

    def _batch(self, step: int, units: np.ndarray, slots: int = 1) -> StepBatch:
        rows = pad(units, self._width, slots=slots, fill=-1).astype(np.int32)
        rows = rows.reshape(1, -1) if self.microbatch is None else rows
        number = np.arange(len(rows), dtype=np.int32)
        steps, parts = (np.full_like(number, x) for x in (step, len(rows)))
        batch = StepBatch(np.maximum(rows, 0), rows >= 0, steps, number, parts, None)
        batch = dataclasses.replace(batch, tag=np.asarray(_tags(batch, self._key)))
        return jax.tree.map(lambda x: x[0], batch) if self.microbatch is None else batch
