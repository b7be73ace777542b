"""ELS against ULS on mean estimation: Figure 3 of Charles et al. 2024, all three panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from mfopt._runtime import _check, _sizes
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.means import ELS, ULS, Descent, MeanTask, even, tuned
from mfopt.experiments.studies.engine import Found, Row, Study
from mfopt.experiments.studies.rows import curve, interval, pick, relative

EPSILON, BUDGET, WITHIN = "ε", "compute budget", "within-user σ₂"


@dataclasses.dataclass(frozen=True)
class MeanStudy(MeanTask, Study):
    """A study whose cells are :class:`~mfopt.experiments.runs.means.Descent`."""

    scale = "{0.users:,} users, {0.dimension} dimensions, {0.steps} steps, {0.trials} trials"

    clips: tuple[float, ...] = option((2.0, 8.0), "Clip norms to choose from.")
    lengths: tuple[float, ...] = option(
        (0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56),
        "Learning rates to choose from, in multiples of the clip norm.",
    )

    def check_together(self) -> None:
        for cell in self.cells():
            _sizes.require("users", self.users, cell.bytes)

    def at_most(self, name: str, owner: str) -> None:
        """Refuse numbers of which a user, or the population, has only so many: ``owner``."""
        most = getattr(self, owner)
        for each in getattr(self, name):
            if each > most:
                rule = f"a user has {most} {owner}" if owner == "examples" else f"there are {most}"
                raise _check.reject(name, each, rule, f"Take less, or more `{owner}`.")


@dataclasses.dataclass(frozen=True)
class MeanEstimation(MeanStudy):
    """ELS against ULS: estimating a mean from users' examples."""

    name = "mean-estimation"
    source = "Charles et al. 2024, section 4, Figure 3"
    default_size = "256 users of 16 examples, 256 steps, 128 trials, 3 panels of 5 points"
    time = "about 2 CPU-minutes"
    columns = (
        "panel=varies; value=at; algorithm; squared_error=error²; low95=from; high95=to (95%); "
        "privacy_unit=unit; sampling; epsilon=ε; noise_multiplier=σ"
    )
    scale = f"{MeanStudy.scale}; in the paper: 256 users, 32 dimensions, 256 steps"
    title = "Mean estimation, user-level DP, δ = {0.delta:g} add-remove"

    epsilons: tuple[float, ...] = option(
        (0.5, 1.0, 2.0, 4.0, 8.0), "ε of the first panel.", name="--eps"
    )
    budgets: tuple[int, ...] = option(
        (16, 32, 64, 128, 256), "Gradients a step, of the second panel."
    )
    withins: tuple[float, ...] = option((0.25, 0.5, 1.0, 2.0, 4.0), "σ₂, of the third panel.")
    groups: tuple[int, ...] = option((1, 2, 4, 8, 16), "G of ULS.")
    at_eps: float = option(1.0, "ε of the other panels.", rule=_check.epsilon)
    at_budget: int = option(64, "Gradients a step of the other panels.")
    at_within: float = option(1.0, "σ₂ of the other panels.")
    across: float = option(1.0, "σ₁, standard deviation of users' means.")
    examples: int = option(16, "Examples K of each user; G of ELS.")
    trials: int = option(128, "Independent trials, an even number.", rule=even)
    clips: tuple[float, ...] = option((2.0, 4.0, 8.0, 16.0), "Clip norms to choose from.")

    def check_together(self) -> None:
        self.at_most("groups", "examples")
        most = min(self.groups) * self.users
        for batch in (*self.budgets, self.at_budget):
            if batch > most:
                rule = f"{self.users} users give at most {most}"
                raise _check.reject("budgets", batch, rule, "Take less, or more `users`.")
        super().check_together()

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
                    cell = Descent.of(self, algorithm=algorithm, group=group, **place)
                    yield panel, float(x), f"{kind}, G = {group}", cell

    def cells(self) -> Iterable[Descent]:
        return [cell for *_, cell in self.arms()]

    def rows(self, found: Found) -> list[Row]:
        rows: list[Row] = []
        for panel, x, label, cell in self.arms():
            losses = tuned(found[cell].arrays["errors"])
            mean, half = interval(losses)
            row = {"panel": panel, "value": x, "algorithm": label, "squared_error": mean}
            row |= {"low95": mean - half, "high95": mean + half, **cell.privacy()}
            row["noise_multiplier"] = found[cell].record["noise_multiplier"]
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
