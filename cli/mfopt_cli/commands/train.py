"""``mfopt train``: fine-tune a language model with user-level differential privacy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.errors import FailureError
from mfopt.progress import Report
from mfopt_cli import display, options
from mfopt_cli.live import Live
from mfopt_cli.options import COUNT, option

# settings whose flag has another name than the record's field
_FLAGS = {"epsilon": "--eps", "output": "--out", "privacy_unit": "--unit"}


def _settings() -> list[options.Option]:
    # the settings' own records give the flags, so that file, flags and help cannot disagree
    from mfopt.training import config

    decorators = []
    fields = dataclasses.fields(config.TrainConfig)
    without_file = _completed(dict.fromkeys(field.name for field in fields))
    for field in fields:
        if field.name == "factorization":
            continue
        flag = _FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
        kind, choices = type(field.default), field.metadata["choices"]
        types: dict[type, object] = {int: COUNT, float: float, str: str, bool: bool}
        if field.name == "output":
            types[str] = click.Path()
        shown = "" if field.default in ("", -1) else f" [{field.default}]"
        if field.name in without_file:
            its = "its own" if field.metadata["section"] == "privacy" else field.default
            shown = f" [{without_file[field.name]}; with a file or --config {its}]"
        decorators.append(
            options.Option(
                [f"{flag}/--no-{flag[2:]}" if kind is bool else flag, field.name],
                type=click.Choice(choices) if choices else types[kind],
                default=None,
                help=_with_flags(field.metadata["help"]) + shown,
                may_be_empty=field.default == "",
            )
        )
    return decorators


def _with_flags(text: str) -> str:
    """Other settings that a help text names in backticks, as their flags."""
    return re.sub(r"`(\w+)`", lambda m: _FLAGS.get(m[1], "--" + m[1].replace("_", "-")), text)


class _TrainCommand(options.Command):
    """Adds one flag per setting when it is first needed: JAX is imported only then."""

    _complete = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self._complete:
            self.params += _settings()
            self._complete = True
        return super().get_params(ctx)


@options.command("train", _TrainCommand)
@click.argument("factorization", required=False, type=click.Path())
@option("--epochs", COUNT, "Epochs of fresh-bins sampling, with --iters.")
@option("--iters", COUNT, "Iterations per epoch, with --epochs.")
@option("--config", click.Path(), "TOML file; flags override it.")
@option("--resume", bool, "Resume the run in the output folder.")
@option(
    "--resume-from",
    COUNT,
    "Like --resume, from the checkpoint of this step; later ones are written again.",
)
@option("--show-config", bool, "Print the resolved settings as TOML and stop.")
@option(
    "--report-only",
    bool,
    "Check everything, print the report and stop.",
    excludes=("resume", "resume_from"),
)
@options.json_flag
@options.quiet
@option(
    "--coordinator",
    str,
    "host:port of process 0, to train with several processes (jax.distributed).",
)
@option("--processes", COUNT, "Number of processes, with --coordinator.")
@option("--process", COUNT, "Index of this process, with --coordinator.")
def command(arguments: SimpleNamespace) -> None:
    """Fine-tune a language model with the mechanism in FACTORIZATION.

    Without a file: 8 epochs of 8 fresh-bins iterations at (8, 1e-5), a C optimized for the
    sampling, a new model pretrained on docstrings, the embedded corpus stdlib-code; flags override
    each. The data loader executes the sampling scheme of the file; anything that differs from what
    was accounted for is refused. A stopped run, even by kill -9, resumes with --resume. --model
    RUN/model begins another run from the model of an earlier one, on the same data or other data;
    the report states what both cost together.

    \b
    Examples:
      mfopt train
      mfopt train --data posts.jsonl --eps 8
      mfopt train --epochs 4 --iters 8 --eps 8 --delta 1e-6 --out run
      mfopt train best.npz --pretrain-steps 300 --out run
      mfopt train best.npz --config run/config.toml --resume
      mfopt train --model run/model --data new.jsonl --eps 2 --out run-2
      mfopt train --algorithm els --sampling fresh-bins:bins=16,epochs=4 --out run
    """
    from mfopt.training.config import TrainConfig, load
    from mfopt.training.data import screen

    resume_from = arguments.resume_from
    flags = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(TrainConfig)}
    flags["sampling"] = _sampling(arguments.epochs, arguments.iters, flags["sampling"])
    if resume_from is not None:
        _check.integer("resume_from", resume_from, at_least=0)
    settings = load(arguments.config, flags if arguments.config else _completed(flags))
    if arguments.show_config:
        click.echo(settings.to_toml(), nl=False)
        return
    screen.check(settings)
    _join(arguments.coordinator, arguments.processes, arguments.process)
    from mfopt.training.execute import execute
    from mfopt.training.folder import dropped_on_error
    from mfopt.training.prepare import preflight, prepare
    from mfopt.training.privacy import report_text

    resume = arguments.resume or resume_from is not None
    with Live(not arguments.quiet) as live:
        if settings.optimizes:
            new = preflight(settings, resume=resume)
            with dropped_on_error(Path(settings.output), new):
                settings = _with_factorization(settings, live)
        prepared = prepare(settings, resume=resume, progress=live)
    report = prepared.report(0)
    if report is not None and not arguments.quiet:
        click.echo(report_text(report), err=True)
    if arguments.report_only:
        prepared.close()
        if arguments.as_json:
            display.json_object(report)
        return
    with Live(not arguments.quiet) as live:
        summary = execute(prepared, resume_from=resume_from, progress=live)
    if arguments.as_json:
        display.json_object(summary)
        return
    for line in _lines(summary):
        display.print_text(line)


def _sampling(epochs: int | None, iters: int | None, sampling: str | None) -> str | None:
    """The sampling that --epochs and --iters stand for, or the given one."""
    if epochs is None and iters is None:
        return sampling
    if epochs is None or iters is None or sampling is not None:
        raise click.UsageError("--epochs and --iters belong together, instead of --sampling")
    return f"fresh-bins:bins={iters},epochs={epochs}"


def _completed(flags: JsonObject) -> JsonObject:
    """The flags of a run without a file, with a mechanism, data and ε where they name none."""
    if flags["factorization"]:
        return flags
    defaults: JsonObject = {"sampling": "fresh-bins:bins=8,epochs=8", "data": "stdlib-code"}
    data = Path(flags["data"] or defaults["data"])
    if flags["model"] is None and ((data / "public").is_dir() or not data.is_dir()):
        defaults["pretrain_steps"] = 300
    if flags["algorithm"] != "none":
        defaults |= {"strategy": "optimized", "epsilon": 8.0, "delta": 1e-5}
    return defaults | {name: value for name, value in flags.items() if value is not None}


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Make this process one of several, where that is asked for."""
    if coordinator is None or processes is None or process is None:
        if (coordinator, processes, process) == (None, None, None):
            return
        raise click.UsageError("--coordinator, --processes, --process belong together")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise _check.reject("coordinator", coordinator, "must be HOST:PORT")
    _check.integer("processes", processes)
    if not 0 <= process < processes:
        raise _check.reject("process", process, f"must lie in 0..{processes - 1}")
    import jax

    try:
        jax.distributed.initialize(coordinator, processes, process)
    except RuntimeError as problem:
        raise FailureError(f"the processes could not connect: {problem}") from None


def _with_factorization(settings: Any, progress: Report) -> Any:
    """The settings with a file for their sampling, epsilon and delta, made if it is not there."""
    import jax

    import mfopt
    from mfopt.optimize import Form, Question, Target, factorize
    from mfopt.training.mesh import wait_for_lead

    path = Path(settings.output) / "factorization.npz"
    scheme = settings.scheme()
    form = Form(None if settings.strategy == "optimized" else settings.strategy)
    if form.strategy is None and scheme.run_adjacency != "add-remove":
        # a file states add-remove adjacency; for another one C = I alone has an account
        return dataclasses.replace(settings, strategy="identity")
    # the best C for a group is near that for one of its units at a share of ε
    target = settings.epsilon / max(1, settings.group_size), settings.delta
    if not path.is_file() and jax.process_index() == 0:
        unit = "user" if settings.by_user else "record"
        question = Question(Target(*target, unit), form)
        factorization = factorize(scheme, question, progress=progress)
        if factorization.provenance["interrupted"]:
            raise KeyboardInterrupt  # before training has begun; what was kept proves nothing
        if not factorization.guarantee.proved:
            raise FailureError(factorization.not_certified)
        factorization.save(path)
    wait_for_lead("factorization")
    factorization = mfopt.load(path)
    facts = factorization.strategy.describe()
    kind = facts.get("base", facts)["kind"]  # a time-scaled one is made where its base is asked for
    stated = (
        factorization.sampling,
        factorization.guarantee.epsilon,
        factorization.guarantee.delta,
        kind,
    )
    question_asked = (scheme, *target, *(form.strategy or (kind,)))
    if stated != question_asked:
        rule = f"holds a factorization for {stated}, not for {question_asked}"
        way_out = "Choose another output folder."
        raise _check.reject("output", settings.output, rule, way_out)
    # for one unit the file's own guarantee is the one that was asked for
    no_target = dict.fromkeys(("epsilon", "delta"), 0.0) if settings.group_size == 1 else {}
    settings_of_file = {"factorization": str(path), "sampling": "", "strategy": "identity"}
    return dataclasses.replace(settings, **settings_of_file, **no_target)


def _lines(summary: JsonObject) -> list[str]:
    lines = [f"{summary['steps']} steps done; results in {summary['output']}"]
    for part, value_after in summary["after"].items():
        value_before = summary["before"].get(part)
        change = f"{value_before['loss']:.4f} -> " if value_before else ""
        tokens = f" ({value_after['tokens']} tokens)" if value_after["tokens"] else ", with noise"
        lines.append(f"{part}: loss {change}{value_after['loss']:.4f}{tokens}")
    if summary["privacy"] is None:
        lines.append("no privacy guarantee: non-private baseline")
    elif summary["privacy"]["holds"]:
        lines.append(summary["privacy"]["statement"])
    else:
        lines.append("NO GUARANTEE: the seed is pinned, or the account is an estimate")
    return lines
