"""The statement about a run: what fits and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from train_fixtures import synthetic_store

from mfopt import sampling
from mfopt.accounting.closed_form.group import black_box_group, one_unit_target
from mfopt.errors import UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.strategies import BLT, Identity
from mfopt.training import privacy
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.data import TokenStore
from mfopt.training.loop import Execution
from mfopt.training.units import RecordUnits, UserUnits
from mfopt.workloads import PrefixSums

STORE = synthetic_store(num_users=40, empty_users=(3,))
SCHEME = sampling.BallsInBins(bins=4, epochs=2)
CLIP = 0.5


def account_for(scheme=SCHEME, *, group_size=1, unit="user", sigma=1.5, strategy=None):
    guarantee = Guarantee(2.0, 1e-6, sigma, unit, group_size, method="for tests", status="bound")
    strategy = strategy or BLT([0.2], [0.8])
    return Factorization(strategy, sigma, scheme, PrefixSums(), guarantee)


def users():
    return UserUnits(STORE, records=2, length=8)


def execution_for(account, units, *, scheme=None, strategy=None, sigma=None, **options):
    sampler = sampling.UnitSampler(scheme or account.sampling, units.population, 0, **options)
    noise = NoiseStream(
        strategy or account.strategy,
        iterations=sampler.scheme.length,
        sampling=sampler.scheme,
        noise_multiplier=sigma or account.noise_multiplier,
        clip_norm=CLIP,
    )
    return Execution(units, sampler, Clipping(CLIP), noise, 10.0)


def test_a_run_that_executes_the_account_gets_its_statement():
    account = account_for()
    stated = privacy.statement(account, execution_for(account, users()))
    assert (stated.epsilon, stated.delta) == (2.0, 1e-6)
    assert (stated.privacy_unit, stated.group_size, stated.adjacency) == ("user", 1, "add-remove")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scheme": sampling.BallsInBins(bins=4, epochs=3)}, "sampling"),
        ({"scheme": sampling.BallsInBins(bins=8, epochs=1)}, "sampling"),
        ({"scheme": sampling.FixedOrder(bins=4, epochs=2)}, "sampling"),
        ({"strategy": Identity()}, "another strategy"),
        ({"sigma": 1.4999}, "noise_multiplier"),
    ],
)
def test_a_run_that_executes_something_else_is_refused(change, match):
    account = account_for()
    with pytest.raises(UsageError, match=match):
        privacy.statement(account, execution_for(account, users(), **change))


def test_the_unit_must_be_the_one_that_is_sampled():
    per_record = account_for(unit="record")
    with pytest.raises(UsageError, match="samples one user"):
        privacy.statement(per_record, execution_for(per_record, users()))
    per_user = account_for(unit="user")
    records = RecordUnits(STORE, group_size=3, length=8)
    with pytest.raises(UsageError, match="samples one record"):
        privacy.statement(per_user, execution_for(per_user, records))
    # a user with up to 3 records needs an account for groups of 3; one record needs none
    with pytest.raises(UsageError, match="up to 3 sampled units"):
        privacy.statement(per_record, execution_for(per_record, records))
    all_kept = execution_for(per_record, RecordUnits(STORE, group_size=7, length=8))
    assert privacy.statement(per_record, all_kept, privacy_unit="record").privacy_unit == "record"
    grouped = account_for(unit="record", group_size=3)
    assert privacy.statement(grouped, execution_for(grouped, records)).privacy_unit == "user"
    with pytest.raises(UsageError, match="clips users"):
        privacy.statement(per_user, execution_for(per_user, users()), privacy_unit="record")


def test_single_records_are_protected_only_where_none_is_left_out():
    texts = [[[k, k] + [1] * k for k in range(2, 6)], [[9, 9, 9]]]
    fewer = [texts[0][1:], texts[1]]

    def kept(users, group_size):
        store = TokenStore.from_records(users)
        units = RecordUnits(store, group_size=group_size, length=8, seed=3)
        rows, _ = units.fetch(np.arange(units.population), 0)
        return units, {tuple(row) for row in rows[:, 0].tolist()}

    account = account_for(unit="record")
    # without one record of a user, another is kept in some record's place: two units change
    assert len(kept(texts, 2)[1] ^ kept(fewer, 2)[1]) > 1
    for users, group_size in ((texts, 2), (texts, 4)):
        units, _ = kept(users, group_size)
        with pytest.raises(UsageError, match="may be kept"):
            privacy.statement(account, execution_for(account, units), privacy_unit="record")
    units, with_it = kept(texts, 5)
    assert len(with_it ^ kept(fewer, 5)[1]) == 1
    stated = privacy.statement(account, execution_for(account, units), privacy_unit="record")
    assert stated.privacy_unit == "record"
    # held out by number: with one record less the numbers of the others are others
    store = TokenStore.from_records(texts, hold_out={"records": 0.05, "users": 0.0, "seed": 0})
    units = RecordUnits(store, group_size=5, length=8)
    with pytest.raises(UsageError, match="held out"):
        privacy.statement(account, execution_for(account, units), privacy_unit="record")


def test_an_emptied_record_moves_no_other_to_another_batch():
    """Under a fixed order a number decides the batch, so it must not follow from content."""
    texts = [[[1] * 5, [2] * 4, [3] * 3], [[7] * 3]]
    emptied = [[[], *texts[0][1:]], texts[1]]
    scheme = sampling.FixedOrder(bins=4, epochs=1)
    account = account_for(scheme, unit="record")

    def units_of(users):
        store = TokenStore.from_records(users, vocab_size=100)
        return RecordUnits(store, length=8, seed=5, group_size=4, reserve=True)

    def batches(users):
        units = units_of(users)
        collected = []
        for step in range(4):
            tokens, mask = units.fetch(np.arange(step, units.population, 4), step)
            kept = mask[:, 0].any(axis=-1)
            collected.append({int(row[0]) for row in tokens[kept, 0]})
        return collected

    pairs = zip(batches(texts), batches(emptied), strict=True)
    assert set().union(*(a ^ b for a, b in pairs)) == {1}
    execution = execution_for(account, units_of(texts))
    stated = privacy.statement(account, execution, privacy_unit="record")
    assert stated.adjacency == "zero-out"


def test_no_statement_in_words_is_better_than_its_numbers():
    account = account_for(sigma=0.49501449)
    guarantee = dataclasses.replace(account.guarantee, epsilon=2.0000001, delta=1.0000001e-6)
    account = dataclasses.replace(account, guarantee=guarantee)
    execution = execution_for(account, users())
    facts = privacy.report(account, execution, guarantee, num_params=10, steps_done=8)
    for text in (str(guarantee), facts["statement"], privacy.report_text(facts)):
        assert "2.00001, 1.00001e-06" in text and "0.495015" in text


def test_without_noise_there_is_no_statement():
    units = users()
    sampler = sampling.UnitSampler(SCHEME, units.population, 0)
    with pytest.raises(UsageError, match="no guarantee"):
        privacy.statement(account_for(), Execution(units, sampler, NoClipping(), None, 10.0))


def test_numbered_batches_protect_data_and_not_presence():
    account = account_for(sampling.FixedOrder(bins=4, epochs=2))
    assert privacy.statement(account, execution_for(account, users())).adjacency == "zero-out"


def test_fixed_batches_protect_what_units_contribute():
    scheme = sampling.FixedBatch(batch_size=10, population=40, iterations=8)
    account = account_for(scheme, strategy=Identity())
    with pytest.raises(UsageError, match="does not compose"):
        privacy.statement(account, execution_for(account, users()))
    solved = privacy.solved(Mechanism(scheme, adjacency="zero-out", privacy_unit="user"), 4, 1e-6)
    stated = privacy.statement(solved, execution_for(solved, users()))
    assert stated.adjacency == "zero-out" and stated.epsilon == 4.0
    wrong = dataclasses.replace(solved, sampling=dataclasses.replace(scheme, population=41))
    with pytest.raises(UsageError, match="population"):
        execution_for(wrong, users())


def test_black_box_group_privacy_against_the_chain_of_inequalities():
    guarantee_of_one = Guarantee(0.5, 1e-9, 2.0, method="x", status="bound")
    group = black_box_group(guarantee_of_one, 4)
    delta = 0.0
    for _ in range(4):  # D_0 .. D_4: δ_{k+1} = δ + e^ε δ_k
        delta = 1e-9 + np.exp(0.5) * delta
    assert group.epsilon == 2.0 and group.delta == pytest.approx(delta)
    epsilon, delta = one_unit_target(2.0, group.delta, 4)
    assert epsilon == 0.5 and delta == pytest.approx(1e-9)
    with pytest.raises(UsageError, match="says nothing"):
        black_box_group(dataclasses.replace(guarantee_of_one, epsilon=8.0), 10)
    account = account_for(unit="record")
    records = RecordUnits(STORE, group_size=3, length=8)
    stated = privacy.statement(account, execution_for(account, records), black_box=True)
    assert stated.epsilon == 6.0 and "black-box" in stated.method


def test_accounts_of_other_schemes_come_from_the_accountant():
    scheme = sampling.Poisson(probability=0.1, iterations=50)
    solution = privacy.solved(Mechanism(scheme, privacy_unit="user"), 4.0, 1e-5)
    assert solution.guarantee.epsilon == 4.0 and solution.sampling is scheme
    assert privacy.statement(solution, execution_for(solution, users())).epsilon == 4.0
    group = privacy.solved(Mechanism(scheme, group_size=3), 4.0, 1e-5)
    assert (
        group.noise_multiplier > 1.5 * solution.noise_multiplier and group.digest != solution.digest
    )


def test_sizes_of_noise_and_signal_against_sampled_noise():
    account = account_for()
    execution = execution_for(account, users())
    sizes = privacy.noise_against_signal(execution, 50_000)
    state = execution.noise.init(np.zeros(50_000, np.float32), seed=1)
    squares, total, totals = [], 0.0, []
    for _ in range(execution.iterations):
        row, state = execution.noise.next(state)
        squares.append(float(np.sum((np.asarray(row) / execution.normalizer) ** 2)))
        total = total + np.asarray(row) / execution.normalizer
        totals.append(float(np.sum(total**2)))
    sums, final = np.sqrt(np.mean(totals)), np.sqrt(totals[-1])
    assert np.sqrt(np.mean(squares)) == pytest.approx(sizes["noise_norm"], rel=0.01)
    assert sums / np.sqrt(50_000) == pytest.approx(sizes["sum_noise_per_coordinate"], rel=0.01)
    assert final == pytest.approx(sizes["noise_of_all_steps"], rel=0.02)
    assert sizes["largest_signal_of_all_steps"] == pytest.approx(8 * sizes["largest_signal_norm"])
    assert sizes["largest_signal_norm"] == pytest.approx(CLIP * (40 / 4) / 10)
    # other strategies than Toeplitz take another path to the same numbers
    independent = dataclasses.replace(account, strategy=Identity())
    unchanged = privacy.noise_against_signal(execution_for(independent, users()), 50_000)
    of_all_steps = np.sqrt(8) * unchanged["noise_norm"]
    assert unchanged["noise_of_all_steps"] == pytest.approx(of_all_steps)


def test_reports_are_public_and_readable():
    account = account_for()
    execution = execution_for(account, users())
    stated = privacy.statement(account, execution)
    facts = privacy.report(account, execution, stated, num_params=100, steps_done=3)
    facts = json.loads(json.dumps(facts))
    text = privacy.report_text(facts)
    for part in ("add-remove", "for tests", "8 covered", "not covered"):
        assert part in text
    assert "NO GUARANTEE" not in text
    scaled = facts | {"strategy": {"kind": "time-scaled", "base": {"kind": "blt", "buffers": 4}}}
    assert "blt, buffers 4, time-scaled" in privacy.report_text(scaled)
    pinned = privacy.report(account, execution, stated, num_params=100, steps_done=3, pinned=True)
    assert "NO GUARANTEE" in privacy.report_text(pinned) and not pinned["holds"]
    weak = dataclasses.replace(stated, delta=1 / execution.units.population)
    doubted = privacy.report(account, execution, weak, num_params=100, steps_done=3)
    assert any("not below 1/N" in said for said in doubted["warnings"])
    assert not any("1/N" in said for said in facts["warnings"])
    guess = dataclasses.replace(stated, status="estimate")
    guessed = privacy.report(account, execution, guess, num_params=100, steps_done=3)
    assert "estimate" in privacy.report_text(guessed) and not guessed["holds"]
