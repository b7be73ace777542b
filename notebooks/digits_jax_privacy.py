"""jax_privacy's clipping with a factorization's noise and batches, on scikit-learn's digits.

python notebooks/digits_jax_privacy.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import clipping
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mfopt
from mfopt import noise
from mfopt.noise.for_optax import add_noise


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    keys = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(keys[0], (64, 32)) / 8,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(keys[1], (32, 10)) / 6,
    }

    def logits(params, x):
        return jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).sum()

    factorization = mfopt.load(path)
    sampler = factorization.sampler(len(x), seed)
    stream = noise.from_factorization(factorization, clip_norm=1.0)
    scale = optax.scale(1 / sampler.expected_batch)
    optimizer = optax.chain(add_noise(stream, seed=seed), scale, optax.sgd(rate, momentum=0.9))
    clipped = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2)))
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for units, mask in sampler.padded(128):
        parts = [
            clipped(params, x[u], y[u], is_padding_example=~m)
            for u, m in zip(units, mask, strict=True)
        ]
        changes, state = update(jax.tree.map(lambda *leaves: sum(leaves), *parts), state, params)
        params = optax.apply_updates(params, changes)

    accuracy = float(np.mean(logits(params, test_x).argmax(1) == test_y))
    print(f"{accuracy:.1%} of held-out digits; {factorization.guarantee}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
