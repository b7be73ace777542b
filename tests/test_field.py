"""The table of the field: its page, and what a row says."""

import csv
import itertools
import math
from pathlib import Path

import field
import jax
import numpy as np
import pytest
from mfopt_cli.commands import optimize

from mfopt._runtime import _float64
from mfopt.accounting.monte_carlo import band
from mfopt.strategies import BandedToeplitz

ROOT = Path(__file__).parents[1]
ARTIFACTS = ROOT / "artifacts"


def test_the_page_has_the_tables(tmp_path: Path) -> None:
    page = (ROOT / "docs/benchmarks/field.md").read_text("utf-8")
    assert field.with_tables(page, ARTIFACTS) == page
    # a control: another number changes the page
    name = "tables/field-16x128.csv"
    (tmp_path / "tables").mkdir()
    changed = (ARTIFACTS / name).read_text("utf-8").replace(",31.947", ",32.947")
    (tmp_path / name).write_text(changed, "utf-8")
    assert "| 32.95 |" in field.with_tables(page, tmp_path)


def test_the_table_has_the_best_of_every_size() -> None:
    with (ARTIFACTS / "tables/field-sizes-16x128.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in ("rmse", "final_model_error"):
            row[name] = float(row[name]) if row[name] else ""  # type: ignore[assignment]
    with (ARTIFACTS / "tables/field-16x128.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    repeated = [{name: str(value) for name, value in row.items()} for row in field.best(rows)]
    assert repeated == table
    # an error of the final model that is known for a part of the sizes is not the best
    (banded,) = [x for x in rows if (x["form"], x["epsilon"], x["size"]) == ("bifr", "2.0", "8")]
    banded["final_model_error"] = ""
    (row,) = [x for x in field.best(rows) if (x["family"], x["epsilon"]) == ("bifr", "2.0")]
    assert row["final_model_error"] == "" != row["rmse"]


def test_the_best_published_rmse_that_optimize_prints_is_that_of_the_table() -> None:
    with (ARTIFACTS / "tables/field-16x128.csv").open(encoding="utf-8") as file:
        peers = [
            row for row in csv.DictReader(file) if row["origin"] == "published" and row["rmse"]
        ]
    assert {float(row["epsilon"]) for row in peers} == {*optimize._PUBLISHED}
    for epsilon, (rmse, name) in optimize._PUBLISHED.items():
        rows = [row for row in peers if float(row["epsilon"]) == epsilon]
        best = min(rows, key=lambda row: float(row["rmse"]))
        assert name.startswith(best["mechanism"]) and f"{float(best['rmse']):.2f}" == f"{rmse:.2f}"


def test_the_likelihood_of_a_random_partition_is_that_of_its_patterns() -> None:
    bins, n, sigma = 4, 4, 1.3
    strategy = BandedToeplitz(np.array([1.0, 0.6]))
    columns = np.asarray(strategy.banded_columns(n, 2))
    matrix = np.asarray(strategy.materialize(n)) / sigma
    with _float64.scope():
        patterns = field.RandomPartition(columns, band.gram(columns), bins).scaled(sigma)
        sample = np.random.default_rng(0).standard_normal((3, n))
        log_ratio = np.asarray(patterns.log_ratio(patterns.noise(sample)))
        drawn = np.asarray(patterns.first(jax.random.key(0), 64), float)
        products = np.asarray(patterns.products(drawn))
    chance, expected = 2 / bins, np.zeros(3)
    for group, *takes in itertools.product((0, 1), repeat=3):
        pattern = np.zeros(n)
        pattern[group::2] = takes
        mode = matrix @ pattern
        law = math.prod(chance if take else 1 - chance for take in takes) / 2
        expected += law * np.exp(sample @ mode - mode @ mode / 2)
    assert np.exp(log_ratio) == pytest.approx(expected)
    assert products == pytest.approx(drawn @ matrix.T @ matrix, abs=1e-12)
    # a unit is in one group for the whole run
    assert not np.any(drawn[:, ::2].any(axis=1) & drawn[:, 1::2].any(axis=1))
