"""The engine of studies: it checks options, finds cells, chooses rates, and runs what is asked.

A study is one frozen dataclass in one file: its options, its arms and their cells, a row for each
arm, the columns that are shown, the panels of a plot, and sentences that compare. Cells of all
studies go through the one runner with the one cache: a stopped study resumes.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from mfopt._runtime import _check
from mfopt._version import __version__
from mfopt.experiments.cache import Cache, Result
from mfopt.experiments.options import check, option_of, options, worded
from mfopt.experiments.plots import Panel
from mfopt.experiments.runner import run_all, summed

# what every row of every study says of its privacy: None where there is none (a baseline)
PRIVACY = ("privacy_unit", "adjacency", "sampling", "epsilon", "delta", "noise_multiplier")
Row = dict[str, Any]
Found = Mapping[Any, Result]


class Outcome(NamedTuple):
    """Outcome of a study, made from the results of its cells.

    Attributes:
      rows: one dictionary a row, all with the same keys, among them :data:`PRIVACY`.
      columns: {key of the rows: heading} of those that the terminal shows, in order.
      panels, title: of the plot.
      findings: what follows, in words, each with its numbers.
    """

    rows: Sequence[Row]
    columns: Mapping[str, str]
    panels: Sequence[Panel]
    title: str
    findings: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Study(abc.ABC):
    """A study with its settings; subclasses add fields made by :func:`option`.

    Attributes:
      name: on the command line, and of the files.
      summary: one line, that of the class's docstring.
      source: paper, section, figures.
      default_size: what is run by default, in words.
      time: of that on two cores, as measured.
      columns: of the rows that the terminal shows, as "key; key=heading".
      title: of the plot, for :meth:`str.format` of a study and its first row.
      scale: of what is trained, and of the paper's, likewise; "" where nothing is.
      plot_columns: panels side by side; as the plots choose where None.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    default_size: ClassVar[str]
    time: ClassVar[str]
    columns: ClassVar[str]
    title: ClassVar[str]
    plot_columns: ClassVar[int | None] = None
    scale: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.summary = (cls.__doc__ or "").partition("\n")[0]

    def check(self) -> Self:
        """Return this study, or raise :class:`UsageError` that names a field that cannot be."""
        for field in options(type(self)):
            check(field, getattr(self, field.name))
        self.check_together()
        return self

    def check_together(self) -> None:  # noqa: B027 (nothing to add)
        """Refuse options that do not go together."""

    @abc.abstractmethod
    def cells(self) -> Iterable[Any]:
        """Cells that :meth:`rows` reads; those that they need are found automatically."""

    def more(self, found: Found) -> Iterable[Any]:
        """Cells that these results ask for: rates beyond an end that was best. None at last."""
        return ()

    @abc.abstractmethod
    def rows(self, found: Found) -> list[Row]:
        """One row for each arm; keys that begin with "_" are for panels and findings only."""

    @abc.abstractmethod
    def panels(self, rows: list[Row]) -> list[Panel]:
        """Panels of the plot."""

    @abc.abstractmethod
    def findings(self, rows: list[Row]) -> list[str]:
        """Sentences that compare the arms."""

    def outcome(self, found: Found) -> Outcome:
        """Rows, plot and words from the results of all cells."""
        rows = self.rows(found)
        shown = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
        columns = dict(part.strip().partition("=")[::2] for part in self.columns.split(";"))
        headings = {key: heading or key for key, heading in columns.items()}
        words = self.heading(rows), self.findings(rows)
        return Outcome(shown, headings, self.panels(rows), *words)

    def heading(self, rows: list[Row]) -> str:
        """The plot's heading, with the size of what is trained."""
        return "\n".join(x.format(self, rows[0]) for x in (self.title, self.scale) if x)

    def command(self) -> str:
        """The command that runs this study."""
        words = ["mfopt", "experiment", self.name]
        for field in options(type(self)):
            value = getattr(self, field.name)
            if value != field.default:
                words += [option_of(field)] if value is True else [option_of(field), worded(value)]
        return shlex.join(words)


class ChosenRate(NamedTuple):
    """Result of a grid of rates.

    Attributes:
      rate: with the least loss of those tried.
      tried: all of them, increasing.
      edge: "lowest" or "highest" where ``rate`` is an end of several, else "".
      missing: the rate to try next; None where the choice is made.
    """

    rate: float
    tried: tuple[float, ...]
    edge: str
    missing: float | None


def choose(
    rates: Sequence[float], loss: Callable[[float], float | None], *, most: int = 0
) -> ChosenRate:
    """The best rate; a grid whose end is best is extended by its last ratio, ``most`` times.

    One rate alone is no grid and stays so. ``loss`` says None where a rate was not run yet; what is
    not finite is worst.

    >>> losses = {1.0: 3.0, 2.0: 2.0, 4.0: 1.0, 8.0: 1.5}
    >>> choose((1.0, 2.0), losses.get, most=3)
    ChosenRate(rate=4.0, tried=(1.0, 2.0, 4.0, 8.0), edge='', missing=None)
    >>> del losses[4.0]
    >>> choose((1.0, 2.0), losses.get, most=3).missing
    4.0
    """
    known = {rate: loss(rate) for rate in rates}
    assert None not in known.values(), "a rate of the grid was not run"

    def finite(rate: float) -> float:
        found = known[rate]
        return math.inf if found is None or not math.isfinite(found) else found

    while True:
        tried = tuple(sorted(known))
        best = min(tried, key=finite)
        ends = {tried[0]: "lowest", tried[-1]: "highest"} if len(tried) > 1 else {}
        edge = ends.get(best, "")
        if not edge or len(known) - len(set(rates)) >= most:
            return ChosenRate(best, tried, edge, None)
        end, inner = (tried[0], tried[1]) if edge == "lowest" else (tried[-1], tried[-2])
        further = float(f"{end * (end / inner):.6g}")
        if (found := loss(further)) is None:
            return ChosenRate(best, tried, edge, further)
        known[further] = found


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

    def more(self, found: Found) -> Iterable[Any]:
        for arm in self.arms():
            if (rate := self.chosen(found, arm).missing) is not None:
                yield self.cell_at(arm, rate)

    def chosen(self, found: Found, arm: Any) -> ChosenRate:
        """The rate of an arm, and the one to try next."""

        def loss(rate: float) -> float | None:
            result = found.get(self.cell_at(arm, rate))
            return None if result is None else self.judged(result, rate)

        return choose(self.rates, loss, most=self.extend)

    def best(self, found: Found, arm: Any) -> tuple[ChosenRate, Result]:
        """The rate of an arm, and the result of the cell that has it."""
        at = self.chosen(found, arm)
        return at, found[self.cell_at(arm, at.rate)]


def run(study: Study, cache: Cache, **how: Any) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a study, and how it was made: JSON-able facts for its files.

    ``how`` and what is raised are as for :func:`.run_all`.

    Raises:
      UsageError: a setting that cannot be.
      FailureError: a cell failed, or what it found is not finite.
    """
    study.check()
    found = run_cells([study], cache, **how)
    outcome = study.outcome(found)
    for row in outcome.rows:
        missing = [key for key in (*PRIVACY, *outcome.columns) if key not in row]
        assert not missing and row.keys() == outcome.rows[0].keys(), missing
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                rule = "runs diverged, or numbers left the range of single precision"
                raise _check.FailureError(f"{key} is {value} in {study.name}: {rule}")
    made = {"command": study.command(), "version": __version__, **summed(found.values())}
    return outcome, made


def run_cells(studies: Sequence[Study], cache: Cache, **how: Any) -> dict[Any, Result]:
    """Run the cells of checked studies in one pool, with those that results ask for."""
    asked = [cell for study in studies for cell in study.cells()]
    found: dict[Any, Result] = {}
    while asked:
        found |= run_all(asked, cache, **how)
        asked = [cell for study in studies for cell in study.more(found) if cell not in found]
    return found
