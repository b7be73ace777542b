"""mfopt certify: prove the statement of a file, or another one, at its σ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt import words
from mfopt_cli import mechanisms, options


@click.command(name="certify", cls=options.Command)
@options.file_argument
@options.eps("ε to prove [default: the file's].")
@options.delta("δ to prove [default: the file's].")
@options.certificate("Save the file with this statement.")
def command(path: Path, **asked: Any) -> int:
    """Prove (ε, δ) for the C and σ of FILE with fresh randomness; exit code 1 if it fails.

    \b
    Example:
      mfopt certify mfopt-blt-16x128-eps2.npz --eps 2.1 --delta 1e-5
    """
    from mfopt import certify

    def described(proved: Any, saved: Path | None) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        stated = proved.guarantee
        numbers = stated.details
        drawn = f"{numbers['samples']}, Rényi order s = {numbers.get('order')}"
        sigma = words.round_up(proved.noise_multiplier, 6)
        facts = {**stated.describe(), "certified": True, "path": str(saved or path)}
        return facts, [
            ("guarantee", mechanisms.statement(stated)),
            ("noise multiplier σ", f"{sigma}  (× clip norm)"),
            ("bound, remove", f"{words.round_up(numbers['remove'])}"),
            ("bound, add", f"{words.round_up(numbers['add'])}"),
            ("samples", drawn if numbers["samples"] else "none needed"),
        ]

    return mechanisms.prove(path, certify, described, **asked)
