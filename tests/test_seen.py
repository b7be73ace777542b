"""A file that was shown is shown again at once, and never says what is not in it."""

import json
import subprocess
import sys

import pytest
from mfopt_cli import seen

from mfopt import _notes, sampling, strategies
from mfopt.errors import FailureError
from mfopt.factorization import load, proofs
from mfopt.optimize import factorize

SHOW = """
import sys
from mfopt_cli.main import main
main(["show", sys.argv[1], *sys.argv[2:]])
print("jax" in sys.modules, file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MFOPT_DATA", str(tmp_path / "notes"))
    monkeypatch.setattr(seen, "_lasting", lambda: True)  # tests define kinds of their own


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("seen") / "one.npz"
    made = factorize(sampling.BallsInBins(bins=4, epochs=2), 2.0, 1e-3, strategy="identity")
    return made.save(path).read_bytes()


@pytest.fixture
def file(content, tmp_path):
    path = tmp_path / "one.npz"
    path.write_bytes(content)
    return path


def _shown(*arguments):
    found = subprocess.run(
        [sys.executable, "-c", SHOW, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout, found.stderr.strip()


def test_the_second_time_needs_no_jax_and_says_the_same(file):
    first, with_jax = _shown(file)
    assert with_jax == "True" and "noise multiplier" in first
    assert _shown(file) == (first, "False")
    printed, with_jax = _shown(file, "--json")
    assert with_jax == "False" and json.loads(printed)["digest"] == load(file).digest


def test_a_proof_made_later_is_seen(file):
    assert seen.view(file)["summary"]["proved_here"] is False
    proofs.note(load(file))
    assert seen.view(file)["summary"]["proved_here"] is True


def test_a_changed_file_is_checked_again(file):
    seen.view(file)
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(FailureError, match="cannot load"):
        seen.view(file)


@pytest.mark.parametrize("edit", ["figure", "version"])
def test_an_edited_note_and_another_versions_are_not_believed(file, edit, monkeypatch):
    true = seen.view(file)
    (place,) = (p for p in _notes.folder().glob("*.json") if "view" in json.loads(p.read_text()))
    note = json.loads(place.read_text())
    note["view"]["summary"]["epsilon"] = 0.1
    if edit == "figure":
        place.write_text(json.dumps(note))
    else:  # authentic, but of another version
        _notes.write(place.stem, {"view": note["view"]})
        assert seen.view(file)["summary"]["epsilon"] == 0.1  # the control: it would be believed
        monkeypatch.setattr(seen, "__version__", "another")
    assert seen.view(file) == true


def test_writing_a_file_notes_what_it_says(file, tmp_path, monkeypatch):
    path = tmp_path / "two.npz"
    seen.keep(load(file), path, force=False)
    monkeypatch.setattr(seen, "_view", None)  # nothing is computed again
    assert seen.view(path)["summary"]["noise_multiplier"] == load(file).noise_multiplier


def test_a_kind_of_the_users_own_is_read_each_time(file, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("MFOPT_DATA", str(file.parent / "none"))
    foreign = type("Foreign", (), {"__module__": "somebody"})
    monkeypatch.setattr(strategies, "registered", lambda: {"foreign": foreign})
    seen.view(file)
    assert not _notes.folder().exists()
