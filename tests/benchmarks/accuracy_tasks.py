"""Tasks of the accuracy bench: small models whose clipped sums are cheap for many runs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Task(NamedTuple):
    """A model with its data. Parameters are vectors; a leading axis L runs over lanes.

    Attributes:
      population: training examples.
      parameters: length of the parameter vector.
      start: initial parameters from a NumPy generator, shape (parameters,).
      clipped_sum: (parameters (L, P), example indices (B,), weights (B,)) -> weighted sum of
        per-example gradients clipped to norm 1, shape (L, P).
      loss: parameters (L, P) -> (test loss (L,), second reading (L,)): the rate of wrong labels, or
        the loss again.
      grid: exponent k of the rate 2^(k/2) from which a search begins, for each optimizer.
    """

    population: int
    parameters: int
    start: Callable[[np.random.Generator], np.ndarray]
    clipped_sum: Callable[..., jax.Array]
    loss: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    grid: dict[str, int]


def digits():
    """(1,437 training images, labels), (360 test images, labels); centred, with a constant."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train, test, y, test_y = train_test_split(images, labels, test_size=0.2, random_state=1)
    center = train.mean(axis=0)
    x, test_x = (
        np.pad((part - center) / 16, ((0, 0), (0, 1)), constant_values=1) for part in (train, test)
    )
    return (x.astype(np.float32), y), (test_x.astype(np.float32), test_y)


def clip(squared_norms, weights):
    """Factors that clip gradients of these squared norms to 1, times the examples' weights."""
    return weights * jax.lax.rsqrt(jnp.maximum(squared_norms, 1.0))


def _cross_entropy(logits, labels):
    """Mean loss and rate of wrong labels of logits (L, B, classes)."""
    log_probabilities = jax.nn.log_softmax(logits)
    picked = log_probabilities[:, np.arange(len(labels)), labels]
    return -picked.mean(axis=1), (logits.argmax(axis=2) != labels).mean(axis=1)


def softmax():
    """Softmax regression on the digits, 650 parameters; clipping in closed form."""
    (x, y), (test_x, test_y) = digits()
    targets, squares = np.eye(10, dtype=np.float32)[y], (x**2).sum(axis=1)

    def as_matrix(parameters):
        return parameters.reshape(len(parameters), 65, 10)

    def clipped_sum(parameters, indices, weights):
        batch = jnp.asarray(x)[indices]
        logits = jnp.einsum("bi,lio->lbo", batch, as_matrix(parameters))
        residuals = jax.nn.softmax(logits) - jnp.asarray(targets)[indices]
        norms = jnp.sum(residuals**2, axis=2) * jnp.asarray(squares)[indices]
        clipped = residuals * clip(norms, weights)[:, :, None]
        return jnp.einsum("bi,lbo->lio", batch, clipped).reshape(parameters.shape)

    def loss(parameters):
        logits = jnp.einsum("bi,lio->lbo", test_x, as_matrix(parameters))
        return _cross_entropy(logits, test_y)

    grid = {"sgd": 4, "momentum": -2, "adam": -6}
    return Task(len(x), 650, lambda rng: np.zeros(650, np.float32), clipped_sum, loss, grid)


def _network(patches_of, channels, grid):
    """The same linear map with tanh of each patch of an image, then a linear layer.

    ``patches_of``: images (B, 65) -> (B, patches, inputs), a constant last. Norms are those of the
    products of patches, so that no gradient of an example is formed.
    """
    (x, y), (test_x, test_y) = digits()
    train, test, targets = patches_of(x), patches_of(test_x), np.eye(10, dtype=np.float32)[y]
    products = np.einsum("bpi,bqi->bpq", train, train)
    _, count, inputs = train.shape
    cut, features = inputs * channels, count * channels

    def forward(parameters, batch):
        lanes = len(parameters)
        inner = parameters[:, :cut].reshape(lanes, inputs, channels)
        outer = parameters[:, cut:].reshape(lanes, features + 1, 10)
        activations = jnp.tanh(jnp.einsum("bpi,lic->lbpc", batch, inner))
        flat = activations.reshape(lanes, len(batch), features)
        return flat, outer, flat @ outer[:, :-1] + outer[:, -1:]

    def clipped_sum(parameters, indices, weights):
        batch = jnp.asarray(train)[indices]
        flat, outer, logits = forward(parameters, batch)
        residuals = jax.nn.softmax(logits) - jnp.asarray(targets)[indices]
        back = (residuals @ outer[:, :-1].transpose(0, 2, 1)) * (1 - flat**2)
        back = back.reshape(*back.shape[:2], count, channels)
        norms = jnp.einsum("bpq,lbpc,lbqc->lb", jnp.asarray(products)[indices], back, back)
        norms += jnp.sum(residuals**2, axis=2) * (1 + jnp.sum(flat**2, axis=2))
        factors = clip(norms, weights)[:, :, None]
        residuals *= factors
        sums = (
            jnp.einsum("bpi,lbpc->lic", batch, back * factors[..., None]),
            flat.transpose(0, 2, 1) @ residuals,
            residuals.sum(axis=1),
        )
        return jnp.concatenate([part.reshape(len(parameters), -1) for part in sums], axis=1)

    def start(rng):
        flat, free = np.zeros(cut + (features + 1) * 10, np.float32), cut - channels
        flat[:free] = rng.standard_normal(free) / np.sqrt(inputs - 1)
        flat[cut:-10] = rng.standard_normal(features * 10) / np.sqrt(features)
        return flat

    return Task(
        len(x),
        cut + (features + 1) * 10,
        start,
        clipped_sum,
        lambda parameters: _cross_entropy(forward(parameters, test)[2], test_y),
        grid,
    )


def mlp():
    """A network 64-32-10 with tanh on the digits, 2,410 parameters."""
    return _network(lambda x: x[:, None], 32, {"sgd": 3, "momentum": -3, "adam": -9})


def _patches(images):
    """The 16 patches 3 × 3, with stride 2, of each image with a constant, shape (B, 16, 10)."""
    padded = np.pad(images[:, :64].reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    flat = windows[:, ::2, ::2].reshape(len(images), 16, 9)
    return np.pad(flat, ((0, 0), (0, 0), (0, 1)), constant_values=1)


def cnn():
    """A convolution 3 × 3 of 16 channels with stride 2 and tanh, then a linear layer; 2,730."""
    return _network(_patches, 16, {"sgd": 0, "momentum": -6, "adam": -10})


def least_squares(dimensions=128, population=2048):
    """Least squares with a power-law spectrum; the loss is the excess over the known optimum.

    Features are Gaussian with variances k^-1.2, the optimum has entries ± k^-0.6, labels have noise
    of variance 0.04. Residuals and features are symmetric, so clipping moves no optimum.
    """
    rng = np.random.default_rng(65)
    order = 1.0 + np.arange(dimensions)
    spectrum = (order**-1.2).astype(np.float32)
    optimum = (rng.choice([-1, 1], dimensions) * order**-0.6).astype(np.float32)
    x = (rng.standard_normal((population, dimensions)) * np.sqrt(spectrum)).astype(np.float32)
    y = x @ optimum + 0.2 * rng.standard_normal(population).astype(np.float32)
    squares = (x**2).sum(axis=1)

    def clipped_sum(parameters, indices, weights):
        batch = jnp.asarray(x)[indices]
        residuals = parameters @ batch.T - jnp.asarray(y)[indices]
        return (residuals * clip(residuals**2 * jnp.asarray(squares)[indices], weights)) @ batch

    def loss(parameters):
        excess = 0.5 * jnp.sum(spectrum * (parameters - optimum) ** 2, axis=1)
        return excess, excess

    grid = {"sgd": 1, "momentum": -5, "adam": -8}
    begin = np.zeros(dimensions, np.float32)
    return Task(population, dimensions, lambda rng: begin, clipped_sum, loss, grid)


TASKS = {"softmax": softmax, "mlp": mlp, "cnn": cnn, "least-squares": least_squares}
