"""What a user chooses between: kinds of C with the sampling that they are run under.

Where a family has a size (bands), a comparison takes the one with the least RMSE at each ε.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mfopt import _check, _sizes
from mfopt.experiments import tasks
from mfopt.experiments.cache import Task
from mfopt.experiments.tasks import BALLS, FRESH, POISSON, UNAMPLIFIED
from mfopt.optimize import kinds, sizes
from mfopt.sampling import BallsInBins, BinScheme, FreshBins
from mfopt.strategies import registered

if TYPE_CHECKING:
    from mfopt.experiments.comparison import Comparison

BUFFERS = (2, 3, 4, 5)
FRESH_BANDS = 16  # of a C optimized under fresh bins: its search takes long, and few are enough
FIXED, FIXED_ORDER, AMPLIFIED = "closed form", "optimized without amplification", "optimized"


class Family(NamedTuple):
    """A kind of C, how it is found, and the sampling that it is run under.

    Attributes:
      label: what a reader sees, at most 34 letters.
      kind: of C.
      sampling: "unamplified", "poisson", "balls-in-bins" or "fresh-bins".
      found: in closed form, optimized in fixed order, or optimized under its sampling.
      scaled: whether C is put between two diagonals that vary with time.
      buffers: of a BLT.
      bands: whether there is a number of bands to choose.
      equal_columns: of C optimized in fixed order: cyclic Poisson sampling needs them.
      slow: left out unless named.
    """

    label: str
    kind: str
    sampling: str
    found: str
    scaled: bool = False
    buffers: int = 0
    bands: bool = False
    equal_columns: bool = True
    slow: bool = False

    def candidates(self, s: Comparison, epsilon: float) -> list[tuple[int, Task]]:
        """Sizes to choose from at this ε, with the task that gives their σ."""
        return [
            (
                width or self.buffers,
                tasks.sigma_task(
                    self._optimum(s, epsilon, width),
                    self.sampling,
                    s.bins,
                    s.epochs,
                    epsilon,
                    s.delta,
                    seed=s.seed,
                    samples=s.samples,
                    schedule=s.schedule,
                ),
            )
            for width in self._widths(s)
        ]

    def _widths(self, s: Comparison) -> Sequence[int]:
        if not self.bands:
            return (0,)
        if self.sampling == FRESH:  # fewer bands are among more
            return (max((w for w in s.widths if w <= min(s.bins, FRESH_BANDS)), default=1),)
        if self.found == AMPLIFIED:
            # one search for each ε is much work, and as many as an epoch has steps are the best of
            # all at a large ε
            return (min(s.bins, max(s.widths)),)
        # under cyclic Poisson sampling the rate within a group is 1 at bands = bins: nothing is
        # left to amplify
        most = s.bins if self.sampling == POISSON else s.bins * s.epochs
        least = 1 if self.found == FIXED_ORDER else 2
        return [width for width in s.widths if least <= width <= most]

    def _optimum(self, s: Comparison, epsilon: float, width: int) -> Task:
        if self.found == FIXED or width == 1:
            return tasks.fixed_task("identity" if width == 1 else self.kind, max(width, 1))
        if self.found == FIXED_ORDER:
            return tasks.unamplified_task(
                self.kind,
                s.bins,
                s.epochs,
                width,
                buffers=self.buffers,
                equal_columns=self.equal_columns,
                schedule=s.schedule,
            )
        return tasks.amplified_task(
            self.kind,
            s.bins,
            s.epochs,
            epsilon,
            s.delta,
            sampling=self.sampling,
            scaled=self.scaled,
            bands=max(width, 1),
            buffers=self.buffers,
            seed=s.seed,
            schedule=s.schedule,
        )

    def require(self, s: Comparison) -> None:
        """Refuse a search or an account that does not fit into the memory that is free."""
        scheme = self._bins(s)
        if scheme is not None:
            sizes.require(self.kind, scheme, **self._of_search(s))
            return
        _sizes.require("bins", s.bins, lambda bins: self._of_vectors(bins * s.epochs))

    def memory(self, s: Comparison) -> float:
        """Bytes that the largest cell takes."""
        scheme = self._bins(s)
        if scheme is not None:
            return sizes.memory(self.kind, scheme, **self._of_search(s))
        return self._of_vectors(s.bins * s.epochs)

    def _bins(self, s: Comparison) -> BinScheme | None:
        made = {BALLS: BallsInBins, FRESH: FreshBins}.get(self.sampling)
        return None if made is None else made(s.bins, s.epochs)

    def _of_search(self, s: Comparison) -> dict[str, Any]:
        samples = kinds.find(self.kind).samples if self.found == AMPLIFIED else 0
        widest = max(self._widths(s), default=1) or 1
        return {"samples": samples, "bands": min(widest, s.bins * s.epochs), "buffers": 8}

    def _of_vectors(self, n: int) -> float:
        # vectors over all steps, and all of X = CᵀC where C is dense
        return 8.0 * n * (60 + (12 if self.kind == "dense" else 0) * n)


# order is the order of tables
FAMILIES: dict[str, Family] = {
    "dpsgd+unamplified": Family("DP-SGD, unamplified", "identity", UNAMPLIFIED, FIXED),
    "dpsgd+poisson": Family("DP-SGD, Poisson", "identity", POISSON, FIXED),
    "dpsgd+balls-in-bins": Family("DP-SGD, balls-in-bins", "identity", BALLS, FIXED),
    "dpsgd+fresh-bins": Family("DP-SGD, fresh bins", "identity", FRESH, FIXED),
    "banded+unamplified": Family(
        "banded, unamplified", "banded", UNAMPLIFIED, FIXED_ORDER, bands=True, equal_columns=False
    ),
    "banded+poisson": Family("banded, cyclic Poisson", "banded", POISSON, FIXED_ORDER, bands=True),
    "banded+balls-in-bins": Family(
        "banded, balls-in-bins", "banded", BALLS, FIXED_ORDER, bands=True
    ),
    "banded-toeplitz+unamplified": Family(
        "banded Toeplitz, unamplified", "banded-toeplitz", UNAMPLIFIED, FIXED_ORDER, bands=True
    ),
    "banded-toeplitz+poisson": Family(
        "banded Toeplitz, cyclic Poisson", "banded-toeplitz", POISSON, FIXED_ORDER, bands=True
    ),
    "banded-toeplitz+balls-in-bins": Family(
        "banded Toeplitz, balls-in-bins", "banded-toeplitz", BALLS, FIXED_ORDER, bands=True
    ),
    "blt-4+unamplified": Family("BLT-4, unamplified", "blt", UNAMPLIFIED, FIXED_ORDER, buffers=4),
    "dense+unamplified": Family(
        "dense multi-epoch, unamplified", "dense", UNAMPLIFIED, FIXED_ORDER, slow=True
    ),
    **{
        f"blt-{d}": Family(f"BLT-{d}", "blt", BALLS, AMPLIFIED, buffers=d, slow=d != 4)
        for d in BUFFERS
    },
    "toeplitz": Family("Toeplitz", "toeplitz", BALLS, AMPLIFIED),
    **{
        f"blt-{d}-scaled": Family(
            f"BLT-{d}, time-scaled", "blt", BALLS, AMPLIFIED, True, d, slow=d not in (2, 4)
        )
        for d in BUFFERS
    },
    "toeplitz-scaled": Family("Toeplitz, time-scaled", "toeplitz", BALLS, AMPLIFIED, True),
    "banded-toeplitz-scaled": Family(
        "banded Toeplitz, time-scaled", "banded-toeplitz", BALLS, AMPLIFIED, True, bands=True
    ),
    "banded-toeplitz-scaled+fresh-bins": Family(
        "banded Toeplitz scaled, fresh bins",
        "banded-toeplitz",
        FRESH,
        AMPLIFIED,
        True,
        bands=True,
    ),
    "cyclic-blocks-5-scaled": Family(
        "cyclic blocks (5), time-scaled", "cyclic-blocks", BALLS, AMPLIFIED, True, 5
    ),
    "wave-blt-4-scaled": Family(
        "BLT with a wave (4), time-scaled", "wave-blt", BALLS, AMPLIFIED, True, 4
    ),
    "banded+amplified": Family("banded", "banded", BALLS, AMPLIFIED, bands=True),
    "dense": Family("dense", "dense", BALLS, AMPLIFIED, slow=True),
    "sqrt": Family("square root, balls-in-bins", "sqrt", BALLS, FIXED),
    "banded-sqrt": Family(
        "banded square root, balls-in-bins", "banded-sqrt", BALLS, FIXED, bands=True
    ),
    "banded-sqrt+poisson": Family(
        "banded square root, cyclic Poisson", "banded-sqrt", POISSON, FIXED, bands=True
    ),
    "banded-inverse-sqrt": Family(
        "banded inverse sqrt, balls-in-bins", "banded-inverse-sqrt", BALLS, FIXED, bands=True
    ),
    "tree": Family("tree (Honaker), balls-in-bins", "tree", BALLS, FIXED),
}
DEFAULT = tuple(name for name, family in FAMILIES.items() if not family.slow)


def find(name: str, argument: str = "include") -> Family:
    """The family of that name, or that of a kind that a user has defined.

    An error says that it was given as ``argument``.

    Raises:
      UsageError: neither.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if name not in _own_kinds():
        raise _check.reject(
            argument, name, "is not a family", f"Choose from {', '.join(FAMILIES)}."
        )
    if name in kinds.names():
        return Family(name, name, BALLS, AMPLIFIED, buffers=4)
    return Family(name, name, BALLS, FIXED)


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Families for names as a user writes them: a family, or the part before its "+", or "all".

    >>> expand(["blt-4", "dpsgd"])[:2]
    ('blt-4', 'dpsgd+unamplified')
    """
    chosen: list[str] = []
    for name in names:
        if name == "all":
            found = list(FAMILIES)
        elif name in FAMILIES or name in _own_kinds():
            found = [name]
        else:
            found = [f for f in FAMILIES if f.split("+")[0] == name]
            found = found or [f for f in FAMILIES if f.startswith(f"{name}-")]
        if not found:
            raise _check.reject(
                "include", name, "is not a family", f"Choose from {', '.join(FAMILIES)}, all."
            )
        chosen += found
    return tuple(dict.fromkeys(chosen))


def memory(s: Comparison) -> float:
    """Bytes that the largest cell takes, in a process of its own."""
    return max(find(name).memory(s) for name in s.include)


def label(name: str) -> str:
    """What a reader sees of a family."""
    return FAMILIES[name].label if name in FAMILIES else name


def _own_kinds() -> set[str]:
    """Kinds that a user has defined and that the optimizer, or nothing but a name, makes."""
    own = {kind for kind, cls in registered().items() if not cls.__module__.startswith("mfopt.")}
    return own & {*kinds.names(), *kinds.fixed_names()}
