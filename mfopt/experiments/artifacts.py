"""The ``artifacts/`` folder: small results with a manifest that says how each was made.

Every artifact has a name, a builder in this library, and an entry in ``manifest.json``: files with
their SHA-256, the command that rebuilds it, version, commit, digest of the code, seed, device, and
the seconds of computing behind it (the sum over the cells it was made of, cached or not).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mfopt import _check, _files
from mfopt._version import __version__
from mfopt.experiments import (
    auditing,
    comparison,
    decision_plots,
    families,
    figures,
    plots,
    spent,
    training,
)
from mfopt.experiments.cache import Cache, code_digest
from mfopt.experiments.mechanisms import AmplifiedCell, CertifiedCell, Goal, SigmaCell, strategy_of
from mfopt.experiments.runner import cores, first_cells, run_all, workers
from mfopt.experiments.studies import engine, output
from mfopt.experiments.studies.engine import Outcome, Study
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.progress import Progress, Report, silent, within
from mfopt.sampling import BallsInBins
from mfopt.workloads import PrefixSums

MANIFEST = "manifest.json"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SETTINGS = tuple((epochs, bins) for epochs in (8, 16, 32) for bins in (32, 64, 128))
DELTA, SEED = 1e-5, 0
# of the grid: name -> kind, buffers, whether time-scaled
KINDS = {
    "blt-4": ("blt", 4, False),
    "toeplitz": ("toeplitz", 0, False),
    "blt-4-scaled": ("blt", 4, True),
    "toeplitz-scaled": ("toeplitz", 0, True),
}
# the forms of C side by side, from the smallest memory to the yardstick
FORMS = (
    "blt-4",
    "toeplitz",
    "blt-2-scaled",
    "blt-4-scaled",
    "wave-blt-4-scaled",
    "toeplitz-scaled",
    "banded+amplified",
    "dense",
)
STRATEGIES = {f"strategies-{e}x{b}": (e, b) for e, b in ((8, 32), (32, 32), (16, 128))}
COMPARISON = "comparison-16x128"
GRID = "grid"
TRAINING, AUDIT = "train-comparison", "audit"
COSTS = "costs"  # what making all of them took: made with all of them only


class Built(NamedTuple):
    """Files that were written, and the tasks behind them."""

    files: Sequence[Path]
    tasks: Sequence[Any]


Build = Callable[[Path, Cache, int | None, Report], Built]


def names() -> list[str]:
    """Every artifact, in the order in which they build on one another's cells."""
    return [*_factorizations(), GRID, *STRATEGIES, COMPARISON, TRAINING, AUDIT, *figures.FIGURES]


def _factorizations() -> dict[str, tuple[str, int, int, float]]:
    return {
        f"{kind}-{epochs}x{bins}-eps{epsilon:g}": (kind, epochs, bins, epsilon)
        for epochs, bins in SETTINGS
        for epsilon in EPSILONS
        for kind in KINDS
    }


def grid_cells(kind: str, epochs: int, bins: int, epsilon: float) -> CertifiedCell:
    """The certificate of one cell of the grid; it names its C and the estimate of its σ.

    Args:
      kind: kind of strategy.
      epochs: passes over the data.
      bins: iterations of an epoch.
      epsilon: ε of the statement.
    """
    form, buffers, scaled = KINDS[kind]
    goal = Goal(bins, epochs, epsilon, DELTA, seed=SEED)
    return CertifiedCell.of(SigmaCell(AmplifiedCell(goal, form, scaled, buffers=buffers), goal))


def factorization(
    kind: str,
    epochs: int,
    bins: int,
    epsilon: float,
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> Factorization:
    """One cell of the grid as a certified factorization.

    Args:
      kind: kind of strategy.
      epochs: passes over the data.
      bins: iterations of an epoch.
      epsilon: ε of the statement.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores.
      progress: told of each finished cell.
    """
    certified = grid_cells(kind, epochs, bins, epsilon)
    source = certified.source
    found = run_all([source, certified], cache, jobs=jobs, progress=progress)
    record = found[certified].record
    guarantee = Guarantee(**record["guarantee"])
    return Factorization(
        strategy_of(found[source]),
        guarantee.noise_multiplier,
        BallsInBins(bins, epochs),
        PrefixSums(),
        guarantee,
        provenance={
            "version": __version__,
            "command": command(f"{kind}-{epochs}x{bins}-eps{epsilon:g}"),
            "seed": SEED,
            "device": record["device"],
            "made": record["made"],
            "estimated_noise_multiplier": record["estimated_noise_multiplier"],
            "estimate_relative_error": record["estimate_relative_error"],
            "optimizer_status": found[source].record["status"],
            "optimizer_seconds": found[source].record["seconds"],
        },
    )


def command(name: str) -> str:
    """The command that rebuilds an artifact."""
    return f"mfopt figures --artifacts artifacts {name}"


def _build(name: str, folder: Path, cache: Cache, jobs: int | None, progress: Report) -> Built:
    factorizations = _factorizations()
    if name in factorizations:
        kind, epochs, bins, epsilon = factorizations[name]
        made = factorization(kind, epochs, bins, epsilon, cache, jobs=jobs, progress=progress)
        place = _made(folder / "factorizations") / f"{name}.npz"
        return Built([made.save(place, force=True)], [grid_cells(kind, epochs, bins, epsilon)])
    if name == GRID:
        return _grid(folder, cache, jobs, progress)
    if name == COMPARISON:
        return _comparison(folder, cache, jobs, progress)
    recorder = _Recording(cache.folder)
    if name in STRATEGIES:
        return _strategies(name, folder, recorder, jobs, progress)
    if name == TRAINING:
        setting = training.TrainingComparison()
        runs = training.compare(setting, recorder, jobs=jobs, progress=progress)
        return Built(training.write(folder / TRAINING, setting, runs), list(recorder.seen))
    if name == AUDIT:
        claim = auditing.TrainerAudit()
        rows = auditing.audits(claim, recorder, jobs=jobs, progress=progress)
        return Built(auditing.write(folder / AUDIT, claim, rows), list(recorder.seen))
    place = _made(folder / "figures")
    files = figures.make(name, place, recorder, jobs=jobs, progress=progress)
    return Built(files, list(recorder.seen))


class _Recording(Cache):
    """A cache that notes which tasks were read: an artifact's seconds are theirs."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.seen: dict[Any, None] = {}

    def load(self, task: Any) -> Any:
        result = super().load(task)
        if result is not None:
            self.seen[task] = None
        return result


def _grid(folder: Path, cache: Cache, jobs: int | None, progress: Report) -> Built:
    """σ and RMSE of all cells: BLT-4 and Toeplitz, plain and time-scaled."""
    cells = {place: grid_cells(*place).estimate for place in _factorizations().values()}
    found = run_all(cells.values(), cache, jobs=jobs, progress=progress)
    lines = [
        "kind,epochs,bins,epsilon,delta,noise_multiplier,rmse,relative_error,optimizer_seconds"
    ]
    for (kind, epochs, bins, epsilon), sigma in cells.items():
        r, (source,) = found[sigma].record, sigma.needs
        search = cache.load(source)
        assert search is not None, "its σ was found from it"
        lines.append(
            f"{kind},{epochs},{bins},{epsilon:g},{DELTA:g},{r['noise_multiplier']!r},"
            f"{r['rmse']!r},{r['relative_error']!r},{search.record['seconds']}"
        )
    place = _made(folder / "tables") / "grid.csv"
    return Built([_files.write(place, "\n".join(lines) + "\n")], [*cells.values()])


def _strategies(
    name: str, folder: Path, recorder: _Recording, jobs: int | None, progress: Report
) -> Built:
    """The forms of C at one size, each against plain Toeplitz: how much time-scaling gains."""
    epochs, bins = STRATEGIES[name]
    setting = comparison.Comparison(bins, epochs, EPSILONS, DELTA, FORMS, (bins,), seed=SEED)
    rows = comparison.compare(setting, recorder, jobs=jobs, progress=progress)
    stem = _made(folder / "tables") / name
    files = [
        _files.write(stem.with_suffix(".csv"), comparison.csv_text(rows, "toeplitz")),
        _files.write(stem.with_suffix(".txt"), comparison.text_table(rows, "toeplitz") + "\n"),
    ]
    return Built(files, list(recorder.seen))


def _comparison(folder: Path, cache: Cache, jobs: int | None, progress: Report) -> Built:
    """The whole comparison at 16 epochs × 128 iterations, with its plots."""
    # more bands than iterations in an epoch overlap, cost much and hardly help
    widths = tuple(width for width in families.WIDTHS if width <= 128)
    setting = comparison.Comparison(128, 16, EPSILONS, DELTA, widths=widths)
    recorder = _Recording(cache.folder)
    sizes = comparison.every_size(setting, recorder, jobs=jobs, progress=progress)
    rows = comparison.best(sizes)
    every = [row for candidates in sizes.values() for row in candidates]
    files = write_comparison(_made(folder / "tables") / COMPARISON, setting, rows, every)
    return Built(files, list(recorder.seen))


def write_comparison(
    stem: Path,
    setting: comparison.Comparison,
    rows: Sequence[comparison.Row],
    sizes: Sequence[comparison.Row],
    baseline: str | None = comparison.DEFAULT_BASELINE,
    parameters: int | None = None,
) -> list[Path]:
    """STEM.csv, .json, .txt and plots of RMSE, improvement over ``baseline``, memory and time.

    Args:
      stem: path without suffix of the files.
      setting: what is compared, and where.
      rows: the rows to show, one for each family and ε.
      sizes: rows of every size that was tried.
      baseline: family that improvements are over; None for none.
      parameters: of the model that the rows' noise was timed for; None where it was not.
    """

    def name(part: str) -> Path:
        return stem.with_name(f"{stem.name}{part}")

    written = [
        _files.write(name(".csv"), comparison.csv_text(rows, baseline)),
        _files.write(name(".json"), comparison.json_text(setting, rows, baseline) + "\n"),
        _files.write(name(".txt"), comparison.text_table(rows, baseline) + "\n"),
    ]
    for part, figure in decision_plots.figures(setting, rows, sizes, baseline, parameters):
        written += plots.save(figure, name(part))
    return written


def rebuild(
    chosen: Sequence[str],
    folder: Path,
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> list[Path]:
    """Build artifacts into ``folder`` and note each in its manifest, replacing what is there.

    Where all are chosen, what that took is one more. The cells of several artifacts are computed by
    one pool of processes, a process for each core, and drawn by another; what measures time is
    made before that, alone.

    Args:
      chosen: names of artifacts.
      folder: where files are written.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every core, and one for every two of a single
        artifact.
      progress: told of each finished cell.

    Raises:
      UsageError: an unknown name.
      FailureError: a certificate was refused.
    """
    known = names()
    for name in chosen:
        if name not in known:
            raise _check.reject("artifact", name, "is not known", "See `mfopt figures --list`.")
    folder.mkdir(parents=True, exist_ok=True)
    read_manifest(folder)  # a damaged one is refused before the work
    chosen, meter = list(dict.fromkeys(chosen)), spent.Meter(cache)
    make, made = _Maker(folder, cache, commit()), dict[str, _Noted]()
    try:
        for name, one in _each(make, chosen, jobs, progress):
            made[name] = one
        if set(chosen) == set(known):
            cells = _with_needs([task for one in made.values() for task in one.built.tasks])
            place = _made(folder / "tables") / f"{COSTS}.csv"
            built = Built([_files.write(place, meter.table(cells))], cells)
            made[COSTS] = make.noted("all", built)
    finally:  # what was made before an interrupt is noted too
        if made:
            _keep(folder, {name: one.entry for name, one in made.items()})
    return [path for one in made.values() for path in one.built.files]


class _Noted(NamedTuple):
    """What was written, and what the manifest says of it."""

    built: Built
    entry: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes artifacts, in this process or in another one."""

    folder: Path
    cache: Cache
    commit: str | None

    def __call__(self, name: str, jobs: int | None, progress: Report) -> _Noted:
        return self.noted(name, _build(name, self.folder, self.cache, jobs, progress))

    def noted(self, name: str, built: Built) -> _Noted:
        """With its entry of the manifest.

        Args:
          name: what is asked for to make it.
          built: its files and cells.
        """
        computing = _computing(_records(built, self.cache))
        how, at = command(name), self.commit
        return _Noted(built, _entry(self.folder, built.files, how, SEED, commit=at, **computing))


def _each(
    make: _Maker, chosen: Sequence[str], jobs: int | None, progress: Report
) -> Iterator[tuple[str, _Noted]]:
    """Artifacts by name as they are made, those that measure time first."""
    together = [name for name in chosen if name not in figures.TIMES]
    for name in chosen:
        if name in figures.TIMES:
            yield name, make(name, jobs, within(progress, name))
    at_once = jobs or cores()
    if len(together) > 1:
        asked = [first_cells(functools.partial(make, name, jobs, silent)) for name in together]
        run_all(itertools.chain(*asked), make.cache, jobs=at_once, progress=progress)
    if len(together) < 2 or at_once == 1:
        for name in together:
            yield name, make(name, jobs, within(progress, name))
        return
    with workers(at_once) as pool:
        making = {name: pool.submit(make, name, 1, silent) for name in together}
        for done, (name, future) in enumerate(making.items()):
            progress(Progress("writing", done, len(together), "artifacts", note=name))
            yield name, future.result()


def study_name(study: type[Study]) -> str:
    """The name of a study's files as an artifact."""
    return f"studies/{study.name}"


def write_study(
    study: Study,
    folder: Path,
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> tuple[Outcome, dict[str, Any], list[Path]]:
    """A study's outcome, how it was made, and its files in ``folder``, noted in its manifest.

    Args:
      study: what is run.
      folder: of the manifest; files of the study that are there are replaced.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores.
      progress: told of each finished cell.

    Raises:
      UsageError: a setting that cannot be.
    """
    read_manifest(folder)  # a damaged one is refused before the work
    recorder = _Recording(cache.folder)
    outcome, made = engine.run(study, recorder, jobs=jobs, progress=progress)
    name = study_name(type(study))
    files = output.write((folder / name).parent, study, outcome, made)
    records = _records(Built(files, list(recorder.seen)), cache)
    note(
        folder,
        name,
        files,
        how=f"{made['command']} --artifacts artifacts",
        seed=getattr(study, "seed", None),
        **_computing(records),
        code=code_digest(training=True, studies=True),
    )
    return outcome, made, files


def _records(built: Built, cache: Cache) -> list[dict[str, Any]]:
    # what worker processes read for them was computed too
    tasks = _with_needs(built.tasks)
    return [found.record for task in tasks if (found := cache.load(task)) is not None]


def _computing(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What :func:`note` says of the computing behind some cells."""
    return {
        "device": sorted({r["device"] for r in records}),
        "seconds": sum(r["seconds"] for r in records),
        "cpu_seconds": sum(r["cpu_seconds"] for r in records),
        "made": max((r["made"] for r in records), default=None),
    }


def _with_needs(tasks: Sequence[Any]) -> list[Any]:
    """The tasks and all that they are made from, each once."""
    found: dict[Any, None] = {}

    def add(task: Any) -> None:
        if task not in found:
            for needed in task.needs:
                add(needed)
            found[task] = None

    for task in tasks:
        add(task)
    return list(found)


def note(
    folder: Path,
    name: str,
    files: Sequence[Path],
    *,
    how: str,
    seed: int | None,
    device: Sequence[str],
    seconds: float,
    made: str | None = None,
    cpu_seconds: float | None = None,
    code: str | None = None,
) -> None:
    """Say in the folder's manifest how an artifact was made, in place of what it said before.

    Args:
      folder: of the manifest.
      name: of the artifact.
      files: its files, in ``folder``.
      how: the command that rebuilds them.
      seed: pinned, or None.
      device: what it was made on.
      seconds: of computing.
      made: the day; today if left out.
      cpu_seconds: of processors, where that is known: what a busy machine does not lengthen.
      code: digest of the code; that of the library without its studies if left out.
    """
    entry = _entry(
        folder,
        files,
        how,
        seed,
        device=device,
        seconds=seconds,
        made=made,
        cpu_seconds=cpu_seconds,
        code=code,
        commit=commit(),
    )
    _keep(folder, {name: entry})


def _entry(
    folder: Path,
    files: Sequence[Path],
    how: str,
    seed: int | None,
    *,
    device: Sequence[str],
    seconds: float,
    commit: str | None,
    made: str | None = None,
    cpu_seconds: float | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    return {
        "files": {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(files)
        },
        "command": how,
        "version": __version__,
        "commit": commit,
        "code": code or code_digest(training=True),
        "seed": seed,
        "device": list(device),
        "seconds": round(seconds, 1),
        "made": made or time.strftime("%Y-%m-%d", time.gmtime()),
        **({} if cpu_seconds is None else {"cpu_seconds": round(cpu_seconds, 1)}),
    }


def _keep(folder: Path, entries: dict[str, Any]) -> None:
    """Write entries into the folder's manifest, in place of what it said of these artifacts."""
    manifest = read_manifest(folder) | entries
    _files.write(folder / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def commit() -> str | None:
    """The commit of the tree that this package is run from, and whether it was changed since."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed package may lie in a tree that is not its own
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)artifacts")
    return f"{git('rev-parse', 'HEAD')}{'+changes' if changed else ''}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the folder's manifest says, by artifact; empty where there is none.

    Raises:
      UsageError: the file is none.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _check.reject("manifest", str(path), "is not one JSON object", "Name another folder.")
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
