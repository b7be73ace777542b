"""The table of the field: every mechanism at its best size and sampling, by RMSE and final model.

RMSE and final-model error stand each at the size (bands, groups, separation, buffers) that is best
for it; ``field-sizes-*.csv`` have every size that was run. A size is tuned by descent: from a start
on, the neighbours of both best sizes are run until none is better, so that no best lies at an end
of what was run. C of peers is found as they publish it: in closed form, in fixed order, or for the
RMSE of prefix sums. σ is estimated as in ``mfopt compare``.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from common import Artifact, Run
from mechanism_tables import write_table

from mfopt import final_model, query_error
from mfopt._runtime._float64 import float64
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo import band, pattern_frozen
from mfopt.accounting.monte_carlo.pattern_frozen import PatternProposal, PatternTerms
from mfopt.accounting.monte_carlo.random_partition import RandomGroups
from mfopt.experiments import families, tables
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import (
    B_MIN_SEP,
    BALLS,
    FRESH,
    POISSON,
    Goal,
    SigmaCell,
    UnamplifiedCell,
    strategy_of,
    with_strategy,
)
from mfopt.optimize import Form, Question, Search, Target, defaults, optimize
from mfopt.sampling import CyclicPoisson
from mfopt.strategies import BandedInverseRoot, Toeplitz, series
from mfopt.workloads import PrefixSums

EPSILONS, DELTA = (0.5, 2.0, 8.0, 16.0), 1e-5
SHAPES = ((8, 32), (4, 64), (16, 128))  # epochs × iterations
# sizes to choose from: bands, powers of two up to half an epoch and then these parts of one; with a
# random partition of them as many groups, or so many times as many; separations in sixteenths of an
# epoch, which 32 iterations have only the even ones of
EIGHTHS = (6, 7, 8, 12, 16, 24, 32)
GROUPS_OF_BAND = (1, 2, 4, 8)
SIXTEENTHS = (4, 6, 8, 10, 12, 14, 15)
# bands that tuning starts from at 128 iterations, by ε; under balls-in-bins, which they take no
# amplification from
START = {0.5: 4, 2.0: 8, 8.0: 64, 16.0: 96}
START_OF_BALLS = {0.5: 16, 2.0: 64, 8.0: 96, 16.0: 96}
SAMPLES, FEW_SAMPLES = 2**13, 2**10  # of σ under b-min-sep and with a random partition
ORDERS = (1.0, 2.0, 4.0, 7.0, 12.0, 20.0)  # of proposals with a random partition
ERRORS = "rmse", "final_model_error"
MFOPT_DEFAULT, MFOPT_FRESH_DEFAULT = "mfopt, default objective", "mfopt, fresh bins"
MFOPT_RMSE, MFOPT_FRESH_RMSE = "mfopt, RMSE objective", "mfopt, fresh bins, RMSE objective"
RANDOM_PARTITION, B_MIN_SEP_FAMILY = "random-partition", "banded-toeplitz+b-min-sep"
BANDED_INVERSE = "banded-inverse"
TUNED = (  # families with sizes to choose from
    *("banded+poisson", "banded-toeplitz+poisson", RANDOM_PARTITION, B_MIN_SEP_FAMILY),
    *("banded+balls-in-bins", "banded-inverse-sqrt", BANDED_INVERSE, "bifr"),
)


class Entry(NamedTuple):
    """One mechanism of the table.

    Attributes:
      label: what a reader sees.
      source: author and year of what was published; "" of mfopt's own.
      tuned: what is chosen here at each ε.
      names: families of ``mfopt compare`` that it is the best of.
    """

    label: str
    source: str
    tuned: str
    names: tuple[str, ...] = ()


def published(name: str, source: str, tuned: str) -> Entry:
    """An entry with the family's own label."""
    return Entry(families.label(name), source, tuned, (name,))


CYCLIC = "Choquette-Choo et al. 2023, a fixed partition"
FIELD = (
    published("dpsgd+poisson", "Abadi et al. 2016", "nothing"),
    published("dpsgd+fresh-bins", "Feldman and Shenfeld 2025, random allocation", "nothing"),
    published("banded+poisson", CYCLIC, "bands, as many groups"),
    published("banded-toeplitz+poisson", CYCLIC, "bands, as many groups"),
    Entry(
        "banded, cyclic Poisson, random partition",
        "jax-privacy 2026",
        "bands and groups",
        (RANDOM_PARTITION,),
    ),
    published(B_MIN_SEP_FAMILY, "Dong and Ganesh 2026", "bands and separation"),
    published("banded+balls-in-bins", "Choquette-Choo et al. 2024", "bands"),
    published("blt-4", "Choquette-Choo et al. 2024; McMahan et al. 2024", "nothing, 4 buffers"),
    published("toeplitz", "Choquette-Choo et al. 2024", "nothing"),
    published("banded-inverse-sqrt", "Kalinin et al. 2025", "bands"),
    Entry(
        "optimized banded inverse, balls-in-bins", "Kalinin et al. 2025", "bands", (BANDED_INVERSE,)
    ),
    published("lambda-cgd", "Kalinin et al. 2026, by its abstract", "λ"),
    published("bifr", "Kalinin et al. 2026, by its abstract", "γ and bands"),
    Entry(MFOPT_RMSE, "", "form of C, 4 buffers", ("blt-4-scaled", "wave-blt-4-scaled")),
    Entry(MFOPT_DEFAULT, "", "form of C, 4 buffers"),
    Entry(
        MFOPT_FRESH_RMSE,
        "",
        "form of C",
        ("cleared-blt-4-scaled+fresh-bins", "banded-toeplitz-scaled+fresh-bins"),
    ),
    Entry(MFOPT_FRESH_DEFAULT, "", "nothing, 4 buffers"),
)


@dataclasses.dataclass(frozen=True)
class DefaultCell(Cell):
    """C of ``mfopt optimize`` without further options: for the final model, any schedule."""

    name = "field-default"
    goal: Goal

    def run(self, *needed: Result) -> Result:
        goal, scheme = self.goal, self.goal.bin_scheme()
        kinds = defaults.kinds(scheme, goal.epsilon, defaults.BUFFERS)
        question = Question(
            Target(goal.epsilon, goal.delta, seed=goal.seed),
            Form(kinds, buffers=defaults.BUFFERS),
            search=Search(time_scale=True),
        )
        outcome = optimize(scheme, question)
        return with_strategy(
            outcome.strategy, status=outcome.status, start_sigma=outcome.noise_multiplier
        )


@dataclasses.dataclass(frozen=True)
class BandedInverseCell(Cell):
    """C whose inverse has so many free coefficients, of least RMSE of prefix sums in fixed order.

    The coefficients after the first are negative and their sum is at least -1, so that C has no
    negative entry, none above 1, and the earliest participations are the worst.
    """

    name = "field-banded-inverse"
    bins: int
    epochs: int
    bands: int

    @float64
    def run(self, *needed: Result) -> Result:
        n = self.bins * self.epochs

        def inverse(logits: Any) -> jax.Array:
            shares = jax.nn.softmax(jnp.append(logits, 0.0))[:-1]
            return jnp.pad(jnp.append(1.0, -shares), (0, n - self.bands))

        @jax.jit
        @jax.value_and_grad
        def log_error(logits: jax.Array) -> jax.Array:
            sums = jnp.cumsum(inverse(logits))
            entries = series.reciprocal(inverse(logits)).reshape(self.epochs, self.bins)
            squares = jnp.sum(jnp.cumsum(entries, axis=0) ** 2)
            return jnp.log(jnp.arange(n, 0, -1) @ sums**2) + jnp.log(squares)

        shares = -BandedInverseRoot(np.array(0.5), self.bands).inverse_coefs(n)[1 : self.bands]
        optimum = scipy.optimize.minimize(
            lambda x: tuple(map(np.asarray, log_error(x))),
            np.log(shares / (1 - np.sum(shares))),
            jac=True,
            method="L-BFGS-B",
            tol=1e-10,
        )
        coefs = np.asarray(series.reciprocal(inverse(optimum.x)))
        return with_strategy(Toeplitz(np.maximum(coefs, 0.0)), evaluations=int(optimum.nfev))


class Crossing(NamedTuple):
    """log σ at which δ̂ = δ, and its standard error."""

    log_sigma: float
    error: float


@dataclasses.dataclass(frozen=True)
class RandomPartitionCell(Cell):
    """σ and errors of a banded C under cyclic Poisson sampling with a random partition.

    By importance sampling of the remove direction, without a proof: samples come from
    E_k N(α m_k + γ m̄, σ²I), and of several (α, γ) that of the least standard error at few samples
    is taken (:mod:`mfopt.accounting.monte_carlo.pattern_frozen`).
    """

    name = "field-random-partition"
    source: UnamplifiedCell
    goal: Goal
    groups: int
    samples: int = SAMPLES

    @float64
    def run(self, *needed: Result) -> Result:
        goal, strategy = self.goal, strategy_of(needed[0])
        n, bands = goal.iterations, self.source.bands
        columns = jnp.asarray(strategy.banded_columns(n, bands))
        patterns = RandomGroups(columns, band.gram(columns), goal.bins, self.groups)
        key = jax.random.key(goal.seed)

        def solve(order: float, samples: int, start: float, step: float) -> Crossing | None:
            """log σ from ``start`` on at which δ̂ = δ; None where these draws lead to none."""
            proposal = PatternProposal(jnp.asarray(1 + 0.35 * order), jnp.asarray(0.65 * order))
            terms = _terms(patterns, proposal, pattern_frozen.draw(key, samples, patterns))

            def excess(log_sigma: float) -> float:
                log_delta = float(_moments(terms, log_sigma, goal.epsilon)[0])
                return max(log_delta - math.log(goal.delta), -50.0)

            side = math.copysign(step, excess(start))  # δ falls with σ
            ends = [start + k * side for k in range(25)]
            beyond = (pair for pair in itertools.pairwise(ends) if not excess(pair[1]) * side > 0)
            begin, end = next(beyond, (start, start))
            if not excess(end) * side <= 0:  # none of them, or no number
                return None
            root = scipy.optimize.brentq(excess, *sorted((begin, end)), xtol=1e-4)
            slope = (excess(root + 0.01) - excess(root - 0.01)) / 0.02
            return Crossing(root, float(_moments(terms, root, goal.epsilon)[1]) / -slope)

        # the fixed partition needs a little more
        scheme = CyclicPoisson(self.groups / goal.bins, self.groups, n)
        fixed = account(Mechanism(scheme, strategy), epsilon=goal.epsilon, delta=goal.delta)
        start = math.log(fixed.noise_multiplier)
        tried = {order: solve(order, FEW_SAMPLES, start, 0.05) for order in ORDERS}
        found = {order: crossing for order, crossing in tried.items() if crossing}
        # draws that miss a part of δ say too little, and do not see by how much
        highest = max(log_sigma - 3 * error for log_sigma, error in found.values())
        usable = {k: v for k, v in found.items() if v.log_sigma + 3 * v.error >= highest}
        order = min(usable, key=lambda order: usable[order].error)
        crossing = solve(order, self.samples, usable[order].log_sigma, 4 * usable[order].error)
        assert crossing is not None, "fewer of the same draws led to one"
        sigma = math.exp(crossing.log_sigma)
        at_one = float(query_error.rmse(PrefixSums(), strategy, n))
        return Result(
            {
                "noise_multiplier": sigma,
                "rmse": sigma * at_one,
                "final_model_error": final_model.error(strategy, n, sigma),
                "relative_error": crossing.error,
                "memory": bands - 1,
                "status": "estimate",
            }
        )


_terms = jax.jit(pattern_frozen.all_terms)


@jax.jit
def _moments(terms: PatternTerms, log_sigma: Any, epsilon: Any) -> tuple[jax.Array, jax.Array]:
    """log δ̂ and its relative standard error; a draw counts with its mirror image."""
    values = pattern_frozen.log_values(terms.patterns, terms.proposal, log_sigma, epsilon)

    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        both = values(*(x.astype(float) for x in part))
        return jnp.logaddexp(*jnp.split(both, 2)) - math.log(2)

    parts = [x.reshape(-1, 64, x.shape[1]) for x in (terms.centre, terms.noise)]
    logs = jax.lax.map(chunk, tuple(parts)).ravel()
    log_mean = jax.scipy.special.logsumexp(logs) - math.log(logs.size)
    return log_mean, jnp.std(jnp.exp(logs - log_mean)) / math.sqrt(logs.size)


Size = tuple[int, ...]


def ladders(name: str, epochs: int, bins: int) -> tuple[tuple[int, ...], ...]:
    """Values of each of a family's sizes, increasing; none where nothing is tuned.

    Where more bands than an epoch has steps are none of the mechanism, these end there.
    """
    if name not in TUNED:
        return ()
    powers = tuple(2**k for k in range(1, int(math.log2(bins))))
    if name == RANDOM_PARTITION:
        return powers, GROUPS_OF_BAND
    if name.endswith("+poisson"):  # other numbers of groups leave some of them a step less
        return ((*powers, bins),)
    most = bins if name == B_MIN_SEP_FAMILY else bins * epochs
    bands = {*powers, *(k * bins // 8 for k in EIGHTHS if k * bins // 8 <= most)}
    if name == B_MIN_SEP_FAMILY:
        separations = tuple(k * bins // 16 for k in SIXTEENTHS if k * bins % 16 == 0)
        return tuple(sorted(bands)), separations
    return (tuple(sorted({*bands, *(3 * power // 2 for power in powers), 5 * bins // 8})),)


def cell(name: str, size: Size, setting: Comparison, epsilon: float) -> Cell | None:
    """The cell of a family at a size; None where the size is none of the mechanism."""
    shape = setting.bins, setting.epochs
    bands = size[0] if size else 0
    if name in (MFOPT_DEFAULT, MFOPT_FRESH_DEFAULT):
        goal = setting.goal(epsilon, FRESH if name == MFOPT_FRESH_DEFAULT else BALLS)
        return SigmaCell(DefaultCell(goal), goal, setting.samples)
    balls = setting.goal(epsilon, BALLS)
    if name == BANDED_INVERSE:
        return SigmaCell(BandedInverseCell(*shape, bands), balls, setting.samples)
    if name == RANDOM_PARTITION:
        source = UnamplifiedCell("banded", *shape, bands)
        goal, groups = setting.goal(epsilon, POISSON), bands * size[1]
        # as many groups as an epoch has steps are balls-in-bins
        return RandomPartitionCell(source, goal, groups) if groups < setting.bins else None
    if name == B_MIN_SEP_FAMILY:
        source = UnamplifiedCell("banded-toeplitz", *shape, bands)
        goal = dataclasses.replace(setting.goal(epsilon, B_MIN_SEP), separation=size[1])
        return SigmaCell(source, goal, SAMPLES) if bands <= size[1] else None
    widths = (bands,) if bands else (setting.bins,)
    (candidate,) = families.find(name).candidates(setting._replace(widths=widths), epsilon)
    return candidate[1]


def words(name: str, size: Size) -> str:
    """A size as tables have it."""
    if name == B_MIN_SEP_FAMILY:
        return "{} bands and separation {}".format(*size)
    if name == RANDOM_PARTITION:
        return f"{size[0]} bands and {size[0] * size[1]} groups"
    return " ".join(map(str, size))


def neighbours(size: Size, axes: Sequence[Sequence[int]]) -> Iterator[Size]:
    """Sizes with one value replaced by the next below or above."""
    for axis, ladder in enumerate(axes):
        place = ladder.index(size[axis])
        for value in (*ladder[max(place - 1, 0) : place], *ladder[place + 1 : place + 2]):
            yield (*size[:axis], value, *size[axis + 1 :])


def start(name: str, axes: Sequence[Sequence[int]], bins: int, epsilon: float) -> Size:
    """Size that tuning starts from: a separation of three quarters of an epoch, groups as bands."""
    if not axes:
        return ()
    in_groups = name in (B_MIN_SEP_FAMILY, RANDOM_PARTITION) or name.endswith("+poisson")
    bands = max((START if in_groups else START_OF_BALLS)[epsilon] * bins // 128, 4)
    wanted = bands, (max(bands + bins // 8, 3 * bins // 4) if name == B_MIN_SEP_FAMILY else 1)
    return tuple(
        next((value for value in axis if value >= minimum), axis[-1])
        for axis, minimum in zip(axes, wanted, strict=False)
    )


def tuned(
    name: str, setting: Comparison, epsilon: float, records: Callable[..., Mapping[Any, Any]]
) -> dict[Size, dict[str, Any]]:
    """Records of the sizes that were run; an empty one where the cell was not.

    Args:
      name: of a family.
      setting, epsilon: the shape, and the target.
      records: of cells by key; it may leave some out.
    """
    axes = ladders(name, setting.epochs, setting.bins)
    tried: dict[Size, dict[str, Any]] = {}
    frontier = {start(name, axes, setting.bins, epsilon)}
    while frontier:
        wanted = {size: cell(name, size, setting, epsilon) for size in sorted(frontier)}
        run = {size: made for size, made in wanted.items() if made is not None}
        done = records(run)
        tried |= {size: done.get(size, {}) for size in run}
        frontier = {
            size
            for error in ERRORS
            for size in neighbours(lowest(tried, error), axes)
            if size not in tried and cell(name, size, setting, epsilon) is not None
        }
    return tried


def lowest(tried: Mapping[Size, Mapping[str, Any]], error: str) -> Size:
    """The size of the least error."""
    return min(tried, key=lambda size: tried[size].get(error, math.inf))


VALUES = "noise_multiplier", "rmse", "final_model_error", "relative_error", "memory"
NOT_RUN = "not run"


def sizes(run: Run, epochs: int, bins: int, only_finished: bool = False) -> list[dict[str, Any]]:
    """A row for every size of every entry that was run at one shape.

    Args:
      run: whose cache has finished cells.
      epochs, bins: the shape.
      only_finished: compute nothing. For a cell that is not in the cache stands a row without
        numbers.
    """
    setting = Comparison(bins, epochs, EPSILONS, DELTA)

    def finished(cells: Mapping[Size, Cell]) -> dict[Size, dict[str, Any]]:
        loaded = {size: run.cache.load(cell) for size, cell in cells.items()}
        done = {size: result.record for size, result in loaded.items() if result}
        run.computed |= dict.fromkeys(cells[size] for size in done)
        return done

    rows = []
    for entry, epsilon in itertools.product(FIELD, EPSILONS):
        for name in entry.names or (entry.label,):
            records = finished if only_finished else run.records
            for size, record in tuned(name, setting, epsilon, records).items():
                place = {"shape": f"{epochs}x{bins}", "epsilon": epsilon, "mechanism": entry.label}
                values = {value: record.get(value, "") for value in VALUES}
                if record and name == BANDED_INVERSE:  # run as a Toeplitz C of no structure
                    values["memory"] = size[0] - 1
                form = {"family": name, "size": words(name, size)}
                rows.append({**place, **form, **values, "status": record.get("status", NOT_RUN)})
    return rows


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each shape, ε and mechanism: both errors, each at the size that is best for it."""
    entries = {entry.label: entry for entry in FIELD}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["epsilon"], row["mechanism"]), []).append(row)
    table = []
    for (shape, epsilon, mechanism), candidates in groups.items():
        entry = entries[mechanism]
        # the family where there is one: what pages name a row by
        name = entry.names[0] if entry.source else mechanism
        place = {"shape": shape, "epsilon": epsilon, "family": name, "mechanism": mechanism}
        by_rmse = _least(candidates, "rmse")
        by_model = _least(candidates, "final_model_error")
        table.append(
            {
                **place,
                "origin": "published" if entry.source else "mfopt",
                "rmse": by_rmse["rmse"],
                "rmse_size": by_rmse["size"],
                "memory": by_rmse["memory"],
                "final_model_error": by_model["final_model_error"],
                "final_model_size": by_model["size"],
                "relative_error": by_rmse["relative_error"],
                "status": by_rmse["status"],
                "sizes_tried": sum(row["status"] != NOT_RUN for row in candidates),
                "sizes_not_run": sum(row["status"] == NOT_RUN for row in candidates),
                "source": entry.source or "this project",
                "tuned_here": entry.tuned,
            }
        )
    return table


def _least(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The row of the least value among those that have one."""
    return min(rows, key=lambda row: math.inf if row[name] == "" else row[name])


def stem(epochs: int, bins: int) -> str:
    """Name of the table of one shape."""
    return f"field-{epochs}x{bins}"


def field(run: Run, epochs: int, bins: int, only_finished: bool) -> list[Path]:
    """Both tables of one shape."""
    rows = sizes(run, epochs, bins, only_finished)
    files = []
    best_of = stem(epochs, bins)
    for name, table in ((best_of, best(rows)), (best_of.replace("field", "field-sizes"), rows)):
        files += write_table(run, name, tables.csv_of_rows(table))
    return files


def with_tables(page: str, folder: Path) -> str:
    """The page with the tables below its headings made again: "Rows", and "E × b" of each shape."""
    tables = {"Rows": [*_entries()]}
    for epochs, bins in SHAPES:
        path = folder / f"tables/{stem(epochs, bins)}.csv"
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                tables[f"{epochs} × {bins}"] = [*_markdown([*csv.DictReader(file)])]
    for title, lines in tables.items():
        before, heading, after = page.partition(f"### {title}\n\n")
        if heading:
            page = before + heading + "\n".join(lines) + "\n\n" + after.partition("\n\n")[2]
    return page


def _entries() -> Iterator[str]:
    """Lines of a table: what each mechanism is, and what is tuned."""
    yield "| mechanism | tuned here | source |"
    yield "| --- | --- | --- |"
    for entry in FIELD:
        yield f"| {entry.label} | {entry.tuned} | {entry.source or 'mfopt'} |"


SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "rmse": ("RMSE", lambda value: f"{value:.2f}"),
    "final_model_error": ("final model", lambda value: f"{value:.3f}"),
}


def _markdown(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Lines of a table: mechanisms by both errors at each ε; the least of all is bold."""
    columns = [(name, epsilon) for name in SHOWN for epsilon in EPSILONS]
    values = {
        (row["mechanism"], name, float(row["epsilon"])): float(row[name] or math.inf)
        for row in rows
        for name in SHOWN
    }
    least = {}
    for name, epsilon in columns:
        column = [values[entry.label, name, epsilon] for entry in FIELD]
        least[name, epsilon] = min(column) if max(column) < math.inf else 0.0
    heads = [f"{SHOWN[name][0]}, ε = {epsilon:g}" for name, epsilon in columns]
    yield "| " + " | ".join(("mechanism", *heads)) + " |"
    yield "| --- " * (len(columns) + 1) + "|"
    for entry in FIELD:
        shown = []
        for name, epsilon in columns:
            value = values[entry.label, name, epsilon]
            text = SHOWN[name][1](value) if value < math.inf else "not run"
            shown.append(f"**{text}**" if value == least[name, epsilon] else text)
        yield "| " + " | ".join((entry.label, *shown)) + " |"


def artifacts(only_finished: bool) -> dict[str, Artifact]:
    """The tables of each shape."""

    def maker(epochs: int, bins: int) -> Callable[[Run], list[Path]]:
        return lambda run: field(run, epochs, bins, only_finished)

    return {stem(epochs, bins): Artifact(maker(epochs, bins)) for epochs, bins in SHAPES}


def main(arguments: Iterable[str] | None = None) -> None:
    """Make the tables that are named."""
    parser = common.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(artifacts(True))}")
    parser.add_argument("--finished", action="store_true", help="only what the cache has")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    made = artifacts(chosen.finished)
    common.make(common.started(chosen), __file__, made, chosen.names or made)


if __name__ == "__main__":
    main()
