"""A private loop in PyTorch and in JAX against the plain one; what probe, ledger and noise cost.

    python tests/benchmarks/bench_private_loop.py --out artifacts/bench-private-loop.json

Both loops take batches of tensors in memory, on one thread, step by step in turns. Times are CPU
time: waits for the disk, one in about five seconds, are not in them. The probe's share is what
probed steps take above the median of the others, but for the first step, which compiles. The layer
takes a quarter of the steps: its shares are larger than those of a whole run. Noise is that of
one step for a million parameters, by PyTorch and by JAX in turns.
"""

import contextlib
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Bench, cpu, in_turn, machine

sys.path.append(str(Path(__file__).parents[1]))
from statements import stated

from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT

BINS = 20
bench = Bench(__file__, __doc__, steps=(1000, "Steps of a run."))


def factorization(steps):
    """A C of two buffers for as many steps at least, whose guarantee nobody proves."""
    scheme = BallsInBins(bins=BINS, epochs=-(-steps // BINS))
    return stated(BLT([0.3, 0.1], [0.5, 0.9]), scheme, 1.0, status="certified")


def measured(make, shape, steps):
    """Times and shares of a run; ``shape`` of a batch."""
    import torch

    import mfopt.torch.run as private_run
    from mfopt.torch.probe import RATE

    data = torch.utils.data.TensorDataset(
        torch.randn(BINS * shape[0], *shape[1:]), torch.randint(10, (BINS * shape[0],))
    )
    run = private_run.PrivateRun(factorization(steps), len(data), 1.0)
    private, plain = make(), make()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (private, plain))
    run.attach(ours)
    ours.state_dict()  # from now on the ledger is a file
    times = {ours: [], theirs: []}
    ledger = []
    probes = [0]  # before each step

    def clocked(owner, name):
        function = getattr(owner, name)

        def call(*arguments):
            result, seconds = cpu(function, *arguments)
            ledger.append(seconds)
            return result

        setattr(owner, name, call)

    clocked(run.noise.ledger, "release")
    clocked(private_run, "release_content")

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step(optimizer, backward, loader):
        batches = itertools.chain.from_iterable(itertools.repeat(loader))

        def once():
            backward(next(batches))
            optimizer.step()
            optimizer.zero_grad()

        def seconds():
            times[optimizer].append(cpu(once)[1])
            return times[optimizer][-1]

        return seconds

    def backward(batch):
        run.backward(private, loss, batch)
        probes.append(run._probes)

    first = step(ours, backward, run.loader(data))
    loader = torch.utils.data.DataLoader(data, shape[0], shuffle=True)
    second = step(theirs, lambda batch: loss(plain, batch).backward(), loader)
    comparison = in_turn(first, second, steps)
    private_times = np.array(times[ours])
    # in some collate_fn alone is probed
    probed = (np.diff(probes) > 0) | (np.arange(steps) % RATE == 0)
    above = private_times - np.median(private_times[~probed])
    return {
        **comparison,
        "probed_steps": int(probed.sum()),
        "probe_share": float(above[1:][probed[1:]].sum() / private_times.sum()),
        "ledger_share": float(sum(ledger) / private_times.sum()),
    }


def measured_in_jax(steps):
    """Times of a step's compiled gradient of an MLP of 406,528 parameters, private and plain."""
    import jax

    from mfopt.jax import PrivateRun

    draws = np.random.default_rng(0)
    shapes = (BINS * 128, 784), (784, 512), (512, 10)
    x, *params = (jax.numpy.asarray(draws.normal(0, 0.03, shape), "f") for shape in shapes)
    run = PrivateRun(factorization(steps), len(x), 1.0)
    states = [run.init(params)]
    batches = iter(run.batches(states[0]))

    def loss(p, rows):
        return jax.numpy.square(jax.nn.relu(rows @ p[0]) @ p[1]).sum()

    private = jax.jit(lambda *rest: run.gradient(jax.grad(loss), params, x, *rest))
    plain = jax.jit(lambda batch: jax.grad(loss)(params, x[batch]))

    def private_seconds():
        batch = next(batches)
        result, seconds = cpu(lambda: jax.block_until_ready(private(batch, *states)))
        states[:] = result[1:]
        return seconds

    def plain_seconds():
        batch = draws.permutation(len(x))[:128]
        return cpu(lambda: jax.block_until_ready(plain(batch)))[1]

    return in_turn(private_seconds, plain_seconds, steps)


def measured_noise(steps):
    """Times of a step's noise for a million parameters: of PyTorch's, of JAX's."""
    import jax
    import torch

    from mfopt import noise
    from mfopt.noise.for_torch import TorchNoise

    stream = noise.from_factorization(factorization(steps), clip_norm=1.0)
    sums = torch.zeros(10**6)
    adding, states = TorchNoise(stream, [sums]), [stream.init(np.zeros(10**6, np.float32))]

    def in_jax():
        states[:] = jax.block_until_ready(stream.next(states[0]))[1:]

    return in_turn(lambda: cpu(adding.add_to, [sums])[1], lambda: cpu(in_jax)[1], steps)


@bench.work
def report(options):
    """Of an MLP of 407,050 parameters, and of a transformer layer of width 256."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    def layer():
        encoder = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 256, 10))

    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        mlp = measured(
            lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)),
            (128, 784),
            options.steps,
        )
        encoder = measured(layer, (32, 32, 256), options.steps // 4)
        jax_mlp, noises = (f(options.steps // 4) for f in (measured_in_jax, measured_noise))
    loops = {"mlp": mlp, "transformer layer": encoder, "mlp in jax": jax_mlp, "noise": noises}
    return {"steps": options.steps, **machine("torch", "jax"), **loops}


if __name__ == "__main__":
    bench.main()
