"""What a new user meets first: messages that name what was typed, honest progress, kept folders."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from mfopt_cli import live, mechanisms, options
from mfopt_cli.main import cli

import mfopt
from mfopt._runtime import _files, _notes
from mfopt._version import ADVISED
from mfopt.experiments import cache
from mfopt.experiments.mechanisms import FixedCell, Goal, SigmaCell
from mfopt.progress import Progress

ROOT = Path(__file__).parent.parent


def test_too_many_bands_for_fresh_bins_are_named():
    words = "optimize --epochs 2 --iters 8 --eps 2 --sampling fresh-bins --bands 99 --out x.npz"
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2
    said = str(done.output)
    assert "--bands 99" in said and "at most 8" in said and "not banded" not in said


def test_an_estimate_that_was_wrong_by_a_factor_of_two_is_withdrawn():
    shown = live.Live(True)
    now = time.perf_counter()
    shown._event = Progress("reading", 2, 4, "files")
    shown._pace.note(now - 20.0, 1)
    shown._pace.note(now - 10.0, 2)
    shown._begun = now - 20.0
    shown._told = now - 10.0
    assert shown._left(now - 5.0).startswith("about")  # 15 s, of 30 in all
    assert shown._left(now + 10.1) == ""  # over, however long the last piece takes
    shown._event = Progress("reading", 2, 40, "files")  # 38 times 10 s: far beyond
    assert shown._left(now) == ""
    shown.close()


def test_a_line_of_progress_says_what_is_computed_without_internal_keys():
    cell = SigmaCell(FixedCell("identity"), Goal(8, 2, 1.0, 1e-5))
    assert cell.in_words() == "σ: identity, 2 × 8, ε = 1.0"
    assert "{" in str(cell)  # the control: the name that a cell had


def test_show_warns_of_a_file_that_an_affected_version_made(tmp_path):
    made = mfopt.factorize(epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity")
    assert mechanisms.advisory(made) is None
    # the same statement, not proved on this machine
    other = dataclasses.replace(made.guarantee, privacy_unit="house")
    for version, warned in ((ADVISED[0], True), (mfopt.__version__, False), (None, True)):
        record = {} if version is None else {"mfopt": version}
        file = dataclasses.replace(made, guarantee=other, provenance=record)
        path = file.save(tmp_path / f"{version}.npz")
        done = CliRunner().invoke(cli, ["show", str(path)])
        assert done.exit_code == 0 and ("advisories" in done.output) == warned, version
    assert mfopt.__version__ not in ADVISED
    page = (ROOT / "docs" / "advisories.md").read_text()
    assert set(re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.M)) == set(ADVISED)


def test_completion_offers_values_of_options():
    kinds = options.StrategyName().shell_complete(None, None, "ban")
    assert [one.value for one in kinds] == ["banded-toeplitz", "banded", *_BANDED]
    words = options.Words(("png", "svg", "pdf"), several=True)
    assert [one.value for one in words.shell_complete(None, None, "png,s")] == ["png,svg"]


_BANDED = ["banded-sqrt", "banded-inverse-sqrt"]


def test_cache_shows_and_clears_only_what_mfopt_made(tmp_path, monkeypatch):
    monkeypatch.setenv("MFOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("MFOPT_COMPILED", str(tmp_path / "programs"))
    monkeypatch.setenv("MFOPT_DATA", str(tmp_path / "notes"))
    mine = tmp_path / "mechanism.npz"
    cell = tmp_path / f"sigma-{'0' * 40}.npz"
    mine.touch()
    cell.write_bytes(b"123")
    assert _notes.write("a" * 64, {})
    found = json.loads(CliRunner().invoke(cli, ["cache", "--json"]).stdout)["folders"]
    assert [(one["files"], one["bytes"]) for one in found[1:2]] == [(1, 3)]
    assert CliRunner().invoke(cli, ["cache", "--clear"]).exit_code == 0
    assert mine.exists() and not cell.exists() and _notes.read("a" * 64) is not None
    assert CliRunner().invoke(cli, ["cache", "--proofs"]).exit_code == 2
    assert CliRunner().invoke(cli, ["cache", "--clear", "--proofs"]).exit_code == 0
    assert mine.exists() and _notes.read("a" * 64) is None


def test_kept_folders_are_bounded(tmp_path):
    for number in range(4):
        path = tmp_path / f"{number}-{'0' * 40}.npz"
        path.write_bytes(b"x" * 10)
        _set_age(path, 100 - number)
    _files.trim(tmp_path, cache.FILES, 25)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["2", "3"]  # the newest


def _set_age(path, seconds):
    import os

    os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("suffix", ["", ".csv"])
def test_compare_writes_the_file_that_is_named(tmp_path, suffix):
    words = "compare --epochs 2 --iters 4 --eps 2 --include dpsgd --quiet --cache"
    out = ["--out", str(tmp_path / f"x{suffix}")]
    done = CliRunner().invoke(cli, [*words.split(), str(tmp_path / "cells"), *out])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.csv").is_file() and not (tmp_path / "x.csv.csv").exists()
