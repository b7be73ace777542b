"""Private SGD with momentum for many seeds and learning rates in one compiled program.

One run is what the trainer does in small: the sampled examples' gradients, each clipped on its own,
are summed, the mechanism's noise is added, the result is divided by the expected batch, a public
number, and a momentum step with a cooling rate is made. A seed fixes the initial model, the
batches and the noise; the rates share them, so that what differs between rates is the rate.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from flax import nnx
from sklearn.datasets import load_digits

from mfopt.noise.choice import choose
from mfopt.noise.stream import NoiseStream
from mfopt.sampling import BallsInBins, FixedOrder, Scheme, UnitSampler
from mfopt.strategies import Strategy
from mfopt.training.clipping import Clipping
from mfopt.training.secrets import uniform_hash
from mfopt.workloads import Workload

CIFAR = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_PIXELS = 3 * 32 * 32


class Examples(NamedTuple):
    """``x`` (N, d), or (N, 32, 32, 3), float32 and ``y`` (N,) int32 classes."""

    x: np.ndarray
    y: np.ndarray

    def take(self, index: np.ndarray) -> Examples:
        """Return the examples at ``index``."""
        return Examples(self.x[index], self.y[index])


class Pictures(NamedTuple):
    """Data in three parts: rates are chosen on ``validation``, what is reported is on ``test``."""

    train: Examples
    validation: Examples
    test: Examples


def load(folder: str | Path | None, held_out: int) -> Pictures:
    """CIFAR-10 from the folder of its binary version, ``held_out`` of it for validation; None:
    scikit-learn's 1,797 digits of 8 × 8, half of ``held_out`` each for validation and test.
    """
    every = _digits() if folder is None else _cifar(Path(folder), CIFAR[:-1])
    order = np.random.default_rng(0).permutation(len(every.y))
    train, kept = every.take(order[held_out:]), order[:held_out]
    if folder is not None:
        return Pictures(train, every.take(kept), _cifar(Path(folder), CIFAR[-1:]))
    half = held_out // 2
    return Pictures(train, every.take(kept[:half]), every.take(kept[half:]))


def _digits() -> Examples:
    x, y = load_digits(return_X_y=True)
    return Examples((x / 16 - 0.3).astype(np.float32), y.astype(np.int32))


def _cifar(folder: Path, files: tuple[str, ...]) -> Examples:
    """Records of a class and the pixels of each colour, which become numbers in [-1, 1]."""
    records = [np.fromfile(folder / file, np.uint8).reshape(-1, 1 + _PIXELS) for file in files]
    every = np.concatenate(records)
    x = every[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.float32)
    return Examples(x / 127.5 - 1, every[:, 0].astype(np.int32))


class Perceptron(nnx.Module):
    """One hidden layer of tanh: ``module(x (d,)) -> logits (10,)``."""

    def __init__(self, inputs: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(inputs, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        logits: jax.Array = self.last(jnp.tanh(self.first(x)))
        return logits


class VGG(nnx.Module):
    """Three blocks of two convolutions and a pool, a dense layer of 128: (32, 32, 3) -> (10,)."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        widths = itertools.pairwise((3, 32, 32, 64, 64, 128, 128))
        self.convolutions = nnx.List(nnx.Conv(*pair, (3, 3), rngs=rngs) for pair in widths)
        self.dense = nnx.Linear(4 * 4 * 128, 128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for number, convolution in enumerate(self.convolutions):
            x = jnp.tanh(convolution(x))
            if number % 2:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        logits: jax.Array = self.last(jnp.tanh(self.dense(x.reshape(-1))))
        return logits


def model(
    shape: tuple[int, ...], hidden: int, seed: int
) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """(parameters, ``apply(parameters, x)``): a perceptron for vectors, a VGG for colour images."""
    rngs = nnx.Rngs(seed)
    made = Perceptron(*shape, hidden, rngs=rngs) if len(shape) == 1 else VGG(rngs=rngs)
    graph, params = nnx.split(made)
    return params, lambda params, x: nnx.merge(graph, params)(x)


MEASURED = ("loss", "accuracy")


@dataclasses.dataclass(frozen=True)
class RunMechanism:
    """Mechanism that a run executes.

    Attributes:
      strategy: C.
      noise_multiplier: σ relative to the clip norm.
      sampling: the scheme that was accounted for and is run.
      batch_size: batches are cut to so many; None cuts nothing.
      shuffled: run equal batches of shuffled examples in place of ``sampling``.
    """

    strategy: Strategy
    noise_multiplier: float
    sampling: Scheme
    batch_size: int | None = None
    shuffled: bool = False

    def batches(self, population: int, seed: int) -> list[np.ndarray]:
        """Examples of each step."""
        steps = range(self.sampling.length)
        if self.shuffled:
            order = np.random.default_rng(seed).permutation(population)
            bins = getattr(self.sampling, "bins", self.sampling.length)
            fixed = FixedOrder(bins, self.sampling.length // bins)
            return [order[fixed.sample(t, population)] for t in steps]
        sampler = UnitSampler(self.sampling, population, seed=seed)
        size = self.batch_size or population
        return [cut_batch(sampler[t], size, seed, t) for t in steps]


def schedule(batches: list[list[np.ndarray]], microbatch: int = 0) -> np.ndarray:
    """Batches of several runs as one array (steps, runs, microbatches, units); -1 is empty."""
    most = max(1, *(len(units) for run in batches for units in run))
    size = microbatch or most
    filled = np.full((len(batches[0]), len(batches), -(-most // size) * size), -1)
    for number, run in enumerate(batches):
        for step, units in enumerate(run):
            filled[step, number, : len(units)] = units
    return filled.reshape(*filled.shape[:2], -1, size)


def train(
    data: Pictures,
    mechanism: RunMechanism,
    workload: Workload,
    *,
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    clip_norm: float = 1.0,
    hidden: int = 16,
    microbatch: int = 0,
) -> dict[str, np.ndarray]:
    """Loss (nats) and accuracy after the last step, each (seeds, rates), by part and name.

    Args:
      data: in three parts.
      mechanism: what is run.
      workload: its learning rates, relative to the first, and its momentum are the optimizer's.
      rates: learning rates of the first step.
      seeds: of models, batches and noise, which are pinned: such runs are experiments.
      clip_norm: bound on an example's gradient.
      hidden: width of the model for vectors.
      microbatch: examples at work at once in a run; 0: a whole batch.
    """
    n = mechanism.sampling.length
    recurrence = workload.recurrence(n)
    assert recurrence is not None, "only SGD with momentum and learning rates runs here"
    relative, momentum = recurrence
    population = len(data.train.y)
    units = schedule([mechanism.batches(population, seed) for seed in seeds], microbatch)
    normalizer = mechanism.sampling.expected_batch(population)
    made = [model(data.train.x.shape[1:], hidden, seed) for seed in seeds]
    apply, many = made[0][1], len(seeds) * optax.tree.size(made[0][0])
    # past draws are kept where they fit and would be regenerated
    keeps = choose(mechanism.strategy, n).draws(n) > 1 and n * many <= 2**28
    stream = NoiseStream(
        mechanism.strategy,
        iterations=n,
        noise_multiplier=mechanism.noise_multiplier,
        clip_norm=clip_norm,
        sampling=mechanism.sampling,
        past="store" if keeps else "auto",
    )
    states = _stacked(
        [stream.init(params, seed=s) for (params, _), s in zip(made, seeds, strict=True)]
    )
    start = jax.tree.map(
        lambda leaf: jnp.repeat(leaf[:, None], len(rates), axis=1), _stacked([p for p, _ in made])
    )
    clipping = Clipping(clip_norm)
    factors = jnp.asarray(rates, jnp.float32)

    def contribution(params: Any, x: jax.Array, y: jax.Array, there: jax.Array) -> Any:
        gradient = jax.grad(lambda p: _loss(apply(p, x), y))(params)
        return jax.tree.map(lambda leaf: jnp.where(there, leaf, 0.0), clipping(gradient).gradient)

    def clipped_sum(params: Any, units: jax.Array, examples: Examples) -> Any:
        def add(total: Any, units: jax.Array) -> tuple[Any, None]:
            x, y = (jnp.take(each, jnp.maximum(units, 0), axis=0) for each in examples)
            each = jax.vmap(contribution, in_axes=(None, 0, 0, 0))(params, x, y, units >= 0)
            return jax.tree.map(lambda t, leaf: t + jnp.sum(leaf, axis=0), total, each), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), units)[0]

    over_rates = jax.vmap(clipped_sum, in_axes=(0, None, None))
    over_runs = jax.vmap(over_rates, in_axes=(0, 0, None))

    def step(
        examples: Examples, carry: Any, given: tuple[jax.Array, jax.Array]
    ) -> tuple[Any, None]:
        params, velocity, states = carry
        units, rate = given
        noise, states = jax.vmap(stream.next)(states)
        summed = over_runs(params, units, examples)
        velocity = jax.tree.map(
            lambda v, s, z: momentum * v + (s + z[:, None]) / normalizer, velocity, summed, noise
        )

        def moved(p: jax.Array, v: jax.Array) -> jax.Array:
            return p - rate * factors.reshape(1, -1, *(1,) * (v.ndim - 2)) * v

        return (jax.tree.map(moved, params, velocity), velocity, states), None

    @jax.jit
    def run(start: Any, states: Any, examples: Any, units: Any, relative: Any) -> Any:
        carry = start, jax.tree.map(jnp.zeros_like, start), states
        return jax.lax.scan(functools.partial(step, examples), carry, (units, relative))[0][0]

    def measured(params: Any, part: Examples) -> tuple[jax.Array, jax.Array]:
        labels = jnp.asarray(part.y)
        size = microbatch or len(labels)
        logits = jax.lax.map(lambda x: apply(params, x), part.x, batch_size=size)
        right = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return jnp.mean(jax.vmap(_loss)(logits, labels)), right

    examples = jax.tree.map(jnp.asarray, data.train)
    params = run(start, states, examples, jnp.asarray(units), jnp.asarray(relative, jnp.float32))
    measure = jax.jit(jax.vmap(jax.vmap(measured, (0, None)), (0, None)))
    results: dict[str, np.ndarray] = {}
    for part in ("validation", "test"):
        for name, values in zip(MEASURED, measure(params, getattr(data, part)), strict=True):
            results[f"{part}_{name}"] = np.asarray(values, np.float64)
    return results


def _loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[label]


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)


# ---- batches cut to a fixed size, and what that costs: a unit that enters a full batch pushes
# another one out. The remark in Choquette-Choo et al. (2024, section 5.2.1), that a unit which is
# cut is one with gradient 0, covers the unit that is cut, and not the unit that cuts.


def cut_batch(units: np.ndarray, batch_size: int, seed: int, step: int) -> np.ndarray:
    """At most ``batch_size`` of the units of a step, increasing.

    By a priority per (step, unit) that is independent of the other units: one unit more displaces
    at most one, and no unit is cut in every pass.
    """
    if len(units) <= batch_size:
        return units
    priority = uniform_hash(seed, step, units)
    return np.sort(units[np.argsort(priority, kind="stable")[:batch_size]])


def displacement_probability(scheme: BallsInBins, population: int, batch_size: int) -> float:
    """Bound on the chance that a unit beside ``population`` others meets a batch they have filled.

    It meets one batch per assignment, with a binomial number of others in it.
    """
    others = scipy.stats.binom(population, 1 / scheme.bins)
    return min(1.0, scheme.throws * float(others.sf(batch_size - 1)))


def smallest_batch_size(scheme: BallsInBins, population: int, probability: float) -> int:
    """Smallest batch size whose :func:`displacement_probability` is at most ``probability``."""

    def rare(batch_size: int) -> bool:
        return displacement_probability(scheme, population, batch_size) <= probability

    # a batch that holds all displaces nobody
    return bisect.bisect_left(range(1, population + 1), True, key=rare) + 1


def charged_delta(epsilon: float, delta: float, displacement: float) -> float:
    """δ + (1 + e^ε) η, at most 1: the statement's δ with the price of cut batches in it.

    H(M(D), M(D')) <= H(M̃(D), M̃(D')) + TV(M(D), M̃(D)) + e^ε TV(M(D'), M̃(D')), where M̃ is the run
    in which the unit displaces nobody and each TV distance is at most η: for add-remove and
    zero-out adjacency.
    """
    if displacement == 0.0:
        return delta
    log_price = np.logaddexp(0.0, epsilon) + math.log(displacement)
    return float(min(1.0, delta + math.exp(min(log_price, 0.0))))
