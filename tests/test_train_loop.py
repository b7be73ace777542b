"""The loop against slow, obvious implementations; sensitivity measured directly; resuming."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from selection import before_release
from train_fixtures import bigram_model, synthetic_store
from train_oracles import dp_sgd, norm_of, plus

from mfopt import sampling
from mfopt.errors import UsageError
from mfopt.noise import NoiseStream
from mfopt.sampling.sampler import pad
from mfopt.strategies import BLT
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.optimizers import make_optimizer, schedule
from mfopt.training.units import RecordUnits, UserUnits, select

LENGTH, USERS, STEPS = 12, 16, 6
STRATEGY = BLT([0.3, 0.2], [0.6, 0.99])
KEY = np.arange(123, 131, dtype=np.uint32)
SCHEME = sampling.BallsInBins(bins=3, epochs=2)


def store_and_model():
    return synthetic_store(num_users=USERS, empty_users=(3,)), bigram_model()


def users_and_model():
    store, model = store_and_model()
    return UserUnits(store, records=2, length=LENGTH, seed=5), model


def stream(clip_norm, strategy=STRATEGY, iterations=STEPS):
    return NoiseStream(strategy, iterations=iterations, noise_multiplier=0.7, clip_norm=clip_norm)


def noise_rows(params, clip_norm):
    """The noise of all steps, from the same key, streamed by itself."""
    vector, unravel = ravel_pytree(params)
    noise = stream(clip_norm)
    state, rows = noise.init(vector, key=KEY), []
    for _ in range(STEPS):
        row, state = noise.next(state)
        rows.append(unravel(row))
    return rows


def execution_for(units, *, noise=True, clipping=None, microbatch=4, **options):
    clipping = (clipping or Clipping(0.4)) if noise else NoClipping()
    sampler = sampling.UnitSampler(SCHEME, units.population, 7, **options)
    bound = clipping.sensitivity
    noise = stream(bound) if noise else None
    return Execution(units, sampler, clipping, noise, 5.0, microbatch)


def run(model, execution, optimizer=None, **options):
    trainer = Trainer(model, execution, optimizer or optax.sgd(0.3), **options)
    return list(trainer.run(trainer.init(KEY if execution.noise else None)))


def assert_close(mine, slow):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


SLOW = {"length": LENGTH, "normalizer": 5.0, "rate": 0.3}


@pytest.mark.ci
@pytest.mark.parametrize("noise", [True, False])
def test_user_level_sampling_against_algorithm_2(noise):
    units, model = users_and_model()
    final = run(model, execution_for(units, noise=noise))[-1]
    batches = []
    for step in range(STEPS):
        chosen = select(units.store, SCHEME.sample(step, USERS, 7), 2, key=(5, step))
        batches.append([[r for r in row if r >= 0] for row in chosen])
    rows = noise_rows(model.params, 0.4) if noise else None
    slow = dp_sgd(model, units.store, batches, noise=rows, clip_norm=0.4 if noise else None, **SLOW)
    assert_close(final.state.params, slow)
    assert int(final.state.step) == STEPS


@pytest.mark.ci
def test_example_level_sampling_against_algorithm_1():
    store, model = store_and_model()
    units = RecordUnits(store, group_size=2, length=LENGTH, seed=5)
    final = run(model, execution_for(units))[-1]
    batches = [
        [[record] for record in units.selected[SCHEME.sample(step, units.population, 7)]]
        for step in range(STEPS)
    ]
    slow = dp_sgd(model, store, batches, noise=noise_rows(model.params, 0.4), clip_norm=0.4, **SLOW)
    assert_close(final.state.params, slow)


@pytest.mark.release
def test_normalized_clipping_is_a_learning_rate_over_the_clip_norm():
    units, model = users_and_model()
    normalized = execution_for(units, clipping=Clipping(0.4, normalized=True))
    a = run(model, execution_for(units), optax.sgd(0.3))[-1].state.params
    b = run(model, normalized, optax.sgd(0.3 * 0.4))[-1].state.params
    assert_close(a, b)


@pytest.mark.ci
@pytest.mark.parametrize("name", before_release(["sgd", "momentum", "adam"], 2))
def test_optimizers_act_on_the_noised_mean(name):
    units, model = users_and_model()
    rate = schedule("cosine", 0.05, STEPS)
    optimizer = make_optimizer(TrainConfig("file.npz", optimizer=name), rate)
    results = run(model, execution_for(units), optimizer, keep_release=True)
    params, state = model.params, optimizer.init(model.params)
    for result in results:
        update, state = optimizer.update(result.release, state, params)
        params = optax.apply_updates(params, update)
    assert_close(results[-1].state.params, params)


@pytest.mark.ci
def test_accumulation_changes_neither_noise_nor_sum():
    units, model = users_and_model()
    result = run(model, execution_for(units, microbatch=2), keep_release=True)
    large = run(model, execution_for(units, microbatch=16), keep_release=True)
    for a, b in zip(result, large, strict=True):
        assert_close(a.release, b.release)


# --- sensitivity --------------------------------------------------------------------------------

CLIP = 0.5


def weighted_model():
    """loss = Σ scale(token) θ[token // 2]: a record's tokens choose its gradient, at any length.

    Token 0 has gradient 0; 2 and 3 are opposite, so are 4 and 5, and long; 6 and 7 overflow.
    """
    scales = jnp.array([0.0, 1e-3, 1.0, -1.0, 1e4, -1e4, 1e30, jnp.nan])[:, None]

    def loss(params, tokens, mask):
        rows = jnp.take(params["rows"], tokens // 2, axis=0) * jnp.take(scales, tokens, axis=0)
        return jnp.sum(jnp.where(mask[:, None], rows, 0.0))

    return Model.of({"rows": jnp.ones((4, 5))}, loss)


@functools.cache
def compiled_trainer():
    """One compiled trainer for all sensitivity tests: only its units and sampler are exchanged."""
    model = weighted_model()
    units = UserUnits(replaced(USER_DATA, 0, []), records=1, length=6)
    sampler = sampling.UnitSampler(SCHEME, units.population, 0)
    execution = Execution(units, sampler, Clipping(CLIP), stream(CLIP), 1.0, microbatch=3)
    return Trainer(model, execution, optax.sgd(1.0))


def sums_of(units, sampler):
    """The clipped sum of every step before noise, at the initial parameters."""
    trainer = compiled_trainer()
    trainer.execution = dataclasses.replace(
        trainer.execution,
        units=units,
        sampler=sampler,
        noise=stream(CLIP, iterations=sampler.scheme.length),
    )
    sums = []
    for step in range(sampler.scheme.length):
        batch = pad(sampler[step], 3, fill=-1)
        totals = trainer.sum(trainer.model.params, batch, step)
        sums.append(jax.tree.map(np.asarray, totals.gradient))
    return sums


def replaced(users, user, records):
    users = [list(u) for u in users]
    users[user] = records
    return TokenStore.from_records(users, vocab_size=8)


ADVERSARIAL = [[4, 4, 4], [4], [6, 6], [7, 2, 2], [5] * 20]
USER_DATA = [[[1, 2, 3], [2]], [], [[1]], [[3, 3], [2, 1], [2]], [[2, 5]], [[3], [3]], [[1, 1, 2]]]

MODES = {
    "uls padded": (UserUnits, {"records": 2}),
    "els": (RecordUnits, {"group_size": 1}),
    "els reserved": (RecordUnits, {"group_size": 1, "reserve": True}),
}
SPECS = [sampling.BallsInBins(2, 2), sampling.Poisson(0.7, 4), sampling.FixedOrder(2, 2)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SPECS, ids=lambda s: s.kind)
def test_one_users_data_moves_each_sum_by_at_most_the_clip_norm(mode, scheme):
    make, unit_options = MODES[mode]
    for user in (0, 1):
        sums = []
        # no data (a record of gradient 0 for record units, whose numbers follow the records),
        # against five sorts of adversarial data
        nothing = [] if make is UserUnits or "reserved" in mode else [[0]]
        for records in [nothing, *([record] for record in ADVERSARIAL), ADVERSARIAL]:
            store = replaced(USER_DATA, user, records)
            units = make(store, length=6, seed=3, **unit_options)
            sampler = sampling.UnitSampler(scheme, units.population, 5)
            sums.append(sums_of(units, sampler))
        took_part = 0
        for step in range(scheme.length):
            for other in sums[1:]:
                moved = norm_of(plus(sums[0][step], other[step], -1.0))
                assert moved <= CLIP + 1e-5
                took_part += moved > 0.9 * CLIP
            # replacement: twice
            for a in sums[1:]:
                for b in sums[1:]:
                    assert norm_of(plus(a[step], b[step], -1.0)) <= 2 * CLIP + 1e-5
        assert took_part > 0


def test_the_control_without_clipping_moves_further():
    model = weighted_model()
    units = [
        UserUnits(replaced(USER_DATA, 0, records), records=2, length=6, seed=3)
        for records in ([], [[4, 4]])
    ]
    scheme = sampling.BallsInBins(2, 2)
    sums = []
    for unit in units:
        sampler = sampling.UnitSampler(scheme, unit.population, 5)
        execution = Execution(unit, sampler, NoClipping(), None, 1.0)
        sums.append(run(model, execution, optax.set_to_zero(), keep_release=True))
    moved = [norm_of(plus(a.release, b.release, -1.0)) for a, b in zip(*sums, strict=True)]
    assert max(moved) > 1000 * CLIP


# --- operation ----------------------------------------------------------------------------------


def test_a_run_past_n_is_refused():
    units, model = users_and_model()
    trainer = Trainer(model, execution_for(units), optax.sgd(0.1))
    with pytest.raises(UsageError, match="covers 6 iterations"):
        next(trainer.run(trainer.init(), stop=7))


def test_executions_that_do_not_fit_are_refused():
    units, _ = users_and_model()
    for changes, match in (
        ({"sampler": sampling.UnitSampler(SCHEME, USERS - 1, 7)}, "16 units"),
        ({"noise": None}, "protects nothing"),
        ({"clipping": NoClipping()}, "protects nothing"),
        ({"normalizer": 0.0}, "normalizer"),
        ({"microbatch": 0}, "microbatch"),
        # noise for another clip norm, for another number of steps
        ({"clipping": Clipping(0.5)}, r"noise\.clip_norm"),
        ({"sampler": sampling.UnitSampler(SPECS[0], USERS, 7)}, r"noise\.iterations"),
    ):
        with pytest.raises(UsageError, match=match):
            dataclasses.replace(execution_for(units), **changes)
