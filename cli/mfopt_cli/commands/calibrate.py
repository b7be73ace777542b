"""mfopt calibrate: σ of the same C for another target."""

from __future__ import annotations

import time
from types import SimpleNamespace

from mfopt import words
from mfopt_cli import display, mechanisms, options


@options.command("calibrate")
@options.file_argument
@options.privacy
@options.certificate("Save C with the new σ.")
def command(arguments: SimpleNamespace) -> int:
    """Smallest σ certified at (ε, δ) for the C of FILE. C itself stays as it is.

    \b
    Example:
      mfopt calibrate mfopt-blt-16x128-eps2.npz --eps 1 --delta 1e-6
    """
    started = time.perf_counter()
    new, saved = mechanisms.prove(arguments, "calibrate")
    if arguments.as_json:
        facts = {
            **mechanisms.summary(new),
            "path": saved and str(saved),
            "seconds": time.perf_counter() - started,
            "estimated_noise_multiplier": new.provenance.get("estimated_noise_multiplier"),
        }
        display.json_object(facts)
    elif not arguments.quiet:
        rows = [
            ("noise multiplier σ", f"{words.round_up(new.noise_multiplier)}  (× clip norm)"),
            ("RMSE", f"{new.rmse:.4f}  (clip norms, per coordinate)"),
            ("guarantee", mechanisms.statement(new.guarantee)),
            ("saved", str(saved) if saved else "no (give --out)"),
        ]
        display.table(str(arguments.path), rows)
    return 0 if saved == arguments.out else 1
