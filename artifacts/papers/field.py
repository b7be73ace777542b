"""The table of the field: every mechanism at its best size and sampling, by RMSE and final model.

RMSE and final-model error stand each at the size (bands, groups, separation, buffers) that is best
for it; ``field-sizes-*.csv`` have every size. C of peers is found as they publish it: in closed
form, in fixed order, or for the RMSE of prefix sums. σ is estimated as in ``mfopt compare``.
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
import scipy
from common import Artifact, Run
from mechanism_tables import write_table

from mfopt import final_model, query_error
from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import pytree
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo import band, pattern_frozen
from mfopt.accounting.monte_carlo.likelihood import Drawn
from mfopt.accounting.monte_carlo.pattern_frozen import (
    PatternLikelihood,
    PatternProposal,
    PatternTerms,
)
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
from mfopt.sampling import BMinSep
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums

EPSILONS, DELTA = (0.5, 2.0, 8.0, 16.0), 1e-5
SHAPES = ((16, 128),)  # epochs × iterations
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
# (bands, separation) of b-min-sep as parts of an epoch, by ε: around the best of wider grids
SEPARATED = {
    0.5: ((2, 96), (4, 96), (8, 96), (4, 80), (4, 112)),
    2.0: ((4, 96), (8, 96), (16, 96), (8, 64), (8, 80), (8, 112)),
    8.0: ((32, 96), (64, 96), (96, 96), (64, 80), (64, 112)),
    16.0: ((64, 112), (96, 112), (112, 112), (96, 104), (96, 120)),
}
EPOCH = 128  # the steps of it
SAMPLES, FEW_SAMPLES = 2**13, 2**10  # of σ under b-min-sep and with a random partition
ORDERS = (1.0, 2.0, 4.0, 7.0, 12.0, 20.0)  # of proposals with a random partition
MFOPT_DEFAULT, MFOPT_FRESH_DEFAULT = "mfopt, default objective", "mfopt, fresh bins"
RANDOM_PARTITION = "banded, cyclic Poisson, random partition"
# bands with a random partition, by ε; as many as an epoch has steps are balls-in-bins
PARTITIONS = {0.5: (2, 4, 8), 2.0: (4, 8, 16, 32), 8.0: (16, 32, 64), 16.0: (32, 64)}
MFOPT_RMSE, MFOPT_FRESH_RMSE = "mfopt, RMSE objective", "mfopt, fresh bins, RMSE objective"


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
    Entry(RANDOM_PARTITION, "jax-privacy 2026", "bands, as many groups", ("random-partition",)),
    published("banded-toeplitz+b-min-sep", "Dong and Ganesh 2026", "bands and separation"),
    published("banded+balls-in-bins", "Choquette-Choo et al. 2024", "bands"),
    published("blt-4", "Choquette-Choo et al. 2024; McMahan et al. 2024", "nothing, 4 buffers"),
    published("toeplitz", "Choquette-Choo et al. 2024", "nothing"),
    published("banded-inverse-sqrt", "Kalinin et al. 2025", "bands"),
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
NOT_BUILT = (
    (
        "optimized banded inverse (BandInvMF)",
        "Kalinin et al. 2025",
        "its closed form and γ-BIFR have rows; the search over the coefficients is not written",
    ),
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
class Separated(Goal):
    """A goal under b-min-sep with a separation of its own."""

    separation: int = 0

    def scheme(self, strategy: Strategy) -> BMinSep:
        """The scheme, whatever the number of bands."""
        return BMinSep(self.bins, self.epochs, self.separation)


@pytree
@dataclasses.dataclass(frozen=True)
class RandomPartition(PatternLikelihood):
    """Cyclic Poisson sampling of units that are each in a group by chance, as many as C has bands.

    A step takes the units of its group with probability groups/bins each: of a unit's columns no
    two overlap, and given its group the log of P/Q is a sum over the group's steps.
    """

    @property
    def groups(self) -> int:
        """Bands of C."""
        return int(self.columns.shape[0])

    def ratio(self, power: Any = 1) -> Callable[[jax.Array], jax.Array]:
        half = power**2 * jnp.asarray(self.gram)[0] / 2
        chance = self.groups / self.bins

        def log_ratio(exponents: jax.Array) -> jax.Array:
            taken = math.log(chance) + power * exponents - half
            steps = jnp.logaddexp(math.log1p(-chance), taken)
            of_groups = jnp.sum(steps.reshape(len(exponents), -1, self.groups), axis=1)
            return jax.scipy.special.logsumexp(of_groups, axis=1) - math.log(self.groups)

        return log_ratio

    def first(self, key: jax.Array, count: int) -> jax.Array:
        keys = jax.random.split(key)
        group = jax.random.randint(keys[0], (count, 1, 1), 0, self.groups)
        shape = count, self.dimension // self.groups, self.groups
        taken = jax.random.bernoulli(keys[1], self.groups / self.bins, shape)
        return (taken & (jnp.arange(self.groups) == group)).reshape(count, -1)

    def products(self, pattern: jax.Array) -> jax.Array:
        columns = band.tiles(jnp.asarray(self.columns))
        return self.noise(band.product(columns, pattern.astype(float)))

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, by: Any) -> Drawn:
        raise NotImplementedError  # of proofs, of which there are none here

    def mean_square(self) -> jax.Array:
        raise NotImplementedError

    def largest_square(self) -> jax.Array:
        raise NotImplementedError


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
    samples: int = SAMPLES

    @float64
    def run(self, *needed: Result) -> Result:
        goal, strategy = self.goal, strategy_of(needed[0])
        scheme, n, bands = goal.scheme(strategy), goal.iterations, self.source.bands
        columns = jnp.asarray(strategy.banded_columns(n, bands))
        patterns = RandomPartition(columns, band.gram(columns), goal.bins)
        key = jax.random.key(goal.seed)

        def solve(order: float, samples: int, start: float, step: float) -> Crossing | None:
            """log σ from ``start`` on at which δ̂ = δ; None where these draws lead to none."""
            proposal = PatternProposal(jnp.asarray(1 + 0.35 * order), jnp.asarray(0.65 * order))
            terms = _terms(patterns, proposal, pattern_frozen.draw(key, samples, patterns))

            def excess(log_sigma: float) -> float:
                log_delta = float(_moments(terms, log_sigma, goal.epsilon)[0])
                return max(log_delta - math.log(goal.delta), -50.0)

            side = math.copysign(step, excess(start))  # δ falls with σ
            ends = [start + k * side for k in range(9)]
            beyond = (pair for pair in itertools.pairwise(ends) if not excess(pair[1]) * side > 0)
            begin, end = next(beyond, (start, start))
            if not excess(end) * side <= 0:  # none of them, or no number
                return None
            root = scipy.optimize.brentq(excess, *sorted((begin, end)), xtol=1e-4)
            slope = (excess(root + 0.01) - excess(root - 0.01)) / 0.02
            return Crossing(root, float(_moments(terms, root, goal.epsilon)[1]) / -slope)

        # the fixed partition needs a little more
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


def cells(entry: Entry, setting: Comparison, epsilon: float) -> dict[tuple[str, str], Cell]:
    """Cells of an entry at one ε, by family and size in words."""
    if entry.label in (MFOPT_DEFAULT, MFOPT_FRESH_DEFAULT):
        goal = setting.goal(epsilon, FRESH if entry.label == MFOPT_FRESH_DEFAULT else BALLS)
        size = "", f"{defaults.BUFFERS}"
        return {size: SigmaCell(DefaultCell(goal), goal, setting.samples)}
    if entry.label == RANDOM_PARTITION:
        goal = setting.goal(epsilon, POISSON)
        shape = setting.bins, setting.epochs
        sources = [
            UnamplifiedCell("banded", *shape, bands * setting.bins // EPOCH)
            for bands in PARTITIONS[epsilon]
        ]
        return {
            (entry.names[0], f"{source.bands}"): RandomPartitionCell(source, goal)
            for source in sources
            if source.bands > 1
        }
    if B_MIN_SEP not in entry.names[0]:
        return {
            (name, f"{size}"): cell
            for name in entry.names
            for size, cell in families.find(name).candidates(setting, epsilon)
        }
    goal = dataclasses.asdict(setting.goal(epsilon, B_MIN_SEP))
    chosen: dict[tuple[str, str], Cell] = {}
    for bands_of_epoch, part in SEPARATED[epsilon]:
        bands, separation = (max(x * setting.bins // EPOCH, 1) for x in (bands_of_epoch, part))
        if 1 < bands <= separation:
            source = UnamplifiedCell("banded-toeplitz", setting.bins, setting.epochs, bands)
            size = f"{bands} bands and separation {separation}"
            place = Separated(**goal, separation=separation)
            chosen[entry.names[0], size] = SigmaCell(source, place, SAMPLES)
    return chosen


VALUES = "noise_multiplier", "rmse", "final_model_error", "relative_error", "memory", "status"
RUN, EARLIER, NOT_RUN = "this table", "comparison-16x128", "not run"


def sizes(run: Run, epochs: int, bins: int, only_finished: bool = False) -> list[dict[str, Any]]:
    """A row for every size of every entry at one shape.

    Args:
      run: whose cache has finished cells.
      epochs, bins: the shape.
      only_finished: compute nothing. Instead of a cell that is not in the cache stands the row of
        ``comparison-16x128``, which has no final-model error, or none.
    """
    setting = Comparison(bins, epochs, EPSILONS, DELTA, widths=WIDTHS)
    wanted = {
        (entry, epsilon, *size): cell
        for entry in FIELD
        for epsilon in EPSILONS
        for size, cell in cells(entry, setting, epsilon).items()
    }
    if only_finished:
        loaded = {key: run.cache.load(cell) for key, cell in wanted.items()}
        records = {key: result.record for key, result in loaded.items() if result is not None}
        run.computed |= dict.fromkeys(wanted[key] for key in records)
    else:
        records = run.records(wanted)
    earlier = _earlier(run.folder) if (epochs, bins) == (16, 128) else {}
    rows = []
    for key in wanted:
        entry, epsilon, name, size = key
        record, origin = records.get(key), RUN
        if record is None:
            record, origin = earlier.get((name, epsilon, size)), EARLIER
        if record is None:
            record, origin = {}, NOT_RUN
        place = {"shape": f"{epochs}x{bins}", "epsilon": epsilon, "mechanism": entry.label}
        values = {value: record.get(value, "") for value in VALUES}
        if values["memory"] != "":
            values["memory"] = _memory(name, size, int(values["memory"]))
        rows.append({**place, "form": name, "size": size, **values, "made_by": origin})
    return rows


def _memory(form: str, size: str, buffers: int) -> int:
    """Noise buffers that a mechanism needs, not those that this library's recursion keeps.

    A banded C⁻¹ needs the past draws that its coefficients multiply; the recursion keeps the
    present one with them. DP-λCGD makes its only past draw again.
    """
    if form in ("banded-inverse-sqrt", "bifr"):
        return int(size) - 1
    return 0 if form == "lambda-cgd" else buffers


def _earlier(folder: Path) -> Mapping[tuple[str, float, str], dict[str, Any]]:
    """Rows of the comparison at 16 × 128, by family, ε and size."""
    with (folder / "tables/comparison-16x128-sizes.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["family"], float(row["epsilon"]), row["size"]): {
            name: row[name] if name == "status" else float(row[name])
            for name in VALUES
            if row.get(name)
        }
        for row in rows
    }


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
        finished = [row for row in candidates if row["made_by"] != NOT_RUN]
        by_rmse = _least(candidates, "rmse")
        # rows of the comparison lack it: the least of the others would say too little of a peer
        whole = all(row["final_model_error"] != "" for row in finished)
        nothing = dict.fromkeys(candidates[0], "")
        by_model = _least(finished, "final_model_error") if whole and finished else nothing
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
                "status": by_rmse["status"] or NOT_RUN,
                "sizes_tried": len(finished),
                "sizes_not_run": len(candidates) - len(finished),
                "made_by": by_rmse["made_by"],
                "source": entry.source or "this project",
                "tuned_here": entry.tuned,
            }
        )
    return table


def _least(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The row of the least value among those that have one."""
    return min(rows, key=lambda row: math.inf if row[name] == "" else row[name])


def field(run: Run, epochs: int, bins: int, only_finished: bool) -> list[Path]:
    """Both tables of one shape."""
    rows = sizes(run, epochs, bins, only_finished)
    files = []
    for name, table in (("field", best(rows)), ("field-sizes", rows)):
        files += write_table(run, f"{name}-{epochs}x{bins}", tables.csv_of_rows(table))
    return files


def with_tables(page: str, folder: Path) -> str:
    """The page with the tables below its headings "### E × b" made again from the artifacts."""
    for epochs, bins in SHAPES:
        path, heading = folder / f"tables/field-{epochs}x{bins}.csv", f"### {epochs} × {bins}\n\n"
        if path.is_file() and heading in page:
            with path.open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            before, _, after = page.partition(heading)
            rest = after.partition("\n\n")[2]
            page = before + heading + "\n".join(_markdown(rows)) + "\n\n" + rest
    return page


ERRORS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "rmse": ("RMSE", lambda value: f"{value:.2f}"),
    "final_model_error": ("final model", lambda value: f"{value:.3f}"),
}


def _markdown(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Lines of a table: mechanisms by both errors at each ε; the least of all is bold."""
    columns = [(name, epsilon) for name in ERRORS for epsilon in EPSILONS]
    values = {
        (row["mechanism"], name, float(row["epsilon"])): float(row[name] or math.inf)
        for row in rows
        for name in ERRORS
    }
    least = {}
    for name, epsilon in columns:
        column = [values[entry.label, name, epsilon] for entry in FIELD]
        least[name, epsilon] = min(column) if max(column) < math.inf else 0.0
    heads = [f"{ERRORS[name][0]}, ε = {epsilon:g}" for name, epsilon in columns]
    yield "| " + " | ".join(("mechanism", *heads, "tuned here", "source")) + " |"
    yield "| --- " * (len(columns) + 3) + "|"
    for entry in FIELD:
        shown = []
        for name, epsilon in columns:
            value = values[entry.label, name, epsilon]
            text = ERRORS[name][1](value) if value < math.inf else "not run"
            shown.append(f"**{text}**" if value == least[name, epsilon] else text)
        source = entry.source or "mfopt"
        yield "| " + " | ".join((entry.label, *shown, entry.tuned, source)) + " |"
    for label, source, reason in NOT_BUILT:
        yield "| " + " | ".join((label, *["not built"] * len(columns), reason, source)) + " |"


def artifacts(only_finished: bool) -> dict[str, Artifact]:
    """The tables of each shape."""

    def maker(epochs: int, bins: int) -> Callable[[Run], list[Path]]:
        return lambda run: field(run, epochs, bins, only_finished)

    return {f"field-{epochs}x{bins}": Artifact(maker(epochs, bins)) for epochs, bins in SHAPES}


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
