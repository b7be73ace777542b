"""Base of a study on users' words: its data, its model and its mechanisms."""

from __future__ import annotations

import dataclasses

from mfopt._runtime import _check
from mfopt.experiments import families
from mfopt.experiments.families import Comparison
from mfopt.experiments.options import option
from mfopt.experiments.runs.next_word import WordTask
from mfopt.experiments.studies.engine import Swept

INDEPENDENT = "dpsgd+poisson"


@dataclasses.dataclass(frozen=True)
class WordStudy(WordTask, Swept):
    """A study that trains an LSTM on words of users, whose posts are read or made."""

    factorization: str = option(
        "blt-4-scaled", "Correlated noise, by its name in mfopt compare.", name="--correlated"
    )
    epsilon: float = option(8.0, "ε of every private variant.", name="--eps")
    delta: float = option(1e-4, "δ of every statement.")
    bins: int = option(
        16, "Rounds in which a user takes part once on average: q = 1/bins.", name="--iters"
    )
    epochs: int = option(4, "Times bins are the rounds.")

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
    def rounds(self) -> int:
        """Rounds of a run."""
        return self.bins * self.epochs

    def comparison(self) -> Comparison:
        """Comparison that the mechanisms are taken from."""
        names = (INDEPENDENT, self.factorization)
        return Comparison(self.bins, self.epochs, (self.epsilon,), self.delta, names)
