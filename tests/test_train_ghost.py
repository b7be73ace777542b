"""Clipped sums without per-unit gradients are those of the definition, and never too long."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import before_release

from mfopt.training import ghost
from mfopt.training.clipping import Clipping
from mfopt.training.gradients import Totals, microbatch_adder, taps_of
from mfopt.training.models.decoder import LINEAR_LAYERS, LoRAConfig
from mfopt.training.models.families import DecoderConfig, gpt2_config
from mfopt.training.models.huggingface import gpt2_model
from mfopt.training.models.nnx_model import from_nnx

V, LENGTH = 40, 6
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
}


class Other(nnx.Module):
    """Flax's own layers; a matrix used twice, one used by itself, and one inside a loop."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.heads = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.mix = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=rngs)
        self.twice = nnx.Linear(8, 8, rngs=rngs)
        self.square = nnx.Param(jax.random.normal(jax.random.key(1), (8, 8)) / 4)
        self.looped = nnx.Param(jax.random.normal(jax.random.key(2), (8, 8)) / 4)
        self.out = nnx.Linear(8, V, rngs=rngs)

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.mix(jnp.tanh(self.heads(x)))
        x = x + self.twice(jax.nn.relu(self.twice(x)))
        x = x @ (self.square[...] @ self.square[...].T)
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ self.looped[...]), None), x, None, length=2)
        return self.out(x)


def tiny(lora=None):
    shape = gpt2_config(V, LENGTH, 8, 1, 2)
    return gpt2_model(shape, lora=lora)


MODELS = {
    "tied": tiny,
    "adapters": lambda: tiny(LoRAConfig(3, layers=LINEAR_LAYERS)),
    "gated": lambda: gpt2_model(DecoderConfig.read(QWEN3)),
    "other layers": lambda: from_nnx(Other()),
}


def moved(params):
    """Away from the zeros and ones that parameters start from."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), host(params))


def host(tree):
    """Its leaves in numpy, whose operations are not compiled."""
    return jax.tree.map(np.asarray, tree)


def rows(records, units=5):
    rng = np.random.default_rng(records)
    tokens = rng.integers(0, V, (units, records, LENGTH)).astype(np.int32)
    tokens[0, :, 1:4] = tokens[0, :, :1]  # a row that is picked several times
    mask = np.ones(tokens.shape, bool)
    mask[1] = False
    mask[2, :, 4:] = False
    mask[3, 1:] = False
    return tokens, mask


def sums(model, params, clipping, tokens, mask, **options):
    add = jax.jit(microbatch_adder(model, clipping, **options))
    return add(Totals.zero(params), params, model.frozen, tokens, mask)


def difference(a, b):
    """Largest over leaves, in terms of the leaf's largest entry."""
    pairs = zip(*map(jax.tree.leaves, (host(a), host(b))), strict=True)
    return max(np.max(np.abs(x - y)) / np.max(np.abs(y)) for x, y in pairs)


# records of a unit, and whether each layer is clipped by itself
CASES = [(name, *options) for name in MODELS for options in ((1, False), (3, True))]


@pytest.fixture
def always(monkeypatch):
    """Small matrices too."""
    monkeypatch.setattr(ghost, "pays", lambda *_: True)


@pytest.mark.ci
@pytest.mark.parametrize("never_formed", before_release([True, False], 0))
@pytest.mark.parametrize(("name", "records", "per_layer"), before_release(CASES, 1, 4))
def test_clipped_sums_are_those_of_the_gradients_one_by_one(
    name, records, per_layer, never_formed, monkeypatch
):
    model = MODELS[name]()
    params = moved(model.params)
    clipping, data = Clipping(0.1, per_layer=per_layer), rows(records)
    if name == "gated":  # every matrix is tapped
        matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
        assert len(taps_of(model, LENGTH).leaves) == len(matrices)
    slow = sums(model, params, clipping, *data, per_unit=True)
    monkeypatch.setattr(ghost, "pays", lambda *_: never_formed)  # or formed from what the taps give
    fast = sums(model, params, clipping, *data)
    assert difference(fast.gradient, slow.gradient) < 3e-5
    np.testing.assert_allclose(fast.statistics, slow.statistics, rtol=1e-5)
    assert 0 < float(fast.statistics.clipped) <= float(fast.statistics.units) == 4


@pytest.mark.release
def test_both_uses_of_a_tied_embedding_count_with_each_other(always, monkeypatch):
    model = tiny()
    params, data = moved(model.params), rows(1)
    whole = ghost.square
    monkeypatch.setattr(ghost, "square", lambda found: sum(whole([part]) for part in found))
    wrong = sums(model, params, Clipping(0.4), *data)
    right = sums(model, params, Clipping(0.4), *data, per_unit=True)
    assert difference(wrong.gradient, right.gradient) > 1e-3


@pytest.mark.ci
def test_no_unit_in_bfloat16_is_longer_than_the_clip_norm(monkeypatch):
    """As on accelerators: products are rounded, and norms are those of what is summed."""
    monkeypatch.setattr(ghost, "pays", lambda *_: False)
    model = gpt2_model(
        dataclasses.replace(gpt2_config(V, LENGTH, 8, 1, 2), compute_dtype="bfloat16")
    )
    params, (tokens, mask) = moved(model.params), rows(1)
    sums_of_units = []
    for unit in (0, 2, 3, 4):
        unit_mask = np.where(np.arange(5)[:, None, None] == unit, mask, False)
        sums_of_units.append(sums(model, params, Clipping(0.05), tokens, unit_mask).gradient)
        squares = [
            np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(sums_of_units[-1])
        ]
        assert 0.0499 < np.sqrt(sum(squares)) <= 0.05
    together = sums(model, params, Clipping(0.05), tokens, mask).gradient
    assert (
        difference(together, jax.tree.map(lambda *leaves: sum(leaves), *map(host, sums_of_units)))
        < 1e-5
    )


@pytest.mark.ci
def test_uses_are_found_in_the_program():
    model = from_nnx(Other())
    actual = taps_of(model, LENGTH)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(model.params)]
    tapped = {names[i] for i in actual.leaves}
    kernels = {f"['{name}']['kernel']" for name in ("heads", "mix", "twice", "out")}
    assert tapped == kernels | {"['embed']['embedding']"}
    assert len(actual.uses) == 6


def test_where_positions_are_many_gradients_are_formed_and_on_accelerators(monkeypatch):
    actual = taps_of(tiny(), LENGTH)
    leaves = jax.tree.leaves(tiny().params)
    # two uses of 6 positions in 40 x 8 numbers; of 12 positions with two records
    assert len(leaves) > len(ghost.chosen(actual, leaves, 1).leaves) > 0
    assert ghost.chosen(actual, leaves, 4).leaves == ()
    monkeypatch.setattr("mfopt.training.mesh.on_cpu", lambda: False)
    assert ghost.chosen(actual, leaves, 1).leaves == ()


@pytest.mark.ci
def test_a_unit_without_a_finite_gradient_adds_nothing(always):
    model = tiny()
    params, (tokens, mask) = moved(model.params), rows(1)
    unused = int(np.setdiff1d(np.arange(V), tokens[[0, 2, 3, 4]])[0])
    tokens[1], mask[1] = unused, True

    def loss(p, frozen, tokens, mask):
        return model.loss(p, frozen, tokens, mask) * jnp.where(tokens[0] == unused, jnp.inf, 1.0)

    odd = dataclasses.replace(model, loss=loss)
    with_it = sums(odd, params, Clipping(0.4), tokens, mask)
    mask[1] = False
    without = sums(odd, params, Clipping(0.4), tokens, mask)
    assert difference(with_it.gradient, without.gradient) < 1e-6
    assert np.all(np.isfinite(with_it.gradient["wte"]))


@pytest.mark.parametrize("size", before_release([1.0, 1e2, 1e4], 2))
def test_norms_are_not_too_small_where_terms_cancel(size, monkeypatch):
    # Σ uᵀv of large terms that nearly cancel: rounding of the double sum exceeds the sum itself
    rng = np.random.default_rng(0)
    u, v = (rng.normal(size=(200, 16, width)) for width in (24, 32))
    u, v = size * np.concatenate([u, -u], axis=1), np.concatenate([v, v], axis=1)
    v[:, 16:] += 1e-6 * rng.normal(size=(200, 16, 32))
    u, v = np.float32(u), np.float32(v)
    true = np.sum((np.float64(u).swapaxes(1, 2) @ np.float64(v)) ** 2, axis=(1, 2))

    def actual():
        squares = jax.vmap(lambda u, v: ghost.square([ghost.Part(u, v, turned=False)]))(u, v)
        return np.asarray(squares, np.float64)

    assert np.all(actual() >= true)
    monkeypatch.setattr(ghost, "_SIGMAS", 0.0)
    assert np.sum(actual() < true) > 20  # without the allowance
