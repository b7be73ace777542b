"""Cells of the real trainer that studies share: a corpus and its model, mechanisms, runs."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell, Result, packed
from mfopt.experiments.families import FRESH_BANDS
from mfopt.experiments.mechanisms import BALLS, Goal
from mfopt.training.data import EMBEDDED, open_parts

CHOSEN_ON, REPORTED = "held-out-records", "held-out-users"


def check_parts(name: str, data: str) -> None:
    """Refuse a folder that lacks what a run is pretrained on, trained on or judged by."""
    if data not in EMBEDDED:
        try:
            there = set(open_parts(data))
        except _check.UsageError:
            rule = f"is none of {', '.join(EMBEDDED)}, and no folder of `mfopt data build`"
            raise _check.reject(name, data, rule) from None
        missing = {"train", "public", CHOSEN_ON, REPORTED} - there
        if missing:
            way_out = "Build it with a public part and both held-out ones (`mfopt data build`)."
            raise _check.reject(name, data, f"has no part {', '.join(sorted(missing))}", way_out)


def check_model(name: str, folder: str) -> None:
    """Refuse a folder that holds no GPT-2."""
    from mfopt.training.models.huggingface import read_config

    read_config(Path(folder))


def _digest(data: str, model: str) -> str:
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
        return cls(data, length, model=model, **sizes, digest=_digest(data, model))

    def run(self, *needed: Result) -> Result:
        from mfopt.training.config import TrainConfig
        from mfopt.training.models.huggingface import export_model
        from mfopt.training.prepare import prepare

        sizes = ("length", "width", "layers", "pretrain_steps", "pretrain_rate")
        given: dict[str, Any] = {name: getattr(self, name) for name in ("data", "model", *sizes)}
        given |= {"sampling": "fixed-order:bins=1,epochs=1", "algorithm": "none", "seed": 0}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # a run that trains nothing
            prepared = prepare(TrainConfig(**given, output=str(folder)))
            if self.digest != _digest(self.data, self.model):
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
        from mfopt.optimize import factorize

        goal = Goal(self.bins, self.epochs, self.epsilon, self.delta, self.sampling)
        found = factorize(
            goal.bin_scheme(),
            self.epsilon,
            self.delta,
            strategy=self.strategy,
            bands=min(self.bins, FRESH_BANDS),
            privacy_unit="user",
            seed=0,
        )
        if found.provenance["interrupted"]:
            raise KeyboardInterrupt  # what was kept is no result of this cell
        if found.guarantee.status != "certified":
            raise _check.FailureError(found.not_certified)
        with tempfile.TemporaryDirectory() as folder:
            found.save(Path(folder) / "mechanism.npz")
            arrays = packed(Path(folder), "mechanism")
        record = {"noise_multiplier": found.noise_multiplier, "rmse": found.rmse}
        return Result(record | {"guarantee": found.guarantee.describe()}, arrays)


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
      units, steps: of Poisson sampling: users, or records, that are expected in a step.
      selection: rule by which a user's records are chosen.
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
        from mfopt.experiments.runs import repeated

        base, *mechanism = needed
        settings, sources = dict(self.given), {"data": base, "model": base}
        record: dict[str, Any] = {}
        if mechanism:
            sources["factorization"] = mechanism[0]
        else:
            chance = record["probability"] = self.probability(base.record["users"], settings)
            settings["sampling"] = f"poisson:probability={chance!r},iterations={self.steps}"
        runs = repeated.runs_of(sources, schedule="constant", seed=0, **settings)
        how: Any = {"selection": self.selection, "every": self.every}
        how |= {"rate": 0.0, "move": self.rate} if self.by_move else {"rate": self.rate}
        every = [runs.run(seed=seed, **how) for seed in self.seeds]
        record["runs"], record["tokens"] = zip(*every, strict=True)
        prepared = runs.prepared
        account, guarantee = prepared.account, prepared.guarantee
        record["noise_multiplier"] = None if account is None else account.noise_multiplier
        record["guarantee"] = None if guarantee is None else guarantee.describe()
        return Result(record | {"parameters": prepared.model.num_params})

    @property
    def setting(self) -> Cell:
        return dataclasses.replace(self, rate=0.0, seeds=(), selection="")

    def probability(self, users: int, settings: dict[str, Any]) -> float:
        """Sampling probability of a unit: a user, or one of the records that are kept of each."""
        by_record = settings["algorithm"] == "els"
        population = users * (settings["records_per_user"] if by_record else 1)
        if self.units > population:
            what = "records" if by_record else "users"
            rule = f"there are {users} users, and so at most {population} {what}"
            raise _check.reject("units of a step", self.units, rule, "Take less, or more data.")
        return self.units / population
