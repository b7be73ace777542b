"""The table of the field: its page, and what a row says."""

import itertools
import re
import shutil

import field
import numpy as np
import pytest
from mfopt_cli.commands import optimize
from sources import ROOT

from mfopt.experiments import families
from mfopt.experiments.families import Comparison

ARTIFACTS = ROOT / "artifacts"
FLOOR = "floor_at_epoch_ends"
FULL = 0.003  # relative, of what a full tuning may find below a row


def stored(name):
    return field.stored(ARTIFACTS, name)


def tuned_rows(shape):
    """The errors of each family that has sizes to choose from, by size."""
    rows = stored(field.stem(*shape).replace("field", "field-sizes"))
    for name, epsilon, error in itertools.product(field.TUNED, field.EPSILONS, field.ERRORS):
        tried = {
            field.size_of(row): float(row[error])
            for row in rows
            if row["family"] == name and float(row["epsilon"]) == epsilon
        }
        yield (field.stem(*shape), name, epsilon, error), tried


def test_the_page_has_the_tables(tmp_path):
    page = (ROOT / "docs/benchmarks/field.md").read_text("utf-8")
    assert field.with_tables(page, ARTIFACTS) == page
    # a control: another number changes the page
    name = "tables/field-16x128.csv"
    shutil.copytree(ARTIFACTS / "tables", tmp_path / "tables")
    changed = (ARTIFACTS / name).read_text("utf-8").replace(",31.947", ",32.947")
    (tmp_path / name).write_text(changed, "utf-8")
    assert "| 32.95 |" in field.with_tables(page, tmp_path)


@pytest.mark.parametrize("shape", field.SHAPES, ids=str)
def test_the_table_has_the_best_of_every_size(shape):
    table = field.stem(*shape)
    rows = field.best(stored(table.replace("field", "field-sizes")))
    for row, kept in zip(rows, stored(table), strict=True):
        assert row.keys() == kept.keys()
        # the floor is computed anew
        exact = {name: str(value) for name, value in row.items() if name != FLOOR}
        assert exact == {name: text for name, text in kept.items() if name != FLOOR}
        floors = [float(value or "nan") for value in (row[FLOOR], kept[FLOOR])]
        assert floors[0] == pytest.approx(floors[1], rel=1e-12, nan_ok=True)


def beside(tried, name, shape):
    """Neighbours of the best size that were not run."""
    setting, best = (
        Comparison(shape[1], shape[0], field.EPSILONS),
        min(tried, key=tried.__getitem__),
    )
    sizes = field.neighbours(best, field.ladders(name, *shape))
    return {s for s in sizes if s not in tried and field.cell(name, s, setting, 2.0) is not None}


@pytest.mark.parametrize("shape", field.SHAPES, ids=str)
def test_no_best_size_is_at_an_end_of_what_was_run(shape):
    for index, tried in tuned_rows(shape):
        name, best = index[1], min(tried, key=tried.__getitem__)
        axes = field.ladders(name, *shape)
        # a lower end is that of the mechanism: one band is DP-SGD, fewer groups than bands are
        # none; so are a sampling rate of 1, which is no amplification, and one group fewer than
        # an epoch has steps, as many being balls-in-bins
        is_last = best[0] == axes[0][-1] and not name.endswith(("+poisson", "-partition"))
        assert not is_last and not beside(tried, name, shape), index
    # a control: without one of its neighbours a best size may be at an end
    tried = {size: error for size, error in tried.items() if size == best}
    assert beside(tried, name, shape)


def parabolas(tried, name, shape):
    """Part by which the least of a parabola in log size, on each axis, is below the best."""
    best, below = min(tried, key=tried.__getitem__), 0.0
    for axis, ladder in enumerate(field.ladders(name, *shape)):
        index = ladder.index(best[axis])
        values = ladder[max(index - 1, 0) : index + 2]
        around = [(*best[:axis], value, *best[axis + 1 :]) for value in values]
        if len(around) == 3 and all(size in tried for size in around):
            errors = np.log([tried[size] / tried[best] for size in around])
            a, b, c = np.polyfit(np.log(values), errors, 2)
            below += b * b / (4 * a) - c
    return below


@pytest.mark.parametrize("shape", field.SHAPES, ids=str)
def test_a_finer_grid_would_lower_no_row_by_much(shape):
    gains = {index: parabolas(tried, index[1], shape) for index, tried in tuned_rows(shape)}
    assert max(gains.values()) <= FULL, gains
    # a control: errors of which a size between would have far less
    sizes = [(value,) for value in field.ladders("bifr", *shape)[0][:3]]
    assert parabolas(dict(zip(sizes, (1.08, 1.0, 1.001), strict=True)), "bifr", shape) > FULL


def test_the_gain_by_fresh_bins_that_optimize_prints_is_that_of_the_table():
    rmse = {
        (row["mechanism"], float(row["epsilon"])): float(row["rmse"])
        for row in stored("field-16x128")
        if row["mechanism"] in (field.MFOPT_DEFAULT, field.MFOPT_FRESH_DEFAULT)
    }
    ratios = {
        epsilon: rmse[field.MFOPT_FRESH_DEFAULT, epsilon] / rmse[field.MFOPT_DEFAULT, epsilon]
        for epsilon in field.EPSILONS
    }
    assert dict(optimize._FRESH_BINS) == {e: pytest.approx(r, abs=6e-4) for e, r in ratios.items()}


def test_compare_has_the_tuned_sizes_of_b_min_sep():
    sizes = [
        (float(row["epsilon"]), *map(int, re.findall(r"\d+", row["final_model_size"])))
        for row in stored("field-16x128")
        if row["family"] == field.B_MIN_SEP_FAMILY
    ]
    assert sizes[::-1] == [*families.B_MIN_SEP_TUNED]
    (_, bands, separation), at_2 = sizes[2], sizes[1][1:]
    assert families.tuned_b_min_sep(64, 2.0) == tuple(size // 2 for size in at_2)
    # the larger of two ε that are as near
    ((width, cell),) = families.find(field.B_MIN_SEP_FAMILY).candidates(
        Comparison(32, 8, (4.0,)), 4.0
    )
    assert (width, cell.goal.separation) == (bands // 4, separation // 4)
