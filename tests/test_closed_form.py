"""Front door under schemes whose σ takes no samples, against dense and third-party oracles."""

import dataclasses
import functools

import bench_truth
import dp_accounting
import numpy as np
import pytest
from commands import printed
from dp_accounting.pld import privacy_loss_distribution as pld
from questions import factorized

import mfopt
from mfopt.accounting import Mechanism, account
from mfopt.errors import UsageError
from mfopt.factorization import proofs
from mfopt.optimize import closed_form
from mfopt.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedOrder,
    MinSeparation,
    Poisson,
    named_scheme,
)
from mfopt.strategies import BandedSquareRoot, Identity, SquareRoot

EPOCHS, ITERS, EPSILON, DELTA = 3, 4, 2.0, 1e-5
N = EPOCHS * ITERS
FIXED = ("identity", "sqrt", "banded-sqrt", "banded-inverse-sqrt", "tree")
CASES = [("fixed-order", kind, {}) for kind in (*FIXED, "blt", "toeplitz", "banded")] + [
    ("fixed-order", "dense", {"objective": "rmse"}),
    ("min-separation", "banded", {"bands": 2, "separation": 2, "max_participations": 3}),
    *[
        ("min-separation", kind, {"separation": 3, "max_participations": 2})
        for kind in ("sqrt", "blt", "toeplitz", "banded-toeplitz")
    ],
    ("poisson", "identity", {}),
    *[("cyclic-poisson", kind, {"bands": 2}) for kind in ("banded-toeplitz", "banded")],
    ("cyclic-poisson", "banded-sqrt", {"bands": 3}),
]
SIZE = {"epochs": EPOCHS, "iterations_per_epoch": ITERS, "epsilon": EPSILON, "delta": DELTA}


@functools.cache
def cached_factorization(sampling, kind, options):
    return mfopt.factorize(**SIZE, sampling=sampling, strategy=kind, **dict(options))


def sensitivity(matrix, scheme):
    """Largest |C x| over patterns and signs of contributions, of vectors of norm 1."""
    products = np.abs(matrix.T @ matrix)
    patterns = np.array([steps for law in bench_truth.laws(scheme, 1) for steps in law])
    return float(np.einsum("kn,nm,km->k", patterns, products, patterns).max()) ** 0.5


def poisson_epsilon(sigma, probability, rounds):
    """ε of Poisson-sampled Gaussian rounds by dp_accounting."""
    one_round = pld.from_gaussian_mechanism(
        sigma, sampling_prob=probability, value_discretization_interval=1e-4
    )
    return one_round.self_compose(rounds).get_epsilon_for_delta(DELTA)


@pytest.mark.ci
@pytest.mark.parametrize(("sampling", "kind", "options"), CASES)
def test_sigma_and_error_are_those_of_independent_oracles(sampling, kind, options):
    actual = cached_factorization(sampling, kind, tuple(options.items()))
    scheme, matrix = actual.sampling, actual.strategy.materialize(N)
    assert scheme.kind == sampling and actual.strategy.kind == kind
    sigma, stated = actual.noise_multiplier, actual.guarantee
    assert (stated.epsilon, stated.delta, stated.status in ("exact", "bound")) == (
        EPSILON,
        DELTA,
        True,
    )
    if isinstance(scheme, FixedOrder | MinSeparation):
        norm = sensitivity(matrix, scheme)
        event = dp_accounting.GaussianDpEvent(sigma / norm)
        accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
        epsilon = accountant.compose(event).get_epsilon(DELTA)
    else:
        bands = getattr(scheme, "bands", 1)
        assert not np.any(np.tril(matrix, -bands))
        norm = np.linalg.norm(matrix, axis=0).max()
        assert scheme.probability == bands / ITERS
        epsilon = poisson_epsilon(sigma / norm, scheme.probability, -(-N // bands))
    assert EPSILON * (1 - 2e-3) < epsilon < EPSILON * (1 + 1e-3)
    prefix = np.tril(np.ones((N, N)))
    rmse = sigma * np.linalg.norm(prefix @ np.linalg.inv(matrix)) / N**0.5
    assert actual.rmse == pytest.approx(rmse, rel=1e-9)


def error(found):
    """Minimized error of a factorization: robust, of prefix sums."""
    from mfopt.optimize import Objective

    loss = Objective().loss(N)
    return float(np.exp(loss(found.strategy, found.noise_multiplier)))


def test_optimized_is_below_what_is_not_and_more_freedom_below_less():
    for sampling, options in (
        ("fixed-order", ()),
        ("min-separation", (("separation", 3), ("max_participations", 2))),
    ):
        toeplitz, blt, *fixed = (
            error(cached_factorization(sampling, kind, options))
            for kind in ("toeplitz", "blt", "sqrt", "identity")
        )
        assert toeplitz < blt < min(fixed)
    banded, toeplitz = (
        error(cached_factorization("cyclic-poisson", kind, (("bands", 2),)))
        for kind in ("banded", "banded-toeplitz")
    )
    assert banded < toeplitz


def test_the_number_of_groups_is_the_best_of_powers_of_two():
    size = {**SIZE, "epsilon": 30.0}
    best = mfopt.factorize(**size, sampling="cyclic-poisson")
    factorizations = [
        mfopt.factorize(**size, sampling="cyclic-poisson", bands=w) for w in (1, 2, 4)
    ]
    assert error(best) == min(map(error, factorizations))
    assert best.sampling.bands == 4
    assert {entry["size"] for entry in best.provenance["groups"]} >= {1, 2}


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ("poisson", {}),
        ("cyclic-poisson", {"bands": 2}),
        ("fixed-order", {"strategy": "sqrt"}),
        ("min-separation", {"strategy": "sqrt", "separation": 3}),
    ],
)
def test_a_file_certifies_itself_and_no_more(tmp_path, sampling, options):
    factorization = mfopt.factorize(**SIZE, sampling=sampling, **options)
    path = factorization.save(tmp_path / "found.npz")
    read = mfopt.load(path)
    assert (
        read.digest == factorization.digest
        and read.guarantee == factorization.guarantee
        and read.proved_here
    )
    shown = printed("show", path)
    assert shown["certified"] and shown["proved_here"] and shown["sampling"]["kind"] == sampling
    repeated = printed("certify", path)
    assert (repeated["epsilon"], repeated["status"], repeated["failure_probability"]) == (
        EPSILON,
        factorization.guarantee.status,
        0,
    )
    with pytest.raises(mfopt.FailureError, match="FALSE"):
        mfopt.certify(read, epsilon=EPSILON * 0.999)
    tighter = mfopt.calibrate(read, epsilon=1.0)
    account = mfopt.account(tighter, delta=DELTA)
    assert tighter.noise_multiplier > factorization.noise_multiplier
    assert account.epsilon == pytest.approx(1.0, abs=1e-3)
    assert mfopt.certify(tighter).guarantee.epsilon == 1.0


@pytest.mark.ci
@pytest.mark.parametrize(
    ("scheme", "strategy", "share"),
    [
        (Poisson(0.2, 8), Identity(), 0.99),
        (CyclicPoisson(0.5, 2, 8), BandedSquareRoot(2), 0.99),
        (FixedOrder(4, 2), SquareRoot(), 0.999),
        (MinSeparation(8, 3, 2), SquareRoot(), 0.999),
        (BallsInBins(4, 2), BandedSquareRoot(2), 0.7),
    ],
)
def test_a_false_guarantee_is_refuted_and_a_true_one_is_not(scheme, strategy, share):
    mechanism = Mechanism(scheme, strategy)
    true = account(mechanism, epsilon=EPSILON, delta=DELTA, certificate="deterministic")
    if isinstance(scheme, BallsInBins):  # without samples σ is far above the least
        true = account(mechanism, epsilon=EPSILON, delta=DELTA, certify=False)
        true = dataclasses.replace(true, status="bound")
    proofs.refute(mechanism, true)
    false = dataclasses.replace(true, epsilon=EPSILON * share)
    with pytest.raises(mfopt.FailureError, match="FALSE"):
        proofs.refute(mechanism, false)
    # by as little as estimates err
    too_small = dataclasses.replace(true, epsilon=0.99 * EPSILON, status="estimate")
    proofs.refute(mechanism, too_small)
    with pytest.raises(mfopt.FailureError, match="FALSE"):
        proofs.refute(mechanism, dataclasses.replace(true, delta=0.0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": "poisson", "strategy": "blt"}, "strategy.*poisson.*identity"),
        ({"sampling": "poisson", "strategy": "sqrt"}, "'sqrt': C has 12 bands.*cyclic-poisson"),
        ({"sampling": "cyclic-poisson", "strategy": "toeplitz"}, "strategy.*banded"),
        ({"sampling": "cyclic-poisson", "bands": 5}, "bands.*at most 4"),
        ({"sampling": "fixed-order", "strategy": "dense"}, "objective=rmse"),
        ({"sampling": "min-separation", "strategy": "dense"}, "strategy.*min-separation"),
        (
            {"sampling": "min-separation", "strategy": "banded", "separation": 2, "bands": 3},
            "bands.*at most 2",
        ),
        ({"sampling": "fixed-order", "separation": 2}, "separation.*fixed-order"),
        ({"sampling": "b-min-sep", "max_participations": 2}, "max_participations"),
        ({"sampling": "fixed-order", "memory": 2}, "memory.*fixed-order"),
        ({"sampling": "fixed-order", "search": mfopt.optimize.Search(samples=64)}, "samples"),
        ({"sampling": "fixed-order", "search": mfopt.optimize.Search(time_scale=True)}, "time_sc"),
    ],
)
def test_what_has_no_account_or_no_effect_is_refused(options, said):
    with pytest.raises(mfopt.UsageError, match=f"(?s){said}"):
        mfopt.factorize(**SIZE, **options)


@pytest.mark.ci
def test_every_scheme_is_taken_by_the_door_for_objects():
    for scheme in (CyclicPoisson(0.3, 2, 8), MinSeparation(9, 2, 3), Poisson(0.1, 7)):
        factorization = factorized(scheme, 2.0, 1e-5, strategy="identity")
        assert factorization.sampling == scheme and factorization.guarantee.status == "exact"


def test_names_have_defaults_of_their_own():
    assert named_scheme("min-separation", 3, 4) == MinSeparation(12, 4, 3)
    assert named_scheme("min-separation", 1, 12, max_participations=1) == MinSeparation(12, 12, 1)
    several = {"max_participations": 3, "separation": 2}
    assert named_scheme("min-separation", 1, 12, **several) == MinSeparation(12, 2, 3)
    for missing, other in (
        ("separation", "max_participations"),
        ("max_participations", "separation"),
    ):
        with pytest.raises(UsageError, match=f"{other} .*Give `{missing}`"):
            named_scheme("min-separation", 1, 12, **{other: several[other]})
    assert named_scheme("fixed-order", 3, 4) == FixedOrder(4, 3)
    # a unit's two participations are 6 apart when spread; one band would be the identity
    assert closed_form._default_bands(MinSeparation(12, 1, 2), "banded-toeplitz") == 6
