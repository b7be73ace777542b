"""The privacy units of each algorithm: how many there are, and the token rows of some of them.

The only place where the algorithms (``docs/training/algorithms.md``) differ: ``uls`` and ``fedavg``
sample users with up to G records, ``els`` and ``group`` single records. Of a user at most G records
are selected, from that user's data alone: ties and random picks are settled by a hash of (step,
user, position), which no other user's presence changes.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.training.data import TokenStore
from mfopt.training.secrets import uniform_hash

Rule = Literal["random", "longest", "shortest", "highest-perplexity", "lowest-perplexity", "chunk"]
RULES: tuple[str, ...] = get_args(Rule)
PERPLEXITY_RULES = ("highest-perplexity", "lowest-perplexity")
_USERS_AT_ONCE = 1 << 16


class Units:
    """A numbered population of privacy units: its public numbers. Subclasses have the data.

    Args:
        population: how many; unit numbers are 0 .. population - 1.
        facts: JSON-able settings. ``unit`` is what one is called, ``records`` is G, the rows of a
            unit, and ``group_size`` the most units that one *user* accounts for: 1 in ULS, G of the
            selection in ELS; both are 1 where they are left out. Both are attributes as
            well.
    """

    def __init__(self, population: int, facts: JsonObject) -> None:
        self.population, self._facts = population, facts
        self.records, self.group_size = (int(facts.get(x, 1)) for x in ("records", "group_size"))

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of ``units`` (m,), -1 for nobody: tokens (m, G, L) int32, mask (m, G, L) bool.

        A pure function of its arguments; one unit's rows depend on no other unit.
        """
        raise NotImplementedError("only the public numbers of these units are known")

    def describe(self) -> JsonObject:
        """JSON-able settings."""
        return dict(self._facts)


class UserUnits(Units):
    """ULS: a unit is a user, with up to ``records`` records chosen at each participation.

    ``length``: tokens of a row; ``rule``, ``seed`` and ``losses``: as in :func:`select`.
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
        self.rule = _check_rule(rule, losses, store.num_records, whole=False)
        self._seed, self._losses = seed, losses
        facts = {"unit": "user", "records": _check.integer("records", records)}
        facts |= {"length": self.length, "selection": rule}
        super().__init__(store.num_users, facts)

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        units = np.asarray(units, dtype=np.int64)
        shape = (len(units), self.records, self.length)
        if self.rule == "chunk":
            rows, places = np.divmod(np.arange(len(units) * self.records), self.records)
            shares = (uniform_hash(self._seed, step, units[rows], places) >> 11) * 2.0**-53
            tokens, mask = self.store.random_chunks(units[rows], self.length, shares)
        else:
            key = self._seed, step
            chosen = select(self.store, units, self.records, self.rule, key, self._losses)
            tokens, mask = self.store.batch(chosen.reshape(-1), self.length)
        return tokens.reshape(shape), mask.reshape(shape)


class RecordUnits(Units):
    """ELS and group privacy: a unit is one of the at most ``group_size`` records kept per user.

    They are chosen once (Charles et al. 2024, Algorithm 1; Chua et al. 2024, Algorithm 1, stage 2).
    Which records are kept follows from all of a user's records, so that one record more may bring
    others in and out; so it may where records were held out by their number. Where neither can be,
    the description says ``whole``, and a statement about single records is possible. Nothing is
    chosen then, and where numbers are reserved they follow from a record's place among its user's,
    whatever ``rule`` is: sorted by content, an emptied record would move others to other batches.

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
        _check_rule(rule, losses, store.num_records)
        rule = "random" if whole and reserve else rule
        blocks = [np.empty(0, dtype=np.int64)]
        for begin in range(0, store.num_users, _USERS_AT_ONCE):
            users = np.arange(begin, min(begin + _USERS_AT_ONCE, store.num_users))
            chosen = select(store, users, group_size, rule, (seed, 0), losses)
            blocks.append(chosen.reshape(-1) if reserve else chosen[chosen >= 0])
        #: numbers of the records of all units (M,), by user; -1 where there is none
        self.selected = np.concatenate(blocks)
        facts = {"unit": "record", "group_size": group_size, "length": self.length}
        facts |= {"selection": rule, "reserve": reserve, "whole": whole}
        super().__init__(len(self.selected), facts)

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        records = np.asarray(units, dtype=np.int64)
        if self.population:
            records = np.where(records < 0, -1, self.selected[np.maximum(records, 0)])
        tokens, mask = self.store.batch(records, self.length)
        return tokens[:, None], mask[:, None]


def _check_rule(rule: str, losses: np.ndarray | None, records: int, whole: bool = True) -> str:
    """Refuse a rule that is unknown or lacks the losses it sorts by; return it."""
    if whole and rule == "chunk":
        cross = "random chunks cross record borders, so they fit user-level sampling (uls) only"
        raise _check.reject("selection", rule, cross, "Choose a rule that picks whole records.")
    _check.choice("selection", rule, RULES)
    shape = None if losses is None else np.shape(losses)
    if rule in PERPLEXITY_RULES and shape != (records,):
        needed = f"{rule} needs the initial model's loss of each record, shape ({records},)"
        raise _check.reject("losses", shape, needed)
    return rule


def select(
    store: TokenStore,
    users: np.ndarray,
    group_size: int,
    rule: str = "random",
    key: tuple[int, int] = (0, 0),
    losses: np.ndarray | None = None,
) -> np.ndarray:
    """Select up to ``group_size`` records of each user, without replacement.

    Args:
        store, users: token store, and (B,) user numbers; -1 stands for nobody.
        group_size: G, most records per user.
        rule: "random" (uniform over subsets, fresh for each ``step``), "longest" or "shortest" (by
            tokens), "highest-perplexity" or "lowest-perplexity" (by ``losses``). All but
            "random" choose the same records at every step. ("chunk" takes no whole records:
            :meth:`TokenStore.random_chunks`.)
        key: seed and step of the random choices.
        losses: (R,) mean loss per token of each record under the *initial* model.

    Returns:
        (B, G) int64 record numbers, -1 where a user has fewer.

    Sources: Charles et al. 2024, Algorithms 1 and 2 (random); Chua et al. 2024, section 4.1.
    """
    group_size = _check.integer("group_size", group_size)
    _check_rule(rule, losses, store.num_records)
    users = np.asarray(users, dtype=np.int64)
    present = np.where(users < 0, 0, users)
    begins = store.user_offsets[present]
    count = np.where(users < 0, 0, store.user_offsets[present + 1] - begins)
    row = np.repeat(np.arange(len(users)), count)
    position = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    record = begins[row] + position
    tie = uniform_hash(*key, users[row], position)
    if rule == "random":
        order = np.lexsort((tie, row))
    else:
        if rule in PERPLEXITY_RULES:
            assert losses is not None
            score = np.nan_to_num(np.asarray(losses)[record], nan=np.inf)
        else:
            score = store.record_lengths(record).astype(np.float64)
        sign = -1.0 if rule in ("longest", "highest-perplexity") else 1.0
        order = np.lexsort((tie, sign * score, row))
    # within a row, `position` now serves as the rank of the sorted records
    kept = position < group_size
    chosen = np.full((len(users), group_size), -1, dtype=np.int64)
    chosen[row[kept], position[kept]] = record[order][kept]
    return chosen
