"""Frame of a self-contained HTML page: no script, no network, no other file."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence


def whole(title: str, parts: Sequence[str]) -> str:
    """The page of these sections."""
    return _PAGE.replace("TITLE", text(title)).replace("BODY", "\n".join(parts))


def section(title: str, body: str) -> str:
    """A heading and what stands below it, in HTML."""
    return f"<section><h2>{text(title)}</h2>{body}</section>"


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values."""
    lines = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows)
    return f"<dl>{lines}</dl>"


def text(value: str) -> str:
    """Escaped; what stands in backquotes becomes code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(value))


def sparkline(values: Sequence[float]) -> str:
    """A small line of numbers that are at least 0, as an element of a page."""
    count, top = max(1, len(values) - 1), max(*values, 0.0) or 1.0
    points = " ".join(
        f"{160 * index / count:.4g},{32 * (1 - value / top):.4g}"
        for index, value in enumerate(values)
    )
    return (
        "<svg width='160' height='32' viewBox='-1 -1 162 34'>"
        f"<polyline points='{points}' fill='none' stroke='currentColor'/></svg>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
dl { display: grid; grid-template-columns: minmax(9rem, 14rem) 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin: 1rem 0; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #ddd; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { width: 25%; min-width: 5rem; }
.bar span { display: block; height: .8rem; background: #0072B2; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; }
code { background: #f4f4f4; padding: 0 .2rem; }
@media (max-width: 36rem) {
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; }
  .bar, .sigma { display: none; }
  .figures { grid-template-columns: 1fr; }
}
</style>
</head>
<body>
<h1>TITLE</h1>
BODY
</body>
</html>
"""
