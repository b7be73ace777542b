"""McMahan, Ramage, Talwar, Zhang 2018: "Learning differentially private recurrent language models".

Tables 1 and 2: ε of DP-FedAvg's sampled Gaussian mechanism at δ = K^-1.1 and 1e-9, add-remove
adjacency of one user, noise multiplier z relative to the sensitivity of the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfopt.accounting.closed_form import moments
from mfopt.experiments.accounts import AccountCell
from mfopt.experiments.figures.context import Context, Drawing, Figures
from mfopt.experiments.tables import csv_text
from mfopt.sampling import Poisson

PAPER = "McMahan et al. 2018, DP recurrent language models"
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


class PrintedEpsilon(NamedTuple):
    """One ε of a paper's table, with what it is of."""

    users: int
    cohort: int
    noise: float
    rounds: int
    delta: float
    printed: float


def accounted(context: Context, asked: Sequence[PrintedEpsilon]) -> list[tuple[float, float]]:
    """(ε of this library's moments accountant, its tightest ε) of each."""
    cells = {
        one: AccountCell(
            Poisson(one.cohort / one.users, one.rounds), noise_multiplier=one.noise, delta=one.delta
        )
        for one in asked
    }
    found = context.records(cells)
    return [
        (
            moments.epsilon(one.noise, one.cohort / one.users, one.rounds, one.delta),
            found[one]["epsilon"],
        )
        for one in asked
    ]


def rounds_table(context: Context) -> Drawing:
    """Table 1: the printed ε, this library's moments accountant, and its tightest account."""
    asked = [
        PrintedEpsilon(users, cohort, noise, rounds, users**-1.1, epsilon)
        for (users, cohort, noise), printed in PRINTED.items()
        for rounds, epsilon in zip(ROUNDS, printed, strict=True)
    ]
    found = accounted(context, asked)
    lines = [
        "ε at δ = users^-1.1 by number of rounds: as printed in 2018, by this library's moments",
        "accountant (the same method), and by privacy loss distribution (tight)",
        f"{'users':>8}{'per round':>11}{'z':>6}" + "".join(f"{f'10^{i}':>10}" for i in range(7)),
    ]
    for first in range(0, len(asked), len(ROUNDS)):
        row, values = asked[first : first + len(ROUNDS)], found[first : first + len(ROUNDS)]
        head = f"{row[0].users:>8.0e}{row[0].cohort:>11}{row[0].noise:>6.1f}"
        lines.append(head + "".join(f"{one.printed:>10.2f}" for one in row))
        lines.append(f"{'moments':>25}" + "".join(f"{same:>10.2f}" for same, _ in values))
        lines.append(f"{'tight':>25}" + "".join(f"{tight:>10.4g}" for _, tight in values))
    return _drawing(lines, asked, found)


def models_table(context: Context) -> Drawing:
    """Table 2: ε of its private models, as :func:`rounds_table` has them."""
    asked = [
        PrintedEpsilon(*who, 1.0, 5000, 1e-9, epsilon) for who, epsilon in PRIVATE_MODELS.items()
    ]
    found = accounted(context, asked)
    lines = [
        "ε at δ = 1e-9 of 5,000 rounds with z = 1",
        f"{'users':>10}{'per round':>11}{'printed':>10}{'moments':>10}{'tight':>10}",
    ]
    for one, (same, tight) in zip(asked, found, strict=True):
        line = f"{one.users:>10}{one.cohort:>11}{one.printed:>10.3f}{same:>10.3f}{tight:>10.4g}"
        lines.append(line)
    return _drawing(lines, asked, found)


def _drawing(
    lines: list[str], asked: list[PrintedEpsilon], found: list[tuple[float, float]]
) -> Drawing:
    rows = [(*one, *values) for one, values in zip(asked, found, strict=True)]
    return Drawing(table="\n".join(lines) + "\n", csv=csv_text(_HEADER, rows))


FIGURES: Figures = {
    "fedavg-table-1": ("Table 1", "ε of DP-FedAvg by number of rounds", rounds_table),
    "fedavg-table-2": ("Table 2", "ε of the private models of DP-FedAvg", models_table),
}
