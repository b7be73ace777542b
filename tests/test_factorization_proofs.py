"""What was proved on this machine: no file, copy or edit brings it along."""

import dataclasses
import importlib.metadata
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from mfopt_cli import mechanisms
from test_layers import graph

import mfopt
from mfopt import strategies as S
from mfopt import workloads
from mfopt._runtime import _notes
from mfopt.accounting import Effort, account
from mfopt.accounting.model import Bounds
from mfopt.accounting.verify import Verified
from mfopt.calibration import guarantee_of, release
from mfopt.errors import FailureError
from mfopt.factorization import Factorization, proofs
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.sampling import BallsInBins, FreshBins

SCHEME = BallsInBins(bins=4, epochs=2)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MFOPT_DATA", str(tmp_path / "proofs"))


@pytest.fixture(scope="module")
def certified():
    """A statement that the first round of a certificate proves: σ a little above the least."""
    strategy = S.BandedToeplitz([1.0, 0.5])
    plain = Factorization(
        strategy, 1.0, SCHEME, workloads.PrefixSums(), Guarantee(2.0, 1e-3, 1.0, status="estimate")
    )
    certificate = release(plain.dominating_pair(), 2.0, 1e-3, effort=Effort(seed=0))
    guarantee, sigma = guarantee_of(certificate, 0), certificate.noise_multiplier
    variant = dataclasses.replace(plain, noise_multiplier=sigma, guarantee=guarantee)
    return with_sigma(variant, 1.02 * sigma)


def with_sigma(factorization, sigma):
    guarantee = dataclasses.replace(factorization.guarantee, noise_multiplier=sigma)
    return dataclasses.replace(factorization, noise_multiplier=sigma, guarantee=guarantee)


def test_a_group_is_proved_again_by_the_statement_itself():
    """A search for its least ε, which ends above it by chance, refused most of these."""
    mechanism = Mechanism(SCHEME, S.BandedToeplitz([1.0, 0.5]), group_size=3)
    stated = account(mechanism, epsilon=4.0, delta=1e-4, seed=0)
    for _ in range(4):
        assert proofs.prove(mechanism, stated.noise_multiplier, stated).epsilon == 4.0
    with pytest.raises(FailureError, match="not certified"):
        proofs.prove(mechanism, 0.97 * stated.noise_multiplier, stated)


WORDS = {
    "privacy_unit": "user",
    "status": "exact",
    "method": "closed form",
    "failure_probability": 0.0,
    "details": {"samples": 10**12},
}


def test_a_note_is_about_one_statement(certified, tmp_path):
    assert not certified.proved_here
    assert proofs.note(certified) and certified.proved_here
    copy = mfopt.load(certified.save(tmp_path / "copy.npz"))
    assert copy.proved_here  # the statement is known, whichever file says it
    assert not with_sigma(certified, np.nextafter(certified.noise_multiplier, 0)).proved_here
    edits = {"epsilon": 1.0, "delta": 1e-4, "group_size": 2, "adjacency": "zero-out"} | WORDS
    assert {field.name for field in dataclasses.fields(Guarantee)} == {*edits, "noise_multiplier"}
    for name, value in edits.items():
        changed = dataclasses.replace(certified.guarantee, **{name: value})
        assert not dataclasses.replace(certified, guarantee=changed).proved_here, name
    other_c = dataclasses.replace(certified, strategy=S.BandedToeplitz([1.0, 0.6]))
    assert not other_c.proved_here


@pytest.mark.parametrize("edited", WORDS)
def test_the_words_belong_to_what_was_proved(certified, edited, tmp_path):
    # each counted as proved when only (epsilon, delta), sigma, C and the sampling did
    proofs.note(certified)
    changed = dataclasses.replace(certified.guarantee, **{edited: WORDS[edited]})
    changed = dataclasses.replace(certified, guarantee=changed)
    changed = mfopt.load(changed.save(tmp_path / "edited.npz"))
    assert not changed.proved_here
    proved = proofs.ensure(changed)  # certified anew, in its own words but for the unit
    assert (proved.status, proved.method) == ("certified", certified.guarantee.method)
    assert proved.failure_probability > 0 and "beta" in proved.details
    assert proved.privacy_unit == changed.guarantee.privacy_unit
    reference = proofs.proved_guarantee(changed)
    assert reference == proved
    # a status, a method or a chance that was not proved does not become so by the certificate
    assert changed.proved_here == (edited in ("privacy_unit", "details"))


def test_what_other_code_has_proved_is_proved_again(certified, monkeypatch):
    proofs.note(certified)
    monkeypatch.setattr(proofs, "code_digest", lambda: "another")
    assert not certified.proved_here
    assert proofs.note(certified) and certified.proved_here


def test_whatever_a_proof_may_run_belongs_to_it(monkeypatch):
    """What accountants and certificates import, and what that imports."""
    root, digest = Path(mfopt.__file__).parent.parent, proofs.code_digest.__wrapped__
    read, contents = [], {}
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read.append(path) or contents.get(path, b"")
    )
    digests = [digest()]
    digested = {".".join(path.relative_to(root).with_suffix("").parts): path for path in read}
    for path in digested.values():
        contents = {path: b"# changed"}
        digests.append(digest())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    digests.append(digest())
    assert len({*digests}) == len(digested) + 2
    imported, rooms = graph(), ("accounting", "calibration", "sampling", "strategies")
    todo = {name for name in imported if name.split(".")[1] in rooms}
    todo |= {"mfopt.factorization.proofs"}
    reached = set()
    while todo:
        reached.add(name := todo.pop())
        todo |= imported[name] - reached
    assert "mfopt._runtime._check" in reached and reached <= digested.keys()
    assert "mfopt.training" not in digested  # no proof runs this


def test_estimates_are_not_noted(certified):
    guess = dataclasses.replace(certified.guarantee, status="estimate")
    assert not proofs.note(dataclasses.replace(certified, guarantee=guess))
    assert not _notes.folder().exists()


def test_a_claim_that_nobody_proved_is_not_called_certified(certified):
    """A run of a hand-made factorization said "certified"."""
    assert "as stated, not proved" in certified.statement()
    assert "certified" not in certified.statement()
    proofs.note(certified)
    assert certified.statement() == str(certified.guarantee)
    assert certified.statement(pinned=True) == "none: seed pinned"
    estimate = dataclasses.replace(certified.guarantee, status="estimate")
    estimate = dataclasses.replace(certified, guarantee=estimate)
    assert not estimate.proved_here and estimate.statement() == "none: not certified"


def test_what_takes_no_samples_is_proved_on_the_spot():
    order = mfopt.sampling.FixedOrder(4, 2)
    stated = account(Mechanism(order), epsilon=1.0, delta=1e-5)
    sigma = stated.noise_multiplier
    plain = Factorization(S.Identity(), sigma, order, workloads.PrefixSums(), stated)
    assert mechanisms.proved(plain, Path("plain.npz")).startswith("yes")
    assert plain.statement() == str(stated)
    assert "as stated" in with_sigma(plain, 0.99 * sigma).statement()


def test_the_key_is_the_owners(certified):
    proofs.note(certified)
    key = _notes.folder() / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and key.stat().st_size == 32
    content = key.read_bytes()
    proofs.note(certified)
    assert key.read_bytes() == content
    os.chmod(key, 0o644)  # others may have read it, so its notes prove nothing any more
    assert not certified.proved_here


def test_notes_from_elsewhere_or_edited_are_not_believed(certified, tmp_path, monkeypatch):
    proofs.note(certified)
    (note,) = _notes.folder().glob("*.json")
    whole = note.read_text()
    other = with_sigma(certified, 0.5 * certified.noise_multiplier)
    forged = {**json.loads(whole), "statement": proofs.statement(other)}
    _notes.note_path(proofs.statement(other)).write_text(json.dumps(forged))
    assert not other.proved_here
    _notes.note_path(proofs.statement(other)).write_text(whole)  # a note under another name
    assert not other.proved_here
    for text in ("", "[]", "{}", "[" * 10**5, whole.replace('"tag": "', '"tag": "0')):
        note.write_text(text)
        assert not certified.proved_here
    note.write_text(whole)
    assert certified.proved_here
    monkeypatch.setenv("MFOPT_DATA", str(tmp_path / "elsewhere"))  # another machine, its own key
    proofs.note(other)
    _notes.note_path(proofs.statement(certified)).write_text(whole)
    assert not certified.proved_here


def test_a_folder_that_cannot_be_written_loses_no_result(certified, tmp_path):
    (tmp_path / "proofs").write_text("")
    assert not proofs.note(certified) and not certified.proved_here


def test_ensure_proves_once_and_refuses_what_is_false(certified, monkeypatch):
    reports = []
    proved = proofs.ensure(certified, progress=reports.append)
    assert (proved.epsilon, proved.delta) == (2.0, 1e-3) and proved.status == "certified"
    assert reports[0].stage.startswith("proving") and reports[-1].stage == "certifying"
    assert certified.proved_here
    # its rounds are counted in what it says it can err with; a second one's would not be
    requests = []

    def refused(loss, sigma, epsilon, delta, **options):
        requests.append((delta, options["effort"].samples))
        raise FailureError("not certified")

    monkeypatch.setattr(proofs, "certify", refused)
    assert proofs.ensure(certified) == proved and not requests
    false = with_sigma(certified, 0.5 * certified.noise_multiplier)
    with pytest.raises(FailureError, match="could not prove it: not certified"):
        proofs.ensure(false)
    assert requests == [(1e-3, None)] and not false.proved_here


class Answer:
    def __init__(self, found):
        self.epsilon = lambda *_: found


def test_other_statements_are_accounted_for(certified, monkeypatch):
    # groups of two: no certificate of this kind, so the accountant is asked
    two = dataclasses.replace(certified.guarantee, group_size=2)
    pair = dataclasses.replace(certified, guarantee=two)
    answers = [two]
    for epsilon, status in [(2.1, "bound"), (1.0, "estimate"), (np.nan, "bound")]:
        actual = Guarantee(2.0, 1e-3, 1.0, status=status)
        object.__setattr__(actual, "epsilon", epsilon)
        answers.append(actual)
    monkeypatch.setattr(proofs, "analysis", lambda _, **effort: Answer(answers.pop()))
    for _ in answers[1:]:
        with pytest.raises(FailureError, match="could not prove"):
            proofs.ensure(pair)
    assert proofs.ensure(pair).group_size == 2 and pair.proved_here


def test_a_statement_of_fresh_bins_is_certified_as_it_stands(monkeypatch):
    requests = []

    def certified(loss, sigma, epsilon, delta, **_):
        requests.append((loss.name, sigma, epsilon, delta))
        return Verified(1.0, 2.0, 1e-3, Bounds(1e-3, 1e-3, {}), 1e-6, 0, 1, "stub")

    monkeypatch.setattr(proofs, "certify", certified)
    monkeypatch.setattr(proofs, "analysis", None)  # a search for ε would end a little above it
    strategy = S.BandedToeplitz([1.0, 0.5])
    mechanism = Mechanism(FreshBins(4, 3), strategy)
    stated = Guarantee(1.0, 1e-5, 2.0, status="certified")
    proved = proofs.prove(mechanism, 2.0, stated, effort=Effort(seed=7))
    assert (proved.privacy_unit, proved.details["seed"]) == ("example", 7)
    assert requests == [("fresh-bins", 2.0, 1.0, 1e-5)]
