"""Artifacts: the committed ones agree with their manifest, and a small one is rebuilt."""

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import failure
from mfopt_cli.main import main

import mfopt
from mfopt import _version
from mfopt.experiments import artifacts, manifest, runner, studies
from mfopt.experiments.accounts import AccountCell
from mfopt.experiments.cache import Cache, code_digest
from mfopt.experiments.mechanisms import FixedCell, Goal, SigmaCell
from mfopt.experiments.runner import first_cells, run_all
from mfopt.progress import Progress
from mfopt.sampling import Poisson

FOLDER = Path(__file__).parent.parent / "artifacts"
SMALL = "blt-4-8x32-eps2"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    cache = tmp_path_factory.mktemp("cells")
    main(f"figures --artifacts {folder} {SMALL} --cache {cache} --jobs 1 --quiet".split())
    return folder


def test_manifest_names_every_file_and_its_digest() -> None:
    manifest = artifacts.read_manifest(FOLDER)
    assert SMALL in manifest
    listed: set[str] = set()
    for name, entry in manifest.items():
        if name in artifacts.names():
            assert entry["command"] == artifacts.command(name)
        assert entry["command"].startswith("mfopt ")
        assert entry["device"] and entry["version"]
        assert entry["seconds"] is None or entry["seconds"] >= 0  # None: not noted
        for path, digest in entry["files"].items():
            assert hashlib.sha256((FOLDER / path).read_bytes()).hexdigest() == digest, path
            listed.add(path)
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    present = {path.relative_to(FOLDER).as_posix() for path in paths}
    assert present - listed == {"manifest.json", "README.md"}
    # light enough to be read, cloned and packed
    assert len(paths) <= 150 and sum(path.stat().st_size for path in paths) <= 6e6
    assert [path.name for path in paths if path.suffix == ".png"] == [
        "optimize-blt-16x128-eps2.png"
    ]


@pytest.mark.release
def test_every_stored_factorization_loads_and_is_certified() -> None:
    paths = sorted((FOLDER / "factorizations").glob("*.npz"))
    assert paths
    for path in paths:
        stored = mfopt.load(path)
        assert stored.guarantee.status == "certified"
        assert stored.guarantee.delta <= artifacts.DELTA
        assert np.all(np.asarray(stored.strategy.modes(stored.sampling)) >= 0)


@pytest.mark.release
def test_a_small_one_is_rebuilt_within_monte_carlo_error(rebuilt: Path) -> None:
    old = mfopt.load(FOLDER / "factorizations" / f"{SMALL}.npz")
    new = mfopt.load(rebuilt / "factorizations" / f"{SMALL}.npz")
    assert new.sampling == old.sampling and new.guarantee.epsilon == old.guarantee.epsilon
    # the same pinned seed: what differs is rounding that an optimizer may have amplified
    assert new.rmse == pytest.approx(old.rmse, rel=0.005)
    entry = json.loads((rebuilt / "manifest.json").read_text())[SMALL]
    (path,) = entry["files"]
    assert entry["files"][path] == hashlib.sha256((rebuilt / path).read_bytes()).hexdigest()
    # a control that must fail: another cell of the grid is nowhere near
    other = mfopt.load(next((FOLDER / "factorizations").glob("blt-4-8x32-eps8*.npz")))
    assert abs(other.rmse / new.rmse - 1) > 0.1


def test_a_note_names_the_commit_and_the_code(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.csv"
    file.write_text("x\n")

    def entry() -> dict:
        manifest.note(tmp_path, "a", [file], how="mfopt", seed=0, device=["CPU"], seconds=1.0)
        return artifacts.read_manifest(tmp_path)["a"]

    assert entry()["code"] == code_digest(training=True)
    # outside a repository no commit is known, and none is made up
    monkeypatch.setattr(_version, "__file__", str(tmp_path / "_version.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert entry()["commit"] is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    (tmp_path / "_version.py").write_text("")
    (tmp_path / ".gitignore").write_text("a.csv\nmanifest.json\n")
    git("init", "-q")
    assert entry()["commit"] is None  # a file that the repository does not track
    git("add", "_version.py", ".gitignore")
    git("commit", "-q", "-m", "first")
    assert entry()["commit"] == git("rev-parse", "HEAD")
    (tmp_path / "_version.py").write_text("1\n")
    assert entry()["commit"].endswith("+changes")


def test_files_that_are_made_no_more_are_taken_away(tmp_path) -> None:
    folder, outside = tmp_path / "artifacts", tmp_path / "outside.csv"
    folder.mkdir()
    old, new = folder / "a.png", folder / "a.svg"
    for path in (old, new, outside):
        path.write_text("x\n")
    how = {"how": "mfopt", "seed": 0, "device": ["CPU"], "seconds": 1.0}
    manifest.note(folder, "a", [old], **how)
    entries = artifacts.read_manifest(folder)
    entries["a"]["files"]["../outside.csv"] = ""  # what a manifest says of other folders is left
    (folder / manifest.MANIFEST).write_text(json.dumps(entries))
    manifest.note(folder, "a", [new], **how)
    assert new.exists() and not old.exists() and outside.exists()
    assert list(artifacts.read_manifest(folder)["a"]["files"]) == ["a.svg"]


def test_a_figure_that_is_printed_twice_is_kept_once() -> None:
    from mfopt_cli.commands.figures import _artifacts

    assert _artifacts("near-exact-18") == ["near-exact-3a"]
    assert not {"near-exact-18", "near-exact-19"} & {*artifacts.names(), *_artifacts("near-exact")}
    assert _artifacts("toeplitz-8x32-eps1") == ["toeplitz-8x32-eps1"]  # made where it is asked for
    assert "toeplitz-8x32-eps1" not in _artifacts("all")


def test_unknown_artifact_is_refused(tmp_path, capsys) -> None:
    words = f"figures --artifacts {tmp_path / 'a'} blt-4-9x9-eps1 --cache {tmp_path / 'c'}"
    assert "is not known" in failure(capsys, *words.split())
    assert not (tmp_path / "a").exists()


def test_what_work_wants_first_is_known_before_anything_runs(tmp_path) -> None:
    cache, account = Cache(tmp_path), AccountCell(Poisson(0.1, 10), epsilon=1.0, delta=1e-5)

    def work() -> None:
        run_all([account], cache)
        raise AssertionError("ran on")

    assert first_cells(work) == [account] and not cache.has(account)
    assert first_cells(lambda: None) == []
    assert run_all([account], cache, jobs=1)[account].record  # asked no more


@pytest.mark.ci
def test_several_are_made_of_cells_of_one_pool(tmp_path) -> None:
    events: list[Progress] = []
    names = ["user-level-2a", "fedavg-table-2"]
    written = artifacts.rebuild(
        names, tmp_path / "new", Cache(tmp_path / "cells"), jobs=1, progress=events.append
    )
    assert {path.stem for path in written} == set(names)
    begun = [event.total for event in events if event.unit == "cells" and event.done == 0]
    assert begun == [24, 0, 0]  # then nothing is left
    cells = Cache(tmp_path / "cells")
    again = artifacts.rebuild(names, tmp_path / "two", cells, jobs=2)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    assert artifacts.read_manifest(tmp_path / "two") == artifacts.read_manifest(tmp_path / "new")


def test_every_cell_of_the_grid_has_a_name() -> None:
    names = artifacts.names()
    assert len(names) == len(set(names))
    assert set(artifacts.READ) < set(artifacts.FACTORIZATIONS) and set(artifacts.READ) < set(names)
    assert len(artifacts.FACTORIZATIONS) == 9 * 6 * 4
    # one command makes all of them, the studies too
    assert {f"studies/{name}" for name in studies.STUDIES} < set(names)
    assert artifacts.command("studies/lora") == "mfopt experiment lora --artifacts artifacts"


def test_an_artifacts_seconds_count_what_its_cells_are_made_from() -> None:
    source = FixedCell("identity")
    cells = [SigmaCell(source, Goal(4, 2, epsilon, 1e-3)) for epsilon in (1.0, 2.0)]
    assert runner.with_needs(cells) == [source, *cells]
