"""What an optimization holds in memory: told before it starts, in place of being killed in it.

The counts below were read off XLA's own account of the compiled programs (10 bins-by-epochs
sizes, most within a few percent) and off SciPy's L-BFGS-B; they are of float64 numbers.
"""

from __future__ import annotations

from mfopt import _check, _sizes
from mfopt.sampling import BallsInBins

_BASE = 2**29  # bytes: Python, JAX and what it compiles
_PAIRS = {True: 20, False: 8}  # of vectors kept by L-BFGS-B, for few and for many parameters


def memory(
    kind: str, bins: int, epochs: int, *, samples: int, bands: int = 1, buffers: int = 1
) -> float:
    """Bytes at the peak of optimizing and certifying a C of ``kind``.

    Args:
      kind: of C; one that is not known here is taken for a structured one with n parameters.
      bins, epochs: n = bins · epochs.
      samples: frozen Monte Carlo samples; 0 for a C that is not optimized.
      bands, buffers: of banded kinds and of BLT.
    """
    n = float(bins) * epochs
    parameters = {
        "blt": 2 * buffers,
        "banded-toeplitz": bands,
        "banded": bands * n,
        "dense": n * n,
    }.get(kind, n)
    whole = n * n if kind in ("dense", "tree") else 0.0
    pair = 2 * n * bins + 12 * float(bins) ** 2 + 5 * whole
    powers = 4 * n * buffers if kind == "blt" else 0.0
    if not samples:
        return _BASE + 8 * (pair + 30 * n)
    search = 16 * float(samples) * bins + 14 * float(bins) ** 2 + 4 * whole + powers
    driver = (2 * _PAIRS[parameters < 10**5] + 12) * parameters
    # the pair is made again while the search's vectors are held
    return _BASE + 8 * (max(search, pair) + driver + 30 * n)


def require(
    kind: str, scheme: BallsInBins, *, samples: int, bands: int = 1, buffers: int = 1
) -> None:
    """Refuse an optimization that does not fit into the memory that is free.

    Raises:
      UsageError: with what would fit.
    """
    if kind == "blt" and buffers > scheme.iterations:
        raise _check.reject(
            "buffers",
            buffers,
            f"is more than the run has iterations ({scheme.iterations})",
            "4 to 8 are near the optimum.",
        )

    def need(bins: int) -> float:
        return memory(
            kind,
            bins,
            scheme.epochs,
            samples=samples,
            bands=min(bands, bins * scheme.epochs),
            buffers=buffers,
        )

    _sizes.require("bins", scheme.bins, need)
