"""Error messages for users: the library's words, with the options' names.

The library names arguments as in Python; here, and only here, they become the options that were
typed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

import click

from mfopt._runtime import _check
from mfopt.errors import UsageError
from mfopt_cli.option import Option

SCHEMA = 1  # of the JSON output; a key that is taken away or means another thing raises it

COMPLETE: list[str] = []  # results of the running command that are written, whatever else fails

# Names in Python -> how the commands call the same thing, first the one that a command may have.
_MEANINGS = {
    "bins": ("iters",),
    "epochs × iterations_per_epoch": ("iters",),
    "epsilon": ("eps",),
    "iterations": ("iters",),
    "iterations_per_epoch": ("iters",),
    "length": ("iters",),
    "loss": ("objective",),
    "output": ("out",),
    "noise_scale": ("noise_multiplier",),
    "path": ("run", "factorization"),
    "privacy_unit": ("unit",),
    "parameters": ("params",),
    "samples": ("certify_samples",),
    "z": ("noise_multiplier",),
}


class Refused(click.ClickException):
    """Bad usage, found after the words were parsed."""

    exit_code = 2
    begins = "mfopt: error:"

    def show(self, file: object = None) -> None:
        click.echo(f"{self.begins} {_check.printable(self.message)}", err=True)


class Failed(Refused):
    """Good usage without a result."""

    exit_code = 1
    begins = "mfopt:"


def show(error: click.ClickException) -> None:
    """Print an error in a line, also one that click has found."""
    if not isinstance(error, click.UsageError):
        error.show()
        return
    text = _check.printable(error.format_message().rstrip("."))
    path = error.ctx.command_path if error.ctx else "mfopt"
    stop = "" if text.endswith("?") else "."
    click.echo(f"mfopt: error: {text}{stop} See {path} --help.", err=True)


def of_usage(problem: UsageError, ctx: click.Context | None) -> str:
    """One message for a refused argument, by the name that was typed."""
    if problem.argument is None:
        return translate(str(problem), ctx)
    names = [part.strip() for part in problem.argument.split(",")]
    shown = ", ".join(_flag(name, ctx) or name for name in names)
    value = problem.value
    names_several = len(names) > 1 and isinstance(value, tuple | list) and len(value) == len(names)
    if names_several:
        pairs = zip(names, value, strict=True)
        shown, value = ", ".join(f"{_flag(n, ctx) or n} {v!r}" for n, v in pairs), None
    if isinstance(value, str):
        said = f" {value}" if value else ""  # the rule speaks of one that is empty
    else:
        said = "" if value is None else f" {_check.in_message(value)}"
    tail = f" {problem.way_out}" if problem.way_out else ""
    return f"{shown}{said}: {translate(f'{problem.rule}.{tail}', ctx)}"


def translate(text: str, ctx: click.Context | None) -> str:
    """``text`` with every argument in backticks (`force=True`) as the option that sets it."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        typed_option = _flag(name, ctx)
        if typed_option is None:
            return match[0]
        return typed_option if value in (None, "True") else f"{typed_option} {value}"

    return re.sub(r"`(\w+)(?:=([^`]*))?`", option, text)


def _flag(name: str, ctx: click.Context | None) -> str | None:
    """The option or argument of the running command that ``name`` stands for, as typed."""
    if ctx is None:
        return None
    parameters = {param.name: param for param in ctx.command.get_params(ctx)}
    for param in ctx.command.get_params(ctx):
        for opt in param.opts:
            parameters.setdefault(opt.lstrip("-").replace("-", "_"), param)
    plain = name.replace(" ", "_").replace("-", "_")
    candidates = [parameters.get(word) for word in (plain, *_MEANINGS.get(name, ()))]
    options = [candidate for candidate in candidates if isinstance(candidate, Option)]
    # what was typed, or else what help shows
    for candidate in sorted(
        options, key=lambda option: (not option.typed_name(ctx), option.hidden)
    ):
        if (
            plain in ("iterations", "length", "epochs_×_iterations_per_epoch")
            and candidate.main == "--iters"
        ):
            return "--epochs × --iters"
        return candidate.typed(ctx)
    positional = [candidate for candidate in candidates if isinstance(candidate, click.Argument)]
    return positional[0].make_metavar(ctx).strip("[]") if positional else None


def json_error(
    words: Sequence[str] | None, message: str, code: int, context: click.Context | None = None
) -> None:
    """Print an error as JSON, too, where ``--json`` was typed.

    Args:
      words: command line without the program's name; by default this process's.
      message: what went wrong.
      code: exit code.
      context: of the command, where it was reached.
    """
    words = sys.argv[1:] if words is None else words
    if "--json" not in words:
        return
    name = " ".join(words[:1]) if context is None else context.command_path.partition(" ")[2]
    kind = {1: "failure", 2: "usage"}.get(code, "interrupt")
    error = {"kind": kind, "message": message, "exit_code": code}
    click.echo(json.dumps({"schema": SCHEMA, "command": name, "error": error}, indent=2))
