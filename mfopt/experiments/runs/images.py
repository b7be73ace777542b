"""Runs on images with a mechanism, and what each run states of its privacy.

What a run states is what it executes: where batches are cut, or shuffled in place of sampled,
(ε, δ) is that of the execution at the same σ, not the one that σ was chosen for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import optax

from mfopt import query_error, sampling
from mfopt._runtime import _check
from mfopt.accounting import Mechanism, account
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.mechanisms import ProvenCell, strategy_of
from mfopt.experiments.options import from_0_to_1, option
from mfopt.sampling import FixedOrder
from mfopt.training.batching import charged_delta, displacement_probability, smallest_batch_size
from mfopt.workloads import Momentum, linear_cooldown

# how a mechanism's batches are made: as accounted for, cut where that costs little δ or at their
# mean size, or by shuffling, which its account does not cover
AS_ACCOUNTED, CUT, CUT_AT_MEAN, SHUFFLED = "as accounted", "cut", "cut at the mean", "shuffled"
EXECUTIONS = (AS_ACCOUNTED, CUT, CUT_AT_MEAN, SHUFFLED)
_SHARE = 0.1  # of δ that cutting batches may cost


def check_folder(name: str, folder: Path) -> None:
    """Refuse a folder without the binary version of CIFAR-10."""
    if not (folder / "test_batch.bin").is_file():
        rule = "must be a folder with the binary version of CIFAR-10"
        raise _check.reject(name, str(folder), rule)


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """Data, model and optimizer: options of a study, and settings of its cells."""

    cifar: Path | None = option(  # noqa: RUF009
        None,
        "Folder with the binary version of CIFAR-10, for a VGG; none: digits, for a hidden layer.",
        kind=Path,
        rule=check_folder,
    )
    held_out: int = option(400, "Examples for validation and test; of CIFAR-10 for validation.")
    hidden: int = option(16, "Width of the hidden layer.")
    momentum: float = option(0.9, "Momentum of the optimizer.", rule=from_0_to_1)
    constant: float = option(0.25, "Share of the run before the rate cools down.", rule=from_0_to_1)
    final: float = option(0.05, "Last rate over the first.")
    clip: float = option(1.0, "Clip norm of an example's gradient.")
    microbatch: int = option(0, "Examples at work at once in a run; 0: a whole batch.", least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagesCell(ImageTask, Cell):
    """Runs over rates and seeds; σ is the mechanism's, however it is executed.

    ``execution`` says how batches are made; a seed pins model, batches and noise. C is optimized
    for prefix sums, whatever the optimizer does.
    """

    name = "study-images"
    source: ProvenCell
    execution: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def run(self, *needed: Result) -> Result:
        from mfopt.experiments.runs import many_runs, pictures

        (source,), loaded = needed, pictures.load(self.cifar, self.held_out)
        strategy = strategy_of(source)
        scheme = sampling.from_description(source.record["scheme"])
        sigma = source.record["guarantee"]["noise_multiplier"]
        population, shape = len(loaded.train.y), loaded.train.x.shape[1:]
        privacy, batch_size = self.stated(source, scheme, population)
        mechanism = many_runs.RunMechanism(
            strategy, sigma, scheme, batch_size, shuffled=self.execution == SHUFFLED
        )
        n = scheme.length
        rates = linear_cooldown(n, min(round(self.constant * n), n - 1), n, self.final)
        workload = Momentum(self.momentum, rates)
        measured = many_runs.train(
            loaded,
            mechanism,
            workload,
            rates=self.rates,
            seeds=self.seeds,
            clip_norm=self.clip,
            hidden=self.hidden,
            microbatch=self.microbatch,
        )
        errors = sigma**2 * np.asarray(query_error.row_variances(workload, strategy, n))
        record = {
            "privacy": {"privacy_unit": "example", **privacy, "noise_multiplier": sigma},
            "rates": list(self.rates),
            "population": population,
            "parameters": optax.tree.size(pictures.model(shape, self.hidden, seed=0)[0]),
            "batch_size": batch_size,
            # on the workload of the run, whatever C was optimized for: of all iterates, of the last
            "rmse": float(np.sqrt(np.mean(errors))),
            "last_error": float(np.sqrt(errors[-1])),
        }
        return Result(record, measured)

    def stated(
        self, source: Result, scheme: Any, population: int
    ) -> tuple[dict[str, Any], int | None]:
        """(adjacency, sampling, ε and δ of what is executed; the size that batches are cut to)."""
        guarantee = source.record["guarantee"]
        epsilon, delta, sigma = (guarantee[k] for k in ("epsilon", "delta", "noise_multiplier"))
        strategy, size = strategy_of(source), None
        if self.execution == SHUFFLED:
            # in equal batches every order is one of fixed order, and that is all that is known
            scheme = FixedOrder(scheme.bins, scheme.epochs)
            fixed = Mechanism(scheme, strategy)
            epsilon = account(fixed, noise_multiplier=sigma, delta=delta).epsilon
        elif self.execution == CUT:
            allowed = _SHARE * delta / (1 + np.exp(epsilon))
            size = smallest_batch_size(scheme, population, allowed)
            pushed_out = displacement_probability(scheme, population, size)
            delta = charged_delta(epsilon, delta, pushed_out)
        elif self.execution == CUT_AT_MEAN:
            # one unit may push out another in each of its batches: twice the sensitivity
            size = max(1, round(scheme.expected_batch(population)))
            epsilon = account(
                Mechanism(scheme, strategy),
                noise_multiplier=sigma / 2,
                delta=delta,
                seed=self.source.goal.seed,
                samples=self.source.samples,
            ).epsilon
        elif self.execution != AS_ACCOUNTED:
            rule = f"must be one of {', '.join(EXECUTIONS)}"
            raise _check.reject("execution", self.execution, rule)
        words = scheme.words() + (f", cut to {size}" if size else "")
        stated = {
            "adjacency": scheme.executed_adjacency(guarantee["adjacency"]),
            "sampling": (
                f"shuffled, accounted as {words}" if self.execution == SHUFFLED else words
            ),
            "epsilon": float(epsilon),
            "delta": float(delta),
            "status": guarantee["status"],
        }
        return stated, size
