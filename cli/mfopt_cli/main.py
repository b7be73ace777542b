"""Entry point of ``mfopt``: finds the command, turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

# name -> one line of help. Each command lives in mfopt_cli/commands/<name>.py as ``command`` and
# is imported only when it is run, so that `mfopt --help` never waits for JAX.
COMMANDS: dict[str, str] = {
    "optimize": "Find the strategy with the least error at (ε, δ); certify it; save it.",
    "certify": "Prove (ε, δ) for the C and σ of a file with fresh randomness.",
    "calibrate": "Smallest certified σ of the same C for another (ε, δ).",
    "show": "What a factorization file holds.",
    "noise": "Memory and time per step of a file's noise on this machine.",
    "plot": "Coefficients, error per step and optimization history of a file.",
    "bench": "Run a benchmark of the source tree.",
    "compare": "σ, RMSE and memory of every mechanism side by side.",
    "figures": "The tables and figures of the papers, from this library's own code.",
    "account": "(ε, δ) from σ, or σ from (ε, δ), for every mechanism with an accountant.",
    "data": "User data: build token stores from text, and describe them.",
    "train": "Fine-tune a language model with user-level differential privacy.",
    "audit": "Attack the training loop with canaries: a lower bound on ε.",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"mfopt_cli.commands.{name.replace('-', '_')}")
        return module.command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mfopt")
def cli() -> None:
    """Optimize, certify and use correlated noise for differentially private training."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; exit code 2 for bad usage, 1 for failure, 130 for an interrupt."""
    from mfopt.errors import FailureError, UsageError

    try:
        return cli.main(args=arguments, prog_name="mfopt", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except UsageError as error:
        click.echo(f"mfopt: error: {error}", err=True)
        sys.exit(2)
    except (FailureError, OSError) as error:
        click.echo(f"mfopt: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("mfopt: interrupted", err=True)
        sys.exit(130)
