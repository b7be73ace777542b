"""An option that is given twice: companions compose, and nothing else is dropped in silence."""

import click
import pytest
from commands import invoked, printed
from test_vocabulary import EVERY, every, of

from mfopt import sampling
from mfopt.errors import UsageError

SMALL = ["--epochs", "2", "--iters", "4"]


def said(words):
    """(exit code, lines on standard error) of a command that writes nothing else."""
    result = invoked(*words)
    assert result.stdout == ""
    return result.exit_code, result.stderr.splitlines()


@every
def test_an_option_given_twice_is_refused_by_its_name(path):
    """Any value: what is refused is refused before values are read."""
    for param in of(path):
        if isinstance(param, click.Argument) or param.multiple:
            continue
        for name in {param.opts[0], param.opts[-1], *param.secondary_opts[:1]}:
            once = [name] if param.is_flag else [name, "1"]
            code, lines = said([*path, *once, *once])
            assert code == 2 and len(lines) == 1, (path, name, lines)
            assert f"{name}: given more than once" in lines[0], lines


def test_two_names_of_one_option_are_the_option_twice():
    code, lines = said(["account", "dpsgd", "--iters", "4", "--bins=5"])
    assert code == 2 and "--iters and --bins: given more than once" in lines[0]
    code, lines = said(["optimize", "--time-scale", "--no-time-scale"])
    assert code == 2 and "--time-scale and --no-time-scale: given" in lines[0]


def test_what_may_be_repeated_adds_up():
    names = {
        (*path, param.name) for path in EVERY for param in of(path) if getattr(param, "multiple", 0)
    }
    assert names == {
        ("account", "balls-in-bins", "also"),
        ("compare", "include"),
        ("data", "build", "paths"),
        ("data", "build", "public"),
    }


def test_a_scheme_is_given_each_number_once():
    with pytest.raises(UsageError, match="gives probability more than once"):
        sampling.parse("poisson:probability=0.05,iterations=2,probability=0.5")


@pytest.mark.ci
def test_companions_compose():
    """σ with several is no less than with any of them alone, in either order."""

    def sigma(*also):
        words = ["account", "balls-in-bins", *SMALL, "--eps", "2", "--delta", "1e-3"]
        words += ["--certify-samples", "8192", "--seed", "1"]
        actual = printed(*words, *(f"--also={text}" for text in also))
        assert len(actual["details"]["composed_with"]) == len(also)
        return actual["noise_multiplier"]

    one_companion = sigma("pure:0.5")
    pair = [sigma("pure:0.5", "pure:1e-3"), sigma("pure:1e-3", "pure:0.5")]
    # to the accuracy that σ is searched to
    assert min(pair) >= one_companion * (1 - 1e-5) and pair[0] == pytest.approx(pair[1], rel=1e-6)
    assert sigma("pure:0.5", "pure:0.5") > 1.05 * one_companion
