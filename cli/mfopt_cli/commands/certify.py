"""mfopt certify: prove the statement of a file, or another one, at its σ."""

from __future__ import annotations

from types import SimpleNamespace

from mfopt import words
from mfopt_cli import display, mechanisms, options


@options.command("certify")
@options.file_argument
@options.eps("ε to prove [default: the file's].")
@options.delta("δ to prove [default: the file's].")
@options.certificate("Save the file with this statement.")
def command(arguments: SimpleNamespace) -> int:
    """Prove (ε, δ) for the C and σ of FILE with fresh randomness; exit code 1 if it fails.

    \b
    Example:
      mfopt certify mfopt-blt-16x128-eps2.npz --eps 2.1 --delta 1e-5
    """
    proved, saved = mechanisms.prove(arguments, "certify")
    stated = proved.guarantee
    if arguments.as_json:
        about = {"certified": True, "path": str(saved or arguments.path)}
        display.json_object(stated.describe() | about)
    elif not arguments.quiet:
        sigma = words.round_up(proved.noise_multiplier)
        rows = [
            ("guarantee", mechanisms.statement(stated)),
            ("noise multiplier σ", f"{sigma}  (× clip norm)"),
            ("method", stated.method),
        ]
        display.table(str(arguments.path), rows)
    return 0 if saved == arguments.out else 1
