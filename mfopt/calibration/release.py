"""A certified σ, by the release engine.

The procedure and its proof are those of :mod:`mfopt.accounting.verify`; ``mfopt account`` asks the
same engine, so one question has one answer.
"""

from __future__ import annotations

from mfopt._runtime._float64 import wide
from mfopt.accounting import Effort
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.protocol import SampledLoss, loss_of
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.verify import Engine, Verified
from mfopt.guarantee import Guarantee
from mfopt.progress import Report, silent

AS_NEEDED = Effort()


def guarantee_of(verified: Verified, seed: int | None, privacy_unit: str = "example") -> Guarantee:
    """A statement of :func:`certify` or :func:`release`, with its details as files store them.

    Args:
      verified: add-remove adjacency of one unit, both directions.
      seed: of its samples, or None for the operating system's entropy.
      privacy_unit: what one unit is.
    """
    bounds, beta = verified.bounds, verified.beta
    return Guarantee(
        verified.epsilon,
        verified.delta,
        verified.noise_multiplier,
        privacy_unit,
        method=verified.method,
        status="certified",
        failure_probability=beta,
        details={
            "remove": bounds.remove,
            "add": bounds.add,
            "beta": beta,
            **{name: bounds.numbers.get(name, 0) for name in ("samples", "add_samples", "order")},
            "attempts": verified.tests,
            "seed": seed,
            "certificate": "monte-carlo" if beta else "deterministic",
        },
    )


@wide
def certify(
    pair: DominatingPair | SampledLoss,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    *,
    effort: Effort = AS_NEEDED,
    progress: Report = silent,
) -> Verified:
    """Prove (ε, δ) for a σ that is already chosen, in up to three tests on fresh samples.

    Args:
      pair: the mechanism, by its dominating pair or as a sampled loss.
      noise_multiplier: σ, relative to the clip norm, for C as stored.
      epsilon, delta: the statement, add-remove adjacency of one unit.
      effort: iid samples for each direction (by default as many as are needed, and none where the
        statement follows without), their seed and the kind of certificate.
      progress: callback for each stage.

    Raises:
      UsageError: an argument out of range.
      FailureError: the bound at this σ is above δ: the statement is false, or true by less
        than the bound's slack (more ``samples`` shrink it).

    >>> from mfopt import sampling, strategies
    >>> from mfopt.accounting.monte_carlo import dominating_pair
    >>> pair = dominating_pair.exact(strategies.Identity(), sampling.BallsInBins(bins=8, epochs=2))
    >>> verified = certify(pair, 3.0, 2.0, 1e-5)
    >>> max(verified.bounds.both) <= 1e-5, verified.samples
    (True, 0)
    """
    model = OneUnit(loss_of(pair), effort.samples, deterministic=effort.deterministic)
    return Engine(model, effort.seed, progress).certify(noise_multiplier, epsilon, delta)


@wide
def release(
    pair: DominatingPair | SampledLoss,
    epsilon: float,
    delta: float,
    *,
    effort: Effort = AS_NEEDED,
    near: float | None = None,
    progress: Report = silent,
) -> Verified:
    """Smallest σ that this method certifies at (ε, δ), with the estimate it started from if any.

    Args:
      pair: the mechanism, by its dominating pair or as a sampled loss.
      epsilon, delta: the target, add-remove adjacency of one unit.
      effort: iid samples of the last test, for each direction; by default as many as keep the
        slack near 0.1% of σ (0.5% for a pair in pieces, with many bins), from 2^16 up to 2^18,
        and beyond while it is above 0.25%, which is enough for fresh bins, from 2^15 on;
        fewer in the direction that the other's bound covers. None are taken where the bins never
        share a coordinate (C = I). Also their seed, and the kind of certificate.
      near: σ within some percent, from whoever searched for C: the estimate begins there. What is
        certified does not depend on it.
      progress: callback for each stage.

    Raises:
      UsageError: ε or δ out of range.
      FailureError: no σ was accepted, or its bound would cost several percent, and no other holds.

    >>> from mfopt import sampling, strategies
    >>> from mfopt.accounting.monte_carlo import dominating_pair
    >>> pair = dominating_pair.exact(strategies.Identity(), sampling.BallsInBins(bins=8, epochs=2))
    >>> verified = release(pair, 2.0, 1e-5)
    >>> round(verified.noise_multiplier, 3), verified.samples
    (1.549, 0)
    """
    model = OneUnit(loss_of(pair), effort.samples, near=near, deterministic=effort.deterministic)
    return Engine(model, effort.seed, progress).noise_multiplier(epsilon, delta)
