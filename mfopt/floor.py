"""Lower bound of the error at epochs' ends, which no C and no sampling passes.

It is known for prefix sums under schemes in which every unit takes part exactly once in each of E
epochs (:attr:`mfopt.sampling.Scheme.epoch_ends`). Let L be the E×E lower triangular matrix of ones,
σ_g the exact σ of the Gaussian mechanism at (ε, δ) and sensitivity 1, and Σ the E×E covariance of
the noise in the queries after the last step of each epoch.

**Bound.** Let a unit contribute in every step of epoch e the same unit vector v_e, chosen
beforehand, row e of V. The queries at epochs' ends follow from what is released, and whichever
steps the unit takes part in, with it they are N(LV, Σ) where they were N(0, Σ) up to what other
units add (each column of V has a draw of its own). No randomness of the sampling is left, so that
(ε, δ)-DP implies |Σ^(−1/2) L V|_F <= 1/σ_g, and by the Cauchy-Schwarz inequality of matrices

    |LV|_* <= |Σ^(1/2)|_F |Σ^(−1/2) L V|_F,    so    tr Σ >= σ_g² |LV|_*²                       (1)

with the nuclear norm. Every V of unit rows is a proof. Take V = D^(−1) (LᵀL)^(1/2) with D =
diag(√E, …, √2, 1): its rows are unit vectors, as the diagonal of LᵀL is D². With the polar
decomposition L = U (LᵀL)^(1/2) one has L V Uᵀ = L D^(−1) Lᵀ, which is positive definite, so |LV|_*
is its trace, that of D^(−1) LᵀL, Σ_{i<=E} √i:

    RMSE at epochs' ends >= σ_g (√1 + … + √E)/√E.                                              (2)

**No V proves more.** Σ = c L D^(−1) Lᵀ gives |Σ^(−1/2) L V|_F² = tr(Vᵀ D V)/c = (√1 + … + √E)/c for
each V of unit rows, so that (1) is an equality: with one step an epoch, independent noise of
variance σ_g² (√1 + … + √E)/√(E − e + 1) in epoch e attains (2).

**Adjacency.** Adding or removing a unit and taking its contributions away (zero-out) are the case
above. Replaced contributions may change sign, which doubles the difference; a group of K units that
contribute alike changes queries by K times as much. The bound grows by these factors. Its V needs
as many coordinates as there are epochs, and a guarantee holds for any number.

**Refutation.** A stated guarantee whose C and σ give less than (2) at epochs' ends is false. So is
one below what the query after epoch e shows by itself, a Gaussian release that moves by e (times
the factors above) with the standard deviation of that query.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mfopt import query_error
from mfopt.accounting.closed_form import gaussian
from mfopt.errors import FailureError
from mfopt.guarantee import Guarantee
from mfopt.sampling import Scheme
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums, Workload

_ROUNDING = 1e-9  # relative, of σ_g and the sum of roots: the bound is rounded down
_ERRORS = 1e-4  # relative, of computed row variances: a refutation allows for as much
_ESTIMATES = 0.02  # relative, of an estimated σ, which is a few thousandths off at most


class EpochEnds(NamedTuple):
    """Error of the queries at epochs' ends.

    Attributes:
      rmse: their root mean squared error per coordinate, in clip norms.
      floor: its lower bound at the same (ε, δ), in the same unit.
    """

    rmse: float
    floor: float

    @property
    def above(self) -> float:
        """Part by which the error is above the bound; a σ that is not proved may be below it."""
        return self.rmse / self.floor - 1


def lower_bound(epochs: int, guarantee: Guarantee) -> float:
    """Least RMSE at the ends of ``epochs`` epochs, per coordinate, in clip norms: (2).

    Args:
      epochs: E, in each of which every unit takes part once.
      guarantee: ε in [0, ∞), δ in (0, 1), adjacency and group size; its σ is not used.

    >>> round(lower_bound(16, Guarantee(epsilon=2.0, delta=1e-5, noise_multiplier=1.0)), 3)
    22.166
    """
    sigma = 1 / gaussian.largest_mu(guarantee.epsilon, guarantee.delta)
    factor = float(np.sum(np.sqrt(np.arange(1, epochs + 1)))) / math.sqrt(epochs)
    return (1 - _ROUNDING) * _moved(guarantee) * sigma * factor


def _moved(guarantee: Guarantee) -> int:
    """How much further a query moves than by one unit that is added."""
    return guarantee.group_size * (2 if guarantee.adjacency == "replace" else 1)


def refute(strategy: Strategy, scheme: Scheme, guarantee: Guarantee) -> None:
    """Raise where a guarantee is proven false at the cost of the error of prefix sums.

    An estimate is refuted where it is further below than estimates err. That a guarantee passes
    proves nothing.

    Args:
      strategy: C.
      scheme: who takes part when.
      guarantee: (ε, δ), and σ for C as stored.

    Raises:
      FailureError: the guarantee is false.
    """
    ends, n = scheme.epoch_ends, scheme.length
    if not len(ends):
        return
    allowed = _ESTIMATES if guarantee.status == "estimate" else _ERRORS
    variances = np.asarray(query_error.row_variances(PrefixSums(), strategy, n))[np.asarray(ends)]
    deviations = guarantee.noise_multiplier * np.sqrt(variances) * (1 + allowed)
    mu = _moved(guarantee) * float(np.max(np.arange(1, len(ends) + 1) / deviations))
    epsilon, delta = guarantee.epsilon, guarantee.delta
    said = f"({epsilon:g}, {delta:g})-DP at σ = {guarantee.noise_multiplier:.6g} is FALSE"
    attained = math.exp(gaussian.GaussianProfile(mu).log_delta_below(epsilon))
    if attained > delta:
        raise FailureError(f"{said}: at this ε a query at an epoch's end shows δ >= {attained:.3g}")
    rmse = math.sqrt(float(np.mean(deviations**2)))
    if 0 < delta < 1 and rmse < (bound := lower_bound(len(ends), guarantee)):
        raise FailureError(
            f"{said}: the error at epochs' ends is {rmse:.6g}, and no mechanism with this "
            f"guarantee has less than {bound:.6g}"
        )


def epoch_ends(
    workload: Workload, strategy: Strategy, scheme: Scheme, guarantee: Guarantee
) -> EpochEnds | None:
    """Error at epochs' ends beside its lower bound; None where no bound is known.

    That is for queries other than prefix sums, for schemes without whole epochs, and for
    statements that say nothing (infinite ε) or cannot be had by noise (δ = 0).

    Args:
      workload: A.
      strategy: C.
      scheme: who takes part when.
      guarantee: (ε, δ), and the σ of the error, for C as stored.
    """
    ends, n = scheme.epoch_ends, scheme.length
    is_finite = math.isfinite(guarantee.epsilon) and 0 < guarantee.delta < 1
    if not (len(ends) and is_finite and query_error.partial_sums(workload, n)):
        return None
    variances = np.asarray(query_error.row_variances(workload, strategy, n))[np.asarray(ends)]
    rmse = guarantee.noise_multiplier * math.sqrt(float(np.mean(variances)))
    return EpochEnds(rmse, lower_bound(len(ends), guarantee))
