"""The record of a statement: what its fields may be, and what a file may say."""

import math

import numpy as np
import pytest

from mfopt.errors import UsageError
from mfopt.guarantee import Guarantee

GOOD = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": 1.5}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("epsilon", 10**400, "finite"),
        ("epsilon", math.nan, "NaN"),
        ("epsilon", -1.0, "negative"),
        ("epsilon", True, "a number"),
        ("epsilon", "2", "a number"),
        ("epsilon", [2.0], "a number"),
        ("delta", 1.5, r"\[0, 1\]"),
        ("delta", np.True_, "a number"),
        ("noise_multiplier", math.nan, "NaN"),
        ("noise_multiplier", None, "a number"),
        ("failure_probability", "small", "a number"),
        ("failure_probability", 2.0, r"\[0, 1\]"),
        ("group_size", True, "whole number"),
        ("group_size", 1.5, "whole number"),
        ("method", 3, "a text"),
        ("privacy_unit", "", "a word"),
        ("adjacency", "none", "one of"),
        ("status", "proven", "one of"),
        ("details", [], "a dictionary"),
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


def test_numbers_of_numpy_become_pythons():
    made = Guarantee(np.float32(2.0), np.float64(1e-5), np.int64(2), group_size=np.int64(3))
    kinds = [type(value) for value in (made.epsilon, made.delta, made.noise_multiplier)]
    assert kinds == [float] * 3 and type(made.group_size) is int


def test_a_description_gives_the_guarantee_back():
    made = Guarantee(**GOOD, details={"bracket": [1.0, 2.0]})
    assert Guarantee.from_description(made.describe()) == made
    for described in (
        made.describe() | {"certified": True},
        {name: value for name, value in made.describe().items() if name != "method"},
        made.describe() | {"epsilon": math.inf},
        ["epsilon"],
    ):
        with pytest.raises(UsageError) as caught:
            Guarantee.from_description(described)
        assert "__init__" not in str(caught.value)
