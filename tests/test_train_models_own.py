"""Models of a user's own: a pytree and a loss of one record, without Flax; and any NNX module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mfopt.errors import UsageError
from mfopt.training.models import Model, next_token_loss, num_targets
from mfopt.training.models.nnx_model import from_nnx


def test_loss_and_gradient_are_those_of_the_rows_that_predict():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)
    tokens = jnp.array([4, 0, 3, 1, 2, 2])

    def cut(logits, mask):
        rows, weights = logits[:-1], (mask[1:] & mask[:-1]).astype(jnp.float32)
        chosen = jnp.take_along_axis(rows, tokens[1:, None], axis=-1)[:, 0]
        losses = jax.nn.logsumexp(rows, axis=-1) - chosen
        return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1.0)

    right, whole = (jax.jit(jax.value_and_grad(loss)) for loss in (cut, next_token_loss))
    for length in range(7):
        mask = jnp.arange(6) < length
        expected, slope = right(logits, mask)
        actual, gradient = whole(logits, tokens, mask)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient, slope, rtol=1e-6)
        assert int(num_targets(mask)) == max(length - 1, 0)
        # a row that the next token is not known of has no gradient; all others have
        assert np.any(gradient, axis=1).tolist() == [row + 1 < length for row in range(6)]


def test_any_nnx_module_becomes_a_model():
    class Bigram(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(16, 4, rngs=rngs)
            self.out = nnx.List([nnx.Linear(4, 16, rngs=rngs)])

        def __call__(self, tokens):
            return self.out[0](self.embed(tokens))

    module = Bigram(nnx.Rngs(0))
    model = from_nnx(module)
    assert model.num_params == 16 * 4 + 4 * 16 + 16
    tokens, mask = jnp.array([3, 1, 4, 1, 5]), jnp.ones(5, bool)
    expected = next_token_loss(module(tokens), tokens, mask)
    actual = model.loss(model.params, model.frozen, tokens, mask)
    assert float(actual) == pytest.approx(float(expected), rel=1e-6)
    kernel_only = from_nnx(module, trainable=nnx.PathContains("kernel"))
    assert jax.tree.map(jnp.shape, kernel_only.params) == {"out": {"0": {"kernel": (4, 16)}}}
    actual = kernel_only.loss(kernel_only.params, kernel_only.frozen, tokens, mask)
    assert float(actual) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(UsageError, match="trainable"):
        from_nnx(module, trainable=nnx.LoRAParam)


def test_data_that_does_not_fit_is_refused():
    model = Model.of({"w": jnp.zeros(3)}, lambda params, tokens, mask: params["w"].sum())
    model.check_fits(10**6, 10**6)
    narrow = from_nnx(_Constant(), vocab_size=32, max_length=8)
    narrow.check_fits(32, 8)
    with pytest.raises(UsageError, match="32 tokens"):
        narrow.check_fits(33, 8)
    with pytest.raises(UsageError, match="at most 8"):
        narrow.check_fits(32, 9)


class _Constant(nnx.Module):
    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(32))

    def __call__(self, tokens):
        return jnp.broadcast_to(self.bias[...], (*tokens.shape, 32))
