"""The concentration filter of Asi and Liu against user-wise DP-SGD, with its halts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, flag
from mfopt.experiments.studies.filtered_means import FilteredDescent
from mfopt.experiments.studies.on_means import MeanStudy
from mfopt.experiments.studies.user_means import ULS, Z95, Descent, relative, tuned

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

PLAIN = "user-wise DP-SGD"


@dataclasses.dataclass(frozen=True)
class ConcentrationFilter(MeanStudy):
    """Squared error and halts of the filter by τ, and user-wise DP-SGD on the same gradients."""

    name = "concentration-filter"
    summary = "The filter of Asi and Liu run for real: outliers, noise by τ, halts."
    source = "Chua et al. 2024, section 5.3 and appendix A, Algorithm 3"
    default_size = "mean estimation, 256 users, 64 steps, 6 τ, 3 spreads of users, 32 trials"
    time = "about 0.2 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {"users": 1024, "trials": 128}
    full_size = "1,024 users, 128 trials (the publication runs no filter: it counts its noise)"

    acrosses: tuple[float, ...] = flag((0.01, 0.1, 1.0), "σ₁, deviations of users' means.")
    relatives: tuple[float, ...] = flag(
        (0.5, 1.0, 1.1, 1.2, 1.4, 2.0), "τ, over the typical distance of two users."
    )
    epsilon: float = flag(3.0, "ε of every run.", option="--eps")
    within: float = flag(1.0, "σ₂, standard deviation of a user's examples.")
    users: int = flag(256, "Users N, all of them in each step.")
    group: int = flag(8, "Examples of a user in a step.")
    steps: int = flag(64, "Steps T.")
    trials: int = flag(32, "Independent trials, an even number.")
    rates: tuple[float, ...] = flag(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "Learning rates to choose from (filter)."
    )
    clips: tuple[float, ...] = flag((1.0, 4.0), "Clip norms to choose from (DP-SGD).")
    lengths: tuple[float, ...] = flag(
        (0.05, 0.1, 0.2, 0.4, 0.8), "Its learning rates, each times the clip norm."
    )

    def check(self) -> Self:
        super().check()
        self._check_positive("acrosses", "relatives", "rates", "within")
        _check.epsilon("epsilon", self.epsilon)
        self._check_at_most("group", self.examples, "examples")
        for across in self.acrosses:
            # squares of τ and of distances are taken in single precision
            if max(1.0, *self.relatives) * self.distance(across) > 1e15:
                rule = "makes a distance or τ above 1e15"
                way_out = "Take less of it, of `within` or of `relatives`."
                raise _check.reject("acrosses", across, rule, way_out)
        return self

    def distance(self, across: float) -> float:
        """Root mean square distance of two users' averaged gradients."""
        each = math.hypot(across, self.within / math.sqrt(self.group))
        return math.sqrt(2 * self.dimension) * each

    def filtered(self, across: float) -> FilteredDescent:
        """The filter at every τ."""
        typical = self.distance(across)
        return FilteredDescent(
            self.group,
            self.epsilon,
            self.delta,
            self.users,
            self.examples,
            self.dimension,
            across,
            self.within,
            self.steps,
            self.trials,
            tuple(share * typical for share in self.relatives),
            self.rates,
            self.seed,
        )

    def plain(self, across: float) -> Descent:
        """DP-SGD of all users, as many gradients a step."""
        return Descent.of(
            self, ULS, self.group, self.group * self.users, self.epsilon, across=across
        )

    def cells(self) -> Iterable[Task]:
        return [f(a).task() for a in self.acrosses for f in (self.filtered, self.plain)]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = []
        for across in self.acrosses:
            result = found[self.filtered(across).task()]
            plain = found[self.plain(across).task()]
            unit = result.record["noise_per_threshold"]
            for k, share in enumerate(self.relatives):
                threshold = share * self.distance(across)
                at = tuned(result.arrays["errors"][k : k + 1], (threshold,), self.rates)
                taken = result.arrays["steps"][k]
                rows.append(
                    self._row(across, at.losses, "all users", unit * threshold, None)
                    | {
                        "algorithm": "filter",
                        "threshold": threshold,
                        "threshold_relative": share,
                        "halted": float((taken < self.steps).mean()),
                        "steps_taken": float(taken.mean()),
                        "guarantee": "as its authors state",
                    }
                )
            at = tuned(plain.arrays["errors"], self.clips, self.lengths)
            sigma = plain.record["noise_multiplier"]
            rows.append(
                self._row(across, at.losses, "all users", sigma * at.clip[0] / self.users, sigma)
                | {
                    "algorithm": PLAIN,
                    "threshold": None,
                    "threshold_relative": None,
                    "halted": 0.0,
                    "steps_taken": float(self.steps),
                    "guarantee": "accounted here",
                }
            )
        return Outcome(
            rows,
            {
                "across": "σ₁",
                "algorithm": "algorithm",
                "threshold_relative": "τ / distance",
                "halted": "halted",
                "steps_taken": "steps",
                "noise_on_mean": "noise",
                "squared_error": "error²",
                "standard_error": "± s.e.",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "epsilon": "ε",
            },
            self._panels(rows),
            f"Concentration filter, ε = {self.epsilon:g}, δ = {self.delta:g} per user, "
            f"{self.users:,} users, {self.steps} steps",
            self._findings(found, rows),
        )

    def _row(
        self, across: float, losses: np.ndarray, sampling: str, noise: float, sigma: float | None
    ) -> dict[str, Any]:
        """What both algorithms say.

        Args:
          across: σ₁.
          losses: of the trials.
          sampling: in words.
          noise: standard deviation on the mean gradient.
          sigma: noise multiplier, where there is one.
        """
        return {
            "across": across,
            "privacy_unit": "user",
            "adjacency": "add-remove",
            "sampling": sampling,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": sigma,
            "noise_on_mean": float(noise),
            "squared_error": float(losses.mean()),
            "standard_error": float(losses.std(ddof=1) / np.sqrt(self.trials)),
            "trials": self.trials,
        }

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        errors, halts = [], []
        ends = (min(self.relatives), max(self.relatives))
        for across in self.acrosses:
            mine = [r for r in rows if r["across"] == across and r["algorithm"] != PLAIN]
            (plain,) = (r for r in rows if r["across"] == across and r["algorithm"] == PLAIN)
            label = f"filter, σ₁ = {across:g}"
            x = [r["threshold_relative"] for r in mine]
            mean = [r["squared_error"] for r in mine]
            band = [Z95 * r["standard_error"] for r in mine]
            low = [m - b for m, b in zip(mean, band, strict=True)]
            high = [m + b for m, b in zip(mean, band, strict=True)]
            errors.append(Curve(label, x, mean, low, high))
            level = plain["squared_error"]
            errors.append(Curve(f"DP-SGD, σ₁ = {across:g}", ends, (level, level), like=label))
            halts.append(Curve(label, x, [r["halted"] for r in mine]))
        axis = "τ over the distance of two users (log scale)"
        return [
            Panel(
                errors, "last iterate", axis, "squared error of the mean\n(log scale)", log_y=True
            ),
            Panel(halts, "runs that halted", axis, "share of trials"),
        ]

    def _findings(self, found: Mapping[Task, Result], rows: list[dict[str, Any]]) -> list[str]:
        said = []
        for across in self.acrosses:
            result = found[self.filtered(across).task()]
            plain = found[self.plain(across).task()]
            thresholds = self.filtered(across).thresholds
            best = tuned(result.arrays["errors"], thresholds, self.rates)
            other = tuned(plain.arrays["errors"], self.clips, self.lengths)
            # other draws: the formula for pairs holds for independent ones too
            ratio, spread = relative(best.losses, other.losses)
            mine = [r for r in rows if r["across"] == across and r["algorithm"] != PLAIN]
            halted = ", ".join(f"{r['halted']:.0%} at {r['threshold_relative']:g}" for r in mine)
            said.append(
                f"σ₁ = {across:g}: at its best τ the filter's squared error is {ratio:.2f} ± "
                f"{Z95 * spread:.2f} times DP-SGD's; halted by τ over distance: {halted}"
            )
        return said
