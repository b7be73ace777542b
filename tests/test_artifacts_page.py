"""What the pages of artifacts and studies say is what their files have."""

import csv
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mfopt.experiments import artifacts, spent
from mfopt.experiments.figures import near_exact

FOLDER = Path(__file__).parents[1] / "artifacts"
LINES = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
SAID = " ".join(" ".join(LINES).split())
# kinds of work in words, as the page has them
WORKS = {
    "amplified": "searches",
    "train-run": "training runs",
    "unamplified": "strategies without amplification",
    "sigma": "σ",
    "certified": "certificates",
}


def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8") as file:
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


def test_few_samples() -> None:
    above = {k: v for panel in panels("near-exact-5") for k, v in panel.items()}
    for power, count in (("2⁹", 2**9), ("2⁷", 2**7)):
        each = [value for (_, x), value in above.items() if x == count]
        assert len(each) == len(near_exact.SAMPLE_EPSILONS)
        assert power in SAID and f"{said(min(each))} to {said(max(each))}%" in SAID
    assert f"at ε = 4 by {said(above['ε = 4', 2**9])}%" in SAID


def test_bins_kept() -> None:
    kept, grown = panels("fresh-bins-kept")
    lengths = sorted({x for _, x in kept})
    table = table_after("- **Bins kept")
    assert {f"ε = {row[0]}" for row in table} == {curve for curve, _ in kept}
    for epsilon, *cells in table:
        assert cells == [said(kept[f"ε = {epsilon}", x]) for x in lengths]
    percent = [said(grown[f"ε = {epsilon:g}", lengths[-1]], 1) for epsilon in (0.5, 2, 8)]
    least, middle, most = percent
    assert f"by {least}% from L = 1 to balls-in-bins at ε = 0.5" in SAID
    assert f"by {middle}% at 2, by {most}% at 8" in SAID


def test_bins_thrown_afresh_certified() -> None:
    rmse, saved = panels("fresh-bins-certified")
    table = table_after("- **16 × 128**")
    assert {float(row[0]) for row in table} == {x for _, x in rmse}
    for epsilon, *cells in table:
        at = float(epsilon)
        assert cells == [
            *(said(y) for (_, x), y in rmse.items() if x == at),
            *(f"{said(y, 1)}%" for (_, x), y in saved.items() if x == at),
        ]
    spent_there = artifacts.read_manifest(FOLDER)["fresh-bins-certified"]["cpu_seconds"]
    assert f"{said(spent_there, 0)} CPU seconds" in SAID


Points = dict[tuple[str, int, int, float], float]


@pytest.fixture(scope="module")
def grid() -> Points:
    return {
        (r["kind"], int(r["epochs"]), int(r["bins"]), float(r["epsilon"])): float(r["rmse"])
        for r in rows("tables/grid.csv")
    }


def below(grid: Points, kind: str, other: str, *epsilons: float) -> tuple[float, float]:
    """How far ``kind`` is below ``other``, in percent: least and most, at these ε or all."""
    gains = [
        100 * (1 - rmse / grid[other, *place])
        for (name, *place), rmse in grid.items()
        if name == kind and (not epsilons or place[-1] in epsilons)
    ]
    return min(gains), max(gains)


def spread(gains: tuple[float, float]) -> str:
    return " to ".join(said(gain, 1) for gain in gains) + "%"


def test_toeplitz_and_time_scaling_over_the_grid(grid) -> None:
    for epsilon in (2.0, 8.0, 16.0):
        assert f"{spread(below(grid, 'toeplitz', 'blt-4', epsilon))} at" in SAID
    least, most = zip(
        *(below(grid, f"{kind}-scaled", kind) for kind in ("blt-4", "toeplitz")), strict=True
    )
    assert f"**Time-scaling takes {spread((min(least), max(most)))} off.**" in SAID
    gains = spread(below(grid, "blt-4-scaled", "blt-4"))
    assert f"the time-scaled BLT-4 is {gains} below the plain one" in SAID
    to_eight = spread(below(grid, "blt-4-scaled", "toeplitz", 0.5, 1, 2, 4, 8))
    assert f"below the plain Toeplitz C at every ε up to 8, by {to_eight};" in SAID
    least, most = below(grid, "blt-4-scaled", "toeplitz", 16)
    assert f"between {said(most, 1)}% below and {said(-least, 1)}% above" in SAID


def test_forms_of_c_at_three_sizes() -> None:
    tables = []
    for name in artifacts.STRATEGIES:
        one = rows(f"tables/{name}.csv")
        tables.append({(r["family"], float(r["epsilon"])): float(r["rmse"]) for r in one})

    def over(kind: str, other: str, epsilon: float) -> list[float]:
        return [100 * (t[kind, epsilon] / t[other, epsilon] - 1) for t in tables]

    first, second, third = over("blt-4-scaled", "toeplitz", 16.0)
    assert (
        f"at ε = 16 it is {said(first, 1)}% above it, {said(-second, 1)}% below "
        f"and {said(third, 1)}% above at the three sizes"
    ) in SAID
    first, second, third = (said(-x, 1) for x in over("wave-blt-4-scaled", "toeplitz", 16.0))
    assert f"of the same memory, is {first}, {second} and {third}% below" in SAID
    worst = max(x for e in artifacts.EPSILONS for x in over("toeplitz-scaled", "dense", e))
    assert worst == over("toeplitz-scaled", "dense", 16.0)[0] and worst < 0.2
    assert f"({said(worst)}% above at 8 × 32, ε = 16)" in SAID


def test_ahead_of_cyclic_poisson_sampling() -> None:
    table = {
        (r["family"], float(r["epsilon"])): float(r["rmse"])
        for r in rows("tables/comparison-16x128.csv")
    }

    def ahead(kind: str, epsilon: float) -> str:
        return f"{said(100 * (1 - table[kind, epsilon] / table['banded+poisson', epsilon]), 1)}%"

    first, *others, last = (f"{ahead('blt-4', e)} at {e:g}" for e in artifacts.EPSILONS)
    words = ", ".join([first.replace("at 0.5", "at ε = 0.5"), *others])
    assert f"by {words} and {last}" in SAID
    assert f"the optimized Toeplitz strategy by {ahead('toeplitz', 8.0)} at ε = 8" in SAID
    poisson, balls = (table[f"dpsgd+{way}", 0.5] for way in ("poisson", "balls-in-bins"))
    assert f"({said(poisson, 1)} against {said(balls, 1)})" in SAID
    off = [said(100 * (1 - x / table["dpsgd+unamplified", 0.5]), 1) for x in (poisson, balls)]
    assert f"{off[0]}% and {off[1]}% below unamplified DP-SGD" in SAID
    many = [table[f"banded{form}+balls-in-bins", 16.0] for form in ("", "-toeplitz")]
    assert f"has RMSE {said(many[0])} and its Toeplitz form {said(many[1])}" in SAID
    assert f"below the {said(table['blt-4', 16.0])} of the 4-buffer BLT" in SAID


def test_independent_noise_with_bins_thrown_afresh() -> None:
    fresh, poisson, balls = (
        next(
            float(r["noise_multiplier"])
            for r in rows("tables/comparison-16x128.csv")
            if r["family"] == f"dpsgd+{way}" and float(r["epsilon"]) == 2
        )
        for way in ("fresh-bins", "poisson", "balls-in-bins")
    )
    assert f"ε = 2**: σ = {said(fresh, 4)}; Poisson sampling has {said(poisson, 4)}" in SAID
    assert f"balls-in-bins {said(balls, 3)}" in SAID


def test_bins_thrown_afresh_in_training() -> None:
    study = json.loads((FOLDER / "studies/sampling-in-training.json").read_text(encoding="utf-8"))
    found = next(words for words in study["findings"] if "held-out-users" in words)
    told = re.search(r"ends ([\d.]+ ± [\d.]+) nats below the time-scaled BLT", SAID)
    assert told is not None and f"in 3 of 3 seeds, by {told[1]}" in found


def test_groups_by_black_box() -> None:
    found = panels("user-level-1")[0]
    loose, exact = (
        [found[f"{way}, σ = 2", k] for k in (16, 32)]
        for way in ("black box", "mixture of Gaussians")
    )
    words = f"ε = {said(loose[0], 1)} at K = 16 and {said(loose[1], 0)} at 32"
    assert f"{words} (exact: {said(exact[0], 1)} and {said(exact[1], 1)})" in SAID


def test_timings() -> None:
    cells: dict[tuple[str, str], list[float]] = {}
    for row in rows("figures/near-exact-4.csv"):
        place = row["epochs"], row["iterations_per_epoch"]
        cells.setdefault(place, []).append(float(row["cpu_seconds"]))
    medians = [statistics.median(each) for each in cells.values()]
    assert f"{said(min(medians), 1)} to {said(max(medians), 1)}, more by bins" in SAID
    more = [each[0] - statistics.median(each) for each in cells.values()]
    assert f"compiles for {said(min(more), 0)} to {said(max(more), 0)} more" in SAID


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


# of studies: a sum, the σ of what is not compared, and a paper's figures
_BESIDE = {
    "public-copies": {"4,794"},
    "noise-in-training": {"0.807"},
    "step-time": {"1.04", "1.09"},
}
_PAGE = (FOLDER.parent / "mfopt" / "experiments" / "README.md").read_text(encoding="utf-8")
_STUDIES = {
    found[1]: part
    for part in re.split(r"\n(?=\* `|What `|\n)", _PAGE.split("## Studies")[1])
    if (found := re.match(r"\s*(?:\* |What )`([a-z-]+)`", part))
    and (FOLDER / "studies" / f"{found[1]}.json").is_file()
}


def means(table: list[dict[str, Any]]) -> Iterator[float]:
    """Of each column over the seeds of each setting."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table:
        words = {k: v for k, v in row.items() if isinstance(v, str | bool)}
        place = *words.items(), row.get("epsilon"), row.get("learning_rate")
        groups.setdefault(place, []).append(row)
    for group in groups.values():
        for column in group[0]:
            values = [row.get(column) for row in group]
            if all(type(value) is float for value in values):
                yield float(np.mean(values))


@pytest.mark.parametrize("study", _STUDIES)
def test_numbers_of_studies(study: str) -> None:
    content = json.loads((FOLDER / "studies" / f"{study}.json").read_text(encoding="utf-8"))
    numbers = [*inside(content), *means(content["rows"])]
    assert missing(_STUDIES[study], numbers) <= _BESIDE.get(study, set())


def test_audits() -> None:
    page = (FOLDER.parent / "mfopt" / "training" / "README.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    content = json.loads((FOLDER / "audit.json").read_text(encoding="utf-8"))
    found = {(a["fault"], a["size"]): a for a in content["audits"]}

    def bounds(fault: str, size: float) -> str:
        one = found[fault, size]
        return f"{one['epsilon_lower']:.3g} and {one['epsilon_profile']:.3g}"

    claim = content["setting"]["epsilon"]
    assert f"ε = {claim:g} the bounds are {bounds('noise', 1.0)} on the trainer as it is" in text
    assert f"They are {bounds('noise', 0.5)} if it adds half the noise, " in text
    assert f"{bounds('norm', 1.5)} if it does not clip gradients of 1.5 clip norms" in text
    caught = [found["noise", 0.5], found["norm", 1.5]]
    assert all(a["epsilon_lower"] < claim < a["epsilon_profile"] for a in caught)
    assert max(a["epsilon_lower"] for a in found.values()) < 3.8  # which the page says of all


@pytest.fixture
def costs() -> dict[str, dict[str, float]]:
    columns = ("cells", "cpu_seconds", "seconds")
    return {r["work"]: {c: float(r[c]) for c in columns} for r in rows("tables/costs.csv")}


def test_costs(costs) -> None:
    whole, command = costs[spent.ALL], costs[spent.COMMAND]
    assert command["cells"] == whole["cells"]  # one command made them all
    assert (
        f"{said(whole['cpu_seconds'], 0)} CPU seconds for its {said(whole['cells'], 0)} cells"
        in SAID
    )
    for work, words in WORKS.items():
        one = costs[work]
        assert f"{said(one['cells'], 0)} {words} {said(one['cpu_seconds'], 0)}" in SAID
    assert f"{said(command['seconds'] / 60, 1)} minutes" in SAID
