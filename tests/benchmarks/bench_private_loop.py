"""A private loop in PyTorch against the plain one, and what its probe and its ledger cost.

    python tests/benchmarks/bench_private_loop.py --out report.json

Both loops take batches from a DataLoader of tensors in memory, on one thread, in turns. Times are
CPU time; of the waits for the disk, wall time. The cost of the probe is that of probed steps above
the median of the others; shares are of a run of ``--steps`` steps, stored from its first step on.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, Options, choice

sys.path.append(str(Path(__file__).parents[1]))
from statements import stated

from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT


def perceptron() -> Any:
    """407,050 parameters."""
    from torch import nn

    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def layer() -> Any:
    """A transformer layer of width 256 and the mean of its positions."""
    from torch import nn

    encoder = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 256, 10))


# model, shape of a record, batch
CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "mlp": (perceptron, (784,), 128),
    "transformer layer": (layer, (32, 256), 32),
}
BINS = 20
bench = Bench(
    __file__, __doc__, steps=(1000, "Steps of a run."), cases=choice(CASES)
)  # fmt: skip
parser, main = bench.parser, bench.main


def timed(loop: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    loop()
    return time.process_time() - start


def measured(name: str, steps: int) -> dict[str, Any]:
    """Times of a case, in milliseconds, and shares of the whole run."""
    import torch
    from torch.nn import functional

    import mfopt.torch.run as private_run
    from mfopt.torch import PrivateRun
    from mfopt.torch.probe import RATE

    torch.set_num_threads(1)
    make, shape, batch = CASES[name]
    torch.manual_seed(0)
    records = torch.utils.data.TensorDataset(
        torch.randn(BINS * batch, *shape), torch.randint(10, (BINS * batch,))
    )
    scheme = BallsInBins(bins=BINS, epochs=-(-steps // BINS))
    strategy = BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9]))
    model, other = make(), make()
    run = PrivateRun(stated(strategy, scheme, 1.0, status="certified"), len(records), 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.attach(optimizer)
    optimizer.state_dict()  # from now on the ledger is a file
    plain_optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    ledger: list[float] = []
    probed: list[bool] = []

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.process_time()
            result = function(*arguments)
            ledger.append(time.process_time() - start)
            return result

        return call

    kept: Any = run.started().ledger  # type: ignore[union-attr]
    kept.release = clocked(kept.release)
    private_run.release_fingerprint = clocked(private_run.release_fingerprint)
    sync = os.fsync

    def waited(descriptor: int) -> None:
        start = time.perf_counter()
        sync(descriptor)
        ledger.append(time.perf_counter() - start)

    os.fsync = waited
    is_probed = run.is_probed

    def noted(*arguments: Any) -> bool:
        probed[-1] = is_probed(*arguments)
        return probed[-1]

    run.is_probed = noted  # type: ignore[method-assign]

    def loss(model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1])

    ours: list[float] = []
    theirs: list[float] = []
    loaders: dict[str, Any] = {"ours": iter(()), "theirs": iter(())}

    def fetch(which: str) -> Any:
        try:
            return next(loaders[which])
        except StopIteration:
            plain = torch.utils.data.DataLoader(records, batch, shuffle=True)
            loaders[which] = iter(run.loader(records) if which == "ours" else plain)
            return next(loaders[which])

    def private_step() -> None:
        run.backward(model, loss, fetch("ours"))
        optimizer.step()
        optimizer.zero_grad()

    def plain_step() -> None:
        loss(other, fetch("theirs")).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    for step in range(steps):
        probed.append(False)
        ours.append(timed(private_step))
        if step % max(1, steps // 100) == 0:
            theirs.append(timed(plain_step))
    for step in {0, 1, *range(0, steps, RATE)}:  # whose batches are made again
        probed[step] = True
    usual = statistics.median(t for t, drawn in zip(ours, probed, strict=True) if not drawn)
    probe = sum(t - usual for t, drawn in zip(ours[1:], probed[1:], strict=True) if drawn)
    whole = sum(ours)
    plain = statistics.median(theirs)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plain_ms": round(1e3 * plain, 3),
        "private_ms": round(1e3 * usual, 3),
        "ratio": round(usual / plain, 2),
        "probed_steps": sum(probed),
        "probe_share": round(probe / whole, 4),
        "ledger_ms": round(1e3 * sum(ledger) / steps, 3),
        "ledger_share": round(sum(ledger) / whole, 4),
    }


@bench.work
def report(options: Options) -> dict[str, Any]:
    """Of each case."""
    warnings.simplefilter("ignore")
    folder = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            return {name: measured(name, options.steps) for name in options.cases}
        finally:
            os.chdir(folder)


if __name__ == "__main__":
    sys.exit(main())
