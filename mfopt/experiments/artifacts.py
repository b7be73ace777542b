"""The ``artifacts/`` folder: small results, each made by a command and noted in its manifest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mfopt._runtime import _check, _sizes
from mfopt._version import __version__
from mfopt.experiments import comparison, decision_plots, families, figures, plots, tables
from mfopt.experiments.auditing import TrainerAudit
from mfopt.experiments.cache import Cache, Cell, Result, code_digest
from mfopt.experiments.manifest import note, read_manifest
from mfopt.experiments.mechanisms import ProvenCell, strategy_of
from mfopt.experiments.runner import cores, first_cells, run_all, summed, with_needs
from mfopt.experiments.studies import STUDIES, engine, find, output
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.progress import Report, silent, within
from mfopt.workloads import PrefixSums

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SETTINGS = tuple((epochs, bins) for epochs in (8, 16, 32) for bins in (32, 64, 128))
DELTA, SEED = 1e-5, 0
# what changes with ε in between is in the tables of forms and the comparison
GRID_KINDS, GRID_EPSILONS = ("blt-4", "toeplitz", "blt-4-scaled"), (0.5, 2.0, 8.0)
KINDS = *GRID_KINDS, "toeplitz-scaled"  # families of factorizations
# the forms of C side by side, from the smallest memory to the yardstick
FORMS = (
    *("blt-4", "toeplitz", "blt-2-scaled", "blt-4-scaled", "wave-blt-4-scaled"),
    *("toeplitz-scaled", "banded+amplified", "dense"),
)
STRATEGIES = {f"strategies-{e}x{b}": (e, b) for e, b in ((8, 32), (32, 32))}
COMPARISON, GRID, AUDIT = "comparison-16x128", "grid", "audit"
FACTORIZATIONS = {
    f"{kind}-{epochs}x{bins}-eps{epsilon:g}": (kind, epochs, bins, epsilon)
    for epochs, bins in SETTINGS
    for epsilon in EPSILONS
    for kind in KINDS
}
# of the grid's, those that pages, notebooks, tests and benchmarks read
READ = (
    *("blt-4-8x32-eps2", "blt-4-8x32-eps8", "blt-4-16x32-eps2", "toeplitz-scaled-16x32-eps2"),
    *("blt-4-scaled-8x32-eps2", "blt-4-scaled-8x32-eps8"),
)
_STUDIES = tuple(f"studies/{name}" for name in STUDIES)
# suffixes of an artifact's files: pictures in one format, data once
FILES, RECORD = ("csv", "svg"), ("json", "svg")


def names() -> list[str]:
    """Names of the artifacts, in the order in which they build on one another's cells."""
    made = [name for name in figures.FIGURES if name not in figures.SAME]
    return [*READ, GRID, *STRATEGIES, COMPARISON, AUDIT, *made, *_STUDIES]


def command(name: str) -> str:
    """The command that rebuilds an artifact."""
    if name in _STUDIES:
        return f"mfopt experiment {Path(name).name} --artifacts artifacts"
    return f"mfopt figures --artifacts artifacts {name}"


def grid_cell(kind: str, epochs: int, bins: int, epsilon: float) -> ProvenCell:
    """The certificate of one cell of the grid; it names the estimate of its σ, and that its C.

    Args:
      kind: family, one of :data:`KINDS`.
      epochs, bins: passes over the data, and iterations of each.
      epsilon: ε of the statement.
    """
    return families.Comparison(bins, epochs, (epsilon,), DELTA, seed=SEED).proven(kind, epsilon)


def _factorization(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    """One cell of the grid as a certified factorization."""
    proven = grid_cell(*FACTORIZATIONS[name])
    (sigma,) = proven.sigmas
    asked = (proven, sigma, sigma.source)
    found = run_all(asked, cache, **how)
    certified, estimate, source = (found[cell].record for cell in asked)
    guarantee = Guarantee.from_description(certified["guarantee"])
    made = Factorization(
        strategy_of(found[proven]),
        guarantee.noise_multiplier,
        proven.goal.bin_scheme(),
        PrefixSums(),
        guarantee,
        provenance={
            "version": __version__,
            "command": command(name),
            "seed": SEED,
            "device": certified["device"],
            "made": certified["made"],
            "estimated_noise_multiplier": estimate["noise_multiplier"],
            "estimate_relative_error": estimate["relative_error"],
            "optimizer_status": source["status"],
            "optimizer_seconds": source["seconds"],
        },
    )
    (folder / "factorizations").mkdir(exist_ok=True)
    return [made.save(folder / "factorizations" / f"{name}.npz", force=True)]


def _table(folder: Path, name: str, text: str) -> list[Path]:
    return plots.write_files(folder / "tables" / name, {".csv": text}, {})


def _grid(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    """σ and RMSE of BLT-4, plain and time-scaled, and of Toeplitz C, by size and ε."""
    cells = {
        place: grid_cell(*place).sigmas[0]
        for place in FACTORIZATIONS.values()
        if place[0] in GRID_KINDS and place[-1] in GRID_EPSILONS
    }
    wanted = [each for cell in cells.values() for each in (cell.source, cell)]
    found = run_all(wanted, cache, **how)
    values = ("noise_multiplier", "rmse", "relative_error")
    rows = [
        (
            *(kind, epochs, bins, f"{epsilon:g}", f"{DELTA:g}"),
            *(found[cell].record[value] for value in values),
            found[cell.source].record["seconds"],
        )
        for (kind, epochs, bins, epsilon), cell in cells.items()
    ]
    place = "kind", "epochs", "bins", "epsilon", "delta"
    return _table(folder, name, tables.csv_text((*place, *values, "optimizer_seconds"), rows))


def _strategies(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    """The forms of C at one size, each against plain Toeplitz: how much time-scaling gains."""
    epochs, bins = STRATEGIES[name]
    setting = families.Comparison(bins, epochs, EPSILONS, DELTA, FORMS, (bins,), seed=SEED)
    rows = comparison.compare(setting, cache, **how)
    return _table(folder, name, comparison.csv_text(rows, "toeplitz"))


def _comparison(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    """The whole comparison at 16 epochs × 128 iterations, with its plots."""
    # more bands than iterations in an epoch overlap, cost much and hardly help
    widths = tuple(width for width in families.WIDTHS if width <= 128)
    setting = families.Comparison(128, 16, EPSILONS, DELTA, widths=widths)
    sizes = comparison.every_size(setting, cache, **how)
    every = [row for candidates in sizes.values() for row in candidates]
    stem, best = folder / "tables" / COMPARISON, comparison.best(sizes)
    return decision_plots.write(stem, setting, best, every, kinds=("csv", "svg"))


def _study(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    """A study at its default sizes."""
    study = TrainerAudit() if name == AUDIT else find(Path(name).name)()
    return output.write((folder / name).parent, study, *engine.run(study, cache, **how), RECORD)


def _figure(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    return figures.make(name, folder / "figures", cache, FILES, **how)


_MAKERS: dict[str, Callable[..., list[Path]]] = {
    **dict.fromkeys(FACTORIZATIONS, _factorization),
    **dict.fromkeys(STRATEGIES, _strategies),
    GRID: _grid,
    COMPARISON: _comparison,
    **dict.fromkeys((AUDIT, *_STUDIES), _study),
}


class _Recording(Cache):
    """A cache that notes which cells were read: an artifact's seconds are theirs."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.seen: dict[Cell, None] = {}

    def load(self, cell: Cell) -> Result | None:
        result = super().load(cell)
        if result is not None:
            self.seen[cell] = None
        return result


def rebuild(
    chosen: Sequence[str],
    folder: Path,
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> list[Path]:
    """Build artifacts into ``folder`` and note each in its manifest, replacing what is there.

    The cells of all are computed by one pool of processes.

    Args:
      chosen: names of artifacts.
      folder: where files are written.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every core, and one for every two of a single
        artifact.
      progress: callback for each finished cell.

    Raises:
      UsageError: an unknown name.
      FailureError: a certificate was refused.
    """
    known = names()
    for name in chosen:
        if name not in (*known, *FACTORIZATIONS, *figures.FIGURES):
            raise _check.reject("artifact", name, "is not known", "See `mfopt figures --list`.")
    folder.mkdir(parents=True, exist_ok=True)
    read_manifest(folder)  # a damaged one is refused before the work
    _sizes.speed()  # measured once, before this machine is busy
    chosen = list(dict.fromkeys(chosen))
    written: list[Path] = []

    def make(name: str, cells: Cache, **how: Any) -> list[Path]:
        maker: Callable[..., list[Path]] = _MAKERS.get(name, _figure)
        return maker(name, folder, cells, **how)

    if len(chosen) > 1:
        asked = [first_cells(functools.partial(make, each, cache)) for each in chosen]
        run_all(itertools.chain(*asked), cache, jobs=jobs or cores(), progress=progress)
    for name in chosen:
        if name in _STUDIES:
            study = find(Path(name).name)()
            written += write_study(study, folder, cache, jobs=jobs, progress=progress)[2]
            continue
        recorder = _Recording(cache.folder)
        files = make(name, recorder, jobs=jobs, progress=within(progress, name))
        _note(folder, name, files, recorder, how=command(name), seed=SEED)
        written += files
    return written


def write_study(
    study: engine.Study, folder: Path, cache: Cache, **how: Any
) -> tuple[engine.Outcome, dict[str, Any], list[Path]]:
    """A study's outcome, how it was made, and its files in ``folder``, noted in its manifest.

    Raises:
      UsageError: a setting that cannot be.
    """
    read_manifest(folder)  # a damaged one is refused before the work
    _sizes.speed()
    recorder = _Recording(cache.folder)
    outcome, made = engine.run(study, recorder, **how)
    files = output.write(folder / "studies", study, outcome, made, RECORD)
    said: dict[str, Any] = {"how": f"{made['command']} --artifacts artifacts"}
    said["seed"] = getattr(study, "seed", None)
    _note(folder, f"studies/{study.name}", files, recorder, **said)
    return outcome, made, files


def _note(folder: Path, name: str, files: list[Path], cells: _Recording, **how: Any) -> None:
    code = code_digest(training=True, studies=name.startswith("studies/"))
    computing = summed(map(cells.load, with_needs(cells.seen)))
    # what a busy or slow machine took says nothing without it
    note(folder, name, files, **how, **computing, speed=round(_sizes.speed(), 1), code=code)
