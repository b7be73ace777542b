"""mfopt account run: what a run of one or several phases has cost, from its beginning on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt.progress import Progress
from mfopt_cli import answers, options
from mfopt_cli.accounts import shared
from mfopt_cli.live import Live
from mfopt_cli.options import MOST_GROUP, MOST_POINTS, Count, option


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
def run(asked: Any) -> None:
    """ε over a run: what has been spent after each part of it, by every scheme that has an account.

    A PHASE is a factorization FILE, or SCHEME:NAME=VALUE,...[/STRATEGY]@SIGMA, with C = I unless
    identity, sqrt, banded-sqrt:BANDS or a FILE is named. Phases follow each other on the same
    data, each with its own noise, batches and scheme; one of them may have a sampled account.

    \b
    Example:
      mfopt account run poisson:probability=0.02,iterations=500@1.1 \\
          poisson:probability=0.05,iterations=200@1.6 --delta 1e-6 --plot run.png
    """
    if (asked.epsilon is None) == (asked.delta is None):
        raise click.UsageError("give one of --eps, --delta: each phase has its noise multiplier")
    if asked.plot is not None:
        answers.check_plot(asked.plot, "phases", asked.force)
    from mfopt.accounting.phases import Phase, over_training

    effort = answers.taken_effort(vars(asked))
    of = {name: getattr(asked, name) for name in ("group_size", *answers.STATEMENT)}
    made = [_phase(text, of) for text in asked.phases]
    question: Any = {name: getattr(asked, name) for name in ("epsilon", "delta", "points")} | effort
    if len(made) == 1:  # one mechanism has its own account, for groups too
        found = over_training(made[0][0], made[0][1], **question)
    else:
        found = over_training([Phase(*one) for one in made], **question)
    total = sum(mechanism.iterations for mechanism, _ in made)
    rows: list[dict[str, Any]] = []
    with Live(not asked.quiet and not asked.as_json) as live:
        live(Progress("run", 0, total, "iterations"))
        for at, guarantee in found:
            live(Progress("run", at, total, "iterations"))
            rows.append({"iterations": at, **guarantee.describe()})
    answers.say_unused(effort, answers.sampled(rows))
    if asked.plot is not None:
        ends = [sum(m.iterations for m, _ in made[: k + 1]) for k in range(len(made) - 1)]
        answers.draw_run(rows, ends, asked.plot)
    show = functools.partial(answers.print_answers, rows, "iterations", "over the run")
    answers.tell({"results": rows}, show, asked.plot, asked.as_json, asked.quiet)


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
