"""Structures of two classes differ: compiled programs are found by them."""

import dataclasses
import re

import jax
import numpy as np
from sources import FILES

from mfopt._runtime._pytree import STATIC, pytree
from mfopt.accounting.monte_carlo.patterns import Patterns
from mfopt.accounting.monte_carlo.separated import Separated


def test_likelihoods_with_the_same_fields_have_structures_of_their_own():
    @pytree
    @dataclasses.dataclass(frozen=True)
    class Other(Separated):
        pass

    columns = np.ones((2, 12))
    actual = [kind(columns, columns, 4, 1) for kind in (Patterns, Separated, Other)]
    assert len({jax.tree.structure(likelihood) for likelihood in actual}) == 3
    for i, likelihood in enumerate(actual):
        for other in actual[i + 1 :]:
            assert jax.tree.structure(likelihood) != jax.tree.structure(other)
            # states of a loop, exports and checkpoints compare them too
            with np.testing.assert_raises(ValueError):
                jax.tree.map(lambda x, y: x, likelihood, other)


def test_a_dataclass_is_rebuilt_with_its_static_fields_and_key_paths():
    @pytree
    @dataclasses.dataclass(frozen=True)
    class Pair:
        first: float
        name: str = dataclasses.field(metadata=STATIC)
        second: float = 0.0

    pair = Pair(1.0, "a", 2.0)
    assert jax.tree.leaves(pair) == [1.0, 2.0]
    assert jax.tree.map(lambda x: 2 * x, pair) == Pair(2.0, "a", 4.0)
    assert jax.tree.structure(pair) != jax.tree.structure(Pair(1.0, "b", 2.0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pair)]
    assert paths == [".first", ".second"]


def test_every_dataclass_is_registered_with_its_class():
    registering = re.compile(r"register_dataclass\(|@jax\.tree_util\.reg")
    assert not [path.name for path in FILES if registering.search(path.read_text())]
