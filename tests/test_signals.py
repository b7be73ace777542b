"""SIGTERM and SIGHUP end work as Ctrl-C does; a result that was found is somewhere afterwards."""

import signal
import time

import pytest
from statements import stated

import mfopt
from mfopt import strategies as S
from mfopt._runtime import _signals
from mfopt.factorization import Factorization, keep
from mfopt.sampling import BallsInBins

SCHEME = BallsInBins(bins=4, epochs=2)
POLITE = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a terminal: whoever started the tests may have had signals ignored."""
    default_handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    original = {
        number: signal.signal(number, handler) for number, handler in default_handlers.items()
    }
    yield
    for number, handler in original.items():
        signal.signal(number, handler)


def raised(number):
    signal.raise_signal(number)
    time.sleep(1)  # the handler runs between two instructions of the main thread


@pytest.mark.parametrize("number", POLITE)
def test_polite_signals_are_interrupts(number):
    handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), _signals.as_interrupts():
        raised(number)
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize("number", [signal.SIGINT, *POLITE])
def test_a_signal_inside_a_finalizer_is_not_lost(number):
    # Python prints and drops what is raised there
    class Finalized:
        def __del__(self):
            signal.raise_signal(number)
            time.sleep(0.01)
            done.append("finalized")

    def block():
        Finalized()
        done.append("went on")
        time.sleep(5)

    done = []
    with pytest.raises(KeyboardInterrupt), _signals.as_interrupts():
        block()
    assert done == ["finalized", "went on"]


@pytest.mark.parametrize("number", [signal.SIGINT, *POLITE])
def test_an_interrupt_that_is_swallowed_comes_again_with_the_next_report(number):
    def block():
        reports = _signals.heard(events.append)
        reports("before")
        try:
            raised(number)
        except:  # noqa: E722 (as libraries have it)
            events.append("swallowed")
        reports("after")
        events.append("went on")

    events = []
    with pytest.raises(KeyboardInterrupt), _signals.as_interrupts():
        block()
    assert events == ["before", "swallowed", "after"]
    with _signals.as_interrupts():
        _signals.heard(events.append)("later")  # one that ended what it was meant for is over


def test_ignored_signals_stay_ignored():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with _signals.as_interrupts():
            signal.raise_signal(signal.SIGHUP)
        with _signals.deferred():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, *POLITE])
def test_a_deferred_signal_comes_after_the_block(number):
    done = []

    def block():
        with _signals.deferred():
            signal.raise_signal(number)
            done.append("saved")

    with pytest.raises(KeyboardInterrupt), _signals.as_interrupts():
        block()
    assert done == ["saved"]


# --- a finished result is never lost --------------------------------------------------------------


def record():
    return stated(S.BandedToeplitz([1.0, 0.5]), SCHEME)


def test_a_result_is_kept_beside_what_appeared_and_an_interrupt_comes_after(tmp_path, monkeypatch):
    path, real = tmp_path / "one.npz", Factorization.save
    assert keep(record(), path) == path
    assert keep(record(), path) == tmp_path / "one-2.npz"
    assert keep(record(), path, force=True) == path

    def save(*args, **options):
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(Factorization, "save", save)
    with pytest.raises(KeyboardInterrupt):
        keep(record(), tmp_path / "two.npz")
    digests = {entry.name: mfopt.load(entry).digest for entry in tmp_path.iterdir()}
    assert digests == dict.fromkeys(("one.npz", "one-2.npz", "two.npz"), record().digest)
