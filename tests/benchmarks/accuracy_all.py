"""Test loss of mfopt and of its peers, each peer at its best size: the accuracy bench.

    python tests/benchmarks/accuracy_all.py --out artifacts/accuracy

trains 8 epochs × 32 iterations at δ = 1e-5 with paired seeds, in cells of (task, optimizer, ε),
in results.json. A mechanism that it has with equal noise and sampling is not trained again:
a stopped call resumes. ``summary.csv`` has each family at its size of the lowest mean loss, for
each cell, schedule and reading, with paired differences to DP-SGD; ``accuracy.png`` shows them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import harness  # noqa: F401 - finds the module of the manifest
import manifest
import numpy as np
import scipy.stats
from accuracy_runs import SCHEDULES, Mechanism, scores
from accuracy_text import TASKS as TEXTS

import mfopt
from mfopt import optimize, sampling
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import calibrate
from mfopt.experiments.runner import device
from mfopt.optimize import unamplified
from mfopt.sampling import Poisson
from mfopt.strategies import Identity

PAGE, TEXTS_PAGE = (Path("docs/benchmarks", name) for name in ("accuracy.md", "training.md"))
EPOCHS, BINS, DELTA = 8, 32, 1e-5
STEPS = EPOCHS * BINS
EPSILONS = (0.5, 2.0, 8.0)
SAMPLES = 2**14  # of an estimated σ
DEFAULT, FRESH = "mfopt", "mfopt, fresh bins"
BASELINE = "DP-SGD, Poisson"


class Cell(NamedTuple):
    """Runs that share seeds: every mechanism is compared within a cell."""

    task: str
    optimizer: str
    epsilon: float

    @property
    def stem(self):
        """Name of the cell's file."""
        return f"{self.task}-{self.optimizer}-eps{self.epsilon:g}"

    @property
    def schedules(self):
        """Names of the schedules that are trained with."""
        return TEXT_SCHEDULES if self.task in TEXTS else (*SCHEDULES,)


CELLS = [
    *(Cell(task, "sgd", epsilon) for epsilon in (2.0, 8.0, 0.5) for task in ("softmax", "mlp")),
    *(Cell(task, name, 2.0) for name in ("momentum", "adam") for task in ("softmax", "mlp")),
    Cell("cnn", "sgd", 2.0),
    *(Cell("least-squares", "sgd", epsilon) for epsilon in EPSILONS),
    *(Cell(task, "adam", epsilon) for epsilon in (8.0, 2.0) for task in TEXTS),
]
TITLES = {
    "softmax": "Softmax regression",
    "mlp": "MLP",
    "cnn": "CNN",
    "text-code": "Language model with Adam on source code",
    "text-docstrings": "Language model with Adam on docstrings",
    "text-reference": "Language model with Adam on a language reference",
}  # of the tables of the page
COLUMNS = {
    "constant": ("constant", "last"),
    "averaged": ("constant", "averaged"),
    "linear": ("linear", "last"),
    "cosine": ("cosine", "last"),
    "warm-up–stable–decay": ("warmup-stable-decay", "last"),
}
# language models take longer: fewer paired seeds and schedules
TEXT_SEEDS, TEXT_SCHEDULES = 5, ("constant", "linear")


# --- mechanisms ----------------------------------------------------------------------------------


def dpsgd(label, epsilon):
    """DP-SGD with Poisson sampling of expected batches as large as one of the bins."""
    return _exact(label, Identity(), Poisson(1 / BINS, STEPS), epsilon)


def interval(differences):
    """Mean of paired differences and half its 95% interval (Student)."""
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    quantile = scipy.stats.t.ppf(0.975, len(differences) - 1)
    return float(differences.mean()), float(error * quantile)


def _exact(label, strategy, scheme, epsilon):
    stated = mfopt.account(mfopt.Mechanism(scheme, strategy), epsilon=epsilon, delta=DELTA)
    return Mechanism.build(label, strategy, stated.noise_multiplier, scheme)


def _estimated(label, strategy, scheme, epsilon):
    loss = law(scheme).loss(strategy)
    estimate = calibrate(loss, epsilon, DELTA, samples=SAMPLES, seed=0)
    return Mechanism.build(label, strategy, estimate.value, scheme)


def _banded(bands):
    """Banded Toeplitz C with the lowest error in a fixed order, as for cyclic Poisson sampling."""
    order = sampling.FixedOrder(BINS, EPOCHS)
    return unamplified.optimize(order, optimize.Form("banded-toeplitz", bands)).strategy


def _cyclic(bands):
    scheme = sampling.CyclicPoisson(bands / BINS, bands, STEPS)
    return lambda label, epsilon: _exact(label, _banded(bands), scheme, epsilon)


def _b_min_sep(bands):
    scheme = sampling.BMinSep(BINS, EPOCHS, 3 * BINS // 4)  # better than half an epoch at ε = 2
    return lambda label, epsilon: _estimated(label, _banded(bands), scheme, epsilon)


def _near_exact(kind, buffers=4):
    """C with the lowest RMSE of prefix sums under balls-in-bins, not scaled in time."""
    scheme = sampling.BallsInBins(BINS, EPOCHS)

    def build(label, epsilon):
        question = optimize.Question(
            optimize.Target(epsilon, DELTA, seed=0),
            optimize.Form(kind, buffers=buffers),
            optimize.Objective("rmse"),
        )
        best = optimize.optimize(scheme, question)
        return _estimated(label, best.strategy, scheme, epsilon)

    return build


def _fresh(label, epsilon):
    return _exact(label, Identity(), sampling.FreshBins(BINS, EPOCHS), epsilon)


PEERS = {
    (BASELINE, ""): dpsgd,
    ("DP-SGD, fresh bins", ""): _fresh,
    **{("banded, cyclic Poisson", f"{b} bands"): _cyclic(b) for b in (2, 4, 8, 16)},
    **{("BLT, balls-in-bins", f"{k} buffers"): _near_exact("blt", k) for k in (2, 4)},
    ("Toeplitz, balls-in-bins", ""): _near_exact("toeplitz"),
    **{("banded, b-min-sep", f"{b} bands"): _b_min_sep(b) for b in (2, 4, 8, 16)},
}
# (family, schedule that C is for) -> options of `mfopt optimize`
OPTIONS = {
    (DEFAULT, ""): [],
    (FRESH, ""): ["--sampling", "fresh-bins"],
    **{
        (f"{family}, --schedule", schedule): [*words, "--schedule", schedule]
        for family, words in ((DEFAULT, []), (FRESH, ["--sampling", "fresh-bins"]))
        for schedule in ("constant", "averaged", "linear", "wsd")
    },
}
FAMILIES = [*dict.fromkeys(family for family, _ in (*OPTIONS, *PEERS))]
GIVEN = f"{FRESH}, --schedule"
SHOWN = [GIVEN, *(f for f in FAMILIES if f != BASELINE and "--schedule" not in f)]


def mechanisms(folder, epsilon, families):
    """(family, mechanism) of every size, from files in ``folder`` or built and kept there."""
    for (family, size), build in PEERS.items():
        if family in families:
            label = f"{family}, {size}" if size else family
            path = folder / f"{label.replace(', ', '-').replace(' ', '-')}-eps{epsilon:g}.npz"
            if not path.is_file():
                build(label, epsilon).save(path)
            yield family, Mechanism.read(label, path)
    for (family, schedule), words in OPTIONS.items():
        if family in families:
            label = f"{family} {schedule}" if schedule else family
            path = folder / f"{label.replace(', ', '-').replace(' ', '-')}-eps{epsilon:g}.npz"
            if not path.is_file():
                command = [str(Path(sys.executable).parent / "mfopt"), "optimize"]
                command += ["--epochs", f"{EPOCHS}", "--iters", f"{BINS}", "--eps", f"{epsilon}"]
                command += ["--delta", f"{DELTA}", "--seed", "1", "--quiet", "--out", str(path)]
                subprocess.run([*command, *words], check=True)
            yield family, Mechanism.load(path)._replace(label=label)


# --- cells ---------------------------------------------------------------------------------------


def _digest(mechanism, seeds):
    """Digest of what a mechanism's runs follow from."""
    noise = (mechanism.noise_multiplier * mechanism.inverse).astype(np.float32).tobytes()
    scheme = json.dumps(mechanism.scheme.describe(), sort_keys=True)
    return hashlib.sha256(noise + f"{scheme} {seeds}".encode()).hexdigest()[:16]


def train(cell, output, folder, families, seeds):
    """Bring the cell's results up to date."""
    seeds = min(seeds, TEXT_SEEDS) if cell.task in TEXTS else seeds
    path = output / "results.json"
    reports = json.loads(path.read_text()) if path.is_file() else {}
    report = reports.setdefault(cell.stem, {})
    begin = {}
    for family, mechanism in mechanisms(folder, cell.epsilon, families):
        digest = _digest(mechanism, seeds)
        if report.get(mechanism.label, {}).get("digest") == digest:
            continue
        started = time.perf_counter()
        results = scores(mechanism, cell.task, cell.optimizer, cell.schedules, seeds, begin)
        begin = {key: score.exponent for key, score in results.items()}
        report[mechanism.label] = {
            "family": family,
            "noise_multiplier": mechanism.noise_multiplier,
            "sampling": mechanism.scheme.describe(),
            "digest": digest,
            "seconds": round(time.perf_counter() - started, 1),
            "scores": [
                {
                    "schedule": schedule,
                    "reading": reading,
                    "rate": 2 ** (score.exponent / 2),
                    "loss": score.mean,
                    "standard_error": score.standard_error,
                    "error_rate": float(score.errors.mean()),
                    "losses": [float(f"{loss:.5g}") for loss in score.losses],
                }
                for (schedule, reading), score in results.items()
            ],
        }
        path.write_text(json.dumps(reports, separators=(",", ":")) + "\n")
        print(cell.stem, mechanism.label, *(f"{s.mean:.4f}" for s in results.values()), flush=True)


def summary(output):
    """Rows of every cell: each family at its best size, with differences to DP-SGD."""
    rows = []
    reports = json.loads((output / "results.json").read_text())
    for cell in CELLS:
        report = reports.get(cell.stem, {})
        best = {}
        for label, entry in report.items():
            for score in entry["scores"]:
                key = score["schedule"], score["reading"], entry["family"]
                if key not in best or score["loss"] < best[key]["loss"]:
                    best[key] = {**score, "mechanism": label}
        for (schedule, reading, family), score in best.items():
            baseline = best[schedule, reading, BASELINE]
            change, half = interval(np.subtract(score["losses"], baseline["losses"]))
            rows.append(
                {
                    **cell._asdict(),
                    "schedule": schedule,
                    "reading": reading,
                    "family": family,
                    "mechanism": score["mechanism"],
                    "rate": f"{score['rate']:.4g}",
                    "loss": f"{score['loss']:.5f}",
                    "standard_error": f"{score['standard_error']:.5f}",
                    "error_rate": f"{score['error_rate']:.4f}",
                    "difference_to_dpsgd": f"{change:.5f}",
                    "half_interval": f"{half:.5f}",
                    "change_percent": f"{100 * change / baseline['loss']:.2f}",
                    "half_interval_percent": f"{100 * half / baseline['loss']:.2f}",
                }
            )
    return rows


def plot(rows, path):
    """Change of test loss against DP-SGD, by ε: models in columns, schedules in rows."""
    import matplotlib.pyplot as plt

    colors = dict(zip(SHOWN, ["C6", "C3", "C0", "0.55", "C2", "C1", "C4", "C5"], strict=True))
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 6.2), sharey="row")
    titles = {"softmax": "softmax regression", "mlp": "MLP 64-32-10"}
    for line, schedule in zip(grid, ("constant", "linear"), strict=True):
        for axes, (task, title) in zip(line, titles.items(), strict=True):
            key = task, "sgd", schedule, "last"
            cell = [
                r for r in rows if (r["task"], r["optimizer"], r["schedule"], r["reading"]) == key
            ]
            for number, family in enumerate(SHOWN):
                points = {r["epsilon"]: r for r in cell if r["family"] == family}
                shift = 0.1 * (number - len(SHOWN) / 2 + 0.5)
                mine = family in (GIVEN, DEFAULT, FRESH)
                axes.errorbar(
                    [index + shift for index, eps in enumerate(EPSILONS) if eps in points],
                    [float(points[eps]["change_percent"]) for eps in EPSILONS if eps in points],
                    [
                        float(points[eps]["half_interval_percent"])
                        for eps in EPSILONS
                        if eps in points
                    ],
                    fmt="D" if mine else "o",
                    color=colors[family],
                    markersize=7 if mine else 5,
                    capsize=2,
                    label=family.replace("--schedule", "own schedule"),
                )
            losses = {r["epsilon"]: float(r["loss"]) for r in cell if r["family"] == BASELINE}
            axes.set_xticks(
                range(len(EPSILONS)),
                [f"ε = {eps:g}\nDP-SGD: {losses.get(eps, np.nan):.3f}" for eps in EPSILONS],
            )
            axes.set_xlim(-0.5, len(EPSILONS) - 0.5)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.grid(axis="y", alpha=0.3)
            axes.set_title(
                f"{title}, {schedule} rate" if schedule == "constant" else f"{title}, linear decay"
            )
        line[0].set_ylabel("test loss against DP-SGD [%]")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=140)


def with_tables(page, rows):
    """The page with the tables of its cells made again: losses, the lowest of a column in bold.

    A table follows the line that names its task and ε: with SGD, and language models with Adam.
    """
    for cell in CELLS:
        heading = f"{TITLES.get(cell.task)}, ε = {cell.epsilon:g}:"
        if cell.optimizer == ("adam" if cell.task in TEXTS else "sgd"):
            losses = {
                (row["family"], row["schedule"], row["reading"]): f"{float(row['loss']):.4f}"
                for row in rows
                if (row["task"], row["optimizer"], float(row["epsilon"])) == cell
            }
            columns = [name for name, key in COLUMNS.items() if (BASELINE, *key) in losses]
            lines = ["| " + " | ".join(("mechanism", *columns)) + " |"]
            lines.append("| --- " * (1 + len(columns)) + "|")
            for family in FAMILIES:
                entries = []
                for name in columns:
                    lowest = min(losses[other, *COLUMNS[name]] for other in FAMILIES)
                    loss = losses[family, *COLUMNS[name]]
                    shown = loss.removeprefix("0")
                    entries.append(f"**{shown}**" if loss == lowest else shown)
                name = family.replace("--schedule", "own schedule")
                lines.append("| " + " | ".join((name, *entries)) + " |")
            page = _with_table(page, heading, lines)
    return _with_table(page, "Of all cells:", [*_counts(rows)])


def _with_table(page, heading, lines):
    """The page with these lines as the table below a heading, where it has that."""
    return re.sub(f"(?<={re.escape(heading)}\n\n).*?(?=\n\n)", "\n".join(lines), page, flags=re.S)


def _counts(rows):
    """Lines of a table: each of mfopt's mechanisms against others, over all cells."""
    cells = {}
    for row in rows:
        index = tuple(row[k] for k in ("task", "optimizer", "epsilon", "schedule", "reading"))
        if row["reading"] == "last" or row["schedule"] == "constant":
            cells.setdefault(index, {})[row["family"]] = float(row["loss"])
    peers = [family for family in FAMILIES if not family.startswith("mfopt")]
    yield "| mechanism | cells below the best peer | against it | against DP-SGD, Poisson |"
    yield "| --- " * 4 + "|"
    for family in FAMILIES:
        if family in peers:
            continue
        losses = [
            (cell[family], min(map(cell.get, peers)), cell[BASELINE]) for cell in cells.values()
        ]
        below = sum(loss < best for loss, best, _ in losses)
        spans = []
        for index in (1, 2):
            changes = [100 * (loss[0] / loss[index] - 1) for loss in losses]
            spans.append(f"{min(changes):+.1f} to {max(changes):+.1f}%".replace("-", "−"))
        name = family.replace("--schedule", "own schedule")
        yield f"| {name} | {below} of {len(losses)} | {spans[0]} | {spans[1]} |"


def parser():
    """Options of the command."""
    words = argparse.ArgumentParser(
        prog="python tests/benchmarks/accuracy_all.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words.add_argument("--out", type=Path, default=Path("artifacts/accuracy"))
    words.add_argument("--mechanisms", type=Path, default=Path("build/accuracy"), metavar="FOLDER")
    words.add_argument("--seeds", type=int, default=16)
    words.add_argument(
        "--cells",
        default="",
        help="Train cells whose name has these letters only; 'none': summarize and plot.",
    )
    words.add_argument("--families", help="Train these, separated by ';'. [default: all]")
    return words


def main():
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.mechanisms.mkdir(parents=True, exist_ok=True)
    families = options.families.split(";") if options.families else FAMILIES
    for cell in CELLS:
        if options.cells in cell.stem:
            train(cell, options.out, options.mechanisms, families, options.seeds)
    rows = summary(options.out)
    with (options.out / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, options.out / "accuracy.png")
    if options.out == Path("artifacts/accuracy"):
        for page in (PAGE, TEXTS_PAGE):
            page.write_text(with_tables(page.read_text(), rows))
    if (options.out.parent / manifest.MANIFEST).is_file():
        reports = json.loads((options.out / "results.json").read_text())
        manifest.note(
            options.out.parent,
            options.out.name,
            [*options.out.iterdir()],
            how="python tests/benchmarks/accuracy_all.py --out artifacts/accuracy",
            seed=0,
            device=[device()],
            seconds=sum(
                entry["seconds"] for report in reports.values() for entry in report.values()
            ),
        )


if __name__ == "__main__":
    main()
