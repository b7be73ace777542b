"""The least error over sampling schemes and forms of C."""

from types import SimpleNamespace

import numpy as np
import pytest
from commands import failure

import mfopt
from mfopt import strategies as S
from mfopt.errors import FailureError, UsageError
from mfopt.optimize import auto, memory
from mfopt.optimize.run import InterruptedOptimization, Optimized
from mfopt.sampling import BallsInBins, FreshBins

TARGET = (2, 4, 2.0, 1e-3)  # epochs, iterations, ε, δ
GOOD, BAD = S.BLT(np.array([0.3]), np.array([0.6])), S.BandedToeplitz(np.array([1.0, 0.9]))


def result(strategy, loss=0.0):
    return Optimized(strategy, loss, 1.0, "stub", np.zeros((0, 3)), 0.0)


ERRORS = {
    ("balls-in-bins", "identity"): 4.0,
    ("fresh-bins", "identity"): 3.0,
    ("balls-in-bins", "blt"): 2.0,
    ("fresh-bins", "banded-toeplitz"): 2.5,
}


@pytest.fixture
def searched(monkeypatch):
    """What is optimized, and what a search of (scheme, kind) ends with: a C, or an exception."""
    calls = []
    ends = {
        ("balls-in-bins", "blt"): GOOD,
        ("fresh-bins", "banded-toeplitz"): BAD,
    }

    def search(scheme, epsilon, delta, *, strategy, bands, buffers, init, **_):
        calls.append((scheme, strategy, bands, buffers, init))
        end = ends[scheme.kind, strategy]
        if isinstance(end, BaseException):
            raise end
        return result(end)

    def scored(one, scheme, *_):
        rmse = ERRORS[scheme.kind, one.strategy.kind]
        return memory.WithinMemory(int(one.strategy.kind != "identity"), one, 1.0, rmse, rmse)

    monkeypatch.setattr(memory, "optimize", search)
    monkeypatch.setattr(memory, "scored", scored)
    monkeypatch.setattr(auto, "certified", lambda loss, made: made.rmse)
    return calls, ends


class Made(tuple):
    """A stub of a factorization: (scheme, C, interrupted, provenance), its error and status."""

    def __new__(cls, facts, rmse, status):
        made = super().__new__(cls, facts)
        made.rmse, made.guarantee = rmse, SimpleNamespace(status=status)
        made.not_certified = "no proof"
        made.provenance = {**facts[3], "interrupted": facts[2], "not_certified": ["no proof"]}
        return made


@pytest.fixture
def proved(monkeypatch):
    """(scheme, C, interrupted, provenance) of all that is put on record; the first may fail, or
    be given an error or a status.
    """
    records, failing = [], []

    def prove(searched, *_):
        found, scheme, provenance, interrupted, _ = searched
        rmse, status = ERRORS[scheme.kind, found.strategy.kind], "certified"
        come = failing.pop(0) if failing else None
        if isinstance(come, float):
            rmse = come
        elif isinstance(come, str):
            status = come
        facts = (scheme, found.strategy, interrupted, provenance)
        records.append(Made(facts, rmse, status))
        if isinstance(come, Exception):
            raise come
        return records[-1]

    monkeypatch.setattr(auto, "on_record", prove)
    return records, failing


def test_the_least_error_is_taken_and_what_was_tried_is_on_record(searched, proved):
    calls, told = searched[0], []
    scheme, strategy, interrupted, record = auto.least_error(*TARGET, most=3, progress=told.append)
    assert [(type(c[0]), *c[1:4]) for c in calls] == [
        (BallsInBins, "blt", 1, 3),
        (FreshBins, "banded-toeplitz", 4, 1),
    ]
    assert calls[1][4] is GOOD  # a banded C begins where the BLT ended
    assert strategy is GOOD and scheme == BallsInBins(4, 2) and not interrupted
    found = {(one["sampling"]["kind"], one["strategy"]): one for one in record["tried"]}
    assert {key: one["estimated_rmse"] for key, one in found.items()} == ERRORS
    notes = [event.note for event in told if event.lasting]
    assert sum("RMSE" in note for note in notes) == len(found)


def test_what_has_no_answer_is_left_out(searched, proved):
    calls, ends = searched
    ends["balls-in-bins", "blt"] = FailureError("no such σ")
    scheme, strategy, _, record = auto.least_error(*TARGET, most=3)
    assert calls[1][4] is None and strategy is BAD and scheme == FreshBins(4, 2)
    assert record["tried"][2]["problem"] == "no such σ"
    assert "estimated_rmse" not in record["tried"][2]


def test_what_is_not_certified_gives_way_to_the_next(searched, proved):
    records, failing = proved
    failing += [FailureError("no bound")]
    scheme, strategy, _, record = auto.least_error(*TARGET, most=3)
    assert [one[1] for one in records] == [GOOD, BAD] and strategy is BAD
    assert scheme == FreshBins(4, 2) and "no bound" in record["not_certified"][0]
    failing += [FailureError("no bound")] * 5
    with pytest.raises(FailureError, match="could be certified: balls-in-bins, blt: no bound"):
        auto.least_error(*TARGET, most=3)


def test_a_certificate_that_costs_the_amplification_gives_way_to_a_lesser_error(searched, proved):
    records, failing = proved
    failing += [10.0]  # of the best estimate; the second is 2.5
    _, strategy, *_ = auto.least_error(*TARGET, most=3)
    assert strategy is BAD and len(records) == 2
    records.clear()
    failing += [2.6, 2.65]
    _, strategy, *_ = auto.least_error(*TARGET, most=3)
    assert strategy is GOOD and len(records) == 2


def test_a_search_without_any_certificate_is_kept(searched, proved):
    records, failing = proved
    failing += ["estimate"] * 5
    made = auto.least_error(*TARGET, most=3)
    assert made[1] is GOOD and made.guarantee.status == "estimate" and len(records) == 4


@pytest.mark.parametrize("loss", [-5.0, 9.0, np.inf])
def test_an_interrupt_keeps_the_best(searched, proved, loss):
    unfinished = result(S.BandedToeplitz(np.array([1.0, 0.5])), loss)
    searched[1]["fresh-bins", "banded-toeplitz"] = InterruptedOptimization(unfinished)
    scheme, strategy, interrupted, record = auto.least_error(*TARGET, most=3)
    assert interrupted and len(record["tried"]) == 3
    if loss < 0:
        assert scheme == FreshBins(4, 2) and strategy is unfinished.strategy
    else:
        assert scheme == BallsInBins(4, 2) and strategy is GOOD


def test_an_interrupt_before_anything_says_so(searched, proved, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "scored", stop)
    _, strategy, interrupted, _ = auto.least_error(*TARGET, most=0)
    assert isinstance(strategy, S.Identity) and interrupted  # there, without an estimate
    monkeypatch.setattr(memory.Candidate, "search", stop)
    with pytest.raises(FailureError, match="nothing to keep"):
        auto.least_error(*TARGET, most=0)


def test_candidates_fit_into_the_memory_and_the_bins():
    for most in range(20):
        for one in auto.candidates(4, 8, 8.0, most):
            if one.kind == "banded-toeplitz":
                assert 2 <= one.size <= min(most + 1, 8)
            else:
                assert one.size <= most
    assert [one.kind for one in auto.candidates(4, 8, 2.0, 0)] == ["identity"] * 2
    kinds = [one.kind for one in auto.candidates(16, 128, 2.0, auto.MEMORY)]
    assert kinds == ["identity", "identity", "blt", "cleared-blt"]
    kinds = [one.kind for one in auto.candidates(16, 128, 8.0, auto.MEMORY)]
    assert kinds == ["identity", "identity", "blt", "wave-blt", "cleared-blt"]
    # all the bands that there are leave nothing for a cleared BLT
    assert [one.kind for one in auto.candidates(4, 8, 2.0, 7)][3:] == ["banded-toeplitz"]
    with pytest.raises(UsageError, match="memory"):
        auto.least_error(*TARGET, most=-1)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("--strategy blt", "--strategy"),
        ("--bands 4", "--bands"),
        ("--steps 5", "--steps"),
        ("--rethrow 2", "--rethrow"),
        ("--memory -1", "memory"),
    ],
)
def test_what_auto_chooses_itself_is_refused(extra, named, capsys):
    words = f"optimize --epochs 2 --iters 4 --eps 2 --sampling auto {extra}"
    assert named in failure(capsys, *words.split())


@pytest.mark.ci
def test_the_command_prints_what_was_tried(searched, tmp_path, capsys, monkeypatch):
    from mfopt_cli.main import main

    for key in ERRORS.keys() - {("balls-in-bins", "blt")}:  # the first certificate is kept
        monkeypatch.setitem(ERRORS, key, 1e3)
    path = tmp_path / "m.npz"
    words = "optimize --epochs 2 --iters 4 --eps 2 --delta 1e-3 --sampling auto --memory 3 --seed 0"
    main([*words.split(), "--out", str(path)])
    text = capsys.readouterr().out
    assert "balls-in-bins, blt (3): RMSE" in text and "(+0.00%)" in text
    assert "fresh-bins, banded-toeplitz (4): RMSE" in text
    found = mfopt.load(path)
    assert found.provenance["at_most"] == 3 and len(found.provenance["tried"]) == 4
