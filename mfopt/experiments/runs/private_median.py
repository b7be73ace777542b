"""A private median of users' numbers of examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mfopt._runtime import _check


def probabilities(numbers: np.ndarray, candidates: Sequence[int], epsilon: float) -> np.ndarray:
    """Chances of a median by the exponential mechanism, (..., candidates): its exact law.

    The score of a candidate g is -|#{users below g} - #{users above g}|. Adding or removing one
    user changes one of the two counts by one, so the score's sensitivity is 1, and a choice with
    probability proportional to exp(ε score / 2) is ε-DP per user, add-remove (McSherry and Talwar
    2007). Before training at (ε', δ) on the same users the whole is (ε + ε', δ)-DP.

    Args:
      numbers: one for each user, shape (..., users).
      candidates: public values to choose from.
      epsilon: ε of the choice.

    >>> probabilities(np.array([1, 2, 2, 3]), (1, 2, 3), 100.0).round(3).tolist()
    [0.0, 1.0, 0.0]
    """
    epsilon = _check.epsilon("epsilon", epsilon)
    values = np.asarray(candidates)[:, None]
    numbers = np.asarray(numbers)[..., None, :]
    score = -np.abs((numbers < values).sum(-1) - (numbers > values).sum(-1))
    weight = np.exp(0.5 * epsilon * (score - score.max(-1, keepdims=True)))
    chances: np.ndarray = weight / weight.sum(-1, keepdims=True)
    return chances
