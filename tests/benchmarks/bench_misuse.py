"""Wrong loops that no check was written for, and right loops that none may refuse.

    python tests/benchmarks/bench_misuse.py --out artifacts/bench-misuse.json

Each wrong loop runs with a key of the operating system, up to twelve steps of about six records.
It is caught by an error of mfopt, or in JAX by noise that is NaN; what ends without one has passed.
What passes and is known to is documented: "What no check sees" of the sharp edges.
Right loops are drawn from a grid of frameworks, models, losses, batches, microbatches, precision
and restarts; each must end, with finite parameters. Exit code 1 if a wrong loop passes that is not
documented, or a right loop is refused.
"""

from __future__ import annotations

import functools
import logging
import random
import sys

from harness import Bench

bench = Bench(__file__, __doc__, right=(300, "Right loops."), seed=(0, "Pin the randomness."))


@bench.work
def measured(options):
    """The report, and whether enough was caught and nothing refused."""
    import torch
    from misuse_loops import DOCUMENTED, GRID, WRONG, outcome, right

    torch.set_num_threads(1)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    logging.getLogger("mfopt").setLevel(logging.CRITICAL)
    wrong = {}
    for name, loop in (WRONG | DOCUMENTED).items():
        wrong[name] = outcome(loop)
        print(f"{name}: {wrong[name]}", file=sys.stderr, flush=True)
    passed = [name for name, result in wrong.items() if result == "ended"]
    documented = [name for name in passed if name in DOCUMENTED]
    draws = random.Random(options.seed)
    refused = {}
    for number in range(options.right):
        cell = {name: draws.choice(values) for name, values in GRID.items()}
        if (result := outcome(functools.partial(right, cell))) != "ended":
            refused[str(cell)] = result
            print(f"{number}: {result}: {cell}", file=sys.stderr, flush=True)
    report = {
        "wrong_loops": len(wrong),
        "passed": sorted(set(passed) - set(documented)),
        "passed, documented": documented,
        "right_loops": options.right,
        "refused": refused,
        "wrong": wrong,
    }
    return report, int(passed != documented or bool(refused))


if __name__ == "__main__":
    bench.main()
