"""How long the comparison's parts take, and what quality they reach; no assertion on time.

    mfopt bench compare --epochs 16 --iters 128 --bands 2,8,32

Every line gives the time of this run; ratios compare methods within the run. Compilation is
included, as a user meets it, unless a line says "again".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mfopt_cli.benchmarks import Parser, count, listed

from mfopt.accounting import Mechanism, account
from mfopt.optimize import unamplified
from mfopt.query_error import row_variances
from mfopt.sampling import CyclicPoisson, FixedOrder, Poisson
from mfopt.strategies import Banded, SquareRoot
from mfopt.strategies.prefix_recursion import prefix_row_variances
from mfopt.workloads import PrefixSums


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = function()
    return time.perf_counter() - begun, result


def recursion(n: int, bands: int) -> None:
    """Row norms of A C⁻¹ by the covariance recursion against the banded solve."""
    matrix = np.asarray(SquareRoot().materialize(n))
    band = Banded.from_dense(matrix, bands)
    with jax.enable_x64(True):
        fast = jax.jit(lambda e: jnp.sum(prefix_row_variances(e)))
        slow = jax.jit(lambda e: jnp.sum(row_variances(PrefixSums(), Banded(e), n)))
        results = {}
        for name, loss in [("recursion", fast), ("banded solve", slow)]:
            gradient = jax.jit(jax.value_and_grad(loss))
            jax.block_until_ready(gradient(jnp.asarray(band.columns)))
            seconds, value = timed(
                lambda g=gradient: jax.block_until_ready(g(jnp.asarray(band.columns)))
            )
            results[name] = seconds, float(value[0])
            print(f"  {name:<14} {seconds:8.3f} s again (value and gradient, {bands} bands)")
        ratio = results["banded solve"][0] / results["recursion"][0]
        agree = results["banded solve"][1] / results["recursion"][1] - 1
        print(f"  ratio {ratio:.1f}; values differ by {agree:.1e} relative")


def baselines(bins: int, epochs: int, widths: list[int]) -> None:
    """Banded C under cyclic Poisson sampling, and DP-SGD, at ε = 2, δ = 1e-5."""
    n = bins * epochs
    sigma = account(Mechanism(Poisson(1 / bins, n)), epsilon=2.0, delta=1e-5).noise_multiplier
    rmse = sigma * np.sqrt((n + 1) / 2)
    print(f"  DP-SGD, Poisson: sigma {sigma:.4f}, RMSE {rmse:.3f}")
    for width in widths:
        seconds, found = timed(
            lambda w=width: unamplified.optimize(FixedOrder(bins, epochs), bands=w)
        )
        scheme = CyclicPoisson(width / bins, width, n)
        guarantee = account(Mechanism(scheme, found.strategy), epsilon=2.0, delta=1e-5)
        error = guarantee.noise_multiplier * found.rmse / found.sensitivity
        print(
            f"  banded {width:>3}: optimized in {seconds:6.1f} s "
            f"({len(found.trace.history)} evaluations), unamplified {found.rmse:.4f} · σ, "
            f"cyclic Poisson RMSE {error:.3f}"
        )


def parser() -> Parser:
    """Its options."""
    words = Parser("compare", __doc__)
    words.word("--epochs", type=count, default=16, help="Passes over the data, E.")
    words.word("--iters", type=count, default=128, help="Iterations per epoch, b.")
    words.word(
        "--bands", type=listed(count), default=[2, 8, 32], help="Widths of banded C; a list."
    )
    return words


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    print(f"error of banded C, n = {options.epochs * options.iters}")
    recursion(options.epochs * options.iters, max(options.bands))
    print(f"baselines at {options.epochs} epochs × {options.iters} iterations, ε = 2, δ = 1e-5")
    baselines(options.iters, options.epochs, options.bands)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
