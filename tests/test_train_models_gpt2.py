"""GPT-2 against recorded logits of the reference implementation, adapters, and files."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mfopt.errors import UsageError
from mfopt.training.models.decoder import LoRAConfig
from mfopt.training.models.families import gpt2_config
from mfopt.training.models.huggingface import gpt2_model, gpt2_shapes, load_pretrained, read_config

REFERENCE = Path(__file__).parent / "data" / "gpt2-reference"
TINY = gpt2_config(vocab_size=61, n_positions=12, n_embd=16, n_layer=2, n_head=4, n_inner=40)


@pytest.fixture(scope="module")
def recorded():
    with np.load(REFERENCE / "reference.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def pretrained():
    return load_pretrained(REFERENCE)


@functools.cache  # compiled once for each model
def of_records(function, arguments):
    return jax.jit(jax.vmap(function, (None, None, *[0] * arguments)))


def all_logits(model, tokens, params=None):
    params = model.params if params is None else params
    return np.asarray(of_records(model.logits, 1)(params, model.frozen, jnp.asarray(tokens)))


def all_losses(model, tokens, mask):
    loss = of_records(model.loss, 2)
    return np.asarray(loss(model.params, model.frozen, jnp.asarray(tokens), jnp.asarray(mask)))


def trees_equal(item, other):
    assert jax.tree.structure(item) == jax.tree.structure(other)
    return all(map(np.array_equal, jax.tree.leaves(item), jax.tree.leaves(other)))


@pytest.mark.ci
def test_logits_and_loss_match_the_reference_implementation(pretrained, recorded):
    np.testing.assert_allclose(
        all_logits(pretrained, recorded["tokens"]), recorded["logits"], atol=2e-5
    )
    whole = np.ones(recorded["tokens"].shape, bool)
    np.testing.assert_allclose(
        all_losses(pretrained, recorded["tokens"], whole), recorded["losses"], rtol=1e-5
    )


def test_no_position_sees_a_later_one_and_padding_is_unseen(pretrained, recorded):
    tokens = np.array(recorded["tokens"], np.int32)
    other = tokens.copy()
    other[:, 7:] = (other[:, 7:] + 1) % 61
    logits, two = all_logits(pretrained, tokens), all_logits(pretrained, other)
    np.testing.assert_array_equal(logits[:, :7], two[:, :7])
    assert np.abs(logits[:, 7:] - two[:, 7:]).max() > 0.1
    mask = np.arange(12) < np.array([7, 1, 0])[:, None]
    losses = all_losses(pretrained, tokens, mask)
    np.testing.assert_array_equal(losses, all_losses(pretrained, other, mask))
    assert losses[0] > 1 and losses[1] == losses[2] == 0
    gradient = jax.jit(jax.grad(pretrained.loss))(
        pretrained.params, pretrained.frozen, jnp.asarray(tokens[2]), jnp.asarray(mask[2])
    )
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))


@pytest.mark.release
def test_bfloat16(pretrained, recorded):
    whole = np.ones(recorded["tokens"].shape, bool)
    exact = all_losses(pretrained, recorded["tokens"], whole)
    half = load_pretrained(REFERENCE, compute_dtype="bfloat16")
    rounded = all_losses(half, recorded["tokens"], whole)
    assert jax.tree.leaves(half.params)[0].dtype == jnp.float32
    assert 0 < np.abs(rounded - exact).max() < 0.1


@pytest.mark.ci
def test_adapters_start_at_the_base_and_are_all_that_is_trained(pretrained, recorded):
    lora = LoRAConfig(rank=3, layers=("attn/c_attn", "mlp/c_proj"))
    model = load_pretrained(REFERENCE, lora=lora, seed=1)
    assert sorted(model.params["h"]["0"]) == ["attn", "mlp"]
    shapes = jax.tree.map(jnp.shape, model.params["h"]["1"])
    assert shapes == {
        "attn": {"c_attn": {"lora_a": (16, 3), "lora_b": (3, 48)}},
        "mlp": {"c_proj": {"lora_a": (40, 3), "lora_b": (3, 16)}},
    }
    assert trees_equal(model.frozen, pretrained.params)
    # two programs: their roundings differ
    np.testing.assert_allclose(
        all_logits(model, recorded["tokens"]), all_logits(pretrained, recorded["tokens"]), atol=5e-6
    )
    gradient = jax.jit(jax.grad(model.loss))(
        model.params, model.frozen, jnp.asarray(recorded["tokens"][0]), jnp.ones(12, bool)
    )
    # B = 0 at the start: A's gradient is 0 there, B's is not.
    adapter = gradient["h"]["0"]["attn"]["c_attn"]
    assert np.all(np.asarray(adapter["lora_a"]) == 0)
    assert np.abs(np.asarray(adapter["lora_b"])).max() > 1e-3


def test_export_and_load_give_the_same_bits(tmp_path, pretrained):
    pretrained.export(pretrained.params, (), tmp_path / "copy")
    original = load_file(REFERENCE / "model.safetensors")
    written = load_file(tmp_path / "copy" / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(np.array_equal(original[name], written[name]) for name in original)
    assert read_config(tmp_path / "copy") == TINY
    assert not list((tmp_path / "copy").glob(".*"))


def copy_of(folder, change=None, **settings):
    folder.mkdir()
    parsed = json.loads((REFERENCE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(parsed | settings))
    tensors = load_file(REFERENCE / "model.safetensors")
    save_file(change(tensors) if change else tensors, folder / "model.safetensors")
    return folder


def test_older_names_half_precision_and_shards(tmp_path, pretrained):
    def older(tensors):  # the hub's first GPT-2 files: no prefix, attention masks kept
        plain = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        return plain | {"h.0.attn.bias": np.ones((1, 1, 12, 12), np.float32)}

    assert trees_equal(load_pretrained(copy_of(tmp_path / "old", older)).params, pretrained.params)
    half = load_pretrained(
        copy_of(
            tmp_path / "half",
            lambda tensors: {n: np.asarray(v, jnp.bfloat16) for n, v in tensors.items()},
        )
    )
    for leaf, two in zip(
        jax.tree.leaves(half.params), jax.tree.leaves(pretrained.params), strict=True
    ):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, two, rtol=2**-8)

    folder = copy_of(tmp_path / "shards")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert trees_equal(load_pretrained(folder).params, pretrained.params)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activation_function": "relu"}, "hidden_act"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"tie_word_embeddings": False}, "lack the tensor lm_head"),
        ({"n_head": 3}, "num_attention_heads"),
    ],
)
def test_other_models_are_refused(tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        load_pretrained(copy_of(tmp_path / "other", **settings))


def test_damaged_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config.json.*RUN/model"):
        load_pretrained(tmp_path / "nowhere")
    folder = copy_of(tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cannot be read"):
        load_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="safe_serialization"):
        load_pretrained(folder)


def test_random_models_are_reproducible_and_as_large_as_said(tmp_path):
    model, two = gpt2_model(TINY, seed=5), gpt2_model(TINY, seed=5)
    assert trees_equal(model.params, two.params)
    assert not trees_equal(model.params, gpt2_model(TINY, seed=6).params)
    assert model.num_params == gpt2_shapes(TINY).num_params
    assert gpt2_shapes(gpt2_config()).num_params == 124439808
    # With a base, the same seed draws the same adapters as without one.
    lora = LoRAConfig(rank=2)
    adapted = gpt2_model(TINY, lora=lora, seed=5)
    gpt2_model(TINY, seed=5).export(adapted.frozen, (), tmp_path / "base")
    repeated = gpt2_model(TINY, lora=lora, seed=5, folder=tmp_path / "base")
    assert trees_equal(adapted.params, repeated.params)
    assert jax.tree.structure(repeated.frozen) == jax.tree.structure(model.params)


def test_impossible_settings_are_refused():
    model = gpt2_model(TINY)
    for call, match in (
        (lambda: gpt2_config(n_embd=10, n_head=3), "num_attention_heads"),
        (lambda: dataclasses.replace(TINY, compute_dtype="float64"), "compute_dtype"),
        (lambda: LoRAConfig(rank=0), "rank"),
        (lambda: LoRAConfig(layers=()), "layers"),
        (lambda: gpt2_model(TINY, lora=LoRAConfig(layers=("attn/q",))), "layers"),
        (lambda: model.logits(model.params, (), jnp.zeros(13, jnp.int32)), "positions"),
    ):
        with pytest.raises(UsageError, match=match):
            call()
