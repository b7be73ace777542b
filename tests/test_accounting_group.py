"""Group privacy: published statements, the whole profile, the textbook lemma in both forms."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import dp_accounting
import group_lemma
import jax
import numpy as np
import pytest
import scipy
from dp_accounting.privacy_accountant import NeighboringRelation
from jax_privacy.accounting import accountants
from jax_privacy.accounting import analysis as jax_privacy

from mfopt.accounting import Mechanism, account
from mfopt.accounting.accountants.independent_rounds import composed
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.accounting.bound import GaussianBound, RoundsBound
from mfopt.accounting.chain import GroupBound
from mfopt.accounting.closed_form import gaussian, group, moments
from mfopt.accounting.closed_form.gaussian import GaussianProfile
from mfopt.accounting.loss_distribution.mixture import Mixture
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.sampled_chain import SampledChain
from mfopt.errors import FailureError
from mfopt.sampling import CyclicPoisson, FixedBatch, FixedOrder, Poisson
from mfopt.strategies import BandedSquareRoot


@dataclasses.dataclass(frozen=True)
class SampledGaussian:
    """A sampled Gaussian loss that notes what each of its bounds is asked for."""

    asked: dict = dataclasses.field(default_factory=lambda: {"remove": [], "add": []})
    name, work, chunk_parts = "Gaussian", 1, 1
    at = staticmethod(lambda tilt, point: tilt)

    def least(self, direction, point):
        return SimpleNamespace(kind=direction, order=1, log_ceiling=0.0)

    def pilot(self, tilt, point, samples, key):
        log_delta = gaussian.log_delta(1 / point.noise_multiplier, point.epsilon)
        return SimpleNamespace(
            tilt=tilt,
            log_mean=log_delta,
            deviation=1.0,
            samples=samples,
            log_bound=lambda samples, beta: (0, log_delta + 0.01),
        )

    def choose(self, direction, point, trial):
        return self.pilot(self.least(direction, point), point, 256, trial.key)

    def bound(self, tilt, point, bet, trial):
        self.asked[tilt.kind].append((trial.beta, jax.random.key_data(trial.key).tolist()))
        return SimpleNamespace(value=math.exp(self.pilot(tilt, point, 1, trial.key).log_mean))


@pytest.mark.parametrize("group_size", [2, 16, 32])
def test_the_bounds_of_a_groups_points_fail_with_beta_together(group_size):
    loss, beta = SampledGaussian(), 1e-6
    chain = SampledChain(loss, group_size)
    trial = Trial(2**14, beta, chunked.seed_key(0))
    pair = chain.bounds(2.0, 4.0, chain.pilot(2.0, 4.0, trial), trial).both
    for questions in loss.asked.values():
        assert len(questions) > 1 and sum(spent for spent, _ in questions) == pytest.approx(beta)
    keys = [key for questions in loss.asked.values() for _, key in questions]
    assert len(set(map(tuple, keys))) == len(keys)
    # above the truth, and near that of a split into shares of the exact profile, which has more
    exact = np.exp(gaussian_chain(group_size).log_deltas(2.0, 4.0))
    for actual, best in zip(pair, exact, strict=True):
        assert (
            math.exp(gaussian.log_delta(group_size / 2.0, 4.0))
            < actual
            <= (1.03 if group_size == 2 else 1.1) * best
        )


def gaussian_chain(group_size):
    return GroupBound(GaussianBound(1.0), group_size, "a Gaussian")


def test_a_group_that_hardly_takes_part_needs_no_noise():
    scheme = CyclicPoisson(probability=0.01, bands=3, iterations=12)
    mechanism = Mechanism(scheme, BandedSquareRoot(2), group_size=3)
    assert account(mechanism, epsilon=0.04, delta=0.13).noise_multiplier == 0
    units = GroupBound(RoundsBound(composed(mechanism), "", True), 3, "")
    chance = 3 * (1 - 0.99**4)
    assert units.without_noise(chance * 1.001) and not units.without_noise(chance * 0.999)


def one_sided(side, more):
    """Two units, whose δ is larger in the direction ``side``, by a factor or without a number."""

    class Profile(GaussianProfile):
        def log_delta(self, epsilon, direction=None):
            log_delta = super().log_delta(epsilon)
            return log_delta + math.log(more) if direction in (side, None) else log_delta

    class Bound(GaussianBound):
        def profile(self, noise_multiplier, accuracy=0):
            return Profile(1 / noise_multiplier)

    return GroupBound(Bound(1.0), 2, "one-sided")


@pytest.mark.parametrize("side", ["remove", "add"])
def test_a_group_is_bounded_in_both_directions_and_by_numbers(side):
    grouped = one_sided(side, 3)
    pair = dict(zip(("remove", "add"), grouped.log_deltas(4.0, 2.0), strict=True))
    larger = pair.pop(side)
    assert larger > max(pair.values()) + 0.5
    assert grouped.profile(4.0).log_delta(2.0) == larger
    epsilon = grouped.epsilon(4.0, math.exp(larger))
    assert 2.0 * (1 - 1e-9) <= epsilon <= 2.0 * (1 + 2e-4)
    assert grouped.noise_multiplier(2.0, math.exp(larger)) == pytest.approx(4.0, rel=2e-4)
    broken = one_sided(side, math.nan)
    for ask in (broken.epsilon, broken.noise_multiplier):
        with pytest.raises(FailureError):
            ask(4.0, 1e-3)


@pytest.mark.release
def test_black_box_is_infinite_where_the_mixture_is_finite():
    """Ganesh 2024, section 1: 2,000 rounds, p = 1/100; accountants that stop at δ = 1e-15."""
    profile = RoundsProfile(Mixture.binomial(1, 0.01), 2000, 1.0)
    assert math.isinf(group_lemma.black_box_epsilon(profile, 8, 1e-6, floor=1e-15))
    mechanism = Mechanism(Poisson(0.01, 2000), group_size=8)
    tight = account(mechanism, noise_multiplier=1.0, delta=1e-6).epsilon
    assert tight == pytest.approx(34.8907, rel=1e-4)
    # with δ's resolved far below that floor the lemma gives a number, and it is far above
    resolved = group_lemma.black_box_epsilon(profile, 8, 1e-6)
    assert math.isinf(resolved) or resolved > 5 * tight


def test_black_box_by_moments_has_a_number_where_probabilities_end():
    """At the setting of Ganesh's Figure 1; dp_accounting's Rényi orders converted by the lemma."""
    position = (2.0, 0.01, 2000, 1e-6)
    assert group_lemma.group_epsilon(*position, 1) < moments.epsilon(*position)
    accountant = dp_accounting.rdp.RdpAccountant(
        [*range(2, 64), *range(64, 1024, 8)], NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0)), 2000
    )
    for size in (8, 16, 32):
        actual = group_lemma.group_epsilon(*position, size)
        # the lemma with dp_accounting's δ of one unit, as far as float64 tells it from 0
        log_delta = math.log(1e-6) - group.black_box_log_factor(actual / size, size)
        if log_delta > -700:
            assert accountant.get_epsilon(math.exp(log_delta)) == pytest.approx(
                actual / size, rel=5e-3
            )
        tight = account(
            Mechanism(Poisson(0.01, 2000), group_size=size), noise_multiplier=2.0, delta=1e-6
        )
        assert tight.epsilon < actual
    assert group_lemma.group_epsilon(*position, 16) == pytest.approx(39.76, abs=0.05)
    assert group_lemma.group_epsilon(*position, 32) == pytest.approx(402.9, abs=0.5)
    assert group_lemma.group_epsilon(2.0, 0.0, 2000, 1e-6, 4) == 0.0


@pytest.mark.ci
def test_moments_of_one_unit_at_0_are_no_group_at_0():
    """Of a release of all units the group's ε is known: that of a Gaussian of K/z."""
    exact = gaussian.epsilon(100 / 7000, 1e-4)
    assert 0.029 < exact < group_lemma.group_epsilon(7000.0, 1.0, 1, 1e-4, 100) < 10 * exact
    for noise in np.geomspace(500, 1e8, 40):
        exact = gaussian.epsilon(100 / noise, 1e-4)
        assert group_lemma.group_epsilon(noise, 1.0, 1, 1e-4, 100) >= exact
    # control: where K δ₁ <= δ it is 0
    assert group_lemma.group_epsilon(1e8, 1.0, 1, 0.1, 4) == 0.0


@pytest.mark.ci
def test_agrees_with_jax_privacy_on_both_samplings():
    config = accountants.PldAccountantConfig(value_discretization_interval=2e-3)
    accountant = jax_privacy.DpsgdTrainingUserLevelAccountant(config)
    for method, scheme in (
        (jax_privacy.SamplingMethod.POISSON, Poisson(0.02, 50)),
        (jax_privacy.SamplingMethod.FIXED_BATCH_SIZE, FixedBatch(20, 1000, 50)),
    ):
        sigma = 3.0
        params = jax_privacy.DpParams(
            noise_multipliers=sigma,
            batch_size=20,
            num_samples=1000,
            delta=1e-5,
            examples_per_user=3,
            sampling_method=method,
        )
        theirs = accountant.compute_epsilon(50, params)
        ours = account(Mechanism(scheme, group_size=3), noise_multiplier=sigma, delta=1e-5)
        assert ours.epsilon == pytest.approx(theirs, rel=2e-3)


def test_whole_profile_of_a_gaussian_loses_almost_nothing():
    """The trade-off function of a Gaussian composes to that of K times the shift, exactly."""
    for group_size in (2, 5):
        chain = DeterministicAnalysis(
            Mechanism(FixedOrder(1, 1), group_size=group_size), gaussian_chain(group_size)
        )
        epsilon = chain.epsilon(4.0, 1e-6)
        exact = gaussian.epsilon(group_size / 4.0, 1e-6)
        assert exact <= epsilon.epsilon <= 1.01 * exact
        assert epsilon.status == "bound" and epsilon.failure_probability == 0


def test_splits_against_all_splits_by_enumeration():
    epsilons = np.linspace(0, 1.5, 7)
    log_deltas = np.array([gaussian.log_delta(0.4, e) for e in epsilons])
    for target in (0.5, 1.0, 2.0):
        best = 0.0
        for split in itertools.product(range(7), repeat=3):
            if sum(epsilons[list(split)]) > target + 1e-12:
                continue
            spent, total = 0.0, 0.0
            for line in split:
                total += math.exp(spent + log_deltas[line])
                spent += epsilons[line]
            best = min(best, math.log(total))
        split = list(group.best_split(epsilons, log_deltas, 3, target))
        assert sum(epsilons[split]) <= target + 1e-12
        weights = np.cumsum(epsilons[split]) - epsilons[split]
        total = scipy.special.logsumexp(weights + log_deltas[split])
        assert total == pytest.approx(best, abs=1e-9)


def test_lemma_forms():
    for epsilon, count in ((0.3, 4), (1e-14, 7), (2.0, 600), (0.0, 3)):
        direct = sum(math.exp(min(j * epsilon - 700, 0)) for j in range(count))
        if count * epsilon < 500:
            direct = math.log(sum(math.exp(j * epsilon) for j in range(count)))
            assert group.black_box_log_factor(epsilon, count) == pytest.approx(direct)
    # at K = 1 the lemma is the identity, which the misprinted form is not
    assert group.black_box_log_factor(0.7, 1) == pytest.approx(0, abs=1e-12)
    profile = GaussianProfile(0.5)
    assert group_lemma.black_box_epsilon(profile, 1, 1e-6) == pytest.approx(profile.epsilon(1e-6))
    actual = group_lemma.black_box_epsilon(profile, 3, 1e-6)
    entry = actual / 3
    total = profile.log_delta(entry) + group.black_box_log_factor(entry, 3)
    assert total <= math.log(1e-6) and actual > gaussian.epsilon(1.5, 1e-6)


@pytest.mark.release
@pytest.mark.parametrize("sigma", [1.0, 1e6])
def test_a_million_units_are_accounted_for(sigma):
    mechanism = Mechanism(Poisson(0.01, 20), group_size=10**6)
    guarantee = account(mechanism, noise_multiplier=sigma, delta=1e-5)
    # all that the group can give, in every round
    epsilon = gaussian.epsilon(1e6 * math.sqrt(20) / sigma, 1e-5)
    # its mean, in every round: less than the truth, as divergences are convex
    lowest = gaussian.epsilon(1e4 * math.sqrt(20) / sigma, 1e-5)
    assert lowest * (1 - 1e-9) < guarantee.epsilon < epsilon
