"""mfopt calibrate: σ of the same C for another target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mfopt import words
from mfopt_cli import answers, display, options
from mfopt_cli.live import COMPILING, Live


@click.command(name="calibrate", cls=options.Command)
@options.file_argument
@options.privacy
@options.certificate("Save C with the new σ.")
def command(
    path: Path,
    epsilon: float,
    delta: float,
    certify_samples: int | None,
    certificate: Any,
    seed: int | None,
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Smallest σ certified at (ε, δ) for the C of FILE. C itself stays as it is.

    \b
    Example:
      mfopt calibrate mfopt-blt-16x128-eps2.npz --eps 1 --delta 1e-6
    """
    import mfopt
    from mfopt.factorization import check_output
    from mfopt_cli import mechanisms

    started = time.perf_counter()
    found = mfopt.load(path)
    if out is not None:
        check_output(out, force=force, name="out")
    with Live(not quiet and not as_json, COMPILING) as live:
        new = mfopt.calibrate(
            found,
            epsilon=epsilon,
            delta=delta,
            samples=certify_samples,
            seed=seed,
            certificate=certificate,
            progress=live,
            command=mechanisms.typed(),
        )
    samples: Any = new.guarantee.details["samples"]
    answers.say_unused({"samples": certify_samples}, samples > 0)
    wanted = out
    if out is not None:
        out = mechanisms.keep(new, out, force=force)
    if as_json:
        seconds = time.perf_counter() - started
        where = None if out is None else str(out)
        display.json_object(
            {
                **mechanisms.summary(new),
                "path": where,
                "seconds": seconds,
                "estimated_noise_multiplier": new.provenance["estimated_noise_multiplier"],
            }
        )
    elif not quiet:
        display.table(
            str(path),
            [
                ("noise multiplier σ", f"{words.round_up(new.noise_multiplier, 6)}  (× clip norm)"),
                ("RMSE", f"{new.rmse:.4f}  (clip norms, per coordinate)"),
                ("guarantee", mechanisms.statement(new.guarantee)),
                ("saved", str(out) if out else "no (give --out)"),
            ],
        )
    return 0 if out == wanted else 1
