"""Studies: one framework for flags, cells, files and messages; every study keeps to it."""

import collections
import csv
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import sys

import pytest
from commands import ended
from documentation import ROOT
from mfopt_cli.main import COMMANDS
from processes import python

from mfopt._runtime import _check
from mfopt.errors import UsageError
from mfopt.experiments import artifacts, figures, studies
from mfopt.experiments.cache import Cell, Result, code_digest
from mfopt.experiments.manifest import MANIFEST
from mfopt.experiments.options import option, option_of
from mfopt.experiments.options import options as study_options
from mfopt.experiments.plots import EVERY, Curve, Panel
from mfopt.experiments.studies.engine import PRIVACY, Study

every = pytest.mark.parametrize("name", studies.STUDIES)


@every
def test_registered_studies_say_what_they_are(name):
    study = studies.find(name)
    assert study.name == name
    for text in (study.summary, study.source, study.default_size, study.time):
        assert len(text) > 8
    small = study().check()
    assert list(small.cells()) and small.command() == f"mfopt experiment {name}"


@every
def test_a_study_is_one_short_file(name):
    source = inspect.getsource(sys.modules[studies.find(name).__module__])
    assert len(source.splitlines()) <= 150


def test_the_cells_of_studies_load_no_plots():
    """Every worker process imports what it runs."""
    runs = pkgutil.iter_modules(importlib.import_module("mfopt.experiments.runs").__path__)
    names = ", ".join(f"mfopt.experiments.runs.{each.name}" for each in runs)
    code = f"import sys, {names}; print('matplotlib' in sys.modules)"
    assert python("-c", code) == "False\n"


@every
def test_the_page_has_a_row_for_every_study(name):
    page = (ROOT / "docs" / "papers" / "studies.md").read_text()
    assert f"| `{name}` |" in page


def _rows_of_papers():
    """(paper, head, verdict, names) of each row of the pages of tables and figures."""
    page = "\n".join(p.read_text() for p in sorted((ROOT / "docs" / "papers").glob("tables*.md")))
    for part in page.split("\n## ")[1:]:
        for row in re.findall(r"\n\| ((?:Figure|Table|App|Alg)[^|]*) \|.*\| (.*) \|(.*)\|", part):
            yield part.split()[0], *row


def test_every_table_and_figure_of_the_papers_has_one_row():
    heads = [(paper, *head.split()) for paper, head, *_ in _rows_of_papers() if head[0] in "FT"]
    assert len(set(heads)) == len(heads)
    numbers = {(paper, kind, int(re.match(r"\d+", which)[0])) for paper, kind, which in heads}
    counts = collections.Counter(f"{paper} {kind}" for paper, kind, _ in numbers)
    printed = "Choquette-Choo Figure", "Ganesh Figure", "Charles Figure", "Charles Table"
    printed += "Chua Figure", "Chua Table", "McMahan Figure", "McMahan Table"
    assert counts == dict(zip(printed, (25, 2, 18, 2, 7, 12, 12, 3), strict=True))


def test_what_a_row_names_exists():
    named = set()
    for *row, verdict, names in _rows_of_papers():
        assert verdict.startswith(("reproduced", "in small", "contradicted", "not", "ε")), row
        for name in (here := re.findall(r"`([a-z0-9-]+)`", names)):
            kind = "studies" if name in studies.STUDIES else "figures"
            assert [*(ROOT / "artifacts" / kind).glob(f"{figures.SAME.get(name, name)}.*")], name
        for typed in re.findall(r"`(--[a-z-]+) ", verdict):
            assert typed in map(option_of, study_options(studies.find(here[0]))), row
        assert {*re.findall(r"`mfopt ([a-z]+)", verdict)} <= {*COMMANDS}, row
        named |= {*here}
    every_name = {*figures.FIGURES, *studies.STUDIES}
    assert every_name - named == {n for n in every_name if re.match("fresh|.*in-training", n)}


def _findings(name):
    """The sentences of a study among the artifacts."""
    return json.loads((ROOT / "artifacts" / "studies" / f"{name}.json").read_text())["findings"]


def _numbers_with_errors(name, *within):
    """(number, half of its 95% interval) of the finding that contains all the words."""
    (line,) = (line for line in _findings(name) if all(words in line for words in within))
    found = re.findall(r"([+-]?[\d.]+) ± ([\d.]*\d)", line)
    return [(float(number), float(half)) for number, half in found]


@pytest.mark.parametrize("panel", ["ε", "compute budget", "within-user σ₂"])
def test_the_artifact_of_mean_estimation_has_the_papers_orderings(panel):
    """Charles et al. 2024, Figure 3: squared error over that of ELS, along each panel."""
    one = _numbers_with_errors("mean-estimation", f"{panel}:", "ULS, G = 1 ")
    assert len(one) == 5 and all(ratio - half <= 1.0 for ratio, half in one)
    assert all(ratio <= 1.0 for ratio, _ in one)
    large = _numbers_with_errors("mean-estimation", f"{panel}:", "ULS, G = 16 over")
    # larger groups pay at a small ε, a large budget, a large deviation: one end below 1, one above
    (low, about), (high, around) = (large[0], large[-1]) if panel == "ε" else (large[-1], large[0])
    assert low + about < 1.0 < high - around


def test_the_artifact_of_images_has_the_papers_orderings_where_it_can_tell():
    ours = "BLT-4, time-scaled over "
    for other in ("banded, cyclic Poisson", "banded, unamplified", "DP-SGD, unamplified"):
        gain, half = _numbers_with_errors("images", f"ε = 1: {ours}{other}:")[0]
        assert gain - half > 0, other
        gain, half = _numbers_with_errors("images", f"ε = 4: {ours}{other}:")[0]
        assert gain + half > 0, other


def test_unknown_studies_are_refused():
    with pytest.raises(UsageError, match="mean-estimation"):
        studies.find("mean")


@dataclasses.dataclass(frozen=True)
class Squares(Study):
    """Squares."""

    name = "squares"
    source, default_size, time = ("none", "two", "0 s")
    columns = "x; square=x²; epsilon=ε"
    title = "Squares"
    values: tuple[float, ...] = option((1.0, 2.0), "What is squared.", rule=_check.finite)
    shift: float = option(0.0, "Added.", rule=_check.non_negative)
    method: str = option("plain", "How.", choices=("plain", "odd"))
    twice: bool = option(False, "Twice.")

    def cells(self):
        return [SquareCell(v, self.shift) for v in self.values]

    def rows(self, found):
        return [
            dict.fromkeys(PRIVACY) | {"x": cell.value, "_hidden": 1, **found[cell].record}
            for cell in self.cells()
        ]

    def panels(self, rows):
        curve = Curve("square", self.values, [row["square"] for row in rows])
        return [Panel([curve], "squares", "x", "x²")]

    def findings(self, rows):
        return ["They grow."]


CALLS = []


@dataclasses.dataclass(frozen=True)
class SquareCell(Cell):
    name = "study-squares"
    value: float
    shift: float

    def run(self, *needed):
        CALLS.append(self.value)
        if self.value == 3.0 and CALLS.count(3.0) == 1:
            raise KeyboardInterrupt
        return Result({"square": self.value * self.value + self.shift})


@pytest.fixture
def squares(monkeypatch):
    CALLS.clear()
    monkeypatch.setitem(studies.STUDIES, "squares", f"{__name__}:Squares")


call = functools.partial(ended, "experiment", "squares")


def test_a_study_is_a_command_that_stops_resumes_and_writes_whole_files(squares, tmp_path, capsys):
    out, cache = tmp_path / "out", tmp_path / "cache"
    words = ("--out", out, "--cache", cache, "--jobs", 1)
    assert call("--values", "1,2,3", *words) == 130
    said = capsys.readouterr().err
    assert "2 of 3 cells are kept" in said and list(out.iterdir()) == []
    assert call("--values", "1,2,3", *words) == 0
    assert CALLS == [1.0, 2.0, 3.0, 3.0]  # the finished ones were not run again
    shown = capsys.readouterr().out
    assert "x²" in shown and "They grow." in shown
    assert {path.name for path in out.iterdir()} == {f"squares.{kind}" for kind in EVERY}
    rows = list(csv.DictReader((out / "squares.csv").read_text().splitlines()))
    assert [row["square"] for row in rows] == ["1.0", "4.0", "9.0"] and set(PRIVACY) <= set(rows[0])
    kept = json.loads((out / "squares.json").read_text())
    assert kept["command"] == "mfopt experiment squares --values 1,2,3"
    assert kept["seconds"] >= 0 and kept["cpu_seconds"] >= 0
    assert kept["setting"]["values"] == [1, 2, 3] and kept["findings"] == ["They grow."]
    # nothing is replaced unasked, and nothing is computed before that is said
    assert call(*words) == 2 and "--force" in capsys.readouterr().err
    assert call("--force", *words) == 0


def test_a_study_among_the_artifacts_is_noted_in_their_manifest(squares, tmp_path, capsys):
    folder, cache = tmp_path / "artifacts", tmp_path / "cache"
    words = ("--artifacts", folder, "--cache", cache, "--jobs", 1)
    other = {"files": {}, "command": "mfopt figures"}
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"grid": other}))
    for values in ("2", "4,5"):  # the second call replaces what is there
        assert call("--values", values, *words) == 0
        manifest = artifacts.read_manifest(folder)
        entry = manifest["studies/squares"]
        assert entry["command"] == (
            f"mfopt experiment squares --values {values} --artifacts artifacts"
        )
        assert set(entry["files"]) == {"studies/squares.json", "studies/squares.svg"}
        for path, digest in entry["files"].items():
            assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == digest
    assert manifest["grid"] == other and set(manifest) == {"grid", "studies/squares"}
    assert entry["code"] == code_digest(True, True) and entry["device"]
    assert entry["seconds"] >= 0 and entry["cpu_seconds"] >= 0
    assert CALLS == [2.0, 4.0, 5.0]
    # a second place, and a place that is a file: nothing is computed before that is said
    capsys.readouterr()
    assert call("--values", "6", "--out", tmp_path / "out", *words) == 2
    assert "--artifacts" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert call("--values", "6", "--artifacts", tmp_path / "file") == 2
    assert "is not a folder" in capsys.readouterr().err
    for damaged in ("{", "[]"):
        (folder / MANIFEST).write_text(damaged)
        assert call("--values", "6", *words) == 2
        assert "is not one JSON object" in capsys.readouterr().err
    assert CALLS == [2.0, 4.0, 5.0]


def test_what_is_not_finite_is_a_failure_in_one_line(squares, tmp_path, capsys):
    words = ("--cache", tmp_path, "--jobs", 1)
    assert call("--values", "1e200", *words) == 1
    said = capsys.readouterr().err
    assert "square is inf in squares" in said and "Traceback" not in said


def test_json_is_one_object(squares, tmp_path, capsys):
    words = ("--cache", tmp_path, "--jobs", 1, "--json")
    assert call("--values", "2", "--shift", "1", "--twice", *words) == 0
    kept = json.loads(capsys.readouterr().out)
    assert [row["square"] for row in kept["rows"]] == [5.0]
    assert kept["command_line"] == "mfopt experiment squares --values 2 --shift 1 --twice"
    assert kept["setting"] == {"values": [2.0], "shift": 1.0, "method": "plain", "twice": True}


REFUSED = """
squares --method even => even
squares --values x => --values
squares --cube 3 => --cube
mean => mean
=> --list
mean-estimation --groups 32 => --groups 32: a user has 16 examples
mean-estimation --trials 5 => --trials 5: must be even
mean-estimation --eps 0 => --eps 0.0: must be greater than 0
mean-estimation --budgets 512 => --budgets 512: 256 users give at most 256
noise-in-training --eps nan => --eps nan
noise-in-training --iters 0 => --iters 0
noise-in-training --data nope => --data nope: is none of stdlib
images --momentum nan => --momentum nan
els-uls-training --rates= => --rates
els-uls-training --groups 0 => --groups
els-uls-training --delta 1 => --delta
estimate-and-double --groups 1,3 => --groups
estimate-and-double --groups 16,32 => --groups
estimate-and-double --cohorts 256,512 => --cohorts
estimate-and-double --trials 7 => --trials
estimate-and-double --probed 0 => --probed
record-selection --rule chunk => 'chunk' is none of random
record-selection --groups 0 => --groups
clip-norms --clips 1,1 => --clips
clip-norms --clips 0 => --clips
lora --ranks 0 => --ranks
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_bad_words_are_named_and_exit_with_2(squares, line, capsys):
    words, _, said = line.partition("=> ")
    assert ended("experiment", *words.split()) == 2
    assert said in capsys.readouterr().err


def test_cells_of_studies_depend_on_the_code_of_studies_and_others_do_not():
    from mfopt.experiments import cache

    assert cache.code_digest(True) != cache.code_digest(True, True)
    (own, other) = SquareCell(1.0, 0.0), SquareCell(1.0, 0.0)
    object.__setattr__(other, "name", "account")
    assert own.key != other.key


@dataclasses.dataclass(frozen=True)
class More(Squares):
    """One whose cells ask for one more; that one is stopped once."""

    name = "more"

    def cells(self):
        return [SquareCell(v, 0.0) for v in (1.0, 2.0)]

    def more(self, found):
        return [SquareCell(3.0, 0.0)]


def test_all_studies_are_one_command_and_one_pool(squares, monkeypatch, tmp_path, capsys):
    registered = {"squares": f"{__name__}:Squares", "more": f"{__name__}:More"}
    monkeypatch.setattr(studies, "STUDIES", registered)
    out, words = tmp_path / "out", ("--cache", tmp_path / "cache", "--jobs", 1)
    everything = functools.partial(ended, "experiment", "all", *words)
    assert everything("--out", out) == 130 and not list(out.iterdir())
    assert everything("--out", out) == 0
    assert CALLS == [1.0, 2.0, 3.0, 3.0]  # what two studies share is run once
    assert "They grow." in capsys.readouterr().out
    names = {f"{name}.{kind}" for name in registered for kind in EVERY}
    assert {path.name for path in out.iterdir()} == names
    assert everything("--out", out) == 2 and "--force" in capsys.readouterr().err
    assert everything("--artifacts", tmp_path / "artifacts") == 0 and len(CALLS) == 4
    assert set(artifacts.read_manifest(tmp_path / "artifacts")) == {
        f"studies/{name}" for name in registered
    }
    assert everything("--jobs", 0) == 2
    capsys.readouterr()
    assert everything("--json") == 0
    assert list(json.loads(capsys.readouterr().out))[2:] == list(registered)


def test_cells_import_nothing_that_their_digest_leaves_out():
    from mfopt.experiments import cache

    folder = ROOT / "mfopt" / "experiments"
    files = [folder / "mechanisms.py", folder / "accounts.py", *(folder / "runs").glob("*.py")]
    assert len(files) > 8
    for file in files:
        for module in re.findall(r"^ *(?:from|import) .*$", file.read_text(), re.M):
            named = set(re.findall(r"\w+", module))
            assert not named & set(cache._SHOWN), (file.name, module)
