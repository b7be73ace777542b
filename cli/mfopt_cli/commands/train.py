"""``mfopt train``: fine-tune a language model with user-level differential privacy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import click


def _settings() -> list[tuple[str, type, Any, str, tuple[str, ...]]]:
    # the settings' own records give the flags, so that file, flags and help cannot disagree
    from mfopt.training import config

    return [
        (field.name, config.kind_of(field), field.default, field.metadata["help"],
         field.metadata["choices"])
        for field in dataclasses.fields(config.TrainConfig)
        if field.name != "factorization"
    ]  # fmt: skip


class _TrainCommand(click.Command):
    """Adds one flag per setting when it is first needed: JAX is imported only then."""

    _complete = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self._complete:
            for name, kind, default, text, choices in _settings():
                flag = "--" + name.replace("_", "-")
                shown = "" if default in ("", -1) else f" [{default}]"
                self.params.append(
                    click.Option(
                        [f"{flag}/--no-{flag[2:]}" if kind is bool else flag],
                        type=click.Choice(choices) if choices else kind,
                        default=None,
                        help=text + shown,
                    )
                )
            self._complete = True
        return super().get_params(ctx)


@click.command(cls=_TrainCommand)
@click.argument("factorization", required=False, type=click.Path())
@click.option("--config", "path", type=click.Path(), help="TOML file; flags override it.")
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder.")
@click.option("--show-config", is_flag=True, help="Print the resolved settings as TOML and stop.")
@click.option("--report-only", is_flag=True, help="Check everything, print the report and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--quiet", is_flag=True, help="No progress bar, no report.")
@click.option(
    "--coordinator",
    help="host:port of process 0, to train with several processes (jax.distributed).",
)
@click.option("--processes", type=int, help="Number of processes, with --coordinator.")
@click.option("--process", type=int, help="This process's number, with --coordinator.")
def command(
    factorization: str | None,
    path: str | None,
    resume: bool,
    show_config: bool,
    report_only: bool,
    as_json: bool,
    quiet: bool,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    **flags: Any,
) -> None:
    """Fine-tune a language model with the mechanism in FACTORIZATION.

    The data loader executes the sampling scheme of the file; anything that differs from what was
    accounted for is refused. A run that was stopped, by kill -9 too, goes on with --resume.

    \b
    Examples:
      mfopt train --sampling balls-in-bins:bins=8,epochs=4 --strategy blt \\
          --epsilon 8 --delta 1e-5 --pretrain-steps 300 --output run
      mfopt train best.npz --pretrain-steps 300 --output run
      mfopt train best.npz --config run/config.toml --resume
      mfopt train --sampling poisson:probability=0.05,iterations=200 \\
          --epsilon 8 --delta 1e-6 --algorithm els --records-per-user 4
    """
    from mfopt.training import config, privacy

    settings = config.load(path, {"factorization": factorization, **flags})
    if show_config:
        click.echo(settings.to_toml(), nl=False)
        return
    _join(coordinator, processes, process)
    from mfopt.training.execute import execute
    from mfopt.training.prepare import prepare

    say: Callable[[str], None] = (
        (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))
    )
    if settings.optimizes:
        settings = _with_factorization(settings, say)
    prepared = prepare(settings, resume=resume, say=say, progress=not quiet)
    report = prepared.report(0)
    if report is not None and not quiet:
        click.echo(privacy.report_text(report), err=True)
    if report_only:
        if as_json:
            click.echo(json.dumps(report, indent=2, sort_keys=True))
        return
    summary = execute(prepared, say=say, progress=not quiet)
    if as_json:
        click.echo(json.dumps(summary, indent=2, sort_keys=True))
        return
    click.echo(_text(summary))


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Make this process one of several, where that is asked for."""
    from mfopt import _check

    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if coordinator is None or processes is None or process is None:
        raise _check.reject(
            ", ".join(missing), None, "is missing: --coordinator, --processes and --process "
            "belong together",
        )  # fmt: skip
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
        raise _check.FailureError(f"the processes did not come together: {problem}") from None


def _with_factorization(settings: Any, say: Callable[[str], None]) -> Any:
    """The settings with a file for their sampling, epsilon and delta, made if it is not there."""
    from pathlib import Path

    import jax

    import mfopt
    from mfopt import _check
    from mfopt.optimize import factorize
    from mfopt.training.folder import make_folder

    path = Path(settings.output) / "factorization.npz"
    if not path.is_file() and jax.process_index() == 0:
        say(f"optimizing {settings.strategy} for ({settings.epsilon:g}, {settings.delta:g})-DP")
        make_folder(path.parent)
        found = factorize(
            settings.scheme(), settings.epsilon, settings.delta, strategy=settings.strategy,
            privacy_unit="user",
        )  # fmt: skip
        found.save(path)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("factorization")
    found = mfopt.load(path)
    kind = found.strategy.describe()["kind"]
    stated = (found.sampling, found.guarantee.epsilon, found.guarantee.delta, kind)
    asked = (settings.scheme(), settings.epsilon, settings.delta, settings.strategy)
    if stated != asked:
        raise _check.reject(
            "output", settings.output, f"holds a factorization for {stated}, not for {asked}",
            "Choose another output folder.",
        )  # fmt: skip
    # the file's own guarantee is the one that was asked for: nothing is left to account for
    return dataclasses.replace(
        settings, factorization=str(path), sampling="", strategy="identity", epsilon=0.0, delta=0.0
    )


def _text(summary: dict[str, Any]) -> str:
    lines = [f"{summary['steps']} steps done; results in {summary['output']}"]
    if summary["padded"] or summary["truncated"]:
        lines.append(f"{summary['padded']} slots padded, {summary['truncated']} units truncated")
    for part, after in summary["after"].items():
        before = summary["before"].get(part)
        change = f"{before['loss']:.4f} -> " if before else ""
        lines.append(f"{part}: loss {change}{after['loss']:.4f} ({after['tokens']} tokens)")
    if summary["privacy"] is None:
        lines.append("no privacy guarantee: non-private baseline")
    elif summary["privacy"]["holds"]:
        lines.append(summary["privacy"]["statement"])
    else:
        lines.append("NO GUARANTEE: the seed is pinned, or the account is an estimate")
    return "\n".join(lines)
