"""Strategy matrices of 2025 and 2026 in closed form that need few noise buffers, as published.

* "normalized-sqrt": the square root with columns of norm 1 (Henzinger, Kalinin, Upadhyay 2025,
  arXiv 2509.14334, abstract).
* "lambda-cgd": C⁻¹ = I less λ of the draw before, with columns of norm 1 (Kalinin, McKenna, Pagh,
  Lampert 2026, DP-λCGD, arXiv 2601.22334, abstract). The draw before is regenerated: no buffer.
* "bifr": C⁻¹ has the first ``bands`` coefficients of (1 - x)^γ: two are those of DP-λCGD without
  its normalization, and γ = 1/2 is the banded inverse square root, which this form generalizes
  (Kalinin, Rehn, Andersson, Honkela, Lampert 2026, γ-BIFR, arXiv 2605.18379, abstract).

λ and γ are the best for the goal: of least estimated RMSE under its sampling.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy

from mfopt import query_error
from mfopt._runtime._types import JsonObject
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import calibrate
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.mechanisms import Goal, with_strategy
from mfopt.strategies import BandedInverseRoot, SquareRoot, Strategy, TimeScaled, ToeplitzStrategy
from mfopt.workloads import PrefixSums

_LEAST, _MOST, _WIDTH = 0.02, 0.999, 4e-3  # of the exponent
_SAMPLES = 2**10  # of each estimate: all use the same


def _normalized(base: ToeplitzStrategy, n: int) -> TimeScaled:
    """Strategy with the columns of the n×n ``base`` divided by their norms."""
    norms = np.sqrt(np.cumsum(np.asarray(base.toeplitz_coefs(n)) ** 2))[::-1]
    return TimeScaled(base, columns=1 / norms)


def strategy(form: str, n: int, bands: int = 2, exponent: float = 0.5) -> Strategy:
    """Strategy of a published form for n iterations.

    Args:
      form: "normalized-sqrt", "lambda-cgd" or "bifr".
      n: iterations.
      bands: of C⁻¹, for "bifr".
      exponent: λ or γ.
    """
    if form == "normalized-sqrt":
        return _normalized(SquareRoot(), n)
    if form == "lambda-cgd":
        return _normalized(BandedInverseRoot(np.array(exponent), 2), n)
    return BandedInverseRoot(np.array(exponent), bands)


@dataclasses.dataclass(frozen=True)
class PublishedCell(Cell):
    """A form of :func:`strategy` with the exponent of least RMSE for the goal."""

    name = "published"
    goal: Goal
    kind: str
    bands: int = 2

    def run(self, *needed: Result) -> Result:
        goal, n = self.goal, self.goal.iterations
        if self.kind == "normalized-sqrt":
            return with_strategy(strategy(self.kind, n))

        def log_rmse(exponent: float) -> float:
            candidate = strategy(self.kind, n, self.bands, exponent)
            loss = law(goal.bin_scheme()).loss(candidate)
            calibrated = calibrate(loss, goal.epsilon, goal.delta, samples=_SAMPLES, seed=goal.seed)
            at_one = float(query_error.rmse(PrefixSums(), candidate, n))
            return math.log(calibrated.value * at_one)

        optimum = scipy.optimize.minimize_scalar(
            log_rmse, bounds=(_LEAST, _MOST), method="bounded", options={"xatol": _WIDTH}
        )
        candidate = strategy(self.kind, n, self.bands, float(optimum.x))
        facts: JsonObject = {"exponent": float(optimum.x), "evaluations": int(optimum.nfev)}
        if self.kind == "lambda-cgd":  # as published: the draw before is made again, not kept
            facts["past"] = "regenerate"
        return with_strategy(candidate, **facts)
