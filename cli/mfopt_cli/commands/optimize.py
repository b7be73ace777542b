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
from mfopt.guarantee import questionable_delta
from mfopt.progress import Progress, Report
from mfopt_cli import answers, display, mechanisms, options
from mfopt_cli.live import COMPILING, Live
from mfopt_cli.options import COUNT, PATH, Count, option


@options.command("optimize")
@options.training_length
@options.privacy
@option(
    "--strategy",
    options.StrategyName(),
    f"Form of C: {', '.join(options.StrategyName.names)}. "
    "blt: a few buffers of memory, near the optimum [default: blt; for ε of 4 and more the better "
    "of blt and wave-blt; banded-toeplitz with fresh-bins and b-min-sep].",
    metavar="KIND",
)
@option(
    "--sampling",
    ("balls-in-bins", "fresh-bins", "b-min-sep", "auto"),
    "Sampling scheme. balls-in-bins: one random bin per unit for all epochs; fresh-bins: a "
    "new bin in each epoch (lowest error at small ε; C needs at most --iters bands); b-min-sep: "
    "independent sampling with at least --separation iterations between participations (C needs "
    "at most that many bands); auto: the scheme of the first two and the form of C within "
    "--memory with the lowest error, with a table of the candidates.",
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
    "Minimum number of iterations between two participations of a unit, for b-min-sep "
    "[default: half of --iters, or as many as --bands].",
    needs={"sampling": "b-min-sep"},
)
@option(
    "--bands",
    COUNT,
    "Number of bands of banded strategies; by default at most --iters with fresh-bins, or "
    "--separation with b-min-sep.",
    default=16,
)
@option(
    "--buffers",
    COUNT,
    "Number of buffers of blt, wave-blt (at least 4) and cleared-blt; by default "
    " at most the number of iterations.",
    default=4,
)
@option(
    "--memory",
    COUNT,
    "Choose C automatically within this many noise buffers (× model size), and show what one "
    "buffer fewer or more would change [default with --sampling auto: 15].",
)
@option(
    "--time-scale/--no-time-scale",
    None,
    "Let C vary with time: multiply it by a diagonal matrix on either side, for a lower error "
    "at the same memory [default: on for blt, wave-blt, toeplitz, banded-toeplitz, cleared-blt].",
    default=None,
)
@option(
    "--knots",
    Count(options.MOST_KNOTS),
    "Interpolation points of each diagonal of the time scaling [default: 24].",
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
    "Momentum of --workload momentum [default: 0.95].",
    needs={"workload": "momentum"},
)
@option("--cooldown", str, "Learning-rate cooldown START:STOP:FINAL in steps, e.g. 500:2000:0.05.")
@option(
    "--objective",
    ("rmse", "max"),
    "Error to minimize: root mean square, or largest standard deviation of a query.",
)
@option("--samples", COUNT, "Frozen Monte Carlo samples [default: by strategy].")
@options.certify_samples
@options.certificate_kind
@option(
    "--optimizer",
    str,
    "tangents (few Monte Carlo evaluations), lbfgs, or an optax optimizer: adam, sgd, ….",
    default="tangents",
)
@option("--steps", COUNT, "Maximum number of objective evaluations [default: by strategy].")
@options.seed()
@option("--init", PATH, "Start from this factorization.")
@options.unit
@options.out(
    "Output file [default: mfopt-STRATEGY-EPOCHSxITERS-epsEPS.npz, with the form that was kept]."
)
@options.force
@options.output
def command(asked: Any) -> int:
    """Find the strategy matrix with the lowest error at (ε, δ), certify it, save it.

    The guarantee is for add-remove adjacency. Under balls-in-bins batching every unit is assigned
    once to one of --iters bins and takes part in that iteration of each epoch; under fresh-bins
    it is reassigned in each epoch; under b-min-sep it takes part once in --iters iterations on
    average, with at least --separation iterations between participations. σ is relative to the
    clip norm. Ctrl-C saves the best strategy so far, marked uncertified (exit code 130).

    \b
    Example:
      mfopt optimize --epochs 16 --iters 128 --eps 2
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling fresh-bins --bands 8
      mfopt optimize --epochs 4 --iters 64 --eps 1 --sampling auto --memory 8
    """
    from mfopt.sampling import bin_scheme

    started, given = time.perf_counter(), vars(asked)
    everywhere = asked.sampling == "auto"
    scheme = bin_scheme(
        "balls-in-bins" if everywhere else asked.sampling,
        asked.epochs,
        asked.iters,
        reassign_every=asked.rethrow,
        separation=asked.separation,
        bands=asked.bands,
    )
    _check.epsilon("epsilon", asked.epsilon)
    _check.probability("delta", asked.delta)
    answers.say_doubt([questionable_delta(asked.delta)])
    if asked.init is not None:
        _check.file("init", asked.init)
    if scheme.most_bands and not options.typed("bands"):
        asked.bands = min(asked.bands, scheme.most_bands)  # more have no account there
    if not options.typed("buffers"):
        asked.buffers = min(asked.buffers, scheme.iterations)
    for name in ("bands", "buffers"):
        _check.integer(name, getattr(asked, name))
    forms: tuple[str, ...]  # one of which the file will hold
    if asked.memory is not None or everywhere:
        forms = ("auto",) if everywhere else (f"memory{asked.memory}",)
        if scheme.most_bands is not None:
            raise click.UsageError("--memory works with --sampling balls-in-bins or auto only")
        named = "--sampling auto" if everywhere else f"--memory {asked.memory}"
        _check_chosen(named, asked)
        searched = False
    else:
        from mfopt.optimize import defaults

        forms = (
            (asked.strategy,)
            if asked.strategy
            else defaults.kinds(scheme, asked.epsilon, asked.buffers)
        )
        searched = not asked.init  # it could begin with a file
        _check_sizes(forms)
    from mfopt.factorization import load

    def named_after(form: str) -> Path:
        return asked.out or Path(
            f"mfopt-{form}-{asked.epochs}x{asked.iters}-eps{asked.epsilon:g}.npz"
        )

    for form in forms[: 1 if asked.out else None]:
        _check_free(named_after(form), asked.force, form if searched else None)

    from mfopt.factorization.provenance import provenance
    from mfopt.optimize import factorize, kinds, least_error
    from mfopt.optimize.autosave import BestSoFar

    settings: dict[str, Any] = {}
    if asked.memory is not None or everywhere:
        settings = {"time_scale": _scaling("blt", asked.time_scale, asked.knots)}
        if asked.memory is not None:
            settings["most" if everywhere else "memory"] = asked.memory
    elif set(forms) <= set(kinds.names()):
        settings = {
            **{name: given[name] for name in ("samples", "optimizer", "steps")},
            "buffers": asked.buffers,
            "time_scale": _scaling(forms[0], asked.time_scale, asked.knots),
            "loss": asked.objective,
            "init": load(asked.init).strategy if asked.init else None,
        }
    elif asked.time_scale or _some(given, "init", "steps", "samples", "knots"):
        raise click.UsageError(
            f"--init, --steps, --samples, --time-scale and --knots have no effect with {forms[0]}"
        )
    record: dict[str, Any] = {
        "workload": mechanisms.workload(asked, scheme.iterations),
        "privacy_unit": asked.privacy_unit,
        "provenance": provenance(asked.seed, mechanisms.typed()),
    }
    with Live(not asked.quiet and not asked.as_json, COMPILING) as live:
        listener = _with_values(live, asked.objective)
        so_far = BestSoFar(
            named_after("-or-".join(forms)), asked.epsilon, asked.delta, listener=listener, **record
        )
        settings |= {name: given[name] for name in ("certify_samples", "certificate", "seed")}
        settings |= record | {"progress": so_far}
        if everywhere:
            found = least_error(asked.epochs, asked.iters, asked.epsilon, asked.delta, **settings)
        else:
            settings |= {"strategy": asked.strategy, "bands": asked.bands}
            found = factorize(scheme, asked.epsilon, asked.delta, **settings)
    wanted = named_after(_kept(found) if len(forms) > 1 else forms[0])
    path = mechanisms.keep(found, wanted, force=asked.force)
    so_far.discard()
    answers.say_unused(
        {"samples": asked.certify_samples}, found.guarantee.details.get("samples") != 0
    )
    seconds = time.perf_counter() - started
    if asked.as_json:
        display.json_object({**mechanisms.summary(found), "path": str(path), "seconds": seconds})
    elif not asked.quiet:
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

    ``searched``: the form of C, where the file could be begun with.
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


def _some(given: dict[str, Any], *names: str) -> bool:
    """Return True if any of these options has a value."""
    return any(given[name] is not None for name in names)


def _check_chosen(option: str, asked: Any) -> None:
    """Refuse options of a single search where the kinds themselves are searched."""
    named = [name for name in ("strategy", "bands", "buffers") if options.typed(name)]
    if named or _some(vars(asked), "init", "steps", "samples") or asked.objective != "rmse":
        words = ", ".join(f"--{name}" for name in named) or "the options of a single search"
        raise click.UsageError(f"{option} chooses the form of C itself: leave out {words}")
    if asked.optimizer != "tangents":
        raise click.UsageError(f"{option} works with the default --optimizer only")


# what each size is of, among the kinds that are known here; those of a plugin may take either
_SIZED = {
    "bands": ("banded", "banded-toeplitz", "banded-sqrt", "banded-inverse-sqrt"),
    "buffers": ("blt", "wave-blt", "cleared-blt"),
}


def _check_sizes(forms: tuple[str, ...]) -> None:
    """Refuse a size that was given and that none of the forms has."""
    known = set(forms) <= set(options.StrategyName.names)
    for name, sized in _SIZED.items():
        if options.typed(name) and known and not set(forms) & set(sized):
            rule = f"--{name} has no effect with {' or '.join(forms)}; remove it, or give "
            rule += f"--strategy {', '.join(sized[:-1])} or {sized[-1]}"
            raise click.UsageError(rule)


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
    # in a fixed, public order the sensitivity of C >= 0 is the largest norm of what a unit adds
    norm = found.provenance.get("mode_norm") or found.loss().sensitivity
    sigma = f"{words.round_up(found.noise_multiplier, 6)}  (× clip norm, C as stored)"
    # a kind whose definition fixes its scale, or very many bins; the norm itself is a hair above
    if abs(norm - 1) > 1e-6:
        at_one = words.round_up(found.noise_multiplier / norm, 6)
        sigma += f"; {at_one} for C normalized to sensitivity 1"
    form, scheme = words.described(found.strategy.describe()), found.sampling
    batching = scheme.words()
    if scheme.kind == "balls-in-bins":
        batching = f"{scheme.epochs} epochs × {scheme.bins} bins"
    display.table(
        f"{form}: {batching}, {found.workload.kind} workload",
        [
            ("noise multiplier σ", sigma),
            ("RMSE", f"{found.rmse:.4f}  (clip norms, per coordinate)"),
            ("guarantee", mechanisms.statement(found.guarantee)),
            *_baselines(found, norm),
            *mechanisms.above_floor(found),
            *_forms(found),
            *_memory(found),
            *_tried(found),
            ("search", found.provenance["optimizer_status"]),
            ("saved", f"{path}  ({words.duration(seconds)})"),
        ],
    )


def _baselines(found: Any, norm: float) -> list[tuple[str, str]]:
    """Rows of the same C without amplification, and of independent noise with the same batching."""
    from mfopt import query_error
    from mfopt.accounting.closed_form import gaussian
    from mfopt.accounting.monte_carlo.dominating_pair import covers
    from mfopt.accounting.monte_carlo.free import Orthogonal
    from mfopt.strategies import Identity

    def versus(rmse: float, sigma: float) -> str:
        return f"RMSE {rmse:.4f} at σ = {sigma:.4f}: {words.against(found.rmse, rmse)} here"

    target, scheme = (found.guarantee.epsilon, found.guarantee.delta), found.sampling
    plain = norm / gaussian.largest_mu(*target)
    ratio = found.rmse / found.noise_multiplier
    rows = [("without amplification", versus(plain * ratio, plain))]
    if covers(scheme):  # where σ of independent noise costs no samples
        sgd = Orthogonal(scheme.bins, float(scheme.epochs)).noise_multiplier(*target)
        rmse = float(query_error.rmse(found.workload, Identity(), found.iterations, sgd))
        rows.append(("DP-SGD, same batching", versus(rmse, sgd)))
    return rows


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
