"""One vocabulary: commands and options have their help and an example, one name means one thing."""

import ast
import importlib
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from commands import failure
from mfopt_cli import messages, options, sweeps
from mfopt_cli.main import COMMANDS, cli
from sources import FILES, ROOT, parsed, texts
from test_docstrings import begins_with_an_opener

from mfopt._runtime import _check


def walk(command=cli, path=()):
    """(path, command) of every command that can be run."""
    if isinstance(command, click.Group):
        with click.Context(command) as ctx:
            for name in command.list_commands(ctx):
                yield from walk(command.get_command(ctx, name), (*path, name))
    else:
        yield path, command


EVERY = dict(walk())
every = pytest.mark.parametrize("path", EVERY, ids=" ".join)


def of(path):
    command = EVERY[path]
    return [
        param for param in command.get_params(click.Context(command)) if "--help" not in param.opts
    ]


def visible(path):
    """main name -> option, of what help shows."""
    return {
        param.main: param
        for param in of(path)
        if isinstance(param, options.Option) and not param.hidden
    }


def test_all_commands_are_walked():
    assert {path[0] for path in EVERY} == set(COMMANDS) and len(COMMANDS) >= 14 and len(EVERY) >= 21


@every
def test_every_command_and_option_is_documented_with_an_example(path):
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80, prog_name="mfopt")
    assert shown.exit_code == 0, shown.output
    if path[0] in ("optimize", "certify", "calibrate", "show", "plot"):
        assert max(map(len, shown.output.splitlines())) <= 80
    parts = shown.output.split("Options:")
    assert re.search(rf"Examples?:\n +mfopt {' '.join(path)}\b", parts[0]), parts[0]
    for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*", parts[0]):
        assert name in parts[1], name  # an example's options exist
    for name, option in visible(path).items():
        text = option.help
        assert text and len(text) > 5, name
        assert name in parts[1]
        for older in option.older:
            assert older not in parts[1]


@every
def test_help_texts_begin_with_a_noun_phrase_or_a_verb(path):
    assert not begins_with_an_opener(EVERY[path].help)
    assert not [o.help for o in visible(path).values() if begins_with_an_opener(o.help)]
    # the control: what options of `train` once said
    assert begins_with_an_opener("Of adamw.") and not begins_with_an_opener("Weight decay (adamw).")


@every
def test_options_are_of_the_one_class(path):
    for param in of(path):
        assert isinstance(param, click.Argument | options.Option), param


def meaning(option):
    """What kind of value an option takes."""
    kind = option.type
    if option.is_flag:
        return "flag"
    if isinstance(kind, options.Count | sweeps.Sweep) or kind is click.FLOAT:
        return "number"
    if isinstance(kind, click.Path):
        return "path"
    return "words"


def test_one_name_takes_one_kind_of_value():
    kinds = defaultdict(lambda: defaultdict(list))
    for path in EVERY:
        for name, option in visible(path).items():
            kinds[name][meaning(option)].append(" ".join(path))
    twofold = {name: dict(actual) for name, actual in kinds.items() if len(actual) > 1}
    assert not twofold


ALIKE = ("--force", "--json", "--quiet", "--jobs", "--cache", "--unit", "--iterations")


def test_shared_options_say_the_same_everywhere():
    texts = defaultdict(set)
    for path in EVERY:
        for name, option in visible(path).items():
            texts[name].add(option.help.removesuffix(" [user]"))
    for name in ALIKE:
        # what `mfopt train` says of its unit comes from its settings' record
        assert len(texts[name] - {"Privacy unit of the statement."}) <= 1, (name, texts[name])
    assert all(text.startswith("Pin ") for text in texts["--seed"])
    for name, word in {"--eps": "ε", "--delta": "δ"}.items():
        greek_or_name = (word, {"ε": "epsilon", "δ": "delta"}[word])
        assert all(any(w in text for w in greek_or_name) for text in texts[name]), texts[name]


OLD = {"--epsilon", "--output", "--bins", "--privacy-unit", "--iterations", "--rounds", "--samples"}


def test_the_older_names_are_hidden_and_mean_the_same():
    main_forms = set().union(*map(visible, EVERY))
    # --samples is itself a name where it counts the frozen samples of a search or estimate
    assert main_forms & OLD == {"--samples"}
    for path in EVERY:
        for param in of(path):
            for older in getattr(param, "older", ()):
                value = [] if param.is_flag else ["7" if meaning(param) == "number" else "word"]
                if param.type.name == "choice":
                    value = [param.type.choices[0]]
                actual = [_parsed(path, [name, *value])[param.name] for name in (param.main, older)]
                assert actual[0] == actual[1] is not None, (path, older)


def _parsed(path, words):
    """What a command's options become; required ones are not asked for."""
    command = EVERY[path]
    ctx = click.Context(command, resilient_parsing=True)
    command.parse_args(ctx, list(words))
    return ctx.params


@every
def test_what_writes_asks_before_it_replaces(path):
    names = visible(path)
    if {"--out", "--plot"} & names.keys():
        assert ("--resume" if path == ("train",) else "--force") in names
    assert "--json" in names


@every
def test_the_design_cards_names(path):
    """Length and target have the card's names wherever a command has them at all."""
    names = visible(path)
    assert ("--iters" in names) == ("--epochs" in names)
    assert "--epsilon" not in names
    for param in of(path):
        if param.name in ("epsilon", "eps", "epsilons"):
            assert param.main == "--eps"
        if param.name in ("out", "output") and not isinstance(param, click.Argument):
            assert param.main == "--out"


# --- benchmarks ----------------------------------------------------------------------------------


def commands_of_the_manifest():
    for entry in json.loads((ROOT / "artifacts" / "manifest.json").read_text()).values():
        yield from entry["command"].split(" && ")


def misspelt(text):
    """What is no word of today's vocabulary in a command; it is parsed, and not run."""
    program, name, *remaining = shlex.split(text)
    if program == "python":
        module = importlib.import_module(Path(name).stem)
        getattr(module, "bench", module).parser().parse_args(remaining)
        return []
    assert program == "mfopt"
    path = (name,)
    if path not in EVERY:  # of a group: a kind of account
        path = (name, remaining.pop(0))
    EVERY[path].make_context(name, list(remaining))
    return [word for word in remaining if word.startswith("--") and word not in visible(path)]


def test_commands_of_the_manifest_are_spelt_as_today(monkeypatch):
    monkeypatch.chdir(ROOT)  # folders of --out are looked for
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # of a FILE the name is enough
    # what the papers' scripts make is compared with their own names in another test, and
    # benchmarks that left the tree have the commit that has them
    commands = [
        text
        for text in commands_of_the_manifest()
        if not text.startswith(("python artifacts/papers/", "mfopt bench "))
    ]
    assert len(commands) > 10
    for text in commands:
        assert misspelt(text) == [], text
    # controls that must fail: an older name, and one that was never there
    assert misspelt("mfopt optimize --epochs 2 --bins 4 --eps 2") == ["--bins"]
    with pytest.raises(SystemExit):
        misspelt("python tests/benchmarks/bench_train.py --models tiny small")
    with pytest.raises(click.UsageError):
        misspelt("mfopt optimize --epoch-count 2")


# --- messages ------------------------------------------------------------------------------------


TYPED = {
    "optimize --epochs 2 --iters 0 --eps 2": "--iters 0: ",
    "optimize --epochs 2 --bins 0 --eps 2": "--bins 0: ",
    "optimize --epochs 0 --iters 4 --epsilon 2": "--epochs 0: ",
    "optimize --epochs 2 --iters 4 --epsilon=-2": "--epsilon -2.0: ",
    "optimize --epochs 2 --iters 4 --eps x": "'--eps'",
    "optimize --epochs 2 --iters 4 --epsilon x": "'--epsilon'",
    "account dpsgd --iters 0 --eps 1 --delta 1e-5": "--iters 0: ",
    "account uls --iterations 0 --probability 0.1 --eps 1 --delta 1e-5": "--iterations 0: ",
    "account fedavg --rounds 0 --probability 0.1 --eps 1 --delta 1e-5": "--rounds 0: ",
    "account balls-in-bins --iters 0 --epochs 1 --eps 1 --delta 1e-5": "--iters 0: ",
    "train --epochs 2 --iters 4 --eps -1": "--eps -1.0: ",
    "train x.npz --out y --width 0": "--width 0: ",
    "train --epochs 2 --iters 4 --eps 8 --layers 1000000": "--layers 1000000: must be at most 1024",
    "compare --epochs 0 --iters 4": "--epochs 0: ",
}


@pytest.mark.parametrize("words", TYPED)
def test_messages_name_what_was_typed(words, capsys):
    assert TYPED[words] in failure(capsys, *words.split())


def test_arguments_in_backticks_become_options_of_the_command_at_hand():
    with click.Context(EVERY["optimize",]) as ctx:
        assert messages.translate("give `force=True` or `certify_samples`", ctx) == (
            "give --force or --certify-samples"
        )
        assert messages.translate("see `mfopt optimize`, `nothing=True`", ctx) == (
            "see `mfopt optimize`, `nothing=True`"
        )
        problem = _check.reject("bins", -1, "must be at least 1", "Or `epochs=3`.")
        assert messages.of_usage(problem, ctx) == "--iters -1: must be at least 1. Or --epochs 3."
    assert str(problem) == "bins = -1: must be at least 1. Or `epochs=3`."
    assert (problem.argument, problem.value) == ("bins", -1)


def test_the_library_knows_no_options():
    """Error texts of mfopt name Python arguments; its commands' own texts may stand in quotes."""
    collected = []
    for path in (path for path in FILES if path.is_relative_to(ROOT / "mfopt")):
        for node in ast.walk(parsed(path)):
            names = (
                [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
            )
            parts_of_one = {getattr(name, "id", "") for name in names} & {"rule", "way_out"}
            if not isinstance(node, ast.Raise) and not parts_of_one:
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    text = re.sub(r"`mfopt [^`]*`", "", part.value)
                    if re.search(r"(?<![\w-])--[a-z]", text):
                        collected.append(f"{path.name}:{part.lineno}: {part.value}")
    assert not collected


# --- phrases that a reader who knows the field stumbles over ------------------------------------

AVOIDED = [
    r"least valid answer",
    r"\bthrown (anew|afresh|again)",
    r"\bbins? (that )?(are|is) thrown",
    r"(draws?|noise) made again",
    r"made again from",
    r"no use for memory",
    r"arrays to spend",
    r"batching open",
    r"the least error",
    r"counted inside δ",
    r"stopped because",
    r"no sample says",
    r"and is taken\b",
    r"choosing the tests",
    r"solving in closed form",
    r"model-sized arrays",
    r"units more or less",
    r"touches the (same )?data",
    r"Try to refute",
    r"nothing here can check",
    r"past outputs that decay",
    r"machine's unrest",
    r"told apart",
    r"\bgoes on\b",
    r"\bgone on\b",
    r"\bgo on (with|from)",
    r"\bbelieve",
    r"\bmade users",
    r"\btold of\b",
    r"\blook(s|ed) at\b",
    r"\b(drawn|placed|chosen|searched|thrown) anew\b",
    r"\bafresh\b",
    r"composed losses of the throws",
    r"throws into bins",
    r"\b(would|are|ones) (be )?made again",
    r"may it be shown",
    r"no thousandth",
    r"is the better\b",
    r"^It in ",
    r"\b(does|do) nothing (for|with|without)\b",
    r"\ba coin for every\b",
    r"\bpaid exactly\b",
    r"\bdirection of adding\b",
    r"\bmade data\b",
]


def speech():
    """(place, text) of pages, and of docstrings and texts of the library and its commands."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        yield str(path.relative_to(ROOT)), re.sub(r"\s+", " ", path.read_text())
    yield from texts()


def avoided(texts):
    wrong = re.compile("|".join(AVOIDED))
    return [f"{index}: {actual[0]}" for index, text in texts for actual in wrong.finditer(text)]


def test_texts_speak_the_terms_of_the_field():
    assert not avoided(speech())
    # the control: what pages and messages once said
    assert len(avoided([("", "bins thrown afresh"), ("", "it goes on"), ("", "it resumes")])) == 2
