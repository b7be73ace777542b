"""Runs of the real trainer that studies share: a corpus and its model, mechanisms, runs.

A study runs one setting at many rates and seeds. What a run of the trainer takes beside its steps,
reading the data, the account, tracing and compiling, is then most of its time and always the same.
:class:`Runs` does it once: the rate is part of the optimizer's state, and a seed
or a rule of choosing records moves units and batches only, which no program knows of. The steps are
the trainer's own; what a whole run writes into its folder is left out.
"""

from __future__ import annotations

import copy
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

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.mechanisms import BALLS, Goal
from mfopt.optimize import Form, Question, Target, factorize
from mfopt.training import mesh as meshes
from mfopt.training import privacy
from mfopt.training.config import TrainConfig
from mfopt.training.data import EMBEDDED, TokenStore, open_parts
from mfopt.training.execute import HELD_OUT
from mfopt.training.loop import Trainer
from mfopt.training.metrics import Evaluator
from mfopt.training.models.huggingface import export_model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.prepare import RATE_WITHOUT_NOISE, Prepared, prepare
from mfopt.training.secrets import RunSecret, uniform_hash
from mfopt.training.units import Units, UserUnits
from mfopt.training.wiring import Wiring

FRESH_BANDS = 16  # of C under fresh bins
# rules of choosing records; those by content read one user's data alone: they prepare data
RANDOM, CHUNK = "random", "chunk"
PERPLEXITY_RULES = ("highest-perplexity", "lowest-perplexity")
RULES = (RANDOM, "longest", "shortest", *PERPLEXITY_RULES, CHUNK)
CHOSEN_ON, REPORTED = "held-out-records", "held-out-users"
# setting of a run -> where a result's files put what it names
PLACES = {"data": "corpus", "model": "pretrained", "factorization": "mechanism/mechanism.npz"}


def packed(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The files under ``folder`` as arrays of bytes, for a result that has it as ``name``."""
    return {
        f"file/{name}/{path.relative_to(folder).as_posix()}": np.frombuffer(
            path.read_bytes(), dtype=np.uint8
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def unpack(result: Result, folder: Path) -> None:
    """Write the files that a result holds into ``folder``."""
    for name, content in result.arrays.items():
        path = folder / name.removeprefix("file/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.tobytes())


def selected(
    store: TokenStore, rule: str, count: int, seed: int, losses: np.ndarray | None = None
) -> TokenStore:
    """The store with up to ``count`` records of each user, those that a rule puts first.

    Args:
      store, count: users and their records, and how many of each are kept.
      rule: one of ``RULES`` that sorts records.
      seed: settles ties.
      losses: mean loss per token of each record under the initial model, shape (R,).
    """
    users = np.repeat(np.arange(store.num_users), store.records_per_user())
    rank = np.arange(store.num_records) - store.user_offsets[users]
    score = store.record_lengths().astype(np.float64)
    if rule in PERPLEXITY_RULES:
        assert losses is not None
        score = np.nan_to_num(losses, nan=np.inf)
    sign = -1.0 if rule in ("longest", "highest-perplexity") else 1.0
    order = np.lexsort((uniform_hash(seed, 0, users, rank), sign * score, users))
    kept = rank < count
    begins = store.record_offsets
    records = [store.tokens[begins[r] : begins[r + 1]] for r in order[kept].tolist()]
    ends = np.cumsum([0, *np.bincount(users[kept], minlength=store.num_users)])
    tokens = np.concatenate([np.empty(0, store.tokens.dtype), *records])
    return TokenStore(tokens, np.cumsum([0, *map(len, records)]), ends, store.metadata)


class ChunkUnits(UserUnits):
    """Users with windows of their joined text, begun at random, in place of records.

    Of a user with fewer tokens than a row has the whole text (Chua et al. 2024, section 5.1).
    """

    def fetch(self, units: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        store, users = self.store, np.maximum(units, 0)
        begin, end = (store.record_offsets[store.user_offsets[users + i]] for i in (0, 1))
        total = np.where(units < 0, 0, end - begin)[:, None]
        rows, places = np.indices((len(units), self.records))
        shares = (uniform_hash(self.seed, step, units[rows], places) >> 11) * 2.0**-53
        windows = np.maximum(total - self.length, 0) + 1
        shift = np.minimum((shares * windows).astype(np.int64), windows - 1)
        position = np.arange(self.length)
        mask = position < (total - shift)[..., None]
        index = np.where(mask, (begin[:, None] + shift)[..., None] + position, 0)
        return np.where(mask, store.tokens[index], 0).astype(np.int32), mask


class Runs:
    """Runs of one setting."""

    def __init__(self, config: TrainConfig) -> None:
        prepared = prepare(dataclasses.replace(config, learning_rate=1.0))
        prepared.close()
        self.prepared: Prepared = prepared
        self._config = dataclasses.replace(prepared.config, learning_rate=config.learning_rate)
        execution = prepared.execution
        one = optax.chain(
            make_optimizer(
                config,
                schedule(config.schedule, 1.0, execution.iterations),
                0.0 if execution.noise is None else privacy.noise_by_step(execution) ** 2,
            ),
            optax.inject_hyperparams(optax.scale)(step_size=1.0),
        )
        self._trainer = Trainer(prepared.model, prepared.execution, one, mesh=prepared.mesh)
        model, mesh = prepared.model, prepared.mesh
        self._evaluator = Evaluator(model, config.length, mesh=mesh)
        self._params = meshes.distribute(mesh, model.params)

    def run(
        self, *, rate: float, seed: int, selection: str, every: int = 0, move: float = 0.0
    ) -> tuple[dict[str, list[tuple[int, float]]], float]:
        """Train once.

        Args:
          rate: learning rate; 0: fitted to the noise.
          seed: pins batches, choice of records and noise.
          selection: one of :data:`RULES`.
          every: steps between evaluations on held-out users; 0: before and after only.
          move: of a fitted rate: how far the noise alone moves a parameter.

        Returns:
          {held-out part: [(steps done, nats per token), ...]}, from before the first step on,
          infinite where it diverged; and the tokens that its steps read.
        """
        prepared, config, secret = self.prepared, self._config, RunSecret.pinned(seed)
        wired = Wiring(config, prepared.account, secret, prepared.mesh)
        execution = wired.execution(self._units(wired, selection))
        trainer = copy.copy(self._trainer)  # its programs serve all units and batches of a shape
        trainer.execution = execution
        if not rate:
            rate = RATE_WITHOUT_NOISE
            if execution.noise is not None:
                move = dataclasses.replace(config, learning_rate=0.0, noise_move=move).move
                settings = {"move": move, "momentum": config.momentum}
                rate = privacy.fitted_rate(execution, config.optimizer, **settings)
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

    def _units(self, wired: Wiring, selection: str) -> Units:
        """Units of a run whose records are chosen by a rule."""
        train, count = self.prepared.parts["train"], self._config.records_per_user
        seed = wired.secret.seed("selection")
        if selection == CHUNK:
            return ChunkUnits(train, records=count, length=self._config.length, seed=seed)
        if selection != RANDOM:
            train = selected(train, selection, count, seed, self._losses_for(selection))
        return wired.units(train)

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
                unpack(source, folder)
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


def folder_digest(data: str, model: str) -> str:
    """Digests of all parts of a data set that is a folder, and of a model's weights."""
    parts = {} if data in EMBEDDED else open_parts(data)
    digests = [f"{name}:{parts[name].digest[:16]}" for name in sorted(parts)]
    for path in sorted(Path(model).glob("*.safetensors")) if model else ():
        with path.open("rb") as stream:
            sha = hashlib.file_digest(stream, "sha256").hexdigest()
        digests.append(f"{path.name}:{sha[:16]}")
    return "-".join(digests)


@dataclasses.dataclass(frozen=True)
class CorpusCell(Cell):
    """A corpus and a model pretrained on its public part, as files.

    Attributes:
      data: an embedded corpus, or a folder of token stores.
      length: tokens of a row.
      width, layers: of the model.
      pretrain_steps, pretrain_rate: on public records.
      model: folder of a GPT-2 to begin from; "": a new one of this width and so many layers.
      digest: of what is in the folders, which may come to hold others; "" for embedded data.
    """

    name = "train-base"
    data: str
    length: int
    width: int = 64
    layers: int = 2
    pretrain_steps: int = 300
    pretrain_rate: float = 3e-3
    model: str = ""
    digest: str = ""

    @classmethod
    def at(cls, data: str, length: int, model: str = "", **sizes: int) -> CorpusCell:
        """The cell of data and model as they are now; ``sizes`` are the other fields."""
        return cls(data, length, model=model, **sizes, digest=folder_digest(data, model))

    def run(self, *needed: Result) -> Result:
        sizes = ("length", "width", "layers", "pretrain_steps", "pretrain_rate")
        given: dict[str, Any] = {name: getattr(self, name) for name in ("data", "model", *sizes)}
        given |= {"sampling": "fixed-order:bins=1,epochs=1", "algorithm": "none", "seed": 0}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # a run that trains nothing
            prepared = prepare(TrainConfig(**given, output=str(folder)))
            if self.digest != folder_digest(self.data, self.model):
                raise _check.reject("data", self.data, "has changed since the cells were named")
            if not self.pretrain_steps:
                made = prepared.model
                export_model(made, made.params, folder / "pretrained", tokenizer=prepared.tokenizer)
            corpus = folder / "corpus" if self.data in EMBEDDED else Path(self.data)
            arrays = packed(corpus, "corpus") | packed(folder / "pretrained", "pretrained")
            users, parameters = prepared.parts["train"].num_users, prepared.model.num_params
        return Result({"users": users, "parameters": parameters}, arrays)


@dataclasses.dataclass(frozen=True)
class TrainMechanismCell(Cell):
    """A certified factorization per user, as the file that the trainer reads."""

    name = "train-mechanism"
    strategy: str
    bins: int
    epochs: int
    epsilon: float
    delta: float
    sampling: str = BALLS

    def run(self, *needed: Result) -> Result:
        goal = Goal(self.bins, self.epochs, self.epsilon, self.delta, self.sampling)
        target = Target(self.epsilon, self.delta, "user", seed=0)
        banded = self.strategy.startswith("banded")
        form = Form(self.strategy, bands=min(self.bins, FRESH_BANDS) if banded else None)
        factorization = factorize(goal.bin_scheme(), Question(target, form))
        if factorization.provenance["interrupted"]:
            raise KeyboardInterrupt  # what was kept is no result of this cell
        if factorization.guarantee.status == "estimate":
            raise _check.FailureError(factorization.not_certified)
        with tempfile.TemporaryDirectory() as folder:
            factorization.save(Path(folder) / "mechanism.npz")
            arrays = packed(Path(folder), "mechanism")
        record = {"noise_multiplier": factorization.noise_multiplier, "rmse": factorization.rmse}
        return Result(record | {"guarantee": factorization.guarantee.describe()}, arrays)


@dataclasses.dataclass(frozen=True)
class TrainRunCell(Cell):
    """Runs of the real trainer over seeds, in one setting.

    On record are, as lists over seeds, "runs" of {held-out part: [(steps done, nats per token),
    ...]} and "tokens" that were read, and what the trainer states.

    Attributes:
      base: a corpus with its model.
      mechanism: of the noise; None: independent, under Poisson sampling.
      given: settings of :class:`~mfopt.training.config.TrainConfig`, as (name, value).
      rate, seeds: of the runs; where ``by_move``, the rate is how far the noise alone is to move a
        parameter.
      units, steps: of Poisson sampling that ``given`` does not name: users, or records, that are
        expected in a step.
      selection: one of :data:`RULES`.
      every: steps between evaluations on held-out users; 0: before and after only.
    """

    name = "train-run"
    base: Cell
    mechanism: Cell | None
    given: tuple[tuple[str, Any], ...]
    rate: float
    seeds: tuple[int, ...]
    by_move: bool = False
    units: float = 0.0
    steps: int = 0
    selection: str = "random"
    every: int = 0

    def run(self, *needed: Result) -> Result:
        base, *mechanism = needed
        settings, sources = dict(self.given), {"data": base, "model": base}
        record: dict[str, Any] = {}
        if mechanism:
            sources["factorization"] = mechanism[0]
        elif self.units:
            chance = record["probability"] = self.probability(base.record["users"], settings)
            settings["sampling"] = f"poisson:probability={chance!r},iterations={self.steps}"
        runs = runs_of(sources, schedule="constant", seed=0, **settings)
        how: Any = {"selection": self.selection, "every": self.every}
        how |= {"rate": 0.0, "move": self.rate} if self.by_move else {"rate": self.rate}
        every = [runs.run(seed=seed, **how) for seed in self.seeds]
        record["runs"], record["tokens"] = zip(*every, strict=True)
        prepared = runs.prepared
        account, report = prepared.account, prepared.public_report
        record["noise_multiplier"] = None if account is None else account.noise_multiplier
        record["guarantee"] = None if report is None else report["guarantee"]
        return Result(record | {"parameters": prepared.model.num_params})

    def probability(self, users: int, settings: dict[str, Any]) -> float:
        """Sampling probability of a unit: a user, or one of the records that are kept of each."""
        by_record = settings["algorithm"] == "els"
        population = users * (settings["records_per_user"] if by_record else 1)
        if self.units > population:
            what = "records" if by_record else "users"
            rule = f"there are {users} users, and so at most {population} {what}"
            raise _check.reject("units of a step", self.units, rule, "Take less, or more data.")
        return self.units / population
