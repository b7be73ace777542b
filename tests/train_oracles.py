"""Slow, obvious counterparts of the trainer's parts, in float64 and one record at a time."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.errors import UsageError
from mfopt.training import verification
from mfopt.training.data.store import METADATA


def verified(facts, lies):
    """What is found in a report that holds, and that does not with any of ``lies`` in it."""
    actual = verification.verify(facts)
    assert actual.holds, [check for check in actual.checks if not check.holds]
    assert not [lie for lie in lies if _believed(facts | lie)]
    return actual


def _believed(facts):
    try:
        return verification.verify(facts).holds
    except UsageError:  # no report
        return False


def json_lines(rows):
    """JSON Lines of ``rows``."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def norm_of(tree):
    """l2 norm over all leaves."""
    return np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree)))


def plus(tree, other, factor=1.0):
    """tree + factor * other, in float64."""
    return jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) + factor * np.asarray(b, np.float64), tree, other
    )


def clipped_sum(model, store, length, clip_norm):
    """(params, lists of units' records) -> sum of min(1, clip_norm / norm) times the units' means.

    None does not clip.
    """
    slope = jax.jit(jax.grad(model.loss))

    def subject(params, units):
        zero = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
        total = zero
        for records in units:
            mean = zero
            for record in records:
                tokens, mask = store.batch([record], length)
                mean = plus(mean, slope(params, model.frozen, tokens[0], mask[0]), 1 / len(records))
            norm = norm_of(mean) or 1.0
            total = plus(total, mean, 1.0 if clip_norm is None else min(1.0, clip_norm / norm))
        return total

    return subject


def dp_sgd(model, store, batches, *, length, clip_norm, noise, normalizer, rate):
    """Parameters after the given batches: a list of steps, each a list of units' record lists."""
    params, summed = model.params, clipped_sum(model, store, length, clip_norm)
    for step, batch in enumerate(batches):
        total = summed(params, batch)
        if noise is not None:
            total = plus(total, noise[step])
        params = jax.tree.map(
            lambda p, g: jnp.asarray(p - rate * g / normalizer, jnp.float32), params, total
        )
    return params


def write_store(store, folder):
    """A store in memory as a folder on disk."""
    folder.mkdir(parents=True)
    for name in ("tokens", "record_offsets", "user_offsets"):
        np.save(folder / f"{name}.npy", getattr(store, name))
    (folder / METADATA).write_text(json.dumps(store.metadata))
