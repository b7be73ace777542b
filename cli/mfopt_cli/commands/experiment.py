"""mfopt experiment: the papers' training studies, each a command with its own flags."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mfopt_cli import display, options, sweeps
from mfopt_cli.live import Live
from mfopt_cli.options import COUNT, PATH, option

EVERY = "all"


class _Studies(options.Group):
    """A group whose commands follow from the registered studies."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from mfopt.experiments.studies import STUDIES

        return [*STUDIES, EVERY]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == EVERY:
            return every
        return _command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from mfopt.experiments.studies import STUDIES, find

        with formatter.section("Studies"):
            summaries = [(name, find(name).summary) for name in STUDIES]
            formatter.write_dl([*summaries, (EVERY, "All of them, at their default sizes.")])


@click.group(name="experiment", cls=_Studies, invoke_without_command=True)
@option("--list", bool, "List the studies with size and time.", "listing")
@options.json_flag
@click.pass_context
def command(ctx: click.Context, listing: bool, as_json: bool) -> None:
    """Run a study of the papers, or one of our own: table, CSV, JSON and plot.

    Small by default; every size is a flag. Finished cells are kept: a stopped study resumes.

    \b
    Examples:
      mfopt experiment --list
      mfopt experiment mean-estimation --out studies
      mfopt experiment all --out studies
    """
    if ctx.invoked_subcommand is not None:
        return
    if not listing:
        raise click.UsageError("name a study; `mfopt experiment --list` has them all")
    from mfopt.experiments.studies import STUDIES, find

    facts = ("summary", "source", "default_size", "time")
    entries = {name: {fact: getattr(find(name), fact) for fact in facts} for name in STUDIES}
    if as_json:
        display.json_object(entries)
        return
    for name, entry in entries.items():
        rows = [(fact.replace("_", " "), text) for fact, text in entry.items() if fact != "summary"]
        display.table(f"{name}: {entry['summary']}", rows)


_shared = options.apply(
    options.out("Folder to write NAME.csv, .json, .txt, .png and .svg into."),
    option(
        "--artifacts",
        PATH,
        "Replace a study's files in DIR/studies and note them in DIR/manifest.json.",
        metavar="DIR",
        excludes=("out", "force"),
    ),
    options.jobs,
    options.cache,
    options.force_of("out"),
    options.output,
)


@functools.cache
def _command(name: str) -> click.Command:
    from mfopt.experiments.options import options as fields_of
    from mfopt.experiments.studies import find

    study, fields = find(name), fields_of(find(name))

    def callback(asked: Any) -> None:
        own = {field.name: getattr(asked, field.name) for field in fields}
        chosen = {key: value for key, value in own.items() if value is not None}
        _run([study(**chosen).check()], asked)

    params: list[click.Parameter] = [_option(field) for field in fields]
    callback.__doc__ = (
        f"{study.summary}\n\n{study.source}. By default: {study.default_size}, {study.time}.\n\n"
        f"\b\nExample:\n  mfopt experiment {name} --out studies\n"
    )
    made = options.command(name)(_shared(callback))
    made.params = [*params, *made.params]
    return made


def _option(field: dataclasses.Field[Any]) -> options.Option:
    """A study's field as an option; what is not given keeps the study's own default."""
    from mfopt.experiments.options import option_of, worded

    meta, several = field.metadata["option"], isinstance(field.default, tuple)
    kind = meta["kind"]
    more: dict[str, Any]
    if kind is bool:
        more = {"is_flag": True, "default": None}
    elif meta["choices"] or (kind is str and several):
        more = {"type": options.Words(meta["choices"], several)}
    elif several:
        more = {"type": sweeps.Sweep(kind)}
    else:
        more = {"type": {int: COUNT, float: click.FLOAT, Path: PATH}.get(kind, click.STRING)}
    text = meta["help"]
    if kind is not bool:
        default = "none" if field.default is None else worded(field.default)
        text = f"{text} [default: {default}]"
    return options.Option([option_of(field), field.name], help=text, **more)


def _run(studies: list[Any], asked: Any, several: bool = False) -> None:
    """Run studies and say what they found: one in full, or each of several in short."""
    from mfopt.experiments.artifacts import write_study
    from mfopt.experiments.cache import Cache, default_folder
    from mfopt.experiments.runner import cores
    from mfopt.experiments.studies import engine, output

    _check_places(studies, asked)
    store, loud = Cache(asked.cache or default_folder()), not asked.quiet and not asked.as_json
    said: dict[str, Any] = {}
    with Live(loud) as live:
        jobs = asked.jobs or (cores() if several else None)
        engine.run_cells(studies, store, jobs=jobs, progress=live)
    for study in studies:  # from the cells
        if asked.artifacts is not None:
            outcome, made, written = write_study(study, asked.artifacts, store)
        else:
            outcome, made = engine.run(study, store)
            written = [] if asked.out is None else output.write(asked.out, study, outcome, made)
        said[study.name] = output.described(study, outcome, made)
        if not loud:
            continue
        display.print_text(f"{study.name}: {outcome.title}" if several else outcome.title, "bold")
        if not several:
            display.columns(*output.table(outcome))
            click.echo()
        for finding in outcome.findings:
            display.print_text(finding)
        for path in written:
            click.echo(f"wrote {path}", err=True)
    if asked.as_json:
        display.json_object(said if several else said[studies[0].name])


@options.command(EVERY)
@_shared
def every(asked: Any) -> None:
    """Run the studies at their default sizes, with one pool of processes.

    As many cells run in parallel as there are cores; files are written at the end. Ctrl-C exits
    with 130, and the same command resumes.

    \b
    Example:
      mfopt experiment all --out studies
    """
    from mfopt.experiments.studies import STUDIES, find

    _run([find(name)().check() for name in STUDIES], asked, several=True)


def _check_places(studies: Sequence[Any], asked: Any) -> None:
    """Refuse what cannot be before anything is computed; folders that are not there are made."""
    from mfopt.experiments import manifest, plots
    from mfopt.experiments.studies import output

    for name in ("out", "artifacts"):
        if (folder := getattr(asked, name)) is not None:
            options.folder(name, folder)
    if asked.artifacts is not None:
        manifest.read_manifest(asked.artifacts)  # a damaged one
    if asked.out is not None:
        found = [path for study in studies for path in output.outputs(study, asked.out)]
        plots.check_outputs(found, force=asked.force)
