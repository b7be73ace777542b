"""What the scripts of the papers share: command line, cells of accounts, studies, words.

A script makes named artifacts. Each is a function from a :class:`Run` to the files that it wrote;
the run computes cells through the cache of ``mfopt compare``, and notes files in the manifest.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, NamedTuple, TypeVar

import group_lemma
import manifest
import numpy as np
import scipy.stats
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from mfopt._version import __version__
from mfopt.accounting import Mechanism, account, analysis
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.errors import FailureError
from mfopt.experiments import comparison, families, plots, tables
from mfopt.experiments.cache import Cache, Cell, Result, default_folder
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import Goal, SigmaCell, strategy_of
from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.runner import device, run_all, with_needs
from mfopt.progress import Progress
from mfopt.sampling import Poisson, Scheme

ARTIFACTS = Path(__file__).resolve().parents[1]
DATA_AND_PICTURE = ("csv", "svg")  # suffixes of a figure's files
Key = TypeVar("Key", bound=Hashable)


# ---- running a script


class Run:
    """Where a script writes, and how its cells are computed.

    Attributes:
      folder: of the artifacts and their manifest.
      cache: of finished cells.
      jobs: worker processes; by default one for every two cores.
      computed: cells that were asked for since the run began; what an artifact cost is their sum.
    """

    def __init__(self, folder: Path, cache: Cache, jobs: int | None = None) -> None:
        self.folder, self.cache, self.jobs = folder, cache, jobs
        self.computed: dict[Cell, None] = {}

    def results(self, cells: Iterable[Cell]) -> dict[Cell, Result]:
        """The result of each cell; what is not in the cache is computed."""
        wanted = list(cells)
        self.computed |= dict.fromkeys(wanted)
        return run_all(wanted, self.cache, jobs=self.jobs, progress=_show)

    def records(self, cells: Mapping[Key, Cell]) -> dict[Key, dict[str, Any]]:
        """The record of each cell, by the cell's key."""
        results = self.results(cells.values())
        return {key: results[cell].record for key, cell in cells.items()}

    def compare(self, setting: Comparison) -> list[comparison.Row]:
        """Rows of a comparison, each at its best size."""
        planned = comparison.plan(setting).values()
        self.computed |= {cell: None for sizes in planned for _, cell in sizes}
        sizes = comparison.every_size(setting, self.cache, jobs=self.jobs, progress=_show)
        return comparison.best(sizes)

    def cost(self) -> dict[str, Any]:
        """Devices, seconds, processor seconds and last day of the cells computed so far."""
        loaded = map(self.cache.load, with_needs(self.computed))
        records = [result.record for result in loaded if result is not None]
        return {
            "device": sorted({record["device"] for record in records}) or [device()],
            "seconds": round(sum(record["seconds"] for record in records), 1),
            "cpu_seconds": round(sum(record["cpu_seconds"] for record in records), 1),
            "made": max((record["made"] for record in records), default=None),
        }


def proven(
    setting: Comparison, family: str, epsilon: float, samples: int | None = None
) -> ProvenCell:
    """The C of least RMSE of a family, with a σ that is proved by so many samples."""
    entry = families.find(family)
    sizes, sigmas = zip(*entry.candidates(setting, epsilon), strict=True)
    return ProvenCell(sigmas, sizes, setting.goal(epsilon, entry.sampling), samples)


@dataclasses.dataclass(frozen=True)
class ProvenCell(Cell):
    """The C of least RMSE among several sizes, with a σ that is proved.

    Attributes:
      sigmas: of each size, whose C are read too.
      sizes: bands or buffers.
      goal: whose account is asked for.
      samples: of the certificate, where there is one; None: as many as it takes by itself.
    """

    name = "study-mechanism"
    sigmas: tuple[SigmaCell, ...]
    sizes: tuple[int, ...]
    goal: Goal
    samples: int | None = None

    @property
    def needs(self) -> tuple[Cell, ...]:
        return (*self.sigmas, *(sigma.source for sigma in self.sigmas))

    def run(self, *needed: Result) -> Result:
        best = int(np.argmin([result.record["rmse"] for result in needed[: len(self.sizes)]]))
        source, goal = needed[len(self.sizes) + best], self.goal
        strategy = strategy_of(source)
        mechanism = Mechanism(goal.scheme(strategy), strategy)
        outcome = account(
            mechanism, epsilon=goal.epsilon, delta=goal.delta, seed=goal.seed, samples=self.samples
        )
        record = {
            "strategy": source.record["strategy"],
            "size": self.sizes[best],
            "scheme": mechanism.sampling.describe(),
            "guarantee": outcome.describe(),
        }
        return Result(record, source.arrays)


Maker = Callable[[Run], list[Path]]


class Artifact(NamedTuple):
    """One artifact of a script.

    Attributes:
      make: writes its files and returns their paths.
      folder: of the artifact's name in the manifest, "studies/" for a study.
      seed: pinned in it, or None.
    """

    make: Maker
    folder: str = ""
    seed: int | None = 0


def _show(event: Progress) -> None:
    if event.total:
        end = "\n" if event.done == event.total else ""
        line = f"\r{event.done} of {event.total} {event.unit} {event.note}"
        print(f"{line:<80.80}", end=end, file=sys.stderr)


def command(script: str, name: str, artifacts: Mapping[str, Artifact]) -> str:
    """The command that makes an artifact: its name is said where the script has several."""
    words = f"python artifacts/papers/{Path(script).name}"
    return words if len(artifacts) == 1 else f"{words} {name}"


def make(run: Run, script: str, artifacts: Mapping[str, Artifact], names: Iterable[str]) -> None:
    """Make artifacts of a script and note each in the manifest of the run's folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    manifest.read_manifest(run.folder)  # a damaged one is refused before the work
    for name in names:
        artifact, run.computed = artifacts[name], {}
        files = artifact.make(run)
        how = command(script, name, artifacts)
        facts = run.cost() | {"how": how, "seed": artifact.seed}
        manifest.note(run.folder, f"{artifact.folder}{name}", files, **facts)
        print(*(f"wrote {path}" for path in files), sep="\n")


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ARTIFACTS, help="folder of the artifacts")
    parser.add_argument("--cache", type=Path, help="folder of finished cells, which resumes")
    parser.add_argument("--jobs", type=int, help="worker processes [default: half the cores]")
    return parser


def started(chosen: argparse.Namespace) -> Run:
    """The run that the options ask for."""
    return Run(chosen.out, Cache(chosen.cache or default_folder()), chosen.jobs)


def main(script: str, description: str | None, artifacts: Mapping[str, Artifact]) -> None:
    """The command line of a script: makes the artifacts that are named, by default all."""
    parser = options(description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(artifacts)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(artifacts):
        parser.error(f"no artifact {', '.join(sorted(unknown))} here: {', '.join(artifacts)}")
    make(started(chosen), script, artifacts, chosen.names or artifacts)


# ---- figures


class Drawing(NamedTuple):
    """A figure's panels, or a table as (header, rows)."""

    panels: Sequence[Panel] = ()
    title: str = ""
    columns: int | None = None
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None


class Intervals(NamedTuple):
    """Values with half the width of their 95% intervals, NaN for none, from the top down."""

    title: str
    values: Sequence[float]
    halves: Sequence[float]


def intervals_figure(
    panels: Sequence[Intervals], names: Sequence[str], label: str, title: str, *, log: bool = False
) -> Figure:
    """A figure of named values, three panels in a row, names at the left of each row."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = 3.4 * columns + max(map(len, names)) / 14, (1.0 + 0.24 * len(names)) * rows + 0.8
    # long names are wider in an SVG than where they are measured
    layout = ConstrainedLayoutEngine(rect=(0.012, 0, 0.988, 1))
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    look = {"fmt": "o", "markersize": 5, "color": plots.COLOURS[0]}
    for axis, panel in zip(axes, panels, strict=False):
        axis.errorbar(panel.values, range(len(names)), xerr=panel.halves, **look)
        axis.set_title(panel.title, fontsize="medium")
        axis.set_xlabel(label)
        if log:
            axis.set_xscale("log")
            plots.plain_ticks(axis.xaxis, panel.values)
        axis.grid(True, which="major", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize="small")
    for axis in axes[len(panels) :]:
        axis.remove()
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(title, fontsize="medium")
    return figure


Builder = Callable[[Run], Drawing]


def csv_of(panels: Sequence[Panel]) -> str:
    """The data of a figure: one row a point."""
    header = ("panel", "curve", "x_label", "x", "y_label", "y", "low95", "high95")
    rows: list[tuple[Any, ...]] = []
    for panel in panels:
        for curve in panel.curves:
            blank: Sequence[Any] = [""] * len(curve.x)
            points = zip(curve.x, curve.y, curve.low or blank, curve.high or blank, strict=True)
            for x, y, *band in points:
                rows.append((panel.title, curve.label, panel.x_label, x, panel.y_label, y, *band))
    return tables.csv_text(header, rows)


def figures(builders: Mapping[str, Builder]) -> dict[str, Artifact]:
    """The artifacts figures/NAME.csv and .svg of functions that draw them."""

    def maker(name: str, build: Builder) -> Maker:
        def write(run: Run) -> list[Path]:
            drawing, stem = build(run), run.folder / "figures" / name
            if drawing.table is not None:
                return plots.write_files(stem, {".csv": tables.csv_text(*drawing.table)}, {})
            figure = plots.draw(drawing.panels, title=drawing.title, columns=drawing.columns)
            data = {".csv": csv_of(drawing.panels)}
            return plots.write_files(stem, data, {"": figure}, DATA_AND_PICTURE)

        return write

    return {name: Artifact(maker(name, build)) for name, build in builders.items()}


# ---- cells of accounts

# Below this one-unit δ the accountants that Ganesh and Charles et al. plot have lost all digits.
BLACK_BOX_FLOOR = 1e-15


@dataclasses.dataclass(frozen=True)
class AccountCell(Cell):
    """The third of (σ, ε, δ) for independent noise and ``group_size`` units changing together."""

    name = "account"
    scheme: Scheme
    group_size: int = 1
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None

    def run(self, *needed: Result) -> Result:
        guarantee = account(
            Mechanism(self.scheme, group_size=self.group_size),
            noise_multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            delta=self.delta,
        )
        names = ("noise_multiplier", "epsilon", "delta", "status", "method")
        return Result({name: getattr(guarantee, name) for name in names})


@dataclasses.dataclass(frozen=True)
class GroupBaselineCell(Cell):
    """ε of a group by the black-box lemma, and the line K·ε₁ (which is no guarantee).

    It is the smaller that two accounts of one unit give. A profile by loss distributions ends where
    float64 probabilities do; under Poisson sampling moments reach further: they are logarithms.
    """

    name = "group-baseline"
    scheme: Scheme
    group_size: int
    noise_multiplier: float
    delta: float

    def run(self, *needed: Result) -> Result:
        one_unit = analysis(Mechanism(self.scheme))
        # the last part is the scheme's own account, after bounds that hold anyway
        one_unit = getattr(one_unit, "parts", (one_unit,))[-1]
        assert isinstance(one_unit, DeterministicAnalysis)
        profile = one_unit.bound.profile(self.noise_multiplier)
        question = profile, self.group_size, self.delta
        epsilon = group_lemma.black_box_epsilon(*question, floor=BLACK_BOX_FLOOR)
        if isinstance(self.scheme, Poisson):
            at = (self.noise_multiplier, self.scheme.probability, self.scheme.iterations)
            epsilon = min(epsilon, group_lemma.group_epsilon(*at, self.delta, self.group_size))
        # infinite is beyond numerical range, which says nothing about the privacy loss
        shown = None if math.isinf(epsilon) else epsilon
        line = self.group_size * profile.epsilon(self.delta)
        return Result({"epsilon": shown, "line": line})


# ---- studies

# what every row of every study says of its privacy: None where there is none (a baseline)
PRIVACY = ("privacy_unit", "adjacency", "sampling", "epsilon", "delta", "noise_multiplier")
Row = dict[str, Any]
Results = Mapping[Any, Result]


@dataclasses.dataclass(frozen=True)
class Study(abc.ABC):
    """A study: its settings are fields; rows, panels and sentences follow from its cells.

    Attributes:
      name: of the files.
      source: paper, section, figures.
      plot_columns: panels side by side; as the plots choose where None.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    plot_columns: ClassVar[int | None] = None

    @abc.abstractmethod
    def title(self, rows: list[Row]) -> str:
        """The plot's heading, with the size of what is trained."""

    @abc.abstractmethod
    def cells(self) -> Iterable[Any]:
        """Cells that :meth:`rows` reads; those that they need are found automatically."""

    def more(self, results: Results) -> Iterable[Any]:
        """Cells that these results ask for: rates beyond an end that was best. None at last."""
        return ()

    @abc.abstractmethod
    def rows(self, results: Results) -> list[Row]:
        """One row for each arm; keys that begin with "_" are for panels and findings only."""

    def panels(self, rows: list[Row]) -> list[Panel]:
        """Panels of the plot."""
        raise NotImplementedError

    def figure(self, rows: list[Row]) -> Figure:
        """The plot."""
        return plots.draw(self.panels(rows), title=self.title(rows), columns=self.plot_columns)

    @abc.abstractmethod
    def findings(self, rows: list[Row]) -> list[str]:
        """Sentences that compare the arms, each with its numbers."""

    def results(self, run: Run) -> dict[Any, Result]:
        """Results of its cells, and of those that the results ask for."""
        results: dict[Any, Result] = {}
        missing = list(self.cells())
        while missing:
            results |= run.results(missing)
            missing = [cell for cell in self.more(results) if cell not in results]
        return results

    def write(self, run: Run, command: str, stem: Path) -> list[Path]:
        """STEM.json (settings, rows, findings) and STEM.svg; the findings are printed."""
        rows = self.rows(self.results(run))
        public = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
        for row in public:
            missing = [key for key in PRIVACY if key not in row]
            assert not missing and row.keys() == public[0].keys(), missing
            for key, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    rule = "runs diverged, or numbers left the range of single precision"
                    raise FailureError(f"{key} is {value} in {self.name}: {rule}")
        findings = self.findings(rows)
        print(*findings, sep="\n")
        content = {
            "study": self.name,
            "source": self.source,
            "command": command,
            "version": __version__,
            **run.cost(),
            "setting": dataclasses.asdict(self),
            "findings": findings,
            "rows": public,
        }
        text = json.dumps(content, indent=2, allow_nan=False, default=str)
        figures = {"": self.figure(rows)}
        return plots.write_files(stem, {".json": f"{text}\n"}, figures, ("json", "svg"))


def studies(script: str, *each: Study, folder: str = "studies/") -> dict[str, Artifact]:
    """The artifacts of studies: FOLDER/NAME.json and .svg."""
    artifacts: dict[str, Artifact] = {}

    def maker(study: Study) -> Maker:
        def write(run: Run) -> list[Path]:
            how = command(script, study.name, artifacts)
            return study.write(run, how, run.folder / folder / study.name)

        return write

    for study in each:
        seed = getattr(study, "seed", None)
        artifacts[study.name] = Artifact(maker(study), folder, seed)
    return artifacts


class ChosenRate(NamedTuple):
    """Result of a grid of rates.

    Attributes:
      rate: with the lowest loss of those tried.
      tried: all of them, increasing.
      edge: "lowest" or "highest" where ``rate`` is an end of several, else "".
      missing: the rate to try next; None where the choice is made.
    """

    rate: float
    tried: tuple[float, ...]
    edge: str
    missing: float | None


def choose(
    rates: Sequence[float], loss: Callable[[float], float | None], *, extend: int = 0
) -> ChosenRate:
    """The best rate; a grid whose end is best is extended by its last ratio, ``extend`` times.

    One rate alone is no grid and stays so. ``loss`` says None where a rate was not run yet; what is
    not finite is worst.

    >>> losses = {1.0: 3.0, 2.0: 2.0, 4.0: 1.0, 8.0: 1.5}
    >>> choose((1.0, 2.0), losses.get, extend=3)
    ChosenRate(rate=4.0, tried=(1.0, 2.0, 4.0, 8.0), edge='', missing=None)
    >>> del losses[4.0]
    >>> choose((1.0, 2.0), losses.get, extend=3).missing
    4.0
    """
    measured = {rate: loss(rate) for rate in rates}
    assert None not in measured.values(), "a rate of the grid was not run"

    def finite(rate: float) -> float:
        value = measured[rate]
        return math.inf if value is None or not math.isfinite(value) else value

    while True:
        tried = tuple(sorted(measured))
        best = min(tried, key=finite)
        ends = {tried[0]: "lowest", tried[-1]: "highest"} if len(tried) > 1 else {}
        edge = ends.get(best, "")
        if not edge or len(measured) - len(set(rates)) >= extend:
            return ChosenRate(best, tried, edge, None)
        end, inner = (tried[0], tried[1]) if edge == "lowest" else (tried[-1], tried[-2])
        further = float(f"{end * (end / inner):.6g}")
        if (value := loss(further)) is None:
            return ChosenRate(best, tried, edge, further)
        measured[further] = value


class Swept(Study):
    """A study whose arms are each run at several rates and stand at the one that is best for it.

    The rate is chosen on other data than what is reported; a grid whose end is best is extended
    beyond it, up to ``extend`` times.
    """

    rates: tuple[float, ...]
    extend: int = 0

    @abc.abstractmethod
    def arms(self) -> Iterable[Any]:
        """Arms that are compared, in the table's order."""

    @abc.abstractmethod
    def cell_at(self, arm: Any, rate: float) -> Any:
        """The cell that has an arm's runs at a rate, with every seed; it may have other rates."""

    @abc.abstractmethod
    def judged(self, result: Result, rate: float) -> float:
        """Score of a rate from the result of its cell; lower is better."""

    def cells(self) -> Iterable[Any]:
        return [self.cell_at(arm, rate) for arm in self.arms() for rate in self.rates]

    def more(self, results: Results) -> Iterable[Any]:
        for arm in self.arms():
            if (rate := self.chosen(results, arm).missing) is not None:
                yield self.cell_at(arm, rate)

    def chosen(self, results: Results, arm: Any) -> ChosenRate:
        """The rate of an arm, and the one to try next."""

        def loss(rate: float) -> float | None:
            result = results.get(self.cell_at(arm, rate))
            return None if result is None else self.judged(result, rate)

        return choose(self.rates, loss, extend=self.extend)

    def best(self, results: Results, arm: Any) -> tuple[ChosenRate, Result]:
        """The rate of an arm, and the result of the cell that has it."""
        at = self.chosen(results, arm)
        return at, results[self.cell_at(arm, at.rate)]


# ---- rows in curves and words


def pick(rows: Sequence[Row], **values: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def curve(
    label: str,
    rows: Sequence[Row],
    x: str,
    y: str = "loss",
    band: tuple[str, str] = ("least", "largest"),
) -> Curve:
    """A column of rows over another, with a band between two more.

    Args:
      label, rows: of the curve.
      x, y, band: names of the columns.
    """
    rows = sorted(rows, key=lambda row: row[x])
    place, value, low, high = ([row[name] for row in rows] for name in (x, y, *band))
    return Curve(label, place, value, low, high)


def level(label: str, ends: Sequence[float], value: float) -> Curve:
    """A horizontal line between the least and the largest of ``ends``."""
    return Curve(label, (min(ends), max(ends)), (value, value))


def alike(panels: list[Panel]) -> list[Panel]:
    """The panels with one range of values, so that they can be compared by eye."""
    drawn = [curve for panel in panels for curve in panel.curves]
    values = [y for c in drawn for line in (c.y, c.low, c.high) if line is not None for y in line]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    return [p._replace(y_range=(min(values) - margin, max(values) + margin)) for p in panels]


def interval(values: np.ndarray) -> tuple[float, float]:
    """(mean, half the width of its 95% interval by Student's t)."""
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def relative(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """(mean over mean, half the width of its 95% interval) of paired losses."""
    value = float(one.mean() / other.mean())
    return value, interval((one - value * other) / other.mean())[1]


def spread(label: str, x: Sequence[float], each: Sequence[Sequence[float]]) -> Curve:
    """The mean over seeds of what was found at each place, between the least and the largest."""
    mid, low, high = ([of(values) for values in each] for of in (mean, min, max))
    return Curve(label, x, mid, low, high)


def ends(rows: Sequence[Row]) -> list[str]:
    """A warning where a best rate is an end of those tried."""
    count = sum(bool(row["rate_at_end"]) for row in rows)
    return [f"{count} of {len(rows)} best rates are an end of those tried"] if count else []


def about(values: Any) -> str:
    """The mean of values in words, with half of its 95% interval where there are several."""
    values = np.atleast_1d(values)
    half = f" ± {interval(values)[1]:.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{half}"


def apart(one: np.ndarray | float, other: np.ndarray | float) -> str:
    """Comparison of losses in words: of several, paired, with 95% of the mean.

    >>> apart(2.0, 2.5), apart(np.array([2.5, 2.7]), np.array([2.0, 2.2]))
    ('0.5000 below', '0.5000 ± 0.0000 above')
    """
    gaps = np.atleast_1d(np.subtract(one, other))
    below = gaps.mean() < 0
    return f"{about(-gaps if below else gaps)} {'below' if below else 'above'}"
