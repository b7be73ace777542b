"""Conformance checks for every sampled loss (:mod:`mfopt.accounting.monte_carlo.protocol`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime._arrays import Array
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import HINGE, Pilot, Point, Tilt, Trial
from mfopt.accounting.monte_carlo.protocol import (
    DIRECTIONS,
    SampledDirection,
    SampledLaw,
    SampledLoss,
    law,
)
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.verify import Engine
from mfopt.mechanism import Mechanism
from mfopt.sampling import Scheme, from_description
from mfopt.strategies import Strategy
from mfopt.testing._rules import ERRORS, moved, rule
from mfopt.testing.accountants import drawn_patterns, not_below_executed

_LARGER = 1.5  # factor of C
_MISS, _RUNS = 0.02, 64  # β of bounds that are drawn again and again, and how often
_KEYS = 16
_SEED = 0


class _Half(NamedTuple):
    """Half of what the mechanism alone pays: all estimates and bounds must halve."""

    def log_value(self, t: Array) -> jax.Array:
        return jnp.asarray(HINGE.log_value(t)) - math.log(2)

    def log_peak(self, order: float) -> float:
        return HINGE.log_peak(order) - math.log(2)


@float64
def check_sampled_law(
    scheme: Scheme,
    strategy: Strategy,
    *,
    noise_multiplier: float,
    epsilon: float,
    samples: int = 2**13,
    sampled: SampledLaw | None = None,
) -> None:
    """Check a scheme's sampled loss against the requirements of calibration, optimizer and release.

    Its estimates are smooth, agree with each other from wherever they are placed, and scale with C;
    its proposals stay below their ceilings and have one mean; its bounds hold as often as they
    say; and no bound is below what the scheme shows when it is executed.

    Args:
      scheme: an example, of few iterations.
      strategy: a C that can be rescaled, with a parameter.
      noise_multiplier: σ, in clip norms.
      epsilon: ε at which δ is about 1e-3 to 1e-1, so that samples see it.
      samples: of each estimate.
      sampled: the law, if it is not the registered one.

    Raises:
      AssertionError: a rule is broken; the message says which.
    """
    if sampled is None:
        sampled, restored = law(scheme), law(from_description(scheme.describe()))
        rule(
            sampled == restored and hash(sampled) == hash(restored),
            "the law must be equal for equal schemes: it is static in compiled code",
        )
    point, key = Point(noise_multiplier, epsilon), chunked.seed_key(_SEED)
    _scaling(sampled, strategy, point, samples, key)
    log_law = _law(sampled, strategy, point, samples, key)
    loss = sampled.loss(strategy)
    _starts(loss, epsilon)
    means = {d: _proposals(loss, d, point, samples, chunked.subkey(key, 7)) for d in DIRECTIONS}
    _agree("the law's estimate", log_law, "a proposal of the remove direction", means["remove"])
    _free(loss, point, means)
    if scheme.executable:
        mechanism = Mechanism(scheme, strategy)
        not_below_executed(
            mechanism,
            drawn_patterns(mechanism),
            ((factor * noise_multiplier, epsilon) for factor in (1.0, 0.5)),
            lambda *point: Engine(OneUnit(loss, 2**14), _SEED).delta(*point).delta,
        )


class _Mean(NamedTuple):
    """An estimate of H and its standard error."""

    value: float
    error: float


def _agree(first_name: str, first_mean: _Mean, second_name: str, second_mean: _Mean) -> None:
    off = abs(first_mean.value - second_mean.value)
    error = math.hypot(first_mean.error, second_mean.error)
    rule(
        off <= ERRORS * error,
        f"{first_name}, {first_mean.value:.4g}, and {second_name}, {second_mean.value:.4g}, are "
        f"{off / error if error else math.inf:.1f} standard errors apart",
    )


def _scaling(
    sampled: SampledLaw, strategy: Strategy, point: Point, samples: int, key: jax.Array
) -> None:
    larger = strategy.rescaled(_LARGER)
    if larger is None:
        raise AssertionError("the example must be a C that can be rescaled")
    quadratics = sampled.quadratic(strategy), sampled.quadratic(larger)
    pairs = zip(*map(jax.tree.leaves, quadratics), strict=True)
    rule(
        all(np.allclose(_LARGER**2 * a, b, rtol=1e-9, atol=0) for a, b in pairs),
        "`quadratic` must be of degree two: that of a·C is a² times that of C",
    )
    _product(sampled, strategy)
    reduced_law, reduced_larger = map(sampled.prepared, quadratics)
    rule(
        math.isclose(
            float(sampled.log_scale(reduced_larger)) - float(sampled.log_scale(reduced_law)),
            math.log(_LARGER),
            rel_tol=1e-6,
        ),
        "`log_scale` must grow by log a with a·C",
    )
    rule(
        math.isclose(
            float(sampled.norm(reduced_larger)),
            _LARGER * float(sampled.norm(reduced_law)),
            rel_tol=1e-6,
        ),
        "`norm` must grow by the factor a with a·C",
    )
    draws = sampled.draws(key, samples)
    values = [
        float(
            sampled.log_delta(
                sampled.frozen(
                    reduced,
                    sampled.proposal(reduced, factor * point.noise_multiplier, point.epsilon),
                    draws,
                ),
                math.log(factor * point.noise_multiplier),
                point.epsilon,
            )
        )
        for reduced, factor in ((reduced_law, 1.0), (reduced_larger, _LARGER))
    ]
    rule(
        math.isclose(*values, rel_tol=1e-6),
        f"log δ̂ of (a·C, a·σ) is {values[1]:.8g}, of (C, σ) it is {values[0]:.8g}",
    )


def _product(sampled: SampledLaw, strategy: Strategy) -> None:
    """`product` is linear in what `quadratic` gives, in value and derivative."""
    rng, moved_strategy = np.random.default_rng(2), moved(strategy)
    slope = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=np.shape(leaf))), sampled.quadratic(strategy)
    )

    def fast(step: jax.Array) -> jax.Array:
        return sampled.product(slope, moved_strategy(step))

    def plain(step: jax.Array) -> jax.Array:
        return SampledLaw.product(sampled, slope, moved_strategy(step))

    pairs = zip(*(jax.jvp(f, (0.0,), (1.0,)) for f in (fast, plain)), strict=True)
    rule(
        all(math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9) for a, b in pairs),
        "`product` must be the inner product with `quadratic`, and have its derivative",
    )


def _law(
    sampled: SampledLaw, strategy: Strategy, point: Point, samples: int, key: jax.Array
) -> _Mean:
    """The law's frozen estimate: smooth, decreasing, and the same from other proposals."""
    draws = sampled.draws(key, samples)
    equal_draws = jax.tree.map(np.array_equal, draws, sampled.draws(key, samples))
    rule(all(jax.tree.leaves(equal_draws)), "`draws` must be a pure function of its key")
    equal_to_next_key = jax.tree.map(
        np.array_equal, draws, sampled.draws(chunked.subkey(key, 1), samples)
    )
    rule(not all(jax.tree.leaves(equal_to_next_key)), "`draws` must depend on its key")
    reduced, log_sigma = sampled.reduced(strategy), math.log(point.noise_multiplier)
    base_proposal = sampled.proposal(reduced, point.noise_multiplier, point.epsilon)

    @jax.jit
    def along(step: jax.Array, log_sigma: jax.Array) -> jax.Array:
        terms = sampled.frozen(sampled.reduced(moved_strategy(step)), base_proposal, draws)
        return sampled.log_delta(terms, log_sigma, point.epsilon)

    moved_strategy = moved(strategy)
    values = [float(along(0.0, log_sigma + h)) for h in np.linspace(-0.2, 0.2, 9)]
    rule(
        bool(np.all(np.isfinite(values)) and np.all(np.diff(values) < 0)),
        "log δ̂ must be finite and fall with log σ",
    )
    for argument, variable in ((0, "the strategy"), (1, "log σ")):
        slope = float(jax.grad(along, argument)(0.0, log_sigma))
        h = np.eye(2)[argument] * 1e-7  # so short that hardly a sample passes its kink
        numeric = float(along(h[0], log_sigma + h[1]) - along(-h[0], log_sigma - h[1])) / 2e-7
        rule(
            abs(slope - numeric) <= 1e-3 * max(1.0, abs(numeric)),
            f"the derivative of log δ̂ in {variable} is {slope:.8g}, by differences {numeric:.8g}",
        )

    @jax.jit
    def estimate(draws: PyTree, proposal: PyTree) -> jax.Array:
        terms = sampled.frozen(reduced, proposal, draws)
        return jnp.exp(sampled.log_delta(terms, log_sigma, point.epsilon))

    if sampled.divisible:
        halves = (
            jax.tree.map(lambda x, i=i: x.reshape(2, -1, *x.shape[1:])[i], draws) for i in (0, 1)
        )
        whole, parts = (
            float(estimate(draws, base_proposal)),
            [float(estimate(x, base_proposal)) for x in halves],
        )
        rule(
            math.isclose(whole, float(np.mean(parts)), rel_tol=1e-9),
            f"δ̂ of halves of the draws is {parts} and of all {whole}: is the law `divisible`?",
        )
    means = []
    for position, factor in enumerate((1.0, 1.15)):
        placed = sampled.proposal(reduced, factor * point.noise_multiplier, point.epsilon)
        fresh = (sampled.draws(chunked.subkey(key, 2 + position, i), samples) for i in range(_KEYS))
        estimates = np.array([float(estimate(draws, placed)) for draws in fresh])
        means.append(
            _Mean(float(estimates.mean()), float(estimates.std(ddof=1)) / math.sqrt(_KEYS))
        )
    _agree("δ̂ of the law", means[0], "from a proposal placed elsewhere", means[1])
    return means[0]


def _starts(loss: SampledLoss, epsilon: float) -> None:
    begin = loss.start(epsilon, 1e-5)
    rule(math.isfinite(begin) and begin > 0, f"`start` gives σ = {begin}")
    rule(loss.work >= 1, "`work` must be at least 1")


def _mean(pilot: Pilot) -> _Mean:
    value = math.exp(pilot.log_mean)
    return _Mean(value, value * pilot.deviation / math.sqrt(pilot.samples))


def _proposals(
    loss: SampledLoss, direction: SampledDirection, point: Point, samples: int, key: jax.Array
) -> _Mean:
    """Ceilings hold, all proposals have one mean, and the bounds are right."""
    lowest = loss.least(direction, point)
    trial = Trial(samples, 1e-3, chunked.subkey(key, 1))
    chosen = loss.choose(direction, point, trial).tilt
    rule(
        lowest.log_ceiling <= chosen.proven.log_ceiling + 1e-9,
        f"`least` of {direction} has a larger ceiling than what `choose` found",
    )
    means = []
    for number, tilt in enumerate((lowest, chosen)):
        placed = loss.at(tilt, point)
        rule(
            placed[:2] == tilt[:2]
            and math.isclose(placed.log_ceiling, tilt.log_ceiling, rel_tol=1e-9, abs_tol=1e-9),
            "`at` must give a proposal back at its own point",
        )
        whole = tilt.proven
        means.append(_values(loss, whole, point, samples, chunked.subkey(key, 2, number)))
        _elsewhere(loss, whole, point, samples, chunked.subkey(key, 3, number), means[-1])
    _agree(f"the proposal of least ceiling ({direction})", means[0], "the chosen one", means[1])
    best = min(means, key=lambda mean: mean.error)
    _bounds(loss, chosen, point, trial, best)
    return best


def _values(loss: SampledLoss, tilt: Tilt, point: Point, samples: int, key: jax.Array) -> _Mean:
    pilot = loss.pilot(tilt, point, samples, key)
    total, square = float(pilot.sums.total), float(pilot.sums.square)
    rule(pilot.samples >= samples, "`pilot` must take at least the samples asked for")
    rule(
        0 < square <= total * (1 + 1e-6) and total <= pilot.samples,
        f"values of a {tilt.kind} proposal leave [0, ceiling], or none is above 0",
    )
    halved = Point(point.noise_multiplier, point.epsilon, _Half())
    half = loss.pilot(loss.at(tilt, halved), halved, samples, key)
    whole, part = _mean(pilot), _mean(half)
    # what is sampled may depend on the form of the payoff: within the errors of both
    rule(
        abs(2 * part.value - whole.value)
        <= ERRORS * math.hypot(2 * part.error, whole.error) + 1e-6 * whole.value,
        "the payoff must be what is paid: half of it did not halve the mean",
    )
    return whole


def _elsewhere(
    loss: SampledLoss, tilt: Tilt, point: Point, samples: int, key: jax.Array, reference: _Mean
) -> None:
    """Check at other noise: fresh ceilings, no value above them, and a mean on the right side."""
    for factor in (0.5, 1.2):
        moved_point = point._replace(noise_multiplier=factor * point.noise_multiplier)
        pilot = loss.pilot(loss.at(tilt, moved_point), moved_point, samples, key)
        rule(math.isfinite(float(pilot.sums.total)), "a ceiling from `at` does not hold elsewhere")
        mean = _mean(pilot)
        off = (mean.value - reference.value) * math.copysign(1.0, factor - 1)
        rule(
            off < ERRORS * math.hypot(mean.error, reference.error),
            "more noise must give a smaller δ̂",
        )


def _bounds(loss: SampledLoss, tilt: Tilt, point: Point, trial: Trial, truth: _Mean) -> None:
    pilot = loss.pilot(tilt, point, trial.samples, chunked.subkey(trial.key, 1))
    bet, _ = pilot.expected(trial.samples, trial.beta)
    bound = loss.bound(tilt, point, bet, trial)
    rule(
        bound == loss.bound(tilt, point, bet, trial),
        "`bound` must be a pure function of what it is given",
    )
    rule(
        truth.value - ERRORS * truth.error < bound.mean < bound.value <= bound.ceiling * (1 + 1e-6)
        and bound.samples >= trial.samples,
        f"a bound must lie above its mean and below its ceiling: {bound}",
    )
    # no ceiling at all: the mean itself is above it, so some value is
    low = tilt.proven._replace(log_ceiling=pilot.log_mean - math.log(2))
    rule(
        not math.isfinite(loss.bound(low, point, bet, trial).value),
        "a value above the ceiling leaves no proof: the bound must be no number",
    )
    runs = [
        loss.bound(tilt, point, bet, Trial(trial.samples, _MISS, chunked.subkey(trial.key, 2, run)))
        for run in range(_RUNS)
    ]
    # the mean of all is unbiased, and known far better than a bound's own
    means = np.array([run.mean for run in runs])
    surely = float(means.mean() - ERRORS / 2 * means.std(ddof=1) / math.sqrt(_RUNS))
    missed = sum(not run.value >= surely for run in runs)
    largest_share = _MISS + ERRORS * math.sqrt(_MISS * (1 - _MISS) / _RUNS)
    rule(
        missed <= largest_share * _RUNS,
        f"{missed} of {_RUNS} bounds with β = {_MISS} are below the truth",
    )


def _free(loss: SampledLoss, point: Point, means: dict[SampledDirection, _Mean]) -> None:
    sigma, epsilon = point.noise_multiplier, point.epsilon
    bounds = loss.free_bounds()
    rule(len(bounds) > 0, "there must be a free bound: at least without amplification")
    for bound in bounds:
        logs = bound.log_deltas(sigma, epsilon)
        for direction, log_delta in zip(DIRECTIONS, logs, strict=True):
            mean, stated = means[direction], math.exp(log_delta)
            rule(
                stated >= mean.value - ERRORS * mean.error,
                f"{bound.method}: {direction} is {stated:.4g}, samples show {mean.value:.4g}",
            )
            if bound.exact:
                _agree(f"{bound.method}, exact,", _Mean(stated, 1e-4 * stated), "samples", mean)
        delta = math.exp(max(logs)) / 2
        less = bound.noise_multiplier(epsilon, delta), bound.epsilon(sigma, delta)
        rule(
            max(bound.log_deltas(less[0], epsilon)) <= math.log(delta) + 1e-9
            and max(bound.log_deltas(sigma, less[1])) <= math.log(delta) + 1e-9,
            f"{bound.method}: a σ or ε that it gave does not satisfy its target",
        )
