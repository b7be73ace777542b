"""Families of mechanisms: kinds of C with the sampling that they are run under.

Where a family has a size (bands), a comparison takes the one with the least RMSE at each ε.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mfopt._runtime import _check, _sizes
from mfopt.experiments.cache import Cell
from mfopt.experiments.mechanisms import (
    B_MIN_SEP,
    BALLS,
    ESTIMATED,
    FRESH,
    POISSON,
    SAMPLED,
    UNAMPLIFIED,
    AmplifiedCell,
    FixedCell,
    Goal,
    ProvenCell,
    SigmaCell,
    UnamplifiedCell,
)
from mfopt.experiments.published import PublishedCell
from mfopt.optimize import kinds, sizes
from mfopt.sampling import BinScheme
from mfopt.strategies import registered

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# how C is found: in closed form, optimized in fixed order, in closed form with the best exponent
FIXED, FIXED_ORDER, PUBLISHED, AMPLIFIED = "closed", "fixed-order", "published", "optimized"


class Family(NamedTuple):
    """A kind of C, how it is found, and the sampling that it is run under.

    Attributes:
      label: what a reader sees, at most 34 letters.
      kind: of C.
      sampling: "unamplified", "poisson", "b-min-sep", "balls-in-bins" or "fresh-bins".
      found: see :data:`FIXED`.
      scaled: whether C is put between two diagonals that vary with time.
      buffers: of a BLT.
      bands: whether there is a number of bands to choose.
      equal_columns: of C optimized in fixed order: cyclic Poisson sampling needs them.
      slow: left out unless named.
      form: of :func:`.published.strategy`.
    """

    label: str
    kind: str
    sampling: str = BALLS
    found: str = AMPLIFIED
    scaled: bool = False
    buffers: int = 0
    bands: bool = False
    equal_columns: bool = True
    slow: bool = False
    form: str = ""

    def candidates(self, s: Comparison, epsilon: float) -> list[tuple[int, SigmaCell]]:
        """Sizes to choose from at this ε, with the cell of their σ."""
        goal = s.goal(epsilon, self.sampling)
        return [
            (width or self.buffers, SigmaCell(self._optimum(goal, width), goal, s.samples))
            for width in self._widths(s)
        ]

    def _widths(self, s: Comparison) -> Sequence[int]:
        if not self.bands:
            return (0,)
        if self.sampling == FRESH:  # fewer bands are among more
            return (max((w for w in s.widths if w <= s.bins), default=1),)
        if self.found == AMPLIFIED:
            # one search for each ε is much work, and as many as an epoch has steps are the best of
            # all at a large ε
            return (min(s.bins, max(s.widths)),)
        # under cyclic Poisson sampling the rate within a group is 1 at bands = bins: nothing is
        # left to amplify
        most = s.bins if self.sampling == POISSON else s.bins * s.epochs
        if self.sampling == B_MIN_SEP:  # beyond half an epoch C has ever less to gain from it
            most = s.bins // 2
        least = 1 if self.found == FIXED_ORDER else 2
        return [width for width in s.widths if least <= width <= most]

    def _optimum(self, goal: Goal, width: int) -> Cell:
        if self.found == FIXED or width == 1:
            return FixedCell("identity" if width == 1 else self.kind, max(width, 1))
        if self.found == PUBLISHED:
            return PublishedCell(goal, self.form, width or 2)
        if self.found == AMPLIFIED:
            return AmplifiedCell(goal, self.kind, self.scaled, max(width, 1), self.buffers)
        size = goal.bins, goal.epochs, width, self.buffers
        return UnamplifiedCell(self.kind, *size, self.equal_columns)

    def require(self, s: Comparison) -> None:
        """Refuse a search or an account that does not fit into the memory that is free."""
        if scheme := self._scheme(s):
            sizes.require(self.kind, scheme, **self._of_search(s))
        else:
            _sizes.require("bins", s.bins, lambda bins: self._of_vectors(bins * s.epochs))

    def memory(self, s: Comparison) -> float:
        """Bytes that the largest cell takes."""
        if scheme := self._scheme(s):
            return sizes.memory(self.kind, scheme, **self._of_search(s))
        return self._of_vectors(s.bins * s.epochs)

    def _scheme(self, s: Comparison) -> BinScheme | None:
        return s.goal(1.0, self.sampling).bin_scheme() if self.sampling in SAMPLED else None

    def _of_search(self, s: Comparison) -> dict[str, Any]:
        samples = kinds.find(self.kind).samples if self.found == AMPLIFIED else 0
        widest = max(self._widths(s), default=1) or 1
        return {
            "samples": samples,
            "bands": min(widest, s.bins * s.epochs),
            "buffers": max(8, self.buffers),
        }

    def _of_vectors(self, n: int) -> float:
        # vectors over all steps, and all of X = CᵀC where C is dense
        return 8.0 * n * (60 + (12 if self.kind == "dense" else 0) * n)


# name | label | kind of C | how it is found where it is not optimized, and what else differs
_TABLE = """
dpsgd+unamplified | DP-SGD, unamplified | identity | closed
dpsgd+poisson | DP-SGD, Poisson | identity | closed
dpsgd+balls-in-bins | DP-SGD, balls-in-bins | identity | closed
dpsgd+fresh-bins | DP-SGD, fresh bins | identity | closed
banded+unamplified | banded, unamplified | banded | fixed-order bands free-columns
banded+poisson | banded, cyclic Poisson | banded | fixed-order bands
banded+balls-in-bins | banded, balls-in-bins | banded | fixed-order bands
banded-toeplitz+unamplified | banded Toeplitz, unamplified | banded-toeplitz | fixed-order bands
banded-toeplitz+poisson | banded Toeplitz, cyclic Poisson | banded-toeplitz | fixed-order bands
banded-toeplitz+balls-in-bins | banded Toeplitz, balls-in-bins | banded-toeplitz | fixed-order bands
banded-toeplitz+b-min-sep | banded Toeplitz, b-min-sep | banded-toeplitz | fixed-order bands slow
blt-4+unamplified | BLT-4, unamplified | blt | fixed-order buffers=4
dense+unamplified | dense multi-epoch, unamplified | dense | fixed-order slow
blt-2 | BLT-2 | blt | buffers=2 slow
blt-3 | BLT-3 | blt | buffers=3 slow
blt-4 | BLT-4 | blt | buffers=4
blt-5 | BLT-5 | blt | buffers=5 slow
toeplitz | Toeplitz | toeplitz |
blt-2-scaled | BLT-2, time-scaled | blt | buffers=2
blt-3-scaled | BLT-3, time-scaled | blt | buffers=3 slow
blt-4-scaled | BLT-4, time-scaled | blt | buffers=4
blt-5-scaled | BLT-5, time-scaled | blt | buffers=5 slow
toeplitz-scaled | Toeplitz, time-scaled | toeplitz |
banded-toeplitz-scaled | banded Toeplitz, time-scaled | banded-toeplitz | bands
banded-toeplitz-scaled+fresh-bins | banded Toeplitz scaled, fresh bins | banded-toeplitz | bands
cleared-blt-2-scaled+fresh-bins | cleared BLT 2 scaled, fresh bins | cleared-blt | buffers=2 slow
cleared-blt-4-scaled+fresh-bins | cleared BLT 4 scaled, fresh bins | cleared-blt | buffers=4 slow
cleared-blt-8-scaled+fresh-bins | cleared BLT 8 scaled, fresh bins | cleared-blt | buffers=8 slow
cleared-blt-16-scaled+fresh-bins | cleared BLT 16 scaled, fresh bins | cleared-blt | buffers=16 slow
wave-blt-4-scaled | BLT with a wave (4), time-scaled | wave-blt | buffers=4
banded+amplified | banded | banded | bands
dense | dense | dense | slow
sqrt | square root, balls-in-bins | sqrt | closed
banded-sqrt | banded square root, balls-in-bins | banded-sqrt | closed bands
banded-sqrt+poisson | banded square root, cyclic Poisson | banded-sqrt | closed bands
banded-inverse-sqrt | banded inverse sqrt, balls-in-bins | banded-inverse-sqrt | closed bands
normalized-sqrt | normalized sqrt, balls-in-bins | sqrt | published form=normalized-sqrt
lambda-cgd | DP-λCGD, balls-in-bins | banded-inverse-sqrt | published form=lambda-cgd
bifr | BIFR, balls-in-bins | banded-inverse-sqrt | published bands form=bifr
tree | tree (Honaker), balls-in-bins | tree | closed
"""


def _family(line: str) -> tuple[str, Family]:
    """(name, family) of a line; the name says the sampling, and whether C is time-scaled."""
    name, label, kind, *words = (part.strip() for part in line.split("|"))
    more = set(" ".join(words).split())
    given = dict(word.split("=") for word in more if "=" in word)
    sampling = name.partition("+")[2]
    return name, Family(
        label,
        kind,
        sampling if sampling in (UNAMPLIFIED, POISSON, *ESTIMATED) else BALLS,
        next((word for word in (FIXED, FIXED_ORDER, PUBLISHED) if word in more), AMPLIFIED),
        scaled="-scaled" in name,
        buffers=int(given.get("buffers", 0)),
        bands="bands" in more,
        equal_columns="free-columns" not in more,
        slow="slow" in more,
        form=given.get("form", ""),
    )


# order is the order of tables
FAMILIES = dict(map(_family, _TABLE.strip().splitlines()))
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

    def goal(self, epsilon: float, sampling: str) -> Goal:
        """Goal of a mechanism at one ε and sampling."""
        at = self.bins, self.epochs, float(epsilon), self.delta, sampling
        return Goal(*at, seed=self.seed)

    def proven(self, family: str, epsilon: float, samples: int | None = None) -> ProvenCell:
        """The C of least RMSE of a family, with a σ that is proved by so many samples."""
        candidates = find(family).candidates(self, epsilon)
        if not candidates:
            rule = f"has no number of bands that fits {self.bins} × {self.epochs}"
            raise _check.reject("mechanisms", family, rule, "Name smaller `widths`.")
        sizes, sigmas = zip(*candidates, strict=True)
        return ProvenCell(sigmas, sizes, self.goal(epsilon, find(family).sampling), samples)

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


def find(name: str, argument: str = "include") -> Family:
    """Return the family of that name, or that of a kind that a user has defined.

    Raises:
      UsageError: neither; it was given as ``argument``.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if name not in _own_kinds():
        known = f"Choose from {', '.join(FAMILIES)}."
        raise _check.reject(argument, name, "is not a family", known)
    if name in kinds.names():
        return Family(name, name, buffers=4)
    return Family(name, name, found=FIXED)


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
            known = f"Choose from {', '.join(FAMILIES)}, all."
            raise _check.reject("include", name, "is not a family", known)
        chosen += found
    return tuple(dict.fromkeys(chosen))


def memory(s: Comparison) -> float:
    """Bytes that the largest cell takes, in a process of its own."""
    return max(find(name).memory(s) for name in s.include)


def label(name: str) -> str:
    """Label of a family for readers."""
    return FAMILIES[name].label if name in FAMILIES else name


def _own_kinds() -> set[str]:
    """Kinds that a user has defined and that the optimizer, or nothing but a name, makes."""
    own = {kind for kind, cls in registered().items() if not cls.__module__.startswith("mfopt.")}
    return own & {*kinds.names(), *kinds.fixed_names()}
