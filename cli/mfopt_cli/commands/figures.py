"""mfopt figures: the papers' tables and figures."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mfopt_cli import display, options


@click.command(name="figures")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the names and stop.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("figures"), show_default=True,
    help="Folder to write NAME.png, NAME.svg and NAME.csv (tables: .txt and .csv) into.",
)  # fmt: skip
@click.option("--jobs", type=int, help="Worker processes. [default: half the cores]")
@click.option(
    "--cache", type=click.Path(path_type=Path),
    help="Folder of finished cells. [default: $MFOPT_CACHE, or under ~/.cache]",
)  # fmt: skip
@options.force
@options.output
def command(
    names: tuple[str, ...], listing: bool, out: Path, jobs: int | None, cache: Path | None,
    force: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Make tables and figures of the papers with this library, each with its data as CSV.

    NAME is one of `mfopt figures --list`, the part of it that names a paper, or all. What is in
    the cache is not computed again.

    \b
    Examples:
      mfopt figures --list
      mfopt figures user-level-1 near-exact-2a --out plots
    """
    from mfopt import _check
    from mfopt.experiments import figures, plots
    from mfopt.experiments.cache import Cache, default_folder

    if listing:
        entries = {k: [e.paper, e.number, e.what] for k, e in figures.FIGURES.items()}
        if as_json:
            display.json_object(entries)
        else:
            for name, (paper, number, what) in entries.items():
                click.echo(f"{name:<16} {number:<12} {what}\n{'':<17}{paper}")
        return
    if not names:
        raise _check.reject("NAME", "", "name a figure, or all", "See `mfopt figures --list`.")
    chosen = list(dict.fromkeys(found for name in names for found in figures.expand(name)))
    if jobs is not None:
        _check.integer("jobs", jobs)
    if out.exists() and not out.is_dir():
        raise _check.reject("out", str(out), "is not a folder")
    out.mkdir(parents=True, exist_ok=True)
    plots.check_outputs(
        [path for name in chosen for path in figures.outputs(name, out)], force=force
    )
    store = Cache(cache or default_folder())
    live = display.Live(not quiet and not as_json)
    written: list[str] = []
    for position, name in enumerate(chosen, 1):

        def progress(
            done: int, total: int, text: str, label: str = f"{position}/{len(chosen)} {name}"
        ) -> None:
            live.update(f"{label}: {done}/{total} cells  {text}", now=True)

        written += [str(p) for p in figures.make(name, out, store, jobs=jobs, progress=progress)]
    live.close()
    if as_json:
        click.echo(json.dumps({"written": written}, indent=2))
    elif not quiet:
        for path in written:
            click.echo(f"wrote {path}")
