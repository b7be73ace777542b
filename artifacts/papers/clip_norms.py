"""Influence of the clip norm: Figure 4 of Chua et al. 2024 in small.

ELS clips each record's gradient, ULS the mean gradient of a user's records, which varies less. The
update is divided by the clip norm before the optimizer sees it, so that a larger norm means more
noise against the same gradients, and not a longer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from common import Row, alike, apart, curve, main, pick, studies
from fine_tuning import OF_SEEDS, Arm, FineTuning
from means import ELS, ULS

from mfopt.experiments.plots import Panel


@dataclasses.dataclass(frozen=True)
class ClipNorms(FineTuning):
    """Sensitivity of ELS and ULS to the clip norm, at fixed ε."""

    name = "clip-norms"
    source = "Chua et al. 2024, section 6, Figure 4"
    heading = "Clip norms, user-level DP"

    epsilon: float = 8.0  # ε of every run.
    clips: tuple[float, ...] = (0.1, 0.5, 2.0, 8.0)  # Clip norms.
    batches: tuple[int, ...] = (16, 64)  # Records a step to expect, of both.
    group: int = 4  # Records of a user.

    def arms(self) -> Iterator[Arm]:
        for algorithm in (ELS, ULS):
            for batch in self.batches:
                units = batch / (1 if algorithm == ELS else self.group)
                for clip in self.clips:
                    yield Arm(algorithm, self.group, units, self.epsilon, clip_norm=clip)

    def panels(self, rows: list[Row]) -> list[Panel]:
        clipped = {ELS: "clips each record", ULS: "clips each user's mean"}
        return alike(
            [
                Panel(
                    [
                        curve(f"{batch} records a step", mine, "clip_norm")
                        for batch in self.batches
                        for mine in [pick(rows, algorithm=name, records_a_step=batch)]
                    ],
                    f"{name}: {what}",
                    "clip norm (log scale)",
                    OF_SEEDS,
                )
                for name, what in clipped.items()
            ]
        )

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for batch in self.batches:
            words = []
            for name in (ELS, ULS):
                mine = pick(rows, algorithm=name, records_a_step=batch)
                ranked = sorted(mine, key=lambda row: row["loss"])
                least, most = ranked[0], ranked[-1]
                gap = apart(most["_losses"], least["_losses"])
                words.append(
                    f"{name} is best at {least['clip_norm']:g} ({least['loss']:.4f}) and "
                    f"worst at {most['clip_norm']:g}, {gap} it"
                )
            said.append(f"{batch} records a step: {'; '.join(words)} ({self.runs_said()})")
        return said


STUDIES = studies(__file__, ClipNorms())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
