"""What a new user meets first: messages that name what was typed, honest progress, kept folders."""

import dataclasses
import os
import re
import time
import tomllib

import click
from commands import invoked, printed
from mfopt_cli import mechanisms
from mfopt_cli.commands import train
from sources import ROOT

import mfopt
from mfopt._runtime import _files, _notes
from mfopt._version import ADVISED
from mfopt.experiments import cache


def test_help_of_train_shows_what_it_does_without_a_file():
    tables = tomllib.loads(invoked("train", "--show-config").stdout)
    does = {name: value for table in tables.values() for name, value in table.items()}
    context = click.Context(train.command)
    shown = {param.name: param.help for param in train.command.get_params(context)[1:]}
    for name in does.keys() - {"factorization", "model", "seed"}:
        assert re.search(r"\[([^];]*)(; with a file [^]]*)?\]$", shown[name])[1] == str(does[name])


def test_show_warns_of_a_file_that_an_affected_version_made(tmp_path):
    factorization = mfopt.factorize(
        epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity"
    )
    assert mechanisms.advisory(factorization) is None
    # the same statement, not proved on this machine
    other = dataclasses.replace(factorization.guarantee, privacy_unit="house")
    for version, warned in ((ADVISED[0], True), (mfopt.__version__, False), (None, False)):
        record = {} if version is None else {"mfopt": version}
        file = dataclasses.replace(factorization, guarantee=other, provenance=record)
        path = file.save(tmp_path / f"{version}.npz")
        done = invoked("show", path)
        assert done.exit_code == 0 and ("Advisories" in done.output) == warned, version
    assert mfopt.__version__ not in ADVISED
    page = (ROOT / "docs" / "advisories.md").read_text()
    assert set(re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.M)) == set(ADVISED)


def test_cache_shows_and_clears_only_what_mfopt_made(tmp_path, monkeypatch):
    for kept, folder in {"CACHE": "", "COMPILED": "programs", "DATA": "notes"}.items():
        monkeypatch.setenv(f"MFOPT_{kept}", str(tmp_path / folder))
    mine = tmp_path / "mechanism.npz"
    cell = tmp_path / f"sigma-{'0' * 40}.npz"
    mine.touch()
    cell.write_bytes(b"123")
    assert _notes.write("a" * 64, {})
    folders = printed("cache")["folders"]
    assert [(cached["files"], cached["bytes"]) for cached in folders[1:2]] == [(1, 3)]
    assert invoked("cache", "--clear").exit_code == 0
    assert mine.exists() and not cell.exists() and _notes.read("a" * 64) is not None
    assert invoked("cache", "--proofs").exit_code == 2
    assert invoked("cache", "--clear", "--proofs").exit_code == 0
    assert mine.exists() and _notes.read("a" * 64) is None


def test_kept_folders_are_bounded(tmp_path):
    for number in range(4):
        path = tmp_path / f"{number}-{'0' * 40}.npz"
        path.write_bytes(b"x" * 10)
        os.utime(path, (time.time() - 100 + number,) * 2)
    _files.trim(tmp_path, cache.FILES, 25)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["2", "3"]  # the newest
