"""A scheme and its accountant in two files of someone else: all of mfopt takes them as its own."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import third_party.lottery_accountant  # noqa: F401 (registers it)
from commands import failure, printed
from third_party.lottery import Lottery
from train_fixtures import synthetic_store

import mfopt
from mfopt import sampling
from mfopt.accounting import Mechanism, account
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization
from mfopt.noise import NoiseStream, from_factorization
from mfopt.strategies import BLT, Identity, SquareRoot
from mfopt.testing import check_accountant, check_scheme
from mfopt.training import attack, privacy
from mfopt.training.clipping import Clipping
from mfopt.training.config import TrainConfig
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model, next_token_loss
from mfopt.training.units import UserUnits
from mfopt.workloads import PrefixSums

SCHEME = Lottery(probability=0.5, bins=4, epochs=2)
STRATEGY = BLT([0.2], [0.8])


def test_the_public_kit_accepts_both_files():
    check_scheme(SCHEME)
    for strategy in (Identity(), SquareRoot()):
        check_accountant(
            Mechanism(SCHEME, strategy),
            noise_multiplier=2.0,
            longer=Mechanism(Lottery(0.5, 4, 3), strategy),
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    mechanism = Mechanism(SCHEME, STRATEGY, privacy_unit="user")
    guarantee = account(mechanism, epsilon=2.0, delta=1e-5)
    path = tmp_path_factory.mktemp("lottery") / "lottery.npz"
    record = Factorization(STRATEGY, guarantee.noise_multiplier, SCHEME, PrefixSums(), guarantee)
    record.save(path)
    return record, path


def test_it_is_saved_and_loaded(saved, tmp_path):
    written, path = saved
    read = mfopt.load(path)
    assert read.sampling == SCHEME and read.digest == written.digest
    assert read.guarantee == written.guarantee and read.mechanism.sampling == SCHEME
    with np.load(path) as arrays:
        assert float(arrays["probability"]) == 0.5 and int(arrays["bins"]) == 4
    with pytest.raises(UsageError, match="bins"):  # where only balls-in-bins will do
        read.dominating_pair()


def test_its_run_is_accounted_for_alone(saved, capsys):
    asked = ["--delta", 1e-5, "--unit", "user"]
    [row] = printed("account", "run", saved[1], *asked)["results"]
    assert row["epsilon"] == pytest.approx(2.0, rel=1e-4) and row["iterations"] == 8
    said = failure(capsys, "account", "run", saved[1], saved[1], *asked)
    assert "no account of third-party-lottery composes" in said


def test_a_file_of_a_scheme_that_is_not_installed_is_refused(saved, monkeypatch):
    from mfopt.sampling import base

    monkeypatch.delitem(base._SCHEMES, Lottery.kind)
    with pytest.raises(FailureError, match=r"third-party-lottery.*must be one of"):
        mfopt.load(saved[1])
    with pytest.raises(UsageError):  # and what cannot be loaded cannot be saved
        Mechanism(SCHEME, STRATEGY)


def test_what_no_accountant_supports_is_not_saved(saved):
    written, _ = saved
    with pytest.raises(UsageError, match="one unit"):
        Factorization(
            STRATEGY,
            written.noise_multiplier,
            SCHEME,
            PrefixSums(),
            type(written.guarantee)(**{**written.guarantee.describe(), "group_size": 2}),
        )
    with pytest.raises(UsageError):
        Factorization(
            STRATEGY, written.noise_multiplier, "poisson", PrefixSums(), written.guarantee
        )


def execution(saved, scheme=SCHEME):
    store = synthetic_store(num_users=40, vocab_size=16)
    units = UserUnits(store, records=2, length=8)
    sampler = sampling.UnitSampler(scheme, units.population, 5)
    noise = from_factorization(saved[0], clip_norm=1.0)
    return Execution(units, sampler, Clipping(1.0), noise, sampler.expected_batch, 4)


@pytest.mark.ci
def test_it_is_trained_with_its_own_statement(saved):
    run = execution(saved)
    stated = privacy.statement(mfopt.load(saved[1]), run)
    assert (stated.epsilon, stated.adjacency) == (2.0, "add-remove")
    assert "lottery" in stated.method
    model = Model.of(
        {"logits": jnp.zeros((16, 16))},
        lambda params, tokens, mask: next_token_loss(params["logits"][tokens], tokens, mask),
    )
    trainer = Trainer(model, run, optax.sgd(0.1))
    drawn = [result.batch for result in trainer.run(trainer.init())]
    assert len(drawn) == 8
    for t, batch in enumerate(drawn):
        assert np.array_equal(batch[batch >= 0], SCHEME.sample(t, 40, 5))
    # a unit takes part twice or never
    participated = np.bincount(np.concatenate([b[b >= 0] for b in drawn]), minlength=40)
    assert set(participated.tolist()) == {0, 2}


def test_what_is_no_scheme_is_refused_where_it_enters(saved):
    with pytest.raises(UsageError, match=r"mfopt\.sampling"):
        sampling.UnitSampler("poisson", 40)
    with pytest.raises(UsageError, match=r"mfopt\.sampling"):
        NoiseStream(STRATEGY, iterations=8, noise_multiplier=1.0, clip_norm=1.0, sampling=8)
    # an audit needs an attack, which nobody has given for the lottery
    for ask in (
        lambda: attack.attack_on(SCHEME, STRATEGY),
        lambda: attack.participations(SCHEME, 3, np.random.default_rng(0)),
    ):
        with pytest.raises(UsageError, match=r"no attack is known.*balls-in-bins"):
            ask()


def test_it_is_named_on_the_command_line():
    text = "third-party-lottery:probability=0.5,bins=4,epochs=2"
    assert sampling.parse(text) == SCHEME
    config = TrainConfig(sampling=text, epsilon=2.0, delta=1e-5)
    assert config.scheme() == SCHEME and not config.optimizes
