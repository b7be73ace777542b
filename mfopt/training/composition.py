"""Statement about several runs, each begun from the parameters that the one before released.

A later run may depend in any way on what an earlier one released, and a user may be in the data of
all of them: that their data has no user in common is never assumed. What was lost to a user is
then at most the sum of all ε, at the sum of all δ; less where every run is a composition of
independent rounds, which :mod:`mfopt.accounting.phases` adds up on one grid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from mfopt._runtime import _check
from mfopt.accounting import phases
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import Guarantee
from mfopt.training.privacy import Account

Run = tuple[Guarantee, Account]  # the statement about a run alone, and what it was accounted by


def composed(runs: Sequence[Run]) -> Guarantee:
    """The statement about all ``runs`` together, the last of them the one that is described.

    Raises:
        UsageError: they protect different units or adjacencies, or one only has an estimate.
    """
    last = runs[-1][0]
    for own, _ in runs:
        for name in ("privacy_unit", "adjacency"):
            if getattr(own, name) != getattr(last, name):
                rule = f"is {getattr(own, name)!r} in an earlier run, {getattr(last, name)!r} here"
                way_out = "Statements about different neighbours do not compose."
                raise _check.reject(name, getattr(last, name), rule, way_out)
        if own.status == "estimate":
            raise _check.reject("account", str(own), "is an estimate, which proves nothing")
    delta = min(1.0, _up(math.fsum(own.delta for own, _ in runs)))
    epsilon, method = _up(math.fsum(own.epsilon for own, _ in runs)), f"sum of {len(runs)} runs"
    if all(_plain(own, account) for own, account in runs):
        with contextlib.suppress(UsageError, FailureError):  # the sum holds without
            parts = [phases.Phase(each.mechanism, each.noise_multiplier) for _, each in runs]
            if all(part.rounds is not None for part in parts):
                found = phases.compose(parts, delta=delta)
                if found.status == "bound" and found.epsilon < epsilon:
                    epsilon, method = found.epsilon, f"composition of {len(runs)} runs"
    alone = [{"epsilon": own.epsilon, "delta": own.delta} for own, _ in runs]
    details = {name: value for name, value in last.details.items() if name != "bracket"}
    return dataclasses.replace(
        last,
        epsilon=epsilon,
        delta=delta,
        method=method,
        status="certified" if any(own.status == "certified" for own, _ in runs) else "bound",
        failure_probability=min(1.0, _up(math.fsum(own.failure_probability for own, _ in runs))),
        details=details | {"runs": alone},
    )


def _plain(own: Guarantee, account: Account) -> bool:
    """True if the statement is the account's own: no group, truncation or grid in it."""
    names = ("epsilon", "delta", "adjacency", "privacy_unit", "group_size")
    return all(getattr(own, name) == getattr(account.guarantee, name) for name in names)


def _up(total: float) -> float:
    return math.nextafter(total, math.inf) if total > 0 else 0.0
