"""The best C so far, in a file beside the output: a long search that is killed is not lost."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from mfopt._runtime import _files
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.optimize.optimizers import Step
from mfopt.optimize.run import StartedTrace, normalized
from mfopt.progress import Progress, Report
from mfopt.workloads import PrefixSums, Workload

EVERY = 60.0  # seconds between two saves, at least
_SHARE = 20  # and so many times what a save takes
_SAME = 2e-3  # of the log error: where samples are put anew, values before and after differ by less


class BestSoFar:
    """A listener that passes every report on and, now and then, saves the best C so far.

    The file is a factorization of its own, beside ``path`` (``best.npz``: ``best.so-far.npz``),
    marked as an estimate: ``mfopt optimize --init`` resumes from it, ``mfopt calibrate`` gives it
    a certified σ. A file of that name that is there already, from a run that was killed, is left
    alone and another name taken.

    Args:
      path: of the result.
      epsilon, delta, workload, privacy_unit, provenance: as for :func:`mfopt.optimize.factorize`.
      listener: who is told.
      every: seconds between two saves, at least.
    """

    def __init__(
        self,
        path: Path,
        epsilon: float,
        delta: float,
        *,
        workload: Workload | None = None,
        privacy_unit: str = "example",
        provenance: dict[str, Any] | None = None,
        listener: Report,
        every: float = EVERY,
    ) -> None:
        self.path: Path | None = None  # of the file, once there is one
        self._wanted = beside(path)
        self._mechanism = (epsilon, delta, workload or PrefixSums(), privacy_unit)
        self._provenance, self._listener, self._every = provenance or {}, listener, every
        self._due = time.monotonic() + every
        self._least = math.inf  # of what is in the file

    def __call__(self, event: Progress) -> None:
        """Pass ``event`` on, and save if it is due."""
        self._listener(event)
        if not isinstance(event, Step) or time.monotonic() < self._due:
            return
        trace = event.trace
        if not isinstance(trace, StartedTrace) or not math.isfinite(trace.best_sigma):
            return
        if trace.best_value < self._least + _SAME:
            begun = time.monotonic()
            self._save(trace, event)
            took = time.monotonic() - begun
            self._due = time.monotonic() + max(self._every, _SHARE * took)

    def discard(self) -> None:
        """Remove the file: the result itself has been saved."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def _save(self, trace: StartedTrace, event: Progress) -> None:
        epsilon, delta, workload, unit = self._mechanism
        scheme = trace.scheme
        try:
            strategy, mode_norm = normalized(trace.result(), scheme, trace.norm)
            sigma = trace.best_sigma * mode_norm
            guarantee = Guarantee(
                epsilon,
                delta,
                sigma,
                privacy_unit=unit,
                status="estimate",
                method="σ of the optimizer's own samples: too small, not certified",
            )
            record = {**self._provenance, "unfinished": event.stage}
            factorization = Factorization(
                strategy, sigma, scheme, workload, guarantee, provenance=record
            )
            if self.path is None:
                self.path = _files.write_beside(
                    self._wanted,
                    lambda path, force: factorization.save(path, force=force),
                    force=False,
                )
                note = f"best so far: {self.path}"
                self._listener(Progress(event.stage, note=note, lasting=True))
            else:
                factorization.save(self.path, force=True)
            self._least = min(self._least, trace.best_value)
        except (OSError, UsageError, FailureError) as problem:
            # the search itself is sound: it continues, and whoever waits is told
            note = f"the best so far could not be saved: {problem}"
            self._listener(Progress(event.stage, note=note, lasting=True))


def beside(path: Path) -> Path:
    """Path of the best C so far of a result at ``path``."""
    return path.with_name(f"{path.stem}.so-far{path.suffix}")
