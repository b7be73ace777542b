"""mfopt account: (ε, δ) from σ, or σ from (ε, δ), for every mechanism with an accountant."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt.errors import FailureError
from mfopt.progress import Progress
from mfopt.sampling import CyclicPoisson, FixedBatch, Poisson, TruncatedPoisson
from mfopt_cli import answers, options, sweeps
from mfopt_cli.accounts import schemes, shared
from mfopt_cli.answers import Row, analysed, answer, iterations, probability
from mfopt_cli.live import Live
from mfopt_cli.options import MOST_GROUP, MOST_POINTS, PATH, Count, option


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
@shared.by_rate
@sweeps.option(
    "--batch-limit",
    int,
    "Maximum batch size; larger batches are truncated at random. Needs --population.",
)
@shared.adjacency
@options.unit
@shared.results_and_curve
def dpsgd(**arguments: Any) -> None:
    """DP-SGD: independent noise, Poisson sampling.

    \b
    Example:
      mfopt account dpsgd --probability 0.01 --iters 2000 --eps 2 --delta 1e-6
    """
    answer(arguments, _truncated, "DP-SGD")


def _poisson(row: Row) -> Poisson:
    return Poisson(probability(row), iterations(row))


def _truncated(row: Row) -> Poisson | TruncatedPoisson:
    """Poisson sampling, with batches of at most ``--batch-limit`` where it is given."""
    limit, population = row["batch_limit"], row["population"]
    if limit is None:
        return _poisson(row)
    if population is None or row["batch_size"] is None:
        instead = " in place of --probability" * (row["probability"] is not None)
        raise click.UsageError(f"--batch-limit needs --batch-size and --population{instead}")
    return TruncatedPoisson(probability(row), limit, population, iterations(row))


@command.command()
@click.argument("path", metavar="[FILE]", type=PATH, required=False)
@shared.by_rate
@sweeps.option("--bands", int, "Bands of C, and groups of the data. [default: those of FILE]")
@shared.protects
@shared.results_and_curve
def banded(path: Path | None, **arguments: Any) -> None:
    """Banded C with cyclic Poisson sampling: the C of a FILE, or the banded square root.

    --probability is the chance within the group whose turn it is; a FILE of cyclic Poisson
    sampling has its own.

    \b
    Example:
      mfopt account banded --bands 4 --batch-size 500 --population 50000 \\
          --iters 2000 --eps 2 --delta 1e-6
    """
    from mfopt.factorization import load
    from mfopt.strategies import BandedSquareRoot

    file = None if path is None else load(path)
    strategy = (lambda scheme: BandedSquareRoot(scheme.bands)) if file is None else file.strategy
    title = f"{path or 'banded'}, cyclic Poisson"
    answer(arguments, lambda row: _cyclic(row, file), title, strategy)


def _cyclic(row: Row, file: Any) -> Any:
    """The sampling of a row, what is left out being that of the file."""
    from mfopt.accounting import unamplified

    if file is None:
        bands = _check.integer("bands", shared.own(row, "bands"))
        return CyclicPoisson(probability(row, bands), bands, iterations(row))
    n, scheme = shared.length_of(row, file), file.sampling
    cyclic = hasattr(scheme, "bands")  # cyclic Poisson sampling alone has
    bands = row["bands"]
    if bands is None:
        bands = scheme.bands if cyclic else unamplified.bands(file.strategy, n)
    given = any(row[name] is not None for name in ("probability", "batch_size", "population"))
    if not given and cyclic and bands == scheme.bands:
        return scheme
    if not given:
        raise click.UsageError("give --probability, or --batch-size and --population")
    return CyclicPoisson(probability(row, bands), bands, n)


@command.command()
@shared.by_rate
@sweeps.option(
    "--group-size", int, "Maximum number of examples of one user, K.", MOST_GROUP, required=True
)
@shared.adjacency
@shared.results_and_curve
def els(**arguments: Any) -> None:
    """Example-level sampling for user-level privacy: DP-SGD with up to K examples of a user.

    \b
    Example:
      mfopt account els --group-size 183 --probability 0.001 --iters 10000 \\
          --eps 8 --delta 1e-6
    """

    def scheme(row: Row) -> Poisson:
        if row["population"] is not None and row["group_size"] > row["population"]:
            rule = f"--group-size {row['group_size']} is above --population {row['population']}: "
            rule += "a user's examples are among the population's"
            raise click.UsageError(rule)
        return _poisson(row)

    answer(arguments, scheme, "ELS")


@command.command()
@shared.by_rate
@shared.adjacency
@shared.results_and_curve
def uls(**arguments: Any) -> None:
    """User-level sampling: users are drawn, and one user's averaged gradient is clipped.

    --probability, --batch-size and --population count users.

    \b
    Example:
      mfopt account uls --batch-size 64 --population 10000 --iters 1000 \\
          --eps 8 --delta 1e-6
    """
    answer(arguments, _poisson, "ULS", privacy_unit="user")


@command.command("fixed-batch")
@shared.noise
@shared.target
@sweeps.option("--batch-size", int, "Examples in every batch.", required=True)
@sweeps.option("--population", int, "Size of the (larger) data set.", required=True)
@shared.length
@shared.protects
@shared.results_and_curve
def fixed_batch(**arguments: Any) -> None:
    """DP-SGD with batches of fixed size, drawn without replacement.

    \b
    Example:
      mfopt account fixed-batch --batch-size 500 --population 50000 --iters 2000 \\
          --group-size 8 --noise-multiplier 2 --delta 1e-6
    """

    def scheme(row: Row) -> FixedBatch:
        return FixedBatch(row["batch_size"], row["population"], iterations(row))

    answer(arguments, scheme, "fixed batches")


@command.command()
@shared.noise
@shared.target
@shared.sampled
@shared.rounds
@option(
    "--conversion",
    ("moments", "improved", "pld"),
    "Accountant: as published, improved Rényi conversion, or PLD (tightest).",
)
@shared.results
def fedavg(conversion: str, **arguments: Any) -> None:
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

    def compute(row: Row) -> list[Row]:
        scheme, unit = _poisson(row), {"noise_unit": "× sensitivity of the estimator"}
        # a sum of contributions of norm 1 with noise z: the same release, scaled
        release = Mechanism(scheme, privacy_unit="user")
        if conversion == "pld":
            return [{**one, **unit} for one in analysed(release, row)]
        found = moments.fedavg(
            row["noise_multiplier"],
            scheme.probability,
            scheme.iterations,
            delta=row["delta"],
            epsilon_target=row["eps"],
            conversion=conversion,  # type: ignore[arg-type]
        )
        # the account of the release itself says what some data sets attain
        with contextlib.suppress(FailureError):
            (exact,) = analysed(release, row)
            names = {"eps": "epsilon", "delta": "delta", "noise_multiplier": "noise_multiplier"}
            asked = next(name for given, name in names.items() if row[given] is None)
            if (low := (exact["details"].get("bracket") or [0.0])[0]) > 0:
                found = found.with_lower_end(low, getattr(found, asked))
        return [{**found.describe(), **unit}]

    answers.run(arguments, compute, "DP-FedAvg")


@options.command("run")
@click.argument("phases", nargs=-1, required=True, metavar="PHASE...")
@options.eps("ε at which δ is evaluated, in place of --delta.")
@options.delta("δ of every statement.")
@option(
    "--points",
    Count(MOST_POINTS),
    "Number of points at which to report ε; whole epochs where bins are kept.",
    default=10,
)
@option(
    "--group-size",
    Count(MOST_GROUP),
    "Size of the group of units that is protected together.",
    default=1,
)
@shared.adjacency
@options.unit
@shared.verified
@shared.results
def run(arguments: Any) -> None:
    """ε over a run: what has been spent after each part of it, by every scheme that has an account.

    A PHASE is a factorization FILE, or SCHEME:NAME=VALUE,...[/STRATEGY]@SIGMA, with C = I unless
    identity, sqrt, banded-sqrt:BANDS or a FILE is named. Phases follow each other on the same
    data, each with its own noise, batches and scheme; one of them may have a sampled account.

    \b
    Example:
      mfopt account run poisson:probability=0.02,iterations=500@1.1 \\
          poisson:probability=0.05,iterations=200@1.6 --delta 1e-6 --plot run.png
    """
    if (arguments.epsilon is None) == (arguments.delta is None):
        raise click.UsageError("give one of --eps, --delta: each phase has its noise multiplier")
    if arguments.plot is not None:
        answers.check_plot(arguments.plot, "phases", arguments.force)
    from mfopt.accounting.phases import Phase, over_training

    effort = answers.taken_effort(vars(arguments))
    of = {name: getattr(arguments, name) for name in ("group_size", *answers.STATEMENT)}
    made = [_phase(text, of) for text in arguments.phases]
    question: Any = {
        name: getattr(arguments, name) for name in ("epsilon", "delta", "points")
    } | effort
    if len(made) == 1:  # one mechanism has its own account, for groups too
        found = over_training(made[0][0], made[0][1], **question)
    else:
        found = over_training([Phase(*phase) for phase in made], **question)
    total = sum(mechanism.iterations for mechanism, _ in made)
    rows: list[dict[str, Any]] = []
    with Live(not arguments.quiet and not arguments.as_json) as live:
        live(Progress("run", 0, total, "iterations"))
        for at, guarantee in found:
            live(Progress("run", at, total, "iterations"))
            rows.append({"iterations": at, **guarantee.describe()})
    answers.say_unused(effort, answers.sampled(rows))
    if arguments.plot is not None:
        ends = [sum(m.iterations for m, _ in made[: k + 1]) for k in range(len(made) - 1)]
        answers.draw_run(rows, ends, arguments.plot)
    show = functools.partial(answers.print_answers, rows, "iterations", "over the run")
    answers.tell({"results": rows}, show, arguments)


def _phase(text: str, of: dict[str, Any]) -> tuple[Any, float]:
    """(mechanism, σ) of a PHASE."""
    from mfopt import sampling
    from mfopt.accounting import Mechanism

    if Path(text).is_file():
        from mfopt.factorization import load

        file = load(text)
        return Mechanism(file.sampling, file.strategy, **of), file.noise_multiplier
    what, at, sigma = text.rpartition("@")
    try:
        noise = float(sigma)
    except ValueError:
        noise = float("nan")
    if not at or not noise > 0:
        rule = "must be a factorization file or SCHEME[/STRATEGY]@SIGMA"
        way_out = "For example poisson:probability=0.01,iterations=1000@1.1."
        raise _check.reject("phases", text, rule, way_out)
    scheme, _, named = what.partition("/")
    strategy, _ = shared.matrix(named or "identity", ("identity", "sqrt", "banded-sqrt"))
    return Mechanism(sampling.parse(scheme), strategy, **of), noise


for one in (
    schemes.balls_in_bins,
    schemes.fresh_bins,
    schemes.b_min_sep,
    schemes.fixed_order,
    schemes.min_separation,
    run,
):
    command.add_command(one)
