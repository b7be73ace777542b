"""The Monte Carlo protocol's conformance test: every registered law passes, broken ones do not."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from mfopt.accounting.bound import GaussianBound
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLaw, BallsInBinsLoss
from mfopt.accounting.monte_carlo.group import GroupUnits
from mfopt.accounting.monte_carlo.protocol import SampledLaw, law
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, BMinSep, FreshBins, Poisson, RandomPartition
from mfopt.strategies import BLT, BandedToeplitz
from mfopt.testing import check_sampled_law

C = BLT([0.3], [0.7])
AT = {"noise_multiplier": 1.5, "epsilon": 1.0, "samples": 2**12}
# for each scheme that a law is registered for, by the class's name
EXAMPLES = {
    "BallsInBins": (BallsInBins(bins=4, epochs=2), C),
    "FreshBins": (FreshBins(bins=4, epochs=2), BandedToeplitz([1.0, 0.4, 0.2])),
    "BMinSep": (BMinSep(bins=4, epochs=2, separation=3), BandedToeplitz([1.0, 0.4, 0.2])),
    "RandomPartition": (RandomPartition(4, 2, 2), BandedToeplitz([1.0, 0.4])),
}
SCHEME, _ = EXAMPLES["BallsInBins"]
REGISTERED = [cls for cls in law.registry if cls is not object]


@pytest.mark.release  # what they assert of kept bins is asserted in the check one by one
@pytest.mark.parametrize("cls", REGISTERED, ids=lambda cls: cls.__name__)
def test_every_registered_law_passes(cls):
    scheme, strategy = EXAMPLES[cls.__name__]
    check_sampled_law(scheme, strategy, **AT)


def test_any_loss_may_be_that_of_a_group():
    loss = law(SCHEME).loss(C)
    assert GroupUnits(loss).most_work == loss.most_work >= loss.work


def test_a_scheme_without_one_is_refused_and_the_known_are_named():
    with pytest.raises(UsageError, match=r"no sampled privacy loss.*BallsInBins"):
        law(Poisson(0.1, 3))


LAW, OWN = BallsInBinsLaw, BallsInBinsLoss


def law_of(**members):
    """A law with these in place of its own."""
    return type("Broken", (LAW,), members)


def law_with(name, method):
    """A law whose loss has another method of this name."""
    loss_class = dataclasses.dataclass(frozen=True, eq=False)(
        type(f"{name.title()}Loss", (BallsInBinsLoss,), {name: method})
    )
    return law_of(loss=lambda self, strategy: loss_class(LAW.loss(self, strategy).pair))


def half_a_derivative(self, slope, strategy):
    value = LAW.product(self, slope, strategy)
    return (value + jax.lax.stop_gradient(value)) / 2


def a_sum_for_a_mean(self, terms, *position):
    """Halves have half of it."""
    return LAW.log_delta(self, terms, *position) + math.log(len(terms.component) / 2**11)


def low_ceiling(self, direction, point):
    tilt = OWN.least(self, direction, point)
    return tilt._replace(log_ceiling=tilt.log_ceiling - 3)


def mean_for_a_bound(self, tilt, point, bet, trial):
    bound = OWN.bound(self, tilt, point, bet, trial)
    return bound._replace(value=bound.mean * (1 + 1e-9))


def no_number_is_fine(self, tilt, point, bet, trial):
    bound = OWN.bound(self, tilt, point, bet, trial)
    return bound if math.isfinite(bound.value) else bound._replace(value=1.0)


def one_payoff(self, tilt, point, samples, key):
    return OWN.pilot(self, tilt, point._replace(payoff=type(point)(1, 1).payoff), samples, key)


BROKEN = {
    # all of one piece, but of a smaller C: only what is executed can tell
    "weaker": (
        law_of(
            loss=lambda self, c: LAW.loss(self, c.rescaled(0.6)),
            quadratic=lambda self, c: LAW.quadratic(self, c.rescaled(0.6)),
            product=SampledLaw.product,
        ),
        "executed",
    ),
    "linear": (
        law_of(quadratic=lambda self, c: jnp.sqrt(LAW.quadratic(self, c))),
        "degree two",
    ),
    "halved": (law_of(product=half_a_derivative), "`product` must be"),
    "still": (law_of(log_scale=lambda self, reduced: jnp.zeros(())), "log_scale"),
    "deaf": (
        law_of(draws=lambda self, key, samples: LAW.draws(self, chunked.seed_key(0), samples)),
        "depend on its key",
    ),
    "biased": (
        law_of(log_delta=lambda self, *position: LAW.log_delta(self, *position) + 0.1),
        "standard errors apart",
    ),
    "undivided": (law_of(log_delta=a_sum_for_a_mean), "is the law `divisible`"),
    "detached": (
        law_of(
            quadratic=lambda self, c: jax.lax.stop_gradient(LAW.quadratic(self, c)),
            product=SampledLaw.product,
        ),
        "derivative of log δ̂ in the strategy",
    ),
    "low ceiling": (law_with("least", low_ceiling), "back at its own point"),
    "mean": (law_with("bound", mean_for_a_bound), "are below the truth"),
    "no number": (law_with("bound", no_number_is_fine), "must be no number"),
    "payoff": (law_with("pilot", one_payoff), "did not halve"),
    "old ceiling": (
        law_with("at", lambda self, tilt, point: tilt),
        "did not halve|does not hold elsewhere",
    ),
    "free": (
        law_with("free_bounds", lambda self: (GaussianBound(0.2 * self.sensitivity),)),
        "samples show",
    ),
    "none free": (law_with("free_bounds", lambda self: ()), "must be a free bound"),
    "start": (law_with("start", lambda self, epsilon, delta: math.nan), "`start` gives"),
}


@pytest.mark.release
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_law_is_refused(name):
    cls, match = BROKEN[name]
    with pytest.raises(AssertionError, match=match):
        check_sampled_law(SCHEME, C, **AT, sampled=cls(SCHEME))
