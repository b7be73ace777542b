"""A budget continued on new data: where it begins, what all runs cost, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from mfopt_cli.commands.train import command
from safetensors.numpy import load_file
from test_train_run import data, exported, settings_for  # noqa: F401 (fixtures)
from train_fixtures import synthetic_store
from train_oracles import verified, write_store

from mfopt import sampling
from mfopt.accounting import phases
from mfopt.errors import FailureError, UsageError
from mfopt.mechanism import Mechanism
from mfopt.strategies import Identity
from mfopt.training import verification
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare
from mfopt.training.privacy import report_rows, solved
from mfopt.training.verification import composed


@pytest.fixture(scope="module")
def other_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    write_store(synthetic_store(num_users=15, seed=7), folder / "train")
    return folder


@pytest.fixture(scope="module")
def first(data, tmp_path_factory):  # noqa: F811
    settings = settings_for(data, tmp_path_factory.mktemp("runs") / "first", steps=2)
    execute(prepare(settings))
    return settings


def report_in(folder):
    return json.loads((folder / "privacy-report.json").read_text())


def settings_of(first, data, folder, **changes):  # noqa: F811
    changes = {"continue_from": first.output, "epsilon": 4.0, "delta": 1e-5} | changes
    return dataclasses.replace(first, data=str(data), output=str(folder), steps=0, **changes)


@pytest.mark.ci
def test_a_run_begins_where_another_ended_and_states_both(first, other_data, tmp_path) -> None:
    settings = settings_of(first, other_data, tmp_path / "second")
    prepared = prepare(settings)
    begun = exported(Path(first.output))
    assert prepared.model.export is not None
    prepared.model.export(prepared.model.params, prepared.model.frozen, tmp_path)
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, begun[name])
    secrets = {(path / "secret").read_bytes() for path in (tmp_path / "second", Path(first.output))}
    assert len(secrets) == 2
    done = execute(prepared)
    facts, old = report_in(tmp_path / "second"), report_in(Path(first.output))
    total, runs = facts["guarantee"], facts["guarantee"]["details"]["runs"]
    assert done["privacy"]["guarantee"] == total
    assert [run["epsilon"] for run in runs] == [old["guarantee"]["epsilon"], pytest.approx(4.0)]
    assert total["delta"] >= 1e-4 + 1e-5
    # both are Poisson sampling: on one grid, less than the sum, more than either
    assert 8.0 < total["epsilon"] < runs[0]["epsilon"] + runs[1]["epsilon"]
    assert "2 runs" in facts["statement"]
    assert any(name == "composed of" and "data of all" in text for name, text in report_rows(facts))
    lies = [
        {"guarantee": total | {"epsilon": 0.99 * total["epsilon"]}},
        {"guarantee": total | {"delta": 1e-4}},
        {"guarantee": total | {"details": total["details"] | {"runs": runs[1:]}}},
        {"continues": old | {"guarantee": old["guarantee"] | {"epsilon": 1.0}}},
        {"continues": old | {"pinned": True}},
    ]
    verified(facts, lies)
    without_earlier = {name: value for name, value in facts.items() if name != "continues"}
    assert not verification.verify(without_earlier).holds
    # a third one, on the first data again: the sum of three
    third = settings_of(first, first.data, tmp_path / "third", continue_from=settings.output)
    privacy = execute(prepare(third))["privacy"]
    assert len(privacy["guarantee"]["details"]["runs"]) == 3
    assert privacy["guarantee"]["epsilon"] > total["epsilon"]
    assert verification.verify(report_in(tmp_path / "third")).holds
    # and a stopped one is resumed, but not from another run
    prepare(third, resume=True).close()
    elsewhere = dataclasses.replace(third, continue_from=first.output)
    with pytest.raises(UsageError, match="continues"):
        execute(prepare(elsewhere, resume=True))


def test_the_command_takes_the_settings_of_the_earlier_run(first, other_data) -> None:
    flags = ["--continue", first.output, "--data", str(other_data), "--out=x", "--show-config"]
    shown = CliRunner().invoke(command, [*flags, "--eps=4", "--delta=1e-5"])
    printed = tomllib.loads(shown.stdout)
    expected_toml = settings_of(first, other_data, "x").to_toml()
    assert printed == tomllib.loads(expected_toml) and printed["model"]["width"] == 8
    refused = CliRunner().invoke(command, ["--continue=nowhere", "--show-config"])
    assert refused.exit_code == 2 and "nowhere" in refused.output


def test_statements_add_up_where_no_grid_does() -> None:
    """Against the sum; and against the composition of rounds itself."""

    def run(scheme, epsilon, delta=1e-6, **changes):
        mechanism = Mechanism(scheme, Identity(), privacy_unit="user")
        solution = solved(mechanism, epsilon, delta)
        return dataclasses.replace(solution.guarantee, **changes), solution

    poisson = sampling.Poisson(0.1, 20)
    first, second = run(poisson, 2.0), run(sampling.Poisson(0.2, 10), 3.0)
    pair = composed([first, second])
    parts = [
        phases.Phase(solution.mechanism, solution.noise_multiplier)
        for _, solution in (first, second)
    ]
    assert pair.epsilon == phases.compose(parts, delta=pair.delta).epsilon < 5.0
    assert pair.delta >= 2e-6 and pair.status == "bound"
    # a statement that is not the account's own (truncation, a grid) is summed
    charged = run(poisson, 2.0)
    charged = dataclasses.replace(charged[0], delta=2e-6), charged[1]
    summed = composed([charged, second])
    stated = charged[0].epsilon + second[0].epsilon
    assert stated <= summed.epsilon <= stated * (1 + 1e-15) and summed.delta >= 3e-6
    for changes, match in (
        ({"adjacency": "zero-out"}, "adjacency"),
        ({"privacy_unit": "record"}, "privacy_unit"),
        ({"status": "estimate"}, "estimate"),
    ):
        with pytest.raises(UsageError, match=match):
            composed([(dataclasses.replace(first[0], **changes), first[1]), second])


@pytest.mark.ci
def test_what_cannot_be_verified_is_not_continued(first, data, other_data, tmp_path) -> None:  # noqa: F811
    pinned = settings_for(data, tmp_path / "pinned", steps=1, seed=3)
    execute(prepare(pinned))
    public = settings_for(data, tmp_path / "public", steps=1, algorithm="none")
    execute(prepare(public))
    write_store(synthetic_store(num_users=15, tokenizer_digest="x"), tmp_path / "words" / "train")
    for number, (changes, match) in enumerate(
        [
            ({"continue_from": pinned.output}, "does not hold: claims a guarantee"),
            ({"continue_from": public.output}, "is not private"),
            ({"continue_from": str(tmp_path / "nothing")}, "holds no run"),
            ({"width": 16}, "other parameters"),
            ({"data": str(tmp_path / "words")}, "another tokenizer"),
        ]
    ):
        settings = settings_of(first, other_data, tmp_path / f"out{number}")
        with pytest.raises(UsageError, match=match):
            prepare(dataclasses.replace(settings, **changes))
        assert not (tmp_path / f"out{number}" / "checkpoints").exists()
    # what is not as it was written is not read
    altered = tmp_path / "altered"
    shutil.copytree(first.output, altered)
    (facts,) = (altered / "checkpoints" / "2" / "facts").glob("metadata")
    facts.write_text(facts.read_text().replace('"epsilon": 8.0', '"epsilon": 1.0'))
    settings = settings_of(first, other_data, tmp_path / "out", continue_from=str(altered))
    with pytest.raises(FailureError, match="facts are not what was written"):
        prepare(settings)
    with pytest.raises(UsageError, match="output folder too"):
        prepare(dataclasses.replace(first, continue_from=first.output), resume=True)
    for changes in ({"pretrain_steps": 3}, {"algorithm": "none", "epsilon": 0.0, "delta": 0.0}):
        with pytest.raises(UsageError, match="continue_from"):
            settings_of(first, other_data, tmp_path, **changes)
