"""mfopt report: one HTML page about a file."""

from __future__ import annotations

from types import SimpleNamespace

from mfopt_cli import mechanisms, options


@options.command("report")
@options.file_argument
@options.output_path("HTML file [default: FILE with .html].")
@options.force
@options.output
def command(arguments: SimpleNamespace) -> None:
    """Write one HTML page: guarantee, sampling, C, error, cost, alternatives, code.

    The page needs no network and no other file.

    \b
    Example:
      mfopt report mfopt-blt-16x128-eps2.npz --out report.html
    """

    with mechanisms.picture(arguments, (".html", ".htm")) as (factorization, target):
        from mfopt._runtime import _files
        from mfopt.experiments.report import page

        _files.write(target, page(factorization, arguments.path.name))
