"""One interface over all accountants: a mechanism, and σ with ε or δ, give a Guarantee.

A mechanism releases C x + σ z for a strategy C, where x sums the contributions (of norm at most
1) of the units that a sampling scheme picks in each iteration. :func:`analysis` finds what is
known about it, or refuses and names the nearest mechanism that has an analysis.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, Protocol

from mfopt import _check, sampling
from mfopt.accounting import solve, unamplified
from mfopt.accounting.chain import Chain, DeterministicUnit
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.closed_form.group import Profile
from mfopt.accounting.loss_distribution import poisson, rounds
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.accounting.monte_carlo import balls_in_bins
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.guarantee import Guarantee, Status
from mfopt.mechanism import Mechanism

# Relative width of σ: what a search returns is at most this much above the smallest σ.
SIGMA_TOLERANCE = 1e-5


class Analysis(Protocol):
    """What is known about one mechanism. All numbers are per group of ``group_size`` units."""

    @property
    def mechanism(self) -> Mechanism:
        """What is analysed."""

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        """The smallest ε at this σ and δ."""

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        """The smallest δ at this σ and ε."""

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        """The smallest σ for (ε, δ), rounded up."""


@dataclasses.dataclass(frozen=True)
class DeterministicAnalysis(abc.ABC):
    """An analysis without randomness of its own.

    Attributes:
      mechanism: what is analysed.
      method: in words short enough for a table.
      status: "exact" up to discretization, or "bound".
      details: public numbers of the analysis.
    """

    mechanism: Mechanism
    method: str
    status: Status
    details: dict[str, Any]

    @abc.abstractmethod
    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> Profile:
        """The privacy profile at this σ, to a relative accuracy of ε."""

    @abc.abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """A σ to begin a search at."""

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        delta = _check.probability("delta", delta)
        return self._guarantee(sigma, self.profile(sigma).epsilon(delta), delta)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon = _check.non_negative("epsilon", epsilon)
        return self._guarantee(sigma, epsilon, math.exp(self.profile(sigma).log_delta(epsilon)))

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)
        target = math.log(delta)

        def excess(sigma: float, accuracy: float) -> float:
            return self.profile(sigma, accuracy).log_delta(epsilon) - target

        # a coarse grid finds the neighbourhood, the fine one decides
        coarse = solve.smallest(
            functools.partial(excess, accuracy=rounds.COARSE),
            self.guess(epsilon, delta), name="noise multiplier", relative=1e-3,
        )  # fmt: skip
        sigma = solve.smallest(
            functools.partial(excess, accuracy=rounds.FINE), coarse * 0.9999,
            name="noise multiplier", relative=SIGMA_TOLERANCE, growth=1.001,
        )  # fmt: skip
        return self._guarantee(sigma, epsilon, delta)

    def _guarantee(self, sigma: float, epsilon: float, delta: float) -> Guarantee:
        mechanism = self.mechanism
        return Guarantee(
            epsilon=epsilon, delta=min(delta, 1.0), noise_multiplier=sigma,
            privacy_unit=mechanism.privacy_unit, group_size=mechanism.group_size,
            adjacency=mechanism.adjacency, method=self.method, status=self.status,
            details={
                "sampling": mechanism.sampling.describe(),
                "strategy": mechanism.strategy.describe(), **self.details,
            },
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GaussianAnalysis(DeterministicAnalysis):
    """One Gaussian release: closed form."""

    sensitivity: float = 1.0

    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> Profile:
        return gaussian.GaussianProfile(self.sensitivity / noise_multiplier)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.sensitivity / gaussian.largest_mu(epsilon, delta)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)
        sigma = self.guess(epsilon, delta)
        while self.profile(sigma).log_delta(epsilon) > math.log(delta):
            sigma *= 1 + 1e-15
        return self._guarantee(sigma, epsilon, delta)


@dataclasses.dataclass(frozen=True)
class ProfileAnalysis(DeterministicAnalysis):
    """A deterministic profile at every σ."""

    unit: DeterministicUnit | None = None

    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> Profile:
        assert self.unit is not None
        return self.unit.profile(noise_multiplier, accuracy)

    def guess(self, epsilon: float, delta: float) -> float:
        assert self.unit is not None
        return self.unit.guess(epsilon, delta)


@dataclasses.dataclass(frozen=True)
class RoundsAnalysis(DeterministicAnalysis):
    """Independent rounds with a random sensitivity: privacy loss distributions."""

    composed: poisson.Rounds | None = None

    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> RoundsProfile:
        assert self.composed is not None
        sigma = noise_multiplier / self.composed.scale
        return RoundsProfile(self.composed.mixture, self.composed.rounds, sigma, accuracy)

    def guess(self, epsilon: float, delta: float) -> float:
        assert self.composed is not None
        mixture, count = self.composed.mixture, self.composed.rounds
        return self.composed.scale * max(mixture.guess(count, epsilon, delta), 1e-3)


def analysis(
    mechanism: Mechanism,
    *,
    samples: int = balls_in_bins.SAMPLES,
    seed: int | None = None,
    certify: bool = True,
) -> Analysis:
    """What is known about the mechanism.

    The keywords matter to sampled accounts only (balls-in-bins): the number of verifying samples,
    their seed if a run is to be reproduced, and whether to verify at all (without, the numbers are
    estimates that prove nothing).

    Raises:
      UsageError: no valid analysis is known; the message names the nearest mechanism with one.
    """
    scheme = mechanism.sampling
    _check.integer("samples", samples)
    if isinstance(scheme, sampling.FixedOrder | sampling.MinSeparation):
        return _unamplified(mechanism, scheme)
    if mechanism.adjacency == "replace":
        raise _check.reject(
            "adjacency", mechanism.adjacency, f"not analysed under {scheme.kind} sampling",
            "Use 'add-remove' (a replacement is a removal, then an addition), or "
            "sampling.FixedOrder, whose account covers 'replace'.",
        )  # fmt: skip
    if isinstance(scheme, sampling.Poisson):
        return _poisson(mechanism, scheme)
    if isinstance(scheme, sampling.CyclicPoisson):
        one = _cyclic(mechanism, scheme)
        if mechanism.group_size == 1:
            return one
        unit = DeterministicUnit(one.profile, one.guess)
        chain = Chain(unit, mechanism.group_size, "cyclic Poisson sampling")
        return VerifiedAnalysis(mechanism, chain, certify=certify, seed=seed)
    if isinstance(scheme, sampling.FixedBatch):
        return _fixed_batch(mechanism, scheme)
    if isinstance(scheme, sampling.BallsInBins):
        if mechanism.group_size == 1:
            squared_norm = balls_in_bins.orthogonal_norm(mechanism)
            if squared_norm is not None:
                return _allocation(mechanism, scheme.bins, squared_norm)
        model = balls_in_bins.model(mechanism, samples)
        return VerifiedAnalysis(mechanism, model, certify=certify, seed=seed)
    raise _check.reject("sampling", scheme, "no accountant for this scheme")


def account(
    mechanism: Mechanism,
    *,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    samples: int = balls_in_bins.SAMPLES,
    seed: int | None = None,
    certify: bool = True,
) -> Guarantee:
    """The third of (σ, ε, δ) from two of them; never rounded towards less privacy.

    Args:
      mechanism: what is released and against whom it protects.
      noise_multiplier: σ, relative to the clip norm, for C as stored.
      epsilon, delta: the (ε, δ) of the statement.
      samples, seed, certify: for sampled accounts, see :func:`analysis`.

    Raises:
      UsageError: not exactly two of the three are given, one is out of range, or no analysis of
        the mechanism is known.
      FailureError: there is an analysis, but it gives no finite answer here.

    >>> from mfopt.sampling import FixedOrder
    >>> mechanism = Mechanism(FixedOrder(bins=10, epochs=1))
    >>> round(account(mechanism, noise_multiplier=1.0, delta=1e-5).epsilon, 4)
    4.3772
    """
    given = {"noise_multiplier": noise_multiplier, "epsilon": epsilon, "delta": delta}
    if sum(value is not None for value in given.values()) != 2:
        raise _check.reject(
            "noise_multiplier, epsilon, delta", tuple(given.values()), "give exactly two of three"
        )
    found = analysis(mechanism, samples=samples, seed=seed, certify=certify)
    if epsilon is None:
        assert noise_multiplier is not None and delta is not None
        return found.epsilon(noise_multiplier, delta)
    if delta is None:
        assert noise_multiplier is not None
        return found.delta(noise_multiplier, epsilon)
    return found.noise_multiplier(epsilon, delta)


def _unamplified(
    mechanism: Mechanism, scheme: sampling.FixedOrder | sampling.MinSeparation
) -> GaussianAnalysis:
    one = unamplified.sensitivity(mechanism.strategy, scheme)
    # units of a group may share their iterations; a replaced unit moves by up to twice the norm
    factor = mechanism.group_size * (2 if mechanism.adjacency == "replace" else 1)
    return GaussianAnalysis(
        mechanism,
        f"Gaussian mechanism, {one.method}",
        "exact" if one.exact else "bound",
        {"sensitivity": one.value * factor},
        one.value * factor,
    )


def _poisson(mechanism: Mechanism, scheme: sampling.Poisson) -> RoundsAnalysis:
    found = poisson.poisson(mechanism.strategy, scheme, mechanism.group_size)
    return _rounds(mechanism, "privacy loss distribution of Poisson-sampled rounds", found)


def _cyclic(mechanism: Mechanism, scheme: sampling.CyclicPoisson) -> RoundsAnalysis:
    found = poisson.cyclic_poisson(mechanism.strategy, scheme)
    return _rounds(mechanism, "privacy loss distribution of cyclic Poisson rounds", found)


def _allocation(mechanism: Mechanism, bins: int, squared_norm: float) -> ProfileAnalysis:
    return ProfileAnalysis(
        mechanism,
        "balls-in-bins with orthogonal modes, sum of lognormals",
        "exact",
        {"mode_norm": math.sqrt(squared_norm)},
        balls_in_bins.allocation(bins, squared_norm),
    )


def _fixed_batch(mechanism: Mechanism, scheme: sampling.FixedBatch) -> RoundsAnalysis:
    if mechanism.adjacency != "add-remove":
        raise _check.reject(
            "adjacency", mechanism.adjacency, "not analysed for fixed batches", "Use 'add-remove'."
        )
    found = poisson.fixed_batch(mechanism.strategy, scheme, mechanism.group_size)
    return _rounds(
        mechanism, "privacy loss distribution, hypergeometric mixture of Gaussians", found
    )


def _rounds(mechanism: Mechanism, method: str, found: poisson.Rounds) -> RoundsAnalysis:
    details = {"rounds": found.rounds, "column_norm": found.scale}
    return RoundsAnalysis(mechanism, method, "exact" if found.exact else "bound", details, found)
