"""One grid over all sampled schemes: likelihood, draws, ceilings, proposals, against all patterns.

A cell is a scheme with a small C. Its patterns, with their chances, and its δ are those of the
benchmark of accounts against the truth, which uses nothing of the package's recursions.
"""

import dataclasses
import functools
import gc
import math
import weakref
from typing import Any

import bench_truth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked, importance
from mfopt.accounting.monte_carlo.count_mixture import CountPair
from mfopt.accounting.monte_carlo.evidence import HINGE, Point, Tilt, Trial
from mfopt.accounting.monte_carlo.group import CountLoss
from mfopt.accounting.monte_carlo.likelihood import Drawn
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.sampling import BallsInBins, BMinSep, FreshBins, RandomPartition
from mfopt.strategies import Banded

K, EPSILON = 4.5, 0.7
POWERS = (1.0, 1.7)


def banded(n, bands, seed=0, largest=1.0):
    """A C of so many bands with entries of its own, dense."""
    rows = np.arange(n)[:, None] - np.arange(n)[None, :]
    entries = np.random.default_rng(seed).uniform(0.2, largest, (n, n))
    return np.where((rows >= 0) & (rows < bands), entries, 0)


def modes_of(matrix, scheme):
    """The modes of a scheme with bins by their definition, a column for each (assignment, bin)."""
    kept = getattr(scheme, "rethrow", scheme.epochs)
    parts = matrix.reshape(len(matrix), -1, kept, scheme.bins)
    return parts.sum(axis=2).reshape(len(matrix), -1)


@dataclasses.dataclass(eq=False)
class Cell:
    """A mechanism whose patterns are written out.

    Attributes:
      scheme, bands: and a C of so many bands; 0 for C = I.
      sigma: where divergences are compared.
      units: of a group.
    """

    scheme: Any
    bands: int
    sigma: float
    units: int = 1

    @functools.cached_property
    def matrix(self):
        if self.bands == 0:
            return np.eye(self.scheme.iterations)
        largest = 0.7 if hasattr(self.scheme, "separation") else 1.0
        return banded(self.scheme.iterations, self.bands, largest=largest)

    @functools.cached_property
    def loss(self):
        if self.bands == 0:
            return CountLoss(CountPair(self.scheme.bins, self.units, self.scheme.epochs))
        unit = law(self.scheme).loss(Banded.from_dense(self.matrix, self.bands))
        return unit if self.units == 1 else unit.group(self.units)

    @functools.cached_property
    def entries(self):
        """The columns that a pattern picks from, (n, entries)."""
        if hasattr(self.scheme, "separation"):
            return self.matrix
        return modes_of(self.matrix, self.scheme)

    @functools.cached_property
    def patterns(self):
        """(how often each pattern picks each entry, their chances)."""
        (total,) = bench_truth.laws(self.scheme, self.units)
        steps = np.array([*total])
        if not hasattr(self.scheme, "separation"):  # a bin that is kept is one entry
            kept = getattr(self.scheme, "rethrow", self.scheme.epochs)
            steps = steps.reshape(len(steps), -1, kept, self.scheme.bins)[:, :, 0]
        return steps.reshape(len(steps), -1), np.array([*total.values()])

    @functools.cached_property
    def modes(self):
        """C x of every pattern, (patterns, n)."""
        return self.patterns[0] @ self.entries.T

    @functools.cached_property
    def truth(self):
        """{direction: (δ, its standard error)}."""
        return bench_truth.mixture(self.modes, self.sigma, EPSILON, self.patterns[1])


CELLS = {
    "kept bins": Cell(BallsInBins(5, 3), 8, 4.0),
    "fresh bins": Cell(FreshBins(4, 3), 3, 2.0),
    "fresh bins, as many bands": Cell(FreshBins(4, 3), 4, 2.5),
    "fresh bins, kept for two epochs": Cell(FreshBins(4, 4, 2), 3, 2.5),
    "fresh bins, many bands": Cell(FreshBins(18, 2), 17, 4.0),
    "separated": Cell(BMinSep(4, 3, 2), 2, 1.1),
    "separated, long rest": Cell(BMinSep(5, 2, 4), 3, 1.1),
    "random partition": Cell(RandomPartition(5, 1, 2), 2, 0.9),
    "pairs in kept bins": Cell(BallsInBins(4, 2), 3, 4.0, 2),
    "pairs in fresh bins": Cell(FreshBins(3, 2), 3, 4.0, 2),
}
COUNTED = {
    "one unit, C = I": Cell(BallsInBins(8, 4), 0, 2.0),
    "three units, C = I": Cell(BallsInBins(4, 2), 0, 2.5, 3),
}
SELDOM = (
    "fresh bins, kept for two epochs",
    "fresh bins, many bands",
    "separated, long rest",
    "pairs in kept bins",
)


def cells(*later, counted=False):
    """Parametrize by the cells; those named, and a few more, wait for a release."""
    marks = dict.fromkeys((*SELDOM, *later), pytest.mark.release)
    enumerated = CELLS | COUNTED if counted else CELLS
    named = [
        pytest.param(cell, id=name, marks=marks.get(name, ())) for name, cell in enumerated.items()
    ]
    return pytest.mark.parametrize("cell", named)


@cells()
@float64
def test_the_likelihood_is_that_of_all_patterns(cell):
    chances = cell.patterns[1]
    assert chances.sum() == pytest.approx(1, rel=1e-12)
    scaled = cell.loss.likelihood.scaled(cell.sigma)
    entries, modes = cell.entries / cell.sigma, cell.modes / cell.sigma
    x = 2 * np.random.default_rng(1).normal(size=(7, len(cell.matrix)))
    log_ratio = jax.jit(scaled.log_ratio)

    def expected(power):
        exponents = power * x @ modes.T - power**2 * np.sum(modes**2, axis=1) / 2
        return logsumexp(exponents, axis=1, b=chances)

    for power in POWERS:
        actual = np.asarray(log_ratio(jnp.asarray(x @ entries), power))
        np.testing.assert_allclose(actual, expected(power), rtol=1e-11, atol=1e-11)
        assert np.max(np.abs(actual - expected(power + 0.1))) > 1e-3  # a control
    white = np.asarray(scaled.noise(jnp.eye(scaled.dimension)))
    np.testing.assert_allclose(white.T @ white, entries.T @ entries, atol=1e-9)
    mean = chances @ modes
    products, square = scaled.mean()
    np.testing.assert_allclose(products, mean @ entries, rtol=1e-9, atol=1e-12)
    assert float(square) == pytest.approx(mean @ mean, rel=1e-9)
    average = scaled.average(jnp.asarray(x @ entries))
    np.testing.assert_allclose(average, x @ mean, rtol=1e-9, atol=1e-12)


@pytest.mark.ci
@cells()
@float64
def test_draws_have_the_moments_of_all_patterns_and_ceilings_hold(cell):
    """Π N_l has the mean E e^(Σ <m_k, m_k'>) over tuples of patterns, and no draw is above it."""
    size, chances = 2**14, cell.patterns[1]
    scaled = cell.loss.likelihood.scaled(cell.sigma)
    ceilings = cell.loss.ceilings(scaled, 0.0)
    entries, modes = cell.entries / cell.sigma, cell.modes / cell.sigma
    overlaps = modes @ modes.T
    squares = np.diagonal(overlaps)
    assert ceilings.largest_square == pytest.approx(squares.max(), rel=1e-9)
    assert ceilings.mean_square == pytest.approx(chances @ squares, rel=1e-9)
    assert ceilings.square_of_mean == pytest.approx(chances @ overlaps @ chances, rel=1e-9)
    pairs = np.exp(overlaps)
    weighted = chances[:, None] * pairs * chances
    moments = {1: np.sum(weighted), 2: np.sum(weighted * ((pairs * chances) @ pairs))}
    noise = scaled.noise(jax.random.normal(jax.random.key(3), (size, scaled.dimension)))
    if ceilings.lengths:  # of the shift: (5') of the module, with the mean as it is
        log_mean = logsumexp(0.35 * squares, b=chances)
        tilt = importance.tilt("shift", 0.7, ceilings, Point(1.0, 0.0))
        assert tilt.log_ceiling == pytest.approx(1.7 * log_mean + HINGE.log_peak(0.7))
        exponents = noise + jnp.asarray(modes[:1] @ entries)
        proposal = scaled.log_ratio(exponents + tilt.detail[0] / 1.7, 1.7) - log_mean
        slack = 1.7 * log_mean + proposal - 1.7 * scaled.log_ratio(exponents)
        assert 0 <= np.min(slack) < 0.5
    draw = jax.jit(scaled.draw)
    for kind in ceilings.chains:
        largest = 0.0
        for order in (1, 2, 3):
            logs = logsumexp(order * overlaps, axis=0, b=chances[:, None])
            largest += np.max(logs)
            log_ceiling, by = ceilings.chain(kind, order)
            if kind == "chain" and cell.scheme.kind != "b-min-sep":
                assert largest - 1e-10 <= log_ceiling <= largest + 0.2
            if order not in moments or kind == "powers":  # weights of its own, and a test of them
                continue
            drawn = draw(jax.random.split(jax.random.key(4)), noise, float(order), by)
            weights = np.exp(np.asarray(drawn.log_normalizers))
            assert np.max(drawn.log_normalizers) <= log_ceiling + 1e-9
            spread = weights.std() / math.sqrt(size)
            assert weights.mean() == pytest.approx(moments[order], abs=K * spread + 1e-9)
            # V from its products with the entries
            sums, white = (
                np.linalg.lstsq(entries.T, np.asarray(rows).T, rcond=None)[0].T
                for rows in (drawn.products, noise)
            )
            np.testing.assert_allclose(np.sum(sums**2, axis=1), drawn.square, rtol=1e-7, atol=1e-7)
            along = np.sum(sums * white, axis=1)
            np.testing.assert_allclose(along, drawn.along, rtol=1e-6, atol=1e-6)


def observed(loss, tilt, point, samples=2**15):
    """(mean, standard error) of a proposal's samples."""
    pilot = loss.pilot(tilt, point, samples, chunked.seed_key(3))
    mean = math.exp(pilot.log_mean)
    return mean, mean * pilot.deviation / math.sqrt(pilot.samples)


@float64
def test_what_is_odd_across_a_shift_adds_up_to_nothing_over_its_points():
    modes, noise = np.random.default_rng(0).normal(size=(2, 5, 3))
    products = jnp.broadcast_to(modes[0] @ modes.T, (5, 5))
    square = products[:, 0]  # the first mode is the shift
    drawn = Drawn(products, jnp.asarray(noise @ modes[0]), square, jnp.zeros(5))

    def evaluate(exponents):
        across = exponents - exponents[:, :1] * products / square[:, None]
        return jnp.log(1 + 0.01 * across[:, 1]), ()

    at = chunked.seed_key(1), evaluate, jnp.asarray(noise @ modes.T), 0.7, drawn
    np.testing.assert_allclose(importance.on_points(*at, 8)[0], 1, rtol=1e-12)
    assert np.min(np.abs(importance.on_points(*at, 1)[0] - 1)) > 1e-6  # a control: one point


@pytest.mark.ci
@cells("fresh bins, as many bands")
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_every_proposal_has_the_mean_of_the_truth(cell, direction):
    """Beside a shared component that is paid exactly; a chain without one too.

    Control: another σ.
    """
    truth, error = cell.truth[direction]
    point = Point(cell.sigma, EPSILON)
    proposals = [(cell.loss, "mean", 0.6)]
    if direction == "remove":
        chains = cell.loss._sampled(point)[1].chains
        proposals = [(cell.loss, kind, 2) for kind in chains] + [(cell.loss, "shift", 0.4)]
        if cell.units == 1 and cell.loss.shared:
            whole = dataclasses.replace(cell).loss
            whole.__dict__["shared"] = None
            proposals.append((whole, "chain", 2))
    for loss, kind, order in proposals:
        mean, spread = observed(loss, loss.at(Tilt(kind, order, 0.0), point), point)
        assert abs(mean - truth) < K * math.hypot(spread, error) < 0.1 * truth
    other = Point(0.8 * cell.sigma, EPSILON)
    mean, spread = observed(loss, loss.at(Tilt(kind, order, 0.0), other), other)
    assert abs(mean - truth) > K * math.hypot(spread, error)


@pytest.mark.ci
@cells("fresh bins, as many bands", counted=True)
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_a_chosen_bound_is_above_the_truth_and_near_it(cell, direction):
    truth, error = cell.truth[direction]
    point, trial = Point(cell.sigma, EPSILON), Trial(2**14, 1e-4, chunked.seed_key(5))
    pilot = cell.loss.choose(direction, point, trial)
    bet, _ = pilot.log_bound(trial.samples, trial.beta)
    bound = cell.loss.bound(pilot.tilt, point, bet, trial._replace(key=chunked.seed_key(6)))
    assert truth - K * error <= bound.value <= 1.15 * truth + K * error
    assert bound.mean <= bound.value <= bound.ceiling * (1 + 1e-6)


@pytest.mark.parametrize("scheme", [BallsInBins(4, 2), FreshBins(4, 2)])
def test_a_loss_ends_with_its_last_user(scheme):
    """What it remembers of its questions is its own: its Gram matrix may take all memory."""
    loss = law(scheme).loss(Banded(np.ones((2, 8))))
    for direction in ("remove", "add"):
        loss.estimator_tilt(direction, Point(2.0, 1.0))
    loss.moments(Point(2.0, 1.0))
    ended = weakref.ref(loss)
    del loss
    gc.collect()
    assert ended() is None
