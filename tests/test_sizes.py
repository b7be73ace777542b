"""What cannot fit into memory is refused before the work, with what would fit."""

import time

import pytest
from questions import factorized, searched

from mfopt import strategies as S
from mfopt._runtime import _sizes
from mfopt.errors import UsageError
from mfopt.experiments import comparison, families
from mfopt.optimize import kinds, sizes, starts
from mfopt.sampling import BallsInBins

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GiB free."""

    def with_free(gib):
        monkeypatch.setattr(_sizes, "free_memory", lambda: int(gib * GIB))

    with_free(16)
    return with_free


def test_the_largest_that_fits_is_said(machine):
    machine(4)
    with pytest.raises(UsageError, match=r"bins = 1000.*7.5 GiB.*3.6 GiB.*Here 481 would fit"):
        _sizes.require("bins", 1000, lambda bins: bins * 7.5 * GIB / 1000 - GIB / 100)
    _sizes.require("bins", 480, lambda bins: bins * 7.5 * GIB / 1000)
    with pytest.raises(UsageError, match="Nothing as large"):
        _sizes.require("bins", 5, lambda bins: 100 * GIB + bins)


REFUSED = "GiB of memory|must be at most 2147483647"


@pytest.mark.parametrize(
    ("kind", "epochs", "bins"),
    [
        ("blt", 64, 32768),
        ("blt", 4, 65536),
        ("dense", 64, 128),
        ("toeplitz", 1, 10**9),
        ("sqrt", 10**6, 10**6),
        ("tree", 10, 10**4),
        ("identity", 10**12, 10**11),
    ],
)
def test_what_was_killed_is_refused_at_once(machine, kind, epochs, bins):
    begun = time.process_time()
    with pytest.raises(UsageError, match=REFUSED):
        factorized(BallsInBins(bins, epochs), 2.0, strategy=kind)
    assert time.process_time() - begun < 5


def test_common_sizes_fit(machine):
    for kind in ("blt", "toeplitz", "banded", "dense"):
        sizes.require(BallsInBins(128, 16), sizes.Load(kind, 2**14, 64, 8))
    machine(4)
    for kind in ("blt", "toeplitz", "banded"):
        sizes.require(BallsInBins(128, 16), sizes.Load(kind, 2**14, 16))


def test_a_million_iterations_fit_where_there_are_no_modes(machine):
    """Modes of a C between two diagonals are made from numbers of all pairs of epochs."""
    million = BallsInBins(bins=128, epochs=7813)
    sizes.require(million, sizes.Load("blt", 2**14, scaled=True))
    for kind in ("banded-toeplitz", "wave-blt"):
        with pytest.raises(UsageError, match=r"bins = 128.*GiB.*Here \d+ would fit"):
            sizes.require(million, sizes.Load(kind, 2**14, scaled=True))


BUILT_IN = ("blt", "toeplitz", "banded-toeplitz", "banded", "dense")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_kind_says_how_many_numbers_it_has(name):
    size = starts.Size(n=12, bins=4, bands=3, buffers=2)
    entry = kinds.find(name)
    start = entry.convert(S.BLT([0.2, 0.1], [0.9, 0.5]), size)
    assert entry.parameters(size) == len(entry.parameterize(start, size.n).start)
    if entry.scalable:
        scaled = kinds.scaled(entry)
        count = len(scaled.parameterize(S.TimeScaled(start), size.n).start)
        assert scaled.parameters(size) == count


def test_unknown_kinds_are_refused_and_others_asked(machine):
    for kind in ("no-such-kind", "time-scaled"):
        with pytest.raises(UsageError, match="must be one of blt"):
            sizes.memory(BallsInBins(8, 2), sizes.Load(kind))
    with pytest.raises(UsageError, match="must be one of"):
        sizes.memory(BallsInBins(8, 2), sizes.Load("sqrt", 64))  # has no parameters to search for
    # a class whose modes are formed from the dense matrix says so
    dense, structured = (
        sizes.memory(BallsInBins(64, 64), sizes.Load(kind)) for kind in ("tree", "sqrt")
    )
    assert dense - structured == 8 * 5 * (64 * 64) ** 2


def test_samples_that_do_not_fit(machine):
    with pytest.raises(UsageError, match=r"samples = 1000000000000.*GiB.*Here \d+ would fit"):
        searched(BallsInBins(8, 2), 2.0, 1e-5, samples=10**12)


def test_vocabularies_and_canaries_beyond_memory_are_refused(machine):
    from mfopt.mechanism import Mechanism
    from mfopt.training.audit import audit
    from mfopt.training.privacy import solved
    from mfopt.training.tokenizers import Tokenizer

    with pytest.raises(UsageError, match="vocab_size = 1000000000: must be at most"):
        Tokenizer.train(iter(()), 10**9)
    mechanism = Mechanism(BallsInBins(4, 2), privacy_unit="user")
    with pytest.raises(UsageError, match=r"canaries = 1000000000.*GiB of memory"):
        audit(solved(mechanism, 2.0, 1e-3), canaries=10**9)


def test_compare_refuses_before_it_starts(machine):
    with pytest.raises(UsageError, match=REFUSED):
        comparison.Comparison(10**6, 10**6, (2.0,)).check()
    comparison.Comparison(128, 16, (2.0,)).check()
    for name in families.FAMILIES:
        with pytest.raises(UsageError, match="GiB of memory"):
            comparison.Comparison(10**6, 2000, (2.0,), include=(name,)).check()


def test_the_account_of_a_large_c(machine):
    from mfopt.accounting.monte_carlo import dominating_pair

    machine(1)
    with pytest.raises(UsageError, match="GiB of memory"):
        dominating_pair.exact(S.BandedToeplitz([1.0, 0.5]), BallsInBins(4096, 64))
