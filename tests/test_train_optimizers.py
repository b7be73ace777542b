"""Rates that fit the noise, and a second moment freed of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mfopt.errors import UsageError
from mfopt.training.config import TrainConfig
from mfopt.training.optimizers import (
    NOISE_MOVE,
    corrected_adam,
    fitting_rate,
    make_optimizer,
    schedule,
)

PARAMS = {"w": jnp.zeros(4000)}


def moved(optimizer, gradients):
    """Parameters after every step, (n, size)."""

    def step(carry, gradient):
        params, state = carry
        update, state = optimizer.update({"w": gradient}, state, params)
        params = optax.apply_updates(params, update)
        return (params, state), params["w"]

    (_, state), path = jax.lax.scan(step, (PARAMS, optimizer.init(PARAMS)), gradients)
    return np.asarray(path), state


def correlated(n, size=4000, seed=0):
    """Noise whose sums are small: z_t - 0.8 z_{t-1}, and independent noise of the same z."""
    z = np.random.default_rng(seed).normal(size=(n, size)).astype(np.float32)
    shifted = np.vstack([np.zeros((1, size), np.float32), z[:-1]])
    return z - 0.8 * shifted, z


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adam-bc"])
def test_the_fitting_rate_makes_all_noise_move_alike(name):
    n, settings = 400, TrainConfig("file.npz", optimizer=name)
    for noise in correlated(n):
        sums = np.cumsum(noise, axis=0)
        deviation = float(noise.std())
        noises = deviation, float(np.sqrt(np.mean(sums**2)))
        rate = fitting_rate(name, noises, steps=n)
        reference = np.full(n, deviation**2)
        path, _ = moved(make_optimizer(settings, rate, reference), noise)
        size = np.sqrt(np.mean(path**2))
        assert NOISE_MOVE / 1.5 < size < 1.5 * NOISE_MOVE
    # the control: one rate for both is off by the ratio of the sums
    first, second = (
        np.sqrt(np.mean(moved(make_optimizer(settings, 0.01), noise)[0] ** 2))
        for noise in correlated(n)
    )
    assert max(first, second) > 1.5 * min(first, second)
    assert fitting_rate(name, (0.5, 0.7), steps=n, move=0.06) == pytest.approx(
        0.06 / NOISE_MOVE * fitting_rate(name, (0.5, 0.7), steps=n)
    )
    with pytest.raises(UsageError, match="noise"):
        fitting_rate(name, (0.0, 1.0), steps=n)
    with pytest.raises(UsageError, match="move"):
        fitting_rate(name, (0.5, 0.7), steps=n, move=0.0)


def test_every_schedule_is_its_formula():
    t, n = np.arange(8), 8
    shapes = {
        "cooldown": np.minimum(1, 2 * (1 - t / n)),
        "constant": np.ones(n),
        "linear": 1 - t / n,
        "cosine": (1 + np.cos(np.pi * t / n)) / 2,
    }
    for name, shape in shapes.items():
        rates = [float(schedule(name, 0.5, n)(step)) for step in t]
        np.testing.assert_allclose(rates, 0.5 * shape, rtol=1e-5, err_msg=name)
    for steps in (1, 2, 3, 7):  # no step is taken at rate 0
        rates = [float(schedule("cooldown", 1.0, steps)(step)) for step in range(steps + 1)]
        assert min(rates[:-1]) > 0 and rates[-1] == 0 and rates[0] == 1
    with pytest.raises(UsageError, match="schedule"):
        schedule("none", 1.0, 3)


def test_a_rate_that_falls_leaves_less_noise_in_the_last_iterate():
    # what a time-scaled C asks for: correlated noise whose sums end larger than they were
    noise, n = correlated(64)[0], 64
    noise = noise * np.linspace(0.5, 2, n, dtype=np.float32)[:, None]
    ends = {
        name: np.std(moved(optax.sgd(schedule(name, 0.1, n)), noise)[0][-1])
        for name in ("cooldown", "constant")
    }
    assert ends["cooldown"] < 0.75 * ends["constant"]


def test_corrected_adam_is_adam_where_there_is_no_noise():
    gradients = np.random.default_rng(1).normal(size=(30, 4000)).astype(np.float32)
    mine, _ = moved(corrected_adam(0.1, np.zeros(1), 0.9, 0.99), gradients)
    plain, _ = moved(optax.adam(0.1, b1=0.9, b2=0.99, eps=0.0), gradients)
    np.testing.assert_allclose(mine, plain, rtol=2e-4, atol=1e-5)


def test_corrected_adam_finds_the_signal_s_second_moment():
    # half of the coordinates have a signal of 1, the others of 0.1; noise of 0.5 in step 0..99
    # and of 1 after: plain Adam makes the small signals' moves a tenth of the large ones'
    rng = np.random.default_rng(2)
    spread = np.where(np.arange(3000) < 100, 0.5, 1.0)
    signal = np.where(np.arange(4000) < 2000, 1.0, 0.3)
    gradients = signal + spread[:, None] * rng.normal(size=(3000, 4000))
    gradients = gradients.astype(np.float32)
    _, state = moved(corrected_adam(0.01, spread**2, 0.9, 0.999), gradients)
    actual = np.asarray(state.adam.nu["w"]) / (1 - 0.999**3000) - float(state.noise) / (
        1 - 0.999**3000
    )
    assert np.mean(actual[:2000]) == pytest.approx(1.0, abs=0.02)
    assert np.mean(actual[2000:]) == pytest.approx(0.09, abs=0.02)
    path, _ = moved(corrected_adam(0.01, spread**2, 0.9, 0.999), gradients)
    plain, _ = moved(optax.adam(0.01), gradients)

    def ratio(path):
        late = path[-1] - path[-500]
        return late[:2000].mean() / late[2000:].mean()

    assert ratio(path) < 1.5 < 2.0 < ratio(plain)


def test_no_move_is_larger_than_the_estimate_allows():
    # noise alone, of which some estimates come out below the known variance: the floor holds
    noise = np.random.default_rng(3).normal(size=(50, 4000)).astype(np.float32)
    path, _ = moved(corrected_adam(0.1, np.ones(1), 0.0, 0.999), noise)
    steps = np.abs(np.diff(np.vstack([np.zeros((1, 4000)), path]), axis=0))
    k = np.arange(1, 51)[:, None]
    assert np.all(steps <= 0.1 * np.abs(noise) * (k / 2) ** 0.25 * 1.001 + 1e-7)
