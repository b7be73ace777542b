"""Choosing a learning rate on public data, under the noise of the private run; and what else public
data can tell: a clip norm, and the records of a user.

Public records cost nothing (``docs/training/rates.md``). They are trained on as the private ones
will be (the same C, clipping, optimizer, steps and size of noise in a mean), once for each rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from mfopt._runtime import _check, _files
from mfopt.noise import NoiseStream
from mfopt.progress import Progress, Report, silent
from mfopt.sampling import Poisson
from mfopt.training.batching import Sampler
from mfopt.training.clipping import Clipping
from mfopt.training.data import TokenStore
from mfopt.training.gradients import Totals, microbatch_adder
from mfopt.training.loop import Execution, Trainer
from mfopt.training.metrics import Evaluator
from mfopt.training.models import Model
from mfopt.training.optimizers import released
from mfopt.training.units import RecordUnits, Units, UserUnits

FILE = "rates.json"
_MOST_UNITS = 4096
_LEFT_OUT = 5  # every fifth unit is evaluated on
_EXAMINED = 128  # units whose gradients are looked at


def sweep(
    model: Model,
    execution: Execution,
    public: TokenStore,
    rates: Sequence[float],
    optimizer: Callable[[float], optax.GradientTransformation],
    *,
    steps: int,
    folder: Path,
    found_for: dict[str, str],
    progress: Report = silent,
) -> float:
    """The rate with which training on ``public`` ends at the least loss.

    What was found is kept in ``folder``, for resumption; a run that diverges has no loss there.

    Args:
        model, execution, steps, folder: of the private run.
        public: records, marked as public.
        rates, optimizer: learning rates, and what makes the optimizer of one.
        found_for: digests of all that the losses follow from; what is kept for others is not used.
        progress: callback for each rate.

    Raises:
        UsageError: training diverges with all of them.
    """
    path = folder / FILE
    kept = json.loads(path.read_text()) if path.is_file() else {}
    if kept.get("rates") == list(rates) and kept.get("for") == found_for:
        return _best(rates, kept["losses"])
    units, left_out, length = _parts(public, execution.units)
    rehearsal = _rehearsal(execution, units)
    evaluate, losses = Evaluator(model, length), []
    for number, rate in enumerate(rates):
        note = f"learning rate {rate:g}"
        progress(Progress("trying rates on public data", number, len(rates), "rates", note=note))
        trainer = Trainer(model, rehearsal, optimizer(rate))
        noise = execution.noise
        state = trainer.init(None if noise is None else np.arange(8, dtype=np.uint32))
        for result in trainer.run(state, steps):
            state = result.state
        loss = evaluate(released(state.params, state.optimizer), left_out).loss
        losses.append(loss if math.isfinite(loss) else None)
    best = _best(rates, losses)
    facts = {"rates": list(rates), "losses": losses, "best": best, "for": found_for}
    _files.write(path, json.dumps(facts, indent=2) + "\n")
    shown = [math.inf if loss is None else loss for loss in losses]
    listed = ", ".join(f"{r:g}: {x:.4f}" for r, x in zip(rates, shown, strict=True))
    edge = "" if min(rates) < best < max(rates) else "; the best is the last one tried: try further"
    note = f"learning rate {best:g}, by public loss ({listed}){edge}"
    progress(Progress("trying rates on public data", note=note, lasting=True))
    return best


def _best(rates: Sequence[float], losses: Sequence[float | None]) -> float:
    found = [(x, rate) for x, rate in zip(losses, rates, strict=True) if x is not None]
    if not found:
        raise _check.reject("sweep_rates", tuple(rates), "all diverge", "Try lower ones.")
    return min(found)[1]


def usual_records(public: TokenStore) -> int:
    """Median number of records of the public users that have any (Charles et al. 2024)."""
    counts = public.records_per_user()
    return max(1, int(np.median(counts[counts > 0]))) if counts.any() else 1


def usual_norm(model: Model, private: Units, public: TokenStore) -> tuple[float, int]:
    """(median norm of the gradients of public units at the start, how many there were).

    A norm to clip to that half of the units keep to (Andrew et al. 2021), as far as the private
    ones are alike: the public ones are given their records and lengths, and none of them is read.
    """
    units, _, _ = _parts(public, private)
    add, zero = jax.jit(microbatch_adder(model, Clipping(1.0))), Totals.zero(model.params)
    norms = []
    for unit in range(min(units.population, _EXAMINED)):
        rows = units.fetch(np.array([unit]), 0)
        norms.append(add(zero, model.params, model.frozen, *rows).statistics.norm)
    return float(np.float32(np.median(norms))), len(norms)


def _parts(public: TokenStore, private: Units) -> tuple[Units, TokenStore, int]:
    """Public units of the private ones' shape, the store of those left out, tokens of a row."""
    if public.metadata.get("public") is not True:
        raise _check.reject("store", str(public.path), "is not marked as public")
    per_unit, length = private.records, int(private.describe()["length"])
    count = min(public.num_records // per_unit, _MOST_UNITS)
    if count < 2 * _LEFT_OUT:
        rule = f"are too few to choose a setting by: {2 * _LEFT_OUT * per_unit} are needed"
        way_out = "Give the clip norm, and leave `sweep_rates` out: the rate then fits the noise."
        raise _check.reject("public records", public.num_records, rule, way_out)
    # neighbouring records belong together, as a user's do
    records = [public.record(number) for number in range(count * per_unit)]
    groups = [records[i : i + per_unit] for i in range(0, len(records), per_unit)]
    trained = [group for i, group in enumerate(groups) if i % _LEFT_OUT]
    store = TokenStore.from_records(trained, public.vocab_size)
    left_out = TokenStore.from_records(groups[::_LEFT_OUT], public.vocab_size)
    if per_unit == 1:
        return RecordUnits(store, group_size=1, length=length), left_out, length
    return UserUnits(store, records=per_unit, length=length), left_out, length


def _rehearsal(execution: Execution, units: Units) -> Execution:
    """The run on public units: Poisson batches, means with as much noise as the private ones."""
    expected = min(execution.sampler.expected_batch, 0.5 * units.population)
    scheme = Poisson(expected / units.population, execution.iterations)
    sampler = Sampler(scheme, units.population, 0, microbatch=execution.sampler.microbatch)
    share = expected / execution.sampler.expected_batch
    noise, bound = execution.noise, execution.clipping.sensitivity
    if noise is not None:
        sigma, n = share * noise.stddev / bound, noise.iterations
        noise = NoiseStream(noise.strategy, iterations=n, noise_multiplier=sigma, clip_norm=bound)
    return Execution(units, sampler, execution.clipping, noise, share * execution.normalizer)
