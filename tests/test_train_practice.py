"""What practitioners bring: packed and saved data, models of their own; and what they look at."""

import gzip
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx
from mfopt_cli.commands.data import _source, build
from processes import python
from test_train_run import data, settings_for  # noqa: F401 (fixtures)
from train_fixtures import synthetic_store
from train_oracles import json_lines, write_store

from mfopt.errors import UsageError
from mfopt.training.data import sources, stdlib
from mfopt.training.execute import _settled, execute
from mfopt.training.models.huggingface import load_pretrained
from mfopt.training.prepare import preflight, prepare

ROWS = [{"user": f"u{i % 3}", "text": f"words of {i}"} for i in range(50)]


def source_of(path):
    with build.make_context("build", ["out", "--data", str(path)]) as context:
        return _source(context.params["paths"], SimpleNamespace(**context.params))


def read(source):
    return [(record.user, record.text) for record in source.read()]


def test_packed_lines_are_lines(tmp_path):
    lines = json_lines(ROWS)
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text(lines)
    packed.write_bytes(gzip.compress(lines.encode()))
    first, second = map(source_of, (plain, packed))
    assert isinstance(second, sources.JsonLines)
    assert read(second) == read(first) == [(row["user"], row["text"]) for row in ROWS]
    assert list(second.read())[-1].done <= second.total() == packed.stat().st_size
    loud = tmp_path / "B.JSONL.GZ"
    shutil.copy(packed, loud)
    assert read(source_of(loud)) == read(first)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UsageError, match="damaged"):
        read(second)


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A standard library of one module for each part, to build a corpus of."""
    folder = tmp_path / "library"
    folder.mkdir()
    text = "".join(f"def f{i}():\n    'Words of {i} and others.'\n" for i in range(40))
    for name in ("json", next(x for x in "abcdefghijklmnop" if stdlib.is_public(x))):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(stdlib, "sysconfig", SimpleNamespace(get_path=lambda _: folder))


@pytest.mark.release
def test_a_corpus_of_other_data_is_not_trained_on(small_library, tmp_path):
    path = tmp_path / "rows.JSONL"

    def digest_of(word, **options):
        rows = [row | {"text": f"{word} of {i}"} for i, row in enumerate(ROWS * 4)]
        rows[0], rows[-1] = ROWS[0], ROWS[-1]  # the ends of the file and its size are the same
        path.write_text(json_lines(rows))
        settings = settings_for(options.pop("data", path), tmp_path / "run", steps=1)
        prepared = prepare(settings, **options)
        prepared.close()
        return prepared.parts["train"].digest

    first, second = digest_of("words"), digest_of("lines")
    assert first != second == digest_of("lines")
    report = tmp_path / "run" / "corpus" / "report.json"
    report.write_text("{")  # damaged: built again
    assert digest_of("lines") == second and json.loads(report.read_text())
    execute(prepare(settings_for(path, tmp_path / "run", steps=1)))
    assert digest_of("lines", resume=True) == second
    for other in ({"word": "words"}, {"word": "lines", "data": "stdlib-code"}):
        with pytest.raises(UsageError, match="another source text"):
            digest_of(**other, resume=True)


def test_a_file_is_no_embedded_corpus_of_its_name(data, tmp_path, work_folder):  # noqa: F811
    (tmp_path / "stdlib").write_text("no lines")
    assert preflight(settings_for("stdlib", tmp_path / "one"))
    with pytest.raises(UsageError, match="must be a folder or a file"):
        preflight(settings_for("./stdlib", tmp_path / "two"))


class Bigram(nnx.Module):
    def __init__(self, vocab_size, rngs, ahead=False):
        self.table = nnx.Embed(vocab_size, vocab_size, rngs=rngs)
        self.ahead = ahead

    def __call__(self, tokens):
        logits = self.table(tokens)
        return logits + logits[-1] if self.ahead else logits


def make_bigram(vocab_size, length, seed):
    return Bigram(vocab_size, nnx.Rngs(seed))


def make_other(vocab_size, length, seed):
    return {"table": np.zeros((vocab_size, vocab_size))}


def make_ahead(vocab_size, length, seed):
    return Bigram(vocab_size, nnx.Rngs(seed), ahead=True)


@pytest.mark.release
def test_a_model_by_its_import_path(data, tmp_path):  # noqa: F811
    name = f"{__name__}:make_bigram"
    summary = execute(prepare(settings_for(data, tmp_path / "run", model=name, steps=2)))
    assert summary["steps"] == 2 and summary["privacy"]["parameters"] == 32 * 32
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    for changes, match in [
        ({"model": f"{__name__}:make_ahead"}, "looks ahead"),
        ({"model": f"{__name__}:make_other"}, "gives a dict: must be a Model or"),
        ({"model": name, "lora_rank": 2}, "adapters"),
        ({"model": str(tmp_path)}, "config.json"),
    ]:
        with pytest.raises(UsageError, match=match):
            prepare(settings_for(data, tmp_path / "other", **changes))


def test_adapters_have_their_layers_and_scale(data, tmp_path):  # noqa: F811
    adapted = {"lora_rank": 2, "lora_layers": "attn/c_attn, mlp/c_fc"}
    prepared = prepare(settings_for(data, tmp_path / "run", **adapted))
    prepared.close()
    # A (8, 2) and B (2, 24); A (8, 2) and B (2, 32)
    assert prepared.model.num_params == 2 * (8 + 24) + 2 * (8 + 32)
    with pytest.raises(UsageError, match="layers"):  # before any work
        preflight(settings_for(data, tmp_path / "run2", **adapted | {"lora_layers": "mlp"}))


@pytest.mark.parametrize(
    "text",
    ["1", "[]", "null", "", "{", "\xff", "[" * 10**5, '{"model_type": "gpt2", "n_layer": "x"}'],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_folder_with_another_json_is_refused_in_a_line(name, text, tmp_path):
    good = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(good))
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(UsageError):
        load_pretrained(tmp_path)


@pytest.mark.release
def test_early_stopping_looks_at_public_data_only(data, tmp_path):  # noqa: F811
    assert not _settled([3.0, 2.0], 2) and not _settled([3.0, 2.0, 1.9], 1)
    assert _settled([3.0, 2.0, 2.5, 2.1], 2) and not _settled([3.0, 2.0, 2.5, 1.9], 2)
    assert not _settled([1.0, 2.0], 0)
    # a rate so large that the loss rises at once
    changes = {"patience": 1, "evaluate_every": 1, "learning_rate": 3.0, "seed": 2}
    summary = execute(prepare(settings_for(data, tmp_path / "run", **changes)))
    assert summary["steps"] < 6 and summary["privacy"]["steps_done"] == summary["steps"]
    assert summary["after"]["public"]["loss"] >= summary["before"]["public"]["loss"]
    repeated = execute(prepare(settings_for(data, tmp_path / "run", **changes), resume=True))
    assert repeated["steps"] == summary["steps"]  # it stays where it stopped
    folder_alone = tmp_path / "alone"
    write_store(synthetic_store(num_users=20), folder_alone / "train")
    with pytest.raises(UsageError, match="no public part"):
        prepare(settings_for(folder_alone, tmp_path / "other", patience=1))


def test_data_that_is_not_there_is_refused_before_jax_is_loaded():
    program = (
        "import sys\nfrom mfopt_cli.main import cli\ntry: cli(['train', '--data', 'nothing'])\n"
        "except SystemExit as end: assert end.code == 2 and 'jax' not in sys.modules"
    )
    python("-c", program)
