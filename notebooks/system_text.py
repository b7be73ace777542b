"""A data set with users from the text on a Debian-like machine; nothing is downloaded.

python notebooks/system_text.py changelogs corpus  # or manpages
mfopt train --data corpus --eps 8

changelogs: an entry is a record, its maintainer the user. manpages: a paragraph of the manual's
sections 5 and 8 is a record, its page the user. Public: docstrings of Python's standard library.
"""

import ast
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path

from mfopt.training.data.build import Options, build
from mfopt.training.data.builder import HoldOut
from mfopt.training.data.sources import JsonLines

ENTRY = re.compile(r"^\S+ \(.*\n((?:\n|  .*\n)+)^ -- [^<\n]*<([^>\n]+)>", re.MULTILINE)
MARKUP = re.compile(r"\\f(?:\[\w*\]|\(..|.)|\\m\[\w*\]|\\s[-+]?\d|\\[&/,|^%:)]|\\\*\(..")
FONT = re.compile(r"^\.(?:B|I|BR|RB|IR|BI|RI|IB|SM) +", re.MULTILINE)
PUBLIC = Path(ast.__file__).parent  # the standard library


def texts(root, pattern):
    """Of the packed files that match, by path."""
    for path in sorted(root.glob(pattern)):
        yield path.name, gzip.decompress(path.read_bytes()).decode("utf-8", "replace")


def changelogs(root):
    """(maintainer, entry) of every Debian changelog below root/doc; equal files once."""
    for text in {text: None for _, text in texts(root, "doc/*/changelog*.gz")}:
        yield from ((user.lower(), entry.strip()) for entry, user in ENTRY.findall(text))


def manpages(root):
    """(page, paragraph) of eight words or more, without its markup."""
    for page, text in texts(root, "man/man[58]/*.gz"):
        plain = FONT.sub("", MARKUP.sub("", text.replace("\\-", "-")))
        parts = (part.split() for part in re.split(r"^[.'].*\n", plain, flags=re.MULTILINE))
        yield from ((page, " ".join(words)) for words in parts if len(words) >= 8)


def docstrings(root):
    """(module, docstring)."""
    for path in sorted(root.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and (text := ast.get_docstring(node)):
                yield path.stem, text


def main(kind, out, share="/usr/share", vocab_size=2048):
    """The report of the build, which makes the folder ``out``."""
    private = {"changelogs": changelogs, "manpages": manpages}[kind](Path(share))
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for name, pairs in (("private", private), ("public", docstrings(PUBLIC))):
            texts_once = dict.fromkeys(pairs)
            lines = [json.dumps({"user": user, "text": text}) + "\n" for user, text in texts_once]
            (path := Path(folder) / f"{name}.jsonl").write_text("".join(lines))
            sources.append(JsonLines([path], "user", "text"))
        options = Options(hold_out=HoldOut(users=0.1, records=0.05))
        return build(sources[0], out, tokenizer=vocab_size, public=sources[1], options=options)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])["parts"], indent=1))
