"""C is accounted by its numbers, whatever the width of the arrays that hold them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt import strategies as S
from mfopt.accounting import Mechanism, account, unamplified
from mfopt.accounting.loss_distribution import poisson
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, CyclicPoisson, FixedOrder, FreshBins, MinSeparation

_WIDE = np.random.default_rng(3).uniform(0.1, 0.9, 20)
_WIDE[0] = 1.0


def _schemes(n):
    return [
        CyclicPoisson(0.3, n, n),
        FixedOrder(n // 4, 4),
        MinSeparation(n, n // 4, 4),
        BallsInBins(n // 4, 4),
        FreshBins(n, 1),
    ]


def _narrowed(strategy, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), strategy)


@pytest.mark.ci
@pytest.mark.parametrize(
    "scheme",
    _schemes(20)[:3],  # whose accounts take no samples
    ids=lambda scheme: scheme.kind,
)
def test_c_is_accounted_by_its_numbers_whatever_their_width(scheme):
    question = {"delta": 1e-5, "certify": False, "seed": 1, "samples": 2**10}
    # the twin's numbers were found first, and may be found again
    float32_coefs = jnp.asarray(_WIDE, jnp.float32)
    assert float32_coefs.dtype == np.float32
    exact = S.Toeplitz(np.asarray(float32_coefs, np.float64))
    collected = []
    for strategy in (S.Toeplitz(float32_coefs), _narrowed(exact, jnp.float32), exact):
        unamplified._extent.cache_clear()
        poisson._columns.cache_clear()
        collected.append(
            account(Mechanism(scheme, strategy), noise_multiplier=9.0, **question).epsilon
        )
    assert collected[0] == collected[1] == collected[2] > 0


@pytest.mark.parametrize("scheme", _schemes(20), ids=lambda scheme: scheme.kind)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64, bool])
def test_c_of_too_few_digits_is_refused_by_all(scheme, dtype):
    narrow = jnp.asarray(_WIDE, dtype)
    with pytest.raises(UsageError, match="float32 or wider"):
        S.Toeplitz(narrow)
    with pytest.raises(UsageError, match="float32 or wider"):
        Mechanism(scheme, _narrowed(S.Toeplitz(_WIDE), dtype))


def test_c_in_float64_stays_the_object_that_it_is():
    exact = S.Toeplitz(_WIDE)
    assert Mechanism(FixedOrder(5, 4), exact).strategy is exact
    narrow = _narrowed(exact, jnp.float32)  # control
    assert Mechanism(FixedOrder(5, 4), narrow).strategy is not narrow


@pytest.mark.parametrize("recorded", [unamplified.column_norms, unamplified.bands])
def test_columns_are_seen_in_float64(recorded):
    whole = jnp.asarray([11, 3] + 18 * [1], jnp.int8)  # their squares are no int8
    unamplified._extent.cache_clear()
    narrow = recorded(_narrowed(S.Toeplitz(_WIDE), jnp.float32), 20)
    unamplified._extent.cache_clear()
    np.testing.assert_array_equal(narrow, recorded(S.Toeplitz(np.float32(_WIDE)), 20))
    assert unamplified.column_norms(S.Toeplitz(whole), 20)[0] == math.sqrt(121 + 9 + 18)


def test_sensitivities_are_those_of_the_numbers_in_float64():
    tall = np.random.default_rng(4).uniform(0, 1, 400)
    for scheme in (FixedOrder(20, 20), MinSeparation(400, 20, 20)):
        narrow = _narrowed(S.Toeplitz(tall), jnp.float32)
        exact = unamplified.sensitivity(S.Toeplitz(np.float32(tall)), scheme)
        assert unamplified.sensitivity(narrow, scheme) == exact
