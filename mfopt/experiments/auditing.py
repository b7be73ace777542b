"""What the audit says of whole and of broken trainers.

The account stays the same; the trainer adds another amount of noise than it says, or hands
gradients on without clipping them. Each audit is one run of the real loop with canary users.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfopt import _files
from mfopt.experiments import plots
from mfopt.experiments.cache import Cache, Result, Task
from mfopt.experiments.packing import unpack
from mfopt.experiments.runner import run_all
from mfopt.experiments.training import TrainingComparison, mechanism_task
from mfopt.progress import Report, silent

if TYPE_CHECKING:
    from mfopt.training.loop import Execution

NOISE, NORM = "noise", "norm"
FAULTS = {
    NOISE: "noise added, times what is claimed",
    NORM: "norm of gradients that are not clipped, in clip norms",
}


@dataclasses.dataclass(frozen=True)
class TrainerAudit:
    """What is audited: a certified BLT for balls-in-bins, and its trainer with faults.

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

    def audits(self) -> list[tuple[str, float]]:
        """(fault, size) of each audit."""
        return [(NOISE, size) for size in self.noise] + [(NORM, size) for size in self.norms]


def audit_task(setting: TrainerAudit, fault: str, size: float) -> Task:
    """One audit."""
    execution = mechanism_task(
        TrainingComparison(
            bins=setting.bins, epochs=setting.epochs, epsilon=setting.epsilon, delta=setting.delta
        ),
        setting.strategy,
    )
    return Task.of(
        "audit",
        (execution,),
        fault=fault,
        size=size,
        canaries=setting.canaries,
        confidence=setting.confidence,
        seed=setting.seed,
    )


def run_audit(
    execution: Result, *, fault: str, size: float, canaries: int, confidence: float, seed: int
) -> Result:
    """Audit the trainer with one fault in it; the outcome is on record.

    Args:
      execution: result of the task that made the mechanism.
      fault: which fault the trainer has.
      size: how large the fault is; 1 is none.
      canaries: canary users.
      confidence: of the bounds.
      seed: pins the random choices.
    """
    import mfopt
    from mfopt.training.audit import audit
    from mfopt.training.privacy import Account

    with tempfile.TemporaryDirectory() as folder:
        unpack(execution, Path(folder))
        account = Account.of(mfopt.load(Path(folder) / "mechanism" / "mechanism.npz"))
    found = audit(
        account,
        canaries=canaries,
        confidence=confidence,
        seed=seed,
        microbatch=250,
        alter=_with_noise(size) if fault == NOISE else _without_clipping(size),
    )
    return Result(dataclasses.asdict(found) | {"passed": found.passed})


def _with_noise(factor: float) -> Callable[[Execution], Execution]:
    from mfopt.noise import NoiseStream

    def alter(execution: Execution) -> Execution:
        noise = execution.noise
        assert noise is not None
        other = NoiseStream(
            noise.strategy,
            iterations=noise.iterations,
            sampling=noise.sampling,
            noise_multiplier=factor * noise.noise_multiplier,
            clip_norm=noise.clip_norm,
        )
        return dataclasses.replace(execution, noise=other)

    return alter


def _without_clipping(norm: float) -> Callable[[Execution], Execution]:
    import jax

    from mfopt.training.clipping import Clipping, Factors

    class Unclipped(Clipping):
        """Says that it clips, and gives every gradient the norm ``norm``."""

        def factors(self, squares: Any) -> Factors:
            found = super().factors(squares)
            return found._replace(each=jax.tree.map(lambda factor: norm * factor, found.each))

    return lambda execution: dataclasses.replace(
        execution, clipping=Unclipped(**dataclasses.asdict(execution.clipping))
    )


def audits(
    setting: TrainerAudit,
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> list[dict[str, Any]]:
    """The outcome of each audit of the setting, in its order.

    Args:
      setting: what is compared, and where.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores.
      progress: told of each finished cell.
    """
    wanted = [(fault, size, audit_task(setting, fault, size)) for fault, size in setting.audits()]
    found = run_all([task for *_, task in wanted], cache, jobs=jobs, progress=progress)
    names = (
        "epsilon_lower",
        "epsilon_profile",
        "noise_multiplier_highest",
        "epsilon_claimed",
        "delta",
        "noise_multiplier_claimed",
        "accuracy",
        "accuracy_claimed",
        "guesses",
        "correct",
        "canaries",
        "confidence",
        "passed",
    )
    return [
        {"fault": fault, "size": size} | {name: found[task].record[name] for name in names}
        for fault, size, task in wanted
    ]


def panels(setting: TrainerAudit, rows: Sequence[dict[str, Any]]) -> list[plots.Panel]:
    """Both lower bounds on ε against the size of each fault."""
    made = []
    for fault, title in ((NOISE, "wrong amount of noise"), (NORM, "no clipping")):
        mine = [row for row in rows if row["fault"] == fault]
        sizes = [row["size"] for row in mine]
        claimed = [row["epsilon_claimed"] for row in mine]
        curves = [
            plots.Curve("claimed ε", sizes, claimed),
            plots.Curve(
                "bound, this mechanism at some noise",
                sizes,
                [row["epsilon_profile"] for row in mine],
            ),
            plots.Curve(
                "bound, whatever the trainer does", sizes, [row["epsilon_lower"] for row in mine]
            ),
        ]
        made.append(
            plots.Panel(
                curves, title, FAULTS[fault], "lower bound on ε", log_y=True, vertical=(1.0, "")
            )
        )
    return made


def write(stem: Path, setting: TrainerAudit, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """STEM.json, .csv, .png and .svg."""
    title = (
        f"Audit with {setting.canaries} canaries, {setting.confidence:.0%} confidence, of a claim "
        f"of ε = {setting.epsilon:g}"
    )
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    text = json.dumps({"setting": dataclasses.asdict(setting), "audits": list(rows)}, indent=2)
    return [
        _files.write(stem.with_name(f"{stem.name}.json"), text + "\n"),
        _files.write(stem.with_name(f"{stem.name}.csv"), buffer.getvalue()),
        *plots.save(plots.draw(panels(setting, rows), title=title), stem),
    ]
