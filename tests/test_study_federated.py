"""DP-FedAvg and DP-FedSGD against plain SGD, their sensitivities by brute force, and the LSTM."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import few

from mfopt.accounting.closed_form.moments import Estimator
from mfopt.errors import UsageError
from mfopt.experiments.runs import federated, lstm
from mfopt.experiments.runs.federated import Server, UserData, UserUpdate
from mfopt.experiments.runs.functional import size
from mfopt.noise.stream import NoiseStream
from mfopt.sampling import FixedOrder, Poisson, UnitSampler
from mfopt.strategies import BLT, Identity
from mfopt.training import fedavg

USERS, ROWS, WIDTH = 7, 6, 3
KEY = jax.random.key(0)


def squares(params, rows, mask):
    x, y = rows
    return jnp.sum(jnp.where(mask, (x @ params["w"] + params["b"] - y) ** 2, 0.0)) / jnp.maximum(
        jnp.sum(mask), 1
    )


@pytest.fixture(scope="module")
def data() -> UserData:
    random = np.random.default_rng(0)
    counts = np.array([6, 1, 4, 6, 2, 3, 5])
    rows = (
        random.normal(size=(USERS, ROWS, WIDTH)).astype(np.float32),
        random.normal(size=(USERS, ROWS)).astype(np.float32),
    )
    return UserData(rows, np.arange(ROWS) < counts[:, None], counts)


PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.float32(0.3)}


def of(data: UserData, users) -> tuple:
    index = np.asarray(users)
    return jax.tree.map(lambda leaf: leaf[index], data.rows), data.mask[index]


@functools.cache
def compiled(update: UserUpdate):
    return jax.jit(functools.partial(update, squares))


def one(update: UserUpdate, data: UserData, user: int, clip: float = 1.0):
    return compiled(update)(PARAMS, *of(data, user), clip, KEY)


def norm(tree) -> float:
    return float(
        np.sqrt(sum(np.sum(np.square(np.float64(leaf))) for leaf in jax.tree.leaves(tree)))
    )


def test_one_local_step_is_fed_sgd_is_plain_sgd(data: UserData) -> None:
    """Without clipping, with one batch of all rows: the mean user's gradient step."""
    whole = {"rate": 0.1, "batch": ROWS, "private": False}
    fed_avg, fed_sgd = UserUpdate(epochs=1, **whole), UserUpdate(epochs=0, **whole)
    everybody = FixedOrder(bins=1, epochs=3)
    ends = []
    for update in (fed_avg, fed_sgd):
        server = Server(
            update,
            squares,
            Estimator(1.0, 1.0, USERS),
            UnitSampler(everybody, USERS, seed=0),
            None,
            np.ones(3),
            chunk=4,
        )
        *_, (rounds, end) = server.run(PARAMS, data, np.ones(USERS, np.float32))
        assert rounds == 3
        ends.append(end)
    plain = PARAMS
    for _ in range(3):
        gradients = [jax.grad(squares)(plain, *of(data, user)) for user in range(USERS)]
        mean = jax.tree.map(lambda *g: sum(g) / USERS, *gradients)
        plain = jax.tree.map(lambda p, g: p - 0.1 * g, plain, mean)
    for end in ends:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), end, plain)
    two = dataclasses.replace(fed_avg, epochs=2)  # the control: two local steps are another thing
    assert abs(float(one(two, data, 0)["b"] - one(fed_avg, data, 0)["b"])) > 1e-3


def test_local_epochs_are_batches_in_order_clipped_after_each(data: UserData) -> None:
    """Against the pseudocode, step by step; the last batch of a user may be short."""
    update = UserUpdate(rate=0.3, batch=4, epochs=2)
    rows, mask = of(data, 6)  # 5 real rows: batches of 4 and of 1
    theta, bound = PARAMS, 0.6
    for _ in range(2):
        for part in (slice(0, 4), slice(4, 6)):
            piece = jax.tree.map(lambda leaf, p=part: leaf[p], rows)
            gradient = jax.grad(squares)(theta, piece, mask[part])
            theta = jax.tree.map(lambda p, g: p - 0.3 * g, theta, gradient)
            moved = jax.tree.map(jnp.subtract, theta, PARAMS)
            shrink = min(1.0, bound / norm(moved))
            theta = jax.tree.map(lambda p, m, s=shrink: p + s * m, PARAMS, moved)
    expected = jax.tree.map(jnp.subtract, theta, PARAMS)
    found = one(update, data, 6, bound)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)


@pytest.mark.parametrize("layers", ["flat", "per-layer"])
@pytest.mark.parametrize("epochs", few([0, 3], 1))
def test_updates_stay_within_the_bound(data: UserData, layers, epochs: int) -> None:
    update = UserUpdate(rate=50.0, batch=4, epochs=epochs, layers=layers)
    for user in range(USERS):
        found = one(update, data, user, 0.7)
        assert norm(found) <= 0.7
        if layers == "per-layer":
            for leaf in found.values():  # each of two vectors by S/√2
                assert norm(leaf) <= 0.7 / np.sqrt(2)
        assert norm(found) > 0.69 or layers == "per-layer"
    assert norm(one(dataclasses.replace(update, private=False), data, 0)) > 0.7  # the control


@pytest.mark.parametrize("kind", ["fixed", "clipped"])
def test_one_user_moves_the_estimate_by_at_most_its_sensitivity(data: UserData, kind) -> None:
    """Lemma 1, over rounds of 1 to 7 users and every one of them left out."""
    cap = 4.0
    weight = fedavg.weights(data.counts, cap)
    assert weight.max() == 1.0 and weight.min() == 0.25
    estimator = Estimator(2.0, 0.5, 6.0, kind)  # q W_min = 3: smaller and larger rounds
    update = UserUpdate(rate=50.0, batch=ROWS, epochs=1)
    rows, mask = jax.tree.map(lambda leaf: leaf[None], (data.rows, data.mask))

    @jax.jit
    def estimated(weight):
        summed = federated.total(update, squares, PARAMS, rows, mask, weight[None], 2.0, KEY)
        return federated.estimate(estimator, *summed)

    def largest(weight: np.ndarray) -> float:
        found = []
        for count in range(1, USERS + 1):
            there = np.arange(USERS) < count
            whole = estimated(jnp.asarray(weight * there))
            for user in range(count):
                part = estimated(jnp.asarray(weight * there * (np.arange(USERS) != user)))
                found.append(norm(jax.tree.map(jnp.subtract, whole, part)))
        return max(found)

    assert 0.3 * estimator.sensitivity < largest(weight) <= estimator.sensitivity
    # the control: weights that are not cut at 1 break the bound
    assert largest(data.counts.astype(np.float32)) > estimator.sensitivity
    server = Server(
        UserUpdate(0.1, 4, private=False),
        squares,
        estimator,
        UnitSampler(Poisson(0.5, 1), USERS, seed=0),
        None,
        np.ones(1),
    )
    with pytest.raises(UsageError, match="weight"):
        next(server.run(PARAMS, data, data.counts / cap))


@pytest.mark.parametrize("strategy", [Identity(), BLT(np.array([0.3]), np.array([0.9]))])
def test_noise_is_z_times_the_sensitivity_of_each_round(data: UserData, strategy) -> None:
    """S falls, z stays: what a silent round adds has the round's own standard deviation."""
    rounds, wide = 3, 4000
    params = {"w": jnp.zeros(wide)}
    silent = UserData(np.zeros((2, 1, 1), np.float32), np.zeros((2, 1), bool), np.ones(2))
    scheme = Poisson(0.5, rounds)
    clip_norms = np.array([2.0, 2.0, 0.5])
    noise = NoiseStream(
        strategy, iterations=rounds, noise_multiplier=1.5, clip_norm=1.0, sampling=scheme
    )
    server = Server(
        UserUpdate(0.1, 1),
        lambda params, rows, mask: 0.0 * jnp.sum(params["w"]),
        Estimator(2.0, 0.5, 10.0, "clipped"),
        UnitSampler(scheme, 2, seed=1),
        noise,
        clip_norms,
    )
    models = [params["w"], *(end["w"] for _, end in server.run(params, silent, np.ones(2)))]
    steps = np.diff(np.array(models), axis=0)
    inverse = np.asarray(strategy.solve(np.eye(rounds)))
    for step, change in enumerate(steps):
        unit = 1.5 * 2 * clip_norms[step] / 5.0
        expected = unit * np.linalg.norm(inverse[step])
        assert abs(np.std(change) / expected - 1) < 4 / np.sqrt(2 * wide)
        assert server.sensitivity(step) * 1.5 == pytest.approx(unit)


@pytest.mark.parametrize("epochs", [0, 1])
def test_one_compilation_serves_all_rates(data: UserData, epochs: int) -> None:
    """The rate is an argument of the compiled round; the model is that of the rate itself."""

    def ended(rate: float) -> dict[str, jax.Array]:
        server = Server(
            dataclasses.replace(whole, rate=rate),
            squares,
            Estimator(0.6, 1.0, 6.0),
            UnitSampler(Poisson(1.0, 1), USERS, seed=0),
            None,
            np.ones(1),
            chunk=USERS,
        )
        return next(server.run(PARAMS, data, weight))[1]

    whole = UserUpdate(rate=0.3, batch=ROWS, epochs=epochs, private=False)
    weight = fedavg.weights(data.counts, 4.0)
    ended(0.3)
    compiled = federated._round._cache_size()
    found = ended(0.02)
    assert federated._round._cache_size() == compiled
    moves = [one(dataclasses.replace(whole, rate=0.02), data, k) for k in range(USERS)]
    for name, leaf in PARAMS.items():
        moved = sum(w * move[name] for w, move in zip(weight, moves, strict=True)) / 6.0
        np.testing.assert_allclose(found[name], leaf + moved, rtol=1e-5)
        assert np.abs(ended(0.3)[name] - found[name]).max() > 1e-3  # the control


def test_a_server_refuses_noise_of_another_sampling() -> None:
    def made(noise: NoiseStream | None, private: bool = True) -> Server:
        return Server(
            UserUpdate(0.1, 1, private=private),
            squares,
            Estimator(1.0, 0.5, 2.0),
            UnitSampler(Poisson(0.5, 2), 4, seed=0),
            noise,
            np.ones(2),
        )

    def stream(scheme, clip_norm: float = 1.0) -> NoiseStream:
        return NoiseStream(
            Identity(), iterations=2, noise_multiplier=1.0, clip_norm=clip_norm, sampling=scheme
        )

    made(stream(Poisson(0.5, 2)))
    for noise in (stream(Poisson(0.4, 2)), stream(None), stream(Poisson(0.5, 2), 2.0), None):
        with pytest.raises(UsageError, match="noise"):
            made(noise)
    with pytest.raises(UsageError, match="noise"):
        made(stream(Poisson(0.5, 2)), private=False)


def test_the_papers_model_has_the_papers_size() -> None:
    """1.35M in 11 vectors; the tied table saves about 40% (McMahan et al. 2018, appendix B)."""
    params, _ = lstm.model()
    gates = 4 * ((96 + 256) * 256 + 256)
    assert size(params) == 10_003 * 96 + gates + 256 * 96 + 96 == 1_346_432
    assert round(size(params) / 1e6, 2) == 1.35 and len(params) == 11
    assert 0.4 < 10_003 * 96 / (size(params) + 10_003 * 96) < 0.42


@pytest.fixture(scope="module")
def small():
    params, apply = lstm.model(20, 6, 8)
    return params, jax.jit(apply)


@pytest.mark.ci
def test_the_lstm_is_causal_and_its_words_have_norm_one(small) -> None:
    params, apply = small
    tokens = jnp.arange(5)
    base = apply(params, tokens)
    assert base.shape == (5, 23)
    later = apply(params, tokens.at[3].set(17))
    np.testing.assert_allclose(later[:3], base[:3], atol=1e-6)
    assert np.abs(later[3:] - base[3:]).max() > 1e-3
    longer = {**params, "table": 7.0 * params["table"]}  # only directions count
    np.testing.assert_allclose(apply(longer, tokens), base, atol=1e-5)
    # against the recurrence written out
    table = params["table"] / jnp.linalg.norm(params["table"], axis=1, keepdims=True)
    hidden = memory = jnp.zeros(8)
    for token in tokens:
        read = jnp.concatenate([table[token], hidden])
        gate = {
            name: read @ params[f"{name}.kernel"] + params[f"{name}.bias"]
            for name in ("input", "forget", "cell", "output")
        }
        memory = jax.nn.sigmoid(gate["forget"]) * memory + jax.nn.sigmoid(gate["input"]) * jnp.tanh(
            gate["cell"]
        )
        hidden = jax.nn.sigmoid(gate["output"]) * jnp.tanh(memory)
    last = (hidden @ params["projection.kernel"] + params["projection.bias"]) @ table.T
    np.testing.assert_allclose(base[-1], last, atol=1e-5)


def test_loss_counts_real_targets_only(small) -> None:
    params, apply = small
    loss = lstm.NextWord(apply)
    inputs, targets = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[2, 3, -1], [5, 6, 7]])
    only = loss(params, (inputs, targets), np.array([True, False]))
    chosen = jax.nn.log_softmax(apply(params, inputs[0]))
    np.testing.assert_allclose(only, -(chosen[0, 2] + chosen[1, 3]) / 2, rtol=1e-5)
    assert loss(params, (inputs, targets), np.array([False, False])) == 0


def test_unknown_words_are_always_wrong() -> None:
    words = 4  # tokens 4, 5, 6 are UNK, BOS and EOS
    logits = jnp.eye(7)[jnp.array([0, 4, 4, 6, 1])]
    targets = jnp.array([0, 4, 2, 6, -1])
    right, counted = lstm.top_one(logits, targets, words)
    assert (int(right), int(counted)) == (2, 4)  # the guess of UNK for UNK is a mistake


def test_head_words_counts_best_guesses_in_the_head() -> None:
    logits = np.zeros((2, 30))
    logits[0, [0, 1, 2, *range(20, 27)]] = 1.0
    logits[1, 10:20] = 1.0
    found = lstm.head_words(logits, (3, 15))
    assert found.shape == (2, 11) and found.sum(axis=1).tolist() == [2, 2]
    assert found[0, 3] == found[0, 0] == 1 and found[1, 3] == found[1, 5] == 1
