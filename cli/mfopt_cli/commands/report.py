"""mfopt report: one HTML page about a file."""

from __future__ import annotations

from pathlib import Path

import click

from mfopt_cli import display, options


@click.command(name="report", cls=options.Command)
@options.file_argument
@options.out("HTML file [default: FILE with .html].")
@options.force
@options.output
def command(path: Path, out: Path | None, force: bool, as_json: bool, quiet: bool) -> None:
    """Write one HTML page: guarantee, sampling, C, error, cost, alternatives, code.

    The page needs no network and no other file.

    \b
    Example:
      mfopt report mfopt-blt-16x128-eps2.npz --out report.html
    """
    from mfopt._runtime import _files
    from mfopt.experiments.report import page
    from mfopt.factorization import load

    found = load(path)
    target = out or path.with_suffix(".html")
    _files.check_output(target, force=force, name="out", suffixes=(".html", ".htm"))
    _files.write(target, page(found, path.name))
    if as_json:
        display.json_object({"path": str(target)})
    elif not quiet:
        display.print_text(f"saved {target}")
