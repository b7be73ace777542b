"""Committed tables say what today's code produces: one cell of each is made again."""

import csv
import math
import sys
from pathlib import Path

import pytest

from mfopt import workloads
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.optimize import kinds, memory, optimize
from mfopt.sampling import BallsInBins, FreshBins

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
LIMIT = 0.003  # of RMSE; two estimates of σ on 2^15 samples differ by 0.1%

pytestmark = pytest.mark.ci


def made(scheme, epsilon, kind, *, scaled=True, **sizes):
    """Estimated RMSE of a fresh search."""
    scaled = scaled and kinds.find(kind).scalable
    found = optimize(scheme, epsilon, 1e-5, strategy=kind, time_scale=scaled, seed=0, **sizes)
    return memory.scored(found, scheme, epsilon, 1e-5, workloads.PrefixSums()).rmse


def stored(table, **wanted):
    """The one row of a committed table with these values."""
    with (ROOT / "artifacts" / "tables" / table).open(newline="") as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if all(row[name] == str(value) for name, value in wanted.items())
        ]
    return float(row["rmse"])


@pytest.mark.parametrize(
    ("table", "row", "scheme", "kind", "sizes"),
    [
        (
            "grid.csv",
            {"kind": "blt-4-scaled", "epochs": 8, "bins": 32, "epsilon": 2},
            BallsInBins(bins=32, epochs=8),
            "blt",
            {},
        ),
        (
            "strategies-8x32.csv",
            {"family": "blt-4", "epsilon": 2.0},
            BallsInBins(bins=32, epochs=8),
            "blt",
            {"scaled": False},
        ),
        (
            "strategies-32x32.csv",
            {"family": "blt-4-scaled", "epsilon": 0.5},
            BallsInBins(bins=32, epochs=32),
            "blt",
            {},
        ),
        (
            "strategies-16x128.csv",
            {"family": "blt-4-scaled", "epsilon": 2.0},
            BallsInBins(bins=128, epochs=16),
            "blt",
            {},
        ),
        (
            "comparison-16x128.csv",
            {"family": "blt-4-scaled", "epsilon": 0.5},
            BallsInBins(bins=128, epochs=16),
            "blt",
            {},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".csv") else "",
)
def test_a_cell_of_each_table_is_found_again(table, row, scheme, kind, sizes):
    wanted = stored(table, **row)
    found = made(scheme, row["epsilon"], kind, **sizes)
    assert found == pytest.approx(wanted, rel=LIMIT)


def test_a_closed_form_of_the_comparison_is_found_again():
    scheme = FreshBins(bins=128, epochs=16)
    wanted = stored("comparison-16x128.csv", family="dpsgd+fresh-bins", epsilon=2.0)
    loss = law(scheme).loss(kinds.fixed("identity"))
    sigma = loss.free_bounds()[0].noise_multiplier(2.0, 1e-5)
    rmse = sigma * math.sqrt((scheme.iterations + 1) / 2)
    assert rmse == pytest.approx(wanted, rel=LIMIT)


@pytest.mark.parametrize(
    ("value", "failed"),
    [(1.0, False), (1.0029, False), (1.004, True), (math.nan, True), (math.inf, True)],
)
def test_a_search_passes_only_if_finite_and_within_the_limit(value, failed):
    import bench_optima

    cell = bench_optima.CHECK[0]
    row = {"cell": list(cell), "seed": 0, "rmse": value}
    best = {cell: (1.0, "")}
    assert bool(bench_optima.failures([row], best, bench_optima.LIMIT)) is failed
    assert bench_optima.failures([row], {}, bench_optima.LIMIT)  # nothing is known: no pass


def test_searches_end_where_the_best_known_ones_did():
    """A few cells of the bench of optima, whose table is not empty."""
    import bench_optima

    best = bench_optima.known()
    assert set(bench_optima.CHECK) <= set(best)
    for cell in bench_optima.CHECK[1:4]:
        value, _ = bench_optima.rmse(cell, seed=1)
        assert value < best[cell][0] * (1 + bench_optima.LIMIT / 100), cell
    # a control: without time scaling C is far above
    cell = bench_optima.CHECK[2]
    scheme = BallsInBins(bins=cell.iters, epochs=cell.epochs)
    assert made(scheme, cell.epsilon, "blt", scaled=False) > best[cell][0] * 1.02
