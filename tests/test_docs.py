"""The pages are true: their blocks run in order, and they name every command."""

import dataclasses
import importlib.util
import re
import sys
import types

import click
import documentation
import pytest
from click.testing import CliRunner
from documentation import PAGES, ROOT, Block
from mfopt_cli import compile_cache
from mfopt_cli.main import COMMANDS, cli
from sources import texts

from mfopt._runtime import _notes
from mfopt.optimize import optimize
from mfopt.words import size

README = (ROOT / "README.md").read_text()
LONGEST_README = 9000
MOST_WORDS = 1500  # of a page


def parse(arguments):
    """Raise unless the command and every option of ``arguments`` exist."""
    command = cli
    context = click.Context(cli, info_name="mfopt")
    words = list(arguments)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        actual = command.get_command(context, words.pop(0))
        assert actual is not None, f"no such command in: mfopt {' '.join(arguments)}"
        command, context = actual, click.Context(actual, parent=context, info_name=actual.name)
    reference = {
        name for p in command.get_params(context) for name in (*p.opts, *p.secondary_opts)
    } | {"--help"}
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            assert name in reference, f"mfopt {' '.join(arguments)}: {name}"


def run(block, names, page):
    if block.language == "python":
        code = compile("\n" * block.line + block.code, page, "exec")
        if not block.is_example:
            exec(code, names)
    elif block.language in ("sh", "console"):
        for arguments, shown in documentation.commands(block):
            parse(arguments)
            if block.is_example:
                continue
            done = CliRunner().invoke(cli, arguments)
            label = f"{page}:{block.line}: mfopt {' '.join(arguments)}"
            assert done.exit_code == 0, f"{label}\n{done.output}"
            missing = set(documentation.words(shown)) - set(documentation.words(done.output))
            assert not missing, f"{label}: not in the output: {sorted(missing)}\n{done.output}"


SEARCHED = {}


def searched(scheme, question, progress):
    """A search of the plainest kind, which many pages begin with, is made once."""
    target, init = question.target, question.search.init
    question_text = repr(
        (scheme, target.epsilon, target.delta, question.form, question.objective, init)
    )
    if question_text not in SEARCHED:
        SEARCHED[question_text] = optimize(scheme, question, progress)
    return SEARCHED[question_text]


def run_page(page, tmp_path, monkeypatch, *, slow):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")  # classes of the page look up the module they are in
    monkeypatch.setitem(sys.modules, "page", module)
    if not slow:
        monkeypatch.setattr("mfopt.optimize.pipeline.optimize", searched)
    names = vars(module)
    for block in documentation.blocks(page):
        if block.slow and not slow:
            continue
        if any(importlib.util.find_spec(package) is None for package in block.needs):
            continue
        run(block, names, str(page))


PLAIN = [page for page in PAGES if not any(block.slow for block in documentation.blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_blocks_of_a_page_are_code_and_their_options_exist(page):
    for block in documentation.blocks(page):
        run(dataclasses.replace(block, note="example"), {}, str(page))


LONG = "docs/accounting/other-tools.md"  # other libraries' accountants take most of it


@pytest.mark.ci
@pytest.mark.filterwarnings("default:::lightning")
@pytest.mark.filterwarnings("default:'click.utils")  # by what Flower imports
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page), marks=[pytest.mark.release] * (str(page) == LONG))
        for page in PAGES
    ],
)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.release
@pytest.mark.parametrize("page", [page for page in PAGES if page not in PLAIN], ids=str)
def test_the_slow_blocks_run_too(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, slow=True)


def test_a_block_that_is_false_is_found(tmp_path, monkeypatch):
    """Controls: code that fails, an option that does not exist, output that is not there."""
    monkeypatch.chdir(tmp_path)
    for block in (
        Block("python", "assert False\n", "", 1),
        Block("sh", "mfopt optimize --epoch-count 3\n", "example", 1),
        Block("console", "$ mfopt --version\nnonsense\n", "", 1),
    ):
        with pytest.raises(AssertionError):
            run(block, {}, "page")


def test_the_readme_and_the_pages_are_short():
    assert len(README) <= LONGEST_README
    words = {
        page: len(re.findall(r"\w\S*", (ROOT / page).read_text())) for page in PAGES if page.parent
    }
    assert max(words.values()) <= MOST_WORDS, max(words, key=words.get)


def test_what_a_page_writes_it_may_write_again():
    """Blocks may be run twice in one folder: what would not be overwritten says ``--force``."""
    for page in PAGES:
        for block in documentation.blocks(page):
            if block.is_example or block.language not in ("sh", "console"):
                continue
            for arguments, _ in documentation.commands(block):
                if "--out" in arguments and arguments[0] != "train":
                    assert "--force" in arguments, f"{page}:{block.line}: {arguments}"


def test_the_page_about_the_machine_says_what_the_code_does():
    text = (ROOT / "docs/machine.md").read_text()
    (row,) = re.findall(r"^\| compiled programs .*$", text, re.M)
    assert f" {size(compile_cache.MOST_BYTES)}," in row and f"`{compile_cache.VARIABLE}`" in row
    (row,) = re.findall(r"^\| proofs .*$", text, re.M)
    assert f" {size(_notes.MOST_BYTES)}," in row
    read = re.findall(r"\bMFOPT_\w+", " ".join(said for _, said in texts()))
    assert set(read) == set(re.findall(r"\bMFOPT_\w+", text))


def test_each_message_of_the_faq_is_one_that_is_said():
    said = re.findall(r"^### `(.*)`$", (ROOT / "docs/faq.md").read_text(), re.M)
    assert len(said) >= 15
    assert not [message for message in said if not any(message in text for _, text in texts())]


def test_the_readme_names_every_command():
    assert not [name for name in COMMANDS if f"`mfopt {name}" not in README]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (folder / target).exists(), f"{page}: {target}"


def test_tree_names_no_machine():
    """No home folders or temporary paths of the machine that wrote a file."""
    pattern = re.compile(r"/(?:home|root|Users|work|tmp)/[A-Za-z0-9_.-]+")
    for path in tracked():
        if path.parts[0] in ("tests", ".ci"):
            continue
        if path.suffix in (".md", ".json", ".csv", ".ipynb", ".py", ".toml", ".svg", ".cff"):
            match = pattern.search((ROOT / path).read_text())
            assert match is None, f"{path}: {match.group()}"


def tracked():
    """Files of the project, without environments, caches and build folders inside the clone."""
    tops = ["mfopt", "cli", "docs", "notebooks", "tests", "artifacts"]
    yield from (path.relative_to(ROOT) for path in ROOT.glob("*.*") if path.is_file())
    for top in tops:
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)
