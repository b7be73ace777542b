"""Arguments are looked at before any work: sizes beyond use, and words that could not be saved."""

import pytest
from commands import invoked
from mfopt_cli import options, sweeps
from test_vocabulary import EVERY, every, of


def refusal(words):
    """The one line in which bad usage is refused."""
    result = invoked(*words)
    lines = result.stderr.splitlines()
    assert result.exit_code == 2 and result.stdout == "" and len(lines) == 1, (words, result.output)
    return lines[0]


@every
def test_a_size_beyond_use_is_refused_where_it_is_read(path):
    for param in of(path):
        if isinstance(param.type, options.Count | sweeps.Sweep) and param.type.maximum:
            for size in ("1e15", f"{param.type.maximum + 1}"):
                said = refusal([*path, f"{param.opts[0]}={size}"])
                assert f"must be at most {param.type.maximum}" in said, said


LIMITED = ("--certify-samples", "--group-size", "--points", "--repeats", "--samples", "--jobs")


def test_every_option_whose_work_grows_with_it_has_a_limit():
    """But for those whose cost is estimated first (`--params`, `--iters`, frozen samples, ...)."""
    without = {
        (" ".join(path), param.opts[0])
        for path in EVERY
        for param in of(path)
        if isinstance(param.type, options.Count | sweeps.Sweep) and param.opts[0] in LIMITED
        if param.type.maximum is None
    }
    assert without == {("optimize", "--samples")}


@pytest.mark.parametrize("option", ["width", "layers", "heads"])
def test_a_model_beyond_use_is_refused_before_it_is_made(option, tmp_path):
    """Its shapes overflowed in a traceback, or it was traced for hours; a folder was left."""
    words = ["train", "--sampling=balls-in-bins:bins=2,epochs=1", "--eps=8", "--delta=1e-3"]
    said = refusal([*words, f"--{option}=1e9", f"--out={tmp_path / 'run'}"])
    assert f"--{option} 1000000000: must be at most" in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unit", ["a\nb", "\x1b[2Juser", " ", "us\u202eer"])
def test_a_unit_that_cannot_be_printed_is_refused_before_the_search(unit):
    """It was refused where the result was saved, and the certified result was lost.

    A search would report its progress in further lines.
    """
    for words in (["optimize", "--epochs=2", "--iters=4", "--eps=2"], ["account", "dpsgd"]):
        said = refusal([*words, f"--unit={unit}"])
        assert "--unit" in said and ("control characters" in said or "is empty" in said)


def test_a_run_whose_data_is_refused_leaves_no_folder(tmp_path):
    words = ["train", "--sampling=balls-in-bins:bins=2,epochs=1", "--eps=8", "--delta=1e-3"]
    said = refusal([*words, f"--data={tmp_path / 'none'}", f"--out={tmp_path / 'run'}"])
    assert "does not exist" in said and list(tmp_path.iterdir()) == []
