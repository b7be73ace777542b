"""Conformance checks for every sampling scheme: its files, its draws, and its declarations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import get_args

import numpy as np

from mfopt import sampling
from mfopt.sampling import Adjacency, Scheme
from mfopt.testing._rules import ERRORS, refused, rule

_MOST_ITERATIONS = 2000
_RUNS = 600  # simulated, each with its own seed


def check_scheme(scheme: Scheme, *, population: int = 40) -> None:
    """Check an example of a scheme against the requirements of the loader and the files.

    Args:
      scheme: an example, of few iterations (at most 2,000) and batches well below ``population``.
      population: number of units of the simulated runs.

    Raises:
      AssertionError: a rule is broken; the message says which.
    """
    rule(
        isinstance(scheme, Scheme) and scheme.length <= _MOST_ITERATIONS,
        f"the example must be a scheme of at most {_MOST_ITERATIONS} iterations",
    )
    _files(scheme)
    _adjacency(scheme)
    if not scheme.executable:
        rule(
            refused(scheme.sample, 0, population, 0) and refused(scheme.draws, population, 0),
            "a scheme that is not executable must refuse to sample with a UsageError",
        )
        return
    _steps(scheme, population)
    sizes, taking_part = _simulate(scheme, population)
    _laws(scheme, population, sizes)
    _epochs(scheme, taking_part)
    if scheme.independent:
        _independence(scheme, population, taking_part)


def _files(scheme: Scheme) -> None:
    rule(
        sampling.registered().get(scheme.kind) is type(scheme),
        f"the kind {scheme.kind!r} is not registered for this class",
    )
    rule(
        dataclasses.is_dataclass(scheme) and type(scheme).__dataclass_params__.frozen,  # type: ignore[attr-defined]
        "a scheme is a frozen dataclass",
    )
    description = json.loads(json.dumps(scheme.describe()))
    restored = sampling.from_description(description)
    rule(
        restored == scheme and hash(restored) == hash(scheme),
        "its description does not give it back",
    )
    rule(
        refused(sampling.from_description, {**description, "no such field": 1}),
        "a description with an unknown field must be refused",
    )
    numbers = {name: value for name, value in description.items() if name != "kind"}
    typed = f"{scheme.kind}:" + ",".join(f"{name}={value!r}" for name, value in numbers.items())
    rule(sampling.parse(typed) == scheme, f"what is typed, {typed}, does not give it back")
    for name, value in numbers.items():
        rule(type(value) in (int, float), f"the field {name} must be a plain number")
        for bad in ("x", math.nan, value + 0.5 if type(value) is int else math.inf):
            rule(
                refused(sampling.from_description, {**description, name: bad}),
                f"{name} = {bad!r} must be refused with a UsageError when it is constructed",
            )


def _adjacency(scheme: Scheme) -> None:
    for accounted in get_args(Adjacency):
        try:
            executed = scheme.executed_adjacency(accounted)
        except ValueError:
            continue  # refused
        rule(executed in get_args(Adjacency), f"{executed!r} is no adjacency")
        rule(
            scheme.independent or executed != "add-remove",
            "a unit that leaves moves the others: a run cannot protect under add-remove adjacency",
        )
        rule(
            executed == accounted or executed == "zero-out",
            f"an account for {accounted!r} shows nothing about {executed!r}",
        )


def _steps(scheme: Scheme, population: int) -> None:
    n = scheme.length
    for step in (-1, n, 0.5, True):
        rule(
            refused(scheme.sample, step, population, 0),
            f"step {step!r} of {n} must be refused with a UsageError",
        )
    drawn = scheme.draws(population, 0)
    backwards = {t: np.asarray(drawn(t)) for t in reversed(range(n))}
    differs = False
    for t in range(n):
        units = np.asarray(scheme.sample(t, population, 0))
        rule(
            units.ndim == 1
            and np.issubdtype(units.dtype, np.integer)
            and bool(np.all(np.diff(units) > 0))
            and bool(np.all((units >= 0) & (units < population))),
            f"step {t} must be increasing indices among {population} units",
        )
        rule(
            np.array_equal(units, scheme.sample(t, population, 0)),
            f"step {t} is not a pure function of its arguments",
        )
        rule(
            np.array_equal(units, backwards[t]),
            f"draws gives other units than sample in step {t}: a resumed run would differ",
        )
        differs |= not np.array_equal(units, scheme.sample(t, population, 1))
    rule(
        differs != scheme.public_order,
        "the draws must depend on the seed, unless the order is declared public",
    )


def _simulate(scheme: Scheme, population: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(sizes (runs, n), participations of units (runs, n, population) as bool)."""
    n = scheme.length
    taking_part = np.zeros((_RUNS, n, population), dtype=bool)
    for run in range(_RUNS):
        drawn = scheme.draws(population, seed + run)
        for t in range(n):
            taking_part[run, t, drawn(t)] = True
    return taking_part.sum(axis=2), taking_part


def _laws(scheme: Scheme, population: int, sizes: np.ndarray) -> None:
    runs, n = sizes.shape
    # the largest distance of an empirical law that occurs once in a million laws (Massart 1990)
    furthest = math.sqrt(math.log(2 * n / 1e-6) / (2 * runs))
    sizes_up_to = np.arange(population + 1)
    means = []
    for t in range(n):
        law = scheme.batch_sizes(t, population)
        cumulative = np.asarray(law.cdf(sizes_up_to))
        rule(abs(cumulative[-1] - 1) < 1e-9, f"step {t}: the law has more units than there are")
        empirical = np.mean(sizes[:, t, None] <= sizes_up_to, axis=0)
        distance = float(np.max(np.abs(empirical - cumulative)))
        rule(
            distance <= furthest,
            f"step {t}: the sizes of {runs} runs are {distance:.3f} away from batch_sizes",
        )
        means.append(float(law.mean()))
        error = float(law.std()) / math.sqrt(runs)
        # once in a million for the furthest of n steps
        rule(
            abs(float(sizes[:, t].mean()) - means[-1]) <= (ERRORS + 1) * error + 1e-9,
            f"step {t}: batches have {sizes[:, t].mean():.3f} units in the mean, and the law "
            f"{means[-1]:.3f}",
        )
    expected = float(scheme.expected_batch(population))
    rule(
        math.isclose(expected, float(np.mean(means)), rel_tol=1e-9),
        f"expected_batch is {expected}, and the mean over the steps is {np.mean(means)}",
    )


def _epochs(scheme: Scheme, taking_part: np.ndarray) -> None:
    ends = [-1, *scheme.epoch_ends]
    rule(
        all(a < b for a, b in itertools.pairwise(ends)) and ends[-1] < scheme.length,
        "epoch_ends must be increasing steps of the scheme",
    )
    for previous, end in itertools.pairwise(ends):
        often = taking_part[:, previous + 1 : end + 1].sum(axis=1)
        rule(
            bool(np.all(often == 1)),
            f"epoch_ends declares steps {previous + 1} to {end} an epoch, and units take part "
            f"{int(often.min())} to {int(often.max())} times in them",
        )


def _independence(scheme: Scheme, population: int, taking_part: np.ndarray) -> None:
    """Independent units: a size varies as much as they do one by one, whoever else is there."""
    chance = taking_part.mean(axis=0)  # (n, population)
    variance_of_units = np.sum(chance * (1 - chance), axis=1) * _RUNS / (_RUNS - 1)
    varies = np.array(
        [float(scheme.batch_sizes(t, population).var()) for t in range(scheme.length)]
    )
    error = np.sqrt(np.sum((1 - 2 * chance) ** 2 * chance * (1 - chance), axis=1) / _RUNS)
    slack = (ERRORS + 1) * error + 0.05 * varies
    rule(
        bool(np.all(np.abs(variance_of_units - varies) <= slack)),
        "units are declared independent, and the sizes vary by another amount than the units do",
    )
    # pairs: correlations that cancel in the total
    centred = taking_part - chance
    spread = np.sqrt(chance * (1 - chance))
    for unit in (1, population // 2, population - 1):
        product = np.mean(centred[:, :, 0] * centred[:, :, unit], axis=0)
        bound = (ERRORS + 1) * spread[:, 0] * spread[:, unit] / math.sqrt(_RUNS) + 1e-9
        rule(
            bool(np.all(np.abs(product) <= bound)),
            f"units are declared independent, and units 0 and {unit} are not",
        )
    fewer = max(1, population // 2)
    try:
        taking_part_fewer = _simulate(scheme, fewer, _RUNS)[1][:, :, 0]
    except ValueError as problem:
        raise AssertionError(
            f"units are declared independent, and {fewer} units are refused: {problem}"
        ) from problem
    chance_of_both = (taking_part_fewer.mean(axis=0) + chance[:, 0]) / 2
    error = np.sqrt(2 * chance_of_both * (1 - chance_of_both) / _RUNS)
    rule(
        bool(
            np.all(
                np.abs(taking_part_fewer.mean(axis=0) - chance[:, 0]) <= (ERRORS + 1) * error + 1e-9
            )
        ),
        f"unit 0 takes part with another chance among {fewer} units than among {population}",
    )
