"""Asks random small accounts, under every scheme, and reads what comes back.

    python tests/benchmarks/bench_accounts.py --accounts 2000 --seed 1

An account is a scheme of at most 12 iterations, a C, a group of at most 3 units, an adjacency, and
two of σ, ε and δ drawn over many orders of magnitude. It ends with a guarantee whose numbers are
finite (an ε or σ may be infinite), whose δ is a probability and whose lower end is not above the
answer; or with one line of UsageError or FailureError. Anything else is kept with its question, and
the exit code is 1. Only few shapes are drawn, since each is compiled.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections import Counter
from typing import Any

import numpy as np
from harness import Bench, Options

from mfopt.accounting import Mechanism, account
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import (
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    RandomPartition,
    TruncatedPoisson,
)
from mfopt.strategies import BandedSquareRoot, Identity, SquareRoot

QUESTIONS = ("noise_multiplier", "epsilon", "delta")
SCHEMES: dict[str, tuple[Any, ...]] = {
    "balls-in-bins": (BallsInBins(4, 2), BallsInBins(2, 3), BallsInBins(1, 2)),
    "fresh-bins": (FreshBins(4, 2), FreshBins(3, 3), FreshBins(4, 2, 2)),
    "b-min-sep": (BMinSep(4, 2, 2), BMinSep(4, 2, 1), BMinSep(3, 3, 2)),
    "random-partition": (RandomPartition(4, 2, 2), RandomPartition(5, 1, 2)),
    "fixed-order": (FixedOrder(4, 2), FixedOrder(1, 1)),
    "min-separation": (MinSeparation(8, 3, 2), MinSeparation(6, 1, 6)),
    "poisson": (Poisson(0.25, 8), Poisson(0.001, 12), Poisson(1.0, 3)),
    "cyclic-poisson": (CyclicPoisson(0.5, 2, 8), CyclicPoisson(0.01, 3, 12)),
    "fixed-batch": (FixedBatch(2, 8, 8), FixedBatch(8, 8, 2)),
    "truncated-poisson": (TruncatedPoisson(0.25, 4, 8, 8), TruncatedPoisson(0.5, 1, 2, 3)),
}
STRATEGIES = (Identity(), BandedSquareRoot(2), SquareRoot())
SECONDS = 60.0  # an account that takes longer is named on the way

bench = Bench(
    __file__, __doc__, accounts=(300, "How many accounts."), seed=(0, "Pin the randomness.")
)
parser, main = bench.parser, bench.main


def drawn(generator: np.random.Generator, kinds: tuple[str, ...] = tuple(SCHEMES)) -> Any:
    """(mechanism, two of three numbers and how to prove them) of a random account.

    Raises:
      UsageError: C does not fit the scheme.
    """
    schemes = SCHEMES[kinds[generator.integers(len(kinds))]]
    scheme = schemes[generator.integers(len(schemes))]
    strategy = STRATEGIES[generator.choice(len(STRATEGIES), p=(0.45, 0.45, 0.1))]
    group = int(generator.choice((1, 2, 3), p=(0.75, 0.15, 0.1)))
    adjacency = generator.choice(("add-remove", "zero-out", "replace"), p=(0.8, 0.1, 0.1))
    logs = {
        "noise_multiplier": generator.uniform(-1.5, 2.0),
        "epsilon": generator.uniform(-2.0, 1.5),
        "delta": generator.uniform(-12.0, -0.5),
    }
    sought = generator.choice(QUESTIONS, p=(0.3, 0.5, 0.2))
    question = {name: 10.0 ** float(log) for name, log in logs.items() if name != sought}
    effort: dict[str, Any] = {"seed": int(generator.integers(2**32))}
    if generator.random() < 0.15:
        effort["certificate"] = "deterministic"
    elif generator.random() < 0.1:
        effort["certify"] = False
    return Mechanism(scheme, strategy, group, "example", str(adjacency)), question | effort


def fault(mechanism: Mechanism, question: dict[str, Any]) -> tuple[str, str]:
    """("", how it ended) of an account; (what is wrong, its question) where something is."""
    arguments = f"account({mechanism}, {question})"
    try:
        answer = account(mechanism, **question)
    except (FailureError, UsageError) as refusal:
        fits = str(refusal) and "\n" not in str(refusal)
        return ("", type(refusal).__name__) if fits else (f"message {refusal!r}", arguments)
    except Exception:
        return traceback.format_exc(), arguments
    sigma, epsilon, delta = answer.noise_multiplier, answer.epsilon, answer.delta
    (sought,) = set(QUESTIONS) - set(question)
    low = answer.lower_bound or 0.0
    fits = (
        min(sigma, epsilon) >= 0
        and 0 <= delta <= 1
        and 0 <= answer.failure_probability <= delta
        and 0 <= low <= getattr(answer, sought)
        and all(math.isclose(getattr(answer, name), question[name]) for name in QUESTIONS[:3]
                if name in question)
    )  # fmt: skip
    return ("", answer.status) if fits else (f"answer {answer!r}", arguments)


@bench.work
def random_accounts(options: Options) -> tuple[dict[str, Any], int]:
    """How many accounts ended how, and what is wrong with the others."""
    generator = np.random.default_rng(options.seed)
    ends, faults = Counter[str](), []
    for number in range(options.accounts):
        try:
            mechanism, question = drawn(generator)
        except UsageError:
            ends["no mechanism"] += 1
            continue
        begun = time.perf_counter()
        wrong, said = fault(mechanism, question)
        seconds = time.perf_counter() - begun
        kind = mechanism.sampling.kind
        ends[f"{kind}: {'fault' if wrong else said}"] += 1
        if wrong:
            faults.append({"fault": wrong, "question": said})
            print(f"{number}: {said}\n{wrong}", file=sys.stderr, flush=True)
        elif seconds > SECONDS:
            print(f"{number}: {seconds:.0f} s: {mechanism}, {question}", file=sys.stderr)
    return {"accounts": options.accounts, "ends": dict(ends), "faults": faults}, int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
