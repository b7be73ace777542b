"""mfopt compare: every mechanism side by side."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import click

from mfopt._runtime import _check, _files
from mfopt_cli import display, options, sweeps
from mfopt_cli.live import of_command
from mfopt_cli.options import COUNT, Count, option


@options.command("compare")
@options.training_length
@sweeps.option("--eps", float, "Targets ε, as 0.5,1,2 or 1:8.", default="0.5,1,2,4,8,16")
@options.delta(default=1e-5)
@option(
    "--include",
    str,
    "Families to compare, repeatable or with commas: dpsgd, banded, banded-toeplitz, blt, "
    "blt-4, toeplitz, dense, sqrt, banded-sqrt, banded-inverse-sqrt, normalized-sqrt, lambda-cgd, "
    "bifr, tree, one of them with +unamplified, +poisson, +random-partition, +b-min-sep, "
    "+balls-in-bins or +fresh-bins, or all; and files FILE.npz of the same shape, ε and δ. "
    "[default: all but dense]",
    multiple=True,
)
@sweeps.option(
    "--bands", int, "Numbers of bands to choose from at each ε.", default="1,2,4,8,16,32,64,128,256"
)
@option(
    "--baseline",
    str,
    "Family that improvements are relative to. [default: banded+poisson, if included]",
)
@option(
    "--memory",
    COUNT,
    "Noise buffers (× model size) that there is room for: what is recommended keeps no more.",
    default=8,
)
@option("--samples", Count(2**24), "Samples of each Monte Carlo estimate of σ.", default=2**15)
@options.seed("that of the Monte Carlo samples", default=0)
@options.jobs
@options.cache
@options.output_path(
    "Stem of the files STEM.csv, STEM-sizes.csv, .json, and of the plots STEM-rmse and "
    "STEM-memory (.png and .svg)."
)
@option("--csv", bool, "Print CSV instead of the table.", "as_csv", excludes=("as_json",))
@options.force_of("out")
@options.output
def command(arguments: SimpleNamespace) -> None:
    """σ, RMSE and memory of every mechanism at (ε, δ), each at its best size.

    Guarantees are for one unit, whatever a file calls it, and add-remove adjacency; RMSE is of
    prefix sums, per coordinate in clip norms. σ of balls-in-bins and of fresh bins is a Monte Carlo
    estimate with its standard error (certify the one you choose with `mfopt optimize`); the others
    are exact up to discretization. Where every unit takes part once in each epoch, the error at
    epochs' ends has a lower bound for every C and sampling scheme; the distance to it is printed
    with the recommendation, and for each row in the CSV and JSON output. A file for min-separation
    has as many epochs as a unit has participations at most.

    \b
    Examples:
      mfopt compare --epochs 16 --iters 128 --eps 0.5,1,2,4,8,16 --out comparison
      mfopt compare --epochs 8 --iters 32 --eps 2 --include dpsgd,blt-4 --baseline dpsgd+poisson
      mfopt compare --epochs 8 --iters 32 --eps 2 --include FILE.npz
    """
    from mfopt.experiments import comparison, decision_plots, families, recommendation
    from mfopt.experiments.cache import Cache, default_folder

    baseline, stem = arguments.baseline, arguments.out
    chosen = [name for part in arguments.include for name in part.split(",") if name]
    files = dict.fromkeys(name for name in chosen if comparison.is_file(name))
    chosen = [name for name in chosen if name not in files]
    setting = comparison.Comparison(
        arguments.iters,
        arguments.epochs,
        tuple(dict.fromkeys(arguments.eps)),
        arguments.delta,
        families.expand(chosen) if chosen else families.DEFAULT,
        tuple(dict.fromkeys(arguments.bands)),
        arguments.seed,
        arguments.samples,
    ).check()
    sized = any(families.find(name).bands for name in setting.include)
    if options.typed("bands") and not sized:
        names = ", ".join(setting.include)
        raise click.UsageError(f"--bands has no effect with --include {names}; remove it")
    _check.integer("samples", arguments.samples, at_least=64)
    _check.integer("memory", arguments.memory, at_least=0)
    _check.pinned("seed", arguments.seed)
    if baseline is None and comparison.DEFAULT_BASELINE in setting.include:
        baseline = comparison.DEFAULT_BASELINE
    if baseline is not None and baseline not in setting.include:
        rule = "is not among the compared families"
        way_out = f"Add `include={baseline}`, or name one of {', '.join(setting.include)}."
        raise _check.reject("baseline", baseline, rule, way_out)
    if stem is not None:
        if stem.suffix in (".csv", ".json"):  # one of the files is named, not their stem
            stem = stem.with_suffix("")
        _check_outputs(stem, arguments.force)
    from_files = [comparison.row_of_file(setting, name) for name in files]
    store = Cache(arguments.cache or default_folder())

    with of_command(arguments) as live:
        by_family = comparison.every_size(setting, store, jobs=arguments.jobs, progress=live)
        rows = comparison.best(by_family) + from_files
        sizes = [row for candidates in by_family.values() for row in candidates] + from_files
        advices = recommendation.recommend(sizes, arguments.memory)
    if stem is not None:
        for path in decision_plots.write(stem, setting, rows, sizes, baseline):
            if not arguments.quiet and not arguments.as_json:
                click.echo(f"wrote {path}", err=True)
    if arguments.as_json:
        display.json_object(comparison.described(setting, rows, baseline))
    elif arguments.as_csv:
        click.echo(comparison.csv_text(rows, baseline), nl=False)
    elif not arguments.quiet:
        over = f"; change of RMSE against {families.label(baseline)}" if baseline else ""
        display.print_text(
            f"RMSE of {arguments.epochs} epochs × {arguments.iters} iterations "
            f"at δ = {arguments.delta:g} (best number of bands){over}",
            "bold",
        )
        display.print_text(recommendation.blocks(rows, baseline))
        click.echo()
        for advice in advices:
            display.print_text(advice.text())
        display.print_text(
            "(model: error of the final model, as the σ of independent noise; buffers: memory of "
            "the noise, × model size; draws: white draws of a step, where past ones are "
            "regenerated instead of kept; *: a form of C of this library)"
        )


def _check_outputs(stem: Path, force: bool) -> None:
    from mfopt.experiments import plots

    if not stem.name or stem.is_dir():
        raise _check.reject("out", str(stem), "must be a file name prefix, not a folder")
    ends = [".csv", "-sizes.csv", ".json"]
    ends += [f"-{part}.{kind}" for part in ("rmse", "memory") for kind in plots.FORMATS]
    for end in ends:
        _files.check_output(stem.with_name(f"{stem.name}{end}"), force=force, name="output")
