"""Ends whole commands at random moments, in every way there is, and looks at what is left.

    python tests/benchmarks/bench_kill.py --moments 200 --out artifacts/bench-kill.json

Each moment runs `mfopt optimize`, `compare` or `train` at a tiny size in an empty folder and ends
it by kill -9, SIGTERM, SIGHUP, Ctrl-C or a full disk (a limit on the size of files), at a point
drawn uniformly from the work of the undisturbed command, in CPU time where the system tells that of
another process: what else the machine does moves no moment. Afterwards

- every file whose name is not hidden can be read whole, and so can the notes of what was proved;
- exit code 0 comes only with the complete output; a polite signal gives 128 + its number or 0; a
  full disk gives 0, 1 or 2; no traceback was printed;
- the same command, run again where anything at all was left, ends well (with --resume for training
  that has begun), and a comparison's table is then that of an undisturbed run, to the last byte.

A command begins as a copy of this process (``os.fork``), in which Python and JAX are imported. One
in eight is a process of its own; while Python itself is starting, a signal is answered by the
interpreter, so there only the files and the second run are judged.

The same command with the same ``--out`` goes on after the last moment, so ``--minutes`` can cut the
work in parts (which share a compilation cache where ``JAX_COMPILATION_CACHE_DIR`` names one). Exit
code 1 if any of this fails.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Bench, Options, choice

COMMANDS = {
    "optimize": "optimize --epochs 2 --iters 4 --eps 2 --strategy banded-toeplitz --bands 2 "
    "--no-time-scale --steps 8 --samples 64 --certify-samples 4096 "
    "--out {0}/one.npz --quiet",
    # with rows that are optimized: what was half done must not be taken for done
    "compare": "compare --epochs 2 --iters 4 --eps 2 --include dpsgd,banded --bands 2 --jobs 1 "
    "--samples 256 --cache {0}/cache --out {0}/comparison --quiet",
    "train": "train --sampling poisson:probability=0.2,iterations=6 --epsilon 8 --delta 1e-4 "
    "--data {1} --width 16 --layers 1 --heads 2 --length 16 --checkpoint-every 2 "
    "--no-tensorboard --quiet --output {0}/run",
}
SIGNALS = {
    "kill -9": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGHUP": signal.SIGHUP,
    "Ctrl-C": signal.SIGINT,
}
WAYS = [*SIGNALS, "disk full"]
LIMITS = (0, 64, 512, 2000, 4000, 20_000)  # bytes of a file on the full disk
COLD = 8  # one moment in so many is a process of its own
LONGEST = 1800.0  # seconds before a command counts as hanging

bench = Bench(
    __file__,
    __doc__,
    moments=(30, "Interrupts in all."),
    minutes=(600.0, "Time for them, after which to stop early."),
    commands=choice(COMMANDS),
    seed=(0, "Pin the randomness."),
)
parser, main = bench.parser, bench.main

_COLD = (
    "import resource, sys; limit = int(sys.argv.pop(1)); "
    "limit < 0 or resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)); "
    "from mfopt_cli.main import main; main()"
)


class Running:
    """A command at work.

    What it says goes through a pipe, which a full disk leaves alone and which holds 64 KiB.
    ``limit``: bytes that a file may have; ``cold``: a process of its own, not a copy of this one.
    """

    def __init__(self, command: str, *, limit: int | None = None, cold: bool = False) -> None:
        words, self._cold, self._begun = shlex.split(command), cold, time.monotonic()
        self._said, error = os.pipe()
        if cold:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COLD, str(-1 if limit is None else limit), *words],
                stdout=subprocess.DEVNULL,
                stderr=error,
            )
            self._pid = self._process.pid
        else:
            self._pid = copied(lambda: announced_steps(words), error, limit)
        os.close(error)

    def spent(self) -> float:
        """Seconds that it has worked so far; that it has run, where nobody tells."""
        try:
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic() - self._begun
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end_after(self, work: float, number: int) -> None:
        """Send a signal once it has worked so long, or at its end."""
        while self.spent() < work and time.monotonic() - self._begun < LONGEST:
            # a process that has ended and was not waited for is still there, and works no more
            if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.005)
        os.kill(self._pid, number)  # it was not waited for: the number is still its own

    def watched(self) -> float:
        """Its work in seconds, to its end."""
        work = 0.0
        while not os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            work = max(work, self.spent())
            time.sleep(0.02)
        return work

    def wait(self) -> tuple[int, str]:
        """(exit code, or minus the signal that ended it; what it said)."""
        begun = time.monotonic()
        while True:
            code = self._process.poll() if self._cold else ended(self._pid)
            if code is not None:
                return code, heard(self._said)
            if time.monotonic() - begun > LONGEST:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)


def ended(pid: int) -> int | None:
    actual, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if actual else None


def heard(pipe: int) -> str:
    """What came through, after its writer has ended."""
    with open(pipe, errors="replace") as stream:
        return stream.read()


def copied(function: Callable[[], int], error: int, limit: int | None = None) -> int:
    """The number of a copy of this process that runs ``function`` and ends with what it gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX: no device is in use yet, so no thread is lost
        pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        # whoever started this script may have had signals ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(error, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # what the streams were of, a file perhaps, is no longer what they write to
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        code = function()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def announced_steps(words: list[str]) -> int:
    """The exit code of a command."""
    from mfopt_cli.main import main

    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    sys.stderr.flush()
    return code if isinstance(code, int) else int(bool(code))


def scratch(name: str) -> Path:
    """A folder for everything, what is compiled and what is proved too."""
    root = Path(tempfile.mkdtemp(prefix=f"mfopt-{name}-"))
    os.environ["MFOPT_DATA"] = str(root / "proofs")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "compiled"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return root


@bench.work
def killed(options: Options) -> tuple[dict[str, Any], bool]:
    """Run the moments; exit code 1 where something was wrong after one of them."""
    started, root = time.perf_counter(), scratch("kill")
    nothing = {"command": bench.how, "seconds": 0.0, "moments": [], "faults": []}
    facts = bench.earlier(nothing, same="command")
    importing = time.process_time()
    for module in ("mfopt_cli.main", "mfopt.optimize", "mfopt.experiments.comparison"):
        importlib.import_module(module)
    if "train" in options.commands:
        importlib.import_module("mfopt.training.execute")
    importing = time.process_time() - importing

    data = root / "data"
    if "train" in options.commands:
        code, said = Running(tiny_data(root, data)).wait()
        if code:
            raise SystemExit(f"no data to train on: {said}")
    works = facts.setdefault("seconds_undisturbed", {})
    undisturbed: dict[str, str] = {}
    for name in options.commands:
        value = works.get(name)  # from an earlier part
        for _ in range(1 if value else 2):  # the first one compiles
            running = Running(COMMANDS[name].format(folder := fresh(root), data))
            works[name] = value or round(running.watched(), 2)
            code, said = running.wait()
            if code:
                raise SystemExit(f"{name} does not even run undisturbed: {said}")
        undisturbed[name] = table(folder)
    seconds, until = facts["seconds"], time.monotonic() + 60 * options.minutes
    while (number := len(facts["moments"])) < options.moments:
        if time.monotonic() > until:
            print(f"{number} of {options.moments} moments; the same command goes on")
            break
        rng = random.Random(f"{options.seed} {number}")
        name, variant = options.commands[number % len(options.commands)], rng.choice(WAYS)
        cold = rng.randrange(COLD) == 0
        whole = works[name] + (importing if cold else 0.0)
        row, faults = attempt(name, variant, cold, rng, root, data, whole, undisturbed[name])
        facts["moments"].append(row)
        # a report names no folder of the machine
        facts["faults"] += [re.sub(r"(?:/[\w.+-]+)+/", "", fault) for fault in faults]
        facts["seconds"] = round(seconds + time.perf_counter() - started, 1)
        print(f"{number + 1}/{options.moments} {row}: {len(facts['faults'])} faults", flush=True)
        write(bench.out, facts)
    shutil.rmtree(root)
    bench.begun = started - seconds
    return summed(facts), bool(facts["faults"])


def write(output: Path | None, facts: dict[str, Any]) -> None:
    """Keep what there is. (:meth:`Bench.keep` asks JAX for its device: a later copy hangs.)"""
    from mfopt._runtime import _files

    if output is not None:
        _files.write(output, json.dumps(summed(facts), indent=2, ensure_ascii=False) + "\n")


def summed(facts: dict[str, Any]) -> dict[str, Any]:
    """The report, with how often each command ended how."""
    outcomes: collections.Counter[str] = collections.Counter()
    for name, variant, _, code in facts["moments"]:
        outcomes[f"{name}, {variant}: exit {code}"] += 1
    return {**facts, "outcomes": dict(sorted(outcomes.items()))}


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
    # the same text is public here, which is refused anywhere else
    return (
        f"data build {data} --data {rows} --public {rows} --public-overlap 1 --vocab-size 300 "
        "--quiet"
    )


def fresh(root: Path) -> Path:
    folder = root / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def attempt(
    name: str,
    variant: str,
    cold: bool,
    rng: random.Random,
    root: Path,
    data: Path,
    whole: float,
    undisturbed: str,
) -> tuple[list[Any], list[str]]:
    """One moment: (command, way, share of the work or bytes of a file, exit code), what was wrong.

    ``whole``, ``undisturbed``: seconds of work and table of the undisturbed command.
    """
    folder = fresh(root)
    command = COMMANDS[name].format(folder, data)
    if variant == "disk full":
        position: float = rng.choice(LIMITS)
        code, said = Running(command, limit=int(position), cold=cold).wait()
        allowed = {0, 1, 2}
    else:
        position = round(rng.random(), 3)
        running = Running(command, cold=cold)
        running.end_after(position * whole, SIGNALS[variant])
        code, said = running.wait()
        allowed = {0, -9} if variant == "kill -9" else {0, 128 + SIGNALS[variant]}
    label = f"{name}, {variant} at {position:g}: "
    faults = []
    if code not in allowed and not cold:
        faults.append(f"{label}exit code {code}: {said[-300:]}")
    if "Traceback" in said and not (cold and variant != "disk full"):
        faults.append(f"{label}traceback: {said[-1500:]}")
    if code == 0 and not finished_run(name, folder):
        faults.append(f"{label}exit code 0 without the whole output")
    faults += [label + text for text in afterwards(name, command, root, folder)]
    if any(folder.iterdir()) and table(folder) != undisturbed:
        faults.append(f"{label}another table than undisturbed: {table(folder)}")
    return [name, variant + (", cold" if cold else ""), position, code], faults


def afterwards(name: str, command: str, root: Path, folder: Path) -> list[str]:
    """What is damaged, and what the same command says to it, run once more by another copy."""
    if not any(folder.iterdir()):
        return wrong(root / "proofs")  # those are JSON: no JAX is needed here
    report = root / "report.json"
    report.unlink(missing_ok=True)
    if name == "train" and (folder / "run" / "checkpoints").is_dir():
        command += " --resume"
    elif name != "train":
        command += " --force"

    def look() -> int:
        actual = wrong(folder) + wrong(root / "proofs")
        code = announced_steps(shlex.split(command))
        if code or not finished_run(name, folder):
            actual.append(f"run again it gives exit code {code}")
        actual += wrong(folder)
        report.write_text(json.dumps(actual))
        return 0

    said, error = os.pipe()
    pid = copied(look, error)
    os.close(error)
    os.waitpid(pid, 0)
    words = heard(said)[-600:]
    if not report.is_file():
        return [f"looking at it fails: {words}"]
    return [f"{text} ({words})" for text in json.loads(report.read_text())]


def wrong(folder: Path) -> list[str]:
    """Files that cannot be read whole."""
    import mfopt

    collected = []
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
            collected.append(f"{path.name} is damaged: {problem}")
    return collected


def table(folder: Path) -> str:
    """The table of a comparison, every number as it was written; nothing for other commands."""
    path = folder / "comparison.csv"
    return path.read_text() if path.is_file() else ""


def finished_run(name: str, folder: Path) -> Any:
    model = "run/model/config.json"
    expected = {"optimize": "one.npz", "compare": "comparison.json", "train": model}
    return (folder / expected[name]).is_file()


if __name__ == "__main__":
    raise SystemExit(main())
