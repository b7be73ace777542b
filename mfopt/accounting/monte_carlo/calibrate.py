"""σ for a target (ε, δ), by the certificate's own proposals on fixed samples: an estimate."""

from __future__ import annotations

from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt.accounting.model import Estimate
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.protocol import SampledLoss, loss_of
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.errors import FailureError

_BLIND = 0.7  # relative standard error of δ̂ from which on nothing is read off it
_DOMAIN = 0x63616C69  # keys of this search: an optimizer with the same seed draws others


@float64
def calibrate(
    pair: DominatingPair | SampledLoss,
    epsilon: float,
    delta: float,
    *,
    samples: int = 2**16,
    seed: int | None = None,
    near: float | None = None,
) -> Estimate:
    """Smallest σ with H(P, Q) and H(Q, P) at e^ε estimated <= δ, well within its standard error.

    A small sample finds σ while its proposals follow it, a quarter of the samples the slope of log
    δ̂; all samples, evaluated once, give the result and its standard error.

    Args:
      pair: the mechanism, by its dominating pair or as a sampled loss.
      epsilon, delta: the target, add-remove adjacency of one unit.
      samples: of the final estimate.
      seed: pinned seed, or None for the operating system's entropy.
      near: a σ within some percent, from elsewhere: no small sample is then taken.

    Raises:
      UsageError: ε or δ out of range.
      FailureError: no σ with this δ̂ was found.
    """
    epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
    _check.integer("samples", samples, at_least=64)
    model = OneUnit(loss_of(pair), calibrate_samples=samples, near=near)
    key = chunked.subkey(chunked.seed_key(seed), _DOMAIN)
    estimate = model.find_noise_multiplier(epsilon, delta, key)
    if not 0 < estimate.error * -estimate.slope < _BLIND:
        raise FailureError(
            f"calibration: the estimate of δ near σ = {estimate.value:.4g} is too noisy "
            f"(ε = {epsilon:g}, δ = {delta:g}). Use more samples or another seed."
        )
    return estimate
