"""Conformance checks for every strategy: all fast forms agree with its own dense matrix."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from mfopt import load, query_error, strategies
from mfopt._runtime import _float64, _quick
from mfopt.accounting import unamplified
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.noise import NoiseStream
from mfopt.noise.choice import Past, recursion
from mfopt.optimize import kinds
from mfopt.sampling import BallsInBins
from mfopt.strategies import Strategy
from mfopt.testing._rules import moved, refused, rule
from mfopt.workloads import DenseWorkload, Momentum, PrefixSums, ToeplitzWorkload

_SCHEME = BallsInBins(bins=4, epochs=3)


def check_strategy(
    strategy: Strategy, scheme: BallsInBins = _SCHEME, *, past: Past = "auto"
) -> tuple[str, ...]:
    """Check everything that mfopt does with a strategy.

    The matrix, its products, modes and bands; differentiation; errors; the stream of its noise;
    its form in a file; and, where its kind is in the optimizer's table, its parameters.

    Args:
      strategy: an example, well-conditioned at n = scheme.iterations: float32 noise is compared.
      scheme: bins and epochs at which modes are formed; small, since dense matrices are the
        oracle.
      past: how the noise is streamed; "dense" for a kind without a recursion of its own.

    Returns:
      The parts that run on the dense matrix for want of a faster form, so that nobody is surprised
      at large n: of "multiply", "solve", "modes", "gram", "error", "noise".

    Raises:
      AssertionError: with the rule that is broken.
    """
    n = scheme.iterations
    kind = strategies.registered().get(strategy.kind)
    rule(kind is type(strategy), f"{strategy.kind!r} is registered for {kind}")
    matrix = _matrix(strategy, n)
    _products(strategy, matrix)
    _products(strategy, _matrix(strategy, 1))
    for shape in ((scheme.bins, scheme.epochs), (1, n), (n, 1)):
        _modes(strategy, BallsInBins(*shape), matrix)
    _bands(strategy, matrix)
    _pytree(strategy, matrix)
    _gradients(strategy, scheme)
    _errors(strategy, matrix)
    _noise(strategy, matrix, past)
    _description(strategy, matrix)
    _file(strategy, scheme, matrix)
    if strategy.kind in kinds.names():
        _parameters(strategy, matrix)
    cls = type(strategy)
    parts = [
        name
        for name in ("multiply", "solve", "modes", "gram")
        if getattr(cls, name) is getattr(Strategy, name)
    ]
    if "modes" not in parts and "gram" in parts:
        parts.remove("gram")  # the product of fast modes
    if query_error.variances.dispatch(cls) is query_error.variances.dispatch(object):
        parts.append("error")
    if past == "dense" or cls not in recursion.registry:
        parts.append("noise")
    return tuple(parts)


def _close(actual: ArrayLike, expected: ArrayLike, label: str, tolerance: float = 1e-9) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    rule(actual.shape == expected.shape, f"{label} has shape {actual.shape}, not {expected.shape}")
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    off = float(np.max(np.abs(actual - expected), initial=0)) / scale
    rule(off <= tolerance, f"{label} is off by {off:.3g}")  # a NaN is off, too


def _matrix(strategy: Strategy, n: int) -> np.ndarray:
    strategy.check_entries(n)
    matrix = strategy.materialize(n)
    rule(
        isinstance(matrix, np.ndarray) and matrix.dtype == np.float64,
        "materialize gives no numpy array of float64",
    )
    matrix = np.asarray(matrix)
    rule(matrix.shape == (n, n), f"materialize({n}) has shape {matrix.shape}")
    rule(not np.any(np.triu(matrix, 1)), "C has entries above the diagonal")
    rule(bool(np.all(matrix >= 0)), "C has negative entries, which check_entries let pass")
    rule(bool(np.all(np.diagonal(matrix) > 0)), "C has a diagonal entry that is not > 0")
    rule(refused(strategy.check_size, 0), "check_size(0) is not refused")
    return matrix


def _products(strategy: Strategy, matrix: np.ndarray) -> None:
    n = len(matrix)
    x = np.random.default_rng(0).normal(size=(n, 2))
    _close(strategy.multiply(x), matrix @ x, "multiply of shape (n, 2)")
    _close(strategy.multiply(x[:, 0]), matrix @ x[:, 0], "multiply of shape (n,)")
    _close(matrix @ np.asarray(strategy.solve(x)), x, "C · solve, of shape (n, 2)")
    _close(matrix @ np.asarray(strategy.solve(x[:, 0])), x[:, 0], "C · solve, of shape (n,)")
    column = strategy.toeplitz_column(n)
    if column is not None:
        _close(column, matrix[:, 0], "toeplitz_column")
        for lag in range(n):
            _close(np.diagonal(matrix, -lag), np.full(n - lag, matrix[lag, 0]), f"diagonal {lag}")
    if (inverse_coefs := getattr(strategy, "inverse_coefs", None)) is not None:
        _close(inverse_coefs(n), np.linalg.inv(matrix)[:, 0], "inverse_coefs")
    scaled = strategy.rescaled(0.5)
    if scaled is not None:
        rule(scaled.kind == strategy.kind, "rescaled gives another kind")
        _close(scaled.materialize(n), matrix / 2, "rescaled(0.5)")


def _modes(strategy: Strategy, scheme: BallsInBins, matrix: np.ndarray) -> None:
    modes = np.stack(
        [matrix[:, bin :: scheme.bins].sum(axis=1) for bin in range(scheme.bins)], axis=1
    )
    _close(strategy.modes(scheme), modes, "modes")
    _close(strategy.gram(scheme), modes.T @ modes, "gram")


def _bands(strategy: Strategy, matrix: np.ndarray) -> None:
    rows, columns = np.nonzero(matrix)
    true = int(np.max(rows - columns)) + 1
    stated = strategy.column_bands(len(matrix))
    rule(stated >= true, f"column_bands says {stated}, C has {true}")
    rule(unamplified.bands(strategy, len(matrix)) >= true, "the accountant sees fewer bands")
    norms = np.linalg.norm(matrix, axis=0)
    _close(unamplified.column_norms(strategy, len(matrix)), norms, "the accountant's column norms")


def _pytree(strategy: Strategy, matrix: np.ndarray) -> None:
    leaves, structure = jax.tree.flatten(strategy)
    rule(
        all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float64 for leaf in leaves),
        "a parameter is no numpy float64 array",
    )
    for builtin in (strategies.Identity(), strategies.SquareRoot()):
        same_structure = hash(jax.tree.structure(builtin)) == hash(structure)
        rule(
            not same_structure or builtin.kind == strategy.kind,
            f"its pytree has the structure of {builtin.kind}, whose compiled code would serve it",
        )
    n = len(matrix)
    with _float64.scope():
        traced = jax.jit(lambda c: jnp.asarray(c.materialize(n)))(strategy)
        _close(traced, matrix, "materialize inside jax.jit")


def _gradients(strategy: Strategy, scheme: BallsInBins) -> None:
    """Derivatives along a random direction of all parameters, by central differences."""
    if not jax.tree.leaves(strategy):
        return
    weight = np.random.default_rng(2).normal(size=(scheme.bins, scheme.bins))
    moved_strategy = moved(strategy)

    def value(step: jax.Array) -> jax.Array:
        shifted = moved_strategy(step)
        variances = query_error.row_variances(PrefixSums(), shifted, scheme.iterations)
        return jnp.sum(weight * shifted.gram(scheme)) + jnp.sum(jnp.log(jnp.asarray(variances)))

    with _float64.scope():
        value_and_slope = _quick.jit(
            jax.value_and_grad(value)
        )  # alone, each operation would be compiled
        slope, numeric = (
            float(value_and_slope(0.0)[1]),
            float(value_and_slope(1e-6)[0] - value_and_slope(-1e-6)[0]) / 2e-6,
        )
    off = abs(slope - numeric) / max(1.0, abs(numeric))
    rule(off < 1e-5, f"its derivative is {slope:.8g}, by differences {numeric:.8g}")


def _errors(strategy: Strategy, matrix: np.ndarray) -> None:
    n = len(matrix)
    rates = np.linspace(1.0, 0.2, n)
    dense = np.tril(np.random.default_rng(5).normal(size=(n, n))) + 2 * np.eye(n)
    workloads = (PrefixSums(), Momentum(0.9, rates), ToeplitzWorkload(rates), DenseWorkload(dense))
    for workload in workloads:
        through = np.asarray(workload.materialize(n)) @ np.linalg.inv(matrix)
        variances = query_error.row_variances(workload, strategy, n)
        _close(variances, np.sum(through**2, axis=1), f"the error on the {workload.kind} workload")


def _noise(strategy: Strategy, matrix: np.ndarray, past: Past) -> None:
    """C w = z in float32, with the draws z of a stream of independent noise with the same seed."""
    n = len(matrix)

    def streamed(c: Strategy, past: Past) -> np.ndarray:
        stream = NoiseStream(c, iterations=n, noise_multiplier=1.0, clip_norm=1.0, past=past)
        state = stream.init(np.zeros(64, np.float32), seed=0)
        rows = []
        for _ in range(n):
            noise, state = stream.next(state)
            rows.append(np.asarray(noise, np.float64))
        return np.array(rows)

    white = streamed(strategies.Identity(), "auto")
    _close(matrix @ streamed(strategy, past), white, f"C times its noise (past={past!r})", 1e-4)


def _description(strategy: Strategy, matrix: np.ndarray) -> None:
    description, arrays = strategy.describe(), strategy.arrays()
    rule(json.loads(json.dumps(description)) == description, "describe() is not what JSON keeps")
    restored = strategies.from_description(description, arrays)
    _close(restored.materialize(len(matrix)), matrix, "the strategy of its description", 0.0)
    rule(restored == strategy and hash(restored) == hash(strategy), "restored, it is not equal")
    surplus = {**arrays, "surplus": np.zeros(1)}
    rule(refused(strategies.from_description, description, surplus), "a surplus array is accepted")
    unknown = {**description, "kind": "no-such-kind"}
    rule(refused(strategies.from_description, unknown, arrays), "an unknown kind is accepted")


def _file(strategy: Strategy, scheme: BallsInBins, matrix: np.ndarray) -> None:
    # an estimate; so much noise that no sum of the steps refutes it
    sigma = 100.0 * len(matrix) * float(np.linalg.norm(matrix, 2))
    guarantee = Guarantee(1.0, 1e-5, sigma, method="none: a test of files")
    factorization = Factorization(strategy, sigma, scheme, PrefixSums(), guarantee)
    with tempfile.TemporaryDirectory() as folder:
        read = load(factorization.save(Path(folder) / "strategy.npz"))
    rule(read.digest == factorization.digest, "saved and loaded, its digest is another")
    rule(read.strategy == strategy, "saved and loaded, it is another strategy")


def _parameters(strategy: Strategy, matrix: np.ndarray) -> None:
    n = len(matrix)
    mapping = kinds.parameterization_of(strategy, n)
    repeated = kinds.parameterization_of(strategy, n)
    rule(
        mapping.build == repeated.build and hash(mapping.build) == hash(repeated.build),
        "parameterize gives unequal builds for one shape: each start would be compiled again",
    )
    with _float64.scope():
        built = mapping.build(jnp.asarray(mapping.start))
        again_built = np.asarray(built.materialize(n))
        _close(
            again_built / again_built[0, 0], matrix / matrix[0, 0], "built from its start, C/C[0,0]"
        )
        rng = np.random.default_rng(2)
        wild = mapping.build(jnp.asarray(3 * rng.normal(size=mapping.start.shape)))
    jax.tree.map(np.asarray, wild).check_entries(n)
