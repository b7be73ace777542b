"""Records per user by a private median: the law of the draw, its ε, what a run pays and keeps."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner
from mfopt_cli.commands.train import command
from scipy import stats
from test_train_privacy import STORE, account_for, execution_for
from test_train_run import FILE, data, settings_for  # noqa: F401 (fixtures)
from train_fixtures import synthetic_store
from train_oracles import verified, write_store

from mfopt.errors import UsageError
from mfopt.sampling import FixedOrder
from mfopt.training import config, median, privacy, verification
from mfopt.training.execute import execute
from mfopt.training.median import GRID, doubled_rank_errors, draw
from mfopt.training.prepare import prepare
from mfopt.training.secrets import RunSecret
from mfopt.training.units import UserUnits

COUNTS = np.array([0, 1, 1, 2, 5, 7, 7, 9, 300])


def chances(errors, epsilon):
    weights = np.exp(-0.5 * epsilon * np.asarray(errors))
    return weights / weights.sum()


def test_draws_follow_the_exponential_mechanism():
    there = [max(point for point in GRID if point <= count) for count in COUNTS if count]
    # 2 (users on the larger side - half of all), at least 0; by counting
    sides = [(sum(c < point for c in there), sum(c > point for c in there)) for point in GRID]
    errors = [max(0, 2 * max(side) - len(there)) for side in sides]
    np.testing.assert_array_equal(doubled_rank_errors(COUNTS), errors)
    source, draws = random.Random(1), 20_000
    numbers = iter(lambda: source.getrandbits(256), None)
    drawn = Counter(draw(COUNTS, 0.8, numbers) for _ in range(draws))
    found = [drawn[point] for point in GRID]
    assert stats.chisquare(found, draws * chances(errors, 0.8)).pvalue > 1e-3
    # controls: another ε, and one user less
    for wrong in (chances(errors, 1.0), chances(doubled_rank_errors(COUNTS[:-1]), 0.8)):
        assert stats.chisquare(found, draws * wrong).pvalue < 1e-6


def test_no_comparison_is_rounded_towards_less_privacy():
    def kept(epsilon, number):  # one user of 2 records: the point 1 is kept by one comparison
        return draw(np.array([2]), epsilon, iter([0, number, 1])) == 1

    for epsilon in (1e-9, *np.random.default_rng(0).uniform(0.01, 3, 50).tolist(), 900.0):
        with localcontext(prec=120):
            limit = Decimal(2) ** 256 * (-Decimal(epsilon) / 2).exp()
            above = int(limit * (1 + Decimal("1e-15"))) + 1
            assert kept(epsilon, int(limit)) and (above >= 2**256 or not kept(epsilon, above))


def test_one_user_changes_no_chance_by_more_than_epsilon():
    users = (1, 2, 3, 5, 999)

    def worst(epsilon):
        found = 0.0
        for size in range(7):
            for counts in itertools.combinations_with_replacement(users, size):
                before = chances(doubled_rank_errors(np.array(counts, int)), epsilon)
                for more in (0, *users):  # an emptied user is no user
                    after = chances(doubled_rank_errors(np.array([*counts, more])), epsilon)
                    found = max(found, np.abs(np.log(after / before)).max())
        return found

    assert 0.75 * 0.1 < worst(0.1) <= 0.1 * (1 + 1e-9)
    assert worst(0.2) > 0.1  # a control: half of the scale


def test_shares_add_up_to_no_more_than_the_target():
    rng = np.random.default_rng(0)
    for total, part in (rng.uniform(0, 1, (200, 2)) * (10, 0.9)).tolist():
        made = settings_for(
            "x", "y", epsilon=total, records_per_user=0, median_epsilon=total * part
        )
        units = UserUnits(STORE, records=2, length=8, median_epsilon=total * part)
        account = account_for()
        own = dataclasses.replace(account.guarantee, epsilon=made.training_epsilon, status="exact")
        account = dataclasses.replace(account, guarantee=own)
        stated = privacy.statement(account, execution_for(account, units))
        assert total * (1 - 1e-14) <= stated.epsilon <= total and stated.status == "bound"
        assert Fraction(stated.epsilon) >= Fraction(own.epsilon) + Fraction(total * part)
    replaced = account_for(FixedOrder(bins=4, epochs=2), adjacency="replace")
    with pytest.raises(UsageError, match="median_epsilon"):
        privacy.statement(replaced, execution_for(replaced, units))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *(({"median_epsilon": value}, "median_epsilon") for value in (math.nan, math.inf, -0.1)),
        *(({"median_epsilon": value}, "leaves nothing") for value in (8.0, 9.0, 8 - 1e-15)),
        ({"algorithm": "none"}, "protects users"),
        ({"algorithm": "els", "privacy_unit": "record"}, "protects users"),
    ],
)
def test_a_median_that_cannot_be_paid_for_is_refused(changes, match):
    with pytest.raises(UsageError, match=match):
        settings_for("x", "y", **{"records_per_user": 0, "median_epsilon": 0.05} | changes)


@pytest.mark.ci
def test_a_run_draws_once_and_pays_once(data, tmp_path, monkeypatch):  # noqa: F811
    asked = {"algorithm": "els", "records_per_user": 0, "median_epsilon": 4.0, "evaluate_every": 0}
    settings = settings_for(data, tmp_path / "run", steps=2, **asked)
    with pytest.raises(UsageError, match="covers 6 steps"):  # after the draw, which is kept
        prepare(dataclasses.replace(settings, steps=7))
    with monkeypatch.context() as patch:
        patch.setattr(median, "draw", None)  # a second draw ends here
        # a start in the same folder, as after a kill before the first checkpoint; then the whole
        # run, a resumption, and one by the settings it wrote
        prepared = prepare(settings)
        group, spent = prepared.config.records_per_user, prepared.account.guarantee.epsilon
        assert group in GRID and prepared.account.mechanism.group_size == group
        assert 4 - 1e-9 < spent < 4 and 8 - 1e-9 < prepared.guarantee.epsilon <= 8.0
        facts = execute(prepared)["privacy"]
        written = config.load(tmp_path / "run" / "config.toml")
        for again in (settings, written):
            resumed = prepare(again, resume=True)
            resumed.close()
            assert resumed.config.records_per_user == group
            assert resumed.guarantee == prepared.guarantee
        for changes in ({"median_epsilon": 0.4}, {"records_per_user": 5}, {"seed": 3}):
            with pytest.raises(UsageError, match="is not what"):
                prepare(dataclasses.replace(settings, **changes), resume=True)
        kept = tmp_path / "run" / median.FILE
        kept.rename(tmp_path / "elsewhere")  # nor is a lost one replaced
        with pytest.raises(UsageError, match="is not what"):
            prepare(settings, resume=True)
        # a number that was drawn for one run is none that another may have for nothing
        with pytest.raises(UsageError, match="must be 0"):
            prepare(dataclasses.replace(written, output=str(tmp_path / "new")))
    # nor, before a checkpoint, is one from other data or by a public seed a secret draw from this
    write_store(synthetic_store(num_users=9, seed=5), tmp_path / "other" / "train")
    for number, (place, seed) in enumerate([(tmp_path / "other", -1), (data, 3)]):
        folder = tmp_path / str(number)
        prepare(settings_for(place, folder, **asked, seed=seed)).close()
        with pytest.raises(UsageError, match="is not what"):
            prepare(settings_for(data, folder, **asked))

    assert facts["units"]["median_epsilon"] == 4 and "and a private median" in facts["statement"]
    assert facts["guarantee"]["details"]["epsilon_before_median"] == spent
    assert "epsilon 4 of the total, 4 left" in privacy.report_text(facts)
    lies = [{"guarantee": facts["guarantee"] | {"epsilon": 7.6}}]
    lies += [{"units": facts["units"] | {"median_epsilon": value}} for value in (0.0, 4.1)]
    found = verified(facts, lies)
    assert any("private median at epsilon 4" in check.stated for check in found.checks)
    with pytest.raises(UsageError, match="median_epsilon"):
        verification.verify(facts | {"units": facts["units"] | {"median_epsilon": math.nan}})
    monkeypatch.setattr(median, "GRID", (5,))  # no draw gives a number beside the grid
    assert not verification.verify(facts).holds


def test_the_draw_is_the_secret_s_and_the_flags_reach_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(median, "draw", lambda *given: seen.append(next(given[2])) or 4)
    for name in "ab":
        (tmp_path / name).mkdir()
        settings = settings_for("x", tmp_path / name, records_per_user=0, median_epsilon=0.05)
        assert median.chosen(settings, synthetic_store(), RunSecret.fresh())[0] == 4
    assert seen[0] != seen[1] and all(2**200 < number < 2**256 for number in seen)
    (tmp_path / "a" / "factorization.npz").write_bytes(FILE.read_bytes())  # for ε = 2
    flags = ["--sampling=balls-in-bins:bins=32,epochs=8", "--strategy=blt", "--delta=1e-5"]
    flags += ["--epsilon=2", "--records-per-user=0", "--median-epsilon=0.05"]
    refused = CliRunner().invoke(command, [*flags, f"--output={tmp_path / 'a'}"])
    assert refused.exit_code == 2 and "1.94999999" in refused.output
