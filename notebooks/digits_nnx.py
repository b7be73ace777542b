"""Flax NNX and optax with a factorization's noise and batches, on scikit-learn's digits.

python notebooks/digits_nnx.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mfopt
from mfopt import noise
from mfopt.noise.for_optax import add_noise
from mfopt.training.clipping import Clipping


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), jnp.tanh, nnx.Linear(32, 10, rngs=rngs))

    factorization = mfopt.load(path)
    sampler = factorization.sampler(len(x), seed)
    stream = noise.from_factorization(factorization, clip_norm=1.0)
    scale = optax.scale(1 / sampler.expected_batch)
    steps = optax.chain(add_noise(stream, seed=seed), scale, optax.sgd(rate, momentum=0.9))
    optimizer = nnx.Optimizer(model, steps, wrt=nnx.Param)
    clip = Clipping(clip_norm=1.0)

    @nnx.jit
    def clipped_sum(model, x, y, mask):
        graph, params = nnx.split(model)

        def loss(params, x, y):
            logits = nnx.merge(graph, params)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y)

        each = jax.vmap(lambda x, y: clip(jax.grad(loss)(params, x, y)).gradient)(x, y)
        return jax.tree.map(lambda g: jnp.tensordot(mask.astype(g.dtype), g, 1), each)

    for units, mask in sampler.padded(128):
        parts = [clipped_sum(model, x[u], y[u], m) for u, m in zip(units, mask, strict=True)]
        optimizer.update(model, jax.tree.map(lambda *leaves: sum(leaves), *parts))

    accuracy = float((model(test_x).argmax(1) == test_y).mean())
    print(f"{accuracy:.1%} of held-out digits; {factorization.guarantee}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
