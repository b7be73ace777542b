"""Construction of a run's parts and account from its settings, for training and audit alike.

The audit must attack what trains: both are built here, from the same settings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jax.sharding import Mesh

from mfopt._runtime import _check
from mfopt.accounting.closed_form.group import one_unit_target
from mfopt.errors import FailureError
from mfopt.factorization import Factorization, proofs
from mfopt.factorization import load as load_factorization
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.progress import Report
from mfopt.sampling import Scheme, UnitSampler
from mfopt.strategies import Identity, Strategy
from mfopt.training import mesh as meshes
from mfopt.training import privacy
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.fedavg import FedAvg
from mfopt.training.folder import ACCOUNT
from mfopt.training.loop import Execution
from mfopt.training.secrets import RunSecret
from mfopt.training.units import RecordUnits, Units, UserUnits


def account_of(
    config: TrainConfig, folder: Path, progress: Report, *, resuming: bool = False
) -> Factorization | None:
    """The account that the run has to execute: of the file, or solved for (ε, δ).

    None for the non-private baseline. What is solved for is kept in ``folder``, for resumption.

    Args:
        config, folder, progress: settings and folder of the run, and callback for proofs.
        resuming: a run in the folder resumes, with the account that is kept there.

    Raises:
        UsageError: what is kept there is not for these settings.
        FailureError: what is kept there, or in a factorization file, is damaged or could not be
            proved.
    """
    if config.algorithm == "none":
        return None
    if config.optimizes:
        rule = "is optimized by `mfopt train`, before this"
        way_out = "Give the file of `mfopt optimize` as `factorization`."
        raise _check.reject("strategy", config.strategy, rule, way_out)
    if config.factorization:
        optimized = load_factorization(config.factorization)
        if not config.epsilon:
            return _proved(optimized, progress, "Run `mfopt calibrate` for a σ that it can prove.")
        # the file's C at a target of the run's own: for groups, which the file is not made for
        strategy: Strategy = optimized.strategy
        sampled = optimized.sampling
    else:
        strategy = Identity()
        sampled = config.scheme()
    target = config.epsilon, config.delta
    group = config.group_size
    if config.algorithm == "group":
        target = one_unit_target(*target, group)
        group = 1
    accounted = Mechanism(
        sampled,
        strategy,
        group_size=group,
        privacy_unit="user" if config.by_user else "record",
        adjacency=sampled.run_adjacency,
    )
    path = folder / ACCOUNT
    solved = None
    if not (resuming and path.is_file()) and meshes.is_lead():
        solved = privacy.solved(accounted, *target)
        solved.save(path, force=True)  # which reads it again
        proofs.note(solved)
    meshes.wait_for_lead("account")
    try:
        account = solved or load_factorization(path)
    except FailureError as problem:
        reason = str(problem).partition(". `mfopt optimize`")[0]  # which makes no account
        raise FailureError(
            f"{reason}. Put a copy of it there, or begin a new run in another folder."
        ) from None
    stated = account.guarantee
    way_out = "Resume with what the run was started with (its config.toml), or start a new run."
    in_target = stated.epsilon <= target[0] and stated.delta <= target[1]
    if not (account.mechanism == accounted and in_target):
        rule = f"differs from the run, whose account ({path}) is {stated}"
        raise _check.reject("resume", "epsilon, delta, sampling or unit", rule, way_out)
    # a kept one anybody may have written
    return _proved(account, None if solved else progress, way_out, f"{path} could not be proved: ")


def _proved(
    account: Factorization, progress: Report | None, way_out: str, subject: str = ""
) -> Factorization:
    """``account`` as proved on this machine; without ``progress`` it is proved already."""
    if progress is not None and meshes.is_lead():  # it alone writes the report
        try:
            proved = proofs.ensure(account, progress=progress)
            account = dataclasses.replace(account, guarantee=proved)
        except FailureError as problem:
            raise FailureError(f"{subject}{problem} {way_out}") from None
    meshes.wait_for_lead("proof")
    return account


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Parts of a run, from its settings; without an account, of the non-private baseline."""

    config: TrainConfig
    account: Factorization | None
    secret: RunSecret
    mesh: Mesh

    @property
    def scheme(self) -> Scheme:
        """The sampling: that of the account, or of the settings."""
        return self.account.sampling if self.account else self.config.scheme()

    def units(self, train: TokenStore) -> Units:
        """The units that the run samples, records chosen as :func:`mfopt.training.units.select`."""
        config = self.config
        count = config.records_per_user
        shared = {"length": config.length, "seed": self.secret.seed("selection")}
        if config.algorithm in ("els", "group"):
            reserve = not self.scheme.independent
            return RecordUnits(train, group_size=count, reserve=reserve, **shared)
        return UserUnits(train, records=count, **shared)

    def execution(self, units: Units) -> Execution:
        """Sampler, clipping and noise of the run, for these units."""
        config = self.config
        scheme = self.scheme
        meshes.check_microbatch(self.mesh, config.microbatch)
        # on a CPU one unit's gradient at a time: no slower, and no memory for several
        usual = 1 if meshes.on_cpu() else max(1, 64 // units.records)
        microbatch = config.microbatch or usual * self.mesh.size
        sampler = UnitSampler(scheme, units.population, self.secret.seed("sampling"))
        normalizer = config.normalizer or sampler.expected_batch
        if config.noise == "secure" and self.mesh.size > 1:
            rule = f"is for one device, and there are {self.mesh.size}"
            raise _check.reject("noise", "secure", rule, "Use noise = 'float', or one device.")
        if self.account is None:
            return Execution(units, sampler, NoClipping(), None, normalizer, microbatch)
        kind = FedAvg if config.algorithm == "fedavg" else Clipping
        fields = [field.name for field in dataclasses.fields(kind)]
        clipping = kind(**{name: getattr(config, name) for name in fields})
        noise = NoiseStream(
            self.account.strategy,
            iterations=scheme.length,
            noise_multiplier=self.account.noise_multiplier,
            clip_norm=clipping.sensitivity,
            sampling=scheme,
            secure=config.noise == "secure",
        )
        return Execution(units, sampler, clipping, noise, normalizer, microbatch)

    def statement(self, execution: Execution) -> Guarantee | None:
        """The statement about a run of ``execution``; None for the non-private baseline."""
        if self.account is None:
            return None
        config = self.config
        return privacy.statement(
            self.account,
            execution,
            privacy_unit=config.privacy_unit,
            black_box=config.algorithm == "group",
        )
