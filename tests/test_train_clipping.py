"""One unit's contribution is bounded, whatever its gradient is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_oracles import norm_of

from mfopt.errors import UsageError
from mfopt.training.clipping import Clipping


def random_gradient(scale):
    rng = np.random.default_rng(0)
    shapes = {"block": {"kernel": (17, 5), "bias": (5,)}, "head": {"kernel": (5, 3)}, "x": ()}
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0, 1e6, 1e18, 1e25, np.inf, np.nan])
def test_every_gradient_is_bounded(normalized, scale):
    clipping = Clipping(0.37, normalized=normalized)
    clipped = clipping(random_gradient(scale))
    assert norm_of(clipped.gradient) <= clipping.sensitivity
    if scale in (1.0, 1e6):
        # a bound that is met only because everything is scaled to nothing would also pass
        assert norm_of(clipped.gradient) > 0.999 * clipping.sensitivity
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
