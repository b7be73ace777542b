"""Privacy statements: their numbers are the guarantee's, and what promises nothing says so."""

import dataclasses
import datetime
import json
import math
import re

import pytest
from commands import failure, invoked, printed
from test_report import Page, made
from test_train_run import data  # noqa: F401 (fixture)
from test_verify_report import report_of

import mfopt
from mfopt import words
from mfopt.errors import UsageError
from mfopt.experiments import statement
from mfopt.guarantee import Guarantee
from mfopt.sampling import MinSeparation
from mfopt.strategies import Identity
from mfopt.workloads import PrefixSums


def guaranteed(**changes):
    """A file's statement; ``changes`` are those of its guarantee."""
    actual = made()
    stated = dataclasses.replace(actual.guarantee, **changes)
    return dataclasses.replace(actual, guarantee=stated)


def test_no_detail_that_a_file_says_lowers_what_an_attacker_can_do():
    honest = statement.of_factorization(guaranteed(epsilon=2.0))
    forged = statement.of_factorization(guaranteed(epsilon=2.0, details={"sensitivity": 1e-9}))
    assert forged.rates == honest.rates and forged.sections == honest.sections


@pytest.mark.parametrize("epsilon", [0.1, 2.0, 400.0])
def test_who_has_two_entries_is_told_apart_as_a_group_of_two(epsilon):
    page = statement.of_factorization(guaranteed(epsilon=epsilon, delta=1e-4)).markdown()
    said = re.search(r"who has two is rightly named (?:at most|up to) ([\d.]+)%", page)
    growth = math.exp(min(epsilon, 300))
    delta = 1e-4 * (1 + growth)
    allowed = min(delta + growth**2 * 0.01, 1 - (1 - delta - 0.01) / growth**2, 1)
    assert allowed <= float(said[1]) / 100 <= 1.01 * allowed


def test_every_number_is_the_guarantees():
    for epsilon, delta in ((0.5, 1e-6), (2.0000001, 1.00000001e-5), (8.0, 1e-9)):
        actual = guaranteed(epsilon=epsilon, delta=delta)
        page = statement.of_factorization(actual, units=1000)
        text, facts = page.markdown(), page.facts
        assert page.holds and facts["holds"]
        assert (facts["epsilon"], facts["delta"]) == (epsilon, delta)
        said = re.search(r"ε = ([\d.]+): .* at most ([\d.,]+) times", text)
        assert float(said[1]) >= epsilon
        assert float(said[2].replace(",", "")) >= math.exp(epsilon)
        assert f"δ = {words.round_up(delta)}" in text and facts["digest"] in text
        for alpha, rate in zip(statement.FALSE_POSITIVE_RATES, page.rates, strict=True):
            allowed = min(
                delta + math.exp(epsilon) * alpha,
                1 - math.exp(-epsilon) * (1 - delta - alpha),
            )
            assert allowed <= rate <= allowed * (1 + 1e-9)
            row = re.search(
                rf"^\| {100 * alpha:g}% \| (?:at most|up to) ([\d.]+)%.* \|$", text, re.M
            )
            assert float(row[1]) >= 100 * rate  # rounded up
        assert "**Its ε and δ are as the file states them" in text
        assert "Warning" not in text and "**Nothing is promised.**" not in text


def test_a_weak_delta_and_a_weak_epsilon_are_named():
    weak = statement.of_factorization(guaranteed(), units=100_000)
    assert "**Warning:**" in weak.markdown() and "not below 1/N" in weak.facts["warning"]
    assert statement.of_factorization(guaranteed(), units=99_000).facts["warning"] is None
    assert "weak limit" in statement.of_factorization(guaranteed(epsilon=8.0)).markdown()
    assert "up to 100% (no limit)" in statement.of_factorization(guaranteed(epsilon=8.0)).markdown()
    assert "weak limit" not in statement.of_factorization(guaranteed()).markdown()
    assert (
        "20, which is not far below"
        in statement.of_factorization(guaranteed(), 2_000_000).markdown()
    )
    with pytest.raises(UsageError, match="units"):
        statement.of_factorization(guaranteed(), units=0)


@pytest.mark.parametrize(
    ("separation", "participations", "said"),
    [
        (1, 5, "at most 5 of the 8 rounds. Two"),
        (3, 5, "at most 3 of the 8 rounds, any two at least 3 rounds apart."),
        (8, 1, "at most 1 of the 8 rounds. Two"),
    ],
)
def test_who_is_not_protected_under_min_separation_is_said(separation, participations, said):
    scheme = MinSeparation(8, separation, participations)
    page = statement.of_factorization(dataclasses.replace(made(), sampling=scheme))
    assert f"protected that take part in {said}" in page.markdown()


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (MinSeparation(8, 4, 2), "round"),
        (mfopt.sampling.FixedOrder(4, 2), "iteration"),
        (mfopt.sampling.BallsInBins(4, 2), "step"),
    ],
)
def test_the_page_speaks_of_what_the_scheme_releases(scheme, name):
    page = statement.of_factorization(dataclasses.replace(made(), sampling=scheme)).markdown()
    assert f"In every {name} noise" in page and f"about at most 8 {name}s." in page
    assert f"in which {name} is decided" in page and "all noised sums" in page
    others = {"round", "iteration", "step"} - {name}
    own = page.replace(scheme.words(), "").replace("a computer rounds", "")
    assert not [word for word in others if re.search(rf"\b{word}", own)]
    assert "drawn" not in page and "batches" not in own.lower()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"status": "estimate"}, "proves nothing"), ({"delta": 1.0}, "allows everything")],
)
def test_what_proves_nothing_promises_nothing(changes, said):
    page = statement.of_factorization(guaranteed(**changes))
    text = page.markdown()
    assert not page.holds and not page.rates and page.title == "No privacy is promised"
    assert "**Nothing is promised.**" in text and said in text and "of those used" not in text


def test_the_page_has_its_date_and_says_that_no_signature_was_checked(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1760000000")
    page = statement.of_factorization(guaranteed())
    assert page.facts["issued"] == "2025-10-09" and "Issued 2025-10-09 (UTC)" in page.markdown()
    assert page.facts["signature"].startswith("not checked: ")
    assert f"Signature: {page.facts['signature']}." in page.markdown()
    assert page == statement.of_factorization(guaranteed())
    for refused in ("abc", "1" * 30, "9" * 5000):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", refused)
        with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
            statement.of_factorization(guaranteed())
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")
    today = datetime.datetime.now(datetime.UTC).date()
    issued = datetime.date.fromisoformat(statement.of_factorization(guaranteed()).facts["issued"])
    assert 0 <= (issued - today).days <= 1  # midnight may lie between them


def test_units_and_neighbours_are_in_words():
    page = statement.of_factorization(guaranteed(privacy_unit="user", group_size=3)).markdown()
    assert "group of up to 3 users" in page and "lacks the data" in page
    zero = statement.of_factorization(guaranteed(adjacency="add-remove")).markdown()
    assert "took part at all is not protected" not in zero
    scheme = mfopt.sampling.FixedOrder(4, 2)
    stated = Guarantee(1.0, 1e-5, 3.0, adjacency="zero-out", method="none", status="exact")
    order = mfopt.Factorization(Identity(), 3.0, scheme, PrefixSums(), stated)
    assert "took part at all is not protected" in statement.of_factorization(order).markdown()


def test_the_page_is_whole_and_escapes():
    page = statement.of_factorization(guaranteed(method="a <method>"))
    html = Page(page.html())
    assert html.open == [] and html.addresses == []
    assert "a <method>" in html.text and "<method>" not in page.html()
    assert "**" not in html.text and "of those used" in html.text


def test_the_command_prints_writes_and_refuses(tmp_path, capsys):
    path = made().save(tmp_path / "m.npz")
    actual = printed("statement", path, "--units", 10)
    assert actual["epsilon"] == 2.0 and actual["units"] == 10 and actual["path"] is None
    assert actual["page"].startswith("# Privacy statement for one example")
    output = tmp_path / "m.html"
    words = ["statement", path, "--format", "html", "--out", output]
    assert "saved" in invoked(*words).stdout and output.read_text().startswith("<!doctype html>")
    assert "--force" in failure(capsys, *words)
    assert ".md" in failure(capsys, "statement", path, "--out", tmp_path / "x.pdf")
    assert "privacy-report.json" in failure(capsys, "statement", tmp_path)


def test_a_runs_report_says_what_was_executed(data, tmp_path):  # noqa: F811
    facts = report_of(data, tmp_path / "run") | {"steps_done": 1}
    pinned = statement.of_report(facts | {"pinned": True})
    assert not pinned.holds and "pinned seed" in pinned.markdown() and pinned.rates == []
    page = statement.of_report(facts)
    text, population = page.markdown(), facts["sampling"]["population"]
    assert page.holds and page.facts["epsilon"] == facts["guarantee"]["epsilon"]
    assert f"Steps taken: 1, of the {facts['iterations_covered']:,}" in text
    assert f"Data: {population:,} users" in text and "Signature: not checked" in text
    assert page.facts["units"] == population
    for broken in ({}, {"guarantee": {}}, facts | {"units": 3}, facts | {"steps_done": "1"}):
        with pytest.raises(UsageError):
            statement.of_report(broken)
    folder = tmp_path / "finished"
    folder.mkdir()
    (folder / "privacy-report.json").write_text(json.dumps(facts | {"pinned": True}))
    assert printed("statement", folder)["holds"] is False
