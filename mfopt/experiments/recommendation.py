"""Recommendations from a comparison: a sentence and a table of 80 columns for each ε."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfopt.experiments import families
from mfopt.experiments.comparison import Row, improvement, number
from mfopt.experiments.mechanisms import B_MIN_SEP, BALLS, FRESH, POISSON, UNAMPLIFIED

LITTLE = 8  # noise buffers that count as little memory
TIE = 0.0025  # relative: errors so close count as equal, and the least memory decides
# what must be executed, in the words of `mfopt train --sampling`
SAMPLING = {
    BALLS: "balls-in-bins",
    FRESH: "fresh bins",
    POISSON: "Poisson sampling (cyclic for bands)",
    B_MIN_SEP: "b-min-sep",
    UNAMPLIFIED: "any fixed order",
}


class Recommendation(NamedTuple):
    """Recommended mechanism at one ε.

    Attributes:
      best: the row of lowest error.
      light: of those that keep little memory and regenerate no draw, the row of lowest error, and
        of least memory where errors are practically equal.
      rivals: the best of those run under any other sampling than ``light``'s, by sampling.
    """

    epsilon: float
    best: Row
    light: Row
    rivals: dict[str, Row]

    def text(self) -> str:
        """One sentence: mechanism, error, cost, sampling, and what else there is."""
        sentence = (
            f"ε = {self.epsilon:g}: {_named(self.light)} with {SAMPLING[_scheme(self.light)]}"
        )
        if self.light.above_floor is not None:
            sentence += f", {100 * self.light.above_floor:.1f}% above the floor at epochs' ends"
        for sampling, row in self.rivals.items():
            change = improvement(self.light, row).percent
            # one with bins too is named below where it is the best
            if row is not self.best or sampling in (POISSON, UNAMPLIFIED):
                side = "below" if change >= 0 else "above"
                sentence += f", {abs(change):.1f}% {side} the best {_AGAINST[sampling]}"
        if self.best.rmse >= self.light.rmse * (1 - TIE):
            return f"{sentence}; nothing here is better"
        lower = improvement(self.best, self.light).percent
        sentence += f"; {lower:.1f}% lower with more: {_named(self.best)}"
        same_sampling = _scheme(self.best) == _scheme(self.light)
        return sentence if same_sampling else f"{sentence} with {SAMPLING[_scheme(self.best)]}"


def recommend(rows: Sequence[Row]) -> list[Recommendation]:
    """Recommendations for each ε, from the rows of a comparison."""
    recommendations = []
    for epsilon in dict.fromkeys(row.epsilon for row in rows):
        ranked = sorted((row for row in rows if row.epsilon == epsilon), key=lambda row: row.rmse)
        cheap = [row for row in ranked if row.memory <= LITTLE and row.draws <= 1] or ranked[:1]
        tied = [row for row in cheap if row.rmse <= cheap[0].rmse * (1 + TIE)]
        light = min(tied, key=lambda row: (row.memory, row.rmse))
        rivals: dict[str, Row] = {}
        for row in ranked:
            if _scheme(row) != _scheme(light):
                rivals.setdefault(_scheme(row), row)
        recommendations.append(Recommendation(epsilon, ranked[0], light, rivals))
    return recommendations


def blocks(rows: Sequence[Row], baseline: str | None = None) -> str:
    """A table for each ε, best first, at most 80 columns wide.

    ``buffers`` is the memory of the noise (× model size), ``draws`` the model-sized white draws of
    a step where it is more than one: what no memory is paid for with. Where the time of a step's
    noise was measured, it stands in the place of the draws, which it includes.
    """
    parts = []
    for epsilon in dict.fromkeys(row.epsilon for row in rows):
        ranked = sorted((row for row in rows if row.epsilon == epsilon), key=lambda row: row.rmse)
        base = next((row for row in ranked if row.family == baseline), None)
        timed = any(row.noise_seconds is not None for row in ranked)
        lines = [
            f"{f'ε = {epsilon:g}':<42}{'RMSE':>10}"
            f"{'' if base is None else 'change':>9}{'buffers':>8}{'time' if timed else 'draws':>8}"
        ]
        for row in ranked:
            size = f" ({row.size})" if row.size and families.find(row.family).bands else ""
            change = "" if base is None else _change(improvement(row, base).percent)
            draws = "" if row.draws <= 1 else f"{row.draws:,.0f}"
            if timed:
                draws = "" if row.noise_seconds is None else _time(row.noise_seconds)
            name = f"{families.label(row.family)}{size}"
            lines.append(f"{name:<42}{number(row.rmse):>10}{change:>9}{row.memory:>8}{draws:>8}")
        parts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(parts)


def _change(percent: float) -> str:
    """RMSE below the baseline's in percent, or how many times it is above."""
    if percent > -100:
        return f"{round(-percent, 1) + 0.0:+.1f}%"  # never -0.0
    return f"×{1 - percent / 100:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _scheme(row: Row) -> str:
    return families.find(row.family).sampling


def _named(row: Row) -> str:
    size = f" ({row.size} bands)" if families.find(row.family).bands and row.size > 1 else ""
    cost = f"{row.memory} buffer{'s' * (row.memory != 1)}"
    if row.draws > 1:
        cost += f" and {row.draws:,.0f} draws a step"
    if row.noise_seconds is not None:
        cost += f", {_time(row.noise_seconds)} a step"
    # the sampling is said where it matters
    name = families.label(row.family).partition(", ")
    kept = name[0] if name[2] in _SAMPLED else "".join(name)
    return f"{kept}{size}, RMSE {number(row.rmse)} at {cost}"


_SAMPLED = ("unamplified", "Poisson", "cyclic Poisson", "b-min-sep", "balls-in-bins", "fresh bins")
_AGAINST = {sampling: f"with {words.partition(' (')[0]}" for sampling, words in SAMPLING.items()}
_AGAINST[UNAMPLIFIED] = "without"
