"""Privacy reports of runs in other loops than the trainer's; ``mfopt verify`` reads them."""

from __future__ import annotations

import json
import os
from typing import Any

from mfopt._runtime import _check, _files
from mfopt._runtime._types import JsonObject
from mfopt.factorization import Factorization
from mfopt.training import privacy
from mfopt.training.batching import Sampler
from mfopt.training.clipping import Clipping
from mfopt.training.loop import Execution
from mfopt.training.units import Units


def receipt(run: Any, state: Any = None) -> JsonObject:
    """The privacy report of a private run so far: public numbers only, JSON-compatible.

    The fields are those that the trainer writes. What a unit is, and that it has one row of a
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
        raise _check.reject("run", type(run).__name__, rule, way_out)
    if state is not None:
        population, progress = run.population, state.noise
        parameters, pinned = progress.layout.size, progress.pinned
    else:
        population, progress = run.sampler.population, run
        parameters, pinned = sum(p.numel() for p in run.parameters), run.is_pinned
    account: Factorization = run.factorization
    unit = account.guarantee.privacy_unit
    execution = Execution(
        Units(population, {"unit": unit}),
        Sampler(account.sampling, population, 0, microbatch=1),  # nothing is drawn
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
    """Write :func:`receipt` to a file, in place of one that is there.

    Args:
      path: of the JSON file.
      run, state: as for :func:`receipt`.
    """
    path = _files.check_output(path, force=True)
    text = json.dumps(receipt(run, state), indent=2, sort_keys=True) + "\n"
    _files.write(path, text)
