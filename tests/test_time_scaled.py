"""C = diag(r) B diag(d) against its dense matrix: modes, errors, gradients, files."""

import jax
import numpy as np
import pytest
from test_query_error import every_workload
from test_strategies import every_strategy

from mfopt import query_error
from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.noise import choice
from mfopt.sampling import BallsInBins
from mfopt.testing import check_strategy

SCHEME = BallsInBins(bins=7, epochs=4)
N = SCHEME.iterations


def diagonals(n, seed=0, spread=0.5):
    rng = np.random.default_rng(seed)
    return np.exp(spread * rng.normal(size=(2, n)))


def every_scaled(n):
    """Each kind between two diagonals, and a BLT (with a gain) with one of them only."""
    rows, columns = diagonals(n)
    blt = S.BLT([0.3, 0.1, 0.02], [0.5, 0.9, 0.9999], 1.7)
    return [
        *(S.TimeScaled(base, rows, columns) for base in list(every_strategy(n).values())[:10]),
        S.TimeScaled(blt, rows=rows),
        S.TimeScaled(blt, columns=columns),
        S.TimeScaled(every_strategy(n)["wave-blt"], rows, columns),
    ]


NAMES = [f"{s.base.kind}-{i}" for i, s in enumerate(every_scaled(4))]


@pytest.mark.release  # of each check, a BLT: test_check_strategy.py
@pytest.mark.parametrize("kind", range(len(NAMES)), ids=NAMES)
def test_scaled_kinds_conform_in_the_memory_of_their_base(kind):
    strategy = every_scaled(N)[kind]
    check_strategy(strategy, SCHEME)
    rows, columns = strategy.diagonals(N)
    matrix = np.diag(rows) @ strategy.base.materialize(N) @ np.diag(columns)
    np.testing.assert_allclose(strategy.materialize(N), matrix, rtol=1e-14)
    assert strategy.column_bands(N) == strategy.base.column_bands(N)
    scaled, base = choice.choose(strategy, N), choice.choose(strategy.base, N)
    assert type(scaled) is type(base)
    assert (scaled.slots, scaled.draws(N)) == (base.slots, base.draws(N))


@pytest.mark.release
def test_short_ways_exist_and_agree_at_length(monkeypatch):
    """On a long run: covariances of a BLT, lag by lag for the same B as a Toeplitz, and dense."""
    n = 300
    rows, columns = diagonals(n, spread=1.0)
    blt = S.BLT([0.05, 0.02, 0.01], [0.6, 0.95, 0.999], 0.3)
    forms = [
        S.TimeScaled(blt, rows, columns),
        S.TimeScaled(S.Toeplitz(blt.toeplitz_coefs(n)), rows, columns),
    ]
    for workload, short in zip(every_workload(n), (True, False, True, False), strict=True):
        product = workload.materialize(n) @ np.linalg.inv(forms[0].materialize(n))
        for strategy in forms:
            with jax.enable_x64(True), monkeypatch.context() as patched:
                if short:
                    patched.setattr(query_error, "dense", None)  # not called
                variances = query_error.variances(strategy, workload, n)
            np.testing.assert_allclose(variances, np.sum(product**2, axis=1), rtol=1e-9)


class FadingBLT(S.BLT):
    """A subclass whose C is not that of its parent."""

    kind = "test-fading-blt"

    def toeplitz_coefs(self, n):
        return super().toeplitz_coefs(n) * 0.9 ** np.arange(n)


class FadingWave(S.WaveBLT):
    kind = "test-fading-wave"

    def toeplitz_coefs(self, n):
        return super().toeplitz_coefs(n) * 0.9 ** np.arange(n)


def test_a_subclass_with_another_matrix_has_its_own_error():
    blt, wave = every_strategy(N)["blt"], every_strategy(N)["wave-blt"]
    rows, columns = diagonals(N)
    momentum = every_workload(N)[2]
    for base, cls in ((blt, FadingBLT), (wave, FadingWave)):
        strategy = S.TimeScaled(cls(**base.arrays()), rows, columns)
        through = momentum.materialize(N) @ np.linalg.inv(strategy.materialize(N))
        variances = query_error.row_variances(momentum, strategy, N)
        np.testing.assert_allclose(variances, np.sum(through**2, axis=1), rtol=1e-9)
        # a control: that of the parent is another one
        parent = query_error.row_variances(momentum, S.TimeScaled(base, rows, columns), N)
        assert not np.allclose(variances, parent, rtol=1e-3)
    assert "blt_scale" not in FadingBLT(**blt.arrays()).inverse_arrays(N)


def test_constant_diagonals_change_nothing_but_the_scale():
    blt = every_strategy(N)["blt"]
    plain, scaled = blt.materialize(N), S.TimeScaled(blt, columns=[2.0])
    np.testing.assert_allclose(scaled.materialize(N), 2 * plain, rtol=1e-14)
    assert list(scaled.arrays()) == ["base/scale", "base/decay", "columns"]
    assert S.TimeScaled(blt) == S.from_description(
        S.TimeScaled(blt).describe(), S.TimeScaled(blt).arrays()
    )


def test_what_does_not_fit_is_refused():
    blt = every_strategy(N)["blt"]
    rows, columns = diagonals(N)
    negative = S.Toeplitz(np.where(np.arange(N) == 2, -0.1, 1.0))
    for call, match in (
        (lambda: S.TimeScaled(S.TimeScaled(blt, rows), columns=columns), "time-scaled already"),
        (lambda: S.TimeScaled(blt, rows, columns[:-1]), "equally long"),
        (lambda: S.TimeScaled(blt, rows).materialize(N + 1), "known for 28 steps"),
        (lambda: S.TimeScaled(S.Toeplitz(np.ones(3)), rows).materialize(N), "at most that many"),
        (lambda: S.TimeScaled(negative, rows, columns).check_entries(N), ">= 0"),
    ):
        with pytest.raises(UsageError, match=match):
            call()
    for bad in (0.0, -1.0, np.nan, np.inf, 1e-40, 1e40):
        broken = np.where(np.arange(N) == 3, bad, 1.0)
        for name in ("rows", "columns"):
            with pytest.raises(UsageError, match=name):
                S.TimeScaled(blt, **{name: broken}).check_entries(N)
