"""Audits of a correct trainer and of broken ones.

The account stays the same; the trainer adds another amount of noise than it says, or hands
gradients on without clipping them. Each audit is one run of the real loop with canary users.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Results, Row, Study, main, pick, studies
from matplotlib.figure import Figure
from training_runs import TrainMechanismCell, unpack

from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.mechanisms import BALLS
from mfopt.experiments.plots import Curve, Panel

if TYPE_CHECKING:
    from mfopt.training.loop import Execution

NOISE, NORM = "noise", "norm"
FAULTS = {
    NOISE: "noise added, times what is claimed",
    NORM: "norm of gradients that are not clipped, in clip norms",
}
_REPORTED = ("epsilon_lower", "epsilon_curve", "epsilon_profile", "guesses", "correct", "passed")


@dataclasses.dataclass(frozen=True)
class TrainerAudit(Study):
    """Audits of a correct trainer and of broken ones."""

    name = "audit"
    source = "Mahloujifar, Melis and Chaudhuri 2024; Steinke, Nasr and Jagielski 2023"

    bins: int = 8  # Iterations of an epoch.
    epochs: int = 8  # Epochs.
    epsilon: float = 8.0  # ε of the claim.
    delta: float = 1e-5  # δ of the claim.
    strategy: str = "blt"  # Form of C.
    canaries: int = 4000  # Canary users.
    confidence: float = 0.95  # Of the bounds.
    seed: int = 0  # Pins the random choices.
    noise: tuple[float, ...] = (0.5, 0.7, 1.0, 1.5, 2.0)  # Factors of the noise; 1 is none.
    # Norms of gradients that skip clipping, in clip norms; 1 is no fault.
    norms: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0)

    def title(self, rows: list[Row]) -> str:
        trials = f"{self.canaries} canaries, {self.confidence:.0%} confidence"
        return f"Audit with {trials}, of a claim of ε = {self.epsilon:g}"

    def cells(self) -> list[AuditCell]:
        """Cells, one per fault and size."""
        at = self.bins, self.epochs, self.epsilon, self.delta
        mechanism = TrainMechanismCell(self.strategy, *at)
        how = self.canaries, self.confidence, self.seed
        faults = [(NOISE, size) for size in self.noise] + [(NORM, size) for size in self.norms]
        return [AuditCell(mechanism, fault, size, *how) for fault, size in faults]

    def rows(self, results: Results) -> list[Row]:
        """The outcome of each audit, in the order of its cell."""
        return [
            {"fault": cell.fault, "size": cell.size}
            | {name: results[cell].record[name] for name in _REPORTED}
            | {"privacy_unit": "user", "adjacency": "add-remove", "sampling": BALLS}
            | {"epsilon": self.epsilon, "delta": self.delta}
            | {"noise_multiplier": results[cell].record["noise_multiplier_claimed"]}
            for cell in self.cells()
        ]

    def figure(self, rows: list[Row]) -> Figure:
        figure = super().figure(rows)
        for axis in figure.axes:  # no fault
            axis.axvline(1.0, color="0.6", linestyle=":", linewidth=1)
        return figure

    def panels(self, rows: list[Row]) -> list[Panel]:
        """Panels of the lower bounds on ε against the size of each fault."""
        shown = {
            "claimed ε": "epsilon",
            "bound, this mechanism at some noise, independent canaries": "epsilon_profile",
            "bound, this mechanism at some noise": "epsilon_curve",
            "bound, whatever the trainer does": "epsilon_lower",
        }
        made = []
        for fault, title in ((NOISE, "wrong amount of noise"), (NORM, "no clipping")):
            mine = pick(rows, fault=fault)
            sizes = [row["size"] for row in mine]
            curves = [Curve(x, sizes, [row[name] for row in mine]) for x, name in shown.items()]
            axes = FAULTS[fault], "lower bound on ε"
            made.append(Panel(curves, title, *axes, log_y=True))
        return made

    def findings(self, rows: list[Row]) -> list[str]:
        whole = [row["passed"] for row in rows if row["size"] == 1]
        faulty = [not row["passed"] for row in rows if row["size"] != 1]
        return [
            f"{sum(faulty)} of {len(faulty)} faulty trainers fail their audit, "
            f"{sum(whole)} of {len(whole)} correct ones pass"
        ]


@dataclasses.dataclass(frozen=True)
class AuditCell(Cell):
    """The audit of the trainer with one fault in it, of a ``size`` of which 1 is none."""

    name = "audit"
    mechanism: Cell
    fault: str
    size: float
    canaries: int
    confidence: float
    seed: int

    def run(self, *needed: Result) -> Result:
        import mfopt
        from mfopt.training.audit import audit

        with tempfile.TemporaryDirectory() as folder:
            unpack(needed[0], Path(folder))
            account = mfopt.load(Path(folder) / "mechanism" / "mechanism.npz")
        report = audit(
            account,
            canaries=self.canaries,
            confidence=self.confidence,
            seed=self.seed,
            microbatch=250,
            alter=(with_noise if self.fault == NOISE else without_clipping)(self.size),
        )
        return Result(dataclasses.asdict(report) | {"passed": report.passed})


def with_noise(factor: float = 1.0, kind: Any = None) -> Callable[[Execution], Execution]:
    """Exchange of an execution's noise: σ times a factor, by another subclass of NoiseStream."""
    from mfopt.noise import NoiseStream

    def alter(execution: Execution) -> Execution:
        noise = execution.noise
        assert noise is not None
        other = (kind or NoiseStream)(
            noise.strategy,
            iterations=noise.iterations,
            sampling=noise.sampling,
            noise_multiplier=factor * noise.noise_multiplier,
            clip_norm=noise.clip_norm,
        )
        return dataclasses.replace(execution, noise=other)

    return alter


def without_clipping(norm: float) -> Callable[[Execution], Execution]:
    """Exchange of an execution's clipping: every gradient gets the norm ``norm``, in clip norms."""
    from mfopt.training.clipping import Clipping

    class Unclipped(Clipping):
        """Says that it clips."""

        def factor(self, gradient_norm: Any) -> Any:
            return norm * super().factor(gradient_norm)

    return lambda execution: dataclasses.replace(
        execution, clipping=Unclipped(**dataclasses.asdict(execution.clipping))
    )


STUDIES = studies(__file__, TrainerAudit(), folder="")

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
