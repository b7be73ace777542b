"""``mfopt verify``: compute a privacy report's numbers again."""

from __future__ import annotations

import click

from mfopt.errors import FailureError
from mfopt_cli import display, options
from mfopt_cli.live import Live
from mfopt_cli.options import option


@click.command(cls=options.Command)
@click.argument("report", type=click.Path())
@option("--public-key", click.Path(), "PEM file of the key that must have signed the report.")
@option(
    "--factorization",
    click.Path(),
    "Factorization file with C, needed if C is too large for the report.",
)
@options.json_flag
@options.quiet
def command(
    report: str, public_key: str | None, factorization: str | None, as_json: bool, quiet: bool
) -> None:
    """Verify the privacy report REPORT of a training run against its settings.

    What follows from the report's inputs (the mechanism, σ, ε, δ, the sizes of noise and signal) is
    computed again. The inputs themselves (clip norm, number of units, ...), which nothing in a
    report can show, are listed as told. Exit code 1 if a result differs.

    \b
    Examples:
      mfopt verify run/privacy-report.json
      mfopt verify privacy-report.json --public-key lab.pub.pem
    """
    from mfopt.training import signing, verification

    facts = verification.read(report)
    key = signing.load_public(public_key) if public_key else None
    with Live(not quiet and not as_json) as live:
        found = verification.verify(
            facts, public_key=key, factorization=factorization, progress=live
        )
    if as_json:
        display.json_object(found.describe())
    elif not quiet:
        rows = [
            (check.name, f"{check.stated}" if check.holds else f"{check.stated}: {check.found}")
            for check in found.checks
        ]
        display.table(f"{report}: computed here", rows)
        told = [(name, str(value)) for name, value in found.told.items()]
        display.table(f"{report}: told by the report", told)
        display.print_text(
            f"signed by the key with fingerprint {found.signer}" if found.signer else "not signed"
        )
        for claim in found.claims:
            display.print_text(f"not verifiable from this report: {claim}")
    if not found.holds:
        wrong = ", ".join(check.name for check in found.checks if not check.holds)
        raise FailureError(f"the report is wrong: {wrong}")
