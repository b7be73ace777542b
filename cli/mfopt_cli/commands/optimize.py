"""mfopt optimize: the main job."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import click

from mfopt import words
from mfopt._runtime import _check, _signals
from mfopt.errors import UsageError
from mfopt.progress import Progress, Report
from mfopt_cli import answers, display, options
from mfopt_cli.live import COMPILING, Live


@click.command(name="optimize", cls=options.Command)
@options.training_length
@options.privacy
@options.option(
    "--strategy",
    type=options.StrategyName(),
    metavar="KIND",
    help=f"Form of C: {', '.join(options.StrategyName.names)}. "
    "blt: a few buffers of memory, near the optimum [default: blt; for ε of 4 and more the better "
    "of blt and wave-blt; banded-toeplitz with fresh-bins, b-min-sep and k-of-n].",
)
@options.option(
    "--sampling",
    type=click.Choice(["balls-in-bins", "fresh-bins", "b-min-sep", "k-of-n", "auto"]),
    default="balls-in-bins",
    show_default=True,
    help="Sampling scheme. balls-in-bins: one random bin per unit for all epochs; fresh-bins: a "
    "new bin in each epoch (lowest error at small ε; C needs at most --iters bands); b-min-sep: "
    "independent sampling with at least --separation iterations between participations (C needs "
    "at most that many bands); k-of-n: exactly --epochs iterations per unit, uniform over the run "
    "with the same two conditions; auto: the scheme of the first two and the form of C within "
    "--memory with the lowest error, with a table of the candidates.",
)
@options.option(
    "--reassign-every",
    "rethrow",
    aliases=("--rethrow",),
    type=options.COUNT,
    needs={"sampling": "fresh-bins"},
    help="Epochs between two assignments, for fresh-bins [default: 1].",
)
@options.option(
    "--separation",
    type=options.COUNT,
    needs={"sampling": "b-min-sep|k-of-n"},
    help="Minimum number of iterations between two participations of a unit, for b-min-sep and "
    "k-of-n [default: half of --iters, or as many as --bands].",
)
@options.option(
    "--bands",
    type=options.COUNT,
    default=16,
    show_default=True,
    help="Number of bands of banded strategies; by default at most --iters with fresh-bins, or "
    "--separation with b-min-sep and k-of-n.",
)
@options.option(
    "--buffers",
    type=options.COUNT,
    default=4,
    show_default=True,
    help="Number of buffers of blt, wave-blt (at least 4), cyclic-blocks and cleared-blt; by "
    "default at most the number of iterations.",
)
@options.option(
    "--memory",
    type=options.COUNT,
    help="Choose C automatically within this many noise buffers (× model size), and show what one "
    "buffer fewer or more would change [default with --sampling auto: 15].",
)
@options.option(
    "--time-scale/--no-time-scale",
    default=None,
    help="Let C vary with time: multiply it by a diagonal matrix on either side, for a lower error "
    "at the same memory [default: on for blt, wave-blt, toeplitz, banded-toeplitz, cyclic-blocks, "
    "cleared-blt].",
)
@options.option(
    "--knots",
    type=options.Count(options.MOST_KNOTS),
    help="Interpolation points of each diagonal of the time scaling [default: 24].",
)
@options.option(
    "--workload",
    default="prefix",
    show_default=True,
    help="Workload whose error is minimized: prefix, momentum, or a .npy file with (n,) Toeplitz "
    "coefficients or an (n, n) matrix. prefix is the safe choice for any learning-rate schedule.",
)
@options.option(
    "--momentum",
    type=float,
    needs={"workload": "momentum"},
    help="Momentum of --workload momentum [default: 0.95].",
)
@options.option(
    "--cooldown", help="Learning-rate cooldown START:STOP:FINAL in steps, e.g. 500:2000:0.05."
)
@options.option(
    "--objective",
    type=click.Choice(["rmse", "max"]),
    default="rmse",
    show_default=True,
    help="Error to minimize: root mean square, or largest standard deviation of a query.",
)
@options.option(
    "--samples", type=options.COUNT, help="Frozen Monte Carlo samples [default: by strategy]."
)
@options.certify_samples
@options.certificate_kind
@options.option(
    "--optimizer",
    default="tangents",
    show_default=True,
    help="tangents (few Monte Carlo evaluations), lbfgs, or an optax optimizer: adam, sgd, ….",
)
@options.option(
    "--steps",
    type=options.COUNT,
    help="Maximum number of objective evaluations [default: by strategy].",
)
@options.seed()
@options.option("--init", type=click.Path(path_type=Path), help="Start from this factorization.")
@options.unit
@options.out(
    "Output file [default: mfopt-STRATEGY-EPOCHSxITERS-epsEPS.npz, with the form that was kept]."
)
@options.force
@options.output
def command(
    epochs: int,
    iters: int,
    epsilon: float,
    delta: float,
    strategy: str | None,
    sampling: str,
    rethrow: int | None,
    separation: int | None,
    bands: int,
    buffers: int,
    memory: int | None,
    time_scale: bool | None,
    knots: int | None,
    workload: str,
    momentum: float | None,
    cooldown: str | None,
    objective: str,
    samples: int | None,
    certify_samples: int | None,
    certificate: str,
    optimizer: str,
    steps: int | None,
    seed: int | None,
    init: Path | None,
    privacy_unit: str,
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Find the strategy matrix with the lowest error at (ε, δ), certify it, save it.

    The guarantee is for add-remove adjacency. Under balls-in-bins batching every unit is assigned
    once to one of --iters bins and takes part in that iteration of each epoch; under fresh-bins
    it is reassigned in each epoch; under b-min-sep it takes part once in --iters iterations on
    average, with at least --separation iterations between participations; under k-of-n exactly
    --epochs times in the run. σ is relative to the clip norm. Ctrl-C saves the best strategy so
    far, marked uncertified (exit code 130).

    \b
    Example:
      mfopt optimize --epochs 16 --iters 128 --eps 2
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling fresh-bins --bands 8
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling auto --memory 8
    """
    from mfopt.sampling import bin_scheme

    started = time.perf_counter()
    everywhere = sampling == "auto"
    scheme = bin_scheme(
        "balls-in-bins" if everywhere else sampling,
        epochs,
        iters,
        reassign_every=rethrow,
        separation=separation,
        bands=bands,
    )
    _check.epsilon("epsilon", epsilon)
    _check.probability("delta", delta)
    if init is not None:
        _check.file("init", init)
    given = click.get_current_context().get_parameter_source
    if scheme.most_bands and given("bands") is click.core.ParameterSource.DEFAULT:
        bands = min(bands, scheme.most_bands)  # more have no account there
    if given("buffers") is click.core.ParameterSource.DEFAULT:
        buffers = min(buffers, scheme.iterations)
    for name, value in [("bands", bands), ("buffers", buffers)]:
        _check.integer(name, value)
    forms: tuple[str, ...]  # one of which the file will hold
    if memory is not None or everywhere:
        forms = ("auto",) if everywhere else (f"memory{memory}",)
        if scheme.most_bands is not None:
            raise click.UsageError("--memory works with --sampling balls-in-bins or auto only")
        named = "--sampling auto" if everywhere else f"--memory {memory}"
        _check_chosen(named, [strategy, init, steps, samples], optimizer, objective)
        searched = False
    else:
        from mfopt.optimize import defaults

        forms = (strategy,) if strategy else defaults.kinds(scheme, epsilon, buffers)
        searched = not init  # it could begin with a file
        _check_sizes(forms)
    from mfopt.factorization import load

    def named_after(form: str) -> Path:
        return out or Path(f"mfopt-{form}-{epochs}x{iters}-eps{epsilon:g}.npz")

    for form in forms[: 1 if out else None]:
        _check_free(named_after(form), force, form if searched else None)

    from mfopt.factorization.provenance import provenance
    from mfopt.optimize import factorize, kinds, least_error
    from mfopt.optimize.autosave import BestSoFar
    from mfopt_cli import mechanisms

    settings: dict[str, Any] = {}
    if memory is not None or everywhere:
        settings = {"time_scale": _scaling("blt", time_scale, knots)}
        if memory is not None:
            settings["most" if everywhere else "memory"] = memory
    elif set(forms) <= set(kinds.names()):
        settings = {
            "buffers": buffers,
            "time_scale": _scaling(forms[0], time_scale, knots),
            "loss": objective,
            "samples": samples,
            "optimizer": optimizer,
            "steps": steps,
            "init": load(init).strategy if init else None,
        }
    elif time_scale or any(value is not None for value in (init, steps, samples, knots)):
        raise click.UsageError(
            f"--init, --steps, --samples, --time-scale and --knots have no effect with {forms[0]}"
        )
    record: dict[str, Any] = {
        "workload": mechanisms.workload(workload, scheme.iterations, momentum, cooldown),
        "privacy_unit": privacy_unit,
        "provenance": provenance(seed, mechanisms.typed()),
    }
    with Live(not quiet and not as_json, COMPILING) as live:
        listener = _with_values(live, objective)
        so_far = BestSoFar(
            named_after("-or-".join(forms)), epsilon, delta, listener=listener, **record
        )
        settings |= {"certify_samples": certify_samples, "seed": seed, "progress": so_far}
        settings |= record | {"certificate": certificate}
        if everywhere:
            found = least_error(epochs, iters, epsilon, delta, **settings)
        else:
            found = factorize(scheme, epsilon, delta, strategy=strategy, bands=bands, **settings)
    wanted = named_after(_kept(found) if len(forms) > 1 else forms[0])
    path = mechanisms.keep(found, wanted, force=force)
    so_far.discard()
    answers.say_unused({"samples": certify_samples}, found.guarantee.details.get("samples") != 0)
    seconds = time.perf_counter() - started
    if as_json:
        display.json_object({**mechanisms.summary(found), "path": str(path), "seconds": seconds})
    elif not quiet:
        _report(found, path, seconds)
    if found.guarantee.status == "certified":
        return 0 if path == wanted else 1
    if not found.provenance["interrupted"]:
        why = found.not_certified
        click.echo(
            f"mfopt: {why} C is saved and its σ is NOT CERTIFIED: `mfopt calibrate {path} "
            "--eps EPS --delta DELTA` finds one without a search for another target, or for this "
            "one with more --certify-samples.",
            err=True,
        )
        return 1
    click.echo(
        "interrupted: the best strategy so far is saved and its σ is NOT CERTIFIED. "
        f"Run `mfopt certify {path}` before training.",
        err=True,
    )
    return _signals.exit_code()


def _check_free(path: Path, force: bool, searched: str | None) -> None:
    """Refuse to overwrite a file, and say how to resume the search that left it there.

    Args:
      searched: the form of C, where the file could be begun with.
    """
    from mfopt._runtime import _files
    from mfopt.factorization import check_output

    try:
        check_output(path, force=force, name="out")
    except UsageError as problem:
        if problem.way_out != _files.EXISTS or not path.is_file():
            raise
        from mfopt.optimize import kinds

        way_out = "`force=True` replaces it, `out` names another"
        if searched in kinds.names():
            way_out += f"; `init={path}` with either resumes from its C"
        unproved = f"`mfopt certify {path}` certifies an interrupted search."
        raise _check.reject("out", str(path), problem.rule, f"{way_out}. {unproved}") from None


def _check_chosen(option: str, unused: list[Any], optimizer: str, objective: str) -> None:
    """Refuse options of a single search where the kinds themselves are searched."""
    source = click.get_current_context().get_parameter_source
    given = click.core.ParameterSource.COMMANDLINE
    named = [name for name in ("strategy", "bands", "buffers") if source(name) is given]
    if named or any(value is not None for value in unused) or objective != "rmse":
        words = ", ".join(f"--{name}" for name in named) or "the options of a single search"
        raise click.UsageError(f"{option} chooses the form of C itself: leave out {words}")
    if optimizer != "tangents":
        raise click.UsageError(f"{option} works with the default --optimizer only")


# what each size is of, among the kinds that are known here; those of a plugin may take either
_SIZED = {
    "bands": ("banded", "banded-toeplitz", "banded-sqrt", "banded-inverse-sqrt"),
    "buffers": ("blt", "wave-blt", "cyclic-blocks", "cleared-blt"),
}


def _check_sizes(forms: tuple[str, ...]) -> None:
    """Refuse a size that was given and that none of the forms has."""
    source = click.get_current_context().get_parameter_source
    known = set(forms) <= set(options.StrategyName.names)
    for name, sized in _SIZED.items():
        given = source(name) is click.core.ParameterSource.COMMANDLINE
        if given and known and not set(forms) & set(sized):
            raise click.UsageError(
                f"--{name} has no effect with {' or '.join(forms)}; remove it, or give "
                f"--strategy {', '.join(sized[:-1])} or {sized[-1]}"
            )


def _scaling(strategy: str, wanted: bool | None, knots: int | None) -> Any:
    """Freedom of the two diagonals, or False for none."""
    from mfopt.optimize import kinds
    from mfopt.optimize.time_scale import Scaling

    if wanted is None:
        wanted = kinds.find(strategy).scalable
    if not wanted and knots is not None:
        raise click.UsageError(f"--knots has no effect with {strategy} without --time-scale")
    return (Scaling() if knots is None else Scaling(knots)) if wanted else False


def _with_values(live: Live, objective: str) -> Report:
    """Progress with the best error and σ so far, where the work is a search."""
    name = {"rmse": "RMSE", "max": "max error"}[objective]

    def report(event: Progress) -> None:
        trace = getattr(event, "trace", None)
        if trace is not None and math.isfinite(trace.best_value):
            note = f"{name} {math.exp(trace.best_value):.5g}  σ {trace.best_sigma:.5g}"
            event = dataclasses.replace(event, note=note)
        live(event)

    return report


def _report(found: Any, path: Path, seconds: float) -> None:
    from mfopt_cli import mechanisms

    against = mechanisms.comparison(found, found.provenance.get("mode_norm"))
    sigma = f"{words.round_up(found.noise_multiplier, 6)}  (× clip norm, C as stored)"
    # a kind whose definition fixes its scale, or very many bins; the norm itself is a hair above
    if abs(against["mode_norm"] - 1) > 1e-6:
        at_one = words.round_up(found.noise_multiplier / against["mode_norm"], 6)
        sigma += f"; {at_one} for C normalized to sensitivity 1"
    form = words.described(found.strategy.describe())
    display.table(
        f"{form}: {found.sampling.words()}, {found.workload.kind} workload"
        if found.sampling.kind != "balls-in-bins"
        else f"{form}: {found.sampling.epochs} epochs × {found.sampling.bins} bins, "
        f"{found.workload.kind} workload",
        [
            ("noise multiplier σ", sigma),
            ("RMSE", f"{found.rmse:.4f}  (clip norms, per coordinate)"),
            ("guarantee", mechanisms.statement(found.guarantee)),
            ("without amplification", _versus(found, against, "unamplified")),
            *(
                [("DP-SGD, same batching", _versus(found, against, "dpsgd"))]
                if "dpsgd_rmse" in against
                else []
            ),
            *mechanisms.above_floor(found),
            *_forms(found),
            *_memory(found),
            *_tried(found),
            ("search", found.provenance["optimizer_status"]),
            ("saved", f"{path}  ({words.duration(seconds)})"),
        ],
    )


def _kept(found: Any) -> str:
    """The kind of its C, without the diagonals."""
    facts = found.strategy.describe()
    return str(facts.get("base", facts)["kind"])


def _forms(found: Any) -> list[tuple[str, str]]:
    """Row of the other kinds of C searched, with their error relative to the best."""
    losses = dict(found.provenance.get("forms", {}))
    if (kept := losses.pop(_kept(found), None)) is None:
        return []
    others = [
        f"{kind}: {100 * math.expm1(loss - kept):+.2f}% error" for kind, loss in losses.items()
    ]
    return [("form of C", "; ".join([f"{_kept(found)} is better", *others]))]


def _memory(found: Any) -> list[tuple[str, str]]:
    """Row of other amounts of noise memory, if tried, with their error."""
    looked_at = found.provenance.get("memory")
    if looked_at is None:
        return []
    most = looked_at["at_most"]
    errors = {int(bound): rmse for bound, rmse in looked_at["estimated_rmse"].items()}
    others = [
        f"with {bound}: {100 * (rmse / errors[most] - 1):+.2f}% error"
        for bound, rmse in sorted(errors.items())
        if bound != most
    ]
    kept = looked_at.get("kept", most)
    few = f", of which {kept} are kept" if kept < most else ""
    return [("noise memory", "; ".join([f"at most {most} noise buffers{few}", *others]))]


def _tried(found: Any) -> list[tuple[str, str]]:
    """Rows of the mechanisms tried, lowest error first."""
    tried = found.provenance.get("tried", [])
    ranked = sorted(tried, key=lambda one: one.get("estimated_rmse", math.inf))
    least = ranked[0].get("estimated_rmse", math.nan) if ranked else math.nan
    rows: list[tuple[str, str]] = []
    for one in ranked:
        size = f" ({one['size']})" if one["size"] else ""
        came = one.get("problem", "")
        if not came:
            change = 100 * (one["estimated_rmse"] / least - 1)
            count = one["memory"]
            came = (
                f"RMSE {one['estimated_rmse']:.4f} ({change:+.2f}%), "
                f"{count} array{'s' * (count != 1)} of noise memory"
            )
        name = f"{one['sampling']['kind']}, {one['strategy']}{size}"
        rows.append(("tried, estimates" if not rows else "", f"{name}: {came}"))
    rows += [("not certified", text) for text in found.provenance.get("not_certified", [])]
    return rows


def _versus(found: Any, against: dict[str, float], name: str) -> str:
    rmse, sigma = against[f"{name}_rmse"], against[f"{name}_noise_multiplier"]
    return f"RMSE {rmse:.4f} at σ = {sigma:.4f}: {words.against(found.rmse, rmse)} here"
