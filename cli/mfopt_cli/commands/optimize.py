"""mfopt optimize: the main job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from mfopt_cli import display, options


@click.command(name="optimize")
@options.training_length
@options.privacy
@click.option(
    "--strategy", type=click.Choice(options.KINDS), metavar="KIND", default="blt",
    show_default=True,
    help=f"Form of C: {', '.join(options.KINDS)}. blt: a few buffers of memory, near the optimum.",
)  # fmt: skip
@click.option("--bands", type=int, default=16, show_default=True, help="Bands of banded kinds.")
@click.option("--buffers", type=int, default=4, show_default=True, help="Buffers of blt.")
@click.option(
    "--workload", default="prefix", show_default=True,
    help="prefix, momentum, or a .npy file: (n,) Toeplitz coefficients or an (n, n) matrix.",
)  # fmt: skip
@click.option("--momentum", type=float, help="Momentum of --workload momentum [default: 0.95].")
@click.option(
    "--cooldown", help="Learning-rate cooldown START:STOP:FINAL in steps, e.g. 500:2000:0.05."
)
@click.option(
    "--objective", type=click.Choice(["rmse", "max"]), default="rmse", show_default=True,
    help="Error to minimize: root mean square, or largest standard deviation of a query.",
)  # fmt: skip
@click.option("--samples", type=int, help="Frozen Monte Carlo samples [default: by strategy].")
@options.certify_samples
@click.option(
    "--optimizer", default="lbfgs", show_default=True,
    help="lbfgs, or an optax optimizer: adam, sgd, …; optax:lbfgs for optax's own L-BFGS.",
)  # fmt: skip
@click.option("--steps", type=int, help="Objective evaluations at most [default: by strategy].")
@options.seed
@click.option("--init", type=click.Path(path_type=Path), help="Start from this factorization.")
@click.option("--unit", default="example", show_default=True, help="Name of the privacy unit.")
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="Output file [default: mfopt-STRATEGY-EPOCHSxITERS-epsEPS.npz].",
)  # fmt: skip
@options.force
@options.output
def command(
    epochs: int, iters: int, epsilon: float, delta: float, strategy: str, bands: int,
    buffers: int, workload: str, momentum: float | None, cooldown: str | None, objective: str,
    samples: int | None, certify_samples: int | None, optimizer: str, steps: int | None,
    seed: int | None, init: Path | None, unit: str, out: Path | None, force: bool,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Find the strategy matrix with the least error at (ε, δ), certify it, save it.

    The guarantee is for add-remove adjacency under balls-in-bins batching: every unit is thrown
    once into one of --iters bins and takes part in that iteration of each epoch. σ is relative to
    the clip norm. Ctrl-C keeps and saves the best so far, marked uncertified.

    \b
    Example:
      mfopt optimize --epochs 16 --iters 128 --eps 2
    """
    started = time.perf_counter()
    from mfopt import _check
    from mfopt.sampling import BallsInBins

    scheme = BallsInBins(bins=iters, epochs=epochs)
    _check.positive("eps", epsilon)
    _check.probability("delta", delta)
    for name, value in [
        ("bands", bands),
        ("buffers", buffers),
    ]:
        _check.integer(name, value)
    path = out or Path(f"mfopt-{strategy}-{epochs}x{iters}-eps{epsilon:g}.npz")
    from mfopt.factorization import check_output, load

    check_output(path, force=force)

    from mfopt.optimize import factorize
    from mfopt_cli import mechanisms

    live = display.Live(not quiet and not as_json)
    settings: dict[str, Any] = {}
    if strategy in ("blt", "banded", "banded-toeplitz", "toeplitz", "dense"):
        settings = {"buffers": buffers, "loss": objective, "samples": samples,
                    "optimizer": optimizer, "steps": steps,
                    "init": load(init).strategy if init else None}  # fmt: skip
    elif init or steps or samples:
        raise click.UsageError(f"--init, --steps and --samples do nothing for {strategy}")
    live.update("starting", now=True)
    found = factorize(
        scheme, epsilon, delta, strategy=strategy, bands=bands,
        workload=mechanisms.workload(workload, scheme.iterations, momentum, cooldown),
        certify_samples=certify_samples, seed=seed, privacy_unit=unit,
        provenance=mechanisms.provenance(seed),
        on_step=_stepper(live, objective), on_stage=lambda text: live.update(text, now=True),
        **settings,
    )  # fmt: skip
    found.save(path, force=force)
    live.close()
    seconds = time.perf_counter() - started
    if as_json:
        display.json_object({**mechanisms.summary(found), "path": str(path), "seconds": seconds})
    elif not quiet:
        _report(found, path, seconds)
    elif found.guarantee.status != "certified":
        click.echo("interrupted: the saved file is NOT CERTIFIED", err=True)


def _stepper(live: display.Live, objective: str) -> Any:
    """Progress text for one evaluation, with the time left if every step allowed is taken."""
    import math

    name = {"rmse": "RMSE", "max": "max error"}[objective]

    def show(stage: str, trace: Any, steps: int) -> None:
        done = len(trace.history)
        pace = trace.history[-1][0] / done
        left = max(steps - done, 0) * pace
        value = math.exp(trace.best_value) if math.isfinite(trace.best_value) else math.nan
        live.update(
            f"{stage}: step {done}/{steps}  {name} {value:.5g}  σ {trace.best_sigma:.5g}  "
            f"at most {left:.0f} s left"
        )

    return show


def _report(found: Any, path: Path, seconds: float) -> None:
    from mfopt_cli import mechanisms

    against = mechanisms.comparison(found)
    sigma = f"{display.round_up(found.noise_multiplier, 6)}  (× clip norm, C as stored)"
    description = found.strategy.describe()
    kind = description.pop("kind")
    form = kind + "".join(f", {value} {name}" for name, value in description.items())
    display.table(
        f"{form}: {found.sampling.epochs} epochs × {found.sampling.bins} bins, "
        f"{found.workload.kind} workload",
        [
            ("noise multiplier σ", sigma),
            ("RMSE", f"{found.rmse:.4f}  (clip norms, per coordinate)"),
            ("guarantee", mechanisms.statement(found.guarantee)),
            ("without amplification", _versus(found, against, "unamplified")),
            ("DP-SGD, same batching", _versus(found, against, "dpsgd")),
            ("stopped because", found.provenance["optimizer_status"]),
            ("saved", f"{path}  ({seconds:.1f} s)"),
        ],
    )  # fmt: skip
    if found.provenance["interrupted"]:
        click.echo(
            "Interrupted: this is the best strategy so far and its σ is NOT CERTIFIED. "
            f"Run `mfopt certify {path}` before training.",
            err=True,
        )


def _versus(found: Any, against: dict[str, float], name: str) -> str:
    rmse = against[f"{name}_rmse"]
    less = round(100 * (1 - found.rmse / rmse), 1)
    words = f"{abs(less):.1f}% {'less' if less > 0 else 'more'} error here" if less else "as here"
    return f"RMSE {rmse:.4f} at σ = {against[f'{name}_noise_multiplier']:.4f}: {words}"
