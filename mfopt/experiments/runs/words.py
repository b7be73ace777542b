"""Next-word data keyed by user: from lines of JSON, or made here.

McMahan et al. 2018 (section 3, appendix B): a dictionary of the most frequent words of *other*,
public text; users cut to 1,600 tokens, those with fewer left out; rows of 10 tokens, which are what
the recurrence is unrolled over. A post begins behind BOS and ends with EOS.

The default data is made: a public chain of words that everybody follows, with a favourite of each
user's own, and words outside the dictionary.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.runs.federated import UserData
from mfopt.training.data.sources import JsonLines

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\w\s]")
UNROLL = 10  # tokens of a row


def split(text: str) -> list[str]:
    """The words of a text, in lower case; a punctuation mark is a word.

    >>> split("It's 3 o'clock, Ann!")
    ["it's", '3', "o'clock", ',', 'ann', '!']
    """
    return _WORD.findall(text.lower().replace("’", "'"))


class Dictionary:
    """Words by falling frequency; tokens behind them are UNK, BOS and EOS.

    It has to come from public text: which words the users have is their secret.

    >>> Dictionary(["a", "b"]).tokens("B what a?").tolist()
    [1, 2, 0, 2, 4]

    Args:
      words: each once.
    """

    def __init__(self, words: Sequence[str]) -> None:
        if not words or len(set(words)) < len(words):
            raise _check.reject("words", f"{len(words)} of them", "must be given, each once")
        self.words = tuple(words)
        self._number = {word: i for i, word in enumerate(words)}
        self.unknown, self.begin, self.end = (len(words) + i for i in range(3))

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def of(cls, texts: Iterable[str], most: int = 10_000) -> Dictionary:
        """The ``most`` most frequent words of public texts; of equally frequent ones the first."""
        counts = collections.Counter(word for text in texts for word in split(text))
        if not counts:
            raise _check.reject("dictionary", "no word", "the public text must hold one at least")
        return cls([word for word, _ in counts.most_common(_check.integer("most", most))])

    def tokens(self, text: str) -> np.ndarray:
        """The tokens of one post and its EOS, int32."""
        found = [self._number.get(word, self.unknown) for word in split(text)]
        return np.array([*found, self.end], np.int32)


class WordData(NamedTuple):
    """Training users, held-out rows (inputs, targets) of others, and the dictionary's size."""

    users: UserData
    held_out: tuple[np.ndarray, np.ndarray]
    words: int


def rows_of(streams: Sequence[np.ndarray], words: int, most: int) -> UserData:
    """Users from their posts' tokens one behind another (each ends with EOS), cut to ``most``.

    A row's inputs are the tokens before its targets; the token before the first, and before each
    post, is BOS. Places behind a user's last token have target -1. ``counts`` are tokens.

    Args:
      streams: tokens of each user.
      words: of the dictionary.
      most: tokens of a user that are kept.
    """
    length = -(-_check.integer("most", most) // UNROLL) * UNROLL
    kind = np.int16 if words + 3 < 2**15 else np.int32
    targets = np.full((len(streams), length), -1, kind)
    for user, stream in enumerate(streams):
        kept = stream[:most]
        targets[user, : len(kept)] = kept
    before = np.concatenate([np.full((len(streams), 1), words + 2, kind), targets[:, :-1]], axis=1)
    inputs = np.where(before == words + 2, words + 1, np.maximum(before, 0)).astype(kind)
    rows = tuple(a.reshape(len(streams), -1, UNROLL) for a in (inputs, targets))
    real = targets >= 0
    there: np.ndarray = np.any(real.reshape(len(streams), -1, UNROLL), axis=-1)
    return UserData(rows, there, real.sum(axis=1))


def load(
    posts: str | Path,
    public: str | Path,
    *,
    words: int = 10_000,
    tokens: int = 1600,
    whole: bool = True,
    held_out: float = 0.05,
    seed: int = 0,
    user_column: str = "author",
    text_column: str = "body",
) -> WordData:
    """Users' posts from lines of JSON, as Reddit's comments come.

    Args:
      posts: the file; a line has an author and a body.
      public: a text file of public words: the dictionary is made from it.
      words: of the dictionary.
      tokens: of a user, at most.
      whole: leave out users with fewer tokens, as the paper does; else they weigh less.
      held_out: share of users for the test, by chance.
      seed: which ones.
      user_column, text_column: names of the two fields.

    Raises:
      UsageError: no such file, or fewer than two users are left.
    """
    try:
        text = Path(public).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise _check.reject("public", str(public), f"is not readable text ({problem})") from None
    dictionary = Dictionary.of(text.splitlines(), words)
    streams: dict[str, list[np.ndarray]] = {}
    lengths: collections.Counter[str] = collections.Counter()
    for item in JsonLines([posts], user_column, text_column).read():
        if item.user is None or item.text is None or lengths[item.user] >= tokens:
            continue
        streams.setdefault(item.user, []).append(dictionary.tokens(item.text))
        lengths[item.user] += len(streams[item.user][-1])
    # deleted authors share one name and are no user
    users = [u for u in sorted(streams) if u != "[deleted]" and (not whole or lengths[u] >= tokens)]
    if len(users) < 2:
        rule = f"leaves {len(users)} users with {tokens if whole else 1} tokens"
        raise _check.reject("posts", str(posts), rule, "Take fewer `tokens` or more posts.")
    random = np.random.default_rng(_check.seed("seed", seed))
    order = random.permutation(len(users))
    count = min(max(1, round(held_out * len(users))), len(users) - 1)
    data = rows_of([np.concatenate(streams[u]) for u in users], len(dictionary), tokens)
    return _divided(data, order[count:], order[:count], len(dictionary))


def make(
    users: int = 2000, *, words: int = 200, tokens: int = 160, test_users: int = 100, seed: int = 0
) -> WordData:
    """Data made here: each user's posts from a chain of words, with lengths that differ.

    A word is followed by one of 8 successors, mostly by the first; in one place of ten by the
    user's own favourite word, in one of thirty by a word outside the dictionary. A post ends after
    12 words on average. One user in four has fewer tokens than ``tokens``.

    Args:
      users: that take part in training.
      words: of the dictionary, by falling frequency.
      tokens: of a user, at most.
      test_users: held out.
      seed: pins the data.
    """
    random = np.random.default_rng(_check.seed("seed", seed))
    everybody = _check.integer("users", users) + _check.integer("test_users", test_users)
    frequency = 1 / (np.arange(words) + 10.0)
    frequency /= frequency.sum()
    successors = random.choice(words, size=(words, 8), p=frequency)
    shares = 1 / np.arange(1, 9.0) ** 1.5
    favourite = random.integers(words, size=everybody)
    state = random.choice(words, size=everybody, p=frequency)
    drawn = np.empty((everybody, tokens), np.int32)
    for place in range(tokens):
        which = random.choice(8, size=everybody, p=shares / shares.sum())
        chance = random.uniform(size=everybody)
        state = np.where(chance < 0.1, favourite, successors[state, which])
        drawn[:, place] = np.select(
            [chance > 1 - 1 / 13, chance > 1 - 1 / 13 - 1 / 30], [words + 2, words], state
        )
    short = random.uniform(size=everybody) < 0.25
    lengths = np.where(short, random.integers(max(tokens // 8, 1), tokens + 1, everybody), tokens)
    data = rows_of([d[:n] for d, n in zip(drawn, lengths, strict=True)], words, tokens)
    return _divided(data, np.arange(users), np.arange(users, everybody), words)


def _divided(data: UserData, train: np.ndarray, test: np.ndarray, words: int) -> WordData:
    inputs, targets = data.rows
    real = data.mask[test]
    return WordData(
        UserData((inputs[train], targets[train]), data.mask[train], data.counts[train]),
        (inputs[test][real], targets[test][real]),
        words,
    )
