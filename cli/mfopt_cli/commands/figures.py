"""mfopt figures: the papers' tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt.progress import within
from mfopt_cli import display, options
from mfopt_cli.live import Live
from mfopt_cli.options import PATH, option


@options.command("figures")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@option(
    "--list",
    bool,
    "List the names and stop.",
    "listing",
    excludes=("out", "folder", "jobs", "cache", "force", "quiet"),
)
@options.out(
    "Folder to write NAME.png, NAME.svg and NAME.csv (tables: .txt and .csv) into.",
    default=Path("figures"),
)
@option(
    "--artifacts",
    PATH,
    "Rebuild the named artifacts in DIR (figures, factorizations such as blt-4-16x128-eps2, "
    "grid, comparison-16x128, audit) and note them in DIR/manifest.json.",
    "folder",
    metavar="DIR",
    excludes=("out", "force"),
)
@options.jobs
@options.cache
@options.force
@options.output
def command(asked: Any) -> None:
    """Make tables and figures of the papers with this library, each with its data as CSV.

    NAME is one of `mfopt figures --list`, the part of it that names a paper, or all. What is in
    the cache is not computed again.

    \b
    Examples:
      mfopt figures --list
      mfopt figures user-level-1 near-exact-2a --out plots
      mfopt figures --artifacts artifacts blt-4-8x32-eps2
    """
    from mfopt.experiments import figures, plots
    from mfopt.experiments.cache import Cache, default_folder

    if asked.listing:
        entries = {k: [e.paper, e.number, e.what] for k, e in figures.FIGURES.items()}
        if asked.as_json:
            display.json_object(entries)
        else:
            for name, (paper, number, what) in entries.items():
                click.echo(f"{name:<16} {number:<12} {what}\n{'':<17}{paper}")
        return
    if not asked.names:
        raise _check.reject("NAME", "", "name a figure, or all", "See `mfopt figures --list`.")
    store = Cache(asked.cache or default_folder())
    loud = not asked.quiet and not asked.as_json
    if asked.folder is not None:
        from mfopt.experiments import artifacts

        options.folder("artifacts", asked.folder, make=False)  # names are checked first
        wanted = [name for given in asked.names for name in _artifacts(given)]
        with Live(loud) as live:
            made = artifacts.rebuild(wanted, asked.folder, store, jobs=asked.jobs, progress=live)
        _report([str(path) for path in made], asked.as_json, asked.quiet)
        return
    chosen = list(dict.fromkeys(found for name in asked.names for found in figures.expand(name)))
    options.folder("out", asked.out)
    plots.check_outputs(
        [path for name in chosen for path in figures.outputs(name, asked.out)], force=asked.force
    )
    written: list[str] = []
    with Live(loud) as live:
        for position, name in enumerate(chosen, 1):
            progress = within(live, f"{position} of {len(chosen)}, {name}")
            made = figures.make(name, asked.out, store, jobs=asked.jobs, progress=progress)
            written += [str(path) for path in made]
    _report(written, asked.as_json, asked.quiet)


def _artifacts(name: str) -> list[str]:
    from mfopt.experiments import artifacts, figures

    known = artifacts.names()
    if name == "all":
        return known
    if name in (*known, *artifacts.FACTORIZATIONS):
        return [name]
    return list(dict.fromkeys(figures.SAME.get(each, each) for each in figures.expand(name)))


def _report(written: list[str], as_json: bool, quiet: bool) -> None:
    if as_json:
        display.json_object({"written": written})
    elif not quiet:
        for path in written:
            click.echo(f"wrote {path}")
