"""White draws: their law in 10⁸ draws, and the canary that 24 bits gave away.

    mfopt bench draws --runs 100 --out artifacts/bench-draws.json

Old is the draw of 24 of Threefry's 64 bits (|z| <= 5.42), kept here and in the tests as a control.

- law: chi-square of 10⁸ draws in 2,000 cells of equal probability and some in the tails.
- canary: a unit of norm 1 (σ = 1) is spread over P parameters and takes part in 16 steps. Attack:
  count the coordinates beyond the largest draw of the old generator, and say "with the unit" where
  there are more than a threshold, fixed before any draw: the least that a run without the unit
  exceeds with probability at most 1%, by the law that the generator claims (none at all for the
  old one, Poisson with mean P · 16 · Φ(-end) for the new one). Reported: how often the attack says
  so in runs with the unit and in the same runs without it, and how likely so many or more are by
  chance (p-value). It finds nothing where the runs with the unit are told no more often than those
  without, up to chance; the unit itself, found by the sum of all coordinates, is what δ answers
  for and no fault of a generator.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bench, Options
from scipy import special, stats

from mfopt.noise import _draws, _keys

PARTICIPATIONS = 16
LEVEL = 0.01  # of the attack: false alarms at most

bench = Bench(
    __file__,
    __doc__,
    params=(10**7, "Parameters of the canary.", "--size"),
    draws=(10**8, "Draws of the law."),
    runs=(100, "Runs of the canary; 0: none."),
)
parser, main = bench.parser, bench.main


def old_normal(low: jax.Array) -> jax.Array:
    """The draw of earlier versions."""
    uniform = (2 * (low >> 8).astype(jnp.int32) + 1 - 2**24).astype(jnp.float32)
    return jnp.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform * np.float32(2.0**-24))


DRAWS = ("old", "new")
END = float(old_normal(jnp.uint32(2**32 - 1)))


def old_subkeys(key: Any) -> list[Any]:
    """The key schedule of the published Threefry-2x32-20, from 64 bits."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    subkeys = [schedule[0], schedule[1]]
    for i in range(5):
        subkeys += [schedule[(i + 1) % 3], schedule[(i + 2) % 3] + np.uint32(i + 1)]
    return subkeys


def draw(which: str, count: int, key: Any, step: Any) -> jax.Array:
    """``count`` draws of a step."""
    if which == "old":
        low = jax.lax.iota(jnp.uint32, count)
        words = _draws.threefry(old_subkeys(key), low, jnp.asarray(step).astype(jnp.uint32))
        return old_normal(words[0])
    subkeys, offset = _draws.seeds(key, step, np.arange(1))
    words = _draws.threefry(subkeys[:, 0], *_draws.counters((count,), (count,), (0,)))
    return _draws.standard_normal(*words, offset[0], jnp.float32)


def law(count: int) -> dict[str, float]:
    """Chi-square over the whole range, cells of at least 5 expected draws."""
    chunk = 10**6
    tails = np.linspace(3.5, 5.1, 17)
    edges = np.concatenate([-tails[::-1], special.ndtri(np.arange(1, 2000) / 2000), tails])
    edges32 = jnp.asarray(edges.astype(np.float32))

    @jax.jit
    def cells(key: Any, step: Any) -> jax.Array:
        made = draw("new", chunk, key, step)
        return jnp.bincount(jnp.searchsorted(edges32, made), length=len(edges) + 1)

    key, counts = _keys.on_host(None, None), np.zeros(len(edges) + 1)
    for step in range(count // chunk):
        counts += np.asarray(cells(key, np.int32(step)))
    cut = edges.astype(np.float32).astype(np.float64)
    expected = np.diff(special.ndtr(cut), prepend=0, append=1) * count
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    return {
        "draws": count,
        "cells": len(counts),
        "least expected": float(np.min(expected)),
        "chi-square": statistic,
        "p-value": float(stats.chi2.sf(statistic, len(counts) - 1)),
    }


def threshold(which: str, size: int) -> tuple[int, float]:
    """(count above which the attack says "with", chance of that without the unit)."""
    if which == "old":
        return 0, 0.0  # nothing lies beyond its end
    law = stats.poisson(size * PARTICIPATIONS * special.ndtr(-END))
    limit = int(law.isf(LEVEL))
    return limit, float(law.sf(limit))


def canary(which: str, size: int, runs: int) -> dict[str, Any]:
    """What the attack says of runs with the unit and of the same runs without it."""
    shift = np.float32(1 / np.sqrt(size))
    limit, chance = threshold(which, size)

    @jax.jit
    def beyond(key: Any, step: Any) -> tuple[jax.Array, jax.Array]:
        made = draw(which, size, key, step)
        return jnp.sum(made + shift > np.float32(END)), jnp.sum(made > np.float32(END))

    key, counts = _keys.on_host(None, None), np.zeros((2, runs), int)
    for run in range(runs):
        for t in range(PARTICIPATIONS):
            found = beyond(key, np.int32(PARTICIPATIONS * run + t))
            counts[:, run] += [int(count) for count in found]
    told = np.sum(counts > limit, axis=1)
    return {
        "parameters": size,
        "runs": runs,
        "threshold": limit,
        "mean with": float(counts[0].mean()),
        "mean without": float(counts[1].mean()),
        "told with": int(told[0]),
        "told without": int(told[1]),
        "p-value": float(stats.binom.sf(told[0] - 1, runs, chance)),
    }


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """Both."""
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "law": law(options.draws),
    }
    if options.runs:
        report["canary"] = {which: canary(which, options.params, options.runs) for which in DRAWS}
    return report
