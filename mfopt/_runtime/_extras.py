"""Packages that an extra of mfopt brings, and what is said where one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

EXTRAS = {
    **dict.fromkeys(
        ("flax", "orbax", "pyarrow", "safetensors", "tokenizers"),
        "train",
    ),
    **dict.fromkeys(("jax_privacy", "opacus", "torch"), "interop"),
    **dict.fromkeys(("accelerate", "transformers"), "huggingface"),
    "lightning": "lightning",
}


def missing(problem: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error with the way out, where the package belongs to an extra."""
    package = (problem.name or "").partition(".")[0]
    if package not in EXTRAS:
        return problem
    return ModuleNotFoundError(
        # mfopt is installed from its clone: no index has it
        f"this needs {package}, which is not installed: in the clone of mfopt, run "
        f"pip install '.[{EXTRAS[package]}]'",
        name=problem.name,
    )


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Context of imports from an extra: :func:`missing` explains one that is not there."""
    try:
        yield
    except ModuleNotFoundError as problem:
        raise missing(problem) from None
