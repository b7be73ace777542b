"""Audits of a correct trainer and of broken ones.

The account stays the same; the trainer adds another amount of noise than it says, or hands
gradients on without clipping them. Each audit is one run of the real loop with canary users.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from mfopt.experiments import plots
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.runs.training import TrainMechanismCell

if TYPE_CHECKING:
    from mfopt.training.loop import Execution

NOISE, NORM = "noise", "norm"
FAULTS = {
    NOISE: "noise added, times what is claimed",
    NORM: "norm of gradients that are not clipped, in clip norms",
}
_REPORTED = (
    *("epsilon_lower", "epsilon_profile", "noise_multiplier_highest", "epsilon_claimed", "delta"),
    *("noise_multiplier_claimed", "accuracy", "accuracy_claimed", "guesses", "correct"),
    *("canaries", "confidence", "passed"),
)


@dataclasses.dataclass(frozen=True)
class TrainerAudit:
    """Audit of a certified BLT for balls-in-bins, and of its trainer with faults.

    Attributes:
      noise: factors of the noise; 1 is the trainer as it is.
      norms: norms of a canary's gradient that skips clipping, in clip norms; 1 is no fault.
    """

    bins: int = 8
    epochs: int = 8
    epsilon: float = 8.0
    delta: float = 1e-5
    strategy: str = "blt"
    canaries: int = 4000
    confidence: float = 0.95
    seed: int = 0
    noise: tuple[float, ...] = (0.5, 0.7, 1.0, 1.5, 2.0)
    norms: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0)

    def cells(self) -> list[AuditCell]:
        """Cells, one per fault and size."""
        at = self.bins, self.epochs, self.epsilon, self.delta
        mechanism = TrainMechanismCell(self.strategy, *at)
        how = self.canaries, self.confidence, self.seed
        return [
            AuditCell(mechanism, fault, size, *how)
            for fault, sizes in ((NOISE, self.noise), (NORM, self.norms))
            for size in sizes
        ]


@dataclasses.dataclass(frozen=True)
class AuditCell(Cell):
    """The audit of the trainer with one fault in it.

    Attributes:
      mechanism: cell of the mechanism that the trainer runs.
      fault: which fault the trainer has.
      size: how large the fault is; 1 is none.
      canaries: canary users.
      confidence: of the bounds.
      seed: pins the random choices.
    """

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
        from mfopt.training.privacy import Account

        with tempfile.TemporaryDirectory() as folder:
            needed[0].unpack(Path(folder))
            account = Account.of(mfopt.load(Path(folder) / "mechanism" / "mechanism.npz"))
        found = audit(
            account,
            canaries=self.canaries,
            confidence=self.confidence,
            seed=self.seed,
            microbatch=250,
            alter=(with_noise if self.fault == NOISE else without_clipping)(self.size),
        )
        return Result(dataclasses.asdict(found) | {"passed": found.passed})


def with_noise(factor: float = 1.0, kind: Any = None) -> Callable[[Execution], Execution]:
    """Exchange of an execution's noise.

    Args:
      factor: of the noise multiplier.
      kind: a subclass of ``NoiseStream``; None: itself.
    """
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
    """Exchange of an execution's clipping: every gradient gets the norm ``norm``, in clip norms.

    Args:
      norm: of every gradient.
    """
    import jax

    from mfopt.training.clipping import Clipping, Factors

    class Unclipped(Clipping):
        """Says that it clips."""

        def factors(self, squares: Any) -> Factors:
            found = super().factors(squares)
            return found._replace(each=jax.tree.map(lambda factor: norm * factor, found.each))

    return lambda execution: dataclasses.replace(
        execution, clipping=Unclipped(**dataclasses.asdict(execution.clipping))
    )


def rows(setting: TrainerAudit, found: Mapping[Any, Result]) -> list[dict[str, Any]]:
    """The outcome of each audit of the setting, in its order."""
    return [
        {"fault": cell.fault, "size": cell.size}
        | {name: found[cell].record[name] for name in _REPORTED}
        for cell in setting.cells()
    ]


def panels(rows: list[dict[str, Any]]) -> list[plots.Panel]:
    """Panels of both lower bounds on ε against the size of each fault."""
    made = []
    for fault, title in ((NOISE, "wrong amount of noise"), (NORM, "no clipping")):
        mine = [row for row in rows if row["fault"] == fault]
        curves = [
            plots.Curve(label, [row["size"] for row in mine], [row[name] for row in mine])
            for label, name in (
                ("claimed ε", "epsilon_claimed"),
                ("bound, this mechanism at some noise", "epsilon_profile"),
                ("bound, whatever the trainer does", "epsilon_lower"),
            )
        ]
        label = "lower bound on ε"
        panel = plots.Panel(curves, title, FAULTS[fault], label, log_y=True, vertical=(1.0, ""))
        made.append(panel)
    return made


def _figure(content: Mapping[str, Any]) -> Figure:
    setting = content["setting"]
    title = (
        f"Audit with {setting['canaries']} canaries, {setting['confidence']:.0%} confidence, of a "
        f"claim of ε = {setting['epsilon']:g}"
    )
    return plots.draw(panels(content["audits"]), title=title)


def write(
    stem: Path,
    setting: TrainerAudit,
    found: Mapping[Any, Result],
    kinds: Collection[str] = plots.EVERY,
) -> list[Path]:
    """Write STEM.json, .png and .svg.

    Args:
      stem: path without suffix of the files.
      setting: what was audited.
      found: results of its cells.
      kinds: suffixes of the files that are wanted.
    """
    content = {"setting": dataclasses.asdict(setting), "audits": rows(setting, found)}
    text = json.dumps(content, indent=2) + "\n"
    return plots.write_files(stem, {".json": text}, {"": _figure(content)}, kinds)


def redraw(path: Path, kinds: Collection[str]) -> list[Path]:
    """The plot drawn again from the JSON file that :func:`write` wrote."""
    return plots.save(_figure(json.loads(path.read_text("utf-8"))), path.with_suffix(""), kinds)
