"""Clipped sums over a microbatch are those of its units one by one, and no unit's is too long."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt.training.clipping import Clipping
from mfopt.training.gradients import Totals, microbatch_adder
from mfopt.training.models.families import gpt2_config
from mfopt.training.models.huggingface import gpt2_model

V, LENGTH, UNITS = 40, 6, 5


def rows(records):
    """Tokens and mask of units, of which one is padding, and others have less than all."""
    rng = np.random.default_rng(records)
    tokens = rng.integers(0, V, (UNITS, records, LENGTH)).astype(np.int32)
    mask = np.ones(tokens.shape, bool)
    mask[1] = False
    mask[2, :, 4:] = False
    mask[3, 1:] = False
    return tokens, mask


def adder(model, clipping):
    """(tokens, mask) -> the sums over their units, compiled once for each shape."""
    add = jax.jit(microbatch_adder(model, clipping))

    def sums(tokens, mask):
        zero = Totals.zero(model.params)
        return jax.tree.map(np.asarray, add(zero, model.params, model.frozen, tokens, mask))

    return sums


def difference(a, b):
    """Largest over leaves, in terms of the leaf's largest entry."""
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return max(np.max(np.abs(x - y)) / np.max(np.abs(y)) for x, y in pairs)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "records", "tolerance"), [("float32", 3, 3e-5), ("bfloat16", 1, 3e-2)]
)
def test_the_sum_is_that_of_units_one_by_one_and_none_is_longer_than_the_clip_norm(
    kind, records, tolerance
):
    shape = dataclasses.replace(gpt2_config(V, LENGTH, 8, 1, 2), compute_dtype=kind)
    model = gpt2_model(shape)
    sums, (tokens, mask) = adder(model, Clipping(0.05)), rows(records)
    together = sums(tokens, mask)
    alone = [sums(tokens[[unit]], mask[[unit]]).gradient for unit in range(UNITS)]
    assert difference(together.gradient, jax.tree.map(lambda *x: sum(x), *alone)) < tolerance
    norms = [
        np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(unit)))
        for unit in alone
    ]
    assert norms[1] == 0 and max(norms) <= 0.05
    assert float(together.statistics.units) == 4 >= float(together.statistics.clipped) > 0


@pytest.mark.ci
def test_a_unit_without_a_finite_gradient_adds_nothing():
    model, (tokens, mask) = gpt2_model(gpt2_config(V, LENGTH, 8, 1, 2)), rows(1)
    unused = int(np.setdiff1d(np.arange(V), tokens[[0, 2, 3, 4]])[0])
    tokens[1], mask[1] = unused, True

    def loss(p, frozen, tokens, mask):
        return model.loss(p, frozen, tokens, mask) * jnp.where(tokens[0] == unused, jnp.inf, 1.0)

    sums = adder(dataclasses.replace(model, loss=loss), Clipping(0.4))
    with_it = sums(tokens, mask).gradient
    mask[1] = False
    without = sums(tokens, mask).gradient
    assert difference(with_it, without) < 1e-6
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(with_it))
