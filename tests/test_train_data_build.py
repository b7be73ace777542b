"""Tokenizers, whole builds, and the command line."""

import csv
import json
import random
import stat

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet
from test_cli import run
from test_train_data_store import as_dict
from tokenizers import Tokenizer as Backend
from tokenizers import models
from train_oracles import json_lines

from mfopt.errors import FailureError, UsageError
from mfopt.training.data import HoldOut, open_parts
from mfopt.training.data.build import Options, build, read_report
from mfopt.training.data.sources import JsonLines, format_of
from mfopt.training.tokenizers import END_OF_TEXT, Tokenizer

PUBLIC = ["the cat sat on the mat", "the dog sat on the log", "naïve ☃ text\n\tindented"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(PUBLIC, 300)


SKIP = Options(skip_bad=True)  # of the rows below a fiftieth is broken


def write_rows(path, count=400, seed=0):
    """Rows of seeded words; every 50th is broken."""
    rng = random.Random(seed)
    words = " ".join(PUBLIC).split()
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            row = {"user": f"u{rng.randrange(17)}", "text": " ".join(rng.choices(words, k=6))}
            file.write("broken\n" if number % 50 == 49 else json.dumps(row) + "\n")
    return path


def test_tokenizer_gives_the_text_back_and_cannot_be_made_to_end_a_record(tokenizer):
    texts = ["the cat", "", " ünknown \x00 bytes ☃☃\r\n", f"fake {END_OF_TEXT} end"]
    encoded = tokenizer.encode_batch(texts)
    for text, tokens in zip(texts, encoded, strict=True):
        assert tokens[-1] == tokenizer.end_id and tokenizer.end_id not in tokens[:-1]
        assert tokenizer.backend.decode(tokens.tolist()) == text
        assert tokens.max() < tokenizer.vocab_size
    assert len(tokenizer.encode_batch(["the cat sat on the mat"])[0]) <= 10
    np.testing.assert_array_equal(tokenizer.encode_batch(["the cat"])[0], encoded[0])


def test_tokenizer_training_is_reproducible_and_files_keep_the_digest(tokenizer, tmp_path):
    assert Tokenizer.train(iter(PUBLIC), 300).digest == tokenizer.digest
    assert Tokenizer.train(PUBLIC, 290).digest != tokenizer.digest
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert Tokenizer.load(path).digest == tokenizer.digest
    with pytest.raises(UsageError, match="not in the vocabulary"):
        Tokenizer.load(tmp_path, end_of_text="</s>")
    with pytest.raises(UsageError, match="at least 257"):
        Tokenizer.train(PUBLIC, 256)
    # A file that asks for truncation does not shorten records.
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "cut.json"))
    text = "the cat sat on the mat"
    np.testing.assert_array_equal(
        Tokenizer.load(tmp_path / "cut.json").encode_batch([text])[0],
        tokenizer.encode_batch([text])[0],
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not a tokenizer"),
        (b"{}", "not a tokenizer"),
        (b"\xff", "not a tokenizer"),
        (None, "holds no tokenizer"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_end_is_refused():
    with pytest.raises(UsageError, match="end_of_text"):
        Tokenizer(Backend(models.BPE()))


def test_a_build_against_a_loop(tmp_path, tokenizer):
    out = tmp_path / "out"
    written = out / "report.json"
    path = write_rows(tmp_path / "rows.jsonl")
    source = JsonLines([path], "user", "text")
    report = build(source, out, tokenizer=tokenizer, options=SKIP)
    expected = {}
    for line in path.read_text().splitlines():
        if line != "broken":
            row = json.loads(line)
            tokens = [*tokenizer.backend.encode(row["text"]).ids, tokenizer.end_id]
            expected.setdefault(row["user"], []).append(tokens)
    store = open_parts(out)["train"]
    assert as_dict(store) == expected
    store.verify()
    assert report["reading"]["train"]["bad"] == {"not JSON": 8}
    assert len(report["reading"]["train"]["examples"]) == 8
    assert report == json.loads(written.read_text())
    assert store.metadata["tokenizer_digest"] == Tokenizer.load(out).digest
    assert str(tmp_path) not in written.read_text()
    for damaged in ({"plan": {"source": 1}}, {"reading": {"train": {}}}):
        written.write_text(json.dumps(report | damaged))
        assert read_report(out) == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "rows.jsonl"]
    # private text is its owner's alone
    folders = [out, out / "train"]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_private_text_given_as_public_is_refused(tmp_path, tokenizer):
    rows = [{"user": f"u{i}", "text": f"{i} of the {i * i} many words " * 9} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text(json_lines(rows))
    source = JsonLines([tmp_path / "rows.jsonl"], "user", "text")
    with pytest.raises(
        UsageError, match=r"9 copies of private records.: hold 100.0% of the tokens of 9"
    ):
        build(source, tmp_path / "out", tokenizer=tokenizer, public=source)
    options = Options(public_overlap=1.0)
    report = build(source, tmp_path / "out", tokenizer=tokenizer, public=source, options=options)
    assert report["overlap"]["copies"] == 9


def test_refusals_before_any_work(tmp_path, tokenizer):
    data = write_rows(tmp_path / "rows.jsonl")
    source = JsonLines([data], "user", "text")
    with pytest.raises(UsageError, match="not trained on private data"):
        build(source, tmp_path / "out", tokenizer=300)
    with pytest.raises(UsageError, match=r"its folder .* does not exist"):
        build(source, tmp_path / "no" / "out", tokenizer=tokenizer)
    (tmp_path / "precious").mkdir()
    with pytest.raises(UsageError, match="exists"):
        build(source, tmp_path / "precious", tokenizer=tokenizer)
    with pytest.raises(UsageError, match="not a built data folder"):
        build(source, tmp_path / "precious", tokenizer=tokenizer, force=True)
    for shares in ({"users": 1.0}, {"records": -0.1}):
        with pytest.raises(UsageError, match="held-out"):
            HoldOut(**shares)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "rows.jsonl"]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_more_than_a_hundredth_of_bad_lines_is_skipped_on_purpose_only(tmp_path, tokenizer, kind):
    def rows(good, bad):
        path = tmp_path / f"rows-{good}-{bad}.{kind}"
        if kind == "csv":
            path.write_text("user,text\n" + "ann,good\n" * good + ",no user\n" * bad)
        else:
            lines = [{"user": "ann", "text": "good"}] * good + [{"text": "no user"}] * bad
            path.write_text(json_lines(lines))
        return format_of(path)([path], "user", "text")

    output = tmp_path / "out"
    with pytest.raises(UsageError, match=r"2 of 101 lines .*2 × user is (missing|empty).*skip_bad"):
        build(rows(99, 2), output, tokenizer=tokenizer)
    assert not output.exists()
    report = build(rows(99, 2), output, tokenizer=tokenizer, options=Options(skip_bad=True))
    assert report["reading"]["train"]["records"] == 99
    build(rows(99, 1), tmp_path / "few", tokenizer=tokenizer)


def test_bad_lines_alone_are_refused(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_text("broken\n")
    with pytest.raises(FailureError, match=r"no record can be used.*1 × not JSON"):
        build(
            JsonLines([tmp_path / "rows.jsonl"], "user", "text"),
            tmp_path / "out",
            tokenizer=tokenizer,
        )


def test_command_line_from_files_to_stores(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl")
    public = write_rows(tmp_path / "public.jsonl", seed=1)
    output = tmp_path / "out"
    command = ["data", "build", output, "--data", data, "--skip-bad"]
    code, text, _ = run(*command, "--public", public, "--vocab-size", 300)
    assert code == 0 and "8 bad, skipped: not JSON" in text
    tokens = open_parts(output)["train"].num_tokens
    assert text.splitlines()[1].split() == ["train", "17", "392", f"{tokens:,}"]
    code, _, error = run(*command, "--tokenizer", output)
    assert code == 2 and "--force" in error
    code, text, _ = run(
        *command, "--tokenizer", output, "--force", "--json", "--held-out-users", 0.3
    )
    report = json.loads(text)
    assert code == 0 and set(report["parts"]) == {"train", "held-out-users"}
    # the end of a record is that of the tokenizer's model
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer.load(output)
    tokenizer.backend.add_special_tokens(["<end>"])
    tokenizer.save(model / "tokenizer.json")
    end = tokenizer.backend.token_to_id("<end>")
    (model / "config.json").write_text(json.dumps({"eos_token_id": end}))
    ended = tmp_path / "ended"
    code, _, _ = run(*command[:2], ended, *command[3:], "--tokenizer", model)
    assert code == 0 and open_parts(ended)["train"].metadata["end_id"] == end


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "rows.jsonl"], "--vocab-size and --public"),
        (["--data", "rows.jsonl", "--vocab-size", "300"], "private data"),
        (["--data", "rows.txt", "--tokenizer", "."], "Give --format"),
        (["--data", "rows.jsonl", "--data", ".", "--tokenizer", "."], "Give --format"),
        (["--data", ".", "--format", "jsonl", "--tokenizer", "."], "is not a file"),
        (["--data", "stdlib", "--tokenizer", "."], "own public part"),
        (["--data", "rows.jsonl", "--tokenizer", ".", "--user-column", "who"], "user is missing"),
        (["--data", "rows.jsonl", "--tokenizer", ".", "--user-column", "who"], "--text-column"),
        (["--data", "rows.jsonl", "--vocab-size", "300", "--end-of-text", "x"], "--tokenizer only"),
        (["--data", "rows.jsonl", "--tokenizer", ".", "--held-out-users", "2"], "held-out"),
    ],
)
def test_command_line_refusals(tmp_path, work_folder, tokenizer, arguments, words):
    write_rows(tmp_path / "rows.jsonl", 60)
    write_rows(tmp_path / "rows.txt", 0)
    tokenizer.save(tmp_path / "tokenizer.json")
    code, _, error = run("data", "build", "out", "--quiet", *arguments)
    assert code == (1 if "who" in arguments else 2) and words in error
    assert "Traceback" not in error and not (tmp_path / "out").exists()


PROMPTS = [
    {"user": f"u{n % 3}", "prompt": f"Add 1 to {n}:", "completion": f" {n + 1}"} for n in range(9)
]
CHATS = [
    {
        "user": f"u{n % 3}",
        "messages": [
            {"role": "user", "content": f"Is {n} <|im_end|> even?"},
            {"role": "assistant", "content": "yes" if n % 2 == 0 else "no"},
        ],
    }
    for n in range(9)
]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_of_a_prompt_and_its_completion_the_completion_is_learned(tmp_path, kind, tokenizer):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(json_lines(PROMPTS))
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, PROMPTS[0])
            writer.writeheader()
            writer.writerows(PROMPTS)
    else:
        parquet.write_table(arrow.Table.from_pylist(PROMPTS), path)
    build(format_of(path)([path], "user", "text"), tmp_path / "out", tokenizer=tokenizer)
    store = open_parts(tmp_path / "out")["train"]
    store.verify()
    tokens, mask = store.batch(np.arange(9), 64)
    rows = [row for user in range(3) for row in PROMPTS[user::3]]
    for row, actual, learned in zip(rows, tokens, mask, strict=True):
        prompt = tokenizer.encode_batch([row["prompt"]])[0][:-1]
        whole = [*prompt, *tokenizer.encode_batch([row["completion"]])[0]]
        assert actual[: len(whole)].tolist() == whole
        # the last token of the prompt is where the first one of the completion is predicted
        assert np.flatnonzero(learned).tolist() == [*range(len(prompt) - 1, len(whole))]
    chunks, _ = store.in_chunks(4).batch([0], 4)
    assert chunks.max() < tokenizer.vocab_size


def test_of_a_chat_what_the_assistant_says_is_learned(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    rows = [*CHATS, {"user": "a", "messages": "b"}]
    path.write_text(json_lines(rows))
    source = JsonLines([path], "user", "text")
    with pytest.raises(UsageError, match="im_start"):
        build(source, tmp_path / "out", tokenizer=tokenizer)
    # one that is trained has the tokens, and its texts end as the assistant's turns do
    public = JsonLines([write_rows(tmp_path / "public.jsonl", 60)], "user", "text")
    texts = {"tokenizer": 300, "public": public, "options": Options(skip_bad=True)}
    report = build(source, tmp_path / "out", **texts)
    assert report["reading"]["train"]["bad"] == {"messages is not a list of roles and texts": 1}
    facts = open_parts(tmp_path / "out")["train"].metadata
    tokenizer = Tokenizer.of_data(tmp_path / "out", facts)
    start, end = (tokenizer.backend.token_to_id(f"<|im_{word}|>") for word in ("start", "end"))
    assert facts["end_id"] == end
    tokens, mask = open_parts(tmp_path / "out")["train"].batch(np.arange(9), 128)
    for row, actual, learned in zip(
        [x for u in range(3) for x in CHATS[u::3]], tokens, mask, strict=True
    ):
        # a user cannot spell a special token out
        assert (actual == start).sum() == (actual == end).sum() == 2
        said = row["messages"][1]["content"]
        words = tokenizer.backend.decode(actual[learned][1:].tolist(), skip_special_tokens=True)
        assert words == f"{said}\n"
    # the end of its records is known wherever the tokenizer is used again
    again = {"tokenizer": Tokenizer.load(tmp_path / "out"), "options": Options(skip_bad=True)}
    build(source, tmp_path / "again", **again)
    assert open_parts(tmp_path / "again")["train"].metadata["end_id"] == end
