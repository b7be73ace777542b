"""DP training runs with correlated noise, many seeds and learning rates in one compiled program.

A run adds σ·C⁻¹z to the sums of clipped per-example gradients (clip norm 1) and divides by the
expected batch. Each mechanism executes its own sampling. Seeds are paired: mechanisms share starts
and white noise z, and rates share batches too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from accuracy_tasks import TASKS as NUMERIC
from accuracy_text import TASKS as TEXTS

import mfopt
from mfopt.sampling import Scheme, from_description

TASKS = NUMERIC | TEXTS
LANES = 4  # runs of a seed that a call simulates, each with a schedule and a rate of its own


class Mechanism(NamedTuple):
    """Noise and sampling of a run.

    Attributes:
      label: name in reports.
      inverse: C⁻¹, lower triangular, shape (n, n).
      noise_multiplier: σ relative to the clip norm.
      scheme: sampling that is executed.
    """

    label: str
    inverse: np.ndarray
    noise_multiplier: float
    scheme: Scheme

    @classmethod
    def build(cls, label, strategy, noise_multiplier, scheme):
        """The mechanism of a strategy C."""
        dense = np.asarray(strategy.materialize(scheme.length), np.float64)
        inverse = scipy.linalg.solve_triangular(dense, np.eye(scheme.length), lower=True)
        return cls(label, inverse, noise_multiplier, scheme)

    @classmethod
    def load(cls, path):
        """The mechanism of a factorization file."""
        stored = mfopt.load(path)
        return cls.build(Path(path).stem, stored.strategy, stored.noise_multiplier, stored.sampling)

    def save(self, path):
        """Keep the arrays that runs need in an ``.npz`` file, which :meth:`read` reads."""
        scheme = json.dumps(self.scheme.describe())
        np.savez(path, inverse=self.inverse, noise_multiplier=self.noise_multiplier, scheme=scheme)

    @classmethod
    def read(cls, label, path):
        """The mechanism of a file of :meth:`save`."""
        with np.load(path) as stored:
            scheme = from_description(json.loads(str(stored["scheme"])))
            return cls(label, stored["inverse"], float(stored["noise_multiplier"]), scheme)


# --- schedules -----------------------------------------------------------------------------------


def _warmup_stable_decay(steps):
    rise, fall = steps // 10, steps // 4
    times = np.arange(steps)
    return np.minimum(1.0, np.minimum((times + 1) / rise, (steps - times) / fall))


SCHEDULES = {
    "constant": np.ones,
    "linear": lambda steps: 1 - np.arange(steps) / steps,
    "cosine": lambda steps: 0.5 * (1 + np.cos(np.pi * np.arange(steps) / steps)),
    "warmup-stable-decay": _warmup_stable_decay,
}
READINGS = ("last", "averaged")  # the last iterate; the mean of the last epoch's iterates


# --- runs ----------------------------------------------------------------------------------------


def _update(optimizer, state, gradients, step):
    """(optimizer state, direction to subtract at rate 1)."""
    if optimizer == "sgd":
        return state, gradients
    if optimizer == "momentum":
        velocity = 0.9 * state[0] + gradients
        return (velocity, state[1]), velocity
    mean = 0.9 * state[0] + 0.1 * gradients
    square = 0.999 * state[1] + 0.001 * gradients**2
    age = step + 1.0
    direction = (mean / (1 - 0.9**age)) / (jnp.sqrt(square / (1 - 0.999**age)) + 1e-8)
    return (mean, square), direction


@functools.cache
def _program(name, optimizer):
    """Compiled runs of one task and optimizer.

    Arguments: starts (S, P), indices and weights (n, S, B), noise (n, S, P), rates and averaging
    weights (n, L) and (n,), expected batch. Result: (2 readings, 2 measures, S, L).
    """
    task = TASKS[name]()

    def simulate(starts, indices, weights, noise, rates, averaging, expected_batch):
        lanes = rates.shape[1]
        begin = jnp.repeat(starts[:, None], lanes, axis=1)

        def step(carry, inputs):
            parameters, state, average = carry
            number, indices, weights, noise, rates, share = inputs
            sums = jax.vmap(task.clipped_sum)(parameters, indices, weights)
            gradients = (sums + noise[:, None]) / expected_batch
            state, direction = _update(optimizer, state, gradients, number)
            parameters = parameters - rates[:, None] * direction
            return (parameters, state, average + share * parameters), None

        zeros = jnp.zeros_like(begin)
        state = {"sgd": (), "momentum": (zeros, ()), "adam": (zeros, zeros)}[optimizer]
        numbers = jnp.arange(len(rates), dtype=jnp.float32)
        steps = (numbers, indices, weights, noise, rates, averaging)
        (parameters, _, average), _ = jax.lax.scan(step, (begin, state, zeros), steps)
        return jnp.array([jax.vmap(task.loss)(model) for model in (parameters, average)])

    return jax.jit(simulate)


@functools.cache
def _task(name):
    return TASKS[name]()


@functools.lru_cache(maxsize=2)
def _draws(name, steps, seeds):
    """Starts (S, P) and white noise (n, S, P): the same for all mechanisms."""
    task = _task(name)
    starts = np.stack([task.start(np.random.default_rng([0, seed])) for seed in range(seeds)])
    shape = steps, task.parameters
    draws = [np.random.default_rng([1, s]).standard_normal(shape, np.float32) for s in range(seeds)]
    return starts, np.stack(draws, axis=1)


def batches(scheme, population, seeds):
    """Indices and weights (1 for an example, 0 for padding) of all steps, shape (n, S, B)."""
    mean = scheme.expected_batch(population)
    width = 16 * int(np.ceil((mean + 5 * np.sqrt(mean)) / 16))
    drawn = []
    for seed in range(seeds):
        draw = scheme.draws(population, seed)
        drawn.append([np.array(draw(step)) for step in range(scheme.length)])
    width = max(width, *(len(units) for run in drawn for units in run))
    indices = np.zeros((scheme.length, seeds, width), np.int32)
    weights = np.zeros(indices.shape, np.float32)
    for seed, run in enumerate(drawn):
        for step, units in enumerate(run):
            indices[step, seed, : len(units)] = units
            weights[step, seed, : len(units)] = 1
    return indices, weights


class Trainer:
    """Runs of one mechanism on one task with one optimizer.

    Args:
      mechanism: noise and sampling.
      task, optimizer: names.
      seeds: number of paired seeds S.
    """

    def __init__(self, mechanism, task, optimizer, seeds):
        self.task, self.optimizer = task, optimizer
        scheme, population = mechanism.scheme, _task(task).population
        starts, white = _draws(task, scheme.length, seeds)
        factor = (mechanism.noise_multiplier * mechanism.inverse).astype(np.float32)
        noise = (factor @ white.reshape(scheme.length, -1)).reshape(white.shape)
        indices, weights = batches(scheme, population, seeds)
        self._inputs = tuple(map(jnp.asarray, (starts, indices, weights, noise)))
        self.expected_batch = scheme.expected_batch(population)
        self.steps = scheme.length
        epoch = min(self.steps, round(population / self.expected_batch))
        averaging = np.zeros(self.steps, np.float32)
        averaging[-epoch:] = 1 / epoch
        self._averaging = jnp.asarray(averaging)

    def losses(self, lanes):
        """Losses of each lane (schedule, k) at rate 2^(k/2), shape (2 readings, 2 measures, S)."""
        program = _program(self.task, self.optimizer)
        results = {}
        for start in range(0, len(lanes), LANES):
            chunk = lanes[start : start + LANES]
            padded = [*chunk, *[chunk[-1]] * (LANES - len(chunk))]
            shapes = [SCHEDULES[schedule](self.steps) * 2 ** (k / 2) for schedule, k in padded]
            rates = jnp.asarray(np.stack(shapes, axis=1), jnp.float32)
            values = program(*self._inputs, rates, self._averaging, self.expected_batch)
            values = np.nan_to_num(np.asarray(values, np.float64), nan=np.inf, posinf=np.inf)
            results.update({lane: values[..., column] for column, lane in enumerate(chunk)})
        return results


@dataclasses.dataclass(frozen=True)
class Score:
    """A mechanism at its best rate: the one of the lowest mean loss, never an end of the grid.

    Attributes:
      exponent: k of the rate 2^(k/2).
      losses: test loss of each seed, shape (S,).
      errors: rate of wrong labels of each seed, shape (S,).
    """

    exponent: int
    losses: np.ndarray
    errors: np.ndarray

    @property
    def mean(self):
        """Mean test loss."""
        return float(self.losses.mean())

    @property
    def standard_error(self):
        """Standard error of the mean over seeds."""
        return float(self.losses.std(ddof=1) / np.sqrt(len(self.losses)))


def scores(
    mechanism,
    task,
    optimizer,
    schedules,
    seeds,
    begin=None,
):
    """Score of each (schedule, reading) on a grid of √2 that is extended until its best is inside.

    Args:
      mechanism: noise and sampling.
      task, optimizer, schedules: names.
      seeds: number of paired seeds.
      begin: exponents to begin from, for example those that another mechanism ended with.
    """
    trainer = Trainer(mechanism, task, optimizer, seeds)
    cells = [(schedule, reading) for schedule in schedules for reading in READINGS]
    default = _task(task).grid[optimizer]
    centers = dict.fromkeys(cells, default) | (begin or {})
    losses = {}
    while True:
        missing = dict.fromkeys(
            (schedule, centers[schedule, reading] + shift)
            for schedule, reading in cells
            for shift in (-1, 0, 1)
            if (schedule, centers[schedule, reading] + shift) not in losses
        )
        if not missing:
            break
        losses |= trainer.losses(list(missing))
        for schedule, reading in cells:
            row = READINGS.index(reading)
            grid = {
                k: values[row, 0].mean() for (name, k), values in losses.items() if name == schedule
            }
            centers[schedule, reading] = min(grid, key=lambda k: grid[k])
    return {
        (schedule, reading): Score(k, *losses[schedule, k][READINGS.index(reading)])
        for (schedule, reading), k in centers.items()
    }
