"""White draws: what they cost, their law in 10⁸ draws, and the canary that 24 bits gave away.

    mfopt bench draws --runs 100 --out artifacts/bench-draws.json

Old is the draw of 24 of Threefry's 64 bits (|z| <= 5.42), kept here and in the tests as a control.

- cost: CPU seconds of one draw of 10⁷ elements, old and new in turn.
- law: chi-square of 10⁸ draws in 2,000 cells of equal probability and some in the tails.
- canary: a unit of norm 1 (σ = 1) is spread over P parameters and takes part in 16 steps. Attack:
  count the coordinates beyond the largest draw of the old generator, in runs with and without the
  unit, each with draws of its own. Reported: runs in which the count says "with" by the threshold
  that serves best, and the p-value of a rank test of both samples of counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from mfopt.noise import _draws, _keys

PARTICIPATIONS = 16


def old_normal(low: jax.Array, high: jax.Array, offset: Any, dtype: Any) -> jax.Array:
    """The draw of earlier versions."""
    del high, offset
    uniform = (2 * (low >> 8).astype(jnp.int32) + 1 - 2**24).astype(dtype) * np.float32(2.0**-24)
    return jnp.asarray(np.sqrt(2), dtype) * jax.lax.erf_inv(uniform)


DRAWS = ("old", "new")
END = float(old_normal(jnp.uint32(2**32 - 1), None, None, jnp.float32))


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
        return old_normal(*words, None, jnp.float32)
    of = _draws.seeds(key, step, np.arange(1)).of(0)
    words = _draws.threefry(of.subkeys, *_draws.Counters((count,)).words((count,), (0,)))
    return _draws.standard_normal(*words, of.offset, jnp.float32)


def cpu_seconds() -> float:
    """Of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cost(size: int, rounds: int) -> dict[str, float]:
    """Least CPU seconds of a draw, and the ratio of the two of one round."""
    compiled = {which: jax.jit(functools.partial(draw, which, size)) for which in DRAWS}
    key = _keys.fresh()
    found: dict[str, list[float]] = {which: [] for which in compiled}
    for step in range(rounds + 1):
        for which, function in compiled.items():
            started = cpu_seconds()
            jax.block_until_ready(function(key, np.int32(step)))
            found[which].append(cpu_seconds() - started)
    ratios = np.divide(found["new"][1:], found["old"][1:])
    least = {which: min(times[1:]) for which, times in found.items()}
    return {**least, "new / old, median of pairs": float(np.median(ratios))}


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

    key, counts = _keys.fresh(), np.zeros(len(edges) + 1)
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


def canary(which: str, size: int, runs: int) -> dict[str, Any]:
    """Counts of the attack with and without the unit."""
    shift = np.float32(1 / np.sqrt(size))

    @jax.jit
    def found(key: Any, step: Any, present: Any) -> jax.Array:
        return jnp.sum(draw(which, size, key, step) + shift * present > np.float32(END))

    counts = {}
    for present in (1, 0):
        key = _keys.fresh()
        counts[present] = [
            sum(
                int(found(key, np.int32(PARTICIPATIONS * run + t), np.float32(present)))
                for t in range(PARTICIPATIONS)
            )
            for run in range(runs)
        ]
    with_unit, without = np.array(counts[1]), np.array(counts[0])
    thresholds = range(max(with_unit.max(), without.max()) + 1)
    best = max(thresholds, key=lambda k: np.mean(with_unit > k) - np.mean(without > k))
    equal = len(set(counts[1] + counts[0])) == 1
    return {
        "parameters": size,
        "runs": runs,
        "mean with": float(with_unit.mean()),
        "mean without": float(without.mean()),
        "found with": int(np.sum(with_unit > best)),
        "found without": int(np.sum(without > best)),
        "p-value": 1.0 if equal else float(stats.mannwhitneyu(with_unit, without).pvalue),
    }


def main(argv: list[str]) -> None:
    """Measure all three and print them as JSON."""
    parser = argparse.ArgumentParser(prog="mfopt bench draws", description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=float, default=1e7, help="parameters of cost and canary")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--draws", type=float, default=1e8, help="draws of the law")
    parser.add_argument("--runs", type=int, default=100, help="of the canary; 0: none")
    parser.add_argument("--out", help="write the report there as well")
    options = parser.parse_args(argv)
    size = int(options.size)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "cost": cost(size, options.rounds),
        "law": law(int(options.draws)),
    }
    print(json.dumps(report, indent=2), flush=True)
    if options.runs:
        report["canary"] = {which: canary(which, size, options.runs) for which in DRAWS}
        print(json.dumps(report["canary"], indent=2), flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
