"""Whether a run can still learn: finite parameters, and a finite loss on a public row.

Both are post-processing of what was released, so that a run which stops for them tells nothing more
about the data. (The loss of a private batch would.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.training.models import Model

PyTree = Any


class Health:
    """The compiled check of a model's parameters.

    Args:
        model: gives the loss; its parameters are not used.
        frozen: the model's frozen arrays, placed where the run has them.
        length: tokens of the public row, which counts through the vocabulary.
    """

    def __init__(self, model: Model, frozen: PyTree, length: int) -> None:
        self._frozen = frozen
        tokens = np.arange(length, dtype=np.int32) % (model.vocab_size or 2)

        def sound(params: PyTree, frozen: PyTree) -> jax.Array:
            finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]
            loss = model.loss(params, frozen, jnp.asarray(tokens), jnp.ones(length, bool))
            return jnp.all(jnp.stack([*finite, jnp.isfinite(loss)]))

        self._sound = jax.jit(sound)

    def __call__(self, params: PyTree) -> bool:
        """Whether all of ``params`` and the loss with them are finite."""
        return bool(self._sound(params, self._frozen))
