"""Version and commit of this code."""

import subprocess
from pathlib import Path

__version__ = "0.3.0"
ADVISED = ("0.1.0",)  # versions that could state a wrong ε: docs/advisories.md


def commit() -> str | None:
    """Commit that this code was built from, or of the clone it is run from; None if unknown.

    ``+changes`` follows a clone's commit where files differ from it, ``artifacts/`` aside.
    """
    folder = Path(__file__).parent
    built = folder / "_commit.txt"  # written by setup.py into what is built
    if built.is_file():
        return built.read_text().strip()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed package may lie in a tree that is not its own
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)artifacts")
    return f"{git('rev-parse', 'HEAD')}{'+changes' if changed else ''}"
