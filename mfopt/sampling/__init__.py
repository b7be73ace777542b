"""Sampling schemes: frozen public specs of who takes part in which iteration.

The same object is given to the accountant and to the data loader, so what is proven is what
is executed. A spec holds public numbers only, never data. A unit is whatever the privacy unit
is: an example, or a user.

``scheme.sample(step, population, seed)`` gives the units of one iteration. It is a pure
function: the random numbers come from a counter-based generator keyed by ``seed`` with the step
as its counter, so a run that resumes at step t draws exactly what an unbroken run draws. The
amplified guarantees hold while the seed is secret and independent of the data.

A new scheme is a subclass of :class:`Scheme`; being defined registers it. :mod:`mfopt.testing`
checks it, and :mod:`mfopt.accounting.account` says how an accountant is given to it.
"""

from mfopt.sampling._generator import generator
from mfopt.sampling.b_min_sep import BMinSep
from mfopt.sampling.balls_in_bins import BallsInBins
from mfopt.sampling.base import (
    Adjacency,
    BinScheme,
    Scheme,
    from_description,
    parse,
    registered,
    require,
)
from mfopt.sampling.cyclic_poisson import CyclicPoisson
from mfopt.sampling.fixed_batch import FixedBatch
from mfopt.sampling.fixed_order import FixedOrder
from mfopt.sampling.fresh_bins import FreshBins
from mfopt.sampling.min_separation import MinSeparation
from mfopt.sampling.named import named_scheme
from mfopt.sampling.owners import Owners
from mfopt.sampling.poisson import Poisson
from mfopt.sampling.random_partition import RandomPartition
from mfopt.sampling.sampler import Padded, UnitSampler, Users
from mfopt.sampling.truncated_poisson import TruncatedPoisson

__all__ = [
    "Adjacency",
    "BMinSep",
    "BallsInBins",
    "BinScheme",
    "CyclicPoisson",
    "FixedBatch",
    "FixedOrder",
    "FreshBins",
    "MinSeparation",
    "Owners",
    "Padded",
    "Poisson",
    "RandomPartition",
    "Scheme",
    "TruncatedPoisson",
    "UnitSampler",
    "Users",
    "from_description",
    "generator",
    "named_scheme",
    "parse",
    "registered",
    "require",
]
