"""The concentration filter run for real: against Algorithm 3 written out, and when it halts."""

import dataclasses

import numpy as np
import pytest

from mfopt.experiments.concentration_filter import filter_noise
from mfopt.experiments.runner import compute
from mfopt.experiments.runs import filtered_means
from mfopt.experiments.runs.filtered_means import FilteredDescent, outcomes
from mfopt.experiments.runs.means import subsets
from mfopt.experiments.studies.concentration import PLAIN, ConcentrationFilter

SMALL = FilteredDescent(
    group=2, epsilon=4.0, delta=1e-5, users=9, examples=3, dimension=2, across=0.4, within=1.0,
    steps=5, trials=6, thresholds=(0.8, 1.5, 2.5, 6.0), rates=(0.1, 0.4), seed=3,
)  # fmt: skip


def written_out(descent, noise, budget):
    """Algorithm 3 of Chua et al. 2024, a user and a pair at a time, from the same draws."""
    make = np.random.default_rng([descent.seed, 5, 0])
    v, t, n, d = descent.trials, descent.steps, descent.users, descent.dimension
    means = make.standard_normal((v, d))
    users = means[:, None] + descent.across * make.standard_normal((v, n, d))
    data = users[:, :, None] + descent.within * make.standard_normal((v, n, descent.examples, d))
    every = subsets(make, np.tile(np.arange(n), v * t), descent.examples, descent.group)
    places = every.reshape(v, t, n, -1)
    bar = 0.8 * n + make.laplace(scale=2 * 2.0 / budget, size=v)
    heard = make.laplace(scale=4 * 2.0 / budget, size=(v, t))
    white, coins = make.standard_normal((v, t, d)), make.random((v, t, n), dtype=np.float32)
    errors = np.empty((len(descent.thresholds), len(descent.rates), v))
    steps = np.zeros((len(descent.thresholds), v), int)
    for i, tau in enumerate(descent.thresholds):
        for j, rate in enumerate(descent.rates):
            for trial in range(v):
                theta, taken = np.zeros(d), 0
                for step in range(t):
                    pool = data[trial].reshape(-1, d)
                    gradients = [theta - pool[places[trial, step, u]].mean(0) for u in range(n)]

                    def near(a, b, gradients=gradients):
                        return np.linalg.norm(gradients[a] - gradients[b])

                    score = sum(near(a, b) <= tau for a in range(n) for b in range(n)) / n
                    if score + heard[trial, step] < bar[trial]:
                        break
                    taken += 1
                    kept = []
                    for a in range(n):
                        friends = sum(near(a, b) <= 2 * tau for b in range(n))
                        if friends >= 2 * n / 3:
                            chance = 1.0
                        else:
                            chance = 0.0 if friends < n / 2 else (friends - n / 2) / (n / 6)
                        if coins[trial, step, a] < chance:
                            kept.append(gradients[a])
                    mean = np.mean(kept, axis=0) if kept else np.zeros(d)
                    theta = theta - rate * (mean + noise * tau * white[trial, step])
                errors[i, j, trial] = np.sum((theta - means[trial]) ** 2)
                steps[i, trial] = taken
    return errors, steps


def test_the_filter_is_the_algorithm_written_out():
    for budget in (40.0, 4.0):
        errors, steps, _ = outcomes(SMALL, 0.1, budget=budget)
        expected, taken = written_out(SMALL, 0.1, budget)
        assert steps.tolist() == taken.tolist()
        np.testing.assert_allclose(errors, expected, rtol=1e-4)
    assert 0 < (steps < 5).mean() < 1  # some halt and some do not: both are compared


def test_half_the_budget_goes_to_the_threshold_and_half_to_the_noise():
    found = compute(SMALL, [])
    assert found.record["noise_per_threshold"] == filter_noise(4.0, 1e-5, 5, 9, 1.0)
    same = outcomes(SMALL, found.record["noise_per_threshold"], budget=2.0)
    np.testing.assert_array_equal(found.arrays["errors"], same[0])


def test_outliers_are_left_out():
    descent = dataclasses.replace(SMALL, users=12, across=1e-6, within=1e-6, thresholds=(1.0,))
    near = outcomes(descent, 1e-9, budget=1e6)
    assert (near[1] == 5).all() and near[2] == pytest.approx(1.0)
    # the score of users far apart stays at 1: halted before the first step, at θ = 0
    far = outcomes(dataclasses.replace(descent, across=50.0), 1e-9, budget=1e6)
    assert (far[1] == 0).all() and np.isnan(far[2]).all()


def test_the_score_moves_by_less_than_its_sensitivity():
    make = np.random.default_rng(0)
    worst = 0.0
    for n in (2, 3, 8):
        points = make.standard_normal((n, 2)) * 0.01
        points[0] = 100.0 * (n == 3)  # with all the others, or alone
        near = np.linalg.norm(points[:, None] - points, axis=-1) <= 1.0
        worst = max(worst, abs(near.sum() - near[1:, 1:].sum()) / n)
    assert 1.5 < worst < filtered_means.SCORE_SENSITIVITY


def test_the_study_reports_halts_and_both_algorithms():
    study = ConcentrationFilter(
        acrosses=(0.1, 1.0), relatives=(0.5, 1.3), users=32, examples=4, group=2, dimension=8,
        steps=6, trials=8, epsilon=50.0, rates=(0.1, 0.3), clips=(1.0,), lengths=(0.4, 0.8),
    ).check()  # fmt: skip
    found = {}
    for task in study.cells():
        found[task] = compute(task, [compute(need, []) for need in task.needs])
    outcome = study.outcome(found)
    assert len(outcome.rows) == 2 * 3 and len(outcome.findings) == 2
    for row in outcome.rows:
        assert row["privacy_unit"] == "user" and row["epsilon"] == 50.0
        if row["algorithm"] == PLAIN:
            assert row["halted"] == 0 and row["noise_multiplier"] > 0
        elif row["threshold_relative"] == 0.5:  # no two users are that near
            assert row["halted"] == 1.0 and row["steps_taken"] < 1
        else:
            assert row["halted"] < 0.5 and row["noise_on_mean"] > 0
    assert "100% at 0.5" in outcome.findings[0]
