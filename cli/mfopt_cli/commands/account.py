"""mfopt account: (ε, δ) from σ, or σ from (ε, δ), for every mechanism with an accountant."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from mfopt_cli import display, sweeps
from mfopt_cli.options import apply
from mfopt_cli.options import output as output_options

Row = dict[str, Any]

_noise = sweeps.option(
    "--noise-multiplier", float, "σ, relative to the clip norm, for C as stored."
)
_target = apply(
    sweeps.option("--eps", float, "ε: target, or where to evaluate δ."),
    sweeps.option("--delta", float, "δ of the statement."),
)
_iterations = sweeps.option("--iterations", int, "Training iterations n.", required=True)
_sampled = apply(
    sweeps.option("--probability", float, "Chance that a unit is in an iteration's batch."),
    sweeps.option("--batch-size", float, "Expected batch; with --population, for --probability."),
    sweeps.option("--population", int, "Number of units in the data set."),
)
_unit = click.option("--unit", default="example", show_default=True, help="Name of the unit.")
_results = apply(
    click.option("--plot", type=click.Path(path_type=Path), help="Draw a sweep into this file."),
    click.option("--force", is_flag=True, help="Replace an existing plot."),
    output_options,
)
_NOISE_UNIT = "× clip norm, for C as stored"
_NAMES = {"noise_multiplier": "--noise-multiplier", "eps": "--eps", "delta": "--delta"}


@click.group(name="account")
def command() -> None:
    """(ε, δ) of a mechanism: give two of --noise-multiplier, --eps, --delta, get the third.

    Any one argument may be swept, for example --group-size 1:64 or --eps 1,2,4,8. Nothing is
    rounded towards less privacy. Unless said otherwise a statement is about adding or removing
    one unit, or --group-size of them.

    \b
    Example:
      mfopt account els --group-size 1:64:9 --noise-multiplier 1 --delta 1e-6 \\
          --probability 0.01 --iterations 2000 --plot els.png
    """


def _probability(row: Row, factor: int = 1) -> float:
    """The sampling probability of a row: given, or from batch size and population."""
    from mfopt import _check

    if (row["probability"] is None) == (row["batch_size"] is None or row["population"] is None):
        raise click.UsageError("give --probability, or --batch-size and --population")
    if row["probability"] is not None:
        return _check.probability("probability", row["probability"], closed=True)
    batch = _check.positive("batch_size", row["batch_size"])
    rate = batch / _check.integer("population", row["population"])
    if rate * factor > 1:
        raise _check.reject("batch_size", batch, "must not exceed the units it is drawn from")
    return rate * factor


def _account(make: Callable[[Row], Any], row: Row, **more: Any) -> list[Row]:
    """One row of results by the common interface."""
    from mfopt.accounting import account

    found = account(
        make(row), noise_multiplier=row["noise_multiplier"], epsilon=row["eps"],
        delta=row["delta"], **more,
    )  # fmt: skip
    return [found.describe()]


def _run(
    arguments: Row, compute: Callable[[Row], list[Row]], title: str,
    plot: Path | None, force: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Evaluate all points with progress, then print a table or JSON and draw the plot."""
    swept, rows = sweeps.points(arguments)
    given = [text for name, text in _NAMES.items() if arguments[name] is not None]
    if len(given) != 2:
        raise click.UsageError(f"give exactly two of {', '.join(_NAMES.values())}")
    if plot is not None:
        _check_plot(plot, swept, force)
    live = display.Live(not quiet and not as_json)
    results: list[Row] = []
    started = time.perf_counter()
    for number, row in enumerate(rows, 1):
        where = "" if swept is None else f", {swept} = {row[swept]:g}"
        with _ticking(live, f"{title}: {number} of {len(rows)}{where}", now=number == 1):
            found = compute(row)
        results += [one if swept is None else {swept: row[swept], **one} for one in found]
    live.close()
    if plot is not None and swept is not None:
        _draw(results, swept, title, plot)
    if as_json:
        seconds = time.perf_counter() - started
        if swept is None and len(results) == 1:
            display.json_object({**results[0], "seconds": seconds})
        else:
            display.json_object({"swept": swept, "results": results, "seconds": seconds})
    elif not quiet:
        _print(results, swept, title)
        if plot is not None:
            click.echo(f"plot: {plot}")


@contextlib.contextmanager
def _ticking(live: display.Live, text: str, *, now: bool) -> Iterator[None]:
    """Show ``text`` with the time that passes, however long one answer takes."""
    live.update(text, now=now)
    done = threading.Event()
    pause = 0.5 if sys.stderr.isatty() else 15.0

    def tick() -> None:
        while not done.wait(pause):
            live.update(text)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _print(results: list[Row], swept: str | None, title: str) -> None:
    if len(results) == 1 and swept is None:
        only = results[0]
        sigma = _up(only["noise_multiplier"])
        rows = [
            ("ε", _up(only["epsilon"])),
            ("δ", _up(only["delta"])),
            ("noise multiplier σ", f"{sigma}  ({only.get('noise_unit', _NOISE_UNIT)})"),
            ("protects", _protects(only)),
            ("status", _status(only)),
            ("method", only["method"]),
        ]  # fmt: skip
        display.table(title, [row for row in rows if row[1]])
        return
    click.echo(f"{title}; {_protects(results[0], swept)}")
    columns = [swept] if swept else []
    shown = ["epsilon", "delta", "noise_multiplier", "method", "status"]
    columns += [name for name in shown if name not in columns]
    cells = [[_cell(row, name) for name in columns] for row in results]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(columns)]
    click.echo("  ".join(name.ljust(width) for name, width in zip(columns, widths, strict=True)))
    for line in cells:
        click.echo(
            "  ".join(c.ljust(width) for c, width in zip(line, widths, strict=True)).rstrip()
        )


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if name == "status" and math.isinf(max(row["epsilon"], row["noise_multiplier"])):
        return "no answer"
    if isinstance(value, float):
        return _up(value) if name in ("epsilon", "delta", "noise_multiplier") else f"{value:g}"
    return str(value)


def _up(value: float) -> str:
    return "beyond numerical range" if math.isinf(value) else display.round_up(value, 6)


def _protects(row: Row, swept: str | None = None) -> str:
    group = "group_size" if swept == "group_size" else row["group_size"]
    what = row["privacy_unit"] if group == 1 else f"groups of {group} {row['privacy_unit']}s"
    return f"{what}, {row['adjacency']} adjacency"


def _status(row: Row) -> str:
    words = {
        "exact": "exact up to discretization, rounded up",
        "certified": f"certified; fails with probability <= {row['failure_probability']:.1e}, "
        "counted inside δ",
        "bound": "an upper bound",
        "estimate": "an ESTIMATE: proves nothing",
    }
    return words.get(row["status"], str(row["status"]))


def _check_plot(path: Path, swept: str | None, force: bool) -> None:
    from mfopt import _files

    if swept is None:
        raise click.UsageError("--plot needs a sweep, for example --group-size 1:64")
    _files.check_output(path, force=force, name="plot", suffixes=(".png", ".svg", ".pdf"))


def _draw(results: list[Row], swept: str, title: str, path: Path) -> None:
    """What was solved for, against what was swept; one line for each method."""

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    from mfopt.experiments import plots

    varying = [
        name for name in ("epsilon", "delta", "noise_multiplier")
        if name != {"eps": "epsilon"}.get(swept, swept) and len({row[name] for row in results}) > 1
    ]  # fmt: skip
    solved = varying[0] if varying else "epsilon"
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    if len({row[swept] for row in results}) == len(results):
        # one answer for each point, perhaps by different methods: one curve
        finite = [row for row in results if math.isfinite(row[solved])]
        axes.plot([r[swept] for r in finite], [r[solved] for r in finite], color="0.7")
    for method in dict.fromkeys(row["method"] for row in results):
        line = [row for row in results if row["method"] == method and math.isfinite(row[solved])]
        axes.plot([r[swept] for r in line], [r[solved] for r in line], ".-", label=method)
    labels = {"epsilon": "ε", "delta": "δ", "noise_multiplier": "noise multiplier σ"}
    axes.set(xlabel=swept.replace("_", " "), ylabel=labels[solved], title=title)
    values = [row[solved] for row in results if math.isfinite(row[solved]) and row[solved] > 0]
    if values and max(values) > 1000 * min(values):
        axes.set_yscale("log")
    at = [row[swept] for row in results]
    if min(at) > 0 and max(at) > 100 * min(at):
        axes.set_xscale("log")
    elif all(isinstance(value, int) for value in at):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    plots.write_figure(figure, path)
    pyplot.close(figure)


@command.command()
@_noise
@_target
@_sampled
@_iterations
@_unit
@_results
def dpsgd(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, unit: str, **arguments: Any
) -> None:
    """DP-SGD: independent noise, Poisson sampling.

    \b
    Example:
      mfopt account dpsgd --probability 0.01 --iterations 2000 --eps 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import Poisson

    def make(row: Row) -> Any:
        return Mechanism(Poisson(_probability(row), row["iterations"]), privacy_unit=unit)

    _run(arguments, lambda row: _account(make, row), "DP-SGD", plot, force, as_json, quiet)


@command.command()
@_noise
@_target
@_sampled
@_iterations
@sweeps.option("--bands", int, "Bands of C, and groups of the data.", required=True)
@sweeps.option("--group-size", int, "Units that change together.", default="1", show_default=True)
@_unit
@_results
def banded(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, unit: str, **arguments: Any
) -> None:
    """Banded C with cyclic Poisson sampling; C is the banded square root.

    --probability is the chance within the group whose turn it is. For another banded C multiply σ
    by its largest column norm over the square root's (both are in the JSON output).

    \b
    Example:
      mfopt account banded --bands 4 --batch-size 500 --population 50000 \\
          --iterations 2000 --eps 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import CyclicPoisson
    from mfopt.strategies import BandedSquareRoot

    def make(row: Row) -> Any:
        scheme = CyclicPoisson(_probability(row, row["bands"]), row["bands"], row["iterations"])
        strategy = BandedSquareRoot(row["bands"])
        return Mechanism(scheme, strategy, row["group_size"], unit)

    _run(
        arguments,
        lambda row: _account(make, row),
        "banded, cyclic Poisson",
        plot,
        force,
        as_json,
        quiet,
    )


@command.command("balls-in-bins")
@_noise
@_target
@sweeps.option("--bins", int, "Batches per epoch b.", required=True)
@sweeps.option("--epochs", int, "Passes over the data E, with the same bins.", required=True)
@sweeps.option("--group-size", int, "Units that change together.", default="1", show_default=True)
@click.option(
    "--strategy", default="identity", show_default=True,
    help="identity, sqrt, banded-sqrt:BANDS, or a factorization FILE.",
)  # fmt: skip
@click.option("--samples", type=int, default=2**17, show_default=True, help="Of the certificate.")
@click.option("--seed", type=int, help="Pin the accountant's randomness, for reproduction.")
@click.option("--estimate", is_flag=True, help="Estimate instead of bound: proves nothing.")
@click.option(
    "--also", metavar="MECHANISM",
    help="What else touches the same data: pure:ε, approximate:ε:δ or gaussian:σ (sensitivity 1).",
)  # fmt: skip
@_unit
@_results
def balls_in_bins(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, unit: str,
    strategy: str, samples: int, seed: int | None, estimate: bool, also: str | None,
    **arguments: Any,
) -> None:  # fmt: skip
    """Any C >= 0 with balls-in-bins batching; exact for C = I, certified by sampling otherwise.

    \b
    Example:
      mfopt account balls-in-bins --bins 128 --epochs 16 --eps 2 --delta 1e-5
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import BallsInBins

    matrix = _strategy(strategy)

    def make(row: Row) -> Any:
        scheme = BallsInBins(row["bins"], row["epochs"])
        return Mechanism(scheme, matrix, row["group_size"], unit)

    other = None if also is None else _other(also)

    def compute(row: Row) -> list[Row]:
        more = {"samples": samples, "seed": seed, "certify": not estimate}
        if other is not None:
            return [_composed(make(row), other, row, **more).describe()]
        return _account(make, row, **more)

    title = f"balls-in-bins, {strategy}" + ("" if also is None else f", and {also}")
    _run(arguments, compute, title, plot, force, as_json, quiet)


@command.command()
@_noise
@_target
@_sampled
@_iterations
@sweeps.option("--group-size", int, "Most examples of one user, K.", required=True)
@_results
def els(plot: Path | None, force: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Example-level sampling for user-level privacy: DP-SGD with up to K examples of a user.

    \b
    Example:
      mfopt account els --group-size 183 --probability 0.001 --iterations 10000 \\
          --eps 8 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import Poisson

    def make(row: Row) -> Any:
        scheme = Poisson(_probability(row), row["iterations"])
        return Mechanism(scheme, group_size=row["group_size"])

    _run(arguments, lambda row: _account(make, row), "ELS", plot, force, as_json, quiet)


@command.command()
@_noise
@_target
@_sampled
@_iterations
@_results
def uls(plot: Path | None, force: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """User-level sampling: users are drawn, and one user's averaged gradient is clipped.

    --probability, --batch-size and --population count users.

    \b
    Example:
      mfopt account uls --batch-size 64 --population 10000 --iterations 1000 \\
          --eps 8 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import Poisson

    def make(row: Row) -> Any:
        return Mechanism(Poisson(_probability(row), row["iterations"]), privacy_unit="user")

    _run(arguments, lambda row: _account(make, row), "ULS", plot, force, as_json, quiet)


@command.command()
@_noise
@sweeps.option("--eps", float, "ε of the group: target that σ is found for.")
@sweeps.option("--delta", float, "δ of the group's statement.", required=True)
@_sampled
@_iterations
@sweeps.option("--group-size", int, "Examples that change together, K.", required=True)
@click.option(
    "--floor", type=float, default=0.0, show_default=True,
    help="Smallest one-example δ that the black box may use; other tools stop near 1e-15.",
)  # fmt: skip
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
          --probability 0.01 --iterations 2000
    """
    from mfopt.accounting import compare

    def compute(row: Row) -> list[Row]:
        return [found.describe() for found in compare.group_methods(
            _probability(row), row["iterations"], row["noise_multiplier"], row["delta"],
            row["group_size"], epsilon=row["eps"], floor=floor,
        )]  # fmt: skip

    _run(arguments, compute, "group privacy of DP-SGD", plot, force, as_json, quiet)


@command.command("fixed-batch")
@_noise
@_target
@sweeps.option("--batch-size", int, "Examples in every batch.", required=True)
@sweeps.option("--population", int, "Size of the (larger) data set.", required=True)
@_iterations
@sweeps.option(
    "--group-size", int, "Examples that change together.", default="1", show_default=True
)
@_unit
@_results
def fixed_batch(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, unit: str, **arguments: Any
) -> None:
    """DP-SGD with batches of fixed size, drawn without replacement.

    \b
    Example:
      mfopt account fixed-batch --batch-size 500 --population 50000 --iterations 2000 \\
          --group-size 8 --noise-multiplier 2 --delta 1e-6
    """
    from mfopt.accounting import Mechanism
    from mfopt.sampling import FixedBatch

    def make(row: Row) -> Any:
        scheme = FixedBatch(row["batch_size"], row["population"], row["iterations"])
        return Mechanism(scheme, group_size=row["group_size"], privacy_unit=unit)

    _run(arguments, lambda row: _account(make, row), "fixed batches", plot, force, as_json, quiet)


@command.command()
@_noise
@_target
@_sampled
@sweeps.option("--rounds", int, "Communication rounds T.", required=True)
@click.option(
    "--conversion", type=click.Choice(["moments", "improved", "pld"]), default="moments",
    show_default=True, help="As published, by improved Rényi conversion, or the tighter PLD.",
)  # fmt: skip
@_results
def fedavg(
    plot: Path | None, force: bool, as_json: bool, quiet: bool, conversion: str, **arguments: Any
) -> None:
    """DP-FedAvg and DP-FedSGD: sampled users, moments accountant.

    --noise-multiplier is z, the noise on the average over the estimator's sensitivity:
    S/(qW) with the fixed denominator, 2S/(qW_min) with the clipped one.

    \b
    Example:
      mfopt account fedavg --batch-size 5000 --population 763430 --rounds 5000 \\
          --noise-multiplier 1 --delta 1e-9
    """
    from mfopt.accounting import Mechanism
    from mfopt.accounting.closed_form import moments
    from mfopt.sampling import Poisson

    def compute(row: Row) -> list[Row]:
        probability = _probability(row)
        if conversion == "pld":
            mechanism = Mechanism(Poisson(probability, row["rounds"]), privacy_unit="user")
            return _account(lambda _: mechanism, row)
        found = moments.account(
            row["noise_multiplier"], probability, row["rounds"], delta=row["delta"],
            epsilon_target=row["eps"], conversion=conversion,  # type: ignore[arg-type]
        )  # fmt: skip
        return [{**found.describe(), "noise_unit": "× sensitivity of the estimator"}]

    _run(arguments, compute, "DP-FedAvg", plot, force, as_json, quiet)


def _other(text: str) -> Any:
    """The mechanism of ``--also``."""
    from mfopt import _check
    from mfopt.accounting.monte_carlo import composition

    kinds: dict[tuple[str, int], Callable[..., Any]] = {
        ("pure", 1): composition.pure, ("approximate", 2): composition.approximate,
        ("gaussian", 1): composition.gaussian,
    }  # fmt: skip
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
