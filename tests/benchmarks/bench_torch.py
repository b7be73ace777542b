"""A step of ``PrivateRun`` against a plain one (forward, backward, SGD), in turn in one process.

    python tests/benchmarks/bench_torch.py --repeats 20 --out FILE

Models: an MLP of 407,714 parameters, a wide one, both for batches of 128, and an encoder layer of
width 256 for 32 sequences of 64. The private step clips, adds the noise of a BLT with two buffers
and divides; "clipping" is the same without noise. Steps that the probe repeats are not timed; its
passes on their own are "probed", in plain steps. Ratios are medians, with quartiles.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import Bench, Options, choice, in_turn, machine
from torch import nn
from torch.nn import functional

from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.sampling import FixedOrder
from mfopt.strategies import BLT
from mfopt.torch import PrivateRun, clipping
from mfopt.workloads import PrefixSums

Batch = tuple[torch.Tensor, torch.Tensor]


class Encoder(nn.Module):
    """One encoder layer, and classes of its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.classes = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 10 classes."""
        scores: torch.Tensor = self.classes(self.layer(x).mean(1))
        return scores


def mlp(*widths: int) -> nn.Module:
    """Linear layers of these widths with ReLU between them."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(x for a, b in pairs for x in (nn.Linear(a, b), nn.ReLU())))[:-1]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(784, 400, 200, 64, 10), (128, 784)),
    "wide": (lambda: mlp(784, 2048, 10), (128, 784)),
    "encoder": (Encoder, (32, 64, 256)),
}


def seconds(call: Callable[[], Any]) -> float:
    """Time of a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def compared(name: str, rounds: int) -> dict[str, Any]:
    """Ratios of steps of one model."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, shadow, unclipped = build(), build(), build()
    x, y = torch.randn(shape), torch.arange(shape[0]) % 10
    strategy = BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9]))
    guarantee = Guarantee(epsilon=2.0, delta=1e-5, noise_multiplier=1.0)
    scheme = FixedOrder(bins=1, epochs=2 * rounds + 4)
    factorization = Factorization(strategy, 1.0, scheme, PrefixSums(), guarantee)
    run = PrivateRun(factorization, len(x), 1.0, seed=0, allow_uncertified=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.attach(optimizer)
    dataset = torch.utils.data.TensorDataset(x, y)
    batches = (
        b for _ in range(len(run.sampler)) for b in run.loader(dataset, collate_fn=lambda _: (x, y))
    )
    plain = torch.optim.SGD(shadow.parameters(), lr=1e-3)
    sums = {p: torch.zeros_like(p) for p in unclipped.parameters()}

    def private_step() -> None:
        run.backward(model, loss_of, next(batches))
        optimizer.step()

    def plain_step() -> None:
        plain.zero_grad()
        loss_of(shadow, (x, y)).backward()
        plain.step()

    def clipping_step() -> None:
        clipping.add_clipped(unclipped, loss_of, (x, y), 1.0, sums.__getitem__)

    probed = [seconds(private_step) for _ in range(2)]
    for call in (plain_step, clipping_step):
        call()
    private = in_turn(lambda: seconds(private_step), lambda: seconds(plain_step), rounds)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "private": private,
        "clipping": in_turn(lambda: seconds(clipping_step), lambda: seconds(plain_step), rounds),
        "probed": min(probed) / private["cpu_seconds"][1],
    }


bench = Bench(
    __file__,
    __doc__,
    repeats=(20, "Steps of each kind."),
    models=choice(MODELS),
)
parser, main = bench.parser, bench.main


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """Ratios by model."""
    results = {name: compared(name, options.repeats) for name in options.models}
    return {**machine("torch"), "threads": torch.get_num_threads(), "models": results}


if __name__ == "__main__":
    raise SystemExit(main())
