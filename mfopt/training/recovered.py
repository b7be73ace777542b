"""A run in the run's own model, on canaries or on its own data, its noise recovered and tested.

The sums that are taken away from the releases follow their definition (``docs/howto/audit.md``):
the gradient of one unit's mean loss, its norm in float64, no code of the trainer but the model's
loss. What a correct trainer never does is tested without chance.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from mfopt.factorization import Factorization
from mfopt.progress import Progress, Report, silent
from mfopt.sampling import UnitSampler
from mfopt.sampling.sampler import pad
from mfopt.training import executed, sizes
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.data.store import Rows
from mfopt.training.executed import Finding, certain
from mfopt.training.initial_model import initial_model
from mfopt.training.loop import Execution, Trainer, TrainState
from mfopt.training.models import Model, PyTree
from mfopt.training.prepare import Prepared
from mfopt.training.secrets import RunSecret
from mfopt.training.units import RecordUnits
from mfopt.training.wiring import Wiring

Alter = Callable[[Execution], Execution]
_STEPS = 256  # at most
_NUMBERS = 1 << 22  # of noise, of all steps together, that are tested
_UNITS, _FEWEST = 5.0, 9  # units in a step on average, and in the run at least
_VOCABULARY = 512  # at most, or where it is unknown
_CLOSELY = 3  # steps whose sums are compared before the noise is added
_LOUD, _QUIET = 100.0, 0.01  # times the loss; three of four records are loud
# distance of two sums from rounding, in bounds a unit
_ROUNDING = {"float32": 1e-3, "bfloat16": 5e-2}
# rounding of a release in float32: of the noised sum, the division and the product with it
_RELEASE_ROUNDING = 4 * 2.0**-24
_OTHERS = 2  # units beside an odd user in a step
_FEW_TOKENS = 8
_STAGE = "comparing steps of the run's own model with their definition"
_LATTICE = 1 << 14  # numbers of a step's noise that are compared with each other
# probability of the likeliest value of a float32 normal draw (3e-8), and of what is rounded to it
_LIKELIEST = 2.0**-22
_RATE = 1e-3  # of plain gradient descent: the optimizer is no part of the guarantee
# a published key, and the first draws of step 0 under it by another program: a library's ChaCha20,
# Threefry in whole numbers, the inverse of the normal law in float64
PUBLISHED_KEY = np.arange(8, dtype=np.uint32)
PUBLISHED_DRAWS = np.array([-0.51512955, 0.69065661, -0.88775771, 1.53007436])
_DRAW_ROUNDING = 1e-5


def _canary_users(
    account: Factorization, settings: TrainConfig, vocab_size: int, rng: np.random.Generator
) -> tuple[TokenStore, int]:
    """(users of random records, some of them in a step on average; how many of the first are odd).

    Odd users are what data can hold: too few records or too many, records that are short, empty,
    of one token, or with a gradient that is not finite (``_not_finite``). All but the last have
    gradients far above the clip norm, and their records are alike, so that gradients add up.
    """
    scheme = account.sampling
    records = settings.records_per_user
    length = settings.length
    tokens = vocab_size - len(_not_finite(vocab_size))
    # a statement about one record needs users with fewer than G
    most_records = records - 1 if settings.privacy_unit == "record" else records
    several = max(1, most_records)
    loud = rng.integers(0, tokens, 3 * length)
    loud[0] = 1
    counts = {0, 1, most_records - 1, most_records}
    if settings.privacy_unit == "user":
        counts |= {records + 1, 100 * records}
    odd = [
        *([loud[:length]] * count for count in sorted(counts) if count >= 0),
        [loud[:1]],
        [loud[: max(2, length // 2)]] * several,
        [loud] * several,
        [[], loud[:length]][:several],
        *([[x, *loud[1:length]], loud[:length]][:several] for x in _not_finite(vocab_size)),
    ]
    users_each = 1 if settings.by_user else records
    population = scheme.describe().get("population")  # of schemes that are for one number of units
    if population is not None:
        users = max(1, population // users_each)
    else:
        # where all take part too some are left out
        users = math.ceil(_UNITS * 1000 / scheme.expected_batch(1000) / users_each)
        users = max(_FEWEST, users, len(odd) + _OTHERS)
    odd = odd[: max(0, users - _OTHERS)]
    drawn = rng.integers(0, tokens, (users - len(odd), several, length))
    weighted = settings.weight_cap > 0  # by their records: users with fewer, too
    ordinary = [
        list(user[: rng.integers(1, most_records + 1) if weighted else None]) for user in drawn
    ]
    return TokenStore.from_records([*odd, *ordinary], vocab_size=vocab_size), len(odd)


def _not_finite(vocab_size: int) -> dict[int, float]:
    """First tokens of records, and what is no finite number, which their losses are times."""
    if vocab_size < _FEW_TOKENS:
        return {}
    return {vocab_size - 1: math.nan, vocab_size - 2: math.inf}


def findings(
    account: Factorization,
    settings: TrainConfig,
    secret: RunSecret,
    *,
    alter: Alter,
    model: Model | None,
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

    vocab_size = min(_VOCABULARY, model.vocab_size or _VOCABULARY)

    # gradients far above any bound, or far below, or not finite, by a record's first token
    def loss(params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        factor = jnp.where(tokens[0] % 4 > 0, _LOUD, _QUIET)
        for token, value in _not_finite(vocab_size).items():
            factor = jnp.where(mask[0] & (tokens[0] == token), value, factor)
        return factor * quiet(params, frozen, tokens, mask)

    model = dataclasses.replace(model, loss=loss)
    model.check_fits(vocab_size, settings.length)
    store, odd = _canary_users(
        account, settings, vocab_size, np.random.default_rng(secret.seed("records"))
    )
    mesh = meshes.make_mesh()
    # of several units where the run's are, and several of them in a step
    settings = dataclasses.replace(
        settings, microbatch=mesh.size * min(2, settings.microbatch // mesh.size)
    )
    wired = Wiring(settings, account, secret, mesh)
    execution = alter(wired.execution(wired.units(store)))
    sizes.RunCost(sizes.work(model, settings.length), execution, settings).require()
    trainer = Trainer(model, execution, optax.sgd(_RATE), mesh=mesh, keep_release=True)
    run = _Run(account, settings, store, odd, trainer, secret, progress)
    return run.findings(min(_STEPS, account.sampling.length))


def findings_of_run(
    prepared: Prepared, begin: TrainState, end: int, progress: Report = silent
) -> list[Finding]:
    """Findings of a run's first steps, and of those from a checkpoint on, on its own data.

    They are executed by its own trainer under its own secret, but for the optimizer, which is no
    part of the guarantee. All tests are made of the first steps; of the later ones, which begin
    with what the run has learned, those that leave nothing to chance.

    Args:
        prepared: the run, which has an account.
        begin, end: state of the checkpoint, and the step before which both parts end.
        progress: callback for every step.
    """
    assert prepared.account is not None
    trainer = Trainer(
        prepared.model,
        prepared.execution,
        optax.sgd(_RATE),
        mesh=prepared.mesh,
        keep_release=True,
    )
    run = _Run(
        prepared.account,
        prepared.config,
        prepared.parts["train"],
        _CLOSELY,
        trainer,
        prepared.secret,
        progress,
    )
    begin = dataclasses.replace(begin, optimizer=trainer.init().optimizer)  # and lay states out
    list(run.steps(begin, min(int(begin.step) + _CLOSELY, end)))
    tests = run.findings(min(_CLOSELY, end))
    assert len(tests) <= executed.OF_RUN
    return [dataclasses.replace(x, name=f"{x.name}, on the run's own data") for x in tests]


@dataclasses.dataclass
class _Run:
    """The definition beside a trainer, on the same users; the first ``odd`` come and go."""

    account: Factorization
    settings: TrainConfig
    store: TokenStore
    odd: int
    trainer: Trainer
    secret: RunSecret
    progress: Report

    def __post_init__(self) -> None:
        settings = self.settings
        population = self.trainer.execution.units.population
        scheme = self.account.sampling
        self.normalizer = settings.normalizer or scheme.expected_batch(population)
        self.drawn = UnitSampler(scheme, population, self.secret.seed("sampling"))
        self.bound = 1.0 if settings.normalized else settings.clip_norm
        self.sigma = self.account.noise_multiplier * self.bound
        model = self.trainer.model
        self.holds: dict[str, bool] = defaultdict(lambda: True)

        def mean(params: PyTree, tokens: jax.Array, mask: jax.Array, frozen: PyTree) -> jax.Array:
            losses = jax.vmap(model.loss, (None, None, 0, 0))(params, frozen, tokens, mask)
            is_there = jnp.any(mask, axis=-1)
            return jnp.sum(jnp.where(is_there, losses.astype(jnp.float32), 0)) / jnp.sum(is_there)

        # an argument: as a constant it would be compiled into the program
        self._gradient = functools.partial(jax.jit(jax.grad(mean)), frozen=model.frozen)
        counts = [leaf.size for leaf in jax.tree.leaves(model.params)]
        share = max(1, _NUMBERS // min(_STEPS, scheme.length) // len(counts))
        rng = np.random.default_rng(0)
        tested = [np.sort(rng.choice(count, min(count, share), replace=False)) for count in counts]
        begins = np.cumsum([0, *counts[:-1]])
        self.tested = np.concatenate([a + b for a, b in zip(tested, begins, strict=True)])
        ends = np.cumsum([0, *map(len, tested)]).tolist()
        self.arrays = [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def findings(self, n: int) -> list[Finding]:
        """Findings of ``n`` steps."""
        # the first steps of C, which is lower triangular
        first = np.eye(self.account.sampling.length, n)
        columns = np.asarray(self.account.strategy.multiply(first))[:n]
        lattice = self._published(columns[0, 0])
        self._pairs()
        by_step = self.steps(self.trainer.init(self.secret.key("noise")), n)
        noise, totals = (np.stack(part) / self.sigma for part in zip(*by_step, strict=True))
        second_release = self._released(self.drawn[0], self.secret.twin().key("noise"))[self.tested]
        other_noise = self.normalizer * second_release / self.sigma - totals[0]
        white = columns @ noise
        signal = columns @ totals
        return [
            *(certain(name, holds_now) for name, holds_now in self.holds.items()),
            lattice,
            executed.compare_signal(white, signal, self.arrays),
            *executed.compare_noise(white, self.arrays, columns[0, 0] * other_noise),
        ]

    def steps(self, state: TrainState, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(noise, sum of the contributions) of each step before ``stop``, where they are tested."""
        trainer = self.trainer
        closely = int(state.step) + _CLOSELY
        params = jax.tree.map(jnp.copy, state.params)  # the loop reuses its buffers
        for result in trainer.run(state, stop):
            batch = result.batch
            units = batch[batch >= 0]
            drawn = self.drawn[result.step]
            self.holds["units that were drawn, each once"] &= np.array_equal(np.sort(units), drawn)
            total = self._total(params, drawn, result.step)
            if result.step < closely:
                summed = _flat(trainer.sum(params, batch, result.step).gradient)
                rounding = _ROUNDING[self.settings.compute_dtype] * max(1, len(drawn))
                self.holds["sums of clipped gradients"] &= (
                    _norm(summed - total) <= rounding * self.bound
                )
                for unit in drawn[:_CLOSELY, None]:
                    single = pad(unit, batch.shape[1], fill=-1)
                    contribution = trainer.sum(params, single, result.step).gradient
                    norm = _norm(_flat(contribution))
                    self.holds["contributions within the bound"] &= norm <= self.bound
            release = _flat(result.release)
            former = _flat(params)
            params = jax.tree.map(jnp.copy, result.state.params)
            difference = _flat(params) - (former - _RATE * release)
            size = _norm(former) + _RATE * _norm(release)
            self.holds["parameters move by the release alone"] &= _norm(difference) <= 1e-6 * size
            self.progress(Progress(_STAGE, result.step + 1, stop, "steps"))
            signal = total[self.tested]
            yield self.normalizer * release[self.tested] - signal, signal

    def _pairs(self) -> None:
        """Check what each odd user changes in a whole release: others, noise and batch as before.

        It must be that user's contribution by the definition, divided by the normalizer, and no
        longer than the sensitivity.
        """
        settings = self.settings
        fixed_units = np.arange(self.trainer.execution.units.population)[-_OTHERS:]
        params = self.trainer.init(self.secret.key("noise")).params
        released_before = self._released(fixed_units)
        sum_before = self._total(params, fixed_units, 0)
        for user in range(self.odd):
            numbers = np.setdiff1d(self._numbers_of(user), fixed_units)
            if settings.privacy_unit == "record":
                numbers = numbers[:1]
            self.holds["units of a user, at most as accounted"] &= (
                len(numbers) <= settings.group_size
            )
            union = np.union1d(numbers, fixed_units)
            released_after = self._released(union)
            change = self.normalizer * (released_after - released_before)
            difference = change - (self._total(params, union, 0) - sum_before)
            # a release is float32: with noise in it more is rounded away than of a sum
            rounded = _RELEASE_ROUNDING * self.normalizer * _norm(released_after)
            rounding = _ROUNDING[settings.compute_dtype] * len(union) * self.bound
            self.holds["change of a release by one user"] &= _norm(difference) <= rounding + rounded
            self.holds["largest change of a release"] &= (
                _norm(change) <= self.bound * settings.group_size + rounded
            )
            self.progress(Progress("taking users in and out", user + 1, self.odd, "users"))

    def _published(self, scale: float) -> Finding:
        """Test the noise of a step without any unit under a published key.

        Its first draws must be the published ones, and it takes as many values as float32 has: a
        draw repeats one of m earlier ones with probability at most m times that of its most likely
        value; rounded to fewer bits, or to a coarse grid, it does much more often.

        ``scale``: entry of C in its first row.
        """
        noise = self._released(np.empty(0, np.int64), PUBLISHED_KEY)
        if self.settings.noise != "secure":  # which has another generator
            drawn = noise[: len(PUBLISHED_DRAWS)]
            away = self.normalizer * scale / self.sigma * drawn - PUBLISHED_DRAWS[: len(drawn)]
            self.holds["draws under a published key"] &= bool(np.all(np.abs(away) < _DRAW_ROUNDING))
        values = noise[self.tested][:_LATTICE]
        repeated = len(values) - len(np.unique(values))
        chance = stats.binom.sf(repeated - 1, len(values), len(values) * _LIKELIEST)
        return Finding("noise on a lattice", executed.capped(chance))

    def _released(self, units: np.ndarray, key: np.ndarray | None = None) -> np.ndarray:
        """The release of step 0, if these were the units that the scheme chose.

        ``key``: of the noise; None: that of the run.
        """
        trainer = copy.copy(self.trainer)
        sampler = copy.copy(self.trainer.execution.sampler)
        sampler._draw = {0: units}.__getitem__
        trainer.execution = dataclasses.replace(trainer.execution, sampler=sampler)
        key = self.secret.key("noise") if key is None else key
        return _flat(next(trainer.run(trainer.init(key), 1)).release)

    def _numbers_of(self, user: int) -> np.ndarray:
        """The numbers of a user's units."""
        units = self.trainer.execution.units
        if not isinstance(units, RecordUnits):
            return np.array([user])
        return np.flatnonzero(np.isin(units.selected, self.store.records_of(user)))

    def _rows(self, unit: int, step: int) -> Rows:
        """Tokens (G, L) and mask of a unit in a step: which records, in which order, is drawn."""
        units = self.trainer.execution.units
        most_records = self.settings.records_per_user
        if isinstance(units, RecordUnits):
            records = units.selected[[unit]]
            most_records = 1
        else:
            records = np.asarray(self.store.records_of(unit))
        tokens, mask = self.store.batch(records, self.settings.length)
        read, read_mask = (part[0] for part in units.fetch(np.array([unit]), step))
        texts = _texts(tokens, mask)
        texts_read = _texts(read, read_mask)
        expected = min(len(records), most_records)
        empty = len(records) - texts.total()
        its_own = texts_read <= texts
        its_own &= max(0, expected - empty) <= texts_read.total() <= expected
        self.holds["records of a unit, at most as accounted"] &= its_own
        return (read, read_mask) if its_own else (tokens[:most_records], mask[:most_records])

    def _total(self, params: PyTree, units: np.ndarray, step: int) -> np.ndarray:
        """Sum of the clipped gradients or updates of ``units``, float64, by the definition."""
        settings = self.settings
        total = np.zeros_like(_flat(params))
        for unit in units.tolist():
            rows = self._rows(unit, step)
            count = int(rows[1].any(axis=-1).sum())
            if not count:
                continue
            if settings.algorithm == "fedavg":
                contribution = self._moved(params, *rows)
            else:
                contribution = self._clipped(_flat(self._gradient(params, *rows)))
            weight = min(1.0, count / (settings.weight_cap or 1))
            total += weight * self.bound / settings.clip_norm * contribution
        return total

    def _clipped(self, vector: np.ndarray) -> np.ndarray:
        """``vector`` within the clip norm; zeros if any of it is not finite."""
        if not math.isfinite(_norm(vector)):
            return np.zeros_like(vector)
        bound = self.settings.clip_norm
        return bound / max(bound, _norm(vector)) * vector

    def _moved(self, params: PyTree, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """-Δ of a user: local gradient descent, clipped after every step."""
        settings = self.settings
        _, tree_of = jax.flatten_util.ravel_pytree(params)
        begin = _flat(params)
        size = settings.local_batch or len(tokens)
        moved = np.zeros_like(begin)
        for start in [*range(0, len(tokens), size)] * settings.local_epochs:
            if not mask[start : start + size].any():
                continue
            position = tree_of(jnp.float32(begin - moved))
            rows = tokens[start : start + size], mask[start : start + size]
            slope = _flat(self._gradient(position, *rows))
            moved = self._clipped(moved + settings.local_rate * slope)
        return moved


def _texts(tokens: np.ndarray, mask: np.ndarray) -> Counter[bytes]:
    """How often each text occurs in rows, but for empty ones."""
    rows = zip(tokens, mask, strict=True)
    return Counter(row[is_there].tobytes() for row, is_there in rows if is_there.any())


def _flat(tree: PyTree) -> np.ndarray:
    """All numbers of a pytree, one array after the other, float64."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def _norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))
