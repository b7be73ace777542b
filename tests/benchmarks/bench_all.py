"""mfopt against other packages in one run, and against what it was before: ratios that are kept.

    python tests/benchmarks/bench_all.py --reports artifacts/benchmarks
    python tests/benchmarks/bench_all.py --against artifacts/benchmarks

Each contest is CPU seconds of mfopt over those of another package for the same question, in turn in
one process: what else runs on the machine meets both alike. Of --repeats ratios the median counts;
their spread is between the quartiles. --reports writes one file for a device and a day. --against
compares with the folder's last one of this device: a ratio is worse where its lower quartile is
above the upper quartile it had, and the exit code is then 1. A contest whose package is missing is
left out, and the report says so.

certify: the certificate of a BLT at 16 × 128, ε = 2, δ = 1e-5, against jax-privacy's Monte Carlo at
equal tightness. *Extrapolated*: its time is that of a few samples times the number of samples that
its own formula asks for, to prove the same δ at a σ whose δ is what mfopt estimates it to be.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from harness import Bench, choice, in_turn, machine
from harness import cpu as timed

_QUIET = 0.5  # processes that want a core, for each core
DECAYS, SCALES = np.array([0.5, 0.9, 0.99, 0.999]), np.array([0.3, 0.1, 0.05, 0.02])  # of a BLT


class Contest(NamedTuple):
    """Two ways to the same answer: each call gives CPU seconds; ``facts`` are told beside them."""

    ours: Callable[[], float]
    theirs: Callable[[], float]
    facts: dict[str, Any]


def cpu(call):
    """``call`` as CPU seconds, threads included."""
    return lambda: timed(call)[1]


# --- contests ------------------------------------------------------------------------------------


def certify():
    """A certificate against jax-privacy's Monte Carlo at equal tightness (extrapolated)."""
    from jax_privacy import batch_selection
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    from mfopt.accounting import Effort
    from mfopt.accounting.monte_carlo import dominating_pair
    from mfopt.calibration import calibrate, release
    from mfopt.sampling import BallsInBins
    from mfopt.strategies import BLT

    scheme, epsilon, delta = BallsInBins(bins=128, epochs=16), 2.0, 1e-5
    blt = BLT(SCALES, DECAYS)
    pair = dominating_pair.exact(blt, scheme)
    sigma = release(pair, epsilon, delta, effort=Effort(seed=1)).noise_multiplier
    # δ at the certified σ, from far more samples than it was made with
    calibration = calibrate(pair, epsilon, delta, samples=2**18, seed=2, near=sigma)
    slope = delta * math.exp(calibration.slope * math.log(sigma / calibration.value))
    needed = delta_calculation.minimum_samples_to_calibrate(slope, delta)
    column = blt.toeplitz_coefs(scheme.iterations)
    sampling = batch_selection.BallsInBinsSampling(scheme.iterations, scheme.bins)
    small, rng = 20, np.random.default_rng(0)

    def samples():
        drawn = sample_generation.generate_sample(sampling, sigma, column, rng, num_samples=small)
        sample_generation.compute_privacy_loss(sampling, drawn, sigma, column)

    per_sample = cpu(samples)
    return Contest(
        cpu(lambda: release(pair, epsilon, delta, effort=Effort(seed=1))),
        lambda: per_sample() / small * needed,
        {"extrapolated": True, "samples_of_theirs": needed, "delta_at_sigma": slope},
    )


def account():
    """ε of DP-SGD for groups of 16 examples against dp_accounting."""
    from dp_accounting.pld import privacy_loss_distribution

    from mfopt.accounting import Mechanism
    from mfopt.accounting import account as solve
    from mfopt.sampling import Poisson

    size, probability, iterations, sigma, delta = 16, 0.001, 2000, 2.0, 1e-6
    mechanism = Mechanism(Poisson(probability, iterations), group_size=size)
    counts = np.arange(size + 1)
    weights = scipy.stats.binom.pmf(counts, size, probability)

    def ours():
        return float(solve(mechanism, noise_multiplier=sigma, delta=delta).epsilon)

    def theirs():
        """As its users call it, on its default grid."""
        step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma, counts.tolist(), weights.tolist(), value_discretization_interval=1e-4
        )
        return float(step.self_compose(iterations).get_epsilon_for_delta(delta))

    return Contest(cpu(ours), cpu(theirs), {"relative_difference": ours() / theirs() - 1})


def allocation():
    """ε of independent noise under balls-in-bins against PLD_accounting."""
    import PLD_accounting

    from mfopt.accounting import Mechanism
    from mfopt.accounting import account as solve
    from mfopt.sampling import BallsInBins

    independent = Mechanism(BallsInBins(bins=16, epochs=1))

    def ours():
        return float(solve(independent, noise_multiplier=1.0, delta=1e-5).epsilon)

    def theirs():
        return PLD_accounting.gaussian_allocation_epsilon_range(
            delta=1e-5, sigma=1.0, num_steps=16, epsilon_accuracy=0.1
        )

    return Contest(cpu(ours), cpu(theirs), {"ours": ours(), "theirs": list(theirs())})


def optimize():
    """A banded Toeplitz C of 16 bands for a fixed order of 2,048 steps, against jax-privacy."""
    from jax_privacy.matrix_factorization import toeplitz

    from mfopt.optimize import Form, unamplified
    from mfopt.sampling import FixedOrder

    scheme = FixedOrder(bins=2048, epochs=1)

    def ours():
        return unamplified.optimize(scheme, Form("banded-toeplitz", 16))

    def theirs():
        return toeplitz.optimize_banded_toeplitz(2048, 16)

    actual = ours(), np.asarray(theirs())
    columns = actual[0].strategy.toeplitz_coefs(2048)[:16], actual[1]
    squares = [
        float(
            toeplitz.sensitivity_squared(column)
            * np.mean(toeplitz.per_query_error(strategy_coef=column, n=2048))
        )
        for column in columns
    ]
    relative = math.sqrt(squares[0] / squares[1])
    return Contest(cpu(ours), cpu(theirs), {"rmse_over_theirs": relative})


def _steps(ours, theirs):
    """Five steps of noise each, after one that compiles."""
    ours(), theirs()

    def five(step):
        return cpu(lambda: [step() for _ in range(5)])

    return Contest(five(ours), five(theirs), {})


def _stream():
    from mfopt.noise import NoiseStream
    from mfopt.strategies import BLT

    return NoiseStream(BLT(SCALES, DECAYS), iterations=2048, noise_multiplier=1.0, clip_norm=1.0)


def _optax_step(transformation):
    """A jitted update that is fed its own state, buffers donated."""
    import jax
    import jax.numpy as jnp

    gradient = jnp.ones(10**6, jnp.float32)
    update = jax.jit(lambda g, s: transformation.update(g, s), donate_argnums=1)
    state = transformation.init(gradient)

    def step():
        nonlocal state
        noisy, state = update(gradient, state)
        jax.block_until_ready((noisy, jax.tree.leaves(state)))

    return step


def noise():
    """One step of a BLT's noise on 10⁶ parameters against jax-privacy, in float32 as here."""
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import buffered_toeplitz

    from mfopt.noise.for_optax import add_noise

    matrix = buffered_toeplitz.StreamingMatrixBuilder(
        buf_decay=DECAYS.astype(np.float32), output_scale=SCALES.astype(np.float32)
    ).build_inverse()
    theirs = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0)
    return _steps(_optax_step(add_noise(_stream())), _optax_step(theirs))


def torch():
    """The same in PyTorch against what one would write by hand, everything in place."""
    import torch

    from mfopt.noise.for_torch import TorchNoise

    gradient, drawn = [torch.ones(10**6)], torch.empty(10**6)
    ours, recursion = TorchNoise(_stream(), gradient), _stream().recursion
    buffers = torch.zeros(len(DECAYS), 10**6)
    steps = itertools.count()

    def theirs():
        gain, *rows = recursion.coefficients(next(steps))
        read, decay, feed = (torch.tensor(row).float() for row in rows)
        drawn.normal_(0.0, float(gain))
        drawn.addmv_(buffers.T, -read)
        buffers.mul_(decay[:, None]).addr_(feed, drawn)
        gradient[0].add_(drawn)

    return _steps(lambda: ours.add_to(gradient), theirs)


CONTESTS = {
    "certify": (certify, "jax_privacy"),
    "account": (account, "dp_accounting"),
    "allocation": (allocation, "PLD-accounting"),
    "optimize": (optimize, "jax_privacy"),
    "noise": (noise, "jax_privacy"),
    "torch": (torch, "torch"),
}


# --- measuring, keeping, comparing ---------------------------------------------------------------


def measured(contest, rounds):
    """The ratios of ``rounds`` pairs, after one that is not counted."""
    contest.ours(), contest.theirs()
    return {**in_turn(contest.ours, contest.theirs, rounds), **contest.facts}


def worse(original, current):
    """By contest, in words: ratios whose lower quartile is above the upper one they had."""
    reports = {}
    for name, old in original["contests"].items():
        new = current["contests"].get(name, {})
        if "ratio" not in old or "ratio" not in new:
            continue
        if not new["quartiles"][0] <= old["quartiles"][1]:
            reports[name] = (
                f"{new['ratio']:.4g} ({new['quartiles'][0]:.4g} to {new['quartiles'][1]:.4g}), was "
                f"{old['ratio']:.4g} ({old['quartiles'][0]:.4g} to {old['quartiles'][1]:.4g}) on "
                f"{original['date']}"
            )
    return reports


def file_of(report):
    """The name of a report's file: device and day."""
    device = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
    return f"{device}.{report['date']}.json"


def latest_run(folder, device):
    """The folder's last report of a device."""
    # the day is the last part of a name, and sorts as it is written
    begin = file_of({"device": device, "date": ""}).removesuffix(".json")
    mine = sorted(path for path in folder.iterdir() if path.name.startswith(begin))
    return json.loads(mine[-1].read_text()) if mine else None


bench = Bench(
    __file__,
    __doc__,
    contests=choice(CONTESTS),
    repeats=(9, "Pairs of each contest."),
    reports=(None, "Folder for the report of this device and day.", Path),
    against=(None, "Folder whose last report of this device is compared with.", Path),
)


@bench.work
def compared(options):
    """Run the contests, keep their ratios, compare them with the last ones."""
    from mfopt.experiments import runner

    actual = {
        "what": "CPU seconds of mfopt over those of the other package",
        "device": runner.device(),
        **machine("jax", "numpy"),  # the load is that of others, before this begins
        "contests": {},
    }
    original = latest_run(options.against, actual["device"]) if options.against else None
    for name in options.contests:
        make, package = CONTESTS[name]
        try:
            entry = {"against": package, "version": metadata.version(package)}
            entry |= measured(make(), options.repeats)
        except (ImportError, metadata.PackageNotFoundError):
            entry = {"against": package, "left_out": "not installed"}
        actual["contests"][name] = entry
        print(name, entry.get("ratio", "left out"), file=sys.stderr, flush=True)
    if options.reports:
        options.reports.mkdir(parents=True, exist_ok=True)
        bench.out = options.reports / file_of(actual)
    if original is None:
        return actual, False
    reports = worse(original, actual)
    for name, text in reports.items():
        print(f"worse: {name} {text}", file=sys.stderr)
    busy = max(facts.get("load_average", [0.0])[0] for facts in (original, actual)) / (
        os.cpu_count() or 1
    )
    if reports and busy > _QUIET:
        print(
            f"a machine was busy ({busy:.1f} processes a core): a ratio moves by more than its "
            "spread then; measure again on an idle one",
            file=sys.stderr,
        )
    return actual, bool(reports)


if __name__ == "__main__":
    bench.main()
