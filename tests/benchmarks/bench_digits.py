"""Accuracy on scikit-learn's digits: mfopt in Opacus against Opacus's own Poisson DP-SGD.

    mfopt bench digits --eps 2,8 --out artifacts/bench-digits.json

Same model, epochs, expected batch, clip norm and optimizer. A seed splits the images anew and
starts the model, for both methods alike. Rates are doubled and halved until the best of each
method and schedule (constant, or falling to 0 in the second half) has a worse one on each side.
The held-out images are halved: on either half a method stands with the rate and schedule that have
the best mean accuracy over ``--repeats`` seeds on the other. Differences are seed by seed.
Guarantees: add-remove of one image, δ = 1e-5; σ of DP-SGD by Opacus's PRV accountant, that of
mfopt from its certified factorization. Schedules are post-processing, and change no guarantee.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, Options, mean

RATES = (0.0625, 0.125, 0.25)  # to begin with
SCHEDULES = ("constant", "cooldown")
EPOCHS, BINS, DELTA, CLIP = 8, 32, 1e-5, 1.0
KEPT = Path(__file__).resolve().parents[2] / "artifacts" / "factorizations"


bench = Bench(
    __file__, __doc__, eps=([2.0, 8.0], "Values of ε; a list."), repeats=(5, "Seeds at each rate.")
)
parser, main = bench.parser, bench.main


def images(seed: int) -> tuple[Any, ...]:
    """(training set, one half of the others, the other half), each (x, y)."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, rest, y, labels = train_test_split(x / 16, y, test_size=0.2, random_state=seed)
    halves = [(rest[i::2], labels[i::2]) for i in range(2)]
    return tuple((torch.tensor(a).float(), torch.tensor(b)) for a, b in ((x, y), *halves))


@functools.cache
def factorization(epsilon: float) -> Any:
    """The certified time-scaled BLT for ε, from the artifacts."""
    import mfopt

    return mfopt.load(KEPT / f"blt-4-scaled-{EPOCHS}x{BINS}-eps{epsilon:g}.npz")


@functools.cache
def poisson_sigma(epsilon: float) -> float:
    """σ of DP-SGD with as many steps and the same expected batch."""
    from opacus.accountants.utils import get_noise_multiplier

    found: float = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=1 / BINS,
        steps=EPOCHS * BINS,
        accountant="prv",
    )
    return found


def trained(method: str, epsilon: float, rate: float, schedule: str, seed: int) -> list[float]:
    """Accuracy on both halves of the held-out images."""
    import opacus
    import torch

    from mfopt.torch import make_private

    torch.set_num_threads(1)  # the model is small
    train, *held_out = images(seed)
    data = torch.utils.data.TensorDataset(*train)
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if method == "mfopt":
        model, optimizer, loader = make_private(
            model, optimizer, data, factorization(epsilon), max_grad_norm=CLIP, seed=seed
        )
    else:
        model, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(data, batch_size=-(-len(data) // BINS)),
            noise_multiplier=poisson_sigma(epsilon),
            max_grad_norm=CLIP,
        )
        assert len(loader) == BINS
    steps = EPOCHS * BINS
    for epoch in range(EPOCHS):
        for t, (x, y) in enumerate(loader, epoch * BINS):
            left = 1.0 if schedule == "constant" else min(1.0, 2 * (1 - t / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate * left
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        return [float((model(x).argmax(1) == y).float().mean()) for x, y in held_out]


def swept(method: str, epsilon: float, schedule: str, seeds: range) -> dict[float, Any]:
    """{rate: accuracies (seeds, 2)}, with the best mean neither at the first nor the last rate."""
    found: dict[float, Any] = {}
    wanted = list(RATES)
    while wanted:
        for rate in wanted:
            runs = [trained(method, epsilon, rate, schedule, seed) for seed in seeds]
            found[rate] = np.array(runs)
        best = max(found, key=lambda rate: np.mean(found[rate]))
        wanted = [rate for rate in (best / 2, 2 * best) if rate not in found]
    return dict(sorted(found.items()))


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """Accuracy of both methods and their difference, for each ε."""
    warnings.simplefilter("ignore")  # of PyTorch and Opacus
    report: dict[str, Any] = {}
    seeds = range(options.repeats)
    for epsilon in options.eps:
        tests = {}
        for method in ("mfopt", "opacus"):
            found = {
                f"{schedule} {rate:g}": accuracy
                for schedule in SCHEDULES
                for rate, accuracy in swept(method, epsilon, schedule, seeds).items()
            }
            halves = {at: np.mean(each, axis=0) for at, each in found.items()}
            # on either half, the setting that is best on the other
            chosen = [max(halves, key=lambda at, h=half: halves[at][1 - h]) for half in (0, 1)]
            each = [found[setting][:, half] for half, setting in enumerate(chosen)]
            tests[method] = np.mean(each, axis=0)
            said = report[f"{method}, epsilon {epsilon:g}"] = {
                "chosen": chosen,
                "halves": {at: both.tolist() for at, both in halves.items()},
                "accuracy": tests[method].tolist(),
                **mean(tests[method]),
            }
            settings = " and ".join(dict.fromkeys(chosen))
            print(f"{method:<10} ε = {epsilon:g}: {_words(said)} with {settings}", flush=True)
        apart = tests["mfopt"] - tests["opacus"]
        said = report[f"difference, epsilon {epsilon:g}"] = {"accuracy": [*apart], **mean(apart)}
        print(f"difference ε = {epsilon:g}: {_words(said)}, seed by seed", flush=True)
        bench.keep(report)
    return report


def _words(said: dict[str, Any]) -> str:
    return f"{said['mean']:.1%} ± {said['standard_error']:.1%}"
