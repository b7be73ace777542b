"""mfopt optimize: the main job."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from mfopt import words
from mfopt._runtime import _check, _signals
from mfopt._runtime._types import JsonObject
from mfopt.errors import UsageError
from mfopt.guarantee import questionable_delta
from mfopt.progress import Progress, Report
from mfopt.sampling.named import NAMES
from mfopt_cli import answers, display, mechanisms, options
from mfopt_cli.live import COMPILING, Live, of_command
from mfopt_cli.options import COUNT, PATH, option

if TYPE_CHECKING:
    from mfopt.factorization import Factorization
    from mfopt.final_model import Schedule
    from mfopt.workloads import Workload


# iterations of an epoch up to which the host's CPU searches unless a device is named: a GPU was
# measured to take longer for so many small steps (docs/faq.md)
_SMALL = 128


@options.command("optimize")
@options.training_length
@options.privacy
@option(
    "--strategy",
    options.StrategyName(),
    f"Form of C: {', '.join(options.StrategyName.names)}. "
    "blt: a few buffers of memory, near the optimum [default: blt; for ε of 4 and more the better "
    "of blt and wave-blt; cleared-blt with fresh-bins, banded-toeplitz with b-min-sep, "
    "random-partition and cyclic-poisson, identity with poisson].",
    metavar="KIND",
)
@option(
    "--sampling",
    (*NAMES, "auto"),
    "Sampling scheme. balls-in-bins: one random bin per unit for all epochs; fresh-bins: a "
    "new bin in each epoch (lowest error; C needs at most --iters bands); b-min-sep: "
    "independent sampling with at least --separation iterations between participations (C needs "
    "at most that many bands); poisson: independent sampling in each iteration (C = I only); "
    "cyclic-poisson: the same among one of --bands groups that take turns (C of as many bands); "
    "random-partition: cyclic-poisson, each unit in one of --separation groups by chance (C "
    "needs at most that many bands); fixed-order: the same public order in each epoch; "
    "min-separation: any public order with at least --separation iterations between at most "
    "--max-participations; both without amplification. auto: the scheme of the first two and "
    "the form of C within --memory with the lowest error, with a table of the candidates.",
    metavar="SCHEME",
)
@option(
    "--reassign-every",
    COUNT,
    "Epochs between two assignments, for fresh-bins [default: 1].",
    "rethrow",
    aliases=("--rethrow",),
    needs={"sampling": "fresh-bins"},
)
@option(
    "--separation",
    COUNT,
    "Minimum number of iterations between two participations of a unit, for b-min-sep [default: "
    "half of --iters, or as many as --bands], random-partition [default: an eighth of them, or as "
    "many as --bands] and min-separation [default: --iters].",
    needs={"sampling": "b-min-sep|random-partition|min-separation"},
)
@option(
    "--max-participations",
    COUNT,
    "Maximum number of participations of a unit, for min-separation [default: --epochs].",
    needs={"sampling": "min-separation"},
)
@option(
    "--bands",
    COUNT,
    "Number of bands of banded strategies [default: at most 16, at most --iters, and at most "
    "--separation with b-min-sep and random-partition; with cyclic-poisson the best of 1, 2, 4, "
    "…].",
)
@option(
    "--buffers",
    COUNT,
    "Number of buffers of blt, wave-blt (at least 4) and cleared-blt [default: 4, at most the "
    "number of iterations].",
)
@option(
    "--memory",
    COUNT,
    "Choose C automatically within this many noise buffers (× model size) [default with "
    "--sampling auto: 15].",
)
@option(
    "--time-scale/--no-time-scale",
    None,
    "Let C vary with time: multiply it by a diagonal matrix on either side, for a lower error "
    "at the same memory [default: on for blt, wave-blt, toeplitz, banded-toeplitz, cleared-blt].",
    default=None,
)
@option(
    "--workload",
    str,
    "Workload whose error is minimized: prefix, momentum, or a .npy file with (n,) Toeplitz "
    "coefficients or an (n, n) matrix. prefix is the safe choice for any learning-rate schedule.",
    default="prefix",
)
@option(
    "--momentum",
    float,
    "Momentum of --workload momentum.",
    default=0.95,
    needs={"workload": "momentum"},
)
@option("--cooldown", str, "Learning-rate cooldown START:STOP:FINAL in steps, e.g. 500:2000:0.05.")
@option(
    "--objective",
    click.Choice(("robust", "final", "rmse", "max")),
    "Error to minimize. robust: of prefix sums and of the final model under four learning-rate "
    "schedules; final: of the final model alone; rmse: root mean square of the "
    "workload's queries; max: largest standard deviation of a query [default: robust; rmse for "
    "another --workload].",
)
@option(
    "--schedule",
    str,
    "Learning-rate schedule to optimize for, with --objective robust or final: constant, averaged "
    "(constant, last iterates averaged), linear, cosine, wsd (warm-up, stable, decay), or a "
    ".npy file of n rates.",
)
@option("--samples", COUNT, "Frozen Monte Carlo samples [default: by strategy].")
@options.certify_samples
@options.certificate_kind
@option("--steps", COUNT, "Maximum number of objective evaluations [default: by strategy].")
@options.seed()
@option("--init", PATH, "Start from this factorization.", callback=options.FILE)
@options.unit
@options.output_path(
    "Output file [default: mfopt-STRATEGY-EPOCHSxITERS-epsEPS.npz, with the form that was kept]."
)
@options.force
@options.output
def command(arguments: SimpleNamespace) -> int:
    """Find the strategy matrix with the lowest error at (ε, δ), certify it, save it.

    The guarantee is for add-remove adjacency. Under balls-in-bins batching every unit is assigned
    once to one of --iters bins and takes part in that iteration of each epoch; under fresh-bins
    it is reassigned in each epoch; under b-min-sep it takes part once in --iters iterations on
    average, with at least --separation iterations between participations, and so it does under
    random-partition, in a random one of --separation groups that take turns. Under the other
    schemes σ has an account in closed form. σ is relative to the clip norm. Ctrl-C saves the best
    strategy so far, marked uncertified (exit code 130).

    \b
    Example:
      mfopt optimize --epochs 16 --iters 128 --eps 2
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling fresh-bins
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling auto --memory 8
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling cyclic-poisson
    """
    started = time.perf_counter()
    if arguments.iters <= _SMALL and "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.out:
        _check_free(arguments.out, arguments.force)
    rates = mechanisms.schedule(arguments.schedule)
    workload = mechanisms.workload(arguments, arguments.epochs * arguments.iters)
    forms = _forms_to_search(arguments)
    answers.say_doubt([questionable_delta(arguments.delta)])

    def named_after(form: str) -> Path:
        return arguments.out or Path(
            f"mfopt-{form}-{arguments.epochs}x{arguments.iters}-eps{arguments.epsilon:g}.npz"
        )

    for form in forms:
        _check_free(named_after(form), arguments.force)
    factorization = _made(arguments, rates, workload)
    target = named_after(_kept(factorization) if len(forms) > 1 else forms[0])
    path = mechanisms.keep(factorization, target, force=arguments.force)
    answers.say_unused(
        {"samples": arguments.certify_samples}, bool(factorization.guarantee.details.get("samples"))
    )
    seconds = time.perf_counter() - started
    if arguments.as_json:
        display.json_object(
            {**mechanisms.summary(factorization), "path": str(path), "seconds": seconds}
        )
    elif not arguments.quiet:
        _report(factorization, path, seconds, mechanisms.error_under(factorization, rates))
    return _exit_code(factorization, path, saved_as_wanted=path == target)


def _made(arguments: SimpleNamespace, rates: Schedule | None, workload: Workload) -> Factorization:
    """The factorization, also of a search that was stopped."""
    import mfopt
    from mfopt.errors import UncertifiedError
    from mfopt.optimize import Search

    init = mfopt.load(arguments.init).strategy if arguments.init else None
    names = "epsilon delta sampling separation max_participations strategy buffers bands memory"
    names += " objective privacy_unit seed certify_samples certificate"
    with of_command(arguments, COMPILING) as live:
        try:
            return mfopt.factorize(
                epochs=arguments.epochs,
                iterations_per_epoch=arguments.iters,
                reassign_every=arguments.rethrow,
                workload=workload,
                schedule=rates,
                search=Search(
                    time_scale=arguments.time_scale,
                    samples=arguments.samples,
                    steps=arguments.steps,
                    init=init,
                ),
                progress=_with_values(live, arguments.objective),
                command=mechanisms.typed(),
                **{name: getattr(arguments, name) for name in names.split()},
            )
        except (UncertifiedError, mfopt.InterruptedFactorization) as stopped:
            return stopped.best


def _exit_code(factorization: Factorization, path: Path, *, saved_as_wanted: bool) -> int:
    """Exit code of the command, with a line on what the file is not."""
    proved = factorization.guarantee.proved
    if factorization.provenance.get("interrupted"):
        text = "interrupted: the best strategy so far is saved"
        if not proved:
            text += f" and its σ is NOT CERTIFIED. Run `mfopt certify {path}` before training"
        click.echo(f"{text}.", err=True)
        return _signals.exit_code()
    if proved:
        return 0 if saved_as_wanted else 1
    click.echo(
        f"mfopt: {factorization.not_certified} C is saved and its σ is NOT CERTIFIED: `mfopt "
        f"calibrate {path} --eps EPS --delta DELTA` finds one without a search for another "
        "target, or for this one with more --certify-samples.",
        err=True,
    )
    return 1


def _forms_to_search(arguments: SimpleNamespace) -> tuple[str, ...]:
    """Forms of C, one of which the file will hold; refuses, before any work, what has no effect."""
    from mfopt.sampling import named_scheme

    scheme = named_scheme(
        "balls-in-bins" if arguments.sampling == "auto" else arguments.sampling,
        arguments.epochs,
        arguments.iters,
        bands=1 if arguments.bands is None else arguments.bands,
        reassign_every=arguments.rethrow,
        separation=arguments.separation,
        max_participations=arguments.max_participations,
    )
    if arguments.sampling == "auto":
        return ("auto",)
    if arguments.memory is not None:
        return (f"memory{arguments.memory}",)
    if arguments.strategy is not None:
        return (arguments.strategy,)
    from mfopt.optimize import defaults

    return defaults.kinds(scheme, arguments.epsilon, arguments.buffers)


def _check_free(path: Path, force: bool) -> None:
    """Refuse to overwrite a file, and say how to resume the search that left it there."""
    from mfopt._runtime import _files

    try:
        mechanisms.check_output(path, force=force)
    except UsageError as problem:
        if problem.way_out != _files.EXISTS or not path.is_file():
            raise
        way_out = "`force=True` replaces it, `out` names another. If its search was interrupted, "
        way_out += f"`mfopt certify {path}` certifies it, and `init={path}` resumes from its C."
        raise _check.reject("out", str(path), problem.rule, way_out) from None


def _with_values(live: Live, objective: str | None) -> Report:
    """Progress with the best error and σ so far, where the work is a search."""
    name = {"rmse": "RMSE", "max": "max error"}.get(objective or "", "error")

    def report(event: Progress) -> None:
        trace = getattr(event, "trace", None)
        if trace is not None and math.isfinite(trace.best_value):
            note = f"{name} {math.exp(trace.best_value):.5g}  σ {trace.best_sigma:.5g}"
            event = dataclasses.replace(event, note=note)
        live(event)

    return report


def _report(factorization: Any, path: Path, seconds: float, error: float | None) -> None:
    # in a fixed, public order the sensitivity of C >= 0 is the largest norm of what a unit adds
    norm = factorization.provenance.get("mode_norm", 1.0)
    sigma = f"{words.round_up(factorization.noise_multiplier)}  (× clip norm, C as stored)"
    # a kind whose definition fixes its scale, or very many bins; the norm itself is a hair above
    if abs(norm - 1) > 1e-6:
        at_one = words.round_up(factorization.noise_multiplier / norm)
        sigma += f"; {at_one} for C normalized to sensitivity 1"
    form, scheme = words.described(factorization.strategy.describe()), factorization.sampling
    batching = scheme.words()
    if scheme.kind == "balls-in-bins":
        batching = f"{scheme.epochs} epochs × {scheme.bins} bins"
    display.table(
        f"{form}: {batching}, {factorization.workload.kind} workload",
        [
            ("noise multiplier σ", sigma),
            ("RMSE", f"{factorization.rmse:.4f}  (clip norms, per coordinate)"),
            ("final-model error", mechanisms.final_model_error(factorization, error)),
            ("guarantee", mechanisms.statement(factorization.guarantee)),
            *_baselines(factorization, error),
            *_fresh_bins(factorization),
            *mechanisms.above_floor(factorization),
            *_forms(factorization),
            *_groups(factorization),
            *_tried(factorization),
            ("search", factorization.provenance["optimizer_status"]),
            ("saved", f"{path}  ({words.duration(seconds)})"),
        ],
    )


def _baselines(factorization: Factorization, error: float | None) -> display.Rows:
    """Row of what independent noise has, see :func:`mechanisms.without_correlation`.

    ``error``: final-model error under the schedule that was typed.
    """
    from mfopt import query_error
    from mfopt.strategies import Identity

    if (independent := mechanisms.without_correlation(factorization)) is None:
        return []
    label, sigma = independent
    rmse = float(
        query_error.rmse(factorization.workload, Identity(), factorization.iterations, sigma)
    )
    changes = (
        words.against(factorization.rmse, rmse),
        words.against(factorization.final_model_error if error is None else error, sigma),
    )
    errors = f"RMSE {rmse:.4f} ({changes[0]} here), final-model error {sigma:.4f} ({changes[1]})"
    return [(label, errors)]


# (ε, RMSE of prefix sums with fresh bins over that with balls-in-bins), of the default C of each at
# 16 × 128: docs/benchmarks/field.md
_FRESH_BINS = ((0.5, 0.981), (2.0, 0.950), (8.0, 0.890), (16.0, 0.856))


def _fresh_bins(factorization: Any) -> display.Rows:
    """Row of what assigning units to new bins in each epoch would gain of prefix sums."""
    import numpy as np

    scheme, workload = factorization.sampling, factorization.workload
    if scheme.kind != "balls-in-bins" or scheme.epochs == 1 or workload.kind != "prefix":
        return []
    ratio = float(np.interp(np.log(factorization.guarantee.epsilon), *np.log(_FRESH_BINS).T))
    gain = f"about {100 * -np.expm1(ratio):.0f}% less error"
    return [("fresh bins", f"{gain} if units may be reassigned each epoch: --sampling fresh-bins")]


def _kept(factorization: Factorization) -> str:
    """The kind of its C, without the diagonals."""
    facts = factorization.strategy.describe()
    return str(facts.get("base", facts)["kind"])


def _forms(factorization: Any) -> display.Rows:
    """Row of the other kinds of C searched, with their error relative to the best."""
    losses = factorization.provenance.get("forms", {})
    errors = {kind: math.exp(loss) for kind, loss in losses.items()}
    return _compared("form of C", errors, _kept(factorization), "is better")


def _groups(factorization: Any) -> display.Rows:
    """Row of the other numbers of bands under cyclic Poisson sampling, with their error."""
    groups = factorization.provenance.get("groups", [])
    errors = {entry["size"]: entry["error"] for entry in groups}
    return _compared("bands", errors, getattr(factorization.sampling, "bands", 0), "are best")


def _compared(name: str, errors: JsonObject, best: Any, verdict: str) -> display.Rows:
    """Row of the errors of all but the best, relative to its own; none where it is alone."""
    differences = [
        f"{size}: {100 * (error / errors[best] - 1):+.2f}% error"
        for size, error in errors.items()
        if best in errors and size != best
    ]
    return [(name, "; ".join([f"{best} {verdict}", *differences]))] if differences else []


def _tried(factorization: Any) -> display.Rows:
    """Rows of the mechanisms tried, lowest error first."""
    tried = factorization.provenance.get("tried", [])
    ranked = sorted(tried, key=lambda candidate: candidate.get("estimated_error", math.inf))
    lowest = ranked[0].get("estimated_error", math.nan) if ranked else math.nan
    rows: display.Rows = []
    for candidate in ranked:
        size = f" ({candidate['size']})" if candidate["size"] else ""
        outcome = candidate.get("problem")
        if not outcome:
            error = candidate["estimated_error"]
            outcome = (
                f"RMSE {candidate['estimated_rmse']:.4f}, minimized error {error:.4f} "
                f"({100 * (error / lowest - 1):+.2f}%), noise buffers: {candidate['memory']}"
            )
        name = f"{candidate['sampling']['kind']}, {candidate['strategy']}{size}"
        rows.append(("" if rows else "tried, estimates", f"{name}: {outcome}"))
    rows += [("not certified", text) for text in factorization.provenance.get("not_certified", [])]
    return rows
