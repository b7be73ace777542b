"""Time of one training step: private algorithms against the non-private loop at equal compute.

    python tests/benchmarks/bench_train.py --models tiny,small --out artifacts/bench-train.json
    python tests/benchmarks/bench_train.py --models gpt2-small --lora-rank 32 --users 64
    python tests/benchmarks/bench_train.py --folder work/model --lora-rank full,16 --users 8

All contenders take the same number of records of the same length in each step: ``none`` and
``uls`` the same users with the same G records, ``els`` as many records, one by one. The
non-private loop is the trainer without clipping and noise: one backward pass for each microbatch.
Steps of the contenders alternate, and the least of each counts: of CPU-seconds on a CPU, so that
other load on the machine spoils ratios as little as it can, else of time. Chua et al. (2024, Table
12) report 1.04 to 1.09.
"""

import dataclasses
import os
import time

import numpy as np
from harness import Bench, choice, count, listed, machine

SIZES = {
    "tiny": {"n_embd": 128, "n_layer": 2, "n_head": 4},
    "small": {"n_embd": 256, "n_layer": 4, "n_head": 4},
    "gpt2-small": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
}
DECAYS = np.array([0.5, 0.9, 0.99, 0.999])
SCALES = np.array([0.3, 0.1, 0.05, 0.02])
CONTENDERS = ("none", "uls", "els")


def rank(text):
    """The rank of adapters, None of full fine-tuning."""
    return None if text == "full" else count(text)


bench = Bench(
    __file__,
    __doc__,
    models=choice(SIZES, ["tiny"]),
    folder=("", "A Hugging Face folder of a model, in place of --models."),
    vocab_size=(2048, "Entries of the tokenizer."),
    length=(64, "Tokens of a record."),
    users=(53, "Users in a step."),
    records_per_user=(4, "Records of a user, G."),
    microbatch=(1, "Units per gradient call."),
    lora_rank=([None], "Train adapters of these ranks; full: all parameters.", listed(rank)),
    compute_dtype=("float32", "Dtype of the forward and backward pass."),
    steps=(6, "Timed steps of each contender."),
    contenders=choice(CONTENDERS),
)


def _model(size, lora_rank, options):
    """A GPT-2 with random weights or the model in ``--folder``; with adapters of ``lora_rank``."""
    from mfopt.training.models.decoder import LoRAConfig
    from mfopt.training.models.families import gpt2_config
    from mfopt.training.models.huggingface import gpt2_model, load_pretrained

    lora = None if lora_rank is None else LoRAConfig(lora_rank)
    dtype = {"compute_dtype": options.compute_dtype}
    if options.folder:
        return load_pretrained(options.folder, lora=lora, **dtype)
    config = gpt2_config(vocab_size=options.vocab_size, n_positions=options.length, **SIZES[size])
    return gpt2_model(dataclasses.replace(config, **dtype), lora=lora)


def _steps(name, model, options):
    """Seconds of one step after the other of one contender."""
    import jax
    import optax

    from mfopt.noise import NoiseStream
    from mfopt.sampling import FixedOrder, UnitSampler
    from mfopt.strategies import BLT
    from mfopt.training import mesh as meshes
    from mfopt.training.clipping import Clipping, NoClipping
    from mfopt.training.data import TokenStore
    from mfopt.training.loop import Execution, Trainer
    from mfopt.training.units import RecordUnits, UserUnits

    rng = np.random.default_rng(0)
    shape = (options.users, options.records_per_user, options.length)
    tokens = rng.integers(0, options.vocab_size, shape)
    store = TokenStore.from_records(tokens.tolist(), vocab_size=options.vocab_size)
    shared = {"length": options.length}
    # a fixed order of one bin: every step takes every unit
    if name == "els":
        units = RecordUnits(store, group_size=options.records_per_user, reserve=True, **shared)
    else:
        units = UserUnits(store, records=options.records_per_user, **shared)
    scheme = FixedOrder(bins=1, epochs=10_000)
    sampler = UnitSampler(scheme, units.population, 0)
    clipping = NoClipping()
    noise = None
    if name != "none":
        clipping = Clipping(1.0, normalized=True)
        noise = NoiseStream(
            BLT(SCALES, DECAYS), iterations=scheme.length, noise_multiplier=1.0, clip_norm=1.0
        )
    trainer = Trainer(
        model,
        Execution(units, sampler, clipping, noise, units.population, options.microbatch),
        optax.adam(1e-4),
        mesh=meshes.make_mesh(),
    )
    clock = time.perf_counter()
    for result in trainer.run(trainer.init()):
        jax.block_until_ready(result.state.params)
        jax.block_until_ready(result.statistics)
        yield time.perf_counter() - clock
        clock = time.perf_counter()


def measure(model, options):
    """Least, median and first (with compilation) step time of each contender, in seconds.

    ``ratio`` is that of CPU-seconds on a CPU, else of time.
    """
    import jax

    runs = {name: _steps(name, model, options) for name in options.contenders}
    first = {name: next(run) for name, run in runs.items()}
    for run in runs.values():
        next(run)
    seconds = {name: [] for name in runs}
    spent = {name: [] for name in runs}
    for _ in range(options.steps):
        for name, run in runs.items():
            # the time since this contender's last step includes the others' steps, so the clock
            # is read around the call and the generator's own figure is not used
            begin, used = time.perf_counter(), time.process_time()
            next(run)
            seconds[name].append(time.perf_counter() - begin)
            spent[name].append(time.process_time() - used)
    if jax.default_backend() != "cpu":
        spent = seconds
    base = min(spent[options.contenders[0]])
    return {
        name: {
            "seconds": min(times),
            "median": float(np.median(times)),
            "first": first[name],
            "cpu_seconds": min(spent[name]),
            "ratio": min(spent[name]) / base,
        }
        for name, times in seconds.items()
    }


@bench.work
def measured(options):
    """A table for each model and rank."""
    begun, load = time.perf_counter(), os.getloadavg()[0]
    results = {
        f"{size}, {f'rank {lora_rank}' if lora_rank else 'full'}": measure(
            _model(size, lora_rank, options), options
        )
        for size in ([options.folder] if options.folder else options.models)
        for lora_rank in options.lora_rank
    }
    import jax

    print(f"{'':28} {'':6} {'least s':>9} {'CPU s':>9} {'ratio':>7}")
    for size, rows in results.items():
        for name, row in rows.items():
            figures = f"{row['seconds']:9.4f} {row['cpu_seconds']:9.4f} {row['ratio']:7.3f}"
            print(f"{size:28} {name:6} {figures}")
    return {
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "device": jax.devices()[0].device_kind,
        "load average": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        **machine("jax"),
        "seconds": round(time.perf_counter() - begun, 1),
        "results": results,
    }


if __name__ == "__main__":
    bench.main()
