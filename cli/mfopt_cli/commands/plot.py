"""mfopt plot: coefficients, error per step and optimization history of a file."""

from __future__ import annotations

from pathlib import Path

import click

from mfopt_cli import display, options


@click.command(name="plot", cls=options.Command)
@options.file_argument
@options.out("Image file, .png, .svg or .pdf [default: FILE with .png].")
@options.force
@options.output
def command(path: Path, out: Path | None, force: bool, as_json: bool, quiet: bool) -> None:
    """Plot C and C⁻¹, the error of each step, and how the optimization went.

    \b
    Example:
      mfopt plot mfopt-blt-16x128-eps2.npz --out blt.png
    """
    from mfopt._runtime._files import check_output
    from mfopt.experiments.mechanism_plot import plot
    from mfopt.factorization import load

    found = load(path)
    target = out or path.with_suffix(".png")
    check_output(target, force=force, name="out", suffixes=(".png", ".svg", ".pdf"))
    plot(found, target)
    if as_json:
        display.json_object({"path": str(target)})
    elif not quiet:
        display.print_text(f"saved {target}")
