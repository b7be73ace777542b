"""Jensen's gap in the add direction: with many patterns it is never near 0, and clipped.

The "mean" proposal of :mod:`.importance` draws X from R = N(−t m̄, I), in noise units; its values
are f = e^(t <m̄, X> + t²ρ/2) δ₂(ε + Y). With ḡ = E_k |m_k|² and the *gap* F = Y − <m̄, X> + ḡ/2,
which is >= 0 by Jensen's inequality,

    (1) f = e^(t²ρ/2 + t(ḡ/2 − ε)) · e^(t(ε + Y)) δ₂(ε + Y) · e^(−tF) <= B e^(−tF),

B being the ceiling that is proven there. It is met at F = 0 alone. Where many modes hardly overlap
the gap is about ḡ/2 whatever X is, since Y is the log of a mean of many terms, and a ceiling for an
F that never occurs asks for hundreds of thousands of samples.

    (2) F is convex in X: the logarithm of a sum of exponentials of affine functions, less an affine
        one. So (1−θ){F <= s} + θ{F <= s'} lies in {F <= (1−θ)s + θs'}, these sets are convex, and
        by Ehrhard's inequality for the Gaussian measure R (Ehrhard 1983, for convex sets)
        h(s) = Φ⁻¹(R(F <= s)) is concave.

    (3) For s_1 < s_2 with R(F <= s_1) <= Φ(h_1), R(F <= s_2) >= Φ(h_2) and
        k = (h_2 − h_1)/(s_2 − s_1) > 0 therefore R(F <= s) <= Φ(h_1 − k(s_1 − s)) at all s <= s_1.

(3) says of a tail that no sample reaches what samples of the bulk prove: R(F <= s_1) and
R(F <= s_2) have confidence bounds by counting (Clopper and Pearson 1934) on iid samples of R, for
s_1 and s_2 that were fixed before. Values are then clipped at B' = B e^(−tg) for some g <= s_1;
with h_0 = h_1 − k(s_1 − g) and r = t/k

    (4) E_R (f − B')₊ <= E_R (B e^(−tF) − B')₊ = ∫_{s <= g} B t e^(−ts) R(F <= s) ds
                      <= B' · (e^(r h_0 + r²/2) Φ(h_0 + r) − Φ(h_0)),

    (5) H(Q, P) = E_R f <= E_R min(f, B') + (4).

s_1, s_2 and g come from a glance at some samples of F, chosen so that (4) should be 10⁻⁶ B';
whatever they are, (5) holds. The test has β for all: half of it for the clipped mean, a quarter for
each count. At ε = 2, δ = 1e-5 the ceiling falls to 1/22 at 4 × 512 and to 1/300 at 8 × 4,096 where
bins are kept, and to 1/190 at 16 × 128 with 16 bands where they are reassigned in each epoch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import scipy

from mfopt.accounting import solve

SAMPLES, GLANCE = 8192, 2048  # of the counts, and of what they are chosen by
ROUNDING = 1e-9  # of F: a sample that is so near to s_1 or s_2 counts against what is proven
_LOW = -1.6  # s_1, in standard deviations of F from its mean, which is s_2
_BEYOND = 1e-6  # (4) over B', as it is planned
_USUAL = 1e-9  # failure probability that it is planned with
_LEAST_CUT = 0.02  # of ḡ: a smaller g gains nothing


class JensenGapBound(NamedTuple):
    """Clipping points, in units of ḡ: as σ moves a little, F moves with it.

    Attributes:
      low, high: s_1 and s_2.
      cut: g.
      samples: to count by.
    """

    low: float
    high: float
    cut: float
    samples: int = SAMPLES


def edges(mean: float, deviation: float) -> tuple[float, float]:
    """s_1 and s_2, by the mean and the standard deviation of F."""
    return mean + _LOW * deviation, mean


def chosen(
    edges: tuple[float, float], shares: tuple[float, float], square: float, t: float, samples: int
) -> JensenGapBound | None:
    """Return the thresholds to count at and the cut; None where clipping gains nothing.

    Args:
      edges: s_1 and s_2.
      shares: about R(F <= s_1) and R(F <= s_2).
      square, t: ḡ and t.
      samples: that the counts will be of.
    """
    low, high = edges
    below, half = (round(samples * share) for share in shares)
    first, second = _line(below, half, samples, _USUAL)
    if not (low < high and math.isfinite(first) and first < second and square > 0):
        return None
    slope = (second - first) / (high - low)
    if _log_beyond(0.0, t / slope) <= math.log(_BEYOND):
        return None
    height = solve.root(lambda h: _log_beyond(h, t / slope) - math.log(_BEYOND), -40.0, 0.0)
    cut = low - max(first - height, 0.0) / slope
    if not cut > _LEAST_CUT * square:
        return None
    return JensenGapBound(low / square, high / square, cut / square, samples)


def beyond(
    gap: JensenGapBound, square: float, t: float, counts: tuple[int, int], samples: int, beta: float
) -> float:
    """Upper bound of (4) over B', except with probability ``beta``; infinite where there is none.

    Args:
      gap: fixed before the samples were drawn.
      square, t: ḡ and t.
      counts: of samples with F <= s_1, and with F <= s_2.
      samples, beta: iid samples of R, and failure probability.
    """
    first, second = _line(*counts, samples, beta / 2)
    low, high, cut = (square * part for part in gap[:3])
    if not (second > first and cut <= low < high):
        return math.inf
    slope = (second - first) / (high - low)
    return math.exp(min(_log_beyond(first - slope * (low - cut), t / slope), 700.0))


def _line(below: int, half: int, samples: int, beta: float) -> tuple[float, float]:
    """(h_1, h_2), either of them wrong with probability ``beta`` at most."""
    most = scipy.special.betainccinv(below + 1, samples - below, beta) if below < samples else 1.0
    least = scipy.special.betaincinv(half, samples - half + 1, beta) if half > 0 else 0.0
    ends = min(most * (1 + ROUNDING), 1.0), least * (1 - ROUNDING)
    return float(scipy.special.ndtri(ends[0])), float(scipy.special.ndtri(ends[1]))


def _log_beyond(height: float, ratio: float) -> float:
    """log of (4) over B' at h_0 and r."""
    first = ratio * height + ratio**2 / 2 + float(scipy.special.log_ndtr(height + ratio))
    second = float(scipy.special.log_ndtr(height))
    # the difference of two numbers near each other: what rounding adds is counted
    share = -math.expm1(min(second - first, 0.0)) + 1e-12
    return first + math.log(share)
