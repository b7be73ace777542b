"""A few steps of the papers' studies at their full size, on random data of the right shape.

    mfopt bench full --studies images --out artifacts/bench-full.json

``images``: the VGG of 550,570 parameters on 45,000 images of CIFAR-10's shape, batches of 450, all
rates and two seeds at once (ten times as many steps: they are one program, timed as a whole).
``next-word``: the LSTM of 1.35 million parameters on users of 1,600 words, 4,990 users a round by
DP-FedAvg. ``fine-tuning``: all parameters of GPT-2 small on 1,020 records of 128 tokens by ELS and
ULS, and without privacy. Each runs the study's own code in a process of its own. ``seconds`` are
those of a step after the first, without compilation, ``peak_gib`` the memory of the accelerator
(of the process on a CPU), and ``hours`` what all runs of ``mfopt experiment NAME --full`` would
take on this machine, one after another: evaluations, mechanisms and further rates left out.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from typing import Any

import numpy as np
from harness import Bench, Options, child, choice, machine

STUDIES = ("images", "next-word", "fine-tuning")

bench = Bench(
    __file__,
    __doc__,
    studies=choice(STUDIES),
    steps=(2, "Steps after the first."),
    share=(1.0, "Of the units of a step, to try it on a small machine."),
    alone=(False, "Measure the one study in this process."),
)
parser, main = bench.parser, bench.main


def images(steps: int, share: float) -> dict[str, Any]:
    """SGD with momentum on images by private gradients: one cell, of all rates and some seeds."""
    import jax

    from mfopt.experiments.mechanisms import Cooldown, workload_of
    from mfopt.experiments.options import at_full
    from mfopt.experiments.runs import many_runs, pictures
    from mfopt.experiments.runs.functional import size
    from mfopt.experiments.studies import find
    from mfopt.sampling import Poisson
    from mfopt.strategies import BLT

    made = find("images")
    study: Any = made(**at_full(made))
    random = np.random.default_rng(0)

    def part(count: int) -> Any:
        x = random.uniform(-1, 1, (count, 32, 32, 3)).astype(np.float32)
        return pictures.Examples(x, random.integers(10, size=count).astype(np.int32))

    data = pictures.Pictures(part(45_000), part(100), part(100))

    seeds, each = tuple(range(study.per_cell)), study.microbatch
    how: dict[str, Any] = {"rates": study.rates, "seeds": seeds, "microbatch": each}

    def run(length: int) -> float:
        scheme = Poisson(share / study.bins, length)
        mechanism = many_runs.RunMechanism(BLT(np.array([0.3]), np.array([0.9])), 1.0, scheme)
        workload = workload_of(Cooldown(study.momentum, 0, length, study.final), length)
        begun = time.perf_counter()
        many_runs.train(data, mechanism, workload, **how)
        return time.perf_counter() - begun

    # each program is compiled in its first call and kept: the second is steps and evaluation
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        (first, one), (_, whole) = ([run(length), run(length)] for length in (1, 1 + 10 * steps))
    params, _ = pictures.model((32, 32, 3), study.hidden, 0)
    runs = len(list(study.arms())) * study.seeds // study.per_cell
    return {
        "parameters": size(params),
        "units": share * 450,
        "first": first,
        "seconds": {f"{len(study.rates) * len(seeds)} runs at once": (whole - one) / (10 * steps)},
        "steps": study.bins * study.epochs,
        "runs": runs,
    }


def next_word(steps: int, share: float) -> dict[str, Any]:
    """DP-FedAvg on users' words."""
    import jax

    from mfopt.accounting.closed_form.moments import Estimator
    from mfopt.experiments.options import at_full
    from mfopt.experiments.runs import federated, lstm, words
    from mfopt.experiments.runs.functional import size
    from mfopt.experiments.studies import find
    from mfopt.noise.stream import NoiseStream
    from mfopt.sampling import Poisson, UnitSampler
    from mfopt.strategies import Identity
    from mfopt.training import fedavg

    made = find("next-word")
    study: Any = made(**at_full(made))
    expected = round(share * 763_430 / study.bins)
    streams = np.random.default_rng(0).integers(study.words, size=(2 * expected, study.tokens))
    data = words.rows_of([*streams.astype(np.int32)], study.words, study.tokens)
    scheme = Poisson(0.5, 1 + steps)
    unit = {"noise_multiplier": 1.0, "clip_norm": 1.0}
    params, apply = lstm.model(study.words, study.embedding, study.state)
    server = federated.Server(
        federated.UserUpdate(study.rates[0], study.batch, study.local_epochs),
        lstm.NextWord(apply),
        Estimator(study.clip, 0.5, float(2 * expected)),
        UnitSampler(scheme, 2 * expected, seed=0),
        NoiseStream(Identity(), iterations=scheme.length, sampling=scheme, **unit),
        np.full(scheme.length, study.clip),
        chunk=study.chunk,
    )
    clocks = [time.perf_counter()]
    for _, model in server.run(params, data, fedavg.weights(data.counts, study.tokens)):
        jax.block_until_ready(model)
        clocks.append(time.perf_counter())
    seconds = np.diff(clocks)
    arms = len(list(study.arms()))
    return {
        "parameters": size(params),
        "units": expected,
        "first": float(seconds[0]),
        "seconds": {"DP-FedAvg": float(np.median(seconds[1:]))},
        "steps": study.rounds,
        "runs": arms * len(study.rates) * study.seeds,
    }


def fine_tuning(steps: int, share: float) -> dict[str, Any]:
    """GPT-2 small, three ways in turn."""
    from mfopt.experiments.options import at_full
    from mfopt.experiments.runs.step_time import ORDER, StepTimeCell
    from mfopt.experiments.studies import find

    made, timed = find("record-selection"), find("step-time")
    study: Any = made(**at_full(made))
    sizes = timed(**at_full(timed))
    batch = max(1, round(share * study.batch / study.group)) * study.group
    cell = StepTimeCell.of(sizes, width=study.width, batch=batch, group=study.group, steps=steps)
    begun = time.perf_counter()
    found = cell.run()
    seconds = np.median(found.arrays["seconds"], axis=1)
    whole = time.perf_counter() - begun
    return {
        "parameters": found.record["parameters"],
        "units": batch,
        "first": whole - float(found.arrays["seconds"].sum()),
        "seconds": dict(zip(ORDER, seconds.tolist(), strict=True)),
        "steps": study.steps,
        "runs": len(list(study.arms())) * len(study.rates) * len(study.seeds),
    }


MEASURED = dict(zip(STUDIES, (images, next_word, fine_tuning), strict=True))


def peak() -> float:
    """The most memory used so far, in GiB."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(stats.get("peak_bytes_in_use", 1024 * kib)) / 2**30


@bench.work
def measured(options: Options) -> tuple[dict[str, Any] | None, int]:
    """Each study, in a process of its own."""
    if options.alone:
        (name,) = options.studies
        found = MEASURED[name](options.steps, options.share)
        slowest = max(found["seconds"].values())
        hours = found["runs"] * found["steps"] * slowest / 3600
        print(json.dumps({**found, "peak_gib": peak(), "hours": hours}))
        return None, 0
    from mfopt.experiments.runner import device

    results, failed = {}, 0
    for name in options.studies:
        words = ["--studies", name, "--steps", options.steps, "--share", options.share, "--alone"]
        found, said = child(__file__, *map(str, words))
        results[name] = found or {"failed": said}
        failed |= not found
    settings = {"steps": options.steps, "share": options.share}
    return {"settings": settings, "device": device(), **machine("jax"), "results": results}, failed


if __name__ == "__main__":
    raise SystemExit(main())
