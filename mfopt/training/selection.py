"""Selection of a unit's records: at most G, chosen from that unit's data alone.

Every rule examines one user only, so that the choice for one user cannot depend on another
user's data. Ties and random picks are settled by a hash of (step, user, position), which no other
user's presence changes.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from mfopt._runtime import _check
from mfopt.training.data import TokenStore
from mfopt.training.secrets import uniform_hash

Rule = Literal["random", "longest", "shortest", "highest-perplexity", "lowest-perplexity", "chunk"]
RULES: tuple[str, ...] = get_args(Rule)
PERPLEXITY_RULES = ("highest-perplexity", "lowest-perplexity")
_USERS_AT_ONCE = 1 << 16


def check_rule(rule: str, losses: np.ndarray | None, records: int, whole: bool = False) -> str:
    """Refuse a rule that is unknown or lacks the losses it sorts by; return it.

    Args:
      rule, losses: as for :func:`select`.
      records: their number.
      whole: whole records are chosen.
    """
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
    *,
    seed: int = 0,
    step: int = 0,
    losses: np.ndarray | None = None,
) -> np.ndarray:
    """Select up to ``group_size`` records of each user, without replacement.

    Args:
        store: token store.
        users: (B,) user numbers; -1 stands for nobody.
        group_size: G, most records per user.
        rule: "random" (uniform over subsets, fresh for each ``step``), "longest" or "shortest" (by
            tokens), "highest-perplexity" or "lowest-perplexity" (by ``losses``). All but
            "random" choose the same records at every step. ("chunk" takes no whole records:
            :meth:`TokenStore.random_chunks`.)
        seed, step: key of the random choices.
        losses: (R,) mean loss per token of each record under the *initial* model.

    Returns:
        (B, G) int64 record numbers, -1 where a user has fewer.

    Sources: Charles et al. 2024, Algorithms 1 and 2 (random); Chua et al. 2024, section 4.1.
    """
    group_size = _check.integer("group_size", group_size)
    check_rule(rule, losses, store.num_records)
    users = np.asarray(users, dtype=np.int64)
    present = np.where(users < 0, 0, users)
    first = store.user_offsets[present]
    count = np.where(users < 0, 0, store.user_offsets[present + 1] - first)
    row = np.repeat(np.arange(len(users)), count)
    position = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    record = first[row] + position
    tie = uniform_hash(seed, step, users[row], position)
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


def select_once(
    store: TokenStore,
    group_size: int,
    rule: str = "random",
    *,
    seed: int = 0,
    losses: np.ndarray | None = None,
    reserve: bool = False,
) -> np.ndarray:
    """The bounded data set of ELS and group privacy: (M,) int64 record numbers, by user.

    Each user contributes at most ``group_size`` records, chosen once (Charles et al. 2024,
    Algorithm 1; Chua et al. 2024, Algorithm 1, stage 2). Worked through in blocks of users.
    With ``reserve``, every user has ``group_size`` entries, -1 where there is no record.

    Args:
      store, group_size, rule, seed, losses: as for :func:`select`.
      reserve: keep a place for every user's missing records.
    """
    check_rule(rule, losses, store.num_records, whole=True)
    blocks = [np.empty(0, dtype=np.int64)]
    for begin in range(0, store.num_users, _USERS_AT_ONCE):
        users = np.arange(begin, min(begin + _USERS_AT_ONCE, store.num_users))
        chosen = select(store, users, group_size, rule, seed=seed, losses=losses)
        blocks.append(chosen.reshape(-1) if reserve else chosen[chosen >= 0])
    return np.concatenate(blocks)
