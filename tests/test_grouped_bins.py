"""Neighbouring bins as one, for searches with many bins: the law, the start, the search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from questions import searched

from mfopt.accounting.monte_carlo import balls_in_bins, design_point, dominating_pair
from mfopt.accounting.monte_carlo.balls_in_bins import GroupedLaw, Groups
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import calibrate
from mfopt.optimize import InterruptedOptimization, kinds, objective, run, sizes
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT, TimeScaled
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(bins=24, epochs=4)
C = TimeScaled(
    BLT([0.2, 0.1], [0.5, 0.95]),
    np.exp(np.linspace(0.2, -0.1, 96)),
    np.exp(np.linspace(0.3, -0.3, 96)),
)


def _pair(gram):
    return dominating_pair.DominatingPair(
        gram, np.linalg.cholesky(gram + 1e-12 * np.eye(len(gram)))
    )


def test_a_few_bins_are_left_as_they_are():
    assert law(BallsInBins(bins=128, epochs=2)).coarse() == law(BallsInBins(bins=128, epochs=2))
    assert law(BallsInBins(bins=300, epochs=2)).coarse() == GroupedLaw(BallsInBins(300, 2), 3)


def test_a_groups_mode_has_the_second_moment_of_its_likelihood_ratio():
    # two bins of three that overlap equally, and a bin alone
    gram = np.array([[1.5, 0.6, 0.2], [0.6, 1.5, 0.2], [0.2, 0.2, 1.4]])
    sigma = 0.8
    means = np.array([[gram[:2, :2].mean(), 0.2], [0.2, 1.4]])
    with jax.enable_x64(True):
        merged, _ = balls_in_bins._merged(Groups(means, np.array([1.5, 1.4])), sigma, 3, 2)
    expected = sigma**2 * np.log(np.exp(gram[:2, :2] / sigma**2).mean())
    np.testing.assert_allclose(merged, [[expected, 0.2], [0.2, 1.4]], rtol=1e-12)
    assert expected > 1.03 * means[0, 0]  # the mean mode alone has less


@pytest.mark.ci
def test_sigma_of_groups_is_near_that_of_all_bins():
    sampled = GroupedLaw(SCHEME, 4)
    exact = calibrate(law(SCHEME).loss(C), 2.0, 1e-4, samples=2**14, seed=0).value
    groups = sampled.quadratic(C)
    with jax.enable_x64(True):
        merged, _ = balls_in_bins._merged(Groups(*map(jnp.asarray, groups)), exact, 24, 4)
    noise_multiplier, far = (
        calibrate(_pair(np.asarray(gram)), 2.0, 1e-4, samples=2**14, seed=0).value
        for gram in (merged, groups.means)
    )
    assert abs(noise_multiplier / exact - 1) < 0.012
    assert far < 0.98 * exact  # mean modes alone, for comparison


@pytest.mark.release
def test_the_gradient_through_groups_is_that_of_differences():
    entry = kinds.scaled(kinds.find("blt"))
    mapping = entry.parameterize(C, SCHEME.iterations)
    loss = objective.log_rmse(PrefixSums(), SCHEME.iterations)
    target = objective.AmplifiedObjective(loss, mapping, GroupedLaw(SCHEME, 5), (2.0, 1e-4), 256, 0)
    placed = target.placed(mapping.start)
    evaluation, step = (
        placed.evaluation,
        1e-5 * np.random.default_rng(0).normal(size=len(mapping.start)),
    )
    ahead, value = (  # a proposal of their own would move them too
        target.tangent(mapping.start + sign * step, placed.placement).evaluation.value
        for sign in (1, -1)
    )
    np.testing.assert_allclose(evaluation.gradient @ step, (ahead - value) / 2, rtol=1e-6)
    norms = np.linalg.norm(C.modes(SCHEME), axis=0)
    np.testing.assert_allclose(evaluation.mode_norm, norms.max(), rtol=0.05)


@pytest.mark.release
def test_of_very_many_bins_c_is_searched_for_fewer_and_stretched(monkeypatch):
    scheme, names = BallsInBins(bins=32, epochs=2), []
    monkeypatch.setattr(design_point, "MOST", 8)
    monkeypatch.setattr(run, "_FEW_BINS", 8)
    monkeypatch.setattr(sizes, "_MOST_GROUPED", 2)
    assert sizes.searched(scheme).bins == 16
    assert sizes.searched(BallsInBins(bins=12, epochs=2)).bins == 12

    def search(progress=lambda event: names.append(event.stage), **arguments):
        options = {"buffers": 2, "time_scale": True, "seed": 0, "steps": 4, "samples": 256}
        return searched(scheme, 2.0, 1e-3, progress=progress, **options | arguments)

    match = search()
    assert names[-1].endswith("16 bins grouped")
    assert len(match.strategy.rows) == scheme.iterations
    # for the scheme's own bins C has a largest mode norm of about 1: four steps end 5% above
    assert law(scheme).loss(match.strategy).sensitivity == pytest.approx(1.0, rel=0.06)
    # a kind that has no such likeness, and a start of its own, are searched with all of them
    names.clear()
    search(init=match.strategy)
    search(strategy=("blt", "cleared-blt"), steps=2)
    assert names and not any("16 bins" in name for name in names)

    # what is kept of an interrupted search is for what was asked for
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(InterruptedOptimization) as stopped:
        search(stop)
    assert len(stopped.value.best.strategy.rows) == scheme.iterations
