"""mfopt plot: coefficients, error per step and optimization history of a file."""

from __future__ import annotations

from types import SimpleNamespace

from mfopt_cli import mechanisms, options


@options.command("plot")
@options.file_argument
@options.output_path("Image file, .png, .svg or .pdf [default: FILE with .png].")
@options.force
@options.output
def command(arguments: SimpleNamespace) -> None:
    """Plot C and C⁻¹, the error of each step, and how the optimization went.

    \b
    Example:
      mfopt plot mfopt-blt-16x128-eps2.npz --out blt.png
    """
    from mfopt.experiments.mechanism_plot import plot

    mechanisms.draw(arguments, (".png", ".svg", ".pdf"), plot)
