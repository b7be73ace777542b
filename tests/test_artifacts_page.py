"""What the pages of artifacts and studies say is what their files have."""

import contextlib
import csv
import functools
import json
import math
import re

import numpy as np
import pytest
from documentation import PAGES, ROOT

from mfopt.experiments.families import FAMILIES

FOLDER = ROOT / "artifacts"
DOCS = ROOT / "docs"


def rows(name, folder=FOLDER):
    with (folder / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def said(number, places=2):
    return f"{number:,.{places}f}"


# A number followed by <!-- FILE: column=value … column --> is that of the one row of the artifact;
# a table after <!-- FILE: column --> has the mechanism's label (or `family`) in front of each row,
# before its source in parentheses, and ε above each column.
_KEYED = re.compile(r"([\d.,]*\d)%?<!-- (\S+\.csv): ((?:\S+=\S+ )+)(\w+) -->")
_KEYED_TABLE = re.compile(r"<!-- (\S+\.csv): (\w+) -->\n((?:\|.*\n)+)")

# A page is checked block by block: a paragraph, an item of a list, or a row of a table. Its decimal
# numbers, and those in percent, are those of the artifacts that it names in backquotes or in a
# comment <!-- from: NAME NAME -->, which holds for the rows of a table below it too; a definition,
# or what follows from one, says <!-- no result -->.
_NAMED = re.compile(r"`([^`\s]+)`|\[([\w.-]+\.json)\]|<!-- from: ([^>]+) -->")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
# no results: code, links, keyed numbers (checked exactly), sizes, dates, settings, versions
_NO_RESULT = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|[\d.,]*\d%?<!--.*?-->|<!--.*?-->|arXiv [\d.]+"
    r"|\d+ × \d+|10[⁰-⁹¹²³⁻]+|20\d\d-\d\d-\d\d|[Ss]ections? [\d.]+|95%|jax-privacy 2\.0"
    r"|[εδσ₂]+ (?:=|up to|every) [\d.e-]+(?:(?:, | and | or | to )[\d.]+(?![\d%]))*"
    r"|(?:rates?|grid|moves?|momentum|top-p|q) (?:of )?[\d.]+(?:(?:, | and | to )[\d.]+)*"
    r"|[Vv]ersions? [\d.]+|(?:Python|flwr|ray|pfl|PEFT|Apache|Theorem|Lemma)[ -][\d.]+"
    r"|\b0\.\d\.[\dy]",
    re.DOTALL,
)
GENERATED = {"accuracy", "field"}  # whose tables other tests make again
# versions and what was wrong in them; a page of faults that no version has
RESULTS = [page for page in PAGES if page.stem not in {"advisories", "file-format"}]
_FILES = {path.stem: path for suffix in ("json", "csv") for path in FOLDER.rglob(f"*.{suffix}")}


def blocks(text):
    """Blocks of a page, each with the words that name its artifacts."""
    above = ""
    text = _KEYED_TABLE.sub("", text)
    for part in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        above = above if part.lstrip().startswith("|") else ""
        for block in re.split(r"\n(?=\s*(?:[*-] |\|))", part):
            is_row = block.lstrip().startswith("|")
            above = above if is_row else block
            yield block, above + block if is_row else block


def inside(value):
    """All numbers of a JSON value, those in its words too, and the lengths of its lists."""
    if isinstance(value, dict):
        yield from inside([*value.items()])
    elif isinstance(value, list | tuple):
        yield len(value)
        for entry in value:
            yield from inside(entry)
    elif isinstance(value, str):
        yield from (float(actual.replace(",", "")) for actual in _NUMBER.findall(value))
    elif isinstance(value, int | float):
        yield value


def seed_means(rows):
    """Means over the rows that differ in nothing but the seed and what was measured."""
    arms = {}
    for row in rows:
        words = (value for key, value in row.items() if isinstance(value, str) or key == "epsilon")
        arms.setdefault(tuple(words), []).append(row)
    for arm in arms.values():
        for key in arm[0]:
            values = [row.get(key) for row in arm]
            if all(isinstance(value, int | float) for value in values):
                yield float(np.mean(values))


@functools.cache
def numbers_of(path):
    """Every number of an artifact, in percent, as a difference in percent, and in minutes."""
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        values = [*inside(content)]
        values += seed_means(content["rows"]) if "studies" in path.parts else []
    else:
        with path.open(encoding="utf-8") as file:
            values = [*inside([*csv.reader(file)])]
    numbers = np.array(values, float)
    percent = 100 * numbers, 100 * (numbers - 1), 100 * (1 - numbers)
    return np.concatenate([numbers, *percent, numbers / 60])  # seconds in minutes


def unfounded(text, files=_FILES):
    """Blocks of a page with the numbers that none of their artifacts has."""
    for block, words in blocks(text):
        keywords = " ".join(map("".join, _NAMED.findall(words))).split()
        stems = {re.sub(r"\.(\*|json|csv|svg)$", "", name.rpartition("/")[2]) for name in keywords}
        values = [numbers_of(files[stem]) for stem in sorted(stems & {*files})]
        numbers = np.concatenate([*values, [math.inf]])
        missing = {
            number
            for number, percent in re.findall(
                rf"({_NUMBER.pattern})(%?)", _NO_RESULT.sub("", block)
            )
            if "." in number or percent
            if np.min(np.abs(numbers - float(number.replace(",", ""))))
            > 0.51 * 10.0 ** -len(number.partition(".")[2].partition("e")[0])
        }
        if missing and "<!-- no result -->" not in block:
            yield block, missing


@pytest.mark.parametrize("page", RESULTS, ids=str)
def test_numbers_of_results_are_those_of_their_artifacts(page):
    is_generated = page.stem in GENERATED
    text = (ROOT / page).read_text("utf-8")
    assert not [
        (block, missing)
        for block, missing in unfounded(text)
        if not (is_generated and block.lstrip().startswith("|"))
    ]


def test_a_changed_study_with_an_unchanged_page_is_seen(tmp_path):
    page = (DOCS / "papers/findings-training.md").read_text("utf-8")
    changed = tmp_path / "studies" / "lora.json"
    changed.parent.mkdir()
    changed.write_text(json.dumps({"rows": []}), "utf-8")
    ((block, missing),) = unfounded(page, _FILES | {"lora": changed})
    assert block.startswith("* `lora`") and missing > {"0.5444", "0.0591"}


_FAMILIES = {family.label: name for name, family in FAMILIES.items()}


def keyed_numbers(text):
    """Each keyed number of a page, with file, the row's key, and column."""
    for number, name, words, column in _KEYED.findall(text):
        yield number, name, dict(word.split("=", 1) for word in words.split()), column
    for name, column, table in _KEYED_TABLE.findall(text):
        header, _, *body = [
            [cell.strip().strip("*`") for cell in line.strip("| ").split("|")]
            for line in table.splitlines()
        ]
        epsilons = [(i, cell[4:]) for i, cell in enumerate(header) if cell.startswith("ε = ")]
        assert epsilons and body, table
        for line in body:
            label = re.sub(r" \(\D.*\)$", "", line[0])
            for index, epsilon in epsilons:
                key = {"family": _FAMILIES.get(label, label), "epsilon": epsilon}
                yield line[index], name, key, column


def differing(text, folder=FOLDER):
    """Keyed numbers of a page that are not the artifact's, with what the artifact has."""
    wrong = []
    for number, name, key, column in keyed_numbers(text):
        (row,) = (
            row
            for row in rows(name, folder)
            if all(_same(row[field], value) for field, value in key.items())
        )
        digits = len(number.partition(".")[2])
        if number != (right := said(float(row[column]), digits)):
            wrong.append((number, right))
    return wrong


def _same(value, key):
    with contextlib.suppress(ValueError):
        return float(value) == float(key)
    return value == key


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_keyed_numbers_are_those_of_the_artifacts(page):
    assert not differing((ROOT / page).read_text("utf-8"))


def test_the_readme_compares_by_keyed_numbers():
    assert len([*keyed_numbers((ROOT / "README.md").read_text("utf-8"))]) >= 20


def test_a_changed_artifact_with_an_unchanged_page_is_seen(tmp_path):
    name, text = "tables/field-16x128.csv", (ROOT / "README.md").read_text("utf-8")
    (tmp_path / "tables").mkdir()
    (rmse,) = (
        row["rmse"]
        for row in rows(name)
        if (row["family"], float(row["epsilon"])) == ("toeplitz", 2.0)
    )
    changed = (FOLDER / name).read_text("utf-8").replace(f",{rmse},", f",{float(rmse) + 0.1},")
    (tmp_path / name).write_text(changed, "utf-8")
    assert differing(text, tmp_path) == [("24.09", "24.19")]
    inline = f"24.08<!-- {name}: family=toeplitz epsilon=2 rmse -->"
    assert differing(inline) == [("24.08", "24.09")]
