"""Fenced blocks of the Markdown pages, and how a reader runs them: in order, in one folder.

What stands in a comment right above a block says how it is tested:

- nothing: Python runs in the page's namespace; of a shell block every ``mfopt`` line runs, and
  where output follows, its words are compared (numbers may differ from machine to machine).
- ``<!-- slow -->``: as above, but only where ``-m ci`` asks for it.
- ``<!-- needs: torch opacus -->``: as above, where these packages are installed.
- ``<!-- example -->``: needs the reader's own data. Python must compile; the options of every
  ``mfopt`` line must exist.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from sources import ROOT

PAGES = sorted(
    path.relative_to(ROOT)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.name != "CHANGELOG.md"
)
_BLOCK = re.compile(
    r"(?:^<!--\s*(?P<note>.*?)\s*-->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```", re.S | re.M
)
_NUMBER = re.compile(r"[-+−]?\d[\d,.]*(?:e[-+−]?\d+)?%?")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    code: str
    note: str
    line: int

    @property
    def slow(self):
        return "slow" in self.note.split()

    @property
    def is_example(self):
        return "example" in self.note.split()

    @property
    def needs(self):
        return self.note.split("needs:")[1].split() if "needs:" in self.note else []


def blocks(page):
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(m["language"], m["code"], m["note"] or "", text.count("\n", 0, m.start()) + 1)
        for m in _BLOCK.finditer(text)
    ]


def commands(block):
    """(arguments, shown output) of the ``mfopt`` lines of a shell block.

    With a prompt, what follows a line is its output; without one, every line is a command.
    """
    text = block.code.replace("\\\n", " ")
    prompted = any(line.startswith("$ ") for line in text.splitlines())
    lines = []
    for line in text.splitlines():
        if line.startswith("$ ") or (not prompted and line.strip()):
            lines.append((line.removeprefix("$ "), []))
        elif lines:
            lines[-1][1].append(line)
    result = []
    for command, output in lines:
        parts = command.split("&&")
        for part in parts if parts[0].startswith("mfopt") else ():  # installing is the check's part
            words = shlex.split(part, comments=True)
            if words[:1] == ["mfopt"]:
                result.append((words[1:], "\n".join(output)))
    return result


def words(text):
    """The words of an output, without numbers, rules and spaces."""
    return re.findall(r"[^\W\d_]{3,}", _NUMBER.sub(" ", text))
