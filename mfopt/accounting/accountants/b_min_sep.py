"""b-min-sep sampling: samples that are verified, for any C >= 0 within the separation."""

from __future__ import annotations

from mfopt.accounting.accountants.sampled import SampledAccountant
from mfopt.accounting.monte_carlo.b_min_sep import BMinSepLaw


class BMinSepAccountant(SampledAccountant):
    """Any group, by its profile."""

    schemes = (BMinSepLaw.covers,)  # the law is registered where it is defined
