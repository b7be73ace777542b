"""About how long the cells of a comparison take on a CPU: told before the work.

Fitted to cells of 2 × 8, 8 × 32 and 16 × 128 on two cores; right within a factor of about three for
a sweep, and a busy machine takes longer. A cell that is in the cache costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mfopt import _sizes
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.experiments.cache import Task
from mfopt.experiments.tasks import BALLS, FRESH
from mfopt.optimize import kinds, sizes
from mfopt.optimize.time_scale import Scaling
from mfopt.sampling import BallsInBins, BinScheme, FreshBins

# Seconds on the two cores that costs were measured on.
_PROGRAM = {"amplified": 5.0, "sigma": 1.0}  # to compile one, by task
_ACCOUNT = 0.3  # of σ without samples
_ROOT = 2  # Monte Carlo evaluations behind a σ
_TANGENTS = 15  # evaluations of most searches by tangents
_GENERAL = 20  # of most for general C, which end where a round gains nothing
_MANY = 2.0  # a search in as many numbers as there are steps, over one in a few
_FIXED_ORDER = 75  # evaluations of a search without amplification
_BANDED, _CUBE = 3e-6, 2e-10  # of such an evaluation: for n (1 + (bands / 30)²), and for n³


def seconds(missing: Iterable[Task]) -> float | None:
    """Seconds of one process for these cells; None where one is of a kind that nobody measured."""
    total, programs = 0.0, {}
    for task in missing:
        cost = _COSTS.get(task.name)
        if cost is None:
            return None
        given = task.arguments
        total += cost(given)
        source = task.needs[0].arguments if task.name == "sigma" else given
        program = (task.name, given.get("sampling"), source["kind"], source.get("scaled"))
        programs[(*program, given.get("bins"), given.get("bands"))] = _PROGRAM.get(task.name, 0.0)
    return _sizes.here(total + sum(programs.values()))


def _amplified(given: dict[str, Any]) -> float:
    entry = kinds.find(given["kind"])
    n, bins = given["bins"] * given["epochs"], given["bins"]
    size = kinds.Size(n, bins, max(given["bands"], 1), max(given["buffers"], 1))
    many = entry.parameters(size) >= n - 1
    if given["scaled"]:
        entry = kinds.scaled(entry, Scaling())
    evaluations = min(entry.steps, _TANGENTS if entry.tangents else _GENERAL)
    samples = given["samples"] or entry.samples // law(_scheme(given)).frugal
    search = sizes.search_seconds(_scheme(given), samples=samples, evaluations=evaluations)
    own = evaluations * _CUBE * float(n) ** 3 if given["kind"] == "dense" else 0.0
    return search * (_MANY if many else 1.0) + own


def _unamplified(given: dict[str, Any]) -> float:
    n = float(given["bins"] * given["epochs"])
    if given["kind"] == "dense":
        return _FIXED_ORDER * _CUBE * n**3
    if given["kind"] == "banded":
        return _FIXED_ORDER * _BANDED * n * (1 + (float(given["bands"]) / 30) ** 2)
    return _PROGRAM["amplified"]  # compilation is most of it


def _sigma(given: dict[str, Any]) -> float:
    if given["sampling"] not in (BALLS, FRESH):
        return _ACCOUNT
    return sizes.search_seconds(_scheme(given), samples=given["samples"], evaluations=_ROOT)


def _scheme(given: dict[str, Any]) -> BinScheme:
    made = FreshBins if given.get("sampling") == FRESH else BallsInBins
    return made(given["bins"], given["epochs"])


_COSTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "fixed": lambda given: 0.0,
    "unamplified": _unamplified,
    "amplified": _amplified,
    "sigma": _sigma,
}
