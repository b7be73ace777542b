"""Noise per training step: mfopt, jax-privacy and opake-dpftrl, and the least it can take.

    mfopt bench noise --params 1e6,1e7,1e8

Every measurement runs in a process of its own, contenders in turn, ``--rounds`` times; the least
step time of each counts, so that other load on the machine spoils ratios as little as it can.
Each contender adds the noise of one step to a gradient of float32. "torch" is what one would write
by hand: ``torch.randn`` (32 bits a draw) and buffers in place. The floor is the time of the white
draw alone plus one pass over the buffers that the method has to touch: for blt the d buffers read
and written, for banded C all read and one written. Toeplitz is timed in its first steps of 64:
mfopt makes past draws again, so its time grows with the step; the others keep all draws.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mfopt_cli.benchmarks import Parser, count, keep, listed

DECAYS = np.array([0.5, 0.9, 0.99, 0.999])
SCALES = np.array([0.3, 0.1, 0.05, 0.02])
BANDS = {"banded-16": 16, "banded-64": 64, "toeplitz": 64}
ITERATIONS = 2048

# contender -> mechanisms; "floor" and "draw" are parts of the least time
CONTENDERS = (
    "mfopt",
    "mfopt-scaled",
    "jax-privacy",
    "mfopt-torch",
    "torch",
    "mfopt-torch-scaled",
    "torch-scaled",
    "opake-dpftrl",
    "floor",
    "jax.random.normal",
)
MECHANISMS = ("identity", "blt", "banded-16", "banded-64", "toeplitz")
SLOTS = {"identity": 0, "blt": len(DECAYS), "banded-16": 15, "banded-64": 63, "toeplitz": 63}
# copies of the parameters that a contender was seen to need, to refuse before swapping
COPIES = {
    "mfopt": lambda slots: slots + 4,
    "mfopt-scaled": lambda slots: slots + 4,
    "mfopt-torch": lambda slots: slots + 4,
    "torch": lambda slots: slots + 4,
    "mfopt-torch-scaled": lambda slots: slots + 4,
    "torch-scaled": lambda slots: slots + 4,
    "jax-privacy": lambda slots: 5 * slots // 2 + 4,
    "opake-dpftrl": lambda slots: 2 * slots + 6,
    "floor": lambda slots: slots + 4,
    "jax.random.normal": lambda slots: 6,
}


def coefs(mechanism: str) -> np.ndarray:
    """The banded and Toeplitz strategies: the square root of the prefix sums, cut."""
    t = np.arange(1, BANDS[mechanism])
    return np.concatenate([[1.0], np.cumprod((2 * t - 1) / (2 * t))])


def mfopt_stream(mechanism: str, *, scaled: bool = False) -> Any:
    """Our stream of the mechanism, between two diagonals that vary with time where ``scaled``."""
    from mfopt import strategies
    from mfopt.noise import NoiseStream

    strategy: Any
    if mechanism == "identity":
        strategy = strategies.Identity()
    elif mechanism == "blt":
        strategy = strategies.BLT(SCALES, DECAYS)
    else:
        kind = strategies.Toeplitz if mechanism == "toeplitz" else strategies.BandedToeplitz
        strategy = kind(coefs(mechanism))
    iterations = 64 if mechanism == "toeplitz" else ITERATIONS
    if scaled:
        rows, columns = (
            np.exp(np.sin(np.arange(iterations) / 100)),
            np.linspace(1.7, 0.6, iterations),
        )
        strategy = strategies.TimeScaled(strategy, rows, columns)
    return NoiseStream(strategy, iterations=iterations, noise_multiplier=1.0, clip_norm=1.0)


def optax_step(transformation: Any, size: int) -> Callable[[], None]:
    """A jitted update that is fed its own state, buffers donated."""
    import jax
    import jax.numpy as jnp

    gradient = jnp.ones(size, jnp.float32)
    update = jax.jit(lambda g, s: transformation.update(g, s), donate_argnums=1)
    state = transformation.init(gradient)

    def step() -> None:
        nonlocal state
        noisy, state = update(gradient, state)
        jax.block_until_ready((noisy, jax.tree.leaves(state)))

    return step


def mfopt_step(mechanism: str, size: int) -> Callable[[], None]:
    """mfopt in JAX."""
    from mfopt.noise.for_optax import add_noise

    return optax_step(add_noise(mfopt_stream(mechanism)), size)


def scaled_step(mechanism: str, size: int) -> Callable[[], None]:
    """mfopt in JAX, the same C between two diagonals."""
    from mfopt.noise.for_optax import add_noise

    return optax_step(add_noise(mfopt_stream(mechanism, scaled=True)), size)


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

    gradient = torch.ones(size)
    noise = TorchNoise(mfopt_stream(mechanism, scaled=scaled), [gradient])

    def step() -> None:
        noise.add_to([gradient])

    return step


def by_hand_step(mechanism: str, size: int, *, scaled: bool = False) -> Callable[[], None]:
    """What one would write in PyTorch, everything in place."""
    import torch

    if scaled and mechanism != "blt":
        raise ValueError("written by hand for blt only")
    gradient, noise = torch.ones(size), torch.empty(size)
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
        gradient.add_(noise)

    return step


def opake_step(mechanism: str, size: int) -> Callable[[], None]:
    """opake-dpftrl's engine with its own streaming inverses."""
    import torch
    from opake.api.dpftrl.noise import _blt_math, _engine, _toeplitz
    from opake.random import key

    if mechanism == "blt":
        matrix = _blt_math.inverse_as_streaming_matrix(
            _blt_math.BufferedToeplitz(
                buf_decay=torch.as_tensor(DECAYS), output_scale=torch.as_tensor(SCALES)
            )
        )
    else:
        matrix = _toeplitz.inverse_as_streaming_matrix(torch.as_tensor(coefs(mechanism)))
    gradient = torch.ones(size)
    add_noise, state = _engine._matrix_factorization_noise(
        gradient, matrix, key=key(0), n_steps=ITERATIONS
    )

    def step() -> None:
        nonlocal state
        with torch.no_grad():
            _, state = add_noise(gradient, state, stddev=1.0)

    return step


def floor_step(mechanism: str, size: int) -> Callable[[], None]:
    """White draw added to a gradient, and one pass over the buffers; nothing in common."""
    import jax
    import jax.numpy as jnp

    from mfopt import strategies
    from mfopt.noise import NoiseStream, _kernels
    from mfopt.noise.for_optax import add_noise

    identity = NoiseStream(
        strategies.Identity(), iterations=ITERATIONS, noise_multiplier=1.0, clip_norm=1.0
    )
    draw = optax_step(add_noise(identity), size)
    slots = SLOTS[mechanism]
    factors = jnp.asarray(DECAYS, jnp.float32)[:, None]
    scale = jax.jit(lambda b: factors * b, donate_argnums=0)
    # sixteen at a time: hardware reads ahead in few streams
    read = jax.jit(lambda b: _kernels._weighted_sum(jnp.ones(slots, jnp.float32), b))
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


def random_normal_step(mechanism: str, size: int) -> Callable[[], None]:
    """jax.random.normal alone, for comparison with our draw inside the floor."""
    import jax

    key = jax.random.key(0)
    draw = jax.jit(lambda k: jax.random.normal(k, (size,)))
    return lambda: jax.block_until_ready(draw(key))


STEPS = {
    "mfopt": mfopt_step,
    "mfopt-scaled": scaled_step,
    "jax-privacy": jax_privacy_step,
    "mfopt-torch": torch_step,
    "torch": by_hand_step,
    "mfopt-torch-scaled": functools.partial(torch_step, scaled=True),
    "torch-scaled": functools.partial(by_hand_step, scaled=True),
    "opake-dpftrl": opake_step,
    "floor": floor_step,
    "jax.random.normal": random_normal_step,
}


def child(contender: str, mechanism: str, size: int, steps: int) -> dict[str, float]:
    """Least seconds of a step and peak memory, measured in this process."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    if "torch" in contender or contender == "opake-dpftrl":
        import torch  # noqa: F401
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    step = STEPS[contender](mechanism, size)
    step()
    first = time.perf_counter() - started
    times, busy = [], []
    for _ in range(steps):
        started, worked = time.perf_counter(), time.process_time()
        step()
        times.append(time.perf_counter() - started)
        busy.append(time.process_time() - worked)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {
        "seconds": min(times),
        "cpu_seconds": min(busy),
        "first": first,
        "copies": peak / (4 * size),
    }


def paired(first: str, second: str, mechanism: str, size: int, pairs: int) -> dict[str, Any]:
    """CPU time of a step of ``first`` over one of ``second``, in turn in one process.

    Whatever else runs on the machine meets both alike, so the median of many ratios is worth more
    than the ratio of two runs.
    """
    steps = [STEPS[name](mechanism, size) for name in (first, second)]
    for step in steps:
        step()
    times = np.zeros((pairs, 2))
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            begun = time.process_time()
            steps[which]()
            times[pair, which] = time.process_time() - begun
    ratios = times[:, 0] / times[:, 1]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "pairs": pairs,
        "median": float(middle),
        "quartiles": [float(low), float(high)],
        "standard error": float(1.2533 * np.std(ratios, ddof=1) / np.sqrt(pairs)),
        "of the least": float(times[:, 0].min() / times[:, 1].min()),
        "least CPU ms": [float(1e3 * x) for x in times.min(axis=0)],
    }


def in_own_process(contender: str, mechanism: str, size: int, steps: int) -> dict[str, Any]:
    """Run :func:`child` in a new process; {"skipped": reason} where it cannot run."""
    from mfopt.noise.measure import free_bytes

    needed = COPIES[contender](SLOTS[mechanism]) * 4 * size
    free = free_bytes()
    if free is not None and needed > free:
        return {"skipped": f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"}
    arguments = [contender, mechanism, str(size), str(steps)]
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"skipped": lines[-1][:160]}
    return json.loads(done.stdout.splitlines()[-1])


def least(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The least time and the largest memory over the rounds."""
    ran = [r for r in results if "seconds" in r]
    if not ran:
        return results[0]
    return {
        "seconds": min(r["seconds"] for r in ran),
        "cpu_seconds": min(r["cpu_seconds"] for r in ran),
        "first": min(r["first"] for r in ran),
        "copies": max(r["copies"] for r in ran),
    }


def verdicts(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ratios of CPU time that the noise must reach: good where it is at most its limit.

    CPU seconds, not the clock's: they say more on a machine that has other work too.
    """
    pairs = {
        "mfopt / jax-privacy (<= 0.33)": ("mfopt", "jax-privacy"),
        "mfopt-torch / torch (<= 1.1)": ("mfopt-torch", "torch"),
        "mfopt-torch-scaled / torch-scaled (<= 1.1)": ("mfopt-torch-scaled", "torch-scaled"),
        "mfopt-torch / opake-dpftrl (<= 1)": ("mfopt-torch", "opake-dpftrl"),
        "mfopt / floor (<= 2)": ("mfopt", "floor"),
        "mfopt-scaled / mfopt (<= 1.05)": ("mfopt-scaled", "mfopt"),
    }
    return {
        name: found[a]["cpu_seconds"] / found[b]["cpu_seconds"]
        for name, (a, b) in pairs.items()
        if "seconds" in found.get(a, {}) and "seconds" in found.get(b, {})
    }


def parser() -> Parser:
    """Its options."""
    words = Parser("noise", __doc__)
    words.word(
        "--params",
        dest="sizes",
        older=("--sizes",),
        type=listed(count),
        default=[10**6, 10**7, 10**8],
        help="Numbers of parameters; a list.",
    )
    words.word(
        "--mechanisms",
        type=listed(str, MECHANISMS),
        default=list(MECHANISMS),
        help=f"Which of {', '.join(MECHANISMS)}; a list.",
    )
    words.word(
        "--contenders",
        type=listed(str, CONTENDERS),
        default=list(CONTENDERS),
        help=f"Which of {', '.join(CONTENDERS)}; a list.",
    )
    words.word(
        "--repeats",
        dest="rounds",
        older=("--rounds",),
        type=count,
        default=3,
        help="Timed processes of each contender.",
    )
    words.word("--steps", type=count, default=8, help="Timed steps of a process.")
    words.word(
        "--paired",
        type=listed(str, CONTENDERS),
        help="Two contenders, A,B: the ratio of A to B, step by step in turn in one process, of "
        "--steps steps each; nothing else is measured.",
    )
    words.word("--json", action="store_true", help="Print one JSON object and nothing else.")
    words.out()
    words.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    return words


def main(arguments: list[str]) -> None:
    """Print one table per mechanism and size."""
    words, begun = parser(), time.perf_counter()
    options = words.parse_args(arguments)
    if options.child:
        contender, mechanism, size, steps = options.child
        print(json.dumps(child(contender, mechanism, int(size), int(steps))))
        return
    report: dict[str, Any] = {}
    if options.paired and len(options.paired) != 2:
        words.error("--paired takes two contenders")
    for size in map(int, options.sizes):
        for mechanism in options.mechanisms:
            if options.paired:
                ratio = paired(*options.paired, mechanism, size, options.steps)
                report[f"{mechanism} {size}"] = {" / ".join(options.paired): ratio}
                keep(options.out, report, how=words.command(arguments), begun=begun)
                print(mechanism, size, ratio, file=sys.stderr, flush=True)
                continue
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contenders}
            for _ in range(options.rounds):
                for name in options.contenders:
                    rounds[name].append(in_own_process(name, mechanism, size, options.steps))
            found = {name: least(results) for name, results in rounds.items()}
            ratios = verdicts(found)
            report[f"{mechanism} {size}"] = {"contenders": found, "ratios": ratios}
            if not options.json:
                show(mechanism, size, found, ratios)
            # what was measured is kept, whatever stops the rest
            keep(options.out, report, how=words.command(arguments), begun=begun)
    if options.json or options.paired:
        print(json.dumps(report, indent=2))


def show(
    mechanism: str, size: int, found: dict[str, dict[str, Any]], ratios: dict[str, float]
) -> None:
    """One table."""
    print(f"\n{mechanism}, {size:,} parameters, {SLOTS[mechanism]} buffers", flush=True)
    columns = f"{'CPU ms/step':>11} {'ms/step':>9} {'first step s':>13} {'peak / parameters':>18}"
    print(f"  {'':<18} {columns}")
    for contender, result in found.items():
        if "skipped" in result:
            print(f"  {contender:<18} not run: {result['skipped']}")
            continue
        copies = f"{result['copies']:.1f} copies" if size >= 10**7 else "-"
        print(
            f"  {contender:<18} {1000 * result['cpu_seconds']:>11.2f} "
            f"{1000 * result['seconds']:>9.2f} {result['first']:>13.2f} "
            f"{copies:>18}"
        )
    for name, ratio in ratios.items():
        limit = float(name.split("<= ")[1].rstrip(")"))
        print(f"  {name:<36} {ratio:.2f}  {'met' if ratio <= limit else 'NOT met'}")


if __name__ == "__main__":
    main(sys.argv[1:])
