"""mfopt report: one HTML page about a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mfopt_cli import mechanisms, options


@options.command("report")
@options.file_argument
@options.out("HTML file [default: FILE with .html].")
@options.force
@options.output
def command(arguments: Any) -> None:
    """Write one HTML page: guarantee, sampling, C, error, cost, alternatives, code.

    The page needs no network and no other file.

    \b
    Example:
      mfopt report mfopt-blt-16x128-eps2.npz --out report.html
    """
    from mfopt._runtime import _files
    from mfopt.experiments.report import page

    def write(factorization: Any, target: Path) -> None:
        _files.write(target, page(factorization, arguments.path.name))

    mechanisms.draw(arguments, (".html", ".htm"), write)
