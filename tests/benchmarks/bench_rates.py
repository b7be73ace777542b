"""What the default learning rate loses on text of installed packages, against a sweep of rates.

    python tests/benchmarks/bench_rates.py --out artifacts/bench-rates-packages.json

A GPT-2 of 234 thousand parameters, pretrained on docstrings of the standard library, is trained for
4 epochs × 8 steps under the noise of an optimized BLT (ε = 8, δ = 1e-5, add-remove, user level) at
the default displacement (--noise-move) times --factors, and beyond them until the best one is not
the last.
Users are modules, or packages. Losses are on held-out users, means over --repeats seeds. ``lost``
is (loss at the default - least loss) / (loss before - least loss), of what can be learned. Data
sets that are in the file are not swept again.
"""

import json
import re
import sys
import tempfile
from functools import partial
from importlib import metadata, util
from pathlib import Path

import numpy as np
from harness import Bench, choice, cpu, machine
from training_runs import Runs

from mfopt.optimize import Form, Question, Target, factorize
from mfopt.sampling import BallsInBins
from mfopt.training.config import TrainConfig
from mfopt.training.data.stdlib import docstrings_of, functions_of, walk

LEAST_WORDS = 8


def texts_of(split, modules, *packages):
    """Texts that ``split`` finds in so many modules of each package."""
    for name in packages:
        folder = Path(str(util.find_spec(name).origin)).parent
        files = [path for path in walk(folder, {"tests", "test"}) if path.suffix == ".py"]
        for path in files[:: max(1, len(files) // modules)]:
            texts = split(path.read_text("utf-8"))
            yield from ((str(path), text) for text in texts if len(text.split()) >= LEAST_WORDS)


def descriptions():
    """Paragraphs of the installed packages' own descriptions."""
    for package in metadata.distributions():
        text = package.metadata.get_payload() or package.metadata.get("Description", "")
        for paragraph in re.split(r"\n\s*\n", text):
            if len(paragraph.split()) >= LEAST_WORDS:
                yield package.metadata["Name"], paragraph


SOURCES = {
    "docstrings of PyTorch": partial(texts_of, docstrings_of, 600, "torch"),
    "docstrings of JAX and Flax": partial(texts_of, docstrings_of, 300, "jax", "flax", "optax"),
    "code of transformers": partial(texts_of, functions_of, 400, "transformers"),
    "code of SciPy and Matplotlib": partial(texts_of, functions_of, 200, "scipy", "matplotlib"),
    "descriptions of packages": descriptions,
}

bench = Bench(
    __file__,
    __doc__,
    data=choice(SOURCES),
    factors=([0.5, 0.7, 1.0, 1.4, 2.0], "Displacements over the default; a list."),
    pretrain_steps=(120, "Steps on public text first."),
    repeats=(2, "Seeds of batches and noise."),
)


def swept(data, folder, options):
    """Losses on one data set by displacement, and what the default loses."""
    lines = [json.dumps({"user": user, "text": text}) + "\n" for user, text in SOURCES[data]()]
    path = folder / "corpus.jsonl"
    path.write_text("".join(lines))
    runs = Runs(
        TrainConfig(
            factorization=str(folder / "blt.npz"),
            data=str(path),
            output=str(folder / data.replace(" ", "-")),
            evaluate_records=500,
            length=48,
            records_per_user=2,
            pretrain_steps=options.pretrain_steps,
        )
    )
    default, before = runs.prepared.config.move, float("nan")
    losses = {}
    factors = {1.0, *options.factors}
    while factors:
        for factor in sorted(factors):
            at = {"rate": 0.0, "move": factor * default, "selection": "random"}
            curves = [
                runs.run(seed=seed, **at)[0]["held-out-users"] for seed in range(options.repeats)
            ]
            before = curves[0][0][1]
            losses[factor] = float(np.mean([curve[-1][1] for curve in curves]))
            print(f"{data} {factor * default:g}: {losses[factor]:.4f}", file=sys.stderr, flush=True)
        least, best = min((loss, factor) for factor, loss in losses.items())
        at_end = best in (min(losses), max(losses))
        factors = {best / 2, 2 * best} - {*losses} if at_end else set()
    return {
        "users": runs.prepared.parts["train"].num_users,
        "records": len(lines),
        "default": default,
        "before": before,
        "best": best * default,
        "lost": (losses[1.0] - least) / (before - least),
        "losses": {f"{factor * default:g}": losses[factor] for factor in sorted(losses)},
    }


@bench.work
def measured(options):
    """Each data set's sweep."""
    report = bench.earlier({"machine": machine("jax")})
    with tempfile.TemporaryDirectory() as name:
        question = Question(Target(8.0, 1e-5, "user", seed=0), Form("blt"))
        account = factorize(BallsInBins(8, 4), question)
        account.save(Path(name) / "blt.npz")
        for data in options.data:
            if data not in report:
                report[data], seconds = cpu(swept, data, Path(name), options)
                report[data]["cpu_seconds"] = seconds
                bench.keep(report)
    return report


if __name__ == "__main__":
    bench.main()
