"""A budget continued: a new run that begins from the parameters of an earlier one.

Its newest checkpoint has them, and its report, under a seal; the report is verified, and what both
runs cost is stated (:func:`mfopt.training.verification.composed`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.progress import Report
from mfopt.training import verification
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.config import TrainConfig, load
from mfopt.training.folder import CHECKPOINTS, hold, secret_of
from mfopt.training.initial_model import digest_of
from mfopt.training.models import Model


@dataclasses.dataclass(frozen=True)
class Earlier:
    """An earlier run: its verified ``report``, its leaves of parameters, what it was made from."""

    folder: Path
    report: JsonObject
    leaves: list[Any]
    facts: JsonObject

    @property
    def base(self) -> str:
        """Digest of the model that the first of all runs began from."""
        return str(self.facts.get("base", self.facts["model"]))

    @property
    def digest(self) -> str:
        """SHA-256 of the report."""
        return hashlib.sha256(json.dumps(self.report, sort_keys=True).encode()).hexdigest()

    def begin(self, model: Model) -> Model:
        """``model`` with the earlier run's parameters, which must have been made for it."""
        leaves, structure = jax.tree.flatten(model.params)
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if shapes != [(leaf.shape, leaf.dtype) for leaf in self.leaves]:
            rule = "has other parameters than this model"
            way_out = "Keep the settings of its model (its config.toml)."
            raise _check.reject("continue_from", str(self.folder), rule, way_out)
        if jax.tree.leaves(model.frozen) and digest_of((model.params, model.frozen)) != self.base:
            rule = "was begun from other frozen parameters than this model's"
            raise _check.reject("continue_from", str(self.folder), rule)
        return dataclasses.replace(model, params=jax.tree.unflatten(structure, self.leaves))


def read(config: TrainConfig, progress: Report) -> Earlier | None:
    """The run that ``config`` continues, its report verified; None: it continues none."""
    if not config.continue_from:
        return None
    folder = Path(config.continue_from)

    def refused(rule: str, way_out: str = "") -> Exception:
        return _check.reject("continue_from", str(folder), rule, way_out)

    if not (folder / CHECKPOINTS).is_dir() or not (folder / "config.toml").is_file():
        raise refused("holds no run", "Name the folder of a run that has trained.")
    if folder.resolve() == Path(config.output).resolve():
        raise refused("is the output folder too", "Give another one; `resume=True` resumes a run.")
    lock = hold(folder)
    try:
        secret = secret_of(load(folder / "config.toml"), folder, resuming=True)
        with Checkpoints(folder / CHECKPOINTS) as checkpoints:
            leaves, facts = checkpoints.parameters(secret)
    finally:
        lock.release()
    report = facts["privacy"]
    if report is None:
        raise refused("is not private: there is no guarantee to continue")
    outcome = verification.verify(report, progress=progress)
    if not outcome.holds:
        failed = [f"{x.name}: {x.stated} ({x.found})" for x in outcome.checks if not x.holds]
        words = _check.printable("; ".join(failed)[:300])
        raise refused(f"has a report that does not hold: {words}")
    return Earlier(folder, report, leaves, facts["run"])
