"""``add_noise`` inside what people build optimizers from: each adds the stream's noise, once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mfopt.errors import UsageError
from mfopt.noise import NoiseStream, from_factorization
from mfopt.noise.for_optax import add_noise
from mfopt.strategies import BLT

N, SCALE = 6, 0.25
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(4)}


def make():
    strategy = BLT([0.3, 0.1], [0.5, 0.9])
    return NoiseStream(strategy, iterations=N, noise_multiplier=2.0, clip_norm=0.5)


def noises(params, seed, steps=N):
    """The noise of each step, straight from the stream."""
    stream, collected = make(), []
    state = stream.init(params, seed=seed)
    for _ in range(steps):
        noise, state = stream.next(state)
        collected.append(noise)
    return collected


def close(actual, expected):
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, atol=2e-6), actual, expected)


@pytest.mark.ci
@pytest.mark.parametrize("jitted", [True, False])
def test_multi_steps_add_noise_once_to_the_sum_of_a_step(jitted):
    inner = optax.chain(add_noise(make(), seed=3), optax.scale(SCALE))
    # sums, not means: three microbatches are one step
    optimizer = optax.MultiSteps(inner, every_k_schedule=3, use_grad_mean=False)
    update = jax.jit(optimizer.update) if jitted else optimizer.update
    state, expected = optimizer.init(PARAMS), noises(PARAMS, 3, 2)
    for step in range(2):
        for part in range(3):
            gradient = jax.tree.map(
                lambda p, size=part + step: jnp.full(p.shape, 1.0 + size), PARAMS
            )
            changes, state = update(gradient, state, PARAMS)
            if part < 2:
                assert not any(np.any(leaf) for leaf in jax.tree.leaves(changes))
        total = sum(1.0 + part + step for part in range(3))
        close(changes, jax.tree.map(lambda z, t=total: SCALE * (t + z), expected[step]))


def test_masked_noise_is_for_the_trained_part_only():
    trained = {"w": True, "b": False}
    frozen = {"w": False, "b": True}
    optimizer = optax.chain(
        optax.masked(optax.chain(add_noise(make(), seed=3), optax.scale(SCALE)), trained),
        optax.masked(optax.set_to_zero(), frozen),  # what gets no noise is not released
    )
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for expected in noises({"w": PARAMS["w"]}, 3):
        changes, state = update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)
        close(changes["w"], SCALE * (1 + expected["w"]))
        assert not np.any(changes["b"])


def test_multi_transform_gives_each_part_noise_of_its_own():
    parts = {
        "fast": optax.chain(add_noise(make(), seed=3), optax.scale(1.0)),
        "slow": optax.chain(add_noise(make(), seed=4), optax.scale(0.1)),
    }
    optimizer = optax.multi_transform(parts, {"w": "fast", "b": "slow"})
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    fast, slow = noises({"w": PARAMS["w"]}, 3), noises({"b": PARAMS["b"]}, 4)
    for fast_leaf, two in zip(fast, slow, strict=True):
        changes, state = update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
        close(changes, {"w": fast_leaf["w"], "b": 0.1 * two["b"]})
    # without seeds the keys are new ones: equal shapes do not get equal noise
    unchanged = {"w": jnp.zeros(5), "b": jnp.zeros(5)}
    fresh = {name: add_noise(make()) for name in parts}
    optimizer = optax.multi_transform(fresh, {"w": "fast", "b": "slow"})
    changes, _ = optimizer.update(unchanged, optimizer.init(unchanged), unchanged)
    assert not np.any(changes["w"] == changes["b"])


@pytest.mark.parametrize("jitted", [True, False])
def test_nnx_optimizers_carry_the_noise(jitted):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    start = jax.tree.map(jnp.array, nnx.state(model, nnx.Param))
    steps = optax.chain(add_noise(make(), seed=3), optax.sgd(SCALE))
    optimizer = nnx.Optimizer(model, steps, wrt=nnx.Param)

    def step(model, optimizer):
        gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, gradients)

    run = nnx.jit(step) if jitted else step
    for _ in range(3):
        run(model, optimizer)
    total = jax.tree.map(lambda *z: sum(z), *noises(start, 3, 3))
    expected = jax.tree.map(lambda p, z: p - SCALE * (3 + z), start, total)
    close(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(expected))


@pytest.mark.parametrize(
    "sums",
    [
        {"w": jnp.zeros((1, 2)), "b": jnp.zeros(4)},  # one number would get three draws
        {"w": jnp.zeros((3, 2)), "b": jnp.zeros((5, 4))},  # five numbers would get one
        {"w": jnp.float32(0), "b": jnp.zeros(4)},
        {"w": jnp.zeros((3, 2))},
        {"w": jnp.zeros((3, 2), int), "b": jnp.zeros(4)},
        None,
    ],
    ids=["narrow", "wide", "scalar", "fewer", "whole numbers", "none"],
)
@pytest.mark.parametrize("jitted", [False, True], ids=["outside", "jit"])
def test_sums_that_are_not_as_the_parameters_are_refused_and_use_no_noise(sums, jitted):
    optimizer = add_noise(make(), seed=3)
    state = optimizer.init(PARAMS)
    update = jax.jit(optimizer.update) if jitted else optimizer.update
    with pytest.raises(UsageError, match="sums"):
        update(sums, state)
    actual, _ = optimizer.update(PARAMS, state)  # the state can still be used
    close(actual, noises(PARAMS, 3, 1)[0])


def test_noise_that_is_added_to_some_sums_only_is_refused():
    transformation = optax.conditionally_transform(add_noise(make()), lambda step: step % 2 == 0)
    state = transformation.init(PARAMS)
    for update in (transformation.update, jax.jit(transformation.update)):
        with pytest.raises(UsageError, match=r"inside conditionally_transform.*without noise"):
            update(PARAMS, state)


@pytest.mark.parametrize("key", [None, np.arange(8, dtype=np.uint32)], ids=["new", "own"])
def test_noise_of_a_step_is_for_one_sum(key):
    optimizer = add_noise(make(), key=key)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    first, next_state = update(PARAMS, state)
    close(update(PARAMS, state)[0], first)
    other = jax.tree.map(lambda leaf: leaf + 1, PARAMS)
    assert all(np.isnan(leaf).all() for leaf in update(other, state)[0].values())
    assert all(np.isfinite(leaf).all() for leaf in update(other, next_state)[0].values())


def test_what_is_no_factorization_or_no_type_is_refused():
    with pytest.raises(UsageError, match=r"factorization = 'str'.*mfopt\.load"):
        from_factorization("factorization.npz", clip_norm=1.0)
    for name in ("dtype", "buffer_dtype"):
        with pytest.raises(UsageError, match=f"{name} = 'wide'"):
            NoiseStream(
                make().strategy, iterations=N, noise_multiplier=2.0, clip_norm=0.5, **{name: "wide"}
            )
