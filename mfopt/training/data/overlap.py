"""Overlap of a public text with the private data: copies, whole ones and near ones.

A private file given as the public one by mistake would undo the guarantee without a trace in it.
A record is a *copy* if at least half of its runs of eight tokens stand in private records; short
records are alike by chance. Runs are hashed by polynomials modulo 2^64 (Rabin and Karp 1987), a few
array operations a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from mfopt._runtime import _check
from mfopt.training.data.store import CONTEXT, TokenStore, give_back
from mfopt.training.secrets import GOLDEN, uniform_hash

WINDOW = 8  # tokens of a run
SHORTEST = 16  # tokens of a record that is examined
NEAR = 0.5  # share of its runs that makes a record a copy
MOST = 0.1  # share of the public tokens in copies that chance and shared boilerplate explain
_BLOCK = 1 << 19  # tokens worked on at once, and those of the last record's rest
_KEPT = 1 << 24  # public runs kept; of more, a fixed share is sampled


def copies(public: TokenStore, private: Sequence[TokenStore]) -> tuple[np.ndarray, np.ndarray]:
    """(examined, copied), each (R,) bool: which records of ``public`` are copies of private ones.

    To leave them out makes the public part a function of the private data, which no guarantee of a
    run covers: it then holds given the public part.
    """
    rate = np.uint64(max(1, -(-public.num_tokens // _KEPT)))
    runs = [windows[windows % rate == 0] for _, windows, _ in _blocks(public)]
    # of the public hashes those that private ones meet: memory does not grow with the private data
    public_runs = np.unique(np.concatenate([np.empty(0, np.uint64), *runs]))
    met = np.zeros(len(public_runs), bool)
    for store in private:
        for _, windows, _ in _blocks(store):
            met |= np.isin(public_runs, windows)
    shared = public_runs[met]
    examined, copied = np.zeros((2, public.num_records), bool)
    for first, windows, owner in _blocks(public):
        sampled = windows % rate == 0
        count = np.bincount(owner[sampled])
        hits = np.bincount(owner[sampled], np.isin(windows[sampled], shared))
        examined[first : first + len(count)] = count > 0
        copied[first : first + len(count)] = (count > 0) & (hits >= NEAR * count)
    return examined, copied


def refuse_copies(
    public: TokenStore, private: Sequence[TokenStore], largest_share: float = MOST
) -> dict[str, float]:
    """Copies of records of ``private`` in ``public``; all with the same tokenizer.

    Refused are copies that hold more than ``largest_share`` of the public tokens.

    Returns:
        ``records``: public ones of at least ``SHORTEST`` tokens; ``copies``: how many of them are
        copies; ``share``: of their tokens, what the copies hold. As private as the data.
    """
    examined, copied = copies(public, private)
    lengths = public.record_lengths()
    total = int(lengths[examined].sum())
    share = int(lengths[copied].sum()) / total if total else 0.0
    overlap = {"records": int(examined.sum()), "copies": int(copied.sum()), "share": share}
    if not share <= largest_share:
        rule = f"hold {share:.1%} of the tokens of {overlap['records']} public records (at most "
        rule += f"{largest_share:.1%} may)"
        way_out = "What is learned from public text is released without noise: leave the private "
        way_out += "records out of it, or, where they are alike by nature, raise `public_overlap`."
        raise _check.reject(
            "public", f"{overlap['copies']} copies of private records", rule, way_out
        )
    return overlap


def _blocks(store: TokenStore) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(number of the first of some records, hashes of runs of tokens (W,), owner of each run).

    A run's owner is its record's place among these; only runs of long records are there.
    """
    borders = np.asarray(store.record_offsets)
    cuts = np.searchsorted(borders, range(0, store.num_tokens, _BLOCK)).tolist()
    powers = np.cumprod(np.full(WINDOW, GOLDEN), dtype=np.uint64)
    for start, end in itertools.pairwise(dict.fromkeys([*cuts, store.num_records])):
        tokens = np.asarray(store.tokens[borders[start] : borders[end]]) % CONTEXT
        if len(tokens) < WINDOW:
            continue
        lengths = np.diff(borders[start : end + 1])
        owner = np.repeat(np.arange(end - start), lengths)
        windows = np.correlate(uniform_hash(0, 0, tokens), powers, "valid")
        owner_of_run = owner[: len(windows)]
        within = owner_of_run == owner[WINDOW - 1 :]  # all of a run is in one record
        within &= lengths[owner_of_run] >= SHORTEST
        yield start, uniform_hash(0, 1, windows[within]), owner_of_run[within]
        give_back(store.tokens)
