"""mfopt show: what a factorization file holds."""

from __future__ import annotations

from pathlib import Path

import click

from mfopt import words
from mfopt_cli import display, mechanisms, options


@click.command(name="show", cls=options.Command)
@options.file_argument
@options.json_flag
def command(path: Path, as_json: bool) -> None:
    """Show the mechanism, its error and its guarantee.

    \b
    Example:
      mfopt show mfopt-blt-16x128-eps2.npz
    """
    from mfopt.factorization import load

    factorization = load(path)
    if as_json:
        display.json_object({**mechanisms.summary(factorization), "path": str(path)})
        return
    sigma = f"{words.round_up(factorization.noise_multiplier)}  (× clip norm, C as stored)"
    rows = [
        ("strategy", words.described(factorization.strategy.describe())),
        ("sampling", factorization.sampling.words()),
        ("workload", words.described(factorization.workload.describe())),
        ("noise multiplier σ", sigma),
        ("RMSE", f"{factorization.rmse:.6g}  (clip norms, per coordinate)"),
        ("max error", f"{factorization.max_error:.6g}"),
        ("final-model error", mechanisms.final_model_error(factorization)),
        *mechanisms.above_floor(factorization),
        ("guarantee", mechanisms.statement(factorization.guarantee)),
        ("proved here", mechanisms.proved(factorization, path)),
        *([("advisory", warning)] if (warning := mechanisms.advisory(factorization)) else []),
        ("method", factorization.guarantee.method),
        ("digest", factorization.digest),
    ]
    for name, value in factorization.provenance.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        rows.append((name.replace("_", " "), shown))
    display.table(str(path), rows)
