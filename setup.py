"""Record the commit in what is built; everything else stands in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

COMMIT = runpy.run_path(str(Path(__file__).parent / "mfopt" / "_version.py"))["commit"]()


def note(folder: str) -> None:
    if COMMIT is not None:
        Path(folder, "mfopt", "_commit.txt").write_text(f"{COMMIT}\n")


class Build(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            note(self.build_lib)


class Source(sdist):
    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        note(base_dir)


setup(cmdclass={"build_py": Build, "sdist": Source})
