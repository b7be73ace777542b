"""Non-private pretraining on public records, by the same loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from mfopt import _check
from mfopt.progress import Progress, Report, silent
from mfopt.sampling import FixedOrder
from mfopt.training.batching import Sampler
from mfopt.training.clipping import NoClipping
from mfopt.training.data import TokenStore
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.units import Units

_WARMUP_SHARE = 0.05


class CorpusUnits(Units):
    """One unit: a fresh random block of ``records`` records of a public store at each step.

    Args:
      store: token store.
      records: record numbers to draw from.
      length: tokens of a row.
      seed: pins the random choices.
    """

    def __init__(self, store: TokenStore, *, records: int, length: int, seed: int) -> None:
        self.store, self.records, self.length, self._seed = store, records, length, seed
        self.population = 1
        self.group_size = 1

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self._seed, step])
        count = self.store.num_records
        records = rng.choice(count, self.records, replace=self.records > count)
        tokens, mask = self.store.batch(records, self.length)
        return tokens[None], mask[None]

    def describe(self) -> dict[str, Any]:
        return {"unit": "block", "records": self.records, "length": self.length}


def pretrain(
    model: Model,
    store: TokenStore,
    *,
    steps: int,
    batch: int,
    length: int,
    learning_rate: float,
    seed: int = 0,
    progress: Report = silent,
) -> Any:
    """Parameters after ``steps`` steps of AdamW with a cosine schedule on public records.

    Args:
      model: the model.
      store: token store.
      steps: number of steps.
      batch: records of a step.
      length: tokens of a row.
      learning_rate: learning rate.
      seed: pins the random choices.
      progress: told of each step.

    Raises:
        UsageError: the store is not marked as public.
    """
    if store.metadata.get("public") is not True:
        raise _check.reject(
            "store", str(store.path), "is not marked as public, and pretraining adds no noise"
        )
    units = CorpusUnits(store, records=batch, length=length, seed=seed)
    sampler = Sampler(FixedOrder(bins=1, epochs=steps), 1, 0, microbatch=1)
    rate = schedule("cosine", learning_rate, steps, warmup=max(1, int(_WARMUP_SHARE * steps)))
    trainer = Trainer(
        model,
        Execution(units, sampler, NoClipping(), None, 1.0),
        make_optimizer("adamw", rate, beta2=0.99, weight_decay=0.01),
    )
    state = trainer.init()
    stage = f"pretraining on {store.num_records} public records"
    progress(Progress(stage, 0, steps, "steps"))
    for result in trainer.run(state):
        state, done, note = result.state, result.step + 1, ""
        if done % 10 == 0 or done == steps:  # looking at the loss waits for the step
            loss = float(result.statistics.loss) / max(1.0, float(result.statistics.targets))
            note = f"loss {loss:.3f}"
            progress(Progress(stage, done, steps, "steps", note=note))
    return state.params
