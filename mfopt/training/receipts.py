"""Privacy reports of runs in other loops than the trainer's; ``mfopt verify`` reads them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from mfopt._runtime import _check, _files
from mfopt._runtime._types import JsonObject
from mfopt.sampling import UnitSampler
from mfopt.training import privacy, verification
from mfopt.training.clipping import Clipping
from mfopt.training.loop import Execution
from mfopt.training.units import Units


def receipt(run: Any, state: Any = None) -> JsonObject:
    """The privacy report of a private run so far: public numbers only, JSON-compatible.

    The fields are those that the trainer writes; ``run`` of its units is a digest of the run's
    secret, which tells it from other runs. What a unit is, and that it has one row of a
    batch, is the caller's word; so is what :mod:`mfopt.training.verification` lists as told.

    Args:
      run: a ``PrivateRun`` of :mod:`mfopt.torch` whose optimizer is attached (``trainer.run`` of
        ``PrivateTrainer``, ``loader.run`` of ``make_private``), or of :mod:`mfopt.jax`.
      state: of a run in JAX.

    Raises:
      UsageError: a run that has not begun, or a run in JAX without its state.
    """
    begun = run if state is None else state
    if getattr(begun, "noise", None) is None or not hasattr(run, "factorization"):
        rule = "must be a PrivateRun of mfopt.torch or mfopt.jax that has begun"
        way_out = "Attach its optimizer; in JAX, give the state too."
        raise _check.reject("run", run, rule, way_out)
    if state is not None:
        sampler = run.sampler(state)
        progress = state.noise
        parameters = progress.layout.size
        pinned = progress.pinned
    else:
        sampler = run.sampler
        progress = run
        parameters = sum(p.numel() for p in run.parameters)
        pinned = sampler.pinned
    secret = f"mfopt run {sampler.state_dict()['seed']}".encode()
    account = run.factorization
    unit = account.guarantee.privacy_unit
    execution = Execution(
        Units(sampler.population, {"unit": unit, "run": hashlib.sha256(secret).hexdigest()}),
        UnitSampler(account.sampling, sampler.population, 0),  # nothing is drawn
        Clipping(run.stream.clip_norm),
        run.stream,
        run.normalizer,
    )
    stated = privacy.statement(account, execution, privacy_unit=unit)
    facts = privacy.report(
        account,
        execution,
        privacy.with_grid(stated, execution, parameters),
        num_params=parameters,
        steps_done=int(progress.step),
        pinned=pinned,
    )
    if not account.proved_here:
        facts["warnings"].append(privacy.UNPROVED)
    return facts


def write_receipt(path: str | os.PathLike[str], run: Any, state: Any = None) -> None:
    """Write :func:`receipt` to a file, in place of an earlier one of the same run.

    Any other file of that name is kept: it gets the first digits of its SHA-256 before its suffix.

    Args:
      path: of the JSON file.
      run, state: as for :func:`receipt`.
    """
    path = _files.check_output(path, force=True)
    facts = receipt(run, state)
    if path.exists() and not _is_of(path, facts["units"]):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(path.with_suffix(f".{digest[:8]}{path.suffix}"))
    _files.write(path, facts)


def _is_of(path: Path, units: JsonObject) -> bool:
    """True for the file of a report with these ``units``."""
    try:
        return verification.read(path)["units"] == units
    except (_check.UsageError, KeyError):  # some other file
        return False
