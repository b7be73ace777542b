"""One HTML page about a factorization."""

import html.parser
import math

import pytest
from commands import failure, invoked

import mfopt
from mfopt import query_error
from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.experiments import report
from mfopt.guarantee import Guarantee
from mfopt.sampling import BallsInBins, FixedOrder, FreshBins
from mfopt.strategies import BLT, BandedToeplitz, Identity, TimeScaled
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(4, 2)


def made(status="certified", unit="example", **record):
    strategy = TimeScaled(BLT([0.3, 0.1], [0.5, 0.9]), [1.0] * 8, [1.2, *[1.0] * 6, 0.8])
    stated = Guarantee(2.0, 1e-5, 3.0, unit, method="a <method>", status=status)
    return mfopt.Factorization(strategy, 3.0, SCHEME, PrefixSums(), stated, provenance=record)


class Page(html.parser.HTMLParser):
    """Text of the page; tags that are not closed, and addresses, are noted."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.addresses = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_says_what_holds():
    page = Page(report.page(made(command="mfopt <b>", seed=1), "m.npz"))
    assert page.open == []
    assert all(address.startswith("#") for address in page.addresses)  # nothing is fetched
    for said in (
        "adding or removing one example",
        "certified: proven, except",
        "a <method>",
        "bins fixed over all epochs",
        "At most 8 steps",
        "2 noise buffers (× model size), 1 white draw a step",
        "mfopt.load('m.npz')",
        "mfopt <b>",
        "no: the file says so",
    ):
        assert said in page.text, said
    estimate = Page(report.page(made("estimate", unit="user"))).text
    assert "it proves NOTHING" in estimate and "one user" in estimate


@pytest.mark.release
def test_a_page_of_fresh_bins_says_what_to_execute_and_compares():
    stated = Guarantee(2.0, 1e-5, 3.0, "example", method="a method", status="certified")
    strategy = BandedToeplitz([1.0, 0.5])
    factorization = mfopt.Factorization(strategy, 3.0, FreshBins(4, 2), PrefixSums(), stated)
    text = Page(report.page(factorization)).text
    assert "reassigned every epoch" in text and "reassigning units at other epochs" in text
    assert "throwing units afresh" not in text
    poisson, fixed = report.alternatives(
        factorization
    )  # of independent noise in the same batches: none
    longest = math.sqrt(2 * 1.25 + 2 * 0.5)  # late in one epoch, early in the next: they overlap
    assert fixed.noise_multiplier == pytest.approx(longest / gaussian.largest_mu(2.0, 1e-5))
    assert 0 < poisson.noise_multiplier < fixed.noise_multiplier


def test_alternatives_are_at_their_exact_noise():
    actual = made()
    unchanged, poisson, fixed = report.alternatives(actual)
    exact = account(Mechanism(SCHEME), epsilon=2.0, delta=1e-5).noise_multiplier
    assert unchanged.noise_multiplier == pytest.approx(exact)
    assert unchanged.rmse == pytest.approx(
        float(query_error.rmse(PrefixSums(), Identity(), 8, exact))
    )
    order = Mechanism(FixedOrder(4, 2), actual.strategy)
    plain = account(order, epsilon=2.0, delta=1e-5).noise_multiplier
    assert fixed.noise_multiplier == pytest.approx(plain, rel=1e-6) and fixed.memory == 2
    assert fixed.rmse == pytest.approx(actual.rmse * plain / 3.0, rel=1e-6)
    assert poisson.noise_multiplier < plain


def test_the_command_writes_beside_the_file(tmp_path, capsys):
    path = made().save(tmp_path / "m.npz")
    assert "saved" in invoked("report", path).stdout
    text = (tmp_path / "m.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text and "<link" not in text and "@import" not in text
    assert "--force" in failure(capsys, "report", path)
