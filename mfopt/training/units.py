"""The privacy units of each algorithm: how many there are, and the token rows of some of them.

The only place where the algorithms (``docs/training/algorithms.md``) differ: ``uls`` and ``fedavg``
sample users with up to G records, ``els`` and ``group`` single records. Of a user at most G records
are selected, at random: by a hash of (step, user, position), which no other user's presence
changes.
"""

from __future__ import annotations

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.training.data import TokenStore
from mfopt.training.data.store import Rows
from mfopt.training.secrets import uniform_hash

_USERS_AT_ONCE = 1 << 16


class Units:
    """A numbered population of privacy units: its public numbers. Subclasses have the data.

    They have a ``store``.

    Args:
        population: how many; unit numbers are 0 .. population - 1.
        facts: JSON-able settings. ``unit`` is what one is called, ``records`` is G, the rows of a
            unit, ``group_size`` the most units that one *user* accounts for: 1 in ULS, G of the
            selection in ELS; ``length`` the tokens of a row. The numbers are 1 where they are left
            out, and attributes as well.
    """

    store: TokenStore

    def __init__(self, population: int, facts: JsonObject) -> None:
        self.population, self._facts = population, facts
        self.records, self.group_size, self.length = (
            int(facts.get(name, 1)) for name in ("records", "group_size", "length")
        )

    def fetch(self, units: np.ndarray, step: int) -> Rows:
        """Rows of ``units`` (m,), -1 for nobody: tokens (m, G, L) int32, mask (m, G, L) bool.

        A pure function of its arguments; one unit's rows depend on no other unit.
        """
        chosen = self._chosen(np.asarray(units, dtype=np.int64), step)
        tokens, mask = self.store.batch(chosen.reshape(-1), self.length)
        shape = (*chosen.shape, self.length)
        return tokens.reshape(shape), mask.reshape(shape)

    def _chosen(self, units: np.ndarray, step: int) -> np.ndarray:
        """Record numbers (m, G) of ``units`` in a step, -1 for none."""
        raise NotImplementedError("only the public numbers of these units are known")

    def describe(self) -> JsonObject:
        """JSON-able settings."""
        return dict(self._facts)


class UserUnits(Units):
    """ULS: a unit is a user, with up to ``records`` records chosen at each participation.

    ``length``: tokens of a row; ``seed``: of the random choices.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        records: int,
        length: int,
        seed: int = 0,
    ) -> None:
        self.store, self.seed = store, seed
        facts = {"unit": "user", "records": records, "length": length}
        super().__init__(store.num_users, facts)

    def _chosen(self, units: np.ndarray, step: int) -> np.ndarray:
        return select(self.store, units, self.records, (self.seed, step))


class RecordUnits(Units):
    """ELS and group privacy: a unit is one of the at most ``group_size`` records kept per user.

    They are chosen once (Charles et al. 2024, Algorithm 1; Chua et al. 2024, Algorithm 1, stage 2).
    Which records are kept follows from all of a user's records, so that one record more may bring
    others in and out; so it may where records were held out by their number. Where neither can be,
    the description says ``whole``, and a statement about single records is possible. Nothing is
    chosen then, and where numbers are reserved they follow from a record's place among its user's.

    Args:
        reserve: number the units user by user, with ``group_size`` numbers for each. Needed where
            a number decides the batch (fixed order) or the population is part of the account
            (fixed batch): then no user's data may move another user's numbers.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        group_size: int,
        length: int,
        seed: int = 0,
        reserve: bool = False,
    ) -> None:
        self.store = store
        held_out = (store.metadata.get("hold_out") or {}).get("records", 0)
        whole = not held_out and int(store.records_per_user().max(initial=0)) < group_size
        blocks = [np.empty(0, dtype=np.int64)]
        for begin in range(0, store.num_users, _USERS_AT_ONCE):
            users = np.arange(begin, min(begin + _USERS_AT_ONCE, store.num_users))
            chosen = select(store, users, group_size, (seed, 0))
            blocks.append(chosen.reshape(-1) if reserve else chosen[chosen >= 0])
        #: numbers of the records of all units (M,), by user; -1 where there is none
        self.selected = np.concatenate(blocks)
        facts = {"unit": "record", "group_size": group_size, "length": length}
        super().__init__(len(self.selected), facts | {"reserve": reserve, "whole": whole})

    def _chosen(self, units: np.ndarray, step: int) -> np.ndarray:
        if self.population:
            units = np.where(units < 0, -1, self.selected[np.maximum(units, 0)])
        return units[:, None]


def select(
    store: TokenStore,
    users: np.ndarray,
    group_size: int,
    key: tuple[int, int],
) -> np.ndarray:
    """Select up to ``group_size`` records of each user: uniform over subsets.

    Args:
        store, users: token store, and (B,) user numbers; -1 stands for nobody.
        group_size: G, most records per user.
        key: seed and step of the random choices.

    Returns:
        (B, G) int64 record numbers, -1 where a user has fewer.

    Source: Charles et al. 2024, Algorithms 1 and 2.
    """
    group_size = _check.integer("group_size", group_size)
    users = np.asarray(users, dtype=np.int64)
    present = np.where(users < 0, 0, users)
    begins = store.user_offsets[present]
    count = np.where(users < 0, 0, store.user_offsets[present + 1] - begins)
    row = np.repeat(np.arange(len(users)), count)
    position = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    record = begins[row] + position
    order = np.lexsort((uniform_hash(*key, users[row], position), row))
    # within a row, `position` now serves as the rank of the sorted records
    kept = position < group_size
    chosen = np.full((len(users), group_size), -1, dtype=np.int64)
    chosen[row[kept], position[kept]] = record[order][kept]
    return chosen
