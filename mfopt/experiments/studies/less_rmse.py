"""Does less RMSE train better? Final loss against RMSE, each mechanism at its best rate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from scipy.stats import spearmanr

from mfopt._runtime import _check
from mfopt.experiments import families
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel, around
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.on_images import PREFIX, SCHEDULE, ImageStudy, TrainedPoint
from mfopt.experiments.studies.rows import ends, interval, pick

_APART = 0.02  # relative difference of RMSE below which two mechanisms count as equal
_SHOWN = 2.0  # times the least RMSE: what is further off would squeeze the rest of the plot


@dataclasses.dataclass(frozen=True)
class LessRmse(ImageStudy):
    """Final loss against RMSE of the schedule that is used, with C for it and for prefix sums."""

    name = "less-rmse"
    summary = "Test whether a lower RMSE trains better, each mechanism at its best rate."
    plot_columns = 2
    source = "a question of this library's; setting of Choquette-Choo et al. 2024, section 5.2"
    default_size = "digits and synthetic data, 8 × 16, 11 mechanisms at 2 ε, 7 rates × 10 seeds"
    time = "about 9 CPU-minutes"
    columns = f"data; {ImageStudy.columns}"
    title = (
        "Loss against RMSE, δ = {0.delta:g}, one example, bars: 95% paired by seed; "
        f"RMSE up to {_SHOWN:g} times the least"
    )

    epsilons: tuple[float, ...] = option((1.0, 4.0), "Values of ε.", name="--eps")
    data: tuple[str, ...] = option(("digits", "made"), "Data sets.", choices=("digits", "made"))
    mechanisms: tuple[str, ...] = option(
        (
            "banded+poisson",
            "banded+balls-in-bins",
            "blt-4",
            "blt-4-scaled",
            "dpsgd+poisson",
            "sqrt",
            "banded+unamplified",
            "dpsgd+unamplified",
        ),
        "Mechanisms, by their names in mfopt compare.",
    )
    both: tuple[str, ...] = option(
        ("banded+poisson", "blt-4", "blt-4-scaled"),
        "Mechanisms whose C is also optimized for prefix sums.",
        empty=True,
    )

    def check_together(self) -> None:
        super().check_together()
        for name in self.both:
            if name not in self.mechanisms:
                way_out = "Name it in `mechanisms`, or others in `both`."
                raise _check.reject("both", name, "must be among the mechanisms", way_out)

    def arms(self) -> Iterator[TrainedPoint]:
        kinds = [(f, SCHEDULE) for f in self.mechanisms] + [(f, PREFIX) for f in self.both]
        for data, epsilon in itertools.product(self.data, self.epsilons):
            for family, workload in kinds:
                yield TrainedPoint(data, epsilon, family, workload)

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for arm in self.arms():
            label = families.label(arm.family) + (", for prefix sums" * (arm.workload == PREFIX))
            what = {"data": arm.data, "mechanism": label, "family": arm.family}
            rows.append(
                self.row(found, arm, **what, optimized_for=arm.workload, target=arm.epsilon)
            )
        for here in self.places(rows).values():
            # a seed's loss less its mean over the near ones: what all share is no difference
            shared = np.mean([row["_loss"] for row in near(here)], axis=0)
            for row in here:
                row["excess"], row["excess_half95"] = interval(row["_loss"] - shared)
        return rows

    def places(self, rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
        """The rows of each data set and ε."""
        pairs = itertools.product(self.data, self.epsilons)
        return {(data, e): pick(rows, data=data, target=e) for data, e in pairs}

    def panels(self, rows: list[Row]) -> list[Panel]:
        axes = "RMSE of the schedule (clip norms)", "test loss less the seed's mean (nats)"
        panels = []
        for (data, epsilon), here in self.places(rows).items():
            curves = [
                around(row["mechanism"], [row["rmse"]], [row["excess"]], [row["excess_half95"]])
                for row in near(here)
            ]
            title = f"{data}, ε = {epsilon:g}"
            panels.append(Panel(curves, title, *axes, log_x=False, lines=False))
        return panels

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        counts = np.zeros(3, int)
        for (data, epsilon), here in self.places(rows).items():
            place = f"{data}, ε = {epsilon:g}"
            losses = [row["loss"] for row in here]
            ranks = (spearmanr([r[k] for r in here], losses)[0] for k in ("rmse", "last_error"))
            counts += pairs(here)
            said.append(
                f"{place}: rank correlation of RMSE and loss over {len(here)} mechanisms "
                "{:.2f}; of the last iterate's error and loss {:.2f}".format(*ranks)
            )
            for family in self.both:
                one, other = pick(here, family=family)
                mean, half = interval(one["_loss"] - other["_loss"])
                change = 1 - one["rmse"] / max(other["rmse"], 1e-300)
                said.append(
                    f"{place}: {families.label(family)} for the schedule has {change:.1%} less "
                    f"RMSE there than for prefix sums, and loss {mean:+.4f} ± {half:.4f}"
                )
        less, tied, more = counts
        answer = (
            f"Of {sum(counts)} pairs at least {_APART:.0%} apart, the lower RMSE had less loss in "
            f"{less}, more in {more}, and {tied} are not significantly different."
        )
        return [answer, *said, *ends(rows)]


def pairs(rows: list[Row]) -> np.ndarray:
    """Numbers of pairs (in the order of RMSE, not significantly different, against it), shape (3,).

    A pair is compared seed by seed; RMSE that are closer than 2% count as equal.
    """
    counts = np.zeros(3, int)
    for one, other in itertools.permutations(rows, 2):
        if one["rmse"] < other["rmse"] * (1 - _APART):
            mean, half = interval(one["_loss"] - other["_loss"])
            counts += mean + half < 0, abs(mean) <= half, mean - half > 0
    return counts


def near(rows: list[Row]) -> list[Row]:
    """The rows whose RMSE is not far above the least."""
    # C for prefix sums is measured on the schedule that is used: that moves the model
    return [row for row in rows if row["rmse"] <= _SHOWN * min(each["rmse"] for each in rows)]
