"""σ for a target (ε, δ), by importance sampling on frozen samples: an estimate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.protocol import FrozenEstimate, SampledLoss, loss_of
from mfopt.errors import FailureError

_PILOT = 2048
_ATTEMPTS = 6  # to place the proposal
_BLIND = 0.7  # relative standard error of δ̂ from which on nothing is read off it
_SURE = 0.1  # relative standard error of δ̂ up to which its slope is
_WEAK, _SHORT = 0.5, 0.5  # relative standard error from which on a search takes no longer steps of
# log σ: far below where δ is met no proposal may serve, and a search that jumps there is lost
_NEAR, _NUDGE = 0.1, 0.01  # of log σ: how far a proposal serves, and the step where it fails
_STRAIGHT = 5e-4  # of log σ: a Newton step whose error, about its square, is a quarter of 1e-6
_MAX_EVALUATIONS = 200
_TRUSTED = 6  # evaluations after which every other step ignores the slope
_DOMAIN = 0x63616C69  # keys of this search: an optimizer with the same seed draws others


class Calibration(NamedTuple):
    """σ with estimated δ̂(σ) <= δ in both directions; an estimate, it proves nothing.

    Attributes:
      noise_multiplier: σ, relative to the clip norm, for C as stored.
      relative_error: standard error of σ over σ, from the Monte Carlo error of δ̂.
      slope: d log δ̂ / d log σ at the solution.
      direction: the direction that needs the larger σ, "remove" or "add"; "both" where both were
        solved for without samples (C = I, or no amplification).
      samples: samples of the final estimate.
    """

    noise_multiplier: float
    relative_error: float
    slope: float
    direction: str
    samples: int


@float64
def calibrate(
    pair: DominatingPair | SampledLoss,
    epsilon: float,
    delta: float,
    *,
    samples: int = 2**16,
    seed: int | None = None,
    start: float | None = None,
    near: float | None = None,
    key: jax.Array | None = None,
) -> Calibration:
    """Smallest σ with H(P, Q) and H(Q, P) at e^ε estimated <= δ, to relative 1e-6 on its samples.

    A small sample finds σ while the shifts follow it; a fresh large one, evaluated once or twice,
    gives the result and its standard error. A last Newton step of log σ below 5e-4 is not
    evaluated: its end is a quarter of 1e-6 beyond the tangent's root.

    Args:
      pair: the mechanism, by its dominating pair or as a sampled loss.
      epsilon, delta: the target, add-remove adjacency of one unit.
      samples: of the final estimate.
      seed: pinned seed, or None for the operating system's entropy.
      start: a σ to begin the search at; any will do.
      near: a σ within some percent, from elsewhere: no small sample is then taken.
      key: randomness, in place of ``seed``.

    Raises:
      UsageError: ε or δ out of range.
      FailureError: no σ with this δ̂ was found.
    """
    epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
    _check.integer("samples", samples, at_least=64)
    loss = loss_of(pair)
    key = chunked.subkey(chunked.seed_key(seed), _DOMAIN) if key is None else key
    if near is None:
        near = rough(loss, epsilon, delta, chunked.subkey(key, 0), start)
    frozen, log_sigma, at = _placed(loss, near, epsilon, delta, samples, key)
    direction, add = "remove", frozen.evaluate_add(log_sigma)
    if add.value > math.log(delta):
        direction = "add"
        log_sigma, at = _solve(frozen.evaluate_add, log_sigma, delta, add)
    return Calibration(
        math.exp(log_sigma), at.relative_error / abs(at.slope), at.slope, direction, frozen.samples
    )


@float64
def rough(
    loss: SampledLoss, epsilon: float, delta: float, key: jax.Array, start: float | None = None
) -> float:
    """σ to about 1%: the proposal follows σ at every evaluation, so it works from anywhere.

    Args:
      loss: of the mechanism.
      epsilon, delta: the target, remove direction.
      key: randomness of the few samples that each evaluation takes.
      start: a σ to begin at; any will do.
    """

    def function(log_sigma: float) -> tuple[float, float]:
        try:
            at = loss.frozen(math.exp(log_sigma), epsilon, _PILOT, key).evaluate(log_sigma)
        except FailureError:  # beyond numerical range: far below
            return math.inf, -1.0
        if math.isnan(at.value):
            return math.inf, -1.0
        slope = at.slope
        # far above, where few samples tell, it may be an eighth of the true one, or positive: that
        # of a Gaussian tail is twice log δ or steeper
        if at.relative_error > _SURE and not slope < 2 * at.value:
            slope = min(2 * at.value, -1.0)
        off = at.value - math.log(delta)
        if at.relative_error > _WEAK:
            off = max(-_SHORT * abs(slope), min(off, _SHORT * abs(slope)))
        return off, slope

    begin = math.log(start or loss.start(epsilon, delta))
    return math.exp(decreasing_root(function, begin, tolerance=0.01, max_step=2.0))


def _placed(
    loss: SampledLoss, near: float, epsilon: float, delta: float, samples: int, key: jax.Array
) -> tuple[FrozenEstimate, float, Any]:
    """A frozen estimate whose proposal serves at its own log σ, and what it gives there.

    A proposal is fitted to a few samples: at one σ the fit may fail where at its neighbours it does
    not, and far from where it was placed it sees nothing, which looks like a δ far too small.
    """
    for attempt in range(_ATTEMPTS):
        frozen = loss.frozen(near, epsilon, samples, chunked.subkey(key, 1 + attempt))
        at = frozen.evaluate(math.log(near))
        # a Newton step says how far it is: nothing is searched where the estimate says little
        off = (at.value - math.log(delta)) / abs(at.slope)
        if not at.relative_error < _BLIND or not math.isfinite(off):
            near *= math.exp(_NUDGE)
        elif abs(off) > _NEAR and attempt < _ATTEMPTS - 1:
            near *= math.exp(max(-0.3, min(off, 0.3)))
        else:
            return frozen, *_solve(frozen.evaluate, math.log(near), delta, at)
    raise FailureError(
        f"calibration: the estimate of δ near σ = {near:.4g} is too noisy (ε = {epsilon:g}, "
        f"δ = {delta:g}). Use more samples or another seed."
    )


def _solve(
    evaluate: Callable[[float], Any], start: float, delta: float, first: Any
) -> tuple[float, Any]:
    """log σ on frozen samples whose proposal was placed near it, and what they give beside it.

    ``evaluate`` is of one direction, and ``first`` what ``start`` gives.
    """
    at = None

    def function(log_sigma: float) -> tuple[float, float]:
        nonlocal at
        at = first if at is None else evaluate(log_sigma)
        return at.value - math.log(delta), at.slope

    return decreasing_root(function, start, straight=_STRAIGHT), at


def decreasing_root(
    function: Callable[[float], tuple[float, float]],
    start: float,
    *,
    tolerance: float = 1e-6,
    max_step: float = 0.1,
    straight: float = 0.0,
) -> float:
    """x with f(x) <= 0 and a point within ``tolerance`` below it where f > 0.

    ``function`` returns (value, slope) and is decreasing; −inf is a valid value. Newton's step
    is taken while it stays inside the bracket, else the bracket is halved, or a full step taken
    towards its open side. After a few evaluations every other step is of that kind, so a wrong
    slope cannot hold up the search.

    Args:
      function, start: of x, and where to begin.
      tolerance: between f <= 0 and f > 0.
      max_step: no step is longer.
      straight: a Newton step no longer than this is the last, and its end is not evaluated: it is
        a quarter of the tolerance beyond the tangent's root, whose error is about the square of the
        step where the slope is the function's own.

    Raises:
      FailureError: the function is not a number, or has no sign change in reach.
    """
    low, high = -math.inf, math.inf
    x = start
    for count in range(_MAX_EVALUATIONS):
        value, slope = function(x)
        if math.isnan(value):
            raise FailureError(f"calibration: the function is not a number at {x}")
        if value > 0:
            low = max(low, x)
        else:
            high = min(high, x)
        if high - low <= tolerance:
            return high
        step = -value / slope if slope < 0 and math.isfinite(value) else math.copysign(1, value)
        if slope < 0 and abs(step) <= straight and low < (end := x + step + tolerance / 4) < high:
            return end
        # overshoot by a quarter of the tolerance: the last Newton steps land on both sides of the
        # root, and no further apart than the tolerance whatever is rounded
        step += math.copysign(tolerance / 4, step) if value > 0 else -tolerance / 4
        x += max(-max_step, min(max_step, step))
        if not low < x < high or (count >= _TRUSTED and count % 2 == 0):
            x = _inside(low, high, max_step)
    raise FailureError(f"calibration: no sign change found between {low} and {high}")


def _inside(low: float, high: float, step: float) -> float:
    if math.isinf(low):
        return high - step
    if math.isinf(high):
        return low + step
    return (low + high) / 2
