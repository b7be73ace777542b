"""Base of a study on users' words: its data, its model and its mechanisms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mfopt._runtime import _check
from mfopt.experiments import families
from mfopt.experiments.families import Comparison
from mfopt.experiments.runs import SPECIAL
from mfopt.experiments.studies.engine import Swept, option

INDEPENDENT = "dpsgd+poisson"


@dataclasses.dataclass(frozen=True)
class WordStudy(Swept):
    """A study that trains an LSTM on words of users, whose posts are read or made."""

    posts: Path | None = option(None, "Users' posts, a line of JSON each; else made.", kind=Path)  # noqa: RUF009
    public: Path | None = option(  # noqa: RUF009
        None, "Public text for the dictionary.", kind=Path, name="--public-text"
    )
    user_column: str = option("author", "Name of the user in a line of the posts.")
    text_column: str = option("body", "Name of the text in a line of the posts.")
    users: int = option(
        2048, "Users of made data; 0: none are made, posts have to be given.", least=0
    )
    words: int = option(100, "Words of the dictionary.")
    tokens: int = option(40, "Most tokens of a user.")
    whole: bool = option(False, "Leave out users with fewer tokens.")
    embedding: int = option(16, "Numbers of a word's vector.")
    state: int = option(24, "Numbers of the state.")
    factorization: str = option(
        "blt-4-scaled", "Correlated noise, by its name in mfopt compare.", name="--correlated"
    )
    epsilon: float = option(8.0, "ε of every private variant.", name="--eps")
    delta: float = option(1e-4, "δ of every statement.")
    bins: int = option(
        16, "Rounds in which a user takes part once on average: q = 1/bins.", name="--iters"
    )
    epochs: int = option(4, "Times bins are the rounds.")
    falls_to: float = option(0.5, "Share of S that is left in the second half, where S falls.")
    batch: int = option(2, "Rows of 10 tokens of a local batch.")
    local_epochs: int = option(1, "Local epochs E.")
    mean_weight: float = option(0.85, "Public guess of users' mean weight: W = it times users.")
    least: float = option(0.8, "W_min over W.")
    seeds: int = option(3, "Runs at each rate.", least=2)
    chunk: int = option(32, "Users at work at once.")
    evaluate: int = option(8, "Evaluations of a run.")

    def check_together(self) -> None:
        if self.mean_weight > 1:
            raise _check.reject("mean_weight", self.mean_weight, "weights are at most 1")
        if (self.posts is None) != (self.public is None):
            rule = "posts and public text are needed together"
            given = (self.posts and str(self.posts), self.public and str(self.public))
            raise _check.reject("posts, public", given, rule, "The dictionary has to be public.")
        if not self.users and self.posts is None:
            rule = "the paper's size is for users' posts, and none are made for it"
            way_out = (
                f"Give `posts` (lines of JSON with {self.user_column} and {self.text_column}) and "
                "`public`, or `users` to make so many."
            )
            raise _check.reject("posts", self.posts, rule, way_out)
        families.find(self.factorization, "factorization")
        self.comparison().check()

    @property
    def parameters(self) -> int:
        """Trained numbers: the table, four gates, the projection."""
        table, inward = (self.words + SPECIAL) * self.embedding, self.embedding + self.state + 1
        return table + 4 * inward * self.state + (self.state + 1) * self.embedding

    @property
    def rounds(self) -> int:
        """Rounds of a run."""
        return self.bins * self.epochs

    def comparison(self) -> Comparison:
        """Comparison that the mechanisms are taken from."""
        names = (INDEPENDENT, self.factorization)
        return Comparison(self.bins, self.epochs, (self.epsilon,), self.delta, names)
