"""A training run from its settings: prepare, check, report, train, evaluate, export.

:func:`prepare` reads everything and refuses what does not fit, before anything is computed.
:func:`execute` then trains; it reads top to bottom.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mfopt import _check
from mfopt.accounting.mechanism import Mechanism as AccountedMechanism
from mfopt.factorization import load as load_factorization
from mfopt.guarantee import Guarantee
from mfopt.noise import NoiseStream
from mfopt.sampling import FixedBatch, FixedOrder
from mfopt.strategies import Identity, Strategy
from mfopt.training import mesh as meshes
from mfopt.training import metrics, privacy
from mfopt.training.batching import Sampler
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore, open_parts
from mfopt.training.data.files import write_text
from mfopt.training.evaluation import Evaluation, Evaluator
from mfopt.training.export import export_model
from mfopt.training.loop import Mechanism, Trainer, TrainState
from mfopt.training.models import Model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.pretraining import pretrain
from mfopt.training.secrets import RunSecret
from mfopt.training.selection import PERPLEXITY_RULES
from mfopt.training.units import RecordUnits, Units, UserUnits

Say = Callable[[str], None]
HELD_OUT = ("held-out-users", "held-out-records")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked. ``guarantee`` is None for the non-private baseline."""

    config: TrainConfig
    parts: dict[str, TokenStore]
    model: Model
    account: privacy.Account | None
    mechanism: Mechanism
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
        return min(self.config.steps or self.mechanism.iterations, self.mechanism.iterations)

    def report(self, steps_done: int) -> dict[str, Any] | None:
        """The signed privacy report after so many steps."""
        if self.public_report is None:
            return None
        return privacy.sign(self.public_report | {"steps_done": steps_done}, self.secret)


def prepare(
    config: TrainConfig, *, resume: bool = False, say: Say = lambda line: None,
    progress: bool = False,
) -> Prepared:  # fmt: skip
    """Read data, model and account; refuse what does not belong together.

    Args:
        resume: go on with the run in ``config.output``, whose secret is then used.
        say: takes lines of progress.
        progress: draw a bar while pretraining.

    Raises:
        UsageError: see :class:`Mechanism` and :func:`privacy.statement`; also where the model does
            not take the data, or the output folder holds a run and ``resume`` is not set.
    """
    folder = Path(config.output)
    resuming = _check_folder(folder, resume)
    mesh = meshes.make_mesh(config.model_parallel)
    account = _account(config, folder)
    parts = _open_data(config, folder, say)
    train = parts["train"]
    model = _model(config, parts, folder, mesh, say, progress)
    model.check_fits(train.vocab_size, config.length)
    secret = _secret(config, folder, resuming)
    scheme = account.sampling if account else config.scheme()
    units = _units(config, train, model, mesh, secret, scheme)
    mechanism = _mechanism(config, account, scheme, units, secret, mesh)
    guarantee = public_report = None
    if account is not None:
        guarantee = privacy.statement(
            account, mechanism, privacy_unit=config.privacy_unit, delta_share=config.delta_share,
            black_box=config.algorithm == "group",
        )  # fmt: skip
        public_report = privacy.report(
            account, mechanism, guarantee, num_params=model.num_params, steps_done=0,
            pinned=config.seed >= 0,
        )  # fmt: skip
    if config.steps > mechanism.iterations:
        raise _check.reject(
            "steps", config.steps, f"the account covers {mechanism.iterations} steps",
            "A longer run needs an account of its own.",
        )  # fmt: skip
    optimizer = make_optimizer(
        config.optimizer,
        schedule(config.schedule, config.learning_rate, mechanism.iterations, config.warmup),
        momentum=config.momentum, beta1=config.beta1, beta2=config.beta2,
        weight_decay=config.weight_decay,
    )  # fmt: skip
    trainer = Trainer(model, mechanism, optimizer, mesh=mesh)
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
        mechanism,
        guarantee,
        trainer,
        secret,
        mesh,
        facts,
        public_report,
    )


def execute(
    prepared: Prepared, *, say: Say = lambda line: None, progress: bool = True
) -> dict[str, Any]:
    """Train, or go on training, and write everything into the run's folder.

    Returns:
        A summary: steps done, slots padded and units truncated (since the start or resumption; as
        private as the metrics), evaluations before and after, the privacy report.
    """
    config, folder, trainer = prepared.config, prepared.folder, prepared.trainer
    lead = jax.process_index() == 0
    with Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
        state = trainer.init(_noise_key(prepared.secret))
        if checkpoints.steps:
            state, secret, facts = checkpoints.restore(state)
            _check_same_run(
                facts["run"] | {"secret": secret}, prepared.facts | {"secret": prepared.secret}
            )
            if facts["privacy"] is not None:
                privacy.check_signature(facts["privacy"], secret)
            say(f"going on after step {int(state.step)}")
        else:
            # before the first draw is used: a killed run goes on with its own draws
            checkpoints.save(state, prepared.secret, _facts(prepared, 0))
        start = int(state.step)
        if lead:
            _write_report(prepared, start)
        evaluate = _evaluator(prepared)
        with metrics.Recorder(
            folder, start=start, total=prepared.steps, private_metrics=config.private_metrics,
            tensorboard=config.tensorboard and lead, progress=progress and lead, write=lead,
        ) as recorder:  # fmt: skip
            first = evaluate(state) if start == 0 else {}
            recorder.evaluations(start, first)
            last, evaluated, padded, truncated = first, start, 0, 0
            for result in trainer.run(state, prepared.steps):
                recorder.step(result)
                padded += result.batch.padded
                truncated += result.batch.truncated
                state, done = result.state, result.step + 1
                ends = done == prepared.steps
                if ends or done % config.checkpoint_every == 0:
                    checkpoints.save(state, prepared.secret, _facts(prepared, done))
                if ends or (config.evaluate_every and done % config.evaluate_every == 0):
                    last, evaluated = evaluate(state), done
                    recorder.evaluations(done, last)
        done = int(state.step)
    params = meshes.gather(prepared.mesh, state.params)
    if lead:
        _write_report(prepared, done)
        export_model(prepared.model, params, folder / "model", force=True)
        metrics.plot(folder, folder / "loss.png")
    return {
        "steps": done,
        "padded": padded,
        "truncated": truncated,
        "evaluated_after": evaluated,
        "before": {part: result._asdict() for part, result in first.items()},
        "after": {part: result._asdict() for part, result in last.items()},
        "privacy": prepared.report(done),
        "output": str(folder),
    }


def digest_of(params: Any) -> str:
    """SHA-256 of the values of a pytree of arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(np.asarray(leaf))
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _check_folder(folder: Path, resume: bool) -> bool:
    """Whether a run is gone on with; refuses to write over one."""
    there = (folder / "checkpoints").is_dir()
    if there and not resume:
        raise _check.reject(
            "output", str(folder), "holds a run already",
            "Go on with it by --resume, or choose another folder.",
        )  # fmt: skip
    make_folder(folder)
    return there


def make_folder(folder: Path) -> None:
    """The folder of a run, readable by its owner only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as problem:
        raise _check.reject(
            "output", str(folder), f"cannot be made a folder ({problem.strerror})"
        ) from None


def _account(config: TrainConfig, folder: Path) -> privacy.Account | None:
    """The account that the run has to execute: of the file, or solved for (ε, δ)."""
    if config.algorithm == "none":
        if config.factorization:
            raise _check.reject(
                "algorithm", "none", "adds no noise, so it needs no factorization",
                "Give its --sampling instead, for example balls-in-bins:bins=16,epochs=4.",
            )  # fmt: skip
        return None
    strategy: Strategy = Identity()
    scheme, digest = None, ""
    if config.factorization:
        found = load_factorization(config.factorization)
        if not config.epsilon:
            return privacy.Account.of(found)
        # the file's C at a target of the run's own: for groups, which the file is not made for
        strategy, scheme, digest = found.strategy, found.sampling, found.digest
    epsilon, delta, group = config.epsilon, config.delta, 1
    if config.algorithm in ("els", "group") and config.privacy_unit == "user":
        group = config.records_per_user
    if config.algorithm == "group":
        epsilon, delta = privacy.one_unit_target(epsilon, delta, group)
        group = 1
    accounted = AccountedMechanism(
        scheme or config.scheme(), strategy, group_size=group,
        privacy_unit="user" if config.algorithm == "uls" else "record",
    )  # fmt: skip
    asked = [accounted.sampling.describe(), digest, group, accounted.privacy_unit, epsilon, delta]
    return _solved_once(folder / "account.json", asked, accounted, epsilon, delta)


def _solved_once(
    path: Path, asked: list[Any], accounted: AccountedMechanism, epsilon: float, delta: float
) -> privacy.Account:
    """The account, kept with the run: a resumed run and every process must have the same σ."""
    if path.is_file():
        kept = json.loads(path.read_text())
        if kept["asked"] == asked:
            return privacy.Account.proved(accounted, Guarantee(**kept["guarantee"]))
    solved = None
    if jax.process_index() == 0:
        solved = privacy.Account.solve(accounted, epsilon, delta)
        text = json.dumps({"asked": asked, "guarantee": solved.guarantee.describe()}, indent=2)
        write_text(path, text + "\n")
    _wait_for_lead("account")
    if solved is not None and jax.process_count() == 1:
        return solved
    return privacy.Account.proved(accounted, Guarantee(**json.loads(path.read_text())["guarantee"]))


def _open_data(config: TrainConfig, folder: Path, say: Say) -> dict[str, TokenStore]:
    if config.data != "stdlib":
        return open_parts(config.data)
    corpus = folder / "corpus"
    if not corpus.is_dir() and jax.process_index() == 0:
        from mfopt.training.data.stdlib import build_stdlib

        say("building the embedded corpus")
        build_stdlib(corpus, show_progress=False)
    _wait_for_lead("corpus")
    return open_parts(corpus)


def _model(
    config: TrainConfig, parts: dict[str, TokenStore], folder: Path, mesh: Mesh, say: Say,
    progress: bool,
) -> Model:  # fmt: skip
    from mfopt.training.models.gpt2 import GPT2Config, LoRAConfig
    from mfopt.training.models.huggingface import gpt2_model, load_pretrained

    lora = LoRAConfig(config.lora_rank) if config.lora_rank else None
    loading: dict[str, Any] = {"compute_dtype": config.compute_dtype, "remat": config.remat}
    source = config.model
    if config.pretrain_steps:
        source = str(folder / "pretrained")
        if jax.process_index() == 0:
            _pretrain(config, parts, Path(source), loading, say, progress)
        _wait_for_lead("pretraining")
    if source:
        return load_pretrained(source, lora=lora, seed=config.model_seed, **loading)
    shape = _shape(config, parts["train"].vocab_size, loading)
    return gpt2_model(GPT2Config(**shape), lora=lora, seed=config.model_seed)


def _pretrain(
    config: TrainConfig, parts: dict[str, TokenStore], target: Path, loading: dict[str, Any],
    say: Say, progress: bool,
) -> None:  # fmt: skip
    """Make the pretrained model of these settings in ``target``, unless it is there."""
    if "public" not in parts:
        raise _check.reject(
            "pretrain_steps", config.pretrain_steps, "the data has no public part",
            "Build it with --public, or pretrain elsewhere and give --model.",
        )  # fmt: skip
    public, note = parts["public"], target / "pretraining.json"
    names = ("length", "width", "layers", "heads", "model_seed", "pretrain_steps",
             "pretrain_batch", "pretrain_rate", "compute_dtype")  # fmt: skip
    base = _plain_model(config, public.vocab_size, loading)
    wanted = {name: getattr(config, name) for name in names}
    wanted |= {"data": public.digest, "model": digest_of(base.params)}
    if note.is_file() and json.loads(note.read_text()) == wanted:
        say("using the pretrained model of these settings")
        return
    params = pretrain(
        base, public, steps=config.pretrain_steps, batch=config.pretrain_batch,
        length=config.length, learning_rate=config.pretrain_rate, seed=config.model_seed, say=say,
        progress=progress,
    )  # fmt: skip
    export_model(base, params, target, force=True)
    write_text(note, json.dumps(wanted, indent=2) + "\n")


def _plain_model(config: TrainConfig, vocab_size: int, loading: dict[str, Any]) -> Model:
    from mfopt.training.models.gpt2 import GPT2Config
    from mfopt.training.models.huggingface import gpt2_model, load_pretrained

    if config.model:
        return load_pretrained(config.model, seed=config.model_seed, **loading)
    return gpt2_model(GPT2Config(**_shape(config, vocab_size, loading)), seed=config.model_seed)


def _shape(config: TrainConfig, vocab_size: int, loading: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size, "n_positions": config.length, "n_embd": config.width,
        "n_layer": config.layers, "n_head": config.heads, **loading,
    }  # fmt: skip


def _secret(config: TrainConfig, folder: Path, resuming: bool) -> RunSecret:
    if config.seed >= 0:
        return RunSecret.pinned(config.seed)
    path = folder / "secret"
    if resuming and not path.is_file():
        raise _check.reject("output", str(folder), "holds a run without its secret")
    if jax.process_index() == 0 and not resuming:
        path.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(RunSecret.fresh().words().tobytes())
            stream.flush()
            os.fsync(stream.fileno())
    _wait_for_lead("secret")
    return RunSecret(path.read_bytes())


def _units(
    config: TrainConfig, train: TokenStore, model: Model, mesh: Mesh, secret: RunSecret, scheme: Any
) -> Units:
    losses = None
    if config.selection in PERPLEXITY_RULES:
        losses = _record_losses(config, train, model, mesh)
    shared: dict[str, Any] = {
        "length": config.length, "rule": config.selection, "seed": secret.seed("selection"),
        "losses": losses,
    }  # fmt: skip
    if config.algorithm in ("els", "group"):
        return RecordUnits(
            train, group_size=config.records_per_user,
            reserve=isinstance(scheme, FixedOrder | FixedBatch), **shared,
        )  # fmt: skip
    return UserUnits(train, records=config.records_per_user, **shared)


def _record_losses(config: TrainConfig, train: TokenStore, model: Model, mesh: Mesh) -> np.ndarray:
    evaluator, params, frozen = _placed(config, model, mesh)
    return evaluator.record_losses(params, frozen, train, np.arange(train.num_records))[0]


def _mechanism(
    config: TrainConfig, account: privacy.Account | None, scheme: Any, units: Units,
    secret: RunSecret, mesh: Mesh,
) -> Mechanism:  # fmt: skip
    # a user's G records fill a device by themselves, single records do so together
    each = 1 if units.records > 1 else 8
    sampler = Sampler(
        scheme, units.population, secret.seed("sampling"),
        microbatch=config.microbatch or each * meshes.data_parallel(mesh),
        batch_size=config.batch_size or None,
        truncation="double" if config.truncation == "double" else "charge",
    )  # fmt: skip
    normalizer = config.normalizer or sampler.expected_batch
    if account is None:
        return Mechanism(units, sampler, NoClipping(), None, normalizer)
    clipping = Clipping(config.clip_norm, config.per_layer, config.normalized)
    noise = NoiseStream(
        account.strategy, iterations=scheme.length, noise_multiplier=account.noise_multiplier,
        clip_norm=clipping.sensitivity * sampler.sensitivity_factor, digest=account.digest,
    )  # fmt: skip
    return Mechanism(units, sampler, clipping, noise, normalizer)


def _noise_key(secret: RunSecret) -> np.ndarray:
    return np.frombuffer(secret.derive("noise")[:8], dtype="<u4").astype(np.uint32)


def _placed(config: TrainConfig, model: Model, mesh: Mesh) -> tuple[Evaluator, Any, Any]:
    """An evaluator on the mesh, with the model's own parameters and frozen arrays there."""
    block = 32 * meshes.data_parallel(mesh)
    evaluator = Evaluator(
        model, config.length, block, lambda rows: meshes.place_rows(mesh, rows),
        lambda tree: meshes.gather(mesh, tree),
    )  # fmt: skip
    params = meshes.place(model.params, meshes.shardings(mesh, model.params, model.partition))
    frozen = meshes.place(
        model.frozen, meshes.shardings(mesh, model.frozen, model.frozen_partition)
    )
    return evaluator, params, frozen


def _evaluator(prepared: Prepared) -> Callable[[TrainState], dict[str, Evaluation]]:
    config = prepared.config
    evaluator, _, frozen = _placed(config, prepared.model, prepared.mesh)

    def evaluate(state: TrainState) -> dict[str, Evaluation]:
        return {
            part: evaluator(state.params, frozen, prepared.parts[part], config.evaluate_records)
            for part in HELD_OUT
            if part in prepared.parts
        }

    return evaluate


def _facts(prepared: Prepared, done: int) -> dict[str, Any]:
    return {
        "run": prepared.facts, "privacy": prepared.report(done),
        "settings": dataclasses.asdict(prepared.config),
    }  # fmt: skip


def _check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    other = [name for name in now if saved.get(name) != now[name]]
    if other:
        raise _check.reject(
            "resume", ", ".join(other), "differs from the run that wrote the checkpoint",
            "The same noise would meet other data: resume with what the run was started with "
            "(its config.toml), or start a new run.",
        )  # fmt: skip


def _write_report(prepared: Prepared, done: int) -> None:
    write_text(prepared.folder / "config.toml", prepared.config.to_toml())
    report = prepared.report(done)
    if report is not None:
        text = json.dumps(report, indent=2, sort_keys=True) + "\n"
        write_text(prepared.folder / "privacy-report.json", text)


def _wait_for_lead(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
