"""L-BFGS with curvature that is handed on, within bounds: against SciPy's, and closed forms."""

import numpy as np
import pytest
import scipy

from mfopt.optimize import quasi_newton
from mfopt.optimize.objective import Evaluation
from mfopt.optimize.quasi_newton import Curvature


class Watched:
    """A function whose points and values are kept."""

    def __init__(self, function):
        self.function, self.points, self.values = function, [], []

    def __call__(self, x):
        value, gradient = self.function(x)
        self.points.append(x)
        self.values.append(value)
        return value, gradient

    @property
    def best(self):
        return self.points[int(np.argmin(self.values))]


def valley(x):
    return scipy.optimize.rosen(x), scipy.optimize.rosen_der(x)


def quadratic(size, seed=0):
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]
    bends = rotation * np.geomspace(1, 1e3, size) @ rotation.T
    return lambda x: (0.5 * (x - 1) @ bends @ (x - 1), bends @ (x - 1))


def test_quasi_newton_finds_a_minimum_whose_function_ends_near_it():
    curvatures = np.logspace(0, 3, 30)

    def evaluate(x):
        # not a number beyond x₀ = 1.01, a hundredth from the optimum
        value = curvatures @ (x - 1) ** 2 / 2 + (np.nan if x[0] > 1.01 else 0)
        return Evaluation(float(value), curvatures * (x - 1), np.nan)

    points = []

    def noted(x):
        points.append(x)
        return evaluate(x)

    ended = quasi_newton.minimize(noted, np.zeros(30), steps=500, tolerance=1e-10)
    assert "gains" in ended
    assert len(points) < 500
    assert min(evaluate(x).value for x in points) < 1e-8
    few = quasi_newton.minimize(evaluate, np.zeros(30), steps=5, tolerance=1e-10)
    assert few == "step limit 5 reached"
    assert "start" in quasi_newton.minimize(evaluate, np.full(30, 2.0), steps=5, tolerance=1e-10)


def test_a_curved_valley_is_followed_to_its_end():
    watched = Watched(valley)
    ended = quasi_newton.minimize(watched, np.full(20, -0.5), steps=600, tolerance=1e-12, window=3)
    assert "gains" in ended
    np.testing.assert_allclose(watched.best, 1, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_kept_and_their_minimum_found(seed):
    """By SciPy's L-BFGS-B; where no bound is active the box changes nothing (the control)."""
    draw = np.random.default_rng(seed)
    low, high = np.sort(draw.normal(0.5, 0.6, size=(2, 12)), axis=0)
    start, function = (low + high) / 2, quadratic(12, seed)
    watched = Watched(function)
    quasi_newton.minimize(watched, start, steps=500, tolerance=1e-13, window=3, box=(low, high))
    points = np.array(watched.points)
    assert np.all(points >= low) and np.all(points <= high)
    known = scipy.optimize.minimize(
        function, start, jac=True, method="L-BFGS-B", bounds=np.stack([low, high], 1), tol=1e-15
    )
    active = (known.x <= low) | (known.x >= high)
    assert np.any(active)
    assert min(watched.values) == pytest.approx(known.fun, rel=1e-7)
    np.testing.assert_allclose(watched.best, known.x, atol=1e-4)
    wide, without = Watched(function), Watched(function)
    box = (np.full(12, -1e3), np.full(12, 1e3))
    quasi_newton.minimize(wide, start, steps=500, tolerance=1e-13, box=box)
    quasi_newton.minimize(without, start, steps=500, tolerance=1e-13)
    np.testing.assert_allclose(wide.best, without.best, atol=1e-8)
    assert np.any((wide.best < low) | (wide.best > high))


def test_curvature_that_is_handed_on_saves_evaluations():
    """Of a function that is a little another; of one that is very different it does no harm."""

    def steps(function, curvature):
        watched = Watched(function)
        quasi_newton.minimize(
            watched, np.zeros(20), steps=500, tolerance=1e-9, window=2, curvature=curvature
        )
        assert min(watched.values) < 1e-6
        return len(watched.values)

    function = quadratic(20)
    handed = Curvature(40)
    first = steps(function, handed)
    near = steps(lambda x: tuple(1.1 * part for part in function(x)), handed)
    assert near < first / 2
    other = quadratic(20, seed=1)
    assert steps(other, handed) < 2 * steps(other, Curvature(40))


def test_a_pair_that_bends_downwards_is_not_learned():
    curvature, step = Curvature(3), np.array([1.0, 0.0])
    curvature.learn(step, -step)
    curvature.learn(step, np.array([0.0, 1.0]))
    assert not curvature
    for factor in (1.0, 2.0, 4.0, 8.0):
        curvature.learn(step, factor * step)
    # the last of them says how long a step is; in parameters that are held there is none
    np.testing.assert_allclose(curvature.descent(np.array([8.0, 0.0])), [-1.0, 0.0])
    held = curvature.descent(np.array([8.0, 1.0]), np.array([False, True]))
    assert held[0] == 0 and held[1] < 0
    curvature.forget()
    assert not curvature
    np.testing.assert_allclose(curvature.descent(np.array([8.0, 0.0])), [-1.0, 0.0])


def test_nothing_goes_down_from_a_minimum():
    watched = Watched(lambda x: (float(x @ x), 2 * x))
    assert "no step" in quasi_newton.minimize(watched, np.zeros(3), steps=50, tolerance=1e-9)
    assert len(watched.values) == 1
