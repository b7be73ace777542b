"""mfopt calibrate: σ of the same C for another target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mfopt import words
from mfopt_cli import mechanisms, options


@click.command(name="calibrate", cls=options.Command)
@options.file_argument
@options.privacy
@options.certificate("Save C with the new σ.")
def command(path: Path, **asked: Any) -> int:
    """Smallest σ certified at (ε, δ) for the C of FILE. C itself stays as it is.

    \b
    Example:
      mfopt calibrate mfopt-blt-16x128-eps2.npz --eps 1 --delta 1e-6
    """
    from mfopt import calibrate

    started = time.perf_counter()

    def described(new: Any, saved: Path | None) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        facts = {
            **mechanisms.summary(new),
            "path": saved and str(saved),
            "seconds": time.perf_counter() - started,
            "estimated_noise_multiplier": new.provenance["estimated_noise_multiplier"],
        }
        return facts, [
            ("noise multiplier σ", f"{words.round_up(new.noise_multiplier, 6)}  (× clip norm)"),
            ("RMSE", f"{new.rmse:.4f}  (clip norms, per coordinate)"),
            ("guarantee", mechanisms.statement(new.guarantee)),
            ("saved", str(saved) if saved else "no (give --out)"),
        ]

    return mechanisms.prove(path, calibrate, described, **asked)
