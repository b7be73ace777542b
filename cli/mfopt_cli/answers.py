"""Answers of accountants on the command line: one, or a sweep of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt.progress import Progress
from mfopt_cli import display, sweeps
from mfopt_cli.live import Live

Row = dict[str, Any]
PLACES = ("plot", "force", "as_json", "quiet")
_SIZES = ("batch_size", "population")
STATEMENT = ("privacy_unit", "adjacency")
_NAMES = {"noise_multiplier": "--noise-multiplier", "eps": "--eps", "delta": "--delta"}


def iterations(row: Row) -> int:
    """Number of iterations n of a row: epochs times iterations per epoch."""

    total, epochs, iters = row["iterations"], row["epochs"], row["iters"]
    if total is not None:
        if epochs is not None or iters is not None:
            raise click.UsageError(
                "--iterations excludes --epochs and --iters: it is their product n"
            )
        return _check.integer("iterations", total)
    if iters is None:
        raise click.UsageError("Missing option '--iters'.")
    return _check.integer("iters", iters) * _check.integer(
        "epochs", 1 if epochs is None else epochs
    )


def probability(row: Row, factor: int = 1) -> float:
    """The sampling probability of a row: given, from batch size and population, or 1/iters.

    ``factor`` groups take turns, so that the rate within the group whose turn it is is higher.
    """

    sized = (row["batch_size"] is not None) + (row["population"] is not None)
    if sized and row["probability"] is not None:
        names = [f"--{name.replace('_', '-')}" for name in _SIZES if row[name] is not None]
        raise click.UsageError(f"--probability excludes {' and '.join(names)}: leave one out")
    if sized == 1:
        raise click.UsageError("give --probability, or --batch-size and --population")
    if row["probability"] is not None:
        return _check.probability("probability", row["probability"], closed=True)
    if not sized:
        if row["iters"] is None:
            raise click.UsageError("give --probability, or --batch-size and --population")
        rate, name = 1 / _check.integer("iters", row["iters"]), "iters"
        said = click.get_current_context().meta
        if not said.setdefault("mfopt.default_probability", False):  # once for a sweep
            said["mfopt.default_probability"] = True
            click.echo(f"mfopt: --probability: 1/iters = {rate:g}, by default", err=True)
    else:
        batch = _check.positive("batch_size", row["batch_size"])
        rate, name = batch / _check.integer("population", row["population"]), "batch_size"
    if rate * factor > 1:
        raise _check.reject(
            name,
            row[name],
            "the batch must not exceed the units it is drawn from",
            f"Each of the {factor} groups holds one in {factor} of them." if factor > 1 else "",
        )
    return rate * factor


def analysed(mechanism: Any, row: Row, **more: Any) -> list[Row]:
    """One row of results by the common interface."""
    from mfopt.accounting import account

    found = account(
        mechanism,
        noise_multiplier=row["noise_multiplier"],
        epsilon=row["eps"],
        delta=row["delta"],
        **more,
    )
    return [found.describe()]


def answer(
    arguments: Row,
    scheme: Callable[[Row], Any],
    title: str,
    strategy: Any = None,
    analyse: Callable[..., list[Row]] = analysed,
    **of: Any,
) -> None:
    """:func:`run` for what has one mechanism at each point.

    Args:
      arguments: as for :func:`run`.
      scheme: the sampling at a point.
      title: as for :func:`run`.
      strategy: C, or a function of the scheme that gives it; I if left out.
      analyse: (mechanism, point, how to sample as keywords) -> rows.
      of: what the statement is about, beside what was typed, as keywords of Mechanism.
    """
    from mfopt.accounting import Mechanism

    of |= {name: arguments.pop(name) for name in STATEMENT if name in arguments}
    effort = taken_effort(arguments)

    def compute(row: Row) -> list[Row]:
        sampling = scheme(row)
        made = strategy(sampling) if callable(strategy) else strategy
        matrix = {} if made is None else {"strategy": made}
        mechanism = Mechanism(sampling, group_size=row.get("group_size", 1), **matrix, **of)
        return analyse(mechanism, row, **effort)

    run(arguments, compute, title, effort)


def run(
    arguments: Row,
    compute: Callable[[Row], list[Row]],
    title: str,
    effort: Row | None = None,
    *,
    show: Callable[[list[Row], str | None, str], None] | None = None,
    drawn: str | None = None,
) -> None:
    """Evaluate all points with progress, then print a table or JSON and draw the plot.

    Args:
      arguments: options by name; one may be a sweep. ``plot``, ``force``, ``as_json`` and ``quiet``
        say where results go.
      compute: a point of the sweep -> one row for each method.
      title: of the table, the plot and the progress.
      effort: of :func:`taken_effort`.
      show: prints the results of a sweep of an argument, with this title; None: as a table.
      drawn: what a plot shows; None: what was solved for.
    """
    plot, force, as_json, quiet = (arguments.pop(name) for name in PLACES)
    swept, rows = sweeps.points(arguments)
    given = [text for name, text in _NAMES.items() if arguments.get(name) is not None]
    if len(given) != 2:
        raise click.UsageError(f"give exactly two of {', '.join(_NAMES.values())}")
    if plot is not None:
        check_plot(plot, swept, force)
    results: list[Row] = []
    started = time.perf_counter()
    with Live(not quiet and not as_json) as live:
        for number, row in enumerate(rows):
            note = "" if swept is None else f"{swept} = {row[swept]:g}"
            live(Progress(title, number, len(rows), "answers", note=note))
            found = compute(row)
            results += [one if swept is None else {swept: row[swept], **one} for one in found]
    say_unused(effort or {}, bool(effort) and sampled(results))
    if plot is not None and swept is not None:
        from mfopt_cli.accounts import answered

        answered.draw(results, swept, title, plot, drawn)
    one = swept is None and len(results) == 1
    facts = results[0] if one else {"swept": swept, "results": results}
    facts = {**facts, "seconds": time.perf_counter() - started}
    tell(facts, lambda: (show or print_answers)(results, swept, title), plot, as_json, quiet)


def tell(
    facts: Row, show: Callable[[], None], plot: Path | None, as_json: bool, quiet: bool
) -> None:
    """Print answers as JSON or as a table.

    Args:
      facts: the JSON output.
      show: prints the table.
      plot: file that was drawn.
      as_json, quiet: what was asked for.
    """
    if as_json:
        display.json_object(facts)
    elif not quiet:
        show()
        if plot is not None:
            display.print_text(f"plot: {plot}")


def taken_effort(arguments: Row) -> Row:
    """Options of a sampled account for ``accounting.account``, removed from ``arguments``."""
    if "estimate" not in arguments:
        return {}
    samples, seed, estimate = (arguments.pop(name) for name in ("samples", "seed", "estimate"))
    certificate = arguments.pop("certificate", "monte-carlo")
    if estimate and (samples is not None or seed is not None):
        raise click.UsageError(
            "--estimate excludes --certify-samples and --seed: it certifies nothing"
        )
    effort = {"samples": samples, "seed": seed, "certify": not estimate}
    return effort if certificate == "monte-carlo" else {**effort, "certificate": certificate}


def say_unused(effort: Row, sampled: bool) -> None:
    """A note where how to sample was said, and no samples were taken."""
    typed = {"samples": "--certify-samples", "seed": "--seed", "certify": "--estimate"}
    given = [
        typed[name] for name, value in effort.items() if value not in (None, True) and name in typed
    ]
    if given and not sampled:
        click.echo(f"mfopt: {', '.join(given)}: no samples were needed", err=True)


def sampled(results: list[Row]) -> bool:
    """Return True if any answer is a Monte Carlo result."""
    return any(row["failure_probability"] or row["status"] == "estimate" for row in results)


def print_answers(results: list[Row], swept: str | None, title: str) -> None:
    """Print one answer with all that is known of it, or a line for each of a sweep."""
    from mfopt_cli.accounts import answered

    if len(results) == 1 and swept is None:
        display.table(title, answered.described(results[0]))
        return
    display.print_text(f"{title}; {answered.protects(results[0], swept)}", style="bold")
    display.columns(*answered.table(results, swept))


def check_plot(path: Path, swept: str | None, force: bool) -> None:
    """Refuse a plot that cannot be drawn or written before any work is done."""
    from mfopt._runtime import _files

    if swept is None:
        raise click.UsageError("--plot needs a sweep, for example --group-size 1:64")
    _files.check_output(path, force=force, name="plot", suffixes=(".png", ".svg", ".pdf"))
