"""Batches of a run for PyTorch's loaders, empty batches included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import data

from mfopt._runtime import _check

if TYPE_CHECKING:
    from mfopt.torch.run import PrivateRun

# what a new loader takes over from a plain one; a collate function of the user's wins over it
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
)


class UnitBatches(data.Sampler[list[int]]):
    """A batch sampler for :class:`torch.utils.data.DataLoader`: one list of units for each step.

    Iterating resumes at the first step that was not released, up to the end of its epoch: in
    ``for epoch in ...: for batch in loader`` every step comes once, also after a break or a
    checkpoint. A list may be empty. ``whole``: the length is that of a whole epoch, also then.

    Raises:
      UsageError: on iteration, if all steps were released, no optimizer is attached, or the batch
        before was not released.
    """

    def __init__(self, run: PrivateRun) -> None:
        self.run, self.whole = run, False

    def _range(self) -> tuple[int, int]:
        sampler, start = self.run.sampler, self.run.step
        epoch = sampler.steps_per_epoch
        return start, min((start // epoch + 1) * epoch, len(sampler))

    def __len__(self) -> int:
        start, stop = self._range()
        if self.whole:
            epoch = self.run.sampler.steps_per_epoch
            start = min(start, len(self.run.sampler) - 1) // epoch * epoch
        return stop - start

    def __iter__(self) -> Iterator[list[int]]:
        self.run.started()
        start, stop = self._range()
        if start >= stop:
            rule = f"the guarantee covers {len(self.run.sampler)} steps, and all were taken"
            way_out = "A longer run needs a factorization for more iterations."
            raise _check.reject("loader", f"step {start}", rule, way_out)
        self.run.restart()
        self.run.drawn, self.run.given = start, None
        for step in range(start, stop):
            units = self.run.sampler[step].tolist()
            self.run.drawn, self.run.sizes[step] = step + 1, len(units)
            yield units
            if not self.run.ahead:
                refuse_unreleased(self.run, step)


def refuse_unreleased(run: PrivateRun, step: int) -> None:
    """Raise :class:`UsageError` where the batch of ``step`` was given out and not released."""
    if run.step <= step:
        rule = "every step must have exactly one batch of the run's loader, an empty one too"
        way_out = "Call step() of the run's optimizer after each batch, "
        way_out += "before the next one is fetched; accumulate nothing over batches."
        raise _check.reject("loader", f"batch {step} was not released", rule, way_out)


class PrivateLoader(data.DataLoader[Any]):
    """A DataLoader over :class:`UnitBatches` that tells the run which batch was given out."""

    # accelerate's ``prepare`` then gives it back: its own loader would fetch a batch ahead
    _is_accelerate_prepared = True

    def __init__(self, dataset: Any, run: PrivateRun, **options: Any) -> None:
        self._units, self.run = UnitBatches(run), run
        super().__init__(dataset, batch_sampler=self._units, **options)
        run.ahead = self.num_workers > 0

    def by_epochs(self) -> PrivateLoader:
        """This loader, its length from now on that of a whole epoch: what trainers count by."""
        self._units.whole = True
        return self

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = self.run.step
        for place, batch in enumerate(super().__iter__()):
            self.run.given = start + place + 1
            yield batch
            refuse_unreleased(self.run, start + place)


def collated(collate: Callable[[list[Any]], Any], dataset: Any, records: list[Any]) -> Any:
    """``collate(records)``; of no records, what it makes of the first one, cut to length 0.

    Each array is cut along its first axis: shapes are public, values do not enter.
    """
    return collate(records) if records else _emptied(collate([dataset[0]]))


def _emptied(batch: Any) -> Any:
    """``batch`` of one record without the record."""
    if isinstance(batch, torch.Tensor | np.ndarray) and batch.ndim:
        return batch[:0]
    if isinstance(batch, Mapping):
        return {name: _emptied(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_emptied, batch))
    if isinstance(batch, list | tuple):
        nested = all(
            isinstance(p, torch.Tensor | np.ndarray | Mapping | list | tuple) for p in batch
        )
        return type(batch)(map(_emptied, batch) if nested else ())
    rule = "a batch of no records cannot be made from what it gives"
    way_out = "Let it give tensors, or lists, tuples and dictionaries of them."
    raise _check.reject("collate_fn", type(batch).__name__, rule, way_out)


def dataset_of(given: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(dataset, options of the new loader) from a dataset, or from a loader of one.

    Refused are a loader that draws in a way of its own, and a data set without numbered records.
    """
    if isinstance(given, data.DataLoader):
        sampler, batches = given.sampler, given.batch_sampler
        plain = type(sampler) in (data.SequentialSampler, data.RandomSampler)
        plain = plain and not getattr(sampler, "replacement", False)
        if not plain or type(batches) is not data.BatchSampler:
            name = type(batches if plain else sampler).__name__
            rule = "has a sampler of its own, and the guarantee is about the factorization's"
            way_out = "Give the data set itself."
            raise _check.reject("dataset", f"DataLoader with {name}", rule, way_out)
        options = {**{name: getattr(given, name) for name in _KEPT}, **options}
        given = given.dataset
    if isinstance(given, data.IterableDataset) or not hasattr(given, "__len__"):
        rule = "must have numbered records: __getitem__ and __len__"
        raise _check.reject("dataset", type(given).__name__, rule)
    if drawn := {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & set(options):
        rule = "batches are drawn by the factorization's scheme"
        raise _check.reject(drawn.pop(), "given", rule, "Leave it out.")
    return given, options
