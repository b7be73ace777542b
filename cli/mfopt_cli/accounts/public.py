"""mfopt account fixed-order, min-separation and filter: what is not amplified by sampling."""

from __future__ import annotations

from typing import Any

import click

from mfopt._runtime import _check
from mfopt_cli import answers, display, options, sweeps
from mfopt_cli.accounts import shared
from mfopt_cli.answers import Row, iterations

_KINDS = ("identity", "sqrt", "banded-sqrt")
_STRATEGIES = "identity, sqrt, banded-sqrt:BANDS, or a factorization FILE."


@click.command("fixed-order", cls=options.Command)
@shared.noise
@shared.target
@shared.bins
@shared.protects
@shared.strategy(_STRATEGIES)
@shared.results
def fixed_order(strategy: str, **arguments: Any) -> None:
    """Batches in an order fixed beforehand, the same in every epoch; any C, nothing amplified.

    \b
    Example:
      mfopt account fixed-order --epochs 4 --iters 256 --strategy sqrt --eps 2 --delta 1e-5
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import FixedOrder

    found, file = shared.matrix(strategy, _KINDS)

    def make(row: Row, of: Row) -> Any:
        return Mechanism(FixedOrder(*shared.bins_of(row, file)), found, row["group_size"], **of)

    answers.answer(arguments, make, f"fixed order, {strategy}")


@click.command("min-separation", cls=options.Command)
@shared.noise
@shared.target
@shared.length
@sweeps.option(
    "--separation", int, "Minimum number of iterations between two participations.", required=True
)
@sweeps.option(
    "--max-participations", int, "Maximum number of participations of a unit.", required=True
)
@shared.protects
@shared.strategy(_STRATEGIES)
@shared.results
def min_separation(strategy: str, **arguments: Any) -> None:
    """Any participation at least --separation iterations apart; any C, nothing amplified.

    \b
    Example:
      mfopt account min-separation --iters 2000 --separation 400 --max-participations 5 \\
          --strategy sqrt --eps 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import MinSeparation

    found, file = shared.matrix(strategy, _KINDS)

    def make(row: Row, of: Row) -> Any:
        n = iterations(row) if file is None else _length_of(row, file)
        scheme = MinSeparation(n, row["separation"], row["max_participations"])
        return Mechanism(scheme, found, row["group_size"], **of)

    answers.answer(arguments, make, f"min-separation, {strategy}")


def _length_of(row: Row, file: Any) -> int:
    """n of the file, which what was typed must be."""

    if row["iterations"] is None and row["iters"] is None and row["epochs"] is None:
        return int(file.iterations)
    typed = iterations(row)
    if typed != file.iterations:
        raise _check.reject(
            "iterations", typed, f"C of the file has {file.iterations} iterations", "Leave it out."
        )
    return typed


@click.command("filter", cls=options.Command)
@sweeps.option("--eps", float, "Target ε of either algorithm, user level.", required=True)
@sweeps.option("--delta", float, "Target δ of either algorithm.", required=True)
@shared.length
@sweeps.option("--population", int, "Number of users.", required=True)
@sweeps.option("--batch-size", float, "Expected users in a step of plain DP-SGD.", required=True)
@sweeps.option("--threshold", float, "τ over the clip norm: concentration of users' gradients.")
@shared.results
def concentration_filter(**arguments: Any) -> None:
    """User-wise DP-SGD with a concentration filter against plain DP-SGD: which adds less noise.

    Asi and Liu's filter takes all users in each step and helps where their averaged gradients lie
    within τ of each other. The noise is that of the mean gradient; the ratio is proportional to
    --threshold, and 1 at the break-even.

    \b
    Example:
      mfopt account filter --eps 4 --delta 1e-6 --iters 1000 --population 100000 \\
          --batch-size 1000 --threshold 0.01:1:x2
    """
    from mfopt.experiments import concentration_filter as filtered

    def compute(row: Row) -> list[Row]:
        found = filtered.compare(
            row["eps"], row["delta"], iterations(row), row["population"], row["batch_size"]
        )
        threshold = row["threshold"]
        return [
            {
                "noise_ratio": None if threshold is None else found.ratio(threshold),
                "break_even": found.break_even,
                "plain_multiplier": found.plain_multiplier,
                "filter_multiplier": found.filter_multiplier,
                "privacy_unit": "user",
                "adjacency": "add-remove",
                "protects": "(ε, δ) of the filter as published, not proven here",
            }
        ]

    drawn = "break_even" if arguments["threshold"] is None else "noise_ratio"
    answers.run(arguments, compute, "filter against plain DP-SGD", show=_compared, drawn=drawn)


def _compared(results: list[Row], swept: str | None, title: str) -> None:
    """Print what a filter and plain DP-SGD need."""
    names = [*([] if swept is None else [swept]), "noise_ratio", "break_even"]
    names += ["plain_multiplier", "filter_multiplier"]
    names = [name for name in names if results[0].get(name) is not None]
    display.print_text(f"{title}, noise of the mean gradient", style="bold")
    display.columns(names, [[f"{row[name]:.6g}" for name in names] for row in results])
