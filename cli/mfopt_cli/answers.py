"""Answers of accountants on the command line, one or a sweep, as text, table or figure.

Nothing is rounded towards less privacy.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from mfopt import words
from mfopt._runtime import _check
from mfopt.guarantee import questionable_delta
from mfopt.progress import Progress, Report, listening, within
from mfopt_cli import display, sweeps
from mfopt_cli.live import Live

Row = dict[str, Any]
_RATES = (1e-4, 1e-3, 1e-2, 0.1)  # false positive rates of a table
_DRAWN_RATES = (1e-6, 1.0, 61)  # least, largest and number of those of a plot
_NOISE_UNIT = "× clip norm, for C as stored"
_ROUNDED_UP = ("epsilon", "delta", "noise_multiplier")
_LABELS = {"epsilon": "ε", "delta": "δ", "noise_multiplier": "noise multiplier σ"}
PLACES = ("plot", "force", "as_json", "quiet")
_SIZES = ("batch_size", "population")
STATEMENT = ("privacy_unit", "adjacency")
_NAMES = {"noise_multiplier": "--noise-multiplier", "eps": "--eps", "delta": "--delta"}


def iterations(row: Row) -> int:
    """Number of iterations n of a row: epochs times iterations per epoch."""
    total, epochs, iters = row["iterations"], row["epochs"], row["iters"]
    if total is not None:
        if epochs is not None or iters is not None:
            rule = "--iterations excludes --epochs and --iters: it is their product n"
            raise click.UsageError(rule)
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
      arguments, title: as for :func:`run`.
      scheme: the sampling at a point.
      strategy: C, or a function of the scheme that gives it; I if left out.
      analyse: (mechanism, point, how to sample as keywords) -> rows.
      of: what the statement is about, beside what was typed, as keywords of Mechanism.
    """
    from mfopt.accounting import Mechanism

    of |= {name: arguments.pop(name) for name in STATEMENT if name in arguments}
    effort, curve = taken_effort(arguments), arguments.pop("curve")

    def compute(row: Row) -> list[Row]:
        sampling = scheme(row)
        made = strategy(sampling) if callable(strategy) else strategy
        matrix = {} if made is None else {"strategy": made}
        mechanism = Mechanism(sampling, group_size=row.get("group_size", 1), **matrix, **of)
        rows = analyse(mechanism, row, **effort)
        if not curve:
            return rows

        def answer_at(sigma: float, epsilon: float) -> Row:
            question = {"noise_multiplier": sigma, "eps": epsilon, "delta": None}
            return analyse(mechanism, {**row, **question}, **effort)[0]

        return [{**each, "curve": _curve(each, answer_at)} for each in rows]

    run(arguments, compute, title, effort, curve=curve)


def _curve(row: Row, answer_at: Callable[[float, float], Row]) -> Row:
    """What an attacker can do, by statements at the answer's σ and several ε."""
    import numpy as np

    from mfopt.accounting.tradeoff import SHARES, Tradeoff, answered
    from mfopt.guarantee import Guarantee

    stated, sigma = Guarantee(**row), row["noise_multiplier"]
    largest = row["epsilon"] if 0 < row["epsilon"] < math.inf else 1.0
    epsilons = [share * largest for share in SHARES]
    others = answered(lambda epsilon: Guarantee(**answer_at(sigma, epsilon)), epsilons)
    rates = np.append(np.geomspace(*_DRAWN_RATES), _RATES)
    return Tradeoff([stated, *others]).describe(np.unique(rates))


def run(
    arguments: Row,
    compute: Callable[[Row], list[Row]],
    title: str,
    effort: Row | None = None,
    *,
    curve: bool = False,
) -> None:
    """Evaluate all points with progress, then print a table or JSON and draw the plot.

    Args:
      arguments: options by name; one may be a sweep. ``plot``, ``force``, ``as_json`` and ``quiet``
        say where results go.
      compute: a point of the sweep -> one row for each method.
      title: of the table, the plot and the progress.
      effort: of :func:`taken_effort`.
      curve: whether rows have a "curve", which a plot then shows.
    """
    asked = SimpleNamespace(**{name: arguments.pop(name) for name in PLACES})
    swept, rows = sweeps.points(arguments)
    given = [text for name, text in _NAMES.items() if arguments.get(name) is not None]
    if len(given) != 2:
        raise click.UsageError(f"give exactly two of {', '.join(_NAMES.values())}")
    if curve and swept is not None:
        raise click.UsageError("--curve is about one answer: remove it, or the sweep")
    if asked.plot is not None:
        check_plot(asked.plot, "curve" if curve else swept, asked.force)
    results: list[Row] = []
    doubts: list[str] = []
    started = time.perf_counter()
    with Live(not asked.quiet and not asked.as_json) as live:
        for number, row in enumerate(rows):
            if swept is None:
                live(Progress(title))
                report: Report = live
            else:
                note = f"{swept} = {row[swept]:g}"
                live(Progress(title, number, len(rows), "answers", note=note))
                report = within(live, note)
            with listening(report):
                found = compute(row)
            results += [one if swept is None else {swept: row[swept], **one} for one in found]
            deltas = [one["delta"] for one in found if "delta" in one]
            doubts += [questionable_delta(delta, row.get("population")) for delta in deltas]
    say_unused(effort or {}, bool(effort) and sampled(results))
    say_doubt(doubts)
    if asked.plot is not None and swept is not None:
        _draw(results, swept, title, asked.plot)
    elif asked.plot is not None:
        _draw_curve(results[0]["curve"], title, asked.plot)
    one = swept is None and len(results) == 1
    facts = results[0] if one else {"swept": swept, "results": results}
    facts = {**facts, "seconds": time.perf_counter() - started}
    tell(facts, lambda: print_answers(results, swept, title), asked)


def tell(facts: Row, show: Callable[[], None], asked: Any) -> None:
    """Print answers as was asked for: ``facts`` as JSON, or by ``show``, or not at all."""
    if asked.as_json:
        display.json_object(facts)
    elif not asked.quiet:
        show()
        if asked.plot is not None:
            display.print_text(f"plot: {asked.plot}")


def taken_effort(arguments: Row) -> Row:
    """Options of a sampled account for ``accounting.account``, removed from ``arguments``."""
    if "estimate" not in arguments:
        return {}
    samples, seed, estimate = (arguments.pop(name) for name in ("samples", "seed", "estimate"))
    certificate = arguments.pop("certificate", "monte-carlo")
    if estimate and (samples is not None or seed is not None):
        rule = "--estimate excludes --certify-samples and --seed: it certifies nothing"
        raise click.UsageError(rule)
    effort = {"samples": samples, "seed": seed, "certify": not estimate}
    return effort if certificate == "monte-carlo" else {**effort, "certificate": certificate}


def say_doubt(texts: Iterable[str]) -> None:
    """Print the first warning about a δ, once for a sweep."""
    if text := next(filter(None, texts), ""):
        click.echo(f"mfopt: warning: {text}", err=True)


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
    if len(results) == 1 and swept is None:
        display.table(title, _described(results[0]))
        return
    display.print_text(f"{title}; {_protects(results[0], swept)}", style="bold")
    display.columns(*_table(results, swept))


def check_plot(path: Path, swept: str | None, force: bool) -> None:
    """Refuse a plot that cannot be drawn or written before any work is done."""
    from mfopt._runtime import _files

    if swept is None:
        rule = "--plot needs a sweep, for example --group-size 1:64, or --curve where there is one"
        raise click.UsageError(rule)
    _files.check_output(path, force=force, name="plot", suffixes=(".png", ".svg", ".pdf"))


def _described(row: Row) -> list[tuple[str, str]]:
    """One answer: names and values."""
    sigma = _up(row["noise_multiplier"])
    rows = [
        ("ε", _up(row["epsilon"])),
        ("δ", _up(row["delta"])),
        ("noise multiplier σ", f"{sigma}  ({row.get('noise_unit', _NOISE_UNIT)})"),
        ("protects", _protects(row)),
        ("status", _status(row)),
        ("at least", _lower_end(row)),
        ("method", row["method"]),
    ]
    return [(name, value) for name, value in [*rows, *_attacker(row.get("curve"))] if value]


def _attacker(curve: Row | None) -> list[tuple[str, str]]:
    """Rows of a table: bounds of what an attacker can do."""
    if curve is None:
        return []
    tpr = dict(zip(curve["false_positive_rates"], curve["true_positive_rates"], strict=True))
    rows = [(f"TPR at FPR {rate:g}", f"<= {words.round_up(tpr[rate], 4)}") for rate in _RATES]
    rows.append(("advantage", f"<= {words.round_up(curve['advantage'], 4)}  (TPR - FPR)"))
    mu = curve["mu"]
    shown = "not bounded" if mu is None else f"<= {words.round_up(mu, 4)}"
    rows.append(("Gaussian μ", f"{shown}  (error rates of 0.001 and more)"))
    if curve["failure_probability"]:
        rows.append(("these hold", f"except with probability {curve['failure_probability']:.1e}"))
    return rows


def _lower_end(row: Row) -> str:
    """What some pair of data sets attains, where the answer is a bound and that is known."""
    below, above = row.get("details", {}).get("bracket", (0.0, 0.0))
    solved = next((name for name in _ROUNDED_UP if row[name] == above), None)
    if row["status"] not in ("bound", "certified") or not 0 < below < above or solved is None:
        return ""
    shown = words.round_up(-below, 6).removeprefix("-")  # towards 0
    return f"{_LABELS[solved].split()[-1]} = {shown}, proved for some data sets"


def _table(results: Sequence[Row], swept: str | None) -> tuple[list[str], list[list[str]]]:
    """Names of the columns and cells of several answers."""
    names = list(dict.fromkeys([*([swept] if swept else []), *_ROUNDED_UP, "method", "status"]))
    return names, [[_cell(row, name) for name in names] for row in results]


def _protects(row: Row, swept: str | None = None) -> str:
    """Whom the statement protects, and how neighbours differ."""
    group = "group_size" if swept == "group_size" else row["group_size"]
    what = row["privacy_unit"] if group == 1 else f"groups of {group} {row['privacy_unit']}s"
    return f"{what}, {row['adjacency']} adjacency"


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if name == "status" and math.isinf(max(row["epsilon"], row["noise_multiplier"])):
        return "no answer"
    if isinstance(value, float):
        return _up(value) if name in _ROUNDED_UP else f"{value:g}"
    return str(value)


def _up(value: float) -> str:
    return "beyond numerical range" if math.isinf(value) else words.round_up(value, 6)


def _status(row: Row) -> str:
    said = {
        "exact": "exact, in closed form"
        if row["method"].startswith("Gaussian mechanism")
        else "exact up to discretization, rounded up",
        "certified": "certified; Monte Carlo failure probability <= "
        f"{row['failure_probability']:.1e}, included in δ",
        "bound": "an upper bound",
        "estimate": "an ESTIMATE: proves nothing",
    }
    return said.get(row["status"], str(row["status"]))


def _draw(results: Sequence[Row], swept: str, title: str, path: Path) -> None:
    """Draw what was solved for against the swept argument, one line per method, to a file."""
    given = {"eps": "epsilon"}.get(swept, swept)
    solved = [n for n in _ROUNDED_UP if n in results[0] and n != given]
    varying = [n for n in solved if len({row[n] for row in results}) > 1]
    shown = varying[0] if varying else "epsilon"
    name = _LABELS.get(shown, shown.replace("_", " "))
    finite = [row for row in results if math.isfinite(row[shown])]
    methods: dict[str, list[Row]] = {}
    for row in finite:
        methods.setdefault(row.get("method", name), []).append(row)
    if len({row[swept] for row in results}) == len(results) and len(methods) > 1:
        # one answer for each point, by different methods: joined into one
        methods = {"all": finite} | methods
    lines: list[tuple[str, list[Row], Row]] = [(name, rows, {}) for name, rows in methods.items()]
    logs = _spans(results, swept), _spans(finite, shown)
    _write(lines, (swept, shown), (title, swept.replace("_", " "), name, *logs), path)


def _draw_curve(curve: Row, title: str, path: Path) -> None:
    """Draw the bound of the true positive rate against the false positive rate, to a file."""
    rates = curve["false_positive_rates"]
    keys = ("false_positive_rate", "true_positive_rate")
    bound = [
        dict(zip(keys, pair, strict=True))
        for pair in zip(rates, curve["true_positive_rates"], strict=True)
    ]
    guess = [dict.fromkeys(keys, rate) for rate in rates]
    lines: list[tuple[str, list[Row], Row]] = [
        ("upper bound", bound, {"marker": ""}),
        ("guessing", guess, {"marker": "", "linestyle": "--"}),
    ]
    about = (title, "false positive rate", "true positive rate", True, True)
    _write(lines, keys, about, path)


def draw_run(results: Sequence[Row], ends: Sequence[int], path: Path) -> None:
    """Draw the privacy cost of a run after each number of iterations, to a file."""
    solved = "delta" if len({row["epsilon"] for row in results}) == 1 else "epsilon"
    finite = [row for row in results if math.isfinite(row[solved])]
    pieces = [0, *ends, max(row["iterations"] for row in results)]
    lines: list[tuple[str, list[Row], Row]] = []
    for number, (first, last) in enumerate(itertools.pairwise(pieces), 1):
        begun = [row for row in finite if row["iterations"] <= first][-1:]
        begun = begun or [{"iterations": 0, solved: 0}]
        part = begun + [row for row in finite if first < row["iterations"] <= last]
        label = "the run" if len(pieces) == 2 else f"phase {number}"
        steps = {"drawstyle": "steps-pre"}  # a value is that of all iterations since the last
        lines.append((label, part, steps))
    given = "epsilon" if solved == "delta" else "delta"
    at = f"{_LABELS[given]} = {results[0][given]:g}"
    title = f"{_LABELS[solved]} over the run at {at}"
    about = (title, "iterations done", _LABELS[solved], False, False)
    _write(lines, ("iterations", solved), about, path)


def _write(
    lines: Sequence[tuple[str, Sequence[Row], Row]],
    axes: tuple[str, str],
    about: tuple[str, str, str, bool, bool],
    path: Path,
) -> None:
    """Draw lines of (label, rows, look), two of the rows' numbers against each other."""
    from mfopt.experiments import plots

    x, y = axes
    curves = [
        plots.Curve(label, [row[x] for row in rows], [row[y] for row in rows], look=look)
        for label, rows, look in lines
    ]
    plots.write_figure(plots.draw([plots.Panel(curves, *about)]), path)


def _spans(rows: Sequence[Row], name: str) -> bool:
    """Return True if values span enough for a logarithmic axis."""
    values = [row[name] for row in rows if row[name] > 0]
    return len(values) == len(rows) > 0 and max(values) > 30 * min(values)
