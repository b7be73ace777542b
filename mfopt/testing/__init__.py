"""Conformance checks for what a third party adds, as scikit-learn's ``check_estimator``.

Each check takes an example and raises :class:`AssertionError` with the rule that it breaks. The
statistical ones use fixed seeds and five standard errors; what they let pass is not proven, what
they refuse is wrong.
"""

from mfopt.testing.accountants import check_accountant
from mfopt.testing.sampled_laws import check_sampled_law
from mfopt.testing.schemes import check_scheme
from mfopt.testing.strategies import check_strategy

__all__ = ["check_accountant", "check_sampled_law", "check_scheme", "check_strategy"]
