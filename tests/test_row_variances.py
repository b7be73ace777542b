"""Error of a time-scaled Toeplitz C by its draws, against the dense product and its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt import _row_variances

CASES = [(1, 0.0, 1), (65, 0.9, 4), (300, 0.0, 4), (300, 0.9, 1)]


def given(n, seed=0):
    """g, r, d and η, none of them smooth."""
    rng = np.random.default_rng(seed)
    inverse = rng.normal(size=n) / (1 + np.arange(n))
    rows, columns = np.exp(0.5 * rng.normal(size=(2, n)))
    return inverse, rows, columns, rng.uniform(0.5, 1.5, size=n)


def dense(inverse, rows, columns, rates, momentum):
    """Row norms of A diag(1/d) B⁻¹ diag(1/r), all matrices written out."""
    lag = np.arange(len(inverse))[:, None] - np.arange(len(inverse))[None, :]
    toeplitz = jnp.where(lag >= 0, jnp.asarray(inverse)[np.maximum(lag, 0)], 0.0)
    velocity = np.where(lag >= 0, momentum ** np.maximum(lag, 0), 0.0)
    sums = jnp.tril(jnp.ones_like(velocity)) @ (rates[:, None] * velocity)
    return jnp.sum((sums @ (toeplitz / columns[:, None] / rows[None, :])) ** 2, axis=1)


@pytest.mark.parametrize(("n", "momentum", "parts"), CASES)
def test_variances_and_their_derivative_are_those_of_the_dense_product(
    monkeypatch, n, momentum, parts
):
    """By each of g, r, d and η, in parts of the run and in one."""
    monkeypatch.setattr(_row_variances, "_MANY", n if parts > 1 else n + 1)
    weight = np.random.default_rng(1).uniform(size=n)

    def both(function):
        def value(*x):
            found = function(*x, momentum)
            return jnp.sum(weight * found), found

        with jax.enable_x64(True):
            (_, found), slopes = jax.jit(
                jax.value_and_grad(value, argnums=(0, 1, 2, 3), has_aux=True)
            )(*given(n))
        return found, slopes

    found, slopes = both(_row_variances.row_variances)
    expected, wanted = both(dense)
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    for ours, theirs in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-11 * np.max(np.abs(theirs)))
        # a control: the last number counts
        if n > 1:
            assert np.max(np.abs(ours[:-1] - theirs[1:])) > 1e-3 * np.max(np.abs(theirs))
