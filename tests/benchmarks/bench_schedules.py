"""What becomes of the noise in the last model: learning-rate schedules, averages and forms of C.

    mfopt bench schedules --eps 0.5,2,8 --out artifacts/bench-schedules.json

DP-SGD with momentum on scikit-learn's digits (8 epochs × 32 steps, a network of 2,410 parameters,
clip norm 1): independent noise with Poisson sampling, a BLT and a time-scaled BLT made for prefix
sums, and a time-scaled BLT made for the iterates of momentum under a rate that falls in the second
half. Each with four schedules, releasing the last iterate or the mean of the last epoch's, at the
rate of the least mean loss on held-out images. A seed splits the images, starts the model and
draws for all alike; differences are from the best of independent noise, seed by seed. Guarantees:
add-remove of one image, δ = 1e-5, the same in a row of a table whatever its schedule and average,
which are post-processing. (Clipped gradients are formed by hand: 1,600 runs take minutes.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bench, Options, mean

from mfopt.accounting import account
from mfopt.mechanism import Mechanism
from mfopt.optimize import factorize
from mfopt.sampling import BallsInBins, Poisson
from mfopt.strategies import Identity
from mfopt.workloads import Momentum, PrefixSums, Workload

EPOCHS, BINS, DELTA, MOMENTUM, ROOM = 8, 32, 1e-5, 0.9, 96
N = EPOCHS * BINS
RATES = tuple(2.0 ** (-k / 2) for k in range(2, 12))
SHARES = {"constant": 0.0, "falling in the last quarter": 0.25, "cooldown": 0.5, "linear": 1.0}
RELEASED = ("last iterate", "mean of the last epoch")
SHAPES = {"w": (64, 32), "b": (32,), "v": (32, 10), "c": (10,)}
Params = dict[str, Any]

bench = Bench(
    __file__, __doc__, eps=([0.5, 2.0, 8.0], "Values of ε; a list."), repeats=(20, "Seeds.")
)
parser, main = bench.parser, bench.main


def schedule(share: float) -> np.ndarray:
    """Rates that fall in a line to 0 at step n over the last ``share`` of the steps, (n,)."""
    left = 1 - np.arange(N) / N
    return np.minimum(1, left / share) if share else np.ones(N)


def mechanisms(epsilon: float) -> Iterator[tuple[str, float, np.ndarray]]:
    """(name, σ, C⁻¹) of each."""
    scheme = BallsInBins(BINS, EPOCHS)
    stated = account(Mechanism(Poisson(1 / BINS, N), Identity()), epsilon=epsilon, delta=DELTA)
    yield "independent noise, Poisson", stated.noise_multiplier, np.eye(N)
    falling = Momentum(MOMENTUM, schedule(SHARES["cooldown"]))
    made: dict[str, tuple[bool, Workload]] = {
        "BLT": (False, PrefixSums()),
        "time-scaled BLT": (True, PrefixSums()),
        "time-scaled BLT for the falling rate": (True, falling),
    }
    for name, (scaled, workload) in made.items():
        found = factorize(
            scheme, epsilon, DELTA, strategy="blt", time_scale=scaled, workload=workload, seed=0
        )
        inverse = np.linalg.inv(np.asarray(found.strategy.materialize(N)))
        yield name, found.noise_multiplier, inverse


def cut(flat: np.ndarray) -> Params:
    """The parameters in a vector, or in each of many."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    parts = np.split(np.asarray(flat, np.float32), ends[:-1], axis=-1)
    lead = flat.shape[:-1]
    return {k: p.reshape(lead + s) for (k, s), p in zip(SHAPES.items(), parts, strict=True)}


def hidden(params: Params, x: jax.Array) -> jax.Array:
    """Activations of many models, (models, images, 32)."""
    return jnp.tanh(jnp.einsum("bi,rij->rbj", x, params["w"]) + params["b"][:, None])


def logits(params: Params, h: jax.Array) -> jax.Array:
    """Logits of many models, (models, images, 10)."""
    return jnp.einsum("rbj,rjk->rbk", h, params["v"]) + params["c"][:, None]


def clipped(params: Params, x: jax.Array, y: jax.Array, real: jax.Array) -> Params:
    """Sums of the images' clipped gradients, for many models: norms follow from the two factors."""
    h = hidden(params, x)
    above = jax.nn.softmax(logits(params, h)) - jax.nn.one_hot(y, 10)
    below = jnp.einsum("rbk,rjk->rbj", above, params["v"]) * (1 - h**2)
    squares = jnp.sum(above**2, -1) * (jnp.sum(h**2, -1) + 1)
    squares += jnp.sum(below**2, -1) * (jnp.sum(x**2, -1) + 1)
    factor = real / jnp.maximum(1.0, jnp.sqrt(squares))
    above, below = above * factor[..., None], below * factor[..., None]
    return {
        "w": jnp.einsum("bi,rbj->rij", x, below),
        "b": below.sum(1),
        "v": jnp.einsum("rbj,rbk->rjk", h, above),
        "c": above.sum(1),
    }


@jax.jit
def trained(start: Params, x: Any, y: Any, batches: Any, noise: Params, size: Any) -> Params:
    """Last iterates and means of the last epoch, (2, schedules × rates, ...)."""
    rates = np.stack([np.outer(RATES, schedule(share)) for share in SHARES.values()])
    rates = rates.reshape(-1, N).astype(np.float32)
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(rates), *leaf.shape)), start)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(carry: Any, now: Any) -> Any:
        params, velocity, mean = carry
        units, drawn, rate, weight = now
        total = clipped(params, x[units], y[units], (units >= 0).astype(jnp.float32))
        velocity = jax.tree.map(
            lambda v, g, z: MOMENTUM * v + (g + z) / size, velocity, total, drawn
        )
        params = jax.tree.map(
            lambda p, v: p - rate.reshape(-1, *[1] * (p.ndim - 1)) * v, params, velocity
        )
        mean = jax.tree.map(lambda m, p: m + weight * p, mean, params)
        return (params, velocity, mean), None

    weights = np.where(np.arange(N) >= N - BINS, 1 / BINS, 0).astype(np.float32)
    steps = (batches, noise, rates.T, weights)
    (last, _, mean), _ = jax.lax.scan(step, (params, zeros, zeros), steps)
    return jax.tree.map(lambda *both: jnp.stack(both), last, mean)


@jax.jit
def judged(params: Params, x: Any, y: Any) -> Any:
    """Accuracy and mean loss of many models."""
    found = logits(params, hidden(params, x))
    loss = -jnp.take_along_axis(jax.nn.log_softmax(found), y[None, :, None], 2).mean((1, 2))
    return (found.argmax(-1) == y).mean(1), loss


@functools.cache
def images() -> Any:
    """All of them."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y


def run(sigma: float, inverse: np.ndarray, poisson: bool, seed: int) -> np.ndarray:
    """Accuracy and loss, (2, released, schedules, rates)."""
    from sklearn.model_selection import train_test_split

    x, rest, y, labels = train_test_split(*images(), test_size=0.2, random_state=seed)
    rng = np.random.default_rng(seed)
    spread = np.concatenate(
        [np.full(int(np.prod(s)), {"w": 64, "v": 32}.get(k, np.inf)) for k, s in SHAPES.items()]
    )
    start = rng.uniform(-1, 1, len(spread)) / np.sqrt(spread)
    noise = sigma * inverse @ rng.normal(size=(N, len(spread)))
    bins = rng.integers(0, BINS, len(x))
    batches = np.full((N, ROOM), -1)
    for t in range(N):
        in_step = rng.random(len(x)) < 1 / BINS if poisson else bins == t % BINS
        units = np.flatnonzero(in_step)
        batches[t, : len(units)] = units  # raises where there are more than there is room for
    both = trained(cut(start), x, y, batches, cut(noise), len(x) / BINS)
    each = [judged(jax.tree.map(lambda leaf, i=i: leaf[i], both), rest, labels) for i in range(2)]
    return np.array(each).reshape(2, 2, len(SHARES), len(RATES)).swapaxes(0, 1)


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """For each ε and mechanism: every schedule and what is released, at the rate of least loss."""
    report: dict[str, Any] = {}
    for epsilon in options.eps:
        best: np.ndarray | None = None
        for name, sigma, inverse in mechanisms(epsilon):
            poisson = name.endswith("Poisson")
            runs = np.array([run(sigma, inverse, poisson, s) for s in range(options.repeats)])
            rates = np.argmin(runs[:, 1].mean(0), axis=-1)  # (released, schedules)
            chosen = {
                (how, what): (int(rates[j, i]), runs[:, :, j, i, rates[j, i]])
                for i, how in enumerate(SHARES)
                for j, what in enumerate(RELEASED)
            }
            if best is None:  # of independent noise, which comes first
                best = min((each for _, each in chosen.values()), key=lambda e: e[:, 1].mean())
            rows = {}
            for (how, what), (at, each) in chosen.items():
                said = rows[f"{how}, {what}"] = {
                    "rate": RATES[at],
                    "bracketed": 0 < at < len(RATES) - 1,
                    "accuracy": mean(each[:, 0]),
                    "loss": mean(each[:, 1]),
                    "accuracy_gained": mean(each[:, 0] - best[:, 0]),
                    "loss_saved": mean(best[:, 1] - each[:, 1]),
                }
                share, loss = said["accuracy"]["mean"], said["loss"]["mean"]
                setting = f"ε = {epsilon:g}  {name:<37} {how:<28} {what:<23}"
                print(f"{setting} {share:.1%}  loss {loss:.4f}", flush=True)
            report[f"{name}, epsilon {epsilon:g}"] = {"noise_multiplier": sigma, **rows}
        bench.keep(report)
    return report
