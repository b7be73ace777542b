"""Ends whole commands at random moments, in every way there is, and looks at what is left.

    python tests/benchmarks/bench_kill.py --moments 200 --out kills.json

Each moment runs `mfopt optimize`, `compare` or `train` at a tiny size in an empty folder and ends
it by kill -9, SIGTERM, SIGHUP, Ctrl-C or a full disk (a limit on the size of files), at a time
drawn uniformly from the time that the undisturbed command takes. Afterwards

- every file whose name is not hidden can be read whole: factorizations load, CSV and JSON parse;
- exit code 0 comes only with the complete output; a polite signal gives 130 or what the command
  itself would have given; a full disk gives 1;
- no traceback was printed;
- the same command, run again, ends well (with --resume for training that has begun).

Exit code 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mfopt
from mfopt import _files

MFOPT = [sys.executable, "-c", "from mfopt_cli.main import main; main()"]
COMMANDS = {
    "optimize": "optimize --epochs 2 --iters 4 --eps 2 --strategy banded-toeplitz --bands 2 "
    "--steps 12 --samples 64 --certify-samples 4096 --out {0}/one.npz --quiet",
    "compare": "compare --epochs 2 --iters 4 --eps 2 --include dpsgd,sqrt --bands 2 --jobs 1 "
    "--samples 256 --cache {0}/cache --out {0}/comparison --quiet",
    "train": "train --sampling poisson:probability=0.2,iterations=6 --epsilon 8 --delta 1e-4 "
    "--data {1} --width 16 --layers 1 --heads 2 --length 16 --checkpoint-every 2 "
    "--no-tensorboard --quiet --output {0}/run",
}
WAYS = ["kill -9", "SIGTERM", "SIGHUP", "Ctrl-C", "disk full"]
SIGNALS = {
    "kill -9": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGHUP": signal.SIGHUP,
    "Ctrl-C": signal.SIGINT,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--commands", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    root = Path(tempfile.mkdtemp(prefix="mfopt-kill-"))
    os.environ["MFOPT_DATA"] = str(root / "proofs")
    data = root / "data"
    if "train" in options.commands:
        code, said = run(tiny_data(root, data))
        if code:
            print(f"no data to train on: {said}")
            return 1
    lasts = {}
    for name in options.commands:
        begun = time.monotonic()
        code, said = run(COMMANDS[name].format(fresh(root), data))
        lasts[name] = time.monotonic() - begun
        if code:
            print(f"{name} does not even run undisturbed: {said}")
            return 1
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    for number in range(options.moments):
        name, way = options.commands[number % len(options.commands)], rng.choice(WAYS)
        faults += one(name, way, rng, fresh(root), data, lasts[name], counts)
        print(f"{number + 1}/{options.moments} {name}, {way}: {len(faults)} faults", flush=True)
    shutil.rmtree(root)
    facts = {
        "moments": options.moments,
        "seed": options.seed,
        "outcomes": dict(counts),
        "faults": faults,
    }
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    print(text)
    if options.out:
        _files.write(options.out, text)
    return 1 if faults else 0


def tiny_data(root: Path, data: Path) -> str:
    """The command that builds 40 users of three records each."""
    rows = root / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"user": f"u{user}", "text": f"words of user {user}, number {record}"})
            + "\n"
            for user in range(40)
            for record in range(3)
        )
    )
    return f"data build {data} --data {rows} --public {rows} --vocab-size 300 --quiet"


def fresh(root: Path) -> Path:
    folder = root / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def run(command: str, *, limit: int | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [*MFOPT, *shlex.split(command)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=None if limit is None else lambda: full_after(limit),
    )
    return done.returncode, done.stderr


def full_after(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def one(
    name: str,
    way: str,
    rng: random.Random,
    folder: Path,
    data: Path,
    lasts: float,
    counts: collections.Counter[str],
) -> list[str]:
    """What was wrong after one moment."""
    command = COMMANDS[name].format(folder, data)
    if way == "disk full":
        moment = float(rng.choice([0, 64, 512, 2000, 4000]))
        # nothing but what the command itself writes is to meet the limit
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        code, said = run(command, limit=int(moment))
        os.environ.pop("JAX_ENABLE_COMPILATION_CACHE")
        allowed = {0, 1, 2}
    else:
        moment = rng.uniform(0.0, lasts)
        process = subprocess.Popen(
            [*MFOPT, *shlex.split(command)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        time.sleep(moment)
        process.send_signal(SIGNALS[way])
        _, said = process.communicate(timeout=600)
        code = process.returncode
        # before the command has taken over the signals, the interpreter answers them
        allowed = {0, 130, -SIGNALS[way]}
    counts[f"{name}, {way}: exit {code}"] += 1
    where = f"{name}, {way} at {moment:.2f}: "
    faults = [where + text for text in wrong(folder)]
    early = way != "disk full" and moment < 3.0  # while Python itself is still starting
    if code not in allowed and not (early and code in (1, -SIGNALS[way])):
        faults.append(f"{where}exit code {code}: {said[-300:]}")
    if "Traceback" in said and not early:
        faults.append(f"{where}traceback: {said[-1500:]}")
    if code == 0 and not complete(name, folder):
        faults.append(f"{where}exit code 0 without the whole output")
    faults += [where + text for text in again(name, command, folder)]
    return faults


def wrong(folder: Path) -> list[str]:
    """Files that cannot be read whole."""
    found = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or "checkpoints" in path.parts or "cache" in path.parts:
            continue
        try:
            if path.suffix == ".npz":
                mfopt.load(path)
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix in (".png", ".svg", ".toml", ".txt"):
                assert path.stat().st_size > 0, "empty"
        except Exception as problem:
            found.append(f"{path.name} is damaged: {problem}")
    return found


def complete(name: str, folder: Path) -> bool:
    expected = {"optimize": "one.npz", "compare": "comparison.json", "train": "run/loss.png"}
    return (folder / expected[name]).is_file()


def again(name: str, command: str, folder: Path) -> list[str]:
    """The same command once more: it must end well, whatever was left."""
    if name == "train" and (folder / "run" / "checkpoints").is_dir():
        command += " --resume"
    elif name != "train":
        command += " --force"
    code, said = run(command)
    if code or not complete(name, folder):
        return [f"run again it gives exit code {code}: {said[-600:]}"]
    return wrong(folder)


if __name__ == "__main__":
    sys.exit(main())
