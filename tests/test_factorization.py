"""Factorization files: what was written comes back, and nothing else is ever accepted."""

import dataclasses
import io
import json
import re
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from alterations import alterations, places, with_leaf
from sources import ROOT
from test_query_error import every_workload
from test_strategies import EVERY_KIND, every_strategy

import mfopt
from mfopt import strategies as S
from mfopt import workloads
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.mechanism import content_digest
from mfopt.sampling import BallsInBins

SCHEME = BallsInBins(bins=4, epochs=2)
N = SCHEME.iterations


def record(strategy=None, workload=None, sigma=1.25, scheme=SCHEME):
    """A factorization with something in every field."""
    blt = S.BLT([0.3, 0.1], [0.5, 0.9])
    return Factorization(
        strategy=blt if strategy is None else strategy,
        noise_multiplier=sigma,
        sampling=scheme,
        workload=workloads.PrefixSums() if workload is None else workload,
        guarantee=Guarantee(
            2000.0,  # true of every C here
            1e-5,
            sigma,
            status="certified",
            method="for this test",
            failure_probability=1e-7,
            details={"order": 7},
        ),
        history=np.arange(6.0).reshape(2, 3),
        provenance={"mfopt": "0", "command": "none", "interrupted": False},
    )


@pytest.fixture
def saved(tmp_path):
    return record().save(tmp_path / "one.npz")


PAGE = (ROOT / "docs" / "file-format.md").read_text()
# the rows (names, shape, dtype) of the page's first table
DOCUMENTED = [
    (re.findall("`(.*?)`", names), shape, dtype)
    for names, shape, dtype in re.findall(
        r"^\| (`[^|]*) \| (\(.*?\)|by kind) \| `(<\w+)` \|", PAGE, re.MULTILINE
    )
]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_and_workload_comes_back_by_the_documented_arrays(kind, tmp_path):
    strategy, choices = every_strategy(N, seed=3)[kind], every_workload(N)
    if kind != "blt":  # all of them for BLT, one each for the other kinds: compilations
        choices = [choices[EVERY_KIND.index(kind) % 4]]
    for index, workload in enumerate(choices):
        written = record(strategy, workload)
        path = written.save(tmp_path / f"{index}.npz")
        agree_with_the_table(path)
        read = mfopt.load(path)
        assert type(read.strategy) is type(strategy) and type(read.workload) is type(workload)
        np.testing.assert_array_equal(read.strategy.materialize(N), strategy.materialize(N))
        np.testing.assert_array_equal(read.workload.materialize(N), workload.materialize(N))
        np.testing.assert_array_equal(read.history, written.history)
        assert read.noise_multiplier == written.noise_multiplier
        assert (read.sampling, read.guarantee) == (written.sampling, written.guarantee)
        assert read.provenance == written.provenance and read.digest == written.digest
        np.testing.assert_allclose([read.rmse, read.max_error], [written.rmse, written.max_error])


def agree_with_the_table(path):
    shapes = {"()": (), "(n,)": (N,), "(evaluations, 3)": (2, 3)}
    assert len(DOCUMENTED) == 8
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            ((shape, dtype),) = [
                (shape, dtype)
                for names, shape, dtype in DOCUMENTED
                for row in names
                if re.fullmatch(row.replace("NAME", r"[\w/]+"), name)
            ]
            value = archive[name]
            assert value.shape == shapes.get(shape, value.shape), name
            assert value.dtype.str.startswith("<U") if dtype == "<U" else value.dtype == dtype
        for names, *_ in DOCUMENTED:
            assert all("NAME" in name or name in archive.files for name in names)


def test_errors_are_those_of_the_dense_definition():
    strategy, workload = every_strategy(N)["dense"], every_workload(N)[3]
    product = workload.materialize(N) @ np.linalg.inv(strategy.materialize(N))
    actual = record(strategy, workload, sigma=0.7)
    assert actual.rmse == pytest.approx(0.7 * np.linalg.norm(product) / np.sqrt(N))
    assert actual.max_error == pytest.approx(0.7 * np.linalg.norm(product, axis=1).max())


def test_digest_names_the_mechanism_and_nothing_else():
    reference = record()
    assert dataclasses.replace(reference, workload=every_workload(N)[1]).digest == reference.digest
    assert dataclasses.replace(reference, provenance={}).digest == reference.digest
    variants = [
        record(S.BLT([0.3, 0.1], [0.5, np.nextafter(0.9, 1)])),
        record(sigma=np.nextafter(1.25, 2)),
        record(scheme=BallsInBins(bins=2, epochs=4)),
        record(S.Toeplitz(reference.strategy.toeplitz_coefs(N))),
    ]
    assert len({reference.digest, *(other.digest for other in variants)}) == 5


def test_record_refuses_what_does_not_belong_together():
    with pytest.raises(UsageError, match="differs from the guarantee"):
        dataclasses.replace(record(), noise_multiplier=1.0)
    with pytest.raises(UsageError, match=">= 0"):
        record(S.Toeplitz([1, -0.5, *[0.0] * 6]))
    with pytest.raises(UsageError, match="noise_multiplier"):
        record(sigma=0.0)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_page_names_the_arrays_of_each_kind(kind):
    table = PAGE.partition("## Arrays of C")[2].partition("\n## ")[0]
    (row,) = [line for line in table.splitlines() if re.match(rf"\|[^|]*`{kind}`", line)]
    _, _, of_strategy, of_noise, _ = row.split("|")
    strategy = every_strategy(N)[kind]
    for name in strategy.arrays():
        assert f"`{name}`" in of_strategy or name.startswith("base/")
    for name in strategy.inverse_arrays(N):
        assert f"`{name}`" in of_noise or name.startswith("base_")
    assert ("none" in of_noise) == (not strategy.inverse_arrays(N))


def test_time_scaled_noise_can_be_streamed_from_its_few_numbers(tmp_path):
    """Other arrays are read by the numpy code of the page: ``test_noise_readme.py``."""
    diagonals = np.linspace(0.5, 2.0, N), np.linspace(2.0, 0.7, N)
    strategy = S.TimeScaled(record().strategy.rescaled(0.3), *diagonals)
    path = record(strategy).save(tmp_path / "scaled.npz")
    z = np.random.default_rng(0).normal(size=N)
    with np.load(path, allow_pickle=False) as archive:
        rows, columns = archive["strategy/rows"], archive["strategy/columns"]
        read, decay = archive["noise/base_blt_scale"], archive["noise/base_blt_decay"]
        gain, sums, noise = archive["noise/base_blt_gain"], np.zeros(2), np.zeros(N)
        for t in range(N):
            draw = z[t] / rows[t]
            noise[t] = (gain * draw + read @ sums) / columns[t]
            sums = decay * sums + draw
    np.testing.assert_allclose(strategy.materialize(N) @ noise, z, atol=1e-12)


# --- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, 3, b"one.npz", ""])
def test_what_is_no_path_is_refused(path):
    for call in (mfopt.load, record().save):
        with pytest.raises(UsageError, match=r"path = .*path"):
            call(path)


def test_an_existing_file_is_replaced_only_by_force(saved):
    content = saved.read_bytes()
    with pytest.raises(UsageError, match="force=True"):
        record(sigma=2.0).save(saved)
    assert saved.read_bytes() == content
    record(sigma=2.0).save(saved, force=True)
    assert mfopt.load(saved).noise_multiplier == 2.0
    with pytest.raises(UsageError, match="path ="):
        record().save(saved.with_suffix(".txt"))


# --- reading what is not a good file -------------------------------------------------------------


def refused(path, match=None):
    with pytest.raises(FailureError, match=match) as caught:
        mfopt.load(path)
    assert str(caught.value).isprintable()


def forge(source, path, change, *, sign=True, compress=False):
    """``source`` with ``change(metadata, arrays)`` applied, with a digest that fits again."""
    with np.load(source, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    metadata = json.loads(str(arrays.pop("metadata")[()]))
    stated = metadata.pop("digest")
    change(metadata, arrays)
    metadata["digest"] = content_digest(metadata, arrays) if sign else stated
    save = np.savez_compressed if compress else np.savez
    save(path, metadata=np.array(json.dumps(metadata)), **arrays)
    return path


FORGERIES = {
    "other scheme": lambda m, a: m.update(
        sampling={"kind": "poisson", "probability": 0.1, "iterations": N}
    ),
    "no scheme": lambda m, a: m.pop("sampling"),
    "missing parameters": lambda m, a: a.pop("strategy/decay"),
    "surplus parameters": lambda m, a: a.update({"strategy/more": np.zeros(2)}),
    "smaller claimed sigma": lambda m, a: m["guarantee"].update(noise_multiplier=1.0),
    "guarantee with a surplus field": lambda m, a: m["guarantee"].update(certified=True),
    "guarantee of unknown status": lambda m, a: m["guarantee"].update(status="proven"),
    "guarantee of unknown adjacency": lambda m, a: m["guarantee"].update(adjacency="none"),
    "no guarantee": lambda m, a: m.pop("guarantee"),
    "no history": lambda m, a: a.pop("history"),
    "surplus noise": lambda m, a: a.update({"noise/more": np.zeros(2)}),
    "surplus fact": lambda m, a: m.update(certified_by="me"),
    "colours of a terminal": lambda m, a: m["guarantee"].update(method="\x1b[31mproven"),
    "a line of its own": lambda m, a: m["provenance"].update(note="\nverified here: yes"),
    "written right to left": lambda m, a: m["provenance"].update({"\u202edate": 1}),
    "surplus array": lambda m, a: a.update(more=np.zeros(2)),
    "schema that is no number": lambda m, a: m.update(schema=True),
    "name of an array with codes of a terminal": lambda m, a: a.update(
        {"strategy/\x1b[2Jscale": np.zeros(2)}
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_inconsistent_files_are_refused_even_with_a_fitting_digest(name, saved, tmp_path):
    refused(forge(saved, tmp_path / "forged.npz", FORGERIES[name]))


def test_every_altered_fact_and_array_is_refused_even_with_a_fitting_digest(saved, tmp_path):
    """But for the statement, which the file alone does not prove, and how C was made."""
    read, believed = {}, []
    forge(saved, tmp_path / "same.npz", lambda m, a: read.update(facts=dict(m), arrays=dict(a)))

    def forged(place, facts, arrays):
        def change(m, a):
            m.clear()
            m.update(facts)
            a.update(arrays)

        try:
            mfopt.load(forge(saved, tmp_path / "forged.npz", change))
            believed.append(place)
        except FailureError:
            pass

    for path, leaf in places(read["facts"]):
        if path[0] not in ("guarantee", "provenance"):
            for value in alterations(leaf):
                if value != leaf:
                    forged(path, with_leaf(read["facts"], path, value), {})
    for name, array in read["arrays"].items():
        if name != "history":
            values = 0 * array, 1.01 * array, np.nan * array, array.astype("f4"), array.ravel()[:1]
            for other in values:
                forged(name, read["facts"], {name: other})
    assert believed == [("final_model_error",)]  # which older files do not have


def test_forgery_control(saved, tmp_path):
    # the same machinery with nothing changed must load, or the refusals above prove nothing
    mfopt.load(forge(saved, tmp_path / "same.npz", lambda m, a: None))
    refused(
        forge(saved, tmp_path / "other.npz", lambda m, a: m.update(rmse=1.0), sign=False), "digest"
    )


def test_texts_of_a_saved_file_are_printable(tmp_path):
    path = dataclasses.replace(record(), provenance={"command": "a\x1b[31m\nb"}).save(
        tmp_path / "one.npz"
    )
    assert mfopt.load(path).provenance == {"command": "a\\x1b[31m\\nb"}


def test_an_inverse_beyond_double_precision_is_refused(tmp_path):
    n = 512
    strategy = S.Toeplitz(np.concatenate([[1.0, 9.0], np.zeros(n - 2)]))
    with pytest.raises((FailureError, ValueError)):
        record(strategy, scheme=BallsInBins(bins=128, epochs=4)).save(tmp_path / "one.npz")
    assert list(tmp_path.iterdir()) == []


def test_an_inverse_that_is_wrong_is_refused():
    class WrongInverse(S.BLT):
        kind = "test-wrong-inverse"

        def inverse_coefs(self, n):
            return np.eye(1, n)[0]

    with pytest.raises(FailureError, match="not the identity"):
        WrongInverse([0.3], [0.5]).check_inverse(N)


def test_long_histories_are_thinned(tmp_path):
    history = np.arange(9.0 * 2**16).reshape(-1, 3)
    factorization = mfopt.load(
        dataclasses.replace(record(), history=history).save(tmp_path / "one.npz")
    )
    np.testing.assert_array_equal(factorization.history, history[::-3][::-1])


BOMBS = {  # what each claims is 48 MiB or more
    "history": lambda m, a: a.update(history=np.zeros((2**21, 3))),
    "noise": lambda m, a: a.update({"noise/inverse_coefs": np.zeros(2**23)}),
    "parameters": lambda m, a: a.update({"strategy/scale": np.zeros(2**23)}),
    "matrix": lambda m, a: a.update({"strategy/scale": np.zeros((2**11, 2**12))}),
    "surplus": lambda m, a: a.update(more=np.zeros(2**23)),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_claim_much_take_no_memory(name, saved, tmp_path):
    path = forge(saved, tmp_path / "bomb.npz", BOMBS[name], compress=True)
    assert path.stat().st_size < 2**21
    tracemalloc.start()
    refused(path, "cannot load")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 25 * 2**20


@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800])
def test_text_that_is_no_text_is_refused(code, saved, tmp_path):
    # Python raises SystemError on a character beyond the last one
    with np.load(saved, allow_pickle=False) as archive:
        codes = np.array([archive["metadata"][()]]).view(np.uint32).copy()
    codes[codes == ord("e")] = code
    header = f"{{'descr': '<U{len(codes)}', 'fortran_order': False, 'shape': (), }}"
    path = rezip(saved, tmp_path / "bad.npz", {"metadata.npy": npy(header, codes.tobytes())})
    refused(path, "is not text")


def test_numbers_that_json_has_not_are_refused(saved, tmp_path):
    metadata = np.array('{"format": "mfopt factorization", "schema": 1, "rmse": NaN}')
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, metadata)
    path = rezip(saved, tmp_path / "nan.npz", {"metadata.npy": buffer.getvalue()})
    refused(path, "holds NaN")


def test_files_that_lack_an_array_of_the_noise_load(saved, tmp_path):
    mfopt.load(forge(saved, tmp_path / "older.npz", lambda m, a: a.pop("noise/blt_gain")))


@pytest.mark.parametrize(("part", "kind"), [("sampling", "k-of-n"), ("strategy", "cyclic-blocks")])
def test_files_of_dropped_kinds_name_the_version_that_reads_them(part, kind, saved, tmp_path):
    def older(metadata, arrays):
        metadata[part]["kind"] = kind

    path = forge(saved, tmp_path / "older.npz", older)
    refused(path, f"'{kind}': is not in this version. mfopt 0.2.0 reads it")


def test_newer_schema_says_what_to_do(saved, tmp_path):
    newer = forge(saved, tmp_path / "new.npz", lambda m, a: m.update(schema=99))
    refused(newer, "newer one")


class _Trap:
    """Unpickling this would leave a mark."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickles_are_never_executed(saved, tmp_path):
    mark = tmp_path / "mark"
    with np.load(saved, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name in ("history", "metadata", "strategy/scale"):
        trapped = np.empty((), object)
        trapped[()] = _Trap(mark)
        np.savez(tmp_path / "trap.npz", **{**arrays, name: trapped})
        refused(tmp_path / "trap.npz", "pickle|Object")
    import pickle

    (tmp_path / "raw.npz").write_bytes(pickle.dumps(_Trap(mark)))
    refused(tmp_path / "raw.npz")
    assert not mark.exists()


def rezip(source, path, members):
    """``source`` packed again, with ``members`` (name -> bytes) replaced or added."""
    with zipfile.ZipFile(source) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (contents | members).items():
            archive.writestr(name, data)
    return path


def npy(header, data=b""):
    """A version 1 .npy member with any header text."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


HEADERS = [
    "",
    "{",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (",
    "  x\n y\n",
    "'''",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (3L,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': 'nonsense', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,), }",
    "__import__('os').system('false')",
    "[" * 400,
    "-" * 9000 + "1",
    "(" * 9000,
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_hostile_array_headers_are_refused(header, saved, tmp_path):
    refused(rezip(saved, tmp_path / "bad.npz", {"history.npy": npy(header, bytes(24))}))


def test_zips_that_claim_too_much_are_refused_before_allocation(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    position = data.index(b"PK\x01\x02")  # first central directory record: size at offset 24
    data[position + 24 : position + 28] = (2**32 - 2).to_bytes(4, "little")
    second = data.index(b"PK\x01\x02", position + 4)
    third = data.index(b"PK\x01\x02", second + 4)
    for record_at in (second, third):
        data[record_at + 24 : record_at + 28] = (2**32 - 2).to_bytes(4, "little")
    (tmp_path / "bomb.npz").write_bytes(data)
    refused(tmp_path / "bomb.npz", "claims")


def test_names_given_twice_are_refused(saved, tmp_path):
    for name in ("bins.npy", "bins"):
        with zipfile.ZipFile(saved) as archive:
            contents = [(entry, archive.read(entry)) for entry in archive.namelist()]
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.array(4, np.int64))
        with zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive:
            for entry, data in contents:
                archive.writestr(entry, data)
            if name == "bins.npy":
                with pytest.warns(UserWarning, match="Duplicate"):
                    archive.writestr(name, buffer.getvalue())
            else:
                archive.writestr(name, buffer.getvalue())
        refused(tmp_path / "twice.npz", "twice")


def test_a_small_file_cannot_claim_a_huge_run(saved, tmp_path):
    # identity has no parameters: only the stored errors tie the file's size to n
    def huge(metadata, arrays):
        metadata["strategy"] = {"kind": "identity"}
        metadata["sampling"]["bins"] = 2**29
        for name in ("strategy/scale", "strategy/decay"):
            del arrays[name]
        arrays["bins"] = np.int64(2**29)

    refused(forge(saved, tmp_path / "huge.npz", huge), "row_variances")


def test_other_files_are_refused(tmp_path):
    np.save(tmp_path / "plain.npy", np.zeros(3))
    (tmp_path / "plain.npy").rename(tmp_path / "plain.npz")
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    np.savez(tmp_path / "numbers.npz", metadata=np.zeros(3))
    np.savez(tmp_path / "texts.npz", metadata=np.array(["{}", "{}"]))
    np.savez(tmp_path / "list.npz", metadata=np.array("[]"))
    np.savez(tmp_path / "json.npz", metadata=np.array("{"))
    np.savez(tmp_path / "deep.npz", metadata=np.array("[" * 100_000))
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello")
    for path in sorted(tmp_path.iterdir()):
        refused(path)


def test_a_loaded_file_equals_what_was_saved_and_others_do_not(tmp_path):
    built = record(workload=workloads.Momentum(0.9, np.ones(N)))
    read = mfopt.load(built.save(tmp_path / "m.npz"))
    assert read == built and hash(read) == hash(built) and {built: 1}[read] == 1
    assert built != "m.npz" and built != record(workload=workloads.Momentum(0.8, np.ones(N)))
    weaker = dataclasses.replace(built.guarantee, epsilon=3000.0)
    assert built != dataclasses.replace(built, guarantee=weaker)
    assert built != record(workload=workloads.Momentum(0.9, np.ones(N)), sigma=1.5)
    assert built == dataclasses.replace(built, provenance={"date": "another"})


def test_notebooks_show_the_guarantee_and_a_line_for_c():
    built = record()
    shown = built._repr_html_()
    assert str(built.guarantee) in shown and "<svg" in shown and "final-model error" in shown
    assert "<svg" in built.mechanism._repr_html_() and "balls-in-bins" in shown
    assert (
        "\n" not in repr(built) and len(repr(built)) < 400 and str(built.guarantee) in repr(built)
    )
