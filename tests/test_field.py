"""The table of the field: its page, and what a row says."""

import csv
from pathlib import Path

import field
from mfopt_cli.commands import optimize

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
    again = [{name: str(value) for name, value in row.items()} for row in field.best(rows)]
    assert again == table
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
