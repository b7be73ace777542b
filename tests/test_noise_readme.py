"""The numpy implementation of the file format's page, as it stands there, against the stream."""

import re

import jax
import numpy as np
import pytest
from selection import before_release
from sources import ROOT
from statements import stated
from test_strategies import EVERY_KIND, every_strategy

from mfopt.noise import _keys, from_factorization
from mfopt.noise.packing import SingleLeaf
from mfopt.sampling import BallsInBins, MinSeparation
from mfopt.strategies import TimeScaled

MARKER = "<!-- numpy-noise -->"
README = ROOT / "docs" / "file-format.md"


@pytest.fixture(scope="module")
def correlated_noise():
    """The function of the page, with nothing but json and numpy in reach."""
    text = README.read_text()
    assert MARKER in text
    code = re.search(re.escape(MARKER) + r"\s*```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 38
    assert re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE) == ["json", "numpy"]
    names = {}
    exec(compile(code, str(README), "exec"), names)
    return names["correlated_noise"]


def white(n, size, seed):
    leaf, key = SingleLeaf(0, (size,), None), _keys.pinned(seed)
    rows = [leaf.draw(key, t, np.float32, (0,)) for t in range(n)]
    return np.array(rows, np.float64)


WITH_ARRAYS = [kind for kind in EVERY_KIND if kind != "tree"]
ROWS, COLUMNS = np.linspace(0.5, 1.0, 10), np.linspace(2.0, 0.7, 10)
DIAGONALS = {"both": (ROWS, COLUMNS), "columns only": (np.ones(1), COLUMNS)}


def example(kind, n):
    """The kind, or "rows+base" for a time-scaled one of that base."""
    scaled, _, base = kind.rpartition("+")
    strategy = every_strategy(n)[base]
    return TimeScaled(strategy, *DIAGONALS[scaled]) if scaled else strategy


def save(kind, path):
    scheme = MinSeparation(10, 5, 2) if kind == "toeplitz" else BallsInBins(bins=5, epochs=2)
    factorization = stated(example(kind, 10), scheme)
    factorization.save(path)
    return factorization


def test_numpy_reference_refuses_what_is_not_in_the_file(correlated_noise, tmp_path):
    save("tree", tmp_path / "f.npz")
    with pytest.raises(ValueError, match="follows from n alone"):
        correlated_noise(tmp_path / "f.npz", np.zeros((10, 2)), 1.0)


SEEN = ("blt", "toeplitz", "banded", "identity", "cleared-blt", "columns only+dense")
SCALED = ("both+cleared-blt", "both+blt", "columns only+blt", "both+toeplitz", "both+banded")
KINDS = [*dict.fromkeys([*SEEN, *WITH_ARRAYS, *SCALED])]


@pytest.mark.ci
@pytest.mark.parametrize("kind", before_release(KINDS, *range(len(SEEN))))
def test_numpy_reference_makes_the_noise_of_the_stream(correlated_noise, tmp_path, kind):
    path = tmp_path / "factorization.npz"
    factorization = save(kind, path)
    stream = from_factorization(factorization, clip_norm=0.5, allow_uncertified=True)
    run = jax.jit(lambda s: jax.lax.scan(lambda s, _: stream.next(s)[::-1], s, length=10))
    _, noise = run(stream.init(np.zeros(3, np.float32), seed=7))
    draws = white(10, 3, seed=7)
    np.testing.assert_allclose(correlated_noise(path, draws, 0.5), noise, atol=1e-5)
    # a run may stop early, never go on
    np.testing.assert_allclose(correlated_noise(path, draws[:4], 0.5), noise[:4], atol=1e-5)
    with pytest.raises(ValueError, match="covers 10 iterations"):
        correlated_noise(path, np.zeros((11, 3)), 0.5)
    assert np.max(np.abs(correlated_noise(path, draws, 1.0) - noise)) > 0.1  # control: the scale
