"""The public conformance kit: every rule refuses something that breaks it and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from mfopt import sampling
from mfopt.accounting import Accountant, Mechanism
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.errors import UsageError
from mfopt.sampling import Poisson, Scheme
from mfopt.testing import check_accountant, check_scheme


@dataclasses.dataclass(frozen=True)
class Coins(Scheme):
    """Poisson sampling, written out: what the broken ones below are variants of."""

    probability: float
    iterations: int
    kind = "kit-coins"
    independent = True

    def __post_init__(self):
        Poisson(self.probability, self.iterations)  # checks both
        if isinstance(self.probability, int):
            object.__setattr__(self, "probability", float(self.probability))

    def sample(self, step, population, seed):
        self._step(step)
        rng = sampling.generator(seed, step)
        return np.flatnonzero(rng.random(population) < self.probability)

    def batch_sizes(self, step, population):
        return stats.binom(population, self.probability)


def test_a_right_scheme_passes():
    check_scheme(Coins(0.3, 6))


def chosen(self, step, population, seed):
    return Coins(self.probability, self.iterations).sample(step, population, seed)


class Memory:
    calls = 0


def impure(self, step, population, seed):
    Memory.calls += 1
    return chosen(self, step, population, seed + Memory.calls)


def all_or_none(self, step, population, seed):
    self._step(step)
    rng = sampling.generator(seed, step)
    return np.arange(population if rng.random() < self.probability else 0)


def pairs(self, step, population, seed):
    """Unit 1 does the opposite of unit 0, and everybody else is on their own."""
    units = chosen(self, step, population, seed)
    remaining = units[units > 1]
    return remaining if remaining.size % 2 else np.concatenate([np.arange(2), remaining])


def of_the_number(self, step, population, seed):
    """A chance that falls with the number of units."""
    rate = min(1.0, 12 / population)
    return np.flatnonzero(sampling.generator(seed, self._step(step)).random(population) < rate)


BROKEN = {
    "unsorted": ({"sample": lambda s, t, n, k: chosen(s, t, n, k)[::-1]}, "increasing"),
    "impure": ({"sample": impure}, "pure function"),
    "other draws": (
        {"draws": lambda s, n, k: lambda t: chosen(s, t, n, k + 1)},
        "draws gives other units",
    ),
    "no end": (
        {"sample": lambda s, t, n, k: chosen(s, int(t) % s.iterations, n, k)},
        "must be refused",
    ),
    "blind": ({"sample": lambda s, t, n, k: chosen(s, t, n, 0)}, "depend on the seed"),
    "other law": (
        {"batch_sizes": lambda s, t, n: stats.binom(n, min(1, 1.3 * s.probability))},
        "sizes of",
    ),
    "other mean": (
        {"batch_sizes": lambda s, t, n: stats.binom(n, 1.066 * s.probability)},
        "in the mean",
    ),
    "other normalizer": ({"expected_batch": lambda s, n: 1.1 * s.probability * n}, "expected"),
    "all or none": (
        {
            "sample": all_or_none,
            "batch_sizes": lambda s, t, n: stats.rv_discrete(
                values=([0, n], [1 - s.probability, s.probability])
            )(),
        },
        "declared independent",
    ),
    "pairs": (
        {"sample": pairs, "batch_sizes": lambda s, t, n: _pair_law(s, n)},
        "declared independent",
    ),
    "of the number": (
        {"sample": of_the_number, "batch_sizes": lambda s, t, n: stats.binom(n, min(1, 12 / n))},
        "another chance",
    ),
    "adjacency": ({"independent": False, "executed_adjacency": lambda s, a: a}, "moves the others"),
    "stronger adjacency": ({"executed_adjacency": lambda s, a: "replace"}, "shows nothing about"),
    "epochs that are none": (
        {"epoch_ends": property(lambda s: range(2, s.iterations, 3))},
        "declares steps 0 to 2 an epoch",
    ),
    "epochs beyond the end": (
        {"epoch_ends": property(lambda s: (s.iterations,))},
        "increasing steps",
    ),
    "anything goes": ({"__post_init__": lambda s: None}, "must be refused"),
}


def _pair_law(scheme, population):
    variants = stats.binom(population - 2, scheme.probability)
    count = np.arange(population + 1)
    mass = np.zeros(population + 1)
    for k in range(population - 1):
        mass[k if k % 2 else k + 2] += variants.pmf(k)
    return stats.rv_discrete(values=(count, mass))()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_scheme_is_refused(name):
    changes, match = BROKEN[name]
    kind = f"kit-broken-{name.replace(' ', '-')}"
    space = {"kind": kind, "__annotations__": {}, **changes}
    cls = type(f"Broken{name.title().replace(' ', '')}", (Coins,), space)
    cls = dataclasses.dataclass(frozen=True)(cls)
    with pytest.raises(AssertionError, match=match):
        check_scheme(cls(0.3, 6))


def test_a_scheme_that_files_cannot_hold_is_refused_when_it_is_defined_or_used():
    for space, match in (
        ({}, "a kind of its own"),
        ({"kind": "has space", "independent": True}, "a kind of its own"),
        ({"kind": "poisson", "independent": True}, "is taken"),
        ({"kind": "kit-undeclared"}, "independent"),
    ):
        with pytest.raises(TypeError, match=match):
            type("Wrong", (Scheme,), space)
    with pytest.raises(TypeError, match="a kind of its own"):
        type("Nearly", (Coins,), {})  # a file would take it for its parent
    plain = type(
        "NoDataclass",
        (Coins,),
        {
            "kind": "kit-plain",
            "extra": 0,
            "__init__": lambda self, extra: vars(self).update(
                extra=extra, probability=0.5, iterations=3
            ),
        },
    )
    with pytest.raises(UsageError):
        Mechanism(plain(1))


# --- accountants ---------------------------------------------------------------------------


class CoinsKnown(Accountant):
    """Right, without amplification; ``_share`` of it is what the broken ones say."""

    schemes = (Coins,)
    _share = 1.0

    def check(self, mechanism):
        if mechanism.adjacency == "replace":
            raise UsageError("adjacency: add-remove")

    def analysis(self, mechanism, effort):
        moved = mechanism.group_size * math.sqrt(mechanism.iterations)
        return gaussian_release(mechanism, CoinsKnown._share * moved, "all coins come up")


def test_a_right_accountant_passes():
    check_accountant(
        Mechanism(Coins(0.9, 4)), noise_multiplier=2.0, longer=Mechanism(Coins(0.9, 5))
    )


def test_an_accountant_that_says_too_little_is_refused(monkeypatch):
    monkeypatch.setattr(CoinsKnown, "_share", 0.6)
    with pytest.raises(AssertionError, match="as it is executed shows"):
        check_accountant(Mechanism(Coins(0.9, 4)), noise_multiplier=2.0)


class Alters:
    """An analysis whose answers are changed on the way out."""

    def __init__(self, inner, change):
        self.inner, self.change, self.mechanism = inner, change, inner.mechanism

    def __getattr__(self, name):
        def ask(*arguments):
            return self.change(name, getattr(self.inner, name)(*arguments))

        return ask


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda name, g: dataclasses.replace(g, group_size=g.group_size + 1), "group_size"),
        (lambda name, g: dataclasses.replace(g, privacy_unit="nobody"), "privacy_unit"),
        (lambda name, g: dataclasses.replace(g, failure_probability=1e-9), "failure probability"),
        (lambda name, g: dataclasses.replace(g, method=""), "method"),
        (lambda name, g: dataclasses.replace(g, details={}), "hold the sampling"),
        (lambda name, g: dataclasses.replace(g, epsilon=3.0), "must cost|smaller"),
        (
            lambda name, g: dataclasses.replace(g, delta=0.5 * g.delta) if name == "delta" else g,
            "which gives δ",
        ),
        (
            lambda name, g: (
                dataclasses.replace(g, noise_multiplier=1.01 * g.noise_multiplier)
                if name == "noise_multiplier"
                else g
            ),
            "which gives σ",
        ),
    ],
)
def test_a_statement_that_says_something_else_is_refused(monkeypatch, change, match):
    plain = CoinsKnown.analysis
    monkeypatch.setattr(
        CoinsKnown,
        "analysis",
        lambda self, mechanism, effort: Alters(plain(self, mechanism, effort), change),
    )
    with pytest.raises(AssertionError, match=match):
        check_accountant(Mechanism(Coins(0.9, 4)), noise_multiplier=2.0)
