"""Interface of a privacy profile: δ(ε) of one mechanism at one σ."""

from __future__ import annotations

import abc
import math
from typing import Literal

Direction = Literal["remove", "add"]


class LowerProfile:
    """Lower bounds of δ(ε) and ε(δ), which some data sets attain; by default none are known.

    Attributes:
      accuracy: relative error of ε that a grid is chosen for; None where there is no grid.
    """

    accuracy: float | None = None

    def log_delta_below(self, epsilon: float) -> float:
        """Lower bound of log δ(ε), ε >= 0."""
        return -math.inf

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        """Lower bound of the smallest ε >= 0 with δ(ε) <= ``delta``.

        Args:
          delta: δ.
          estimate: about where it is; the upper bound, where that was computed.
        """
        return 0.0


class Profile(LowerProfile, abc.ABC):
    """Upper bounds of δ(ε) in every adjacency direction asked for."""

    @abc.abstractmethod
    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε), ε >= 0, the larger of both directions unless one is named."""

    @abc.abstractmethod
    def epsilon(self, delta: float) -> float:
        """Smallest ε >= 0 with δ(ε) <= ``delta``, verified by evaluation."""
