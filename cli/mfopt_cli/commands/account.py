"""mfopt account: (ε, δ) from σ, or σ from (ε, δ), for every mechanism with an accountant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mfopt_cli import answers, options, sweeps
from mfopt_cli.answers import Row, analysed, iterations, probability
from mfopt_cli.options import apply

_noise = sweeps.option(
    "--noise-multiplier", float, "σ, relative to the clip norm, for C as stored."
)
_target = apply(
    sweeps.option("--eps", float, "ε: target, or where to evaluate δ."),
    sweeps.option("--delta", float, "δ of the statement."),
)
_length = apply(
    sweeps.option("--epochs", int, "Passes over the data, E. [default: 1]"),
    sweeps.option("--iters", int, "Iterations per epoch, b. n = E·b."),
    sweeps.option("--iterations", int, "All iterations, n.", hidden=True),
)
_sampled = apply(
    sweeps.option(
        "--probability",
        float,
        "Chance that a unit is in an iteration's batch. [default: 1/iters]",
    ),
    sweeps.option("--batch-size", float, "Expected batch; with --population, for --probability."),
    sweeps.option("--population", int, "Number of units in the data set."),
)
_group_size = sweeps.option(
    "--group-size", int, "Units that change together.", default="1", show_default=True
)
_results = apply(
    options.option("--plot", type=click.Path(path_type=Path), help="Draw a sweep into this file."),
    options.force,
    options.output,
)

_rounds = apply(
    sweeps.option("--epochs", int, "Passes over the users, E. [default: 1]"),
    sweeps.option("--iters", int, "Rounds per epoch, b. n = E·b rounds."),
    sweeps.option("--iterations", int, "All rounds, T.", hidden=True, aliases=("--rounds",)),
)


@click.group(name="account", cls=options.Group)
def command() -> None:
    """(ε, δ) of a mechanism: give two of --noise-multiplier, --eps, --delta, get the third.

    Any one argument may be swept, for example --group-size 1:64 or --eps 1,2,4,8. Nothing is
    rounded towards less privacy. Unless said otherwise a statement is about adding or removing
    one unit, or --group-size of them.

    \b
    Example:
      mfopt account els --group-size 1:64:9 --noise-multiplier 1 --delta 1e-6 \\
          --probability 0.01 --iters 2000 --plot els.png
    """


@command.command()
@_noise
@_target
@_sampled
@_length
@options.unit
@_results
def dpsgd(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, privacy_unit: str, **arguments: Any
) -> None:
    """DP-SGD: independent noise, Poisson sampling.

    \b
    Example:
      mfopt account dpsgd --probability 0.01 --iters 2000 --eps 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import Poisson

    def make(row: Row) -> Any:
        return Mechanism(Poisson(probability(row), iterations(row)), privacy_unit=privacy_unit)

    answers.run(
        arguments, lambda row: analysed(make(row), row), "DP-SGD", plot, force, as_json, quiet
    )


@command.command()
@_noise
@_target
@_sampled
@_length
@sweeps.option("--bands", int, "Bands of C, and groups of the data.", required=True)
@_group_size
@options.unit
@_results
def banded(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, privacy_unit: str, **arguments: Any
) -> None:
    """Banded C with cyclic Poisson sampling; C is the banded square root.

    --probability is the chance within the group whose turn it is. For another banded C multiply σ
    by its largest column norm over the square root's (both are in the JSON output).

    \b
    Example:
      mfopt account banded --bands 4 --batch-size 500 --population 50000 \\
          --iters 2000 --eps 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import CyclicPoisson
    from mfopt.strategies import BandedSquareRoot

    def make(row: Row) -> Any:
        scheme = CyclicPoisson(probability(row, row["bands"]), row["bands"], iterations(row))
        strategy = BandedSquareRoot(row["bands"])
        return Mechanism(scheme, strategy, row["group_size"], privacy_unit)

    answers.run(
        arguments,
        lambda row: analysed(make(row), row),
        "banded, cyclic Poisson",
        plot,
        force,
        as_json,
        quiet,
    )


@command.command("balls-in-bins")
@_noise
@_target
@sweeps.option("--epochs", int, "Passes over the data, E, with the same bins.", required=True)
@sweeps.option("--iters", int, "Iterations per epoch, b: the bins.", required=True)
@_group_size
@options.option(
    "--strategy",
    default="identity",
    show_default=True,
    help="identity, sqrt, banded-sqrt:BANDS, or a factorization FILE.",
)
@options.certify_samples_as("samples", aliases=("--samples",))
@options.seed()
@options.option("--estimate", is_flag=True, help="Estimate instead of bound: proves nothing.")
@options.option(
    "--also",
    metavar="MECHANISM",
    help="What else touches the same data: pure:ε, approximate:ε:δ or gaussian:σ (sensitivity 1).",
)
@options.unit
@_results
def balls_in_bins(
    plot: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    privacy_unit: str,
    strategy: str,
    samples: int | None,
    seed: int | None,
    estimate: bool,
    also: str | None,
    **arguments: Any,
) -> None:
    """Any C >= 0 with balls-in-bins batching; exact for C = I, certified by sampling otherwise.

    \b
    Example:
      mfopt account balls-in-bins --epochs 16 --iters 128 --eps 2 --delta 1e-5
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import BallsInBins

    matrix = _strategy(strategy)

    def make(row: Row) -> Any:
        scheme = BallsInBins(row["iters"], row["epochs"])
        return Mechanism(scheme, matrix, row["group_size"], privacy_unit)

    other = None if also is None else _other(also)

    def compute(row: Row) -> list[Row]:
        more = {"samples": samples, "seed": seed, "certify": not estimate}
        if other is not None:
            return [_composed(make(row), other, row, **more).describe()]
        return analysed(make(row), row, **more)

    title = f"balls-in-bins, {strategy}" + ("" if also is None else f", and {also}")
    answers.run(arguments, compute, title, plot, force, as_json, quiet)


@command.command("fresh-bins")
@_noise
@_target
@sweeps.option("--epochs", int, "Passes over the data, E.", required=True)
@sweeps.option("--iters", int, "Iterations per epoch, b: the bins.", required=True)
@sweeps.option("--rethrow", int, "Epochs between two throws.", default="1", show_default=True)
@_group_size
@options.option(
    "--strategy",
    default="identity",
    show_default=True,
    help="identity, banded-sqrt:BANDS, or a factorization FILE; at most --iters bands.",
)
@options.certify_samples_as("samples", aliases=("--samples",))
@options.seed()
@options.option("--estimate", is_flag=True, help="Estimate instead of bound: proves nothing.")
@options.unit
@_results
def fresh_bins(
    plot: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    privacy_unit: str,
    strategy: str,
    samples: int | None,
    seed: int | None,
    estimate: bool,
    **arguments: Any,
) -> None:
    """Every unit in a new random batch in each epoch; any banded C >= 0, certified by sampling.

    \b
    Example:
      mfopt account fresh-bins --epochs 16 --iters 128 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import FreshBins

    matrix = _strategy(strategy)

    def compute(row: Row) -> list[Row]:
        scheme = FreshBins(row["iters"], row["epochs"], row["rethrow"])
        mechanism = Mechanism(scheme, matrix, row["group_size"], privacy_unit)
        more = {"samples": samples, "seed": seed, "certify": not estimate}
        return analysed(mechanism, row, **more)

    answers.run(arguments, compute, f"fresh-bins, {strategy}", plot, force, as_json, quiet)


@command.command()
@_noise
@_target
@_sampled
@_length
@sweeps.option("--group-size", int, "Most examples of one user, K.", required=True)
@_results
def els(plot: Path | None, force: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Example-level sampling for user-level privacy: DP-SGD with up to K examples of a user.

    \b
    Example:
      mfopt account els --group-size 183 --probability 0.001 --iters 10000 \\
          --eps 8 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import Poisson

    def make(row: Row) -> Any:
        scheme = Poisson(probability(row), iterations(row))
        if row["population"] is not None and row["group_size"] > row["population"]:
            raise click.UsageError(
                f"--group-size {row['group_size']} is above --population {row['population']}: "
                "a user's examples are among the population's"
            )
        return Mechanism(scheme, group_size=row["group_size"])

    answers.run(arguments, lambda row: analysed(make(row), row), "ELS", plot, force, as_json, quiet)


@command.command()
@_noise
@_target
@_sampled
@_length
@_results
def uls(plot: Path | None, force: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """User-level sampling: users are drawn, and one user's averaged gradient is clipped.

    --probability, --batch-size and --population count users.

    \b
    Example:
      mfopt account uls --batch-size 64 --population 10000 --iters 1000 \\
          --eps 8 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import Poisson

    def make(row: Row) -> Any:
        return Mechanism(Poisson(probability(row), iterations(row)), privacy_unit="user")

    answers.run(arguments, lambda row: analysed(make(row), row), "ULS", plot, force, as_json, quiet)


@command.command()
@_noise
@sweeps.option("--eps", float, "ε of the group: target that σ is found for.")
@sweeps.option("--delta", float, "δ of the group's statement.", required=True)
@_sampled
@_length
@sweeps.option("--group-size", int, "Examples that change together, K.", required=True)
@options.option(
    "--floor",
    type=float,
    default=0.0,
    show_default=True,
    help="Smallest one-example δ that the black box may use; other tools stop near 1e-15.",
)
@_results
def group(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, floor: float, **arguments: Any
) -> None:
    """How a group's ε (or σ) follows from one example's, by every method side by side.

    The mixture of Gaussians (tight), the whole one-example profile, the textbook lemma in both
    forms, and the line K·ε₁, which is no guarantee. Where the lemma needs a one-example δ below
    --floor it has no finite answer: "beyond numerical range", null in the JSON output.

    \b
    Example:
      mfopt account group --group-size 1,2,4,8 --noise-multiplier 1 --delta 1e-6 \\
          --probability 0.01 --iters 2000
    """
    from mfopt.accounting import compare

    def compute(row: Row) -> list[Row]:
        return [
            found.describe()
            for found in compare.group_methods(
                probability(row),
                iterations(row),
                row["noise_multiplier"],
                row["delta"],
                row["group_size"],
                epsilon=row["eps"],
                floor=floor,
            )
        ]

    answers.run(arguments, compute, "group privacy of DP-SGD", plot, force, as_json, quiet)


@command.command("fixed-batch")
@_noise
@_target
@sweeps.option("--batch-size", int, "Examples in every batch.", required=True)
@sweeps.option("--population", int, "Size of the (larger) data set.", required=True)
@_length
@_group_size
@options.unit
@_results
def fixed_batch(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, privacy_unit: str, **arguments: Any
) -> None:
    """DP-SGD with batches of fixed size, drawn without replacement.

    \b
    Example:
      mfopt account fixed-batch --batch-size 500 --population 50000 --iters 2000 \\
          --group-size 8 --noise-multiplier 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import FixedBatch

    def make(row: Row) -> Any:
        scheme = FixedBatch(row["batch_size"], row["population"], iterations(row))
        return Mechanism(scheme, group_size=row["group_size"], privacy_unit=privacy_unit)

    answers.run(
        arguments,
        lambda row: analysed(make(row), row),
        "fixed batches",
        plot,
        force,
        as_json,
        quiet,
    )


@command.command()
@_noise
@_target
@_sampled
@_rounds
@options.option(
    "--conversion",
    type=click.Choice(["moments", "improved", "pld"]),
    default="moments",
    show_default=True,
    help="As published, by improved Rényi conversion, or the tighter PLD.",
)
@_results
def fedavg(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, conversion: str, **arguments: Any
) -> None:
    """DP-FedAvg and DP-FedSGD: sampled users, moments accountant.

    --noise-multiplier is z, the noise on the average over the estimator's sensitivity:
    S/(qW) with the fixed denominator, 2S/(qW_min) with the clipped one.

    \b
    Example:
      mfopt account fedavg --batch-size 5000 --population 763430 --iters 5000 \\
          --noise-multiplier 1 --delta 1e-9
    """
    from mfopt.accounting import Mechanism
    from mfopt.accounting.closed_form import moments
    from mfopt.sampling import Poisson

    def compute(row: Row) -> list[Row]:
        chance = probability(row)
        if conversion == "pld":
            mechanism = Mechanism(Poisson(chance, iterations(row)), privacy_unit="user")
            return analysed(mechanism, row)
        found = moments.fedavg(
            row["noise_multiplier"],
            chance,
            iterations(row),
            delta=row["delta"],
            epsilon_target=row["eps"],
            conversion=conversion,  # type: ignore[arg-type]
        )
        return [{**found.describe(), "noise_unit": "× sensitivity of the estimator"}]

    answers.run(arguments, compute, "DP-FedAvg", plot, force, as_json, quiet)


def _other(text: str) -> Any:
    """The mechanism of ``--also``."""
    from mfopt import _check
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


def _composed(mechanism: Any, other: Any, row: Row, **more: Any) -> Any:
    """The guarantee of a mechanism together with what else touches the data."""
    from mfopt.accounting.monte_carlo import composition

    found = composition.analysis(mechanism, other, **more)
    if row["eps"] is None:
        return found.epsilon(row["noise_multiplier"], row["delta"])
    if row["delta"] is None:
        return found.delta(row["noise_multiplier"], row["eps"])
    return found.noise_multiplier(row["eps"], row["delta"])


def _strategy(text: str) -> Any:
    """A strategy from ``--strategy``."""
    from mfopt import _check, strategies

    if text == "identity":
        return strategies.Identity()
    if text == "sqrt":
        return strategies.SquareRoot()
    if text.startswith("banded-sqrt:"):
        bands = text.removeprefix("banded-sqrt:")
        if not bands.isdecimal():
            raise _check.reject("strategy", text, "must be banded-sqrt:BANDS, as in banded-sqrt:8")
        return strategies.BandedSquareRoot(int(bands))
    if not Path(text).is_file():
        raise _check.reject(
            "strategy", text, "must be identity, sqrt, banded-sqrt:BANDS or a factorization file"
        )
    from mfopt.factorization import load

    return load(text).strategy
