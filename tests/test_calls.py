"""A sample of the hostile calls that ``bench_calls.py`` makes by the thousand."""

import shlex
from pathlib import Path

import bench_calls as calls
import pytest
from mfopt_cli.main import COMMANDS


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    # independent noise: its σ takes no samples
    prepared = calls.prepare(tmp_path_factory.mktemp("calls"), "identity")
    yield prepared
    Path(prepared["LOCKED"]).chmod(0o600)


# what was once answered by a traceback, an abort or success
ONCE = [
    "optimize --epochs 1e9 --iters 4 --eps 2 --out NEW.npz",
    "optimize --epochs 1e20 --iters 4 --eps 2 --out NEW.npz",
    "optimize --epochs 2 --iters 2147483648 --eps 2 --out NEW.npz",
    "optimize --epochs 2 --iters 1e23 --eps 2 --out NEW.npz",
    "optimize --epochs 2 --iters 4 --eps 1e20 --out NEW.npz",
    "optimize --epochs 2 --iters 4 --eps 2 --delta 1e-320 --out NEW.npz",
    "compare --epochs 2 --iters 4 --eps 2 --out .",
    "compare --epochs 2 --iters 4 --eps 2 --out ''",
    "compare --epochs 1e20 --iters 4 --eps 2",
    "train --epochs 2 --iters 4 --eps 2 --delta 1e-5 --show-config --momentum 2",
    "train --epochs 2 --iters 4 --eps 2 --delta 1e-5 --show-config --average 1",
    "train --epochs 2 --iters 4 --eps 2 --delta 1e-5 --show-config --heads 3",
    "account dpsgd --iterations 1e18 --probability 0.01 --noise-multiplier 1 --delta 1e-5",
    "account dpsgd --epochs 2 --iters 8 --eps 1e20 --delta 1e-5",
    "account fixed-batch --iters 8 --batch-size 10 --population 100 --eps 2 --delta 1e-320",
    "certify FILE --certify-samples 1e30",
    "certify FILE --out ''",
    "compare --epochs 2 --iters 4 --eps 2 --include ''",
    "train FILE --data MISSING --show-config --out ''",
    "train FILE --show-config --learning-rate 1e300",
    "train FILE --show-config --normalizer 1e300",
    "train FILE --show-config --seed -5",
    "optimize --epochs 2 --iters 4 --eps 2 --strategy identity --seed -1 --out NEW.npz",
    "account balls-in-bins --epochs 2 --iters 4 --eps 2 --delta 1e-5 --estimate --seed -1",
    "account fedavg --iters 8 --probability 0.1 --noise-multiplier 1e300 --delta 1e-5",
    "data build NEW --data stdlib --vocab-size 0",
    "audit FILE --canaries 1e23",
    "plot FILE --out 'new\nline.npz'",
    "verify /dev/full",
    "plan --units 100 --eps 2 --epochs 2 --iters 0 --loader poisson --yes --out NEW.npz",
]


@pytest.mark.parametrize("line", ONCE)
def test_what_was_once_a_traceback_is_bad_usage_in_one_line(line, places):
    result = calls.run(shlex.split(line), places, 60.0)
    assert (result["code"], result["problem"], result["stopped"]) == (2, "", False), result
    assert result["said"].startswith("mfopt: error: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train FILE --data MISSING --out NEW", "--data MISSING: does not exist"),
        ("audit FOLDER", "RUN FOLDER: holds no config.toml"),
        ("certify FILE --out FOLDER", "--out FOLDER: must end in"),
        ("data build NEW --data TEXT --public FOLDER --vocab-size 300", "--public"),
        ("data build NEW --data TEXT --format jsonl --tokenizer MISSING/", "--vocab-size 2048"),
        (
            "data build NEW --data TEXT --format jsonl --tokenizer FOLDER/",
            "holds no tokenizer.json",
        ),
        (
            "optimize --epochs 2 --iters 4 --eps 2 --out FILE",
            "--force replaces it, --out names another. If its search was interrupted, `mfopt "
            "certify FILE` certifies it, and --init FILE resumes from its C.",
        ),
    ],
)
def test_a_refusal_names_what_was_typed_and_the_way_out(line, said, places):
    result = calls.run(line.split(), places, 60.0)
    for name in ("FILE", "FOLDER", "MISSING", "TEXT"):
        said = said.replace(name, places[name])
    assert result["code"] == 2 and said in result["said"], result


@pytest.mark.release
def test_a_sample_of_generated_calls(places):
    chosen = list(calls.generate(4 * len(calls.GOOD), seed=1))
    # what is valid by chance may take long: those commands are for the benchmark
    quick = [call for call in chosen if call[0] not in ("optimize", "compare", "audit", "noise")]
    assert len(quick) > 60
    problems = [
        (actual["call"], actual["problem"])
        for actual in (calls.run(call, places, 5.0) for call in quick)
        if actual["problem"]
    ]
    assert not problems


def test_every_command_is_attacked_and_the_judge_sees_faults(tmp_path):
    # cache would clear this user's folders
    assert {path.split()[0] for path in calls.GOOD} == set(COMMANDS) - {"cache"}
    judge = calls.judge
    show = ["show", "FILE"]
    assert judge(show, 0, "fine", "", tmp_path, False) == ""
    assert judge(show, 1, "", "mfopt: no", tmp_path, False) == ""
    assert "traceback" in judge(show, 1, "", "Traceback (most recent call last)", tmp_path, False)
    assert "no reason" in judge(show, 2, "", "boom", tmp_path, False)
    assert "exit code" in judge(show, 3, "", "mfopt: no", tmp_path, False)
    error = '{"error": {"exit_code": 2}}'
    assert judge([*show, "--json"], 2, error, "mfopt: no", tmp_path, False) == ""
    assert "spite" in judge([*show, "--json"], 2, "{}", "mfopt: no", tmp_path, False)
    assert "not JSON" in judge([*show, "--json"], 0, '{"a": NaN}', "", tmp_path, False)
    assert "success" in judge(["optimize", "--eps", "nan"], 0, "", "", tmp_path, False)
    (tmp_path / ".x.0123456789ab.mfopt-part").touch()
    assert "left" in judge(show, 0, "", "", tmp_path, False)
