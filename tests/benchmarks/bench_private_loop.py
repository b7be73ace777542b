"""A private loop in PyTorch against the plain one, and what its probe and its ledger cost.

    python tests/benchmarks/bench_private_loop.py --out artifacts/bench-private-loop.json

Both loops take batches of tensors in memory, on one thread, step by step in turns. Times are CPU
time: waits for the disk, one in about five seconds, are not in them. The probe's share is what
probed steps take above the median of the others, but for the first step, which compiles. The layer
takes a quarter of the steps: its shares are larger than those of a whole run.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, Options, cpu, in_turn

sys.path.append(str(Path(__file__).parents[1]))
from statements import stated

from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT

BINS = 20
bench = Bench(__file__, __doc__, steps=(1000, "Steps of a run."))
parser, main = bench.parser, bench.main


def measured(make: Callable[[], Any], shape: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Times and shares of a run; ``shape`` of a batch."""
    import torch

    import mfopt.torch.run as private_run
    from mfopt.torch.probe import RATE

    data = torch.utils.data.TensorDataset(
        torch.randn(BINS * shape[0], *shape[1:]), torch.randint(10, (BINS * shape[0],))
    )
    scheme = BallsInBins(bins=BINS, epochs=-(-steps // BINS))
    strategy = BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9]))
    factorization = stated(strategy, scheme, 1.0, status="certified")
    run = private_run.PrivateRun(factorization, len(data), 1.0)
    private, plain = make(), make()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (private, plain))
    run.attach(ours)
    ours.state_dict()  # from now on the ledger is a file
    times: dict[Any, list[float]] = {ours: [], theirs: []}
    ledger: list[float] = []
    drawn: list[bool] = []

    def clocked(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            result, seconds = cpu(function, *arguments)
            ledger.append(seconds)
            return result

        setattr(owner, name, call)

    clocked(run.noise.ledger, "release")  # type: ignore[union-attr]
    clocked(private_run, "release_fingerprint")
    is_probed = run.is_probed
    vars(run).update(is_probed=lambda *parts: drawn.append(is_probed(*parts)) or drawn[-1])

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step(optimizer: Any, backward: Callable[[Any], Any], loader: Any) -> Callable[[], float]:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))

        def once() -> None:
            backward(next(batches))
            optimizer.step()
            optimizer.zero_grad()

        def seconds() -> float:
            times[optimizer].append(cpu(once)[1])
            return times[optimizer][-1]

        return seconds

    first = step(ours, lambda batch: run.backward(private, loss, batch), run.loader(data))
    loader = torch.utils.data.DataLoader(data, shape[0], shuffle=True)
    second = step(theirs, lambda batch: loss(plain, batch).backward(), loader)
    comparison = in_turn(first, second, steps)
    private_times = np.array(times[ours])
    # in some collate_fn alone is probed
    probed = np.array(drawn) | (np.arange(steps) % RATE == 0) | (np.arange(steps) < 2)
    above = private_times - np.median(private_times[~probed])
    return {
        **comparison,
        "probed_steps": int(probed.sum()),
        "probe_share": float(above[1:][probed[1:]].sum() / private_times.sum()),
        "ledger_share": float(sum(ledger) / private_times.sum()),
    }


@bench.work
def report(options: Options) -> dict[str, Any]:
    """Of an MLP of 407,050 parameters, and of a transformer layer of width 256."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    def layer() -> nn.Module:
        encoder = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 256, 10))

    folder, before = Path.cwd(), os.getloadavg()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        mlp = measured(
            lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)),
            (128, 784),
            options.steps,
        )
        encoder = measured(layer, (32, 32, 256), options.steps // 4)
        os.chdir(folder)
    loads = {"load_before": before, "load_after": os.getloadavg(), "torch": torch.__version__}
    return {"steps": options.steps, **loads, "mlp": mlp, "transformer layer": encoder}


if __name__ == "__main__":
    sys.exit(main())
