"""Records per user by a private median of how many each has, paid for out of the run's ε.

The exponential mechanism (McSherry and Talwar 2007; Dwork and Roth 2014, section 3.4) over the
fixed ``GRID``, as for any private quantile (Smith 2011). Of the users with records, whose numbers
are rounded down to the grid, let L lie below a point, E on it and R above it. The point's rank
error s / 2, s = max(|L - R| - E, 0), is 0 where it is a median, else the users by which its rank
is off. One user more, fewer or emptied changes one of L, E and R by one, and every s by at most
one: the utility -s / 2 has sensitivity 1/2, and weights e^(-ε s / 2) are ε-DP. The rank is off by
t users or more with probability at most 16 e^(-ε t).

No float decides: a point is proposed uniformly, and kept with probability r^s, by s comparisons of
256 secret bits with r = e^(-ε / 2), which is rounded up.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from mfopt._runtime import _check, _files
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.secrets import RunSecret

FILE = "records-per-user.json"
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # 16 divides 2^256


def doubled_rank_errors(counts: np.ndarray) -> np.ndarray:
    """s of each point of ``GRID``, int64 (16,), from the numbers of records of all users (U,)."""
    cells = np.searchsorted(GRID, counts[counts > 0], side="right") - 1
    here = np.bincount(cells, minlength=len(GRID))
    below = np.cumsum(here) - here
    return np.maximum(np.abs(here.sum() - here - 2 * below) - here, 0)


def draw(counts: np.ndarray, epsilon: float, numbers: Iterator[int]) -> int:
    """An ε-DP median of ``counts`` (U,) on ``GRID``; ``numbers``: secret, uniform, of 256 bits."""
    ratio = math.exp(-_check.epsilon("median_epsilon", epsilon) / 2)
    for _ in range(2):  # the exponential may err by an ulp
        ratio = min(1.0, math.nextafter(ratio, math.inf))
    limit, errors = math.ceil(math.ldexp(ratio, 256)), doubled_rank_errors(counts)
    while True:
        point = next(numbers) % len(GRID)
        if all(next(numbers) < limit for _ in range(errors[point])):
            return GRID[point]


def check(config: TrainConfig) -> None:
    """Refuse a number of records that no draw in the run's folder has given."""
    path = Path(config.output) / FILE
    if config.median_epsilon and config.records_per_user and not path.is_file():
        rule = f"must be 0 for `median_epsilon` to choose it: no draw is kept in {path}"
        way_out = "Give 0, or leave `median_epsilon` out."
        raise _check.reject("records_per_user", config.records_per_user, rule, way_out)


def chosen(config: TrainConfig, train: TokenStore, secret: RunSecret | None) -> tuple[int, str]:
    """(the run's number of records of a user, in words how), drawn once and kept in its folder.

    A later start in the folder gets the same one, also after a kill before the first checkpoint.
    Refused is a number that was drawn from other data, or with another ε. ``secret``: of a run that
    begins; None: a run resumes, and nothing is drawn.
    """
    path = Path(config.output) / FILE
    asked = {"data": train.digest, "epsilon": config.median_epsilon, "seed": config.seed}

    def record(count: int) -> str:
        return json.dumps(asked | {"grid": GRID, "records_per_user": count}) + "\n"

    if not path.is_file() and secret is not None and jax.process_index() == 0:
        numbers = (secret.seed(f"median {number}") for number in itertools.count())
        count = draw(train.records_per_user(), config.median_epsilon, numbers)
        # on disk before anybody sees it: nothing is drawn twice
        _files.write(path, record(count), private=True)
    meshes.wait_for_lead("records per user")
    kept = path.read_text() if path.is_file() else ""
    for count in GRID:
        if kept == record(count) and config.records_per_user in (0, count):
            off = math.log(len(GRID) / 0.05) / config.median_epsilon
            return count, f"a private median, off by {off:.0f} users or less (probability 95%)"
    rule = f"is not what {path} holds for this data, seed and `median_epsilon`"
    way_out = "Resume with what the run was started with, or begin a new one in another folder."
    raise _check.reject("records_per_user", config.records_per_user, rule, way_out)
