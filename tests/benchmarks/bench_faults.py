"""One training run through many faults: each resume is bit-identical, or refused with its reason.

    mfopt bench faults --faults 20 --out artifacts/bench-faults.json

A tiny run is begun and copied. The copy that is left alone goes to its end. The other one meets
faults at random moments, one after the other: kill -9, SIGTERM, a full disk (a limit on the size of
files), and one flipped bit in a random place of its folder or of its data. After each it is
resumed. What was refused (exit code 1 or 2 and a line that says why) is mended by flipping the bit
back. A fault is survived if

- no traceback is printed, and a polite signal is answered by 143;
- every step that the run has recorded has the loss, to the last digit, of the run left alone;
- at the end the model, bit for bit, and both tables are those of the run left alone.

Exit code 1 if one is not.
"""

from __future__ import annotations

import collections
import csv
import hashlib
import importlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import bench_kill
from harness import Bench, Options

KINDS = ("kill -9", "SIGTERM", "disk full", "bit flip")
LIMITS = (0, 300, 4_000, 20_000)  # bytes of a file on the full disk
TRAIN = (
    "train --sampling poisson:probability=0.2,iterations={steps} --epsilon 8 --delta 1e-4 "
    "--data {data} --width 16 --layers 1 --heads 2 --length 16 --checkpoint-every 1 --keep 3 "
    "--evaluate-every 0 --no-tensorboard --output {folder}"
)


bench = Bench(__file__, __doc__, faults=(20, "Faults in all."), seed=(0, "Pin the randomness."))
parser, main = bench.parser, bench.main


def rows(folder: Path) -> list[dict[str, str]]:
    """What a run has recorded, without the clock's part; a row that is being written is not."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    with open(path, newline="") as stream:
        found = [row for row in csv.DictReader(stream) if all(row.values())]
    for row in found:
        row.pop("tokens_per_second", None)
    return found


def model_digest(folder: Path) -> str:
    """Of the exported weights."""
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


class Faults:
    """The run that meets them, of so many steps; ``rng`` chooses kinds, moments and bits."""

    def __init__(self, root: Path, steps: int, rng: random.Random) -> None:
        self.root, self.rng, self.steps = root, rng, steps
        self.data, self.folder, self.alone = root / "data", root / "run", root / "alone"
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.refusals: list[str] = []

    def command(self, folder: Path) -> str:
        """The words of the run in ``folder``."""
        return TRAIN.format(steps=self.steps, data=self.data, folder=folder)

    def begin(self) -> None:
        """Build the data; begin a run, copy it, and let the copy go to its end."""
        self.expect(bench_kill.Running(bench_kill.tiny_data(self.root, self.data)).wait())
        command = self.command(self.folder)
        self.expect(bench_kill.Running(f"{command} --steps 1 --quiet").wait())
        shutil.copytree(self.folder, self.alone)
        command = self.command(self.alone)
        self.expect(bench_kill.Running(f"{command} --resume --quiet").wait())
        self.reference = rows(self.alone)

    def expect(self, outcome: tuple[int, str]) -> None:
        """Stop where even the undisturbed does not work."""
        if outcome[0]:
            raise SystemExit(f"the run does not even work undisturbed: {outcome[1]}")

    def one(self, number: int, kind: str) -> None:
        """One fault and what comes of it."""
        command = f"{self.command(self.folder)} --resume"
        if kind == "disk full":
            limit = self.rng.choice(LIMITS)
            code, said = bench_kill.Running(f"{command} --quiet", limit=limit).wait()
            self.judge(number, f"{kind} ({limit} bytes)", code, said, {0, 1})
        elif kind == "bit flip":
            self.flipped(number, command)
        else:
            before = len(rows(self.folder))
            wanted = before + self.rng.randint(0, 2)
            running = bench_kill.Running(f"{command} --quiet")
            begun = time.monotonic()
            while (
                not os.waitid(os.P_PID, running._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                and len(rows(self.folder)) <= wanted
                and time.monotonic() - begun < 200
            ):
                time.sleep(0.002)
            time.sleep(self.rng.uniform(0, 0.05))
            sent = signal.SIGKILL if kind == "kill -9" else signal.SIGTERM
            os.kill(running._pid, sent)  # not waited for yet: the number is still its own
            code, said = running.wait()
            allowed = {0, -9} if sent == signal.SIGKILL else {0, 143}
            self.judge(number, kind, code, said, allowed)

    def flipped(self, number: int, command: str) -> None:
        """A flipped bit, a resume of a few steps, and the bit flipped back where it is refused."""
        places = [self.folder, self.folder / "checkpoints", self.data]
        place = places[self.rng.randrange(3)]
        files = [p for p in sorted(place.rglob("*")) if p.is_file() and p.stat().st_size]
        path = self.rng.choice(files)
        content = bytearray(path.read_bytes())
        at, bit = self.rng.randrange(len(content)), 1 << self.rng.randrange(8)
        content[at] ^= bit
        path.write_bytes(content)
        done = len(rows(self.folder))
        few = min(self.steps, done + 2)
        code, said = bench_kill.Running(f"{command} --steps {few}").wait()
        where = str(path.relative_to(self.root))
        self.judge(number, f"bit flip in {where}", code, said, {0, 1, 2}, kind="bit flip")
        if code and path.is_file():
            content[at] ^= bit
            path.write_bytes(content)

    def judge(
        self, number: int, name: str, code: int, said: str, allowed: set[int], kind: str = ""
    ) -> None:
        """Note the outcome, and what is wrong with it."""
        kind = kind or name.partition(" (")[0]
        lines = [line for line in said.replace("\r", "\n").split("\n") if line.strip()]
        last = lines[-1].replace(str(self.root), "ROOT") if lines else ""
        noted = " after setting a checkpoint aside" if "was set aside" in said else ""
        self.outcomes[f"{kind}: exit {code}{noted}"] += 1
        faults = []
        if code not in allowed:
            faults.append(f"exit {code}: {said[-400:]}")
        if "Traceback" in said:
            faults.append(f"traceback: {said[-1200:]}")
        if code in (1, 2):
            if not last.startswith("mfopt: "):
                faults.append(f"refused without a reason: {said[-300:]}")
            self.refusals.append(f"{name}: {last}")
        mine = rows(self.folder)
        if mine != self.reference[: len(mine)]:
            faults.append("recorded steps are not those of the run left alone")
        self.wrong += [f"{number} {name}: {fault}" for fault in faults]
        print(
            f"{number} {name}: exit {code}, {len(mine)} steps; {len(self.wrong)} wrong", flush=True
        )

    def end(self) -> None:
        """Go to the end, and compare with the run left alone."""
        code, said = bench_kill.Running(f"{self.command(self.folder)} --resume --quiet").wait()
        if code:
            self.wrong.append(f"the end is not reached: {said[-600:]}")
            return
        if rows(self.folder) != self.reference:
            self.wrong.append("the metrics are not those of the run left alone")
        if model_digest(self.folder) != model_digest(self.alone):
            self.wrong.append("the model is not that of the run left alone")


@bench.work
def measured(options: Options) -> tuple[dict[str, Any], bool]:
    """Run the faults; exit code 1 where one was not survived."""
    rng = random.Random(options.seed)
    root = bench_kill.scratch("faults")
    for module in ("mfopt_cli.main", "mfopt.training.execute", "mfopt.training.prepare"):
        importlib.import_module(module)
    begun = time.process_time()
    faults = Faults(root, 3 * options.faults, rng)
    faults.begin()
    # every kind equally often, in random order
    kinds = [KINDS[number % len(KINDS)] for number in range(options.faults)]
    rng.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        faults.one(number, kind)
    faults.end()
    shutil.rmtree(root)
    used = os.times()
    spent = time.process_time() - begun + used.children_user + used.children_system
    return {
        "command": bench.how,
        "faults": options.faults,
        "steps": faults.steps,
        "cpu_seconds": round(spent),
        "outcomes": dict(faults.outcomes),
        "refusals": faults.refusals,
        "wrong": [text.replace(str(root), "ROOT") for text in faults.wrong],
    }, bool(faults.wrong)
