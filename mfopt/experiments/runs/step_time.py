"""Seconds of one step of the trainer: without privacy, with ELS and with ULS, taking turns."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import numpy as np

from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.runs.fine_tuning import PLAIN
from mfopt.experiments.runs.means import ELS, ULS

ORDER = (PLAIN, ELS, ULS)
_WARM = 2  # steps before the clock counts


@dataclasses.dataclass(frozen=True)
class StepTimeCell(Cell):
    """Seconds of each step, (algorithms, steps), in the order of ``ORDER``."""

    name = "study-step-time"
    width: int
    batch: int
    group: int
    layers: int
    length: int
    vocabulary: int
    steps: int
    microbatch: int

    def run(self, *needed: Result) -> Result:
        import jax

        from mfopt.training.data import TokenStore
        from mfopt.training.models.gpt2 import GPT2Config
        from mfopt.training.models.huggingface import gpt2_model

        shape = self.batch // self.group, self.group, self.length
        made = np.random.default_rng(0).integers(self.vocabulary, size=shape)
        store = TokenStore.from_records(list(map(list, made)), vocab_size=self.vocabulary)
        model = gpt2_model(
            GPT2Config(
                vocab_size=self.vocabulary,
                n_positions=self.length,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=max(1, self.width // 64),
            )
        )
        trainers = [self.trainer(model, store, name) for name in ORDER]
        running, steps = [each.run(each.init()) for each in trainers], self.steps + _WARM
        seconds = np.empty((len(ORDER), steps))
        for step in range(steps):
            for k, run in enumerate(running):
                begun = time.perf_counter()
                jax.block_until_ready(next(run).state.params)
                seconds[k, step] = time.perf_counter() - begun
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        record = {"parameters": model.num_params, "load": round(load, 2)}
        return Result(record, {"seconds": seconds[:, _WARM:]})

    def trainer(self, model: Any, store: Any, algorithm: str) -> Any:
        """A trainer by one algorithm that takes the whole store in every step."""
        from mfopt.noise.stream import NoiseStream
        from mfopt.sampling import FixedOrder
        from mfopt.strategies import Identity
        from mfopt.training.batching import Sampler
        from mfopt.training.clipping import Clipping, NoClipping
        from mfopt.training.loop import Execution, Trainer
        from mfopt.training.optimizers import make_optimizer, schedule
        from mfopt.training.units import RecordUnits, UserUnits

        units: Any
        if algorithm == ELS:
            units = RecordUnits(store, group_size=self.group, length=self.length)
        else:
            units = UserUnits(store, records=self.group, length=self.length)
        steps, each = self.steps + _WARM, max(1, (self.microbatch or 8) // units.records)
        scheme = FixedOrder(bins=1, epochs=steps)
        sampler = Sampler(scheme, units.population, 0, microbatch=each)
        optimizer = make_optimizer("adam", schedule("constant", 1e-4, steps, 0))
        if algorithm == PLAIN:
            execution = Execution(units, sampler, NoClipping(), None, sampler.expected_batch)
        else:
            clipping = Clipping(1.0)
            noise = NoiseStream(
                Identity(),
                iterations=steps,
                noise_multiplier=1.0,
                clip_norm=clipping.sensitivity,
                sampling=scheme,
            )
            execution = Execution(units, sampler, clipping, noise, sampler.expected_batch)
        return Trainer(model, execution, optimizer)
