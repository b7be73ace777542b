"""The families of decoders against the reference implementation, and in private runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import flax
from safetensors.numpy import load_file, save_file
from selection import before_release
from test_train_models_gpt2 import all_logits, trees_equal
from test_train_run import data, settings_for  # noqa: F401 (fixtures)

from mfopt.errors import UsageError
from mfopt.training.execute import execute
from mfopt.training.models.decoder import LINEAR_LAYERS, LoRAConfig
from mfopt.training.models.huggingface import WEIGHTS, load_pretrained, read_config
from mfopt.training.prepare import prepare
from mfopt.training.tokenizers import Tokenizer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e2,
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA3 = {
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {**LINEAR, "rope_theta": 200.0},
    },
}
PARTLY = {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5}
KINDS = {
    "llama": ("Llama", {"attention_bias": True, "rope_theta": 5e5}),
    "llama-3.1": ("Llama", {"head_dim": 12, "rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {**LINEAR, "rope_theta": 1e2}}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**CAPS, "head_dim": 8, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3Text", {**GEMMA3, "final_logit_softcapping": 4.0}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-partly-rotated": ("Phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", {"head_dim": 4, "pad_token_id": 0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "gpt2": ("GPT2", {"n_inner": 40}),
    "pythia": ("GPTNeoX", {"num_key_value_heads": 4, "rope_parameters": PARTLY, "hidden_size": 32}),
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 20)).astype(np.int32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder and reference logits of each kind, with no parameter at 0 or 1."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    collected = {}

    def save(kind):
        if kind not in collected:
            name, extra = KINDS[kind]
            torch.manual_seed(len(kind))
            config = getattr(transformers, f"{name}Config")(**SIZES | extra)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for value in model.parameters():
                    value.add_(0.3 * torch.randn_like(value))
                logits = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            collected[kind] = folder, logits
        return collected[kind]

    return save


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_reference_implementation(kind, saved):
    folder, expected = saved(kind)
    model = load_pretrained(folder)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(all_logits(model, TOKENS), expected, atol=1e-4)
    # the control: each tensor is seen in them
    leaves, structure = jax.tree.flatten(model.params)
    for number, leaf in enumerate(leaves):
        other = [*leaves[:number], leaf[::-1] * 1.1, *leaves[number + 1 :]]
        off = np.abs(
            all_logits(model, TOKENS, jax.tree.unflatten(structure, other)) - expected
        ).max()
        assert off > 1e-3, jax.tree.structure(model.params)


@pytest.mark.parametrize("kind", before_release(list(KINDS), 3, 4))
def test_an_export_is_a_folder_of_the_reference_implementation(kind, saved, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, _ = saved(kind)
    model = load_pretrained(folder, lora=LoRAConfig(rank=2, layers=LINEAR_LAYERS))
    params = jax.tree.map(
        lambda x: x + 0.2 * np.cos(np.arange(x.size)).reshape(x.shape), model.params
    )
    model.export(params, model.frozen, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    assert np.abs(logits - saved(kind)[1]).max() > 0.1
    np.testing.assert_allclose(logits, all_logits(model, TOKENS, params), atol=1e-4)
    assert read_config(tmp_path) == read_config(folder)
    assert load_file(tmp_path / WEIGHTS).keys() == load_file(folder / WEIGHTS).keys()
    # by PEFT's definition the base's tensors and scale B A are the merged ones, all of them
    merged, plain = load_file(tmp_path / WEIGHTS), load_file(folder / WEIGHTS)
    low = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    parsed = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for name in low:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if f"{module}.weight" in plain:
            (layer,) = (x for x in parsed["target_modules"] if module.endswith(f".{x}"))
            scale = parsed["alpha_pattern"][layer] / parsed["rank_pattern"][layer]
            change = scale * low[name.replace("lora_A", "lora_B")] @ low[name]
            plain[f"{module}.weight"] += change.T if parsed["fan_in_fan_out"] else change
    assert len(low) == 2 * 2 * len(parsed["target_modules"])
    for name, value in merged.items():
        np.testing.assert_allclose(value, plain[name], atol=1e-5)


@pytest.mark.parametrize("kind", before_release(list(KINDS), 1, 6))
def test_a_frozen_base_stays_in_bfloat16_where_its_file_is(kind, saved, tmp_path):
    half, single = tmp_path / "half", tmp_path / "single"
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), flax.load_file(saved(kind)[0] / WEIGHTS)
    )
    for folder, dtype in ((half, jnp.bfloat16), (single, jnp.float32)):
        folder.mkdir()
        (folder / "config.json").write_text((saved(kind)[0] / "config.json").read_text())
        flax.save_file({name: x.astype(dtype) for name, x in rounded.items()}, folder / WEIGHTS)
    models = [load_pretrained(folder, lora=LoRAConfig(rank=2)) for folder in (half, single)]
    kept, wide = ({leaf.dtype.name for leaf in jax.tree.leaves(model.frozen)} for model in models)
    assert kept == {"bfloat16"} and wide == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_pretrained(half).params)} == wide
    # the same is computed, up to the order of sums, and written
    np.testing.assert_allclose(*(all_logits(model, TOKENS) for model in models), atol=1e-5)
    for number, model in enumerate(models):
        model.export(model.params, model.frozen, tmp_path / str(number))
    assert trees_equal(*(load_file(tmp_path / number / WEIGHTS) for number in "01"))


@pytest.mark.release
@pytest.mark.parametrize("lora", [0, 2])
def test_two_private_steps(lora, saved, data, tmp_path):  # noqa: F811
    folder = saved("qwen2")[0]
    changes = {"model": str(folder), "length": 16, "steps": 2, "lora_rank": lora}
    run = tmp_path / "run"
    summary = execute(prepare(settings_for(data, run, **changes)))
    original, updated = load_file(folder / WEIGHTS), load_file(run / "model" / WEIGHTS)
    moved = {name for name in original if not np.array_equal(original[name], updated[name])}
    assert summary["steps"] == 2 and original.keys() == updated.keys()
    adapted = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in "01" for x in "qkv"}
    assert moved == (adapted if lora else set(original))
    trained = summary["privacy"]["parameters"]
    sizes = sum(2 * (16 + columns) for columns in (16, 8, 8)) * 2
    assert trained == (sizes if lora else sum(value.size for value in original.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bert"}, "model_type = 'bert': must be one of gpt2, llama"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "must be one of default, linear, llama3",
        ),
        (
            {"rope_parameters": {**LLAMA3, "attention_factor": 2.0}},
            "attention_factor = 2.0: is not",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "lacks low_freq_factor, high",
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "needs low_freq_factor <"),
        ({"rope_scaling": LINEAR | {"factor": 0}}, "rope_scaling factor = 0"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu': only 'silu' is supported"),
        ({"use_mrope": True}, "use_mrope = True: only False is supported"),
        (
            {"final_logit_softcapping": 30.0},
            "softcapping = 30.0: only None is supported. Take it out",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lack the tensor model.layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "does not mention"),
        ({"hidden_size": None}, "hidden_size"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"num_attention_heads": 2}, "must have shape"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"head_dim": 3}, "must be even"),
    ],
)
def test_what_would_be_another_function_is_refused(change, words, saved, tmp_path):
    folder = saved("qwen2")[0]
    parsed = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(parsed | change))
    save_file(load_file(folder / WEIGHTS), tmp_path / WEIGHTS)
    with pytest.raises(UsageError, match=words):
        load_pretrained(tmp_path)


def test_settings_of_no_effect_are_passed_over_and_unknown_ones_told(saved, tmp_path, recwarn):
    folder, change = saved("qwen2")[0], {"_model_name_or_path": "a/b", "unk_token_id": 3}
    change |= {"quantization_config": None, "id2label": {"0": "LABEL_0"}, "use_cache": True}
    settings = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read_config(tmp_path)
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"colour": "blue"}))
    with pytest.warns(UserWarning, match="colour = 'blue', which is not known here"):
        read_config(tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_window_longer_than_the_records_is_no_obstacle(kind, saved, tmp_path):
    folder = saved(kind)[0]
    settings = json.loads((folder / "config.json").read_text()) | {"sliding_window": 6}
    if kind == "qwen2":
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
        settings["layer_types"] = ["full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(load_file(folder / WEIGHTS), tmp_path / WEIGHTS)
    windowed, full = load_pretrained(tmp_path), load_pretrained(folder)
    windowed.check_fits(5, 6)
    with pytest.raises(UsageError, match="at most 6 tokens"):
        windowed.check_fits(5, 7)
    row = np.arange(6, dtype=np.int32)
    np.testing.assert_array_equal(
        *(model.logits(model.params, model.frozen, row) for model in (windowed, full))
    )
    # what is exported keeps the window
    windowed.export(windowed.params, windowed.frozen, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("sliding_window", "use_sliding_window", "layer_types")
    assert [written.get(name) for name in names] == [settings.get(name) for name in names]


def test_older_files_say_the_same(saved, tmp_path):
    for kind, change in [
        ("llama", {"rope_theta": 5e5, "rope_scaling": None, "rope_interleaved": False}),
        ("gemma", {"rope_theta": 1e4, "hidden_act": "gelu", "hidden_activation": None}),
        ("llama-linear", {"rope_theta": 1e2, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama-3.1", {"rope_scaling": LLAMA3}),
    ]:
        folder = saved(kind)[0]
        parsed = json.loads((folder / "config.json").read_text())
        del parsed["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(parsed | change))
        assert read_config(tmp_path) == read_config(folder)


def test_the_end_of_a_text_is_the_model_s_own(tmp_path):
    tokenizer = Tokenizer.train(["ab ab"], 257)
    tokenizer.backend.add_special_tokens(["</s>"])
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).end_of_text == "<|endoftext|>"
    for ids in (257, [257, 0]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert Tokenizer.load(tmp_path).end_of_text == "</s>"
    for text in (
        "{",
        "[]",
        '{"eos_token_id": null}',
        '{"eos_token_id": 999}',
        '{"eos_token_id": -1}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert Tokenizer.load(tmp_path).end_id == tokenizer.end_id
    for text in ('{"eos_token": "</s>"}', '{"eos_token": {"content": "</s>"}}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert Tokenizer.load(tmp_path).end_of_text == "</s>"
    with pytest.raises(UsageError, match="that the data was built with"):
        Tokenizer.load(tmp_path, "<end>")
