"""The record of an optimized mechanism, without its files."""

from __future__ import annotations

import dataclasses

import numpy as np

from mfopt import query_error
from mfopt._runtime import _check
from mfopt.accounting.account import supporting
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.accounting.monte_carlo.protocol import SampledLoss, law
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.sampling import Scheme, UnitSampler
from mfopt.strategies import Strategy
from mfopt.workloads import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """Fields and numbers of a factorization: see :class:`mfopt.Factorization`."""

    strategy: Strategy
    noise_multiplier: float
    sampling: Scheme
    workload: Workload
    guarantee: Guarantee
    history: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3)))
    provenance: dict[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sigma = _check.positive("noise_multiplier", self.noise_multiplier)
        if sigma != self.guarantee.noise_multiplier:
            rule = f"differs from the guarantee's {self.guarantee.noise_multiplier!r}"
            raise _check.reject("noise_multiplier", sigma, rule)
        supporting(self.mechanism)

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism that the guarantee is about."""
        stated = self.guarantee
        return Mechanism(
            self.sampling, self.strategy, stated.group_size, stated.privacy_unit, stated.adjacency
        )

    @property
    def not_certified(self) -> str:
        """Reason why the last certificate that was tried failed; empty where none did."""
        reasons = self.provenance.get("not_certified")
        return str(reasons[-1]) if isinstance(reasons, list) and reasons else ""

    @property
    def iterations(self) -> int:
        """Training iterations n that the guarantee covers; a run may stop earlier, never later."""
        return self.sampling.length

    @property
    def row_variances(self) -> np.ndarray:
        """Error variance of each query at σ = 1, shape (n,)."""
        return np.asarray(query_error.row_variances(self.workload, self.strategy, self.iterations))

    @property
    def rmse(self) -> float:
        """Root mean squared error per coordinate, in clip norms."""
        return float(self.noise_multiplier * np.sqrt(np.mean(self.row_variances)))

    @property
    def max_error(self) -> float:
        """Largest standard deviation of any query, in clip norms."""
        return float(self.noise_multiplier * np.sqrt(np.max(self.row_variances)))

    @property
    def digest(self) -> str:
        """Digest of C, σ and the sampling: two files with equal digests give the same mechanism."""
        return self.mechanism.digest(self.noise_multiplier)

    def sampler(self, population: int, seed: int | None = None) -> UnitSampler:
        """Sampler of the batches that the guarantee covers, for each of the n iterations.

        Units are numbered: under a fixed order a unit that leaves would move all after it, and what
        a run by number protects is a unit's data (zero-out), whatever the account was for.

        Args:
          population: number of units in the data set, public.
          seed: pins the batches, for experiments only; the default is a secret from the operating
            system.

        Raises:
          UsageError: the scheme has nothing to draw, or no guarantee is known for a run of it.
        """
        sampler = UnitSampler(self.sampling, population, seed)
        self.sampling.executed_adjacency(self.guarantee.adjacency)
        return sampler

    def dominating_pair(self) -> dominating_pair.DominatingPair:
        """The pair whose hockey-stick divergences the guarantee bounds, under balls-in-bins."""
        return dominating_pair.exact(self.strategy, self.sampling)

    def loss(self) -> SampledLoss:
        """The privacy loss that the guarantee is about, under a scheme that has a sampled one.

        Raises:
          UsageError: the scheme's accounts are computed without samples.
        """
        return law(self.sampling).loss(self.strategy)
