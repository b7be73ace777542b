"""The form in which the papers show improvements over a baseline: one curve a family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mfopt.experiments.comparison import Comparison, Row, by_key, improvements
from mfopt.experiments.families import label
from mfopt.experiments.plots import Curve, Panel

_LOWEST_SHOWN = -40  # percent: a far worse mechanism would squeeze all the others into one line
EPSILON = "privacy budget ε (log scale)"


def where(setting: Comparison) -> str:
    return f"{setting.epochs} epochs × {setting.bins} iterations, δ = {setting.delta:g}"


def improvement_panel(
    setting: Comparison,
    rows: Sequence[Row],
    baseline: str,
    families: Iterable[str] | None = None,
    title: str = "",
) -> Panel:
    """Percent by which each family's RMSE is below the baseline's, against ε.

    Args:
      setting: what is compared, and where.
      rows: the rows to show, one for each family and ε.
      baseline: family that improvements are over; None for none.
      families: families to draw; all of the rows by default.
      title: heading.
    """
    table, gains = by_key(rows), improvements(rows, baseline)
    shown = [f for f in families or dict.fromkeys(row.family for row in rows) if f != baseline]
    curves = []
    for family in shown:
        epsilons = sorted(e for f, e in gains if f == family)
        mine = [gains[family, e] for e in epsilons]
        assert all((family, e) in table for e in epsilons)
        curves.append(
            Curve(
                label(family),
                epsilons,
                [g.percent for g in mine],
                [g.low for g in mine],
                [g.high for g in mine],
            )
        )
    axis = f"RMSE below {label(baseline)} (%)\nhigher is better"
    values = [value for curve in curves for value in curve.y]
    near = [value for value in values if value >= _LOWEST_SHOWN]
    if len(near) == len(values) or len(near) < len(values) / 2:
        return Panel(curves, title or where(setting), EPSILON, axis, zero_line=True)
    curves = [curve for curve in curves if max(curve.y) >= _LOWEST_SHOWN]
    limits = (min(_LOWEST_SHOWN, min(near)), max(*near, 0) + 3)
    axis += f"; below {_LOWEST_SHOWN}% not shown"
    return Panel(curves, title or where(setting), EPSILON, axis, zero_line=True, y_range=limits)
