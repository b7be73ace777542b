"""Loss against ε at fixed compute: ELS and ULS fine-tuning a language model by the real trainer.

Charles et al. 2024, section 6 (Figures 4 to 7 in small): B records a step in expectation, from the
same pretrained model, as many steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from common import Results, Row, alike, apart, curve, ends, level, main, pick, studies
from fine_tuning import OF_SEEDS, Arm, FineTuning
from means import ELS, ULS

from mfopt.experiments.plots import Panel


@dataclasses.dataclass(frozen=True)
class TrainingBudgets(FineTuning):
    """ELS against ULS: fine-tuning a language model at fixed compute."""

    name = "els-uls-training"
    source = "Charles et al. 2024, section 6, Figures 4 to 7 in small"
    paper = "350 million parameters, 2,000 and 10,000 steps"
    heading = "Fine-tuning at fixed compute, user-level DP"

    epsilons: tuple[float, ...] = (2.0, 8.0)  # ε of the runs.
    budgets: tuple[int, ...] = (64,)  # Records a step to expect.
    groups: tuple[int, ...] = (1, 4)  # G of ULS: records of a user in a step.
    els_groups: tuple[int, ...] = (4,)  # G of ELS: records kept of each user.
    rates: tuple[float, ...] = (0.003, 0.01, 0.03)  # Learning rates to choose from (adam).

    def arms(self) -> Iterator[Arm]:
        kinds = [(ELS, g) for g in self.els_groups] + [(ULS, g) for g in self.groups]
        for epsilon, budget in itertools.product(self.epsilons, self.budgets):
            for algorithm, group in kinds:
                units = budget / (1 if algorithm == ELS else group)
                yield Arm(algorithm, group, float(units), epsilon)

    def rows(self, results: Results) -> list[Row]:
        return [self.row(results, arm) | {"algorithm": arm.label} for arm in self.arms()]

    def panels(self, rows: list[Row]) -> list[Panel]:
        # one ε is no axis: then G is, and an algorithm is one curve
        several = len(self.epsilons) > 1
        by, axis = ("epsilon", "user-level ε") if several else ("group", "records of a user G")
        panels = []
        for budget in self.budgets:
            mine = pick(rows, records_a_step=budget)
            labels = {row["algorithm"] if several else _kind(row): None for row in mine}
            curves = [
                curve(label, [r for r in mine if label in (r["algorithm"], _kind(r))], by)
                for label in labels
            ]
            places, before = [row[by] for row in mine], mine[0]["pretrained"]
            curves.append(level("pretrained, no fine-tuning", places, before))
            title = f"{budget} records a step" + ("" if several else f", ε = {self.epsilons[0]:g}")
            panels.append(Panel(curves, title, f"{axis} (log scale)", OF_SEEDS))
        return alike(panels)

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon, budget in itertools.product(self.epsilons, self.budgets):
            # as a learning rate is: on other records than those that are reported
            els, best = (
                min(
                    (
                        r
                        for r in pick(rows, epsilon=epsilon, records_a_step=budget)
                        if _kind(r) == kind
                    ),
                    key=lambda row: float(row["on_records"]),
                )
                for kind in (ELS, ULS)
            )
            losses = best["_losses"]
            said.append(
                f"ε = {epsilon:g}, {budget} records a step: "
                f"{best['algorithm']} ends {apart(losses, els['_losses'])} {els['algorithm']}, and "
                f"{apart(losses, best['pretrained'])} the pretrained model ({self.runs_said()})"
            )
        return [*said, *ends(rows)]


def _kind(row: Row) -> str:
    """ELS or ULS."""
    return str(row["algorithm"]).partition(",")[0]


STUDIES = studies(__file__, TrainingBudgets())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
