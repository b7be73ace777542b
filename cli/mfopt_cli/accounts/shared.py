"""Options and steps that several subcommands of ``mfopt account`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt_cli import options, sweeps
from mfopt_cli.answers import Row, iterations
from mfopt_cli.options import MOST_GROUP, PATH, apply, option

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
    MOST_GROUP,
    default="1",
)
adjacency = option(
    "--adjacency",
    ("add-remove", "zero-out", "replace"),
    "Adjacency: add or remove a unit, zero out its contributions, or replace it.",
)
protects = apply(group_size, adjacency, options.unit)
results = apply(
    option("--plot", PATH, "Plot a sweep to this file."),
    options.force_of("plot"),
    options.output,
)
results_and_curve = apply(
    option(
        "--curve",
        bool,
        "Bounds of what an attacker can do: true positive rate at a false positive rate, advantage "
        "and μ, from statements at several ε at this σ. --plot draws them.",
    ),
    results,
)
verified = apply(
    options.certify_samples_as("samples", aliases=("--samples",)),
    options.seed(),
    option("--estimate", bool, "Compute an estimate, which proves nothing, instead of a bound."),
)


def strategy(kinds: tuple[str, ...], rule: str = "") -> options.Decorator:
    """``--strategy`` of a mechanism whose C is a file's or one of these kinds, by this rule."""
    text = f"{', '.join(map(_named, kinds))}, or a factorization FILE{rule}."
    return option("--strategy", str, text, default="identity")


def _named(kind: str) -> str:
    return f"{kind}:BANDS" if kind == "banded-sqrt" else kind


def matrix(text: str, kinds: tuple[str, ...]) -> tuple[Any, Any]:
    """(C, the factorization it is from or None) of ``--strategy``: a file or one of ``kinds``."""
    from mfopt import strategies

    name, _, number = text.partition(":")
    if name in kinds and name in ("identity", "sqrt") and not number:
        return (strategies.Identity() if name == "identity" else strategies.SquareRoot()), None
    if name in kinds and name == "banded-sqrt":
        if not number.isdecimal():
            raise _check.reject("strategy", text, "must be banded-sqrt:BANDS, as in banded-sqrt:8")
        return strategies.BandedSquareRoot(int(number)), None
    if not Path(text).is_file():
        named = ", ".join(map(_named, kinds))
        raise _check.reject("strategy", text, f"must be {named} or a factorization file")
    from mfopt.factorization import load

    found = load(text)
    return found.strategy, found


def own(row: Row, name: str, value: Any = None) -> Any:
    """Value of an option, which must be the file's ``value``, if it has one, or left out."""
    typed = row[name]
    if value is None:
        if typed is None:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.")
        return typed
    if typed is not None and typed != value:
        rule = f"the mechanism of the file has {value}"
        way_out = "Leave it out; `mfopt account run FILE` gives ε for the first part of a run."
        raise _check.reject(name, typed, rule, way_out)
    return value


def length_of(row: Row, file: Any) -> int:
    """n of a row, or of the file that C is from, which what was typed must be."""
    typed = any(row[name] is not None for name in ("iterations", "iters", "epochs"))
    n = iterations(row) if file is None or typed else int(file.iterations)
    if file is not None and n != file.iterations:
        rule = f"C of the file has {file.iterations} iterations"
        raise _check.reject("iterations", n, rule, "Leave it out.")
    return n


def bins_of(row: Row, file: Any) -> tuple[int, int]:
    """(bins, epochs) of a row, or of the file that C is from."""
    scheme = None if file is None else file.sampling
    if scheme is None or (hasattr(scheme, "bins") and hasattr(scheme, "epochs")):
        found = own(row, "iters", getattr(scheme, "bins", None))
        return found, own(row, "epochs", getattr(scheme, "epochs", None))
    # C for another kind of sampling: of as many iterations
    iters, epochs = own(row, "iters"), own(row, "epochs")
    if iters * epochs != scheme.iterations:
        rule = f"C of the file has {scheme.iterations} iterations"
        raise _check.reject("iters, epochs", (iters, epochs), rule)
    return iters, epochs
