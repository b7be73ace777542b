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
from typing import TYPE_CHECKING, Any

import click

from mfopt import words
from mfopt.guarantee import Guarantee, questionable_delta
from mfopt.progress import Progress, listening, within
from mfopt_cli import display, sweeps
from mfopt_cli.live import of_command

if TYPE_CHECKING:
    from mfopt.experiments.plots import Curve, Panel
    from mfopt.mechanism import Mechanism
    from mfopt.sampling import Scheme
    from mfopt.strategies import Strategy

Row = dict[str, Any]
_RATES = (1e-4, 1e-3, 1e-2, 0.1)  # false positive rates of a table
_DRAWN_RATES = (1e-6, 1.0, 61)  # least, largest and number of those of a plot
_NOISE_UNIT = "× clip norm, for C as stored"
_ROUNDED_UP = ("epsilon", "delta", "noise_multiplier")
_LABELS = {"epsilon": "ε", "delta": "δ", "noise_multiplier": "noise multiplier σ"}
_PLACES = ("plot", "force", "as_json", "quiet")
STATEMENT = ("privacy_unit", "adjacency")
# option -> number of a statement, two of which are typed
_FIELDS = {"noise_multiplier": "noise_multiplier", "eps": "epsilon", "delta": "delta"}


def question(row: Row) -> Row:
    """σ, ε and δ of a row, by the library's names; None for the one to solve for."""
    return {field: row[name] for name, field in _FIELDS.items()}


def analysed(mechanism: Mechanism, row: Row, **effort: Any) -> Guarantee:
    """The answer of the mechanism's own accountant."""
    from mfopt.accounting import account

    return account(mechanism, **question(row), **effort)


def answer(
    arguments: Row,
    scheme: Callable[[Row], Scheme],
    title: str,
    strategy: Strategy | Callable[[Scheme], Strategy] | None = None,
    analyse: Callable[..., Guarantee] = analysed,
    noise_unit: str | None = None,
    **statement: Any,
) -> None:
    """Evaluate all points with progress, then print a table or JSON and draw the plot.

    Args:
      arguments: options by name; one may be a sweep. ``plot``, ``force``, ``as_json`` and ``quiet``
        say where results go.
      scheme: the sampling at a point.
      title: of the table, the plot and the progress.
      strategy: C, or a function of the scheme that gives it; I if left out.
      analyse: (mechanism, point, how to sample as keywords) -> guarantee.
      noise_unit: unit of σ, where it is not the usual one.
      statement: keywords of Mechanism, beside what was typed.
    """
    from mfopt.accounting import Mechanism

    statement |= {name: arguments.pop(name) for name in STATEMENT if name in arguments}
    places = SimpleNamespace(**{name: arguments.pop(name) for name in _PLACES})
    effort, curve = pop_effort(arguments), arguments.pop("curve", False)
    swept, points = sweeps.points(arguments)
    if sum(arguments[name] is not None for name in _FIELDS) != 2:
        typed = ", ".join(f"--{name.replace('_', '-')}" for name in _FIELDS)
        raise click.UsageError(f"give exactly two of {typed}")
    if curve and swept is not None:
        raise click.UsageError("--curve is about one answer: remove it, or the sweep")
    if places.plot is not None:
        check_plot(places.plot, "curve" if curve else swept, places.force)

    def compute(point: Row) -> Row:
        sampling = scheme(point)
        matrix = strategy(sampling) if callable(strategy) else strategy
        if matrix is not None:
            statement["strategy"] = matrix
        mechanism = Mechanism(sampling, group_size=point.get("group_size", 1), **statement)
        guarantee = analyse(mechanism, point, **effort)
        row = guarantee.describe()
        if noise_unit is not None:
            row["noise_unit"] = noise_unit
        if curve:
            sigma = guarantee.noise_multiplier
            row["curve"] = _curve(
                guarantee,
                lambda epsilon: analyse(
                    mechanism,
                    {**point, "noise_multiplier": sigma, "eps": epsilon, "delta": None},
                    **effort,
                ),
            )
        return row if swept is None else {swept: point[swept], **row}

    started = time.perf_counter()
    rows: list[Row] = []
    with of_command(places) as live:
        for number, point in enumerate(points):
            note = "" if swept is None else f"{swept} = {point[swept]:g}"
            total = None if swept is None else len(points)
            live(Progress(title, number, total, "answers" if swept else "", note=note))
            with listening(within(live, note) if swept else live):
                rows.append(compute(point))
    say_unused(effort, bool(effort) and sampled(rows))
    say_doubt(
        questionable_delta(row["delta"], point.get("population"))
        for row, point in zip(rows, points, strict=True)
    )
    if places.plot is not None:
        panel = _sweep_panel(rows, swept, title) if swept else _curve_panel(rows[0]["curve"], title)
        _draw(places.plot, panel)
    facts = rows[0] if swept is None else {"swept": swept, "results": rows}
    facts = {**facts, "seconds": time.perf_counter() - started}
    tell(facts, lambda: print_answers(rows, swept, title), places)


def _curve(stated: Guarantee, guarantee_at: Callable[[float], Guarantee]) -> Row:
    """What an attacker can do, by statements at the answer's σ and several ε."""
    import numpy as np

    from mfopt.accounting.tradeoff import SHARES, Tradeoff, answered

    largest = stated.epsilon if 0 < stated.epsilon < math.inf else 1.0
    statements = answered(guarantee_at, [share * largest for share in SHARES])
    rates = np.append(np.geomspace(*_DRAWN_RATES), _RATES)
    return Tradeoff([stated, *statements]).describe(np.unique(rates))


def tell(facts: Row, show: Callable[[], None], places: SimpleNamespace) -> None:
    """Print answers: ``facts`` as JSON, or by ``show``, or not at all."""
    if places.as_json:
        display.json_object(facts)
    elif not places.quiet:
        show()
        if places.plot is not None:
            display.print_text(f"plot: {places.plot}")


def pop_effort(arguments: Row) -> Row:
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
    unused = [
        typed[name] for name, value in effort.items() if value not in (None, True) and name in typed
    ]
    if unused and not sampled:
        click.echo(f"mfopt: {', '.join(unused)}: no samples were needed", err=True)


def sampled(results: list[Row]) -> bool:
    """Return True if any answer is a Monte Carlo result."""
    return any(row["failure_probability"] or row["status"] == "estimate" for row in results)


def print_answers(results: list[Row], swept: str | None, title: str) -> None:
    """Print one answer with all that is known of it, or a line for each of a sweep."""
    if len(results) == 1 and swept is None:
        display.table(title, _described(results[0]))
        return
    display.print_text(f"{title}; {_protects(results[0], swept)}", style="bold")
    names = list(dict.fromkeys([*([swept] if swept else []), *_ROUNDED_UP, "method", "status"]))
    display.columns(names, [[_cell(row, name) for name in names] for row in results])


def check_plot(path: Path, swept: str | None, force: bool) -> None:
    """Refuse a plot that cannot be drawn or written before any work is done."""
    from mfopt._runtime import _files

    if swept is None:
        rule = "--plot needs a sweep, for example --group-size 1:64, or --curve where there is one"
        raise click.UsageError(rule)
    _files.check_output(path, force=force, name="plot", suffixes=(".png", ".svg", ".pdf"))


def _described(row: Row) -> display.Rows:
    """One answer: names and values."""
    sigma = _up(row["noise_multiplier"])
    rows = [
        ("ε", _up(row["epsilon"])),
        ("δ", _up(row["delta"])),
        ("noise multiplier σ", f"{sigma}  ({row.get('noise_unit', _NOISE_UNIT)})"),
        ("protects", _protects(row)),
        ("status", status(row)),
        ("at least", _lower_end(row)),
        ("method", row["method"]),
    ]
    return [(name, value) for name, value in [*rows, *_attacker(row.get("curve"))] if value]


def _attacker(curve: Row | None) -> display.Rows:
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
    shown = words.round_up(-below).removeprefix("-")  # towards 0
    return f"{_LABELS[solved].split()[-1]} = {shown}, proved for some data sets"


def _protects(row: Row, swept: str | None = None) -> str:
    """Whom the statement protects, and how neighbours differ."""
    group = "group_size" if swept == "group_size" else row["group_size"]
    protected = row["privacy_unit"] if group == 1 else f"groups of {group} {row['privacy_unit']}s"
    return f"{protected}, {row['adjacency']} adjacency"


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if name == "status" and math.isinf(max(row["epsilon"], row["noise_multiplier"])):
        return "no answer"
    if isinstance(value, float):
        return _up(value) if name in _ROUNDED_UP else f"{value:g}"
    return str(value)


def _up(value: float) -> str:
    return "beyond numerical range" if math.isinf(value) else words.round_up(value)


def status(row: Row) -> str:
    """Whether a guarantee, as it describes itself, was proved, and how surely."""
    chance = f"Monte Carlo failure probability <= {row['failure_probability']:.1e}, included in δ"
    said = {
        "exact": "exact, in closed form"
        if row["method"].startswith("Gaussian mechanism")
        else "exact up to discretization, rounded up",
        "certified": f"certified; {chance if row['failure_probability'] else 'deterministic'}",
        "bound": "an upper bound",
        "estimate": "NOT CERTIFIED, an estimate only",
    }
    return said[row["status"]]


def _sweep_panel(results: Sequence[Row], swept: str, title: str) -> Panel:
    """What was solved for against the swept argument, one line per method."""
    from mfopt.experiments.plots import Panel

    solved = [n for n in _ROUNDED_UP if n in results[0] and n != _FIELDS.get(swept)]
    varying = [n for n in solved if len({row[n] for row in results}) > 1]
    shown = varying[0] if varying else "epsilon"
    finite = [row for row in results if math.isfinite(row[shown])]
    methods: dict[str, list[Row]] = {}
    for row in finite:
        methods.setdefault(row["method"], []).append(row)
    if len(methods) > 1:  # one answer for each point, by different methods: joined into one
        methods = {"all": finite} | methods
    logs = _spans(results, swept), _spans(finite, shown)
    curves = [_line(name, rows, swept, shown) for name, rows in methods.items()]
    return Panel(curves, title, swept.replace("_", " "), _LABELS[shown], *logs)


def _curve_panel(curve: Row, title: str) -> Panel:
    """The bound of the true positive rate against the false positive rate."""
    from mfopt.experiments.plots import Curve, Panel

    rates = curve["false_positive_rates"]
    bound = Curve("upper bound", rates, curve["true_positive_rates"], look={"marker": ""})
    guess = Curve("guessing", rates, rates, look={"marker": "", "linestyle": "--"})
    return Panel([bound, guess], title, "false positive rate", "true positive rate", True, True)


def draw_run(results: Sequence[Row], ends: Sequence[int], path: Path) -> None:
    """Draw the privacy cost of a run after each number of iterations, to a file.

    ``ends``: 0, and the iterations done at the end of each phase.
    """
    from mfopt.experiments.plots import Panel

    solved = "delta" if len({row["epsilon"] for row in results}) == 1 else "epsilon"
    fixed = "epsilon" if solved == "delta" else "delta"
    finite = [{"iterations": 0, solved: 0.0}]
    finite += [row for row in results if math.isfinite(row[solved])]
    curves: list[Curve] = []
    for number, (begun, ended) in enumerate(itertools.pairwise(ends), 1):
        start = [row for row in finite if row["iterations"] <= begun][-1:]
        part = start + [row for row in finite if begun < row["iterations"] <= ended]
        label = "the run" if len(ends) == 2 else f"phase {number}"
        # a value is that of all iterations since the last
        curves.append(_line(label, part, "iterations", solved, drawstyle="steps-pre"))
    title = f"{_LABELS[solved]} over the run at {_LABELS[fixed]} = {results[0][fixed]:g}"
    _draw(path, Panel(curves, title, "iterations done", _LABELS[solved], False, False))


def _line(label: str, rows: Sequence[Row], x: str, y: str, **look: str) -> Curve:
    from mfopt.experiments.plots import Curve

    return Curve(label, [row[x] for row in rows], [row[y] for row in rows], look=look)


def _draw(path: Path, panel: Panel) -> None:
    from mfopt.experiments import plots

    plots.write_figure(plots.draw([panel]), path)


def _spans(rows: Sequence[Row], name: str) -> bool:
    """Return True if values span enough for a logarithmic axis."""
    values = [row[name] for row in rows if row[name] > 0]
    return len(values) == len(rows) > 0 and max(values) > 30 * min(values)
