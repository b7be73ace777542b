"""A run of the audit in the run's own model, its noise recovered and tested.

The sums that are taken away from the releases follow their definition (``docs/howto/audit.md``):
the gradient of one unit's mean loss, its norm in float64, no code of the trainer but the model's
loss. What a correct trainer never does is tested without chance.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mfopt._runtime import _sizes
from mfopt.factorization import Factorization
from mfopt.progress import Progress, Report, silent
from mfopt.sampling import UnitSampler
from mfopt.training import executed, sizes
from mfopt.training import mesh as meshes
from mfopt.training.batching import Batch
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.executed import Finding, certain
from mfopt.training.initial_model import initial_model
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model, PyTree
from mfopt.training.secrets import RunSecret
from mfopt.training.wiring import Wiring

Alter = Callable[[Execution], Execution]
_STEPS = 256  # at most
_NUMBERS = 1 << 22  # of noise, of all steps together, that are tested
_UNITS, _MOST = 5.0, 8  # in a step, on average and at most
_VOCABULARY = 512  # at most, or where it is unknown
_CLOSELY = 3  # steps whose sums are compared before the noise is added
_LOUD, _QUIET = 100.0, 0.01  # times the loss; three of four records are loud
# distance of two sums from rounding, in bounds a unit
_ROUNDING = {"float32": 1e-3, "bfloat16": 5e-2}
_RATE = 1e-3  # of plain gradient descent: the optimizer is no part of the guarantee


def _canary_users(
    account: Factorization, settings: TrainConfig, vocab_size: int, rng: np.random.Generator
) -> TokenStore:
    """Users of as many random records as a user may have, some of them in a step on average."""
    scheme, records = account.sampling, settings.records_per_user
    each = 1 if settings.by_user else records
    weighted = settings.weight_cap > 0  # by their records: users with fewer, too
    fixed = getattr(scheme, "population", None)  # of schemes that are for one number of units
    if fixed is not None:
        users = max(1, int(fixed) // each)
    else:
        # where all take part too some are left out
        users = max(_MOST + 1, math.ceil(_UNITS * 1000 / scheme.expected_batch(1000) / each))
    tokens = rng.integers(0, vocab_size, (users, records, settings.length))
    return TokenStore.from_records(
        [list(user[: rng.integers(1, records + 1) if weighted else None]) for user in tokens],
        vocab_size=vocab_size,
    )


def findings(
    account: Factorization,
    settings: TrainConfig,
    secret: RunSecret,
    *,
    alter: Alter = lambda execution: execution,
    model: Model | None = None,
    progress: Report = silent,
) -> list[Finding]:
    """Findings of all tests of a run in the run's own model.

    Args:
        account, settings, alter, model: as for :func:`mfopt.training.audit.audit`.
        secret, progress: of the audit, and callback for every step.
    """
    if model is None:  # the run's before any pretraining: nothing is pretrained here
        fresh = dataclasses.replace(settings, pretrain_steps=0)
        store = TokenStore.from_records([[[0, 0]]], vocab_size=_VOCABULARY)
        model = initial_model(fresh, {"train": store}, silent)
    quiet = model.loss

    # gradients far above any bound, or far below, by a record's first token
    def loss(params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(tokens[0] % 4 > 0, _LOUD, _QUIET) * quiet(params, frozen, tokens, mask)

    model = dataclasses.replace(model, loss=loss)
    known = min(_VOCABULARY, model.vocab_size or _VOCABULARY)
    model.check_fits(known, settings.length)
    store = _canary_users(account, settings, known, np.random.default_rng(secret.seed("records")))
    mesh = meshes.make_mesh(math.gcd(settings.model_parallel, len(meshes.devices())))
    devices, cut = meshes.data_parallel(mesh), settings.batch_size
    if cut and account.sampling.independent:  # to batches of few units too
        cut = _MOST
    settings = dataclasses.replace(
        settings,
        # of several units where the run's are, and several of them in a step
        microbatch=devices * min(2, settings.microbatch // devices),
        batch_size=cut,
    )
    wired = Wiring(settings, account, secret, mesh)
    execution = alter(wired.execution(wired.units(store, "random")))
    own = sizes.RunCost(sizes.work(model, settings.length), execution, settings)
    own.require()
    n = min(_STEPS, account.sampling.length)
    _sizes.announce(2 * own.seconds(n), progress, of=f"{n} steps in the run's own model")
    trainer = Trainer(model, execution, optax.sgd(_RATE), mesh=mesh, keep_release=True)
    return _Run(account, settings, store, trainer, secret).findings(n, progress)


@dataclasses.dataclass
class _Run:
    """The definition beside a trainer, on the same canary users."""

    account: Factorization
    settings: TrainConfig
    store: TokenStore
    trainer: Trainer
    secret: RunSecret

    def __post_init__(self) -> None:
        account, settings, trainer = self.account, self.settings, self.trainer
        population, scheme = trainer.execution.units.population, account.sampling
        self.normalizer = settings.normalizer or scheme.expected_batch(population)
        self.drawn = UnitSampler(scheme, population, self.secret.seed("sampling"))
        self.bound = 1.0 if settings.normalized else settings.clip_norm
        displaces = settings.batch_size and not scheme.public_order
        doubled = 2.0 if displaces and settings.truncation == "double" else 1.0
        doubled *= 2.0 if settings.estimator == "clipped" else 1.0
        self.sigma = doubled * account.noise_multiplier * self.bound
        model, groups = trainer.model, defaultdict(list)
        for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(model.params)):
            parent = path[: max(1, len(path) - 1)] if settings.per_layer else ()
            groups[jax.tree_util.keystr(parent)].append(i)
        self.layers = list(groups.values())

        def mean(params: PyTree, tokens: jax.Array, mask: jax.Array) -> jax.Array:
            losses = jax.vmap(model.loss, (None, None, 0, 0))(params, model.frozen, tokens, mask)
            return jnp.mean(losses.astype(jnp.float32))

        self._gradient = jax.jit(jax.grad(mean))
        counts = [leaf.size for leaf in jax.tree.leaves(model.params)]
        share = max(1, _NUMBERS // min(_STEPS, scheme.length) // len(counts))
        rng = np.random.default_rng(0)
        self.tested = [
            np.sort(rng.choice(count, min(count, share), replace=False)) for count in counts
        ]
        ends = np.cumsum([0, *map(len, self.tested)]).tolist()
        self.arrays = [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def findings(self, n: int, progress: Report) -> list[Finding]:
        """Findings of ``n`` steps."""
        holds: dict[str, bool] = defaultdict(lambda: True)
        found = []
        for step, each in enumerate(self._steps(n, holds)):
            found.append(each)
            progress(Progress("training the run's own model on canaries", step + 1, n, "steps"))
        noise, totals = (np.stack(part) / self.sigma for part in zip(*found, strict=True))
        again = next(self.trainer.run(self.trainer.init(self.secret.twin().key("noise")), 1))
        other = self.normalizer * self._at(_leaves(again.release)) / self.sigma - totals[0]
        # the first steps of C, which is lower triangular
        length = self.account.sampling.length
        first = np.asarray(self.account.strategy.multiply(np.eye(length, n)))[:n]
        white, signal = first @ noise, first @ totals
        return [
            *(certain(name, held) for name, held in holds.items()),
            executed.compare_signal(white, signal, self.arrays),
            *executed.compare_noise(white, self.arrays, first[0, 0] * other),
        ]

    def _steps(self, n: int, holds: dict[str, bool]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(the noise, the sum of the contributions) of each step, at the tested coordinates."""
        trainer = self.trainer
        state = trainer.init(self.secret.key("noise"))
        params = jax.tree.map(jnp.copy, state.params)  # the loop reuses its buffers
        for result in trainer.run(state, n):
            batch = result.batch
            units, drawn = batch.units[batch.units >= 0], self.drawn[result.step]
            most = min(len(drawn), self.settings.batch_size or len(drawn))
            holds["units that were drawn, each once"] &= bool(
                len(units) == len(np.unique(units)) == most and np.isin(units, drawn).all()
            )
            total = self._total(params, units if most < len(drawn) else drawn, result.step)
            if result.step < _CLOSELY:
                summed = _leaves(trainer.sum(params, batch, result.step).gradient)
                rounding = _ROUNDING[self.settings.compute_dtype] * max(1, most)
                apart = [a - b for a, b in zip(summed, total, strict=True)]
                holds["sums of clipped gradients"] &= _norm(apart) <= rounding * self.bound
                for unit in drawn[:_CLOSELY].tolist():
                    alone = np.full(batch.microbatch, -1)
                    alone[0] = unit
                    one = trainer.sum(params, Batch(alone, 1, 0, batch.microbatch), result.step)
                    within = _norm(_leaves(one.gradient)) <= self.bound
                    holds["contributions within the bound"] &= within
            release, after = _leaves(result.release), jax.tree.map(jnp.copy, result.state.params)
            apart = [
                b - (a - _RATE * move)
                for a, b, move in zip(_leaves(params), _leaves(after), release, strict=True)
            ]
            size = _norm(_leaves(params)) + _RATE * _norm(release)
            holds["parameters move by the release alone"] &= _norm(apart) <= 1e-6 * size
            signal = self._at(total)
            yield self.normalizer * self._at(release) - signal, signal
            params = after

    def _total(self, params: PyTree, units: np.ndarray, step: int) -> list[np.ndarray]:
        """Sum of the clipped gradients or updates of ``units``, float64, by the definition."""
        settings, weights = self.settings, 0.0
        total = [np.zeros(leaf.shape) for leaf in jax.tree.leaves(params)]
        selected = getattr(self.trainer.execution.units, "selected", None)
        for unit in units.tolist():
            records = self.store.records_of(unit) if selected is None else selected[[unit]]
            rows = self.store.batch(np.asarray(records), settings.length)
            if settings.algorithm == "fedavg":
                leaves = self._moved(params, self._ordered(rows[0], unit, step))
            else:
                leaves = self._clipped(_leaves(self._gradient(params, *rows)))
            weight = min(1.0, len(rows[0]) / (settings.weight_cap or 1))
            weights += weight
            for i, leaf in enumerate(leaves):
                total[i] += weight * self.bound / settings.clip_norm * leaf
        if settings.estimator == "clipped":
            total = [leaf * self.normalizer / max(self.normalizer, weights) for leaf in total]
        return total

    def _clipped(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        bound, clipped = self.settings.clip_norm / math.sqrt(len(self.layers)), [*leaves]
        for layer in self.layers:
            factor = bound / max(bound, _norm([leaves[i] for i in layer]))
            for i in layer:
                clipped[i] = factor * leaves[i]
        return clipped

    def _ordered(self, tokens: np.ndarray, unit: int, step: int) -> np.ndarray:
        """A user's records in the order of the step, which is drawn; as they are if others came."""
        fetched, mask = self.trainer.execution.units.fetch(np.array([unit]), step)
        came: np.ndarray = fetched[0][mask[0].any(axis=-1)]
        return came if sorted(came.tolist()) == sorted(tokens.tolist()) else tokens

    def _moved(self, params: PyTree, tokens: np.ndarray) -> list[np.ndarray]:
        """-Δ of a user: local gradient descent, clipped after every step."""
        settings, structure = self.settings, jax.tree.structure(params)
        begin, size = _leaves(params), settings.local_batch or len(tokens)
        moved = [np.zeros(leaf.shape) for leaf in begin]
        for at in [*range(0, len(tokens), size)] * settings.local_epochs:
            here = [np.float32(leaf - move) for leaf, move in zip(begin, moved, strict=True)]
            rows, mask = tokens[at : at + size], np.ones_like(tokens[at : at + size], bool)
            slope = _leaves(self._gradient(jax.tree.unflatten(structure, here), rows, mask))
            moved = [a + settings.local_rate * b for a, b in zip(moved, slope, strict=True)]
            moved = self._clipped(moved)
        return moved

    def _at(self, leaves: list[np.ndarray]) -> np.ndarray:
        """The tested coordinates of a tree's leaves, in one vector."""
        pairs = zip(leaves, self.tested, strict=True)
        return np.concatenate([leaf.reshape(-1)[at] for leaf, at in pairs])


def _leaves(tree: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def _norm(leaves: list[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(leaf**2)) for leaf in leaves))
