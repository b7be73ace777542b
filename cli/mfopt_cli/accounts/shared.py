"""Options and steps that several subcommands of ``mfopt account`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt_cli import options, sweeps
from mfopt_cli.answers import Row
from mfopt_cli.options import apply

noise = sweeps.option(
    "--noise-multiplier",
    float,
    "Noise multiplier σ relative to the clip norm, for C as stored.",
    aliases=("--sigma",),
)
target = apply(
    sweeps.option("--eps", float, "ε: target, or where to evaluate δ."),
    sweeps.option("--delta", float, "δ of the guarantee."),
)
length = apply(
    sweeps.option("--epochs", int, "Passes over the data, E. [default: 1]"),
    sweeps.option("--iters", int, "Iterations per epoch, b. n = E·b."),
    sweeps.option("--iterations", int, "All iterations, n.", hidden=True, aliases=("--steps",)),
)
rounds = apply(
    sweeps.option("--epochs", int, "Passes over the users, E. [default: 1]"),
    sweeps.option("--iters", int, "Rounds per epoch, b. n = E·b rounds."),
    sweeps.option(
        "--iterations", int, "All rounds, T.", hidden=True, aliases=("--rounds", "--steps")
    ),
)
bins = apply(
    sweeps.option("--epochs", int, "Passes over the data, E. [default: those of a FILE]"),
    sweeps.option("--iters", int, "Iterations per epoch, b: the bins. [default: those of a FILE]"),
)
sampled = apply(
    sweeps.option(
        "--probability",
        float,
        "Sampling probability of a unit in each iteration. [default: 1/iters]",
        aliases=("--sample-rate",),
    ),
    sweeps.option(
        "--batch-size", float, "Expected batch size, with --population in place of --probability."
    ),
    sweeps.option("--population", int, "Number of units in the data set."),
)
by_rate = apply(noise, target, sampled, length)
group_size = sweeps.option(
    "--group-size",
    int,
    "Size of the group of units that is protected together.",
    options.MOST_GROUP,
    default="1",
    show_default=True,
)
adjacency = options.option(
    "--adjacency",
    type=click.Choice(["add-remove", "zero-out", "replace"]),
    default="add-remove",
    show_default=True,
    help="Adjacency: add or remove a unit, zero out its contributions, or replace it.",
)
protects = apply(group_size, adjacency, options.unit)
results = apply(
    options.option("--plot", type=click.Path(path_type=Path), help="Plot a sweep to this file."),
    options.force_of("plot"),
    options.output,
)
verified = apply(
    options.certify_samples_as("samples", aliases=("--samples",)),
    options.seed(),
    options.option(
        "--estimate",
        is_flag=True,
        help="Compute an estimate, which proves nothing, instead of a bound.",
    ),
)


def strategy(text: str) -> options.Decorator:
    """``--strategy`` of a mechanism with this C; ``text`` says which are taken."""
    return options.option("--strategy", default="identity", show_default=True, help=text)


def matrix(text: str, kinds: tuple[str, ...]) -> tuple[Any, Any]:
    """(C, the factorization it is from or None) of ``--strategy``.

    Args:
      text: identity, sqrt, banded-sqrt:BANDS or a factorization file.
      kinds: names that are taken besides files.
    """
    from mfopt import strategies

    name, _, number = text.partition(":")
    if name in kinds and name in ("identity", "sqrt") and not number:
        return (strategies.Identity() if name == "identity" else strategies.SquareRoot()), None
    if name in kinds and name == "banded-sqrt":
        if not number.isdecimal():
            raise _check.reject("strategy", text, "must be banded-sqrt:BANDS, as in banded-sqrt:8")
        return strategies.BandedSquareRoot(int(number)), None
    if not Path(text).is_file():
        named = [f"{kind}:BANDS" if kind == "banded-sqrt" else kind for kind in kinds]
        raise _check.reject("strategy", text, f"must be {', '.join(named)} or a factorization file")
    from mfopt.factorization import load

    found = load(text)
    return found.strategy, found


def own(row: Row, name: str, value: Any, file: Any) -> Any:
    """Value of an option, checked against the file's; the file's if it was not typed.

    Args:
      row: of the options.
      name: of one.
      value: the file's.
      file: the factorization, or None where there is none.
    """

    typed = row[name]
    if file is None:
        if typed is None:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.")
        return typed
    if typed is not None and typed != value:
        rule = f"the mechanism of the file has {value}"
        way_out = "Leave it out; `mfopt account run FILE` gives ε for the first part of a run."
        raise _check.reject(name, typed, rule, way_out)
    return value


def bins_of(row: Row, file: Any) -> tuple[int, int]:
    """(bins, epochs) of a row, or of the file that C is from."""

    scheme = None if file is None else file.sampling
    if scheme is None or (hasattr(scheme, "bins") and hasattr(scheme, "epochs")):
        found = own(row, "iters", getattr(scheme, "bins", None), scheme)
        return found, own(row, "epochs", getattr(scheme, "epochs", None), scheme)
    # C for another kind of sampling: of as many iterations
    iters, epochs = own(row, "iters", None, None), own(row, "epochs", None, None)
    if iters * epochs != scheme.iterations:
        raise _check.reject(
            "iters, epochs", (iters, epochs), f"C of the file has {scheme.iterations} iterations"
        )
    return iters, epochs
