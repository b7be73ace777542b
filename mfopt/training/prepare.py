"""Everything a training run needs, read and checked before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import BaseFileLock
from jax.sharding import Mesh

from mfopt._runtime import _check
from mfopt._runtime._float64 import pinned
from mfopt._runtime._types import JsonObject
from mfopt.factorization import Factorization
from mfopt.progress import Progress, Report, silent, within
from mfopt.training import initial_model, privacy, sizes
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig, load
from mfopt.training.continued import earlier_report
from mfopt.training.data import EMBEDDED, TokenStore, open_parts, screen
from mfopt.training.data.stdlib import build_lines, build_stdlib
from mfopt.training.folder import (
    check_folder,
    dropped_on_error,
    hold,
    make_folder,
    secret_of,
)
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.secrets import RunSecret
from mfopt.training.tokenizers import FILE_NAME as TOKENIZER_FILE
from mfopt.training.tokenizers import Tokenizer
from mfopt.training.validation import Validation, validation_of
from mfopt.training.verification import composed, runs_of
from mfopt.training.wiring import Wiring, account_of

RATE_WITHOUT_NOISE = 2e-3


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked.

    It holds the output folder against other runs until it is closed (or, at the latest, until the
    process ends).
    """

    config: TrainConfig
    parts: dict[str, TokenStore]
    tokenizer: Tokenizer | None
    model: Model
    account: Factorization | None
    execution: Execution
    trainer: Trainer
    secret: RunSecret
    mesh: Mesh
    facts: JsonObject
    public_report: JsonObject | None
    validation: Validation | None
    lock: BaseFileLock

    @property
    def folder(self) -> Path:
        """Output folder of the run."""
        return Path(self.config.output)

    @property
    def steps(self) -> int:
        """Steps to do: all that are covered, or fewer."""
        return self.config.steps or self.execution.iterations

    def report(self, steps_done: int) -> JsonObject | None:
        """The privacy report after so many steps."""
        return self.public_report and self.public_report | {"steps_done": steps_done}

    def close(self) -> None:
        """Let go of the output folder."""
        self.lock.release()


def preflight(config: TrainConfig, *, resume: bool = False) -> bool:
    """Refuse early what :func:`prepare` would refuse after minutes of work, then make the folder.

    Returns True if there was no output folder.
    """
    check_folder(Path(config.output), resume)
    screen.check(config)
    if initial_model.outline(config, vocab_size=1) is None:
        initial_model.maker_of(config)
    return make_folder(Path(config.output))


@pinned
def prepare(config: TrainConfig, *, resume: bool = False, progress: Report = silent) -> Prepared:
    """Read data, model and account; refuse what does not belong together.

    All data is read and compared with its digests. What follows from settings and data alone is
    checked before a model is pretrained.

    ``resume``: resume the run in ``config.output``, whose secret is then used.
    """
    new = preflight(config, resume=resume)
    lock = hold(Path(config.output))
    with dropped_on_error(Path(config.output), new):
        try:
            return _prepare(config, resume, progress, lock)
        except BaseException:
            lock.release()
            raise


def _prepare(config: TrainConfig, resume: bool, progress: Report, lock: BaseFileLock) -> Prepared:
    folder = Path(config.output)
    resuming = check_folder(folder, resume)
    mesh = meshes.make_mesh()
    earlier = earlier_report(config, progress)
    parts, tokenizer = _open_data(config, progress, resuming)
    for line in screen.lines(parts, _folder_of_data(config), config):
        progress(Progress("preparing", note=line, lasting=True))
    if config.in_chunks:
        parts = {name: store.in_chunks(config.length) for name, store in parts.items()}
    train = parts["train"]
    secret = secret_of(config, folder, resuming)
    account = account_of(config, folder, progress, resuming=resuming)
    if resuming and not config.microbatch:
        # that of the run's start, so that sums are rounded alike, where the devices can share it
        started = load(folder / "config.toml").microbatch
        config = dataclasses.replace(config, microbatch=started * (started % mesh.size == 0))
    wiring = Wiring(config, account, secret, mesh)
    execution = wiring.execution(wiring.units(train))
    guarantee = wiring.statement(execution)
    if config.steps > execution.iterations:
        rule = f"the account covers {execution.iterations} steps"
        way_out = "A longer run needs an account of its own."
        raise _check.reject("steps", config.steps, rule, way_out)
    validation = validation_of(config, parts, guarantee, execution.iterations, secret)
    shapes = initial_model.outline(config, train.vocab_size)
    # before a model is pretrained; one that a function makes is there before its sizes are known
    make = functools.partial(
        initial_model.initial_model, config, parts, progress, tokenizer, resuming
    )
    model = shapes or make()
    model.check_fits(train.vocab_size, config.length)
    execution = _affordable(model, config, execution)
    if guarantee is not None:
        guarantee = privacy.with_grid(guarantee, execution, model.num_params)
    if shapes is not None:
        model = make()
    config = dataclasses.replace(config, microbatch=execution.microbatch)
    model_digest = meshes.digest_of((model.params, model.frozen))
    if mesh.size > 1:  # of these, too, no device holds more than its share
        arrays = {"params": model.params, "frozen": model.frozen}
        model = dataclasses.replace(model, **jax.tree.map(np.array, arrays))
    rate = config.learning_rate or (
        privacy.fitted_rate(execution, config.optimizer, move=config.move, momentum=config.momentum)
        if account
        else RATE_WITHOUT_NOISE
    )
    facts = config.fixed | {
        "learning_rate": rate,
        "data": train.digest,
        "model": model_digest,
        "tokenizer": train.metadata.get("tokenizer_digest", ""),
        "mechanism": account.digest if account else "",
        "validation": validation and validation.describe(),
        "continues": earlier and hashlib.sha256(json.dumps(earlier).encode()).hexdigest(),
    }
    public_report = None
    if account is not None and guarantee is not None:
        if earlier is not None:
            guarantee = composed([*runs_of(earlier), (guarantee, account)])
        public_report = privacy.report(
            account,
            execution,
            guarantee,
            num_params=model.num_params,
            steps_done=0,
            pinned=config.seed >= 0,
            black_box=config.algorithm == "group",
            validation=facts["validation"],
        )
        public_report["learning_rate"] = {
            "value": rate,
            "chosen": privacy.CHOSEN["learning_rate" if config.learning_rate else ""],
            "noise_move": config.move,
            "optimizer": config.optimizer,
            "momentum": config.momentum,
        }
        if earlier is not None:
            public_report["continues"] = earlier
    variance = privacy.noise_by_step(execution) ** 2 if account else 0.0
    rates = schedule(config.schedule, rate, execution.iterations)
    optimizer = make_optimizer(config, rates, variance)
    return Prepared(
        config=config,
        parts=parts,
        tokenizer=tokenizer,
        model=model,
        account=account,
        execution=execution,
        trainer=Trainer(model, execution, optimizer, mesh=mesh),
        secret=secret,
        mesh=mesh,
        facts=facts,
        public_report=public_report,
        validation=validation,
        lock=lock,
    )


def _affordable(model: Model, config: TrainConfig, execution: Execution) -> Execution:
    """The execution with the largest microbatch that fits; refused is one that does not.

    ``model`` may hold shapes in place of values.
    """
    cost = sizes.RunCost(sizes.work(model, config.length), execution, config)
    fitting = dataclasses.replace(execution, microbatch=cost.fitting())
    dataclasses.replace(cost, execution=fitting).require()
    return fitting


def _folder_of_data(config: TrainConfig) -> Path:
    """Folders of the token stores of a run: in the folder given, or built in the run's own."""
    data = Path(config.data)
    built = config.data in EMBEDDED or data.is_file()
    return Path(config.output) / "corpus" if built else data


def _open_data(
    config: TrainConfig, progress: Report, resuming: bool
) -> tuple[dict[str, TokenStore], Tokenizer | None]:
    """The stores, every bit of them compared with their digests, and their one tokenizer."""
    file = Path(config.data)
    folder = _folder_of_data(config)
    # another tokenizer of the same size than the model's own would pass every other check
    model = "" if initial_model.made_elsewhere(config.model) else config.model
    if folder != file:
        if meshes.is_lead():
            keywords: dict[str, Any] = {"progress": within(progress, f"corpus of {config.data}")}
            keywords["reuse" if resuming else "force"] = True
            if config.data in EMBEDDED:
                build_stdlib(folder, public=EMBEDDED[config.data], **keywords)
            else:
                build_lines(file, folder, model, skip_bad=config.skip_bad, **keywords)
        meshes.wait_for_lead("corpus")
    parts = open_parts(folder)
    progress(Progress("comparing the data with its digests"))
    if meshes.is_lead():
        for store in parts.values():
            store.verify()
    meshes.wait_for_lead("digests")
    for store in parts.values():
        store.digest = store.metadata["content_digest"]  # compared by the lead, for all processes
    train = parts["train"].metadata
    for name, store in parts.items():
        if store.metadata.get("tokenizer_digest") != train.get("tokenizer_digest"):
            raise _check.reject("data", name, "was built with another tokenizer than train")
    if not train.get("tokenizer_digest"):  # a store of tokens that come from no text
        return parts, None
    places = (folder / TOKENIZER_FILE, folder.parent / TOKENIZER_FILE)
    place = model or next(filter(Path.is_file, places), None)
    return parts, Tokenizer.of_data(place, train) if place else None
