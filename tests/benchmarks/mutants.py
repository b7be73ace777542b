"""Mutants of accept rules and bounds: each changes one line so that a reported ε or σ could fall.

    python tests/benchmarks/mutants.py [--only NAME]

Every mutant is written into a copy of the package, and the tests that should notice it are run
there; a mutant that passes them all survives. The exit code is the number of survivors. Lines are
chosen by hand, where a wrong sign, bound or share would show as too little noise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERIFY, MODEL = "mfopt/accounting/verify.py", "mfopt/accounting/model.py"
TILTED = "mfopt/accounting/monte_carlo/tilted.py"
BETTING = "mfopt/accounting/monte_carlo/betting.py"
TABLE = "mfopt/accounting/monte_carlo/composition.py"
ENGINE_TESTS, SAMPLING_TESTS = ("tests/test_verify.py",), ("tests/test_montecarlo.py",)

# name: (file, as it is, as the mutant has it, tests)
MUTANTS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "accept on remove alone": (
        VERIFY,
        "for bound in bounds)",
        "for bound in bounds[:1])",
        ENGINE_TESTS,
    ),
    "drop the spent β": (VERIFY, "bound + spent <= delta", "bound <= delta", ENGINE_TESTS),
    "a round charges nothing": (
        VERIFY,
        "number * delta * BETA_SHARE",
        "0.0 * delta * BETA_SHARE",
        ENGINE_TESTS,
    ),
    "δ reported without β": (
        VERIFY,
        "largest(found.both) + beta\n        if not total",
        "largest(found.both)\n        if not total",
        ENGINE_TESTS,
    ),
    "NaN is below": (
        VERIFY,
        "bound >= 0 and bound + spent <= delta",
        "not bound + spent > delta",
        ENGINE_TESTS,
    ),
    "the first bound is the largest": (
        MODEL,
        "max(bounds) if fair",
        "bounds[0] if fair",
        ENGINE_TESTS,
    ),
    "go on after a refusal": (
        VERIFY,
        "spent, delta):\n                break",
        "spent, delta):\n                continue",
        ENGINE_TESTS,
    ),
    "floor lost in the composed loss": (
        TABLE,
        "low * (1 - share) + high * share",
        "high",
        ENGINE_TESTS,
    ),
    "bound without log 1/β": (BETTING, "math.log(beta)", "0.0", SAMPLING_TESTS),
    "values above 1 pass": (TILTED, "value <= 1 + _ABOVE", "value <= jnp.inf", SAMPLING_TESTS),
    "chain without normalizers": (
        TILTED,
        "return log_normalizers - order * epsilon",
        "return -order * epsilon",
        SAMPLING_TESTS,
    ),
    "shift's ceiling with half the norm": (
        TILTED,
        "order * (1 + order) * top / 2 -",
        "order * (1 + order) * top / 4 -",
        SAMPLING_TESTS,
    ),
    "square of the direction": (
        TILTED,
        "square + 2 * products[rows, chosen]",
        "square + products[rows, chosen]",
        SAMPLING_TESTS,
    ),
}


def survives(name: str) -> bool:
    """Whether all tests pass with this mutant."""
    path, before, after, tests = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("mfopt", "tests", "cli", "pyproject.toml"):
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / part)
        text = (copy / path).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise SystemExit(f"{name}: {before!r} stands {text.count(before)} times in {path}")
        (copy / path).write_text(text.replace(before, after), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(copy / "cli")])}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            check=False,
        )
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MUTANTS, action="append")
    left = []
    for name in parser.parse_args().only or MUTANTS:
        alive = survives(name)
        print(f"{'SURVIVES' if alive else 'killed':9} {name}", flush=True)
        left += [name] * alive
    sys.exit(len(left))


if __name__ == "__main__":
    main()
