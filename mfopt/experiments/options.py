"""Fields of a study, and of its cells, that are options of its command, with their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfopt._runtime import _check

# whole numbers are at most 2^20, ten times what the papers take; parts of models, whose memory is
# known when they are made, at most
_MOST = {"width": 2**14, "hidden": 2**14, "layers": 2**10}


def option(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    kind: type[int] | type[float] | type[str] | type[bool] | type[Path] | None = None,
    choices: tuple[str, ...] = (),
    least: int = 1,
    rule: Callable[[str, Any], Any] | None = None,
) -> Any:
    """A field of a study that is an option of its command too.

    Args:
      default: also tells the kind: a number, a word, a tuple of numbers or words, a bool, a path.
      help: one line.
      name: of the option, where this is not the field's with dashes (``--eps`` for ``epsilons``).
      kind: of the value, or of the items of a tuple, where ``default`` is None or empty.
      choices: the only words allowed.
      least: whole number allowed.
      rule: (name, value) -> the value, or :class:`UsageError`; as the kind and the name have it
        where None: an ε, a δ, a seed, a whole number, a number of single precision above 0.
    """
    item = (default[0] if default else None) if isinstance(default, tuple) else default
    of = kind or (Path if isinstance(item, Path) else type(item))
    meta: dict[str, Any] = {"help": help, "name": name, "kind": of, "choices": choices}
    meta |= {"least": least, "rule": rule}
    return dataclasses.field(default=default, metadata={"option": meta})


def options(study: Any) -> list[dataclasses.Field[Any]]:
    """The fields that are options: a study's own, then those that it shares with others."""
    own = study.__annotations__
    found = [field for field in dataclasses.fields(study) if "option" in field.metadata]
    return sorted(found, key=lambda field: field.name not in own)


def option_of(field: dataclasses.Field[Any]) -> str:
    """The name of a field's option."""
    given: str | None = field.metadata["option"]["name"]
    return given or "--" + field.name.replace("_", "-")


def worded(value: Any) -> str:
    """A field's value as it is typed."""
    return ",".join(map(_word, value)) if isinstance(value, tuple) else _word(value)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def check(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse what an option cannot be, by its own rule or the one of its kind."""
    meta, name = field.metadata["option"], field.name
    several = isinstance(field.default, tuple)
    if several and (not value or len(set(value)) < len(value)):
        raise _check.reject(name, value, "must name at least one value, and none twice")
    for each in value if several else () if value is None else (value,):
        if meta["choices"] and each not in meta["choices"]:
            raise _check.reject(name, each, f"must be one of {', '.join(meta['choices'])}")
        if meta["rule"] is not None:
            meta["rule"](name, each)
        elif name in ("epsilon", "epsilons"):
            _check.epsilon(name, each)
        elif name == "delta":
            _check.probability(name, each)
        elif name == "seed" or (name == "seeds" and several):
            _check.pinned(name, each)
        elif meta["kind"] is int:
            most = _MOST.get(name, 2**20)
            _check.integer(name, each, at_least=meta["least"], at_most=most)
        elif meta["kind"] is float:
            _check.single(name, each)


def from_0_to_1(name: str, value: Any) -> float:
    """The rule of a share that may be 0 or 1."""
    return _check.probability(name, value, closed=True)
