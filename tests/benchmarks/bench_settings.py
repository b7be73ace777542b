"""Random settings over the whole range that users may ask for: does each get a right answer?

Each setting is a Poisson-sampled mechanism with p from 1e-9 to 1, up to 10^7 iterations, groups of
up to 1,000, ε from 1e-3 to 100 and δ from 1e-3 to 1e-15, all log-uniform. Asked are σ for (ε, δ)
and then ε and δ at that σ. Checked: an answer or a refusal that gives its reason, at most 10 s of
CPU time and 1 GiB for each question; the lower bound of the discretization below the answer; ε
falls with σ and δ and grows with p, T and K; and, for every tenth setting for which dp_accounting
has an answer in 10 s, ε between its optimistic and its pessimistic estimate, up to the 3e-5 that
answers here may be above the truth (2e-5 are aimed at). Below δ = 1e-11 a disagreement is listed
apart: its own rounding is of that size. So is one with a reference that contradicts itself: whose
optimistic estimate is above its pessimistic one, or that is asked again on a grid three times as
coarse and three times as fine (twice, where that takes too long), and either estimate is worse on
the finer of two grids of which one holds the other, or a lower bound of one is above the upper
bound of another. Any other disagreement is wrong, but for the settings in ``ARBITRATED``.

What was found for each setting goes into ``--log``, a line each, with the commit; settings that it
has already are not examined again, so that a long run may be cut anywhere. The last line of a
setting is the one that counts: that of ``--first 6610 --count 1`` with a log of its own takes the
older one's place once it is added.

    python tests/benchmarks/bench_settings.py --count 10000 --log settings.jsonl --out FILE
"""

import collections
import contextlib
import importlib
import itertools
import json
import math
import os
import pickle
import resource
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Bench, add_to_log, logged
from scipy import stats  # here, or every setting's process would import it anew

from mfopt import _version
from mfopt.accounting import account, analysis
from mfopt.errors import FailureError, UsageError
from mfopt.mechanism import Mechanism
from mfopt.sampling import Poisson

SECONDS, BYTES = 10.0, 1 << 30
_REFERENCE_SECONDS = 10.0
# of its grid, for one unit and for a group, whose losses it inverts one by one: with more points a
# second it was never done in time
_REFERENCE_POINTS = (5e4, 3e3)
_ABOVE = 3e-5  # of ε: 2e-5 are aimed at, by an estimate of the first order
# dp_accounting convolves without tilting, so that its δ has an absolute error: at p = 5e-9,
# T = 656, σ = 0.471, δ = 2.42e-14 it says ε <= 0.00431, where δ is 4.26e-14 by the closed form of
# one round
_FLOOR = 1e-11
_SLACK = 1e-4  # of ε between two answers that are each up to 3e-5 above the truth, and p, T

# of seed 0: one round of dp_accounting's has, composed by a transform with a tilt and in the widest
# floats, a bracket that the answer lies in; as it composes them, without a tilt, rounding leaves an
# error of δ that grows with the rounds (at 6610 it says ε <= 22.01829; bounds given the number of
# rounds with a large loss have the truth above 22.01876)
ARBITRATED = (6610, 7170, 8630)

bench = Bench(
    __file__,
    __doc__,
    count=(200, "How many settings."),
    first=(0, "Number of the first."),
    seed=(0, "Pin the randomness."),
    log=(None, "Lines of JSON to go on with.", Path),
    minutes=(math.inf, "Begin no setting after so many minutes."),
)


def draw(rng):
    """One setting."""

    def between(low, high):
        return float(10 ** rng.uniform(math.log10(low), math.log10(high)))

    return {
        "probability": between(1e-9, 1.0),
        "iterations": max(1, round(between(1, 1e7))),
        "group_size": round(between(1, 1000)) if rng.random() < 0.5 else 1,
        "epsilon": between(1e-3, 100.0),
        "delta": between(1e-15, 1e-3),
    }


def settings(count, seed=0):
    """``count`` settings; the first of a longer list are those of a shorter one."""
    return [draw(np.random.default_rng((seed, index))) for index in range(count)]


def make(setting):
    """The mechanism of a setting."""
    scheme = Poisson(min(setting["probability"], 1.0), setting["iterations"])
    return Mechanism(scheme, group_size=setting["group_size"])


def check(setting, account=account):
    """What was found for one setting, and the list of what is wrong with it."""
    mechanism = make(setting)
    wrong = []
    target, delta = setting["epsilon"], setting["delta"]
    result = {**setting, "wrong": wrong}
    try:
        with _measured(result, "sigma"):
            sigma = account(mechanism, epsilon=target, delta=delta).noise_multiplier
    except (UsageError, FailureError) as refusal:
        result["refused"] = str(refusal)
        return result
    result["noise_multiplier"] = sigma
    if sigma == 0:
        return result
    with _measured(result, "epsilon"):
        guarantee = account(mechanism, noise_multiplier=sigma, delta=delta)
    with _measured(result, "delta"):
        back = account(mechanism, noise_multiplier=sigma, epsilon=target).delta
    result |= {"found": guarantee.epsilon, "below": guarantee.details.get("bracket", [0.0])[0]}
    if guarantee.epsilon > target * (1 + 2e-5) + 1e-12:
        wrong.append(f"ε = {guarantee.epsilon} at its own σ")
    if back > delta * (1 + 1e-9):
        wrong.append(f"δ = {back} at its own σ")
    if not result["below"] <= guarantee.epsilon:
        wrong.append("lower bound above the answer")
    # σ is the least: with a thousandth less noise the target is missed
    less = _epsilon(setting, sigma * 0.995)
    if 0 < less < target * (1 - _SLACK):
        wrong.append(f"σ is not the smallest: ε = {less} with 0.5% less")
    for name, worse in _worse(setting).items():
        extra = _epsilon(worse, sigma)
        if extra < guarantee.epsilon * (1 - _SLACK) - 1e-8:
            wrong.append(f"not monotone in {name}: {guarantee.epsilon} -> {extra}")
    return result


def _epsilon(setting, sigma):
    """What ``account`` would say, without the other end of its bracket, which takes as long."""
    bound = analysis(make(setting))
    return float(bound.parts[-1].bound.profile(sigma).epsilon(setting["delta"]))


def _worse(setting):
    return {
        "probability": {**setting, "probability": min(1.0, 1.1 * setting["probability"])},
        "iterations": {**setting, "iterations": math.ceil(1.1 * setting["iterations"])},
        "group_size": {**setting, "group_size": setting["group_size"] + 1},
        "delta": {**setting, "delta": setting["delta"] / 2},
    }


@contextlib.contextmanager
def _measured(result, name):
    started = time.process_time()
    try:
        yield
    finally:
        spent = time.process_time() - started
        result[f"{name}_seconds"] = spent
        if spent > SECONDS:
            result["wrong"].append(f"{name} took {spent:.1f} s of CPU time")


def reference(result, finer=1.0):
    """dp_accounting's optimistic and pessimistic ε at the σ that :func:`check` found.

    ``finer``: its grid, of spacing 1e-3 or a hundredth of ε, is this many times finer.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    sigma, options = result["noise_multiplier"], {}
    options["value_discretization_interval"] = _interval(result, finer)

    def one_round(pessimistic):
        extra = {**options, "pessimistic_estimate": pessimistic}
        if result["group_size"] > 1:
            return pld.from_mixture_gaussian_mechanism(sigma, *_mixture(result), **extra)
        p = result["probability"]
        return pld.from_gaussian_mechanism(sigma, sampling_prob=p, **extra)

    return [
        one_round(pessimistic)
        .self_compose(result["iterations"])
        .get_epsilon_for_delta(result["delta"])
        for pessimistic in (False, True)
    ]


def _interval(result, finer):
    return float(min(1e-3, result["found"] / 100) / finer)


def _mixture(result):
    """How many of a group take part, and how likely that is."""
    count = np.arange(result["group_size"] + 1)
    weights = stats.binom.pmf(count, result["group_size"], result["probability"])
    return count[weights > 0].tolist(), weights[weights > 0].tolist()


def hopeless(result, seconds, finer=1.0):
    """Whether the reference has more points on its grid than it can look at in this CPU time."""
    from dp_accounting.pld import privacy_loss_mechanism

    directions, span = privacy_loss_mechanism.AdjacencyType, 0.0
    for direction in (directions.REMOVE, directions.ADD):
        loss = privacy_loss_mechanism.MixtureGaussianPrivacyLoss(
            result["noise_multiplier"], *_mixture(result), adjacency_type=direction
        )
        ends = loss.connect_dots_bounds()
        span += ends.epsilon_upper - ends.epsilon_lower
    limit = _REFERENCE_POINTS[result["group_size"] > 1] * seconds
    return bool(span / _interval(result, finer) > limit)


def contradiction(brackets):
    """Whether (optimistic ε, pessimistic ε) on grids, from coarse to fine, cannot all be right.

    Each grid holds the one before, so that its bracket lies within that one's.
    """

    def above(larger, smaller):
        return larger > smaller * (1 + 1e-6) + 1e-9

    lows, highs = zip(*brackets, strict=True)
    return (
        above(max(lows), min(highs))
        or any(above(*pair) for pair in itertools.pairwise(lows))
        or any(above(fine, coarse) for coarse, fine in itertools.pairwise(highs))
    )


def isolated(work, seconds):
    """(result or None, peak memory in bytes, what went wrong) of ``work`` in a process."""
    with tempfile.TemporaryFile() as pipe:
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds),) * 2)
                pickle.dump(work(), pipe)
                pipe.flush()
                os._exit(0)
            except BaseException as problem:
                pickle.dump(repr(problem), pipe)
                pipe.flush()
                os._exit(1)
        _, status, usage = os.wait4(child, 0)
        pipe.seek(0)
        peak = usage.ru_maxrss * 1024
        if os.WIFSIGNALED(status):
            return None, peak, f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        loaded = pickle.load(pipe)  # our own child's
        return (None, peak, loaded) if os.WEXITSTATUS(status) else (loaded, peak, "")


def examine(setting, *, compare):
    """All checks of one setting, each in its own process."""
    actual, peak, problem = isolated(lambda: check(setting), 12 * SECONDS)
    if actual is None:
        return {**setting, "wrong": [problem], "peak": peak}
    actual["peak"] = peak
    if peak > BYTES:
        actual["wrong"].append(f"{peak / 2**30:.2f} GiB")
    bracket = _asked(actual, _REFERENCE_SECONDS) if compare and actual.get("found") else None
    if bracket is not None:
        actual["reference"] = bracket
        low, high = bracket
        if not low * (1 - 1e-6) - 1e-9 <= actual["found"] <= high * (1 + _ABOVE) + 1e-9:
            said = f"ε = {actual['found']} outside dp_accounting's {tuple(bracket)}"
            actual["grids"] = grids(actual)
            if contradiction(actual["grids"]):
                actual["contradictory_reference"] = said
            elif setting["delta"] < _FLOOR:
                actual["beyond_floor"] = said
            elif setting.get("number") in ARBITRATED:
                actual["arbitrated"] = said
            else:
                actual["wrong"].append(said)
    return actual


def _asked(result, seconds, finer=1.0):
    """What :func:`reference` says, or None: where it has no answer in time, or none at all."""

    def ask():
        return None if hopeless(result, seconds, finer) else reference(result, finer)

    return isolated(ask, seconds)[0]


def grids(result):
    """The reference's bracket and, if it has them in time, those on two other grids."""
    limit = 3 * _REFERENCE_SECONDS
    coarse, fine = _asked(result, limit, 1 / 3), _asked(result, limit, 3.0)
    fine = fine or _asked(result, limit, 2.0)
    return [grid for grid in (coarse, result["reference"], fine) if grid is not None]


def finished(log, chosen):
    """What the log has of the settings that were chosen, as they are drawn today."""
    # of a setting that was examined again, what was found last
    latest = {row["number"]: row for row in logged(log) if row["number"] < len(chosen)}
    current = [latest[number] for number in sorted(latest)]
    if any({**row, **chosen[row["number"]]} != row for row in current):
        raise SystemExit(f"--log {log}: its settings are other ones")
    return current


def summary(results):
    """Numbers of all settings, and those with something wrong."""
    names = [f"{name}_seconds" for name in ("sigma", "epsilon", "delta")]
    times = [r[name] for r in results for name in names if name in r]
    widths = [1 - r["below"] / r["found"] for r in results if r.get("found")]
    numbers = sorted(r["number"] for r in results)
    gaps = [i for i in range(1, len(numbers)) if numbers[i] > numbers[i - 1] + 1]
    pieces = itertools.pairwise([0, *gaps, len(numbers)])
    return {
        "settings": len(results),
        "numbers": [[numbers[first], numbers[end - 1]] for first, end in pieces],
        "commits": dict(collections.Counter(r.get("commit") or "unknown" for r in results)),
        "wrong": sum(bool(r["wrong"]) for r in results),
        "refused": sum("refused" in r for r in results),
        "without_noise": sum(r.get("noise_multiplier") == 0 for r in results),
        "groups": sum(r["group_size"] > 1 for r in results),
        "compared_with_dp_accounting": sum("reference" in r for r in results),
        "outside_its_bracket_below_its_rounding": [r for r in results if "beyond_floor" in r],
        "outside_its_bracket_which_contradicts_itself": [
            r for r in results if "contradictory_reference" in r
        ],
        "outside_its_bracket_within_that_of_its_round_composed_here": [
            r for r in results if "arbitrated" in r
        ],
        "cpu_seconds": {
            "median": float(np.median(times)),
            "99%": float(np.quantile(times, 0.99)),
            "largest": max(times),
            "total": sum(times),
        },
        "peak_bytes": max(r["peak"] for r in results),
        "bracket": {
            "median": float(np.median(widths)),
            "99%": float(np.quantile(widths, 0.99)),
            "largest": max(widths),
        },
        "failures": [r for r in results if r["wrong"]],
        "refusals": [r for r in results if "refused" in r],
    }


@bench.work
def examined(options):
    """Examine settings; exit code 1 where something was wrong."""
    begun = time.perf_counter()
    chosen = settings(options.first + options.count, options.seed)
    results = {row["number"]: row for row in finished(options.log, chosen)}
    commit = _version.commit()
    # once, not in every process that asks it
    importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    for number in sorted({*range(options.first, len(chosen))} - {*results}):
        if time.perf_counter() - begun > 60 * options.minutes:
            break
        numbered = chosen[number] if options.seed else {"number": number, **chosen[number]}
        actual = {**examine(numbered, compare=number % 10 == 0), "number": number, "commit": commit}
        results[number] = actual
        add_to_log(options.log, actual)
        if actual["wrong"]:
            print(json.dumps(actual, ensure_ascii=False), flush=True)
    report = summary(list(results.values()))
    # of all settings, those of earlier calls too
    bench.begun = time.perf_counter() - report["cpu_seconds"]["total"]
    return report, bool(report["wrong"])


if __name__ == "__main__":
    bench.main()
