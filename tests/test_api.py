"""The front door in Python: what ``import mfopt`` offers, and that the commands do the same."""

import pytest
from typed_user import main

import mfopt
from mfopt.sampling import FreshBins, named_scheme


def test_a_users_script_runs_and_names_its_maker(tmp_path):
    actual = main(str(tmp_path / "made.npz"))
    assert actual.guarantee.epsilon == 1.0 and actual.guarantee.status == "certified"
    assert actual.provenance["command"] == "mfopt.factorize"
    assert actual.provenance["calibrated_by"]["command"] == "mfopt.calibrate"
    assert actual.provenance["mfopt"] == mfopt.__version__ and actual.provenance["commit"]


def test_an_account_of_a_factorization_is_at_its_own_noise():
    factorization = mfopt.factorize(
        epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity"
    )
    assert (
        mfopt.account(factorization, delta=1e-5).noise_multiplier == factorization.noise_multiplier
    )
    other = mfopt.account(factorization, epsilon=1.0, delta=1e-5)
    assert other.noise_multiplier > factorization.noise_multiplier


def test_options_of_a_scheme_reach_it():
    size = {"epochs": 2, "iterations_per_epoch": 4, "epsilon": 1.0, "strategy": "identity"}
    separated = mfopt.factorize(**size, sampling="min-separation", separation=3)
    assert separated.sampling.separation == 3
    fresh = mfopt.factorize(**size, sampling="fresh-bins", reassign_every=2)
    assert fresh.sampling == FreshBins(bins=4, epochs=2, rethrow=2)


def test_a_separation_holds_the_bands_where_none_is_named():
    assert named_scheme("b-min-sep", 2, 8).separation == 4
    assert named_scheme("b-min-sep", 2, 8, bands=6).separation == 6
    assert named_scheme("b-min-sep", 2, 8, bands=20).separation == 7


@pytest.mark.parametrize(
    ("sampling", "option"),
    [("balls-in-bins", "separation"), ("auto", "reassign_every"), ("fresh-bins", "separation")],
)
def test_options_of_another_scheme_are_refused(sampling, option):
    with pytest.raises(mfopt.UsageError, match=f"(?s)^{option}.*{sampling}"):
        mfopt.factorize(
            epochs=2, iterations_per_epoch=4, epsilon=2.0, sampling=sampling, **{option: 2}
        )


def test_misspelt_names_are_refused():
    with pytest.raises(mfopt.UsageError, match=r"sampling.*fresh-bins.*auto"):
        mfopt.factorize(epochs=2, iterations_per_epoch=4, epsilon=2.0, sampling="shuffle")
    with pytest.raises(AttributeError, match="factorise"):
        _ = mfopt.factorise
