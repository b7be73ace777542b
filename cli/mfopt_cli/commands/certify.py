"""mfopt certify: prove the statement of a file, or another one, at its σ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt import words
from mfopt_cli import answers, display, options
from mfopt_cli.live import COMPILING, Live


@click.command(name="certify", cls=options.Command)
@options.file_argument
@options.eps("ε to prove [default: the file's].")
@options.delta("δ to prove [default: the file's].")
@options.certificate("Save the file with this statement.")
def command(
    path: Path,
    epsilon: float | None,
    delta: float | None,
    certify_samples: int | None,
    certificate: Any,
    seed: int | None,
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prove (ε, δ) for the C and σ of FILE with fresh randomness; exit code 1 if it fails.

    \b
    Example:
      mfopt certify mfopt-blt-16x128-eps2.npz --eps 2.1 --delta 1e-5
    """
    import mfopt
    from mfopt.factorization import check_output
    from mfopt_cli import mechanisms

    found = mfopt.load(path)
    if out is not None:
        check_output(out, force=force, name="out")
    with Live(not quiet and not as_json, COMPILING) as live:
        proved = mfopt.certify(
            found,
            epsilon=epsilon,
            delta=delta,
            samples=certify_samples,
            seed=seed,
            certificate=certificate,
            progress=live,
            command=mechanisms.typed(),
        )
    guarantee = proved.guarantee
    numbers: Any = guarantee.details
    answers.say_unused({"samples": certify_samples}, numbers["samples"] > 0)
    wanted = out
    if out is not None:
        out = mechanisms.keep(proved, out, force=force)
    if as_json:
        display.json_object({**guarantee.describe(), "certified": True, "path": str(out or path)})
    elif not quiet:
        display.table(
            str(path),
            [
                ("guarantee", mechanisms.statement(guarantee)),
                (
                    "noise multiplier σ",
                    f"{words.round_up(found.noise_multiplier, 6)}  (× clip norm)",
                ),
                ("bound, remove", f"{words.round_up(numbers['remove'])}"),
                ("bound, add", f"{words.round_up(numbers['add'])}"),
                (
                    "samples",
                    f"{numbers['samples']}, Rényi order s = {numbers['order']}"
                    if numbers["samples"]
                    else "none needed",
                ),
            ],
        )
    return 0 if out == wanted else 1
