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

    The error of independent noise at the same (ε, δ), with Poisson sampling of the same mean
    batch where batches are random, is drawn beside it.

    \b
    Example:
      mfopt plot mfopt-blt-16x128-eps2.npz --out blt.png
    """

    with mechanisms.picture(arguments, (".png", ".svg", ".pdf")) as (factorization, target):
        from mfopt.experiments.mechanism_plot import plot

        plot(factorization, target, mechanisms.without_correlation(factorization))
