"""A budget continued on new data: where it begins, what all runs cost, what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_train_run import data, exported, settings_for  # noqa: F401 (fixtures)
from train_fixtures import synthetic_store
from train_oracles import verified, write_store

from mfopt import sampling
from mfopt.accounting import phases
from mfopt.errors import UsageError
from mfopt.mechanism import Mechanism
from mfopt.strategies import Identity
from mfopt.training import verification
from mfopt.training.continued import path_of
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare
from mfopt.training.privacy import report_text, solved
from mfopt.training.verification import composed


@pytest.mark.ci
def test_a_run_begins_where_another_ended_and_states_both(data, tmp_path):  # noqa: F811
    write_store(synthetic_store(num_users=15, seed=7), tmp_path / "data" / "train")
    first = settings_for(data, tmp_path / "first", steps=2)
    old = execute(prepare(first))["privacy"]

    def following(before, folder, **changes):
        changes = {"data": str(tmp_path / "data"), "epsilon": 4.0, "delta": 1e-5} | changes
        changes |= {"output": str(tmp_path / folder), "model": str(Path(before.output) / "model")}
        return dataclasses.replace(first, steps=0, **changes)

    settings = following(first, "second")
    prepared = prepare(settings)
    assert prepared.model.export is not None
    prepared.model.export(prepared.model.params, prepared.model.frozen, tmp_path)
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, exported(tmp_path / "first")[name])
    facts = execute(prepared)["privacy"]
    total, runs = facts["guarantee"], facts["guarantee"]["details"]["runs"]
    assert [run["epsilon"] for run in runs] == [old["guarantee"]["epsilon"], pytest.approx(4.0)]
    assert total["delta"] >= 1e-4 + 1e-5
    # both are Poisson sampling: on one grid, less than the sum, more than either
    assert 8.0 < total["epsilon"] < runs[0]["epsilon"] + runs[1]["epsilon"]
    assert "2 runs" in facts["statement"]
    assert "the last of them this one; a user may be in the data of all" in report_text(facts)
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
    third = following(settings, "third", data=first.data)
    privacy = execute(prepare(third))["privacy"]
    assert len(privacy["guarantee"]["details"]["runs"]) == 3
    assert privacy["guarantee"]["epsilon"] > total["epsilon"]
    # a stopped one is resumed, but with no other earlier run; and none continues a lie
    prepare(third, resume=True).close()
    report = tmp_path / "second" / "model" / "privacy-report.json"
    assert verification.read(report.parent)["guarantee"] == total  # of a folder, too
    report.write_text(json.dumps(facts | {"warnings": ["another"]}))
    with pytest.raises(UsageError, match="does not hold: warnings"):
        prepare(third, resume=True)
    report.unlink()
    (tmp_path / "second" / "privacy-report.json").unlink()
    with pytest.raises(UsageError, match="continues"):
        execute(prepare(third, resume=True))
    # without privacy nothing is stated; what begins there, or from a copy, still counts the first
    shutil.copytree(tmp_path / "first" / "model", tmp_path / "copy")
    public = following(first, "public", algorithm="none", epsilon=0.0, delta=0.0)
    public = dataclasses.replace(public, steps=1, model=str(tmp_path / "copy"))
    prepared = prepare(public)
    assert prepared.public_report is None
    assert execute(prepared)["privacy"] is None
    path = path_of(following(public, "fourth"))
    assert path is not None and verification.read(path)["guarantee"] == old["guarantee"]
    never = settings_for(data, tmp_path / "never", algorithm="none", epsilon=0.0, delta=0.0)
    execute(prepare(dataclasses.replace(never, steps=1)))
    notes = []
    prepare(following(never, "fifth", algorithm="uls"), progress=lambda at: notes.append(at.note))
    assert any("never/model was trained without privacy" in note for note in notes)


def test_statements_add_up_where_no_grid_does():
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
