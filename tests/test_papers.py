"""The scripts of the papers' artifacts: every script imports, cheap ones make what is committed."""

import csv
import hashlib
import json
import re
from pathlib import Path

import all as scripts
import audit
import common
import fedavg
import manifest
import mean_estimation
import pytest
import user_level
from documentation import ROOT

from mfopt.experiments.cache import Cache

FOLDER = ROOT / "artifacts"
ARTIFACTS = {
    f"{artifact.folder}{name}": common.command(script.__file__, name, artifacts)
    for script, artifacts in scripts.SCRIPTS.items()
    for name, artifact in artifacts.items()
}


@pytest.fixture
def run(tmp_path):
    return common.Run(tmp_path / "artifacts", Cache(tmp_path / "cells"), jobs=1)


def test_the_manifest_has_every_file_its_digest_and_its_command():
    entries = manifest.read_manifest(FOLDER)
    listed = set()
    for name, entry in entries.items():
        # a table of the field may keep rows of an earlier one
        command = entry["command"].replace(" --keep", "")
        assert command == ARTIFACTS.get(name, command)
        assert entry["device"] and entry["version"]
        for path, digest in entry["files"].items():
            assert hashlib.sha256((FOLDER / path).read_bytes()).hexdigest() == digest, path
            listed.add(path)
    assert ARTIFACTS.keys() <= entries.keys()
    paths = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    present = {path.relative_to(FOLDER) for path in paths}
    remaining = {path.as_posix() for path in present if path.parts[0] != "papers"} - listed
    assert remaining == {"manifest.json", "README.md"}
    # light enough to be read, cloned and packed
    assert len(paths) <= 157 and sum(path.stat().st_size for path in paths) <= 6e6


def points(path):
    """The last number of each row of a figure or table, by what is before it."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    filled = [[cell for cell in row if cell] for row in rows]
    return {tuple(row[:-1]): float(row[-1]) for row in filled}


@pytest.mark.release
def test_a_figure_is_made_again_and_noted(run):
    figures = user_level.FIGURES, ["user-level-2a"]
    common.make(run, user_level.__file__, *figures)
    csv_path = Path("figures/user-level-2a.csv")
    assert points(run.folder / csv_path) == pytest.approx(points(FOLDER / csv_path), rel=1e-4)
    entry = manifest.read_manifest(run.folder)["user-level-2a"]
    assert entry["command"] == "python artifacts/papers/user_level.py user-level-2a"
    assert set(entry["files"]) == {f"figures/user-level-2a.{kind}" for kind in ("csv", "svg")}
    assert entry["seconds"] > 0 and entry["seed"] == 0


def test_the_models_of_table_2_have_the_printed_epsilon(run):
    (path,) = fedavg.FIGURES["fedavg-table-2"].make(run)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with (FOLDER / "figures" / path.name).open(encoding="utf-8", newline="") as file:
        committed = list(csv.DictReader(file))
    assert len(rows) == 6
    for row, committed_row in zip(rows, committed, strict=True):
        assert round(float(row["epsilon_moments"]), 3) == float(row["epsilon_printed"])
        assert float(row["epsilon_pld"]) < float(row["epsilon_moments"])
        assert float(row["epsilon_pld"]) == pytest.approx(
            float(committed_row["epsilon_pld"]), rel=1e-3
        )


def test_a_study_says_what_it_found(run, capsys):
    study = mean_estimation.MeanEstimation(
        users=16, examples=4, groups=(1, 4), dimension=4, steps=8, trials=4, epsilons=(1.0, 8.0),
        budgets=(8,), at_budget=8, withins=(1.0,), clips=(2.0,), lengths=(0.1,),
    )  # fmt: skip
    common.make(run, "x.py", common.studies("x.py", study), [study.name])
    kept = json.loads((run.folder / "studies" / "mean-estimation.json").read_text())
    assert kept["setting"]["epsilons"] == [1.0, 8.0] and kept["command"].endswith("papers/x.py")
    assert kept["findings"] and kept["findings"][0] in capsys.readouterr().out
    assert len(kept["rows"]) == 4 * 3 and set(common.PRIVACY) <= kept["rows"][0].keys()
    at_1, *_, at_8 = [row for row in kept["rows"] if row["panel"] == "ε"]
    assert at_1["noise_multiplier"] > at_8["noise_multiplier"] > 0


@pytest.mark.release
def test_faults_are_caught_and_a_whole_trainer_passes(run):
    study = audit.TrainerAudit(
        bins=2, epochs=1, epsilon=3.0, strategy="identity", canaries=1000,
        noise=(0.5, 1.0, 2.0), norms=(2.0,),
    )  # fmt: skip
    rows = study.rows(study.results(run))
    assert [row["passed"] for row in rows] == [False, True, False, False]
    half, whole, double, unclipped = rows
    assert half["epsilon_profile"] > 3.0 > whole["epsilon_profile"] > double["epsilon_profile"]
    assert unclipped["epsilon_profile"] > 3.0
    assert study.findings(rows) == [
        "3 of 3 faulty trainers fail their audit, 1 of 1 correct ones pass"
    ]


def test_what_the_pages_name_exists():
    """Each row of the pages of tables and figures names artifacts, and each figure has a row."""
    pages = sorted((ROOT / "docs" / "papers").glob("tables*.md"))
    rows = re.findall(
        r"\n\| ((?:Figure|Table|App|Alg)[^|]*) \|.*\| (.*) \|(.*)\|",
        "\n".join(page.read_text("utf-8") for page in pages),
    )
    page_names = {name for *_, names in rows for name in re.findall(r"`([a-z0-9-]+)`", names)}
    artifact_names = {name.removeprefix("studies/") for name in ARTIFACTS}
    assert len(rows) > 60 and page_names <= artifact_names
    figures = {name for script in scripts.FIGURES for name in script.FIGURES}
    assert {name for name in figures if not name.startswith("fresh-bins")} <= page_names
