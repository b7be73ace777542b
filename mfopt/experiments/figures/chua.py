"""Chua et al. 2024: "Mind the privacy unit!", noise with and without the concentration filter.

The publication does not print the number of users, batch and iterations behind its figures. Here:
N = 10,000 users, 1,024 records a step (1,024/k users of k records each), 1,000 steps, δ = 1e-5,
add-remove adjacency of one user. The noise is the standard deviation on the mean gradient.
"""

from __future__ import annotations

from mfopt.experiments.accounts import FilterCell
from mfopt.experiments.figures.context import Builder, Context, Drawing, Figures, table
from mfopt.experiments.plots import Curve, Panel

PAPER = "Chua et al. 2024, Mind the privacy unit"
USERS, RECORDS, STEPS, DELTA = 10_000, 1024, 1000, 1e-5
PER_USER = (2, 5, 10, 20)
LENGTH, CHOSEN = 48, 4  # tokens of a record, and records of a user, of the fine-tuning studies
_COLUMNS = (
    *("users", "records", "least", "median", "mean", "largest"),
    *("mean_tokens", "mean_perplexity", "share_shorter"),
)
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def noise(*epsilons: float) -> Builder:
    """Figures 3 and 7: the filter's noise grows with τ, that of user-wise DP-SGD does not."""

    def build(context: Context) -> Drawing:
        places = [(e, k) for e in epsilons for k in PER_USER]
        found = context.records(
            {(e, k): FilterCell(e, DELTA, STEPS, USERS, RECORDS / k) for e, k in places}
        )
        panels = []
        for epsilon in epsilons:
            # the filter uses all users in each step, whatever k is: one curve
            slope = found[epsilon, PER_USER[0]]["filter_noise_per_threshold"]
            curves = [Curve("with filter (all users)", THRESHOLDS, [slope * t for t in THRESHOLDS])]
            for k in PER_USER:
                label = f"user-wise DP-SGD, k = {k} records per user"
                level = found[epsilon, k]["plain_noise"]
                curves.append(Curve(label, THRESHOLDS, [level] * len(THRESHOLDS)))
            axis = "concentration over clip norm, τ/C (log scale)"
            label = "noise on the mean gradient\n(clip norms, log scale)"
            panels.append(Panel(curves, f"ε = {epsilon:g}", axis, label, log_y=True))
        title = f"{USERS:,} users, {RECORDS:,} records a step, {STEPS:,} steps, δ = {DELTA:g}"
        return Drawing(panels, title)

    return build


def data(context: Context) -> Drawing:
    """Tables 1 and 7 and Figure 5, of the corpora that this library brings."""
    from mfopt.experiments.runs.training import PARTS, RECORD_RULES, CorpusCell, CorpusSizesCell
    from mfopt.training.data import EMBEDDED

    cells = {
        name: CorpusSizesCell(CorpusCell.at(name, LENGTH, pretrain_steps=120), CHOSEN)
        for name in EMBEDDED
    }
    rows = [
        (name, of, *(record["rows"][of].get(key) for key in _COLUMNS))
        for name, record in context.records(cells).items()
        for of in (*PARTS, *RECORD_RULES)
    ]
    title = (
        f"Records of a user by part, and {CHOSEN} of each user in train by rule: mean length,\n"
        f"mean perplexity before fine-tuning, and the share of records below {LENGTH} tokens"
    )
    return table(title, ("data", "of", *_COLUMNS), rows)


FIGURES: Figures = {
    "privacy-unit-data": ("Tables 1 and 7", "sizes of users, and what rules choose", data),
    "privacy-unit-3": ("Figure 3", "noise with and without the filter, ε = 3", noise(3.0)),
    "privacy-unit-7": (
        "Figure 7",
        "noise with and without the filter, more ε",
        noise(1.0, 3.0, 8.0),
    ),
}
