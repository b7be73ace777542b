"""Batches of a run for PyTorch's loaders, empty batches included."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import data

from mfopt._runtime import _check
from mfopt.torch.probe import RATE
from mfopt.torch.rows import Rows, seeded

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
        self.run.forget()  # the batch of a step that was broken off comes again, whole
        return (self.run.sampler[step].tolist() for step in range(start, stop))


class PrivateLoader(data.DataLoader[Any]):
    """A DataLoader over :class:`UnitBatches`, whose tensors are :class:`~mfopt.torch.rows.Rows`."""

    # accelerate's ``prepare`` then gives it back: its own loader would fetch a batch ahead
    _is_accelerate_prepared = True

    def __init__(self, dataset: Any, run: PrivateRun, collate: Collator, **options: Any) -> None:
        self._units, self.run = UnitBatches(run), run
        numbered = _Numbered(dataset)
        super().__init__(numbered, batch_sampler=self._units, collate_fn=collate, **options)

    def by_epochs(self) -> PrivateLoader:
        """This loader, its length from now on that of a whole epoch: what trainers count by."""
        self._units.whole = True
        return self

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = self.run.step
        for step, batch in enumerate(super().__iter__(), start):
            yield batch
            if self.run.step <= step:
                rule = (
                    "every step must have exactly one batch of the run's loader, an empty one too"
                )
                way_out = "Call step() of the run's optimizer after each batch, "
                way_out += "before the next one is fetched; accumulate nothing over batches."
                raise _check.reject("loader", f"batch {step} was not released", rule, way_out)


class _Numbered(data.Dataset[Any]):
    """A data set whose batches are (numbers, records)."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, unit: int) -> Any:
        return self.records[unit]

    def __getitems__(self, units: list[int]) -> tuple[list[int], list[Any]]:
        at_once = getattr(self.records, "__getitems__", None)
        return units, at_once(units) if at_once and units else [self.records[i] for i in units]


class Collator:
    """``collate``, with the unit of each row of the tensors that it makes.

    Of two batches and then one in a hundred, another one is made with a record in place of another:
    no other row may change.

    Args:
      collate: of a list of records.
      dataset: whose first record stands for a batch of none, cut to length 0: shapes are public,
        values do not enter.
      is_marked: whether tensors name their units.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: Any, *, is_marked: bool = True
    ) -> None:
        self._collate, self._dataset, self._batches = collate, dataset, 0
        self._is_marked = is_marked

    def __call__(self, numbered: Any) -> Any:
        units, records = numbered  # of `_Numbered`
        is_probed = len(units) > 1 and (self._batches < 2 or self._batches % RATE == 0)
        self._batches += len(units) > 1
        if is_probed:
            self._refuse_mixed(records)
        batch = self._collate(records or [self._dataset[0]])
        if not records:
            batch = _mapped(_emptied, batch)

        def marked(part: Any) -> Any:
            is_array = isinstance(part, torch.Tensor) and part.ndim > 0 and self._is_marked
            return Rows.of(part, units, is_probed=is_probed) if is_array else part

        return _mapped(marked, batch)

    def _refuse_mixed(self, records: list[Any]) -> None:
        """Raise :class:`UsageError` where another record changes more rows than its own."""
        for place in (-1, 0):  # one of them may be the longest, that all others are padded to
            others = list(records)
            others[place] = records[len(records) // 2]
            rows, again, changed = map(self._rows_of, (records, records, others))
            is_alike = rows == again and all(len(x) == len(changed[0]) for x in rows)
            if is_alike and (Counter(rows) - Counter(changed)).total() > 1:
                rule = "makes rows of several records each: their sum moves by more than one clips"
                way_out = "Let it make one row of each record alone."
                raise _check.reject("collate_fn", repr(self._collate), rule, way_out)

    def _rows_of(self, records: list[Any]) -> list[bytes]:
        """Content of each row of the batch of ``records``; nothing where it has not one of each."""
        tensors: list[torch.Tensor] = []
        with seeded([]):
            _mapped(tensors.append, self._collate(copy.deepcopy(records)))
        rows = [
            x.reshape(len(records), -1).contiguous().view(torch.uint8).numpy()
            for x in tensors
            if isinstance(x, torch.Tensor) and x.numel() and x.shape[0] == len(records)
        ]
        return [b"".join(part.tobytes() for part in parts) for parts in zip(*rows, strict=True)]


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """``batch`` with ``function`` of each of its parts: arrays, and lists without any."""
    if isinstance(batch, Mapping):
        parts = {name: _mapped(function, part) for name, part in batch.items()}
        try:
            made: Any = copy.copy(batch)
            made.update(parts)
        except (AttributeError, TypeError):
            return parts
        return made
    containers: Any = (torch.Tensor, np.ndarray, Mapping, list, tuple)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(function, part) for part in batch))
    if isinstance(batch, list | tuple) and all(isinstance(part, containers) for part in batch):
        return type(batch)(_mapped(function, part) for part in batch)
    return function(batch)


def _emptied(part: Any) -> Any:
    """A part of a batch of one record without the record."""
    if isinstance(part, list | tuple):
        return type(part)()
    if isinstance(part, torch.Tensor | np.ndarray) and part.ndim:
        return part[:0]
    rule = "a batch of no records cannot be made from what it gives"
    way_out = "Let it give tensors, or lists, tuples and dictionaries of them."
    raise _check.reject("collate_fn", type(part).__name__, rule, way_out)


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
