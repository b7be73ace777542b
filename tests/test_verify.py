"""Accept rules: what must be refused, with the bounds stubbed, and what may be accepted."""

import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt import Mechanism
from mfopt import strategies as S
from mfopt.accounting import verify
from mfopt.accounting.analyses import DeterministicAnalysis, least
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.model import Bounds, LossModel, Plan, Side, largest
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.profile import Profile
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.accounting.verify import Engine
from mfopt.calibration import certify, release
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import BallsInBins

DELTA = 1e-5
NO_BOUND = (math.nan, math.inf, -math.inf, -1e-9)
SMALL = BallsInBins(bins=5, epochs=3)


@pytest.fixture(scope="module")
def pair():
    return dominating_pair.exact(S.SquareRoot(), SMALL)


@pytest.mark.parametrize("broken", NO_BOUND)
def test_one_broken_bound_is_enough_to_refuse(broken):
    for bounds in ((broken, 0.0), (0.0, broken), (broken, broken), (broken,)):
        assert not verify.accepts(bounds, 0.0, DELTA)
        assert largest(bounds) == math.inf


def test_each_bound_and_the_failure_probability_count():
    assert verify.accepts((0.9e-5, 0.5e-5), 1e-6, DELTA)  # exactly at δ is below
    assert not verify.accepts((0.9e-5, 0.5e-5), 1.1e-6, DELTA)
    assert not verify.accepts((0.5e-5, 0.9e-5), 1.1e-6, DELTA)
    assert not verify.accepts((0.5e-5, 2e-5), 0.0, DELTA)
    assert not verify.accepts((2e-5, 0.5e-5), 0.0, DELTA)
    assert not verify.accepts((), 0.0, DELTA)
    for spent in (math.nan, -1e-6, math.inf):
        assert not verify.accepts((0.0, 0.0), spent, DELTA)
    for delta in (math.nan, 0.0, 1.0, 2.0, math.inf):
        assert not verify.accepts((0.0, 0.0), 0.0, delta)
    assert largest((1e-7, 3e-6)) == 3e-6
    assert largest(()) == math.inf


# --- the engine, on a model whose truth and bounds are chosen ------------------------------------

SLOPE = 20.0


def words_of(key):
    """The numbers of a key, which tell it from others."""
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


class Known(LossModel):
    """δ(σ, ε) = 1e-5 · (3/σ)^20 · e^(-(ε - 1)); what ``answer`` says is given for bounds."""

    method, estimator, status = "known", "known, estimate", "certified"

    def __init__(self, answer=lambda truth, number, key: (truth, truth / 2), samples=2**16):
        self.answer, self.samples = answer, samples
        self.asked, self.keys, self.sizes, self.betas, self.pilots = [], [], [], [], 0
        self.pilot_keys = []
        self.excess, self.free, self.slow = 0.01, (), ()

    @staticmethod
    def truth(sigma, epsilon=1.0):
        return 1e-5 * (3 / sigma) ** SLOPE * math.exp(1 - epsilon)

    def log_estimate(self, noise_multiplier, epsilon):
        return math.log(self.truth(noise_multiplier, epsilon))

    def guess(self, epsilon, delta):
        return 1.0

    def pilot(self, noise_multiplier, epsilon, trial):
        assert not self.asked or self.pilots  # every pilot of a round comes before its tests
        self.pilots += 1
        self.pilot_keys.append(words_of(trial.key))
        log_mean = self.log_estimate(noise_multiplier, epsilon)
        return Plan((Side(log_mean, lambda n, b: self.excess * 256 / math.sqrt(n), 1.0, 2**15),))

    def widened(self, plan, noise_multiplier, epsilon, trial):
        self.pilot_keys.append(words_of(trial.key))
        return plan

    def bounds(self, noise_multiplier, epsilon, plan, trial):
        self.asked.append((noise_multiplier, epsilon))
        self.sizes.append(trial.samples)
        self.betas.append(trial.beta)
        self.keys.append(words_of(trial.key))
        truth = self.truth(noise_multiplier, epsilon)
        return Bounds(*self.answer(truth, len(self.asked) - 1, trial.key), {})

    def free_bounds(self):
        return self.free

    def slow_bounds(self):
        return self.slow


def sigma_of(model, seed=0):
    return Engine(model, seed).noise_multiplier(1.0, DELTA)


def certified(model, sigma=3.2, seed=0):
    return Engine(model, seed).certify(sigma, 1.0, DELTA)


QUESTIONS = {
    "noise_multiplier": sigma_of,
    "epsilon": lambda model: Engine(model, 0).epsilon(3.0, DELTA),
    "certify": certified,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_looks_at_both_directions(question):
    good, bad = 0.5 * DELTA, (*NO_BOUND, 2 * DELTA)
    ask = QUESTIONS[question]
    assert ask(Known(lambda *_: (good, good))).bounds.both == (good, good)  # control
    for value in bad:
        for pair in ((good, value), (value, good), (value, value)):
            with pytest.raises(FailureError, match="not certified"):
                ask(Known(lambda *_, pair=pair: pair))


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_charges_its_failure_probability(question):
    ask = QUESTIONS[question]
    for two_values in ((DELTA, 0.0), (0.0, DELTA), (DELTA * (1 - 0.5e-3), 0.0)):
        with pytest.raises(FailureError, match="not certified"):
            ask(Known(lambda *_, both=two_values: both))
    actual = ask(Known(lambda *_: (DELTA * (1 - 1.001e-3), 0.0)))
    assert actual.beta == DELTA / 1000 and actual.delta == DELTA


def test_a_reported_delta_holds_both_directions_and_its_failure_probability():
    truth = Known.truth(3.0)
    for two_values in ((truth, truth / 3), (truth / 3, truth)):
        delta = Engine(Known(lambda *_, both=two_values: both), 0).delta(3.0, 1.0)
        assert delta.delta == pytest.approx(truth * 1.001, rel=1e-9) and delta.delta > truth
        assert delta.beta == pytest.approx(truth / 1000)
    for value in NO_BOUND:
        for two_values in ((truth, value), (value, truth)):
            delta = Engine(Known(lambda *_, both=two_values: both), 0).delta(3.0, 1.0)
            assert delta.delta == 1.0  # nothing is shown, and that always holds


@pytest.mark.parametrize("question", ["noise_multiplier", "epsilon"])
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_one_value_is_tested_in_a_round_and_released_where_it_is_accepted(question, refused):
    index = 0 if question == "noise_multiplier" else 1
    good, bad = (0.5 * DELTA, 0.5 * DELTA), (1.01 * DELTA, 0.0)
    model = Known(lambda truth, number, key: bad if number < refused else good)
    actual = QUESTIONS[question](model)
    tested = [x[index] for x in model.asked]
    assert len(tested) == actual.tests == refused + 1
    assert (actual.noise_multiplier, actual.epsilon)[index] == tested[-1]
    used = model.keys + model.pilot_keys
    assert len(set(used)) == len(used)  # fresh samples for each pilot and test
    assert model.betas == [pytest.approx(DELTA / 1000)] * len(model.keys)
    assert actual.samples == model.sizes[-1]
    assert actual.beta == pytest.approx((refused + 1) * DELTA / 1000)


def test_a_refused_first_value_starts_a_new_round_that_is_charged():
    good = DELTA * (1 - 1.5e-3)  # below δ - β, above δ - 2β
    refuse = 2 * DELTA, 0.0
    model = Known(lambda truth, number, key: refuse if number == 0 else (good, 0.0))
    with pytest.raises(FailureError, match="not certified"):
        sigma_of(model)
    assert len(model.asked) == 3  # one in each round
    good = DELTA * (1 - 2.1e-3)
    model = Known(lambda truth, number, key: refuse if number == 0 else (good, 0.0))
    sigma = sigma_of(model)
    assert sigma.beta == 2 * DELTA / 1000 and len(set(model.keys)) == len(model.keys)


@pytest.mark.parametrize("wrong", [False, True], ids=["as it is", "without the stop"])
def test_bad_values_are_released_no_more_often_than_beta(wrong, monkeypatch):
    """Bounds that fail with probability exactly β, and a pilot so hopeful that the value is bad.
    Control: an engine that goes on after a refusal."""
    beta, runs = 0.1, 600
    monkeypatch.setattr(verify, "BETA_SHARE", beta)
    monkeypatch.setattr(verify, "ROUNDS", 1)
    rng = np.random.default_rng(0)

    def answer(truth, number, key):
        low = rng.random() < beta
        return (0.5 * truth if low else 1.02 * truth), 0.0

    bad = 0
    for seed in range(runs):
        model = Known(answer, samples=2**18)
        model.excess = -0.3  # the bounds are expected below the truth
        try:
            if wrong:
                plan = [
                    Engine(model, seed).model.bounds(
                        x, 1.0, None, Trial(1, beta, jax.random.key(0))
                    )
                    for x in (3.1, 2.95, 2.94, 2.93)
                ]
                accepted = [verify.accepts(bounds.both, beta * DELTA, DELTA) for bounds in plan]
                bad += any(accepted[1:])
                continue
            sigma = sigma_of(model, seed)
        except FailureError:
            continue
        bad += Known.truth(sigma.noise_multiplier) > DELTA * (1 - beta)
    limit = beta + 4 * math.sqrt(beta * (1 - beta) / runs)
    assert (bad / runs <= limit) == (not wrong)
    assert bad > 0  # the failures do happen


# --- bounds that cost nothing --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Free:
    """A closed form with δ = factor · truth."""

    factor: float
    exact: bool = False
    method: str = "free"
    less: float = 1.0  # of log δ, where a unit is added

    def log_deltas(self, noise_multiplier, epsilon):
        factor = math.log(self.factor * Known.truth(noise_multiplier, epsilon))
        return factor, factor - self.less

    def noise_multiplier(self, epsilon, delta):
        return 3 * (self.factor * 1e-5 / delta * math.exp(1 - epsilon)) ** (1 / SLOPE)

    def epsilon(self, noise_multiplier, delta):
        return 1 + math.log(self.factor * Known.truth(noise_multiplier) / delta)


def outcomes(tests, factor):
    """σ of a free bound that leaves its share of δ to each test before it."""
    return Free(factor).noise_multiplier(1.0, DELTA * (1 - tests / 1000))


def test_nothing_above_the_free_bound_is_ever_released():
    model = Known(lambda truth, number, key: (2 * DELTA, 0.0))  # no test is ever passed
    model.free = (Free(1.2),)
    sigma = sigma_of(model)
    assert sigma.method == "free" and sigma.beta == 0
    assert sigma.noise_multiplier == pytest.approx(outcomes(1, 1.2), rel=1e-9)
    model.free = (Free(1e3),)  # far from the estimate, and still what holds
    sigma = sigma_of(model)
    assert sigma.method == "free" and sigma.beta == 0
    # where tests are passed they win
    model = Known()
    model.free = (Free(1.2),)
    sigma = sigma_of(model)
    assert sigma.method == "known" and sigma.noise_multiplier < 3 * 1.2 ** (1 / SLOPE)


def test_exact_bounds_need_no_samples():
    model = Known(lambda *_: (math.nan, math.nan))
    model.free = (Free(1.0, exact=True), Free(2.0))
    sigma = sigma_of(model)
    assert not model.asked and sigma.noise_multiplier == pytest.approx(3.0)
    assert Engine(model, 0).epsilon(3.0, DELTA).epsilon == pytest.approx(1.0)
    assert Engine(model, 0).delta(3.0, 1.0).delta == pytest.approx(1e-5)
    assert certified(model, 3.001).method == "free"
    with pytest.raises(FailureError, match="not certified"):
        certified(model, 2.999)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_free_bound_that_is_no_number_is_not_believed(broken):
    model = Known(lambda *_: (2 * DELTA, 0.0))
    model.free = (Free(0.1, exact=True, less=broken),)
    for ask in (QUESTIONS["noise_multiplier"], QUESTIONS["epsilon"], QUESTIONS["certify"]):
        with pytest.raises(FailureError):
            ask(model)


def test_where_samples_say_too_little_what_holds_without_them_is_given():
    refused = Known(lambda *_: (2 * DELTA, 0.0))  # every test of every round
    far = Known(lambda truth, number, key: (truth, 0.0))
    far.excess = 8.0  # a bound would cost half of σ: none is tried
    for model in (far, refused):
        with pytest.raises(FailureError, match="not certified"):
            sigma_of(model)
        reports, model.free, model.pilots = [], (Free(1e3),), 0
        model.asked.clear()
        sigma = Engine(model, 0, reports.append).noise_multiplier(1.0, DELTA)
        assert sigma.method == "free" and len(model.asked) == (3 if model is refused else 0)
        assert sigma.noise_multiplier == pytest.approx(outcomes(len(model.asked), 1e3), rel=1e-9)
        assert (
            sigma.beta == 0 and "proved without samples" in reports[-1].note and reports[-1].lasting
        )


class Nothing(Free):
    """Shows nothing for any σ."""

    def noise_multiplier(self, epsilon, delta):
        raise FailureError("no noise multiplier reaches the target")


def test_what_takes_long_without_samples_is_asked_where_they_say_too_little():
    refused = Known(lambda *_: (2 * DELTA, 0.0))
    loose = Known(lambda truth, number, key: (2 * truth, 0.0))  # a bound costs more than 5% of σ
    loose.excess = math.log(4)
    for model in (refused, loose):
        model.free, model.slow = (Free(1e3),), (Free(1.2),)
        sigma = sigma_of(model)
        assert sigma.method == "free"
        tests = 3 if model is refused else 1
        assert sigma.noise_multiplier == pytest.approx(outcomes(tests, 1.2), rel=1e-9)
        # the control: a lower answer by samples stands
        model.slow = (Free(1e3),)
        other = sigma_of(model)
        assert (other.method == "known") == (model is loose)
        assert other.noise_multiplier > 1.01 * sigma.noise_multiplier
    tight = Known()
    tight.free, tight.slow = (Free(1e3),), None  # is not asked
    assert sigma_of(tight).method == "known"
    # a statement, and δ
    refused.free, refused.slow = (), (Free(1.2),)
    assert certified(refused, 3.1).method == "free"
    with pytest.raises(FailureError, match="not certified"):
        certified(refused, 3.01)
    refused.slow = (Nothing(1.2),)
    with pytest.raises(FailureError, match="was accepted in 3 tests"):
        sigma_of(refused)
    loose.free, loose.slow, loose.excess = (), (Free(1.2),), 1.0
    assert Engine(loose, 0).delta(3.0, 1.0).delta == pytest.approx(1.2e-5)


class KnownProfile(Profile):
    def __init__(self, sigma):
        self.sigma = sigma

    def log_delta(self, epsilon, direction=None):
        return math.log(Known.truth(self.sigma, epsilon))

    def epsilon(self, delta):
        return Free(1.0).epsilon(self.sigma, delta)


class KnownBound(DeterministicBound):
    method, exact = "proved", False

    def profile(self, noise_multiplier, accuracy=0.0):
        return KnownProfile(noise_multiplier)

    def guess(self, epsilon, delta):
        return 3.0


@pytest.mark.parametrize("question", ["noise_multiplier", "epsilon"])
def test_tests_have_their_share_of_delta_beside_another_analysis(question):
    """What that proves is reported after three refused tests: at what is left of δ, as δ."""
    mechanism = Mechanism(SMALL)
    arguments = (1.0 if question == "noise_multiplier" else 3.0, DELTA)
    proved = DeterministicAnalysis(mechanism, KnownBound())
    for answer, tests in ((2 * DELTA, 3), (0.5 * DELTA, 1)):  # refused, and accepted further out
        tested = VerifiedAnalysis(mechanism, Known(lambda *_, answer=answer: (answer, 0.0)), seed=0)
        actual = getattr(least([tested, proved]), question)(*arguments)
        less = getattr(proved, question)(arguments[0], DELTA * (1 - tests / 1000))
        assert getattr(actual, question) == getattr(less, question) and actual.delta == DELTA
        assert ("without_answer" in actual.details) == (tests == 3)
    # the control: without tests nothing is charged
    whole = getattr(proved, question)(*arguments)
    assert getattr(least([proved]), question)(*arguments) == whole
    assert getattr(whole, question) < getattr(less, question)


class Flat(Known):
    """Bounds fall with σ three times more slowly than δ, from 100 times δ at σ = 3."""

    def __init__(self):
        super().__init__(lambda truth, number, key: (self.ceiling(self.asked[-1][0]), 0.0))

    @staticmethod
    def ceiling(sigma):
        return 1e-4 * (3 / sigma) ** (SLOPE / 3)

    def pilot(self, noise_multiplier, epsilon, trial):
        log_mean = self.log_estimate(noise_multiplier, epsilon)
        above = math.log(self.ceiling(noise_multiplier)) - log_mean
        return Plan((Side(log_mean, lambda n, b: above, 1e-3, 2**15),))


def test_a_search_follows_the_slope_of_its_bounds():
    """Within a test: by the slope of δ̂ it would need more than there are rounds."""
    model = Flat()
    model.most_slack = 1.0
    actual = sigma_of(model)
    lowest = 3 * 10 ** (3 / SLOPE)
    assert lowest <= actual.noise_multiplier < 1.02 * lowest and actual.tests == 1
    model.ceiling = lambda sigma: 1e-4  # has no slope
    with pytest.raises(FailureError, match="not certified"):
        sigma_of(model)


class Chance(Known):
    """Pilots and bounds that spread as means of samples of relative standard deviation 1 do."""

    def __init__(self):
        super().__init__(lambda truth, number, key: (truth * self.drawn(key, 2.56), 0.0), None)

    def drawn(self, key, above):
        return 1 + (above + float(jax.random.normal(key))) / math.sqrt(self.sizes[-1])

    def pilot(self, noise_multiplier, epsilon, trial):
        self.sizes.append(2**13)
        log_mean = self.log_estimate(noise_multiplier, epsilon)
        log_mean += math.log(self.drawn(trial.key, 0.0))
        return Plan((Side(log_mean, lambda n, b: 2.56 / math.sqrt(n), 1.0, 2**13),))


def certified_again(seeds):
    """How many released σ are certified with another seed."""
    occupied = 0
    for seed in seeds:
        sigma = sigma_of(Chance(), seed).noise_multiplier
        with contextlib.suppress(FailureError):
            occupied += certified(Chance(), sigma, 1000 + seed).delta == DELTA
    return occupied


def test_a_sigma_that_was_certified_is_certified_again(monkeypatch):
    """Whatever the seeds; the control: in one test some are refused by chance."""
    assert certified_again(range(60)) == 60
    monkeypatch.setattr(verify, "ROUNDS", 1)
    assert certified_again(range(60)) < 60


def test_each_round_of_a_certificate_has_its_own_samples_and_counts():
    model = Known(lambda truth, number, key: (DELTA * (1.1 - 0.06 * number), 0.0), samples=None)
    certificate = certified(model, 3.2)
    assert certificate.tests == 3 and certificate.beta == pytest.approx(3 * DELTA / 1000)
    used = model.keys + model.pilot_keys
    assert len(set(used)) == len(used) > 3 and len(model.keys) == 3
    assert model.sizes[1:] == [4 * size for size in model.sizes[:-1]]


def test_statements_that_are_false_by_far_are_refused_before_the_samples():
    model = Known(samples=None)
    with pytest.raises(FailureError, match="a pilot estimates as much"):
        certified(model, 2.5)
    assert not model.asked and model.pilots == 1


def test_deltas_that_floats_cannot_halve_are_refused():
    for ask in (
        lambda e: e.noise_multiplier(1.0, 1e-300),
        lambda e: e.epsilon(3.0, 1e-300),
        lambda e: e.certify(3.0, 1.0, 1e-300),
    ):
        with pytest.raises(UsageError, match="delta"):
            ask(Engine(Known(), 0))


# --- the composed loss ---------------------------------------------------------------------------


def test_a_loss_that_is_no_number_does_not_count_as_zero():
    values = np.asarray(dominating_pair.log_hinge(jnp.array([math.nan, -1.0, 1.0, -math.inf])))
    assert math.isnan(values[0]) and values[1] == values[3] == -math.inf and values[2] < 0


# --- the pair ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-155, 3e-154, 1e-120, 1e120, 1e155, 1e-300, 1e300])
def test_c_out_of_range_is_refused(scale):
    with pytest.raises(UsageError, match=r"Multiply C by a constant"):
        dominating_pair.exact(S.Dense(scale * np.eye(15) + 0.5 * scale * np.eye(15, k=-1)), SMALL)


def test_what_is_no_pair_is_refused():
    good = np.array([[2.0, 1.0], [1.0, 2.0]])
    factor = np.linalg.cholesky(good)
    bad = [
        (good * [[1, np.nan], [np.nan, 1]], factor),
        (good, np.full((2, 2), np.inf)),
        (good, factor * 1.01),
        (np.array([[2.0, 1.1], [1.0, 2.0]]), factor),
        (-good, factor),
        (np.zeros((2, 2)), np.zeros((2, 2))),
        (good[0], factor),
        (np.array([[2.0, -1.0], [-1.0, 2.0]]), np.linalg.cholesky(np.array([[2.0, -1], [-1, 2]]))),
    ]
    for (gram, root), call in itertools.product(bad, (certify, release)):
        arguments = (3.0, 1.0, DELTA) if call is certify else (1.0, DELTA)
        with pytest.raises(UsageError, match="pair"):
            call(dominating_pair.DominatingPair(gram, root), *arguments)
    dominating_pair.check(dominating_pair.DominatingPair(good, factor))
