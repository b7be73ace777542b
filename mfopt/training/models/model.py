"""Interface of a model for the trainer: parameters and the loss of one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from mfopt._runtime import _check
from mfopt._runtime._types import PyTree as PyTree

Loss = Callable[[PyTree, PyTree, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as a value: trainable parameters, frozen arrays and a loss of one record.

    Args:
        params: pytree of float arrays; what is trained, clipped, noised and checkpointed.
        loss: ``loss(params, frozen, tokens (L,) int32, mask (L,) bool) -> scalar``, the loss of
            one record. It must depend on that record alone (no batch statistics), must be
            differentiable in ``params``, and must be 0 with gradient 0 where ``mask`` is False
            throughout: such rows are padding.
        frozen: pytree of arrays the loss needs and training leaves alone (a LoRA base).
        vocab_size: tokens must be below it; None: unknown.
        max_length: longest record the model takes, tokens; None: any.
        logits: ``logits(params, frozen, tokens (L,)) -> (L, V)``, where the model has such.
        export: ``export(params, frozen, folder)`` writes the model alone; None: parameters are
            written as one safetensors file.

    Any model of one's own is ``Model.of(params, loss)`` with a three-argument loss:

    >>> import jax.numpy as jnp
    >>> def bigram(params, tokens, mask):
    ...     return next_token_loss(params["logits"][tokens], tokens, mask)
    >>> model = Model.of({"logits": jnp.zeros((16, 16))}, bigram)
    >>> round(float(model.loss(model.params, (), jnp.array([1, 2, 3]), jnp.ones(3, bool))), 4)
    2.7726
    """

    params: PyTree
    loss: Loss
    frozen: PyTree = ()
    vocab_size: int | None = None
    max_length: int | None = None
    logits: Callable[[PyTree, PyTree, jax.Array], jax.Array] | None = None
    export: Callable[[PyTree, PyTree, Path], None] | None = None

    @classmethod
    def of(cls, params: PyTree, loss: Callable[[PyTree, jax.Array, jax.Array], jax.Array]) -> Model:
        """A model without frozen arrays, from ``loss(params, tokens, mask) -> scalar``."""
        return cls(params, lambda params, _, tokens, mask: loss(params, tokens, mask))

    def check_fits(self, vocab_size: int, length: int) -> None:
        """Refuse data with tokens up to ``vocab_size`` - 1, or ``length``, beyond this model."""
        if self.vocab_size is not None and vocab_size > self.vocab_size:
            rule = f"the model knows {self.vocab_size} tokens"
            way_out = "Build the data with the model's own tokenizer."
            raise _check.reject("vocab_size", vocab_size, rule, way_out)
        if self.max_length is not None and length > self.max_length:
            rule = f"the model takes at most {self.max_length} tokens"
            raise _check.reject("length", length, rule)

    @property
    def num_params(self) -> int:
        """Trainable numbers."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def num_targets(mask: jax.Array) -> jax.Array:
    """Tokens that a record's loss is the mean over: all real ones but the first; (..., L) -> (...).

    Corpus loss is ``sum(loss * num_targets) / sum(num_targets)``; perplexity is its exponential.
    """
    return jnp.sum((mask[..., 1:] & mask[..., :-1]).astype(jnp.int32), axis=-1)


def next_token_loss(logits: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean negative log-likelihood (nats) of each token given those before it: scalar float32.

    ``logits`` (L, V): row i predicts token i + 1; ``tokens``: (L,) integers; ``mask``: (L,) bool,
    True on real tokens. 0 where the record has fewer than two real tokens.
    """
    # the last row predicts nothing and weighs 0: without it every logit would be copied, and the
    # gradient of each once more
    logits = logits.astype(jnp.float32)
    targets = jnp.roll(tokens, -1)
    weights = jnp.append(mask[1:] & mask[:-1], False).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1.0)
