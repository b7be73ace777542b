"""mfopt bench: the benchmarks of the source tree."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from mfopt_cli import options


def _folder() -> Path | None:
    """tests/benchmarks of the working directory's tree, or of an editable install."""
    roots = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[3]]
    for root in roots:
        folder = root / "tests" / "benchmarks"
        if folder.is_dir() and (root / "mfopt").is_dir():
            return folder
    return None


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

    NAME is one of ablation, account, all, calls, certify, commands, defaults, devices, digits,
    draws, faults, full, fuzz, kill, mutants, noise, optima, optimize, schedules, seeds, settings,
    train.
    Ratios are measured within one run; a figure is worth what the machine's quiet was worth.

    \b
    Example:
      mfopt bench optimize --out artifacts/bench-optimize.json
    """
    folder = _folder()
    if folder is None:
        raise click.UsageError("benchmarks need the source tree: run inside a clone of mfopt")
    path = folder / f"bench_{name}.py"
    if not path.is_file():
        known = sorted(p.stem.removeprefix("bench_") for p in folder.glob("bench_*.py"))
        raise click.UsageError(f"no benchmark {name!r}; there are: {', '.join(known)}")
    sys.path.insert(0, str(folder))
    module = importlib.import_module(path.stem)
    return int(module.main(context.args) or 0)
