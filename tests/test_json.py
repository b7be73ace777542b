"""JSON output: one versioned schema, which every command's output meets, errors included.

The whole suite's outputs are held against it, too: see ``conftest.py``.
"""

import json

import pytest
from commands import ended, failure, printed
from json_schema import SCHEMA, validate
from mfopt_cli import messages
from processes import python
from test_vocabulary import EVERY

import mfopt


@pytest.fixture(scope="module")
def optimized_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "made.npz"
    mfopt.factorize(epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity").save(path)
    return str(path)


def test_every_command_prints_the_schemas_version_and_its_name(optimized_file, tmp_path):
    identity = ["--epochs", "2", "--iters", "4", "--eps", "2", "--strategy", "identity"]
    for words, name in [
        (["show", optimized_file], "show"),
        (["certify", optimized_file], "certify"),
        (["calibrate", optimized_file, "--eps", "1"], "calibrate"),
        (["optimize", *identity, "--out", str(tmp_path / "a.npz")], "optimize"),
        (["noise", optimized_file, "--params", "10"], "noise"),
        (["plot", optimized_file, "--out", str(tmp_path / "a.svg")], "plot"),
        (["account", "dpsgd", "--probability", "0.1", "--iterations", "9", "--eps", "1",
          "--delta", "1e-5"], "account dpsgd"),
        (["cache"], "cache"),
    ]:  # fmt: skip
        actual = printed(*words)
        validate(actual)
        assert actual["schema"] == messages.SCHEMA and actual["command"] == name


def test_the_schema_knows_every_command():
    said = json.dumps(SCHEMA)
    for path in EVERY:
        if path[0] != "account":  # by pattern
            assert f'"{" ".join(path)}"' in said, path


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (["show", "missing.npz"], "usage", 2),
        (["optimize", "--epochs", "2"], "usage", 2),
        (["optimise"], "usage", 2),
        (["account", "els", "--eps", "-1", "--delta", "1e-5"], "usage", 2),
    ],
)
def test_errors_are_json_too(words, kind, code, capsys):
    assert ended(*words, "--json") == 2
    actual = json.loads(capsys.readouterr().out)
    validate(actual)
    assert (actual["error"]["kind"], actual["error"]["exit_code"]) == (kind, code)
    assert ended(*words) == 2
    assert not capsys.readouterr().out  # without --json standard output stays empty


def test_a_wrong_output_is_refused():
    """Controls: a key that is missing, an error with a result, another version."""
    good = {"schema": 1, "command": "plot", "path": "a.svg"}
    validate(good)
    for change in ({"path": 3}, {"schema": 2}, {"error": {"kind": "usage"}}):
        with pytest.raises(AssertionError):
            validate({**good, **change})
    with pytest.raises(AssertionError):
        validate({"schema": 1, "command": "show", "path": "a.npz"})


def test_python_m_and_versions_and_misspelt_commands(capsys):
    assert python("-m", "mfopt", "-V").startswith(f"mfopt, version {mfopt.__version__}")
    for words in (["optimise"], ["account", "el"]):
        assert f"No such command '{words[-1]}'" in failure(capsys, *words)
