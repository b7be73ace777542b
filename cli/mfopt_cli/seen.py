"""What ``mfopt show`` prints of a file, kept for when the same file is shown again.

All of a file is checked before any of it is shown: C⁻¹ and the errors are computed again, in JAX,
which takes seconds to import. What came out is noted (:mod:`mfopt._notes`) under the SHA-256 of the
file's bytes, by the command that wrote the file or showed it first. The note is for showing alone:
whoever uses a mechanism loads it, and so checks it, each time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import click

from mfopt import _check, _notes, words
from mfopt._version import __version__
from mfopt_cli import display, mechanisms

_VIEW = "view"


def view(path: Path) -> dict[str, Any]:
    """``summary`` for ``--json`` and ``rows`` to print, of a file that was checked.

    Raises:
      UsageError: the file is missing.
      FailureError: it is damaged, of a newer schema, inconsistent, or not such a file.
    """
    path = _check.file("path", path)
    facts = _notes.read(_name(path))
    if facts is None or _VIEW not in facts:
        from mfopt.factorization import load

        name, found = _name(path), load(path)
        facts = {_VIEW: _view(found)}
        if _name(path) == name and _lasting():  # what was read is what is there
            _notes.write(name, facts)
    found_here = _notes.read(facts[_VIEW]["statement"]) is not None
    summary = {**facts[_VIEW]["summary"], "proved_here": found_here}
    return {**facts[_VIEW], "summary": summary}


def note(path: Path, factorization: Any) -> None:
    """Keep what will be shown of a file that was read and found to be ``factorization``."""
    if _lasting():
        _notes.write(_name(path), {_VIEW: _view(factorization)})


def keep(factorization: Any, path: Path, *, force: bool) -> Path:
    """Save a finished result, elsewhere if need be, and say so; the command then fails."""
    from mfopt.factorization import keep

    saved = keep(factorization, path, force=force, checked=note)
    if saved != path:
        click.echo(
            f"mfopt: {path} could not be written (it appeared meanwhile, or the disk is full): "
            f"the result is saved as {saved}",
            err=True,
        )
    return saved


def _lasting() -> bool:
    """Whether this version of mfopt says all of what a file is: a user's own kinds may change."""
    from mfopt import sampling, strategies

    kinds = (*strategies.registered().values(), *sampling.registered().values())
    return all(cls.__module__.startswith("mfopt.") for cls in kinds)


def _name(path: Path) -> str:
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{_VIEW}|{__version__}|{content}".encode()).hexdigest()


def _view(found: Any) -> dict[str, Any]:
    from mfopt.factorization import proofs

    sigma = f"{words.round_up(found.noise_multiplier, 6)}  (× clip norm, C as stored)"
    rows = [
        ("strategy", words.described(found.strategy.describe())),
        ("sampling", found.sampling.words()),
        ("workload", words.described(found.workload.describe())),
        ("noise multiplier σ", sigma),
        ("RMSE", f"{found.rmse:.6g}  (clip norms, per coordinate)"),
        ("max error", f"{found.max_error:.6g}"),
        ("guarantee", mechanisms.statement(found.guarantee)),
        ("proved here", ""),  # asked each time
        ("method", found.guarantee.method),
        ("digest", found.digest),
    ]
    for name, value in found.provenance.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        rows.append((name.replace("_", " "), shown))
    summary = display.plain(mechanisms.summary(found))
    return {"summary": summary, "rows": rows, "statement": proofs.statement(found)}
