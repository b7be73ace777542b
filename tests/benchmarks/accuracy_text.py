"""Language models for the accuracy bench: a transformer that predicts characters, on three texts.

A model of one layer starts from weights that another text trained, which counts as public. The
privacy unit is a record: one passage of ``LENGTH`` characters. Texts are those of the running
Python: functions of its library, their docstrings, and its language reference.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
import re
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from accuracy_tasks import Task, clip

from mfopt.training.data.stdlib import docstrings_of, functions_of

LENGTH, WIDTH = 24, 16  # characters that are predicted of a record; of the model's vectors
CHARACTERS = 96  # printable ASCII and the end of a line
TRAINED, TESTED = 2048, 2048  # records
PUBLIC_STEPS, PUBLIC_BATCH, PUBLIC_RATE = 2000, 128, 3e-3
SHAPES = {
    "characters": (CHARACTERS, WIDTH),
    "places": (LENGTH, WIDTH),
    **dict.fromkeys(("query", "key", "value", "mixed"), (WIDTH, WIDTH)),
    "inner": (WIDTH, 2 * WIDTH),
    "outer": (2 * WIDTH, WIDTH),
}
SIZES = [rows * columns for rows, columns in SHAPES.values()]
GRID = {"adam": -16}


# --- text ----------------------------------------------------------------------------------------


def _of_library(part):
    """Texts of each module of the standard library that ``part`` finds in its source."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield "\n".join(part(path.read_text("utf-8")))


def _reference():
    return pydoc_data.topics.topics.values()


DOCUMENTS = {
    "code": functools.partial(_of_library, functions_of),
    "docstrings": functools.partial(_of_library, docstrings_of),
    "reference": _reference,
}
PUBLIC = {"code": "reference", "docstrings": "code", "reference": "docstrings"}


@functools.cache
def records(text):
    """(records to train (TRAINED, LENGTH + 1), to test), of different documents; characters."""
    rng = np.random.default_rng(65)
    passages = []
    for document in DOCUMENTS[text]():
        kept = re.sub(r"[^\n -~]", "?", re.sub(r"[ \t]+", " ", document)).encode("ascii")
        codes = np.maximum(np.frombuffer(kept, np.uint8).astype(np.int32) - 31, 0)
        count = len(codes) // (LENGTH + 1)
        passages.append(codes[: count * (LENGTH + 1)].reshape(count, LENGTH + 1))
    order = rng.permutation(len(passages))
    cut = len(order) * 3 // 4
    parts = (order[:cut], TRAINED), (order[cut:], TESTED)
    return tuple(
        rng.permutation(np.concatenate([passages[index] for index in chosen]))[:size]
        for chosen, size in parts
    )


# --- model ---------------------------------------------------------------------------------------


def _normalized(vectors):
    return vectors * jax.lax.rsqrt(jnp.mean(vectors**2, axis=-1, keepdims=True) + 1e-6)


def logits(parameters, characters):
    """Logits of the next character at each place, (LENGTH, CHARACTERS): parameters (P,)."""
    parts = jnp.split(parameters, np.cumsum(SIZES)[:-1])
    weights = {
        name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }
    vectors = weights["characters"][characters] + weights["places"]
    read = _normalized(vectors)
    attention = (read @ weights["query"]) @ (read @ weights["key"]).T / np.sqrt(WIDTH)
    earlier = np.tril(np.ones((LENGTH, LENGTH), bool))
    attention = jax.nn.softmax(jnp.where(earlier, attention, -1e9))
    vectors += attention @ (read @ weights["value"]) @ weights["mixed"]
    vectors += jax.nn.gelu(_normalized(vectors) @ weights["inner"]) @ weights["outer"]
    return _normalized(vectors) @ weights["characters"].T


def _loss(parameters, record):
    """Mean loss of a record's characters, and the rate of wrong ones."""
    scores, target = logits(parameters, record[:-1]), record[1:, None]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), target, axis=1)
    return losses.mean(), (scores.argmax(axis=1) != target[:, 0]).mean()


@functools.cache
def public_start(text):
    """Parameters after Adam without privacy on another text."""
    public, _ = records(PUBLIC[text])
    rng = np.random.default_rng(66)
    drawn = [
        0.1 * rng.standard_normal(shape)
        if name in ("characters", "places")
        else rng.standard_normal(shape) / np.sqrt(shape[0])
        for name, shape in SHAPES.items()
    ]
    begin = jnp.asarray(np.concatenate([part.ravel() for part in drawn]), jnp.float32)
    optimizer = optax.adam(optax.linear_schedule(PUBLIC_RATE, 0, PUBLIC_STEPS))
    rows = jnp.asarray(rng.integers(0, len(public), (PUBLIC_STEPS, PUBLIC_BATCH)))

    def mean_loss(parameters, indices):
        return jax.vmap(_loss, (None, 0))(parameters, jnp.asarray(public)[indices])[0].mean()

    def step(carry, indices):
        parameters, state = carry
        changes, state = optimizer.update(jax.grad(mean_loss)(parameters, indices), state)
        return (optax.apply_updates(parameters, changes), state), None

    (parameters, _), _ = jax.jit(lambda: jax.lax.scan(step, (begin, optimizer.init(begin)), rows))()
    return np.asarray(parameters)


def language_model(text):
    """The transformer, trained on another text before, on this one; 3,968 parameters."""
    train, test = records(text)

    def clipped_sum(parameters, indices, weights):
        batch = jnp.asarray(train)[indices]
        per_record = jax.vmap(jax.grad(lambda *given: _loss(*given)[0]), (None, 0))

        def of_lane(model):
            gradients = per_record(model, batch)
            return clip(jnp.sum(gradients**2, axis=1), weights) @ gradients

        return jax.lax.map(of_lane, parameters)

    def loss(parameters):
        def of_lane(model):
            losses, errors = jax.vmap(_loss, (None, 0))(model, jnp.asarray(test))
            return losses.mean(), errors.mean()

        return jax.lax.map(of_lane, parameters)

    return Task(TRAINED, sum(SIZES), lambda rng: public_start(text), clipped_sum, loss, GRID)


TASKS = {f"text-{text}": functools.partial(language_model, text) for text in DOCUMENTS}
