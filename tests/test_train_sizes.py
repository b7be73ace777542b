"""What a training run takes is told before it; what cannot fit is refused before the model is."""

import dataclasses
from types import SimpleNamespace

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mfopt_cli import messages
from mfopt_cli.main import cli
from selection import before_release

from mfopt import strategies as S
from mfopt._runtime import _sizes
from mfopt.errors import UsageError
from mfopt.noise import NoiseStream
from mfopt.training import mesh, sizes
from mfopt.training.clipping import Clipping
from mfopt.training.config import TrainConfig
from mfopt.training.gradients import Totals, microbatch_adder
from mfopt.training.initial_model import outline
from mfopt.training.models.decoder import LoRAConfig
from mfopt.training.models.families import gpt2_config
from mfopt.training.models.huggingface import gpt2_model, gpt2_shapes

GIB = 2**30
BLT = S.BLT([0.2, 0.1], [0.9, 0.5])


def config(**changes):
    shape = {"width": 32, "layers": 2, "heads": 2, "length": 16, **changes}
    return TrainConfig(
        sampling="poisson:probability=0.2,iterations=6", epsilon=8.0, delta=1e-4, **shape
    )


def execution(*, microbatch=8, strategy=BLT, records=4, iterations=1000, batch=100.0):
    noise = None
    if strategy is not None:
        noise = NoiseStream(strategy, iterations=iterations, noise_multiplier=1.0, clip_norm=1.0)
    return SimpleNamespace(
        noise=noise,
        clipping=Clipping(1.0),
        units=SimpleNamespace(records=records),
        sampler=SimpleNamespace(expected_batch=batch),
        microbatch=microbatch,
        iterations=iterations,
    )


def work(settings, vocab_size=300):
    return sizes.work(outline(settings, vocab_size), settings.length)


@pytest.mark.parametrize("layers", ["attn/c_attn", "attn/c_proj,mlp/c_fc,mlp/c_proj"])
def test_the_model_is_counted_before_it_is_made(layers):
    shape = gpt2_config(300, 16, 32, 2, 2)
    plain = gpt2_model(shape)
    assert work(config()) == sizes.work(plain, 16)
    assert work(config())[:2] == (plain.num_params, 0)
    adapted = gpt2_model(shape, lora=LoRAConfig(4, layers=tuple(layers.split(","))))
    with_adapters = work(config(lora_rank=4, lora_layers=layers))
    assert with_adapters[:2] == (adapted.num_params, plain.num_params)
    assert with_adapters == sizes.work(adapted, 16)
    assert outline(config(model="somewhere:make"), 300) is None  # one of a function's


@pytest.mark.ci
@pytest.mark.parametrize(
    ("width", "records", "layers"), before_release([(64, 4, 1), (128, 1, 1), (64, 2, 3)], 1)
)
def test_a_microbatch_takes_what_the_compiled_program_does(width, records, layers):
    model = gpt2_shapes(gpt2_config(300, 64, width, layers, 2))
    add = microbatch_adder(model, Clipping(1.0))
    rows = [jax.ShapeDtypeStruct((8, records, 64), dtype) for dtype in (jnp.int32, bool)]
    totals = jax.eval_shape(Totals.zero, model.params)
    program = jax.jit(add, donate_argnums=0).lower(totals, model.params, model.frozen, *rows)
    temp_size_in_bytes = program.compile().memory_analysis().temp_size_in_bytes
    settings = config(width=width, layers=layers, heads=2, length=64)
    run = execution(records=records)
    first, second = map(sizes.RunCost(work(settings), run, settings).memory, (8, 16))
    assert 0.45 * (second - first) < temp_size_in_bytes < 1.3 * (second - first)


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch):
    settings = config(width=768, layers=12, heads=12, length=1024)
    small = work(settings, 50257)
    monkeypatch.setattr(_sizes, "free_memory", lambda: 20 * GIB)
    sizes.RunCost(small, execution(microbatch=1, records=1), settings).require()
    with pytest.raises(UsageError, match=r"microbatch = 64: .* GiB of memory.*Here \d+ would fit"):
        sizes.RunCost(small, execution(microbatch=64, records=1), settings).require()
    wide = config(width=61440, layers=12, heads=12, length=1024)
    with pytest.raises(UsageError, match=r"width = \(12, 61440\): .* GiB of memory.*smaller") as e:
        sizes.RunCost(work(wide, 50257), execution(microbatch=1), wide).require()
    with click.Context(cli.get_command(None, "train")) as context:  # as `mfopt train` says it
        assert messages.of_usage(e.value, context).startswith("--layers 12, --width 61440: needs")
    # noise that keeps every draw is part of it
    banded = S.BandedToeplitz(np.ones(400) / np.arange(1, 401))
    run = execution(microbatch=1, records=1, strategy=banded)
    with pytest.raises(UsageError, match="arrays of noise"):
        sizes.RunCost(small, run, settings).require()


@pytest.mark.parametrize(("microbatch", "devices", "fitting"), [(21, 1, 5), (24, 4, 4)])
def test_microbatches_of_any_size_are_halved_until_they_fit(
    microbatch, devices, fitting, monkeypatch
):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7.0})
    monkeypatch.setattr(mesh, "devices", lambda: [device] * devices)

    class Cost(sizes.RunCost):
        def memory(self, microbatch):
            return float(microbatch)

    assert Cost(None, execution(microbatch=microbatch), config()).fitting() == fitting


def test_a_billion_parameters_fit_on_eight_devices(monkeypatch):
    monkeypatch.setattr(mesh, "on_cpu", lambda: False)
    shape = config(width=1792, layers=24, heads=14, length=128)
    four = S.BLT([0.2, 0.1, 0.1, 0.1], [0.9, 0.7, 0.5, 0.3])
    large = work(shape, 50257)
    assert 1.0e9 < large.trained < 1.05e9
    cost = sizes.RunCost(large, execution(records=1, strategy=four), shape)
    assert cost.memory(1) > 70e9
    limit = 80e9
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit})
    monkeypatch.setattr(mesh, "devices", lambda: [device] * 8)
    assert 14e9 < cost.memory(8) < 16e9
    large_batches = dataclasses.replace(
        cost, execution=execution(records=1, strategy=four, microbatch=512)
    )
    assert large_batches.fitting() == 64
    limit = 14e9
    assert 8 <= large_batches.fitting() < 512
    # several processes take what was asked for
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert large_batches.fitting() == 512
