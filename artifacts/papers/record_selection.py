"""Selection of a user's records: Tables 2 to 6 of Chua et al. 2024 in small.

Group Privacy (ELS here) keeps k records of each user and samples records; User-wise DP-SGD (ULS)
samples users and takes k records of each. At one k every rule of choosing them is tried (their
Tables 2 and 4), at one rule every k (Tables 3 and 5), and each algorithm stands at the best of
both against the other (Table 6). As there, a step has as many records (ELS) and users (ULS) at
every k; unlike there, a user with fewer than k records is not filled up by copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from common import Row, alike, apart, curve, main, pick, studies
from fine_tuning import OF_SEEDS, Arm, FineTuning
from means import ELS, ULS
from training_runs import CHUNK, RULES

from mfopt.experiments.plots import Panel

# chunks cross the borders of records, which ELS samples: for ULS only
BOTH = tuple(rule for rule in RULES if rule != CHUNK)


@dataclasses.dataclass(frozen=True)
class RecordSelection(FineTuning):
    """Choice and number of records per user: ELS and ULS by rule and by k."""

    name = "record-selection"
    source = "Chua et al. 2024, sections 4 to 6, Tables 2 to 6"
    heading = "Which records of a user, user-level DP"
    plot_columns = 2

    epsilons: tuple[float, ...] = (2.0, 8.0)  # ε of the runs.
    rules: tuple[str, ...] = RULES  # Rules at one k; chunk is for ULS.
    group: int = 4  # k at which the rules are compared.
    groups: tuple[int, ...] = (1, 4, 8)  # k at one rule.
    rule: str = "random"  # Rule at which the k are compared.
    batch: int = 64  # Records a step to expect, of ELS.
    cohort: int = 16  # Users a step to expect, of ULS.

    def rules_of(self, algorithm: str) -> list[str]:
        """The rules that are tried with an algorithm."""
        return [rule for rule in self.rules if algorithm == ULS or rule != CHUNK]

    def arms(self) -> Iterator[Arm]:
        for epsilon in self.epsilons:
            for algorithm in (ELS, ULS):
                units = float(self.batch if algorithm == ELS else self.cohort)
                # rules at one k, then the other k at one rule; none twice
                pairs = [(self.group, rule) for rule in self.rules_of(algorithm)]
                pairs += [(group, self.rule) for group in self.groups]
                for group, rule in dict.fromkeys(pairs):
                    yield Arm(algorithm, group, units, epsilon, rule)

    def panels(self, rows: list[Row]) -> list[Panel]:
        by_rule, by_size = [], []
        for algorithm in (ELS, ULS):
            mine = pick(rows, algorithm=algorithm)
            curves = [
                curve(rule, pick(mine, group=self.group, selection=rule), "epsilon")
                for rule in self.rules_of(algorithm)
            ]
            title = f"{algorithm}: rules at k = {self.group}"
            by_rule.append(Panel(curves, title, "user-level ε (log scale)", OF_SEEDS))
            sizes = [row for row in pick(mine, selection=self.rule) if row["group"] in self.groups]
            curves = [curve(f"ε = {e:g}", pick(sizes, epsilon=e), "group") for e in self.epsilons]
            title = f"{algorithm}: k at the rule {self.rule}"
            by_size.append(Panel(curves, title, "records of a user k (log scale)", OF_SEEDS))
        return alike([*by_rule, *by_size])

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            best = {}
            for algorithm in (ELS, ULS):
                mine = pick(rows, epsilon=epsilon, algorithm=algorithm)
                rules = sorted(pick(mine, group=self.group), key=lambda row: row["loss"])
                sizes = sorted(pick(mine, selection=self.rule), key=lambda row: row["group"])
                said.append(
                    f"ε = {epsilon:g}, {algorithm}: by rule at k = {self.group} "
                    f"{_listed(rules, '{selection}')}; by k at {self.rule} "
                    f"{_listed(sizes, '{group}:')} ({self.runs_said()})"
                )
                # as a learning rate is: on other records than those that are reported
                best[algorithm] = min(mine, key=lambda row: row["on_records"])
            els, uls = best[ELS], best[ULS]
            gap = apart(uls["_losses"], els["_losses"])
            said.append(
                f"ε = {epsilon:g}: ULS at its best ({uls['selection']}, k = {uls['group']}) "
                f"ends {gap} ELS at its best ({els['selection']}, k = {els['group']})"
            )
        return said


def _listed(rows: list[Row], form: str) -> str:
    """The loss of each row, and how far it lies from the first one's where seeds can tell."""
    words: list[str] = []
    for row in rows:
        told = len(row["_losses"]) > 1 and words
        gap = f" ({apart(row['_losses'], rows[0]['_losses'])} the first)" if told else ""
        words.append(f"{form.format(**row)} {row['_losses'].mean():.4f}{gap}")
    return ", ".join(words)


STUDIES = studies(__file__, RecordSelection())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
