"""Values clipped in the direction of adding: the tail that Ehrhard's inequality bounds."""

import math

import numpy as np
import pairs
import plain_monte_carlo as plain
import pytest
import scipy
from scipy.special import ndtr

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked, importance, jensen_gap, losses
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Point, Tilt, Trial

K = 4.5


@pytest.mark.parametrize(("height", "ratio"), [(-4.6, 0.3), (-2.0, 0.5), (-3.0, 2.0)])
def test_what_is_clipped_is_the_integral(height, ratio):
    """(4) for k = 1."""

    def inside(y):
        return ratio * np.exp(ratio * y) * ndtr(height - y)

    expected = scipy.integrate.quad(inside, 0, 60)[0]
    assert math.exp(jensen_gap._log_beyond(height, ratio)) == pytest.approx(expected, rel=1e-8)


def test_counts_have_the_confidence_of_clopper_and_pearson():
    first, second = jensen_gap._line(30, 500, 1000, 1e-3)
    assert scipy.stats.binom.cdf(30, 1000, ndtr(first)) == pytest.approx(1e-3, rel=1e-6)
    assert scipy.stats.binom.sf(499, 1000, ndtr(second)) == pytest.approx(1e-3, rel=1e-6)
    assert jensen_gap._line(1000, 0, 1000, 1e-3) == (math.inf, -math.inf)


def test_no_line_no_bound():
    known = jensen_gap.JensenGapBound(0.4, 0.5, 0.3)
    assert math.isfinite(jensen_gap.beyond(known, 2.0, 3.0, (300, 4000), 8192, 1e-8))
    for counts in ((8192, 8192), (300, 0), (4000, 4000)):
        assert jensen_gap.beyond(known, 2.0, 3.0, counts, 8192, 1e-8) == math.inf
    rising = jensen_gap.JensenGapBound(0.4, 0.5, 0.45)  # it would clip where the line is not proven
    assert jensen_gap.beyond(rising, 2.0, 3.0, (300, 4000), 8192, 1e-8) == math.inf


@float64
def test_gaps_are_counted_on_samples_of_the_clipped_proposal():
    """X ~ N(−t m̄, I); the control: the shift the other way."""
    squares, order, size = np.arange(1.0, 6.0), 2.0, 2**15
    pair = DominatingPair(np.diag(squares), np.diag(np.sqrt(squares)))
    edges, at = np.array([0.8, 1.2]), pairs.scaled(pair, 1.0)
    found, samples = importance._gaps(at, 3.0, order, edges, size, chunked.seed_key(0))
    noise = np.random.default_rng(0).normal(size=(size, 5)) * np.sqrt(squares)

    def gaps(sign):
        exponents = noise + sign * order * squares / 5
        loss = scipy.special.logsumexp(exponents - squares / 2, axis=1) - math.log(5)
        return loss - exponents.mean(axis=1) + 3.0 / 2

    def agrees(gap):
        one = [gap, gap <= edges[0], gap <= edges[1]]
        seen = np.array([found.total, found.below, found.half]) / samples
        means, errors = np.mean(one, axis=1), np.std(one, axis=1) * math.sqrt(2 / size)
        return np.all(np.abs(seen - means) < K * errors)

    assert agrees(gaps(-1)) and not agrees(gaps(1))


@pytest.fixture(scope="module")
def truth():
    return plain.delta(pairs.spiky(160, 0.3, 2.0), 1.0, 0.3, direction="add", samples=2**16, seed=3)


@pytest.mark.ci
@float64
def test_what_is_left_and_what_is_clipped_are_all(truth):
    """E min(f, B') below the truth by at most what is bounded; and it is below it."""
    pair, point = pairs.spiky(160, 0.3, 2.0), Point(1.0, 0.3)
    found = pairs.clipped_tilt(pair, point, chunked.seed_key(0))
    assert found is not None
    assert found.log_ceiling < pairs.mean_tilt(pair, point).log_ceiling - 0.4

    def seen(cut):
        made = pairs.tilt("clipped", found.order, pair, point, found.detail._replace(cut=cut))
        sums, samples = pairs.total(pair, made, point, 2**14, chunked.seed_key(1))
        mean = float(sums.total) / samples
        error = math.sqrt((float(sums.square) / samples - mean**2) / samples)
        ceiling = math.exp(made.log_ceiling)
        rest = pairs.beyond(pair, made, point, 1e-8, chunked.seed_key(2))
        return mean * ceiling, math.hypot(error * ceiling, truth.standard_error), rest * ceiling

    mean, error, rest = seen(found.detail.cut)
    assert abs(mean - truth.value) < K * error and rest < 1e-2 * mean
    mean, error, rest = seen(found.detail.low)
    assert mean + rest > truth.value - K * error
    mean, error, rest = seen(1.2 * found.detail.high)  # much is clipped then, and nothing proven
    assert mean < truth.value - K * error and rest == math.inf


@pytest.mark.ci
@float64
def test_a_loose_bound_is_clipped_and_holds(monkeypatch, truth):
    pair, point, trial = (
        pairs.spiky(160, 0.3, 2.0),
        Point(1.0, 0.3),
        Trial(2**13, 1e-6, chunked.seed_key(4)),
    )
    loss = BallsInBinsLoss(pair)
    monkeypatch.setattr(losses, "_LOOSE", 10.0)
    assert loss.choose("add", point, trial).tilt.kind == "mean"
    monkeypatch.setattr(losses, "_LOOSE", 0.0)
    pilot = loss.choose("add", point, trial)
    assert pilot.tilt.kind == "clipped"
    bet, _ = pilot.expected(trial.samples, trial.beta)
    found = loss.bound(pilot.tilt, point, bet, trial)
    assert truth.value - K * truth.standard_error < found.value < 1.3 * truth.value
    # it goes along with σ, and what alone needs no samples is the whole ceiling
    moved = loss.at(pilot.tilt, Point(1.05, 0.3))
    assert moved.detail == pilot.tilt.detail and moved.log_ceiling < pilot.tilt.log_ceiling
    assert loss.least("add", point).kind == "mean"
    # a line that counts do not bear out leaves no bound
    steep = pilot.tilt._replace(detail=pilot.tilt.detail._replace(low=0.9, high=0.91))
    assert math.isnan(loss.bound(steep, point, bet, trial).value)


def test_a_clipped_bound_takes_half_of_beta_for_each_part(monkeypatch):
    taken = []
    monkeypatch.setattr(importance, "beyond", lambda *at: taken.append(at[3]) or 0.0)
    bound = losses.upper_bound
    monkeypatch.setattr(
        losses, "upper_bound", lambda *at, **how: taken.append(how["beta"]) or bound(*at, **how)
    )
    loss, point = BallsInBinsLoss(pairs.spiky(20, 0.3, 2.0)), Point(1.0, 0.3)
    clip = loss.at(Tilt("clipped", 1.5, 0.0, jensen_gap.JensenGapBound(0.4, 0.5, 0.1)), point)
    loss.bound(clip, point, 3, Trial(256, 1e-6, chunked.seed_key(4)))
    assert len(taken) == 2 and sum(taken) == pytest.approx(1e-6)
