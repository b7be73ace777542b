"""Copies of private text in the public part, and what is left when they are removed.

Charles et al. 2024 (section 5, appendix D) remove near-duplicates of the private text from what is
pretrained on: left there, they hide what private fine-tuning gives. Here copies are put in, a few
of their tokens changed, and taken out again by :func:`mfopt.training.data.overlap.copies`, the
digests that the trainer itself compares the two parts by.

A model that was pretrained on copies of private records has no guarantee at all, and one whose
public part was cleaned by looking at them has its own given that part only; the rows say so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell
from mfopt.experiments.options import from_0_to_1, option
from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.runs.fine_tuning import Arm
from mfopt.experiments.runs.means import ULS
from mfopt.experiments.runs.public_copies import PublicCopiesCell
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, FineTuning
from mfopt.experiments.studies.rows import about, alike, pick

AS_BUILT, COPIED, CLEANED = "as built", "with copies", "copies removed"
PARTS = (AS_BUILT, COPIED, CLEANED)


@dataclasses.dataclass(frozen=True)
class PublicCopies(FineTuning):
    """Loss before and after private fine-tuning, by what the public part holds."""

    name = "public-copies"
    summary = "Copies of private text in the public part, left there and removed."
    source = "Charles et al. 2024, section 5 and appendix D"
    default_size = "embedded corpus, 3 public parts, 3 seeds, 9 runs of 32 steps"
    time = "about 2 CPU-minutes"
    full = f"{FineTuning.PAPER} epsilons=1,4,16,64 cohort=256"
    full_size = "2,000 steps of GPT-2 small's shape, 4 ε, 3 seeds, 4 rates"
    columns = (
        "public_part=public part; put=copies put in; left; exact=found exact; near; "
        "asked_epsilon=ε asked; pretrained; loss=fine-tuned; fall; privacy_unit=unit; sampling; "
        "epsilon=ε held; noise_multiplier=σ"
    )
    title = "Copies of private records in the public part; fine-tuning per user, δ = {0.delta:g}"

    epsilons: tuple[float, ...] = option((8.0,), "ε of the runs.", name="--eps")
    share: float = option(
        0.5, "Share of the private training records that are copied.", rule=_check.probability
    )
    changed: float = option(
        0.03, "Share of a copy's tokens that are replaced by others.", rule=from_0_to_1
    )
    shortest: int = option(1, "Fewest tokens of a record that is examined for removal.")
    cohort: int = option(16, "Users a step to expect.")
    group: int = option(4, "Records of a user in a step.", name="--k")

    def check_together(self) -> None:
        _check.integer("pretrain_steps", self.pretrain_steps)  # copies are in what is pretrained on

    def public(self, part: str) -> Cell:
        """The corpus and the model pretrained on one public part."""
        if part == AS_BUILT:
            return self.base
        shortest = self.shortest if part == CLEANED else None
        return PublicCopiesCell(self.base, self.share, self.changed, shortest)

    def arms(self) -> Iterator[tuple[str, Arm]]:
        for part, epsilon in itertools.product(PARTS, self.epsilons):
            yield part, Arm(ULS, self.group, float(self.cohort), epsilon)

    def cells(self) -> Iterable[Cell]:
        return [*map(self.public, PARTS), *super().cells()]

    def runs(self, arm: Any, rate: float, base: Cell | None = None) -> list[Any]:
        part, way = arm
        return super().runs(way, rate, self.public(part))

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for part, arm in self.arms():
            row = self.row(found, arm, (part, arm))
            if part == COPIED:  # what was pretrained on had no noise
                row |= {"privacy_unit": None, "epsilon": None, "delta": None}
            if part == CLEANED:
                row |= {"privacy_unit": f"{row['privacy_unit']}, given the public part"}
            counted = found[self.public(part)].record.get("copies", {})
            rows.append(
                {"public_part": part, "asked_epsilon": arm.epsilon, **row}
                | {name: counted.get(name) for name in ("put", "left", "exact", "near")}
                | {"fall": row["pretrained"] - row["loss"]}
            )
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        panels = []
        for epsilon in self.epsilons:
            curves = [
                Curve(row["public_part"], (0, self.steps), (row["pretrained"], row["loss"]))
                for row in pick(rows, asked_epsilon=epsilon)
            ]
            title = f"before and after fine-tuning, ε = {epsilon:g}"
            panels.append(Panel(curves, title, "steps", LOSS_LABEL, log_x=False))
        return alike(panels)

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            built, copied, cleaned = pick(rows, asked_epsilon=epsilon)
            falls = [about(row["pretrained"] - row["_losses"]) for row in (built, copied, cleaned)]
            said.append(
                f"ε = {epsilon:g}: fine-tuning lowers the loss by {falls[0]} from a "
                f"public part as built, by {falls[1]} where it holds copies of "
                f"{self.share:.0%} of the private records (the pretrained model is "
                f"{built['pretrained'] - copied['pretrained']:.4f} lower there, without a "
                f"guarantee), and by {falls[2]} where they were removed: "
                f"{cleaned['exact']} exact and {cleaned['near']} near "
                f"copies were found, {cleaned['left']} of the {cleaned['put']} that were put in "
                f"are left ({self.runs_said()})"
            )
        return said
