"""The studies on images: data, runs against a plain loop, and what each run states."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mfopt import sampling
from mfopt.accounting import Mechanism, account
from mfopt.errors import UsageError
from mfopt.experiments.cache import Result
from mfopt.experiments.mechanisms import FixedCell, Goal, ProvenCell, SigmaCell
from mfopt.experiments.runs import images, lstm, many_runs, pictures
from mfopt.experiments.studies.images import Images
from mfopt.noise.stream import NoiseStream
from mfopt.sampling import BallsInBins, UnitSampler
from mfopt.strategies import BLT, Identity
from mfopt.training.clipping import Clipping
from mfopt.training.models.nnx_model import from_nnx
from mfopt.workloads import Momentum

BLT1 = BLT(np.array([0.3]), np.array([0.9]))


def size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_sizes_of_data_and_models() -> None:
    data = pictures.load(None, 400)
    assert [len(part.y) for part in data] == [1397, 200, 200]
    params, apply = pictures.model((64,), 8, seed=0)
    assert size(params) == 64 * 8 + 8 + 80 + 10
    assert jax.vmap(lambda x: apply(params, x))(data.test.x).shape == (200, 10)


def test_cifar_is_read_from_its_binary_version(tmp_path) -> None:
    with pytest.raises(UsageError, match="binary version"):
        pictures.load(str(tmp_path), 4)
    random = np.random.default_rng(0)
    for name in pictures.CIFAR:
        records = random.integers(10, size=(3, 3073), dtype=np.uint8)
        records[:, 1] = 255  # the first red pixel
        records.tofile(tmp_path / name)
    data = pictures.load(str(tmp_path), 4)
    assert [len(part.y) for part in data] == [11, 4, 3]
    assert (data.train.x[:, 0, 0, 0] == 1).all() and data.train.x[:, 0, 0, 1:].max() < 0

    def shapes(x):
        params, apply = pictures.model(x.shape, 0, seed=0)
        return params, apply(params, x)

    params, logits = jax.eval_shape(shapes, data.test.x[0])  # its draws are not made
    assert size(params) == 550_570 and logits.shape == (10,)


def test_the_lstm_has_the_papers_size_and_learns_from_what_came_before() -> None:
    assert size(nnx.eval_shape(lambda: lstm.NextWord(10_003, 10, seed=0))) == 1_346_432
    small = from_nnx(lstm.NextWord(12, 8, seed=0))
    logits = jax.jit(functools.partial(small.logits, small.params, ()))
    before, after = (logits(np.array(x)) for x in (range(8), [0, 1, 2, 3, 4, 11, 6, 7]))
    assert before.shape == (8, 12) and np.array_equal(before[:5], after[:5])
    assert not np.allclose(before[7], after[7])


@pytest.mark.release
def test_runs_are_those_of_a_plain_loop() -> None:
    """Two seeds and rates at once against one step after another."""
    data = pictures.load(None, 1700)
    n, rates, seeds = 4, (0.1, 1.0), (0, 5)
    scheme = BallsInBins(bins=2, epochs=2)
    workload = Momentum(0.5, np.array([1.0, 1.0, 0.5, 0.25]))
    mechanism = many_runs.RunMechanism(BLT1, 0.7, scheme)
    how = {"rates": rates, "seeds": seeds, "clip_norm": 0.3, "hidden": 4, "microbatch": 20}
    found = many_runs.train(data, mechanism, workload, **how)
    x, y = data.train
    _, apply = pictures.model((64,), 4, 0)

    def loss(params, x, y):
        return -jax.nn.log_softmax(apply(params, x))[y]

    @jax.jit
    def clipped(params, x, y):
        each = jax.vmap(lambda x, y: Clipping(0.3)(jax.grad(loss)(params, x, y)).gradient)(x, y)
        return jax.tree.map(lambda g: g.sum(axis=0), each)

    stream = NoiseStream(BLT1, iterations=n, noise_multiplier=0.7, clip_norm=0.3, sampling=scheme)
    measure = jax.jit(jax.vmap(loss, in_axes=(None, 0, 0)))
    for (i, seed), (j, rate) in itertools.product(enumerate(seeds), enumerate(rates)):
        params, _ = pictures.model((64,), 4, seed)
        sampler = UnitSampler(scheme, len(y), seed=seed)
        state, velocity = stream.init(params, seed=seed), jax.tree.map(jnp.zeros_like, params)
        for t in range(n):
            units = sampler[t]
            noised, state = stream.release(clipped(params, x[units], y[units]), state)
            velocity = jax.tree.map(lambda v, g: 0.5 * v + g / (len(y) / 2), velocity, noised)
            step = rate * workload.learning_rates[t]
            params = jax.tree.map(lambda p, v, s=step: p - s * v, params, velocity)
        losses = measure(params, data.test.x, data.test.y)
        np.testing.assert_allclose(found["test_loss"][i, j], losses.mean(), rtol=1e-4)
        logits = jax.vmap(lambda x, p=params: apply(p, x))(data.test.x)
        right = np.mean(logits.argmax(axis=1) == data.test.y)
        np.testing.assert_allclose(found["test_accuracy"][i, j], right, atol=1e-6)
    assert found["test_loss"].shape == (2, 2)


def test_batches_of_each_execution() -> None:
    scheme = BallsInBins(bins=4, epochs=3)
    exact = many_runs.RunMechanism(Identity(), 1.0, scheme)
    drawn = exact.batches(22, seed=3)
    cut = many_runs.RunMechanism(Identity(), 1.0, scheme, batch_size=5).batches(22, seed=3)
    for whole, part in zip(drawn, cut, strict=True):
        assert len(part) == min(len(whole), 5) and set(part) <= set(whole)
    shuffled = many_runs.RunMechanism(Identity(), 1.0, scheme, shuffled=True).batches(22, seed=3)
    assert sorted(map(len, shuffled[:4])) == [5, 5, 6, 6]
    assert sorted(np.concatenate(shuffled[:4])) == list(range(22))
    assert all(np.array_equal(shuffled[t], shuffled[t + 4]) for t in range(8))
    assert shuffled[0].tolist() != list(range(0, 22, 4))
    table = many_runs.schedule([drawn, drawn])
    assert table.shape == (12, 2, 1, max(map(len, drawn)))
    assert (table >= 0).sum() == 2 * sum(map(len, drawn))
    small = many_runs.schedule([drawn, drawn], microbatch=4).reshape(12, 2, -1)
    assert all(
        set(row[0][row[0] >= 0]) == set(units) for row, units in zip(small, drawn, strict=True)
    )


def test_a_run_states_what_it_executes() -> None:
    scheme, goal = BallsInBins(bins=8, epochs=2), Goal(8, 2, 2.0, 1e-5)
    guarantee = account(Mechanism(scheme), epsilon=2.0, delta=1e-5).describe()
    made = Result({"strategy": Identity().describe(), "guarantee": guarantee})
    source = ProvenCell((SigmaCell(FixedCell("identity"), goal),), (1,), goal, samples=2**12)
    sigma = guarantee["noise_multiplier"]

    def stated(execution: str):
        how = {"execution": execution, "rates": (0.1,), "seeds": (0,)}
        cell = images.ImagesCell(source=source, **how)
        return cell.stated(made, scheme, 800)

    plain, whole = stated(images.AS_ACCOUNTED)
    assert whole is None and (plain["epsilon"], plain["delta"]) == (2.0, 1e-5)
    assert plain["adjacency"] == "add-remove" and plain["sampling"] == scheme.words()
    cut, limit = stated(images.CUT)
    assert 1e-5 < cut["delta"] <= 1.1e-5 and cut["epsilon"] == 2.0 and 100 < limit < 200
    mean, limit = stated(images.CUT_AT_MEAN)
    assert limit == 100 and mean["delta"] == 1e-5
    twice = account(Mechanism(scheme), noise_multiplier=sigma / 2, delta=1e-5).epsilon
    assert mean["epsilon"] == pytest.approx(twice) and twice > 3
    shuffled, _ = stated(images.SHUFFLED)
    fixed = sampling.FixedOrder(8, 2)
    known = account(Mechanism(fixed), noise_multiplier=sigma, delta=1e-5).epsilon
    assert shuffled["epsilon"] == pytest.approx(known) and known > 2.5
    assert shuffled["adjacency"] == "zero-out" and "shuffled" in shuffled["sampling"]
    with pytest.raises(UsageError, match="execution"):
        stated("sorted")


def test_the_best_rate_is_chosen_on_validation_and_reported_on_test() -> None:
    losses = {0.1: (3.0, 3.0), 0.2: (1.0, 1.2), 0.4: (np.nan, 0.1)}  # by rate, of two seeds
    test = {0.1: (0.0, 0.0), 0.2: (5.0, 7.0), 0.4: (0.0, 0.0)}

    def ran(cell) -> Result:
        def array(values: dict) -> np.ndarray:
            return np.array([values[rate] for rate in cell.rates]).T

        arrays = {"validation_loss": array(losses), "test_loss": array(test)}
        return Result({"rates": list(cell.rates)}, arrays)

    mechanisms = ("dpsgd+balls-in-bins",)
    study = Images(
        epsilons=(1.0,), mechanisms=mechanisms, executed=mechanisms[0], seeds=2, extend=1
    )
    for rates, asked in (((0.1, 0.2, 0.4), None), ((0.2, 0.4), 0.1)):
        here = dataclasses.replace(study, rates=rates).check()
        arm = next(here.arms())
        found = {cell: ran(cell) for cell in [here.cell_at(arm, 0.2)]}
        at = here.chosen(found, arm)
        assert (at.rate, at.missing) == (0.2, asked)
        assert at.edge == ("lowest" if asked else "")
        if asked:
            found |= {cell: ran(cell) for cell in [here.cell_at(arm, asked)]}
            assert len(found) == 2
        at, result = here.best(found, arm)
        assert at.rate == 0.2 and at.edge == ""
        last = at.tried.index(0.2) - bool(asked)
        assert result.arrays["test_loss"][:, last].tolist() == [5, 7]
