"""ELS against ULS on mean estimation: Figure 3 of Charles et al. 2024, all three panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, check_several, flag
from mfopt.experiments.studies.on_means import MeanStudy
from mfopt.experiments.studies.user_means import (
    ELS,
    ULS,
    Z95,
    Descent,
    Tuned,
    relative,
    tuned,
)

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

EPSILON, BUDGET, WITHIN = "ε", "compute budget", "within-user σ₂"


class PanelPoint(NamedTuple):
    """One place on the axis of a panel."""

    panel: str
    x: float
    epsilon: float
    batch: int
    within: float


@dataclasses.dataclass(frozen=True)
class MeanEstimation(MeanStudy):
    """Squared error of ELS and of ULS at several G, each at its best clip norm and rate."""

    name = "mean-estimation"
    summary = "ELS against ULS: estimating a mean from users' examples."
    source = "Charles et al. 2024, section 4, Figure 3"
    default_size = "256 users of 16 examples, 256 steps, 128 trials, 3 panels of 5 points"
    time = "about 5 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        "epsilons": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
        "budgets": (16, 32, 64, 128, 256),
        "withins": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        "clips": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    }
    full_size = "the same with longer axes and a wider sweep: the default is the paper's size"

    epsilons: tuple[float, ...] = flag(
        (0.5, 1.0, 2.0, 4.0, 8.0), "ε of the first panel.", option="--eps"
    )
    budgets: tuple[int, ...] = flag(
        (16, 32, 64, 128, 256), "Gradients a step, of the second panel."
    )
    withins: tuple[float, ...] = flag((0.25, 0.5, 1.0, 2.0, 4.0), "σ₂, of the third panel.")
    groups: tuple[int, ...] = flag((1, 2, 4, 8, 16), "G of ULS.")
    at_eps: float = flag(1.0, "ε of the other panels.")
    at_budget: int = flag(64, "Gradients a step of the other panels.")
    at_within: float = flag(1.0, "σ₂ of the other panels.")
    across: float = flag(1.0, "σ₁, standard deviation of users' means.")
    examples: int = flag(16, "Examples K of each user; G of ELS.")
    trials: int = flag(128, "Independent trials, an even number.")
    clips: tuple[float, ...] = flag((2.0, 4.0, 8.0, 16.0), "Clip norms to choose from.")

    def check(self) -> Self:
        super().check()
        self._check_positive("at_eps", "across", "at_within", "epsilons", "withins")
        _check.integer("at_budget", self.at_budget)
        for name in ("budgets", "groups"):
            check_several(name, getattr(self, name))
        self._check_at_most("groups", self.examples, "examples")
        for batch in (*self.budgets, self.at_budget):
            _check.integer("budgets", batch)
            if batch > min(self.groups) * self.users:
                rule = f"{self.users} users give at most {min(self.groups) * self.users}"
                raise _check.reject("budgets", batch, rule, "Take less, or more `users`.")
        return self

    def points(self) -> list[PanelPoint]:
        """All points of all panels."""
        return [
            *(PanelPoint(EPSILON, e, e, self.at_budget, self.at_within) for e in self.epsilons),
            *(PanelPoint(BUDGET, b, self.at_eps, b, self.at_within) for b in self.budgets),
            *(PanelPoint(WITHIN, s, self.at_eps, self.at_budget, s) for s in self.withins),
        ]

    def algorithms(self) -> list[tuple[str, str, int]]:
        """(label, algorithm, G)."""
        return [
            (f"ELS, G = {self.examples}", ELS, self.examples),
            *((f"ULS, G = {group}", ULS, group) for group in self.groups),
        ]

    def descent(self, point: PanelPoint, algorithm: str, group: int) -> Descent:
        """One algorithm at one point."""
        return Descent.of(
            self, algorithm, group, point.batch, point.epsilon, within=float(point.within)
        )

    def _all(self) -> Iterator[tuple[PanelPoint, str, Descent]]:
        for point in self.points():
            for label, algorithm, group in self.algorithms():
                yield point, label, self.descent(point, algorithm, group)

    def cells(self) -> Iterable[Task]:
        return [descent.task() for *_, descent in self._all()]

    def best(self, found: Mapping[Task, Result]) -> dict[tuple[PanelPoint, str], Tuned]:
        """Every algorithm at every point, at its best setting."""
        return {
            (point, label): tuned(found[descent.task()].arrays["errors"], self.clips, self.lengths)
            for point, label, descent in self._all()
        }

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        best = self.best(found)
        rows = []
        for point, label, descent in self._all():
            at = best[point, label]
            rows.append(
                {
                    "panel": point.panel,
                    "value": float(point.x),
                    "algorithm": label,
                    "squared_error": at.mean,
                    "low95": at.mean - Z95 * at.error,
                    "high95": at.mean + Z95 * at.error,
                    "privacy_unit": "user",
                    "adjacency": "add-remove",
                    "sampling": descent.words(),
                    "epsilon": descent.epsilon,
                    "delta": descent.delta,
                    "noise_multiplier": found[descent.task()].record["noise_multiplier"],
                    "gradients": descent.batch,
                    "within": descent.within,
                    "trials": self.trials,
                    "clip_even": at.clip[0],
                    "clip_odd": at.clip[1],
                    "length_even": at.length[0],
                    "length_odd": at.length[1],
                    "at_the_end_of": " ".join(at.edge),
                }
            )
        return Outcome(
            rows,
            {
                "panel": "varies",
                "value": "at",
                "algorithm": "algorithm",
                "squared_error": "error²",
                "low95": "from",
                "high95": "to (95%)",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "epsilon": "ε",
                "noise_multiplier": "σ",
            },
            self._panels(best),
            f"Mean estimation, user-level DP, δ = {self.delta:g} add-remove, {self.trials} trials",
            self._findings(best),
        )

    def _panels(self, best: Mapping[tuple[PanelPoint, str], Tuned]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        axes = {
            EPSILON: ("varying ε", "user-level ε (log scale)"),
            BUDGET: ("varying compute budget", "gradients per step B (log scale)"),
            WITHIN: ("varying within-user deviation", "within-user deviation σ₂ (log scale)"),
        }
        panels = []
        for name, (title, axis) in axes.items():
            points = [point for point in self.points() if point.panel == name]
            curves = []
            for label, *_ in self.algorithms():
                at = [best[point, label] for point in points]
                curves.append(
                    Curve(
                        label,
                        [point.x for point in points],
                        [t.mean for t in at],
                        [t.mean - Z95 * t.error for t in at],
                        [t.mean + Z95 * t.error for t in at],
                    )
                )
            panels.append(
                Panel(curves, title, axis, "squared error of the mean\n(log scale)", log_y=True)
            )
        return panels

    def _findings(self, best: Mapping[tuple[PanelPoint, str], Tuned]) -> list[str]:
        els, *uls = [label for label, *_ in self.algorithms()]
        said = []
        for panel in (EPSILON, BUDGET, WITHIN):
            points = [point for point in self.points() if point.panel == panel]
            for label in dict.fromkeys((uls[0], uls[-1])):
                ratios = [
                    relative(best[point, label].losses, best[point, els].losses) for point in points
                ]
                text = ", ".join(
                    f"{r:.2f} ± {Z95 * s:.2f} at {point.x:g}"
                    for point, (r, s) in zip(points, ratios, strict=True)
                )
                said.append(f"{panel}: error² of {label} over that of {els}: {text}")
        edges = sum(bool(t.edge) for t in best.values())
        if edges:
            said.append(
                f"{edges} of {len(best)} sweeps have their best value at an end (at_the_end_of)"
            )
        return said
