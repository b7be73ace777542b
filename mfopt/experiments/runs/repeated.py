"""Training runs that differ in learning rate, seed and choice of records, compiled once.

A study runs one setting at many rates and seeds. What a run of the trainer takes beside its steps,
reading the data, the account, tracing and compiling, is then most of its time and always the same.
:class:`Runs` does it once: the rate is part of the optimizer's state, and a seed
or a rule of choosing records moves units and batches only, which no program knows of. The steps are
the trainer's own; what a whole run writes into its folder is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from mfopt.experiments.cache import Result
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.execute import HELD_OUT
from mfopt.training.loop import Trainer
from mfopt.training.metrics import Evaluator
from mfopt.training.prepare import Prepared, learning_rate_of, optimizer_of, prepare
from mfopt.training.secrets import RunSecret
from mfopt.training.units import PERPLEXITY_RULES
from mfopt.training.wiring import Wiring

# setting of a run -> where a result's files put what it names
PLACES = {"data": "corpus", "model": "pretrained", "factorization": "mechanism/mechanism.npz"}


class Runs:
    """Runs of one setting."""

    def __init__(self, config: TrainConfig) -> None:
        assert not config.average
        prepared = prepare(dataclasses.replace(config, selection="random", learning_rate=1.0))
        prepared.close()
        self.prepared: Prepared = prepared
        self._config = dataclasses.replace(prepared.config, learning_rate=config.learning_rate)
        one = optax.chain(
            optimizer_of(config, prepared.execution, 1.0),
            optax.inject_hyperparams(optax.scale)(step_size=1.0),
        )
        self._trainer = Trainer(prepared.model, prepared.execution, one, mesh=prepared.mesh)
        model, mesh = prepared.model, prepared.mesh
        self._evaluator = Evaluator(model, config.length, mesh=mesh)
        self._params = meshes.distribute(mesh, model.params, model.partition)

    def run(
        self, *, rate: float, seed: int, selection: str, every: int = 0, move: float = 0.0
    ) -> tuple[dict[str, list[tuple[int, float]]], float]:
        """Train once.

        Args:
          rate: learning rate; 0: fitted to the noise.
          seed: pins batches, choice of records and noise.
          selection: rule by which a user's records are chosen.
          every: steps between evaluations on held-out users; 0: before and after only.
          move: of a fitted rate: how far the noise alone moves a parameter.

        Returns:
          {held-out part: [(steps done, nats per token), ...]}, from before the first step on,
          infinite where it diverged; and the tokens that its steps read.
        """
        prepared, config, secret = self.prepared, self._config, RunSecret.pinned(seed)
        wired = Wiring(config, prepared.account, secret, prepared.mesh)
        units = wired.units(prepared.parts["train"], selection, self._losses_for(selection))
        execution = wired.execution(units)
        trainer = self._trainer.over(units, execution.sampler)
        if not rate:
            fitted = dataclasses.replace(config, learning_rate=0.0, noise_move=move)
            rate = learning_rate_of(fitted, execution)
        state = trainer.init(secret.key("noise"))
        size = jax.device_put(np.float32(rate), state.step.sharding)  # as a step hands it out
        optimizer = optax.tree.set(state.optimizer, step_size=size)
        state = dataclasses.replace(state, optimizer=optimizer)
        before = self._initially("parts", lambda: self._evaluated(self._params))
        losses = {part: [(0, loss)] for part, loss in before.items()}
        tokens = 0.0
        for result in trainer.run(state, prepared.steps):
            state, done = result.state, result.step + 1
            tokens += float(result.statistics.tokens)
            last = done == prepared.steps
            if last or (every and done % every == 0):
                now = self._evaluated(state.params, HELD_OUT if last else HELD_OUT[:1])
                for part, loss in now.items():
                    losses[part].append((done, loss if math.isfinite(loss) else math.inf))
        return losses, tokens

    def _evaluated(self, params: Any, wanted: Sequence[str] = HELD_OUT) -> dict[str, float]:
        most, parts = self._config.evaluate_records, self.prepared.parts
        return {
            part: self._evaluator(params, parts[part], most).loss
            for part in wanted
            if part in parts
        }

    def _losses_for(self, selection: str) -> np.ndarray | None:
        """Loss of each record under the initial model, if the rule needs it; else None."""
        if selection not in PERPLEXITY_RULES:
            return None
        train = self.prepared.parts["train"]
        of = self._params, train, np.arange(train.num_records)
        losses: np.ndarray = self._initially("train", lambda: self._evaluator.record_losses(*of)[0])
        return losses

    def _initially(self, what: str, find: Callable[[], Any]) -> Any:
        """Losses of the initial model, which other settings of this process share."""
        at = self._config.length, self._config.evaluate_records, self._config.compute_dtype
        digests = (store.digest for store in self.prepared.parts.values())
        key = (what, self.prepared.facts["model"], *at, *digests)
        if key not in _INITIAL:
            _INITIAL[key] = find()
        return _INITIAL[key]


# the last setting of this process: a study's runs come one after the other
_KEPT: dict[str, Runs] = {}
_INITIAL: dict[tuple[Any, ...], Any] = {}  # losses before the first step


def runs_of(sources: dict[str, Result], **settings: Any) -> Runs:
    """The runs of :class:`TrainConfig` settings; those of the last ones asked for are still there.

    ``sources`` has the results that hold the "data", "model" and "factorization" of a setting.
    """
    key = json.dumps([[_digest(source) for source in sources.values()], settings], sort_keys=True)
    if key not in _KEPT:
        _KEPT.clear()
        # files that are open stay readable when their names are gone
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for source in {id(source): source for source in sources.values()}.values():
                source.unpack(folder)
            places: dict[str, Any] = {name: str(folder / PLACES[name]) for name in sources}
            # a core takes small records one by one in half the time of several at once
            settings["microbatch"] = len(meshes.devices()) if meshes.on_cpu() else 0
            _KEPT[key] = Runs(TrainConfig(**places, **settings, output=str(folder / "run")))
    return _KEPT[key]


def _digest(result: Result) -> str:
    sha = hashlib.sha256()
    for name, content in sorted(result.arrays.items()):
        sha.update(name.encode() + content.tobytes())
    return sha.hexdigest()
