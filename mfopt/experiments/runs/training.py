"""Cells of the real trainer that studies share: a corpus, its sizes and model, mechanisms, runs."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell, Result, packed
from mfopt.experiments.families import FRESH_BANDS
from mfopt.experiments.mechanisms import BALLS, Goal
from mfopt.training.data import EMBEDDED, open_parts
from mfopt.training.selection import RULES, select_once

CHOSEN_ON, REPORTED = "held-out-records", "held-out-users"
PARTS = ("train", REPORTED, CHOSEN_ON, "public")
RECORD_RULES = tuple(rule for rule in RULES if rule != "chunk")


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


def pretrained(base: CorpusCell, folder: Path, **settings: Any) -> Any:
    """Prepare a run that trains nothing: the corpus and the model pretrained on its public part."""
    from mfopt.training.config import TrainConfig
    from mfopt.training.prepare import prepare

    of_model = ("data", "length", "width", "layers", "pretrain_steps", "pretrain_rate")
    given = {name: getattr(base, name) for name in of_model} | settings
    sampling = "fixed-order:bins=1,epochs=1"
    return prepare(
        TrainConfig(sampling=sampling, algorithm="none", output=str(folder), seed=0, **given)
    )


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
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepared = pretrained(self, folder)
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
    schedule: str
    records_per_user: int
    length: int
    evaluate_every: int
    learning_rate: float = 0.0
    noise_move: float = 0.0
    evaluate_records: int = 500

    def run(self, *needed: Result) -> Result:
        from mfopt.experiments.runs import repeated

        base, mechanism = needed
        names = ("optimizer", "schedule", "records_per_user", "length", "evaluate_records")
        runs = repeated.runs_of(
            {"data": base, "model": base, "factorization": mechanism},
            seed=0,
            **{name: getattr(self, name) for name in names},
        )
        trained = runs.run(
            rate=self.learning_rate,
            move=self.noise_move,
            seed=self.seed,
            selection="random",
            evaluate_every=self.evaluate_every,
        )
        return Result(
            {
                "losses": trained.losses,
                "steps": runs.prepared.steps,
                "tokens": trained.tokens,
                "noise_multiplier": mechanism.record["noise_multiplier"],
            }
        )


@dataclasses.dataclass(frozen=True)
class CorpusSizesCell(Cell):
    """Records of a user in each part, and length and perplexity of ``group`` chosen of each.

    The perplexity of a record is that of the pretrained model of ``base`` on its first ``length``
    tokens, over its own tokens.
    """

    name = "train-sizes"
    base: CorpusCell
    group: int

    def run(self, *needed: Result) -> Result:
        import jax

        from mfopt.training.models.huggingface import load_pretrained

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            needed[0].unpack(folder)
            model = load_pretrained(str(folder / "pretrained"))
            parts = open_parts(folder / "corpus")
            train = parts["train"]
            rows = train.batch(np.arange(train.num_records), self.base.length)
            sizes = {part: store.records_per_user() for part, store in parts.items()}
            lengths = train.record_lengths()

            @jax.jit
            def losses_of(rows: Any) -> Any:
                one = lambda row: model.loss(model.params, model.frozen, *row)  # noqa: E731
                return jax.lax.map(one, rows, batch_size=128)

            losses = np.asarray(losses_of(rows), np.float64)
            chosen = {
                rule: select_once(train, self.group, rule, losses=losses) for rule in RECORD_RULES
            }
        said = {part: _sizes(each) for part, each in sizes.items()}
        for rule, records in chosen.items():
            of, perplexity = lengths[records], np.exp(losses[records])
            said[rule] = _sizes(np.minimum(sizes["train"], self.group)) | {
                "mean_tokens": float(of.mean()),
                "mean_perplexity": float(perplexity.mean()),
                "share_shorter": float((of < self.base.length).mean()),
            }
        return Result({"rows": said})


def _sizes(each: np.ndarray) -> dict[str, Any]:
    """Numbers of users and records, and of records of a user."""
    return {
        "users": len(each),
        "records": int(each.sum()),
        "least": int(each.min()),
        "median": float(np.median(each)),
        "mean": float(each.mean()),
        "largest": int(each.max()),
    }
