"""The one vocabulary of the command line: options that several commands share, and their types.

An option has one name on every command. Older names of the same thing go on working, unseen.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mfopt._runtime import _check, _plugins, _sizes
from mfopt.errors import FailureError, UsageError
from mfopt_cli import messages
from mfopt_cli.option import WORDS
from mfopt_cli.option import Option as Option

N = TypeVar("N", int, float)
Decorator = Callable[[Callable[..., object]], Callable[..., object]]


PATH = click.Path(path_type=Path)


_WITHOUT_JAX = {"account", "data"}  # groups; accounts by sampling say so themselves


def _once(command: click.Command, ctx: click.Context, args: list[str]) -> None:
    """Refuse an option that is given more than once: click takes the last and drops the others."""
    if ctx.resilient_parsing:  # half a line, to be completed
        return
    _, _, parsed = command.make_parser(ctx).parse_args(args=list(args))
    for param in dict.fromkeys(parsed):
        single = isinstance(param, click.Option) and not (param.multiple or param.is_eager)
        if single and parsed.count(param) > 1:
            names = [word.split("=")[0] for word in args]
            typed = [name for name in [*param.opts, *param.secondary_opts] if name in names]
            said = " and ".join(typed or param.opts[:1])
            raise messages.Refused(f"{said}: given more than once. Give one value, once.")


def _with_effect(command: click.Command, ctx: click.Context) -> None:
    """Refuse an option that was given where it has no effect, by what it needs and excludes."""
    if ctx.resilient_parsing:
        return
    params = {param.name: param for param in command.get_params(ctx) if isinstance(param, Option)}
    typed_names = {
        name: param.typed(ctx)
        for name, param in params.items()
        if ctx.get_parameter_source(name or "") is ParameterSource.COMMANDLINE
    }
    for name, typed in typed_names.items():
        for other_name in params[name].excludes:
            if other_name in typed_names:
                rule = f"{typed} has no effect with {typed_names[other_name]}; remove one"
                raise messages.Refused(rule)
        needs = params[name].needs
        if needs and not any(
            ctx.params[other_name] in values.split("|")
            if values
            else ctx.params[other_name] is not None
            for other_name, values in needs.items()
        ):
            needed = (
                f"{params[other_name].main} {(values or '').replace('|', ' or ')}".strip()
                for other_name, values in needs.items()
            )
            raise messages.Refused(f"{typed} has no effect without {' or '.join(needed)}")


class Command(click.Command):
    """A command that remembers the words it was given, for its messages."""

    def get_short_help_str(self, limit: int = 1000) -> str:
        """The whole first sentence of its help, which click would cut to a line."""
        return super().get_short_help_str(1000)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = tuple(args)
        _once(self, ctx, args)
        try:
            remaining = super().parse_args(ctx, args)
        except UsageError as problem:
            raise messages.Refused(messages.of_usage(problem, ctx)) from problem
        _with_effect(self, ctx)
        return remaining

    def invoke(self, ctx: click.Context) -> object:
        try:
            if not _WITHOUT_JAX & set(ctx.command_path.split()[1:2]):
                _sizes.require_address_space()
            return super().invoke(ctx)
        except UsageError as problem:
            raise messages.Refused(messages.of_usage(problem, ctx)) from problem
        except FailureError as problem:
            raise messages.Failed(messages.translate(str(problem), ctx)) from problem
        except EOFError as problem:  # click takes it for Ctrl-D at a prompt, and there are none
            raise messages.Failed(f"a file or an answer ends too early ({problem})") from problem


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


class StrategyName(click.Choice):  # type: ignore[type-arg]  # no runtime argument in click 8.1
    """A registered kind of strategy: one that can be optimized, or has no parameters."""

    # what mfopt.optimize.kinds.all_names() gives without plugins: help does not wait for JAX
    # fmt: off
    names: tuple[str, ...] = (
        "blt", "toeplitz", "banded-toeplitz", "cleared-blt", "wave-blt", "banded",
        "dense", "identity", "sqrt", "banded-sqrt", "banded-inverse-sqrt", "tree",
    )
    # fmt: on

    def __init__(self) -> None:
        super().__init__(self.names)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        kind_names = self.names
        if value not in kind_names and (_plugins.installed() or "mfopt.optimize" in sys.modules):
            from mfopt.optimize import kinds

            with contextlib.suppress(UsageError):
                return kinds.check(str(value))
            kind_names = kinds.all_names()
        if value not in kind_names:
            self.fail(f"{value!r} is none of {', '.join(kind_names)}", param, ctx)
        return str(value)


class Count(click.ParamType):  # type: ignore[type-arg]  # no runtime argument in click 8.1
    """A whole number, also as 1e6, 10M or 1_000.

    More than ``maximum`` is refused where it is read, before any work: sizes beyond which work
    takes days, for nothing. What else is wrong with a number is for the library to say, or at once
    for ``rule``, also of a command that has then no use for it.
    """

    name = "integer"

    def __init__(
        self, maximum: int | None = None, rule: Callable[[str, int], int] | None = None
    ) -> None:
        self.maximum, self.rule = maximum, rule

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            number = whole(value)
        except ValueError as problem:
            self.fail(f"{value!r} {problem}", param, ctx)
        count = at_most(self.maximum, number, param)
        return self.rule((param and param.name) or "value", count) if self.rule else count


def at_most(maximum: int | None, number: N, param: click.Parameter | None) -> N:
    """``number``, unless it is above ``maximum``."""
    if maximum is not None and number > maximum:
        name = (param and param.name) or "value"
        raise _check.reject(name, number, f"must be at most {maximum}")
    return number


def whole(value: object) -> int:
    """``value`` as an int: digits, or a number like 1e6 or 10M that is whole.

    A ValueError says what is wrong, to be put behind the value.
    """
    text = str(value).strip()
    try:
        return int(text)
    except ValueError:
        pass
    unit = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        raise ValueError("is not a whole number") from None
    if not math.isfinite(number) or number != math.floor(number):
        raise ValueError("is not a whole number")
    return int(number)


COUNT = Count()
MOST_SAMPLES = 2**28  # a thousand times the default: minutes for 4 bins, an hour for 128
MOST_GROUP = 10**6  # units that change together
MOST_POINTS = 10**4  # of a table


def command(
    name: str, kind: type[click.Command] = Command
) -> Callable[[Callable[[SimpleNamespace], object]], click.Command]:
    """A command whose function is given all that was asked for as one namespace, by parameter."""

    def decorate(function: Callable[[SimpleNamespace], object]) -> click.Command:
        @functools.wraps(function)
        def called(**values: object) -> object:
            return function(SimpleNamespace(**values))

        return click.command(name=name, cls=kind)(called)

    return decorate


def typed(name: str) -> bool:
    """Return True if the running command's option ``name`` was given, and is not a default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def option(name: str, kind: Any, text: str, into: str | None = None, **keywords: Any) -> Decorator:
    """``click.option`` of this module's class, which shows its default.

    Args:
      name: with its dashes.
      kind: type of its value; bool for a flag, a tuple for a choice of these words, by default the
        first.
      text: its help.
      into: the parameter that it sets, where that is not its name.
      keywords: as for :class:`Option`.
    """
    if isinstance(kind, tuple):
        kind, keywords["default"] = click.Choice(kind), kind[0]
    value_type = {"is_flag": True} if kind is bool else {"type": kind}
    names = [name] if into is None else [name, into]
    return click.option(*names, cls=Option, help=text, **value_type, **keywords)


def apply(*decorators: Decorator) -> Decorator:
    """Several decorators as one, in reading order."""

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _checked(rule: Callable[..., object]) -> Callable[..., object]:
    """A callback of an option whose value, where there is one, is held against ``rule``."""
    return lambda _, param, value: _check.optional(rule, param.name, value)


def _report(name: str, value: object) -> Path:
    """``value`` as the path of a file, which in the folder of a run is its privacy report."""
    path = _check.path(name, value)
    return _check.file(name, path / "privacy-report.json" if path.is_dir() else path)


# callbacks of arguments that must be there
FILE = _checked(_check.file)
REPORT = _checked(_report)


def eps(text: str = "Target ε > 0.", **keywords: object) -> Decorator:
    """``--eps``; a target, unless ``keywords`` have another callback."""
    keywords = {"callback": _checked(_check.epsilon), **keywords}
    return option("--eps", float, text, "epsilon", **keywords)


def delta(text: str = "Target δ.", **keywords: Any) -> Decorator:
    """``--delta``."""
    return option("--delta", float, text, callback=_checked(_check.probability), **keywords)


def output_path(text: str, **keywords: Any) -> Decorator:
    """``--out``."""
    return option("--out", PATH, text, **keywords)


privacy = apply(eps(required=True), delta(default=1e-5))

training_length = apply(
    option("--epochs", COUNT, "Passes over the data, E.", required=True),
    option(
        "--iters",
        COUNT,
        "Iterations per epoch, b: the bins of balls-in-bins. n = E·b.",
        required=True,
    ),
)

json_flag = option("--json", bool, "Print one JSON object and nothing else.", "as_json")
quiet = option("--quiet", bool, "Suppress progress and the table.")
output = apply(json_flag, quiet)


def force_of(*places: str) -> Decorator:
    """``--force``; ``places``: the options that name what is replaced, where none has a default."""
    needs = dict.fromkeys(places)
    return option("--force", bool, "Overwrite existing output.", needs=needs)


force = force_of()


def unit_or(default: str | None) -> Decorator:
    """``--unit``."""
    return option(
        "--unit",
        str,
        "Name of the privacy unit: what the guarantee protects.",
        "privacy_unit",
        callback=_checked(_check.word),
        default=default,
    )


unit = unit_or("example")


def certify_samples_as(name: str | None = None, **keywords: object) -> Decorator:
    """``--certify-samples``; the default is the same everywhere, so that one question has one σ."""
    text = (
        "iid samples of the certificate [default: chosen automatically; more give a slightly "
        "smaller σ]."
    )
    return option("--certify-samples", Count(MOST_SAMPLES), text, name, **keywords)


certify_samples = certify_samples_as()
certificate_kind = option(
    "--certificate",
    ("monte-carlo", "deterministic"),
    "Proof of σ: deterministic draws no samples and has failure probability 0.",
)


def seed(text: str = "for reproduction; the certificate says so", **keywords: Any) -> Decorator:
    """``--seed``."""
    text = f"Pin the randomness, {text}."
    if "default" not in keywords:
        text += " Default: the operating system's entropy."
    return option("--seed", Count(rule=_check.pinned), text, **keywords)


jobs = option(
    "--jobs",
    Count(1024, _check.integer),
    "Worker processes. [default: half the cores]",
)
cache = option(
    "--cache",
    PATH,
    "Folder of finished cells: a stopped run resumes. [default: $MFOPT_CACHE, or the user's "
    "cache folder]",
)


def certificate(text: str) -> Decorator:
    """Options of commands that prove a statement about a file; ``text``: help of ``--out``."""
    return apply(
        certify_samples, certificate_kind, seed(), output_path(text), force_of("out"), output
    )


file_argument = click.argument("path", metavar="FILE", type=PATH, callback=FILE)
