"""Balls-in-bins: the exact account of C = I, groups, and composition, against sampling."""

import copy
import itertools
import math

import bench_truth
import jax
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from selection import before_release

from mfopt.accounting import Mechanism, account, loss_distribution
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import Composition
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.monte_carlo import chunked, composition, dominating_pair
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.protocol import loss_of
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, Poisson
from mfopt.strategies import BandedSquareRoot


@pytest.mark.parametrize(
    ("bins", "sigma", "low", "high"),
    [
        (16, 1.0, 1.7857291880184663, 1.7953699234038825),
        (128, 2.7818 / 4, 1.9971066249497018, 2.0066690835449505),
    ],
)
def test_identity_lies_inside_recorded_brackets_of_pld_accounting(bins, sigma, low, high):
    """PLD_accounting 2.0, gaussian_allocation_epsilon_range(delta=1e-5, num_steps=bins,
    epsilon_accuracy=0.02), which takes minutes."""
    assert low <= AllocationProfile(bins, 1 / sigma**2).epsilon(1e-5) <= high


@pytest.mark.parametrize(("bins", "epsilon", "gram"), [(4, 150.0, 12.0), (64, 295.0, 36.0)])
def test_mass_too_faint_for_floats_is_not_left_out(bins, epsilon, gram):
    """What the other bins add can only raise δ above that of one bin alone."""
    log_delta = gaussian.log_delta(math.sqrt(gram), epsilon + math.log(bins))
    assert AllocationProfile(bins, gram).log_delta(epsilon, "remove") >= log_delta > -math.inf


def bounds_of(model, sigma, epsilon, beta, seed):
    """Both directions' bounds, by name."""
    with jax.enable_x64(True):
        trial = Trial(model.samples, beta, chunked.seed_key(seed))
        actual = model.bounds(sigma, epsilon, None, trial)
    return {"remove": actual.remove, "add": actual.add}


class TestComposition:
    pair = dominating_pair.exact(BandedSquareRoot(2), BallsInBins(4, 2))

    @pytest.mark.ci
    @pytest.mark.parametrize("epsilon", before_release([0.5, 1.2], 1))
    def test_randomized_response_against_the_truth(self, epsilon):
        sigma, local = 2.5, 0.4
        model = composition.ComposedModel(self.pair, composition.pure(local), 2**14)
        numbers = bounds_of(model, sigma, epsilon, 1e-6, 1)
        likely = 1 / (1 + math.exp(-local))
        unchanged, other = (
            bench_truth.mixture(self.pair.factor, sigma, epsilon - loss) for loss in (local, -local)
        )
        for direction, bound in numbers.items():
            (value, one_error), (two, two_error) = unchanged[direction], other[direction]
            mean, error = likely * value + (1 - likely) * two, one_error + two_error
            assert mean - 4 * error < bound < 1.25 * mean + 4 * error

    @pytest.mark.ci
    def test_reads_dp_accounting(self):
        theirs = composition.from_dp_accounting(
            reference.from_randomized_response(0.5, 2, value_discretization_interval=1e-3)
        )
        ours = composition.pure(math.log(3), 1e-3)  # keeps its value with probability 3/4
        for sides in ((theirs, ours), (theirs.reverse(), ours.reverse())):
            tables = [composition.HockeyStick.of_composition(side) for side in sides]
            t = np.array([0.0, 0.5, 1.0])
            assert np.allclose(*(np.exp(table.log_value(t)) for table in tables), atol=2e-3)

    def test_what_bounds_losses_from_below_is_no_companion(self):
        options = {"value_discretization_interval": 0.05, "use_connect_dots": False}
        hopeful, bound = (
            reference.from_gaussian_mechanism(1.0, pessimistic_estimate=side, **options)
            for side in (False, True)
        )
        with pytest.raises(UsageError, match="optimistic"):
            composition.from_dp_accounting(hopeful)
        for name in ("_pmf_remove", "_pmf_add"):  # one side is enough
            mixed = copy.copy(bound)
            setattr(mixed, name, getattr(hopeful, name))
            with pytest.raises(UsageError, match="optimistic"):
                composition.from_dp_accounting(mixed)
        composition.from_dp_accounting(bound)  # control

    @pytest.mark.parametrize("share", [1 - 1e-9, 0.5, math.nan])
    def test_a_companion_that_lacks_mass_is_refused(self, share):
        arguments = reference.from_laplace_mechanism(1.0, value_discretization_interval=0.01)
        composition.from_dp_accounting(arguments)  # control
        dense = copy.copy(arguments._pmf_add.to_dense_pmf())
        dense._probs = share * dense._probs
        arguments._pmf_add = dense
        with pytest.raises(UsageError, match="add up"):
            composition.from_dp_accounting(arguments)

    def test_a_composed_guarantee_names_its_companion(self):
        mechanism = Mechanism(BallsInBins(4, 2), BandedSquareRoot(2))
        epsilon = composition.analysis(
            mechanism, composition.approximate(0.3, 1e-7), certify=False
        ).epsilon(2.5, 1e-3)
        assert "composed with" in epsilon.method
        (part,) = epsilon.details["composed_with"]
        assert part["infinite"] == 1e-7 and part["count"] == 1
        assert part["largest_loss"] == pytest.approx(0.3, abs=2e-3)
        model = composition.ComposedModel(self.pair, composition.pure(0.3))
        assert "composed with" in model.method
        assert "composed with" not in OneUnit(loss_of(self.pair)).method  # control

    def test_a_constant_is_added_in_both_directions(self):
        with_it, without = (
            bounds_of(composition.ComposedModel(self.pair, other, 2**14), 50.0, 3.0, 1e-8, 0)
            for other in (composition.approximate(0.2, 1e-4), composition.pure(0.2))
        )
        for direction in ("remove", "add"):
            assert with_it[direction] >= 1e-4 > without[direction]

    def test_table_of_a_wide_loss_has_no_overflow(self):
        loss, mass = np.array([0.0, 800.0]), np.array([0.25, 0.75])
        part = loss_distribution.from_atoms(0.5, loss, mass, 0.0, 0.75)
        stick = composition.HockeyStick.of_composition(Composition(((part, 1),)))
        t = np.array([-100.0, 0.0, 700.0, 799.0, 800.0])
        expected = [1.0, 0.75, 0.75, -0.75 * math.expm1(-1.0), 0.0]
        assert np.exp(stick.log_value(t)) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.ci
    @pytest.mark.parametrize(
        "companion",
        [composition.pure(0.1), composition.approximate(0.3, 1e-3), composition.gaussian(0.8)],
        ids=["pure", "approximate", "gaussian"],
    )
    def test_table_is_the_hockey_stick_between_and_below_its_points(self, companion):
        part = companion.parts[0][0]
        stick = composition.HockeyStick.of_composition(companion)
        t = np.array([-30.0, -5.0, -1.00047, -0.1, -0.09971, -1e-4, 0.0, 0.04321, 0.0999, 1.2345])
        exact = [part.mass @ np.maximum(-np.expm1(x - part.losses), 0) for x in t]
        log_values = np.exp(stick.log_value(t))
        assert np.all(log_values >= np.array(exact) * (1 - 1e-12))
        assert log_values == pytest.approx(exact, rel=1e-9, abs=1e-12)
        dense = np.linspace(-40, stick.step * (stick.start + stick.finite.size), 400_001)
        for order in (0.03, 1.0, 7.0, 64.0):
            scanned = np.max(order * dense + stick.log_value(dense))
            assert scanned - 1e-9 <= stick.log_peak(order) <= scanned + 2e-4 * max(order, 1)

    def test_what_is_not_composed_is_refused(self):
        with pytest.raises(UsageError, match="one unit"):
            composition.analysis(Mechanism(BallsInBins(4, 2), group_size=2), composition.pure(1))
        with pytest.raises(UsageError, match="BallsInBins"):
            composition.analysis(Mechanism(Poisson(0.1, 4)), composition.pure(1))


@pytest.mark.parametrize("profile", [AllocationProfile(4, 1.0), gaussian.GaussianProfile(1.0)])
def test_profiles_refuse_bad_arguments(profile):
    for bad in (0.0, 1.0, math.nan, -1.0):
        with pytest.raises(UsageError):
            profile.epsilon(bad)
    with pytest.raises(UsageError):
        profile.log_delta(-0.1)


def test_far_out_epsilon_is_that_of_a_known_bin_less_the_log_of_their_number():
    profile = AllocationProfile(128, 480.0)
    values = [profile.log_delta(epsilon) for epsilon in (290.0, 299.999, 300.001, 310.0, 1200.0)]
    assert all(low > high for low, high in itertools.pairwise(values))
    assert values[1] - values[2] < 1e-2  # both ways of computing meet
    far = AllocationProfile(128, 1500.0).epsilon(1e-5)
    table = gaussian.epsilon(math.sqrt(1500.0), 1e-5)
    assert far == pytest.approx(table - math.log(128), abs=1e-3)
    guarantee = account(Mechanism(BallsInBins(128, 16)), epsilon=800.0, delta=1e-5)
    assert guarantee.status == "exact"
