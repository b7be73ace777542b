"""A privacy report in other hands: what follows from it is computed again."""

import json
import re

import numpy as np
import pytest
from alterations import GONE, alterations, places, with_leaf
from click.testing import CliRunner
from mfopt_cli.commands.verify import command
from selection import before_release
from sources import ROOT
from test_train_run import data, settings_for  # noqa: F401 (fixtures)
from train_oracles import verified

from mfopt.errors import UsageError
from mfopt.guarantee import Guarantee
from mfopt.training import verification
from mfopt.training.prepare import prepare

FILE = ROOT / "artifacts" / "factorizations" / "blt-4-8x32-eps2.npz"


def report_of(data, folder, **changes):  # noqa: F811
    prepared = prepare(settings_for(data, folder, **changes))
    prepared.close()
    return json.loads(json.dumps(prepared.report(0)))


@pytest.mark.parametrize(
    "changes",
    before_release(
        [
            {"algorithm": "group", "epsilon": 20.0, "learning_rate": 0.0},
            {"algorithm": "els"},
            {"sampling": "fixed-order:bins=3,epochs=2"},
        ],
        *(0, 1),
    ),
    ids=lambda c: "-".join(c),
)
def test_an_honest_report_holds_and_a_better_one_does_not(data, tmp_path, changes):  # noqa: F811
    facts = report_of(data, tmp_path / "run", **changes)
    guarantee, account = facts["guarantee"], facts["account"]
    planet = guarantee["details"] | {"sampled_unit": "planet"}
    lies = [
        {"account": account | {"epsilon": 0.9 * account["epsilon"]}},
        {"normalizer": 2 * facts["normalizer"]},
        {"sampling": facts["sampling"] | {"population": 5}},
        {"parameters": 10 * facts["parameters"]},
        {"mechanism_digest": "0" * 64},
        {"steps_done": 100},
        {"holds": False, "pinned": True},
        {"not_covered": [*facts["not_covered"], "nothing: all else is covered"]},
        {"note": "everything is covered"},
        {"mfopt": "9999.1"},
        {"guarantee": guarantee | {"details": {"sampled_unit": "planet"}}},
        {"units": facts["units"] | {"note": "all is covered"}},
        {
            "units": facts["units"] | {"unit": "planet"},
            "guarantee": guarantee | {"details": planet},
        },
        {"guarantee": guarantee | {"details": guarantee["details"] | {"note": "all is covered"}}},
        {"sampling": facts["sampling"] | {"expected_batch": 1e6}},
        {"warnings": [*facts["warnings"], "all is well"]},
        {"noise_multiplier": 10**400},
        {"warnings": ["all is well"] * len(facts["warnings"])} if facts["warnings"] else None,
    ]
    other = "bound" if guarantee["status"] == "certified" else "certified"
    for status in (other, "estimate"):
        lies.append({"guarantee": guarantee | {"status": status}})
    actual = verified(facts, filter(None, lies))
    assert actual.claims
    # a rate that says more, or that an older version wrote with less
    rate = facts.pop("learning_rate")
    for other in (rate | {"note": "private"}, {"value": 0.1}, None):
        written = facts if other is None else facts | {"learning_rate": other}
        match = r"must have the fields chosen, momentum|not a privacy report"
        with pytest.raises(UsageError, match=match):
            verification.verify(written)


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    before_release(
        [
            {"validation_bound": 4.0, "learning_rate": 0.0},
            {"algorithm": "fedavg", "weight_cap": 2},
            {"algorithm": "els", "learning_rate": 0.0},
            {"sampling": "", "factorization": str(FILE), "epsilon": 0.0, "delta": 0.0},
        ],
        0,
    ),
    ids=lambda c: "-".join(c),
)
def test_every_field_altered_is_refused_or_told(data, tmp_path, changes, monkeypatch):  # noqa: F811
    facts = report_of(data, tmp_path / "run", **changes)
    proved, prove = {}, verification.proofs.prove

    def prove_once(mechanism, multiplier, stated, **options):
        key = mechanism.digest, multiplier, stated.delta, stated.status
        if key not in proved:
            proved[key] = prove(mechanism, multiplier, stated, **options)
        return proved[key]

    monkeypatch.setattr(verification.proofs, "prove", prove_once)
    assert verification.verify(facts).holds
    believed, recorded = [], set()
    for path, leaf in places(facts):
        if path == ("account", "delta"):  # what is proved again at a lower δ is true
            continue
        for value in alterations(leaf):
            try:
                actual = verification.verify(with_leaf(facts, path, value))
            except UsageError:
                continue
            names = [".".join(map(str, path[:end])) for end in range(1, len(path) + 1)]
            if actual.holds and not any(name in actual.told for name in names):
                believed.append((path, leaf, value))
            elif actual.holds:
                recorded.add(names[-1])
                same_type = type(value) is type(leaf) or None in (leaf, value) or value is GONE
                assert same_type or names[1:2] == ["account.details"], (path, value)
    assert not believed
    assert (
        "clipping.clip_norm" in recorded
        or "sampling.population" in recorded
        or "units.length" in recorded
    )
    assert not recorded & {"guarantee.epsilon", "noise_multiplier", "mechanism_digest"}


@pytest.mark.release
def test_a_certified_file_is_proved_again(data, tmp_path):  # noqa: F811
    changes = {"factorization": str(FILE), "sampling": "", "epsilon": 0.0, "delta": 0.0}
    facts = report_of(data, tmp_path / "run", **changes)
    # C is in the report, bit for bit
    assert {len(part["values"]) for part in facts["strategy_arrays"].values()} <= {1, 4}
    assert verification.verify(facts).holds
    less = facts["account"] | {"epsilon": 1.7}
    assert not verification.verify(facts | {"account": less}).holds
    # a certificate that may be wrong is not a proof that cannot be
    believed = []
    for change in ({"status": "exact"}, {"status": "bound"}, {"failure_probability": 0.0}):
        pair = {name: facts[name] | change for name in ("account", "guarantee")}
        text = str(Guarantee(**pair["guarantee"]))
        if verification.verify(facts | pair | {"statement": text}).holds:
            believed.append(change)
    assert not believed
    # a C that does not fit is looked up in its file, and must be that of the digest
    without = facts | {"strategy_arrays": None}
    with pytest.raises(UsageError, match="factorization"):
        verification.verify(without)
    assert verification.verify(without, factorization=FILE).holds
    other = FILE.with_name("blt-4-16x128-eps2.npz")
    if other.is_file():
        assert not verification.verify(without, factorization=other).holds


def test_the_command_line(data, tmp_path):  # noqa: F811
    facts = report_of(data, tmp_path / "run")
    path = tmp_path / "report.json"
    runner = CliRunner()

    def checked(content, **options):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return runner.invoke(command, [str(path), "--quiet"], **options)

    assert checked(facts, catch_exceptions=False).exit_code == 0
    said = runner.invoke(command, [str(path)], catch_exceptions=False)
    assert "not verifiable" in said.stdout
    assert "computed here" in said.stdout and "told by the report" in said.stdout
    sigmas = re.findall(r"(?:noise multiplier +|σ = )([\d.]+)", said.stdout)
    assert sigmas and min(map(float, sigmas)) >= facts["noise_multiplier"]
    printed = json.loads(runner.invoke(command, [str(path), "--json"]).stdout)
    assert printed["holds"] and len(printed["checks"]) > 10
    for name, exit_code in (("train", 0), ("train: all is covered", 1)):  # as JSON is printed
        assert checked({"schema": 1, "command": name, **facts}).exit_code == exit_code
    pinned = report_of(data, tmp_path / "pinned", seed=3)
    assert pinned["pinned"] and not pinned["holds"]
    refused = checked(pinned)
    assert refused.exit_code == 1 and "claims a guarantee" in refused.stderr
    wrong = checked(facts | {"parameters": 3})
    assert wrong.exit_code == 1 and "noise against signal" in wrong.stderr
    rng = np.random.default_rng(0)
    for content in ("", [], {}, {"format": 3}, facts | {"sampling": 3}):
        bad = checked(content)
        assert bad.exit_code == 2 and "privacy report" in bad.stderr, content
    for _ in range(20):  # a part of it gone
        fewer = dict(facts)
        del fewer[rng.choice(sorted(fewer))]
        assert checked(fewer).exit_code in (0, 1, 2)
