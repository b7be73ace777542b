"""What plots of a comparison choose to show, on rows made by hand."""

from mfopt.experiments import decision_plots
from mfopt.experiments.comparison import Comparison, Row
from mfopt.experiments.families import FAMILIES


def row(family, rmse, memory=0, epsilon=1.0, size=0, draws=1.0):
    return Row(family, epsilon, size, 1.0, rmse, 1e-3, memory, "estimate", draws)


def test_the_front_is_what_nothing_beats_in_both():
    rows = [
        row("dpsgd+poisson", 20.0),
        row("blt-2", 10.0, 2),
        row("blt-4", 10.0 * (1 - 0.001), 4),  # a tie: its memory buys nothing
        row("banded+poisson", 12.0, 3),
        row("toeplitz", 9.0, 99),
    ]
    front = decision_plots.pareto_front(rows)
    assert [r.family for r in front] == ["dpsgd+poisson", "blt-2", "toeplitz"]
    assert decision_plots.pareto_front(rows[::-1]) == front


def test_a_front_for_memory():
    setting = Comparison(bins=4, epochs=2, epsilons=(1.0,), include=("blt-2", "sqrt"))
    rows = [
        row("blt-2", 10.0, 2),
        row("banded+poisson", 12.0, 1),
        row("sqrt", 9.0, 0, draws=50.0),  # no memory, at the price of time
    ]
    figure = decision_plots.memory_figure(setting, rows)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    # of those that keep their draws; the axis counts what the names count
    grey = ["others", "regenerate past draws", "front"]
    assert names == [*grey, "banded, cyclic Poisson: 1", "BLT-2: 2"]
    (axis,) = figure.axes
    assert [float(x) for line in axis.lines for x in line.get_xdata()][-2:] == [1.0, 2.0]


def test_at_most_eight_families_and_the_baseline():
    names = [*FAMILIES]
    rows = [row(name, 1.0 + index, epsilon=e) for index, name in enumerate(names) for e in (1, 2)]
    chosen = decision_plots.best_families(rows, names[-1])
    assert len(chosen) == decision_plots.MOST_CURVES and chosen[-1] == names[-1]
