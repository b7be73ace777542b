"""mfopt account for schemes with bins, a separation or a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from mfopt._runtime import _check
from mfopt.sampling import BallsInBins, BMinSep, FixedOrder, FreshBins, MinSeparation
from mfopt_cli import answers, options, sweeps
from mfopt_cli.accounts import shared
from mfopt_cli.answers import Row
from mfopt_cli.options import apply, option

_ANY = ("identity", "sqrt", "banded-sqrt")
_BANDED = ("identity", "banded-sqrt")
_binned = apply(
    shared.noise,
    shared.target,
    shared.bins,
    shared.protects,
    shared.verified,
    options.certificate_kind,
    shared.results_and_curve,
)


@click.command("balls-in-bins", cls=options.Command)
@_binned
@shared.strategy(_ANY)
@option(
    "--also",
    str,
    "Another mechanism on the same data, to compose with: pure:ε, approximate:ε:δ or "
    "gaussian:σ (sensitivity 1). Repeatable.",
    metavar="MECHANISM",
    multiple=True,
)
def balls_in_bins(strategy: str, also: tuple[str, ...], **arguments: Any) -> None:
    """Any C >= 0 with balls-in-bins batching; exact for C = I, certified by sampling otherwise.

    \b
    Example:
      mfopt account balls-in-bins --epochs 16 --iters 128 --eps 2 --delta 1e-5
    """
    others = [_other(text) for text in also]

    def composed(mechanism: Any, row: Row, **effort: Any) -> list[Row]:
        return [_composed(mechanism, others, row, **effort).describe()]

    title = ", and ".join([f"balls-in-bins, {strategy}", *also])
    analyse = composed if others else answers.analysed
    _answer(BallsInBins, shared.matrix(strategy, _ANY), title, arguments, analyse=analyse)


@click.command("fresh-bins", cls=options.Command)
@_binned
@option(
    "--reassign-every",
    sweeps.Sweep(int),
    "Epochs between two assignments. [default: 1, or that of a FILE]",
    "rethrow",
    aliases=("--rethrow",),
)
@shared.strategy(_BANDED, "; at most --iters bands")
def fresh_bins(strategy: str, **arguments: Any) -> None:
    """Units in a new random batch in each epoch; any banded C >= 0, certified by sampling.

    \b
    Example:
      mfopt account fresh-bins --epochs 16 --iters 128 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    matrix = shared.matrix(strategy, _BANDED)
    _answer(FreshBins, matrix, f"fresh-bins, {strategy}", arguments, ("rethrow", 1))


_separated = apply(
    _binned,
    sweeps.option(
        "--separation",
        int,
        "Minimum number of iterations between two participations. [default: that of a FILE]",
    ),
    shared.strategy(_BANDED, "; up to --separation bands"),
)


@click.command("b-min-sep", cls=options.Command)
@_separated
def b_min_sep(strategy: str, **arguments: Any) -> None:
    """Units by chance, resting after each participation; any banded C >= 0, certified by sampling.

    An available unit takes part with probability 1/(iters − separation + 1), so that each iteration
    has the expected batch of one in --iters bins. The start is stationary.

    \b
    Example:
      mfopt account b-min-sep --epochs 16 --iters 128 --separation 64 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    matrix = shared.matrix(strategy, _BANDED)
    _answer(BMinSep, matrix, f"b-min-sep, {strategy}", arguments, ("separation", None))


@click.command("fixed-order", cls=options.Command)
@shared.noise
@shared.target
@shared.bins
@shared.protects
@shared.strategy(_ANY)
@shared.results_and_curve
def fixed_order(strategy: str, **arguments: Any) -> None:
    """Batches in an order fixed beforehand, the same in every epoch; any C, nothing amplified.

    \b
    Example:
      mfopt account fixed-order --epochs 4 --iters 256 --strategy sqrt --eps 2 --delta 1e-5
    """
    _answer(FixedOrder, shared.matrix(strategy, _ANY), f"fixed order, {strategy}", arguments)


def _answer(
    kind: Any,
    matrix: tuple[Any, Any],
    title: str,
    arguments: Row,
    extra: tuple[str, int | None] | None = None,
    *,
    analyse: Callable[..., list[Row]] = answers.analysed,
) -> None:
    """Answer for a scheme of bins and epochs, and maybe of one more number.

    Args:
      kind: class of the scheme.
      matrix: C, and the file that it is from or None.
      title: of the answer.
      arguments: what was typed.
      extra: option of the third number, and its default; a file's own comes first.
      analyse: as for :func:`.answers.answer`.
    """
    strategy, file = matrix

    def scheme(row: Row) -> Any:
        sizes = shared.bins_of(row, file)
        if extra is None:
            return kind(*sizes)
        name, default = extra
        stated = None if file is None else getattr(file.sampling, name, None)
        if default is not None and stated is None and row[name] is None:
            return kind(*sizes, default)
        return kind(*sizes, shared.own(row, name, stated))

    answers.answer(arguments, scheme, title, strategy, analyse)


def _other(text: str) -> Any:
    """The mechanism of ``--also``."""
    from mfopt.accounting.monte_carlo import composition

    kinds: dict[tuple[str, int], Callable[..., Any]] = {
        ("pure", 1): composition.pure,
        ("approximate", 2): composition.approximate,
        ("gaussian", 1): composition.gaussian,
    }
    name, *numbers = text.split(":")
    try:
        return kinds[name, len(numbers)](*map(float, numbers))
    except (KeyError, ValueError) as problem:
        if isinstance(problem, _check.UsageError):
            raise
        rule = "must be pure:EPS, approximate:EPS:DELTA or gaussian:SIGMA"
        raise _check.reject("also", text, rule) from None


def _composed(mechanism: Any, others: list[Any], row: Row, **more: Any) -> Any:
    """Guarantee of a mechanism composed with the others on the same data."""
    from mfopt.accounting.loss_distribution import Composition
    from mfopt.accounting.monte_carlo import composition

    if "certificate" in more:
        raise click.UsageError("--also has no deterministic certificate: remove one of the two")
    other = Composition(tuple(part for one in others for part in one.parts))
    if row["delta"] is not None:
        _check_alone(other, row["eps"], row["delta"])
    found = composition.analysis(mechanism, other, **more)
    if row["eps"] is None:
        return found.epsilon(row["noise_multiplier"], row["delta"])
    if row["delta"] is None:
        return found.delta(row["noise_multiplier"], row["eps"])
    return found.noise_multiplier(row["eps"], row["delta"])


def _check_alone(other: Any, epsilon: float | None, delta: float) -> None:
    """Refuse a target that the other mechanisms alone exceed: no noise reaches it."""
    alone, at = other.infinite, "any ε"
    if epsilon is not None:
        tilt = other.tilt_for_epsilon(epsilon)
        alone = math.exp(other.convolve(tilt).log_delta_below(epsilon))
        at = f"ε = {epsilon:g}"
    if alone > delta:
        rule = f"what --also names is accounted for with δ = {alone:.3g} at {at} on its own, above "
        rule += f"{delta:g}: no noise reaches the target. Ask for a larger ε or δ, or less."
        raise _check.FailureError(rule)


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
@shared.strategy(_ANY)
@shared.results_and_curve
def min_separation(strategy: str, **arguments: Any) -> None:
    """Any participation at least --separation iterations apart; any C, nothing amplified.

    \b
    Example:
      mfopt account min-separation --iters 2000 --separation 400 --max-participations 5 \\
          --strategy sqrt --eps 2 --delta 1e-6
    """
    found, file = shared.matrix(strategy, _ANY)

    def scheme(row: Row) -> MinSeparation:
        n = shared.length_of(row, file)
        return MinSeparation(n, row["separation"], row["max_participations"])

    answers.answer(arguments, scheme, f"min-separation, {strategy}", found)
