"""Estimate, verify, release: a rigorous (ε, δ) statement.

Wang, Mahloujifar, Wu, Jia, Mittal 2023, in the form of Choquette-Choo et al. 2024 (Algorithm 1).
The accountant's randomness is independent of the data, so a mechanism that is released only
after a test that errs with probability β is (ε, bound + β)-DP. σ is fixed first; fresh iid
samples then bound H(P, Q) and H(Q, P), each at failure probability β/2; σ is accepted if

    max(bound) + (sum of β over all attempts so far) <= δ,

and inflated otherwise. Where the modes do not overlap (C = I) no sample is needed: see
:mod:`mfopt.calibration.orthogonal`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from mfopt import _check
from mfopt._float64 import float64
from mfopt.accounting import verify
from mfopt.accounting.monte_carlo import _chunks, dominating_pair, frozen, tilted
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.calibration import orthogonal
from mfopt.calibration.balls_in_bins import Calibration, calibrate
from mfopt.errors import FailureError
from mfopt.guarantee import Guarantee
from mfopt.progress import Progress, Report, silent

SAMPLES = 2**18  # of a certificate, at least
CALIBRATE_SAMPLES = 2**15  # of the estimate that a certificate starts from
MOST_WORK = 2**31  # samples times bins, at most, that are taken without being asked for
_WORTH = 0.0025  # more samples are taken while the bound's slack costs a larger part of σ
_WORTH_DELTA = 0.03  # or, where σ is given, of δ
ATTEMPTS = 8
_BETA_SHARE = 1 / 100  # β = δ/100 for each attempt
ROUNDING_SIGMA = 2.0**-40  # relative: σ is nudged up so that no later rounding can lower it


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Proof record of (ε, δ)-DP under add-remove adjacency of one unit, both directions.

    Attributes:
      epsilon, delta: the certified statement.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      remove, add: upper bounds on H_{e^ε}(P, Q) and H_{e^ε}(Q, P).
      beta: failure probability over the accountant's randomness of all attempts together; it
        is already counted inside ``delta``.
      samples, order: sample count and Rényi order s of the accepted attempt (remove direction);
        0 where the bounds hold with certainty, without samples.
      add_samples: samples of the add direction; 0 where its closed-form ceiling was enough.
      attempts: how many σ were tried, each charged its share of β.
      seed: pinned seed, or None for the operating system's entropy.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    remove: float
    add: float
    beta: float
    samples: int
    add_samples: int
    order: int
    attempts: int
    seed: int | None

    def guarantee(self, privacy_unit: str = "example") -> Guarantee:
        """The statement as a :class:`Guarantee`."""
        return Guarantee(
            epsilon=self.epsilon, delta=self.delta, noise_multiplier=self.noise_multiplier,
            privacy_unit=privacy_unit, adjacency="add-remove",
            method="balls-in-bins Monte Carlo, Rényi-tilted, estimate-verify-release"
            if self.samples
            else "balls-in-bins, orthogonal modes: convolution, rounded up",
            status="certified", failure_probability=self.beta,
            details={k: v for k, v in dataclasses.asdict(self).items()
                     if k not in ("epsilon", "delta", "noise_multiplier")},
        )  # fmt: skip


@float64
def certify(
    pair: DominatingPair,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    *,
    samples: int | None = None,
    seed: int | None = None,
) -> Certificate:
    """Prove (ε, δ) for a σ that is already chosen, in one attempt.

    Orthogonal modes (C = I) need no samples, unless ``samples`` are asked for.

    Raises:
      FailureError: the bound at this σ is above δ: the statement is false, or true by less
        than the bound's slack (more ``samples`` shrink it).
    """
    target = _Target(pair, epsilon, delta, samples, seed)
    if target.squared_norm is not None:
        attempt = target.without_samples(target.squared_norm, noise_multiplier)
    else:
        order, _ = target.plan(noise_multiplier, lambda ratio: ratio - 1 <= _WORTH_DELTA)
        attempt = target.attempt(noise_multiplier, 1, order)
    if not attempt.accepted:
        raise FailureError(
            f"not certified: at noise multiplier {noise_multiplier:.6g} and ε = {epsilon:g} the "
            f"upper bound on δ is {attempt.total:.4g}, above {delta:g}. "
            "Ask for a larger δ or ε, or more certify samples."
        )
    return attempt.certificate


@float64
def release(
    pair: DominatingPair,
    epsilon: float,
    delta: float,
    *,
    samples: int | None = None,
    calibrate_samples: int = CALIBRATE_SAMPLES,
    seed: int | None = None,
    start: float | None = None,
    progress: Report = silent,
) -> tuple[Certificate, Calibration]:
    """Smallest σ that this method certifies at (ε, δ), with the estimate it started from.

    ``samples`` are taken for each attempt's remove direction, half as many for add; by default
    as many as keep the slack within 0.25% of σ, from 2^18 up to 2^31/bins, and none where the
    modes are orthogonal (C = I).

    Raises:
      UsageError: ε or δ out of range.
      FailureError: no σ was accepted within the allowed attempts.
    """
    target = _Target(pair, epsilon, delta, samples, seed)
    if target.squared_norm is not None:
        progress(Progress("solving for σ"))
        sigma = orthogonal.noise_multiplier(pair.bins, target.squared_norm, epsilon, delta)
        attempt = target.without_samples(target.squared_norm, sigma * (1 + ROUNDING_SIGMA))
        if attempt.accepted:
            return attempt.certificate, Calibration(sigma, 0.0, -math.inf, "both", 0)
    progress(Progress("calibrating σ on fresh samples"))
    estimate = calibrate(
        pair, epsilon, delta, samples=calibrate_samples, key=target.key(0), start=start
    )
    # The pilot predicts bound/mean. σ is inflated by what the bound and β will cost, plus standard
    # errors of the estimate of δ and of the certificate's own mean; a failed attempt adds more.
    slope = abs(estimate.slope)
    order, ratio = target.plan(
        estimate.noise_multiplier, lambda ratio: math.log(ratio) / slope <= _WORTH
    )
    if not (math.isfinite(ratio) and math.isfinite(estimate.relative_error)):
        raise FailureError(
            f"not certified: no sample came near ε = {epsilon:g} at noise multiplier "
            f"{estimate.noise_multiplier:.6g}. Use more certify samples, or a larger δ."
        )
    spread = math.hypot(
        estimate.relative_error * slope, (ratio - 1) / math.sqrt(2 * math.log(2 / target.beta))
    )
    margin = 0.0
    for number in range(1, ATTEMPTS + 1):
        cost = math.log(ratio) - math.log1p(-number * _BETA_SHARE)
        margin = (cost + 2 * number * spread) / slope
        sigma = estimate.noise_multiplier * math.exp(min(margin, 50)) * (1 + ROUNDING_SIGMA)
        progress(Progress("certifying", note=f"σ = {sigma:.6g}, attempt {number}"))
        attempt = target.attempt(sigma, number, order)
        if attempt.accepted:
            return attempt.certificate, estimate
    raise FailureError(
        f"not certified: {ATTEMPTS} values of σ up to {1 + margin:.3f} times the estimate "
        f"{estimate.noise_multiplier:.6g} were refused. Use more certify samples."
    )


@float64
def warm_up(bins: int) -> None:
    """Compile what :func:`release` will need for so many bins, beyond what the optimizer uses.

    Run in a thread beside the optimizer, this hides seconds of compilation.
    """
    pair = DominatingPair(np.eye(bins), np.eye(bins))
    tilted.warm_up(pair)
    frozen.warm_up(pair, CALIBRATE_SAMPLES)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    accepted: bool
    total: float
    certificate: Certificate


class _Target:
    """One (ε, δ) to prove: holds the keys, so that no two attempts share a sample."""

    def __init__(
        self,
        pair: DominatingPair,
        epsilon: float,
        delta: float,
        samples: int | None,
        seed: int | None,
    ) -> None:
        self.pair = dominating_pair.check(pair)
        self.epsilon = _check.epsilon("epsilon", epsilon)
        self.delta = _check.probability("delta", delta)
        self.given = samples is not None
        # of orthogonal modes, which need no samples unless they are asked for
        self.squared_norm = None if self.given else dominating_pair.orthogonal_norm(pair)
        self.samples = _check.integer(
            "certify samples", SAMPLES if samples is None else samples, at_least=256
        )
        self.seed = seed
        self.beta = self.delta * _BETA_SHARE
        self._root = _chunks.seed_key(seed)

    def key(self, *path: int) -> jax.Array:
        return _chunks.subkey(self._root, *path)

    def plan(self, sigma: float, good: Callable[[float], bool]) -> tuple[int, float]:
        """Order and expected ratio of bound to δ; takes more samples until the ratio is good."""
        while True:
            order, ratio = tilted.choose_order(
                self.pair, sigma, self.epsilon, samples=self.samples, beta=self.beta / 2,
                key=self.key(1), mean=self.delta,
            )  # fmt: skip
            if self.given or 2 * self.samples * self.pair.bins > MOST_WORK or good(ratio):
                return order, ratio
            self.samples *= 2

    def without_samples(self, squared: float, sigma: float) -> _Attempt:
        logs = orthogonal.log_delta(self.pair.bins, squared, sigma, self.epsilon)
        remove, add = bounds = tuple(math.exp(value) for value in logs)
        certificate = Certificate(
            self.epsilon, self.delta, float(sigma), remove, add, 0.0, 0, 0, 0, 1, self.seed
        )
        accepted = verify.accepts(bounds, 0.0, self.delta)
        return _Attempt(accepted, verify.largest(bounds), certificate)

    def attempt(self, sigma: float, number: int, order: int) -> _Attempt:
        remove = tilted.remove_bound(
            self.pair, sigma, self.epsilon, order=order, samples=self.samples,
            beta=self.beta / 2, key=self.key(2, number),
        )  # fmt: skip
        add = tilted.add_bound(
            self.pair, sigma, self.epsilon, samples=self.samples // 2, beta=self.beta / 2,
            negligible=self.delta / 2, key=self.key(3, number),
        )  # fmt: skip
        spent = number * self.beta
        bounds = (remove.value, add.value)
        certificate = Certificate(
            self.epsilon, self.delta, float(sigma), remove.value, add.value, spent,
            remove.samples, add.samples, order, number, self.seed,
        )  # fmt: skip
        accepted = verify.accepts(bounds, spent, self.delta)
        return _Attempt(accepted, verify.largest(bounds) + spent, certificate)
