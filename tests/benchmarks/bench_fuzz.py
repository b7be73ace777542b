"""Damages factorization and noise-state files in every way and looks at what still loads.

    python tests/benchmarks/bench_fuzz.py --minutes 60 --out artifacts/bench-fuzz.json

Three ways, drawn by hypothesis: bytes (flipped, cut out, inserted, zeroed, blocks swapped), members
of the zip (headers and data of arrays exchanged for other ones, members left out, doubled, renamed,
compressed otherwise), and contents (numbers, shapes, types and texts changed, with a digest that
fits again). Then

- loading ends with the old contents, or with one line of FailureError or UsageError, and nothing
  else; after a change of contents that fits the digest, C, σ, sampling and noise are the old ones
  or the file is refused;
- no file takes more than twice the memory of the good one while it is loaded (as Python and numpy
  allocate; the files are small, and 256 KiB are left to the words of an error), and the whole
  process does not grow by more than 200 MiB;
- no message holds a control character.

Exit code 1 at the first file that breaks this; it is kept, and its path printed.
"""

import contextlib
import io
import json
import tempfile
import time
import tracemalloc
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from harness import Bench
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import mfopt
from mfopt import strategies as S
from mfopt import workloads
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.mechanism import content_digest
from mfopt.noise import NoiseStream, load_state, save_state
from mfopt.sampling import BallsInBins

SCHEME = BallsInBins(bins=4, epochs=2)
N = SCHEME.iterations
OWN = 2**18  # bytes that Python may take for the words of an error, whatever the file

bench = Bench(__file__, __doc__, minutes=(1.0, "How long."), seed=(0, "Pin the randomness."))


class Broken(AssertionError):
    """A file that loads and should not, or that is refused in another way than it should be."""


class Target:
    """One kind of file: a good one, how it is loaded, and what of it must come back."""

    def __init__(self, path, load, facts):
        self.path, self._load, self._facts = path, load, facts
        self.data = path.read_bytes()
        self.good = facts(load(path))  # and whatever is imported or compiled once
        self.most = 0  # memory of a damaged file, in bytes
        with measured() as peak:
            load(path)
        self.memory = peak[0]

    def check(self, data):
        """Load ``data``; "same" or "refused"."""
        damaged = self.path.with_name(f"damaged-{self.path.name}")
        damaged.write_bytes(data)
        damaged.chmod(0o600)
        memory = max(2 * self.memory, OWN)
        actual, participated = self._loaded(damaged)
        if participated > memory:  # what is imported or compiled once is no part of it
            actual, participated = self._loaded(damaged)
        self.most = max(self.most, participated)
        if participated > memory:
            raise Broken(f"{participated} bytes were taken, and {self.memory} for the good file")
        if actual is None:
            return "refused"
        if actual != self.good:
            raise Broken("it loads with other contents")
        return "same"

    def _loaded(self, path):
        """(what came of a file, or None where it was refused; the most bytes that it took)."""
        actual = None
        with measured() as peak:
            try:
                actual = self._facts(self._load(path))
            except (FailureError, UsageError) as problem:
                if not str(problem).isprintable():
                    raise Broken(f"a message with control characters: {problem!r}") from None
        return actual, peak[0]


@contextlib.contextmanager
def measured():
    """The largest number of bytes that were allocated in the block and held at one time."""
    peak = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def targets(folder):
    """Good files of several kinds."""
    collected = []
    kinds = [
        (S.BLT([0.3, 0.1], [0.5, 0.9]), workloads.PrefixSums()),
        (S.Toeplitz(1.0 / np.arange(1.0, N + 1)), workloads.Momentum(0.9, np.ones(N))),
        (S.Dense(np.tril(np.full((N, N), 0.5)) + np.eye(N)), workloads.PrefixSums()),
        (S.Identity(), workloads.ToeplitzWorkload(np.arange(1.0, N + 1))),
    ]
    for number, (strategy, workload) in enumerate(kinds):
        guarantee = Guarantee(
            2.0, 1e-5, 12.5, status="certified", method="for this benchmark", details={"order": 7}
        )
        factorization = Factorization(
            strategy,
            12.5,
            SCHEME,
            workload,
            guarantee,
            np.arange(6.0).reshape(2, 3),
            {"command": "none"},
        )
        collected.append(Target(factorization.save(folder / f"{number}.npz"), mfopt.load, contents))
    params = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(5, np.float32)}
    stream = NoiseStream(
        kinds[0][0], iterations=N, noise_multiplier=1.25, clip_norm=1.0, sampling=SCHEME
    )
    _, state = stream.next(stream.init(params, seed=0))
    save_state(folder / "state.npz", stream, state)
    collected.append(
        Target(folder / "state.npz", lambda path: load_state(path, stream, params), of_state)
    )
    return collected


def contents(factorization):
    """All that a factorization is, comparable. History and provenance are told, not proved."""
    return (
        factorization.digest,
        factorization.guarantee,
        factorization.workload,
        factorization.strategy.materialize(N).tolist(),
        factorization.row_variances.tolist(),
    )


def of_state(state):
    leaves = jax.tree.leaves(state)
    return [(np.asarray(leaf).dtype.str, np.asarray(leaf).tolist()) for leaf in leaves]


# --- damages --------------------------------------------------------------------------------------


@st.composite
def bytes_changed(draw, data):
    """Up to four spans replaced by other bytes: fewer (cut, truncated), more, or as many."""
    changed = bytearray(data)
    directory = max(data.find(b"PK\x01\x02"), 0)
    for _ in range(draw(st.integers(1, 4))):
        low = min(draw(st.sampled_from([0, directory])), len(changed) - 1)
        begin = draw(st.integers(low, len(changed) - 1))
        length = draw(st.sampled_from([0, 1, 1, 1, 2, 4, 8, 64, len(changed)]))
        same = [bytes(length), b"\xff" * length] if length <= 64 else []
        changed[begin : begin + length] = draw(
            st.one_of(st.binary(max_size=64), st.sampled_from([b"", *same]))
        )
        if not changed:
            return b""
    return bytes(changed)


# a zip ends a name at a NUL
_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@st.composite
def members_changed(draw, data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    drawn = draw(st.integers(0, len(members) - 1))
    name, body = members[drawn]
    variant = draw(
        st.sampled_from(["drop", "double", "rename", "exchange", "body", "header", "order"])
    )
    if variant == "drop":
        del members[drawn]
    elif variant == "double":
        members.append((name, members[draw(st.integers(0, len(members) - 1))][1]))
    elif variant == "rename":
        members[drawn] = (draw(_NAMES) + ".npy", body)
    elif variant == "exchange":
        members[drawn] = (name, members[draw(st.integers(0, len(members) - 1))][1])
    elif variant == "body":
        members[drawn] = (name, draw(bytes_changed(body)))
    elif variant == "header":
        shape = draw(st.lists(st.integers(-1, 2**40), max_size=3))
        dtype = draw(st.sampled_from(["<f8", "<i8", "|O", "<U9", ">f8", "<f4", "|V8", "<c16"]))
        order = draw(st.booleans())
        text = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {tuple(shape)}, }}\n"
        tail = body[10 + int.from_bytes(body[8:10], "little") :]
        members[drawn] = (
            name,
            b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + tail,
        )
    else:
        members = draw(st.permutations(members))
    buffer = io.BytesIO()
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names given twice: they are what is wanted
        for member, content in members:
            archive.writestr(member or "x", content)
    return buffer.getvalue()


_NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("nan")]),
    st.floats(),
)
_TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["\x1b[2J", "‮", "\n", "certified"]))
_VALUES = st.one_of(
    _NUMBERS.filter(np.isfinite),
    _TEXTS,
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.just([]),
    st.just({}),
)


@st.composite
def contents_changed(draw, data):
    """Of a factorization: arrays or facts changed, with a digest that fits again."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if "metadata" not in arrays:  # a noise state: no digest to fit
        return draw(members_changed(data))
    metadata = json.loads(str(arrays.pop("metadata")[()]))
    metadata.pop("digest")
    # what is only told may be changed at will: it says nothing about the mechanism. A is given,
    # like C, and -A has the same errors
    proved = [name for name in arrays if not name.startswith(("history", "workload/"))]
    if draw(st.booleans()):
        name = draw(st.sampled_from(proved))
        value = np.array(arrays[name])
        drawn = draw(st.sampled_from(["entry", "shape", "type", "cut", "grow", "scale"]))
        if drawn == "entry" and value.size:
            value.reshape(-1)[draw(st.integers(0, value.size - 1))] = (
                draw(_NUMBERS) if value.dtype.kind == "f" else draw(st.integers(-(2**60), 2**60))
            )
        elif drawn == "shape":
            value = value.reshape(draw(st.sampled_from([(-1,), (1, -1), (-1, 1)])))
        elif drawn == "type":
            value = value.astype(draw(st.sampled_from(["<f4", "<i8", ">f8", "<U8", "<c16"])))
        elif drawn == "cut":
            value = value.reshape(-1)[: draw(st.integers(0, max(value.size - 1, 0)))]
        elif drawn == "grow":
            value = np.zeros(draw(st.sampled_from([N + 1, 2**12, 2**20])), value.dtype)
        else:
            value = (value * draw(st.sampled_from([0.0, 0.5, 2.0, -1.0]))).astype(value.dtype)
        arrays[name] = value
    else:
        holder, key = draw(
            st.sampled_from(sorted(_places(metadata), key=lambda p: (str(p[0]), p[1])))
        )
        inside = metadata
        for part in holder:
            inside = inside[part]
        if draw(st.booleans()):
            del inside[key]
        else:
            inside[key] = draw(_VALUES)
    metadata["digest"] = content_digest(metadata, arrays)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, metadata=np.array(json.dumps(metadata)), **arrays)
    return buffer.getvalue()


def _places(facts, holder=()):
    """Where a fact about the mechanism stands: (way to its object, name)."""
    descriptive = {"provenance", "guarantee", "workload"} if not holder else set()
    actual = [(holder, name) for name in facts if name not in descriptive]
    for name, value in facts.items():
        if isinstance(value, dict) and name not in descriptive:
            actual += _places(value, (*holder, name))
    return actual


WAYS = (bytes_changed, members_changed, contents_changed)


def peak():
    """MiB that this process held at most, so far."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) / 1024


def attack(target, variant, counts, *, examples, number):
    """Load so many files damaged in one way."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=variant(target.data))
    def once(data):
        counts[f"{target.path.name}, {variant.__name__}: {target.check(data)}"] += 1

    once()


@bench.work
def damaged(options):
    """Damage files for so many minutes; exit code 1 where memory grew too much."""
    folder = Path(tempfile.mkdtemp(prefix="mfopt-fuzz-"))
    reference = targets(folder)
    memory, begun, counts = peak(), time.monotonic(), Counter()
    round_ = 0
    try:
        while time.monotonic() - begun < 60 * options.minutes:
            for target in reference:
                for variant in WAYS:
                    attack(target, variant, counts, examples=200, number=options.seed + round_)
                    round_ += 1
    except BaseException:
        print(f"the file is kept in {folder}")
        raise
    grown = peak() - memory
    return {
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "files": sum(counts.values()),
        "peak_growth_mib": round(grown, 1),
        "bytes taken, good file and most": {
            target.path.name: [target.memory, target.most] for target in reference
        },
        "outcomes": dict(sorted(counts.items())),
    }, grown > 200


if __name__ == "__main__":
    bench.main()
