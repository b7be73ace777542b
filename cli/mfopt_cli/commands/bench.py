"""mfopt bench: the benchmarks of the source tree."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from mfopt_cli import options


@click.command(
    name="bench",
    cls=options.Command,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,  # what stands behind NAME is the benchmark's own
    },
)
@click.argument("name")
@click.pass_context
def command(context: click.Context, name: str) -> int:
    """Run benchmark NAME with its own options.

    NAME is one of ablation, account, accounts, all, calls, digits, draws, fuzz, kill, mutants,
    optima, optimize, rates, schedules, seeds, settings, train.
    Compare ratios within one run; absolute times depend on the load of the machine.

    \b
    Example:
      mfopt bench optimize --out artifacts/bench-optimize.json
    """
    roots = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[3]]
    places = [root / "tests" / "benchmarks" for root in roots if (root / "mfopt").is_dir()]
    folder = next(filter(Path.is_dir, places), None)
    if folder is None:
        rule = "benchmarks are no part of an installed mfopt: they live in tests/benchmarks of its "
        rule += "source tree. Run this inside a clone"
        raise click.UsageError(rule)
    known = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    if name not in known:
        raise click.UsageError(f"no benchmark {name!r}; there are: {', '.join(known)}")
    sys.path.insert(0, str(folder))
    return int(importlib.import_module(f"bench_{name}").main(context.args) or 0)
