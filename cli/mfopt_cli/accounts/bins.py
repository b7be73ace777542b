"""mfopt account for schemes with bins or a separation, batches of one law, and any C >= 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from mfopt._runtime import _check
from mfopt_cli import answers, options, sweeps
from mfopt_cli.accounts import shared
from mfopt_cli.answers import Row
from mfopt_cli.options import apply

_binned = apply(
    shared.noise,
    shared.target,
    shared.bins,
    shared.protects,
    shared.verified,
    options.certificate_kind,
    shared.results,
)


@click.command("balls-in-bins", cls=options.Command)
@_binned
@shared.strategy("identity, sqrt, banded-sqrt:BANDS, or a factorization FILE.")
@options.option(
    "--also",
    metavar="MECHANISM",
    multiple=True,
    help="Another mechanism on the same data, to compose with: pure:ε, approximate:ε:δ or "
    "gaussian:σ (sensitivity 1). Repeatable.",
)
def balls_in_bins(strategy: str, also: tuple[str, ...], **arguments: Any) -> None:
    """Any C >= 0 with balls-in-bins batching; exact for C = I, certified by sampling otherwise.

    \b
    Example:
      mfopt account balls-in-bins --epochs 16 --iters 128 --eps 2 --delta 1e-5
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import BallsInBins

    found, file = shared.matrix(strategy, ("identity", "sqrt", "banded-sqrt"))
    others = [_other(text) for text in also]

    def make(row: Row, of: Row) -> Any:
        return Mechanism(BallsInBins(*shared.bins_of(row, file)), found, row["group_size"], **of)

    def composed(mechanism: Any, row: Row, **effort: Any) -> list[Row]:
        return [_composed(mechanism, others, row, **effort).describe()]

    title = ", and ".join([f"balls-in-bins, {strategy}", *also])
    answers.answer(arguments, make, title, composed if others else answers.analysed)


@click.command("fresh-bins", cls=options.Command)
@_binned
@options.option(
    "--reassign-every",
    "rethrow",
    aliases=("--rethrow",),
    type=sweeps.Sweep(int),
    help="Epochs between two assignments. [default: 1, or that of a FILE]",
)
@shared.strategy("identity, banded-sqrt:BANDS, or a factorization FILE; at most --iters bands.")
def fresh_bins(strategy: str, **arguments: Any) -> None:
    """Units in a new random batch in each epoch; any banded C >= 0, certified by sampling.

    \b
    Example:
      mfopt account fresh-bins --epochs 16 --iters 128 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import FreshBins

    found, file = shared.matrix(strategy, ("identity", "banded-sqrt"))

    def make(row: Row, of: Row) -> Any:
        bins, epochs = shared.bins_of(row, file)
        rethrow = 1 if row["rethrow"] is None else row["rethrow"]
        if hasattr(getattr(file, "sampling", None), "rethrow"):
            rethrow = shared.own(row, "rethrow", file.sampling.rethrow, file)
        return Mechanism(FreshBins(bins, epochs, rethrow), found, row["group_size"], **of)

    answers.answer(arguments, make, f"fresh-bins, {strategy}")


_separated = apply(
    _binned,
    sweeps.option(
        "--separation",
        int,
        "Minimum number of iterations between two participations. [default: that of a FILE]",
    ),
    shared.strategy(
        "identity, banded-sqrt:BANDS, or a factorization FILE; up to --separation bands."
    ),
)


@click.command("b-min-sep", cls=options.Command)
@_separated
def b_min_sep(**arguments: Any) -> None:
    """Units by chance, resting after each participation; any banded C >= 0, certified by sampling.

    An available unit takes part with probability 1/(iters − separation + 1), so that each iteration
    has the expected batch of one in --iters bins. The start is stationary.

    \b
    Example:
      mfopt account b-min-sep --epochs 16 --iters 128 --separation 64 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    from mfopt.sampling import BMinSep

    _answer(BMinSep, **arguments)


@click.command("k-of-n", cls=options.Command)
@_separated
def k_of_n(**arguments: Any) -> None:
    """Exactly --epochs iterations for each unit; any banded C >= 0, certified by sampling.

    Uniform over all sets of iterations of which any two are at least --separation apart, the last
    iteration of the run being the first one's neighbour.

    \b
    Example:
      mfopt account k-of-n --epochs 16 --iters 128 --separation 64 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    from mfopt.sampling import KOfN

    _answer(KOfN, **arguments)


def _answer(kind: Any, strategy: str, **arguments: Any) -> None:
    """Answer for a scheme with a separation."""
    from mfopt.accounting import Mechanism

    found, file = shared.matrix(strategy, ("identity", "banded-sqrt"))
    stated = file if hasattr(getattr(file, "sampling", None), "separation") else None

    def make(row: Row, of: Row) -> Any:
        bins, epochs = shared.bins_of(row, file)
        own = None if stated is None else stated.sampling.separation
        scheme = kind(bins, epochs, shared.own(row, "separation", own, stated))
        return Mechanism(scheme, found, row["group_size"], **of)

    answers.answer(arguments, make, f"{kind.kind}, {strategy}")


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
        raise _check.reject(
            "also", text, "must be pure:EPS, approximate:EPS:DELTA or gaussian:SIGMA"
        ) from None


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
        raise _check.FailureError(
            f"what --also names is accounted for with δ = {alone:.3g} at {at} on its own, above "
            f"{delta:g}: no noise reaches the target. Ask for a larger ε or δ, or less."
        )
