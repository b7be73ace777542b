"""Estimate, verify, release: the only place where a sampled statement becomes a guarantee.

A :class:`~mfopt.accounting.model.LossModel` estimates and bounds δ(x), where x is σ or ε and the
other one is fixed; δ falls as x grows. Asked for the smallest x with δ(x) <= δ, the engine

1. estimates it, and takes a pilot there, half as large as the last test, that tells where δ is met
   and what a bound will cost with so many samples;
2. fixes from that an x, as small as a bound should still accept, and a sample count;
3. tests x on fresh iid samples at failure probability β, and releases it if it is accepted. If not,
   nothing is released, and a new round may begin, with a new pilot and fresh samples: up to three.

**Guarantee** (the release argument is that of Wang, Mahloujifar, Wu, Jia, Mittal 2023). Round r
demands that bounds be <= δ − rβ. Call x bad there if max(H(P, Q), H(Q, P)) > δ − rβ at x. x was
fixed before the samples of its test were drawn. A test accepts only if *both* directions' bounds,
each valid except with probability β, are <= δ − rβ; at a bad x one of the two divergences is
larger, and accepting means that its bound failed: probability <= β (an intersection-union test, so
β is not split over the directions). The accountant's randomness is independent of the data, so the
mechanism "draw x as above, publish it, run at x" has H <= Σ_r q_r (δ − rβ) + Σ_r β·Pr[round r is
reached] <= δ, q_r = Pr[release in round r]: Pr[round r is reached] sums the later q's and the
chance of releasing nothing (Rβ <= δ).

β is δ/1000, which costs 0.1% of δ and little under the logarithm.

What a bound shows without samples needs no test: an x at which a :class:`~.FreeBound` is <= δ is
accepted as it is, and it is what remains where samples say too little. After r tests it must be <=
δ − rβ, as what round r releases: the chance of ending there is in Pr[round r is reached] too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import jax

from mfopt._runtime import _check
from mfopt.accounting.analyses import BETA_SHARE, TESTS
from mfopt.accounting.model import Bounds, Estimate, LossModel, Plan, largest
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.free import ROUNDING
from mfopt.accounting.monte_carlo.protocol import FreeBound
from mfopt.errors import FailureError
from mfopt.progress import Progress, Report, ambient

Unknown = Literal["noise_multiplier", "epsilon"]

ROUNDS = TESTS
SAMPLES = 2**18
MOST_SAMPLES, MOST_WORK = 2**22, LossModel.most_work
LEAST_DELTA = 1e-280
# for more samples than SAMPLES: times ``worth`` of a model, and at least
_COSTLIER, _COSTLY = 2.0, 0.0025
_HELPS = 0.96  # twice the samples should bring the slack below this part of it
_WORTH_DELTA = 0.02
_MOST_MOVE = 0.01  # of log x: a pilot that says the estimate is further off is taken again
_OTHER = 4  # times or part of the slope of δ̂ that a bound's may have, as it is read off two pilots
_ALLOWED = 1.3  # times what a round missed by, for the next one
_FAR = 6.0  # standard errors beyond which a statement is not worth a test
_LARGE = 50.0  # ε from which on overlaps may be beyond what likelihoods are known for
_LOOSE = 0.05  # of x over its estimate, from which on ``slow_bounds`` are asked too
_LOWER_END_BETA = 1e-6  # failure probability of a lower end, in one try
_PART = 4  # of a test's samples, that a try of a lower end takes at most where they are many
_LEAST_SHARE, _MOST_SHARE = 0.0025, 1 / 64  # of a σ or ε, by which it is tried smaller at first
_LOOSER, _TRIES = 1.5, 12  # times the share that was too small, for the next try; at most
_APART = 2.0  # times what log δ̂ was below log δ: so far away a bound from below may exceed δ
_DOMAIN = 0x76657269  # keys of the engine: no other user of the same seed draws from them


def accepts(bounds: Iterable[float], spent: float, delta: float) -> bool:
    """True if every bound on δ plus the failure probability ``spent`` so far is <= ``delta``.

    Each bound is examined on its own: a NaN, an infinity, a negative number, or no bound at all
    is never accepted, whatever the others are.
    """
    bounds = list(bounds)
    fair = math.isfinite(spent) and spent >= 0 and 0 < delta < 1
    return fair and bool(bounds) and all(bound >= 0 and bound + spent <= delta for bound in bounds)


@dataclasses.dataclass(frozen=True)
class Verified:
    """A verified statement.

    Attributes:
      noise_multiplier, epsilon, delta: the statement.
      bounds: what was accepted.
      beta: failure probability, included in δ.
      samples: of the accepted test; 0 for a free bound.
      tests: how many were made.
      method: of the accepted bounds.
      estimate: what the search began with, where there was one.
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    bounds: Bounds
    beta: float
    samples: int
    tests: int
    method: str
    estimate: Estimate | None = None


_Shown: TypeAlias = tuple[float, Verified]  # σ or ε, with the statement
_NUMBER = operator.itemgetter(0)  # of such a pair


class Engine:
    """One model's statements.

    Args:
      model: what is estimated and bounded.
      seed: pinned seed of all samples, or None for the operating system's entropy.
      progress: callback for each stage.
      known: σ or ε that is proved otherwise: a search that cannot end below it stops.

    Attributes:
      tests: that the last search made, each of which has its share of δ.
    """

    def __init__(
        self,
        model: LossModel,
        seed: int | None = None,
        progress: Report = ambient,
        known: float = math.inf,
    ):
        self.model, self.seed, self.progress, self.known = model, seed, progress, known
        self._root, self.tests = chunked.seed_key(seed), 0
        if model.samples is not None:
            _check.integer("certify samples", model.samples, at_least=256)

    # --- questions -------------------------------------------------------------------------------

    def noise_multiplier(self, epsilon: float, delta: float) -> Verified:
        """Smallest σ that is verified for (ε, δ).

        Raises:
          UsageError: ε or δ out of range.
          FailureError: no σ was accepted.
        """
        epsilon, delta = _check.epsilon("epsilon", epsilon), check_delta(delta)
        return self._smallest(
            "noise_multiplier",
            delta,
            point_at=lambda x: (x, epsilon),
            free=lambda bound, delta: bound.noise_multiplier(epsilon, delta),
            find=functools.partial(self.model.find_noise_multiplier, epsilon, delta),
        )

    def epsilon(self, noise_multiplier: float, delta: float) -> Verified:
        """The smallest ε that is verified for σ and δ. Raises as :meth:`noise_multiplier`."""
        sigma, delta = _check.positive("noise_multiplier", noise_multiplier), check_delta(delta)
        start = self.known if math.isfinite(self.known) else 2.0
        return self._smallest(
            "epsilon",
            delta,
            point_at=lambda x: (sigma, x),
            free=lambda bound, delta: bound.epsilon(sigma, delta),
            find=lambda _: self.model.find_epsilon(sigma, delta, start),
        )

    def delta(self, noise_multiplier: float, epsilon: float) -> Verified:
        """A verified δ for σ and ε, its failure probability included."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon = _check.epsilon("epsilon", epsilon)
        nothing = Verified(sigma, epsilon, 1.0, Bounds(1.0, 1.0, {}), 0.0, 0, 0, "no bound")
        best = min(
            (self._freely(bound, sigma, epsilon, 1.0) for bound in self.model.free_bounds()),
            key=lambda free: free.delta,
            default=nothing,
        )
        exact = [bound.method for bound in self.model.free_bounds() if bound.exact]
        # or no share of δ is left for β
        if self.model.deterministic or best.method in exact or best.delta < LEAST_DELTA:
            return best
        log_delta = min(self.model.log_estimate(sigma, epsilon), 0.0)
        beta = max(math.exp(log_delta), LEAST_DELTA) * BETA_SHARE
        plan, samples = self._plan(
            sigma,
            epsilon,
            beta,
            lambda plan, n: (plan.expected(n, beta) - plan.log_mean, _WORTH_DELTA, _WORTH_DELTA),
        )
        if not plan.expected(samples, beta) - plan.log_mean < self.model.most_slack_delta:
            for bound in self.model.slow_bounds():
                best = min(best, self._freely(bound, sigma, epsilon, 1.0), key=lambda v: v.delta)
            if best.delta < 1:
                return best
            raise FailureError(
                f"not certified: the Monte Carlo bound at σ = {sigma:.6g} is too loose. "
                "Use more certify samples, or a larger σ or ε."
            )
        bounds = self.model.bounds(sigma, epsilon, plan, self._trial(samples, beta))
        total = largest(bounds.both) + beta
        if not total < best.delta:
            return best
        return Verified(sigma, epsilon, total, bounds, beta, samples, 1, self.model.method)

    def certify(self, noise_multiplier: float, epsilon: float, delta: float) -> Verified:
        """Verify the statement for a given σ.

        A true statement is refused by chance now and then: up to ROUNDS tests are made, as rounds
        of the procedure above are, the later ones with four times the samples each.

        Raises:
          UsageError: an argument out of range.
          FailureError: the bound is above δ: the statement is false, or true by less than the
            bound's slack.
        """
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon, delta = _check.epsilon("epsilon", epsilon), check_delta(delta)
        free = self._shown(self.model.free_bounds(), sigma, epsilon, delta)
        if free is not None:
            return free
        beta, most_samples = delta * BETA_SHARE, self._most_samples()
        previous, above = 0, math.inf
        for number in range(1, ROUNDS + 1):
            spent = number * beta
            target = math.log(delta - spent)

            def judged(plan: Plan, samples: int, target: float = target) -> tuple[float, ...]:
                # more samples only where they can still bring the bound below δ
                if plan.expected(most_samples, beta, 2.0) > target:
                    return 0.0, 0.0, 0.0
                return plan.expected(samples, beta, 2.0) - target, 0.0, 0.0

            with chunked.counting(self.progress, "choosing the test"):
                plan, samples = self._plan(sigma, epsilon, beta, judged, (number, 0))
                if number > 1:  # refused by chance, or close to the truth: four times the samples
                    samples = min(4 * max(samples, previous), most_samples)
                    trial = Trial(samples, beta, self._key(1, number, 1))
                    plan = self.model.widened(plan, sigma, epsilon, trial)
            if plan.log_mean - math.log1p(_FAR * min(plan.error, 1e3)) > math.log(delta):
                about = math.exp(min(plan.log_mean, 0.0))
                raise _refusal((sigma, epsilon, delta), about, ": a pilot estimates as much")
            if number > 1 and not plan.expected(samples, beta) <= target:
                break
            with chunked.counting(
                self.progress, "certifying", samples * len(plan.sides), f"σ = {sigma:.6g}"
            ):
                trial = self._trial(samples, beta, number, 0)
                found_bounds = self.model.bounds(sigma, epsilon, plan, trial)
            if accepts(found_bounds.both, spent, delta):
                return Verified(
                    sigma, epsilon, delta, found_bounds, spent, samples, number, self.model.method
                )
            previous, above = samples, largest(found_bounds.both) + spent
        free = self._shown(self.model.slow_bounds(), sigma, epsilon, delta)
        if free is None:
            raise _refusal((sigma, epsilon, delta), above)
        return free

    def _shown(
        self, bounds: Iterable[FreeBound], sigma: float, epsilon: float, delta: float
    ) -> Verified | None:
        """The statement by the first of these bounds that shows it, without samples.

        Raises:
          FailureError: one that is exact does not, or nothing else is to be asked.
        """
        lowest = math.inf
        for bound in bounds:
            free = self._freely(bound, sigma, epsilon, delta)
            if accepts(free.bounds.both, 0.0, delta):
                return free
            lowest = min(lowest, value := largest(free.bounds.both))
            if bound.exact:
                raise _refusal((sigma, epsilon, delta), value)
        if self.model.deterministic:
            why = " by every bound without samples: --certificate monte-carlo may prove it"
            raise _refusal((sigma, epsilon, delta), lowest, why)
        return None

    # --- lower ends ------------------------------------------------------------------------------

    def smallest_below(self, name: Unknown, verified: Verified) -> float:
        """A σ or ε that is proved too small for δ, near one that was searched for; 0 for none.

        Each try is on fresh samples and fails with probability :data:`_LOWER_END_BETA` at most.
        That is no part of δ: no guarantee rests on it.
        """
        if verified.estimate is None:
            return 0.0
        enough = math.log(verified.delta)
        # the test's bound was so far above δ̂; one from below is about as far below it
        above = enough - math.log(verified.bounds.numbers.get("estimate") or verified.delta)
        share = min(max(_APART * above / -verified.estimate.slope, _LEAST_SHARE), _MOST_SHARE)
        samples = max(verified.samples // _PART, self.model.least_samples)
        with chunked.counting(self.progress, "bounding from below"):
            for number in range(_TRIES):
                x = (1 - share * _LOOSER**number) * getattr(verified, name)
                smaller = dataclasses.replace(verified, **{name: x})
                if self._log_lower_bound(smaller, number, samples, enough) > enough:
                    return x
        return 0.0

    def delta_below(self, verified: Verified) -> float:
        """A lower bound of δ where samples were drawn for one, likewise; 0 for none."""
        if not verified.tests:
            return 0.0
        with chunked.counting(self.progress, "bounding from below"):
            return math.exp(self._log_lower_bound(verified))

    def _log_lower_bound(
        self, statement: Verified, number: int = 0, samples: int = 0, enough: float = -math.inf
    ) -> float:
        trial = Trial(samples or self.model.least_samples, _LOWER_END_BETA, self._key(4, number))
        try:
            return self.model.log_below(
                statement.noise_multiplier, statement.epsilon, trial, enough
            )
        except FailureError:  # σ is beyond numerical range
            return -math.inf

    # --- the procedure ---------------------------------------------------------------------------

    def _smallest(
        self,
        name: Unknown,
        delta: float,
        *,
        point_at: Callable[[float], tuple[float, float]],
        free: Callable[[FreeBound, float], float],
        find: Callable[..., Estimate],
    ) -> Verified:
        """The least that is verified: by tests, or without samples where these say little."""
        self.tests = 0

        def shown(bound: FreeBound) -> _Shown | None:
            spent = self.tests * delta * BETA_SHARE
            x = free(bound, delta - spent) * (1 + ROUNDING)
            statement = self._freely(bound, *point_at(x), delta)
            return (x, statement) if accepts(statement.bounds.both, spent, delta) else None

        fallback: _Shown | None = None
        for bound in self.model.free_bounds():
            self.progress(Progress("initial σ (closed form)"))
            candidate = shown(bound)
            if candidate is not None and (bound.exact or candidate[0] == 0):  # no ε is less
                return candidate[1]
            fallback = min(filter(None, (fallback, candidate)), key=_NUMBER, default=None)
        if self.model.deterministic and fallback is not None:
            return fallback[1]
        searched: Verified | None = None
        why = FailureError("not certified: no bound without samples leaves room for the tests")
        try:
            searched = self._searched(name, delta, point_at, find, fallback)
        except FailureError as problem:
            why = problem
        best = searched if searched is not None and searched.tests > 0 else None
        estimated = searched.estimate.value if searched and searched.estimate else math.inf
        if best is not None and getattr(best, name) <= (1 + _LOOSE) * estimated:
            return best
        bounds_again = self.model.free_bounds() if self.tests else ()
        fallback = (
            None if bounds_again else fallback
        )  # each test has its share of δ, whatever came of it
        self.progress(Progress("bounding without samples"))
        for bound in [*bounds_again, *self.model.slow_bounds()]:
            with contextlib.suppress(FailureError):  # it shows nothing for any x
                fallback = min(filter(None, (fallback, shown(bound))), key=_NUMBER, default=None)
        if best is not None and (fallback is None or getattr(best, name) <= fallback[0]):
            return best
        if fallback is None:
            raise why
        if searched is not None:
            return dataclasses.replace(fallback[1], estimate=searched.estimate)
        said = str(why).removeprefix("not certified: ").partition(". ")[0]
        note = f"{said}; {_words(name)} = {fallback[0]:.6g} is proved without samples and is used"
        self.progress(Progress("certifying", note=note, lasting=True))
        return fallback[1]

    def _searched(
        self,
        name: Unknown,
        delta: float,
        point_at: Callable[[float], tuple[float, float]],
        find: Callable[..., Estimate],
        fallback: _Shown | None,
    ) -> Verified:
        """Return the smallest σ or ε verified near an estimate, by tests on fresh samples.

        Raises:
          FailureError: nothing within some percent of the estimate.
        """
        if fallback is not None and point_at(fallback[0])[1] > _LARGE:
            self.model.require(*point_at(fallback[0]))  # before a search that cannot end well
        with chunked.counting(self.progress, "calibrating on fresh samples"):
            estimate = find(self._key(0))
        begin, short = dataclasses.replace(estimate, slope=estimate.slope * self.model.flatter), 0.0
        for number in range(1, ROUNDS + 1):
            accepted, begin, short = self._round(
                name, number, estimate, begin, point_at, delta, fallback, short
            )
            if accepted is not None:
                return dataclasses.replace(accepted, estimate=estimate)
        raise FailureError(
            f"not certified: no {_words(name)} within {100 * self.model.most_slack:g}% of the "
            f"estimate, {estimate.value:.6g}, was accepted in {ROUNDS} tests. "
            "Use more certify samples."
        )

    def _round(
        self,
        name: Unknown,
        number: int,
        estimate: Estimate,
        begin: Estimate,
        point_at: Callable[[float], tuple[float, float]],
        delta: float,
        fallback: _Shown | None,
        short: float,
    ) -> tuple[Verified | None, Estimate, float]:
        """One test, near ``begin``; None where it refused.

        With it, where it was made and the slope of bounds there, for the next round to begin with,
        and by how much bounds have missed, in log, which it allows for (``short``). Rounds may
        depend on earlier ones in any way: each has its own share of δ.
        """
        beta, spent = delta * BETA_SHARE, number * delta * BETA_SHARE
        target = math.log(delta - spent)
        estimated_slope, slope = abs(estimate.slope), abs(begin.slope)
        centre, worthwhile = begin.value, self.model.worth
        previous: tuple[float, float] | None = None

        def bound(plan: Plan, samples: int) -> float:
            return plan.expected(samples, beta, self.model.safe, pilot=samples // 2)

        with chunked.counting(self.progress, "planning the certificate"):
            for attempt in range(4):

                def judged(plan: Plan, n: int, slope: float = slope) -> tuple[float, ...]:
                    slack = (bound(plan, n) - plan.log_mean) / slope
                    return slack, worthwhile, max(_COSTLIER * worthwhile, _COSTLY)

                plan, samples = self._plan(*point_at(centre), beta, judged, (number, attempt))
                height = bound(plan, samples)
                if previous is not None and abs(math.log(centre / previous[0])) > 2 * _MOST_MOVE:
                    # a ceiling may fall more slowly than δ̂, whose slope is no more than an estimate
                    fall = (previous[1] - height) / math.log(centre / previous[0])
                    if math.isfinite(fall):
                        slope = min(max(fall, estimated_slope / _OTHER), estimated_slope * _OTHER)
                previous = centre, height
                # the pilot belongs where the value that is tested will be
                move = (height - target) / slope
                if not math.isfinite(move) or abs(move) < _MOST_MOVE:
                    break
                centre *= math.exp(max(-0.3, min(move, 0.3)))
            # its error is in the value that is tested: half of the test is about the best
            wide = Trial(samples, beta, self._key(3, number))
            plan = self.model.widened(plan, *point_at(centre), wide)
        most_slack = self.model.most_slack
        is_near = fallback is not None and fallback[0] <= (1 + min(_LOOSE, most_slack)) * centre
        if not (bound(plan, samples) - plan.log_mean) / estimated_slope < most_slack:
            raise FailureError(
                f"not certified: the Monte Carlo bound near {_words(name)} = {centre:.6g} is too "
                f"loose: more than {100 * most_slack:g}%. Use more certify samples."
            )
        # so far beyond where the pilot says that δ is met, nothing is worth a test
        truth = centre * math.exp((plan.log_mean - math.log(delta)) / estimated_slope)
        ahead = plan.expected(samples, beta, self.model.safe + number - 1) - target + short
        x = centre * math.exp(ahead / (slope if ahead > 0 else estimated_slope))
        x *= 1 + ROUNDING
        x = min(x, truth * (1 + most_slack))  # fixed before its test
        if x >= self.known:
            raise FailureError(
                "what is proved otherwise is more than a test can be expected to prove"
            )
        if fallback is not None and x >= fallback[0]:
            return fallback[1], begin, 0.0
        total, self.tests = samples * len(plan.sides), number
        with chunked.counting(self.progress, "certifying", total, f"{_words(name)} = {x:.6g}"):
            bounds = self.model.bounds(*point_at(x), plan, self._trial(samples, beta, number))
        if accepts(bounds.both, spent, delta):
            sigma, epsilon = point_at(x)
            accepted = Verified(
                sigma, epsilon, delta, bounds, spent, samples, number, self.model.method
            )
            return accepted, begin, 0.0
        if is_near and fallback is not None:
            return fallback[1], begin, 0.0
        refused = largest(bounds.both)
        missed = math.log(refused) - target if 0 < refused < math.inf else 0.0
        return None, Estimate(x, -slope), short + _ALLOWED * missed

    def _plan(
        self,
        sigma: float,
        epsilon: float,
        beta: float,
        judged: Callable[[Plan, int], tuple[float, ...]],
        path: tuple[int, ...] = (0,),
    ) -> tuple[Plan, int]:
        """A pilot, and the samples worth taking: more while what ``judged`` gives is too much.

        ``judged`` gives (slack, what is worth more samples up to SAMPLES, and beyond them).
        """
        samples = self.model.samples or self.model.least_samples
        plan = self.model.pilot(sigma, epsilon, Trial(samples, beta, self._key(1, *path)))
        while 2 * samples <= self._most_samples():
            slack, worthwhile, costly = judged(plan, samples)
            if not slack > (worthwhile if samples < SAMPLES else costly):
                break
            if not judged(plan, 2 * samples)[0] < _HELPS * slack:
                break  # what is left is the pilot's, or β's
            whole = samples & (samples - 1) == 0  # a power of two, then the half between two
            samples = samples * 3 // 2 if whole else samples * 4 // 3
        return plan, samples

    def _most_samples(self) -> int:
        if self.model.samples is not None:
            return self.model.samples
        affordable = min(MOST_SAMPLES, self.model.most_work // self.model.work)
        return max(self.model.least_samples, affordable)

    @staticmethod
    def _freely(bound: FreeBound, sigma: float, epsilon: float, delta: float) -> Verified:
        logs = bound.log_deltas(sigma, epsilon)
        remove, add = (math.exp(min(value, 1.0)) for value in logs)
        bounds = Bounds(remove, add, {})
        stated = min(largest(bounds.both), 1.0) if delta == 1.0 else delta
        return Verified(sigma, epsilon, stated, bounds, 0.0, 0, 0, bound.method)

    def _trial(self, samples: int, beta: float, *path: int) -> Trial:
        """Fresh randomness for a test."""
        return Trial(samples, beta, self._key(2, *path))

    def _key(self, *path: int) -> jax.Array:
        return chunked.subkey(self._root, _DOMAIN, *path)


def _refusal(statement: tuple[float, float, float], bound: float, why: str = "") -> FailureError:
    sigma, epsilon, delta = statement
    return FailureError(
        f"not certified: at noise multiplier {sigma:.6g} and ε = {epsilon:g} the upper bound on δ "
        f"is {bound:.4g}, above {delta:g}{why}. Ask for a larger δ or ε, or more certify samples."
    )


def check_delta(delta: float) -> float:
    """δ in (0, 1), above the smallest that floats can take a thousandth of."""
    delta = _check.probability("delta", delta)
    if delta < LEAST_DELTA:
        rule = f"must be at least {LEAST_DELTA:g}: below it double precision fails"
        way_out = "Use a larger one: 1e-20 is beyond what anybody could observe."
        raise _check.reject("delta", delta, rule, way_out)
    return delta


def _words(name: Unknown) -> str:
    return "σ" if name == "noise_multiplier" else "ε"
