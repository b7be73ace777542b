"""Does less RMSE train better? Final loss against RMSE, each mechanism at its best rate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import scipy.stats

from mfopt import _check
from mfopt.experiments import families
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, flag
from mfopt.experiments.studies.image_cells import Best, interval
from mfopt.experiments.studies.images import COLUMNS, PREFIX, SCHEDULE, ImageStudy, ends

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

_APART = 0.02  # relative difference of RMSE below which two mechanisms are not told apart
_SHOWN = 2.0  # times the least RMSE: what is further off would squeeze the rest of the plot
_RESAMPLED = 2000


class TrainedPoint(NamedTuple):
    """One mechanism at one ε on one data set; ``workload`` is what C was optimized for."""

    data: str
    epsilon: float
    family: str
    workload: str

    @property
    def label(self) -> str:
        """What a reader sees."""
        return families.label(self.family) + (
            ", for prefix sums" if self.workload == PREFIX else ""
        )


@dataclasses.dataclass(frozen=True)
class LessRmse(ImageStudy):
    """Final loss against RMSE of the schedule that is used, with C for it and for prefix sums."""

    name = "less-rmse"
    summary = "Whether less RMSE trains better, each mechanism at its best rate."
    source = "a question of this library's; setting of Choquette-Choo et al. 2024, section 5.2"
    default_size = "digits and made data, 8 × 16, 11 mechanisms at 2 ε, 7 rates × 10 seeds"
    time = "about 9 CPU-minutes"
    full = {  # noqa: RUF012
        "data": ("digits", "made", "cifar10"),
        "epsilons": (0.5, 1.0, 2.0, 4.0, 8.0),
        "seeds": 30,
        "per_cell": 2,
        "bins": 100,
        "epochs": 20,
        "momentum": 0.95,
        "widths": (1, 2, 4, 8, 16, 32, 64),
        "microbatch": 50,
    }
    full_size = "CIFAR-10 too, 20 × 100, 5 ε, 30 seeds"
    needs = "CIFAR-10's python batches (--folder) and a GPU"

    epsilons: tuple[float, ...] = flag((1.0, 4.0), "Values of ε.", option="--eps")
    data: tuple[str, ...] = flag(("digits", "made"), "Data sets: digits, made, cifar10.")
    mechanisms: tuple[str, ...] = flag(
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
    both: tuple[str, ...] = flag(
        ("banded+poisson", "blt-4", "blt-4-scaled"),
        "Those whose C is also optimized for prefix sums.",
    )

    def data_sets(self) -> tuple[str, ...]:
        return self.data

    def families(self) -> tuple[str, ...]:
        return self.mechanisms

    def check(self) -> Self:
        for name in self.data:
            if name not in ("digits", "made", "cifar10"):
                raise _check.reject("data", name, "must be digits, made or cifar10")
        super().check()
        for name in self.both:
            if name not in self.mechanisms:
                way_out = "Name it in `mechanisms`, or others in `both`."
                raise _check.reject("both", name, "must be among the mechanisms", way_out)
        return self

    def points(self) -> list[TrainedPoint]:
        """All that is trained."""
        kinds = [(f, SCHEDULE) for f in self.mechanisms] + [(f, PREFIX) for f in self.both]
        return [
            TrainedPoint(data, float(epsilon), family, workload)
            for data in self.data
            for epsilon in self.epsilons
            for family, workload in kinds
        ]

    def _of(self, p: TrainedPoint) -> list[Task]:
        return self.runs(p.family, p.epsilon, data=p.data, workload=p.workload)

    def curves(self) -> list[list[Task]]:
        return [self._of(point) for point in self.points()]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        points = self.points()
        best = {point: self.best(found, self._of(point)) for point in points}
        rows = [
            self.row(
                found,
                self._of(p),
                data=p.data,
                mechanism=p.label,
                family=p.family,
                optimized_for=p.workload,
                target=p.epsilon,
            )
            for p in points
        ]
        # C for prefix sums is measured on the schedule that is used: that is what moves the model
        rmse = {p: row["rmse"] for p, row in zip(points, rows, strict=True)}
        last = {p: row["last_error"] for p, row in zip(points, rows, strict=True)}
        return Outcome(
            rows,
            {"data": "data", **COLUMNS},
            self._panels(best, rmse),
            f"Loss against RMSE, {self.epochs} × {self.bins}, δ = {self.delta:g}, one example, "
            f"{self.seeds} seeds (bars: 95%, paired);\nRMSE up to {_SHOWN:g} times the least",
            [*self._findings(best, rmse, last), *ends(rows)],
            plot_columns=len(self.epsilons),
        )

    def _panels(
        self, best: Mapping[TrainedPoint, Best], rmse: Mapping[TrainedPoint, float]
    ) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        panels = []
        for data, epsilon in itertools.product(self.data, map(float, self.epsilons)):
            here = [p for p in best if (p.data, p.epsilon) == (data, epsilon)]
            near = [p for p in here if rmse[p] <= _SHOWN * min(rmse[q] for q in here)]
            level = np.mean([best[p].loss for p in near], axis=0)  # of each seed
            curves = []
            for p in near:
                mean, half = interval(best[p].loss - level)
                x = [rmse[p]] * 3
                curves.append(Curve(p.label, x, [mean - half, mean, mean + half]))
            panels.append(
                Panel(
                    curves,
                    f"{data}, ε = {epsilon:g}",
                    "RMSE of the schedule (clip norms)",
                    "test loss less the seed's mean (nats)",
                    log_x=False,
                )
            )
        return panels

    def _findings(
        self,
        best: Mapping[TrainedPoint, Best],
        rmse: Mapping[TrainedPoint, float],
        last: Mapping[TrainedPoint, float],
    ) -> list[str]:
        said = []
        agree = against = near = 0
        for data, epsilon in itertools.product(self.data, map(float, self.epsilons)):
            here = [p for p in best if (p.data, p.epsilon) == (data, epsilon)]
            error = np.array([rmse[p] for p in here])
            losses = np.array([best[p].loss for p in here])
            rank, low, high = correlation(error, losses)
            of_last, *_ = correlation(np.array([last[p] for p in here]), losses)
            for i, j in itertools.permutations(range(len(here)), 2):
                if error[i] < error[j] * (1 - _APART):
                    mean, half = interval(losses[i] - losses[j])
                    agree, against = agree + (mean + half < 0), against + (mean - half > 0)
                    near += abs(mean) <= half
            said.append(
                f"{data}, ε = {epsilon:g}: rank correlation of RMSE and loss over {len(here)} "
                f"mechanisms {rank:.2f} (95% over seeds: {low:.2f} to {high:.2f}); of the last "
                f"iterate's error and loss {of_last:.2f}"
            )
            for family in self.both:
                one, other = (
                    best[TrainedPoint(data, epsilon, family, w)].loss for w in (SCHEDULE, PREFIX)
                )
                mean, half = interval(one - other)
                change = 1 - rmse[TrainedPoint(data, epsilon, family, SCHEDULE)] / max(
                    rmse[TrainedPoint(data, epsilon, family, PREFIX)], 1e-300
                )
                said.append(
                    f"{data}, ε = {epsilon:g}: {families.label(family)} for the schedule has "
                    f"{change:.1%} less RMSE there than for prefix sums, and loss {mean:+.4f} ± "
                    f"{half:.4f}"
                )
        verdict = answer(agree, near, against)
        return [verdict, *said]


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
