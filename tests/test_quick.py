"""Programs with quick settings of the compiler."""

import jax
import jax.numpy as jnp
import pytest

from mfopt._runtime import _quick


@pytest.fixture
def asked_again():
    _quick.options.cache_clear()
    yield
    _quick.options.cache_clear()


def test_what_the_compiler_does_not_know_is_left_out(monkeypatch, asked_again):
    reference = _quick.options()
    assert {"xla_backend_optimization_level"} <= set(reference) <= set(_quick.OPTIONS)
    for known, expected in ((reference, reference), ({}, None)):
        _quick.options.cache_clear()
        monkeypatch.setattr(_quick, "OPTIONS", known | {"xla_of_another_version": True})
        assert _quick.options() == expected
    assert _quick.jit(lambda x: 2 * x)(jnp.float32(3)) == 6


def test_options_are_for_the_cpu(monkeypatch, asked_again):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert _quick.options() is None


def test_a_quick_program_is_one_of_its_own_or_part_of_another():
    double = _quick.jit(lambda x, times: times * x, static_argnums=1)
    assert double(jnp.float32(2), 3) == 6
    assert jax.jit(lambda x: double(x, 3) + 1)(jnp.float32(2)) == 7
    assert jax.grad(lambda x: double(x, 3))(2.0) == 3
    assert jax.jit(lambda x: x + double(jnp.float32(2), 3))(1.0) == 7  # nothing of it is traced
    if options := _quick.options():  # why it looks for traced arguments
        plain = jax.jit(lambda x: 3 * x, compiler_options=options)
        with pytest.raises(ValueError, match="top-level"):
            jax.jit(plain)(2.0)


def test_a_function_that_is_kept_whole_is_in_a_program_once():
    calls = []
    double = _quick.jit(lambda x: calls.append(1) or 2 * x, once=True)
    assert jax.jit(lambda x: double(x) + double(x + 1))(2.0) == 10
    assert len(calls) == 1
