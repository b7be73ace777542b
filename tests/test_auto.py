"""The least error over sampling schemes and forms of C."""

from types import SimpleNamespace

import numpy as np
import pytest
from commands import failure
from questions import asked

import mfopt
from mfopt import strategies as S
from mfopt.accounting.model import Estimate
from mfopt.errors import FailureError, UsageError
from mfopt.optimize import auto
from mfopt.optimize.run import InterruptedOptimization, Optimized
from mfopt.sampling import BallsInBins, FreshBins

SCHEMES = BallsInBins(4, 2), FreshBins(4, 2)
QUESTION = asked(2.0, 1e-3)
GOOD, BAD = S.BLT([0.3], [0.6]), S.BandedToeplitz([1.0, 0.9])


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

    def search(scheme, question, progress):
        (strategy,), bands, buffers = vars(question.form).values()
        calls.append((scheme, strategy, bands, buffers, question.search.init))
        end = ends[scheme.kind, strategy]
        if isinstance(end, BaseException):
            raise end
        return result(end)

    def scored(strategy, scheme, _):
        rmse = ERRORS[scheme.kind, strategy.kind]
        return auto.Score(1.0, rmse, rmse, int(strategy.kind != "identity"))

    monkeypatch.setattr(auto, "optimize", search)
    monkeypatch.setattr(auto, "scored", scored)
    monkeypatch.setattr(auto, "certified_error", lambda question, made: made.rmse)
    return calls, ends


class Made(tuple):
    """A stub of a factorization: (scheme, C, interrupted, provenance), its error and status."""

    def __new__(cls, facts, rmse, status):
        candidate = super().__new__(cls, facts)
        candidate.rmse, candidate.guarantee = rmse, SimpleNamespace(status=status)
        candidate.not_certified = "no proof"
        candidate.provenance = {**facts[3], "interrupted": facts[2], "not_certified": ["no proof"]}
        return candidate


@pytest.fixture
def proved(monkeypatch):
    """(scheme, C, interrupted, provenance) of all that is put on record; the first may fail, or
    be given an error or a status.
    """
    records, failing = [], []

    def prove(searched, *_):
        actual, scheme, provenance, interrupted, _ = searched
        rmse, status = ERRORS[scheme.kind, actual.strategy.kind], "certified"
        come = failing.pop(0) if failing else None
        if isinstance(come, float):
            rmse = come
        elif isinstance(come, str):
            status = come
        facts = (scheme, actual.strategy, interrupted, provenance)
        records.append(Made(facts, rmse, status))
        if isinstance(come, Exception):
            raise come
        return records[-1]

    monkeypatch.setattr(auto, "on_record", prove)
    return records, failing


def test_the_least_error_is_taken_and_what_was_tried_is_on_record(searched, proved):
    calls, reports = searched[0], []
    scheme, strategy, interrupted, record = auto.least_error(
        SCHEMES, QUESTION, 3, progress=reports.append
    )
    assert [(type(c[0]), *c[1:4]) for c in calls] == [
        (BallsInBins, "blt", 1, 3),
        (FreshBins, "banded-toeplitz", 4, 1),
    ]
    assert calls[1][4] is GOOD  # a banded C begins where the BLT ended
    assert strategy is GOOD and scheme == BallsInBins(4, 2) and not interrupted
    actual = {(trial["sampling"]["kind"], trial["strategy"]): trial for trial in record["tried"]}
    assert {key: trial["estimated_rmse"] for key, trial in actual.items()} == ERRORS
    notes = [event.note for event in reports if event.lasting]
    assert sum("RMSE" in note for note in notes) == len(actual)


def test_what_has_no_answer_is_left_out(searched, proved):
    calls, ends = searched
    ends["balls-in-bins", "blt"] = FailureError("no such σ")
    scheme, strategy, _, record = auto.least_error(SCHEMES, QUESTION, 3)
    assert calls[1][4] is None and strategy is BAD and scheme == FreshBins(4, 2)
    assert record["tried"][2]["problem"] == "no such σ"
    assert "estimated_rmse" not in record["tried"][2]


def test_what_is_not_certified_gives_way_to_the_next(searched, proved):
    records, failing = proved
    failing += [FailureError("no bound")]
    scheme, strategy, _, record = auto.least_error(SCHEMES, QUESTION, 3)
    assert [record[1] for record in records] == [GOOD, BAD] and strategy is BAD
    assert scheme == FreshBins(4, 2) and "no bound" in record["not_certified"][0]
    failing += [FailureError("no bound")] * 5
    with pytest.raises(FailureError, match="could be certified: balls-in-bins, blt: no bound"):
        auto.least_error(SCHEMES, QUESTION, 3)


def test_a_certificate_that_costs_the_amplification_gives_way_to_a_lesser_error(searched, proved):
    records, failing = proved
    failing += [10.0]  # of the best estimate; the second is 2.5
    _, strategy, *_ = auto.least_error(SCHEMES, QUESTION, 3)
    assert strategy is BAD and len(records) == 2
    records.clear()
    failing += [2.6, 2.65]
    _, strategy, *_ = auto.least_error(SCHEMES, QUESTION, 3)
    assert strategy is GOOD and len(records) == 2


def test_a_search_without_any_certificate_is_kept(searched, proved):
    records, failing = proved
    failing += ["estimate"] * 5
    estimate = auto.least_error(SCHEMES, QUESTION, 3)
    assert estimate[1] is GOOD and estimate.guarantee.status == "estimate" and len(records) == 4


@pytest.mark.parametrize("loss", [-5.0, 9.0, np.inf])
def test_an_interrupt_keeps_the_best(searched, proved, loss):
    unfinished = result(S.BandedToeplitz([1.0, 0.5]), loss)
    searched[1]["fresh-bins", "banded-toeplitz"] = InterruptedOptimization(unfinished)
    scheme, strategy, interrupted, record = auto.least_error(SCHEMES, QUESTION, 3)
    assert interrupted and record["tried"][3]["problem"] == "interrupted"
    if loss < 0:
        assert scheme == FreshBins(4, 2) and strategy is unfinished.strategy
    else:
        assert scheme == BallsInBins(4, 2) and strategy is GOOD


def test_an_interrupt_before_anything_says_so(searched, proved, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(auto, "scored", stop)
    _, strategy, interrupted, _ = auto.least_error(SCHEMES, QUESTION, 0)
    assert isinstance(strategy, S.Identity) and interrupted  # there, without an estimate
    monkeypatch.setattr(auto.Candidate, "search", stop)
    with pytest.raises(FailureError, match="nothing to keep"):
        auto.least_error(SCHEMES, QUESTION, 0)


def test_candidates_fit_into_the_memory_and_the_bins():
    def candidates(epochs, bins, epsilon, memory):
        schemes = BallsInBins(bins, epochs), FreshBins(bins, epochs)
        return auto.candidates(schemes, epsilon, memory)

    for limit in range(20):
        for candidate in candidates(4, 8, 8.0, limit):
            if candidate.kind == "banded-toeplitz":
                assert 2 <= candidate.size <= min(limit + 1, 8)
            else:
                assert candidate.size <= limit
    assert [candidate.kind for candidate in candidates(4, 8, 2.0, 0)] == ["identity"] * 2
    kinds = [candidate.kind for candidate in candidates(16, 128, 2.0, auto.MEMORY)]
    assert kinds == ["identity", "identity", "blt", "cleared-blt"]
    kinds = [candidate.kind for candidate in candidates(16, 128, 8.0, auto.MEMORY)]
    assert kinds == ["identity", "identity", "blt", "wave-blt", "cleared-blt"]
    # all the bands that there are leave nothing for a cleared BLT
    assert [candidate.kind for candidate in candidates(4, 8, 2.0, 7)][3:] == ["banded-toeplitz"]
    with pytest.raises(UsageError, match="memory"):
        auto.least_error(SCHEMES, QUESTION, -1)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("--sampling auto --strategy blt", "--strategy"),
        ("--sampling auto --bands 4", "--bands"),
        ("--sampling auto --steps 5", "--steps"),
        ("--sampling auto --rethrow 2", "--rethrow"),
        ("--sampling auto --memory -1", "memory"),
        ("--memory 2 --strategy toeplitz", "chosen by --memory"),
        ("--memory 2 --buffers 4", "chosen by --memory"),
        ("--memory 2 --steps 5", "chosen by --memory"),
    ],
)
def test_what_auto_or_memory_chooses_itself_is_refused(extra, said, capsys):
    words = f"optimize --epochs 2 --iters 4 --eps 2 {extra}"
    assert said in failure(capsys, *words.split())


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
    factorization = mfopt.load(path)
    assert factorization.provenance["at_most"] == 3 and len(factorization.provenance["tried"]) == 4


@pytest.mark.ci
def test_within_a_memory_the_scheme_stays(searched, tmp_path):
    from mfopt_cli.main import main

    path = tmp_path / "m.npz"
    words = "optimize --epochs 2 --iters 4 --eps 2 --delta 1e-3 --memory 3 --seed 0 --quiet"
    main([*words.split(), "--out", str(path)])
    factorization = mfopt.load(path)
    assert factorization.guarantee.status == "certified" and factorization.sampling == SCHEMES[0]
    assert [trial["strategy"] for trial in factorization.provenance["tried"]] == ["identity", "blt"]


@pytest.mark.parametrize(("bins", "samples"), [(256, 2**15), (512, 2**17)])
def test_all_c_of_a_scheme_are_compared_on_as_many_samples(monkeypatch, bins, samples):
    calibrations = []

    def calibrated(loss, epsilon, delta, *, samples, seed):
        calibrations.append((samples, seed))
        noisy = 0.02 if len(calibrations) == 1 else 1e-6  # of two C on the same samples, one
        return Estimate(1.0, -10.0, noisy, "remove", samples)

    monkeypatch.setattr(auto, "calibrate", calibrated)
    for bands in (2, 3):
        auto.scored(S.BandedSquareRoot(bands), BallsInBins(bins, 1), QUESTION)
    assert len(calibrations) == 2 and len(set(calibrations)) == 1
    assert calibrations[0][0] == samples
