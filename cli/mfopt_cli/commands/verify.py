"""``mfopt verify``: compute a privacy report's numbers again."""

from __future__ import annotations

from pathlib import Path

import click

from mfopt.errors import FailureError
from mfopt_cli import display, options
from mfopt_cli.live import Live
from mfopt_cli.options import option


@click.command(cls=options.Command)
@click.argument("report", type=options.PATH, callback=options.REPORT)
@option(
    "--factorization",
    click.Path(),
    "Factorization file with C, needed if C is too large for the report.",
)
@options.json_flag
@options.quiet
def command(report: Path, factorization: str | None, as_json: bool, quiet: bool) -> None:
    """Verify the privacy report REPORT of a training run, or that in the run's folder.

    What follows from the report's inputs (the mechanism, σ, ε, δ, the sizes of noise and signal) is
    computed again. The inputs themselves (clip norm, number of units, ...), which nothing in a
    report can show, are listed as told. Exit code 1 if a result differs.

    \b
    Example:
      mfopt verify run/privacy-report.json
    """
    from mfopt.training import verification

    facts = verification.read(report)
    with Live(not quiet and not as_json) as live:
        verification_result = verification.verify(facts, factorization=factorization, progress=live)
    if as_json:
        display.json_object(verification_result.describe())
    elif not quiet:
        rows = [
            (check.name, check.stated if check.holds else f"{check.stated}: {check.found}")
            for check in verification_result.checks
        ]
        display.table(f"{report}: computed here", rows)
        claims = [(name, str(value)) for name, value in verification_result.told.items()]
        display.table(f"{report}: told by the report", claims)
        for claim in verification_result.claims:
            display.print_text(f"not verifiable from this report: {claim}")
    if not verification_result.holds:
        wrong = ", ".join(check.name for check in verification_result.checks if not check.holds)
        raise FailureError(f"the report is wrong: {wrong}")
