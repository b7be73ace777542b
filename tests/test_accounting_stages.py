"""Composition in two stages against one fine grid, and each inequality of it by itself."""

import math

import numpy as np
import pytest

from mfopt.accounting.loss_distribution import distribution, grid
from mfopt.accounting.loss_distribution.convolution import Composition, _power
from mfopt.accounting.loss_distribution.mixture import Mixture, Resolution
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.accounting.loss_distribution.stages import Stages, coarser, coarser_below, divided

RARE = Mixture.binomial(1, 1e-3), 0.5  # rare large losses
COMMON = Mixture.binomial(2, 0.3), 20.0  # like a Gaussian


def hinge(losses, log_mass, epsilon):
    """Σ p (1 - e^{ε - l})₊, and all P- and Q-mass."""
    mass = np.exp(log_mass)
    above = np.maximum(-np.expm1(epsilon - losses), 0.0)
    return mass @ above, mass.sum(), mass @ np.exp(-losses)


def block(round_, count=64, step=1e-3, tilt=2.0):
    part = round_[0].discretize(round_[1], step, Resolution(0.01, -40.0, (-1.0, 2.0)))
    return Composition(((part, count),)).convolve(tilt)


def atoms(composed):
    loss = composed.low + composed.step * np.arange(composed.law.size)
    kept = composed.law > 0
    return loss[kept], np.log(composed.law[kept]) + composed.log_scale - composed.tilt * loss[kept]


@pytest.mark.parametrize("round_", [RARE, COMMON])
@pytest.mark.parametrize("ratio", [2, 7, 300])
def test_a_coarser_block_keeps_both_masses_and_dominates(round_, ratio):
    composed = block(round_)
    actual = coarser(composed, ratio)
    assert actual.step == pytest.approx(ratio * composed.step)
    fine = [hinge(*atoms(composed), e) for e in (-0.3, 0.0, 0.11, 0.6)]
    coarse = [hinge(actual.losses, actual.log_mass, e) for e in (-0.3, 0.0, 0.11, 0.6)]
    for (low, *masses), (high, *variants) in zip(fine, coarse, strict=True):
        assert high >= low * (1 - 1e-9)
        assert variants == pytest.approx(masses, rel=1e-9)
    # control: what is done is seen
    assert ratio < 300 or coarse[2][0] > fine[2][0] * (1 + 1e-6)


@pytest.mark.parametrize("round_", [RARE, COMMON])
@pytest.mark.parametrize("ratio", [2, 7, 50])
def test_a_coarser_block_from_below_is_dominated(round_, ratio):
    composed = block(round_)
    actual = coarser_below(composed, ratio)
    for epsilon in (-0.3, 0.0, 0.11, 0.6):
        fine, mass, _ = hinge(*atoms(composed), epsilon)
        coarse, lowest, _ = hinge(actual.losses, actual.log_mass, epsilon)
        assert coarse <= fine * (1 + 1e-9)
        assert lowest <= mass * (1 + 1e-9)


def test_the_two_parts_of_a_round_are_pairs_and_dominate_it():
    part = RARE[0].discretize(RARE[1], 1e-4, Resolution(0.01, -40.0, (-1.0, 2.0)))
    small, large = divided(part, 0.01, 1e-3)
    assert small.mass.sum() == pytest.approx(1, abs=1e-12)
    assert small.mass @ np.exp(-small.losses) == pytest.approx(1, abs=1e-12)
    assert large.mass.sum() + large.infinite == pytest.approx(1, abs=1e-9)
    assert large.mass @ np.exp(-large.losses) + large.reverse_infinite == pytest.approx(1, abs=1e-9)
    # all pairs of the two, by hand
    pair = (small.losses[:, None] + large.losses).ravel()
    log_mass = (small.log_mass[:, None] + large.log_mass).ravel()
    for epsilon in (0.0, 0.003, 0.2, 1.1):
        infinite = hinge(part.losses, part.log_mass, epsilon)[0] + part.infinite
        two = hinge(pair, log_mass, epsilon)[0] + large.infinite
        assert infinite * (1 - 1e-9) <= two <= infinite * 1.02
    # control: without the small losses it is no longer above
    assert hinge(large.losses, large.log_mass, 0.003)[0] + large.infinite < hinge(
        part.losses, part.log_mass, 0.003
    )[0] * (1 - 1e-3)


def plan(profile, epsilon, direction, below=False):
    law = profile._law(direction, -690.0).at(epsilon)
    return grid.Grid.plan(law, epsilon, profile.accuracy, 2, below=below)


@pytest.mark.parametrize(
    ("mixture", "count", "sigma", "epsilon", "direction"),
    [
        (Mixture.binomial(1, 1e-5), 50_000, 0.5, 0.5, "remove"),
        (Mixture.binomial(2, 0.01), 20_000, 2.0, 4.0, "remove"),
        (Mixture.binomial(1, 0.5), 4096, 60.0, 2.0, "remove"),
        (Mixture.binomial(1, 0.5), 4096, 60.0, 2.0, "add"),
    ],
)
def test_two_stages_are_one_grid(monkeypatch, mixture, count, sigma, epsilon, direction):
    profile = RoundsProfile(mixture, count, sigma)
    monkeypatch.setattr(grid, "_FEW", math.inf)
    plain = profile.log_delta(epsilon, direction)
    monkeypatch.setattr(grid, "_FEW", 1 << 10)
    stages = plan(profile, epsilon, direction).stages
    assert stages is not None and math.isfinite(stages.small)
    log_delta = profile.log_delta(epsilon, direction)
    slope = (
        profile.log_delta(epsilon * 0.99, direction) - profile.log_delta(epsilon * 1.01, direction)
    ) / (0.02 * epsilon)
    # both are up to 2e-5 of ε above the truth
    assert log_delta == pytest.approx(plain, abs=5e-5 * epsilon * slope)
    law = profile._law(direction, -690.0)
    below = profile._below(epsilon, law, log_delta).log_delta_below(epsilon)
    assert below <= min(log_delta, plain)
    # control: a thousandth fewer rounds are told apart
    fewer = RoundsProfile(mixture, round(count * 0.999), sigma).log_delta(epsilon, direction)
    assert fewer < log_delta


@pytest.mark.parametrize("small", [math.inf, 0.02])
def test_lower_bounds_in_two_stages_are_below_and_near(small):
    mixture, sigma, count, epsilon = Mixture.binomial(1, 0.01), 2.0, 1 << 13, 2.0
    profile = RoundsProfile(mixture, count, sigma)
    law = profile._law("remove", -690.0).at(epsilon)
    planned = grid.Grid.plan(law, epsilon, profile.accuracy, 2, below=True)
    stages = Stages(planned.step / 2, 20, 128, small)
    cut = Resolution(planned.spacing, -60.0, (planned.least, planned.largest))
    cells = mixture.cells_below(sigma, stages.steps, cut, add=False)
    actual = stages.compose_below(cells, count, planned.tilt).log_delta_below(epsilon)
    above = profile.log_delta(epsilon, "remove")
    assert above - (0.2 if math.isfinite(small) else 0.01) < actual < above


def shares_step_by_step(excess, deficit, mode):
    """What :func:`.distribution.upward` says, one point after the other."""
    size, share = excess.size, np.zeros(excess.size)
    for k in range(mode + 1):
        previous = share[k - 1] * deficit[k - 1] if k else 0.0
        value = 1 - previous / excess[k] if excess[k] > 0 else 0.0
        limit = excess[k + 1] / deficit[k] if k + 1 < size and deficit[k] > 0 else 1.0
        share[k] = max(0.0, min(value, limit, 1.0))
    forward, share[-1] = share[mode], 0.0
    for k in range(size - 1, mode, -1):
        room = (1 - share[k]) * excess[k]
        share[k - 1] = min(1.0, room / deficit[k - 1]) if deficit[k - 1] > 0 else 0.0
    share[mode] = min(share[mode], forward)
    return share


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
@pytest.mark.parametrize("faint", [0.0, 0.2])
def test_shares_are_those_of_the_recursion_and_never_too_large(size, faint):
    rng = np.random.default_rng(size)
    for decay in (0.0, 1.0, 4.0):
        mass = np.exp(-decay * np.linspace(-4, 4, size) ** 2)
        below = rng.random(size)
        excess = mass * below * (rng.random(size) >= faint)
        deficit = mass * (1 - below) * (rng.random(size) >= faint)
        for mode in sorted({0, int(np.argmax(mass)), size // 3, size - 1}):
            actual, _ = distribution.upward(excess, deficit, mode)
            expected = shares_step_by_step(excess, deficit, mode)
            np.testing.assert_allclose(actual, expected, atol=1e-9)
            assert actual.min() >= 0 and actual.max() <= 1
            remainder = (1 - actual[1:]) * excess[1:] - actual[:-1] * deficit[:-1]
            assert np.all(remainder >= -2e-15 * excess[1:])


def test_steep_steps_that_are_composed_do_not_overflow():
    # as at number 8319 of the random settings, where what came out was no number
    size = 300_000
    excess, deficit = np.full(size, 1.0), np.full(size, 1e-6)
    excess[:1000] = np.random.default_rng(0).random(1000)
    for mode in (0, size // 2, size - 1):
        actual, _ = distribution.upward(excess, deficit, mode)
        np.testing.assert_allclose(actual, shares_step_by_step(excess, deficit, mode), atol=1e-9)
        remainder = (1 - actual[1:]) * excess[1:] - actual[:-1] * deficit[:-1]
        assert np.all(remainder >= -2e-15 * excess[1:])


def test_powers_by_squaring_keep_their_digits():
    count, size = 1_000_003, 4096
    angle = np.arange(size)
    base = np.exp(2j * np.pi * angle / size)
    exact = np.exp(2j * np.pi * (angle * count % size) / size)
    assert np.max(np.abs(_power(base.copy(), count) - exact)) < 4 * count * np.finfo(float).eps
    small = _power(np.array([0.5 + 0j, 0.9]), 100)
    assert small[0] == 0 and small[1] == pytest.approx(0.9**100, rel=1e-12)
