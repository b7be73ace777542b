"""``mfopt audit``: tests of the training loop by canaries, and a lower bound on ε."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

import mfopt
from mfopt import words
from mfopt._runtime import _check
from mfopt.errors import FailureError, UsageError
from mfopt.progress import silent
from mfopt_cli import display, options
from mfopt_cli.live import of_command
from mfopt_cli.options import COUNT, option

# what a run that is as it was may lack here: two checkpoints, its data, its base model, memory
_ELSEWHERE = ("run", "data", "model", "microbatch")


@options.command("audit")
@click.argument("run", required=False, type=click.Path())
@option("--config", click.Path(), "TOML file of a training run to audit.")
@option("--canaries", COUNT, "Canary users; more is tighter.", default=4000)
@option("--confidence", float, "Confidence level of the bounds.", default=0.95)
@options.seed("for reproduction")
@options.output
def command(arguments: SimpleNamespace) -> None:
    """Audit RUN's training loop: canaries, its noise, its sums, its sampling.

    RUN is the folder of a training run, or a factorization file. A run of canaries in the run's
    own model, wired from its own settings, is compared step by step with the definition: its
    clipped sums, the noise in its releases, its participations. In a second one canary users with
    worst-case gradients take part, each with probability 1/2, and an attacker who sees every
    noised mean guesses who did: an empirical lower bound on ε. Where RUN's secret and data are at
    hand its last steps are executed again from a checkpoint and compared bit for bit, and its first
    steps and some later ones are compared with the definition on its own data. Exit code 1 if a
    test fails; a correct trainer fails with probability at most 1e-4, for any --confidence.

    \b
    Examples:
      mfopt audit run
      mfopt audit best.npz
      mfopt audit --config c.toml --canaries 20000
      mfopt audit best.npz --config c.toml
    """
    account, settings, folder = _subject(arguments.run, arguments.config)
    from mfopt.training import executed, replay
    from mfopt.training.audit import audit

    executed_again, why_not, is_allowed = None, "not a run's folder", True
    with of_command(arguments) as live:
        result = audit(
            account,
            settings,
            canaries=arguments.canaries,
            confidence=arguments.confidence,
            seed=arguments.seed,
            progress=live,
        )
        if folder is not None:
            try:
                executed_again, of_run = replay.replay(folder, progress=live)
                sampling = (*result.sampling, *of_run)
                result = dataclasses.replace(result, sampling=sampling)
            except (UsageError, FailureError) as problem:
                why_not = str(problem)
                is_allowed = getattr(problem, "argument", "") in _ELSEWHERE
    faults = [finding for finding in result.sampling if finding.fault]
    if arguments.as_json:
        tests = [dataclasses.asdict(f) | {"deviation": f.deviation} for f in result.sampling]
        replayed = dataclasses.asdict(executed_again) if executed_again else {"not": why_not}
        facts = {"passed": result.passed, "sampling": tests, "replay": replayed}
        display.json_object(dataclasses.asdict(result) | facts)
    elif not arguments.quiet:
        claimed = (result.epsilon_claimed, result.delta, result.noise_multiplier_claimed)
        rows = {
            "claimed": "({}, {})-DP at noise multiplier {}".format(*map(words.round_up, claimed)),
            "right guesses": f"{result.accuracy:.4f}; the same attacker on the claimed "
            f"mechanism expects {result.accuracy_claimed:.4f}",
            "epsilon at least": f"{result.epsilon_lower:.4g} whatever the trainer does "
            f"({result.correct} of {result.guesses} guesses right)",
            " ": f"{result.epsilon_curve:.4g} if it is this mechanism with another noise "
            "multiplier",
            "": f"{result.epsilon_profile:.4g} if canaries are independent besides "
            f"({_at_most(result.noise_multiplier_highest)})",
            "confidence": f"{result.confidence:g}",
            "tests": "; ".join(
                f"{f.name}: in a correct trainer with probability {f.chance:.2g}" for f in faults
            )
            or f"{len(result.sampling)} passed; a correct trainer fails one of them with "
            f"probability at most {executed.FALSE_ALARM:g}",
        }
        if folder is not None:
            rows["executed again"] = str(executed_again or f"not: {why_not}")
        title = f"{arguments.run or arguments.config}: audit with {result.canaries} canaries"
        display.table(title, rows.items())
    if faults:
        names = ", ".join(finding.name for finding in faults)
        rule = "audit failed: the trainer does not execute what was accounted for"
        raise FailureError(f"{rule} ({names})")
    if executed_again is not None and executed_again.differences:
        names = ", ".join(executed_again.differences)
        raise FailureError(f"audit failed: executed again, the run ends with another {names}")
    if not is_allowed:
        raise FailureError(f"audit failed: the run cannot be executed again: {why_not}")


def _at_most(noise_multiplier: float) -> str:
    """The largest noise multiplier that the guesses allow, in words."""
    if math.isfinite(noise_multiplier):
        return f"its noise multiplier then is at most {words.round_up(noise_multiplier, 4)}"
    return "these guesses are no upper bound on it: more canaries may be"


def _subject(run: str | None, path: str | None) -> tuple[Any, Any, Path | None]:
    """(account, settings or None, folder of the run or None)."""
    folder = Path(run) if run is not None and Path(run).is_dir() else None
    if folder is not None:
        if path is not None:
            raise _check.reject("config", path, "is not needed: the run's folder has its own")
        path = str(folder / "config.toml")
        if not Path(path).is_file():
            way_out = "Name the folder that `mfopt train` wrote, or a factorization file."
            raise _check.reject("run", run, "holds no config.toml of a run", way_out)
    elif run is not None:
        _check.file("run", run)
    if path is None:
        if run is None:
            raise _check.reject("run", None, "give a run's folder, a factorization, or --config")
        return mfopt.load(run), None, None
    from mfopt.training import config, replay, wiring

    settings_of_run = {} if folder or run is None else {"factorization": run, "sampling": ""}
    settings = replay.settings_of_run(folder) if folder else config.load(path, settings_of_run)
    with tempfile.TemporaryDirectory() as empty:
        run_folder = folder or Path(empty)
        account = wiring.account_of(settings, run_folder, silent, resuming=folder is not None)
    if account is None:
        raise _check.reject("algorithm", "none", "makes no claim that an audit could test")
    return account, settings, folder
