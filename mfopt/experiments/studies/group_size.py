"""ELS where users differ in size: how many examples of each to keep, and a private median for it.

Charles et al. 2024 (section 6, Figure 4, appendix E) find that the median number of examples of a
user is a good G_ELS, and name private medians as the way to learn it. Here that is done: the median
is chosen by the exponential mechanism, and its ε is taken from the training's. Users hold
log-normal numbers of examples, whose law is public; one user's number is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.doubling import median_probabilities
from mfopt.experiments.runs.means import ELS, Z95, Descent, Tuned, by_halves, draw_sizes, relative
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.means import MeanStudy
from mfopt.experiments.studies.rows import curve, level, pick


@dataclasses.dataclass(frozen=True)
class GroupSize(MeanStudy):
    """Squared error of ELS by G, and where a private median chooses G."""

    name = "els-group-size"
    summary = "ELS: examples kept of each user, and the private median that chooses them."
    source = "Charles et al. 2024, section 6, Figure 4, appendix E"
    default_size = "mean estimation, 256 users of 1 to 64 examples, 7 G, 3 ε, 64 trials"
    time = "about 2 CPU-minutes"
    full = "epsilons=1,4,16,64 trials=128 clips=0.5,1,2,4,8,16"
    full_size = "4 ε, 128 trials, a wider sweep (their language models: `mfopt train`)"
    columns = (
        "epsilon=ε; epsilon_of_median=of it, median; group=G; squared_error=error²; low95=from; "
        "high95=to (95%); privacy_unit=unit; sampling; noise_multiplier=σ"
    )
    title = (
        "G of ELS where users hold 1 to {0.examples} examples, median {0.median:g}; "
        "user-level DP, δ = {0.delta:g}"
    )

    epsilons: tuple[float, ...] = option((1.0, 4.0, 16.0), "ε of the whole.", name="--eps")
    median_share: float = option(
        0.05, "Share of ε that the private median spends.", rule=_check.probability
    )
    groups: tuple[int, ...] = option((1, 2, 4, 8, 16, 32, 64), "G to choose from.")
    median: float = option(8.0, "Median of the law of users' numbers of examples.")
    spread: float = option(1.0, "Standard deviation of their logarithm.")
    examples: int = option(64, "Most examples of a user.")
    batch: int = option(64, "Expected gradients a step.")
    within: float = option(2.0, "σ₂, standard deviation of a user's examples.")
    across: float = option(1.0, "σ₁, standard deviation of users' means.")

    def check_together(self) -> None:
        self.at_most("groups", "examples")
        if len(self.groups) < 2:
            raise _check.reject("groups", self.groups, "must name two values, and none twice")
        room = min(self.descent(1.0, group).expected for group in self.groups)
        if self.batch > room:
            rule = f"is more than the {room:.4g} examples to expect at the smallest G"
            raise _check.reject("batch", self.batch, rule, "Take less, or more `users`.")
        super().check_together()

    def descent(self, epsilon: float, group: int) -> Descent:
        """ELS at one G."""
        return Descent.of(self, algorithm=ELS, group=group, epsilon=epsilon)

    def _left(self, epsilon: float) -> float:
        """ε of the training where the median has spent its share."""
        return epsilon - self.median_share * epsilon

    def cells(self) -> Iterable[Descent]:
        both = [each for epsilon in self.epsilons for each in (epsilon, self._left(epsilon))]
        return [self.descent(epsilon, group) for epsilon in both for group in self.groups]

    def chances(self, epsilon: float) -> np.ndarray:
        """(trials, groups): of the private median's choices."""
        sizes = draw_sizes(self.descent(epsilon, self.groups[0]))
        return median_probabilities(sizes, self.groups, self.median_share * epsilon)

    def nearest(self) -> int:
        """The G nearest the law's median, in ratio."""
        return min(self.groups, key=lambda group: abs(np.log(group / self.median)))

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for epsilon in self.epsilons:
            cells = {group: self.descent(epsilon, group) for group in self.groups}
            for group, cell in cells.items():
                row = self.row(self.best(found[cell]), cell, group=str(group), gradients=self.batch)
                sigma = found[cell].record["noise_multiplier"]
                rows.append(row | {"noise_multiplier": sigma, "epsilon_of_median": 0.0})
            # the private one is the mean over the mechanism's exact law, for each trial's users
            left = [self.best(found[self.descent(self._left(epsilon), g)]) for g in self.groups]
            chances = self.chances(epsilon)
            at = Tuned((np.stack([t.losses for t in left], axis=-1) * chances).sum(-1))
            pairs = zip(self.groups, chances.mean(0), strict=True)
            shares = ", ".join(f"{g}: {c:.2f}" for g, c in pairs if c > 0.005)
            said: Row = {
                "group": f"private median ({shares})",
                "sampling": "exponential mechanism, then Poisson, examples",
                "noise_multiplier": None,
                "epsilon_of_median": self.median_share * epsilon,
                "_right": chances.mean(0)[self.groups.index(self.nearest())],
            }
            rows.append(self.row(at, cells[self.nearest()], gradients=self.batch, **said))
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        panels = []
        for epsilon in self.epsilons:
            *each, private = pick(rows, epsilon=epsilon)
            fixed = [row | {"group": int(row["group"])} for row in each]
            y = "squared_error", ("low95", "high95")
            label = "G by a private median, its ε paid"
            panels.append(
                Panel(
                    [
                        curve("ELS with G fixed beforehand", fixed, "group", *y),
                        level(label, self.groups, private["squared_error"]),
                    ],
                    f"ε = {epsilon:g}",
                    "examples kept of each user G (log scale)\ndotted: median of the users",
                    "squared error of the mean\n(log scale; bands: 95%)",
                    log_y=True,
                    vertical=(self.median, "median"),
                )
            )
        return panels

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            *fixed, private = pick(rows, epsilon=epsilon)
            best = by_halves(np.stack([row["_losses"] for row in fixed]))[0]
            (median,) = pick(fixed, group=str(self.nearest()))
            (one, error), (paid, other) = (relative(r["_losses"], best) for r in (median, private))
            said.append(
                f"ε = {epsilon:g}: G = {self.nearest()} (the median) has {one:.3f} ± "
                f"{Z95 * error:.3f} times the squared error of the best G; the private median, its "
                f"ε of {self.median_share * epsilon:g} paid, {paid:.3f} ± {Z95 * other:.3f} times; "
                f"it chooses the median's G with probability {private['_right']:.2f}"
            )
        return said
