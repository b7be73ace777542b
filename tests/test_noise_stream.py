"""Streamed noise against C⁻¹Z computed densely, its covariance, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release
from test_strategies import EVERY_KIND, every_strategy

from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.noise import NoiseExhaustedError, NoiseStream, _draws, _keys, from_factorization
from mfopt.noise.choice import choose
from mfopt.noise.packing import SingleLeaf
from mfopt.sampling import BallsInBins
from mfopt.workloads import PrefixSums

PARAMS = {"a": np.zeros((3, 4), np.float32), "b": np.zeros((), np.float32)}


def make(strategy, n, **options):
    settings = {"iterations": n, "noise_multiplier": 2.0, "clip_norm": 0.5, **options}
    return NoiseStream(strategy, **settings)


def flat(tree):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def white(n, seed, params=PARAMS, dtype=jnp.float32):
    """The documented draws, one step and leaf at a time: shape (n, parameters)."""
    return _white(n, seed, tuple(np.shape(leaf) for leaf in jax.tree.leaves(params)), dtype)


@functools.cache  # the same for every kind of C
def _white(n, seed, shapes, dtype):
    key = _keys.pinned(seed)
    rows = []
    for step in range(n):
        row = []
        for leaf, shape in enumerate(shapes):
            low = np.arange(int(np.prod(shape)), dtype=np.uint32)
            subkeys, offset = _draws.seeds(key, step, np.array([leaf]))
            with np.errstate(over="ignore"):
                words = _draws.threefry(np.asarray(subkeys[:, 0]), low, np.zeros_like(low))
            words = map(jnp.asarray, words)
            row.append(_draws.standard_normal(*words, offset[0], dtype))
        rows.append(np.concatenate(row))
    actual = np.array(rows, np.float64)
    actual.setflags(write=False)
    return actual


def streamed(stream, n, seed=1, params=PARAMS):
    state = stream.init(params, seed=seed)
    rows = []
    for _ in range(n):
        noise, state = stream.next(state)
        rows.append(flat(noise))
    return np.array(rows, np.float64), state


# --- equality with the dense matrix --------------------------------------------------------


@pytest.mark.parametrize("past", before_release(["auto", "store", "regenerate"], 0))
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_stream_equals_dense_inverse(kind, past):
    n = 13  # not a multiple of any buffer or block size
    strategy = every_strategy(n)[kind]
    stream = make(strategy, n, past=past)
    noise, state = streamed(stream, n)
    expected = np.asarray(strategy.solve(white(n, seed=1)))
    np.testing.assert_allclose(noise, expected, atol=3e-6)
    assert stream._advance_jitted._cache_size() == 1, "recompiled after the first step"
    with pytest.raises(NoiseExhaustedError, match="covers 13 iterations"):
        stream.next(state)


def well_conditioned(n):
    """One of each kind for large n: the inverse must not amplify float32 rounding by itself."""
    rng = np.random.default_rng(0)
    root = np.asarray(S.SquareRoot().toeplitz_coefs(n))
    dense = np.asarray(S.SquareRoot().materialize(n)) * rng.uniform(0.9, 1.1, (1, n))
    blt = S.BLT([0.3, 0.1, 0.03, 0.01], [0.3, 0.9, 0.99, 1.0])
    examples = [
        S.Identity(),
        S.Toeplitz(root / np.arange(1, n + 1) ** 0.1),
        S.BandedToeplitz(root[:16]),
        blt,
        S.Banded.from_dense(dense, 16),
        S.Dense(dense),
        S.SquareRoot(),
        S.BandedSquareRoot(40),  # more buffers than are summed in one unrolled loop
        S.BandedInverseSquareRoot(40),
        S.BandedInverseRoot(0.7, 40),
        S.ClearedBLT([0.3, 0.1], [0.3, 0.9], (64, 200), (2, 4)),
        S.Tree(),
        S.WaveBLT([0.3, 0.1], [0.3, 0.9], 0.01, 0.998, 0.9, 0.01, -3.4),
        S.TimeScaled(blt, np.linspace(0.7, 1.4, n), np.linspace(2.0, 0.6, n)),
    ]
    return {example.kind: example for example in examples}


@pytest.mark.release
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_stream_equals_dense_inverse_in_a_scan_of_2048_steps(kind):
    n = 2048
    strategy = well_conditioned(n)[kind]
    stream = make(strategy, n)
    params = np.zeros(2, np.float32)
    state = stream.init(params, seed=5)
    run = jax.jit(lambda s: jax.lax.scan(lambda s, _: stream.next(s)[::-1], s, length=n + 2))
    state, noise = run(state)
    expected = np.asarray(strategy.solve(_white_by_scan(n, 5)))
    error = np.abs(np.asarray(noise[:n]) - expected)
    assert np.max(error) < 2e-5 and np.max(error[-100:]) < 2e-5
    # past the end: nothing that could be taken for noise, and no way back
    assert np.all(np.isnan(noise[n:])) and int(state.step) == n + 2


def _white_by_scan(n, seed):
    leaf, key = SingleLeaf(0, (2,), None), _keys.pinned(seed)
    draws = jax.lax.map(lambda step: leaf.draw(key, step, np.float32, (0,)), jnp.arange(n))
    return np.asarray(draws, np.float64)


def test_a_kind_without_a_recursion_is_streamed_by_its_dense_inverse_only_if_asked():
    class Steeper(S.BLT):
        """C of another matrix than its parent's: the parent's recursion would be wrong."""

        kind = "test-steeper"

        def toeplitz_coefs(self, n):
            return super().toeplitz_coefs(n) / (1 + jnp.arange(n))

    strategy = Steeper(np.array([0.5]), np.array([0.9]))
    for past in ("auto", "store", "regenerate"):
        with pytest.raises(UsageError, match="past='dense'"):
            make(strategy, 9, past=past)
    with pytest.raises(UsageError, match="must be one of auto, store"):
        make(strategy, 9, past="sparse")
    noise, _ = streamed(make(strategy, 9, past="dense"), 9)
    matrix = np.asarray(strategy.materialize(9))
    assert matrix[8, 0] < 0.5 * S.BLT(strategy.scale, strategy.decay).materialize(9)[8, 0]
    np.testing.assert_allclose(matrix @ noise, white(9, seed=1), atol=1e-5)


def test_memory_and_draws_are_those_of_the_recursion():
    n = 2048
    for strategy, past, slots, draws in [
        (S.SquareRoot(), "regenerate", 0, (n + 1) / 2),
        (S.SquareRoot(), "store", n - 1, 1),
        (S.Tree(), "auto", 11, 1),
        (S.BandedInverseSquareRoot(4), "auto", 3, 1),
        (S.BandedInverseSquareRoot(4), "regenerate", 0, 4 - 6 / n),
        (S.BandedSquareRoot(4), "auto", 3, 1),
    ]:
        recursion = choose(strategy, n, past)
        assert (recursion.slots, recursion.draws(n)) == (slots, pytest.approx(draws))
        state = make(strategy, n, past=past).init(np.zeros(1, np.float32), seed=1)
        assert [len(buffer) for buffer in state.buffers if buffer is not None] == [slots] * (
            slots > 0
        )


@pytest.mark.parametrize("kind", ["banded-toeplitz", "blt", "sqrt", "banded-inverse-sqrt"])
def test_narrow_buffers_round_the_noise_and_no_more(kind):
    n = 13
    strategy = every_strategy(n)[kind]
    stream = make(strategy, n, past="store", buffer_dtype=jnp.bfloat16)
    noise, state = streamed(stream, n)
    assert state.buffers[0].dtype == jnp.bfloat16
    difference = np.abs(noise - np.asarray(strategy.solve(white(n, seed=1))))
    assert 1e-4 < np.max(difference) < 0.05


@pytest.mark.parametrize(
    "kind",
    before_release(
        ["banded-toeplitz", "blt", "banded", "banded-sqrt", "banded-inverse-sqrt", "tree"], 1, 2
    ),
)
def test_inside_a_training_step_the_buffers_are_updated_in_place(kind):
    # the noise is no output here: a compiler that fused it into each of its uses would make the
    # draw twice and copy the buffers
    size = 4096
    stream = make(every_strategy(64)[kind], 64)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, state):
        noise, state = stream.next(state)
        return params - 0.1 * noise, state

    params = jnp.zeros(size)
    memory = train.lower(params, stream.init(params, seed=0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= stream.buffer_bytes(size) + 4 * size
    assert memory.temp_size_in_bytes <= 2 * 4 * size + 4096


# --- distribution --------------------------------------------------------------------------


def test_scale_is_noise_multiplier_times_clip_norm():
    noise, _ = streamed(make(S.Identity(), 1), 1)
    louder, _ = streamed(make(S.Identity(), 1, noise_multiplier=6.0, clip_norm=1.5), 1)
    np.testing.assert_allclose(louder, 9 * noise, rtol=1e-6)


def test_from_factorization_reads_what_it_needs():
    strategy, sampling = S.BandedToeplitz([1.0, 0.5]), BallsInBins(5, 1)
    stated = Guarantee(2.0, 1e-5, 3.0, method="for this test", status="certified")
    record = Factorization(strategy, 3.0, sampling, PrefixSums(), stated)
    stream = from_factorization(record, clip_norm=2.0, buffer_dtype=jnp.bfloat16)
    assert (stream.iterations, stream.stddev, stream.sampling) == (5, 6.0, sampling)
    assert stream.describe()["buffer_dtype"] == "bfloat16"


# --- no silent reuse -----------------------------------------------------------------------


def test_every_call_of_init_draws_a_new_key_unless_a_seed_pins_it():
    stream = make(S.Identity(), 4)
    first, second = stream.init(PARAMS), stream.init(PARAMS)
    assert not np.array_equal(first.key, second.key) and not first.pinned
    state, two = stream.init(PARAMS, seed=3), stream.init(PARAMS, seed=3)
    np.testing.assert_array_equal(state.key, two.key)
    assert state.pinned and not np.array_equal(state.key, stream.init(PARAMS, seed=4).key)
    words = np.arange(1, 9, dtype=np.uint32)
    arguments = stream.init(PARAMS, key=words)
    np.testing.assert_array_equal(arguments.key, words)
    assert not arguments.pinned
    with pytest.raises(UsageError, match="not both"):
        stream.init(PARAMS, seed=1, key=words)
    with pytest.raises(UsageError, match="uint32"):
        stream.init(PARAMS, key=np.arange(8))
    with pytest.raises(UsageError, match="uint32"):  # 64 bits are within reach of a search
        stream.init(PARAMS, key=np.array([1, 2], np.uint32))
    for seed in (-1, 2**64, 0.5, True):
        with pytest.raises(UsageError, match="seed"):
            stream.init(PARAMS, seed=seed)


def test_a_key_or_a_state_cannot_become_a_constant_of_a_compiled_function():
    stream = make(S.Identity(), 4)
    with pytest.raises(UsageError, match="outside of jit"):
        jax.jit(lambda p: stream.init(p).key)(PARAMS)
    jax.jit(lambda p: stream.init(p, seed=1).key)(PARAMS)
    state = stream.init(PARAMS)
    with pytest.raises(UsageError, match="argument"):
        jax.jit(lambda: stream.next(state)[0])()


def test_a_state_of_another_factorization_is_refused():
    stream = make(S.BandedToeplitz([1.0, 0.5]), 4)
    for other in (
        make(S.BandedToeplitz([1.0, 0.4]), 4),
        make(S.BandedToeplitz([1.0, 0.5]), 5),
        make(S.BandedToeplitz([1.0, 0.5]), 4, noise_multiplier=1.0),
    ):
        with pytest.raises(UsageError, match="another factorization"):
            stream.next(other.init(PARAMS))
    other = make(S.BandedToeplitz([1.0, 0.5]), 4, clip_norm=0.25)
    with pytest.raises(UsageError, match="other settings"):
        stream.next(other.init(PARAMS))
    with pytest.raises(UsageError, match="init or next"):
        stream.next(PARAMS)


def test_the_key_is_never_printed():
    stream = make(S.BLT(np.ones(1), np.ones(1)), 4)
    state = stream.init(PARAMS, key=np.array([123456789, 987654321] * 4, np.uint32))
    for text in (repr(state), str(state), repr(stream), str(stream.describe())):
        assert "123456789" not in text and "987654321" not in text
    assert "secret" in repr(state)
    assert "none: seed pinned" in repr(stream.init(PARAMS, seed=123456789))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"noise_multiplier": 0}, "noise_multiplier"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"clip_norm": 1e-50}, "out of range"),  # a standard deviation of 0 in float32
        ({"clip_norm": 1e38}, "out of range"),
        ({"iterations": 0}, "iterations"),
        ({"past": "forget"}, "past"),
        ({"dtype": jnp.bfloat16}, "float32 or float64"),
        ({"buffer_dtype": np.int8}, "buffer_dtype"),
    ],
)
def test_bad_settings_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        make(S.Identity(), options.pop("iterations", 3), **options)


@pytest.mark.parametrize("params", [{}, {"a": np.zeros(2, np.int32)}, {"a": "text"}])
def test_parameters_without_noise_are_refused(params):
    with pytest.raises(UsageError, match="params"):
        make(S.Identity(), 3).init(params)


def test_float64_noise_needs_64_bit_mode():
    with pytest.raises(UsageError, match="jax_enable_x64"):
        make(S.Identity(), 3, dtype=np.float64).init(PARAMS)
