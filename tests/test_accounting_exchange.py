"""Rounds that keep their number of units, against quadrature over data, and dp_accounting."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mfopt.accounting import Mechanism, account, events, phases
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import Composition, poisson
from mfopt.accounting.loss_distribution.exchange import PublicMixture, ReplacementRound
from mfopt.accounting.loss_distribution.mixture import Mixture, Resolution
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.errors import UsageError
from mfopt.sampling import FixedBatch, Poisson, TruncatedPoisson

KINDS = {
    "zeroed": ReplacementRound.zeroed_in_fixed_batch,
    "replaced": ReplacementRound.replaced_in_fixed_batch,
    "replaced, Poisson": ReplacementRound.replaced_in_poisson_batch,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("step", [0.5, 5.0])
def test_what_floats_cannot_carry_is_an_infinite_loss(step):
    # at losses near -660 atoms hold a hundredth of Q, and of P less than a float can
    pair = one_unit("replaced", 0.5)
    actual = pair.discretize(0.055, step, Resolution(0.05, -60.0))
    carried = float(np.exp(actual.log_mass - actual.losses).sum())
    assert carried + actual.reverse_infinite == pytest.approx(1, abs=1e-12)
    twice = actual.reverse().reverse()
    assert float(twice.mass.sum()) + twice.infinite == pytest.approx(1, abs=1e-12)


def one_unit(kind, q):
    return KINDS[kind](Mixture.binomial(1, q))


def worlds(kind, units, rng):
    """(v, x, x') of unit balls of the plane for each unit, (units, 2), as the data may be."""
    radius, angle = rng.choice([0.0, 0.5, 1.0], (3, units)), rng.uniform(0, 2 * math.pi, (3, units))
    v, x, other = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return restricted(kind, v, x, other)


def restricted(kind, v, x, other):
    return v * (kind != "replaced, Poisson"), x, other * (kind != "zeroed")


def worst(kind, units):
    """Data on a line that should be worst for positive, and for negative losses."""
    whole = np.stack([np.ones(units), np.zeros(units)], axis=-1)
    steps = np.array([*itertools.product((-1.0, -0.5, 0.0, 0.5, 1.0), repeat=units)])
    return [restricted(kind, whole * step[:, None], whole, -whole) for step in steps]


def divergences(world, counts, sigma, orders):
    """H_α(P, Q) of one round in the plane, by quadrature."""
    v, x, other = world
    size = 500 + 300 * (len(v) > 1)
    line = np.linspace(-2 * len(v) - 8 * sigma, 2 * len(v) + 8 * sigma, size)
    cell = (line[1] - line[0]) ** 2

    def density(moved):
        return sum(
            chance
            * stats.norm.pdf(line, place[0], sigma)[:, None]
            * stats.norm.pdf(line, place[1], sigma)[None]
            for chance, place in zip(
                np.exp(counts.log_weights), np.cumsum([[0, 0], *moved], axis=0), strict=True
            )
        )

    p, q = density(x - v), density(other - v)
    return np.array([np.maximum(p - alpha * q, 0).sum() * cell for alpha in orders])


def curve(exchange, sigma, orders, *, add=False):
    """H_α of the discretized round, whose losses decide at α above and below 1."""
    part = exchange.discretize(sigma, 1e-4, Resolution(2e-3, -40.0))
    part = part.reverse() if add else part
    loss, mass = part.losses, part.mass
    return np.array(
        [
            np.maximum(mass - alpha * mass * np.exp(-loss), 0).sum() + part.infinite
            for alpha in orders
        ]
    )


ORDERS = [0.3, 0.7, 0.95, 1.0, 1.05, 1.5, 4.0]


@every_kind
@pytest.mark.parametrize(
    ("counts", "sigma"),
    [
        (Mixture.binomial(1, 0.1), 0.7),
        (Mixture.binomial(1, 0.6), 1.3),
        (Mixture.binomial(2, 0.2), 0.7),  # where two units together have another threshold
        (Mixture.hypergeometric(2, 3, 6), 2.0),
    ],
)
def test_no_data_are_worse_in_a_round_and_some_attain_it(kind, counts, sigma):
    rng, units = np.random.default_rng(5), int(counts.largest)
    bound = curve(KINDS[kind](counts), sigma, ORDERS)
    for _ in range(12):
        actual = divergences(worlds(kind, units, rng), counts, sigma, ORDERS)
        assert np.all(actual <= bound * (1 + 1e-3) + 1e-6)
    attained = np.max(
        [divergences(world, counts, sigma, ORDERS) for world in worst(kind, units)], axis=0
    )
    assert attained == pytest.approx(bound, rel=2e-3 if units == 1 else 2e-2, abs=1e-6)
    # control: the undoubled mixture is not enough for any of them
    lone = counts.discretize(sigma, 1e-4, Resolution(2e-3, -40.0))
    undoubled = np.maximum(lone.mass * (1 - 4 * np.exp(-lone.losses)), 0).sum()
    assert attained[-1] > 1.2 * undoubled


@every_kind
# three units at once are so rare that they are left out, as an infinite loss; not all counts are
@pytest.mark.parametrize("counts", [Mixture.binomial(3, 0.03), Mixture.binomial(1, 1e-9)])
def test_a_discretized_round_is_one_pair(kind, counts):
    """As much mass under Q as under P, and the same rest at loss 0."""
    part = KINDS[kind](counts).discretize(0.9, 1e-3, Resolution(1e-2, -9.0))
    assert float(part.mass.sum()) + part.infinite == pytest.approx(1, abs=1e-12)
    in_q = float((part.mass * np.exp(-part.losses)).sum()) + part.reverse_infinite
    assert in_q == pytest.approx(1, abs=1e-12)


def test_certain_participation_is_a_gaussian_release():
    for kind, moved in (("zeroed", 1), ("replaced", 2), ("replaced, Poisson", 2)):
        exchange = one_unit(kind, 1.0)
        exact = gaussian.log_delta(3 * moved / 5.0, 1.0)
        assert RoundsProfile(exchange, 9, 5.0).log_delta(1.0) == exact
        part = exchange.discretize(5.0, 1e-3, Resolution(1e-2, -60.0))
        composed = Composition(((part, 9),))
        log_delta = composed.convolve(composed.tilt_for_epsilon(1.0)).log_delta(1.0)
        assert exact - 1e-9 <= log_delta <= exact + 1e-3


def test_losses_that_floats_do_not_resolve_have_a_bound():
    mechanism = Mechanism(FixedBatch(2, 8, 4), adjacency="zero-out")
    # of a Gaussian release that moves by 2/4: a quarter of the unit in each of four rounds
    attained = math.exp(gaussian.log_delta(0.5e-18, 0.0))
    assert account(mechanism, noise_multiplier=1e18, epsilon=0.0).delta > attained


def test_many_units_are_many_whose_least_likely_counts_are_left_out():
    mechanism = Mechanism(FixedBatch(2000, 10_000, 4), group_size=500, adjacency="zero-out")
    answer = account(mechanism, noise_multiplier=400.0, delta=1e-5)
    assert answer.lower_bound <= answer.epsilon < 1.03 * answer.lower_bound


def test_a_group_must_be_among_the_units():
    mechanism = Mechanism(FixedBatch(5, 20, 4), group_size=21, adjacency="zero-out")
    with pytest.raises(UsageError, match="20 units"):
        account(mechanism, noise_multiplier=1.0, delta=1e-5)
    whole = Mechanism(FixedBatch(20, 20, 4), adjacency="zero-out")  # nobody needs to be left
    epsilon = account(whole, noise_multiplier=4.0, delta=1e-5).epsilon
    assert epsilon == pytest.approx(gaussian.epsilon(2 / 4.0, 1e-5), rel=1e-9)


def cut_batches(scheme, variants, unit, sigma, line):
    """Density of a round's sum: ``unit`` is what the unit gives, None where it is not there."""
    n, size, p = scheme.population, scheme.batch_size, scheme.probability
    density = np.zeros_like(line)
    for drawn in range(n):
        for participated, chance in ((0, 1 - p), (1, p)) if unit is not None else ((0, 1.0),):
            chance *= stats.binom.pmf(drawn, n - 1, p)
            room = min(drawn + participated, size)
            stays = room / (drawn + participated) if participated else 0.0  # uniformly who is kept
            for kept, share in ((1, stays), (0, 1 - stays)):
                total = variants * (room - kept) + (unit or 0.0) * kept
                density += chance * share * stats.norm.pdf(line, total, sigma)
    return density


@pytest.mark.parametrize(("adjacency", "other"), [("add-remove", None), ("zero-out", 0.0),
                                                  ("replace", -1.0)])  # fmt: skip
def test_batches_that_are_cut_are_within_their_account(adjacency, other):
    from mfopt.strategies import Identity

    scheme, sigma = TruncatedPoisson(0.9, 5, 6, 1), 0.8
    line = np.linspace(-9, 9, 4001)
    exchange = poisson.independent(Identity(), scheme, 1, adjacency).mixture
    far = [*ORDERS, 30.0]
    ways = [curve(exchange, sigma, far), curve(exchange, sigma, far, add=True)]
    index = Mixture.binomial(1, scheme.kept)
    undoubled = curve(PublicMixture(Mixture.binomial(1, 0.9), index, scheme.full), sigma, far)
    worst = np.zeros(len(far))
    for variants in (-1.0, 0.0, 1.0):
        with_it = cut_batches(scheme, variants, 1.0, sigma, line)
        without = cut_batches(scheme, variants, other, sigma, line)
        assert with_it.sum() * (line[1] - line[0]) == pytest.approx(1, abs=1e-6)
        for (p, q), bound in zip(((with_it, without), (without, with_it)), ways, strict=True):
            actual = np.array([np.maximum(p - a * q, 0).sum() * (line[1] - line[0]) for a in far])
            assert np.all(actual <= bound * (1 + 1e-3) + 1e-6)
            worst = np.maximum(worst, actual)
    assert np.any(worst > 1.05 * undoubled)  # control: the unit also takes another's place


def test_cut_batches_agree_with_dp_accounting():
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    rare, often = TruncatedPoisson(0.02, 40, 1000, 100), TruncatedPoisson(0.02, 22, 1000, 100)
    values = []
    for scheme, width in ((rare, 1e-2), (often, 0.2)):
        phase = phases.Phase(Mechanism(scheme), 1.2)
        event = events.to_event([phase])
        assert isinstance(event.event, dp_event.TruncatedSubsampledGaussianDpEvent)
        assert events.from_event(event) == [phase]
        theirs = PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-6)
        guarantee = account(phase.mechanism, noise_multiplier=1.2, delta=1e-6)
        # where batches are often full, theirs counts a replacement for the unit's place
        assert (1 - width) * theirs <= guarantee.epsilon <= theirs * (1 + 1e-3)
        assert guarantee.status == "bound"
        values.append(guarantee.epsilon)
    plain = account(Mechanism(Poisson(0.02, 100)), noise_multiplier=1.2, delta=1e-6).epsilon
    never = TruncatedPoisson(0.02, 1000, 1000, 100)
    assert account(Mechanism(never), noise_multiplier=1.2, delta=1e-6).epsilon == plain
    assert plain <= values[0] < values[1]
    with pytest.raises(UsageError, match="one unit"):
        account(Mechanism(rare, group_size=2), noise_multiplier=1.0, delta=1e-5)
