"""What the defaults lose on five data sets: displacements, clip norms and schedules swept.

    mfopt bench rates --out artifacts/bench-rates.json

A GPT-2 of 234 thousand parameters is trained for 4 epochs × 8 steps under time-scaled BLT noise
(ε = 8, δ = 1e-5, add-remove, user level) from one start, at the default displacement (--noise-move)
times --factors, and beyond them until the best one is not the last; then with other clip norms at
the default and the best of these, and with other schedules at the best and twice that. Data: code
after pretraining on code (stdlib) and on docstrings (stdlib-code), docstrings of NumPy and SciPy
after those of the standard library, scikit-learn's digits as letters, and walks on a random graph
written as numbers, the last two without pretraining. Losses are on held-out users, means over
--repeats seeds. ``lost`` is (loss at the default - least loss) / (loss before - least loss), of
what can be learned, and ``lost_to`` the same against the least loss under each other setting
(negative: that is worse than the default).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, Options, choice, cpu, machine

from mfopt.experiments.runs.repeated import Runs
from mfopt.optimize import factorize
from mfopt.sampling import BallsInBins
from mfopt.training.config import TrainConfig
from mfopt.training.data.stdlib import docstrings_of


def docstrings() -> Iterator[tuple[str, str]]:
    """(module, docstring) of NumPy and SciPy, of at least eight words."""
    import scipy

    for path in (p for m in (np, scipy) for p in sorted(Path(m.__file__).parent.rglob("*.py"))):
        texts = () if "tests" in path.parts else docstrings_of(path.read_text("utf-8"))
        yield from ((str(path), text) for text in texts if len(text.split()) >= 8)


def digits() -> Iterator[tuple[str, str]]:
    """(user of three images, label and 64 pixels, each a letter from a to q)."""
    from sklearn.datasets import load_digits

    for number, (image, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        yield str(number // 3), f"{label} " + "".join(chr(97 + int(pixel)) for pixel in image)


def walks() -> Iterator[tuple[str, str]]:
    """(user, 48 numbers below 100): four walks each on one graph with three edges from a number."""
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 100, (100, 3))
    for number in range(2400):
        walk = [int(rng.integers(100))]
        while len(walk) < 48:
            walk.append(int(rng.choice(edges[walk[-1]])))
        yield str(number // 4), " ".join(map(str, walk))


MADE = {"docstrings": docstrings, "digits": digits, "walks": walks}

bench = Bench(
    __file__,
    __doc__,
    data=choice(("stdlib", "stdlib-code", *MADE)),
    factors=([0.5, 0.7, 1.0, 1.4, 2.0], "Displacements over the default; a list."),
    clip_norms=([0.25, 0.5, 2.0, 4.0], "Clip norms beside the default; a list."),
    schedules=(["linear", "cooldown"], "Schedules beside the default; a list."),
    pretrain_steps=(120, "Steps on public text first."),
    repeats=(2, "Seeds of batches and noise."),
)
parser, main = bench.parser, bench.main


def swept(data: str, folder: Path, options: Options) -> dict[str, Any]:
    """Losses on one data set by displacement, and what the default loses."""
    how: dict[str, Any] = {"data": data, "output": str(folder / data), "evaluate_records": 500}
    how |= {"length": 48, "records_per_user": 2, "trust": True}
    how["pretrain_steps"] = 0 if data in ("digits", "walks") else options.pretrain_steps
    if data in MADE:
        lines = [json.dumps({"user": user, "text": text}) + "\n" for user, text in MADE[data]()]
        (folder / f"{data}.jsonl").write_text("".join(lines))
        how["data"] = str(folder / f"{data}.jsonl")
    config = TrainConfig(factorization=str(folder / "blt.npz"), **how)
    default = config.move
    found: dict[str, dict[float, float]] = {}  # setting -> factor -> loss

    def tried(name: str, factors: set[float], **setting: Any) -> tuple[float, float]:
        """(least loss, its factor), with the loss before the first step kept in ``row``."""
        runs, losses = Runs(dataclasses.replace(config, **setting)), found.setdefault(name, {})
        while factors:
            for x in sorted(factors):
                at: dict[str, Any] = {"rate": 0.0, "move": x * default, "selection": "random"}
                each = [runs.run(seed=s, **at)[0]["held-out-users"] for s in range(options.repeats)]
                row["before"], losses[x] = each[0][0][1], float(np.mean([e[-1][1] for e in each]))
                print(
                    f"{data} {name} {x * default:g}: {losses[x]:.4f}", file=sys.stderr, flush=True
                )
            least, best = min((loss, x) for x, loss in losses.items())
            at_end = not setting and best in (min(losses), max(losses))
            factors = {best / 2, 2 * best} - {*losses} if at_end else set()
        return least, best

    row: dict[str, Any] = {"default": default}
    least, best = tried("defaults", {1.0, *options.factors})
    ends = {"defaults": (least, best)}
    for norm in options.clip_norms:
        name = f"clip norm {norm:g}"
        ends[name] = tried(name, {1.0, best}, clip_norm=norm)
    for name in options.schedules:
        ends[name] = tried(name, {best, 2 * best}, schedule=name)
    over, at_default = row["before"], found["defaults"][1.0]
    lost = {name: (at_default - end) / (over - end) for name, (end, _) in ends.items()}
    row |= {"best": best * default, "lost": lost["defaults"], "lost_to": lost}
    losses = {
        name: {f"{x * default:g}": each[x] for x in sorted(each)} for name, each in found.items()
    }
    return row | {"losses": losses}


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """Each data set's sweep."""
    report: dict[str, Any] = {"machine": machine("jax")}
    with tempfile.TemporaryDirectory() as name:
        made = factorize(BallsInBins(8, 4), 8.0, strategy="blt", seed=0, privacy_unit="user")
        made.save(Path(name) / "blt.npz")
        for data in options.data:
            report[data], seconds = cpu(swept, data, Path(name), options)
            report[data]["cpu_seconds"] = seconds
            bench.keep(report)
    return report
