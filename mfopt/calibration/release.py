"""A certified σ: the release engine's statement as a certificate.

The procedure and its proof are those of :mod:`mfopt.accounting.verify`; ``mfopt account`` asks the
same engine, so one question has one answer.
"""

from __future__ import annotations

import dataclasses
import math

from mfopt._runtime._float64 import wide
from mfopt.accounting import Effort
from mfopt.accounting.monte_carlo.calibrate import Calibration
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.protocol import SampledLoss, loss_of
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.verify import Engine, Verified
from mfopt.guarantee import Guarantee
from mfopt.progress import Report, silent

AS_NEEDED = Effort()


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Proof record of (ε, δ)-DP under add-remove adjacency of one unit, both directions.

    Attributes:
      epsilon, delta: the certified statement.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      remove, add: upper bounds on H_{e^ε}(P, Q) and H_{e^ε}(Q, P).
      beta: failure probability over the accountant's randomness; it is already counted inside
        ``delta``. 0 where the bounds hold with certainty.
      samples, order: sample count and order of the accepted test (remove direction); 0 where no
        samples were needed.
      add_samples: samples of the add direction; 0 where its closed-form ceiling was enough.
      attempts: how many tests were made, the accepted one included.
      seed: pinned seed, or None for the operating system's entropy.
      method: the analysis, in words short enough for a table.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    remove: float
    add: float
    beta: float
    samples: int
    add_samples: int
    order: float
    attempts: int
    seed: int | None
    method: str

    def guarantee(self, privacy_unit: str = "example") -> Guarantee:
        """The statement as a :class:`Guarantee`."""
        return Guarantee(
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            privacy_unit=privacy_unit,
            adjacency="add-remove",
            method=self.method,
            status="certified",
            failure_probability=self.beta,
            details={
                k: v
                for k, v in dataclasses.asdict(self).items()
                if k not in ("epsilon", "delta", "noise_multiplier", "method")
            }
            | {"certificate": "monte-carlo" if self.beta else "deterministic"},
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
) -> Certificate:
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
    >>> found = certify(pair, 3.0, 2.0, 1e-5)
    >>> max(found.remove, found.add) <= 1e-5, found.samples
    (True, 0)
    """
    model = OneUnit(loss_of(pair), effort.samples, deterministic=effort.deterministic)
    engine = Engine(model, effort.seed, progress)
    return _certificate(engine.certify(noise_multiplier, epsilon, delta), effort.seed)


@wide
def release(
    pair: DominatingPair | SampledLoss,
    epsilon: float,
    delta: float,
    *,
    effort: Effort = AS_NEEDED,
    near: float | None = None,
    progress: Report = silent,
) -> tuple[Certificate, Calibration]:
    """Smallest σ that this method certifies at (ε, δ), with the estimate it started from.

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
    >>> certificate, estimate = release(pair, 2.0, 1e-5)
    >>> round(certificate.noise_multiplier, 3), certificate.samples
    (1.549, 0)
    """
    model = OneUnit(loss_of(pair), effort.samples, near=near, deterministic=effort.deterministic)
    verified = Engine(model, effort.seed, progress).noise_multiplier(epsilon, delta)
    calibration = Calibration(verified.noise_multiplier, 0.0, -math.inf, "both", 0)
    if verified.estimate is not None:
        calibration = Calibration.of_estimate(verified.estimate)
    return _certificate(verified, effort.seed), calibration


def _certificate(verified: Verified, seed: int | None) -> Certificate:
    numbers = verified.bounds.numbers
    return Certificate(
        verified.epsilon,
        verified.delta,
        verified.noise_multiplier,
        verified.bounds.remove,
        verified.bounds.add,
        verified.beta,
        numbers.get("samples", 0),
        numbers.get("add_samples", 0),
        numbers.get("order", 0),
        verified.tests,
        seed,
        verified.method,
    )
