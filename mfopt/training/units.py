"""The privacy units of each algorithm: how many there are, and the token rows of some of them.

The sampling scheme speaks of unit numbers only. This is where a number becomes data, and the only
place where the algorithms (``docs/training/algorithms.md``) differ: ``uls`` and ``fedavg`` sample
users with up to G records, ``els`` and ``group`` single records, on which they run the same steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt.training.data import TokenStore
from mfopt.training.secrets import stream
from mfopt.training.selection import check_rule, select, select_once


class Units:
    """A numbered population of privacy units: its public numbers. Subclasses have the data.

    Args:
        population: how many; unit numbers are 0 .. population - 1.
        facts: JSON-able settings. ``unit`` is what one is called, ``records`` is G, the rows of a
            unit, and ``group_size`` the most units that one *user* accounts for: 1 in ULS, G of the
            selection in ELS. Both are 1 where they are left out, and are attributes as well.
    """

    def __init__(self, population: int, facts: dict[str, Any]) -> None:
        self.population, self._facts = population, facts
        self.records, self.group_size = (int(facts.get(x, 1)) for x in ("records", "group_size"))

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of ``units`` (m,), -1 for nobody: tokens (m, G, L) int32, mask (m, G, L) bool.

        A pure function of its arguments; one unit's rows depend on no other unit.
        """
        raise NotImplementedError("only the public numbers of these units are known")

    def describe(self) -> dict[str, Any]:
        """JSON-able settings."""
        return dict(self._facts)


class UserUnits(Units):
    """ULS: a unit is a user, with up to ``records`` records chosen at each participation.

    Args:
      store: token store.
      records: records of a user in one participation.
      length: tokens of a row.
      rule: how records are chosen.
      seed: pins the random choices.
      losses: loss of each record under the initial model, for the perplexity rules.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        records: int,
        length: int,
        rule: str = "random",
        seed: int = 0,
        losses: np.ndarray | None = None,
    ) -> None:
        self.store = store
        self.length = _check.integer("length", length)
        self.rule = check_rule(rule, losses, store.num_records)
        self._seed, self._losses = seed, losses
        facts = {"unit": "user", "records": _check.integer("records", records)}
        super().__init__(store.num_users, facts | {"length": self.length, "selection": rule})

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        units = np.asarray(units, dtype=np.int64)
        shape = (len(units), self.records, self.length)
        if self.rule == "chunk":
            tokens, mask = self._chunks(units, step)
        else:
            how: dict[str, Any] = {"seed": self._seed, "step": step, "losses": self._losses}
            chosen = select(self.store, units, self.records, self.rule, **how)
            tokens, mask = self.store.batch(chosen.reshape(-1), self.length)
        return tokens.reshape(shape), mask.reshape(shape)

    def _chunks(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        # one generator per unit: the store draws once per row, and rows must not depend on who
        # else is in the microbatch
        rows = [self.store.batch(np.empty(0, np.int64), self.length)]
        for unit in units.tolist():
            rng, numbers = stream(self._seed, step, unit), np.full(self.records, unit)
            rows.append(self.store.random_chunks(numbers, self.length, 0, rng))
        tokens, mask = zip(*rows, strict=True)
        return np.concatenate(tokens), np.concatenate(mask)


class RecordUnits(Units):
    """ELS and group privacy: a unit is one of the at most ``group_size`` records kept per user.

    Which records are kept follows from all of a user's records, so that one record more may bring
    others in and out; so it may where records were held out by their number. Where neither can be,
    the description says ``whole``, and a statement about single records is possible. Nothing is
    chosen then, and where numbers are reserved they follow from a record's place among its user's,
    whatever ``rule`` is: sorted by content, an emptied record would move others to other batches.

    Args:
        reserve: number the units user by user with ``group_size`` numbers each, also for users
            with fewer records. Needed where a number decides the batch (fixed order) or where
            the population is part of the account (fixed batch): then no user's data may move
            another user's numbers. Schemes that draw each unit on its own need it not.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        group_size: int,
        length: int,
        rule: str = "random",
        seed: int = 0,
        losses: np.ndarray | None = None,
        reserve: bool = False,
    ) -> None:
        self.store = store
        self.length = _check.integer("length", length)
        held_out = (store.metadata.get("hold_out") or {}).get("records", 0)
        group_size = _check.integer("group_size", group_size)
        whole = not held_out and int(store.records_per_user().max(initial=0)) < group_size
        check_rule(rule, losses, store.num_records, whole=True)
        rule = "random" if whole and reserve else rule
        self.selected = select_once(
            store, group_size, rule, seed=seed, losses=losses, reserve=reserve
        )
        facts = {"unit": "record", "group_size": group_size, "length": self.length}
        facts |= {"selection": rule, "reserve": reserve, "whole": whole}
        super().__init__(len(self.selected), facts)

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        records = np.asarray(units, dtype=np.int64)
        if self.population:
            records = np.where(records < 0, -1, self.selected[np.maximum(records, 0)])
        tokens, mask = self.store.batch(records, self.length)
        return tokens[:, None], mask[:, None]
