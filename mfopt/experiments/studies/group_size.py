"""ELS where users differ in size: how many examples of each to keep, and a private median for it.

Charles et al. 2024 (section 6, Figure 4, appendix E) find that the median number of examples of a
user is a good G_ELS, and name private medians as the way to learn it. Here that is done: the median
is chosen by the exponential mechanism, and its ε is taken from the training's. Users hold
log-normal numbers of examples, whose law is public; one user's number is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, flag
from mfopt.experiments.studies.on_means import MeanStudy
from mfopt.experiments.studies.private_median import probabilities
from mfopt.experiments.studies.user_means import (
    ELS,
    Z95,
    Descent,
    draw_sizes,
    relative,
    tuned,
)

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

PRIVATE, MEDIAN = "G by a private median", "G = median"


@dataclasses.dataclass(frozen=True)
class GroupSize(MeanStudy):
    """Squared error of ELS by G, and where a private median chooses G."""

    name = "els-group-size"
    summary = "ELS: examples kept of each user, and the private median that chooses them."
    source = "Charles et al. 2024, section 6, Figure 4, appendix E"
    default_size = "mean estimation, 256 users of 1 to 64 examples, 7 G, 3 ε, 64 trials"
    time = "about 2 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        "epsilons": (1.0, 4.0, 16.0, 64.0),
        "trials": 128,
        "clips": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    }
    full_size = "4 ε, 128 trials, a wider sweep (their language models: `mfopt train`)"

    epsilons: tuple[float, ...] = flag((1.0, 4.0, 16.0), "ε of the whole.", option="--eps")
    median_share: float = flag(0.05, "Share of ε that the private median spends.")
    groups: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32, 64), "G to choose from.")
    median: float = flag(8.0, "Median of the law of users' numbers of examples.")
    spread: float = flag(1.0, "Standard deviation of their logarithm.")
    examples: int = flag(64, "Most examples of a user.")
    batch: int = flag(64, "Expected gradients a step.")
    within: float = flag(2.0, "σ₂, standard deviation of a user's examples.")
    across: float = flag(1.0, "σ₁, standard deviation of users' means.")

    def check(self) -> Self:
        super().check()
        self._check_positive("median", "spread", "within", "across", "epsilons")
        _check.integer("batch", self.batch)
        _check.probability("median_share", self.median_share)
        self._check_at_most("groups", self.examples, "examples")
        if len(set(self.groups)) < max(2, len(self.groups)):
            raise _check.reject("groups", self.groups, "must name two values, and none twice")
        room = min(self.descent(1.0, group).expected for group in self.groups)
        if self.batch > room:
            rule = f"is more than the {room:.4g} examples to expect at the smallest G"
            raise _check.reject("batch", self.batch, rule, "Take less, or more `users`.")
        return self

    def descent(self, epsilon: float, group: int) -> Descent:
        """ELS at one G."""
        return Descent.of(
            self, ELS, group, self.batch, epsilon, median=self.median, spread=self.spread
        )

    def _left(self, epsilon: float) -> float:
        """ε of the training where the median has spent its share."""
        return epsilon - self.median_share * epsilon

    def cells(self) -> Iterable[Task]:
        return [
            self.descent(each, group).task()
            for epsilon in self.epsilons
            for each in (epsilon, self._left(epsilon))
            for group in self.groups
        ]

    def losses(self, found: Mapping[Task, Result], epsilon: float) -> dict[Any, np.ndarray]:
        """(trials,) of every G, of the G nearest the median, and of the private median.

        The private one is the mean over the mechanism's exact law, for each trial's users.
        """

        def at(each: float, group: int) -> np.ndarray:
            errors = found[self.descent(each, group).task()].arrays["errors"]
            return tuned(errors, self.clips, self.lengths).losses

        known: dict[Any, np.ndarray] = {group: at(epsilon, group) for group in self.groups}
        known[MEDIAN] = known[self.nearest()]
        rest = np.stack([at(self._left(epsilon), group) for group in self.groups], axis=-1)
        known[PRIVATE] = (rest * self.chances(epsilon)).sum(-1)
        return known

    def chances(self, epsilon: float) -> np.ndarray:
        """(trials, groups): of the private median's choices."""
        sizes = draw_sizes(self.descent(epsilon, self.groups[0]))
        return probabilities(sizes, self.groups, self.median_share * epsilon)

    def nearest(self) -> int:
        """The G nearest the law's median, in ratio."""
        return min(self.groups, key=lambda group: abs(np.log(group / self.median)))

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        every = {epsilon: self.losses(found, epsilon) for epsilon in self.epsilons}
        rows = []
        for epsilon, known in every.items():
            names: tuple[int | str, ...] = (*self.groups, PRIVATE)
            for name in names:
                private = isinstance(name, str)
                descent = self.descent(epsilon, self.nearest() if isinstance(name, str) else name)
                result = found[descent.task()].record
                chosen = self.chances(epsilon).mean(0)
                losses = known[name]
                error = losses.std(ddof=1) / np.sqrt(self.trials)
                shares = ", ".join(
                    f"{g}: {c:.2f}" for g, c in zip(self.groups, chosen, strict=True) if c > 0.005
                )
                rows.append(
                    {
                        "group": f"private median ({shares})" if private else str(name),
                        "squared_error": float(losses.mean()),
                        "low95": float(losses.mean() - Z95 * error),
                        "high95": float(losses.mean() + Z95 * error),
                        "privacy_unit": "user",
                        "adjacency": "add-remove",
                        "sampling": "exponential mechanism, then Poisson, examples"
                        if private
                        else descent.words(),
                        "epsilon": epsilon,
                        "epsilon_of_median": self.median_share * epsilon if private else 0.0,
                        "delta": self.delta,
                        "noise_multiplier": None if private else result["noise_multiplier"],
                        "gradients": self.batch,
                        "trials": self.trials,
                    }
                )
        return Outcome(
            rows,
            {
                "epsilon": "ε",
                "epsilon_of_median": "of it, median",
                "group": "G",
                "squared_error": "error²",
                "low95": "from",
                "high95": "to (95%)",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "noise_multiplier": "σ",
            },
            self._panels(every),
            f"G of ELS where users hold 1 to {self.examples} examples, median {self.median:g}; "
            f"user-level DP, δ = {self.delta:g}",
            self._findings(every),
        )

    def _panels(self, every: Mapping[float, Mapping[Any, np.ndarray]]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        panels = []
        for epsilon, known in every.items():
            mean = [float(known[g].mean()) for g in self.groups]
            band = [Z95 * float(known[g].std(ddof=1)) / self.trials**0.5 for g in self.groups]
            low = [m - b for m, b in zip(mean, band, strict=True)]
            high = [m + b for m, b in zip(mean, band, strict=True)]
            level = float(known[PRIVATE].mean())
            ends = (self.groups[0], self.groups[-1])
            panels.append(
                Panel(
                    [
                        Curve("ELS with G fixed beforehand", self.groups, mean, low, high),
                        Curve("G by a private median, its ε paid", ends, (level, level)),
                    ],
                    f"ε = {epsilon:g}",
                    "examples kept of each user G (log scale)\ndotted: median of the users",
                    "squared error of the mean\n(log scale)",
                    log_y=True,
                    vertical=(self.median, "median"),
                )
            )
        return panels

    def _findings(self, every: Mapping[float, Mapping[Any, np.ndarray]]) -> list[str]:
        said = []
        for epsilon, known in every.items():
            best = best_of({group: known[group] for group in self.groups})
            median, m_error = relative(known[MEDIAN], best)
            private, p_error = relative(known[PRIVATE], best)
            right = self.chances(epsilon).mean(0)[self.groups.index(self.nearest())]
            said.append(
                f"ε = {epsilon:g}: G = {self.nearest()} (the median) has "
                f"{median:.3f} ± {Z95 * m_error:.3f} times the squared error of the best G; the "
                f"private median, its ε of {self.median_share * epsilon:g} paid, "
                f"{private:.3f} ± {Z95 * p_error:.3f} times; it chooses the median's G with "
                f"probability {right:.2f}"
            )
        return said


def best_of(losses: Mapping[int, np.ndarray]) -> np.ndarray:
    """Losses at what is best for the other half of the trials."""
    first = next(iter(losses.values()))
    best = np.empty_like(first)
    for half in (0, 1):
        chosen = min(losses, key=lambda key: losses[key][1 - half :: 2].mean())
        best[half::2] = losses[chosen][half::2]
    return best
