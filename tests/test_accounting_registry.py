"""The registry of accountants: who is asked, which answer is taken, and what is refused."""

import dataclasses
import math
import sys

import pytest
from scipy import stats

from mfopt import sampling
from mfopt.accounting import Accountant, Effort, Mechanism, SampledAnalysis, account, analysis
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import least
from mfopt.accounting.closed_form import gaussian
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import Poisson


@dataclasses.dataclass(frozen=True)
class Everyone(sampling.Scheme):
    """Every unit in every iteration."""

    iterations: int
    kind = "registry-test-everyone"
    independent = True

    def sample(self, step, population, seed):
        raise NotImplementedError

    def batch_sizes(self, step, population):
        return stats.binom(population, 1)


@dataclasses.dataclass(frozen=True)
class OftenPoisson(Poisson):
    """Says that it is Poisson sampling, and takes everybody."""

    kind = "registry-test-often"

    def sample(self, step, population, seed):
        return range(population)


class Loose(Accountant):
    """Right, and twice too large."""

    schemes = (Everyone,)

    def check(self, mechanism):
        if mechanism.group_size > 3:
            raise UsageError("loose: groups of at most 3")

    def analysis(self, mechanism, effort):
        moved = 2 * mechanism.group_size * math.sqrt(mechanism.iterations)
        return gaussian_release(mechanism, moved, "loose")


class Tight(Accountant):
    """Right, for one unit."""

    schemes = (Everyone,)

    def check(self, mechanism):
        if mechanism.group_size > 1:
            raise UsageError("tight: one unit")

    def analysis(self, mechanism, effort):
        return gaussian_release(mechanism, math.sqrt(mechanism.iterations), "tight", exact=True)


class Sampled(SampledAnalysis):
    """An answer that holds with a probability; far too small, so that it shows when it is asked."""

    def __init__(self, mechanism, value, spent=None):
        self.mechanism, self.value, self.spent = mechanism, value, spent

    def epsilon(self, noise_multiplier, delta, budget=None):
        if self.spent is not None:
            budget.spent = self.spent
        if self.value is None:
            raise FailureError("the sampled account found none")
        actual = gaussian_release(self.mechanism, 1.0, f"sampled {self.value}")
        return dataclasses.replace(actual.epsilon(noise_multiplier, delta), epsilon=self.value)

    def delta(self, noise_multiplier, epsilon):
        raise FailureError("the sampled account found none")

    def noise_multiplier(self, epsilon, delta, budget=None):
        raise FailureError("the sampled account found none")


def test_the_least_valid_answer_is_taken_and_named():
    guarantee = account(Mechanism(Everyone(9)), noise_multiplier=3.0, delta=1e-5)
    assert guarantee.method == "tight" and set(guarantee.details["least_of"]) == {"tight", "loose"}
    assert guarantee.epsilon == pytest.approx(gaussian.epsilon(1.0, 1e-5), rel=1e-9)
    group = account(Mechanism(Everyone(9), group_size=3), noise_multiplier=3.0, delta=1e-5)
    assert group.method == "loose"
    for actual in (
        account(Mechanism(Everyone(9)), epsilon=1.0, delta=1e-5),
        account(Mechanism(Everyone(9)), epsilon=1.0, noise_multiplier=3.0),
    ):
        assert actual.method == "tight"
    with pytest.raises(UsageError, match=r"at most 3\b.* Or: .*one unit"):
        account(Mechanism(Everyone(9), group_size=4), noise_multiplier=3.0, delta=1e-5)


def test_a_scheme_without_accountant_is_refused_and_nothing_is_inherited():
    with pytest.raises(UsageError, match=r"no accountant.*balls-in-bins.*poisson"):
        account(Mechanism(OftenPoisson(0.1, 5)), noise_multiplier=1.0, delta=1e-5)


@pytest.fixture
def accountants(monkeypatch):
    """Accountants of the scheme by name, none at first."""
    by_name = {}
    table = sys.modules["mfopt.accounting.account"]._REGISTERED
    monkeypatch.setitem(table, Everyone.kind, by_name)
    return by_name


def test_of_sampled_accounts_one_is_asked_and_a_free_bound_stands_in_for_a_failure(accountants):
    def register(value):
        class OneSampled(Accountant):
            sampled = True

            def check(self, mechanism):
                pass

            def analysis(self, mechanism, effort):
                return Sampled(mechanism, value)

        accountants[f"sampled {value}"] = OneSampled

    class Free(Loose):
        free = True

    mechanism = Mechanism(Everyone(9))
    accountants["free"] = Free
    with pytest.raises(UsageError, match="no accountant"):  # a free bound alone is no support
        analysis(mechanism)
    register(0.5)
    register(0.25)
    guarantee = account(mechanism, noise_multiplier=3.0, delta=1e-5)
    assert guarantee.epsilon == 0.5 and guarantee.details["least_of"] == ["loose", "sampled 0.5"]
    del accountants["sampled 0.5"], accountants["sampled 0.25"]
    register(None)
    guarantee = account(mechanism, noise_multiplier=3.0, delta=1e-5)
    assert guarantee.method == "loose" and guarantee.details["without_answer"]
    del accountants["free"]
    with pytest.raises(FailureError, match="found none"):
        account(mechanism, noise_multiplier=3.0, delta=1e-5)


def test_what_is_no_scheme_or_no_mechanism_is_refused():
    with pytest.raises(TypeError, match="not a sampling scheme"):

        class Wrong(Accountant):
            schemes = ("poisson",)

    with pytest.raises(UsageError, match="Mechanism"):
        account(Poisson(0.1, 5), noise_multiplier=1.0, delta=1e-5)
    with pytest.raises(UsageError, match="Mechanism"):
        analysis(Poisson(0.1, 5))
    with pytest.raises(UsageError, match="samples"):
        Effort(samples=0)


# --- never worse than a bound that holds anyway --------------------------------------------


@pytest.mark.parametrize(
    ("spent", "charged"), [(None, 3e-3), (0.0, 0.0), (1e-3, 1e-3)], ids=["silent", "none", "one"]
)
@pytest.mark.parametrize("value", [None, 100.0], ids=["refused", "answered"])
def test_tests_of_a_third_party_have_their_share_of_delta(spent, charged, value, accountants):
    """Beside them, refused or not, what holds anyway is asked at δ less what they have spent."""
    accountants["tight"] = Tight

    class OneSampled(Loose):
        schemes, sampled = (), True

        def analysis(self, mechanism, effort):
            return Sampled(mechanism, value, spent)

    accountants["sampled"] = OneSampled
    guarantee = account(Mechanism(Everyone(9)), noise_multiplier=3.0, delta=1e-5)
    assert guarantee.method == "tight" and guarantee.delta == 1e-5
    expected = gaussian.epsilon(1.0, 1e-5 * (1 - charged))
    assert guarantee.epsilon == pytest.approx(expected, rel=1e-12)
    # and the lower end is of the whole δ
    lower = gaussian.epsilon(1.0, 1e-5)
    assert lower * (1 - 1e-9) < guarantee.lower_bound <= lower
    # a δ includes the failure probability of its tests: nothing beside it is charged
    beside = account(Mechanism(Everyone(9)), noise_multiplier=3.0, epsilon=1.0)
    assert math.log(beside.delta) == pytest.approx(gaussian.log_delta(1.0, 1.0), rel=1e-12)


def test_a_sampled_accountant_has_to_say_what_its_tests_spend(accountants):
    class Silent(Loose):
        schemes, sampled = (), True

        def analysis(self, mechanism, effort):
            return object()

    accountants["silent"] = Silent
    with pytest.raises(TypeError, match=r"Silent.analysis: object must be .*SampledAnalysis"):
        account(Mechanism(Everyone(9)), noise_multiplier=3.0, delta=1e-5)


@pytest.mark.parametrize("nested", [False, True])
def test_two_sampled_analyses_are_not_combined(nested):
    """Each counts its tests in the whole δ."""
    mechanism = Mechanism(Everyone(9))
    certain = gaussian_release(mechanism, 3.0, "certain")
    parts = [certain, Sampled(mechanism, 100.0, 1e-3)]
    assert least([least(parts), certain]).parts == (*parts, certain)
    with pytest.raises(TypeError, match="at most one"):
        least([least(parts) if nested else parts[1], Sampled(mechanism, 100.0, 1e-3)])
