"""ELS where users differ in size: how many examples of each to keep, and a private median for it.

Charles et al. 2024 (section 6, Figure 4, appendix E) find that the median number of examples of a
user is a good G_ELS, and name private medians as the way to learn it. Here that is done: the median
is chosen by the exponential mechanism, and its ε is taken from the training's. Users hold
log-normal numbers of examples, whose law is public; one user's number is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mfopt import _check
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.means import ELS, Z95, Descent, Tuned, draw_sizes, relative
from mfopt.experiments.studies.engine import Found, Row, option
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
        return probabilities(sizes, self.groups, self.median_share * epsilon)

    def nearest(self) -> int:
        """The G nearest the law's median, in ratio."""
        return min(self.groups, key=lambda group: abs(np.log(group / self.median)))

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for epsilon in self.epsilons:
            cells = {group: self.descent(epsilon, group) for group in self.groups}
            for group, cell in cells.items():
                at = self.best(found[cell])
                said = {"noise_multiplier": found[cell].record["noise_multiplier"]}
                rows.append(self._row(str(group), at, cell) | said)
            # the private one is the mean over the mechanism's exact law, for each trial's users
            left = [self.best(found[self.descent(self._left(epsilon), g)]) for g in self.groups]
            chances = self.chances(epsilon)
            at = Tuned((np.stack([t.losses for t in left], axis=-1) * chances).sum(-1))
            pairs = zip(self.groups, chances.mean(0), strict=True)
            shares = ", ".join(f"{g}: {c:.2f}" for g, c in pairs if c > 0.005)
            said = {
                "sampling": "exponential mechanism, then Poisson, examples",
                "epsilon_of_median": self.median_share * epsilon,
                "_right": chances.mean(0)[self.groups.index(self.nearest())],
            }
            cell = cells[self.nearest()]
            rows.append(self._row(f"private median ({shares})", at, cell) | said)
        return rows

    def _row(self, group: str, at: Tuned, cell: Descent) -> Row:
        privacy = cell.privacy()
        return {
            "group": group,
            **at.summary("squared_error", "low95", "high95"),
            **{key: privacy[key] for key in privacy if key != "delta"},
            "epsilon_of_median": 0.0,
            "delta": self.delta,
            "noise_multiplier": None,
            "gradients": self.batch,
            "trials": self.trials,
            "_losses": at.losses,
        }

    def title(self, rows: list[Row]) -> str:
        return (
            f"G of ELS where users hold 1 to {self.examples} examples, median {self.median:g}; "
            f"user-level DP, δ = {self.delta:g}"
        )

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
                    "squared error of the mean\n(log scale)",
                    log_y=True,
                    vertical=(self.median, "median"),
                )
            )
        return panels

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            *fixed, private = pick(rows, epsilon=epsilon)
            best = best_of({row["group"]: row["_losses"] for row in fixed})
            (median,) = pick(fixed, group=str(self.nearest()))
            (one, error), (paid, other) = (relative(r["_losses"], best) for r in (median, private))
            said.append(
                f"ε = {epsilon:g}: G = {self.nearest()} (the median) has {one:.3f} ± "
                f"{Z95 * error:.3f} times the squared error of the best G; the private median, its "
                f"ε of {self.median_share * epsilon:g} paid, {paid:.3f} ± {Z95 * other:.3f} times; "
                f"it chooses the median's G with probability {private['_right']:.2f}"
            )
        return said


def best_of(losses: Mapping[str, np.ndarray]) -> np.ndarray:
    """Losses at what is best for the other half of the trials."""
    best = np.empty_like(next(iter(losses.values())))
    for half in (0, 1):
        chosen = min(losses, key=lambda key: losses[key][1 - half :: 2].mean())
        best[half::2] = losses[chosen][half::2]
    return best


def probabilities(numbers: np.ndarray, candidates: Sequence[int], epsilon: float) -> np.ndarray:
    """Chances of a median by the exponential mechanism, (..., candidates): its exact law.

    The score of a candidate g is -|#{users below g} - #{users above g}|. Adding or removing one
    user changes one of the two counts by one, so the score's sensitivity is 1, and a choice with
    probability proportional to exp(ε score / 2) is ε-DP per user, add-remove (McSherry and Talwar
    2007). Before training at (ε', δ) on the same users the whole is (ε + ε', δ)-DP.

    Args:
      numbers: one for each user, shape (..., users).
      candidates: public values to choose from.
      epsilon: ε of the choice.

    >>> probabilities(np.array([1, 2, 2, 3]), (1, 2, 3), 100.0).round(3).tolist()
    [0.0, 1.0, 0.0]
    """
    epsilon = _check.epsilon("epsilon", epsilon)
    values = np.asarray(candidates)[:, None]
    numbers = np.asarray(numbers)[..., None, :]
    score = -np.abs((numbers < values).sum(-1) - (numbers > values).sum(-1))
    weight = np.exp(0.5 * epsilon * (score - score.max(-1, keepdims=True)))
    chances: np.ndarray = weight / weight.sum(-1, keepdims=True)
    return chances
