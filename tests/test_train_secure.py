"""Secure noise in the trainer: the stream's own releases, resumption, its price in a report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from test_train_run import data, settings_for  # noqa: F401 (fixtures)
from train_fixtures import bigram_model, synthetic_store
from train_oracles import verified

from mfopt import sampling
from mfopt.errors import UsageError
from mfopt.noise import NoiseStream
from mfopt.strategies import BLT, Identity
from mfopt.training import privacy, verification
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.clipping import Clipping
from mfopt.training.config import TrainConfig
from mfopt.training.execute import execute
from mfopt.training.loop import Execution, Trainer
from mfopt.training.prepare import prepare
from mfopt.training.secrets import RunSecret
from mfopt.training.units import UserUnits
from mfopt.training.wiring import Wiring

SCHEME = sampling.BallsInBins(bins=3, epochs=2)
STRATEGY = BLT([0.3, 0.2], [0.6, 0.99])
SECRET = RunSecret.pinned(3)


def trainer_of(secure=True):
    units = UserUnits(synthetic_store(num_users=12), records=2, length=8, seed=5)
    sampler = sampling.UnitSampler(SCHEME, units.population, 7)
    noise = NoiseStream(
        STRATEGY, iterations=6, noise_multiplier=0.7, clip_norm=0.4, sampling=SCHEME, secure=secure
    )
    execution = Execution(units, sampler, Clipping(0.4), noise, 5.0, microbatch=4)
    return Trainer(bigram_model(), execution, optax.adam(0.1), keep_release=True)


@pytest.mark.ci
def test_every_release_is_the_streams_own_and_a_resumed_run_the_same(tmp_path):
    trainer, other = trainer_of(), trainer_of(secure=False)
    state, key = trainer.init(SECRET.key("noise")), SECRET.key("noise")
    noise = trainer.execution.noise
    with jax.enable_x64(True):
        noise_state = noise.init(jax.ShapeDtypeStruct((2 * 32 * 8,), jnp.float32), key=key)
    ends, params = [], jax.tree.map(jnp.array, state.params)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for result in trainer.run(state):
            # sums of the same data: those that a trainer with other noise forms there
            total, tree_of = ravel_pytree(other.sum(params, result.batch, result.step).gradient)
            with jax.enable_x64(True):
                noised, noise_state = noise.release(total, noise_state)
            for mine, theirs in zip(
                jax.tree.leaves(result.release), jax.tree.leaves(tree_of(noised)), strict=True
            ):
                assert mine.dtype == jnp.float32
                np.testing.assert_allclose(mine, theirs / 5.0, rtol=1e-6, atol=1e-7)
            params = jax.tree.map(jnp.array, result.state.params)
            ends.append(params)
            if result.step == 2:
                kept = result.state
                assert {leaf.dtype for leaf in kept.noise.buffers} == {np.dtype(np.float64)}
                checkpoints.save(kept, SECRET, {})
        checkpoints.wait()
        restored = checkpoints.restore(trainer.init(key), SECRET)
        assert not restored.damaged
    *_, final = trainer.run(restored.state)
    jax.tree.map(np.testing.assert_array_equal, final.state.params, ends[-1])
    plain = next(other.run(other.init(key)))  # the control: other noise moves them elsewhere
    assert np.abs(plain.state.params["embed"] - ends[0]["embed"]).max() > 1e-3


@pytest.mark.ci
def test_a_report_states_the_price_and_none_without_it_holds(data, tmp_path):  # noqa: F811
    settings = settings_for(data, tmp_path / "run", noise="secure", seed=-1)
    done = execute(prepare(settings))
    facts = json.loads((tmp_path / "run" / "privacy-report.json").read_text())
    guarantee, details = facts["guarantee"], facts["guarantee"]["details"]
    assert done["privacy"]["guarantee"] == guarantee
    stream = NoiseStream(Identity(), iterations=6, noise_multiplier=1.0, clip_norm=1.0, secure=True)
    cost = stream.secure_cost(facts["parameters"])
    before_grid = details["epsilon_before_grid"], details["delta_before_grid"]
    assert (guarantee["epsilon"], guarantee["delta"]) == cost.total(*before_grid)
    assert facts["noise"]["epsilon"] == cost.epsilon > 0
    assert guarantee["epsilon"] > before_grid[0] <= 8.0 and guarantee["delta"] > before_grid[1]
    assert privacy.SECURE_NOT_COVERED in facts["not_covered"]
    assert "secure noise" in privacy.report_text(facts)
    lies = [
        {"guarantee": guarantee | {"epsilon": before_grid[0]}},
        {"guarantee": guarantee | {"delta": before_grid[1]}},
        {"noise": facts["noise"] | {"epsilon": 0.0}},
        {"parameters": facts["parameters"] // 2},
    ]
    verified(facts, lies)
    del facts["noise"]
    assert not verification.verify(facts).holds


def test_what_it_does_not_go_with_is_refused(data, tmp_path):  # noqa: F811
    with pytest.raises(UsageError, match="no effect on algorithm = 'none'"):
        settings_for(data, tmp_path, noise="secure", algorithm="none")
    with pytest.raises(UsageError, match="float, secure"):
        settings_for(data, tmp_path, noise="discrete")
    settings = settings_for(data, tmp_path, noise="secure")
    devices = jax.sharding.AbstractMesh((4, 1), ("data", "model"))
    wired = Wiring(settings, None, SECRET, devices)
    units = wired.units(synthetic_store())
    with pytest.raises(UsageError, match="one device, and there are 4"):
        wired.execution(units)
    settings = TrainConfig(factorization="f.npz")
    assert TrainConfig(factorization="f.npz", noise="secure").fixed != settings.fixed
