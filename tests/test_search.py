"""The search by tangents, its objective, and time-scaled C found by it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release
from test_optimize import PREFIX, SCHEME, N, objective_for
from test_strategies import every_strategy

from mfopt import strategies as S
from mfopt.accounting.monte_carlo import design_point, dominating_pair
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.optimize import implicit, kinds, parameterization, search
from mfopt.optimize.objective import (
    AmplifiedObjective,
    Evaluation,
    Placement,
    Tangent,
    log_rmse,
)
from mfopt.optimize.optimizers import Descent, Trace
from mfopt.sampling import BallsInBins, FreshBins


def scaled_blt():
    rows, columns = np.exp(0.3 * np.random.default_rng(0).normal(size=(2, N)))
    return S.TimeScaled(S.BLT([0.3, 0.1], [0.5, 0.9]), rows, columns)


# --- σ and its tangent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "root", "limit"),
    [
        (lambda x: 8 - x, math.nan, 6),  # every σ in reach is too small
        (lambda x: -8 - x, math.nan, 60),  # and too large
        (lambda x: 6.5 - 10 * x, 0.65, 8),
        (lambda x: -20 * x, 0.0, 8),
        (lambda x: -22 * (x + 0.102) + 30 * (x + 0.102) ** 2, -0.102, 8),
        # a jump over the target: no σ meets it
        (lambda x: jnp.where(x < 0.1, 3.0, -3.0) - x, math.nan, 60),
        (lambda x: jnp.where(jnp.abs(x - 0.3) < 0.2, jnp.nan, 1 - 2 * x), math.nan, 60),
    ],
)
def test_sigma_meets_the_target_or_is_nan(value, root, limit):
    """Evaluations of log δ̂, here by a formula, are counted."""
    recorded = []

    def estimate(theta):
        jax.debug.callback(lambda x: recorded.append(float(x)), theta)
        return value(theta) - 12

    with jax.enable_x64(True):
        zero = jnp.zeros(())
        actual = float(implicit.log_sigma(estimate, zero, zero - 12))
    jax.effects_barrier()
    assert actual == pytest.approx(root, abs=2e-9, nan_ok=True)
    assert 1 <= len(recorded) <= limit, recorded


@pytest.mark.ci
def test_no_tangent_has_a_sigma_that_misses_the_target():
    """Wherever a step goes, near its proposal or far from it, and from wherever it comes."""
    target, mapping = objective_for(scaled_blt(), samples=512)
    rng, log_delta, met = np.random.default_rng(0), jax.jit(design_point.log_delta), 0
    placed = target.placed(mapping.start)
    for size in (0.01, 0.1, 0.5, 1, 2, 8, 30) * 3:
        point = mapping.start + size * rng.normal(size=mapping.start.shape)
        tangent = target.tangent(point, placed.placement)
        if not math.isfinite(tangent.evaluation.value):
            continue
        met += 1
        with jax.enable_x64(True):
            pair = dominating_pair.jittered(mapping.build(jnp.asarray(point)).gram(SCHEME))
            terms = design_point.exponents(pair, placed.placement.proposal, target._draws)
            reached = float(log_delta(terms, math.log(tangent.evaluation.noise_multiplier), 2.0))
        assert reached == pytest.approx(math.log(1e-4), abs=1e-6)
    assert 5 < met < 21  # some were near, some were too far


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    before_release([every_strategy(N)["blt"], every_strategy(N)["toeplitz"], scaled_blt()], 2),
)
def test_a_tangent_touches_the_objective(strategy):
    """Its model has the value and gradient of the objective there, and is near it elsewhere."""
    target, mapping = objective_for(strategy)
    placed = target.placed(mapping.start)
    assert abs(placed.drift) < 0.03
    value, gradient = target.model(placed, mapping.start)
    assert value == pytest.approx(placed.evaluation.value, abs=1e-10)
    np.testing.assert_allclose(gradient, placed.evaluation.gradient, atol=1e-10)
    away = mapping.start + 0.03 * np.random.default_rng(0).normal(size=mapping.start.shape)
    error = abs(target.model(placed, away)[0] - target.follow(away, placed).evaluation.value)
    assert 1e-8 < error < 0.02


@pytest.mark.release
def test_proposals_follow_where_sigma_moves():
    """Wherever a search comes from, its value is that of a proposal placed at the point."""
    scheme = BallsInBins(bins=32, epochs=8)
    mapping = kinds.parameterization_of(S.BLT([0.3, 0.1], [0.5, 0.9]), scheme.iterations)
    loss = log_rmse(PREFIX, scheme.iterations)
    target = AmplifiedObjective(loss, mapping, law(scheme), (0.5, 1e-5), 1024, 0)
    start, placed = mapping.start + np.array([2.0, 2.0, 1.0, 1.0]), target.placed(mapping.start)
    placed_there, from_afar = target.placed(start), target.follow(start, placed)
    assert from_afar.placement is not placed.placement and abs(from_afar.drift) <= 0.03
    assert from_afar.evaluation.value == pytest.approx(placed_there.evaluation.value, abs=3e-4)
    followed = target.follow(start + 0.01, placed_there)
    assert followed.placement is placed_there.placement and followed.drift != placed_there.drift


def test_a_sigma_beyond_numerical_range_is_no_answer_but_no_failure():
    """A tangent foresees any σ: where no proposal can be placed for it, the step is refused.

    That others are taken is what searches of fresh bins end by: ``bench_optima.py``.
    """
    scheme = FreshBins(bins=N // 2, epochs=2)
    target, mapping = objective_for(S.BandedToeplitz([1.0, 0.5, 0.3]), samples=64, scheme=scheme)
    for sigma in (1e-2, 1e-9, math.nan):
        assert not target.placed(mapping.start, sigma, anywhere=False).evaluation.usable


# --- the search ----------------------------------------------------------------------------------


class Valley:
    """A long bent valley whose tangents lack half of the curvature, NaN far from its end."""

    disagreement = 0.01

    def __init__(self, bend=1.0, stale=0.0):
        # on a proposal placed elsewhere a value is too low by `stale` times the distance
        self.bend, self.stale, self.calls = bend, stale, 0
        self.known = np.array([1.0, 30.0, 4.0])

    def truth(self, y):
        whole = self.known + self.bend * np.array([1.0, 2.0, 0.5])
        return 0.5 * whole @ y**2, whole * y

    def placed(self, x, sigma=math.nan, anywhere=True):
        return self.touch(x, Placement(np.array(x), 0.0))

    def follow(self, x, near, anywhere):
        touched = self.touch(x, near.placement)
        return touched if abs(touched.drift) <= 0.1 else self.placed(x)

    def touch(self, x, placement):
        self.calls += 1
        value, gradient = self.truth(x)
        away = x - placement.proposal
        far = float(np.linalg.norm(away))
        if far > 0:
            value, gradient = value - self.stale * far, gradient - self.stale * away / far
        if np.max(np.abs(x)) > 20:
            value, gradient = math.nan, np.full(3, math.nan)
        return Tangent(np.array(x), Evaluation(value, gradient, 1.0), placement, far, (0.0, ()))

    def model(self, touched, y):
        evaluation, away = touched.evaluation, y - touched.point
        reference = self.known * away
        return (
            evaluation.value + evaluation.gradient @ away + 0.5 * reference @ away,
            evaluation.gradient + reference,
        )


def searched(objective, start, steps=60, tolerance=1e-9):
    trace = Trace()
    search.minimize(objective, np.array(start), Descent(trace, steps, tolerance))
    return trace


@pytest.mark.parametrize("bend", [0.0, 1.0, 20.0, 300.0])
def test_curvature_that_the_tangents_lack_is_learned(bend):
    valley = Valley(bend)
    trace = searched(valley, [3.0, -2.0, 4.0])
    assert trace.best_value < 1e-6 and "converged" in trace.status
    assert valley.calls <= 60


class Noisy(Valley):
    noise = np.random.default_rng(0)

    def truth(self, y):
        value, gradient = super().truth(y)
        return value, gradient + 0.02 * self.noise.normal(size=3)


def test_no_step_goes_astray_on_noise_of_the_gradients():
    """Negative curvature is seen in noise too: a model with it falls without end."""
    recorded = [step[1] for step in searched(Noisy(), [0.3, -0.1, 0.2], tolerance=1e-5).history]
    assert max(recorded[1:]) < recorded[0]


class Slopes(Valley):
    """Each proposal has a slope of its own, as few samples give one: there is always a gain."""

    def touch(self, x, placement):
        touched, proposal = super().touch(x, placement), placement.proposal
        slope = 0.05 * np.random.default_rng(int(1e9 * np.abs(proposal).sum())).normal(size=3)
        value, gradient = (
            touched.evaluation.value + slope @ (x - proposal),
            touched.evaluation.gradient + slope,
        )
        return touched._replace(
            evaluation=touched.evaluation._replace(value=value, gradient=gradient)
        )


def test_a_search_ends_where_proposals_of_its_own_find_nothing_lower():
    trace = searched(Slopes(), [0.3, -0.1, 0.2], steps=400, tolerance=1e-6)
    assert "no lower error" in trace.status and len(trace.history) < 100
    assert trace.best_value == pytest.approx(Valley().truth(trace.best)[0], abs=1e-9)


class Trap(Valley):
    """A valley in which proposals further than 0.05 apart hide a wall."""

    def truth(self, y):
        value, gradient = super().truth(y)
        wall = max(0.0, 0.5 - y[0])
        return value + 40 * wall**2, gradient - np.array([80 * wall, 0, 0])

    def touch(self, x, placement):
        touched = super().touch(x, placement)
        if touched.drift == 0 or not touched.evaluation.usable:
            return touched
        return touched._replace(evaluation=touched.evaluation._replace(value=Valley().truth(x)[0]))


def test_a_point_that_is_worse_on_its_own_proposal_is_taken_back():
    for steps in (3, 40):
        trace = searched(Trap(), [0.6, 0.01, 0.01], steps=steps, tolerance=1e-5)
        start, end = (Trap().truth(np.array(x))[0] for x in ([0.6, 0.01, 0.01], trace.best))
        assert end <= start + Valley.disagreement
        assert trace.best_value == pytest.approx(end, abs=1e-9)


class Wall(Valley):
    """Flat, but for a wall that the tangents do not see."""

    def truth(self, x):
        wall = np.maximum(np.abs(x) - 1.5, 0)
        value = float(np.sum(0.05 * x**2 + 5 * wall**4))
        return value, 0.1 * x + 20 * np.sign(x) * wall**3

    def model(self, touched, y):
        x, evaluation = touched.point, touched.evaluation
        return evaluation.value + evaluation.gradient @ (y - x), evaluation.gradient


def test_a_step_far_too_long_does_not_end_the_search():
    """Curvature learned behind the wall would forbid all further steps."""
    trace = searched(Wall(), [1.0, -0.9, 0.8], steps=60, tolerance=3e-5)
    assert trace.best_value < 2e-3 and "converged" in trace.status


def test_a_start_without_a_sigma_ends_at_once():
    trace = searched(Valley(), [30.0, 0.0, 0.0])
    assert trace.best is None and "not a number" in trace.status


# --- parameters of time-scaled C -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("bins", "share", "epsilon"),
    [
        pytest.param(5, 0.5, 1.0, marks=pytest.mark.release, id="whole"),
        pytest.param(5, 0.02, 2000.0, marks=pytest.mark.release, id="large ε"),
        pytest.param(200, 0.005, 1e5, marks=pytest.mark.release, id="powers that are cut"),
    ],
)
def test_log_values_are_those_of_their_definition(bins, share, epsilon):
    """Blocks read a table's rows once for all of them; a part cycle is at the end.

    Both draws of a pair have one exponential, whose powers end within double precision.
    """
    modes = np.eye(bins) + 0.5 * np.random.default_rng(0).random((bins, bins))
    sigma = share * np.linalg.norm(modes[:, 0])

    def expected(terms):
        for sign in (1, -1):
            loss, ratio = (
                dominating_pair.privacy_loss(
                    part.square[terms.component] / sigma**2 + sign * part.linear / sigma
                )
                for part in (terms.loss, terms.proposal)
            )
            yield loss - ratio + dominating_pair.log_hinge(loss - epsilon)

    with jax.enable_x64(True):
        pair = dominating_pair.jittered(jnp.asarray(modes.T @ modes))
        placed = design_point.placed(pair.gram, sigma, epsilon)
        draws = design_point.draw(jax.random.key(0), 2 * 4013, bins)  # many blocks
        terms = design_point.exponents(pair, placed, draws)
        # what is not in cycles, it misreads
        mixed = terms._replace(component=jnp.sort(terms.component))
        fit = [
            np.allclose(
                design_point.log_values(some, jnp.log(sigma), epsilon),
                np.concatenate([*expected(some)]),
                rtol=1e-9,
                atol=1e-9,
            )
            for some in (terms, mixed)
        ]
    assert fit == [True, False]


def test_scaled_parameters_round_trip():
    strategy = scaled_blt()
    mapping = parameterization.scaled(strategy, N, kinds.parameterization_of, None)
    assert len(mapping.start) == 4 + 2 * parameterization.KNOTS
    with jax.enable_x64(True):
        strategy_again = jax.tree.map(np.asarray, mapping.build(jnp.asarray(mapping.start)))
        for diagonal, two in zip(strategy_again.diagonals(N), strategy.diagonals(N), strict=True):
            np.testing.assert_allclose(diagonal[[0, -1]], two[[0, -1]], rtol=1e-12)
        repeated = parameterization.scaled(strategy_again, N, kinds.parameterization_of, None)
        reached = jax.tree.map(np.asarray, repeated.build(jnp.asarray(repeated.start)))
    strategy_again.check_entries(N)
    reached.check_entries(N)
