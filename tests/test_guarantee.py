"""The record of a statement: what its fields may be, and what a file may say."""

import math

import numpy as np
import pytest
from commands import invoked
from mfopt_cli.main import main

from mfopt.errors import UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee, questionable_delta
from mfopt.sampling import BallsInBins
from mfopt.strategies import Identity
from mfopt.workloads import PrefixSums

GOOD = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": 1.5}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("epsilon", 10**400, "finite"),
        ("epsilon", math.nan, r"\[0, inf\]"),
        ("epsilon", -1.0, r"\[0, inf\]"),
        ("epsilon", True, "a number"),
        ("epsilon", "2", "a number"),
        ("epsilon", [2.0], "a number"),
        ("delta", 1.5, r"\[0, 1\]"),
        ("delta", np.True_, "a number"),
        ("noise_multiplier", math.nan, r"\[0, inf\]"),
        ("noise_multiplier", None, "a number"),
        ("failure_probability", "small", "a number"),
        ("failure_probability", 2.0, r"\[0, 1\]"),
        ("group_size", True, "whole number"),
        ("group_size", 1.5, "whole number"),
        ("method", 3, "class str"),
        ("privacy_unit", "", "a word"),
        ("adjacency", "none", "one of"),
        ("status", "proven", "one of"),
        ("details", [], "class dict"),
        ("details", {"bracket": 3}, "a lower and an upper end"),
        ("details", {"bracket": [1.0, "2"]}, "upper end of the bracket"),
        ("details", {"bracket": [2.0, 1.0]}, "lower end of the bracket"),
    ],
)
def test_a_field_that_is_none_is_refused_by_its_name(field, value, rule):
    with pytest.raises(UsageError, match=rule) as caught:
        Guarantee(**{**GOOD, field: value})
    name = "bracket" if field == "details" and value else field
    assert name in str(caught.value) and len(str(caught.value)) < 200


def test_a_certified_delta_counts_the_chance_that_its_proof_fails():
    with pytest.raises(UsageError, match="failure_probability"):
        Guarantee(**GOOD, status="certified", failure_probability=2e-5)
    assert Guarantee(**GOOD, status="certified", failure_probability=1e-5).proved


def test_numbers_of_numpy_become_pythons():
    guarantee = Guarantee(np.float32(2.0), np.float64(1e-5), np.int64(2), group_size=np.int64(3))
    kinds = [
        type(value) for value in (guarantee.epsilon, guarantee.delta, guarantee.noise_multiplier)
    ]
    assert kinds == [float] * 3 and type(guarantee.group_size) is int


def test_a_description_gives_the_guarantee_back():
    guarantee = Guarantee(**GOOD, details={"bracket": [1.0, 2.0]})
    assert Guarantee.from_description(guarantee.describe()) == guarantee
    for described in (
        guarantee.describe() | {"certified": True},
        {name: value for name, value in guarantee.describe().items() if name != "method"},
        guarantee.describe() | {"epsilon": math.inf},
        ["epsilon"],
    ):
        with pytest.raises(UsageError) as caught:
            Guarantee.from_description(described)
        assert "__init__" not in str(caught.value)


@pytest.mark.parametrize(
    ("delta", "population", "said"),
    [
        (1e-5, None, ""),
        (1e-3, None, ""),
        (1e-5, 99_999, ""),
        (1e-5, 100_000, "not below 1/N for N = 100,000"),
        (1e-5, 10**7, "not below 1/N"),
        (0.0011, None, "above 0.001"),
        (0.0011, 100, "above 0.001"),
        (0.999999, None, "above 0.001"),
    ],
)
def test_a_delta_that_permits_publication_is_questioned(delta, population, said):
    actual = questionable_delta(delta, population)
    assert said in actual and bool(said) == bool(actual)


def test_the_doors_question_a_delta():
    words = ["account", "dpsgd", "--iters", 10, "--noise-multiplier", 1]
    drawn = ["--batch-size", 100, "--delta", 1e-5, "--population"]
    assert "1/N" in invoked(*words, *drawn, 10**7).stderr
    assert "warning" not in invoked(*words, *drawn, 1000).stderr
    assert "above 0.001" in invoked(*words, "--probability", 0.1, "--eps", 0.1).stderr

    guarantee = Guarantee(2.0, 1e-3, 1.0)
    file = Factorization(Identity(), 1.0, BallsInBins(2, 2), PrefixSums(), guarantee)
    file.sampler(population=999)
    with pytest.warns(UserWarning, match=r"1/N for N = 1,000 "):
        file.sampler(population=1000)


def test_help_of_a_group_is_whole(capsys):
    main(["account", "--help"])
    assert "..." not in capsys.readouterr().out.split("Commands:")[1]
