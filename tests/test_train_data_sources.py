"""Each source: what becomes a record, what is bad, and the same at every reading."""

import codecs
import csv
import json
from collections import Counter

import pyarrow as arrow
import pytest
from pyarrow import parquet

from mfopt.errors import UsageError
from mfopt.training.data.sources import Csv, JsonLines, Parquet
from mfopt.training.data.stdlib import StandardLibrary, functions_of

ROWS = [("ann", "first"), ("bob", 'quo"te, comma'), ("ann", "two\nlines"), ("Ünal", "☃ snow")]


def records(source):
    return [(record.user, record.text) for record in source.read() if record.reason is None]


def reasons(source):
    return Counter(record.reason for record in source.read() if record.reason is not None)


def assert_repeatable(source):
    items = list(source.read())
    assert items, "an empty source proves nothing"
    assert list(source.read()) == items
    done = [progress.done for progress in items]
    assert done == sorted(done) and done[-1] <= source.total()
    assert source.describe() == source.describe() and json.dumps(source.describe())


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps({"who": u, "what": t}) + "\n" for u, t in rows), "utf-8")
    return path


def write_csv(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "who", "what"), *((0, u, t) for u, t in rows)])
    return path


def write_parquet(path, rows):
    users, texts = zip(*rows, strict=True)
    table = arrow.table({"what": list(texts), "other": [1] * len(rows), "who": list(users)})
    parquet.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    ("kind", "write", "suffix"),
    [
        (JsonLines, write_jsonl, "jsonl"),
        (Csv, write_csv, "csv"),
        (Parquet, write_parquet, "parquet"),
    ],
)
def test_tables_give_the_rows_that_were_written(tmp_path, kind, write, suffix):
    files = [
        write(tmp_path / f"one.{suffix}", ROWS),
        write(tmp_path / f"two.{suffix}", [*ROWS[:2], ("x", " "), *ROWS[:1]]),
    ]
    source = kind(files, "who", "what")
    assert records(source) == ROWS + ROWS[:2] + ROWS[:1]
    assert reasons(source) == {"what is empty": 1}
    assert_repeatable(source)
    bad = next(record for record in source.read() if record.reason)
    assert bad.where.startswith(f"two.{suffix}: ")
    description = source.describe()
    write(files[0], [*ROWS, ("new", "row")])
    assert kind(files, "who", "what").describe() != description
    with pytest.raises(UsageError, match="does not exist"):
        kind([tmp_path / "nowhere"], "who", "what")


def test_one_name_is_one_user_however_it_is_written(tmp_path):
    names = ["Jos\u00e9", "Jose\u0301", " Jos\u00e9\t", "jos\u00e9"]
    path = write_jsonl(tmp_path / "a.jsonl", [(name, "text") for name in names])
    source = JsonLines([path], "who", "what")
    assert [user for user, _ in records(source)] == ["Jos\u00e9"] * 3 + ["jos\u00e9"]
    # a byte order mark is no part of the first record, and elsewhere it is no JSON
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(codecs.BOM_UTF8 + path.read_bytes() + codecs.BOM_UTF8 + path.read_bytes())
    source = JsonLines([marked], "who", "what")
    assert len(records(source)) == 7 and reasons(source) == {"not JSON": 1}


def test_bad_json_lines_are_told_apart(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"user": "a", "text": "fine"}',
        b'{"user": "a", "text": "cut',
        b"[1, 2]",
        b'{"user": "a"}',
        b'{"text": "t"}',
        b'{"user": null, "text": "t"}',
        b'{"user": true, "text": "t"}',
        b'{"user": ["a", "b"], "text": "t"}',
        b'{"user": "a", "text": 3}',
        b'{"user": " ", "text": "t"}',
        b'{"user": "a", "text": ""}',
        b'{"user": "a", "text": "\xff"}',
        b'{"user": "a", "text": "\\ud800"}',
        b"[" * 100_000,
        b"",
        b"  ",
        b'{"user": 7, "text": "number"}',  # no newline at the end
    ]
    path.write_bytes(b"\n".join(lines))
    source = JsonLines([path], "user", "text")
    assert records(source) == [("a", "fine"), ("7", "number")]
    assert reasons(source) == {
        "not JSON": 2,
        "not a JSON object": 1,
        "text is missing": 1,
        "user is missing": 2,
        "user is neither text nor integer (of several users: see mfopt.sampling.Owners)": 2,
        "text is not text": 1,
        "user is empty": 1,
        "text is empty": 1,
        "not UTF-8": 2,
    }
    assert_repeatable(source)
    # the first row decides what a text is
    path.write_text('{"user": "a", "prompt": "p", "completion": "c"}\n{"user": "a", "text": "t"}')
    assert reasons(JsonLines([path], "user", "text")) == {"prompt or completion is not text": 1}


def test_bad_csv_rows_are_told_apart(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes(b"user,text\na,fine\na\na,b,c\n\n,t\na,\xff\nb,last\n")
    source = Csv([path], "user", "text")
    assert records(source) == [("a", "fine"), ("b", "last")]
    assert reasons(source) == {"wrong number of columns": 2, "user is empty": 1, "not UTF-8": 1}
    assert_repeatable(source)
    with pytest.raises(UsageError, match=r"bad.csv has columns .*'text'\]. A CSV"):
        list(Csv([path], "who", "text").read())


def test_parquet_column_types(tmp_path):
    path = tmp_path / "types.parquet"
    table = arrow.table(
        {
            "user": arrow.array([5, None, 6], arrow.int32()),
            "text": arrow.array(["a", "b", None], arrow.large_string()),
        }
    )
    parquet.write_table(table, path)
    source = Parquet([path], "user", "text")
    assert records(source) == [("5", "a")]
    assert reasons(source) == {"user is missing": 1, "text is missing": 1}
    with pytest.raises(UsageError, match="column"):
        list(Parquet([path], "who", "text").read())
    path.write_bytes(b"no parquet at all")
    with pytest.raises(UsageError, match="not a Parquet file"):
        list(Parquet([path], "user", "text").read())


def test_functions_of_a_module():
    source = (
        "import os\n"
        "@decorated(\n    1)\n"
        "def outer():\n    def inner():\n        pass\n    return inner\n"
        "class A:\n    class B:\n        async def deep(self):\n            '''x'''\n"
        "    value = 1\n    def method(self): return 2\n"
        "if True:\n    def conditional(): pass\n"
    )
    assert functions_of(source) == [
        "@decorated(\n    1)\ndef outer():\n    def inner():\n        pass\n    return inner\n",
        "async def deep(self):\n    '''x'''\n",
        "def method(self): return 2\n",
    ]


def test_the_standard_library_skips_what_is_not_python(tmp_path):
    for name, text in {
        "test/a.py": "def no(): pass\n",
        ".hidden/a.py": "def no(): pass\n",
        "data.txt": "def no(): pass\n",
        "json.py": "def f(): pass\ndef g(): pass\n",
        "asyncio.py": "def (\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "gone.py").symlink_to("nowhere")
    with pytest.raises(UsageError, match="has no modules of this part"):
        StandardLibrary("public", tmp_path)
    source = StandardLibrary("private", tmp_path)
    assert next(source.read()).where == "asyncio.py: asyncio"
    assert records(source) == [("json", "def f(): pass\n"), ("json", "def g(): pass\n")]
    assert reasons(source) == {"not Python": 1}
    assert_repeatable(source)
