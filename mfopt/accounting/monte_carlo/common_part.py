"""What all modes of balls-in-bins have in common is a Gaussian release, and is paid exactly.

Let every mode have the same inner product √c·σ > 0 with some unit vector: m_k = √c·û + r_k with
r_k orthogonal to û. Then with G = c·11ᵀ + G', G' the Gram matrix of the r_k,

    (1) P = N(√c, σ²) × P',  Q = N(0, σ²) × Q',  P' and Q' the pair of G';
    (2) Y = Y₂ + Y', the first of a Gaussian release of shift μ = √c/σ, independent of the other
        under P and under Q;
    (3) H(P, Q) = E_P' δ₂(ε − Y') and H(Q, P) = E_Q' δ₂(ε + Y'), δ₂(t) = H_{e^t}(N(μ, 1), N(0, 1)),
        the same either way round.

So the estimator of :mod:`.tilted`, of the pair of G' with the payoff δ₂, bounds the whole: nothing
in its proof asks for G' >= 0. What is exact in δ₂ need not be sampled, and the ceiling loses the
peak of the hinge, which one Y in many comes near. At 16 × 128, ε = 2 the ceiling over δ falls from
44 to 16 at δ = 1e-5 and from 4,300 to 1,040 at 1e-12 (remove), from 190 to 32 in the direction of
adding at 1e-12.

The largest c with G' >= 0 (as a form) is 1/(1ᵀG⁻¹1), the squared distance of the origin from the
affine hull of the modes: with w = Lᵀα/|Lᵀα|, Gα ∝ 1, Lw = √c·1. Any smaller one will do, and a hair
less is taken, so that the mean mode of what is left is not 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy

from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.nested import Nested, less, times, transposed_times
from mfopt.accounting.monte_carlo.overlaps import Gram, TableGram

_SHARE = 0.999  # of the largest c
_WORTH = 1e-3  # of the largest squared norm: a smaller c gains nothing
_ROUNDING = 1e-9  # relative: Lw against √c·1


class CommonPart(NamedTuple):
    """A dominating pair as a Gaussian release and what is left.

    Attributes:
      shift: √c, of the release before division by σ.
      rest: the pair of G'; its entries may be negative.
    """

    shift: float
    rest: DominatingPair


def split(pair: DominatingPair) -> CommonPart | None:
    """The largest common part of a pair; None where it is too small to gain anything.

    Args:
      pair: a checked one.
    """
    gram, factor = pair.gram, pair.factor
    ones = np.ones(pair.bins)
    try:
        # what an ill-conditioned G does to it is seen below
        if isinstance(factor, Nested):
            toward = factor.solve(ones)  # Lᵀ G⁻¹ 1
        else:
            solved = scipy.linalg.cho_solve(scipy.linalg.cho_factor(np.asarray(gram)), ones)
            toward = transposed_times(factor, solved)
    except scipy.linalg.LinAlgError:
        return None
    length = float(np.linalg.norm(toward))
    if not 0 < length < math.inf:
        return None
    toward /= length
    common = times(factor, toward)
    root = float(np.mean(common))
    largest = float(np.max(np.asarray(gram).diagonal()))
    even = float(np.max(np.abs(common - root))) <= _ROUNDING * root
    if not (even and root**2 >= _WORTH * largest):
        return None
    squared = _SHARE * root**2
    kept = less(factor, (1 - math.sqrt(1 - _SHARE)) * common, toward)
    if isinstance(factor, Nested):
        left: Gram = TableGram(jnp.asarray(gram), squared)
    else:
        left = np.asarray(gram) - squared
    return CommonPart(math.sqrt(squared), DominatingPair(left, kept))
