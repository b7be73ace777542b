"""A limit of the address space is told in a line, before JAX's threads abort or wait on it."""

import os
import subprocess
import sys

import pytest

from mfopt._runtime import _sizes
from mfopt.errors import FailureError

resource = pytest.importorskip("resource")
GIB = 2**30


def limited(words):
    """A command under ``ulimit -v``, begun by a shell: a fork of this process would warn of JAX."""
    command = [sys.executable, "-c", "from mfopt_cli.main import main; main()", *words]
    return subprocess.run(
        ["sh", "-c", f'ulimit -v {GIB // 1024}; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_a_search_ends_in_a_line():
    ended = limited(["optimize", "--epochs=2", "--iters=4", "--delta=1e-5", "--eps=2"])
    assert ended.returncode == 1 and ended.stdout == ""
    assert "address space of this process is limited to 1.0 GiB" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and "ulimit -v" in ended.stderr


def test_an_account_without_jax_still_answers():
    words = ["--probability=0.01", "--iters=20", "--eps=2", "--delta=1e-6", "--json"]
    ended = limited(["account", "dpsgd", *words])
    assert ended.returncode == 0 and '"noise_multiplier"' in ended.stdout


def test_what_is_left_counts_as_free_memory(monkeypatch):
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    assert _sizes.free_memory() > GIB / 2
    _sizes.require_address_space.__wrapped__()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, infinite))
    # less than is taken already: what work counts for Python and JAX is all there is
    assert _sizes.free_memory() <= GIB / 2
    with pytest.raises(FailureError, match=r"limited to 0\.0 GiB"):
        _sizes.require_address_space.__wrapped__()
