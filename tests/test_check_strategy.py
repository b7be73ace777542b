"""The conformance kit on every registered kind by name, and on kinds that each break one rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_strategies import EVERY_KIND, every_strategy

from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.noise import choice
from mfopt.noise.recursions import Ring
from mfopt.sampling import BallsInBins
from mfopt.testing import check_strategy

SCHEME = BallsInBins(bins=4, epochs=3)  # 12 iterations, no power of two
AT_CHECK = ("blt", "dense", "time-scaled", "tree")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.ci if kind in AT_CHECK else pytest.mark.release)
        for kind in EVERY_KIND
    ],
)
def test_every_registered_kind_conforms(kind):
    example = every_strategy(12)[kind]
    dense = check_strategy(example, SCHEME)
    # what is left to the dense matrix, where nothing better is known
    matrix = ("multiply", "solve", "modes", "gram", "error")
    assert dense == (matrix if kind in ("dense", "tree") else ())


@pytest.mark.release
def test_a_blt_of_another_scale_conforms():
    example = S.BLT([0.3, 0.1], [0.5, 0.9], gain=0.3)
    check_strategy(example, SCHEME)
    # a gain of 1 is not written, so that files of version 0.1.0 keep their digest
    assert set(example.arrays()) == {"scale", "decay", "gain"}
    assert set(example.rescaled(1 / 0.3).arrays()) == {"scale", "decay"}


class Healthy(S.Strategy):
    """Two bands. The kinds below are each this one with a fault."""

    kind = "test-healthy"
    level: S.Array = S.parameter(dimensions=0)

    def materialize(self, n):
        return jnp.eye(n) + self.level * jnp.eye(n, k=-1)

    def column_bands(self, n):
        return min(2, n)


def test_a_parameter_or_property_may_have_the_name_of_another_kinds_method():
    class Named(Healthy):
        kind = "test-named"
        diagonals: S.Array = S.parameter(dimensions=1)
        tables = property(lambda self: len(self.diagonals))
        gram = staticmethod(lambda scheme: jnp.eye(scheme.bins))  # in float64 all the same

    strategy = Named(0.5, np.ones(3))
    assert strategy.tables == 3 and {*strategy.arrays()} == {"level", "diagonals"}
    assert strategy.gram(SCHEME).dtype == np.float64


class WrongNoise(Healthy):
    kind = "test-wrong-noise"


@choice.recursion.register
def _(strategy: WrongNoise, n: int, past: str):
    return Ring(np.array([[1.0, float(strategy.level)]]), feedback=True)  # a sign is wrong


def gram_without_overlaps(self, scheme):
    return jnp.diag(jnp.sum(jnp.asarray(self.modes(scheme)) ** 2, axis=0))


def with_constant_bands(self, n):
    return jnp.eye(n) + jax.lax.stop_gradient(self.level) * jnp.eye(n, k=-1)


# what is wrong: the members of such a kind, and what is said of it
BROKEN = {
    "product": ({"multiply": lambda s, x: x}, "multiply"),
    "solve": ({"solve": lambda s, y: jnp.asarray(y) * (1 + 1e-6)}, "solve"),
    "modes": ({"modes": lambda s, p: Healthy.modes(s, BallsInBins(p.bins, 1))}, "modes"),
    "gram": ({"gram": gram_without_overlaps}, "gram"),
    "bands": ({"column_bands": lambda s, n: 1}, "column_bands says 1, C has 2"),
    "sign": (
        {
            "check_entries": lambda s, n: None,
            "materialize": lambda s, n: jnp.eye(n) - s.level * jnp.eye(n, k=-1),
        },
        "negative",
    ),
    "side": (
        {
            "check_entries": lambda s, n: None,
            "materialize": lambda s, n: jnp.eye(n) + s.level * jnp.eye(n, k=1),
        },
        "above the diagonal",
    ),
    "derivative": ({"materialize": with_constant_bands}, "derivative"),
    "description": ({"arrays": lambda s: {"level": np.zeros(())}}, "description"),
    "scale": ({"rescaled": lambda s, factor: type(s)(factor * s.level)}, "rescaled"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name):
    members, words = BROKEN[name]
    broken = type("Broken", (Healthy,), {"kind": f"test-wrong-{name}", **members})
    with pytest.raises(AssertionError, match=words):
        check_strategy(broken(0.5), SCHEME, past="dense")


@pytest.mark.ci
def test_noise_of_another_matrix_is_named():
    with pytest.raises(AssertionError, match="noise"):
        check_strategy(WrongNoise(0.5), SCHEME, past="auto")


def test_a_healthy_one_passes_and_its_dense_parts_are_named():
    parts = ("multiply", "solve", "modes", "gram", "error", "noise")
    assert check_strategy(Healthy(0.5), SCHEME, past="dense") == parts


def test_a_kind_is_declared_once_and_whole():
    roleless = {"kind": "test-roleless", "__annotations__": {"q": "int"}}
    for call, match in (
        (lambda: type("Mine", (S.Strategy,), {"kind": "blt"}), r"by mfopt\.strategies\.blt\.BLT"),
        (lambda: type("Mine", (S.BLT,), {}), "kind of its own"),
        (lambda: type("Mine", (S.Strategy,), {"kind": "My Kind"}), "lower-case"),
        (lambda: type("Mine", (S.Strategy,), roleless), "without a role"),
        (lambda: S.Dense(np.ones(3)), "2 dimension"),
        (lambda: S.TimeScaled(np.ones(3)), "must be a strategy"),
    ):
        with pytest.raises(UsageError, match=match):
            call()
    assert "test-roleless" not in S.registered()


def test_numbers_of_a_kind_are_float64_without_a_word_in_it():
    matrix = Healthy(1 / 3).materialize(3)
    assert isinstance(matrix, np.ndarray) and matrix[1, 0] == 1 / 3
