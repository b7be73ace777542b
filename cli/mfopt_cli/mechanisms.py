"""Steps that several commands share: strategies by name, baselines, certified records."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt._version import ADVISED
from mfopt.guarantee import questionable_delta
from mfopt_cli import answers, display, messages
from mfopt_cli.live import COMPILING, of_command

if TYPE_CHECKING:
    from mfopt.factorization import Factorization
    from mfopt.final_model import Schedule
    from mfopt.floor import EpochEnds
    from mfopt.guarantee import Guarantee
    from mfopt.workloads import Workload


def workload(arguments: SimpleNamespace, n: int) -> Workload:
    """The workload of ``--workload``, ``--momentum`` and ``--cooldown``, for n iterations."""
    import numpy as np

    from mfopt import workloads

    text, momentum, cooldown = arguments.workload, arguments.momentum, arguments.cooldown
    if text not in ("prefix", "momentum"):
        if cooldown is not None:
            raise _check.reject("cooldown", cooldown, "needs --workload prefix or momentum")
        if not Path(text).is_file():
            rule = "must be prefix, momentum or the .npy file of one"
            raise _check.reject("workload", text, rule)
        return workloads.load(text, n)
    if text == "prefix" and cooldown is None:
        return workloads.PrefixSums()
    rates = np.ones(n)
    if cooldown is not None:
        try:
            start, stop, final = cooldown.split(":")
            rates = workloads.linear_cooldown(n, int(start), int(stop), float(final))
        except ValueError as problem:
            if isinstance(problem, _check.UsageError):
                rule = f"its {problem.argument} {problem.value!r} {problem.rule}"
                raise _check.reject("cooldown", cooldown, rule) from None
            rule = "must be START:STOP:FINAL, for example 500:2000:0.05"
            raise _check.reject("cooldown", cooldown, rule) from None
    return workloads.Momentum(momentum if text == "momentum" else 0.0, rates)


def schedule(text: str | None) -> Schedule | None:
    """The learning rates of ``--schedule``: a name, or the array of a file."""
    from mfopt.workloads import SHAPES

    if text is None or not text.endswith(".npy"):
        return _check.optional(_check.choice, "schedule", text, choices=SHAPES)
    from mfopt._runtime import _archive

    return _archive.array(text, "schedule")


def final_model_error(factorization: Factorization, error: float | None = None) -> str:
    """Final-model error, with its unit; ``error``: under the schedule that was typed."""
    shown = f"{factorization.final_model_error:.4f} over four schedules"
    if error is not None:
        shown = f"{error:.4f} under --schedule, {shown}"
    return f"{shown}  (σ of independent noise with that error)"


def error_under(factorization: Factorization, rates: Schedule | None) -> float | None:
    """Final-model error under what :func:`schedule` gives, where that is one."""
    from mfopt import final_model

    if rates is None:
        return None
    n, sigma = factorization.iterations, factorization.noise_multiplier
    return final_model.error(factorization.strategy, n, sigma, (rates,))


def typed() -> str:
    """Command line, as it was typed: what a result's record names as its maker."""
    return " ".join(["mfopt", *sys.argv[1:]])


def check_output(path: Path, *, force: bool) -> None:
    """Refuse an output before JAX is imported, where no factorization could be written there."""
    from mfopt._runtime import _files

    _files.check_output(path, force=force, name="out", suffixes=(".npz",))


def keep(factorization: Factorization, path: Path, *, force: bool) -> Path:
    """Save a finished result, elsewhere if need be; return where, and say so if it is elsewhere."""
    from mfopt.factorization import keep

    saved = keep(factorization, path, force=force)
    messages.COMPLETE.append(str(saved))
    if saved != path:
        click.echo(
            f"mfopt: {path} could not be written (it appeared meanwhile, its folder is gone, or "
            f"the disk is full): the result is saved as {saved}",
            err=True,
        )
    return saved


def prove(arguments: SimpleNamespace, verb: str) -> tuple[Factorization, Path | None]:
    """(what ``mfopt.certify`` or ``calibrate`` proves about the C of a file, where it is saved)."""
    if arguments.out is not None:
        check_output(arguments.out, force=arguments.force)
    import mfopt
    from mfopt.accounting import Effort
    from mfopt.factorization import load

    factorization = load(arguments.path)
    goal = {name: getattr(arguments, name) for name in ("epsilon", "delta")}
    effort = Effort(arguments.certify_samples, arguments.seed, certificate=arguments.certificate)
    with of_command(arguments, COMPILING) as live:
        new = getattr(mfopt, verb)(
            factorization, effort=effort, progress=live, command=typed(), **goal
        )
    answers.say_doubt([questionable_delta(new.guarantee.delta)])
    answers.say_unused(
        {"samples": arguments.certify_samples}, bool(new.guarantee.details.get("samples"))
    )
    return new, None if arguments.out is None else keep(new, arguments.out, force=arguments.force)


@contextlib.contextmanager
def picture(
    arguments: SimpleNamespace, suffixes: tuple[str, ...]
) -> Iterator[tuple[Factorization, Path]]:
    """(mechanism of a file, where its picture is to be written inside); then say so.

    That is ``--out``, or beside the file with the first of ``suffixes``.
    """
    from mfopt._runtime import _files

    target = arguments.out or arguments.path.with_suffix(suffixes[0])
    _files.check_output(target, force=arguments.force, name="out", suffixes=suffixes)
    from mfopt.factorization import load

    yield load(arguments.path), target
    if arguments.as_json:
        display.json_object({"path": str(target)})
    elif not arguments.quiet:
        display.print_text(f"saved {target}")


def without_correlation(factorization: Factorization) -> tuple[str, float] | None:
    """(label, σ) of independent noise at the same (ε, δ): what a user would do without mfopt.

    Poisson sampling with the same expected batch; the same batches where their order is public or
    devices decide who takes part. None where that is the mechanism itself, and for another
    neighbouring relation than one unit more or less.
    """
    import mfopt
    from mfopt import sampling

    scheme, stated = factorization.sampling, factorization.guarantee
    if (stated.adjacency, stated.group_size) != ("add-remove", 1):
        return None
    if scheme.executable and not scheme.public_order:
        scheme = sampling.Poisson(scheme.expected_share, factorization.iterations)
    same_batches = scheme == factorization.sampling
    if same_batches and factorization.strategy.is_identity:
        return None
    independent = mfopt.account(scheme, epsilon=stated.epsilon, delta=stated.delta)
    label = "independent noise" if same_batches else "DP-SGD, Poisson"
    return label, independent.noise_multiplier


def _epoch_ends(factorization: Factorization) -> EpochEnds | None:
    """Error at epochs' ends beside its lower bound, None where there is none."""
    from mfopt import floor

    return floor.epoch_ends(
        factorization.workload,
        factorization.strategy,
        factorization.sampling,
        factorization.guarantee,
    )


def above_floor(factorization: Factorization) -> display.Rows:
    """A row of a table: how far the error at epochs' ends is above its lower bound."""
    if (ends := _epoch_ends(factorization)) is None:
        return []
    above = f"{100 * ends.above:.1f}% above the lower bound, {ends.floor:.4f}"
    return [("at epochs' ends", f"RMSE {ends.rmse:.4f}: {above}")]


def summary(factorization: Factorization) -> JsonObject:
    """JSON output of a factorization."""
    guarantee, ends = factorization.guarantee, _epoch_ends(factorization)
    fields = (
        "rmse",
        "max_error",
        "final_model_error",
        "noise_multiplier",
        "proved_here",
        "digest",
        "provenance",
    )
    stated = guarantee.describe()
    del stated["details"]
    return stated | {
        **{name: getattr(factorization, name) for name in fields},
        "epoch_ends": ends and ends._asdict(),
        "certified": guarantee.proved,
        "advisory": advisory(factorization),
        "certificate": guarantee.details.get("certificate"),
        "strategy": factorization.strategy.describe(),
        "sampling": factorization.sampling.describe(),
        "workload": factorization.workload.describe(),
    }


def proved(factorization: Factorization, path: Path) -> str:
    """One line: how much of the guarantee was proved on this machine."""
    from mfopt.factorization import proofs

    as_stated = factorization.proved_here  # may prove it now
    guarantee = proofs.proved_guarantee(factorization)
    if guarantee is None:
        return f"no: run `mfopt certify {path}`"
    if not as_stated:
        return f"not as stated; what was proved: {statement(guarantee)} by {guarantee.method}"
    return f"yes (that the unit is one {guarantee.privacy_unit} is its maker's word)"


def advisory(factorization: Factorization) -> str | None:
    """One line where a version that could state a wrong ε made the file, and nothing proved it."""
    made_by = factorization.provenance.get("mfopt")
    if made_by not in ADVISED or factorization.proved_here:
        return None
    return (
        f"made by mfopt {made_by}, which could state a wrong ε (page Advisories): certify it again"
    )


def statement(guarantee: Guarantee) -> str:
    """One line: the guarantee in words, nothing rounded towards less privacy."""
    return f"{guarantee.claim}, {answers.status(guarantee.describe())}"
