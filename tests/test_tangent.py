"""Minimization by tangents of σ, and time-scaled C found by it."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release
from test_optimize import PREFIX, SCHEME, N, error_of, objective_for
from test_strategies import every_strategy

from mfopt import optimize
from mfopt import strategies as S
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLaw
from mfopt.errors import UsageError
from mfopt.optimize import kinds, quasi_newton, tangent, tangent_search, time_scale
from mfopt.optimize import run as runs
from mfopt.optimize.drivers import Trace
from mfopt.optimize.objective import AmplifiedObjective, Evaluation, log_rmse
from mfopt.optimize.time_scale import Scaling


def scaled_blt(n=N, seed=0):
    rows, columns = np.exp(0.3 * np.random.default_rng(seed).normal(size=(2, n)))
    return S.TimeScaled(S.BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9])), rows, columns)


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    before_release([every_strategy(N)["blt"], every_strategy(N)["toeplitz"], scaled_blt()], 2),
)
def test_a_tangent_touches_the_objective(strategy):
    """Value and gradient are those of the plain objective; away from the point they are not."""
    direct, mapping = objective_for(strategy)
    target = tangent.TangentObjective(
        log_rmse(PREFIX, N), mapping, SCHEME, 2.0, 1e-4, samples=256, seed=0
    )
    target.refresh(mapping.start)
    for other in ("_proposal", "_centre", "_start"):
        setattr(target, other, getattr(direct, other))
    here, plain = target.tangent(mapping.start), AmplifiedObjective.__call__(direct, mapping.start)
    assert here.at.value == pytest.approx(plain.value, abs=1e-8)
    np.testing.assert_allclose(here.at.gradient, plain.gradient, atol=1e-7)
    assert here.at.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-8)
    assert here.at.mode_norm == pytest.approx(plain.mode_norm, rel=1e-10)
    away = mapping.start + 0.03 * np.random.default_rng(0).normal(size=mapping.start.shape)
    error = abs(here.model(away)[0] - direct(away).value)
    assert 1e-8 < error < 0.02  # near, and another function


@pytest.mark.parametrize(
    ("bins", "share", "epsilon"),
    [(5, 0.5, 1.0), (200, 0.5, 1.0), (5, 0.02, 2000.0), (200, 0.005, 1e5)],
    ids=["whole", "nodes", "large ε", "powers that are cut"],
)
def test_rows_of_a_cycle_have_the_value_and_gradient_of_a_gather(bins, share, epsilon):
    """Blocks read a table's rows once for all of them; a part cycle is at the end.

    Both draws of a pair have one exponential, whose powers end within double precision.
    """
    from mfopt.accounting.monte_carlo import design_point, dominating_pair

    modes = np.eye(bins) + 0.5 * np.random.default_rng(0).random((bins, bins))
    sigma = share * np.linalg.norm(modes[:, 0])

    def whole(parts, component, nodes):
        tables, loss_linear, proposal_linear = parts
        x, values = jnp.exp(-jnp.log(sigma)), []
        for sign in (1, -1):
            u = x**2 * tables.loss_square[component] + sign * x * loss_linear
            w = x**2 * tables.proposal_square[component] + sign * x * proposal_linear
            loss, ratio = (dominating_pair.privacy_loss(y) for y in (u, w))
            density = dominating_pair.privacy_loss(u[:, nodes])
            values.append(density - ratio + dominating_pair.log_hinge(loss - epsilon))
        values = jnp.concatenate(values)
        return jax.scipy.special.logsumexp(values) - jnp.log(len(values))

    def in_blocks(parts, component, nodes):
        tables, *linear = parts
        terms = design_point.joined(tables, (component, *linear), nodes)
        return design_point.log_delta(terms, jnp.log(sigma), epsilon)

    with jax.enable_x64(True):
        pair = dominating_pair.jittered(jnp.asarray(modes.T @ modes))
        placed = design_point.placed(pair.gram, sigma, epsilon, 0.5)
        draws = design_point.draw(jax.random.key(0), 2 * 4013, bins)  # many blocks

        def both(log_delta, draws):
            tables = design_point.tables(pair.gram, placed.weights)
            component, *linear = design_point.linear(pair.factor, placed.weights, draws)
            return jax.value_and_grad(log_delta)((tables, *linear), component, placed.nodes)

        fast, slow = both(in_blocks, draws), both(whole, draws)
        assert math.isfinite(slow[0]) and float(fast[0]) == pytest.approx(float(slow[0]), rel=1e-12)
        for found, expected in zip(*map(jax.tree.leaves, (fast[1], slow[1])), strict=True):
            assert np.any(expected)
            np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-9, atol=1e-14)
        if epsilon == 1:  # what is not in cycles, it misreads
            mixed = draws._replace(component=np.sort(draws.component))
            assert abs(both(in_blocks, mixed)[0] - both(whole, mixed)[0]) > 1e-4


@pytest.mark.parametrize("rows", [True, False])
def test_scaled_parameters_round_trip_and_have_gradients(rows):
    strategy, scaling = scaled_blt(), Scaling(knots=5, rows=rows)
    inside = kinds.of(strategy.base, N)
    mapping = time_scale.scaled(strategy, N, inside, scaling)
    assert len(mapping.start) == 4 + (10 if rows else 5)
    with jax.enable_x64(True):
        built = jax.tree.map(np.asarray, mapping.build(jnp.asarray(mapping.start)))
        at = np.rint(time_scale.places(5, N)).astype(int)
        ours, theirs = built.diagonals(N), strategy.diagonals(N)
        if rows:
            for one, two in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one[[0, -1]], two[[0, -1]], rtol=1e-12)
        again = time_scale.scaled(built, N, inside, scaling)
        reached = jax.tree.map(np.asarray, again.build(jnp.asarray(again.start)))
    assert at[0] == 0 and at[-1] == N - 1
    built.check_entries(N)
    reached.check_entries(N)
    with pytest.raises(UsageError, match="knots"):
        Scaling(knots=1)


@pytest.mark.parametrize("kind", ["blt", "toeplitz", "banded-toeplitz"])
def test_a_slope_between_the_diagonals_is_told_by_the_base_alone(kind):
    """However steep: the same C, with diagonals near each other, and zeros that stay zeros."""
    base = {
        "blt": S.BLT(np.array([0.3, 0.1]), np.array([0.2, 0.5])),
        "toeplitz": S.Toeplitz(0.6 ** np.arange(N)),
        "banded-toeplitz": S.BandedToeplitz(np.array([1.0, 0.5, 0.3])),
    }[kind]
    time = np.arange(N) / (N - 1)
    steep = (1.5 if kind == "blt" else 20.0) * time
    steep -= np.mean(steep)  # a constant would scale C, and σ with it
    given = S.TimeScaled(base, np.exp(steep), np.exp(0.3 * time**2 - steep))
    matrix = np.asarray(given.materialize(N))
    entry = kinds.scaled(kinds.find(kind), Scaling())
    levelled = time_scale.level(given, N, kinds.find(kind).tilted)
    np.testing.assert_allclose(np.asarray(levelled.materialize(N)), matrix, rtol=1e-9)
    rows, columns = map(np.log, map(np.asarray, levelled.diagonals(N)))
    trend = np.polyfit(np.arange(N), columns - rows, 1)
    np.testing.assert_allclose(trend, 0, atol=1e-9)
    # and parameters lose nothing, whatever of this kind the search begins from
    containing = kinds.scaled(kinds.find("toeplitz"), Scaling(knots=24))
    for one in (entry, containing) if kind != "blt" else (entry,):
        start = one.convert(given, kinds.Size(N, SCHEME.bins, 3, 2))
        mapping = one.parameterize(start, N)
        with jax.enable_x64(True):
            built = np.asarray(mapping.build(jnp.asarray(mapping.start)).materialize(N))
            moved = mapping.start.copy()
            moved[-24:] += time_scale.places(24, N) / time_scale._units(24)
            again = np.asarray(mapping.build(jnp.asarray(moved)).materialize(N))
        np.testing.assert_allclose(again, built, rtol=1e-9)  # a slope of q changes nothing
        scale = np.mean(np.diagonal(matrix)) / np.mean(np.diagonal(built))
        np.testing.assert_allclose(built * scale, matrix, rtol=0.02, atol=1e-6 * np.max(matrix))


class Valley:
    """A long bent valley whose tangents lack half of the curvature, NaN far from its end."""

    def __init__(self, bend):
        self.bend, self.calls = bend, 0

    def refresh(self, parameters, known=math.nan):
        pass

    def tangent(self, x):
        self.calls += 1
        known = np.array([1.0, 30.0, 4.0])

        def truth(y):
            hidden = self.bend * np.array([1.0, 2.0, 0.5])
            return 0.5 * (known + hidden) @ y**2, (known + hidden) * y

        value, gradient = truth(x)
        if np.max(np.abs(x)) > 20:
            value, gradient = math.nan, np.full(3, math.nan)

        def model(y):
            away = y - x
            return (
                value + gradient @ away + 0.5 * known @ away**2,
                gradient + known * away,
            )

        return tangent.Tangent(Evaluation(value, gradient, 1.0), model)


@pytest.mark.parametrize("bend", [0.0, 1.0, 20.0, 300.0])
def test_curvature_that_the_tangents_lack_is_learned(bend):
    valley, trace = Valley(bend), Trace()
    tangent_search.minimize(valley, np.array([3.0, -2.0, 4.0]), trace, steps=40, tolerance=1e-9)
    assert trace.best_value < 1e-6 and "converged" in trace.status
    assert valley.calls <= 25


class Shifting(Valley):
    """A valley whose σ grows with the way from where the shifts were placed."""

    def refresh(self, parameters, known=math.nan):
        self.placed = np.array(parameters)

    def tangent(self, x):
        found = super().tangent(x)
        sigma = math.exp(0.3 * np.max(np.abs(x - self.placed)))
        return found._replace(at=found.at._replace(noise_multiplier=sigma))


def test_a_sigma_far_from_where_the_shifts_were_placed_is_not_believed():
    """Whatever the search begins from; shifts that follow in shorter steps lead to the end."""
    valley, trace = Shifting(1.0), Trace()
    tangent_search.minimize(valley, np.array([3.0, -2.0, 4.0]), trace, steps=40, tolerance=1e-9)
    _, values, sigmas = np.array(trace.history).T
    far = np.log(sigmas) > tangent_search.DRIFT
    assert np.any(far) and np.array_equal(np.isnan(values), far)
    assert trace.best_value < 1e-6 and "converged" in trace.status


class Slopes(Valley):
    """Of very many directions, each of which bends more than its tangents know."""

    def __init__(self):
        self.bends, self.calls = np.geomspace(2.0, 40.0, 60), 0

    def tangent(self, x):
        self.calls += 1
        value, gradient = 0.5 * self.bends @ x**2, self.bends * x

        def model(y):
            away = y - x
            return value + gradient @ away + 0.5 * away @ away, gradient + away

        return tangent.Tangent(Evaluation(value, gradient, 1.0), model)


def test_a_refused_step_is_followed_by_a_shorter_one(monkeypatch):
    """What one step tells of one direction makes none that is as long a good one."""
    ends = []
    for shorter in (tangent_search._SHORTER, 1):
        monkeypatch.setattr(tangent_search, "_SHORTER", shorter)
        trace = Trace()
        start = np.random.default_rng(0).normal(size=60)
        tangent_search.minimize(Slopes(), start, trace, steps=40, tolerance=1e-9)
        ends.append(trace.best_value)
    assert ends[0] < ends[1] / 3


class Loosened:
    """A valley whose first placement of the shifts is stiff: it forbids what the others do not."""

    def __init__(self):
        self.placements = 0

    def refresh(self, parameters, known=math.nan):
        self.placed, self.placements = np.array(parameters), self.placements + 1

    def tangent(self, x):
        def model(y):
            return 0.05 * float((y - 3) @ (y - 3)), 0.1 * (y - 3)

        stiff = 20.0 if self.placements == 1 else 0.0
        (value, gradient), away = model(x), x - self.placed
        at = Evaluation(value + stiff * float(away @ away), gradient + 2 * stiff * away, 1.0)
        return tangent.Tangent(at, model)


def test_what_one_placement_of_the_shifts_forbids_is_asked_again_of_the_next(monkeypatch):
    kept = tangent_search._Bend()
    for bend, end in (
        (tangent_search._Bend, 3.0),
        (lambda: kept, 0.0),
    ):  # the control never forgets
        monkeypatch.setattr(tangent_search, "_Bend", bend)
        trace = Trace()
        tangent_search.minimize(
            Loosened(), np.zeros(2), trace, steps=40, tolerance=5e-3, reach=0.05
        )
        np.testing.assert_allclose(trace.best, end, atol=0.3)


class Blind:
    """A hill whose value, away from where the shifts were placed, seems to fall."""

    def refresh(self, parameters, known=math.nan):
        self.placed = np.array(parameters)

    def tangent(self, x):
        away = x - self.placed
        truth = 0.05 * float(x @ x)
        at = Evaluation(truth - 0.2 * float(away @ away), 0.1 * x - 0.4 * away, 1.0)

        def model(y):
            return at.value + float(at.gradient @ (y - x)), at.gradient

        return tangent.Tangent(at, model)


@pytest.mark.parametrize("steps", [4, 40])
def test_a_round_that_found_what_its_shifts_do_not_see_is_taken_back(steps, monkeypatch):
    for unseen in (tangent_search._UNSEEN, math.inf):  # the control believes all
        monkeypatch.setattr(tangent_search, "_UNSEEN", unseen)
        trace, start = Trace(), np.array([0.4, -0.3])
        tangent_search.minimize(Blind(), start, trace, steps=steps, tolerance=1e-4)
        assert len(trace.history) <= steps
        far = np.linalg.norm(trace.best) > 1
        assert far if math.isinf(unseen) else not far and trace.best_value <= 0.0125 + 1e-12


class Wall:
    """A flat hollow between walls, whose tangents are lines: their minimum is behind a wall."""

    def refresh(self, parameters, known=math.nan):
        pass

    def tangent(self, x):
        def wall(y):
            return np.maximum(np.abs(y) - 1.5, 0)

        value = float(np.sum(0.05 * x**2 + 5 * wall(x) ** 4))
        gradient = 0.1 * x + 20 * np.sign(x) * wall(x) ** 3
        evaluation = Evaluation(value, gradient, 1.0)
        return tangent.Tangent(evaluation, lambda y: (value + gradient @ (y - x), gradient))


def test_a_step_far_too_long_does_not_end_the_search():
    """What is learned behind the wall would forbid all further steps."""
    trace = Trace()
    tangent_search.minimize(Wall(), np.array([1.0, -0.9, 0.8]), trace, steps=40, tolerance=3e-5)
    assert trace.best_value < 2e-3 and "step limit" not in trace.status


def test_a_search_that_begins_at_its_end_asks_once_where_sigma_is_known():
    """And once more after a step that gains less than another placement of the shifts changes."""

    def calls(start, bend=0.0, **known):
        valley = Valley(bend)
        tangent_search.minimize(valley, start, Trace(), steps=20, tolerance=1e-5, **known)
        return valley.calls

    end, near = np.zeros(3), np.array([math.sqrt(4e-5), 0.0, 0.0])
    assert calls(end, sigma=1.0) == 1 and calls(end) == 2
    # a step that promises 4.5e-5 and gains 2.3e-5; one that gains more is looked at again
    assert calls(near, 0.5, sigma=1.0) == 2 and calls(near, 0.5) == 3
    assert calls(2 * near, 0.5, sigma=1.0) > 2


def lowest_of(model, value, size, counted):
    """The end of one minimization, whose values are kept."""

    def watched(y):
        counted.append(model(y)[0])
        return model(y)

    curvature = quasi_newton.Curvature(30)
    return tangent_search._minimum(watched, np.zeros(size), 5.0, value, 5e-5, curvature)


def test_a_model_is_not_minimized_to_its_very_end(monkeypatch):
    """Most of the way for less than half of the evaluations."""
    bends, gradient = np.geomspace(1e-2, 10.0, 200), np.geomspace(1e-2, 0.1, 200)
    truth = 0.5 * np.sum(gradient**2 / bends)

    def model(y):
        slope = gradient + bends * y
        return 2.0 + (gradient + slope) @ y / 2, slope

    found = 2.0 - lowest_of(model, 2.0, 200, some := [])[0]
    monkeypatch.setattr(tangent_search, "_ADDED", 0.0)
    whole = 2.0 - lowest_of(model, 2.0, 200, every := [])[0]
    assert whole == pytest.approx(truth, rel=0.01)
    assert 0.8 * truth < found < whole and len(some) < len(every) / 2


def test_a_model_s_minimum_stays_within_reach():
    """A plane falls to a corner of the box; its curvature, which is none, is not learned."""
    downhill = np.array([1.0, -0.3, 0.0, 2e-3])
    curvature = quasi_newton.Curvature(30)
    lowest, reached = tangent_search._minimum(
        lambda y: (5 - 0.01 * downhill @ y, -0.01 * downhill),
        np.zeros(4),
        2.0,
        5.0,
        5e-5,
        curvature,
    )
    np.testing.assert_allclose(reached[:3], [2.0, -2.0, 0.0])
    assert 5 - 0.01 * downhill @ reached == lowest and not curvature


def test_a_model_whose_error_falls_below_every_error_is_left_at_once():
    """σ of a tangent may reach 0: what it promises there is no reason to follow it to the end."""
    counted = []

    def model(y):  # log of an error, whose square is linear in y
        square = 1 + np.sum(y) / 9.9
        if not square > 0:
            return math.nan, y
        return 1 + math.log(square) / 2, np.full(2, 0.5 / (9.9 * square))

    lowest, reached = lowest_of(model, 1.0, 2, counted)
    assert lowest < 1 - tangent_search._LOST and np.max(np.abs(reached)) <= 5
    lost = [value < 1 - tangent_search._LOST for value in counted]
    assert lost == [False] * (len(counted) - 1) + [True]


def test_step_limit_of_tangents_is_kept():
    trace = Trace()
    tangent_search.minimize(Valley(300.0), np.full(3, 4.0), trace, steps=3, tolerance=1e-9)
    assert len(trace.history) == 3 and trace.status == "step limit 3 reached"


def test_fewer_samples_are_the_first_of_all():
    known = BallsInBinsLaw(SCHEME)
    key, other = (jax.random.key(seed) for seed in (0, 1))
    with jax.enable_x64(True):
        few, every, others = (
            jax.tree.map(np.asarray, known.draws(*of))
            for of in ((key, 64), (key, 512), (other, 512))
        )
    assert len(few.normal) == 32
    for part, whole in zip(few, every, strict=True):
        np.testing.assert_array_equal(part, whole[:32])
    assert not np.any(few.normal == others.normal[:32])


def looked_at(monkeypatch, **options):
    """(samples of each evaluation, what was found) of a search for a BLT."""
    numbers, tangents = [], tangent.TangentObjective.tangent

    def counted(self, parameters):
        numbers.append(2 * len(self._draws.normal))
        return tangents(self, parameters)

    with monkeypatch.context() as patch:
        patch.setattr(tangent.TangentObjective, "tangent", counted)
        options = {"buffers": 1, "samples": 1024, "seed": 0, **options}
        return numbers, optimize.optimize(SCHEME, 2.0, 1e-4, strategy="blt", **options)


def test_the_last_steps_are_made_with_all_samples(monkeypatch):
    numbers, small = looked_at(monkeypatch)
    assert set(numbers) == {1024}  # a small search has nothing to save
    whole = small.strategy
    monkeypatch.setattr(runs, "_TERMS", 0)
    for options in ({}, {"steps": 4}, {"steps": 1}, {"init": whole}):
        numbers, found = looked_at(monkeypatch, **options)
        assert set(numbers) == {128, 1024} and numbers[0] == 128 and numbers[-1] == 1024
        if "steps" not in options:
            assert found.loss == pytest.approx(small.loss, abs=2e-4)
        if "init" not in options:
            # between runs on few, each start's end is looked at on all: fewer would mistake them
            changes = [numbers[0], *(b for a, b in itertools.pairwise(numbers) if a != b)]
            assert changes[:4] == [128, 1024, 128, 1024]
    monkeypatch.setattr(runs, "_FOR_EACH", 65)  # too few for two parameters
    assert set(looked_at(monkeypatch)[0]) == {1024}


def test_an_interrupt_between_few_samples_and_all_keeps_the_best(monkeypatch):
    refresh = tangent.TangentObjective.refresh

    def stopped(self, parameters, *known):
        refresh(self, parameters, *known)
        if len(self._draws.normal) == 512:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_TERMS", 0)
    monkeypatch.setattr(tangent.TangentObjective, "refresh", stopped)
    with pytest.raises(optimize.InterruptedOptimization) as kept:
        looked_at(monkeypatch)
    assert len(kept.value.best.history) > 2 and kept.value.best.noise_multiplier > 0


@pytest.mark.release
def test_time_scaling_pays_and_every_kind_of_it_is_found():
    options = {"samples": 2048, "seed": 5, "bands": 3, "buffers": 2}
    plain = optimize.optimize(SCHEME, 2.0, 1e-4, strategy="blt", **options)
    for kind in ("blt", "toeplitz", "banded-toeplitz"):
        found = optimize.optimize(
            SCHEME, 2.0, 1e-4, strategy=kind, time_scale=Scaling(knots=5), **options
        )
        assert found.strategy.kind == "time-scaled" and found.strategy.base.kind == kind
        gram = np.asarray(found.strategy.gram(SCHEME))
        assert np.max(np.diagonal(gram)) == pytest.approx(1)
        if kind != "banded-toeplitz":  # three bands are too few here
            assert error_of(found) < error_of(plain) - 0.01
    again = optimize.optimize(
        SCHEME, 2.0, 1e-4, strategy="blt", time_scale=True, init=plain.strategy, **options
    )
    assert error_of(again) < error_of(plain) - 0.01
    with pytest.raises(UsageError, match="time scale"):
        optimize.optimize(SCHEME, 2.0, 1e-4, strategy="dense", time_scale=True)
