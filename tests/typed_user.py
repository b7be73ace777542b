"""A user's script, as their type checker sees it: no ``Any`` in it (pyproject.toml, tool.mypy)."""

from typing import assert_type

import mfopt
from mfopt.sampling import Poisson


def main(path: str) -> mfopt.Factorization:
    """Find, save, read, certify, calibrate and account for a mechanism of few iterations."""
    factorization = mfopt.factorize(
        epochs=2, iterations_per_epoch=4, epsilon=2, delta=1e-5, strategy="identity", seed=0
    )
    factorization.save(path)
    read = mfopt.load(path)
    assert_type(read, mfopt.Factorization)
    assert_type(read.noise_multiplier, float)
    assert_type(read.rmse, float)
    assert_type(read.guarantee, mfopt.Guarantee)
    assert_type(read.guarantee.epsilon, float)
    assert_type(str(read.guarantee), str)
    assert_type(read.guarantee.lower_bound, float | None)
    assert_type(read.guarantee.details, dict[str, object])
    assert_type(read.provenance, dict[str, object])
    assert_type(read.sampling.iterations, int)
    assert_type(mfopt.account(read, delta=1e-6), mfopt.Guarantee)
    scheme = Poisson(probability=0.01, iterations=100)
    assert_type(mfopt.account(scheme, noise_multiplier=1.0, delta=1e-6).epsilon, float)
    assert mfopt.certify(read, epsilon=2.5).guarantee.epsilon == 2.5
    return mfopt.calibrate(read, epsilon=1.0, delta=1e-5)
