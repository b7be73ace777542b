"""``mfopt audit``: an empirical lower bound on ε from canaries in the real training loop."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from mfopt_cli import display, options


@click.command(cls=options.Command)
@click.argument("factorization", type=click.Path())
@options.option(
    "--config", "path", type=click.Path(), help="TOML file of the training run to audit."
)
@options.option(
    "--canaries",
    type=options.COUNT,
    default=4000,
    show_default=True,
    help="Canary users; more is tighter.",
)
@options.option("--confidence", default=0.95, show_default=True, help="That the bounds are true.")
@options.seed("for reproduction")
@options.json_flag
def command(
    factorization: str,
    path: str | None,
    canaries: int,
    confidence: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Try to refute the guarantee of FACTORIZATION by attacking the loop that trains with it.

    Canary users with worst-case gradients take part, each with probability 1/2, in a run of the
    real sampler, clipping and noise; an attacker who sees every noised mean guesses who did.
    Exit code 1 if the guesses are better than the guarantee allows.

    \b
    Examples:
      mfopt audit best.npz
      mfopt audit best.npz --config run/config.toml --canaries 20000
    """
    import mfopt
    from mfopt.errors import FailureError
    from mfopt.training import config
    from mfopt.training.audit import audit
    from mfopt.training.privacy import Account

    chosen: dict[str, Any] = {}
    if path is not None:
        settings = config.load(path, {"factorization": factorization, "sampling": ""})
        chosen = {
            name: getattr(settings, name)
            for name in ("clip_norm", "normalized", "per_layer", "truncation")
        }
        chosen["batch_size"] = settings.batch_size or None
    account = Account.of(mfopt.load(factorization))
    result = audit(account, canaries=canaries, confidence=confidence, seed=seed, **chosen)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result) | {"passed": result.passed}))
    else:
        display.table(
            f"{factorization}: audit with {result.canaries} canaries",
            [
                (
                    "claimed",
                    f"({result.epsilon_claimed:.4g}, {result.delta:.4g})-DP at noise "
                    f"multiplier {result.noise_multiplier_claimed:.6g}",
                ),
                (
                    "right guesses",
                    f"{result.accuracy:.4f}; the best attacker on the claimed "
                    f"mechanism expects {result.accuracy_claimed:.4f}",
                ),
                (
                    "epsilon at least",
                    f"{result.epsilon_lower:.4g} whatever the trainer does "
                    f"({result.correct} of {result.guesses} guesses right)",
                ),
                (
                    "",
                    f"{result.epsilon_profile:.4g} if it is this mechanism with another noise "
                    f"multiplier (at most {result.noise_multiplier_highest:.4g})",
                ),
                ("confidence", f"{result.confidence:g}"),
            ],
        )
    if not result.passed:
        raise FailureError(
            "audit failed: the trainer leaks more than the guarantee allows "
            f"(with confidence {result.confidence:g})"
        )
