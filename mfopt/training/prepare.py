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
from mfopt.progress import Report, silent, within
from mfopt.sampling import Scheme
from mfopt.strategies import Identity, Strategy
from mfopt.training import mesh as meshes
from mfopt.training import privacy
from mfopt.training.batching import Sampler
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore, open_parts
from mfopt.training.evaluation import Evaluator
from mfopt.training.folder import check_folder, secret_of, wait_for_lead
from mfopt.training.initial_model import digest_of, initial_model
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.secrets import RunSecret
from mfopt.training.selection import PERPLEXITY_RULES
from mfopt.training.units import RecordUnits, Units, UserUnits


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked. ``guarantee`` is None for the non-private baseline."""

    config: TrainConfig
    parts: dict[str, TokenStore]
    model: Model
    account: privacy.Account | None
    execution: Execution
    guarantee: Guarantee | None
    trainer: Trainer
    secret: RunSecret
    mesh: Mesh
    facts: dict[str, Any]
    public_report: dict[str, Any] | None

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.config.output)

    @property
    def steps(self) -> int:
        """Steps to do: all that are covered, or fewer."""
        return min(self.config.steps or self.execution.iterations, self.execution.iterations)

    def report(self, steps_done: int) -> dict[str, Any] | None:
        """The signed privacy report after so many steps."""
        if self.public_report is None:
            return None
        return privacy.sign(self.public_report | {"steps_done": steps_done}, self.secret)


def prepare(config: TrainConfig, *, resume: bool = False, progress: Report = silent) -> Prepared:
    """Read data, model and account; refuse what does not belong together.

    Args:
        resume: go on with the run in ``config.output``, whose secret is then used.
        progress: told of what is built first, and of every ten steps of pretraining.

    Raises:
        UsageError: see :class:`Execution` and :func:`privacy.statement`; also where the model does
            not take the data, or the output folder holds a run and ``resume`` is not set.
    """
    folder = Path(config.output)
    resuming = check_folder(folder, resume)
    mesh = meshes.make_mesh(config.model_parallel)
    account = _account(config, folder, progress)
    parts = _open_data(config, folder, progress)
    train = parts["train"]
    model = initial_model(config, parts, folder, mesh, progress)
    model.check_fits(train.vocab_size, config.length)
    secret = secret_of(config, folder, resuming)
    scheme = account.sampling if account else config.scheme()
    units = _units(config, train, model, mesh, secret, scheme)
    execution = _execution(config, account, scheme, units, secret, mesh)
    guarantee = public_report = None
    if account is not None:
        guarantee = privacy.statement(
            account,
            execution,
            privacy_unit=config.privacy_unit,
            delta_share=config.delta_share,
            black_box=config.algorithm == "group",
        )
        public_report = privacy.report(
            account,
            execution,
            guarantee,
            num_params=model.num_params,
            steps_done=0,
            pinned=config.seed >= 0,
        )
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
    trainer = Trainer(model, execution, optimizer, mesh=mesh)
    facts = {
        "settings": config.fingerprint,
        "data": train.digest,
        "model": digest_of(model.params),
        "mechanism": account.digest if account else "",
        "devices": [int(size) for size in mesh.devices.shape],
    }
    return Prepared(
        config,
        parts,
        model,
        account,
        execution,
        guarantee,
        trainer,
        secret,
        mesh,
        facts,
        public_report,
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


def _open_data(config: TrainConfig, folder: Path, progress: Report) -> dict[str, TokenStore]:
    if config.data != "stdlib":
        return open_parts(config.data)
    corpus = folder / "corpus"
    if not corpus.is_dir() and jax.process_index() == 0:
        from mfopt.training.data.stdlib import build_stdlib

        build_stdlib(corpus, progress=within(progress, "embedded corpus"))
    wait_for_lead("corpus")
    return open_parts(corpus)


def _units(
    config: TrainConfig,
    train: TokenStore,
    model: Model,
    mesh: Mesh,
    secret: RunSecret,
    scheme: Scheme,
) -> Units:
    losses = None
    if config.selection in PERPLEXITY_RULES:
        losses = _record_losses(config, train, model, mesh)
    shared: dict[str, Any] = {
        "length": config.length,
        "rule": config.selection,
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


def _execution(
    config: TrainConfig,
    account: privacy.Account | None,
    scheme: Scheme,
    units: Units,
    secret: RunSecret,
    mesh: Mesh,
) -> Execution:
    # a user's G records fill a device by themselves, single records do so together
    each = 1 if units.records > 1 else 8
    sampler = Sampler(
        scheme,
        units.population,
        secret.seed("sampling"),
        microbatch=config.microbatch or each * meshes.data_parallel(mesh),
        batch_size=config.batch_size or None,
        truncation="double" if config.truncation == "double" else "charge",
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
