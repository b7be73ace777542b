"""The command line: what it prints, what it refuses, and how it ends."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from mfopt_cli import display
from mfopt_cli.commands.optimize import command as optimize_command
from mfopt_cli.main import COMMANDS, cli, main
from mfopt_cli.options import StrategyName
from processes import ended

import mfopt
from mfopt import words
from mfopt.optimize import kinds
from mfopt.sampling.named import NAMES
from mfopt.strategies import registered

TINY = ["optimize", "--epochs", "2", "--iters", "4", "--eps", "2", "--delta", "1e-3", "--seed", "3"]
KEYS = {"rmse", "noise_multiplier", "epsilon", "delta", "certified", "strategy", "path"}


def run(*arguments):
    """(exit code, standard output, standard error) of ``main``, as the console script runs it."""
    import contextlib
    import io

    output, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code or 0
    return code, output.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def optimized_file(tmp_path_factory):
    """A file that ``optimize`` made, and what it printed."""
    path = tmp_path_factory.mktemp("cli") / "one.npz"
    code, output, err = run(*TINY, "--strategy", "sqrt", "--out", path, "--json")
    assert (code, err) == (0, "")
    return path, json.loads(output)


def test_optimize_json_is_one_object_that_agrees_with_the_file(optimized_file):
    path, printed = optimized_file
    assert printed.keys() >= KEYS | {"seconds"}
    factorization = mfopt.load(path)
    assert printed["certified"] is True and factorization.guarantee.status == "certified"
    assert printed["rmse"] == pytest.approx(factorization.rmse)
    assert printed["noise_multiplier"] == factorization.noise_multiplier
    assert (printed["epsilon"], printed["delta"]) == (2.0, 1e-3)
    assert (printed["path"], printed["strategy"]) == (str(path), {"kind": "sqrt"})
    assert factorization.sampling == mfopt.BallsInBins(bins=4, epochs=2)
    assert printed["provenance"]["seed"] == "pinned 3"


@pytest.mark.ci
def test_optimize_prints_a_table_and_names_its_file(tmp_path, work_folder):
    code, output, err = run(*TINY, "--buffers", 1, "--samples", 256, "--steps", 5)
    assert code == 0 and "Traceback" not in err
    (path,) = tmp_path.iterdir()
    assert path.name == "mfopt-blt-2x4-eps2.npz"
    for said in (
        "noise multiplier σ",
        "RMSE",
        "certified",
        "(2, 0.001)-DP",
        "DP-SGD, Poisson",
        "final-model error",
        "fresh bins",
        path.name,
    ):
        assert said in output, said
    shown = float(re.search(r"noise multiplier σ +([\d.]+)", output)[1])
    assert shown >= mfopt.load(path).noise_multiplier  # never rounded towards less privacy
    assert "certifying" in err  # progress goes to standard error


@pytest.mark.parametrize(("workload", "expected"), [("prefix", True), ("momentum", False)])
def test_optimize_compares_with_fresh_bins_where_it_was_measured(tmp_path, workload, expected):
    """Figures are of prefix sums: for another workload independent noise may be better there."""
    code, output, _ = run(
        *TINY, "--strategy", "identity", "--workload", workload, "--out", tmp_path / "one.npz"
    )
    assert code == 0 and ("--sampling fresh-bins" in output) is expected


def test_optimize_explains_every_sampling_scheme():
    (explanation,) = (
        option.help for option in optimize_command.params if option.name == "sampling"
    )
    assert [name for name in (*NAMES, "auto") if f"{name}: " not in explanation] == []


def test_show(optimized_file):
    path, printed = optimized_file
    code, output, _ = run("show", path, "--json")
    assert code == 0 and json.loads(output).keys() >= KEYS
    assert json.loads(output)["digest"] == printed["digest"]
    code, output, _ = run("show", path)
    assert code == 0 and "balls-in-bins" in output and printed["digest"] in output


def test_certify(optimized_file, tmp_path):
    path, _ = optimized_file
    out_path = tmp_path / "weaker.npz"
    code, output, _ = run(
        "certify", path, "--eps", 3, "--delta", "1e-2", "--seed", 1, "--json", "--out", out_path
    )
    assert code == 0
    printed = json.loads(output)
    assert printed["certified"] is True and printed["epsilon"] == 3.0 and printed["delta"] == 1e-2
    factorization = mfopt.load(out_path)
    assert factorization.guarantee.epsilon == 3.0
    assert factorization.noise_multiplier == mfopt.load(path).noise_multiplier
    for epsilon, said in ((1.99, "not certified"), (1, "is FALSE")):
        code, output, err = run("certify", path, "--eps", epsilon, "--seed", 1)
        assert code == 1 and output == "" and said in err and one_line(err.splitlines()[-1])


def test_calibrate(optimized_file, tmp_path):
    path, printed = optimized_file
    out_path = tmp_path / "stronger.npz"
    code, output, _ = run(
        "calibrate", path, "--eps", 1, "--delta", "1e-3", "--seed", 1, "--json", "--out", out_path
    )
    assert code == 0
    parsed = json.loads(output)
    assert parsed["certified"] is True and parsed["path"] == str(out_path)
    assert parsed["noise_multiplier"] > printed["noise_multiplier"]
    assert parsed["strategy"] == printed["strategy"]
    assert mfopt.load(out_path).noise_multiplier == parsed["noise_multiplier"]


@pytest.mark.filterwarnings("ignore")  # matplotlib's own, by version
def test_plot(optimized_file, tmp_path):
    path, _ = optimized_file
    target = tmp_path / "one.png"
    code, output, _ = run("plot", path, "--out", target)
    assert code == 0 and str(target) in output
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 10_000
    code, _, err = run("plot", path, "--out", target)
    assert code == 2 and "exists" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.png"]


def one_line(text):
    return text.startswith(("mfopt: ", "Error: ", "Usage: ")) and "Traceback" not in text


# options of a search for "sqrt" -> what is said
BAD = {
    "--eps -1": "eps",
    "--eps inf": "eps",
    "--delta 2": "delta",
    "--delta 1e-300 --strategy blt": "must be at least 1e-280: below it double precision fails",
    "--iters -4": "--iters -4: must be at least 1",
    "--strategy magic": "magic",
    "--bands 0": "bands",
    "--certify-samples 10": "samples",
    "--strategy blt --steps 0": "steps",
    "--steps 5": "--steps",
    "--strategy blt --bands 3": "--bands 3: has no effect with blt",
    "--strategy identity --bands 3": "--bands 3: has no effect",
    "--strategy toeplitz --buffers 3": "--buffers 3: has no effect with toep",
    "--strategy banded --bands 99": "--bands 99: is more than the run has iterations (8)",
    "--sampling fresh-bins --strategy banded-toeplitz --bands 99": "--bands 99: must be at most 4",
    "--sampling poisson": "--strategy sqrt: C has 8 bands; poisson is accounted for at most 1",
    "--momentum 0.9": "--momentum has no effect without --workload momentum",
    "--objective median": "objective",
    "--workload none.npy": "workload",
    "--workload cut.npz": "readable .npy array",
    "--workload prefx": "prefix, momentum or",
    "--unit ' '": "unit",
    "--workload momentum --cooldown 1:2": "cooldown",
    "--workload momentum --cooldown 5:2:0.1": "5:2:0.1: its stop 2 must be at least 6",
    "--strategy blt --init none.npz": "--init none.npz: does not exist",
    "--out none/one.npz": "does not exist",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_has_an_exit_code_and_one_line(words, tmp_path, work_folder):
    cut = tmp_path / "cut.npz"
    cut.write_bytes(b"PK\x03\x04 and no more")
    pairs = iter([*TINY[1:], "--strategy", "sqrt", *shlex.split(words)])
    options = dict(zip(pairs, pairs, strict=True))  # the last of a name
    actual, output, err = run("optimize", "--quiet", *(x for pair in options.items() for x in pair))
    assert actual == 2 and output == ""
    assert BAD[words] in err and "Traceback" not in err
    assert one_line(err.splitlines()[-1]), err
    assert list(tmp_path.iterdir()) == [cut]  # nothing was written


def test_existing_files_are_kept(optimized_file):
    path, _ = optimized_file
    content = path.read_bytes()
    for command in (
        [*TINY, "--strategy", "identity"],
        ["certify", path],
        ["calibrate", path, "--eps", 1],
    ):
        code, _, err = run(*command, "--out", path)
        assert code == 2 and "exists" in err and "--force" in err
        assert path.read_bytes() == content


@pytest.mark.parametrize("command", [["show"], ["plot"], ["certify"], ["calibrate", "--eps", "1"]])
def test_corrupt_and_missing_files(command, optimized_file, tmp_path):
    bad = tmp_path / "bad.npz"
    data = optimized_file[0].read_bytes()
    for content in (data[:-100], b"hello", b"", data[:700] + b"xxxx" + data[704:]):
        bad.write_bytes(content)
        code, output, err = run(*command, bad)
        assert code == 1 and output == "" and "cannot load" in err
        assert len(err.splitlines()) == 1 and one_line(err)
    code, output, err = run(*command, tmp_path / "none.npz")
    assert code == 2 and "does not exist" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "phrase"), [(["none"], "RUN"), (["--config", "none"], "--config")]
)
def test_an_audit_names_what_was_typed(words, phrase):
    code, _, err = run("audit", *words)
    assert code == 2 and f"{phrase} none: does not exist" in err


def test_a_file_that_is_something_else_is_called_so(tmp_path):
    other = tmp_path / "other.npz"
    other.write_text("hello")
    code, _, err = run("show", other)
    assert code == 1 and "not a factorization file of mfopt" in err and "mfopt optimize" in err
    for path, why in ((tmp_path / "none", "does not exist"), (other, "cannot be read (it is not")):
        code, _, err = run("verify", path)
        assert code == 2 and f"{path}: {why}" in err


def test_a_date_that_numpy_cannot_read_is_refused(optimized_file, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1e9")
    code, output, err = run("show", optimized_file[0])
    assert (code, output) == (2, "") and "SOURCE_DATE_EPOCH=1e9: must be" in err


def test_a_file_that_ends_too_early_is_no_interrupt(optimized_file, monkeypatch):
    def load(path):
        raise EOFError("no data left in file")

    monkeypatch.setattr("mfopt.factorization.load", load)
    code, output, err = run("calibrate", optimized_file[0], "--eps", 1)
    assert (code, output) == (1, "")
    assert err == "mfopt: a file or an answer ends too early (no data left in file)\n"


@pytest.mark.release
def test_an_audit_without_an_upper_bound_says_so_and_is_json():
    blt = Path(__file__).parents[1] / "artifacts/factorizations/blt-4-8x32-eps2.npz"
    words = ["audit", blt, "--canaries", 100, "--seed", 1]

    def no_constant(text):
        raise AssertionError(f"{text} is no JSON")

    code, output, _ = run(*words, "--json")
    parsed = json.loads(output, parse_constant=no_constant)
    assert code == 0 and parsed["noise_multiplier_highest"] is None
    code, output, _ = run(*words)
    assert code == 0 and "no upper bound" in output and "inf" not in output
    claimed = float(re.search(r"multiplier ([\d.]+)", output)[1])
    assert claimed >= parsed["noise_multiplier_claimed"]


def test_one_printer_writes_all_json(capsys):
    for path in (Path(display.__file__).parent / "commands").glob("*.py"):
        assert "json.dumps(" not in path.read_text(), path.name
    display.json_object({"b": [float("inf"), 1.0], "a": {"x": float("nan")}})
    printed = json.loads(capsys.readouterr().out)
    assert (printed["a"], printed["b"]) == ({"x": None}, [None, 1.0])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("command", "closed", "code"),
    [("show {}", ">&- 2>&-", 0), ("x", "2>&-", 2)],
)
def test_a_closed_stream_is_no_reason_to_fail(command, closed, code, optimized_file):
    python = f"{shlex.quote(sys.executable)} -c 'from mfopt_cli.main import main; main()'"
    words = command.format(shlex.quote(str(optimized_file[0])))
    done = subprocess.run(
        f"{python} {words} {closed}", shell=True, capture_output=True, check=False
    )
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr


# --- help ----------------------------------------------------------------------------------------


def test_help_and_bad_usage_wait_for_nothing_large():
    """Help, and words that are refused, without JAX and SciPy's parts; one process for all.

    Nothing of it is changed for good.
    """
    optimize = ["optimize", "--epochs", "2", "--iters", "4", "--eps"]
    calls = [
        ["--help"],
        ["optimize", "--help"],
        ["optimize", "--epochs", "2"],
        [*optimize, "-2"],
        [*optimize, "2", "--strategy", "no"],
        [*optimize, "2", "--out", "name"],
        [*optimize, "2", "--schedule", "cubic"],
        [*optimize, "2", "--workload", "none.npy"],
        ["statement", "none"],
        ["verify", "none"],
        ["certify", __file__, "--delta", "2"],
        ["calibrate", __file__, "--eps", "1", "--out", __file__],
        ["plot", __file__, "--out", "plot.jpg"],
        ["report", __file__, "--out", "page.pdf"],
        ["audit", "no-such-run"],
        ["show", "no-such-file.npz"],
        ["train", "--no-such-option"],
        ["no-such-command"],
    ]
    program = (
        "import gc, os, sys; from mfopt_cli.main import main\n"
        "settings = lambda: (dict(os.environ), gc.get_threshold())\n"
        "before = settings()\n"
        f"for words in {calls!r}:\n"
        "    found, code = 0, 0 if '--help' in words else 2\n"
        "    try: main(words)\n"
        "    except SystemExit as end: found = end.code\n"
        "    large = {'jax', 'scipy.linalg', 'scipy.special', 'scipy.optimize', 'scipy.stats',\n"
        "             'matplotlib', 'optax', 'torch'} & set(sys.modules)\n"
        "    assert (found or 0) == code and not large, (words, found, large)\n"
        "    assert settings() == before\n"
    )
    done = ended("-c", program)
    assert done.returncode == 0, done.stderr
    assert "--out name: must end in .npz" in done.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "FILE no-such-file.npz: does not exist" in done.stderr
    assert "'no' is none of blt" in done.stderr and "--eps -2.0: must be" in done.stderr


def test_the_kinds_that_help_names_are_those_that_can_be_asked_for():
    project_kinds = [
        k for k in kinds.all_names() if registered()[k].__module__.startswith("mfopt.")
    ]
    assert list(StrategyName.names) == project_kinds


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("mfopt op", "plain,optimize"), ("mfopt show --js", "plain,--json"), ("mfopt sho --js", "")],
)
def test_the_documented_completion_completes(typed, completed):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(
        cli, [], prog_name="mfopt", env={"_MFOPT_COMPLETE": "bash_complete", **words}
    )
    assert result.output.strip() == completed
    helped = CliRunner().invoke(cli, ["--help"]).output
    assert 'eval "$(_MFOPT_COMPLETE=bash_source mfopt)"' in helped


# --- numbers -------------------------------------------------------------------------------------


def test_displayed_numbers_are_never_rounded_down():
    rng = np.random.default_rng(0)
    values = [*np.exp(rng.uniform(-40, 40, 2000)), 1.0, 0.1, 9.99999, 9.999999999, 1e-5, 0.3, 25.47]
    for value in values:
        for digits in (3, 5, 6):
            shown = float(words.round_up(value, digits))
            assert value <= shown <= value * (1 + 2 * 10.0 ** (1 - digits)), (value, digits)
    assert words.round_up(1e-5) == "1e-05" and words.round_up(2.0) == "2"
