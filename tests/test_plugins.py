"""Installed packages are loaded when a name is unknown, and only then."""

import importlib.metadata
import sys

import numpy as np
import pytest
from commands import invoked

from mfopt import sampling, strategies
from mfopt._runtime import _plugins
from mfopt.accounting import Mechanism, account
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import load
from mfopt.noise import from_factorization
from mfopt.optimize import kinds
from mfopt.strategies import base

SCHEME = """
import dataclasses
from mfopt.sampling import Poisson

@dataclasses.dataclass(frozen=True)
class Renamed(Poisson):
    kind = "plugin-poisson"
"""
ACCOUNTANT = """
from mfopt.accounting import Accountant
from mfopt.accounting.accountants.unamplified import gaussian_release
from plugin_scheme import Renamed

class Known(Accountant):
    schemes = (Renamed,)

    def check(self, mechanism):
        pass

    def analysis(self, mechanism, effort):
        return gaussian_release(mechanism, float(mechanism.iterations), "plugin")
"""


STRATEGY = """
import jax.numpy as jnp
import numpy as np
from mfopt.optimize import kinds
from mfopt.optimize.parameterization import Parameterization
from mfopt.strategies import ToeplitzStrategy
from mfopt.strategies.fields import Array, parameter

class Decaying(ToeplitzStrategy):
    kind = "plugin-decaying"
    power: Array = parameter(dimensions=0)

    def toeplitz_coefs(self, n):
        return (1.0 + jnp.arange(n)) ** -jnp.asarray(self.power)

def build(x):
    return Decaying(jnp.exp(x[0]))

kinds.register(
    kinds.Kind(
        "plugin-decaying",
        starts=lambda size: [Decaying(0.5)],
        convert=lambda strategy, size: strategy if strategy.kind == Decaying.kind else None,
        parameterize=lambda strategy, n: Parameterization(np.log([strategy.power]), build),
        parameters=lambda size: 1,
        samples=256,
        steps=3,
        tolerance=1e-3,
    )
)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_plugins, "_loaded", set())
    entries = []
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda *, group: tuple(entries) if group == _plugins.GROUP else (),
    )

    def add(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        entries.append(importlib.metadata.EntryPoint(name, name, _plugins.GROUP))

    yield add
    for name in ("plugin_scheme", "plugin_accountant", "plugin_broken", "plugin_strategy"):
        sys.modules.pop(name, None)


def test_a_plugin_is_found_by_the_kind_that_it_defines(install):
    text = "plugin-poisson:probability=0.5,iterations=4"
    with pytest.raises(UsageError, match="must be one of"):
        sampling.parse(text)
    install("plugin_scheme", SCHEME)
    sampling.parse("poisson:probability=0.5,iterations=4")
    assert "plugin_scheme" not in sys.modules  # nobody asked for it
    scheme = sampling.parse(text)
    assert scheme.kind == "plugin-poisson"
    with pytest.raises(UsageError, match="no accountant"):
        account(Mechanism(scheme), noise_multiplier=1.0, delta=1e-5)
    install("plugin_accountant", ACCOUNTANT)
    assert account(Mechanism(scheme), noise_multiplier=8.0, delta=1e-5).method == "plugin"


def test_a_plugin_that_cannot_be_imported_is_named(install):
    install("plugin_broken", "raise RuntimeError('half installed')")
    for ask in (
        lambda: sampling.parse("nobody-s-kind:x=1"),
        lambda: strategies.from_description({"kind": "nobody-s-kind"}, {}),
    ):
        with pytest.raises(FailureError, match=r"plugin_broken.*half installed"):
            ask()
    sampling.parse("poisson:probability=0.5,iterations=4")  # control: what is known needs none


@pytest.mark.ci
def test_a_strategy_of_a_plugin_is_optimized_by_name(install, tmp_path):
    words = ["optimize", "--epochs", "2", "--iters", "4", "--eps", "2", "--delta", "1e-2"]
    words += ["--strategy", "plugin-decaying", "--certify-samples", "4096", "--seed", "1"]
    words += ["--out", str(tmp_path / "made.npz"), "--json"]
    refused = invoked(*words)
    assert refused.exit_code == 2 and "is none of blt" in refused.output
    install("plugin_strategy", STRATEGY)
    try:
        done = invoked(*words)
        assert done.exit_code == 0, done.output
        factorization = load(tmp_path / "made.npz")
        assert (
            factorization.strategy.kind == "plugin-decaying"
            and factorization.guarantee.status == "certified"
        )
        stream = from_factorization(factorization, clip_norm=1.0, past="dense")
        noise, _ = stream.next(stream.init(np.zeros(2, np.float32)))
        assert np.all(np.isfinite(noise)) and np.all(noise != 0)
    finally:
        kinds._KINDS.pop("plugin-decaying", None)
        base._KINDS.pop("plugin-decaying", None)
