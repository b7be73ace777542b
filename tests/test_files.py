"""The one writer: whole or not at all, told when the name is taken, rubbish of killed runs gone."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mfopt._runtime import _files
from mfopt.errors import FailureError, UsageError


def names(folder):
    return sorted(os.listdir(folder))


def test_contents_come_back(tmp_path):
    for content, expected in [
        (b"\x00\xff", b"\x00\xff"),
        ("ε\n", "ε\n".encode()),
        ({"b": [], "a": 1}, b'{\n  "a": 1,\n  "b": []\n}\n'),
        (lambda stream: stream.write(b"by stream"), b"by stream"),
        (lambda stream: Path(stream.name).write_bytes(b"by path"), b"by path"),
    ]:
        assert _files.write(tmp_path / "one", content).read_bytes() == expected
        assert names(tmp_path) == ["one"]


def test_an_existing_file_is_left_alone_without_force(tmp_path):
    path = _files.write(tmp_path / "one", "old")
    with pytest.raises(FileExistsError):
        _files.write(path, "new", force=False)
    assert path.read_text() == "old" and names(tmp_path) == ["one"]
    _files.write(path, "new", force=True)
    assert path.read_text() == "new"


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_many_savers_one_wins_and_the_others_are_told(tmp_path, links, monkeypatch):
    if not links:

        def refuse(*_):
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    outcomes = []
    ready = threading.Barrier(8)

    def save(number):
        def content(stream):
            stream.write(str(number).encode())
            ready.wait()  # all have begun before any is placed

        try:
            _files.write(tmp_path / "one", content, force=False)
            outcomes.append(f"{number} won")
        except FileExistsError:
            outcomes.append("told")

    threads = [threading.Thread(target=save, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("told") == 7
    assert f"{(tmp_path / 'one').read_text()} won" in outcomes
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes(tmp_path, umask):
    old = os.umask(umask)
    try:
        plain = _files.write(tmp_path / "plain", "")
        secret = _files.write(
            tmp_path / "secret",
            lambda stream: stream.write(
                oct(stat.S_IMODE(os.fstat(stream.fileno()).st_mode)).encode()
            ),
            private=True,
        )
    finally:
        os.umask(old)
    assert stat.S_IMODE(plain.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_text() == "0o600"  # while it was written, too


@pytest.mark.parametrize("label", ["content", "check", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_rubbish(tmp_path, label, monkeypatch):
    path = _files.write(tmp_path / "one", "old")

    def broken(*_):
        raise OSError(errno.ENOSPC, "disk full")

    if label in ("fsync", "replace"):
        monkeypatch.setattr(os, label, broken)
    with pytest.raises(OSError, match="disk full"):
        _files.write(
            path,
            broken if label == "content" else "new",
            check=broken if label == "check" else None,
        )
    assert path.read_text() == "old" and names(tmp_path) == ["one"]


def test_pickles_are_not_written():
    with pytest.raises(TypeError, match="objects"):
        _files.npz({"a": np.array([{}], object)})


def test_npz_holds_what_was_given_and_nothing_else(tmp_path):
    # numpy before 2.2 stored savez's keyword allow_pickle as one more array
    for compress in (False, True):
        path = _files.write(tmp_path / "a.npz", _files.npz({"a": np.arange(3)}, compress=compress))
        with np.load(path, allow_pickle=False) as archive:
            assert archive.files == ["a"]
            np.testing.assert_array_equal(archive["a"], np.arange(3))


def test_a_damaged_zip_is_not_saved(tmp_path):
    def content(stream):
        _files.npz({"a": np.arange(100)})(stream)
        stream.seek(300)
        stream.write(b"damage")

    with pytest.raises(OSError, match="does not read"):
        _files.write(tmp_path / "a.npz", content, check=_files.check_zip)
    assert names(tmp_path) == []


# --- what killed runs leave -----------------------------------------------------------------------

WRITER = """
import sys, time
from mfopt._runtime import _files
def content(stream):
    stream.write(b"half")
    stream.flush()
    print("writing", flush=True)
    time.sleep(60)
_files.write(sys.argv[1], content)
"""


def start_writer(path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    return process


def age(folder, seconds=3600):
    for entry in folder.iterdir():
        os.utime(entry, (time.time() - seconds,) * 2)


def test_a_killed_writer_leaves_nothing_that_the_next_start_does_not_sweep(tmp_path):
    process = start_writer(tmp_path / "one")
    (part,) = tmp_path.iterdir()
    age(tmp_path)
    _files.sweep(tmp_path)  # alive: its file stays, however old it looks
    assert list(tmp_path.iterdir()) == [part]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.iterdir()) == [part]
    age(tmp_path)
    _files.check_output(tmp_path / "one", force=False)
    assert list(tmp_path.iterdir()) == []


def test_sweep_takes_nothing_else(tmp_path):
    (tmp_path / ".one.0123456789ab.mfopt-part").write_text("young")
    kept = [".one.mfopt-part", "one.0123456789ab.mfopt-part", ".one.0123456789ab.mfopt-part.txt"]
    for name in kept:
        (tmp_path / name).write_text("")
    _files.sweep(tmp_path)
    assert ".one.0123456789ab.mfopt-part" in names(tmp_path)
    age(tmp_path)
    target = tmp_path / "target"
    target.write_text("not ours")
    (tmp_path / ".link.0123456789ab.mfopt-part").symlink_to(target)
    _files.sweep(tmp_path)
    assert names(tmp_path) == sorted([*kept, "target", ".link.0123456789ab.mfopt-part"])


# --- a finished result finds a place --------------------------------------------------------------


def saver(content="result"):
    return lambda path, force: _files.write(path, content, force=force)


def test_a_result_is_kept_beside_a_file_that_appeared(tmp_path):
    required = tmp_path / "one.npz"
    assert _files.write_beside(required, saver("first"), force=False) == required
    assert _files.write_beside(required, saver("second"), force=False) == tmp_path / "one-2.npz"
    assert _files.write_beside(required, saver("third"), force=False) == tmp_path / "one-3.npz"
    assert [(tmp_path / name).read_text() for name in names(tmp_path)] == [
        "second",
        "third",
        "first",
    ]


def test_a_result_is_kept_elsewhere_where_the_folder_is_gone(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    actual = _files.write_beside(tmp_path / "gone" / "one.npz", saver(), force=True)
    assert actual.resolve() == work / "one-2.npz" and actual.read_text() == "result"


def test_a_result_outlives_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    actual = _files.write_beside(Path("one.npz"), saver(), force=False)
    assert actual == tmp_path / "home" / "one-2.npz" and actual.read_text() == "result"
    monkeypatch.chdir(tmp_path)  # pytest's own goes back from a folder that is there


def test_a_result_that_fits_nowhere_says_why(tmp_path):
    def full(path, force):
        raise OSError(errno.ENOSPC, "disk full", str(path))

    with pytest.raises(FailureError, match=r"written nowhere.*disk full"):
        _files.write_beside(tmp_path / "one.npz", full, force=False)


# --- checks before the work -----------------------------------------------------------------------


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "taken").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for path, rule in [
        ("taken", "exists"),
        ("folder", "is a directory"),
        ("dangling", "exists"),
        ("missing/one", "does not exist"),
        ("taken/one", "does not exist"),
        ("one.txt", "must end"),
        ("/proc/one", "cannot be written"),  # where nobody may make a file
    ]:
        suffixes = (".npz",) if rule == "must end" else ()
        with pytest.raises(UsageError, match=rule):
            _files.check_output(tmp_path / path, force=False, suffixes=suffixes)
    with pytest.raises(UsageError, match=r"out = .*not the name of a file"):
        _files.check_output(".", force=False, name="out")
    for bad in ("", None, 3, b"one"):
        with pytest.raises(UsageError, match=r"out = .*path"):
            _files.check_output(bad, force=False, name="out")
    assert _files.check_output(tmp_path / "taken", force=True) == tmp_path / "taken"
    assert _files.check_output(tmp_path / "folder", force=True, folder=True)


# --- folders --------------------------------------------------------------------------------------


def test_folders_are_whole_or_absent(tmp_path):
    target = tmp_path / "model"
    for text in ("old", "new"):
        with _files.new_folder(target) as part:
            (part / "weights").write_text(text)
        assert (target / "weights").read_text() == text and names(tmp_path) == ["model"]

    def fill(part):
        (part / "weights").write_text("half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), _files.new_folder(target) as part:
        fill(part)
    assert (target / "weights").read_text() == "new" and names(tmp_path) == ["model"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_folder_replaced_half_is_put_back(tmp_path, step, monkeypatch):
    target = tmp_path / "model"
    with _files.new_folder(target) as part:
        (part / "weights").write_text("old")
    calls = []
    real = os.replace

    def killed(source, destination):
        calls.append(destination)
        if len(calls) > step:
            raise SystemExit
        real(source, destination)

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(_files, "_remove", lambda path: None)  # a kill cleans nothing up
    with contextlib.suppress(SystemExit), _files.new_folder(target) as part:
        (part / "weights").write_text("new")
    assert len(calls) == 2
    monkeypatch.undo()
    _files.recover(target)
    assert (target / "weights").read_text() == ("old" if step == 1 else "new")
    assert not _files._aside(target).exists()
