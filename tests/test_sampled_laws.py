"""The Monte Carlo protocol's conformance test: every registered law passes, broken ones do not."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLaw, BallsInBinsLoss
from mfopt.accounting.monte_carlo.free import Unamplified
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, BMinSep, FreshBins, KOfN, Poisson
from mfopt.strategies import BLT, BandedToeplitz
from mfopt.testing import check_sampled_law

C = BLT(np.array([0.3]), np.array([0.7]))
AT = {"noise_multiplier": 1.5, "epsilon": 1.0, "samples": 2**12}
# for each scheme that a law is registered for, by the class's name
EXAMPLES = {
    "BallsInBins": (BallsInBins(bins=4, epochs=2), C),
    "FreshBins": (FreshBins(bins=4, epochs=2), BandedToeplitz(np.array([1.0, 0.4, 0.2]))),
    "BMinSep": (BMinSep(bins=4, epochs=2, separation=3), BandedToeplitz(np.array([1.0, 0.4, 0.2]))),
    "KOfN": (KOfN(bins=5, epochs=2, separation=3), BandedToeplitz(np.array([1.0, 0.4, 0.2]))),
}
SCHEME, _ = EXAMPLES["BallsInBins"]
REGISTERED = [cls for cls in law.registry if cls is not object]


@pytest.mark.release  # what they assert of kept bins is asserted in the check one by one
@pytest.mark.parametrize("cls", REGISTERED, ids=lambda cls: cls.__name__)
def test_every_registered_law_passes(cls):
    scheme, strategy = EXAMPLES[cls.__name__]
    check_sampled_law(scheme, strategy, **AT)


def test_a_scheme_without_one_is_refused_and_the_known_are_named():
    with pytest.raises(UsageError, match=r"no sampled privacy loss.*BallsInBins"):
        law(Poisson(0.1, 3))


class Weaker(BallsInBinsLaw):
    """All of one piece, but of a smaller C: only what is executed can tell."""

    def loss(self, strategy):
        return super().loss(strategy.rescaled(0.6))

    def quadratic(self, strategy):
        return super().quadratic(strategy.rescaled(0.6))


class Linear(BallsInBinsLaw):
    def quadratic(self, strategy):
        return jnp.sqrt(super().quadratic(strategy))


class Halved(BallsInBinsLaw):
    """The value is right, the derivative is not."""

    def product(self, slope, strategy):
        value = super().product(slope, strategy)
        return (value + jax.lax.stop_gradient(value)) / 2


class Still(BallsInBinsLaw):
    def log_scale(self, reduced):
        return jnp.zeros(())


class Deaf(BallsInBinsLaw):
    def draws(self, key, samples):
        from mfopt.accounting.monte_carlo import chunked

        return super().draws(chunked.seed_key(0), samples)


class Biased(BallsInBinsLaw):
    def log_delta(self, terms, log_sigma, epsilon):
        return super().log_delta(terms, log_sigma, epsilon) + 0.1


class Undivided(BallsInBinsLaw):
    """A sum is taken for a mean: halves have half of it."""

    def log_delta(self, terms, log_sigma, epsilon):
        return super().log_delta(terms, log_sigma, epsilon) + math.log(len(terms.component) / 2**11)


class Detached(BallsInBinsLaw):
    def quadratic(self, strategy):
        return jax.lax.stop_gradient(super().quadratic(strategy))


def law_with(name, method):
    """A law whose loss has another method of this name."""
    loss_class = dataclasses.dataclass(frozen=True, eq=False)(
        type(f"{name.title()}Loss", (BallsInBinsLoss,), {name: method})
    )

    class Broken(BallsInBinsLaw):
        def loss(self, strategy):
            return loss_class(super().loss(strategy).pair)

    return Broken


OWN = BallsInBinsLoss


def low_ceiling(self, direction, point):
    found = OWN.least(self, direction, point)
    return found._replace(log_ceiling=found.log_ceiling - 3)


def mean_for_a_bound(self, tilt, point, bet, trial):
    found = OWN.bound(self, tilt, point, bet, trial)
    return found._replace(value=found.mean * (1 + 1e-9))


def no_number_is_fine(self, tilt, point, bet, trial):
    found = OWN.bound(self, tilt, point, bet, trial)
    return found if math.isfinite(found.value) else found._replace(value=1.0)


def one_payoff(self, tilt, point, samples, key):
    return OWN.pilot(self, tilt, point._replace(payoff=type(point)(1, 1).payoff), samples, key)


def old_ceiling(self, tilt, point):
    return tilt


def less_noise_is_free(self):
    return (Unamplified(0.2 * self.sensitivity),)


BROKEN = {
    "weaker": (Weaker, "executed"),
    "linear": (Linear, "degree two"),
    "halved": (Halved, "`product` must be"),
    "still": (Still, "log_scale"),
    "deaf": (Deaf, "depend on its key"),
    "biased": (Biased, "standard errors apart"),
    "undivided": (Undivided, "is the law `divisible`"),
    "detached": (Detached, "derivative of log δ̂ in the strategy"),
    "low ceiling": (law_with("least", low_ceiling), "back at its own point"),
    "mean": (law_with("bound", mean_for_a_bound), "are below the truth"),
    "no number": (law_with("bound", no_number_is_fine), "must be no number"),
    "payoff": (law_with("pilot", one_payoff), "did not halve"),
    "old ceiling": (law_with("at", old_ceiling), "did not halve|does not hold elsewhere"),
    "free": (law_with("free_bounds", less_noise_is_free), "samples show"),
    "none free": (law_with("free_bounds", lambda self: ()), "must be a free bound"),
    "start": (law_with("start", lambda self, epsilon, delta: math.nan), "`start` gives"),
}


@pytest.mark.release
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_law_is_refused(name):
    cls, match = BROKEN[name]
    with pytest.raises(AssertionError, match=match):
        check_sampled_law(SCHEME, C, **AT, sampled=cls(SCHEME))
