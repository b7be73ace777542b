"""One option: its main name, the older ones that go on working, and how it was typed."""

from __future__ import annotations

from typing import Any

import click

from mfopt._runtime import _check

# main form -> the older names that mean the same
ALIASES = {
    "--iters": ("--bins",),
    "--eps": ("--epsilon",),
    "--out": ("--output",),
    "--population": ("--units",),
    "--unit": ("--privacy-unit",),
}


class Option(click.Option):
    """An option with older names that help does not show; errors name it as it was typed."""

    def __init__(
        self,
        names: list[str],
        *,
        aliases: tuple[str, ...] = (),
        help: str = "",
        may_be_empty: bool = False,
        needs: dict[str, str | None] | None = None,
        excludes: tuple[str, ...] = (),
        **keywords: Any,
    ) -> None:
        """Make an option; ``names``, ``help`` and ``keywords`` as for ``click.Option``.

        ``aliases``: older names; ``may_be_empty``: whether "" is a value. ``needs``: names of other
        options, one of which must be given (or have this value): without all of them this one has
        no effect, nor has it beside the options named in ``excludes``.
        """
        main = next(name for name in names if name.startswith("--"))
        self.older = tuple(aliases) or ALIASES.get(main, ())
        self.may_be_empty, self.needs, self.excludes = may_be_empty, needs or {}, excludes
        super().__init__([*names, *self.older], help=help, **{"show_default": True, **keywords})

    @property
    def main(self) -> str:
        """The name that help shows."""
        return next(name for name in self.opts if name.startswith("--"))

    def type_cast_value(self, ctx: click.Context, value: object) -> object:
        values = value if isinstance(value, list | tuple) else (value,)
        if not self.may_be_empty and any(isinstance(x, str) and not x.strip() for x in values):
            # an unset variable of a shell, as a rule: "" would be the working folder, or nothing
            raise _check.reject(self.name or "", None, "is empty", "Give a value, or leave it out.")
        return super().type_cast_value(ctx, value)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        all_names, self.opts = self.opts, [name for name in self.opts if name not in self.older]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = all_names

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return f"'{self.typed(ctx)}'"

    def typed_name(self, ctx: click.Context | None) -> str | None:
        """The name under which the option was given, None if it was not."""
        words = [] if ctx is None else [word.split("=")[0] for word in ctx.meta.get(WORDS, ())]
        return next((name for name in self.opts if name in words), None)

    def typed(self, ctx: click.Context | None) -> str:
        """The name under which the option was given, its main one if it was not."""
        return self.typed_name(ctx) or self.main


WORDS = "mfopt_cli.words"  # where a context's meta keeps what was typed
