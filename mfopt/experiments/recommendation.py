"""Recommendations from a comparison: a sentence and a table of 80 columns for each ε."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfopt.experiments.comparison import Row, improvement, number
from mfopt.experiments.mechanisms import (
    B_MIN_SEP,
    BALLS,
    FRESH,
    POISSON,
    RANDOM_PARTITION,
    UNAMPLIFIED,
)

LITTLE = 8  # noise buffers that count as little memory
FEW_DRAWS = 2  # white draws of a step that no time is lost for: one past draw made again
TIE = 0.0025  # relative: errors so close count as equal, and the least memory decides
# what must be executed, in the words of `mfopt train --sampling`
SAMPLING = {
    BALLS: "balls-in-bins",
    FRESH: "fresh bins",
    POISSON: "Poisson sampling (cyclic for bands)",
    B_MIN_SEP: "b-min-sep",
    RANDOM_PARTITION: "a random partition",
    UNAMPLIFIED: "any fixed order",
}


class _Recommendation(NamedTuple):
    """Recommended mechanism at one ε.

    Attributes:
      best: the row of lowest :func:`_error`.
      light: of those within the memory that regenerate at most one draw a step, the row of lowest
        error, and of least memory where errors are practically equal.
      rivals: the best of those run under any other sampling than ``light``'s, by sampling.
    """

    epsilon: float
    best: Row
    light: Row
    rivals: dict[str, Row]

    def text(self) -> str:
        """One sentence: mechanism, error, cost, sampling, and what else there is."""
        sentence = (
            f"ε = {self.epsilon:g}: {_named(self.light)} with {_executed(self.light.sampling)}"
        )
        if self.light.above_floor is not None:
            sentence += f", {100 * self.light.above_floor:.1f}% above the floor at epochs' ends"
        for sampling, row in self.rivals.items():
            change = _percent_below(self.light, row)
            # one with bins too is named below where it is the best
            if row is not self.best or sampling in (POISSON, UNAMPLIFIED):
                side = "below" if change >= 0 else "above"
                sentence += f", {abs(change):.1f}% {side} the best {_against(sampling)}"
        if _error(self.best) >= _error(self.light) * (1 - TIE):
            return f"{sentence}; nothing here is better"
        lower = _percent_below(self.best, self.light)
        sentence += f"; {lower:.1f}% lower with more: {_named(self.best)}"
        same_sampling = self.best.sampling == self.light.sampling
        return sentence if same_sampling else f"{sentence} with {_executed(self.best.sampling)}"


def _error(row: Row) -> float:
    """What rows are ranked by: final-model error, or RMSE where the comparison has no other."""
    return row.rmse if row.final_model_error is None else row.final_model_error


def _percent_below(row: Row, reference: Row) -> float:
    return 100 * (1 - _error(row) / _error(reference))


def recommend(rows: Sequence[Row], memory: int = LITTLE) -> list[_Recommendation]:
    """Recommendations for each ε.

    Args:
      rows: of every size that was tried: the best within the memory is seldom the best of all.
      memory: noise buffers (× model size) that there is room for.
    """
    recommendations = []
    for epsilon in dict.fromkeys(row.epsilon for row in rows):
        ranked = sorted((row for row in rows if row.epsilon == epsilon), key=_error)
        cheap = [row for row in ranked if row.memory <= memory and row.draws <= FEW_DRAWS]
        cheap = cheap or ranked[:1]
        tied = [row for row in cheap if _error(row) <= _error(cheap[0]) * (1 + TIE)]
        light = min(tied, key=lambda row: (row.memory, _error(row)))
        rivals: dict[str, Row] = {}
        for row in ranked:
            if row.sampling != light.sampling:
                rivals.setdefault(row.sampling, row)
        recommendations.append(_Recommendation(epsilon, ranked[0], light, rivals))
    return recommendations


def blocks(rows: Sequence[Row], baseline: str | None = None) -> str:
    """A table for each ε, best first, at most 80 columns wide.

    ``model`` is the final-model error (:mod:`mfopt.final_model`).
    ``buffers`` is the memory of the noise (× model size), ``draws`` the model-sized white draws of
    a step where it is more than one: what no memory is paid for with.
    """
    parts = []
    for epsilon in dict.fromkeys(row.epsilon for row in rows):
        ranked = sorted((row for row in rows if row.epsilon == epsilon), key=lambda row: row.rmse)
        base = next((row for row in ranked if row.family == baseline), None)
        lines = [
            f"{f'ε = {epsilon:g}':<40}{'RMSE':>9}{'' if base is None else 'change':>8}"
            f"{'model':>7}{'buffers':>8}{'draws':>8}"
        ]
        for row in ranked:
            size = f" ({row.bands})" if row.bands else ""
            change = "" if base is None else _change(improvement(row, base).percent)
            draws = "" if row.draws <= 1 else f"{row.draws:,.0f}"
            name = f"{row.label}{size}"
            model = "" if row.final_model_error is None else number(row.final_model_error)
            cost = f"{model:>7}{row.memory:>8}{draws:>8}"
            lines.append(f"{name:<40}{number(row.rmse):>9}{change:>8}{cost}")
        parts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(parts)


def _change(percent: float) -> str:
    """RMSE below the baseline's in percent, or how many times it is above."""
    if percent > -100:
        return f"{round(-percent, 1) + 0.0:+.1f}%"  # never -0.0
    times = 1 - percent / 100
    return f"×{times:.3g}" if times < 1000 else f"×{times:.0e}"


def _named(row: Row) -> str:
    size = f" ({row.bands} bands)" if row.bands > 1 else ""
    cost = f"{row.memory} buffer{'s' * (row.memory != 1)}"
    if row.draws > 1:
        cost += f" and {row.draws:,.0f} draws a step"
    # the sampling is said where it matters
    name = row.label.partition(", ")
    kept = name[0] if name[2] in _SAMPLED else "".join(name)
    errors = f"RMSE {number(row.rmse)}"
    if row.final_model_error is not None:
        errors = f"final-model error {number(row.final_model_error)} ({errors})"
    return f"{kept}{size}, {errors} at {cost}"


_SAMPLED = (
    "unamplified",
    "Poisson",
    "cyclic Poisson",
    "b-min-sep",
    "random partition",
    "balls-in-bins",
    "fresh bins",
)


def _executed(sampling: str) -> str:
    return SAMPLING.get(sampling, sampling)


def _against(sampling: str) -> str:
    if sampling == UNAMPLIFIED:
        return "without"
    return f"with {_executed(sampling).partition(' (')[0]}"
