"""The white draws: known answers, accuracy of the inversion, the law of the tails."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import special, stats

from mfopt._runtime._check import UsageError
from mfopt.noise import _draws, _keys, packing
from mfopt.noise.packing import Packing

SIGN = np.uint32(1 << 31)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def drawn(invert, count, dtype, seed, step):
    """``count`` draws of one step by the inversion ``invert``."""
    subkeys, offset = _draws.seeds(jnp.asarray(seed), step, np.arange(1))
    words = _draws.threefry(subkeys[:, 0], *_draws.counters((count,), (count,), (0,)))
    return invert(*words, offset[0], dtype)


def normals(count, step, dtype=jnp.float32, invert=_draws.standard_normal):
    return np.asarray(drawn(invert, count, dtype, _keys.pinned(0), step), np.float64)


# --- the generators ------------------------------------------------------------------------


def published_subkeys(key):
    """The key schedule of Threefry-2x32 (Salmon et al. 2011), for its known answers."""
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    subkeys = [schedule[0], schedule[1]]
    for i in range(5):
        subkeys += [schedule[(i + 1) % 3], (schedule[(i + 2) % 3] + i + 1) % 2**32]
    return np.array(subkeys, np.uint32)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # known answers of the Random123 distribution for threefry2x32, 20 rounds
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    with np.errstate(over="ignore"):
        words = _draws.threefry(published_subkeys(key), *map(np.uint32, counter))
    assert tuple(map(int, words)) == expected


def test_chacha20_known_answer():
    # RFC 8439, section 2.3.2
    key = np.frombuffer(bytes(range(32)), "<u4").astype(np.uint32)
    nonce = np.frombuffer(bytes.fromhex("000000090000004a00000000"), "<u4")
    counter = np.array([[1, *nonce], [2, *nonce]], np.uint32).T
    block, other = np.asarray(_draws.chacha20(jnp.asarray(key), jnp.asarray(counter))).T
    assert not np.any(block == other)
    assert block.astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_steps_and_leaves_have_seeds_of_their_own():
    key = _keys.pinned(3)
    seeds_of_steps = [_draws.seeds(key, step, np.arange(4)) for step in range(3)]
    subkeys = np.concatenate([np.asarray(words).T for words, _ in seeds_of_steps])
    assert len(np.unique(subkeys)) == subkeys.size == 12 * 12
    offsets = np.concatenate([offset for _, offset in seeds_of_steps])
    assert len(np.unique(offsets)) == 12 and np.all((offsets > 0) & (offsets <= 1))
    for bit in (0, 31, 255):  # every bit of the key counts
        other = key.copy()
        other[bit // 32] ^= np.uint32(1 << bit % 32)
        assert not np.any(np.asarray(_draws.seeds(other, 0, np.arange(4))[0]) == subkeys[:4].T)
    uniform = np.asarray(_draws.seeds(key, 0, np.arange(20_000))[1], np.float64)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4


def test_an_empty_leaf_changes_no_draw_of_another():
    # 2 rows for 2 leaves, and both of one leaf
    with_empty = Packing((0, 1), ((0,), (2000,)))
    key, step = jnp.asarray(_keys.pinned(7)), jnp.int32(3)
    packed = with_empty.unpacked(with_empty.draw(key, step, np.float32))
    leaf_alone = packing.SingleLeaf(1, (2000,), None).draw(key, step, np.float32, (0,))
    assert packed[0].shape == (0,)
    np.testing.assert_array_equal(packed[1], leaf_alone)


@pytest.mark.parametrize(
    ("shape", "spec", "width"),
    [
        ((16, 3), P("x"), 0),
        ((16, 3), P(("y", "x")), 0),
        ((4, 512), P(None, "y"), 128),
        ((4, 6, 512), P("x", None, "y"), 128),
        ((2, 8, 640), P(None, ("x", "y")), 128),
        ((8, 2048), P("y", "x"), 1024),
        ((5, 7), P(), 0),
    ],
)
def test_the_rows_of_every_device_are_numbered_as_in_the_whole_leaf(
    shape, spec, width, monkeypatch
):
    mesh = AbstractMesh((2, 4), ("x", "y"))
    layout = (
        ((3,), shape, (8, 4)),
        (None, NamedSharding(mesh, spec), NamedSharding(mesh, P("x", "y"))),
    )
    first, group, ungrouped = packing.grouped(*layout)
    assert first.leaves == (0,) and group.leaves == (1,)
    assert isinstance(ungrouped, packing.SingleLeaf)  # of which a device has runs of one
    assert group.divisor == width
    whole, recorded = np.arange(math.prod(shape)).reshape(shape), set()
    for spot in np.ndindex(2, 4):
        position = dict(zip("xy", spot, strict=True))

        def index(axes, at=position):  # of the device, as jax.lax.axis_index
            names = axes if isinstance(axes, tuple) else (axes,)
            return np.ravel_multi_index([at[n] for n in names], [mesh.shape[n] for n in names])

        monkeypatch.setattr(jax.lax, "axis_index", index)
        (block,) = group.parts(group.words(group.begin()))
        specs = (*spec, *[None] * (len(shape) - len(spec)))
        part = whole[
            tuple(
                slice(None) if axes is None else slice(index(axes) * n, (index(axes) + 1) * n)
                for axes, n in zip(specs, block.shape, strict=True)
            )
        ]
        np.testing.assert_array_equal(block, part)
        recorded |= set(part.ravel().tolist())
    assert len(recorded) == whole.size


def test_parts_of_several_processes_are_parts_of_one_draw():
    shapes, key, step = ((2000,), (3,), (7, 100)), jnp.asarray(_keys.pinned(7)), jnp.int32(3)
    whole = Packing((0, 1, 2), shapes)
    expected = whole.unpacked(np.asarray(whole.draw(key, step, np.float32)))
    spans = [packing.share(math.prod(shape), (1, 3)) for shape in shapes]
    part = Packing((0, 1, 2), tuple((stop - start,) for start, stop in spans))
    first = part.row_starts(np.array([start for start, _ in spans]))
    draws = part.unpacked(np.asarray(part.draw(key, step, np.float32, first)))
    for leaf, (start, stop), actual in zip(expected, spans, draws, strict=True):
        np.testing.assert_array_equal(leaf.ravel()[start:stop], actual)


def test_counters_of_a_leaf_beyond_32_bits_do_not_repeat():
    # groups of whole slices: never materialized, so one block of a huge leaf is looked at
    huge = (5, 2**31)
    _draws.check_sizes((huge,), iterations=4)
    recorded = set()
    for row in range(5):
        low, high = _draws.counters(huge, (1, 2), (row, 2**31 - 2))
        recorded |= {(int(word), int(high.ravel()[0])) for word in low[0]}
    assert len(recorded) == 5 * 2
    with pytest.raises(UsageError, match="slice"):
        _draws.check_sizes(((2, 2**33),), 1)
    with pytest.raises(UsageError, match=r"2\*\*32"):
        _draws.check_sizes(((3,), (4,)), 2**32 + 1)


def test_sizes_whose_tails_could_count_are_refused():
    # ten billion parameters in one array, 10,000 steps: far below any δ
    shape = (2**10, 10**7)
    assert _draws.slack((shape,), 10_000) == pytest.approx(10**4 * (2**10 * 10**7) ** 2 / 2**127)
    _draws.check_sizes((shape,), 10_000)
    huge = (2**14, 2**30)
    assert _draws.slack((huge,), 2) > 2**-40
    with pytest.raises(UsageError, match="range"):
        _draws.check_sizes((huge,), 2)


# --- the inversion -------------------------------------------------------------------------


def words_of(magnitude, negative):
    """(low, high) for m, integers below 2⁶³ (Python's, exact)."""
    low = np.array([m % 2**32 for m in magnitude], np.uint32)
    high = np.array([m >> 32 for m in magnitude], np.uint32)
    return low, np.where(negative, high | SIGN, high ^ np.uint32(0))


@pytest.mark.parametrize(("wide", "tolerance"), [(False, 1e-6), (True, 1e-11)])
def test_inversion_against_scipy_over_the_whole_range(wide, tolerance):
    rng = np.random.default_rng(0)
    magnitude = [0, 1, 2, 2**63 - 1, 2**62]
    magnitude += [int(rng.integers(2**62)) >> int(s) for s in rng.integers(0, 62, 20_000)]
    magnitude += [2**63 - 1 - m for m in magnitude[:2000]]
    offset = np.float32(0.3)
    tail = np.array([(m + float(offset)) * 2.0**-64 for m in magnitude])
    expected = -special.ndtri(tail)
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32
        for negative in (False, True):
            words = map(jnp.asarray, _signed(words_of(magnitude, False), negative))
            draws = np.asarray(_draws.standard_normal(*words, offset, dtype), np.float64)
            sign = -1 if negative else 1
            np.testing.assert_allclose(draws, sign * expected, rtol=tolerance, atol=1e-9)
    assert np.max(expected) > 9.1


def _signed(words, negative):
    """Tail magnitudes as the generator's words: below zero as they are, above complemented."""
    low, high = words
    return (low, high | SIGN) if negative else (low, ~high & ~SIGN)


def test_no_end_is_shared_by_all_draws():
    # the outermost cell, m = 0, at many offsets: the tail probability is uniform in it
    steps = 2000
    offsets = _draws.seeds(_keys.pinned(1), 0, np.arange(steps))[1]
    zeros = jnp.zeros(steps, jnp.uint32)
    ends = -np.asarray(_draws.standard_normal(zeros, zeros | SIGN, offsets, jnp.float32))
    inside = special.ndtr(-ends.astype(np.float64)) * 2.0**64
    assert np.min(ends) > 9.07 and stats.kstest(inside, "uniform").pvalue > 1e-4
    fixed = _draws.standard_normal(zeros, zeros | SIGN, jnp.float32(0.5), jnp.float32)
    assert len(np.unique(fixed)) == 1  # control: without the offset all end at one value
    tiny = _draws.standard_normal(zeros, zeros | SIGN, jnp.float32(2.0**-33), jnp.float32)
    assert float(tiny[0]) == pytest.approx(-11.3034, abs=1e-3)


# --- the law -------------------------------------------------------------------------------


def chi_square(steps, count, edges, **options):
    """(statistic, p-value) of the draws in the cells between ``edges``."""
    counts = np.zeros(len(edges) + 1)
    for step in range(steps):
        cells = np.searchsorted(edges, normals(count, step, **options))
        counts += np.bincount(cells, minlength=len(counts))
    law = np.diff(special.ndtr(edges), prepend=0, append=1)
    expected = steps * count * law
    assert np.min(expected) >= 5
    statistic = np.sum((counts - expected) ** 2 / expected)
    return stats.chi2.sf(statistic, len(law) - 1)


def test_chi_square_over_the_whole_range():
    # 5·10⁶ draws
    edges = np.concatenate(
        [-np.linspace(4.7, 3.1, 9), special.ndtri(np.linspace(0.001, 0.999, 800))]
    )
    edges = np.sort(np.concatenate([edges, np.linspace(3.1, 4.7, 9)]))
    assert chi_square(5, 10**6, edges) > 1e-4
    # control: an error of 2% in the scale
    wrong = functools.partial(_scaled, 1.02)
    assert chi_square(1, 10**6, edges[5:-5], invert=wrong) < 1e-6


def _scaled(factor, *arguments):
    return factor * _draws.standard_normal(*arguments)


def test_tails_beyond_five_and_a_half_have_the_normal_frequencies():
    # the same counters with the top 24 bits of m set to 0: draws given that p < 2⁻²⁵
    count = 10**6

    def given_a_tail(low, high, offset, dtype):
        return _draws.standard_normal(low, (high & np.uint32(0x8000007F)) | SIGN, offset, dtype)

    draws = -normals(count, 0, invert=given_a_tail)
    assert np.min(draws) > 5.41
    for bound in (5.5, 5.8, 6.2, 6.6, 7.2):
        chance = special.ndtr(-bound) * 2.0**25
        recorded = np.mean(draws > bound)
        assert abs(recorded - chance) < 4.5 * np.sqrt(chance * (1 - chance) / count), bound
