"""What the pages of artifacts and studies say is what their files have."""

import contextlib
import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documentation import PAGES, ROOT

from mfopt.experiments.families import FAMILIES

FOLDER = Path(__file__).parents[1] / "artifacts"
DOCS = FOLDER.parent / "docs"
LINES = [
    line
    for page in (
        FOLDER / "README.md",
        *sorted((DOCS / "benchmarks").glob("*.md")),
        DOCS / "papers" / "differences.md",
    )
    for line in page.read_text(encoding="utf-8").splitlines()
]


def rows(name: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def panels(name: str) -> list[dict[tuple[str, float], float]]:
    """For each panel of a figure its values by curve and place."""
    found: dict[str, dict[tuple[str, float], float]] = {}
    for row in rows(f"figures/{name}.csv"):
        found.setdefault(row["panel"], {})[row["curve"], float(row["x"])] = float(row["y"])
    return list(found.values())


def said(number: Any, places: int = 2) -> str:
    return f"{number:,.{places}f}"


def table_after(heading: str) -> list[list[str]]:
    """The cells of the first table below a line that begins so, but for its head."""
    first = next(i for i, line in enumerate(LINES) if line.lstrip().startswith(heading))
    found = []
    for line in LINES[first:]:
        if line.lstrip().startswith("|"):
            found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif found:
            break
    return found[2:]


def test_tables_of_the_page() -> None:
    kept, _ = panels("fresh-bins-kept")
    lengths = sorted({x for _, x in kept})
    table = table_after("- **Bins kept")
    assert {f"ε = {row[0]}" for row in table} == {curve for curve, _ in kept}
    for epsilon, *cells in table:
        assert cells == [said(kept[f"ε = {epsilon}", x]) for x in lengths]
    rmse, saved = panels("fresh-bins-certified")
    table = table_after("- **16 × 128**")
    assert {float(row[0]) for row in table} == {x for _, x in rmse}
    for epsilon, *cells in table:
        at = float(epsilon)
        assert cells == [
            *(said(y) for (_, x), y in rmse.items() if x == at),
            *(f"{said(y, 1)}%" for (_, x), y in saved.items() if x == at),
        ]


# of benchmarks: what was done, and what follows from several of a file's numbers
_SETTING = {"40", "24", "2,048", "1,024"}
_FOLLOWS = {"1.24", "0.12", "0.03", "636", "22.018768", "22.018793", "2,688", "5,820", "8319"}
_BENCHMARKS = [line for line in LINES if line.startswith("| `bench-")]


def inside(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, those in its words too, and the lengths of its lists."""
    if isinstance(value, dict):
        yield from inside([*value.items()])
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from inside(each)
    elif isinstance(value, str):
        yield from (float(found.replace(",", "")) for found in _NUMBER.findall(value))
    elif isinstance(value, int | float):
        yield value


_NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")


@pytest.mark.parametrize("line", _BENCHMARKS, ids=lambda line: line[3 : line.index("json") - 1])
def test_numbers_of_benchmarks(line: str) -> None:
    names, text = line.strip("| ").split("|", 1)
    files = [FOLDER / name for name in re.findall(r"`([^`]+)`", names)]
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert missing(text, inside(contents)) <= _SETTING | _FOLLOWS


def missing(text: str, numbers: Iterable[float]) -> set[str]:
    """The numbers of a text that are none of these, rounded, in percent, or as a difference."""
    values = np.array(list(numbers))
    values = np.concatenate([values, 100 * values, 100 * (values - 1), 100 * (1 - values)])
    found = set()
    for number in _NUMBER.findall(re.sub(r"`[^`]*`|BLT-4|\d+ × \d+|10[⁰-⁹¹²³]+", "", text)):
        places = len(number.partition(".")[2].partition("e")[0])
        if np.min(np.abs(values - float(number.replace(",", "")))) > 0.51 * 10.0**-places:
            found.add(number)
    return found


def test_a_number_that_no_benchmark_has_is_seen() -> None:
    line = next(line for line in _BENCHMARKS if "bench-seeds" in line)
    with pytest.raises(AssertionError, match="23"):
        test_numbers_of_benchmarks(line.replace("22.89", "23.89"))


def test_audits() -> None:
    page = (DOCS / "howto" / "audit.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    content = json.loads((FOLDER / "audit.json").read_text(encoding="utf-8"))
    found = {(a["fault"], a["size"]): a for a in content["rows"]}

    def bounds(fault: str, size: float) -> str:
        one = found[fault, size]
        return f"{one['epsilon_lower']:.3g} and {one['epsilon_profile']:.3g}"

    claim = content["setting"]["epsilon"]
    assert f"ε = {claim:g} the bounds are {bounds('noise', 1.0)} for the correct trainer" in text
    assert f"{bounds('noise', 0.5)} for one that adds half the noise, " in text
    assert f"{bounds('norm', 1.5)} for one that does not clip gradients of 1.5 clip norms" in text
    caught = [found["noise", 0.5], found["norm", 1.5]]
    assert all(a["epsilon_lower"] < claim < a["epsilon_profile"] for a in caught)
    assert max(a["epsilon_lower"] for a in found.values()) < 3.8  # which the page says of all


# A number followed by <!-- FILE: column=value … column --> is that of the one row of the artifact;
# a table after <!-- FILE: column --> has the mechanism's label (or `family`) in front of each row,
# before its source in parentheses, and ε above each column.
_KEYED = re.compile(r"([\d.,]*\d)%?<!-- (\S+\.csv): ((?:\S+=\S+ )+)(\w+) -->")
_KEYED_TABLE = re.compile(r"<!-- (\S+\.csv): (\w+) -->\n((?:\|.*\n)+)")
_FAMILIES = {family.label: name for name, family in FAMILIES.items()}


def keyed_numbers(text: str) -> Iterator[tuple[str, str, dict[str, str], str]]:
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
            for place, epsilon in epsilons:
                key = {"family": _FAMILIES.get(label, label), "epsilon": epsilon}
                yield line[place], name, key, column


def differing(text: str, folder: Path = FOLDER) -> list[tuple[str, str]]:
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


def _same(value: str, key: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(value) == float(key)
    return value == key


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_keyed_numbers_are_those_of_the_artifacts(page: Path) -> None:
    assert not differing((ROOT / page).read_text("utf-8"))


def test_the_readme_compares_by_keyed_numbers() -> None:
    assert len([*keyed_numbers((ROOT / "README.md").read_text("utf-8"))]) >= 20


def test_a_changed_artifact_with_an_unchanged_page_is_seen(tmp_path: Path) -> None:
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
