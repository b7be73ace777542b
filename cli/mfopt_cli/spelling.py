"""Letters that an encoding lacks are spelled, in place of an error or a question mark."""

from __future__ import annotations

import codecs
import sys

# for terminals and files whose encoding lacks the letter
_SPELLED = {
    "ε": "epsilon",
    "δ": "delta",
    "σ": "sigma",
    "β": "beta",
    "×": "x",
    "≤": "<=",
    "≥": ">=",
    "⁻": "^-",
    "¹": "1",
    "²": "2",
    "→": "->",
    "…": "...",
    "·": "*",
    "–": "-",
    "—": "-",
    "√": "sqrt",
    "‖": "|",
    "±": "+-",
    "│": "|",
    "━": "-",
    "╸": "-",
    "╺": "-",
    "─": "-",
    "∞": "inf",
}


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_SPELLED.get(letter, "?") for letter in lost), error.end


codecs.register_error("mfopt-spell", _spell)


def speak_plainly() -> None:
    """Make standard output and error spell what their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="mfopt-spell")
