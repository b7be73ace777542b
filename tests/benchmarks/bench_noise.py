"""Noise per training step: mfopt, jax-privacy and torch, and the least it can take.

    mfopt bench noise --params 1e6,1e7,1e8

Every measurement runs in a process of its own, contenders in turn, ``--rounds`` times; the least
step time of each counts, so that other load on the machine spoils ratios as little as it can.
Each contender adds the noise of one step to a gradient of float32. "torch" is what one would write
by hand: ``torch.randn`` (32 bits a draw) and buffers in place. The floor is the time of the white
draw alone plus one pass over the buffers that the method has to touch: for blt the d buffers read
and written, for banded C all read and one written. Toeplitz is timed in its first steps of 64:
mfopt makes past draws again, so its time grows with the step; the others keep all draws.
With ``--leaves 148`` the parameters are as many arrays, of the sizes of GPT-2's blocks, for mfopt,
jax-privacy and torch, which then cuts one vector of noise.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness import Bench, Options, child, choice, cpu, in_turn

DECAYS = np.array([0.5, 0.9, 0.99, 0.999])
SCALES = np.array([0.3, 0.1, 0.05, 0.02])
BANDS = {"banded-16": 16, "banded-64": 64, "toeplitz": 64}
ITERATIONS = 2048
BLOCK = (1, 1, 2304, 3, 768, 1, 1, 1, 3072, 4, 3072, 1)  # arrays of a block of GPT-2, over 768
leaves = 1
SLOTS = {"identity": 0, "blt": len(DECAYS), "banded-16": 15, "banded-64": 63, "toeplitz": 63}
# ratios of CPU time that the noise must reach: at most
LIMITS = {
    ("mfopt", "jax-privacy"): 0.33,
    ("mfopt-torch", "torch"): 1.1,
    ("mfopt-torch-scaled", "torch-scaled"): 1.1,
    ("mfopt", "floor"): 2,
    ("mfopt-scaled", "mfopt"): 1.05,
}


def coefs(mechanism: str) -> np.ndarray:
    """The banded and Toeplitz strategies: the square root of the prefix sums, cut."""
    t = np.arange(1, BANDS[mechanism])
    return np.concatenate([[1.0], np.cumprod((2 * t - 1) / (2 * t))])


def mfopt_stream(mechanism: str, *, scaled: bool = False) -> Any:
    """Our stream of the mechanism, between two diagonals that vary with time where ``scaled``."""
    from mfopt import strategies
    from mfopt.noise import NoiseStream

    if mechanism in BANDS:
        kind = strategies.Toeplitz if mechanism == "toeplitz" else strategies.BandedToeplitz
        strategy: Any = kind(coefs(mechanism))
    else:
        strategy = strategies.BLT(SCALES, DECAYS) if mechanism == "blt" else strategies.Identity()
    iterations = 64 if mechanism == "toeplitz" else ITERATIONS
    if scaled:
        rows = np.exp(np.sin(np.arange(iterations) / 100))
        strategy = strategies.TimeScaled(strategy, rows, np.linspace(1.7, 0.6, iterations))
    return NoiseStream(strategy, iterations=iterations, noise_multiplier=1.0, clip_norm=1.0)


def pieces(size: int) -> list[int]:
    """Sizes of the arrays that so many parameters are."""
    parts = np.cumsum(np.resize(BLOCK, leaves))
    return [int(n) for n in np.diff([0, *(size * parts // parts[-1])])]


def optax_step(transformation: Any, size: int) -> Callable[[], None]:
    """A jitted update that is fed its own state, buffers donated."""
    import jax
    import jax.numpy as jnp

    gradient = [jnp.ones(n, jnp.float32) for n in pieces(size)]
    update = jax.jit(lambda g, s: transformation.update(g, s), donate_argnums=1)
    state = transformation.init(gradient)

    def step() -> None:
        nonlocal state
        noisy, state = update(gradient, state)
        jax.block_until_ready((noisy, jax.tree.leaves(state)))

    return step


def mfopt_step(mechanism: str, size: int, *, scaled: bool = False) -> Callable[[], None]:
    """mfopt in JAX."""
    from mfopt.noise.for_optax import add_noise

    return optax_step(add_noise(mfopt_stream(mechanism, scaled=scaled)), size)


def jax_privacy_step(mechanism: str, size: int) -> Callable[[], None]:
    """jax-privacy's privatizer, its BLT in float32 too (it recommends float64)."""
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    if mechanism == "blt":
        matrix = buffered_toeplitz.StreamingMatrixBuilder(
            buf_decay=DECAYS.astype(np.float32), output_scale=SCALES.astype(np.float32)
        ).build_inverse()
    else:
        column = [1.0] if mechanism == "identity" else coefs(mechanism)
        matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(column, jnp.float32))
    return optax_step(
        noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0), size
    )


def torch_step(mechanism: str, size: int, *, scaled: bool = False) -> Callable[[], None]:
    """mfopt in PyTorch."""
    import torch

    from mfopt.noise.for_torch import TorchNoise

    gradient = [torch.ones(n) for n in pieces(size)]
    noise = TorchNoise(mfopt_stream(mechanism, scaled=scaled), gradient)

    def step() -> None:
        noise.add_to(gradient)

    return step


def by_hand_step(mechanism: str, size: int, *, scaled: bool = False) -> Callable[[], None]:
    """What one would write in PyTorch, everything in place."""
    import torch

    if scaled and mechanism != "blt":
        raise ValueError("written by hand for blt only")
    gradient, noise = [torch.ones(n) for n in pieces(size)], torch.empty(size)
    slots = SLOTS[mechanism]
    buffers = torch.zeros(slots, size)
    recursion = mfopt_stream(mechanism, scaled=scaled).recursion
    if mechanism == "toeplitz":  # draws are kept, and C⁻¹ applied to them
        weights = torch.tensor(np.asarray(recursion.inverse)).float()[1:]
    elif slots and mechanism != "blt":
        weights = -torch.tensor(coefs(mechanism)).float()[1:]
    at = 0

    def step() -> None:
        nonlocal at
        if mechanism == "blt":
            gain, *rows = recursion.at(at)
            read, decay, feed = (torch.tensor(row).float() for row in rows)
            noise.normal_(0.0, float(gain))
            noise.addmv_(buffers.T, -read)
            buffers.mul_(decay[:, None]).addr_(feed, noise)
        else:
            torch.randn(size, out=noise)
        if slots and mechanism != "blt":
            white = noise.clone() if mechanism == "toeplitz" else None
            noise.addmv_(buffers.T, weights.flip(0).roll(at))
            buffers[at % slots].copy_(noise if white is None else white)
        at += 1
        torch._foreach_add_(gradient, noise.split(pieces(size)))

    return step


def floor_step(mechanism: str, size: int) -> Callable[[], None]:
    """White draw added to a gradient, and one pass over the buffers; nothing in common."""
    import jax
    import jax.numpy as jnp

    from mfopt.noise import _kernels

    draw = mfopt_step("identity", size)
    slots = SLOTS[mechanism]
    factors = jnp.asarray(DECAYS, jnp.float32)[:, None]
    scale = jax.jit(lambda b: factors * b, donate_argnums=0)
    # sixteen at a time: hardware reads ahead in few streams
    read = jax.jit(lambda b: _kernels.weighted_sum(jnp.ones(slots, jnp.float32), b))
    write = jax.jit(lambda b, row: b.at[0].set(row), donate_argnums=0)
    buffers = jnp.zeros((slots, size), jnp.float32)

    def step() -> None:
        nonlocal buffers
        draw()
        if mechanism == "blt":
            buffers = scale(buffers)
        elif slots:
            buffers = write(buffers, read(buffers))
        jax.block_until_ready(buffers)

    return step


STEPS: dict[str, Callable[[str, int], Callable[[], None]]] = {
    "mfopt": mfopt_step,
    "mfopt-scaled": partial(mfopt_step, scaled=True),
    "jax-privacy": jax_privacy_step,
    "mfopt-torch": torch_step,
    "torch": by_hand_step,
    "mfopt-torch-scaled": partial(torch_step, scaled=True),
    "torch-scaled": partial(by_hand_step, scaled=True),
    "floor": floor_step,
}
# copies of the parameters that a contender was seen to need, to refuse before swapping
COPIES = {"jax-privacy": (2.5, 4)}

bench = Bench(
    __file__,
    __doc__,
    params=([10**6, 10**7, 10**8], "Numbers of parameters; a list.", "--sizes"),
    mechanisms=choice(SLOTS),
    contenders=choice(STEPS),
    repeats=(3, "Timed processes of each contender.", "--rounds"),
    steps=(8, "Timed steps of a process."),
    paired=("", "Two contenders, A,B: the ratio of A to B alone, --steps of each in turn."),
    leaves=(1, "Arrays that the parameters are cut into."),
    child=("", "CONTENDER,MECHANISM,SIZE,STEPS: the measurement of one process."),
)
parser, main = bench.parser, bench.main


def here(contender: str, mechanism: str, size: int, steps: int) -> dict[str, float]:
    """Least seconds of a step and peak memory, measured in this process."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    if "torch" in contender:
        import torch  # noqa: F401
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    step = STEPS[contender](mechanism, size)
    step()
    first = time.perf_counter() - started
    times, busy = [], []
    for _ in range(steps):
        started = time.perf_counter()
        busy.append(cpu(step)[1])
        times.append(time.perf_counter() - started)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {
        "seconds": min(times),
        "cpu_seconds": min(busy),
        "first": first,
        "copies": peak / (4 * size),
    }


def paired(first: str, second: str, mechanism: str, size: int, pairs: int) -> dict[str, Any]:
    """CPU time of a step of ``first`` over one of ``second``, in turn in one process."""
    steps = [STEPS[name](mechanism, size) for name in (first, second)]
    for step in steps:
        step()
    return in_turn(*(lambda s=step: cpu(s)[1] for step in steps), pairs)


def in_own_process(contender: str, mechanism: str, size: int, steps: int) -> dict[str, Any]:
    """Run :func:`here` in a new process; {"skipped": reason} where it cannot run."""
    from mfopt.noise.measure import free_bytes

    each, more = COPIES.get(contender, (1, 4))
    needed, free = (each * SLOTS[mechanism] + more) * 4 * size, free_bytes()
    if free is not None and needed > free:
        return {"skipped": f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"}
    words = f"--child={contender},{mechanism},{size},{steps}", f"--leaves={leaves}"
    found, problem = child(__file__, *words)
    return found or {"skipped": problem[:160]}


def least(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The least time and the largest memory over the rounds."""
    ran = [r for r in results if "seconds" in r]
    if not ran:
        return results[0]
    return {name: (max if name == "copies" else min)(r[name] for r in ran) for name in ran[0]}


@bench.work
def measured(options: Options) -> dict[str, Any] | None:
    """A table for each mechanism and size."""
    global leaves
    leaves = options.leaves
    if options.child:
        contender, mechanism, size, steps = options.child.split(",")
        print(json.dumps(here(contender, mechanism, int(size), int(steps))))
        return None
    report: dict[str, Any] = {}
    for size in options.params:
        for mechanism in options.mechanisms:
            name = f"{mechanism} {size}"
            if options.paired:
                pair = options.paired.split(",")
                ratio = paired(*pair, mechanism, size, options.steps)
                report[name] = {" / ".join(pair): ratio}
                print(name, ratio, file=sys.stderr, flush=True)
            else:
                report[name] = table(mechanism, size, options)
            bench.keep(report)  # what was measured, whatever stops the rest
    return report


def table(mechanism: str, size: int, options: Options) -> dict[str, Any]:
    """All contenders in turn, their ratios, and both in print."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contenders}
    for _ in range(options.repeats):
        for name in options.contenders:
            rounds[name].append(in_own_process(name, mechanism, size, options.steps))
    found, ratios = {name: least(results) for name, results in rounds.items()}, {}
    print(f"\n{mechanism}, {size:,} parameters, {SLOTS[mechanism]} buffers", flush=True)
    for name, row in found.items():
        words = [f"{key} {value:.4g}" for key, value in row.items() if key != "skipped"]
        print(f"  {name:<18} {', '.join(words) or row['skipped']}")
    for (first, second), limit in LIMITS.items():
        both = [found.get(name, {}).get("cpu_seconds") for name in (first, second)]
        if all(both):
            name = f"{first} / {second} (<= {limit})"
            ratios[name] = both[0] / both[1]
            print(f"  {name:<44} {ratios[name]:.2f}")
    return {"contenders": found, "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main())
