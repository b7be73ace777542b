"""McMahan, Ramage, Talwar, Zhang 2018: "Learning differentially private recurrent language models".

Table 1: ε of DP-FedAvg's sampled Gaussian mechanism at δ = K^-1.1, add-remove adjacency of one
user, noise multiplier z relative to the sensitivity of the average.
"""

from __future__ import annotations

from mfopt.accounting.closed_form import moments
from mfopt.experiments.accounts import AccountCell
from mfopt.experiments.figures.context import Context, Drawing, Figures, csv_text
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
_HEADER = (
    *("users", "users_per_round", "noise_multiplier", "rounds", "delta"),
    *("epsilon_printed", "epsilon_moments", "epsilon_pld"),
)


def table(context: Context) -> Drawing:
    """Table 1: the printed ε, this library's moments accountant, and its tightest account."""
    places = [(*row, rounds) for row in PRINTED for rounds in ROUNDS]
    found = context.records(
        {
            (users, cohort, noise, rounds): AccountCell(
                Poisson(cohort / users, rounds), noise_multiplier=noise, delta=users**-1.1
            )
            for users, cohort, noise, rounds in places
        }
    )
    old = {
        (users, cohort, noise, rounds): moments.epsilon(noise, cohort / users, rounds, users**-1.1)
        for users, cohort, noise, rounds in places
    }
    lines = [
        "ε at δ = users^-1.1 by number of rounds: as printed in 2018, by this library's moments",
        "accountant (the same method), and by privacy loss distribution (tight)",
        f"{'users':>8}{'per round':>11}{'z':>6}" + "".join(f"{f'10^{i}':>10}" for i in range(7)),
    ]
    rows = []
    for row, printed in PRINTED.items():
        users, cohort, noise = row
        tight = [found[(*row, rounds)]["epsilon"] for rounds in ROUNDS]
        same = [old[(*row, rounds)] for rounds in ROUNDS]
        head = f"{users:>8.0e}{cohort:>11}{noise:>6.1f}"
        lines.append(head + "".join(f"{e:>10.2f}" for e in printed))
        lines.append(f"{'moments':>25}" + "".join(f"{e:>10.2f}" for e in same))
        lines.append(f"{'tight':>25}" + "".join(f"{e:>10.4g}" for e in tight))
        each = zip(ROUNDS, printed, same, tight, strict=True)
        rows += [(*row, rounds, users**-1.1, *values) for rounds, *values in each]
    return Drawing(table="\n".join(lines) + "\n", csv=csv_text(_HEADER, rows))


FIGURES: Figures = {
    "fedavg-table-1": ("Table 1", "ε of DP-FedAvg by number of rounds", table),
}
