"""Mean estimation from users' examples: private descent by ELS and ULS, many trials at once.

The task of Charles et al. 2024 (section 4): a population mean μ ~ N(0, I_d), users' means
N(μ, σ₁² I), a user's examples N(its mean, σ₂² I), the loss half the squared distance to an example.
ELS (their Algorithm 1) samples examples and clips each one's gradient; ULS (Algorithm 2) samples
users and clips the gradient averaged over G examples resampled. Both sample by Poisson, divide
the noised sum by the expected number of sampled units, and start at 0. A trial draws its own data,
batches and noise; clip norms and step lengths of a sweep share them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np
from common import AccountCell, Row, Study

from mfopt.errors import FailureError
from mfopt.experiments.cache import Cell, Result
from mfopt.sampling import Poisson

ELS, ULS = "ELS", "ULS"
_ROUND = 16  # places of a batch are a multiple of this, so that programs are used again


@dataclasses.dataclass(frozen=True)
class MeanTask:
    """Population, steps and trials of a study and its cells.

    A statement protects one user with all its examples; data, and noise, are the same for every
    algorithm.
    """

    delta: float = 1e-6  # δ of every statement.
    users: int = 256  # Users N.
    examples: int = 16  # Examples K of each user.
    dimension: int = 32  # Coordinates d.
    steps: int = 256  # Steps T.
    trials: int = 64  # Independent trials, an even number.
    seed: int = 0  # Pins the randomness of data, batches and noise.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descent(MeanTask, Cell):
    """Squared distance of the last iterate to μ, (clips, lengths, trials), by ELS or ULS.

    Attributes:
      group: G, examples of a user: in all (ELS), in one participation (ULS).
      epsilon: of adding or removing one user.
      across: σ₁, standard deviation of users' means.
      within: σ₂, standard deviation of a user's examples.
      algorithm: "ELS" or "ULS".
      batch: B, expected gradients a step.
      clips: clip norms of the sweep, in units of the data.
      lengths: learning rate times clip norm: the longest step of one whole contribution.
    """

    name = "study-means"
    group: int
    epsilon: float
    across: float
    within: float
    algorithm: str
    batch: int
    clips: tuple[float, ...]
    lengths: tuple[float, ...]

    @property
    def scheme(self) -> Poisson:
        """Sampling scheme of the units: examples (ELS), users (ULS)."""
        return Poisson(self.batch / (self.group * self.users), self.steps)

    @property
    def cohort(self) -> float:
        """Expected units of a step: what the noised sum is divided by."""
        return self.batch if self.algorithm == ELS else self.batch / self.group

    @property
    def needs(self) -> tuple[Cell, ...]:
        together = self.group if self.algorithm == ELS else 1
        return (AccountCell(self.scheme, together, epsilon=self.epsilon, delta=self.delta),)

    def run(self, *needed: Result) -> Result:
        accounted = needed[0].record
        sigma = accounted["noise_multiplier"]
        record = {"noise_multiplier": sigma, "status": accounted["status"]}
        return Result(record, {"errors": squared_errors(self, sigma)})

    def privacy(self, **more: Any) -> dict[str, Any]:
        """Privacy columns of a row: adding or removing one user; ``more`` is first."""
        what = "examples" if self.algorithm == ELS else "users"
        said = {
            "privacy_unit": "user",
            "adjacency": "add-remove",
            "sampling": f"Poisson, {what}, {self.scheme.probability:.4g}",
            "epsilon": self.epsilon,
            "delta": self.delta,
        }
        return said | more


@dataclasses.dataclass(frozen=True)
class MeanStudy(MeanTask, Study):
    """A study whose cells are :class:`Descent`."""

    heading: ClassVar[str]  # of the plot
    paper: ClassVar[str]  # sizes in it

    clips: tuple[float, ...] = (2.0, 8.0)  # Clip norms to choose from.
    # Learning rates to choose from, in multiples of the clip norm.
    lengths: tuple[float, ...] = (0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56)

    def title(self, rows: list[Row]) -> str:
        sizes = f"{self.users:,} users, {self.dimension} dimensions, {self.steps} steps"
        here = f"{sizes}, {self.trials} trials; in the paper: {self.paper}"
        return f"{self.heading}, δ = {self.delta:g}\n{here}"

    def descent(self, **arm: Any) -> Descent:
        """A cell of the study's population, steps and sweep; ``arm`` has its other fields."""
        task = {field.name: getattr(self, field.name) for field in dataclasses.fields(MeanTask)}
        return Descent(**task, clips=self.clips, lengths=self.lengths, **arm)


def squared_errors(descent: Descent, sigma: float) -> np.ndarray:
    """(clips, lengths, trials) float32: ‖θ_T − μ‖² at noise multiplier ``sigma``."""
    clips, lengths = np.meshgrid(descent.clips, descent.lengths, indexing="ij")
    means, data = draw_data(descent)
    noise = _generator(descent, 2).standard_normal(
        (descent.trials, descent.steps, descent.dimension), dtype=np.float32
    )
    errors = _program()(
        data,
        batches(descent),
        noise,
        means,
        np.float32(clips.ravel()),
        np.float32((lengths / clips).ravel() / descent.cohort),
        np.float32(sigma),
    )
    return np.asarray(errors).reshape(*clips.shape, -1)


def draw_data(descent: Descent) -> tuple[np.ndarray, np.ndarray]:
    """μ (trials, d) and the pool of examples, (trials, units, d): N·G of ELS, N·K or N of ULS.

    The first normal draws are the same for every algorithm, G and σ: what differs is paired.
    """
    make, d = _generator(descent, 0), descent.dimension
    shape = (descent.trials, descent.users, descent.examples, d)
    means = make.standard_normal((descent.trials, d), dtype=np.float32)
    users = means[:, None] + np.float32(descent.across) * make.standard_normal(
        (*shape[:2], d), dtype=np.float32
    )
    data = make.standard_normal(shape, dtype=np.float32)
    data *= np.float32(descent.within)
    data += users[:, :, None]
    if descent.algorithm == ELS:  # iid examples: the first G are G at random
        data = data[:, :, : descent.group]
    elif descent.group == descent.examples:  # all of a user's examples, always: their mean
        data = data.mean(2, keepdims=True)
    return means, data.reshape(descent.trials, -1, d)


def batches(descent: Descent) -> np.ndarray:
    """(trials, T, units, examples of a unit): places in the pool, -1 for nobody."""
    whole = descent.algorithm == ELS or descent.group == descent.examples
    units = descent.users * (descent.group if descent.algorithm == ELS else 1)
    make, rounds = _generator(descent, 1), descent.trials * descent.steps
    at, unit = poisson(make, rounds, units, descent.scheme.probability)
    counts = np.bincount(at, minlength=rounds)
    room = -(-max(int(counts.max()), 1) // _ROUND) * _ROUND
    rank = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    taken = unit[:, None] if whole else subsets(make, unit, descent.examples, descent.group)
    places = np.full((rounds, room, taken.shape[1]), -1, np.int32)
    places[at, rank] = taken
    return places.reshape(descent.trials, descent.steps, room, -1)


def poisson(
    generator: np.random.Generator, rounds: int, units: int, probability: float
) -> tuple[np.ndarray, np.ndarray]:
    """(round, unit) of every participation, in order: each unit in each round independently.

    Gaps between successes of independent trials are geometric: nothing is drawn for the others.

    Args:
      generator: randomness.
      rounds: steps of all trials, one after the other.
      units, probability: how many, and of a participation.
    """
    total, last, blocks = rounds * units, -1, []
    while last < total:
        block = int((total - last) * probability * 1.01) + 64
        places = last + np.cumsum(generator.geometric(probability, size=block))
        blocks.append(places)
        last = int(places[-1])
    places = np.concatenate(blocks)
    return np.divmod(places[places < total], units)


def subsets(make: np.random.Generator, unit: np.ndarray, of: int, size: int) -> np.ndarray:
    """Places in a pool of examples drawn without replacement, resampled for each participation.

    Args:
      make: randomness.
      unit: of each participation, shape (participations,).
      of, size: a unit's examples, and how many of them are drawn.
    """
    chosen = np.empty((len(unit), size), dtype=np.int64)
    for rows in np.array_split(np.arange(len(unit)), max(1, len(unit) // 2**18)):
        scores = make.random((len(rows), of), dtype=np.float32)
        chosen[rows] = np.argpartition(scores, size - 1, axis=1)[:, :size]
    return unit[:, None] * of + chosen


def _generator(descent: Descent, stream: int) -> np.random.Generator:
    return np.random.default_rng([descent.seed, stream])


@functools.cache
def _program() -> Any:
    import jax
    import jax.numpy as jnp

    def trial(
        pool: Any, places: Any, noise: Any, mean: Any, clips: Any, rates: Any, sigma: Any
    ) -> Any:
        def step(theta: Any, now: tuple[Any, Any]) -> tuple[Any, None]:
            place, white = now
            gathered = pool[place].mean(1)  # (units, d)
            distance = jnp.linalg.norm(theta[:, None] - gathered[None], axis=-1)
            share = jnp.minimum(1.0, clips[:, None] / jnp.maximum(distance, 1e-12))
            share = share * (place[:, 0] >= 0)
            total = theta * share.sum(1, keepdims=True) - share @ gathered
            noised = total + (sigma * clips)[:, None] * white
            return theta - rates[:, None] * noised, None

        start = jnp.zeros((clips.shape[0], pool.shape[-1]), jnp.float32)
        theta, _ = jax.lax.scan(step, start, (places, noise))
        return jnp.sum((theta - mean) ** 2, axis=-1)

    return jax.jit(jax.vmap(trial, in_axes=(0, 0, 0, 0, None, None, None), out_axes=1))


def tuned(errors: np.ndarray) -> np.ndarray:
    """Losses (trials,): each half of the trials at the setting that is best for the other.

    So no loss chose its own setting. ``errors`` are (..., trials), at each setting of a sweep; what
    is not finite is worst, and the halves are the even and the odd trials.
    """
    errors = errors.reshape(-1, errors.shape[-1]).astype(np.float64)
    errors = np.where(np.isfinite(errors), errors, np.inf)
    losses = np.empty(errors.shape[1])
    for half in (0, 1):
        best = np.argmin(errors[:, 1 - half :: 2].mean(1))
        losses[half::2] = errors[best, half::2]
    if not np.isfinite(losses).all():
        raise FailureError("every learning rate of the sweep diverges: add shorter steps")
    return losses
