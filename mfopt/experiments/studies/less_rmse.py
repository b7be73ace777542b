"""Does less RMSE train better? Final loss against RMSE, each mechanism at its best rate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import scipy.stats

from mfopt import _check
from mfopt.experiments import families
from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.studies.engine import Found, Row, option
from mfopt.experiments.studies.on_images import PREFIX, SCHEDULE, ImageStudy, TrainedPoint
from mfopt.experiments.studies.rows import ends, interval, pick

_APART = 0.02  # relative difference of RMSE below which two mechanisms are not told apart
_SHOWN = 2.0  # times the least RMSE: what is further off would squeeze the rest of the plot
_RESAMPLED = 2000


@dataclasses.dataclass(frozen=True)
class LessRmse(ImageStudy):
    """Final loss against RMSE of the schedule that is used, with C for it and for prefix sums."""

    name = "less-rmse"
    summary = "Whether less RMSE trains better, each mechanism at its best rate."
    source = "a question of this library's; setting of Choquette-Choo et al. 2024, section 5.2"
    default_size = "digits and made data, 8 × 16, 11 mechanisms at 2 ε, 7 rates × 10 seeds"
    time = "about 9 CPU-minutes"
    full = f"data=digits,made,cifar10 {ImageStudy.CIFAR} seeds=30"
    full_size = "CIFAR-10 too, 20 × 100, 5 ε, 30 seeds"
    columns = f"data; {ImageStudy.columns}"

    epsilons: tuple[float, ...] = option((1.0, 4.0), "Values of ε.", name="--eps")
    data: tuple[str, ...] = option(("digits", "made"), "Data sets: digits, made, cifar10.")
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
        "Those whose C is also optimized for prefix sums.",
        empty=True,
    )

    def families(self) -> tuple[str, ...]:
        return self.mechanisms

    def data_sets(self) -> tuple[str, ...]:
        return self.data

    @property
    def plot_columns(self) -> int:  # type: ignore[override]
        return len(self.epsilons)

    def check_together(self) -> None:
        for name in self.data:
            if name not in ("digits", "made", "cifar10"):
                raise _check.reject("data", name, "must be digits, made or cifar10")
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
        return rows

    def title(self, rows: list[Row]) -> str:
        return (
            f"Loss against RMSE, {self.epochs} × {self.bins}, δ = {self.delta:g}, one example, "
            f"{self.seeds} seeds (bars: 95%, paired);\nRMSE up to {_SHOWN:g} times the least"
        )

    def panels(self, rows: list[Row]) -> list[Panel]:
        panels = []
        for data, epsilon in itertools.product(self.data, self.epsilons):
            here = pick(rows, data=data, target=epsilon)
            # C for prefix sums is measured on the schedule that is used: that moves the model
            near = [r for r in here if r["rmse"] <= _SHOWN * min(row["rmse"] for row in here)]
            level = np.mean([row["_loss"] for row in near], axis=0)  # of each seed
            curves = []
            for row in near:
                mean, half = interval(row["_loss"] - level)
                y = [mean - half, mean, mean + half]
                curves.append(Curve(row["mechanism"], [row["rmse"]] * 3, y))
            axes = "RMSE of the schedule (clip norms)", "test loss less the seed's mean (nats)"
            panels.append(Panel(curves, f"{data}, ε = {epsilon:g}", *axes, log_x=False))
        return panels

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        agree = against = near = 0
        for data, epsilon in itertools.product(self.data, self.epsilons):
            here, place = pick(rows, data=data, target=epsilon), f"{data}, ε = {epsilon:g}"
            error, last = (np.array([r[k] for r in here]) for k in ("rmse", "last_error"))
            losses = np.array([row["_loss"] for row in here])
            rank, low, high = correlation(error, losses)
            of_last, *_ = correlation(last, losses)
            for i, j in itertools.permutations(range(len(here)), 2):
                if error[i] < error[j] * (1 - _APART):
                    mean, half = interval(losses[i] - losses[j])
                    agree, against = agree + (mean + half < 0), against + (mean - half > 0)
                    near += abs(mean) <= half
            said.append(
                f"{place}: rank correlation of RMSE and loss over {len(here)} mechanisms "
                f"{rank:.2f} (95% over seeds: {low:.2f} to {high:.2f}); of the last iterate's "
                f"error and loss {of_last:.2f}"
            )
            for family in self.both:
                one, other = pick(here, family=family)
                mean, half = interval(one["_loss"] - other["_loss"])
                change = 1 - one["rmse"] / max(other["rmse"], 1e-300)
                said.append(
                    f"{place}: {families.label(family)} for the schedule has {change:.1%} less "
                    f"RMSE there than for prefix sums, and loss {mean:+.4f} ± {half:.4f}"
                )
        return [answer(agree, near, against), *said, *ends(rows)]


def correlation(error: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """Spearman's rank correlation of RMSE and mean loss, with a 95% interval over seeds.

    Args:
      error: (mechanisms,).
      losses: (mechanisms, seeds); seeds are drawn again for the interval, the same for all.
    """
    random = np.random.default_rng(0)
    ranks = scipy.stats.rankdata(error)

    def of(values: np.ndarray) -> float:
        return float(np.corrcoef(ranks, scipy.stats.rankdata(values))[0, 1])

    seeds = losses.shape[1]
    drawn = [
        of(losses[:, random.integers(seeds, size=seeds)].mean(axis=1)) for _ in range(_RESAMPLED)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return of(losses.mean(axis=1)), float(low), float(high)


def answer(agree: int, near: int, against: int) -> str:
    """The answer in words, from counts of pairs that differ in RMSE by more than 2%.

    >>> answer(8, 2, 0).partition(":")[0]
    'Less RMSE trained better'
    """
    pairs = agree + near + against
    if against == 0 and agree:
        word = "Less RMSE trained better" if agree >= near else "Less RMSE never trained worse"
    elif agree > 4 * against:
        word = "Less RMSE mostly trained better"
    else:
        word = "Less RMSE did not tell what trains better"
    return (
        f"{word}: of {pairs} pairs at least {_APART:.0%} apart, the lower RMSE had less loss in "
        f"{agree}, more in {against}, and {near} cannot be told apart."
    )
