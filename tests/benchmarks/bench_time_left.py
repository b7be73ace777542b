"""The time left that `mfopt train` shows, over the time that was left.

    python tests/benchmarks/bench_time_left.py --out artifacts/bench-time-left.json

Time is the process's CPU time, so that other load on the machine counts little. Judged are steps of
pretraining, and of training with its losses on held-out parts and its checkpoints. Exit code 1
where what is shown is off by more than a factor of two.
"""

import tempfile
import time
from types import SimpleNamespace

from harness import Bench, machine
from mfopt_cli import live
from mfopt_cli.commands import train

SETTINGS = (
    "--epochs=2 --iters=32 --strategy=identity",
    "--epochs=4 --iters=32 --strategy=identity --evaluate-every=8 --checkpoint-every=16",
    "--epochs=2 --iters=32 --strategy=identity --algorithm=els",
    "--sampling=poisson:probability=0.05,iterations=100 --pretrain-steps=0",
)

bench = Bench(__file__, __doc__)


def shares(line):
    """Smallest and largest shown time left over the actual one in a run."""
    told = []

    class Recorded(live.Live):
        def __call__(self, event):
            super().__call__(event)
            clock = time.process_time()
            seconds = self._left(clock).removeprefix("about ").removesuffix(" left")
            told.append((event.stage, clock, float(seconds or 0)))

    train.Live = Recorded
    with tempfile.TemporaryDirectory() as folder:
        train.command.main([*line.split(), f"--out={folder}/run"], standalone_mode=False)
    ends = {stage: clock for stage, clock, _ in told}
    judged = [(seconds, ends[stage] - clock) for stage, clock, seconds in told if seconds]
    ratios = [round(shown / max(actual, 1e-9), 2) for shown, actual in judged]
    return [min(ratios), max(ratios)]


@bench.work
def measured(options):
    """Both ends for each run."""
    live.time = SimpleNamespace(perf_counter=time.process_time)
    live.words = SimpleNamespace(duration=str)
    rows = {line: shares(line) for line in SETTINGS}
    off = any(low < 0.5 or high > 2 for low, high in rows.values())
    return {"command": bench.how, **machine("jax"), "shown over actual": rows}, off


if __name__ == "__main__":
    bench.main()
