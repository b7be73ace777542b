"""Option bundles shared by the commands, and parsing of what several of them take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

KINDS = (
    "identity", "banded", "banded-toeplitz", "blt", "toeplitz", "dense",
    "sqrt", "banded-sqrt", "banded-inverse-sqrt", "tree",
)  # fmt: skip

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def apply(*decorators: Decorator) -> Decorator:
    """Several decorators as one, in reading order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


privacy = apply(
    click.option("--eps", "epsilon", type=float, required=True, help="Target ε > 0."),
    click.option("--delta", type=float, default=1e-5, show_default=True, help="Target δ."),
)

training_length = apply(
    click.option("--epochs", type=int, required=True, help="Passes over the data, E."),
    click.option(
        "--iters", type=int, required=True, help="Iterations per epoch = bins, b. n = E·b."
    ),
)

output = apply(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
    click.option("--quiet", is_flag=True, help="No progress and no table."),
)

certify_samples = click.option(
    "--certify-samples", type=int, default=None,
    help="iid samples of the certificate [default: 2^18 to 2^31/bins, until more would save less "
    "than 0.25% of σ].",
)  # fmt: skip

seed = click.option(
    "--seed", type=int, default=None,
    help="Pin the accountant's randomness (for reproduction; the certificate says so). "
    "Default: the operating system's entropy.",
)  # fmt: skip

force = click.option("--force", is_flag=True, help="Replace an existing output file.")

file_argument = click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
