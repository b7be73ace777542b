"""The accountants that come with mfopt, an accountant a class, found by the scheme that it names.

Importing this registers them; :mod:`mfopt.accounting.account` asks them.
"""

from mfopt.accounting.accountants import (
    b_min_sep,
    balls_in_bins,
    fresh_bins,
    independent_rounds,
    unamplified,
)

__all__ = ["b_min_sep", "balls_in_bins", "fresh_bins", "independent_rounds", "unamplified"]
