"""mfopt statement: one page about a guarantee, in plain words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click

from mfopt_cli import display, options
from mfopt_cli.options import COUNT, option

if TYPE_CHECKING:
    from mfopt.experiments.statement import Statement

_SUFFIXES = {"markdown": (".md", ".txt"), "html": (".html", ".htm")}


@options.command("statement")
@click.argument(
    "path",
    metavar="FILE|RUN",
    type=options.PATH,
    callback=options.REPORT,
)
@option(
    "--format",
    ("markdown", "html"),
    "Form of the page.",
    "form",
)
@option("--population", COUNT, "Number of units in the data, N: δ must be far below 1/N.")
@options.output_path("File for the page [default: standard output].")
@options.force_of("out")
@options.json_flag
def command(arguments: SimpleNamespace) -> None:
    """Write a privacy statement for a reader who knows no differential privacy.

    FILE is a factorization file or a privacy report, RUN the folder of a training run. The page
    says whom the guarantee protects, what an attacker can do at most, who proved it, what is
    trusted and what is not covered.

    \b
    Example:
      mfopt statement FILE.npz --population 60000 --format html --out statement.html
    """
    from mfopt._runtime import _files

    target = arguments.out
    if target is not None:
        suffixes = _SUFFIXES[arguments.form]
        _files.check_output(target, force=arguments.force, name="out", suffixes=suffixes)
    statement = _statement(arguments.path, arguments.population)
    page = statement.html() if arguments.form == "html" else statement.markdown()
    if target is not None:
        _files.write(target, page, force=arguments.force)
    if arguments.as_json:
        display.json_object({**statement.facts, "page": page, "path": target and str(target)})
    else:
        display.print_text(page.rstrip("\n") if target is None else f"saved {target}")


def _statement(path: Path, units: int | None) -> Statement:
    """The statement about a factorization file or a privacy report."""
    from mfopt.experiments import statement
    from mfopt.factorization import load

    if path.suffix == ".json":
        from mfopt.training import verification

        return statement.of_report(verification.read(path), units)
    return statement.of_factorization(load(path), units)
