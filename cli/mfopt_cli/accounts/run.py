"""mfopt account run: what a run of one or several phases has cost, from its beginning on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt.progress import Progress
from mfopt_cli import answers, display, options
from mfopt_cli.accounts import shared
from mfopt_cli.live import Live


@click.command("run", cls=options.Command)
@click.argument("phases", nargs=-1, required=True, metavar="PHASE...")
@options.eps("ε at which δ is evaluated, in place of --delta.")
@options.delta("δ of every statement.")
@options.option(
    "--points",
    type=options.Count(options.MOST_POINTS),
    default=10,
    show_default=True,
    help="Number of points at which to report ε; whole epochs where bins are kept.",
)
@options.option(
    "--group-size",
    type=options.Count(options.MOST_GROUP),
    default=1,
    help="Size of the group of units that is protected together.",
)
@shared.adjacency
@options.unit
@shared.verified
@shared.results
def run(
    phases: tuple[str, ...],
    epsilon: float | None,
    delta: float | None,
    points: int,
    group_size: int,
    adjacency: str,
    privacy_unit: str,
    plot: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **arguments: Any,
) -> None:
    """ε over a run: what has been spent after each part of it, by every scheme that has an account.

    A PHASE is a factorization FILE, or SCHEME:NAME=VALUE,...[/STRATEGY]@SIGMA, with C = I unless
    identity, sqrt, banded-sqrt:BANDS or a FILE is named. Phases follow each other on the same
    data, each with its own noise, batches and scheme; one of them may have a sampled account.

    \b
    Example:
      mfopt account run poisson:probability=0.02,iterations=500@1.1 \\
          poisson:probability=0.05,iterations=200@1.6 --delta 1e-6 --plot run.png
    """
    if (epsilon is None) == (delta is None):
        raise click.UsageError("give one of --eps, --delta: each phase has its noise multiplier")
    if plot is not None:
        answers.check_plot(plot, "phases", force)
    from mfopt.accounting.phases import Phase, over_training

    effort = answers.taken_effort(arguments)
    of: Any = {"group_size": group_size, "privacy_unit": privacy_unit, "adjacency": adjacency}
    made = [_phase(text, of) for text in phases]
    asked: Any = {"epsilon": epsilon, "delta": delta, "points": points, **effort}
    if len(made) == 1:  # one mechanism has its own account, for groups too
        found = over_training(made[0][0], made[0][1], **asked)
    else:
        found = over_training([Phase(*one) for one in made], **asked)
    total = sum(mechanism.iterations for mechanism, _ in made)
    rows: list[dict[str, Any]] = []
    with Live(not quiet and not as_json) as live:
        live(Progress("run", 0, total, "iterations"))
        for at, guarantee in found:
            live(Progress("run", at, total, "iterations"))
            rows.append({"iterations": at, **guarantee.describe()})
    answers.say_unused(effort, answers.sampled(rows))
    if plot is not None:
        from mfopt_cli.accounts import answered

        ends = [sum(m.iterations for m, _ in made[: k + 1]) for k in range(len(made) - 1)]
        answered.draw_run(rows, ends, plot)
    if as_json:
        display.json_object({"results": rows})
    elif not quiet:
        from mfopt_cli.accounts import answered

        display.print_text(f"over the run; {answered.protects(rows[0])}", style="bold")
        display.columns(*answered.table(rows, "iterations"))
        if plot is not None:
            display.print_text(f"plot: {plot}")


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
