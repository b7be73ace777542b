"""Factorization for training code, and its ``.npz`` form: readable with ``numpy.load`` alone.

Schema 1. docs/file-format.md describes every array and key. Nothing that follows from C, σ and the
sampling is trusted: :func:`load` computes it again and compares. What cannot be computed again is
the guarantee itself (that takes a certificate, see :mod:`mfopt.factorization.proofs`), the history
and the provenance.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mfopt import final_model, query_error, strategies, workloads
from mfopt._runtime import _check, _files, _page, _signals
from mfopt._runtime._archive import MALFORMED, Archive, Header
from mfopt._runtime._types import JsonObject
from mfopt.accounting.account import supporting
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.accounting.monte_carlo.protocol import SampledLoss, law
from mfopt.errors import FailureError
from mfopt.factorization import proofs
from mfopt.guarantee import Guarantee, absence, questionable_delta
from mfopt.mechanism import Mechanism, content_digest, stream_digest
from mfopt.sampling import Scheme, UnitSampler, from_description
from mfopt.strategies import Strategy
from mfopt.words import round_up
from mfopt.workloads import Workload

SCHEMA = 1
_FORMAT = "mfopt factorization"
_MAX_BYTES = 2**33 + 2**26  # a dense C with n = 32,768; larger claims are refused unread
_MAX_ARRAYS = 100
_MAX_METADATA = 2**22  # bytes
_MAX_HISTORY = 2**16  # evaluations; of a longer optimization every second, third, … is kept
_SHORT = 64  # parameters that do not grow with n may be so many even where n is less
_ROUNDING = 1e-6  # relative: what a number that is computed again may differ by
_FLOAT = np.dtype("<f8")
_LATER = {"final_model_error"}  # facts that files of 0.2.0 and earlier lack


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Factorization:
    """A strategy matrix C with its noise multiplier and guarantee.

    Two are equal if C, σ, sampling, workload and guarantee are, whoever made them and when.

    The mechanism adds σ·clip_norm·(C⁻¹ z)_t, z standard normal, to the *sum* of clipped
    contributions of iteration t.

    Attributes:
      strategy: C.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      sampling: sampling scheme; the loader must execute exactly this one.
      workload: A, on which the error is measured.
      guarantee: the (ε, δ) statement; ``guarantee.status`` says whether it is certified.
      history: optimization history, rows (seconds, loss, σ), shape (evaluations, 3).
      provenance: version, command, seed policy, device, date.
    """

    strategy: Strategy
    noise_multiplier: float
    sampling: Scheme
    workload: Workload
    guarantee: Guarantee
    history: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3)))
    provenance: dict[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check.kind("guarantee", self.guarantee, Guarantee, "mfopt.account computes one.")
        _check.kind("workload", self.workload, Workload)
        sigma = _check.positive("noise_multiplier", self.noise_multiplier)
        if sigma != self.guarantee.noise_multiplier:
            rule = f"differs from the guarantee's {self.guarantee.noise_multiplier!r}"
            raise _check.reject("noise_multiplier", sigma, rule)
        supporting(self.mechanism)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Factorization):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _content(self) -> tuple[str, str, str]:
        """What equality compares."""
        described = self.guarantee.describe(), self.workload.describe()
        text = json.dumps(described, sort_keys=True)  # tuples and lists alike, as in a file
        return self.digest, text, content_digest({}, self.workload.arrays())

    def __repr__(self) -> str:
        rows = ", ".join(value for _, value in self.mechanism.rows())
        return f"<Factorization {rows}: {self.guarantee}>"

    def _repr_html_(self) -> str:
        rows = [
            ("guarantee", str(self.guarantee)),
            *self.mechanism.rows(),
            ("noise multiplier σ", f"{round_up(self.noise_multiplier)} clip norms"),
            ("RMSE", f"{self.rmse:.6g} clip norms, per coordinate"),
            ("final-model error", f"{self.final_model_error:.6g}"),
        ]
        return f"<b>Factorization</b>{_page.facts(rows)}{self.mechanism.curve()}"

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism that the guarantee is about."""
        stated = self.guarantee
        return Mechanism(
            self.sampling, self.strategy, stated.group_size, stated.privacy_unit, stated.adjacency
        )

    @property
    def not_certified(self) -> str:
        """Reason why the last certificate that was tried failed; empty where none did."""
        reasons = self.provenance.get("not_certified")
        return str(reasons[-1]) if isinstance(reasons, list) and reasons else ""

    @property
    def iterations(self) -> int:
        """Training iterations n that the guarantee covers; a run may stop earlier, never later."""
        return self.sampling.length

    @functools.cached_property
    def row_variances(self) -> np.ndarray:
        """Error variance of each query at σ = 1, shape (n,), read-only."""
        variances = query_error.row_variances(self.workload, self.strategy, self.iterations)
        result = np.array(variances)
        result.setflags(write=False)
        return result

    @property
    def rmse(self) -> float:
        """Root mean squared error per coordinate, in clip norms."""
        return float(self.noise_multiplier * np.sqrt(np.mean(self.row_variances)))

    @property
    def max_error(self) -> float:
        """Largest standard deviation of any query, in clip norms."""
        return float(self.noise_multiplier * np.sqrt(np.max(self.row_variances)))

    @property
    def final_model_error(self) -> float:
        """Noise multiplier of independent noise that disturbs the final model as much.

        See :mod:`mfopt.final_model`, whose default schedules count alike.
        """
        return final_model.error(self.strategy, self.iterations, self.noise_multiplier)

    @property
    def digest(self) -> str:
        """Digest of C, σ and the sampling: two files with equal digests give the same mechanism."""
        return self.mechanism.digest(self.noise_multiplier)

    def sampler(self, population: int, seed: int | None = None) -> UnitSampler:
        """Sampler of the batches that the guarantee covers, for each of the n iterations.

        Units are numbered: under a fixed order a unit that leaves would move all after it, and what
        a run by number protects is a unit's data (zero-out), whatever the account was for.

        Args:
          population: number of units in the data set, public.
          seed: pins the batches, for experiments only; the default is a secret from the operating
            system.

        Warns:
          UserWarning: δ of the guarantee is large for so many units.

        Raises:
          UsageError: the scheme has nothing to draw, or no guarantee is known for a run of it.
        """
        sampler = UnitSampler(self.sampling, population, seed)
        if text := questionable_delta(self.guarantee.delta, sampler.population):
            warnings.warn(text, stacklevel=2)
        self.sampling.executed_adjacency(self.guarantee.adjacency)
        return sampler

    def dominating_pair(self) -> dominating_pair.DominatingPair:
        """The pair whose hockey-stick divergences the guarantee bounds, under balls-in-bins."""
        return dominating_pair.exact(self.strategy, self.sampling)

    def loss(self) -> SampledLoss:
        """The privacy loss that the guarantee is about, under a scheme that has a sampled one.

        Raises:
          UsageError: the scheme's accounts are computed without samples.
        """
        return law(self.sampling).loss(self.strategy)

    @property
    def proved_here(self) -> bool:
        """True if the guarantee was proved on this machine, now where that takes no samples.

        The text of a file proves nothing, nor does an object that is put together by hand.
        """
        return proofs.is_known(self)

    def statement(self, *, pinned: bool = False) -> str:
        """What a run may say of its privacy.

        That is the guarantee if it was proved on this machine, (ε, δ) "as stated" where it was not,
        and "none" with the reason where there is none.

        Args:
          pinned: whether a seed pins batches or noise of the run.
        """
        if none := absence(self.guarantee, pinned=pinned):
            return none
        if self.proved_here:
            return str(self.guarantee)
        way_out = "not proved on this machine (`mfopt certify` proves it)"
        return f"{self.guarantee.claim}, as stated, {way_out}"

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the ``.npz`` file and read it again before it takes its place: never half a file.

        Args:
          path: where.
          force: replace what is there.

        Raises:
          UsageError: the path exists (without ``force``) or cannot be written.
          FailureError: what was written does not load; nothing is saved.
        """
        path = _check.path("path", path)
        _files.check_output(path, force=force, suffixes=(".npz",))
        arrays, metadata = _contents(self)
        metadata["digest"] = content_digest(metadata, arrays)
        text = np.array(json.dumps(metadata, sort_keys=True, allow_nan=False))

        def check(written: Path) -> None:
            if load(written).digest != self.digest:
                raise FailureError(f"cannot save {path}: what was written reads as something else")

        try:
            return _files.write(
                path,
                _files.npz({"metadata": text, **arrays}, compress=True),
                force=force,
                check=check,
            )
        except FileExistsError:
            raise _check.reject("path", str(path), "appeared meanwhile", _files.EXISTS) from None


def keep(factorization: Factorization, path: Path, *, force: bool = False) -> Path:
    """Save a result that took long, wherever that is possible; returns where.

    An interrupt meanwhile comes through once it is saved. See
    :func:`mfopt._runtime._files.write_beside`.

    Args:
      factorization: what is written.
      path: where, if it can be written there.
      force: replace what is there.
    """
    with _signals.deferred():
        return _files.write_beside(
            path,
            lambda candidate, replace: factorization.save(candidate, force=replace),
            force=force,
        )


def load(path: str | Path) -> Factorization:
    """Read a file and check everything in it that can be recomputed. Nothing in it is executed.

    A guarantee that :func:`mfopt.factorization.proofs.refute` proves false is refused. That the
    guarantee was ever proved is not examined: :attr:`Factorization.proved_here` says whether this
    machine did.

    Raises:
      UsageError: ``path`` is none, or the file is missing.
      FailureError: it is damaged, of a newer schema, inconsistent, or not such a file.

    >>> import tempfile
    >>> import mfopt
    >>> made = mfopt.factorize(epochs=2, iterations_per_epoch=8, epsilon=2.0, strategy="identity")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read = load(made.save(f"{folder}/mechanism.npz"))
    >>> read.noise_multiplier == made.noise_multiplier, read.guarantee == made.guarantee
    (True, True)
    """
    path = _check.file("path", path)
    try:
        with Archive(path, most_bytes=_MAX_BYTES, most_arrays=_MAX_ARRAYS) as archive:
            metadata = _metadata(archive)
            sampling = from_description(metadata["sampling"])
            _check_headers(archive.headers, metadata, sampling)
            stated = metadata.pop("digest", None)
            arrays = (
                (name, *header, archive.chunks(name))
                for name, header in sorted(archive.headers.items())
                if name != "metadata"
            )
            if stated != stream_digest(metadata, arrays):
                raise ValueError("its digest does not match its contents: the file is damaged")
            return _restore(archive, metadata, sampling)
    except MALFORMED as problem:
        reason = _check.printable(str(problem) or type(problem).__name__)
        if isinstance(problem, zipfile.BadZipFile):
            reason = (
                "it is not a factorization file of mfopt, or is damaged. `mfopt optimize` makes one"
            )
        raise FailureError(f"cannot load {path}: {reason}") from None


def _metadata(archive: Archive) -> JsonObject:
    header = archive.headers.get("metadata")
    if header is None or header.dtype.kind != "U" or header.shape:
        raise ValueError("it has no metadata: it is not an mfopt factorization")
    if header.nbytes > _MAX_METADATA:
        raise ValueError(f"its metadata claims {header.nbytes} bytes, more than {_MAX_METADATA}")
    metadata = json.loads(str(archive.read("metadata")[()]), parse_constant=_no_number)
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        raise ValueError("it is not an mfopt factorization")
    if repr(metadata.get("schema")) != repr(SCHEMA):  # JSON's true equals 1
        raise ValueError(
            f"it has schema {metadata.get('schema')!r} and this version reads {SCHEMA}; "
            "use the mfopt version that wrote it, or a newer one"
        )
    # nothing that is shown later can move a terminal's cursor or write right to left
    if metadata != _printable(metadata):
        raise ValueError("its metadata holds control characters")
    return metadata


def _no_number(text: str) -> float:
    raise ValueError(f"its metadata holds {text}")


def _printable(value: Any) -> Any:
    """JSON-able ``value`` with every text in it escaped."""
    if isinstance(value, str):
        return _check.printable(value)
    if isinstance(value, dict):
        return {_printable(name): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value


def _check_headers(headers: Mapping[str, Header], metadata: JsonObject, sampling: Scheme) -> None:
    """Names, types and shapes of the table above, before any array is read.

    Shapes that follow from C are compared with C's later, when they are computed; until then no
    side may be longer than n, so that a small file of a small run cannot ask for much memory.
    """
    n = sampling.length
    expected = {
        "noise_multiplier": Header(_FLOAT, ()),
        **{name: Header(v.dtype, ()) for name, v in _sampling_arrays(sampling).items()},
        "row_variances": Header(_FLOAT, (n,)),
    }
    sides = {
        **{f"strategy/{k}": v for k, v in strategies.dimensions(metadata["strategy"]).items()},
        **{f"workload/{k}": v for k, v in workloads.dimensions(metadata["workload"]).items()},
    }
    for name, header in headers.items():
        if name == "metadata":
            continue
        longest = max(header.shape, default=0)
        if name == "history":
            fits = len(header.shape) == 2 and header.shape[1] == 3 and longest <= _MAX_HISTORY
        elif name in sides:
            fits = len(header.shape) == sides[name] and longest <= max(n, _SHORT)
        elif name.startswith("noise/"):
            fits = longest <= max(n, _SHORT)
        else:
            if name not in expected:
                raise ValueError(f"array {name!r} is not part of the schema")
            fits = header == expected[name]
        if not fits or (header.dtype != _FLOAT and name not in expected):
            raise ValueError(f"array {name!r} is {header}, which does not fit n = {n}")
    for name in ("history", *expected):
        if name not in headers:
            raise ValueError(f"it has no array {name!r}")


def _contents(factorization: Factorization) -> tuple[dict[str, np.ndarray], JsonObject]:
    strategy, n = factorization.strategy, factorization.iterations
    history = np.asarray(factorization.history, np.float64)
    step = max(-(-len(history) // _MAX_HISTORY), 1)  # evenly spaced rows, the last one included
    arrays: dict[str, np.ndarray] = {
        "noise_multiplier": np.array(factorization.noise_multiplier, np.float64),
        "row_variances": factorization.row_variances,
        "history": history[::-1][::step][::-1],
    }
    arrays |= _sampling_arrays(factorization.sampling)
    arrays |= {f"strategy/{name}": value for name, value in strategy.arrays().items()}
    arrays |= {f"workload/{name}": value for name, value in factorization.workload.arrays().items()}
    arrays |= {f"noise/{name}": value for name, value in strategy.inverse_arrays(n).items()}
    metadata = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "strategy": strategy.describe(),
        "sampling": factorization.sampling.describe(),
        "workload": factorization.workload.describe(),
        "guarantee": factorization.guarantee.describe(),
        "rmse": factorization.rmse,
        "max_error": factorization.max_error,
        "final_model_error": factorization.final_model_error,
        "mechanism_digest": factorization.digest,
        "units": "sigma and errors are in clip norms, per coordinate; noise is added to sums",
        "provenance": _printable(factorization.provenance),
    }
    return {name: np.ascontiguousarray(v).reshape(np.shape(v)) for name, v in arrays.items()}, (
        metadata
    )


def _restore(archive: Archive, metadata: JsonObject, sampling: Scheme) -> Factorization:
    def part(prefix: str) -> dict[str, np.ndarray]:
        return {
            name.removeprefix(prefix): archive.read(name)
            for name in archive.headers
            if name.startswith(prefix)
        }

    for name in ("guarantee", "provenance"):
        if not isinstance(metadata[name], dict):
            raise ValueError(f"its {name} is not an object")
    factorization = Factorization(
        strategy=strategies.from_description(metadata["strategy"], part("strategy/")),
        noise_multiplier=float(archive.read("noise_multiplier")),
        sampling=sampling,
        workload=workloads.from_description(metadata["workload"], part("workload/")),
        guarantee=Guarantee.from_description(metadata["guarantee"]),
        history=archive.read("history"),
        provenance=metadata["provenance"],
    )
    _prove(archive, metadata, factorization)
    proofs.refute(factorization.mechanism, factorization.guarantee)
    return factorization


def _prove(archive: Archive, metadata: JsonObject, factorization: Factorization) -> None:
    """Refuse a file that is not, but for rounding, what saving ``factorization`` would write."""
    factorization.strategy.check_inverse(factorization.iterations)
    arrays, expected = _contents(factorization)
    # a file may lack arrays of noise/, which nothing here reads
    for name, header in archive.headers.items():
        if name == "metadata":
            continue
        if (value := arrays.get(name)) is None:
            raise ValueError(f"array {name!r} is not part of its kind of C")
        if header != Header(value.dtype, value.shape):
            raise ValueError(f"array {name!r} is {header}, not {value.shape}")
        is_input = name.startswith(
            ("strategy/", "workload/", "history")
        )  # C, A: what it was built of
        if not is_input and not _equal(archive.read(name), value):
            raise ValueError(f"its {name!r} does not belong to its C, σ and sampling")
    for name in _LATER - metadata.keys():
        del expected[name]
    if metadata.keys() != expected.keys():
        raise ValueError(f"its metadata has {sorted(metadata)}, not {sorted(expected)}")
    for name, value in expected.items():
        is_equal = _equal(metadata[name], value) if isinstance(value, float) else None
        if is_equal is False or (is_equal is None and metadata[name] != _printable(value)):
            raise ValueError(f"its {name} does not belong to its C, σ and sampling")


def _equal(stored: ArrayLike, computed: float | np.ndarray) -> bool:
    """Equal but for the rounding of another machine; each number by itself, however small."""
    return bool(np.allclose(stored, computed, rtol=_ROUNDING, atol=_ROUNDING**2, equal_nan=False))


def _sampling_arrays(sampling: Scheme) -> dict[str, np.ndarray]:
    """The numbers of the scheme, by name."""
    fields = {name: value for name, value in sampling.describe().items() if name != "kind"}
    reserved = set(fields) & {"metadata", "noise_multiplier", "row_variances", "history"}
    if reserved:
        rule = f"a file has other arrays called {sorted(reserved)}"
        way_out = "Name the scheme's fields otherwise."
        raise _check.reject("sampling", sampling, rule, way_out)
    return {
        name: np.array(value, np.int64 if isinstance(value, int) else np.float64)
        for name, value in fields.items()
    }
