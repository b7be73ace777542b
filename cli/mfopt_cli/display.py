"""What commands print: tables, one JSON object, a live progress line."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import click


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """A two-column table."""
    width = max(len(name) for name, _ in rows)
    click.echo(title)
    for name, value in rows:
        click.echo(f"  {name:<{width}}  {value}")


def json_object(values: dict[str, Any]) -> None:
    """One JSON object; numbers that are not finite become null, as JSON has none."""
    click.echo(json.dumps(_plain(values), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item"):
        return _plain(value.item())
    return value


class Live:
    """A progress line on standard error: rewritten on a terminal, sparse lines elsewhere."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._terminal = sys.stderr.isatty()
        self._last = 0.0
        self._open = False
        self.started = time.perf_counter()

    def update(self, text: str, *, now: bool = False) -> None:
        """Show ``text``; at most a few times a second unless ``now``."""
        pause = 0.1 if self._terminal else 2.0
        if not self._enabled or (not now and time.perf_counter() - self._last < pause):
            return
        self._last = time.perf_counter()
        elapsed = self._last - self.started
        if self._terminal:
            click.echo(f"\r\x1b[2K[{elapsed:5.1f} s] {text}", nl=False, err=True)
            self._open = True
        else:
            click.echo(f"[{elapsed:5.1f} s] {text}", err=True)

    def close(self) -> None:
        """End the line."""
        if self._open:
            click.echo("\r\x1b[2K", nl=False, err=True)
            self._open = False


def round_up(value: float, digits: int = 5) -> str:
    """``value`` with ``digits`` significant digits, rounded away from zero: for σ, ε, δ."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    shown = f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{digits}g}"
    return shown if float(shown) >= value else f"{float(shown) + unit:.{digits}g}"
