"""Overlap of a public text with the private data: exact and near copies.

A private file given as the public one by mistake would undo the guarantee without a trace in it.
A record is an *exact* copy if its tokens are a private record's, and a *near* copy if at least half
of its runs of eight tokens stand in private records; short records are alike by chance. Runs are
hashed by polynomials modulo 2^64 (Rabin and Karp 1987), a few array operations a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from mfopt._runtime import _check
from mfopt.training.data.store import TokenStore, give_back
from mfopt.training.secrets import uniform_hash
from mfopt.training.tokenizers import CONTEXT

WINDOW = 8  # tokens of a run
SHORTEST = 16  # tokens of a record that is examined
NEAR = 0.5  # share of its runs that makes a record a near copy
MOST = 0.1  # share of the public tokens in copies that chance and shared boilerplate explain
_BLOCK = 1 << 19  # tokens worked on at once
_KEPT = 1 << 24  # public runs kept; of more, a fixed share is sampled
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Copies of private records among the public ones; as private as the data it comes from.

    ``records``: public ones of at least ``SHORTEST`` tokens; ``exact``, ``near``: how many of them
    are copies, none counted as both; ``share``: of their tokens, what the copies hold.
    """

    records: int
    exact: int
    near: int
    share: float


def copies(public: TokenStore, private: Sequence[TokenStore]) -> tuple[np.ndarray, np.ndarray]:
    """(exact, near), each (R,) bool: which records of ``public`` are copies of private ones.

    To leave them out makes the public part a function of the private data, which no guarantee of a
    run covers: it then holds given the public part.
    """
    rate = np.uint64(max(1, -(-public.num_tokens // _KEPT)))
    whole, runs = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for _, records, windows, _ in _blocks(public):
        whole.append(records)
        runs.append(windows[windows % rate == 0])
    # of the public hashes those that private ones meet: memory does not grow with the private data
    own = [np.unique(np.concatenate(parts)) for parts in (whole, runs)]
    met = [np.zeros(len(mine), bool) for mine in own]
    for store in private:
        for _, *hashes, _ in _blocks(store):
            for mine, seen, found in zip(own, met, hashes, strict=True):
                seen |= np.isin(mine, found)
    known, known_runs = (mine[seen] for mine, seen in zip(own, met, strict=True))
    exact, near = np.zeros((2, public.num_records), bool)
    for numbers, records, windows, owner in _blocks(public):
        same = np.isin(records, known)
        sampled = windows % rate == 0
        count = np.bincount(owner[sampled], minlength=len(same))
        found = np.isin(windows[sampled], known_runs)
        hits = np.bincount(owner[sampled], found, minlength=len(same))
        exact[numbers] = same
        near[numbers] = ~same & (count > 0) & (hits >= NEAR * count)
    return exact, near


def refuse_copies(public: TokenStore, private: Sequence[TokenStore], most: float = MOST) -> Overlap:
    """Copies of records of ``private`` in ``public``; all with the same tokenizer.

    Refused are copies that hold more than ``most`` of the public tokens.
    """
    exact, near = copies(public, private)
    lengths = public.record_lengths()
    looked = lengths >= SHORTEST
    total = int(lengths[looked].sum())
    share = int(lengths[exact | near].sum()) / total if total else 0.0
    found = Overlap(int(looked.sum()), int(exact.sum()), int(near.sum()), share)
    if not share <= most:
        copied = f"{found.exact} exact and {found.near} near copies"
        rule = f"of private records among {found.records} hold {share:.1%} of the public tokens "
        rule += f"(at most {most:.1%} may)"
        way_out = "What is learned from public text is released without noise: leave the private "
        way_out += "records out of it, or, where they are alike by nature, raise `public_overlap`."
        raise _check.reject("public", copied, rule, way_out)
    return found


def _blocks(store: TokenStore) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(numbers of long records (R,), their hashes, hashes of runs of tokens (W,), their owners).

    A run's owner is its record's place among the R.
    """
    first, count, borders = 0, store.num_records, np.asarray(store.record_offsets)
    while first < count:
        # as many records as fit, at least one
        end = int(np.searchsorted(borders, borders[first] + _BLOCK, side="right")) - 1
        end = min(max(end, first + 1), count)
        offsets = borders[first : end + 1]
        tokens = np.asarray(store.tokens[offsets[0] : offsets[-1]]) % CONTEXT
        offsets = offsets - offsets[0]
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths >= SHORTEST)
        place = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)  # in its record
        powers = np.cumprod(np.full(max(lengths.max(initial=0), WINDOW), _BASE), dtype=np.uint64)
        letters = uniform_hash(0, 0, tokens)
        # sums of each record's terms as differences of prefix sums; the length goes in too, as an
        # empty sum would be any record of zeros
        total = np.append(np.uint64(0), np.cumsum(letters * powers[place], dtype=np.uint64))
        records = uniform_hash(0, 1, total[offsets[long + 1]] - total[offsets[long]], lengths[long])
        runs = lengths[long] - WINDOW + 1
        owner = np.repeat(np.arange(len(long)), runs)
        begin = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
        begin += offsets[long][owner]
        windows = np.zeros(len(begin), np.uint64)
        for i in range(WINDOW):
            windows += letters[begin + i] * powers[i]
        yield first + long, records, uniform_hash(0, 1, windows), owner
        give_back(store.tokens)
        first = end
