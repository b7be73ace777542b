"""mfopt plot: coefficients, error per step and optimization history of a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from mfopt_cli import mechanisms, options

if TYPE_CHECKING:
    from mfopt.factorization import Factorization


@options.command("plot")
@options.file_argument
@options.output_path("Image file, .png, .svg or .pdf [default: FILE with .png].")
@options.force
@options.output
def command(arguments: SimpleNamespace) -> None:
    """Plot C and C⁻¹, the error of each step, and how the optimization went.

    The error of independent noise at the same (ε, δ), with Poisson sampling of the same mean
    batch where batches are random, is drawn beside it.

    \b
    Example:
      mfopt plot mfopt-blt-16x128-eps2.npz --out blt.png
    """

    def write(factorization: Factorization, path: Path) -> None:
        from mfopt.experiments.mechanism_plot import plot

        plot(factorization, path, mechanisms.without_correlation(factorization))

    mechanisms.draw(arguments, (".png", ".svg", ".pdf"), write)
