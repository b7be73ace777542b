"""k of n sampling as a sampled privacy loss: b-min-sep's, with the recursion of a circle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mfopt._runtime import _sizes
from mfopt.accounting.monte_carlo import circular, circular_ceilings
from mfopt.accounting.monte_carlo.b_min_sep import SeparatedLaw, SeparatedLoss
from mfopt.accounting.monte_carlo.circular import Circular
from mfopt.accounting.monte_carlo.likelihood import SharedGaussianComponent
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.sampling import KOfN

_SAMPLES = 64  # of a chunk, at least


class KOfNLoss(SeparatedLoss):
    """k participations in n steps."""

    name = "k-of-n"
    proven = staticmethod(circular_ceilings.ceilings)

    @functools.cached_property
    def shared(self) -> SharedGaussianComponent | None:
        return circular.shared(self.likelihood)


@dataclasses.dataclass(frozen=True)
class KOfNLaw(SeparatedLaw):
    """δ̂ of k of n sampling."""

    scheme: KOfN
    covers = KOfN
    losses = KOfNLoss
    limit = (
        "k-of-n supports at most as many bands as its separation",
        "columns of two participations of a unit overlap",
    )

    def of(self, columns: Any, gram: Any) -> Circular:
        return Circular(columns, gram, self.scheme.bins, self.scheme.separation)

    def require_memory(self) -> None:
        # weights of a chunk by beginning, count and step; counts between two steps
        n, size = self.scheme.iterations, self.scheme.separation
        _sizes.require("epochs", self.scheme.epochs, lambda k: 8 * _SAMPLES * n * k * (k + 3) / 2)
        _sizes.require("separation", size, lambda s: 8 * 3.0 * n * (n / s + s))


law.register(KOfN)(KOfNLaw)
