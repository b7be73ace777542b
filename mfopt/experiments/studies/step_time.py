"""Cost of privacy in time: Table 12 and Figure 6 of Chua et al. 2024 in small.

Seconds of one step of the real trainer with exactly as many records, without privacy, with ELS
(Group Privacy) and with ULS (User-wise DP-SGD), on random tokens. The three take turns, step by
step, and what is reported are medians, of the ratios too: a machine that has other work to do slows
all three. Compilation is left out, sampling and noise are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.fine_tuning import PLAIN
from mfopt.experiments.runs.step_time import ORDER, StepTimeCell
from mfopt.experiments.studies.engine import PRIVACY, Found, Row, Study
from mfopt.experiments.studies.rows import alike, curve, pick


@dataclasses.dataclass(frozen=True)
class StepTime(Study):
    """Seconds of a step by model, records a step, and records of a user."""

    name = "step-time"
    alone = True
    summary = "Seconds per step of ELS, ULS and non-private training."
    source = "Chua et al. 2024, appendices C.4 and C.5, Table 12, Figure 6"
    default_size = "2 widths, 2 batches, 3 numbers of records of a user, 5 steps of each algorithm"
    time = "about 3 CPU-minutes"
    full = (
        "widths=768,1024,1280 layers=12 batches=256,1024 groups=8,1,2,16 length=128 "
        "vocabulary=50257 steps=100 microbatch=32"
    )
    full_size = "widths of GPT-2 small to large, 12 layers, 1,024 records a step, 100 steps"
    needs = "a GPU"
    columns = (
        "parameters; batch=records a step; group=k; algorithm; seconds=s/step; ratio; "
        "least_ratio=least; largest_ratio=largest; load; device"
    )
    title = "Time of a training step"
    plot_columns = 2
    scale = "{0.layers} layers of width up to {0.widest}, {0.length} tokens a record"

    widths: tuple[int, ...] = option((64, 128), "Widths of the models; one attention head per 64.")
    layers: int = option(2, "Blocks of the models.")
    batches: tuple[int, ...] = option((16, 64), "Records a step, at the first k.")
    groups: tuple[int, ...] = option((4, 1, 16), "Records of a user k; at the last batch.")
    length: int = option(48, "Tokens of a record.", least=2)
    vocabulary: int = option(2048, "Tokens that there are.")
    steps: int = option(5, "Steps timed of each algorithm.")
    microbatch: int = option(
        0, "Records of a gradient call; 0: 8, as `mfopt train` on a CPU.", least=0
    )

    @property
    def widest(self) -> int:
        """Width of the largest model."""
        return max(self.widths)

    def check_together(self) -> None:
        for cell in self.cells():
            if cell.batch % cell.group:
                rule = f"must be a multiple of every k, and {cell.group} is one"
                raise _check.reject("batches", cell.batch, rule)

    def cells(self) -> Iterable[StepTimeCell]:
        """Cells of every model: the batches at the first k, and the k at the last batch."""
        pairs = [(batch, self.groups[0]) for batch in self.batches]
        pairs += [(self.batches[-1], group) for group in self.groups]
        return [
            StepTimeCell.of(self, width=width, batch=batch, group=group)
            for width in self.widths
            for batch, group in dict.fromkeys(pairs)
        ]

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for cell in self.cells():
            record, seconds = found[cell].record, found[cell].arrays["seconds"]
            for name, mine in zip(ORDER, seconds, strict=True):
                ratios, private = mine / seconds[0], name != PLAIN
                rows.append(
                    dict.fromkeys(PRIVACY)
                    | {
                        "parameters": record["parameters"],
                        "width": cell.width,
                        "batch": cell.batch,
                        "group": cell.group,
                        "algorithm": name,
                        "seconds": float(np.median(mine)),
                        "ratio": float(np.median(ratios)),
                        "least_ratio": float(ratios.min()),
                        "largest_ratio": float(ratios.max()),
                        "steps": self.steps,
                        "device": record["device"],
                        "load": record["load"],
                        "privacy_unit": "none: random tokens" if private else None,
                        "sampling": "the same records in each step, timed only",
                        "noise_multiplier": 1.0 if private else None,
                    }
                )
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        label = "times the step without privacy\n(bands: least to largest)"
        y = "ratio", ("least_ratio", "largest_ratio")
        group, batch = self.groups[0], self.batches[-1]
        panels = []
        for width in self.widths:
            for x, fixed, said, axis in (
                ("batch", {"group": group}, f"k = {group}", "records a step"),
                ("group", {"batch": batch}, f"{batch} records a step", "records of a user k"),
            ):
                mine = pick(rows, width=width, **fixed)
                curves = [curve(name, pick(mine, algorithm=name), x, *y) for name in ORDER]
                title = f"width {width}, {said}"
                panels.append(Panel(curves, title, f"{axis} (log scale)", label))
        return alike(panels)

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for width in self.widths:
            mine = pick(rows, width=width)
            loads = [row["load"] for row in mine]
            words = [
                f"{name} {min(ratios):.2f} to {max(ratios):.2f}"
                for name in ORDER[1:]
                for ratios in [[row["ratio"] for row in pick(mine, algorithm=name)]]
            ]
            said.append(
                f"width {width} ({mine[0]['parameters']:,} parameters): times the step without "
                f"privacy, {' and '.join(words)} (medians of {self.steps} steps in turns, load "
                f"{min(loads):.1f} to {max(loads):.1f})"
            )
        return said
