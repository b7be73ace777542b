"""mfopt show: what a factorization file holds."""

from __future__ import annotations

from pathlib import Path

import click

from mfopt_cli import display, options, seen


@click.command(name="show", cls=options.Command)
@options.file_argument
@options.json_flag
def command(path: Path, as_json: bool) -> None:
    """Show the mechanism, its error and its guarantee.

    \b
    Example:
      mfopt show mfopt-blt-16x128-eps2.npz
    """
    found = seen.view(path)
    if as_json:
        display.json_object({**found["summary"], "path": str(path)})
        return
    proved = "yes" if found["summary"]["proved_here"] else f"no: run `mfopt certify {path}`"
    live = {"proved here": proved}
    display.table(str(path), [(name, live.get(name, value)) for name, value in found["rows"]])
