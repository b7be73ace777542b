"""DP-FedAvg and DP-FedSGD on next-word prediction: McMahan, Ramage, Talwar, Zhang 2018."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mfopt import _check
from mfopt.experiments import families
from mfopt.experiments.cache import Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.runs import SPECIAL
from mfopt.experiments.runs.next_word import GUESSES, HEADS, NextWordCell, Variant
from mfopt.experiments.studies.engine import Found, Row, Swept, check_several, option
from mfopt.experiments.studies.rows import curve, ends, interval, intervals, pick

INDEPENDENT = "dpsgd+poisson"
VARIANTS = {
    "fedavg-plain": Variant("FedAvg, not private", private=False),
    "fedsgd-plain": Variant("FedSGD, not private", local=False, private=False),
    "fedavg": Variant("DP-FedAvg"),
    "fedavg-per-layer": Variant("DP-FedAvg, per-layer clipping", layers="per-layer"),
    "fedavg-clipped": Variant("DP-FedAvg, clipped denominator", estimator="clipped"),
    "fedavg-falling": Variant("DP-FedAvg, S and σ fall", falling=True),
    "fedavg-factorized": Variant("DP-FedAvg, factorization", factorized=True),
    "fedsgd": Variant("DP-FedSGD", local=False),
    "fedsgd-factorized": Variant("DP-FedSGD, factorization", local=False, factorized=True),
}
SWEPT = "fedsgd"  # whose S is varied: Figure 9
COMPARED = (
    *(("fedavg", "fedavg-plain"), ("fedsgd", "fedsgd-plain"), ("fedavg-per-layer", "fedavg")),
    *(("fedavg-clipped", "fedavg"), ("fedavg-falling", "fedavg"), ("fedavg-factorized", "fedavg")),
    *(("fedsgd", "fedavg"), ("fedsgd-factorized", "fedsgd")),
)


class SweptVariant(NamedTuple):
    """A variant by name, at one S."""

    name: str
    clip: float

    @property
    def variant(self) -> Variant:
        """What is run."""
        return VARIANTS[self.name]


def _known(name: str, variant: str) -> None:
    if variant not in VARIANTS:
        raise _check.reject(name, variant, f"must be of {', '.join(VARIANTS)}")


@dataclasses.dataclass(frozen=True)
class NextWordStudy(Swept):
    """Accuracy of an LSTM trained on users' words, at one user-level ε."""

    name = "next-word"
    summary = "DP-FedAvg and DP-FedSGD: an LSTM from users' words."
    source = "McMahan et al. 2018, Algorithm 1, Figures 1 to 4 and 9, Tables 2 and 3"
    default_size = "2,048 made users of 40 words, an LSTM of 6 thousand parameters, 64 rounds"
    time = "about 13 CPU-minutes"
    full = (
        "users=0 words=10000 tokens=1600 embedding=96 state=256 bins=153 epochs=33 delta=1e-09 "
        "epsilon=4.634 clip=15 sgd_clip=2 sgd_clips=0.1,0.3,1,5,10 rates=3,6,12 sgd_rates=3,6,12 "
        "batch=8 mean_weight=1 whole=True chunk=16 evaluate=20"
    )
    full_size = "10,000 words, 1.35M parameters, users of 1,600 tokens, 5,049 rounds"
    scale = "{0.parameters:,} parameters, {0.rounds:,} rounds"
    needs = "users' posts (--posts, lines of JSON) and public text (--public), a GPU"
    columns = (
        "variant; accuracy=AccuracyTop1; accuracy_half95=±; rate; clip_norm=S; "
        "noise_multiplier=z; privacy_unit=unit; adjacency; sampling; epsilon=ε; "
        "epsilon_moments=ε, moments"
    )

    posts: Path | None = option(None, "Users' posts, a line of JSON each; else made.", kind=Path)  # noqa: RUF009
    public: Path | None = option(  # noqa: RUF009
        None, "Public text for the dictionary.", kind=Path, name="--public-text"
    )
    user_column: str = option("author", "Name of the user in a line of the posts.")
    text_column: str = option("body", "Name of the text in a line of the posts.")
    variants: tuple[str, ...] = option(tuple(VARIANTS), f"Of {', '.join(VARIANTS)}.", rule=_known)
    factorization: str = option(
        "blt-4-scaled", "Correlated noise, by its name in mfopt compare.", name="--correlated"
    )
    epsilon: float = option(8.0, "ε of every private variant.", name="--eps")
    delta: float = option(1e-4, "δ of every statement.")
    users: int = option(
        2048, "Users of made data; 0: none are made, posts have to be given.", least=0
    )
    words: int = option(100, "Words of the dictionary.")
    tokens: int = option(40, "Most tokens of a user.")
    whole: bool = option(False, "Leave out users with fewer tokens.")
    embedding: int = option(16, "Numbers of a word's vector.")
    state: int = option(24, "Numbers of the state.")
    bins: int = option(
        16, "Rounds in which a user takes part once on average: q = 1/bins.", name="--iters"
    )
    epochs: int = option(4, "Times bins are the rounds.")
    rates: tuple[float, ...] = option((2.5, 5.0, 10.0), "Local rates of FedAvg to choose from.")
    sgd_rates: tuple[float, ...] = option((2.0, 8.0, 32.0), "Rates of FedSGD to choose from.")
    extend: int = option(3, "Most rates to add beyond an end that is best.", least=0)
    clip: float = option(3.0, "S of FedAvg.")
    sgd_clip: float = option(2.0, "S of FedSGD.")
    sgd_clips: tuple[float, ...] = option(
        (0.5, 8.0), "S that DP-FedSGD is run at besides.", empty=True
    )
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
        check_several("sgd_clips", (self.sgd_clip, *self.sgd_clips))
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

    def comparison(self) -> Comparison:
        """Where the mechanisms are found."""
        names = (INDEPENDENT, self.factorization)
        return Comparison(self.bins, self.epochs, (self.epsilon,), self.delta, names)

    def arms(self) -> Iterator[SweptVariant]:
        """Every variant at its S, then DP-FedSGD at the others."""
        for name in self.variants:
            yield SweptVariant(name, self.clip if VARIANTS[name].local else self.sgd_clip)
        for clip in self.sgd_clips if SWEPT in self.variants else ():
            yield SweptVariant(SWEPT, clip)

    def rates_of(self, arm: SweptVariant) -> tuple[float, ...]:  # type: ignore[override]
        return self.rates if arm.variant.local else self.sgd_rates

    def runs(self, arm: SweptVariant, rate: float) -> list[NextWordCell]:
        family = self.factorization if arm.variant.factorized else INDEPENDENT
        own = {field.name for field in dataclasses.fields(NextWordCell)}
        shared = {name: getattr(self, name) for name in own if hasattr(self, name)}
        given = shared | {
            "source": self.comparison().proven(family, self.epsilon),
            "variant": arm.variant,
            "rate": rate,
            "clip": arm.clip,
            "posts": None if self.posts is None else str(self.posts),
            "public": None if self.public is None else str(self.public),
        }
        return [NextWordCell(**given)]

    def judged(self, results: list[Result], rate: float) -> float:
        """The accuracy on one half of the held-out rows, the more the better."""
        return -float(results[0].arrays["validation"][:, -1].mean())

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for arm in self.arms():
            at, (result,) = self.best(found, arm)
            record, variant = result.record, arm.variant
            accuracy, half = interval(result.arrays["test"][:, -1])
            heads = result.arrays["heads"].sum(axis=0)
            rows.append(
                {
                    "variant": variant.label,
                    "algorithm": "FedAvg" if variant.local else "FedSGD",
                    "accuracy": accuracy,
                    "accuracy_half95": half,
                    "rate": record["rate"],
                    "rate_at_end": at.edge,
                    "clip_norm": record["clip_norm"],
                    "clipping": variant.layers if variant.private else "none",
                    "estimator": variant.estimator,
                    "sensitivity": record["sensitivity"],
                    "users": record["population"],
                    "rounds": record["rounds"],
                    "parameters": record["parameters"],
                    "seeds": self.seeds,
                    **{
                        f"top10_in_head_{n}": " ".join(map(str, heads[i]))
                        for i, n in enumerate(HEADS)
                    },
                    **record["privacy"],
                    "_last": 100 * result.arrays["test"][:, -1],
                }
            )
        return rows

    @property
    def parameters(self) -> int:
        """Trained numbers: the table, four gates, the projection."""
        table, inward = (self.words + SPECIAL) * self.embedding, self.embedding + self.state + 1
        return table + 4 * inward * self.state + (self.state + 1) * self.embedding

    @property
    def rounds(self) -> int:
        """Rounds of a run."""
        return self.bins * self.epochs

    def title(self, rows: list[Row]) -> str:
        said = f"ε = {self.epsilon:g}, δ = {self.delta:g} per user"
        return f"Next word: {rows[0]['users']:,} users, {said}, after the last round"

    def panels(self, rows: list[Row]) -> list[Panel]:
        in_percent = [
            row | {k: 100 * row[k] for k in ("accuracy", "accuracy_half95")} for row in rows
        ]
        named, by_clip = in_percent[: len(self.variants)], self.by_clip(in_percent)
        names = [row["variant"] for row in named]
        accuracy = intervals(named, "accuracy", "accuracy_half95")
        if self.seeds < 3:  # an interval from two values says nothing
            accuracy = accuracy._replace(low=None, high=None)
        counts = [[int(n) for n in row[f"top10_in_head_{HEADS[0]}"].split()] for row in named]
        heads = [sum(k * n for k, n in enumerate(each)) / sum(each) for each in counts]
        head = Curve(accuracy.label, heads, range(len(heads)))
        guesses = f"of the {GUESSES} best guesses, mean"
        title, axis = f"in the head of {HEADS[0]} words", "AccuracyTop1 (%)"
        panels = [
            Panel([accuracy], "accuracy", axis, "", log_x=False, lines=False, names=names),
            Panel([head], title, guesses, "", log_x=False, lines=False, names=names),
        ]
        if len(by_clip) > 1:
            label = VARIANTS[SWEPT].label
            swept = curve(label, by_clip, "clip_norm", "accuracy", half=("accuracy_half95", 1.0))
            panels.append(Panel([swept], f"{label} by S", "clip norm S (log scale)", axis))
        return panels

    def by_clip(self, rows: list[Row]) -> list[Row]:
        """DP-FedSGD by S, increasing."""
        mine = pick(rows, variant=VARIANTS[SWEPT].label)
        return sorted(mine, key=lambda row: float(row["clip_norm"]))

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        named = zip(self.variants, rows, strict=False)
        last = {name: row["_last"] for name, row in named}
        for one, other in COMPARED:
            if one in last and other in last:
                mean, half = interval(last[one] - last[other])
                said.append(
                    f"{VARIANTS[one].label} over {VARIANTS[other].label}: {mean:+.2f} ± {half:.2f} "
                    f"points of AccuracyTop1 (95%, paired by seed, {self.seeds} seeds)"
                )
        if len(by_clip := self.by_clip(rows)) > 1:
            words = ", ".join(
                f"S = {row['clip_norm']:g}: {100 * row['accuracy']:.2f} ± "
                f"{100 * row['accuracy_half95']:.2f}"
                for row in by_clip
            )
            said.append(f"{VARIANTS[SWEPT].label} by S, AccuracyTop1 in %: {words}")
        return [*said, *ends(rows)]
