"""Cells of the real trainer that studies share: a corpus and its model, mechanisms, runs."""

from __future__ import annotations

import dataclasses
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


def _digest(folder: str) -> str:
    """Digests of all parts of a data set."""
    parts = open_parts(folder)
    return "-".join(f"{name}:{parts[name].digest[:16]}" for name in sorted(parts))


@dataclasses.dataclass(frozen=True)
class CorpusCell(Cell):
    """A corpus and a model pretrained on its public part, as files.

    Attributes:
      data: an embedded corpus, or a folder of token stores.
      length: tokens of a row.
      width, layers: of the model.
      pretrain_steps, pretrain_rate: on public records.
      digest: of the data in a folder, which may come to hold others; "" for embedded ones.
    """

    name = "train-base"
    data: str
    length: int
    width: int = 64
    layers: int = 2
    pretrain_steps: int = 300
    pretrain_rate: float = 3e-3
    digest: str = ""

    @classmethod
    def at(cls, data: str, length: int, **sizes: int) -> CorpusCell:
        """The cell of data as it is now; ``sizes`` are the other fields."""
        return cls(data, length, **sizes, digest="" if data in EMBEDDED else _digest(data))

    def run(self, *needed: Result) -> Result:
        from mfopt.training.config import TrainConfig
        from mfopt.training.prepare import prepare

        of_model = ("data", "length", "width", "layers", "pretrain_steps", "pretrain_rate")
        given: dict[str, Any] = {name: getattr(self, name) for name in of_model}
        given |= {"sampling": "fixed-order:bins=1,epochs=1", "algorithm": "none", "seed": 0}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepared = prepare(
                TrainConfig(**given, output=str(folder))
            )  # a run that trains nothing
            if self.digest and self.digest != _digest(self.data):
                raise _check.reject("data", self.data, "has changed since the cells were named")
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
    """One run with user-level sampling; the losses of every evaluation are on record.

    ``base`` has the corpus with its model, ``mechanism`` the factorization; a rate of 0 is fitted
    by ``noise_move``, how far the noise alone is to move a parameter.
    """

    name = "train-run"
    base: Cell
    mechanism: Cell
    seed: int
    optimizer: str
    records_per_user: int
    length: int
    evaluate_every: int
    learning_rate: float = 0.0
    noise_move: float = 0.0
    evaluate_records: int = 500

    def run(self, *needed: Result) -> Result:
        from mfopt.experiments.runs import repeated

        base, mechanism = needed
        names = ("optimizer", "records_per_user", "length", "evaluate_records")
        runs = repeated.runs_of(
            {"data": base, "model": base, "factorization": mechanism},
            schedule="constant",
            seed=0,
            **{name: getattr(self, name) for name in names},
        )
        losses, tokens = runs.run(
            rate=self.learning_rate,
            move=self.noise_move,
            seed=self.seed,
            selection="random",
            evaluate_every=self.evaluate_every,
        )
        return Result(
            {
                "losses": losses,
                "steps": runs.prepared.steps,
                "tokens": tokens,
                "noise_multiplier": mechanism.record["noise_multiplier"],
            }
        )
