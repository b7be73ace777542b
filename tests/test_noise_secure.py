"""Secure noise: the law of its draws, the grid, what is counted, and what it refuses."""

import bisect
import dataclasses
import fractions
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from test_noise_stream import flat
from test_strategies import EVERY_KIND, SOME_KINDS, every_strategy

from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.noise import NoiseExhaustedError, NoiseStream, _keys, load_state, save_state, secure

PARAMS = {"a": np.zeros((3, 4), np.float32), "b": np.zeros((), np.float32)}
N = 13


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def make(strategy, n=N, **options):
    settings = {"noise_multiplier": 2.0, "clip_norm": 0.5, "secure": True, **options}
    return NoiseStream(strategy, iterations=n, **settings)


integers = jax.jit(secure.integers)


def draws(count, step=0, seed=0, leaf=0):
    low, high = np.arange(count, dtype=np.uint32), np.zeros((), np.uint32)
    return np.asarray(integers(_keys.pinned(seed), np.int32(step), np.uint32(leaf), low, high))


# --- draws ---------------------------------------------------------------------------------


def exact_table():
    upper, lower = secure.table()
    return [(int(u) << 32) | int(v) for u, v in zip(upper, lower, strict=True)]


def test_the_table_is_the_law_of_the_discrete_gaussian():
    law = exact_table()
    half = secure.CUT * secure.BASE
    assert len(law) == 2 * half and sorted(law) == law
    for x in (0, 1, 7, 450, 1000, 2000, 3000):  # ratios of weights, to the width of a word
        weights = [law[half + y] - law[half + y - 1] for y in (x, 0)]
        ratio = weights[0] / weights[1]
        assert ratio == pytest.approx(np.exp(-(x**2) / (2 * secure.BASE**2)), rel=1e-12)
    for x in range(half):  # symmetric: P(x <= -j-1) + P(x <= j) = 1
        assert abs(law[half + x] + law[half - x - 1] - 2**96) <= 2


def test_samples_invert_the_table_exactly():
    law = exact_table()
    rng = np.random.default_rng(0)
    numbers = [0, 2**96 - 1]
    numbers += [n for j in (0, 1, 5399, 5400, 10799) for n in (law[j] - 1, law[j], law[j] + 1)]
    numbers += [int(rng.integers(2**63)) << 33 | int(rng.integers(2**33)) for _ in range(3000)]
    numbers += [n >> int(rng.integers(0, 96)) for n in numbers[17:1000]]
    numbers = [n for n in numbers if 0 <= n < 2**96]
    expected = [bisect.bisect_right(law, n) - secure.CUT * secure.BASE for n in numbers]
    upper = np.array([n >> 32 for n in numbers], np.uint64)
    lower = np.array([n & 0xFFFFFFFF for n in numbers], np.uint32)
    np.testing.assert_array_equal(secure.sample(jnp.asarray(upper), jnp.asarray(lower)), expected)
    assert min(expected) < -5000 and max(expected) == 5400


def relative_error_of_a_sum(base, factor):
    """Largest relative error of the law of x₀ + k x₁ against the discrete Gaussian."""
    wide = np.arange(-40 * base, 40 * base + 1)
    weight = np.exp(-(wide**2) / (2.0 * base**2))
    spread = np.zeros(factor * (len(wide) - 1) + 1)
    spread[::factor] = weight
    law = np.convolve(spread, weight)
    steps = np.arange(len(law)) - len(law) // 2
    exact = np.exp(-(steps**2) / (2 * base**2 * (1 + factor**2)))
    nearby = np.abs(steps) < 6 * base * factor
    ratio = law[nearby] / exact[nearby]
    return np.max(ratio) / np.min(ratio) - 1


def test_sums_of_samples_are_discrete_gaussians():
    # as the module's σ₀ and k: s = σ₀/√(1 + k²) >= 1.75
    assert secure.BASE / np.sqrt(1 + secure.FACTOR**2) >= 1.75
    assert relative_error_of_a_sum(15, 8) < 1e-13
    assert relative_error_of_a_sum(3, 8) > 0.1  # control: below the smoothing width
    # what the distance adds up from: truncation, words of 96 bits, sums, rounding
    entries = 2 * secure.CUT * secure.BASE
    smoothing = 4 * np.exp(-2 * np.pi**2 * 1.75**2)
    parts = [2 * special.ndtr(-secure.CUT), entries * 2.0**-96, smoothing]
    # and room for what :func:`bounds` takes for granted of an output and of 60 buffers of each draw
    tail_mass = 61 * 2 * special.ndtr(-secure.CUT)
    assert secure.LEVELS * sum(parts) + 1 / (12 * secure.STEPS**2) + tail_mass < secure.DISTANCE
    # the largest draw there is, and a unit that is not below a grid step
    largest = secure.CUT * secure.BASE * (secure.FACTOR**secure.LEVELS - 1) / (secure.FACTOR - 1)
    assert largest < secure._LARGEST_DRAW * secure.STEPS
    square = secure.BASE**2 * (secure.FACTOR ** (2 * secure.LEVELS) - 1) // (secure.FACTOR**2 - 1)
    assert fractions.Fraction(secure.UNIT) ** 2 * square >= 1


def test_draws_have_the_law_of_the_grid():
    count = 200_000
    drawn = draws(count)
    assert np.all(drawn == np.round(drawn)) and len(np.unique(drawn)) > count - 5
    z = drawn / secure.STEPS
    moments = np.array([np.mean(z), np.mean(z**2) - 1, np.mean(z**3), np.mean(z**4) - 3])
    assert np.all(np.abs(moments) < 4.5 * np.sqrt(np.array([1, 2, 15, 96]) / count))
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert stats.kstest(1.05 * z, "norm").pvalue < 1e-4  # control: a wrong scale
    for modulus in (2, 256, 1000):  # the finest bits are uniform
        counts = np.bincount((drawn % modulus).astype(int), minlength=modulus)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_draws_differ_by_step_leaf_element_and_key_and_do_not_depend_on_the_block():
    drawn = draws(20_000)
    np.testing.assert_array_equal(draws(100), drawn[:100])
    variants = [draws(20_000, step=1), draws(20_000, seed=1), draws(20_000, leaf=1)]
    assert not any(np.any(drawn == other) for other in variants)


# --- streams -------------------------------------------------------------------------------


def released(stream, sums=None, n=N, seed=1):
    """(outputs by step, widths of the grid)."""
    state, rows = stream.init(PARAMS, seed=seed), []
    sums = jax.tree.map(lambda p: np.zeros(p.shape), PARAMS) if sums is None else sums
    for _ in range(n):
        output, state = stream.release(sums, state)
        rows.append(flat(output))
    unit = stream.stddev * secure.UNIT
    gains = np.diagonal(np.asarray(stream.strategy.solve(np.eye(n))))
    return np.array(rows), unit, unit * gains, state


def white(n, seed=1):
    """The integers of every step, (n, 13), for PARAMS."""
    return np.array(
        [
            np.concatenate([draws(size, step, seed, leaf) for leaf, size in enumerate((12, 1))])
            for step in range(n)
        ]
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "past"),
    [
        *(pytest.param(*kind.values, "auto", marks=kind.marks) for kind in SOME_KINDS),
        pytest.param("toeplitz", "store", marks=pytest.mark.release),
        ("banded-inverse-sqrt", "regenerate"),
    ],
)
def test_secure_noise_is_the_dense_inverse_up_to_the_grid_and_within_its_bounds(kind, past):
    strategy = every_strategy(N)[kind]
    stream = make(strategy, past=past)
    noise, unit, widths, state = released(stream)
    drawn = white(N)
    expected = np.asarray(strategy.solve(unit * drawn))
    matrix = np.asarray(strategy.materialize(N))
    # C w against z is what the proof bounds, in every coordinate; in units of σ
    moved = np.max(np.abs(matrix @ noise - unit * drawn)) / stream.stddev
    assert moved <= stream._largest_shift
    if strategy.kind != "identity":
        assert moved > 1e-14  # control: something is rounded
    np.testing.assert_allclose(noise, expected, atol=1e-9 * stream.stddev)
    steps = noise / widths[:, None]
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)  # on the grid of its step
    with pytest.raises(NoiseExhaustedError):
        stream.release(jax.tree.map(np.zeros_like, PARAMS), state)


def test_the_sum_is_rounded_to_the_grid_before_the_noise_comes():
    stream = make(S.BandedToeplitz([1.0, 0.5, 0.25]))
    rng = np.random.default_rng(0)
    sums = jax.tree.map(lambda p: rng.normal(size=p.shape), PARAMS)
    noise, _, widths, _ = released(stream, jax.tree.map(lambda p: np.zeros(p.shape), PARAMS))
    pair, _, _, _ = released(stream, sums)
    on_grid = np.round(flat(sums) / widths[:, None])
    steps = pair / widths[:, None] - noise / widths[:, None]
    # integers below 2⁴⁸, one rounding of the last product each
    np.testing.assert_allclose(steps, on_grid, atol=1e-2)
    assert np.max(np.abs(flat(sums) / widths[:, None] - on_grid)) > 0.4


def test_inside_jit_and_from_a_file_it_is_the_same(tmp_path):
    stream = make(S.BLT([0.3, 0.1], [0.5, 0.9]))
    sums = jax.tree.map(lambda p: np.full(p.shape, 0.3, np.float32), PARAMS)
    expected, *_ = released(stream, sums)
    state = stream.init(PARAMS, seed=1)
    run = jax.jit(
        lambda s: jax.lax.scan(lambda s, _: stream.release(sums, s)[::-1], s, length=N + 1)
    )
    _, releases = run(state)
    assert releases["a"].dtype == np.float32  # the type of the sums, after the grid
    rows = np.concatenate(
        [np.asarray(releases["a"]).reshape(N + 1, -1), releases["b"][:, None]], axis=1
    )
    np.testing.assert_array_equal(rows[:N], expected.astype(np.float32))
    assert np.all(np.isnan(rows[N]))
    state = stream.init(PARAMS, seed=1)
    _, state = stream.release(sums, state)
    save_state(tmp_path / "state.npz", stream, state)
    output, _ = stream.release(sums, load_state(tmp_path / "state.npz", stream, PARAMS))
    np.testing.assert_array_equal(flat(output), rows[1])


# --- what is counted -----------------------------------------------------------------------


def test_the_cost_is_that_of_a_gaussian_mechanism_on_either_side():
    cost = secure.SecureCost.of_draws(3e-10, 2048 * 10**7)
    assert cost.distance == 2048 * 10**7 * 2.0**-80
    # hockey stick of N(0, 1) against N(r, 1) at ε₂, half of what is added: at most δ₂
    shift, half = 3e-10 * np.sqrt(2048 * 10**7), cost.epsilon / 2
    tail = special.ndtr(shift / 2 - half / shift)
    assert tail == pytest.approx(2.0**-60, rel=1e-6) and cost.epsilon < 1e-3
    epsilon, delta = cost.total(2.0, 1e-5)
    assert epsilon == 2.0 + cost.epsilon and 1e-5 < delta < 1e-5 * (1 + 1e-3)


def test_three_steps_between_neighbours_spend_what_is_counted():
    # R, I, I', R' as laws on a line; R -> I and I' -> R' move by r, I -> I' is a Gaussian mechanism
    def hockey_stick(shift, epsilon):
        remainder = special.ndtr(shift / 2 - epsilon / shift)
        return remainder - np.exp(epsilon) * special.ndtr(-shift / 2 - epsilon / shift)

    moved, inner = 1e-4, 0.7
    delta = hockey_stick(inner, 1.0)
    cost = secure.SecureCost.of_draws(moved / np.sqrt(7), 7)
    epsilon, total = cost.total(1.0, delta)
    assert hockey_stick(inner + 2 * moved, epsilon) <= total < 1.01 * delta
    assert hockey_stick(inner + 2 * moved, 1.0) > total  # control: ε would not do


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_responses_are_what_the_recursion_makes_of_unit_draws(kind):
    strategy = every_strategy(N)[kind]
    recursion = make(strategy).recursion
    responses = secure._responses(recursion, N)
    np.testing.assert_allclose(responses, np.asarray(strategy.solve(np.eye(N))), atol=1e-12)
    matrix = np.asarray(strategy.materialize(N))
    residual, error = secure._residual(matrix, responses)
    exact = [
        [
            sum(fractions.Fraction(a) * fractions.Fraction(b) for a, b in zip(*pair, strict=True))
            for pair in itertools.product([row], responses.T.tolist())
        ]
        for row in matrix.tolist()
    ]
    assert (
        np.max(np.sum(np.abs(residual - np.array(exact - np.eye(N, dtype=int), float)), 1))
        <= error
        < 1e-16
    )


def test_coefficients_that_are_off_are_paid_for():
    strategy = S.BandedToeplitz([1.0, 0.5, 0.25])
    recursion = make(strategy).recursion
    table = recursion.table.copy()
    table[0, 1] *= 1 + 1e-9
    good = secure.largest_shift(strategy, recursion, N)
    bad = secure.largest_shift(strategy, dataclasses.replace(recursion, table=table), N)
    assert good < 1e-11 and bad > good + 0.5e-9 * secure._LARGEST_DRAW


def test_every_error_is_added_to_the_shift():
    """The documented sum, term by term, for C = 1, 1/2 below: its C⁻¹ is exact in float64."""
    a, epsilon = 0.5, 2.0**-53
    strategy = S.BandedToeplitz([1.0, a])
    powers = a ** np.arange(N)
    norm, largest_draw = 1 + a, 1.01 * secure.CUT
    # one product of a past output with 1 + 5 roundings, in a step that has one to feed back
    arithmetic = 6 * a * largest_draw * np.linalg.norm(powers[:-1])
    of_responses = 6 * a * np.sum(powers[:-1])
    residual = N * (N + 2) * 2.0**-20 * (norm + np.sum(powers))  # the responses are exact
    expected = norm * (1.26 * secure.UNIT + epsilon * arithmetic)
    expected += largest_draw * epsilon * (residual + norm * of_responses)
    expected += 2.01 * 2.0**51 * 4 * epsilon * secure.UNIT
    shift = secure.largest_shift(strategy, make(strategy).recursion, N)
    assert shift == pytest.approx(expected, rel=1e-12, abs=0)


def test_bounds_at_the_size_of_a_run_are_small():
    n = 512
    for strategy in (
        S.BLT([0.3, 0.1, 0.03, 0.01], [0.3, 0.9, 0.99, 1.0]),
        S.BandedToeplitz(np.asarray(S.SquareRoot().toeplitz_coefs(n))[:16]),
        S.SquareRoot(),
    ):
        cost = make(strategy, n).secure_cost(10**7)
        assert cost.epsilon < 2e-4, strategy.kind


def test_what_secure_noise_is_not_for_is_refused():
    stream = make(S.Identity())
    for call, match in (
        (lambda: stream.next(stream.init(PARAMS)), "release"),
        (lambda: make(S.Identity(), dtype=np.float32), "float64"),
        (lambda: make(S.Identity(), buffer_dtype=jnp.bfloat16), "float64"),
        (lambda: make(S.Identity(), 8193).init(PARAMS), "8192"),
        (lambda: stream.release({"a": PARAMS["a"]}, stream.init(PARAMS)), "sums"),
        (lambda: make(S.Identity(), secure=False).secure_cost(10), "only secure"),
        (lambda: stream.secure_cost(10**15), "would add"),
    ):
        with pytest.raises(UsageError, match=match):
            call()
    with jax.enable_x64(False), pytest.raises(UsageError, match="jax_enable_x64"):
        stream.init(PARAMS)
