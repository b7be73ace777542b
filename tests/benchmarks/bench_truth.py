"""Random small accounts against the truth: is an ε anywhere below what an attack reaches?

    python tests/benchmarks/bench_truth.py --count 615 --seed 1 --out artifacts/bench-truth.json

An account asks for ε of a scheme of at most 8 iterations, a C (identity, banded or dense, with
negative entries too), σ, δ from 1e-10 to 1e-2, a group of at most 4 units and an adjacency. The
truth is computed here, in NumPy and without the package: every pattern of steps that the group may
have, with its chance, from the scheme's definition; an attack that adds the same unit vector in all
steps (and, where C has negative entries, with other signs; other units of a fixed batch may add it
or its opposite); and δ(ε) of the resulting mixtures of Gaussians by importance sampling around the
points that matter most.

An account is *wrong* where δ at its ε is above the stated δ by more than 5 standard errors, or at
its stated lower end below by as much (where C >= 0 and units are drawn independently: there the
attack is the worst case), or where it is refused though C >= 0 and no unit is replaced. Counted
besides: accounts that would be refuted if their ε were 5% smaller. A cell depends on the seed and
its own number alone.
"""

import itertools
import math
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import scipy.stats
from harness import Bench, add_to_log, logged
from scipy.special import logsumexp

from mfopt import sampling, strategies
from mfopt.accounting import Mechanism, account
from mfopt.errors import FailureError, UsageError

DEVIATIONS = 5.0  # standard errors
SAMPLES, LEAST, MOST = 2**13, 2**15, 2**19  # of a δ: what is drawn at a time, and in all
ACCURACY = 0.02  # standard error that is small enough, relative to the larger of δ and the stated
MOST_PATTERNS = 400

bench = Bench(
    __file__,
    __doc__,
    count=(500, "How many accounts."),
    seed=(1, "Of accounts and their samples."),
    log=(None, "File with a line for each cell: cells that it has are not tried again.", Path),
)


# --- patterns of steps: {steps that a unit takes part in, (n,) of counts: chance} ----------------


def _products(draws):
    """Patterns that are one independent choice each of several laws {steps: chance}."""
    patterns = {(): 1.0}
    for law in draws:
        joined = defaultdict(float)
        for (left, p), (right, q) in itertools.product(patterns.items(), law.items()):
            joined[left + right] += p * q
        patterns = joined
    return patterns


def _coin(chance):
    return {(1,): chance, (0,): 1 - chance} if chance < 1 else {(1,): 1.0}


def _bin(bins, repeats=1):
    return {tuple(row) * repeats: 1 / bins for row in np.eye(bins, dtype=int).tolist()}


def _b_min_sep(scheme):
    """A renewal chain in its stationary state: steps to rest -> chance, one step after another."""
    rest, p, n = scheme.separation, 1 / (scheme.bins - scheme.separation + 1), scheme.iterations
    available = 1 / (1 + (rest - 1) * p)
    states = {((), 0): available} | {((), k): p * available for k in range(1, rest)}
    for _ in range(n):
        following = defaultdict(float)
        for (steps, wait), chance in states.items():
            if wait:
                following[*((*steps, 0),), wait - 1] += chance
            else:
                following[*((*steps, 1),), rest - 1] += chance * p
                following[*((*steps, 0),), 0] += chance * (1 - p)
        states = following
    patterns = defaultdict(float)
    for (steps, _), chance in states.items():
        patterns[steps] += chance
    return patterns


def _in_group(steps, groups, group, chance):
    return _products(_coin(chance) if t % groups == group else {(0,): 1.0} for t in range(steps))


def _random_partition(scheme):
    groups, patterns = scheme.separation, defaultdict(float)
    for group in range(groups):
        law = _in_group(scheme.iterations, groups, group, groups / scheme.bins)
        for steps, chance in law.items():
            patterns[steps] += chance / groups
    return patterns


def _separated(scheme):
    """Any steps at least ``separation`` apart, at most so many: each a law of its own."""
    return [
        {steps: 1.0}
        for steps in itertools.product((0, 1), repeat=scheme.iterations)
        if 0 < sum(steps) <= scheme.max_participations
        and np.diff(np.flatnonzero(steps)).min(initial=scheme.iterations) >= scheme.separation
    ]


def _fixed_batch(scheme, units):
    """So many of the units in each batch: a batch is drawn without replacement."""
    counts = scipy.stats.hypergeom(scheme.population, units, scheme.batch_size)
    most = min(units, scheme.batch_size)
    drawn = {(k,): chance for k in range(most + 1) if (chance := float(counts.pmf(k))) > 0}
    return _products([drawn] * scheme.iterations)


# scheme -> laws of a unit's patterns, of which the attacker has the choice
LAWS = {
    "balls-in-bins": lambda s: [_bin(s.bins, s.epochs)],
    "fresh-bins": lambda s: [_products([_bin(s.bins, s.rethrow)] * (s.epochs // s.rethrow))],
    "b-min-sep": lambda s: [_b_min_sep(s)],
    "random-partition": lambda s: [_random_partition(s)],
    "poisson": lambda s: [_in_group(s.iterations, 1, 0, s.probability)],
    "cyclic-poisson": lambda s: [
        _in_group(s.iterations, s.bands, group, s.probability) for group in range(s.bands)
    ],
    "fixed-order": lambda s: [{steps: 1.0} for steps in _bin(s.bins, s.epochs)],
    "min-separation": _separated,
}


def laws(scheme, units):
    """Laws of the sum of a group's patterns, of which the attacker has the choice."""
    if scheme.kind == "fixed-batch":
        return [_fixed_batch(scheme, units)]
    return [_of_group(law, units) for law in LAWS[scheme.kind](scheme)]


def _of_group(law, units):
    """The law of the sum of independent units' patterns."""
    total = law
    for _ in range(units - 1):
        joined = defaultdict(float)
        for (left, p), (right, q) in itertools.product(total.items(), law.items()):
            joined[tuple(map(sum, zip(left, right, strict=True)))] += p * q
        total = joined
    return total


# --- δ of two mixtures ---------------------------------------------------------------------------


def log_density(points, mixture):
    """log density of Σ_j p_j N(m_j, I) at points (N, n), up to that of N(0, I) at 0; gradient."""
    means, log_chances = mixture
    squares = (means**2).sum(axis=1) / 2
    exponents = points @ means.T - squares + log_chances
    total = logsumexp(exponents, axis=1)
    posterior = np.exp(exponents - total[:, None])
    return total, posterior @ means


def _important_points(first, second, epsilon):
    """For each component of ``first``, a point near its mean where the loss is about ε."""
    means = points = first[0]
    for _ in range(30):
        numerator, gradient = log_density(points, first)
        denominator, other = log_density(points, second)
        slope = gradient - other
        missing = epsilon - (numerator - denominator) + (slope * (points - means)).sum(axis=1)
        steps = missing / np.maximum((slope**2).sum(axis=1), 1e-12)
        target = means + np.maximum(steps, 0)[:, None] * slope
        points = np.clip(0.5 * (points + target), -1e3, 1e3)
    return points


def delta(first, second, epsilon, rng, stated=0.0, accuracy=ACCURACY):
    """(δ, its standard error): ∫ (P − e^ε Q)₊ of two mixtures (means (M, n), log chances).

    The error is at most ``accuracy`` times δ, or a ``stated`` δ that it is compared with where
    that is larger.
    """
    means, log_chances = first
    points = _important_points(first, second, epsilon)
    costs = log_chances - ((points - means) ** 2).sum(axis=1) / 2
    weights = np.exp(costs - costs.max())
    weights = 0.6 * weights / weights.sum() + 0.2 / len(means)
    proposal = (
        np.concatenate([points, means]),
        np.log(np.concatenate([weights, 0.2 * np.exp(log_chances)])),
    )
    shares = np.exp(proposal[1])
    sums = np.zeros(2)
    drawn = 0
    while drawn < MOST:
        chosen = rng.choice(len(shares), SAMPLES, p=shares / shares.sum())
        sample = proposal[0][chosen] + rng.standard_normal((SAMPLES, means.shape[1]))
        numerator, _ = log_density(sample, first)
        denominator, _ = log_density(sample, second)
        exceeds = -np.expm1(np.minimum(epsilon + denominator - numerator, 0.0))
        values = exceeds * np.exp(numerator - log_density(sample, proposal)[0])
        sums += values.sum(), (values**2).sum()
        drawn += SAMPLES
        mean = sums[0] / drawn
        error = math.sqrt(max(sums[1] / drawn - mean**2, 0.0) / drawn)
        if drawn >= LEAST and error <= accuracy * max(mean, stated):
            break
    return float(mean), float(error)


def mixture(modes, sigma, epsilon, chances=None, accuracy=0.005):
    """{direction: (δ, standard error)} of a mixture of ``modes`` (M, n) beside their absence.

    ``chances`` of the modes are alike where they are None.
    """
    modes = np.asarray(modes, float) / sigma
    chances = np.full(len(modes), 1 / len(modes)) if chances is None else chances
    pair = (modes, np.log(chances)), (np.zeros_like(modes[:1]), np.zeros(1))
    rng = np.random.default_rng(0)
    return {
        direction: delta(*worlds, epsilon, rng, accuracy=accuracy)
        for direction, worlds in (("remove", pair), ("add", pair[::-1]))
    }


def attacks(mechanism, rng):
    """Pairs of mixtures at σ = 1 whose δ is reached, for every choice of the attacker's tried."""
    scheme = mechanism.sampling
    matrix = np.asarray(mechanism.strategy.materialize(scheme.iterations))
    signs = [np.ones(scheme.iterations)]
    if (matrix < 0).any():
        alternating = (-1.0) ** np.arange(scheme.iterations)
        signs += [alternating, *rng.choice((-1.0, 1.0), (2, scheme.iterations))]
    changed = -1.0 if mechanism.adjacency == "replace" else 0.0
    # a batch of fixed size has other units, which may say whether the group is in it
    companions = (-1.0, 0.0, 1.0) if scheme.kind == "fixed-batch" else (0.0,)
    for law, sign, others in itertools.product(
        laws(scheme, mechanism.group_size), signs, companions
    ):
        means = (np.array([*law], float) * sign) @ matrix.T
        chances = np.array([*law.values()])
        pair = [_merged(means * (value - others), chances) for value in (1.0, changed)]
        yield pair
        yield pair[::-1]


def _merged(means, chances):
    """A mixture with every mean once: (means (M, n), log chances (M,))."""
    means, inverse = np.unique(means, axis=0, return_inverse=True)
    return means, np.log(np.bincount(inverse.ravel(), chances))


def largest_delta(mechanism, sigma, epsilon, rng, stated):
    """(δ, standard error) of the attack with the largest δ, to be compared with the ``stated``."""
    return max(
        delta(*((means / sigma, chances) for means, chances in pair), epsilon, rng, stated)
        for pair in attacks(mechanism, rng)
    )


# --- accounts ------------------------------------------------------------------------------------

SCHEMES = [
    sampling.BallsInBins(4, 2),
    sampling.BallsInBins(2, 3),
    sampling.FreshBins(4, 2),
    sampling.FreshBins(2, 4, 2),
    sampling.BMinSep(4, 2, 2),
    sampling.BMinSep(3, 2, 2),
    sampling.RandomPartition(4, 2, 2),
    sampling.Poisson(0.25, 6),
    sampling.CyclicPoisson(0.5, 2, 8),
    sampling.FixedOrder(4, 2),
    sampling.MinSeparation(8, 3, 2),
    sampling.FixedBatch(2, 8, 4),
]


# scheme -> most bands of a C that is accounted for, where that is not any
BANDS = {
    "fresh-bins": 2,
    "b-min-sep": 2,
    "random-partition": 2,
    "cyclic-poisson": 2,
    "poisson": 1,
    "fixed-batch": 1,
}


def random_strategy(scheme, rng):
    """The identity, or C with entries of the lower triangle drawn, half of them banded."""
    n = scheme.iterations
    most = BANDS.get(scheme.kind, n)
    bands = most if rng.random() < 0.5 else min(2, most)
    negative = rng.random() < 0.25
    if bands == 1 or rng.random() < 0.25:
        return strategies.Identity()
    lower = np.tril(rng.uniform(0, 1, (n, n)), -1)
    if negative:
        lower *= rng.choice((-1.0, 1.0), (n, n))
    return strategies.Banded.from_dense(lower + np.diag(rng.uniform(0.5, 1.5, n)), bands)


def drawn(rng):
    """(mechanism, σ, δ) of a random account."""
    scheme = SCHEMES[rng.integers(len(SCHEMES))]
    strategy = random_strategy(scheme, rng)
    units = int(rng.choice((1, 2, 3, 4), p=(0.6, 0.2, 0.1, 0.1)))
    adjacency = str(rng.choice(("add-remove", "zero-out", "replace"), p=(0.7, 0.15, 0.15)))
    if scheme.kind == "fixed-batch" and adjacency == "add-remove":
        adjacency = "zero-out"
    norm = np.sqrt((np.asarray(strategy.materialize(scheme.iterations)) ** 2).sum(axis=0).max())
    sigma = float(norm * units * 10 ** rng.uniform(-0.3, 0.7))
    target = float(10 ** rng.uniform(-10, -2))
    return Mechanism(scheme, strategy, units, "example", adjacency), sigma, target


def cell(seed, number):
    """What a random account says and the truth about it; None where patterns are too many."""
    rng = np.random.default_rng((seed, number))
    mechanism, sigma, target = drawn(rng)
    if max(map(len, laws(mechanism.sampling, mechanism.group_size))) > MOST_PATTERNS:
        return None
    return {"seed": seed, "cell": number} | compared(mechanism, sigma, target, rng, seed=number)


def compared(mechanism, sigma, target, rng, **effort):
    """What an account of ε says and the truth about it."""
    scheme = mechanism.sampling
    matrix = np.asarray(mechanism.strategy.materialize(scheme.iterations))
    report = {
        "scheme": scheme.describe(),
        "negative entries": bool((matrix < 0).any()),
        "group size": mechanism.group_size,
        "adjacency": mechanism.adjacency,
        "noise multiplier": sigma,
        "delta": target,
    }
    begun = time.process_time()
    try:
        answer = account(mechanism, noise_multiplier=sigma, delta=target, **effort)
    except (FailureError, UsageError) as refusal:
        excused = report["negative entries"] or mechanism.adjacency == "replace"
        return report | {"refused": str(refusal), "wrong": [] if excused else ["refused"]}
    report |= {
        "epsilon": answer.epsilon,
        "lower end": answer.lower_bound,
        "status": answer.status,
        "cpu seconds": round(time.process_time() - begun, 2),
    }
    return report | judged(mechanism, report, rng)


def judged(mechanism, report, rng):
    """What the truth says of an account's ε and lower end."""
    sigma, target, epsilon = (report[k] for k in ("noise multiplier", "delta", "epsilon"))
    wrong = []

    def attained(epsilon):
        return largest_delta(mechanism, sigma, epsilon, rng, target)

    value, error = attained(epsilon)
    if value - DEVIATIONS * error > target:
        wrong.append("epsilon")
    closer, spread = attained(0.95 * epsilon)
    lower = report["lower end"]
    independent = mechanism.sampling.kind not in ("cyclic-poisson", "min-separation")
    if lower and independent and not report["negative entries"]:
        least, deviation = attained(lower)
        if least + DEVIATIONS * deviation < target:
            wrong.append("lower end")
    return {
        "attained delta": value,
        "standard error": error,
        "refuted if 5% smaller": closer - DEVIATIONS * spread > target,
        "wrong": wrong,
    }


@bench.work
def cells(options):
    """Try the cells that --log lacks, and say what all show; exit code 1 where one is wrong."""
    reports = logged(options.log)
    if any(report["seed"] != options.seed for report in reports):
        raise SystemExit(f"--log {options.log}: its cells are those of another seed")
    number = reports[-1]["cell"] + 1 if reports else 0
    while len(reports) < options.count:
        report = cell(options.seed, number)
        number += 1
        if report is not None:
            reports.append(report)
            add_to_log(options.log, report)
            print(report, file=sys.stderr, flush=True)
    answered = [report for report in reports if "epsilon" in report]
    by_scheme = {
        kind: {
            "answered": len(chosen),
            "refuted if 5% smaller": sum(report["refuted if 5% smaller"] for report in chosen),
            "with a lower end": sum(report["lower end"] is not None for report in chosen),
        }
        for kind in sorted({report["scheme"]["kind"] for report in answered})
        if (chosen := [report for report in answered if report["scheme"]["kind"] == kind])
    }
    certified = [report for report in answered if report["status"] == "certified"]
    wrong = [report for report in reports if report["wrong"]]
    summary = {
        "accounts": len(reports),
        "answered": len(answered),
        "certified": len(certified),
        "certified, refuted if 5% smaller": sum(r["refuted if 5% smaller"] for r in certified),
        "largest cpu seconds": max(report["cpu seconds"] for report in answered),
        "by scheme": by_scheme,
        "wrong": wrong,
    }
    return summary, 1 if wrong else 0


if __name__ == "__main__":
    bench.main()
