"""Synthetic stores and models for the trainer's tests: small, seeded, with odd users in them."""

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.training.data import TokenStore
from mfopt.training.models import Model, next_token_loss


def synthetic_store(
    num_users=24,
    vocab_size=32,
    max_records=6,
    seed=0,
    empty_users=(),
    **metadata,
):
    """A store in memory whose text a model can learn.

    Each user walks the ring of tokens with a step size of their own (1 to 3) and 10% random jumps,
    so users differ and next-token loss can fall well below log(vocab_size). Users in
    ``empty_users`` have no record; at least one record of the store has a single token.
    """
    rng = np.random.default_rng(seed)
    users = []
    for user in range(num_users):
        count = 0 if user in empty_users else int(rng.integers(1, max_records + 1))
        step = 1 + user % 3
        records = []
        for number in range(count):
            length = 1 if (user, number) == (1, 0) else int(rng.integers(2, 21))
            jumps = rng.random(length) < 0.1
            steps = np.where(jumps, rng.integers(0, vocab_size, length), step)
            records.append((rng.integers(vocab_size) + np.cumsum(steps)) % vocab_size)
        users.append(records)
    return TokenStore.from_records(users, vocab_size=vocab_size, source="synthetic", **metadata)


def tokens_of(store, record):
    """The tokens of a record."""
    return store.tokens[store.record_offsets[record] : store.record_offsets[record + 1]]


def bigram_model():
    """A two-matrix next-token model without Flax: logits = E[token] @ D."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "embed": jax.random.normal(first, (32, 8)) / np.sqrt(8),
        "decode": jax.random.normal(second, (8, 32)) / np.sqrt(8),
    }

    def loss(params, tokens, mask):
        logits = jnp.take(params["embed"], tokens, axis=0) @ params["decode"]
        return next_token_loss(logits, tokens, mask)

    return Model.of(params, loss)


WIDTH, RANK = 64, 4


def layered_model():
    """An embedding, a matrix, an adapter and a bias."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(WIDTH), jnp.float32)

    def loss(params, tokens, mask):
        x = params["embedding"][tokens]
        x = x @ params["matrix"] + x @ params["adapter"]["a"] @ params["adapter"]["b"]
        return jnp.sum(jnp.where(mask[:, None], jnp.tanh(x + params["bias"]) ** 2, 0))

    params = {
        "adapter": {"a": normal(WIDTH, RANK), "b": normal(RANK, WIDTH)},
        "bias": normal(WIDTH),
        "embedding": normal(512, WIDTH),
        "matrix": normal(WIDTH, WIDTH),
    }
    return Model.of(params, loss)
