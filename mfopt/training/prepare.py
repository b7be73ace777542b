"""Everything a training run needs, read and checked before anything is computed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mfopt import _check, _files
from mfopt.accounting.closed_form.group import one_unit_target
from mfopt.factorization import Factorization, proofs
from mfopt.factorization import load as load_factorization
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.progress import Progress, Report, silent, within
from mfopt.sampling import Scheme
from mfopt.strategies import Identity, Strategy
from mfopt.training import mesh as meshes
from mfopt.training import privacy, signing
from mfopt.training.batching import Sampler
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore, open_parts, verify_all
from mfopt.training.evaluation import Evaluator
from mfopt.training.folder import Lock, check_folder, secret_of, wait_for_lead
from mfopt.training.initial_model import digest_of, initial_model, no_public_part
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.secrets import RunSecret
from mfopt.training.selection import PERPLEXITY_RULES
from mfopt.training.tokenizers import FILE_NAME as TOKENIZER_FILE
from mfopt.training.tokenizers import Tokenizer
from mfopt.training.units import RecordUnits, Units, UserUnits


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked. ``guarantee`` is None for the non-private baseline.

    It holds the output folder against other runs until it is closed (or, at the latest, until the
    process ends).
    """

    config: TrainConfig
    parts: dict[str, TokenStore]
    tokenizer: Tokenizer | None
    model: Model
    account: privacy.Account | None
    execution: Execution
    guarantee: Guarantee | None
    trainer: Trainer
    secret: RunSecret
    mesh: Mesh
    facts: dict[str, Any]
    public_report: dict[str, Any] | None
    lock: Lock

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.config.output)

    @property
    def steps(self) -> int:
        """Steps to do: all that are covered, or fewer."""
        return min(self.config.steps or self.execution.iterations, self.execution.iterations)

    def report(self, steps_done: int) -> dict[str, Any] | None:
        """The privacy report after so many steps."""
        if self.public_report is None:
            return None
        return self.public_report | {"steps_done": steps_done}

    def close(self) -> None:
        """Let go of the output folder."""
        self.lock.close()


def preflight(config: TrainConfig, *, resume: bool = False) -> None:
    """Refuse at once what :func:`prepare` would refuse after minutes of work.

    Raises:
        UsageError: the output folder holds a run, or data, model or key cannot be opened.
    """
    check_folder(Path(config.output), resume)
    if config.data != "stdlib":
        parts = open_parts(config.data)
        if config.pretrain_steps and "public" not in parts:
            raise no_public_part(config.pretrain_steps)
    if config.model:
        from mfopt.training.models.huggingface import read_config

        read_config(config.model)
    if config.sign_key:
        signing.load_private(config.sign_key)


def prepare(config: TrainConfig, *, resume: bool = False, progress: Report = silent) -> Prepared:
    """Read data, model and account; refuse what does not belong together.

    All data is read and compared with its digests. What follows from settings and data alone is
    checked before a model is pretrained.

    Args:
        config: settings of the run.
        resume: go on with the run in ``config.output``, whose secret is then used.
        progress: told of what is built first, and of every ten steps of pretraining.

    Raises:
        UsageError: see :class:`Execution` and :func:`privacy.statement`; also where the data is not
            what its digests say, the model does not take it, or the output folder holds a run and
            ``resume`` is not set, or another process is at work in it.
    """
    preflight(config, resume=resume)
    lock = Lock(Path(config.output))
    try:
        return _prepare(config, resume, progress, lock)
    except BaseException:
        lock.close()
        raise


def _prepare(config: TrainConfig, resume: bool, progress: Report, lock: Lock) -> Prepared:
    folder = Path(config.output)
    resuming = check_folder(folder, resume)
    mesh = meshes.make_mesh(config.model_parallel)
    account = _account(config, folder, progress)
    parts, tokenizer = _open_data(config, folder, progress)
    train = parts["train"]
    secret = secret_of(config, folder, resuming)
    scheme = account.sampling if account else config.scheme()
    # Which of a user's records are chosen changes no number that is checked here.
    rule = "random" if config.selection in PERPLEXITY_RULES else config.selection
    units = units_of(config, train, secret, scheme, rule)
    execution = execution_of(config, account, scheme, units, secret, mesh)
    guarantee = None if account is None else statement_of(config, account, execution)
    if config.steps > execution.iterations:
        raise _check.reject(
            "steps",
            config.steps,
            f"the account covers {execution.iterations} steps",
            "A longer run needs an account of its own.",
        )
    optimizer = make_optimizer(
        config.optimizer,
        schedule(config.schedule, config.learning_rate, execution.iterations, config.warmup),
        momentum=config.momentum,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.weight_decay,
    )
    model = initial_model(config, parts, folder, mesh, progress, tokenizer)
    model.check_fits(train.vocab_size, config.length)
    if config.selection in PERPLEXITY_RULES:
        losses = _record_losses(config, train, model, mesh)
        units = units_of(config, train, secret, scheme, config.selection, losses)
        execution = dataclasses.replace(execution, units=units)
    public_report = None
    if account is not None and guarantee is not None:
        public_report = privacy.report(
            account,
            execution,
            guarantee,
            num_params=model.num_params,
            steps_done=0,
            pinned=config.seed >= 0,
            black_box=config.algorithm == "group",
        )
    facts = {
        "settings": config.fingerprint,
        "data": train.digest,
        "model": digest_of((model.params, model.frozen)),
        "tokenizer": train.metadata.get("tokenizer_digest", ""),
        "mechanism": account.digest if account else "",
        "devices": [int(size) for size in mesh.devices.shape],
    }
    return Prepared(
        config=config,
        parts=parts,
        tokenizer=tokenizer,
        model=model,
        account=account,
        execution=execution,
        guarantee=guarantee,
        trainer=Trainer(model, execution, optimizer, mesh=mesh),
        secret=secret,
        mesh=mesh,
        facts=facts,
        public_report=public_report,
        lock=lock,
    )


def statement_of(
    config: TrainConfig, account: privacy.Account, execution: Execution
) -> Guarantee:
    """The statement about a run of ``execution`` with these settings, or a refusal.

    Raises:
        UsageError: as :func:`privacy.statement`.
    """
    return privacy.statement(
        account,
        execution,
        privacy_unit=config.privacy_unit,
        delta_share=config.delta_share,
        black_box=config.algorithm == "group",
    )


def _account(config: TrainConfig, folder: Path, progress: Report) -> privacy.Account | None:
    """The account that the run has to execute: of the file, or solved for (ε, δ)."""
    if config.algorithm == "none":
        if config.factorization:
            raise _check.reject(
                "algorithm",
                "none",
                "adds no noise, so it needs no factorization",
                "Give its `sampling` instead, for example balls-in-bins:bins=16,epochs=4.",
            )
        return None
    strategy: Strategy = Identity()
    scheme, digest = None, ""
    if config.factorization:
        found = load_factorization(config.factorization)
        if not config.epsilon:
            return privacy.Account.of(_believed(found, config.trust, progress))
        # the file's C at a target of the run's own: for groups, which the file is not made for
        strategy, scheme, digest = found.strategy, found.sampling, found.digest
    epsilon, delta, group = config.epsilon, config.delta, 1
    if config.algorithm in ("els", "group") and config.privacy_unit == "user":
        group = config.records_per_user
    if config.algorithm == "group":
        epsilon, delta = one_unit_target(epsilon, delta, group)
        group = 1
    accounted = Mechanism(
        scheme or config.scheme(),
        strategy,
        group_size=group,
        privacy_unit="user" if config.algorithm == "uls" else "record",
    )
    asked = [accounted.sampling.describe(), digest, group, accounted.privacy_unit, epsilon, delta]
    return _solved_once(folder / "account.json", asked, accounted, epsilon, delta)


def _believed(found: Factorization, trust: bool, progress: Report) -> Factorization:
    """``found``, its guarantee proved on this machine or marked as taken on trust."""
    if trust:
        if found.proved_here:
            return found
        details = {**found.guarantee.details, "taken_on_trust": True}
        return dataclasses.replace(
            found, guarantee=dataclasses.replace(found.guarantee, details=details)
        )
    if jax.process_index() == 0:
        proofs.ensure(found, progress=progress)
    wait_for_lead("proof")
    return found


def _solved_once(
    path: Path, asked: list[Any], accounted: Mechanism, epsilon: float, delta: float
) -> privacy.Account:
    """The account, kept with the run: a resumed run and every process must have the same σ."""
    if path.is_file():
        kept = json.loads(path.read_text())
        if kept["asked"] == asked:
            return privacy.Account(accounted, Guarantee(**kept["guarantee"]))
    solved = None
    if jax.process_index() == 0:
        solved = privacy.Account.solve(accounted, epsilon, delta)
        text = json.dumps({"asked": asked, "guarantee": solved.guarantee.describe()}, indent=2)
        _files.write(path, text + "\n")
    wait_for_lead("account")
    if solved is not None and jax.process_count() == 1:
        return solved
    return privacy.Account(accounted, Guarantee(**json.loads(path.read_text())["guarantee"]))


def _open_data(
    config: TrainConfig, folder: Path, progress: Report
) -> tuple[dict[str, TokenStore], Tokenizer | None]:
    """The stores, every bit of them compared with their digests, and their one tokenizer."""
    place = Path(config.data)
    if config.data == "stdlib":
        place = folder / "corpus"
        if not place.is_dir() and jax.process_index() == 0:
            from mfopt.training.data.stdlib import build_stdlib

            build_stdlib(place, progress=within(progress, "embedded corpus"))
        wait_for_lead("corpus")
    parts = open_parts(place)
    progress(Progress("comparing the data with its digests"))
    verify_all(parts)
    train = parts["train"].metadata
    for name, store in parts.items():
        if store.metadata.get("tokenizer_digest") != train.get("tokenizer_digest"):
            raise _check.reject("data", name, "was built with another tokenizer than train")
    if not train.get("tokenizer_digest"):  # a store of tokens that come from no text
        return parts, None
    found = None
    for file in (place / TOKENIZER_FILE, place.parent / TOKENIZER_FILE):
        if file.is_file():
            found = Tokenizer.of_data(file, train)
            break
    if config.model:  # another tokenizer of the same size would pass every other check
        found = Tokenizer.of_data(config.model, train)
    return parts, found


def units_of(
    config: TrainConfig,
    train: TokenStore,
    secret: RunSecret,
    scheme: Scheme,
    rule: str,
    losses: np.ndarray | None = None,
) -> Units:
    """The privacy units that the run samples.

    Args:
        config: settings of the run.
        train: the private store.
        secret: of the run.
        scheme: that samples them.
        rule: which of a user's records are used.
        losses: of each record under the initial model, for the perplexity rules.
    """
    shared: dict[str, Any] = {
        "length": config.length,
        "rule": rule,
        "seed": secret.seed("selection"),
        "losses": losses,
    }
    if config.algorithm in ("els", "group"):
        return RecordUnits(
            train,
            group_size=config.records_per_user,
            reserve=not scheme.independent,
            **shared,
        )
    return UserUnits(train, records=config.records_per_user, **shared)


def _record_losses(config: TrainConfig, train: TokenStore, model: Model, mesh: Mesh) -> np.ndarray:
    evaluator, params, frozen = placed(config, model, mesh)
    return evaluator.record_losses(params, frozen, train, np.arange(train.num_records))[0]


def execution_of(
    config: TrainConfig,
    account: privacy.Account | None,
    scheme: Scheme,
    units: Units,
    secret: RunSecret,
    mesh: Mesh,
) -> Execution:
    """Sampler, clipping and noise of the run, for these units.

    Args:
        config: settings of the run.
        account: what it executes; None: the non-private baseline.
        scheme: that samples the units.
        units: the privacy units.
        secret: of the run.
        mesh: devices.
    """
    devices = meshes.data_parallel(mesh)
    # a user's G records fill a device by themselves, single records do so together
    each = 1 if units.records > 1 else 8
    if config.microbatch % devices:
        raise _check.reject(
            "microbatch",
            config.microbatch,
            f"must be a multiple of the {devices} devices along the data axis",
        )
    sampler = Sampler(
        scheme,
        units.population,
        secret.seed("sampling"),
        microbatch=config.microbatch or each * devices,
        batch_size=config.batch_size or None,
        truncation="double" if config.truncation == "double" else "charge",
        group_size=units.group_size,
    )
    normalizer = config.normalizer or sampler.expected_batch
    if account is None:
        return Execution(units, sampler, NoClipping(), None, normalizer)
    clipping = Clipping(config.clip_norm, config.per_layer, config.normalized)
    noise = NoiseStream(
        account.strategy,
        iterations=scheme.length,
        noise_multiplier=account.noise_multiplier,
        clip_norm=clipping.sensitivity * sampler.sensitivity_factor,
        sampling=account.sampling,
    )
    return Execution(units, sampler, clipping, noise, normalizer)


def placed(config: TrainConfig, model: Model, mesh: Mesh) -> tuple[Evaluator, Any, Any]:
    """An evaluator on the mesh, with the model's own parameters and frozen arrays there."""
    block = 32 * meshes.data_parallel(mesh)
    evaluator = Evaluator(
        model,
        config.length,
        block,
        lambda rows: meshes.place_rows(mesh, rows),
        lambda tree: meshes.gather(mesh, tree),
    )
    params = meshes.place(model.params, meshes.shardings(mesh, model.params, model.partition))
    frozen = meshes.place(
        model.frozen, meshes.shardings(mesh, model.frozen, model.frozen_partition)
    )
    return evaluator, params, frozen
