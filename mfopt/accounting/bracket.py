"""Brackets of computed bounds: the reported value and a lower bound, from profiles that have both.

The width of a bracket limits the error of the reported value. A value is called exact if the
bracket is narrower than 0.1% of an ε or σ or 1% of a δ, and a bound otherwise, whatever accuracy
was asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from mfopt.accounting.profile import LowerProfile
from mfopt.errors import FailureError

_FINER = (10, 100, 1000)  # times, grids for lower ends alone
_HELPS = 0.8  # part of its width, below which a bracket by finer grids is to come
NARROW, NARROW_DELTA = 1e-3, 1e-2  # relative width up to which an answer is called exact
# by how much a σ is tried to be too small
_SHORTER = (3e-5, 1e-4, 4e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.35, 0.5, 0.75, 0.9)


@dataclasses.dataclass(frozen=True)
class Bracket:
    """The exact answer lies between ``below`` and ``above``, which is what is reported."""

    below: float
    above: float
    tolerance: float = NARROW

    @property
    def narrow(self) -> bool:
        """True if both ends agree within the tolerance."""
        return self.below >= self.above * (1 - self.tolerance)


def of_epsilon(profile: LowerProfile, epsilon: float, delta: float) -> Bracket:
    """The bracket of an ε that ``profile`` gave for ``delta``; from 0 if it has no lower bound."""
    if epsilon == 0:
        return Bracket(0.0, 0.0)

    def bracket(finer: LowerProfile) -> Bracket:
        below = known(finer.epsilon_below, delta, epsilon, nothing=0.0)
        return Bracket(min(below, epsilon), epsilon)

    return _narrowed(bracket, profile)


def of_delta(profile: LowerProfile, delta: float, epsilon: float) -> Bracket:
    """The bracket of a δ that ``profile`` gave at ``epsilon``."""
    if delta == 0:
        return Bracket(0.0, 0.0, NARROW_DELTA)

    def bracket(finer: LowerProfile) -> Bracket:
        below = math.exp(known(finer.log_delta_below, epsilon, nothing=-math.inf))
        return Bracket(min(below, delta), delta, NARROW_DELTA)

    return _narrowed(bracket, profile)


def of_sigma(
    make: Callable[[float], LowerProfile],
    sigma: float,
    epsilon: float,
    delta: float,
    finest: float = _SHORTER[0],
    loosest: float = 1.0,
) -> Bracket:
    """The bracket of a σ found for (ε, δ): the least σ is above one that is proven too small.

    Args:
      make: σ -> its profile, with lower bounds.
      sigma: the answer, safe for the target.
      epsilon, delta: the target.
      finest, loosest: least and largest share of σ by which one is tried to be too small.
    """
    if not sigma > 0:
        return Bracket(0.0, sigma)

    shares = sorted({share for share in (min(finest, _SHORTER[0]), *_SHORTER) if share <= loosest})
    best = len(shares)  # index of the least that is proved

    def bracket(like: LowerProfile) -> Bracket:
        nonlocal best

        def too_small(share: float) -> bool:
            finer: Any = make(sigma * (1 - share))
            if None not in (like.accuracy, finer.accuracy):
                finer = dataclasses.replace(finer, accuracy=like.accuracy)
            return known(finer.log_delta_below, epsilon, nothing=-math.inf) > math.log(delta)

        # each share that is tried costs a composition: on a finer grid the next smaller ones alone
        if best == len(shares):
            best = next((i for i, share in enumerate(shares) if too_small(share)), best)
        else:
            while best and too_small(shares[best - 1]):
                best -= 1
        return Bracket(sigma * (1 - shares[best]) if best < len(shares) else 0.0, sigma)

    return _narrowed(bracket, make(sigma))


def _narrowed(bracket: Callable[[LowerProfile], Bracket], profile: Any) -> Bracket:
    """The bracket by ``profile``, by finer grids while it is wide and they narrow it."""
    best = bracket(profile)
    if profile.accuracy is None:
        return best
    for finer in _FINER:
        if best.narrow or best.below == 0:
            break
        narrower = bracket(dataclasses.replace(profile, accuracy=profile.accuracy / finer))
        missing = best.above - best.below
        if narrower.below > best.below:
            best = narrower
        if best.above - best.below > _HELPS * missing:
            break
    return best


def known(ask: Callable[..., float], *arguments: Any, nothing: float) -> float:
    """A lower bound, or ``nothing`` where none is found: the upper bound holds either way."""
    try:
        return float(ask(*arguments))
    except FailureError:
        return nothing
