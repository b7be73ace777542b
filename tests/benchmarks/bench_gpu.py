"""Noise, search, certificate and training step on whatever device there is, one report for each.

    mfopt bench gpu --out artifacts/benchmarks/gpu.json

``noise``: a step of C⁻¹z by a BLT of four buffers, by the secure draw, and by a banded C, for
``--parameters`` numbers. ``search``, ``certificate``: the default C at ``--epochs`` × ``--iters``,
ε = 2, δ = 1e-5. ``training``: a step of ``mfopt.jax.PrivateRun`` for a network of three layers, of
``--batch`` examples. ``first`` is the seconds of the first call, compilation included, ``seconds``
the median of ``--repeats`` later ones; each waits until the device is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Bench, Options, machine

bench = Bench(
    __file__,
    __doc__,
    parameters=(10_000_000, "Numbers that get noise."),
    secure_parameters=(100_000, "Numbers that get noise by the secure draw."),
    epochs=(16, "Of search and certificate."),
    iters=(128, "Iterations of an epoch."),
    batch=(256, "Examples of a training step."),
    width=(1024, "Of the network's hidden layers."),
    repeats=(5, "Calls after the first."),
)
parser, main = bench.parser, bench.main


def timed(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Seconds of the first call, and the median of the others."""
    import jax

    taken = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    later = statistics.median(taken[1:]) if repeats else taken[0]
    return {"first": round(taken[0], 4), "seconds": round(later, 6)}


def noise(size: int, repeats: int, *, strategy: Any, **options: Any) -> dict[str, float]:
    """A step of the noise for ``size`` numbers."""
    import jax

    from mfopt.noise import NoiseStream

    scale = {"iterations": 2048, "noise_multiplier": 1.0, "clip_norm": 1.0}
    with jax.enable_x64(bool(options.get("secure"))):
        stream = NoiseStream(strategy, **scale, **options)
        sums = jax.numpy.zeros(size, stream.dtype)
        state = stream.init(sums)

        def step() -> Any:
            nonlocal state
            made, state = stream.release(sums, state)
            return made

        return timed(step, repeats)


def training(batch: int, width: int, repeats: int) -> dict[str, float]:
    """A private step of a network of three layers on random images of 784 numbers."""
    import jax
    import jax.numpy as jnp

    from mfopt.jax import PrivateRun
    from mfopt.optimize import factorize
    from mfopt.sampling import BallsInBins

    bins = 2 + repeats
    made = factorize(BallsInBins(bins=bins, epochs=1), 8.0, strategy="identity")
    random = np.random.default_rng(0)
    sizes = [(784, width), (width, width), (width, 10)]
    params = [jnp.asarray(random.normal(size=s) / s[0] ** 0.5, jnp.float32) for s in sizes]
    x = jnp.asarray(random.normal(size=(batch * bins, 784)), jnp.float32)

    def loss(params: Any, x: Any) -> Any:
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer)
        return -jax.nn.log_softmax(x @ params[-1])[0]

    run = PrivateRun(made, population=len(x), clip_norm=1.0)
    state = run.init(params)
    batches = iter(run.batches(state))
    step = jax.jit(lambda state, batch: run.gradient(jax.grad(loss), params, x, batch, state))

    def one() -> Any:
        nonlocal state
        mean, state = step(state, next(batches))
        return mean

    return timed(one, repeats)


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """The report."""
    import jax

    import mfopt
    from mfopt.strategies import BLT, BandedToeplitz, Identity

    repeats = options.repeats
    blt = BLT(np.array([0.2, 0.1, 0.05, 0.02]), np.array([0.5, 0.8, 0.95, 0.99]))
    banded = BandedToeplitz(0.5 ** np.arange(8))
    report: dict[str, Any] = {
        "device": str(jax.devices()[0].device_kind),
        "noise": {
            "blt": noise(options.parameters, repeats, strategy=blt),
            "banded": noise(options.parameters, repeats, strategy=banded),
            "secure": noise(options.secure_parameters, repeats, strategy=Identity(), secure=True),
        },
        "training": training(options.batch, options.width, repeats),
    }
    start = time.perf_counter()
    target = {"epochs": options.epochs, "iterations_per_epoch": options.iters, "epsilon": 2.0}
    made = mfopt.factorize(**target, seed=0)
    report["search"] = {"seconds": round(time.perf_counter() - start, 2), "rmse": made.rmse}
    start = time.perf_counter()
    mfopt.certify(made, seed=1)
    report["certificate"] = {"seconds": round(time.perf_counter() - start, 2)}
    return {**machine("jax"), **report}
