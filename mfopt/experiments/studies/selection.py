"""Which records of a user, and how many: Tables 2 to 6 of Chua et al. 2024 in small.

Group Privacy (ELS here) keeps k records of each user and samples records; User-wise DP-SGD (ULS)
samples users and takes k records of each. At one k every rule of choosing them is tried (their
Tables 2 and 4), at one rule every k (Tables 3 and 5), and each algorithm stands at the best of
both against the other (Table 6). As there, a step has as many records (ELS) and users (ULS) at
every k; unlike there, a user with fewer than k records is not filled up by copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, check_several, flag
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, Arm, FineTuning, alike, apart, curve
from mfopt.experiments.studies.user_means import ELS, ULS
from mfopt.training.selection import RULES

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

CHUNK = "chunk"  # crosses the borders of records: of users only


@dataclasses.dataclass(frozen=True)
class RecordSelection(FineTuning):
    """Loss on held-out users by rule, by records of a user, and by ε, for both algorithms."""

    name = "record-selection"
    summary = "Which records of a user, and how many: ELS and ULS by rule and by k."
    source = "Chua et al. 2024, sections 4 to 6, Tables 2 to 6"
    default_size = "embedded corpus, 5 and 6 rules, 3 k, 2 ε, 3 seeds, 90 runs"
    time = "about 13 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        **FineTuning.PAPER,
        "epsilons": (0.5, 1.0, 3.0, 8.0),
        "group": 10,
        "groups": (2, 5, 10, 20, 50),
        "batch": 1024,
        "cohort": 1024,
    }
    full_size = "2,000 steps of GPT-2 small's shape, 4 ε, k = 2 to 50, 3 seeds, 4 rates"

    epsilons: tuple[float, ...] = flag((2.0, 8.0), "ε of the runs.", option="--eps")
    algorithms: tuple[str, ...] = flag(
        (ELS, ULS), "Group Privacy is ELS, User-wise DP-SGD is ULS.", choices=(ELS, ULS)
    )
    rules: tuple[str, ...] = flag(RULES, "Rules at one k; chunk is for ULS.", choices=RULES)
    group: int = flag(4, "k at which the rules are compared.", option="--k")
    groups: tuple[int, ...] = flag((1, 4, 8), "k at one rule.", option="--several-k")
    rule: str = flag("random", "Rule at which the k are compared.", choices=RULES)
    batch: int = flag(64, "Records a step to expect, of ELS.")
    cohort: int = flag(16, "Users a step to expect, of ULS.")

    def check(self) -> Self:
        super().check()
        self._check_numbers("epsilons", "groups")
        for name in ("algorithms", "rules"):
            check_several(name, getattr(self, name))
        for name in ("group", "batch", "cohort"):
            _check.integer(name, getattr(self, name))
        if self.rule == CHUNK and ELS in self.algorithms:
            rule = "crosses the borders of records, which ELS samples"
            raise _check.reject("rule", self.rule, rule, "Take another, or `algorithms` = ULS.")
        return self

    def _arms(self, algorithm: str, epsilon: float) -> Iterator[Arm]:
        """Rules at one k, then the other k at one rule; none twice."""
        units = float(self.batch if algorithm == ELS else self.cohort)
        pairs = [(self.group, rule) for rule in self.rules if algorithm == ULS or rule != CHUNK]
        pairs += [(group, self.rule) for group in self.groups]
        for group, rule in dict.fromkeys(pairs):
            yield Arm(algorithm, group, units, float(epsilon), rule)

    def arms(self) -> Iterator[Arm]:
        """All of them, in the table's order."""
        for epsilon in self.epsilons:
            for algorithm in self.algorithms:
                yield from self._arms(algorithm, epsilon)

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = [self.row(found, arm) for arm in self.arms()]
        return Outcome(
            rows,
            {
                "epsilon": "ε",
                "algorithm": "algorithm",
                "selection": "rule",
                "group": "k",
                "loss": "nats/token",
                "perplexity": "perplexity",
                "on_records": "held-out records",
                "pretrained": "pretrained",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "noise_multiplier": "σ",
            },
            self._panels(rows),
            f"Which records of a user: {self.steps} steps, user-level DP, δ = {self.delta:g}",
            self._findings(found, rows),
            plot_columns=2,
        )

    def _of(self, rows: list[dict[str, Any]], **want: Any) -> list[dict[str, Any]]:
        return [row for row in rows if all(row[key] == value for key, value in want.items())]

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Panel

        panels = []
        for algorithm in self.algorithms:
            rules = [rule for rule in self.rules if algorithm == ULS or rule != CHUNK]
            curves = [
                curve(
                    rule,
                    "epsilon",
                    self._of(rows, algorithm=algorithm, group=self.group, selection=rule),
                )
                for rule in rules
            ]
            title = f"{algorithm}: rules at k = {self.group}"
            panels.append(Panel(curves, title, "user-level ε (log scale)", LOSS_LABEL))
        for algorithm in self.algorithms:
            curves = [
                curve(
                    f"ε = {epsilon:g}",
                    "group",
                    [
                        row
                        for row in self._of(
                            rows, algorithm=algorithm, epsilon=epsilon, selection=self.rule
                        )
                        if row["group"] in self.groups
                    ],
                )
                for epsilon in self.epsilons
            ]
            title = f"{algorithm}: k at the rule {self.rule}"
            panels.append(Panel(curves, title, "records of a user k (log scale)", LOSS_LABEL))
        return alike(panels)

    def _findings(self, found: Mapping[Task, Result], rows: list[dict[str, Any]]) -> list[str]:
        said = []
        row_of = dict(zip(self.arms(), rows, strict=True))
        for epsilon in self.epsilons:
            best = {}
            for algorithm in self.algorithms:
                mine = list(self._arms(algorithm, epsilon))
                rules = [arm for arm in mine if arm.group == self.group]
                rules.sort(key=lambda arm: row_of[arm]["loss"])
                sizes = [arm for arm in mine if arm.selection == self.rule]
                sizes.sort(key=lambda arm: arm.group)
                of_rules = self._listed(found, rules, [arm.selection for arm in rules])
                of_sizes = self._listed(found, sizes, [f"{arm.group}:" for arm in sizes])
                said.append(
                    f"ε = {epsilon:g}, {algorithm}: by rule at k = {self.group} {of_rules}; "
                    f"by k at {self.rule} {of_sizes} ({self._runs_said()})"
                )
                # as a learning rate is: on other records than those that are reported
                best[algorithm] = min(mine, key=lambda arm: row_of[arm]["on_records"])
            if len(best) == 2:
                els, uls = best[ELS], best[ULS]
                gap = apart(self.losses(found, uls), self.losses(found, els))
                said.append(
                    f"ε = {epsilon:g}: ULS at its best ({uls.selection}, k = {uls.group}) "
                    f"ends {gap} ELS at its best ({els.selection}, k = {els.group})"
                )
        return said

    def _listed(self, found: Mapping[Task, Result], arms: list[Arm], names: list[str]) -> str:
        """Each arm's loss, and how far it lies from the first one's where seeds can tell."""
        words: list[str] = []
        first = self.losses(found, arms[0])
        for arm, name in zip(arms, names, strict=True):
            losses = self.losses(found, arm)
            gap = f" ({apart(losses, first)} the first)" if len(losses) > 1 and words else ""
            words.append(f"{name} {losses.mean():.4f}{gap}")
        return ", ".join(words)
