"""The ``.npz`` form of a factorization: readable with ``numpy.load(allow_pickle=False)`` alone.

Schema 1. Arrays, all little-endian:

====================== ================== ======= ==========================================
name                   shape              dtype   meaning, unit
====================== ================== ======= ==========================================
``metadata``           ()                 <U      JSON text: everything that is not an array
``noise_multiplier``   ()                 <f8     σ relative to the clip norm, C as stored
``bins``, ``epochs``   ()                 <i8     balls-in-bins; n = bins·epochs. Other schemes:
                                                  their numbers by name, <i8 or <f8
``strategy/NAME``      by kind            <f8     parameters of C (see the strategy's class)
``noise/NAME``         by kind            <f8     C⁻¹, ready to stream; derived, for readers
``workload/NAME``      by kind            <f8     numbers of A, where it has any
``row_variances``      (n,)               <f8     squared row norms of A C⁻¹ (σ = 1)
``history``            (evaluations, 3)   <f8     seconds, loss, σ of the optimization
====================== ================== ======= ==========================================

``noise/inverse_coefs`` (n,) is the first column of C⁻¹ for Toeplitz kinds: the noise of step t is
σ·clip_norm·Σ_k inverse_coefs[k]·z[t-k]. BLT adds ``noise/blt_gain`` g, ``noise/blt_scale`` ω and
``noise/blt_decay`` λ, with inverse coefficients g, Σ_i ω_i λ_i^(t-1). Other kinds are solved from
``strategy/*``.

``metadata`` holds schema, kinds, guarantee, errors, provenance and ``digest``, a SHA-256 over all
arrays and the rest of the metadata. It protects against damage, not against an adversary.
"""

from __future__ import annotations

import json
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mfopt import _check, _files, strategies, workloads
from mfopt.errors import FailureError
from mfopt.factorization.record import Factorization
from mfopt.guarantee import Guarantee
from mfopt.mechanism import content_digest
from mfopt.sampling import Scheme, from_description

SCHEMA = 1
_FORMAT = "mfopt factorization"
_MAX_BYTES = 2**33  # a dense C with n = 32,768; larger claims are refused before allocation


def check_output(path: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` now, rather than after the work, if ``path`` cannot be written."""
    _files.check_output(path, force=force, suffixes=(".npz",))


def save(factorization: Factorization, path: Path, *, force: bool = False) -> Path:
    """Write the file and read it again before it takes its place: never half a file.

    Raises:
      UsageError: the path exists (without ``force``) or cannot be written.
      FailureError: what was written does not load; nothing is saved.
    """
    check_output(path, force=force)
    arrays, metadata = _contents(factorization)
    metadata["digest"] = content_digest(metadata, arrays)
    text = np.array(json.dumps(metadata, sort_keys=True, allow_nan=False))

    def check(written: Path) -> None:
        if load(written).digest != factorization.digest:
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


def load(path: str | Path) -> Factorization:
    """Read and check a file. Nothing in it is executed.

    Raises:
      UsageError: the file is missing.
      FailureError: it is damaged, of a newer schema, inconsistent, or not such a file.
    """
    path = Path(path)
    if not path.is_file():
        raise _check.reject("path", str(path), "is not a file")
    try:
        arrays = _read_arrays(path)
        metadata = json.loads(str(arrays.pop("metadata")[()]))
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            raise ValueError("it is not an mfopt factorization")
        if metadata.get("schema") != SCHEMA:
            raise ValueError(
                f"it has schema {metadata.get('schema')!r} and this version reads {SCHEMA}; "
                "use the mfopt version that wrote it, or a newer one"
            )
        stated = metadata.pop("digest", None)
        if stated != content_digest(metadata, arrays):
            raise ValueError("its digest does not match its contents: the file is damaged")
        return _restore(metadata, arrays)
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError,
        OSError, EOFError, MemoryError, RecursionError, NotImplementedError, RuntimeError,
        zipfile.BadZipFile, zlib.error, SyntaxError, tokenize.TokenError, Warning,
    ) as problem:  # fmt: skip
        # every way in which zip, npy or JSON parsing reports a malformed file ends here
        raise FailureError(f"cannot load {path}: {_reason(problem)}") from None


def _reason(problem: BaseException) -> str:
    return str(problem) if str(problem) else type(problem).__name__


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        claimed = sum(entry.file_size for entry in archive.infolist())
        if claimed > _MAX_BYTES:
            raise ValueError(f"it claims {claimed} bytes of arrays, more than {_MAX_BYTES}")
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if len(set(names)) != len(names):
            raise ValueError("it names an array twice")
        methods = {entry.compress_type for entry in archive.infolist()}
        if not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise ValueError("it is compressed in a way that numpy does not write")
    with warnings.catch_warnings(), np.load(path, allow_pickle=False) as archive:
        warnings.simplefilter("error")  # numpy only warns of headers that it had to repair
        arrays = {name: archive[name] for name in archive.files}
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise ValueError(f"array {name} is not a plain array")
    if "metadata" not in arrays or arrays["metadata"].dtype.kind != "U":
        raise ValueError("it has no metadata: it is not an mfopt factorization")
    return arrays


def _contents(factorization: Factorization) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    strategy, n = factorization.strategy, factorization.iterations
    arrays: dict[str, np.ndarray] = {
        "noise_multiplier": np.array(factorization.noise_multiplier, np.float64),
        "row_variances": factorization.row_variances,
        "history": np.asarray(factorization.history, np.float64),
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
        "mechanism_digest": factorization.digest,
        "units": "sigma and errors are in clip norms, per coordinate; noise is added to sums",
        "provenance": factorization.provenance,
    }
    return {name: np.asarray(value) for name, value in arrays.items()}, metadata


def _restore(metadata: dict[str, Any], arrays: dict[str, np.ndarray]) -> Factorization:
    sampling = from_description(metadata["sampling"])
    _check_arrays(arrays, sampling)
    strategy = strategies.from_description(metadata["strategy"], _part(arrays, "strategy/"))
    for name in ("guarantee", "provenance"):
        if not isinstance(metadata[name], dict):
            raise ValueError(f"its {name} is not an object")
    factorization = Factorization(
        strategy=strategy,
        noise_multiplier=float(arrays["noise_multiplier"]),
        sampling=sampling,
        workload=workloads.from_description(metadata["workload"], _part(arrays, "workload/")),
        guarantee=Guarantee(**metadata["guarantee"]),
        history=arrays["history"],
        provenance=metadata["provenance"],
    )
    if factorization.digest != metadata["mechanism_digest"]:
        raise ValueError("its mechanism digest does not match C, σ and the sampling scheme")
    if not np.allclose(arrays["row_variances"], factorization.row_variances, rtol=1e-6):
        raise ValueError("its stored errors do not belong to its C")
    return factorization


def _sampling_arrays(sampling: Scheme) -> dict[str, np.ndarray]:
    """The numbers of the scheme, by name."""
    fields = {name: value for name, value in sampling.describe().items() if name != "kind"}
    taken = set(fields) & {"metadata", "noise_multiplier", "row_variances", "history"}
    if taken:
        raise _check.reject(
            "sampling", sampling, f"a file has other arrays called {sorted(taken)}",
            "Name the scheme's fields otherwise.",
        )  # fmt: skip
    return {
        name: np.array(value, np.int64 if isinstance(value, int) else np.float64)
        for name, value in fields.items()
    }


def _check_arrays(arrays: dict[str, np.ndarray], sampling: Scheme) -> None:
    """Shapes and types of the table above, before anything of size n is computed."""
    named = _sampling_arrays(sampling)
    for name, value in named.items():
        if arrays[name].tobytes() != value.tobytes():
            raise ValueError("its arrays and its metadata name different sampling schemes")
    history = arrays["history"]
    wanted = {
        "noise_multiplier": ((), "<f8"),
        **{name: ((), value.dtype.str) for name, value in named.items()},
        "row_variances": ((sampling.length,), "<f8"), "history": ((*history.shape[:1], 3), "<f8"),
    }  # fmt: skip
    for name, value in arrays.items():
        part = name.partition("/")[0]
        if name not in wanted and (part == name or part not in ("strategy", "noise", "workload")):
            raise ValueError(f"array {name} is not part of the schema")
        shape, dtype = wanted.get(name, (value.shape, "<f8"))
        if value.shape != shape or value.dtype != np.dtype(dtype):
            raise ValueError(f"array {name} is {value.dtype.str}{value.shape}, not {dtype}{shape}")


def _part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
