"""Privacy loss distributions: a discrete pair that dominates, its composition, its schemes.

:mod:`.distribution` discretizes one round, :mod:`.convolution` composes rounds, :mod:`.mixture` and
:mod:`.poisson` say what a round of a sampling scheme is, :mod:`.rounds` chooses the grid, and
:mod:`.allocation` does balls-in-bins with orthogonal modes.
"""

from mfopt.accounting.loss_distribution.convolution import Composition
from mfopt.accounting.loss_distribution.distribution import LossDistribution, from_atoms

__all__ = ["Composition", "LossDistribution", "from_atoms"]
