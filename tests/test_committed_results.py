"""Committed tables say what today's code produces: one cell of each is made again."""

import csv
import math
import re

import bench_optima
import pytest
from questions import asked
from selection import before_release
from sources import ROOT

from mfopt.accounting import Mechanism, account
from mfopt.optimize import auto, optimize
from mfopt.sampling import BallsInBins, Poisson

LIMIT = 0.003  # of RMSE; two estimates of σ on 2^15 samples differ by 0.1%

pytestmark = pytest.mark.ci


def stored(table, **required):
    """The one row of a committed table with these values."""
    with (ROOT / "artifacts" / "tables" / table).open(newline="") as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if all(row[name] == str(value) for name, value in required.items())
        ]
    return float(row["rmse"])


CELLS = [  # table, which row, epochs × bins, whether time-scaled
    ("grid.csv", {"kind": "blt-4-scaled", "epochs": 8, "bins": 32, "epsilon": 2}, 8, 32, True),
    ("strategies-8x32.csv", {"family": "blt-4", "epsilon": 2.0}, 8, 32, False),
    ("strategies-32x32.csv", {"family": "blt-4-scaled", "epsilon": 0.5}, 32, 32, True),
    ("field-sizes-16x128.csv", {"family": "blt-4-scaled", "epsilon": 0.5}, 16, 128, True),
]


@pytest.mark.parametrize(
    ("table", "row", "epochs", "bins", "scaled"),
    before_release(CELLS),  # of most tables the bench of optima searches one again: below
    ids=[cell[0] for cell in CELLS],
)
def test_a_cell_of_each_table_is_found_again(table, row, epochs, bins, scaled):
    scheme, epsilon = BallsInBins(bins=bins, epochs=epochs), row["epsilon"]
    question = asked(epsilon, strategy="blt", time_scale=scaled, seed=0, loss="rmse")
    rmse = auto.scored(optimize(scheme, question).strategy, scheme, question).rmse
    assert rmse == pytest.approx(stored(table, **row), rel=LIMIT)


FAMILIES = {"blt-4-scaled": "blt", "wave-blt-4-scaled": "wave-blt", "blt-2-scaled": "blt-2"}


@pytest.mark.parametrize("table", [cell[0] for cell in CELLS if "32x32" not in cell[0]])
def test_tables_hold_the_best_values_known(table):
    """One of which is searched again before a release, by `bench_optima.py`."""
    best, recorded = bench_optima.known(), set()
    with (ROOT / "artifacts" / "tables" / table).open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = re.findall(r"\d+", table) or [row["epochs"], row["bins"]]
            kind = FAMILIES.get(row.get("family") or row["kind"], "")
            index = kind, "balls-in-bins", *map(int, sizes), float(row["epsilon"])
            if (cell := bench_optima.Cell(*index)) in best:
                recorded.add(cell)
                assert float(row["rmse"]) == pytest.approx(best[cell][0], rel=LIMIT), cell
    assert recorded & set(bench_optima.every())


CLOSED_FORMS = ("field-16x128.csv", "field-4x64.csv", "field-8x32.csv")


def test_every_table_has_a_cell_that_is_found_again():
    tables = {path.name for path in (ROOT / "artifacts" / "tables").glob("*.csv")}
    # the tables of every size follow from the same cells as those of the best
    sizes = {name for name in tables if "sizes" in name}
    assert tables == {*(cell[0] for cell in CELLS), *CLOSED_FORMS, *sizes}


@pytest.mark.parametrize("table", CLOSED_FORMS)
def test_a_closed_form_of_the_field_is_found_again(table):
    required = stored(table, family="dpsgd+poisson", epsilon=2.0)
    epochs, bins = map(int, re.findall(r"\d+", table))
    scheme = Poisson(1 / bins, epochs * bins)
    sigma = account(Mechanism(scheme), epsilon=2.0, delta=1e-5).noise_multiplier
    rmse = sigma * math.sqrt((scheme.iterations + 1) / 2)
    assert rmse == pytest.approx(required, rel=LIMIT)


@pytest.mark.parametrize(
    ("value", "failed"),
    [(1.0, False), (1.0029, False), (1.004, True), (math.nan, True), (math.inf, True)],
)
def test_a_search_passes_only_if_finite_and_within_the_limit(value, failed):
    cell = bench_optima.CHECK[0]
    assert set(bench_optima.CHECK) <= set(bench_optima.known())
    row = {"cell": list(cell), "seed": 0, "rmse": value}
    best = {cell: (1.0, "")}
    assert bool(bench_optima.failures([row], best, bench_optima.LIMIT)) is failed
    assert bench_optima.failures([row], {}, bench_optima.LIMIT)  # nothing is known: no pass
