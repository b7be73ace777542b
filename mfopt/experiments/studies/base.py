"""What a study is: a record of its flags, its cells, and the outcome made from their results.

A study's cells are :class:`~mfopt.experiments.cache.Task` objects like those of every other table
here: :func:`run` gives them to the one runner with the one cache, so that a study that was stopped
goes on where it was. What a cell computes is named in :data:`mfopt.experiments.runner.WORK`, under
a name that begins with ``study-``; account tasks are shared with the papers' figures.
"""

from __future__ import annotations

import abc
import csv
import dataclasses
import io
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from mfopt import _check, _files
from mfopt._version import __version__
from mfopt.experiments.cache import Cache, Result, Task
from mfopt.experiments.runner import run_all
from mfopt.progress import Report, silent

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

# what every row of every study says of its privacy: None where there is none (a baseline)
PRIVACY = ("privacy_unit", "adjacency", "sampling", "epsilon", "delta", "noise_multiplier")
FILES = ("csv", "json", "txt", "png", "svg")


def flag(
    default: Any,
    help: str,
    *,
    option: str | None = None,
    kind: type[int] | type[float] | type[str] | type[bool] | type[Path] | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a study that is an option of its command too.

    Args:
      default: also tells the kind: a number, a word, a tuple of numbers or words, a bool, a path.
      help: one line, of the option.
      option: its name where this is not the field's with dashes (``--eps`` for ``epsilons``).
      kind: of the value, or of the items of a tuple, where ``default`` is None or empty.
      choices: the only words allowed.
    """
    item = (default[0] if default else None) if isinstance(default, tuple) else default
    of = kind or (Path if isinstance(item, Path) else type(item))
    meta = {"help": help, "option": option, "kind": of, "choices": choices}
    return dataclasses.field(default=default, metadata={"flag": meta})


class Outcome(NamedTuple):
    """What a study says, made from the results of its cells.

    Attributes:
      rows: one dictionary a row, all with the same keys, among them :data:`PRIVACY`.
      columns: {key of the rows: heading} of those that the terminal shows, in order.
      panels: of the plot.
      title: of the plot.
      findings: what follows, in words, each with its numbers.
      plot_columns: panels side by side; as the plots choose where None.
    """

    rows: Sequence[dict[str, Any]]
    columns: Mapping[str, str]
    panels: Sequence[Panel]
    title: str
    findings: Sequence[str]
    plot_columns: int | None = None


@dataclasses.dataclass(frozen=True)
class Study(abc.ABC):
    """A study with its settings; subclasses add fields made by :func:`flag`.

    Attributes:
      name: on the command line, and of the files.
      summary: one line.
      source: paper, section, figures.
      default_size: what is run by default, in words.
      time: of that on two cores, as measured.
      full: the fields' values at the paper's size (``--full``).
      full_size: the same in words.
      needs: what the full size needs that mfopt does not bring.
      alone: whether it measures time, so that nothing may run beside it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    default_size: ClassVar[str]
    time: ClassVar[str]
    full: ClassVar[Mapping[str, Any]]
    full_size: ClassVar[str]
    needs: ClassVar[str] = "nothing"
    alone: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self) -> Self:
        """This study, or :class:`UsageError` naming a field that cannot be."""

    @abc.abstractmethod
    def cells(self) -> Iterable[Task]:
        """Every result that :meth:`outcome` reads; what those need is found by itself."""

    def more(self, found: Mapping[Task, Result]) -> Iterable[Task]:
        """Cells that these results ask for: rates beyond an end that was best. None at last."""
        return ()

    @abc.abstractmethod
    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        """Rows, plot and words from the results of all cells."""

    def seconds(self, missing: Iterable[Task]) -> float | None:
        """About how long these cells take in one process; None where nobody knows."""
        return None

    def command(self) -> str:
        """The command that runs this study."""
        words = ["mfopt", "experiment", self.name]
        for field in flags(type(self)):
            value = getattr(self, field.name)
            if value != field.default:
                words += [option_of(field)] if value is True else [option_of(field), worded(value)]
        return shlex.join(words)


def check_several(name: str, values: tuple[object, ...]) -> None:
    """Refuse a list of values with nothing in it, or with one twice."""
    if not values or len(set(values)) < len(values):
        raise _check.reject(name, values, "must name at least one value, and none twice")


def check_number(name: str, value: float) -> None:
    """Refuse what a study cannot run with: an ε that says nothing, a number out of range."""
    if name in ("epsilon", "epsilons"):
        _check.epsilon(name, value)
    else:
        _check.single(name, value)


def flags(study: type[Study]) -> list[dataclasses.Field[Any]]:
    """The fields that are options: a study's own, then those that it shares with others."""
    own = study.__annotations__
    found = [field for field in dataclasses.fields(study) if "flag" in field.metadata]
    return sorted(found, key=lambda field: field.name not in own)


def option_of(field: dataclasses.Field[Any]) -> str:
    """The name of a field's option."""
    given: str | None = field.metadata["flag"]["option"]
    return given or "--" + field.name.replace("_", "-")


def worded(value: Any) -> str:
    """A field's value as it is typed."""
    return ",".join(map(_word, value)) if isinstance(value, tuple) else _word(value)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def run(
    study: Study, cache: Cache, *, jobs: int | None = None, progress: Report = silent
) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a study, and how it was made: JSON-able facts for its files.

    Args:
      study: what is run.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores.
      progress: told of each finished cell.

    Raises:
      UsageError: a setting that cannot be.
      FailureError: a cell failed, or what it found is not finite.
      KeyboardInterrupt: what was finished is kept; the same call goes on from there.
    """
    study.check()
    found = run_cells([study], cache, jobs=jobs, progress=progress)
    outcome = study.outcome(found)
    for row in outcome.rows:
        missing = [key for key in (*PRIVACY, *outcome.columns) if key not in row]
        assert not missing and row.keys() == outcome.rows[0].keys(), missing
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                rule = "runs diverged, or numbers left the range of single precision"
                raise _check.FailureError(f"{key} is {value} in {study.name}: {rule}")
    records = [result.record for result in found.values()]
    made = {
        "command": study.command(),
        "version": __version__,
        "device": sorted({record["device"] for record in records}),
        **{
            name: round(sum(record[name] for record in records), 1)
            for name in ("seconds", "cpu_seconds")
        },
        "made": max(record["made"] for record in records),
    }
    return outcome, made


def run_cells(
    studies: Sequence[Study], cache: Cache, *, jobs: int | None = None, progress: Report = silent
) -> dict[Task, Result]:
    """Every cell of some studies, in one pool, with those that results ask for.

    Args:
      studies: checked.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores.
      progress: told of each finished cell.
    """

    def cost(missing: Iterable[Task]) -> float | None:
        return studies[0].seconds(missing) if len(studies) == 1 else None

    asked = [task for study in studies for task in study.cells()]
    found: dict[Task, Result] = {}
    jobs = 1 if any(study.alone for study in studies) else jobs
    while asked:
        found |= run_all(asked, cache, jobs=jobs, progress=progress, cost=cost)
        asked = [task for study in studies for task in study.more(found) if task not in found]
    return found


def described(study: Study, outcome: Outcome, made: dict[str, Any]) -> dict[str, Any]:
    """All of a study as one JSON-able object."""
    return {
        "study": study.name,
        "source": study.source,
        **made,
        "setting": {
            field.name: _jsonable(getattr(study, field.name)) for field in flags(type(study))
        },
        "findings": list(outcome.findings),
        "rows": list(outcome.rows),
    }


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def table(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """(headings, cells) of the table for people."""
    return list(outcome.columns.values()), [
        [_shown(row[key]) for key in outcome.columns] for row in outcome.rows
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def csv_text(outcome: Outcome) -> str:
    """Every row with all its columns."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(outcome.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(outcome.rows)
    return buffer.getvalue()


def outputs(study: Study, folder: Path) -> list[Path]:
    """The files that :func:`write` writes."""
    return [folder / f"{study.name}.{kind}" for kind in FILES]


def write(folder: Path, study: Study, outcome: Outcome, made: dict[str, Any]) -> list[Path]:
    """NAME.csv, .json, .txt (the findings), .png and .svg in ``folder``, each whole or not at all.

    Args:
      folder: where; it is made where it is not there.
      study: what was run.
      outcome: what it says.
      made: how it was made, as :func:`run` gives it.
    """
    from mfopt.experiments import plots

    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / study.name
    text = json.dumps(described(study, outcome, made), indent=2, allow_nan=False)
    figure = plots.draw(outcome.panels, title=outcome.title, columns=outcome.plot_columns)
    return [
        _files.write(folder / f"{study.name}.csv", csv_text(outcome)),
        _files.write(folder / f"{study.name}.json", text + "\n"),
        _files.write(folder / f"{study.name}.txt", "\n".join(outcome.findings) + "\n"),
        *plots.save(figure, stem),
    ]
