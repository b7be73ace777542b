"""Ablation of the Monte Carlo accountant: each refinement switched off, one at a time.

    mfopt bench ablation --out artifacts/bench-ablation.json

A setting is a mechanism and a target (ε, δ). For each refinement that takes part in it, σ is
certified without the refinement, with the seeds that the unchanged accountant is given. A row says
by how much certified and estimated σ grow and by what factor CPU seconds do (programs compiled
beforehand); it is kept as soon as it is measured, and a later call goes on from there. What saves
less than 0.1% of σ and less than a third of the time in every setting is not worth its lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from harness import Bench, Options, choice, cpu

import mfopt
from mfopt.accounting.monte_carlo import (
    balls_in_bins,
    count_mixture,
    design_point,
    dominating_pair,
    evidence,
    group,
    importance,
    kept_bins,
    losses,
    nested,
    pattern_ceilings,
    pattern_frozen,
    patterns,
    sampled,
)
from mfopt.accounting.verify import Engine
from mfopt.mechanism import Mechanism
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import BLT, BandedSquareRoot, Identity, SquareRoot, Strategy, TimeScaled

# --- settings -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mechanism and its target."""

    scheme: Any
    strategy: Callable[[], Strategy]
    epsilon: float
    delta: float
    group_size: int = 1

    @property
    def family(self) -> str:
        """What kind of accountant it has."""
        if self.group_size > 1:
            return "groups"
        if isinstance(self.scheme, FreshBins):
            return "fresh"
        return "many" if self.scheme.bins >= nested.LEAST else "kept"

    def model(self) -> Any:
        """A new model of it: nothing is kept from one run to the next."""
        mechanism = Mechanism(self.scheme, self.strategy(), group_size=self.group_size)
        module = group if isinstance(self.scheme, FreshBins) else balls_in_bins
        return module.model(mechanism)


def _file(name: str) -> Strategy:
    return mfopt.load(Path("artifacts/factorizations") / f"{name}.npz").strategy


def _stretched(n: int) -> Strategy:
    """The scaled BLT of a file, its diagonals and decays stretched to n iterations."""
    found: Any = _file(_SCALED)
    old = len(found.rows)
    at = np.linspace(0, old - 1, n)
    rows, columns = (np.interp(at, np.arange(old), np.asarray(x)) for x in found.diagonals(old))
    scale, decay = (np.asarray(part) for part in (found.base.scale, found.base.decay))
    return TimeScaled(BLT(scale * old / n, decay ** (old / n)), rows, columns)


def _kept(epochs: int, bins: int, strategy: Any, *target: Any) -> Setting:
    make = strategy if callable(strategy) else functools.partial(_file, strategy)
    return Setting(BallsInBins(epochs=epochs, bins=bins), make, *target)


def _fresh(epochs: int, bins: int, bands: int, *target: Any) -> Setting:
    make = functools.partial(BandedSquareRoot, bands)
    return Setting(FreshBins(epochs=epochs, bins=bins), make, *target)


_SCALED = "optimize-blt-16x128-eps2"
_BANDED = functools.partial(BandedSquareRoot, 4)
_EIGHT = functools.partial(BandedSquareRoot, 8)
SETTINGS = {
    "kept 4x8 banded (4), ε=2, δ=1e-4": _kept(4, 8, _BANDED, 2, 1e-4),
    "kept 4x8 banded (4), ε=64, δ=1e-5": _kept(4, 8, _BANDED, 64, 1e-5),
    "kept 8x32 scaled BLT, ε=8, δ=1e-5": _kept(8, 32, "blt-4-scaled-8x32-eps8", 8, 1e-5),
    "kept 4x64 square root, ε=8, δ=1e-8": _kept(4, 64, SquareRoot, 8, 1e-8),
    "kept 16x128 scaled BLT, ε=0.1, δ=1e-4": _kept(16, 128, _SCALED, 0.1, 1e-4),
    "kept 16x128 scaled BLT, ε=0.5, δ=1e-8": _kept(16, 128, _SCALED, 0.5, 1e-8),
    "kept 16x128 scaled BLT, ε=2, δ=1e-5": _kept(16, 128, _SCALED, 2, 1e-5),
    "kept 16x128 scaled BLT, ε=2, δ=1e-12": _kept(16, 128, _SCALED, 2, 1e-12),
    **{
        f"kept 8x{bins} scaled BLT, ε=2, δ=1e-5": _kept(
            8, bins, functools.partial(_stretched, 8 * bins), 2, 1e-5
        )
        for bins in (512, 1024, 4096)
    },
    "fresh 4x8 banded (4), ε=2, δ=1e-4": _fresh(4, 8, 4, 2, 1e-4),
    "fresh 8x32 banded (8), ε=0.5, δ=1e-8": _fresh(8, 32, 8, 0.5, 1e-8),
    "fresh 4x32 banded (8), ε=2, δ=1e-12": _fresh(4, 32, 8, 2, 1e-12),
    "fresh 4x32 banded (16), ε=8, δ=1e-5": _fresh(4, 32, 16, 8, 1e-5),
    "fresh 4x16 banded (16), ε=64, δ=1e-5": _fresh(4, 16, 16, 64, 1e-5),
    "fresh 16x128 banded (16), ε=2, δ=1e-5": _fresh(16, 128, 16, 2, 1e-5),
    "groups of 4, kept 2x16 banded (8), ε=2, δ=1e-5": _kept(2, 16, _EIGHT, 2, 1e-5, 4),
    "groups of 8, kept 2x16 identity, ε=8, δ=1e-8": _kept(2, 16, Identity, 8, 1e-8, 8),
}

# --- what is switched off -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Switch:
    """A refinement: where it takes part, and (object, attribute, value) of what replaces it.

    ``compiled`` says that programs hold what is replaced, so that they are compiled anew.
    """

    families: str
    changes: tuple[tuple[Any, str, Any], ...]
    compiled: bool = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.compiled:
                jax.clear_caches()
                stack.callback(jax.clear_caches)
            for change in self.changes:
                stack.enter_context(mock.patch.object(*change))
            yield


def _bernstein(sums: Any, samples: int, beta: float) -> float:
    """Maurer and Pontil 2009, of values in [0, 1]."""
    mean = float(sums.total) / samples
    variance = max(float(sums.square) / samples - mean**2, 0.0) * samples / (samples - 1)
    logs = math.log(2 / beta)
    return mean + math.sqrt(2 * variance * logs / samples) + 7 * logs / (3 * (samples - 1))


def _expected(pilot: Any, samples: int, beta: float) -> tuple[int, float]:
    total = evidence.Sums(*(leaf * (samples / pilot.samples) for leaf in pilot.sums))
    mean = float(pilot.sums.total) / pilot.samples
    return 0, math.log(_bernstein(total, samples, beta) / mean) if mean > 0 else math.inf


def _bound(tilt: Any, sums: Any, samples: int, *, bet: int, beta: float, **more: Any) -> Any:
    scaled = min(_bernstein(sums, samples, beta) + more.get("beyond", 0.0), 1.0)
    found = evidence.ceiling_alone(tilt)
    mean = float(sums.total) / samples * found.ceiling
    return found._replace(value=scaled * found.ceiling, mean=mean, samples=samples)


_CEILINGS, _TILTS, _PLACED = kept_bins.ceilings, importance.remove_tilts, design_point.placed
_SPLITS, _MINIMIZE = group.splits, pattern_frozen.scipy.optimize.minimize


def _without_clusters(*args: Any) -> Any:
    found = _CEILINGS(*args)
    return dataclasses.replace(found, chains={"chain": found.chains["chain"]})


def _without_shift(*args: Any) -> Any:
    return [tilt for tilt in _TILTS(*args) if tilt.kind != "shift"]


def _one_start(*args: Any) -> Any:
    """Design points from the mode alone: both halves of the components are the same."""
    found = _PLACED(*args)
    own = np.asarray(found.weights)[: len(found.weights) // 2]
    return found._replace(weights=jax.numpy.asarray(np.concatenate([own, own])))


def _product_of_maxima(moments: Any, l: int) -> float:
    worst = np.log(np.max(np.mean(np.exp(l * moments.within), axis=1), axis=1))
    pairs = l * moments.corner.max(axis=(1, 2), initial=0.0)
    return float(np.sum(worst) + 2 * np.sum(pairs))


def _not_fitted(function: Any, start: Any, **more: Any) -> Any:
    return _MINIMIZE(function, start, **{**more, "options": {"maxfun": 1, "maxiter": 0}})


def _not_faint(loss: Any, part: int, faint: Any = None) -> Any:
    pair = count_mixture.CountPair(loss.bins, loss.group_size, *loss.parts[part])
    return pair._replace(faint=0.0)


_ONE, _ALL = "kept many fresh", "kept many fresh groups"
SWITCHES = {
    "shared Gaussian component": Switch(
        _ONE, ((kept_bins, "shared", lambda pair: None), (patterns, "shared", lambda at: None))
    ),
    "clusters": Switch("kept many", ((kept_bins, "ceilings", _without_clusters),)),
    "shift proposal": Switch(
        "kept fresh",
        ((importance, "remove_tilts", _without_shift), (importance, "_SHIFT_WORTH", math.inf)),
    ),
    "several points a sample": Switch(
        _ONE, ((importance, "POINTS", 1), (importance, "_SMOOTH_POINTS", 1)), compiled=True
    ),
    "eight points where no component is shared": Switch(
        "kept fresh", ((importance, "POINTS", 2),), compiled=True
    ),
    "order by pilots": Switch(
        _ONE,
        (
            (
                losses.LikelihoodLoss,
                "_best",
                lambda loss, tilts, point, trial, _: loss.pilot(
                    tilts[0], point, loss.glance, trial.key
                ),
            ),
        ),
    ),
    "betting (empirical Bernstein instead)": Switch(
        _ALL,
        (
            (evidence.Pilot, "expected", _expected),
            (losses, "upper_bound", _bound),
            (count_mixture, "upper_bound", _bound),
        ),
    ),
    "fewer samples in the lesser direction": Switch(_ONE, ((sampled, "_ENOUGH", 0),)),
    "lesser direction by its ceiling": Switch(_ONE, ((sampled, "_ALONE", 1e-300),)),
    "clipping in the add direction": Switch(_ONE, ((losses, "_LOOSE", math.inf),)),
    "second start of design points": Switch("kept", ((design_point, "placed", _one_start),)),
    "hierarchical factor": Switch(
        "many", ((nested, "LEAST", 10**9), (dominating_pair, "_SPARE", 0.0))
    ),
    "σ by pilots with many bins": Switch(
        "many", ((sampled.OneUnit, "_by_pilots", lambda unit, *args: None),)
    ),
    "fitted proposal of the estimate": Switch(
        "fresh", ((pattern_frozen.scipy.optimize, "minimize", _not_fitted),)
    ),
    "second component of the estimate": Switch(
        "fresh", ((pattern_frozen, "COMPONENTS", 1),), compiled=True
    ),
    "ceiling by a chain (product of maxima instead)": Switch(
        "fresh", ((pattern_ceilings._Moments, "log_largest", _product_of_maxima),)
    ),
    "event that leaves the faint out": Switch("groups", ((group.GroupLoss, "_pair", _not_faint),)),
    "several splits": Switch(
        "groups", ((group, "splits", lambda gram, size: _SPLITS(gram, size)[:1]),)
    ),
}

bench = Bench(
    __file__,
    __doc__,
    settings=("", "Only settings with this in their name."),
    switches=choice(SWITCHES),
    seeds=(1, "Certificates of each, beside the first, which compiles."),
)
parser, main = bench.parser, bench.main


def measured(setting: Setting, seeds: int) -> dict[str, Any]:
    """Certified and estimated σ, means over seeds, and CPU seconds of one certificate."""
    certified, estimated, seconds = [], [], []
    for seed in range(seeds + 1):
        engine = Engine(setting.model(), seed)
        found, took = cpu(engine.noise_multiplier, setting.epsilon, setting.delta)
        seconds.append(took)
        certified.append(found.noise_multiplier)
        estimated.append(found.estimate.value if found.estimate else found.noise_multiplier)
    return {
        "certified": float(np.mean(certified)),
        "estimated": float(np.mean(estimated)),
        "seconds": float(np.median(seconds[1:])),
        "method": found.method,
    }


def without(setting: Setting, switch: Switch, before: dict[str, Any], seeds: int) -> dict[str, Any]:
    """What a setting gives with a refinement switched off, beside what it gives with all."""
    try:
        with switch.off():
            after = measured(setting, seeds)
    except Exception as problem:  # no certificate is a result
        return {"refused": f"{type(problem).__name__}: {problem}"[:160]}
    return {
        "certified σ, percent": 100 * (after["certified"] / before["certified"] - 1),
        "estimated σ, percent": 100 * (after["estimated"] / before["estimated"] - 1),
        "CPU seconds, factor": after["seconds"] / before["seconds"],
        **({} if after["method"] == before["method"] else {"method": after["method"]}),
    }


def worth(rows: dict[str, Any]) -> dict[str, Any]:
    """The most that each refinement saves anywhere, and in how many settings it was measured."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows.values() for name in row if name != "all"):
        seen = [row[name] for row in rows.values() if name in row]
        known = [row for row in seen if "refused" not in row]
        most = {key: max((row[key] for row in known), default=None) for key in _MOST}
        needed = len(known) < len(seen) or most[_MOST[0]] >= 0.1 or most[_MOST[1]] >= 4 / 3
        found[name] = {"settings": len(seen), **most, "worth its lines": needed}
    return found


_MOST = ("certified σ, percent", "CPU seconds, factor")


@bench.work
def ablation(options: Options) -> dict[str, Any]:
    """Measure what is not in the report yet."""
    report = bench.earlier({"most saved anywhere": {}, "settings": {}})
    rows = report["settings"]
    for name, setting in SETTINGS.items():
        if options.settings not in name:
            continue
        row = rows.setdefault(name, {})
        for switch in options.switches:
            if switch in row or setting.family not in SWITCHES[switch].families.split():
                continue
            if "all" not in row:
                row["all"] = measured(setting, options.seeds)
            row[switch] = without(setting, SWITCHES[switch], row["all"], options.seeds)
            print(f"{name}: {switch}: {row[switch]}", flush=True)
            report["most saved anywhere"] = worth(rows)
            bench.keep(report)
    return report
