"""Entry point of ``mfopt``: finds the command, turns errors into messages and exit codes."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from typing import NoReturn

import click

from mfopt._runtime import _extras, _signals
from mfopt_cli import compile_cache, display, messages, options

# name -> one line of help. Each command lives in mfopt_cli/commands/<name>.py as ``command`` and
# is imported only when it is run, so that `mfopt --help` never waits for JAX.
COMMANDS: dict[str, str] = {
    "plan": "From a data set and a loader to a mechanism, its file and its training loop.",
    "optimize": "Find the strategy with the lowest error at (ε, δ); certify it; save it.",
    "certify": "Prove (ε, δ) for the C and σ of a file with fresh randomness.",
    "calibrate": "Smallest certified σ of the same C for another (ε, δ).",
    "show": "Mechanism, error and guarantee of a factorization file.",
    "noise": "Memory and time per step of a file's noise on this machine.",
    "plot": "Coefficients, error per step and optimization history of a file.",
    "report": "One HTML page about a file: guarantee, sampling, error, cost, alternatives.",
    "statement": "One page in plain words about a file or a run, for a privacy officer.",
    "cache": "Folders that mfopt keeps on this machine, and clearing them.",
    "compare": "σ, RMSE and memory of every mechanism side by side.",
    "account": "(ε, δ) from σ, or σ from (ε, δ), for every mechanism with an accountant.",
    "data": "User data: build token stores from text.",
    "train": "Fine-tune a language model with user-level differential privacy.",
    "verify": "Recompute the numbers of a run's privacy report.",
    "audit": "Attack the training loop with canaries: a lower bound on ε.",
}


class _LazyGroup(options.Group):
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


@click.group(
    cls=_LazyGroup,
    commands=dict.fromkeys(COMMANDS, click.Command(None)),  # click names the nearest one
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, value: _show_version(ctx) if value else None,
    help="Show the version and its commit, and exit.",
)
@click.option(
    "--no-compile-cache",
    is_flag=True,
    help="Compile everything again and keep no compilation cache on disk.",
)
def cli(no_compile_cache: bool) -> None:
    """Optimize, certify and use correlated noise for differentially private training.

    \b
    Tab completion: put this line into ~/.bashrc (zsh_source for ~/.zshrc; fish likewise):
      eval "$(_MFOPT_COMPLETE=bash_source mfopt)"
    """
    stamp = os.environ.get("SOURCE_DATE_EPOCH", "0")
    try:
        int(stamp)  # as NumPy does when it is imported
    except ValueError:
        rule = "must be whole seconds since 1970; correct or unset it in the environment"
        raise messages.Refused(f"SOURCE_DATE_EPOCH={stamp}: {rule}.") from None
    if not no_compile_cache:
        compile_cache.switch_on()


def main(arguments: list[str] | None = None) -> object:
    """Run the command line.

    Exit codes: 0 done, 1 failed, 2 bad usage, 128 + number of the signal that ended the work (130
    after Ctrl-C, 143 after SIGTERM; a result that was kept in spite of it is no full one, so that
    ``mfopt optimize ... && mfopt train ...`` stops).
    """
    threshold, variables = gc.get_threshold(), set(os.environ)
    _open_streams()
    display.speak_plainly()
    messages.COMPLETE.clear()
    # Threads of NumPy's BLAS would wait awake for 25 ms on the cores of compiled code: on two busy
    # cores a warm main command takes 8.8 CPU seconds so, and 6.8 where they sleep at once.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    # Traces of programs are many small objects that live on: searches for garbage among them took
    # 4% of the main command's CPU time.
    gc.set_threshold(50_000)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `mfopt ... | head`: nobody reads on
        _close_output()
        sys.exit(1)
    except OSError as error:  # of standard output: any other has become a message
        _close_output()
        saved = "".join(f"; {path} is complete" for path in messages.COMPLETE)
        click.echo(f"mfopt: standard output: {error.strerror}{saved}", err=True)
        sys.exit(1)
    finally:  # for a program that calls this within itself
        gc.set_threshold(*threshold)
        for name in set(os.environ) - variables:
            del os.environ[name]
    if isinstance(code, int) and code:
        sys.exit(code)
    return code


def _run(arguments: list[str] | None) -> object:
    """Run the command; its errors become messages and exit codes, but for those of its output."""
    try:
        with _signals.as_interrupts():
            return cli.main(args=arguments, prog_name="mfopt", standalone_mode=False)
    except click.ClickException as error:
        messages.show(error)
        messages.json_error(
            arguments, error.format_message(), error.exit_code, getattr(error, "ctx", None)
        )
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, click.Abort) as stop:
        # what the work that was stopped has to say: what is kept, and how to go on
        notes = getattr(stop.__cause__ or stop, "__notes__", ())  # click raises Abort from it
        _end(": ".join(("interrupted", *notes)), _signals.exit_code(), arguments)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or _is_of_output(error):
            raise
        has_path = error.filename and error.strerror
        _end(f"{error.filename}: {error.strerror}" if has_path else str(error), 1, arguments)
    except MemoryError as error:
        _end(f"out of memory{f': {error}' if str(error) else ''}", 1, arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _extras.EXTRAS:
            raise
        _end(str(_extras.missing(error)), 1, arguments)
    except (RuntimeError, AssertionError) as error:
        if _no_device():
            name = os.environ["JAX_PLATFORMS"]
            message = f"error: JAX_PLATFORMS={name}: no such device. Unset it, or install its JAX."
            _end(message, 2, arguments)
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _end(f"out of memory: {str(error).splitlines()[0]}", 1, arguments)


def _open_streams() -> None:
    """Let a stream that was closed before the start (``>&-``) lead nowhere, where it is None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as we run


def _end(message: str, code: int, arguments: list[str] | None) -> NoReturn:
    click.echo(f"mfopt: {message}", err=True)
    messages.json_error(arguments, message, code)
    sys.exit(code)


def _show_version(ctx: click.Context) -> None:
    from mfopt._version import __version__, commit

    made_from = commit()
    click.echo(f"mfopt, version {__version__}" + (f" ({made_from})" if made_from else ""))
    ctx.exit()


def _close_output() -> None:
    # the interpreter flushes standard output on its way out, and would complain once more
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_of_output(error: OSError) -> bool:
    """True for an error of what a command prints, not of a file that it reads or writes."""
    return any(
        frame.f_code is click.echo.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _no_device() -> bool:
    """Return True if an error comes from a device in JAX_PLATFORMS that this machine lacks."""
    if "jax" not in sys.modules or not os.environ.get("JAX_PLATFORMS"):
        return False
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError):
        return True
    return False
