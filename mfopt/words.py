"""Numbers formatted for people; σ, ε and δ are never rounded towards less privacy."""

from __future__ import annotations

import math

from mfopt._runtime._types import JsonObject

# what each status of a guarantee means
STATUS = {
    "exact": "computed up to a rounding, always towards a larger ε",
    "certified": "proven, except with the failure probability below over the random numbers of the "
    "proof itself, which is included in δ",
    "bound": "proven with certainty; the true loss may be smaller",
    "estimate": "an estimate: it proves NOTHING. Run `mfopt certify` before training",
}


def round_up(value: float, digits: int = 6) -> str:
    """``value`` with ``digits`` significant digits, rounded away from zero: for σ, ε, δ.

    One below 1 that would be 1 (a δ) is written in full.

    >>> round_up(2.0000001), round_up(1e-5), round_up(0.9999999)
    ('2.00001', '1e-05', '0.9999999')
    """
    if value == 0 or not math.isfinite(value):
        return str(value)
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    shown = f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{digits}g}"
    shown = shown if float(shown) >= value else f"{float(shown) + unit:.{digits}g}"
    return repr(value) if value < 1 <= float(shown) else shown


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> [duration(s) for s in (0.004, 0.25, 12.34, 75, 4000, 200000)]
    ['4 ms', '250 ms', '12 s', '1 min 15 s', '1 h 6 min', '2 d 7 h']
    """
    if not math.isfinite(seconds):
        return "no end"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two(whole, "min", 60, "s", 1)
    if whole < 48 * 3600:
        return _two(whole, "h", 3600, "min", 60)
    return _two(whole, "d", 86400, "h", 3600)


def _two(seconds: int, large: str, long: int, small: str, short: int) -> str:
    units, remainder = divmod(seconds, long)
    return f"{units} {large}" + (f" {remainder // short} {small}" if remainder // short else "")


def size(count: float) -> str:
    """A number of bytes in binary units.

    >>> size(1000), size(3 * 2**20), size(5e15)
    ('1000 B', '3 MiB', '4.441 PiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if count < 1024 or unit == "PiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def against(value: float, reference: float) -> str:
    """Comparison of ``value`` with ``reference``, both errors: smaller is better.

    >>> against(0.75, 1.0), against(1.031, 1.0), against(1.0, 1.0), against(7.0, 1.0)
    ('25.0% less error', '3.1% more error', 'the same error', '7.0 times the error')
    >>> against(1e21, 1.0)
    'over a million times the error'
    """
    if not (math.isfinite(value) and math.isfinite(reference) and reference > 0):
        return "no comparison of the error"
    ratio = value / reference
    if ratio > 1e6:
        return "over a million times the error"
    if ratio >= 2:
        return f"{ratio:.{1 if ratio < 100 else 0}f} times the error"
    percent = round(100 * (1 - ratio), 1)
    if not percent:
        return "the same error"
    return f"{abs(percent):.1f}% {'less' if percent > 0 else 'more'} error"


def described(description: JsonObject) -> str:
    """A strategy's or workload's description in a line: kind, then its numbers.

    >>> described({"kind": "blt", "buffers": 4})
    'blt, buffers 4'
    >>> described({"kind": "time-scaled", "base": {"kind": "blt", "buffers": 4}})
    'blt, buffers 4, time-scaled'
    """
    if "base" in description:
        return f"{described(description['base'])}, {description['kind']}"
    facts = (f"{k.replace('_', ' ')} {v}" for k, v in description.items() if k != "kind")
    shortened = (text if len(text) < 60 else f"{text[:57]}..." for text in facts)
    return ", ".join([description["kind"], *shortened])
