"""Families of mechanisms: kinds of C with the sampling that they are run under.

Where a family has a size (bands), a comparison takes the one with the least RMSE at each ε.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mfopt._runtime import _check, _sizes
from mfopt.experiments.cache import Cell
from mfopt.experiments.mechanisms import (
    B_MIN_SEP,
    BALLS,
    FRESH,
    POISSON,
    RANDOM_PARTITION,
    SAMPLED,
    UNAMPLIFIED,
    AmplifiedCell,
    FixedCell,
    Goal,
    SigmaCell,
    UnamplifiedCell,
)
from mfopt.experiments.published import PublishedCell
from mfopt.optimize import kinds, sizes
from mfopt.sampling import BinScheme
from mfopt.strategies import registered

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# how C is found: in closed form, optimized in fixed order or under the sampling
FIXED, FIXED_ORDER, AMPLIFIED = "closed", "fixed-order", "optimized"


class Family(NamedTuple):
    """A kind of C, how it is found, and the sampling that it is run under.

    Attributes:
      label: what a reader sees, at most 34 letters; with * where the form of C is this library's.
      kind: of C.
      sampling: "unamplified", "poisson", "random-partition", "b-min-sep", "balls-in-bins" or
        "fresh-bins".
      search: how C is found, see :data:`FIXED`; or a form of :func:`.published.strategy`.
      scaled: whether C is put between two diagonals that vary with time.
      buffers: of a BLT.
      bands: whether there is a number of bands to choose.
      equal_columns: of C optimized in fixed order: cyclic Poisson sampling needs them.
      slow: left out unless named.
    """

    label: str
    kind: str
    sampling: str = BALLS
    search: str = AMPLIFIED
    scaled: bool = False
    buffers: int = 0
    bands: bool = False
    equal_columns: bool = True
    slow: bool = False

    def candidates(self, setting: Comparison, epsilon: float) -> list[tuple[int, SigmaCell]]:
        """Sizes to choose from at this ε, with the cell of their σ."""
        goal, widths = setting.goal(epsilon, self.sampling), self._widths(setting)
        if self.sampling == B_MIN_SEP:
            bands, separation = tuned_b_min_sep(setting.bins, epsilon)
            goal = setting.goal(epsilon, self.sampling, separation)
            widths = (bands,) if separation >= bands else ()
        return [
            (width or self.buffers, SigmaCell(self._optimum(goal, width), goal, setting.samples))
            for width in widths
        ]

    def _widths(self, setting: Comparison) -> Sequence[int]:
        if not self.bands:
            return (0,)
        if self.sampling == FRESH:  # fewer bands are among more
            return (max((w for w in setting.widths if w <= setting.bins), default=1),)
        if self.search == AMPLIFIED:
            # one search for each ε is much work, and as many as an epoch has steps are the best of
            # all at a large ε
            return (min(setting.bins, max(setting.widths)),)
        # under cyclic Poisson sampling the rate within a group is 1 at bands = bins: nothing is
        # left to amplify
        widest = setting.bins * setting.epochs
        widest = {POISSON: setting.bins, RANDOM_PARTITION: setting.bins - 1}.get(
            self.sampling, widest
        )
        narrowest = 1 if self.search == FIXED_ORDER else 2
        return [width for width in setting.widths if narrowest <= width <= widest]

    def _optimum(self, goal: Goal, width: int) -> Cell:
        if self.search == FIXED or width == 1:
            return FixedCell("identity" if width == 1 else self.kind, max(width, 1))
        if self.search == AMPLIFIED:
            return AmplifiedCell(goal, self.kind, self.scaled, max(width, 1), self.buffers)
        if self.search == FIXED_ORDER:
            size = goal.bins, goal.epochs, width, self.buffers
            return UnamplifiedCell(self.kind, *size, self.equal_columns)
        return PublishedCell(goal, self.search, width or 2)

    def require(self, setting: Comparison) -> None:
        """Refuse a search or an account that does not fit into the memory that is free."""
        if scheme := self._scheme(setting):
            sizes.require(scheme, self._of_search(setting))
        else:
            _sizes.require(
                "bins", setting.bins, lambda bins: self._of_vectors(bins * setting.epochs)
            )

    def memory(self, setting: Comparison) -> float:
        """Bytes that the largest cell takes."""
        if scheme := self._scheme(setting):
            return sizes.memory(scheme, self._of_search(setting))
        return self._of_vectors(setting.bins * setting.epochs)

    def _scheme(self, setting: Comparison) -> BinScheme | None:
        return setting.goal(1.0, self.sampling).bin_scheme() if self.sampling in SAMPLED else None

    def _of_search(self, setting: Comparison) -> sizes.Load:
        samples = kinds.find(self.kind).samples if self.search == AMPLIFIED else 0
        widest = max(self._widths(setting), default=1) or 1
        bands = min(widest, setting.bins * setting.epochs)
        return sizes.Load(self.kind, samples, bands, self.buffers or 1)

    def _of_vectors(self, n: int) -> float:
        # vectors over all steps, and all of X = CᵀC where C is dense
        return 8.0 * n * (60 + (12 if self.kind == "dense" else 0) * n)


# (ε, bands, separation) of b-min-sep with the least final-model error at 16 × 128: its σ is slow to
# estimate, and these were tuned once (artifacts/tables/field-16x128.csv)
B_MIN_SEP_TUNED = ((16.0, 96, 112), (8.0, 64, 96), (2.0, 16, 88), (0.5, 4, 88))


def tuned_b_min_sep(bins: int, epsilon: float) -> tuple[int, int]:
    """Bands and separation of b-min-sep: the parts of an epoch tuned at the next ε,
    the larger of two that are as near."""
    _, bands, separation = min(B_MIN_SEP_TUNED, key=lambda tuned: abs(math.log(tuned[0] / epsilon)))
    return max(2, bands * bins // 128), separation * bins // 128


# order is the order of tables
FAMILIES = {
    "dpsgd+unamplified": Family("DP-SGD, unamplified", "identity", UNAMPLIFIED, FIXED),
    "dpsgd+poisson": Family("DP-SGD, Poisson", "identity", POISSON, FIXED),
    "dpsgd+balls-in-bins": Family("DP-SGD, balls-in-bins", "identity", BALLS, FIXED),
    "dpsgd+fresh-bins": Family("DP-SGD, fresh bins", "identity", FRESH, FIXED),
    "banded+unamplified": Family(
        "banded, unamplified", "banded", UNAMPLIFIED, FIXED_ORDER, bands=True, equal_columns=False
    ),
    "banded+poisson": Family("banded, cyclic Poisson", "banded", POISSON, FIXED_ORDER, bands=True),
    "banded+random-partition": Family(
        "banded, random partition", "banded", RANDOM_PARTITION, FIXED_ORDER, bands=True, slow=True
    ),
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
    "banded-toeplitz+b-min-sep": Family(
        "banded Toeplitz, b-min-sep", "banded-toeplitz", B_MIN_SEP, FIXED_ORDER, bands=True
    ),
    "blt-4+unamplified": Family("BLT-4, unamplified", "blt", UNAMPLIFIED, FIXED_ORDER, buffers=4),
    "dense+unamplified": Family(
        "dense multi-epoch, unamplified", "dense", UNAMPLIFIED, FIXED_ORDER, slow=True
    ),
    **{
        f"blt-{count}": Family(f"BLT-{count}", "blt", slow=count != 4, buffers=count)
        for count in (2, 3, 4, 5)
    },
    "toeplitz": Family("Toeplitz", "toeplitz"),
    **{
        f"blt-{count}-scaled": Family(
            f"BLT-{count}, time-scaled*", "blt", scaled=True, slow=count % 2 == 1, buffers=count
        )
        for count in (2, 3, 4, 5)
    },
    "toeplitz-scaled": Family("Toeplitz, time-scaled*", "toeplitz", scaled=True),
    "banded-toeplitz-scaled": Family(
        "banded Toeplitz, time-scaled*", "banded-toeplitz", scaled=True, bands=True
    ),
    "banded-toeplitz-scaled+fresh-bins": Family(
        "banded Toeplitz*, fresh bins", "banded-toeplitz", FRESH, scaled=True, bands=True
    ),
    **{
        f"cleared-blt-{count}-scaled+fresh-bins": Family(
            f"cleared BLT {count} scaled*, fresh bins",
            "cleared-blt",
            FRESH,
            scaled=True,
            slow=True,
            buffers=count,
        )
        for count in (2, 4, 8, 16)
    },
    "wave-blt-4-scaled": Family(
        "BLT with a wave (4), time-scaled*", "wave-blt", scaled=True, buffers=4
    ),
    "banded+amplified": Family("banded", "banded", bands=True),
    "dense": Family("dense", "dense", slow=True),
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
    "normalized-sqrt": Family("normalized sqrt, balls-in-bins", "sqrt", BALLS, "normalized-sqrt"),
    "lambda-cgd": Family("DP-λCGD, balls-in-bins", "banded-inverse-sqrt", BALLS, "lambda-cgd"),
    "bifr": Family("BIFR, balls-in-bins", "banded-inverse-sqrt", BALLS, "bifr", bands=True),
    "tree": Family("tree (Honaker), balls-in-bins", "tree", BALLS, FIXED),
}
DEFAULT = tuple(name for name, family in FAMILIES.items() if not family.slow)


class Comparison(NamedTuple):
    """Setting of a comparison.

    Attributes:
      bins, epochs: iterations an epoch, and epochs; n = bins · epochs.
      epsilons, delta: targets.
      include: names of families.
      widths: numbers of bands to choose from.
      seed: pins the Monte Carlo samples.
      samples: of each reported σ.
    """

    bins: int
    epochs: int
    epsilons: tuple[float, ...]
    delta: float = 1e-5
    include: tuple[str, ...] = DEFAULT
    widths: tuple[int, ...] = WIDTHS
    seed: int = 0
    samples: int = 2**15

    def goal(self, epsilon: float, sampling: str, separation: int = 0) -> Goal:
        """Goal of a mechanism at one ε and sampling, with its least separation or groups."""
        shape_and_target = self.bins, self.epochs, float(epsilon), self.delta, sampling
        return Goal(*shape_and_target, seed=self.seed, separation=separation)

    def check(self) -> Comparison:
        """Return it, or raise :class:`UsageError`."""
        _check.integer("iters", self.bins)
        _check.integer("epochs", self.epochs)
        _check.probability("delta", self.delta)
        if not self.epsilons:
            raise _check.reject("eps", "", "name at least one ε")
        for epsilon in self.epsilons:
            _check.epsilon("eps", epsilon)
        for width in self.widths:
            _check.integer("bands", width)
        for name in self.include:
            find(name).require(self)
        return self


def find(name: str) -> Family:
    """Return the family of that name, or that of a kind that a user has defined.

    Raises:
      UsageError: neither.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if name not in _user_kinds():
        way_out = f"Choose from {', '.join(FAMILIES)}."
        raise _check.reject("include", name, "is not a family", way_out)
    if name in kinds.names():
        return Family(name, name, buffers=4)
    return Family(name, name, search=FIXED)


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Families for names as a user writes them: a family, or the part before its "+", or "all".

    >>> expand(["blt-4", "dpsgd"])[:2]
    ('blt-4', 'dpsgd+unamplified')
    """
    chosen: list[str] = []
    for name in names:
        if name == "all":
            matching = list(FAMILIES)
        elif name in FAMILIES or name in _user_kinds():
            matching = [name]
        else:
            matching = [f for f in FAMILIES if f.split("+")[0] == name]
            matching = matching or [f for f in FAMILIES if f.startswith(f"{name}-")]
        if not matching:
            way_out = f"Choose from {', '.join(FAMILIES)}, all."
            raise _check.reject("include", name, "is not a family", way_out)
        chosen += matching
    return tuple(dict.fromkeys(chosen))


def memory(setting: Comparison) -> float:
    """Bytes that the largest cell takes, in a process of its own."""
    return max(find(name).memory(setting) for name in setting.include)


def label(name: str) -> str:
    """Label of a family for readers; the end of a name that is long."""
    if name in FAMILIES:
        return FAMILIES[name].label
    return name if len(name) <= 28 else f"…{name[-27:]}"


def _user_kinds() -> set[str]:
    """Kinds that a user has defined and that the optimizer, or nothing but a name, makes."""
    defined = registered().items()
    user_kinds = {kind for kind, cls in defined if not cls.__module__.startswith("mfopt.")}
    return user_kinds & {*kinds.all_names()}
