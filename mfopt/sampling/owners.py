"""Examples of several owners: which of them to keep, and who takes part in which iteration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

import numpy as np

from mfopt._runtime import _check


class Owners:
    """Table of the owners of each example, of which there may be several.

    For a guarantee per person where an e-mail is its sender's and its receivers', or a paper all
    its authors'. **Who owns which example is public**: neighbouring data sets have the same
    examples with the same owners, and of one owner's examples the content is zeroed out (the fixed
    graph of Ganesh, McKenna, McMahan, Smith and Wu 2025). The examples that :meth:`bounded` keeps
    are then the same in both, and at most ``limit`` of them change: what holds for groups of
    ``limit`` examples under zero-out adjacency holds for an owner. Whether somebody owns an example
    is not protected, nor how many or with whom. Adding or removing an owner is not covered by any
    account: it may change which examples of all others are kept.

    >>> owners = Owners([["ann", "bob"], ["ann"], ["bob", "cy"], ["cy"], ["ann"]])
    >>> owners.bounded(1).tolist(), owners.bounded(2).tolist()
    ([1, 3], [1, 2, 3, 4])

    Args:
      owners_of_example: name or number of the owner of each example, or a list of several.
    """

    def __init__(self, owners_of_example: Collection[Iterable[str | int]]) -> None:
        table = _check.kind("owners_of_example", owners_of_example, Collection)
        self._owners = [_names(*item) for item in enumerate(table)]

    def bounded(self, limit: int) -> np.ndarray:
        """Numbers of the examples to keep, increasing: at most ``limit`` of each owner.

        Examples are taken in the order of how many owners they have, then of their numbers, and
        kept where no owner has ``limit`` already (greedy, as jax-privacy's
        ``greedy_contribution_bound`` for a limit of 1). The numbers must not follow from the
        content. What is kept is no random sample: examples of few owners are preferred.
        """
        limit = _check.integer("limit", limit)
        counts: Counter[str] = Counter()
        selected = []
        for example, owners in sorted(enumerate(self._owners), key=lambda item: len(item[1])):
            if all(counts[owner] < limit for owner in owners):
                counts.update(owners)
                selected.append(example)
        return np.array(sorted(selected), dtype=np.int64)

    def participations(self, batches: Collection[Iterable[int]]) -> np.ndarray:
        """Number of an owner's examples in each batch, shape (patterns, iterations).

        A row for each pattern that an owner has, once. :func:`mfopt.accounting.sensitivity` gives
        the sensitivity.

        Args:
          batches: numbers of the examples of each iteration, which must not follow from the
            content; random ones are not amplified by this.
        """
        _check.kind("batches", batches, Collection)
        steps: defaultdict[str, list[int]] = defaultdict(list)
        largest = len(self._owners) - 1
        for step, batch in enumerate(batches):
            for example in _check.kind("batches", batch, Iterable):
                number = _check.integer("batches", example, at_least=0, at_most=largest)
                for owner in self._owners[number]:
                    steps[owner].append(step)
        patterns = {*map(tuple, steps.values())}
        rows = [np.bincount(pattern, minlength=len(batches)) for pattern in patterns]
        return np.reshape(rows, (len(patterns), len(batches)))


def _names(example: int, owners: Iterable[str | int]) -> frozenset[str]:
    """Names of the owners of an example, each once; 1 is "1"."""
    listed = np.ravel(np.array(owners, dtype=object)).tolist()
    if not listed or not all(isinstance(owner, str | int | np.integer) for owner in listed):
        rule = "must be a name or number, or a list of some"
        raise _check.reject(f"owners of example {example}", owners, rule)
    return frozenset(map(str, listed))
