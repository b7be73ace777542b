"""Cells of the studies on images: a mechanism at its best size and σ, and runs with it.

The mechanisms are those of ``mfopt compare`` and share its cells. What a run states is what it
executes: where batches are cut, or shuffled in place of sampled, (ε, δ) is that of the execution
at the same σ, not the one that σ was chosen for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfopt import _check, query_error, sampling
from mfopt.accounting import Mechanism, account
from mfopt.experiments import families
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import Cooldown, Goal, strategy_of, workload_of
from mfopt.experiments.studies.rates import choose
from mfopt.experiments.studies.rows import interval as interval
from mfopt.sampling import FixedOrder
from mfopt.training.batching import (
    charged_delta,
    displacement_probability,
    smallest_batch_size,
)
from mfopt.workloads import PrefixSums

if TYPE_CHECKING:
    from mfopt.experiments.studies.pictures import Pictures
# how a mechanism's batches are made: as accounted for, cut where that costs little δ or at their
# mean size, or by shuffling, which its account does not cover
AS_ACCOUNTED, CUT, CUT_AT_MEAN, SHUFFLED = "as accounted", "cut", "cut at the mean", "shuffled"
EXECUTIONS = (AS_ACCOUNTED, CUT, CUT_AT_MEAN, SHUFFLED)
_SHARE = 0.1  # of δ that cutting batches may cost


class Data(NamedTuple):
    """Which data, as text for a cell: "digits", "made", or CIFAR-10's folder and its digest."""

    name: str
    folder: str = ""
    held_out: int = 400

    def load(self) -> Pictures:
        """The three parts."""
        from mfopt.experiments.studies import pictures

        if self.name == "digits":
            return pictures.digits(self.held_out)
        if self.name == "made":
            return pictures.blobs(held_out=self.held_out)
        return pictures.cifar10(self.folder, self.held_out)


def mechanism_task(
    family: str, setting: Comparison, epsilon: float, *, samples: int = 2**17
) -> Task:
    """The family's C of least RMSE on the setting's workload, with a σ that is proved.

    Args:
      family: of :mod:`mfopt.experiments.families`.
      setting: bins, epochs, δ, widths and schedule.
      epsilon: of the statement.
      samples: of the certificate, where there is one.
    """
    candidates = families.find(family).candidates(setting, epsilon)
    if not candidates:
        rule = f"has no number of bands that fits {setting.bins} × {setting.epochs}"
        raise _check.reject("mechanisms", family, rule, "Name smaller `widths`.")
    sigmas = tuple(task for _, task in candidates)
    return Task.of(
        "study-mechanism",
        (*sigmas, *(sigma.source for sigma in sigmas)),
        sizes=[size for size, _ in candidates],
        sampling=families.find(family).sampling,
        bins=setting.bins,
        epochs=setting.epochs,
        epsilon=float(epsilon),
        delta=setting.delta,
        seed=setting.seed,
        samples=samples,
    )


def run_mechanism(
    *needed: Result,
    sizes: list[int],
    sampling: str,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    seed: int,
    samples: int,
) -> Result:
    """Choose among sizes and prove σ.

    Args:
      needed: σ of each size, then C of each.
      sizes: bands or buffers.
      sampling: scheme by name.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      seed: pins the random choices.
      samples: Monte Carlo samples.
    """
    errors = [result.record["rmse"] for result in needed[: len(sizes)]]
    best = int(np.argmin(errors))
    source = needed[len(sizes) + best]
    strategy = strategy_of(source)
    scheme = Goal(bins, epochs, epsilon, delta, sampling).scheme(strategy)
    found = account(
        Mechanism(scheme, strategy), epsilon=epsilon, delta=delta, seed=seed, samples=samples
    )
    record = {
        "strategy": source.record["strategy"],
        "size": sizes[best],
        "scheme": scheme.describe(),
        "guarantee": found.describe(),
        "rmse_prefix": found.noise_multiplier
        * float(query_error.rmse(PrefixSums(), strategy, bins * epochs)),
    }
    return Result(record, source.arrays)


def run_task(
    source: Task,
    data: Data,
    schedule: Cooldown,
    *,
    execution: str = AS_ACCOUNTED,
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    clip_norm: float,
    hidden: int,
    microbatch: int,
) -> Task:
    """Runs of a :func:`mechanism_task` over rates and seeds; σ is its σ, however it is executed.

    Args:
      source: the mechanism.
      data: what is trained on.
      schedule: momentum and cooldown of the optimizer.
      execution: how batches are made.
      rates: learning rates.
      seeds: of models, batches and noise.
      clip_norm: bound on an example's gradient.
      hidden: width of the model for vectors.
      microbatch: examples at work at once; 0: a batch.
    """
    return Task.of(
        "study-images",
        (source,),
        data=list(data),
        schedule=list(schedule),
        execution=execution,
        rates=list(rates),
        seeds=list(seeds),
        clip_norm=clip_norm,
        hidden=hidden,
        microbatch=microbatch,
    )


def run_images(
    source: Result,
    *,
    data: list[Any],
    schedule: Any,
    execution: str,
    rates: list[float],
    seeds: list[int],
    clip_norm: float,
    hidden: int,
    microbatch: int,
) -> Result:
    """Train and measure; the record says what was executed and what it protects.

    Args:
      source: result that holds C, σ and its account.
      data: name, folder, held-out examples.
      schedule: momentum and cooldown of the optimizer.
      execution: how batches are made.
      rates: learning rates.
      seeds: of models, batches and noise.
      clip_norm: bound on an example's gradient.
      hidden: width of the model for vectors.
      microbatch: examples at work at once; 0: a batch.
    """
    from mfopt.experiments.studies import many_runs

    loaded = Data(*data).load()
    strategy = strategy_of(source)
    scheme = sampling.from_description(source.record["scheme"])
    sigma = source.record["guarantee"]["noise_multiplier"]
    population = len(loaded.train.y)
    privacy, batch_size = _stated(execution, source, scheme, population)
    mechanism = many_runs.RunMechanism(
        strategy, sigma, scheme, batch_size, shuffled=execution == SHUFFLED
    )
    workload = workload_of(schedule, scheme.length)
    measured = many_runs.train(
        loaded,
        mechanism,
        workload,
        rates=tuple(rates),
        seeds=tuple(seeds),
        clip_norm=clip_norm,
        hidden=hidden,
        microbatch=microbatch,
    )
    errors = sigma**2 * np.asarray(query_error.row_variances(workload, strategy, scheme.length))
    record = {
        "privacy": {"privacy_unit": "example", **privacy, "noise_multiplier": sigma},
        "population": population,
        "batch_size": batch_size,
        # on the workload of the run, whatever C was optimized for: of all iterates, of the last
        "rmse": float(np.sqrt(np.mean(errors))),
        "last_error": float(np.sqrt(errors[-1])),
    }
    return Result(record, measured)


def _stated(
    execution: str, source: Result, scheme: Any, population: int
) -> tuple[dict[str, Any], int | None]:
    """(adjacency, sampling, ε and δ of what is executed; the size that batches are cut to)."""
    guarantee = source.record["guarantee"]
    epsilon, delta, sigma = (guarantee[k] for k in ("epsilon", "delta", "noise_multiplier"))
    strategy = strategy_of(source)
    size = None
    if execution == SHUFFLED:
        # in equal batches every order is one of fixed order, and that is all that is known
        scheme = FixedOrder(scheme.bins, scheme.epochs)
        epsilon = account(Mechanism(scheme, strategy), noise_multiplier=sigma, delta=delta).epsilon
    elif execution == CUT:
        allowed = _SHARE * delta / (1 + np.exp(epsilon))
        size = smallest_batch_size(scheme, population, allowed)
        delta = charged_delta(epsilon, delta, displacement_probability(scheme, population, size))
    elif execution == CUT_AT_MEAN:
        # one unit may push out another in each of its batches: twice the sensitivity
        size = max(1, round(scheme.expected_batch(population)))
        epsilon = account(
            Mechanism(scheme, strategy),
            noise_multiplier=sigma / 2,
            delta=delta,
            seed=source.record["cell"]["seed"],
            samples=source.record["cell"]["samples"],
        ).epsilon
    elif execution != AS_ACCOUNTED:
        raise _check.reject("execution", execution, f"must be one of {', '.join(EXECUTIONS)}")
    words = scheme.words() + (f", cut to {size}" if size else "")
    stated = {
        "adjacency": scheme.executed_adjacency(guarantee["adjacency"]),
        "sampling": f"shuffled, accounted as {words}" if execution == SHUFFLED else words,
        "epsilon": float(epsilon),
        "delta": float(delta),
        "status": guarantee["status"],
    }
    return stated, size


class Best(NamedTuple):
    """Runs at the learning rate with the least mean validation loss.

    Attributes:
      rate: that rate.
      edge: "lowest" or "highest" where it is an end of those tried, else "".
      loss, accuracy: on the test part, (seeds,).
    """

    rate: float
    edge: str
    loss: np.ndarray
    accuracy: np.ndarray


def best(
    found: Mapping[Task, Result], cells: Sequence[Task], *, most: int = 0
) -> tuple[Best, list[Task]]:
    """The best rate over all seeds of a mechanism's cells, and the cells to run for one more.

    Args:
      found: results.
      cells: of :func:`run_task`, over all seeds and one grid of rates.
      most: rates to add where an end of the grid is best.
    """
    runs: dict[float, dict[str, np.ndarray]] = {}

    def read(cells: Sequence[Task]) -> None:
        results = [found[task] for task in cells]
        for at, rate in enumerate(cells[0].arguments["rates"]):
            runs[rate] = {
                name: np.concatenate([result.arrays[name][:, at] for result in results])
                for name in ("validation_loss", "test_loss", "test_accuracy")
            }

    def loss(rate: float) -> float | None:
        further = _at(cells, rate)
        if rate not in runs and all(task in found for task in further):
            read(further)
        return float(runs[rate]["validation_loss"].mean()) if rate in runs else None

    read(cells)
    chosen = choose(tuple(runs), loss, most=most)
    at = runs[chosen.rate]
    more = [] if chosen.missing is None else _at(cells, chosen.missing)
    return Best(chosen.rate, chosen.edge, at["test_loss"], at["test_accuracy"]), more


def _at(cells: Sequence[Task], rate: float) -> list[Task]:
    """The same runs at one other rate."""
    return [Task.of(task.name, task.needs, **{**task.arguments, "rates": [rate]}) for task in cells]
