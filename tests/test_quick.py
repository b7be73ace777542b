"""Programs with quick settings of the compiler."""

import jax
import jax.numpy as jnp
import pytest

from mfopt import _quick


def test_options_are_for_known_versions_and_the_cpu(monkeypatch):
    found = {}
    for version, backend in (("0.9.1", "cpu"), ("0.7.2", "cpu"), ("0.12.0", "cpu"), ("0.9", "gpu")):
        with monkeypatch.context() as patch:
            patch.setattr(_quick, "version", lambda name, version=version: version)
            patch.setattr(jax, "default_backend", lambda backend=backend: backend)
            _quick.options.cache_clear()
            found[version, backend] = _quick.options() is not None
    _quick.options.cache_clear()
    assert found == {
        ("0.9.1", "cpu"): True,
        ("0.7.2", "cpu"): False,
        ("0.12.0", "cpu"): False,
        ("0.9", "gpu"): False,
    }


def test_a_quick_program_is_one_of_its_own_or_part_of_another():
    double = _quick.jit(lambda x, times: times * x, static_argnums=1)
    assert double(jnp.float32(2), 3) == 6
    assert jax.jit(lambda x: double(x, 3) + 1)(jnp.float32(2)) == 7
    assert jax.grad(lambda x: double(x, 3))(2.0) == 3
    if _quick.options():  # why it looks for traced arguments
        with pytest.raises(ValueError, match="top-level"):
            jax.jit(lambda x: double._compiled(x, 3))(2.0)
