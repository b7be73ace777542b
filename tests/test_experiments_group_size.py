"""A private median chooses G of ELS: its privacy, the law of sizes, and what it costs."""

import dataclasses

import numpy as np
import pytest

from mfopt.errors import UsageError
from mfopt.experiments.cache import Result
from mfopt.experiments.runs import means
from mfopt.experiments.runs.doubling import median_probabilities
from mfopt.experiments.runs.means import ELS, ULS, Descent
from mfopt.experiments.studies.group_size import GroupSize

CANDIDATES = (1, 2, 4, 8, 16)


def largest_ratio(epsilon, numbers):
    """The largest |log ratio| of chances when one user comes or goes, over all its numbers."""
    at = np.log(median_probabilities(numbers, CANDIDATES, epsilon))
    others = [np.append(numbers, value) for value in range(18)]
    others += [np.delete(numbers, place) for place in range(len(numbers))]
    return max(abs(np.log(median_probabilities(n, CANDIDATES, epsilon)) - at).max() for n in others)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_the_private_median_is_private(epsilon):
    make = np.random.default_rng(0)
    cases = [make.integers(1, 17, size=n) for n in (1, 2, 5, 12)] + [np.full(9, 4)]
    ratios = [largest_ratio(epsilon, numbers) for numbers in cases]
    assert max(ratios) <= epsilon * (1 + 1e-9)
    assert max(ratios) > 0.4 * epsilon  # a bound that is nearly reached: twice ε would break it


def test_the_private_median_finds_the_median():
    numbers = np.array([[1] * 40 + [4] * 30 + [16] * 40, [8] * 110, [1] * 80 + [16] * 30])
    chances = median_probabilities(numbers, CANDIDATES, 1.0)
    assert chances.argmax(-1).tolist() == [2, 3, 0] and (chances.max(-1) > 0.95).all()
    np.testing.assert_allclose(chances.sum(-1), 1)
    weak = median_probabilities(numbers[:1], CANDIDATES, 1e-9)
    np.testing.assert_allclose(weak, 0.2, atol=1e-6)  # control: no ε, no choice


SIZED = Descent(
    algorithm=ELS, group=3, batch=20, epsilon=1.0, delta=1e-5, users=30, examples=12, dimension=2,
    across=1.0, within=0.7, steps=5, trials=200, clips=(2.0,), lengths=(0.1,), seed=1,
    median=3.0, spread=0.8,
)  # fmt: skip


def test_batches_of_users_of_several_sizes_have_the_size_that_is_public():
    sizes = means.draw_sizes(SIZED)
    assert sizes.shape == (200, 30) and sizes.min() >= 1 and sizes.max() <= 12
    kept = np.minimum(sizes, 3)
    error = 5 * kept.sum(1).std() / np.sqrt(200)
    assert abs(kept.sum(1).mean() - SIZED.expected) < error
    drawn = np.concatenate([places[..., 0] for _, places in means.batches(SIZED)])
    user, number = np.divmod(drawn, 3)
    trial = np.broadcast_to(np.arange(200)[:, None, None], drawn.shape)
    there = drawn >= 0
    assert (number[there] < sizes[trial[there], user[there]]).all()  # nobody's empty places
    assert abs(there.sum() / (200 * 5) - 20) < 5 * np.sqrt(20 / 1000)
    with pytest.raises(UsageError, match="spread"):
        dataclasses.replace(SIZED, algorithm=ULS)


def study():
    return GroupSize(
        epsilons=(2.0,), median_share=0.1,
        groups=(1, 4, 16), median=4.0, spread=0.5, examples=16, users=40, batch=8,
        trials=6, clips=(1.0,), lengths=(0.1,),
    ).check()  # fmt: skip


def test_the_whole_costs_no_more_than_it_says():
    made = study()
    assert {cell.needs[0].epsilon for cell in made.cells()} == {2.0, 1.8}  # 0.2 for a median
    found = {}
    for cell in made.cells():
        errors = np.full((1, 1, 6), float(cell.group + 100 * (cell.epsilon < 2)))
        found[cell] = Result({"noise_multiplier": 1.0}, {"errors": errors})
    rows = made.rows(found)
    chances = made.chances(2.0)
    np.testing.assert_allclose(rows[-1]["_losses"], chances @ [101.0, 104.0, 116.0])
    assert made.nearest() == 4 and rows[1]["squared_error"] == 4.0
    assert len(rows) == 4 and all(row["epsilon"] == 2.0 for row in rows)
    assert rows[-1]["epsilon_of_median"] == pytest.approx(0.2)
    assert "G = 4 (the median) has 4.000 ± 0.000 times" in made.findings(rows)[0]


def test_the_best_is_judged_by_the_other_half():
    one, two = np.array([0.0, 3.0, 0.0, 3.0]), np.array([1.0, 1.0, 1.0, 1.0])
    # odd trials choose 2 for the even ones, even ones choose 1 for the odd ones
    assert means.by_halves(np.stack([one, two]))[0].tolist() == [1.0, 3.0, 1.0, 3.0]
