"""The concentration filter of Asi and Liu against user-wise DP-SGD, with its halts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from mfopt._runtime import _check
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.filtered_means import FilteredDescent
from mfopt.experiments.runs.means import ULS, Z95, Descent, Tuned, even, relative, tuned
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.means import MeanStudy
from mfopt.experiments.studies.rows import curve, level, pick

FILTER, PLAIN = "filter", "user-wise DP-SGD"


@dataclasses.dataclass(frozen=True)
class ConcentrationFilter(MeanStudy):
    """Squared error and halts of the filter by τ, and user-wise DP-SGD on the same gradients."""

    name = "concentration-filter"
    summary = "The filter of Asi and Liu run for real: outliers, noise by τ, halts."
    source = "Chua et al. 2024, section 5.3 and appendix A, Algorithm 3"
    default_size = "mean estimation, 256 users, 64 steps, 6 τ, 3 spreads of users, 32 trials"
    time = "about 0.2 CPU-minutes"
    full = "users=1024 trials=128"
    full_size = "1,024 users, 128 trials (the publication runs no filter: it counts its noise)"
    columns = (
        "across=σ₁; algorithm; threshold_relative=τ / distance; halted; steps_taken=steps; "
        "noise_on_mean=noise; squared_error=error²; standard_error=± s.e.; privacy_unit=unit; "
        "sampling; epsilon=ε"
    )
    title = "Concentration filter, ε = {0.epsilon:g}, δ = {0.delta:g} per user"

    acrosses: tuple[float, ...] = option((0.01, 0.1, 1.0), "σ₁, deviations of users' means.")
    relatives: tuple[float, ...] = option(
        (0.5, 1.0, 1.1, 1.2, 1.4, 2.0), "τ, over the typical distance of two users."
    )
    epsilon: float = option(3.0, "ε of every run.", name="--eps")
    within: float = option(1.0, "σ₂, standard deviation of a user's examples.")
    users: int = option(256, "Users N, all of them in each step.")
    group: int = option(8, "Examples of a user in a step.")
    steps: int = option(64, "Steps T.")
    trials: int = option(32, "Independent trials, an even number.", rule=even)
    rates: tuple[float, ...] = option(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "Learning rates to choose from (filter)."
    )
    clips: tuple[float, ...] = option((1.0, 4.0), "Clip norms to choose from (DP-SGD).")
    lengths: tuple[float, ...] = option(
        (0.05, 0.1, 0.2, 0.4, 0.8), "Learning rates of DP-SGD, in multiples of the clip norm."
    )

    def check_together(self) -> None:
        self.at_most("group", "examples")
        # squares of τ and of distances are taken in single precision
        most = max(1.0, *self.relatives) * max(map(self.distance, self.acrosses))
        if most > 1e15:
            rule = "makes a distance or τ above 1e15", "Take less, or less `within`."
            raise _check.reject("acrosses", max(self.acrosses), *rule)
        super().check_together()

    def distance(self, across: float) -> float:
        """Root mean square distance of two users' averaged gradients."""
        each = math.hypot(across, self.within / math.sqrt(self.group))
        return math.sqrt(2 * self.dimension) * each

    def filtered(self, across: float) -> FilteredDescent:
        """The filter at every τ."""
        thresholds = tuple(each * self.distance(across) for each in self.relatives)
        return FilteredDescent.of(self, across=across, thresholds=thresholds)

    def plain(self, across: float) -> Descent:
        """DP-SGD of all users, as many gradients a step."""
        return Descent.of(self, algorithm=ULS, batch=self.group * self.users, across=across)

    def cells(self) -> Iterable[Descent | FilteredDescent]:
        return [cell for a in self.acrosses for cell in (self.filtered(a), self.plain(a))]

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for across in self.acrosses:
            cell, plain = self.filtered(across), self.plain(across)
            errors, steps = (found[cell].arrays[name] for name in ("errors", "steps"))
            noise = found[cell].record["noise_per_threshold"]
            best = tuned(errors, cell.thresholds, self.rates).losses
            for k, threshold in enumerate(cell.thresholds):
                at = tuned(errors[k : k + 1], (threshold,), self.rates)
                row = self._row(across, at, FILTER, noise * threshold) | {"_losses": best}
                row |= {"threshold": threshold, "threshold_relative": self.relatives[k]}
                halted, taken = (steps[k] < self.steps).mean(), steps[k].mean()
                rows.append(row | {"halted": float(halted), "steps_taken": float(taken)})
            sigma, at = found[plain].record["noise_multiplier"], self.best(found[plain])
            row = self._row(across, at, PLAIN, sigma * at.clip[0] / self.users)
            rows.append(row | {"noise_multiplier": sigma, "guarantee": "accounted here"})
        return rows

    def _row(self, across: float, at: Tuned, algorithm: str, noise: float) -> Row:
        """Columns shared by both algorithms; ``noise`` is that on the mean gradient."""
        said = at.summary("squared_error", "standard_error") | {"_losses": at.losses}
        return said | {
            "across": across,
            "algorithm": algorithm,
            **self.plain(across).privacy(sampling="all users", noise_multiplier=None),
            "noise_on_mean": float(noise),
            "trials": self.trials,
            **dict.fromkeys(("threshold", "threshold_relative")),
            "halted": 0.0,
            "steps_taken": float(self.steps),
            "guarantee": "as its authors state",
        }

    def panels(self, rows: list[Row]) -> list[Panel]:
        errors, halts = [], []
        for across in self.acrosses:
            mine = pick(rows, across=across, algorithm=FILTER)
            (plain,) = pick(rows, across=across, algorithm=PLAIN)
            label, x = f"filter, σ₁ = {across:g}", "threshold_relative"
            errors.append(curve(label, mine, x, "squared_error", half=("standard_error", Z95)))
            value = plain["squared_error"]
            dashed = level(f"DP-SGD, σ₁ = {across:g}", self.relatives, value)
            errors.append(dashed._replace(like=label))
            halts.append(curve(label, mine, x, "halted", None))
        axis = "τ over the distance of two users (log scale)"
        error = "squared error of the mean\n(log scale; bands: 95%)"
        return [
            Panel(errors, "last iterate", axis, error, log_y=True),
            Panel(halts, "runs that halted", axis, "share of trials"),
        ]

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for across in self.acrosses:
            mine = pick(rows, across=across, algorithm=FILTER)
            (plain,) = pick(rows, across=across, algorithm=PLAIN)
            # other draws: the formula for pairs holds for independent ones too
            ratio, spread = relative(mine[0]["_losses"], plain["_losses"])
            halted = ", ".join(f"{r['halted']:.0%} at {r['threshold_relative']:g}" for r in mine)
            said.append(
                f"σ₁ = {across:g}: at its best τ the filter's squared error is {ratio:.2f} ± "
                f"{Z95 * spread:.2f} times DP-SGD's; halted by τ over distance: {halted}"
            )
        return said
