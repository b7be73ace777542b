"""Batches of a run for PyTorch's loaders, empty batches included."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import data

from mfopt._runtime import _check
from mfopt.torch.probe import RATE
from mfopt.torch.rows import UnitRows, seeded

_COMPARED = 8  # records of a batch that are collated again, at most

if TYPE_CHECKING:
    from mfopt.torch.run import PrivateRun


class UnitBatches(data.Sampler[list[int]]):
    """A batch sampler for :class:`torch.utils.data.DataLoader`: one list of units for each step.

    Iterating resumes at the first step that was not released, up to the end of its epoch: in
    ``for epoch in ...: for batch in loader`` every step comes once, also after a break or a
    checkpoint. A list may be empty. The length is that of a whole epoch, also then.

    Raises:
      UsageError: on iteration, if no optimizer is attached.
      NoiseExhaustedError: on iteration, if all steps were released.
    """

    def __init__(self, run: PrivateRun) -> None:
        self.run = run

    @property
    def _epoch(self) -> range:
        """Steps of the epoch of the next step."""
        steps, epoch = len(self.run.sampler), self.run.sampler.steps_per_epoch
        begin = min(self.run.step, steps - 1) // epoch * epoch
        return range(begin, min(begin + epoch, steps))

    def __len__(self) -> int:
        return len(self._epoch)

    def __iter__(self) -> Iterator[list[int]]:
        self.run.started()
        steps = range(self.run.step, self._epoch.stop)
        self.run.stream.refuse_past_end(steps.start)
        self.run.forget()  # the batch of a step that was broken off comes again, whole
        for step in steps:
            yield self.run.sampler[step].tolist()


class PrivateLoader(data.DataLoader[Any]):
    """Loader over :class:`UnitBatches`, whose tensors are :class:`~mfopt.torch.rows.UnitRows`."""

    # accelerate's ``prepare`` then gives it back: its own loader would fetch a batch ahead
    _is_accelerate_prepared = True

    def __init__(
        self, dataset: Any, run: PrivateRun, collate: Callable[[list[Any]], object], **options: Any
    ) -> None:
        self.run = run
        options |= {"batch_sampler": UnitBatches(run), "collate_fn": Collator(collate, dataset)}
        super().__init__(_Numbered(dataset), **options)


class _Numbered(data.Dataset[Any]):
    """A data set whose batches are (numbers, records)."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitems__(self, units: list[int]) -> tuple[list[int], list[object]]:
        at_once = getattr(self.records, "__getitems__", None)
        return units, at_once(units) if at_once and units else [self.records[i] for i in units]


class Collator:
    """``collate``, with the unit of each row of the tensors that it makes.

    Of two batches in 250 of a loader, the first ones, some records are collated again, with one in
    place of another: no other row may change.

    Args:
      collate: of a list of records.
      dataset: whose first record stands for a batch of none, cut to length 0: shapes are public,
        values do not enter.
    """

    def __init__(self, collate: Callable[[list[Any]], object], dataset: Any) -> None:
        self._collate, self._dataset, self._batches = collate, dataset, 0

    def __call__(self, numbered: Any) -> object:
        units, records = numbered  # of `_Numbered`
        is_probed = len(units) > 1 and self._batches % RATE < 2
        self._batches += len(units) > 1
        if is_probed:
            self._refuse_mixed(records[:: -(-len(records) // _COMPARED)])
        batch = self._collate(records or [self._dataset[0]])
        if not records:
            batch = _mapped(_emptied, batch)

        return _mapped(lambda x: UnitRows.of(x, units, is_probed=is_probed), batch)

    def _refuse_mixed(self, records: list[object]) -> None:
        """Raise :class:`UsageError` where another record changes more rows than its own."""
        rows, again = map(self._rows_of, (records, records))
        for place in (-1, 0):  # one of them may be the longest, that all others are padded to
            others = list(records)
            others[place] = records[len(records) // 2]
            changed = self._rows_of(others)
            is_alike = [*map(len, rows), again] == [*map(len, changed), rows]
            if is_alike and (Counter(rows) - Counter(changed)).total() > 1:
                rule = "makes rows of several records each: their sum moves by more than one clips"
                way_out = "Let it make one row of each record alone."
                raise _check.reject("collate_fn", self._collate, rule, way_out)

    def _rows_of(self, records: list[object]) -> list[bytes]:
        """Content of each row of the batch of ``records``; nothing where it has not one of each."""
        tensors: list[torch.Tensor] = []

        def copied(part: Any) -> object:
            # of a view not what it is a view of, which may be all data
            return part.clone() if isinstance(part, torch.Tensor) else copy.deepcopy(part)

        with seeded():
            _mapped(tensors.append, self._collate(pytree.tree_map(copied, records)))
        rows = [
            x.reshape(len(records), -1).contiguous().view(torch.uint8).numpy()
            for x in tensors
            if isinstance(x, torch.Tensor) and x.numel() and x.shape[:1] == (len(records),)
        ]
        return [b"".join(part.tobytes() for part in parts) for parts in zip(*rows, strict=True)]


def _mapped(function: Callable[[Any], object], batch: object) -> object:
    """``batch`` with ``function`` of each of its parts; kinds of dictionaries as plain ones."""
    return pytree.tree_map(function, dict(batch) if isinstance(batch, Mapping) else batch)


def _emptied(part: Any) -> object:
    """A part of a batch of one record without the record."""
    if isinstance(part, str) or getattr(part, "ndim", False):
        return part[:0]
    rule = "a batch of no records cannot be made from what it gives"
    way_out = "Let it give tensors, or lists, tuples and dictionaries of them."
    raise _check.reject("collate_fn", type(part).__name__, rule, way_out)


def population_of(dataset: Any) -> int:
    """The number of records; raises :class:`UsageError` for what the scheme cannot draw from."""
    is_numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, data.IterableDataset) or not is_numbered:
        rule = "must have numbered records: __getitem__ and __len__"
        way_out = "Of a DataLoader, give its `dataset`: batches are drawn by the factorization."
        raise _check.reject("dataset", dataset, rule, way_out)
    return len(dataset)
