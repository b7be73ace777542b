"""Whole runs by the command line: report, refusal, kill -9 and resume, configuration."""

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from commands import invoked, printed
from mfopt_cli.commands.train import command
from safetensors.numpy import load_file
from selection import before_release
from train_fixtures import synthetic_store
from train_oracles import write_store

import mfopt
from mfopt.accounting.closed_form.group import one_unit_target
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import proofs
from mfopt.training import config, initial_model, metrics, privacy, verification
from mfopt.training.config import TrainConfig
from mfopt.training.execute import execute
from mfopt.training.folder import check_folder, secret_of
from mfopt.training.prepare import prepare

SMALL = {
    "length": 8,
    "width": 8,
    "layers": 1,
    "heads": 2,
    "records_per_user": 2,
    "pretrain_steps": 0,
    "microbatch": 4,
    "checkpoint_every": 2,
    "evaluate_every": 3,
    "learning_rate": 0.01,
    "long_records": "cut",
}
POISSON = {"sampling": "poisson:probability=0.3,iterations=6", "epsilon": 8.0, "delta": 1e-4}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_store(synthetic_store(num_users=20, empty_users=(3,)), folder / "train")
    write_store(synthetic_store(num_users=5, seed=1), folder / "held-out-users")
    write_store(synthetic_store(num_users=9, seed=2, public=True), folder / "public")
    named(folder)
    return folder


def named(folder):
    """``folder`` of stores with names of users, none of which is in two of them."""
    for part in ("train", "held-out-users"):
        count = len(np.load(folder / part / "user_offsets.npy")) - 1
        names = [f"{part} {number}".encode() for number in range(count)]
        np.save(folder / part / "user_names.npy", np.frombuffer(b"".join(names), np.uint8))
        np.save(folder / part / "name_offsets.npy", np.cumsum([0, *map(len, names)]))


def settings_for(data, output, **changes):
    return TrainConfig(**{**SMALL, **POISSON, "data": str(data), "output": str(output), **changes})


def flags_of(**settings):
    """Settings that are no switches, as flags."""
    arguments = {name: value for name, value in settings.items() if not isinstance(value, bool)}
    return [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]


def exported(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_the_account_in_a_folder_is_believed_only_where_it_is_proved(data, tmp_path, monkeypatch):
    monkeypatch.setenv("MFOPT_DATA", str(tmp_path / "proofs"))
    # nothing is proven false as it is read
    monkeypatch.setattr(proofs, "refute", lambda *_: None)
    settings = settings_for(data, tmp_path / "run", steps=1)
    path = tmp_path / "run" / "account.npz"

    def altered(**changes):
        stated = dataclasses.replace(honest.guarantee, **changes)
        sigma = stated.noise_multiplier
        dataclasses.replace(honest, guarantee=stated, noise_multiplier=sigma).save(path, force=True)

    prepared = prepare(settings)
    sigma = prepared.account.noise_multiplier
    prepared.close()
    honest = mfopt.load(path)
    # a new run asks nobody but the accountant
    altered(noise_multiplier=0.01)
    prepared = prepare(settings)
    assert prepared.account.noise_multiplier == sigma
    assert mfopt.load(path) == honest
    execute(prepared)
    # one that goes on does not take what cannot be proved
    for changes, problem, match in (
        ({"noise_multiplier": 0.01}, FailureError, "could not be proved"),
        ({"noise_multiplier": 0.99 * sigma}, FailureError, "could not be proved"),
        ({"epsilon": 20.0}, UsageError, "differs from the run"),
        ({"delta": 0.5}, UsageError, "differs from the run"),
        ({"group_size": 2}, UsageError, "differs from the run"),
        ({"adjacency": "replace"}, UsageError, "differs from the run"),
    ):
        altered(**changes)
        with pytest.raises(problem, match=match):
            prepare(settings, resume=True)
    path.write_text("{}")
    with pytest.raises(FailureError, match=r"is not a factorization file.*Put a copy") as damaged:
        prepare(settings, resume=True)
    assert "mfopt optimize" not in str(damaged.value)
    # nor what is accounted for another algorithm, or anew
    honest.save(path, force=True)
    monkeypatch.setattr(privacy, "solved", None)
    with pytest.raises(UsageError, match="differs from the run"):
        prepare(settings_for(data, tmp_path / "run", algorithm="els"), resume=True)
    # controls: the honest one, also where nothing is noted of its proof
    proved = []
    prove = proofs.prove
    monkeypatch.setattr(proofs, "prove", lambda *a, **k: proved.append(a) or prove(*a, **k))
    prepare(settings, resume=True).close()
    assert not proved
    monkeypatch.setenv("MFOPT_DATA", str(tmp_path / "elsewhere"))
    prepare(settings, resume=True).close()
    prepare(settings, resume=True).close()
    assert len(proved) == 1


@pytest.mark.ci
def test_a_run_writes_all_it_promises(data, tmp_path, monkeypatch):
    settings = settings_for(data, tmp_path / "run", pretrain_steps=3)
    summary = execute(prepare(settings))
    folder = tmp_path / "run"
    assert summary["steps"] == 6 and summary["evaluated_after"] == 6
    assert set(summary["after"]) == {"held-out-users"}
    report = json.loads((folder / "privacy-report.json").read_text())
    assert report == summary["privacy"] and report["holds"] and report["steps_done"] == 6
    assert report["guarantee"]["epsilon"] == 8.0
    assert report["guarantee"]["privacy_unit"] == "user"
    rows = metrics.read_table(folder / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(6))
    evaluated = metrics.read_table(folder / "evaluation.csv")
    assert [int(row["step"]) for row in evaluated] == [0, 3, 6]
    assert stat.S_IMODE((folder / "metrics.csv").stat().st_mode) == 0o600
    # what may be released can be read by others, once it is copied out of the run's folder
    for path in [*(folder / "model").iterdir(), folder / "privacy-report.json"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert config.load(folder / "config.toml") == settings
    # the model alone: no optimizer, no noise
    parameters = sum(array.size for array in exported(folder).values())
    assert parameters == report["parameters"]
    with pytest.raises(UsageError, match="holds a run already"):
        prepare(settings)
    monkeypatch.setattr(initial_model, "_pretrain", None)  # a resumed run does it no more
    prepare(settings, resume=True).close()
    for path in folder.iterdir():  # only its secret is left
        if not path.name.startswith("secret"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UsageError, match="checkpoints are gone"):
        check_folder(folder, resume=True)


CHILD = """
import sys, json
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare
from mfopt.training.config import TrainConfig
settings = TrainConfig(**json.loads(sys.argv[1]))
execute(prepare(settings, resume=sys.argv[2] == "resume"))
"""


@pytest.mark.release
def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(data, tmp_path):
    # seed pinned, so that the broken and the unbroken run can be compared
    changes = {
        "seed": 5,
        "checkpoint_every": 1,
        "sampling": "poisson:probability=0.3,iterations=40",
    }
    changes |= {"algorithm": "els", "records_per_user": 2}
    whole = settings_for(data, tmp_path / "whole", **changes)
    execute(prepare(whole))
    broken = {**SMALL, **POISSON, "data": str(data), "output": str(tmp_path / "broken"), **changes}
    table = tmp_path / "broken" / "metrics.csv"
    killed = 0
    for rows in (3, 11, 1000):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(broken), "resume" if killed else "begin"],
        )
        while child.poll() is None:
            if len(metrics.read_table(table)) >= rows:
                os.kill(child.pid, signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.002)
        child.wait()
    assert killed == 2 and child.returncode == 0
    mine, other = exported(tmp_path / "broken"), exported(tmp_path / "whole")
    for name in other:
        np.testing.assert_array_equal(mine[name], other[name])
    for name in ("metrics.csv", "evaluation.csv"):
        a, b = (metrics.read_table(tmp_path / which / name) for which in ("broken", "whole"))
        for row in (*a, *b):
            row.pop("tokens_per_second", None)
        assert a == b


def test_all_tokens_are_read_and_a_screen_says_so(data, tmp_path):
    reports = []

    def prepared_for(name, **changes):
        reports.clear()
        settings = settings_for(data, tmp_path / name, **changes)
        prepared = prepare(settings, progress=lambda progress: reports.append(progress.note or ""))
        prepared.close()
        return prepared

    cut = prepared_for("cut")
    over = int(np.maximum(cut.parts["train"].record_lengths() - 8, 0).sum())
    assert over and any("train: 19 users" in x and f"{over:,} (" in x for x in reports), reports
    chunks = prepared_for("chunks", long_records="chunks")
    assert any("train: 19 users" in x and "all read in" in x for x in reports), reports
    drawn = "of users with more than 2 rows 2 are drawn"
    assert any(x.endswith(f"{drawn} for a step") for x in reports), reports
    for name, store in chunks.parts.items():
        assert store.num_tokens == cut.parts[name].num_tokens
        assert store.record_lengths().max() <= 8, name
    assert chunks.execution.units.population == cut.execution.units.population
    assert chunks.public_report["guarantee"] == cut.public_report["guarantee"]
    prepared_for("els", algorithm="els", evaluate_records=4)
    assert any(x.endswith(f"{drawn} once, for all steps") for x in reports), reports
    read = [x for x in reports if x.endswith("; an evaluation reads 4 of these rows")]
    assert len(read) == 2 and not any(x.startswith("train") for x in read), reports
    # a record that is the unit of the statement stays whole
    record = {"algorithm": "els", "privacy_unit": "record", "records_per_user": 9}
    whole = prepared_for("record", long_records="chunks", **record)
    assert whole.parts["train"].num_records == cut.parts["train"].num_records
    # and a run that begins with one way does not resume with the other
    execute(prepare(settings_for(data, tmp_path / "cut", steps=1)))
    other = settings_for(data, tmp_path / "cut", long_records="chunks")
    with pytest.raises(UsageError, match="resume"):
        execute(prepare(other, resume=True))


@pytest.mark.ci
def test_a_resumed_run_must_be_the_same_run(data, tmp_path):
    settings = settings_for(data, tmp_path / "run", steps=2)
    execute(prepare(settings))
    variants = {"clip_norm": 0.5, "records_per_user": 3, "epsilon": 9.0, "normalizer": 5.0}
    variants |= {"momentum": 0.5, "sampling": "poisson:probability=0.3,iterations=7"}
    for name, value in variants.items():
        other = settings_for(data, tmp_path / "run", **{name: value})
        with pytest.raises(UsageError, match=r"resume|its noise are not"):
            execute(prepare(other, resume=True))
    changed = tmp_path / "changed"
    write_store(synthetic_store(num_users=20, seed=9), changed / "train")
    write_store(synthetic_store(num_users=5, seed=1), changed / "held-out-users")
    with_other_data = prepare(settings_for(changed, tmp_path / "run"), resume=True)
    with pytest.raises(UsageError, match="data"):
        execute(with_other_data)
    # and what changes no number may change; the run then reaches its end and not one step more
    extra = settings_for(data, tmp_path / "run", checkpoint_every=1, evaluate_every=0)
    summary = execute(prepare(extra, resume=True))
    assert summary["steps"] == 6
    with pytest.raises(UsageError, match="covers 6 steps"):
        prepare(settings_for(data, tmp_path / "run", steps=7), resume=True)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "0").mkdir(parents=True)
    assert check_folder(folder, resume=True)
    (folder / "checkpoints" / "0").rmdir()
    # killed before its first checkpoint, or robbed of all: begins with a secret of its own
    assert not check_folder(folder, resume=True)
    (folder / "privacy-report.json").write_text("{}")
    (folder / "checkpoints" / "damaged-3").mkdir()
    with pytest.raises(UsageError, match="checkpoints are gone"):
        check_folder(folder, resume=True)
    (folder / "checkpoints" / "2").mkdir()
    assert check_folder(folder, resume=True)
    shutil.rmtree(folder / "checkpoints")  # by somebody who wants to begin again
    with pytest.raises(UsageError, match="checkpoints are gone"):
        check_folder(folder, resume=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"data": "stdlib-code", "sampling": "fresh-bins:bins=8,epochs=8",
              "strategy": "optimized", "epsilon": 8.0, "pretrain_steps": 300}),
        (["--data=x.jsonl", "--eps=3"], {"data": "x.jsonl", "epsilon": 3.0, "delta": 1e-5}),
        (["--epochs=2", "--iters=4", "--eps=3"],
         {"sampling": "fresh-bins:bins=4,epochs=2", "epsilon": 3.0, "delta": 1e-5}),
        (["--algorithm=none"], {"strategy": "identity", "epsilon": 0.0, "delta": 0.0}),
        (["--model=gpt2"], {"pretrain_steps": 0}),
        (["--sampling=poisson:probability=0.1,iterations=9", "--eps=1", "--delta=1e-5"],
         {"data": "stdlib-code", "strategy": "optimized", "pretrain_steps": 300}),
    ],
)  # fmt: skip
def test_what_the_flags_leave_open_is_filled_in(words, expected):
    said = CliRunner().invoke(command, [*words, "--show-config"], catch_exceptions=False)
    tables = tomllib.loads(said.stdout).values()
    actual = {name: value for table in tables for name, value in table.items()}
    assert expected.items() <= actual.items()


def test_the_move_of_a_fitted_rate_follows_what_the_model_has_read():
    settings = TrainConfig(sampling="fixed-order:bins=1,epochs=1", epsilon=1.0, delta=0.1)
    variant = dataclasses.replace(settings, pretrain_steps=3)
    assert settings.data == "stdlib" and (settings.move, variant.move) == (0.04, 0.003)
    assert dataclasses.replace(variant, data="stdlib-code").move == 0.04
    assert dataclasses.replace(variant, noise_move=0.012).move == 0.012


@pytest.mark.parametrize("remainder", ["empty", "damaged"])
def test_other_data_never_meets_the_secret_of_a_run_without_checkpoints(tmp_path, remainder):
    folder = tmp_path / "run"
    settings = TrainConfig(sampling="fixed-order:bins=1,epochs=1", epsilon=1.0, delta=0.1)
    (folder / "checkpoints").mkdir(parents=True)

    def secret():
        return secret_of(settings, folder, check_folder(folder, resume=True)).to_bytes()

    first = secret()
    (folder / "checkpoints" / "0").mkdir()
    assert secret() == first  # a control
    (folder / "checkpoints" / "0").rename(folder / "checkpoints" / "damaged-0")
    if remainder == "empty":
        (folder / "checkpoints" / "damaged-0").rmdir()
    assert secret() != first


def test_a_run_is_gone_on_with_where_one_is(tmp_path):
    """A folder that is misspelled, or another, would begin a run anew and spend ε once more."""
    other = tmp_path / "other"
    other.mkdir()
    for folder in (tmp_path / "runn", other):
        with pytest.raises(UsageError, match="holds no run to resume"):
            check_folder(folder, resume=True)
    assert not (tmp_path / "runn").exists()
    (other / "secret").write_bytes(b"")  # killed before its first checkpoint: no noise was used
    assert not check_folder(other, resume=True)
    words = ["--resume", f"--output={tmp_path / 'runn'}", "--data=stdlib", *RUN]
    said = CliRunner().invoke(command, words, catch_exceptions=False)
    assert said.exit_code == 2 and said.stdout == "" and len(said.stderr.splitlines()) == 1
    assert "holds no run to resume" in said.stderr and "leave --resume out" in said.stderr


RUN = ["--sampling=poisson:probability=0.1,iterations=10", "--eps=8", "--delta=1e-4"]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("json:loads", "missing a required argument: 's'"),
        ("builtins:dict", "must be a function to call with vocab_size, length and seed"),
        ("math:pi", "must be a function to call with"),
        ("no_such:module", "cannot be imported"),
    ],
)
def test_a_model_that_is_no_function_of_the_settings_is_refused_before_any_work(
    model, problem, tmp_path, monkeypatch
):
    monkeypatch.setattr("mfopt.training.prepare._open_data", None)
    words = [f"--model={model}", f"--output={tmp_path / 'run'}", "--data=stdlib", *RUN]
    said = CliRunner().invoke(command, words, catch_exceptions=False)
    assert said.exit_code == 2 and said.stdout == ""
    assert f"--model {model}: " in said.stderr and problem in said.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    before_release(
        [
            {"algorithm": "els"},
            {"algorithm": "group", "epsilon": 20.0},
            {"algorithm": "els", "privacy_unit": "record", "records_per_user": 7},
            {"algorithm": "none", "epsilon": 0.0, "delta": 0.0},
            {"lora_rank": 2},
            {"algorithm": "els", "sampling": "balls-in-bins:bins=3,epochs=1"},
            {
                "sampling": "fixed-order:bins=3,epochs=2",
                "optimizer": "adam",
            },
            {
                "sampling": "cyclic-poisson:probability=0.5,bands=2,iterations=4",
                "normalized": False,
                "private_metrics": False,
                "evaluate_every": 3,
            },
        ],
        *(2, 7),
    ),
    ids=lambda c: c.get("algorithm", "uls") + " " + c.get("sampling", "")[:12],
)
def test_every_algorithm_runs(data, tmp_path, changes):
    settings = settings_for(data, tmp_path / "run", **{"steps": 2, "evaluate_every": 0} | changes)
    summary = execute(prepare(settings))
    assert summary["steps"] == 2
    if not settings.private_metrics:  # tables of private records are left out
        names = {path.name for path in (tmp_path / "run").iterdir()}
        assert not names & {"evaluation.csv", "metrics.csv"} and not summary["after"]
    assert all(np.isfinite(array).all() for array in exported(tmp_path / "run").values())
    if settings.algorithm == "none":
        assert summary["privacy"] is None
    else:
        guarantee = summary["privacy"]["guarantee"]
        assert guarantee["epsilon"] == pytest.approx(settings.epsilon)
        assert guarantee["privacy_unit"] == settings.privacy_unit
        assert guarantee["delta"] <= 1.1e-4


def test_settings_round_trip_and_refuse_what_is_unknown(tmp_path):
    settings = TrainConfig(**POISSON, records_per_user=3, private_metrics=False, output="a b")
    path = tmp_path / "c.toml"
    path.write_text(settings.to_toml())
    assert config.load(path) == settings
    assert config.load(path, {"length": 7, "data": None}).length == 7
    moved = config.load(path, {"output": "elsewhere", "checkpoint_every": 9})
    assert moved.fixed == settings.fixed
    assert config.load(path, {"clip_norm": 2.0}).fixed != settings.fixed
    for text, match in [
        ("[privacy]\nepsilom = 1.0\n", "epsilom"),
        ("[data]\nepsilon = 1.0\n", "epsilon"),
        ("[extra]\na = 1\n", "tables"),
        ("[optimizer]\nwarmup = 0\n", "Leave it out, if an earlier version wrote it"),
        ("[data]\nlength = 1.5\n", "length"),
        ("[data]\nlength = true\n", "length"),
        ("[data\n", "TOML"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=match):
            config.load(path, POISSON)
    unknown = ("poisson:probability=x,iterations=3", "poisson:rate=1", "dice:bins=3", "poisson")
    for changes, match in (
        ({"sampling": "", "epsilon": 0.0, "delta": 0.0}, "either"),
        ({"delta": 0.0}, "a target has both"),
        ({"epsilon": 0.0, "delta": 0.0}, "needed with"),
        ({"optimizer": "lion"}, "optimizer"),
        *(({"sampling": bad}, "sampling") for bad in unknown),
    ):
        with pytest.raises(UsageError, match=match):
            TrainConfig(**{**POISSON, **changes})


@pytest.mark.ci
def test_the_command_line(data, tmp_path):
    flags = flags_of(**SMALL, **POISSON, data=data, output=tmp_path / "run", steps=2)
    fewer = [flag for flag in flags if not flag.startswith("--steps")]
    elsewhere = [flag for flag in flags if not flag.startswith("--output")]
    runner = CliRunner()
    shown = runner.invoke(command, [*flags, "--show-config"])
    assert shown.exit_code == 0 and "width = 8" in shown.output
    result = invoked("train", *flags, "--report-only", "--json")
    assert result.exit_code == 0 and "epsilon, delta    8, 0.0001" in result.stderr
    (tmp_path / "printed.json").write_text(result.stdout)
    assert invoked("verify", tmp_path / "printed.json").exit_code == 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    done = runner.invoke(command, [*flags, "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0 and "2 steps done" in done.stdout
    repeated = runner.invoke(command, [*fewer, "--resume", "--json", "--quiet", "--steps=4"])
    assert json.loads(repeated.stdout)["steps"] == 4
    for arguments, words in [
        (flags, "--resume"),
        (["--resume", "--report-only", *flags], "--report-only"),
        ([*flags, "--processes=2"], "belong together"),
        (
            [flag.replace("--epsilon=8.0", "--eps=0") for flag in elsewhere],
            "--eps 0.0: must be above 0",
        ),
        ([*flags, "--coordinator=here", "--processes=2", "--process=0"], "HOST:PORT"),
        ([*flags, "--coordinator=here:1", "--processes=2", "--process=2"], r"0..1"),
        ([*elsewhere, f"--output={data / 'train' / 'metadata.json'}"], "cannot be made a folder"),
    ]:
        wrong = runner.invoke(command, [*arguments, "--quiet"])
        assert wrong.exit_code == 2 and words in wrong.stderr


FILE = Path(__file__).parents[1] / "artifacts" / "factorizations" / "blt-4-8x32-eps2.npz"


@pytest.mark.release
def test_a_factorization_file_brings_its_sampling_and_its_guarantee(data, tmp_path):
    changes = {"factorization": str(FILE), "sampling": "", "epsilon": 0.0, "delta": 0.0, "steps": 2}
    settings = settings_for(data, tmp_path / "run", evaluate_every=0, **changes)
    prepared = prepare(settings)
    summary = execute(prepared)
    stored = mfopt.load(FILE)
    guarantee = summary["privacy"]["guarantee"]
    assert (guarantee["epsilon"], guarantee["status"]) == (2.0, "certified")
    assert summary["privacy"]["noise_multiplier"] == stored.noise_multiplier
    assert summary["privacy"]["iterations_covered"] == 256
    assert prepared.execution.sampler.scheme == stored.sampling
    assert prepared.execution.noise.digest == stored.digest
    with pytest.raises(UsageError, match="adds no noise"):
        prepare(settings_for(data, tmp_path / "other", algorithm="none", **changes))


def test_the_c_of_a_file_can_be_accounted_anew_for_groups(data, tmp_path, monkeypatch):
    requests = []

    def solve(execution, epsilon, delta):
        requests.append((execution, epsilon, delta))
        raise FailureError("seen")

    monkeypatch.setattr(privacy, "solved", solve)
    for algorithm in ("els", "group"):
        changes = {"factorization": str(FILE), "sampling": "", "algorithm": algorithm}
        with pytest.raises(FailureError, match="seen"):
            prepare(settings_for(data, tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()
    stored = mfopt.load(FILE)
    (tight, *target), (plain, *smaller) = requests
    assert tight.sampling == plain.sampling == stored.sampling
    assert tight.strategy.describe() == stored.strategy.describe()
    assert (tight.group_size, plain.group_size) == (2, 1)
    assert target == [8.0, 1e-4]
    assert smaller == list(one_unit_target(8.0, 1e-4, 2))


def test_a_strategy_is_optimized_before_a_private_run(data, tmp_path, monkeypatch):
    for settings in ({**POISSON, "algorithm": "none"}, {"factorization": "x.npz"}):
        with pytest.raises(UsageError, match="strategy"):
            TrainConfig(**settings, strategy="blt")
    with pytest.raises(UsageError, match="mfopt optimize"):  # not left out without a word
        prepare(settings_for(data, tmp_path / "none", strategy="optimized"))
    # where a unit that is gone makes room for another, the account is for its data alone
    sampling = "truncated-poisson:probability=0.2,batch_size=6,population=20,iterations=4"
    flags = flags_of(**SMALL, data=data, output=tmp_path / "cut", sampling=sampling)
    assert printed("train", *flags, "--report-only")["guarantee"]["adjacency"] == "zero-out"
    # a file of another target in the output folder is not taken for this one
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "factorization.npz").write_bytes(FILE.read_bytes())
    flags = ["--sampling=balls-in-bins:bins=32,epochs=8", "--strategy=blt", "--epsilon=3"]
    words = [*flags, "--delta=1e-5", f"--output={tmp_path / 'run'}"]
    refused = CliRunner().invoke(command, words)
    assert refused.exit_code == 2 and "not for" in refused.output
    # one that cannot be certified leaves no folder
    monkeypatch.setattr(mfopt.optimize, "factorize", lambda *_, **__: 1 / 0)
    assert CliRunner().invoke(command, [*words[:-1], f"--output={tmp_path / 'new'}"]).exit_code == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.release
def test_a_run_that_optimized_its_strategy_goes_on_by_its_written_settings(data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "factorization.npz").write_bytes(FILE.read_bytes())
    small = {**SMALL, "data": data, "output": tmp_path / "run", "evaluate_every": 0}
    bins = {"sampling": "balls-in-bins:bins=32,epochs=8", "strategy": "blt"}
    flags = [*flags_of(**small, **bins, epsilon=2, delta=1e-5), "--quiet", "--json"]
    runner = CliRunner()
    begun = runner.invoke(command, [*flags, "--steps=2"], catch_exceptions=False)
    # the file's own guarantee, not one that was made anew
    stored = mfopt.load(FILE)
    assert json.loads(begun.stdout)["privacy"]["noise_multiplier"] == stored.noise_multiplier
    written = ["--config", str(tmp_path / "run" / "config.toml"), "--resume", "--quiet", "--json"]
    gone_on = runner.invoke(command, [*written, "--steps=3"], catch_exceptions=False)
    assert json.loads(gone_on.stdout)["steps"] == 3


@pytest.mark.release
@pytest.mark.parametrize("scheme", ["balls-in-bins", "fresh-bins"])
def test_records_of_a_user_get_a_c_that_was_optimized(data, tmp_path, scheme):
    settings = {"sampling": f"{scheme}:bins=4,epochs=3", "epsilon": 8, "algorithm": "els"}
    sums = []
    for extra in ([], ["--strategy=identity"]):
        output = tmp_path / str(len(sums))
        flags = flags_of(**SMALL, **settings, data=data, output=output)
        facts = printed("train", *flags, *extra, "--report-only")
        del facts["schema"], facts["command"]
        assert facts["guarantee"]["details"]["accounted_group_size"] == 2
        # proved again on fresh samples: up to three tests, of which one has to accept
        assert not [check for check in verification.verify(facts).checks if not check.holds]
        sums.append(facts["noise_against_signal"]["sum_noise_per_coordinate"])
    # by 22% and 8%; from run to run each differs by 0.2%
    assert sums[0] < sums[1]


def test_losses_of_held_out_users_are_paid_for(data, tmp_path):
    """Noise of the σ of the report, once a step; a run of other steps or users is refused."""
    settings = settings_for(data, tmp_path / "run", validation_bound=3.0, private_metrics=False)
    prepared = prepare(settings)
    validation, report = prepared.validation, prepared.report(0)
    assert report["validation"]["steps"] == [0, 3, 6] and report["validation"]["users"] == 5
    assert verification.verify(report).holds
    # the σ is the smallest for the (ε, δ) of the run
    less = report["validation"] | {"noise_multiplier": 0.99 * validation.noise_multiplier}
    failed = verification.verify(report | {"validation": less}).checks
    assert [check.name for check in failed if not check.holds] == ["held-out users"]
    # the sum of bounded losses, and noise that differs from step to step
    evaluator = metrics.Evaluator(prepared.model, settings.length)
    exact = dataclasses.replace(validation, noise_multiplier=1e-9)
    params = prepared.model.params
    assert (
        0
        < exact.loss(evaluator, params, 0)
        < dataclasses.replace(exact, bound=9.0).loss(evaluator, params, 0)
    )
    drawn = [validation.loss(evaluator, params, step) for step in range(40)]
    noise = (np.array(drawn) - exact.loss(evaluator, params, 0)) * 5 / 3.0
    assert len({*drawn}) == 40
    assert abs(np.std(noise) / validation.noise_multiplier - 1) < 4 / np.sqrt(80)
    summary = execute(prepared)
    assert summary["before"].keys() == summary["after"].keys() == {"validation"}
    with pytest.raises(UsageError, match="validation"):
        execute(prepare(dataclasses.replace(settings, evaluate_every=2), resume=True))
    with pytest.raises(UsageError, match="held-out users"):
        prepare(settings_for(data, tmp_path / "on", model=str(tmp_path / "run" / "model")))


def test_a_user_who_is_held_out_and_trained_on_is_refused(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    for name in ("user_names", "name_offsets"):
        file = Path("train") / f"{name}.npy"
        shutil.copy(tmp_path / "data" / file, tmp_path / "data" / "held-out-users")
    with pytest.raises(UsageError, match="trained on too"):
        prepare(settings_for(tmp_path / "data", tmp_path / "run", validation_bound=3.0))
