"""ELS against ULS on mean estimation: Figure 3 of Charles et al. 2024, all three panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from common import Results, Row, curve, interval, main, pick, relative, studies
from means import ELS, ULS, Descent, MeanStudy, tuned

from mfopt.experiments.plots import Panel

EPSILON, BUDGET, WITHIN = "ε", "compute budget", "within-user σ₂"


@dataclasses.dataclass(frozen=True)
class MeanEstimation(MeanStudy):
    """ELS against ULS: estimating a mean from users' examples."""

    name = "mean-estimation"
    source = "Charles et al. 2024, section 4, Figure 3"
    heading = "Mean estimation, user-level DP"
    paper = "256 users, 32 dimensions, 256 steps"

    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)  # ε of the first panel.
    budgets: tuple[int, ...] = (16, 32, 64, 128, 256)  # Gradients a step, of the second panel.
    withins: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)  # σ₂, of the third panel.
    groups: tuple[int, ...] = (1, 2, 4, 8, 16)  # G of ULS.
    at_eps: float = 1.0  # ε of the other panels.
    at_budget: int = 64  # Gradients a step of the other panels.
    at_within: float = 1.0  # σ₂ of the other panels.
    across: float = 1.0  # σ₁, standard deviation of users' means.
    examples: int = 16  # Examples K of each user; G of ELS.
    trials: int = 128  # Independent trials, an even number.
    clips: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0)  # Clip norms to choose from.

    def arms(self) -> Iterator[tuple[str, float, str, Descent]]:
        """(panel, place on its axis, label, cell)."""
        axes = {EPSILON: "epsilon", BUDGET: "batch", WITHIN: "within"}
        places = {EPSILON: self.epsilons, BUDGET: self.budgets, WITHIN: self.withins}
        at = {"epsilon": self.at_eps, "batch": self.at_budget, "within": self.at_within}
        kinds = [("ELS", ELS, self.examples), *(("ULS", ULS, group) for group in self.groups)]
        for panel, name in axes.items():
            for x in places[panel]:
                for kind, algorithm, group in kinds:
                    place = {**at, name: x}
                    cell = self.descent(
                        algorithm=algorithm, group=group, across=self.across, **place
                    )
                    yield panel, float(x), f"{kind}, G = {group}", cell

    def cells(self) -> Iterable[Descent]:
        return [cell for *_, cell in self.arms()]

    def rows(self, results: Results) -> list[Row]:
        rows: list[Row] = []
        for panel, x, label, cell in self.arms():
            losses = tuned(results[cell].arrays["errors"])
            mean, half = interval(losses)
            row = {"panel": panel, "value": x, "algorithm": label, "squared_error": mean}
            row |= {"low95": mean - half, "high95": mean + half, **cell.privacy()}
            row["noise_multiplier"] = results[cell].record["noise_multiplier"]
            rows.append(row | {"_losses": losses})
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        axes = {
            EPSILON: ("varying ε", "user-level ε (log scale)"),
            BUDGET: ("varying compute budget", "gradients per step B (log scale)"),
            WITHIN: ("varying within-user deviation", "within-user deviation σ₂ (log scale)"),
        }
        y = "squared_error", ("low95", "high95")
        return [
            Panel(
                [
                    curve(label, pick(rows, panel=panel, algorithm=label), "value", *y)
                    for label in dict.fromkeys(row["algorithm"] for row in rows)
                ],
                *words,
                "squared error of the mean\n(log scale; bands: 95%)",
                log_y=True,
            )
            for panel, words in axes.items()
        ]

    def findings(self, rows: list[Row]) -> list[str]:
        els, *uls = dict.fromkeys(row["algorithm"] for row in rows)
        said = []
        for panel in (EPSILON, BUDGET, WITHIN):
            for label in dict.fromkeys((uls[0], uls[-1])):
                pairs = zip(
                    *(pick(rows, panel=panel, algorithm=a) for a in (label, els)), strict=True
                )
                ratios = ((a["value"], relative(a["_losses"], b["_losses"])) for a, b in pairs)
                text = ", ".join(f"{r:.2f} ± {s:.2f} at {x:g}" for x, (r, s) in ratios)
                said.append(f"{panel}: error² of {label} over that of {els}: {text}")
        return said


STUDIES = studies(__file__, MeanEstimation())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
