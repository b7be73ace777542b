"""McMahan, Ramage, Talwar, Zhang 2018: "Learning differentially private recurrent language models".

Tables 1 and 2: ε of DP-FedAvg's sampled Gaussian mechanism at δ = K^-1.1 and 1e-9, add-remove
adjacency of one user, noise multiplier z relative to the sensitivity of the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import AccountCell, Drawing, Run, figures, main

from mfopt.accounting.closed_form import moments
from mfopt.sampling import Poisson

ROUNDS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
# (users K, users per round, noise multiplier) -> ε as printed, moments accountant of 2018
PRINTED: dict[tuple[int, int, float], tuple[float, ...]] = {
    (10**5, 10**2, 1.0): (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50),
    (10**6, 10**1, 1.0): (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73),
    (10**6, 10**3, 1.0): (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13),
    (10**6, 10**4, 1.0): (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01),
    (10**6, 10**3, 3.0): (0.47, 0.47, 0.48, 0.48, 0.49, 0.67, 1.95),
    (10**9, 10**3, 1.0): (0.84, 0.84, 0.84, 0.85, 0.88, 0.88, 0.88),
}
# of Table 2, at z = 1, 5,000 rounds and δ = 1e-9: (users K, users per round) -> ε as printed
PRIVATE_MODELS: dict[tuple[int, int], float] = {
    (763_430, 5000): 4.634,
    (763_430, 1667): 2.314,
    (763_430, 1250): 2.038,
    (10**8, 5000): 1.152,
    (10**8, 1667): 0.991,
    (10**8, 1250): 0.987,
}
_HEADER = (
    *("users", "users_per_round", "noise_multiplier", "rounds", "delta"),
    *("epsilon_printed", "epsilon_moments", "epsilon_pld"),
)


def _table(run: Run, asked: Sequence[tuple[Any, ...]], title: str) -> Drawing:
    """The printed ε, that of this library's moments accountant, and its tightest.

    What is asked is (users, users per round, noise multiplier, rounds, δ, the printed ε).
    """
    cells, by_moments = {}, {}
    for one in asked:
        users, cohort, noise, rounds, delta, _ = one
        scheme = Poisson(cohort / users, rounds)
        cells[one] = AccountCell(scheme, noise_multiplier=noise, delta=delta)
        by_moments[one] = moments.epsilon(noise, scheme.probability, rounds, delta)
    results = run.records(cells)
    rows = [(*one, by_moments[one], results[one]["epsilon"]) for one in asked]
    return Drawing(title=title, table=(_HEADER, rows))


def rounds_table(run: Run) -> Drawing:
    """Table 1: ε by number of rounds."""
    asked = [
        (users, cohort, noise, rounds, users**-1.1, epsilon)
        for (users, cohort, noise), printed in PRINTED.items()
        for rounds, epsilon in zip(ROUNDS, printed, strict=True)
    ]
    return _table(run, asked, "ε at δ = users^-1.1 by number of rounds")


def models_table(run: Run) -> Drawing:
    """Table 2: ε of its private models."""
    asked = [(*who, 1.0, 5000, 1e-9, epsilon) for who, epsilon in PRIVATE_MODELS.items()]
    return _table(run, asked, "ε at δ = 1e-9 of 5,000 rounds with z = 1")


FIGURES = figures({"fedavg-table-1": rounds_table, "fedavg-table-2": models_table})


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
