"""Losses and progress of a run: bar and CSV.

All are computed from the data, held-out parts included, without noise, and *not* covered by the
guarantee: readable by their owner only, and with ``private_metrics = false`` not written.
"""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mfopt._runtime import _files
from mfopt.progress import Progress, Report
from mfopt.sampling.sampler import pad
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.loop import StepResult
from mfopt.training.models import Model, PyTree, num_targets

STEP_FIELDS = (
    *("step", "loss", "perplexity", "clipped_fraction", "gradient_norm"),
    *("units", "tokens", "tokens_per_second"),
)
_RECORDS = 32  # of a call, on a device
EVAL_FIELDS = ("step", "part", "loss", "perplexity", "tokens")


class HeldOutLoss(NamedTuple):
    """``loss``: nats per predicted token; ``tokens``: how many were predicted."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e^loss."""
        return float(np.exp(min(self.loss, 700.0)))


class Evaluator:
    """The compiled loss of fixed-size blocks of records.

    It reads ``length`` tokens of a record, and 32 records per call and device, on ``mesh``
    (None: one device of this process), where it has the model's ``frozen`` arrays. Parameters are
    given at each call.
    """

    def __init__(self, model: Model, length: int, mesh: Mesh | None = None) -> None:
        self._length = length
        self._mesh = mesh or meshes.one_device()
        self._block = _RECORDS * self._mesh.size
        self.frozen = meshes.distribute(self._mesh, model.frozen)

        def losses(
            params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            params, frozen = meshes.gathered(self._mesh, (params, frozen))
            by_unit = jax.vmap(model.loss, in_axes=(None, None, 0, 0))(params, frozen, tokens, mask)
            return by_unit.astype(jnp.float32), num_targets(mask)

        self._losses = jax.jit(losses)

    def record_losses(
        self, params: PyTree, store: TokenStore, records: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(mean loss per token (R,) float32, predicted tokens (R,)) of ``records`` (R,)."""
        blocks = []
        for block in pad(records, self._block, fill=-1):
            rows = [meshes.place_rows(self._mesh, x) for x in store.batch(block, self._length)]
            blocks.append(meshes.gather(self._losses(params, self.frozen, *rows)))
        losses, targets = (
            np.concatenate(part)[: len(records)] for part in zip(*blocks, strict=True)
        )
        return losses, targets

    def __call__(
        self, params: PyTree, store: TokenStore, max_records: int | None = None
    ) -> HeldOutLoss:
        """Loss over the store, or over ``max_records`` of it, evenly spaced and always the same."""
        count = store.num_records
        chosen = np.arange(count)
        if max_records is not None and count > max_records:
            chosen = np.linspace(0, count - 1, max_records).astype(np.int64)
        losses, targets = self.record_losses(params, store, chosen)
        total = int(targets.sum())
        if not total:
            return HeldOutLoss(float("nan"), 0)
        return HeldOutLoss(float(np.sum(losses.astype(np.float64) * targets) / total), total)


def step_row(result: StepResult, seconds: float) -> dict[str, float]:
    """The numbers of one step (``STEP_FIELDS``); waits for the step to be done.

    ``loss`` is the mean per token over the step's records; ``gradient_norm`` the mean norm of a
    unit's gradient before clipping; ``clipped_fraction`` the share of units that were clipped.
    """
    sums = {name: float(value) for name, value in result.statistics._asdict().items()}
    units = max(1.0, sums["units"])
    loss = sums["loss"] / sums["targets"] if sums["targets"] else float("nan")
    return {
        "step": result.step,
        "loss": loss,
        "perplexity": HeldOutLoss(loss, 0).perplexity,
        "clipped_fraction": sums["clipped"] / units,
        "gradient_norm": sums["norm"] / units,
        "units": sums["units"],
        "tokens": sums["tokens"],
        "tokens_per_second": sums["tokens"] / seconds if seconds > 0 else float("nan"),
    }


def _open_table(
    stack: contextlib.ExitStack, path: Path, fields: tuple[str, ...], start: int
) -> csv.DictWriter[str]:
    """A table that grows by rows, each on disk as soon as written.

    Args:
      stack: closes its file.
      path, fields: of the table.
      start: rows at or after this step, of a run that was killed, are taken out.
    """
    kept = [row for row in read_table(path) if int(float(row["step"])) < start]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fields, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(kept)
    _files.write(path, text.getvalue(), private=True)
    stream = stack.enter_context(open(path, "a", buffering=1, newline=""))  # noqa: SIM115
    return csv.DictWriter(stream, fields)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, [] where there is none; a half-written last row is dropped."""
    if not path.is_file():
        return []
    with open(path, newline="") as stream:
        return [row for row in csv.DictReader(stream) if all(v for v in row.values())]


class Recorder(contextlib.ExitStack):
    """Writes a run's metrics: metrics.csv, evaluation.csv.

    The run begins or resumes at step ``start`` of ``total``. ``write``: False on all processes but
    one.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        start: int,
        total: int,
        progress: Report,
        write: bool,
    ) -> None:
        super().__init__()
        folder = Path(config.output)
        self._private = write and config.private_metrics
        if self._private:
            self._steps = _open_table(self, folder / "metrics.csv", STEP_FIELDS, start)
            # an evaluation belongs to the state after so many steps, so that of `start` is kept
            self._evaluations = _open_table(self, folder / "evaluation.csv", EVAL_FIELDS, start + 1)
        self._total = total
        self._report = progress
        self._clock = time.perf_counter()

    def step(self, result: StepResult) -> None:
        """Record one step."""
        result.statistics.units.block_until_ready()
        clock = time.perf_counter()
        row = step_row(result, clock - self._clock)
        self._clock = clock
        note = ""
        if self._private:
            self._steps.writerow(row)
            note = (
                f"loss {row['loss']:.3f}, clipped {row['clipped_fraction']:.0%}, "
                f"{row['tokens_per_second']:.0f} tokens/s"
            )
        self._report(
            Progress("training", result.step + 1, self._total, "steps", note=note, paced=True)
        )

    def evaluations(self, step: int, results: Mapping[str, HeldOutLoss]) -> None:
        """Record losses on held-out parts after ``step`` steps."""
        for part, result in results.items():
            row = {"step": step, "part": part, **result._asdict(), "perplexity": result.perplexity}
            if self._private:
                self._evaluations.writerow(row)
            note = f"after {step} steps: {part} loss {result.loss:.4f}, "
            note += f"perplexity {result.perplexity:.2f}"
            self._report(Progress("training", step, self._total, "steps", note=note, lasting=True))
        self._clock = time.perf_counter()
