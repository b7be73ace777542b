"""Assertions of the conformance checks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime._arrays import Step
from mfopt.errors import UsageError
from mfopt.strategies import Strategy

ERRORS = 5.0  # standard errors that a statistic may be off


def rule(holds: bool, broken: str) -> None:
    """Raise :class:`AssertionError` unless the rule holds; kept under ``python -O``."""
    if not holds:
        raise AssertionError(broken)


def refused(function: Callable[..., object], *arguments: object) -> bool:
    """Return True if the call raises :class:`UsageError`; other exceptions propagate."""
    try:
        function(*arguments)
    except UsageError:
        return True
    return False


def moved(strategy: Strategy) -> Callable[[Step], Strategy]:
    """Step -> the strategy moved along a random direction of its parameters."""
    leaves, structure = jax.tree.flatten(strategy)
    rng = np.random.default_rng(1)
    along = [rng.normal(size=np.shape(leaf)) * np.asarray(leaf) for leaf in leaves]

    def at_step(step: Step) -> Strategy:
        parts = [jnp.asarray(x) + step * d for x, d in zip(leaves, along, strict=True)]
        return jax.tree.unflatten(structure, parts)

    return at_step
