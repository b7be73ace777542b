"""The README is true: its Python runs, and it names every command and option-bearing file."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from mfopt_cli.main import COMMANDS, cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def marked_blocks():
    return re.findall(r"<!-- test: python -->\n```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("index", range(len(marked_blocks())))
def test_readme_python_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(marked_blocks()[index], "README.md", "exec"), {})


def test_readme_has_marked_python():
    assert marked_blocks()


def test_every_command_is_documented_and_has_an_example():
    for name in COMMANDS:
        assert f"`mfopt {name}" in README, f"README lacks mfopt {name}"
        command = cli.get_command(None, name)
        shown = CliRunner().invoke(cli, [name, "--help"])
        assert shown.exit_code == 0
        parts = [shown.output]
        for sub in getattr(command, "commands", {}):
            parts.append(CliRunner().invoke(cli, [name, sub, "--help"]).output)
        assert any(f"mfopt {name}" in part.partition("Example")[2] for part in parts), name


def test_artifacts_are_all_in_the_manifest():
    folder = ROOT / "artifacts"
    manifest = json.loads((folder / "manifest.json").read_text())
    listed = {file for entry in manifest.values() for file in entry["files"]}
    present = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("README.md", "manifest.json")
    }
    assert present <= listed, sorted(present - listed)


def test_tree_names_no_machine():
    """No home folders or temporary paths of the machine that wrote a file."""
    pattern = re.compile(r"/(?:home|root|Users|work|tmp)/[A-Za-z0-9_.-]+")
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if (
            not path.is_file()
            or parts[0] in (".git", "tests", ".ci")
            or any(
                part.startswith(".") or part.endswith(".egg-info") or part == "__pycache__"
                for part in parts
            )
        ):
            continue
        if path.suffix in (".md", ".json", ".csv", ".ipynb", ".py", ".toml", ".svg"):
            found = pattern.search(path.read_text())
            assert found is None, f"{path.relative_to(ROOT)}: {found.group()}"
