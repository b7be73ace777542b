"""DP-FedAvg and DP-FedSGD on next-word prediction: McMahan, Ramage, Talwar, Zhang 2018."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from mfopt.experiments.cache import Result
from mfopt.experiments.options import check_several, option
from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.runs.next_word import (
    COMPARED,
    GUESSES,
    HEADS,
    VARIANTS,
    NextWordCell,
    Variant,
    row_of,
)
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.on_words import INDEPENDENT, WordStudy
from mfopt.experiments.studies.rows import curve, ends, interval, intervals, pick

SWEPT = "fedsgd"  # whose S is varied: Figure 9


@dataclasses.dataclass(frozen=True)
class NextWordStudy(WordStudy):
    """Accuracy of an LSTM trained on users' words, at one user-level ε."""

    name = "next-word"
    summary = "DP-FedAvg and DP-FedSGD: an LSTM from users' words."
    source = "McMahan et al. 2018, Algorithm 1, Figures 1 to 4 and 9, Tables 2 and 3"
    default_size = "2,048 synthetic users of 40 words, an LSTM of 6 thousand parameters, 64 rounds"
    time = "about 13 CPU-minutes"
    full = (
        "users=0 words=10000 tokens=1600 embedding=96 state=256 bins=153 epochs=33 delta=1e-09 "
        "epsilon=4.634 clip=15 sgd_clip=2 sgd_clips=0.1,0.3,1,5,10 rates=3,6,12 sgd_rates=3,6,12 "
        "batch=8 mean_weight=1 whole=True chunk=16 evaluate=20"
    )
    full_size = "10,000 words, 1.35M parameters, users of 1,600 tokens, 5,049 rounds"
    scale = "{0.parameters:,} parameters, {0.rounds:,} rounds"
    needs = "users' posts (--posts, lines of JSON) and public text (--public-text), a GPU"
    columns = (
        "variant; accuracy=AccuracyTop1; accuracy_half95=±; rate; clip_norm=S; "
        "noise_multiplier=z; privacy_unit=unit; adjacency; sampling; epsilon=ε; "
        "epsilon_moments=ε, moments"
    )
    title = (
        "Next word: {1[users]:,} users, ε = {0.epsilon:g}, δ = {0.delta:g} per user, "
        "after the last round"
    )

    variants: tuple[str, ...] = option(tuple(VARIANTS), "Ways to train.", choices=tuple(VARIANTS))
    rates: tuple[float, ...] = option((2.5, 5.0, 10.0), "Local rates of FedAvg to choose from.")
    sgd_rates: tuple[float, ...] = option((2.0, 8.0, 32.0), "Rates of FedSGD to choose from.")
    extend: int = option(3, "Most rates to add beyond an end that is best.", least=0)
    clip: float = option(3.0, "S of FedAvg.")
    sgd_clip: float = option(2.0, "S of FedSGD.")
    sgd_clips: tuple[float, ...] = option(
        (0.5, 8.0), "S that DP-FedSGD is run at besides.", empty=True
    )

    def check_together(self) -> None:
        check_several("sgd_clips", (self.sgd_clip, *self.sgd_clips))
        super().check_together()

    def arms(self) -> Iterator[tuple[Variant, float]]:
        """Yield the variants at their S, then DP-FedSGD at the others."""
        for variant in map(VARIANTS.__getitem__, self.variants):
            yield variant, self.clip if variant.local else self.sgd_clip
        for clip in self.sgd_clips if SWEPT in self.variants else ():
            yield VARIANTS[SWEPT], clip

    def rates_of(self, arm: tuple[Variant, float]) -> tuple[float, ...]:  # type: ignore[override]
        return self.rates if arm[0].local else self.sgd_rates

    def runs(self, arm: tuple[Variant, float], rate: float) -> list[NextWordCell]:
        variant, clip = arm
        family = self.factorization if variant.factorized else INDEPENDENT
        source = self.comparison().proven(family, self.epsilon)
        return [NextWordCell.of(self, source=source, variant=variant, rate=rate, clip=clip)]

    def judged(self, results: list[Result], rate: float) -> float:
        """The accuracy on one half of the held-out rows, the more the better."""
        return -float(results[0].arrays["validation"][:, -1].mean())

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for arm in self.arms():
            at, (result,) = self.best(found, arm)
            row = row_of(arm[0], result) | {"rate_at_end": at.edge, "seeds": self.seeds}
            row["accuracy"], row["accuracy_half95"] = interval(row["_last"] / 100)
            rows.append(row)
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        in_percent = [
            row | {k: 100 * row[k] for k in ("accuracy", "accuracy_half95")} for row in rows
        ]
        named, by_clip = in_percent[: len(self.variants)], self.by_clip(in_percent)
        names = [row["variant"] for row in named]
        accuracy = intervals(named, "accuracy", "accuracy_half95")
        if self.seeds < 3:  # an interval from two values says nothing
            accuracy = accuracy._replace(low=None, high=None)
        counts = [row[f"top10_in_head_{HEADS[0]}"].split() for row in named]
        heads = [np.average(range(len(each)), weights=list(map(int, each))) for each in counts]
        head = Curve(accuracy.label, heads, range(len(heads)))
        axis, guesses = "AccuracyTop1 (%)", f"of the {GUESSES} best guesses, mean"
        how: Any = {"log_x": False, "lines": False, "names": names}
        panels = [
            Panel([accuracy], "accuracy", axis, "", **how),
            Panel([head], f"in the head of {HEADS[0]} words", guesses, "", **how),
        ]
        if len(by_clip) > 1:
            label = VARIANTS[SWEPT].label
            swept = curve(label, by_clip, "clip_norm", "accuracy", half=("accuracy_half95", 1.0))
            axes = "clip norm S (log scale)", "AccuracyTop1 (%; bands: 95%)"
            panels.append(Panel([swept], f"{label} by S", *axes))
        return panels

    def by_clip(self, rows: list[Row]) -> list[Row]:
        """DP-FedSGD by S, increasing."""
        mine = pick(rows, variant=VARIANTS[SWEPT].label)
        return sorted(mine, key=lambda row: float(row["clip_norm"]))

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        last = {name: row["_last"] for name, row in zip(self.variants, rows, strict=False)}
        for one, other in COMPARED:
            if one in last and other in last:
                mean, half = interval(last[one] - last[other])
                said.append(
                    f"{VARIANTS[one].label} over {VARIANTS[other].label}: {mean:+.2f} ± {half:.2f} "
                    f"points of AccuracyTop1 (95%, paired by seed, {self.seeds} seeds)"
                )
        if len(by_clip := self.by_clip(rows)) > 1:
            at = {row["clip_norm"]: interval(row["_last"]) for row in by_clip}
            words = ", ".join(f"S = {c:g}: {m:.2f} ± {h:.2f}" for c, (m, h) in at.items())
            said.append(f"{VARIANTS[SWEPT].label} by S, AccuracyTop1 in %: {words}")
        return [*said, *ends(rows)]
