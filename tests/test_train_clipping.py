"""One unit's contribution is bounded, whatever its gradient is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_fixtures import bigram_model, synthetic_store
from train_oracles import clipped_sum, norm_of

from mfopt.errors import UsageError
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.gradients import Totals, microbatch_adder


def random_gradient(scale, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"block": {"kernel": (17, 5), "bias": (5,)}, "head": {"kernel": (5, 3)}, "x": ()}
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0, 1e6, 1e18, 1e25, np.inf, np.nan])
def test_every_gradient_is_bounded(per_layer, normalized, scale):
    clipping = Clipping(0.37, per_layer=per_layer, normalized=normalized)
    clipped = clipping(random_gradient(scale))
    assert norm_of(clipped.gradient) <= clipping.sensitivity
    if scale in (1.0, 1e6):
        # a bound that is met only because everything is scaled to nothing would also pass
        low = 0.5 if per_layer else 0.999
        assert norm_of(clipped.gradient) > low * clipping.sensitivity
        assert bool(clipped.active)
    if not np.isfinite(scale):
        assert norm_of(clipped.gradient) == 0 and bool(clipped.active)


def test_flat_clipping_against_the_definition():
    gradient = random_gradient(0.1)
    norm = norm_of(gradient)
    for clip_norm in (norm / 3, norm * 3):
        clipped = Clipping(clip_norm)(gradient)
        assert float(clipped.norm) == pytest.approx(norm, rel=1e-6)
        assert bool(clipped.active) == (clip_norm < norm)
        for mine, leaf in zip(
            jax.tree.leaves(clipped.gradient), jax.tree.leaves(gradient), strict=True
        ):
            np.testing.assert_allclose(mine, leaf * min(1, clip_norm / norm), rtol=1e-5)


def test_per_layer_clipping_bounds_each_layer_on_its_own():
    gradient = random_gradient(1.0)
    gradient["head"]["kernel"] *= 1e-3
    clipped = Clipping(0.6, per_layer=True)(gradient).gradient
    bound = 0.6 / np.sqrt(3)  # block (kernel and bias together), head, x
    assert norm_of(clipped["block"]) == pytest.approx(bound, rel=1e-4)
    # the long layer does not shrink the short one
    np.testing.assert_allclose(clipped["head"]["kernel"], gradient["head"]["kernel"], rtol=1e-5)


def test_normalized_is_clipped_over_the_clip_norm():
    gradient = random_gradient(1.0)
    plain, normalized = Clipping(0.2)(gradient), Clipping(0.2, normalized=True)(gradient)
    for a, b in zip(
        jax.tree.leaves(plain.gradient), jax.tree.leaves(normalized.gradient), strict=True
    ):
        np.testing.assert_allclose(a, 0.2 * b, rtol=1e-5)
    assert Clipping(0.2, normalized=True).sensitivity == 1.0


def test_low_precision_gradients_are_clipped_in_float32():
    gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_gradient(1.0))
    clipped = Clipping(0.5)(gradient).gradient
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(clipped))
    assert 0.499 < norm_of(clipped) <= 0.5


# the last: gradients of 1e-22, a billion times as long, would have squares of 0 in float32
@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "x", 1e-31])
def test_bad_clip_norms_are_refused(bad):
    with pytest.raises(UsageError, match="clip_norm"):
        Clipping(bad)


@pytest.mark.ci
def test_microbatched_sum_against_one_record_at_a_time():
    store = synthetic_store(empty_users=(3,), num_users=7)
    model = bigram_model()
    groups = [list(store.records_of(user))[:3] for user in range(7)]
    rows = np.full((8, 3), -1)
    for i, records in enumerate(groups):
        rows[i, : len(records)] = records
    tokens, mask = store.batch(rows.reshape(-1), 12)
    tokens, mask = tokens.reshape(8, 3, 12), mask.reshape(8, 3, 12)
    expected = clipped_sum(model, store, 12, 0.3)(model.params, groups)
    add = jax.jit(microbatch_adder(model, Clipping(0.3)))
    for size in (1, 4, 8):
        totals = Totals.zero(model.params)
        for begin in range(0, 8, size):
            part = slice(begin, begin + size)
            totals = add(totals, model.params, model.frozen, tokens[part], mask[part])
        for mine, slow in zip(
            jax.tree.leaves(totals.gradient), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(mine, slow, rtol=1e-4, atol=1e-6)
        assert float(totals.statistics.units) == 6  # one user has nothing, one slot is padding
        assert 0 < float(totals.statistics.clipped) < 6


@pytest.mark.ci
def test_without_clipping_the_sum_is_that_of_the_gradients():
    store, model = synthetic_store(num_users=4), bigram_model()
    tokens, mask = store.batch([0, 1, 2, 3], 12)
    add = jax.jit(microbatch_adder(model, NoClipping()))
    totals = add(Totals.zero(model.params), model.params, (), tokens[:, None], mask[:, None])

    def summed(params):
        return sum(model.loss(params, (), tokens[i], mask[i]) for i in range(4))

    for mine, slow in zip(
        jax.tree.leaves(totals.gradient),
        jax.tree.leaves(jax.jit(jax.grad(summed))(model.params)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, slow, rtol=1e-4, atol=1e-6)
