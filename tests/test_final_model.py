"""Error of the final model: dense formula, a simulated quadratic, finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mfopt
from mfopt import final_model, query_error, strategies
from mfopt.errors import UsageError
from mfopt.optimize import Objective, Search
from mfopt.workloads import Momentum, PrefixSums

N = 24
RNG = np.random.default_rng(7)
STRATEGIES = {
    "blt": strategies.BLT([0.2, 0.1], [0.9, 0.4]),
    "toeplitz": strategies.Toeplitz(np.append(1.0, 0.3 / np.arange(1, N))),
    "banded": strategies.BandedToeplitz([1.0, 0.4, 0.1]),
    "cleared-blt": strategies.ClearedBLT([0.3], [0.8], (6,), (2,)),
    "dense": strategies.Dense(np.tril(RNG.uniform(0, 0.3, (N, N)), -1) + np.eye(N)),
}
STRATEGIES["scaled"] = strategies.TimeScaled(
    STRATEGIES["blt"], RNG.uniform(0.5, 2, N), RNG.uniform(0.5, 2, N)
)


@pytest.mark.parametrize("schedule", [*final_model.SCHEDULES, np.linspace(1, 0.2, N)], ids=str)
def test_a_noisy_quadratic_ends_where_the_directions_say(schedule):
    """Gradient flow between steps: the noise of each curvature, run through its own recursion."""
    rates = final_model.learning_rates(schedule, N)
    curvatures = final_model.CURVATURES / rates.sum()
    end = np.zeros((len(curvatures), N))  # of unit noise in each step alone
    iterates = []
    for step, rate in enumerate(rates):
        end = end * np.exp(-curvatures * rate)[:, None]
        end[:, step] += rate
        iterates.append(end)
    averaged = isinstance(schedule, str) and schedule == "averaged"
    final = np.mean(iterates[-3:], axis=0) if averaged else end  # 24 / 8
    rows = np.sqrt(curvatures)[:, None] * final
    np.testing.assert_allclose(
        final_model.directions([schedule], N), rows / np.linalg.norm(rows), rtol=1e-12
    )


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_error_is_that_of_the_dense_inverse(kind):
    strategy = STRATEGIES[kind]
    rows = final_model.directions(final_model.DEFAULT_SCHEDULES, N)
    dense = np.linalg.norm(rows @ np.linalg.inv(strategy.materialize(N)))
    assert final_model.error(strategy, N, 1.5) == pytest.approx(1.5 * dense, rel=1e-9)
    # a control: the transposed inverse has another norm
    wrong = np.linalg.norm(rows @ np.linalg.inv(strategy.materialize(N)).T)
    assert wrong != pytest.approx(dense, rel=1e-3)


def test_independent_noise_has_its_noise_multiplier():
    for schedules in (("linear",), final_model.DEFAULT_SCHEDULES):
        errors = final_model.error(strategies.Identity(), N, 0.7, schedules)
        assert errors == pytest.approx(0.7, rel=1e-12)


@pytest.mark.release
def test_the_mixture_mixes_squares_and_has_the_right_gradient():
    strategy, share = STRATEGIES["scaled"], final_model.WORKLOAD_SHARE
    loss = final_model.MixedError(PrefixSums(), N)
    of_workload = float(query_error.rmse(PrefixSums(), strategy, N)) ** 2 / ((N + 1) / 2)
    of_model = final_model.error(strategy, N, 1.0) ** 2
    value = float(loss(strategy, 2.0))
    mixed = share * of_workload + (1 - share) * of_model
    assert value == pytest.approx(np.log(2.0) + np.log(mixed) / 2, rel=1e-6)
    with jax.enable_x64(True):
        rows, columns = (jnp.asarray(x) for x in strategy.diagonals(N))

        def position(x):
            base = strategies.BLT(strategy.base.scale * jnp.exp(x), strategy.base.decay)
            return loss(strategies.TimeScaled(base, rows * jnp.exp(x), columns), 1.0)

        slope, step = float(jax.grad(position)(0.1)), 1e-5
        assert slope == pytest.approx(
            float(position(0.1 + step) - position(0.1 - step)) / (2 * step), rel=1e-6
        )


def test_equal_objectives_share_what_was_compiled():
    objective, unchanged = (final_model.MixedError(PrefixSums(), N) for _ in range(2))
    assert objective == unchanged and hash(objective) == hash(unchanged)
    assert objective != final_model.MixedError(PrefixSums(), N, ("linear",))
    assert objective != final_model.MixedError(PrefixSums(), N, workload_share=0.5)


def test_what_is_no_schedule_is_refused():
    for schedule in (
        "exponential",
        np.zeros(N),
        np.ones(N - 1),
        -np.ones(N),
        [np.nan] * N,
        object(),
    ):
        with pytest.raises(UsageError, match="schedule"):
            final_model.learning_rates(schedule, N)


def test_a_workload_of_ones_own_is_minimized_alone():
    momentum = Momentum(0.9, np.ones(N))
    assert Objective.chosen(None, None, None) == Objective("robust")
    assert Objective.chosen(None, None, PrefixSums()) == Objective("robust")
    assert Objective.chosen(None, None, momentum) == Objective("rmse", workload=momentum)
    assert Objective.chosen(None, "linear", momentum) == Objective("robust", "linear", momentum)


def optimized(**options):
    return mfopt.factorize(
        epochs=2, iterations_per_epoch=8, epsilon=2.0, delta=1e-3, buffers=2, seed=0, **options
    )


@pytest.mark.release
def test_each_objective_wins_by_its_own_measure():
    search = Search(samples=2048)
    optima = {
        name: optimized(objective=name, search=search) for name in ("robust", "final", "rmse")
    }
    assert min(optima, key=lambda name: optima[name].rmse) == "rmse"
    assert min(optima, key=lambda name: optima[name].final_model_error) == "final"
    assert optima["final"].rmse > 1.02 * optima["rmse"].rmse
    assert optima["rmse"].final_model_error > 1.02 * optima["robust"].final_model_error
    assert optima["robust"].provenance["objective"] == {"name": "robust", "schedule": None}


def test_a_file_keeps_the_final_model_error(tmp_path):
    factorization = mfopt.factorize(
        epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity", seed=0
    )
    assert factorization.final_model_error == pytest.approx(
        factorization.noise_multiplier, rel=1e-12
    )
    read = mfopt.load(factorization.save(tmp_path / "file.npz"))
    assert read.final_model_error == factorization.final_model_error
