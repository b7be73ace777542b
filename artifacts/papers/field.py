"""The table of the field: every mechanism at its best size and sampling, by RMSE and final model.

RMSE and final-model error stand each at the size (bands, groups, separation, buffers) that is best
for it; ``field-sizes-*.csv`` have every size that was run. A size is tuned by descent: from a start
on, the neighbours of both best sizes are run until none is better, so that no best lies at an end
of what was run. C of peers is found as they publish it: in closed form, in fixed order, or for the
RMSE of prefix sums. σ is estimated as in ``mfopt compare``.

Each size's row has the day and the commit of its run. With ``--keep`` the rows of the stored table
stay and only sizes that it lacks are run, and the manifest has the cost of these.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import re
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

from mfopt import floor
from mfopt._runtime._float64 import float64
from mfopt._version import commit
from mfopt.experiments import families, tables
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import (
    B_MIN_SEP,
    BALLS,
    FRESH,
    RANDOM_PARTITION,
    Goal,
    SigmaCell,
    UnamplifiedCell,
    with_strategy,
)
from mfopt.guarantee import Guarantee
from mfopt.optimize import Form, Question, Search, Target, defaults, optimize
from mfopt.strategies import BandedInverseRoot, Toeplitz, series

EPSILONS, DELTA = (0.5, 2.0, 8.0, 16.0), 1e-5
SHAPES = ((8, 32), (4, 64), (16, 128))  # epochs × iterations
# sizes to choose from: bands, powers of two up to half an epoch and then these parts of one; with a
# random partition of them as many groups, or so many times as many; separations in sixteenths of an
# epoch, which 32 iterations have only the even ones of, and 13 of them as bands
EIGHTHS = (6, 7, 8, 12, 16, 24, 32)
GROUPS_OF_BAND = (1, 2, 4, 8)
SIXTEENTHS = (4, 6, 8, 10, 11, 12, 13, 14, 15)
# bands that tuning starts from at 128 iterations, by ε; under balls-in-bins, which they take no
# amplification from
START = {0.5: 4, 2.0: 8, 8.0: 64, 16.0: 96}
START_OF_BALLS = {0.5: 16, 2.0: 64, 8.0: 96, 16.0: 96}
SAMPLES = 2**13  # of σ under b-min-sep and with a random partition
ERRORS = "rmse", "final_model_error"
MFOPT_DEFAULT, MFOPT_FRESH_DEFAULT = "mfopt, default objective", "mfopt, fresh bins"
MFOPT_RMSE, MFOPT_FRESH_RMSE = "mfopt, RMSE objective", "mfopt, fresh bins, RMSE objective"
PARTITION_FAMILY, B_MIN_SEP_FAMILY = "banded+random-partition", "banded-toeplitz+b-min-sep"
BANDED_INVERSE = "banded-inverse"
TUNED = (  # families with sizes to choose from
    *("banded+poisson", "banded-toeplitz+poisson", PARTITION_FAMILY, B_MIN_SEP_FAMILY),
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
    published(PARTITION_FAMILY, "jax-privacy 2026", "bands and groups"),
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


Size = tuple[int, ...]


def ladders(name: str, epochs: int, bins: int) -> tuple[tuple[int, ...], ...]:
    """Values of each of a family's sizes, increasing; none where nothing is tuned.

    Where more bands than an epoch has steps are none of the mechanism, these end there.
    """
    if name not in TUNED:
        return ()
    powers = tuple(2**k for k in range(1, int(math.log2(bins))))
    if name == PARTITION_FAMILY:
        return (*powers, 6 * bins // 8, 7 * bins // 8, bins - 1), GROUPS_OF_BAND
    halves = tuple(3 * power // 2 for power in powers)
    if name.endswith("+poisson"):
        return (tuple(sorted({*powers, *halves, bins})),)
    most = bins if name == B_MIN_SEP_FAMILY else bins * epochs
    bands = {*powers, *(k * bins // 8 for k in EIGHTHS if k * bins // 8 <= most)}
    if name == B_MIN_SEP_FAMILY:
        bands.add(13 * bins // 16)
        separations = tuple(k * bins // 16 for k in SIXTEENTHS if k * bins % 16 == 0)
        return tuple(sorted(bands)), separations
    return (tuple(sorted({*bands, *halves, 7 * bins // 16, 5 * bins // 8})),)


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
    if name == PARTITION_FAMILY:
        goal = setting.goal(epsilon, RANDOM_PARTITION, bands * size[1])
        cell = SigmaCell(UnamplifiedCell("banded", *shape, bands), goal, SAMPLES)
        # as many groups as an epoch has steps are balls-in-bins
        return cell if goal.separation < setting.bins else None
    if name == B_MIN_SEP_FAMILY:
        source = UnamplifiedCell("banded-toeplitz", *shape, bands)
        goal = setting.goal(epsilon, B_MIN_SEP, size[1])
        return SigmaCell(source, goal, SAMPLES) if bands <= size[1] else None
    widths = (bands,) if bands else (setting.bins,)
    (candidate,) = families.find(name).candidates(setting._replace(widths=widths), epsilon)
    return candidate[1]


def words(name: str, size: Size) -> str:
    """A size as tables have it."""
    if name == B_MIN_SEP_FAMILY:
        return "{} bands and separation {}".format(*size)
    if name == PARTITION_FAMILY:
        return f"{size[0]} bands and {size[0] * size[1]} groups"
    return " ".join(map(str, size))


def size_of(row: Row) -> Size:
    """The size of a row."""
    size = tuple(map(int, re.findall(r"\d+", row["size"])))
    return (size[0], size[1] // size[0]) if row["family"] == PARTITION_FAMILY else size


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
    in_groups = name in (B_MIN_SEP_FAMILY, PARTITION_FAMILY) or name.endswith("+poisson")
    bands = max((START if in_groups else START_OF_BALLS)[epsilon] * bins // 128, 4)
    wanted = bands, (max(bands + bins // 8, 3 * bins // 4) if name == B_MIN_SEP_FAMILY else 1)
    return tuple(
        next((value for value in axis if value >= minimum), axis[-1])
        for axis, minimum in zip(axes, wanted, strict=False)
    )


Records = Mapping[Size, Mapping[str, Any]]


def tuned(
    name: str,
    setting: Comparison,
    epsilon: float,
    records: Callable[[Mapping[Size, Cell]], Records],
    kept: Records,
) -> Records:
    """Records of the sizes that were run.

    Args:
      name: of a family.
      setting, epsilon: the shape, and the target.
      records: of cells by size.
      kept: records to go on from.
    """
    axes = ladders(name, setting.epochs, setting.bins)
    tried = dict(kept)
    while True:
        wanted = {start(name, axes, setting.bins, epsilon)}
        if tried:
            bests = [lowest(tried, error) for error in ERRORS]
            wanted |= {size for best in bests for size in neighbours(best, axes)}
        cells = {
            size: made
            for size in sorted(wanted - tried.keys())
            if (made := cell(name, size, setting, epsilon)) is not None
        }
        if not cells:
            return tried
        tried |= records(cells)


def lowest(tried: Records, error: str) -> Size:
    """The size of the least error."""
    return min(tried, key=lambda size: float(tried[size][error]))


VALUES = "noise_multiplier", "rmse", "final_model_error", "relative_error", "memory"
Row = dict[str, Any]


def sizes(run: Run, epochs: int, bins: int, kept: Sequence[Row]) -> list[Row]:
    """A row for every size of every entry that was run at one shape.

    Args:
      run: computes cells.
      epochs, bins: the shape.
      kept: rows of an earlier table, which are not run again.
    """
    setting = Comparison(bins, epochs, EPSILONS, DELTA)
    rows = []
    for entry, epsilon in itertools.product(FIELD, EPSILONS):
        for name in entry.names or (entry.label,):
            place = {"shape": f"{epochs}x{bins}", "epsilon": epsilon}
            place |= {"mechanism": entry.label, "family": name}
            stored = {
                size_of(row): row
                for row in kept
                if all(row[key] == str(value) for key, value in place.items())
            }
            for size, record in tuned(name, setting, epsilon, run.records, stored).items():
                values = {value: record[value] for value in (*VALUES, "status", "made")}
                if name == BANDED_INVERSE:  # run as a Toeplitz C of no structure
                    values["memory"] = size[0] - 1
                source = {"commit": record.get("commit") or commit()}
                rows.append({**place, "size": words(name, size), **values, **source})
    return rows


def best(rows: Sequence[Row]) -> list[Row]:
    """A row for each shape, ε and mechanism: both errors, each at the size that is best for it."""
    entries = {entry.label: entry for entry in FIELD}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["epsilon"], row["mechanism"]), []).append(row)
    table = []
    for (shape, epsilon, mechanism), candidates in groups.items():
        entry = entries[mechanism]
        # the family where there is one: what pages name a row by
        name = entry.names[0] if entry.source else mechanism
        place = {"shape": shape, "epsilon": epsilon, "family": name, "mechanism": mechanism}
        epochs = int(shape.partition("x")[0])
        by_rmse, by_model = (min(candidates, key=lambda row: float(row[error])) for error in ERRORS)
        table.append(
            {
                **place,
                "origin": "published" if entry.source else "mfopt",
                "rmse": by_rmse["rmse"],
                "rmse_size": by_rmse["size"],
                "memory": by_rmse["memory"],
                "floor_at_epoch_ends": lowest_at_ends(name, epochs, float(epsilon)),
                "final_model_error": by_model["final_model_error"],
                "final_model_size": by_model["size"],
                "relative_error": by_rmse["relative_error"],
                "status": by_rmse["status"],
                "sizes_tried": len(candidates),
                "made": max(row["made"] for row in candidates),
                "source": entry.source or "this project",
                "tuned_here": entry.tuned,
            }
        )
    return table


def lowest_at_ends(name: str, epochs: int, epsilon: float) -> float | str:
    """Least RMSE at epochs' ends of any C; "" where a unit may miss an epoch."""
    if name.endswith(("poisson", PARTITION_FAMILY, B_MIN_SEP_FAMILY)):
        return ""
    return floor.lower_bound(epochs, Guarantee(epsilon, DELTA, noise_multiplier=1.0))


def stem(epochs: int, bins: int) -> str:
    """Name of the table of one shape."""
    return f"field-{epochs}x{bins}"


def field(run: Run, epochs: int, bins: int, keep: bool) -> list[Path]:
    """Both tables of one shape; ``keep``: the rows of the stored one stay."""
    best_of = stem(epochs, bins)
    every_size = best_of.replace("field", "field-sizes")
    rows = sizes(run, epochs, bins, stored(run.folder, every_size) if keep else ())
    files = []
    for name, table in ((best_of, best(rows)), (every_size, rows)):
        files += write_table(run, name, tables.csv_of_rows(table))
    return files


def stored(folder: Path, name: str) -> list[Row]:
    """Rows of a table in a folder of artifacts."""
    with (folder / f"tables/{name}.csv").open(encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def with_tables(page: str, folder: Path) -> str:
    """The page with the tables below its headings made again: rows, lower bounds, each shape."""
    shapes = {f"{e} × {b}": stored(folder, stem(e, b)) for e, b in SHAPES}
    tables = {"Rows": [*_entries()], "Lower bound": [*_floors(shapes)]}
    tables |= {shape: [*_markdown(rows)] for shape, rows in shapes.items()}
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


def _markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a table: mechanisms by both errors at each ε; the least of all is bold."""
    columns = [(name, epsilon) for name in SHOWN for epsilon in EPSILONS]
    values = {
        (row["mechanism"], name, float(row["epsilon"])): float(row[name])
        for row in rows
        for name in SHOWN
    }
    least = {
        (name, epsilon): min(values[entry.label, name, epsilon] for entry in FIELD)
        for name, epsilon in columns
    }
    heads = [f"{SHOWN[name][0]}, ε = {epsilon:g}" for name, epsilon in columns]
    yield "| " + " | ".join(("mechanism", *heads)) + " |"
    yield "| --- " * (len(columns) + 1) + "|"
    for entry in FIELD:
        shown = []
        for name, epsilon in columns:
            value = values[entry.label, name, epsilon]
            text = SHOWN[name][1](value)
            shown.append(f"**{text}**" if value == least[name, epsilon] else text)
        yield "| " + " | ".join((entry.label, *shown)) + " |"


def _floors(shapes: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Lines of a table: the lower bound at epochs' ends, by shape and ε."""
    yield "| " + " | ".join(("shape", *(f"ε = {epsilon:g}" for epsilon in EPSILONS))) + " |"
    yield "| --- " * (len(EPSILONS) + 1) + "|"
    for shape, rows in shapes.items():
        bounded = [row for row in rows if row["mechanism"] == MFOPT_DEFAULT]
        values = {float(row["epsilon"]): float(row["floor_at_epoch_ends"]) for row in bounded}
        yield "| " + " | ".join((shape, *(f"{values[e]:.2f}" for e in EPSILONS))) + " |"


def artifacts(keep: bool) -> dict[str, Artifact]:
    """The tables of each shape."""

    def maker(epochs: int, bins: int) -> Callable[[Run], list[Path]]:
        return lambda run: field(run, epochs, bins, keep)

    return {stem(epochs, bins): Artifact(maker(epochs, bins)) for epochs, bins in SHAPES}


def main(arguments: Iterable[str] | None = None) -> None:
    """Make the tables that are named."""
    parser = common.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(artifacts(True))}")
    parser.add_argument("--keep", action="store_true", help="run what the stored table lacks")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    script = f"{__file__} --keep" if chosen.keep else __file__
    tables_of = artifacts(chosen.keep)
    common.make(common.started(chosen), script, tables_of, chosen.names or tables_of)


if __name__ == "__main__":
    main()
