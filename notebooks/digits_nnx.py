"""Flax NNX and optax with a factorization's noise and batches, on scikit-learn's digits.

python notebooks/digits_nnx.py artifacts/factorizations/blt-4-8x32-eps8.npz
"""

import sys

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mfopt
from mfopt.jax import PrivateRun


def loss(model, example):
    """The loss of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(example[0]), example[1])


def main(path: str, rate: float = 0.5, seed: int | None = None) -> float:
    """Accuracy on held-out digits; ``seed`` pins the run, which then protects nothing."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), jnp.tanh, nnx.Linear(32, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.sgd(rate, momentum=0.9), wrt=nnx.Param)

    factorization = mfopt.load(path)
    pinned = seed is not None  # in tests
    run = PrivateRun(factorization, population=len(x), clip_norm=1.0, allow_uncertified=pinned)
    state = run.init(nnx.state(model, nnx.Param), seed=seed)

    @nnx.jit
    def step(model, optimizer, state, batch):
        mean, state = run.gradient(nnx.grad(loss), model, (x, y), batch, state)
        optimizer.update(model, mean)
        return state

    for batch in run.batches(state):
        state = step(model, optimizer, state, batch)

    accuracy = float((model(test_x).argmax(1) == test_y).mean())
    print(f"{accuracy:.1%} of held-out digits; {factorization.guarantee}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
