"""The accountants that come with mfopt, an accountant a class, found by the scheme that it names.

Importing this registers them; :mod:`mfopt.accounting.account` asks them.
"""

from mfopt.accounting.accountants import balls_in_bins, independent_rounds, sampled, unamplified

__all__ = ["balls_in_bins", "independent_rounds", "sampled", "unamplified"]
