"""What pyproject.toml cannot say: the commit in what is built, links, types and dates."""

import gzip
import io
import os
import re
import runpy
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.resolve()
COMMIT = runpy.run_path(str(ROOT / "mfopt" / "_version.py"))["commit"]()


def note(folder: str) -> None:
    if COMMIT is not None:
        Path(folder, "mfopt", "_commit.txt").write_text(f"{COMMIT}\n")


def readme() -> str:
    """README whose links lead to ``$MFOPT_TREE``, the address of the tree, where that is set."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = os.environ.get("MFOPT_TREE", "").rstrip("/")
    if not tree:
        return text
    # of an image the file itself, not the page about it
    text = re.sub(r"(!\[[^]]*\]\([^:)]*)\)", r"\1?raw=true)", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({tree}/", text)


def repack(archive: str, date: int) -> None:
    """Write a .tar.gz again: names in order, nobody's files, one date."""
    packed = io.BytesIO()
    with tarfile.open(archive) as source, tarfile.open(fileobj=packed, mode="w") as target:
        for entry in sorted(source.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = date, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            target.addfile(entry, source.extractfile(entry) if entry.isfile() else None)
    with open(archive, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=date) as zipped:
        zipped.write(packed.getvalue())


class Build(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            note(self.build_lib)


class Source(sdist):
    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        note(base_dir)

    def make_archive(self, base_name, format, *where, **options):
        archive = super().make_archive(base_name, format, *where, **options)
        if format == "gztar" and (date := os.environ.get("SOURCE_DATE_EPOCH")):
            repack(archive, int(date))
        return archive


class Folders:
    """An editable install by folders in a .pth file, which type checkers follow."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, wheel, files, mapping) -> None:
        wheel.writestr(f"__editable__.{self.name}.pth", f"{ROOT}\n{ROOT / 'cli'}\n")

    def __enter__(self) -> "Folders":
        return self

    def __exit__(self, *problem: object) -> None:
        pass


class Editable(editable_wheel):
    def _select_strategy(self, name, tag, build_lib):
        return Folders(name)  # the default finds packages by code, which no type checker runs


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": Build, "sdist": Source, "editable_wheel": Editable},
)
