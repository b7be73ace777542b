"""Adapters of low rank against all parameters: Table 8 of Chua et al. 2024 in small.

Adapters train fewer numbers, so the noise on them is shorter as a whole. Each rank stands at its
own best learning rate, with and without privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from common import Results, Row, apart, curve, ends, main, pick, studies
from fine_tuning import OF_SEEDS, PLAIN, Arm, FineTuning
from means import ULS

from mfopt.experiments.plots import Panel


@dataclasses.dataclass(frozen=True)
class Adapters(FineTuning):
    """Adapters of low rank against all parameters, with and without privacy."""

    name = "lora"
    source = "Chua et al. 2024, appendix C.1, Table 8"
    heading = "Adapters against all parameters, user-level DP"

    epsilons: tuple[float, ...] = (8.0,)  # ε of the private runs.
    ranks: tuple[int, ...] = (4, 16)  # Ranks of the adapters.
    cohort: int = 16  # Users a step to expect.
    group: int = 4  # Records of a user in a step.
    rates: tuple[float, ...] = (0.003, 0.01, 0.03)  # Learning rates to choose from (adam).

    def arms(self) -> Iterator[Arm]:
        for epsilon in (None, *self.epsilons):  # no privacy first, all parameters first
            algorithm = PLAIN if epsilon is None else ULS
            for rank in (0, *self.ranks):
                yield Arm(algorithm, self.group, float(self.cohort), epsilon, rank=rank)

    def rows(self, results: Results) -> list[Row]:
        rows = super().rows(results)
        return [row | {"trained": f"rank {r}" if (r := row["rank"]) else "all"} for row in rows]

    def panels(self, rows: list[Row]) -> list[Panel]:
        labels = {None: PLAIN} | {epsilon: f"ULS, ε = {epsilon:g}" for epsilon in self.epsilons}
        curves = [curve(label, pick(rows, epsilon=e), "parameters") for e, label in labels.items()]
        axis = "trained parameters (log scale)\nrightmost: all; the others: adapters"
        return [Panel(curves, "each at its best learning rate", axis, OF_SEEDS)]

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in (None, *self.epsilons):
            whole, *adapters = pick(rows, epsilon=epsilon)
            words = ", ".join(
                f"rank {row['rank']} ends {apart(row['_losses'], whole['_losses'])}"
                for row in adapters
            )
            name = PLAIN if epsilon is None else f"ε = {epsilon:g}"
            said.append(f"{name}: against all parameters {words} ({self.runs_said()})")
        return [*said, *ends(rows)]


STUDIES = studies(__file__, Adapters())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
