"""Steps that several commands share: strategies by name, baselines, certified records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt._version import ADVISED


def workload(text: str, n: int, momentum: float | None, cooldown: str | None) -> Any:
    """A workload from ``--workload``, ``--momentum`` and ``--cooldown``.

    Args:
      text: "prefix", "momentum" or a ``.npy`` file.
      n: iterations.
      momentum: β; of "momentum" only.
      cooldown: START:STOP:FINAL of the learning rates.
    """
    import numpy as np

    from mfopt import workloads

    if text not in ("prefix", "momentum"):
        if cooldown is not None:
            raise _check.reject("cooldown", cooldown, "needs --workload prefix or momentum")
        if not Path(text).is_file():
            raise _check.reject(
                "workload", text, "must be prefix, momentum or the .npy file of one"
            )
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
                part = (problem.argument or "").removeprefix("cooldown ")
                rule = f"its {part} {problem.value!r} {problem.rule}"
                raise _check.reject("cooldown", cooldown, rule) from None
            raise _check.reject(
                "cooldown", cooldown, "must be START:STOP:FINAL, for example 500:2000:0.05"
            ) from None
    default = 0.95 if text == "momentum" else 0.0
    return workloads.Momentum(default if momentum is None else momentum, rates)


def typed() -> str:
    """Command line, as it was typed: what a result's record names as its maker."""
    return " ".join(["mfopt", *sys.argv[1:]])


def keep(factorization: Any, path: Path, *, force: bool) -> Path:
    """Save a finished result, elsewhere if need be; return where, and say so if it is elsewhere."""
    from mfopt.factorization import keep

    saved = keep(factorization, path, force=force)
    if saved != path:
        click.echo(
            f"mfopt: {path} could not be written (it appeared meanwhile, or the disk is full): "
            f"the result is saved as {saved}",
            err=True,
        )
    return saved


def comparison(factorization: Any, norm: float | None = None) -> dict[str, float]:
    """σ and RMSE without amplification, and of independent noise with the same batching.

    Args:
      factorization: any.
      norm: the largest norm of what a unit adds to C x, from whoever made it.
    """
    from mfopt import query_error
    from mfopt.accounting.closed_form import gaussian
    from mfopt.accounting.monte_carlo.dominating_pair import covers
    from mfopt.accounting.monte_carlo.free import Orthogonal
    from mfopt.strategies import Identity

    scheme, n = factorization.sampling, factorization.iterations
    epsilon, delta = factorization.guarantee.epsilon, factorization.guarantee.delta
    # in a fixed, public order the sensitivity of C >= 0 is the largest norm of what a unit adds
    if norm is None:
        norm = factorization.loss().sensitivity
    plain = norm / gaussian.largest_mu(epsilon, delta)
    ratio = factorization.rmse / factorization.noise_multiplier
    found = {
        "mode_norm": norm,
        "unamplified_noise_multiplier": plain,
        "unamplified_rmse": plain * ratio,
    }
    if covers(scheme):  # where σ of independent noise costs no samples
        sgd = Orthogonal(scheme.bins, float(scheme.epochs)).noise_multiplier(epsilon, delta)
        rmse = float(query_error.rmse(factorization.workload, Identity(), n, sgd))
        found |= {"dpsgd_noise_multiplier": sgd, "dpsgd_rmse": rmse}
    return found


def epoch_ends(factorization: Any) -> Any:
    """Error at epochs' ends beside its lower bound, None where there is none."""
    from mfopt import floor

    made = factorization
    return floor.epoch_ends(made.workload, made.strategy, made.sampling, made.guarantee)


def above_floor(factorization: Any) -> list[tuple[str, str]]:
    """A row of a table: how far the error at epochs' ends is above its lower bound."""
    if (found := epoch_ends(factorization)) is None:
        return []
    above = f"{100 * found.above:.1f}% above the lower bound, {found.floor:.4f}"
    return [("at epochs' ends", f"RMSE {found.rmse:.4f}: {above}")]


def summary(factorization: Any) -> dict[str, Any]:
    """JSON output of a factorization."""
    guarantee, ends = factorization.guarantee, epoch_ends(factorization)
    return {
        "rmse": factorization.rmse,
        "max_error": factorization.max_error,
        "epoch_ends": ends and ends._asdict(),
        "noise_multiplier": factorization.noise_multiplier,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "certified": guarantee.status == "certified",
        "status": guarantee.status,
        "proved_here": factorization.proved_here,
        "advisory": advisory(factorization),
        "adjacency": guarantee.adjacency,
        "privacy_unit": guarantee.privacy_unit,
        "certificate": guarantee.details.get("certificate"),
        "failure_probability": guarantee.failure_probability,
        "method": guarantee.method,
        "strategy": factorization.strategy.describe(),
        "sampling": factorization.sampling.describe(),
        "workload": factorization.workload.describe(),
        "digest": factorization.digest,
        "provenance": factorization.provenance,
    }


def proved(factorization: Any, path: Path) -> str:
    """One line: how much of the guarantee was proved on this machine."""
    from mfopt.factorization import proofs

    found = proofs.known(factorization)
    if found is None:
        return f"no: run `mfopt certify {path}`"
    if not factorization.proved_here:
        return f"not as stated; what was proved: {statement(found)} by {found.method}"
    return f"yes (that the unit is one {found.privacy_unit} is its maker's word)"


def advisory(factorization: Any) -> str | None:
    """One line where a version that could state a wrong ε made the file, and nothing proved it."""
    made_by = factorization.provenance.get("mfopt", "an unknown version")
    if factorization.proved_here or made_by not in (*ADVISED, "an unknown version"):
        return None
    return f"made by mfopt {made_by}, which could state a wrong ε: see docs/advisories.md"


def statement(guarantee: Any) -> str:
    """One line: the guarantee in words, nothing rounded towards less privacy."""
    from mfopt.words import delta, round_up

    words = {
        "certified": f"certified; Monte Carlo failure probability <= "
        f"{guarantee.failure_probability:.1e}, included in δ"
        if guarantee.failure_probability
        else "certified (deterministic, rounded up)",
        "estimate": "NOT CERTIFIED, an estimate only",
    }
    return (
        f"({round_up(guarantee.epsilon, 6)}, {delta(guarantee.delta)})-DP per "
        f"{guarantee.privacy_unit}, {guarantee.adjacency} adjacency, "
        f"{words.get(guarantee.status, guarantee.status)}"
    )
