"""The token store and its builder against dictionaries and loops."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_fixtures import tokens_of

from mfopt.errors import FailureError, UsageError
from mfopt.training.data import HoldOut, TokenStore, TokenStoreBuilder, open_parts
from mfopt.training.data.builder import _uniform
from mfopt.training.data.store import token_dtype

FACTS = {"tokenizer_digest": "0" * 64}


def fill(builder, rows):
    """Add (user, tokens, text) rows in batches of three."""
    for begin in range(0, len(rows), 3):
        users, records, _ = zip(*rows[begin : begin + 3], strict=True)
        builder.add(users, [np.array(record, int) for record in records])


def grouped(rows):
    """{user: [tokens, ...]} in order of first appearance: what the builder must give."""
    output = {}
    for user, record, _ in rows:
        output.setdefault(user, []).append(list(record))
    return output


def as_dict(store):
    data, ends = (np.load(store.path / f"{name}.npy") for name in ("user_names", "name_offsets"))
    return {
        data[ends[u] : ends[u + 1]].tobytes().decode(): [
            tokens_of(store, r).tolist() for r in store.records_of(u)
        ]
        for u in range(store.num_users)
    }


row_lists = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob", "Ünal ☃", "d" * 40, "e"]),
        st.lists(st.integers(0, 99), max_size=5),
        st.sampled_from(["x", "y", "z"]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(rows=row_lists)
def test_builder_groups_like_a_dictionary(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("store")
    with TokenStoreBuilder(folder, vocab_size=100) as builder:
        fill(builder, rows)
        builder.finish(folder, FACTS)
    store = open_parts(folder)["train"]
    assert as_dict(store) == grouped(rows)
    assert list(as_dict(store)) == list(grouped(rows))
    store.verify()


def split(folder, names, hold_out, count=8):
    rows = [(name, [number], "") for number in range(count) for name in names]
    folder.mkdir()
    with TokenStoreBuilder(folder, vocab_size=100) as builder:
        fill(builder, rows)
        builder.finish(folder, FACTS, hold_out=hold_out)
    return {part: as_dict(store) for part, store in open_parts(folder).items()}


def test_held_out_parts_are_a_partition_decided_by_each_user_alone(tmp_path):
    names = [f"user {number}" for number in range(400)]
    hold_out = HoldOut(users=0.25, records=0.5, seed=3)
    parts = split(tmp_path / "all", names, hold_out)
    assert set(parts) == {"train", "held-out-users", "held-out-records"}
    for name in names:
        actual = [record for part in parts.values() for record in part.get(name, [])]
        assert sorted(actual) == [[number] for number in range(8)]
    outside = parts["held-out-users"]
    assert not set(outside) & (set(parts["train"]) | set(parts["held-out-records"]))
    # 400 users at 1/4, and 8 * 300 records at 1/2: within 4 standard errors.
    assert abs(len(outside) - 100) < 4 * np.sqrt(400 * 0.25 * 0.75)
    remaining = 400 - len(outside)
    kept = sum(map(len, parts["train"].values()))
    assert abs(kept - 4 * remaining) < 4 * np.sqrt(8 * remaining / 4)
    # Without every other user, each remaining user's records stay on the same side.
    fewer = split(tmp_path / "half", names[::-2], hold_out)
    for name in names[::-2]:
        for part, users in parts.items():
            assert users.get(name) == fewer[part].get(name)
    other = split(tmp_path / "other", names, HoldOut(users=0.25, records=0.5, seed=4))
    assert set(other["held-out-users"]) != set(outside)


def words(texts):
    keys = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in texts)
    return np.frombuffer(keys, "<u8").reshape(-1, 2)


def test_hash_numbers_are_uniform():
    keys = words(b"%d" % number for number in range(20000))
    unsalted, two = (_uniform(keys, salt) for salt in (0, 1))
    for numbers in (unsalted, two):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert np.sum((counts - 1000) ** 2 / 1000) < 19 + 4 * np.sqrt(2 * 19)
    # the choice that older builds made: a store can be built again
    old = _uniform(words([b"ann", b"ann"]), 7, np.array([0, 3]))
    assert old == pytest.approx([0.030907540492, 0.934624560561], abs=1e-12)
    assert abs(np.corrcoef(unsalted, two)[0, 1]) < 4 / np.sqrt(20000)


def test_builder_refuses_what_does_not_fit(tmp_path):
    with TokenStoreBuilder(tmp_path, vocab_size=100) as builder:
        with pytest.raises(UsageError, match="below 100"):
            builder.add(["a"], [np.array([100])])
        with pytest.raises(UsageError, match="below 100"):
            builder.add(["a"], [np.array([-1])])
        with pytest.raises(UsageError, match="as many"):
            builder.add(["a", "b"], [np.array([1])])
        with pytest.raises(FailureError, match="No record"):
            builder.finish(tmp_path, FACTS)


def small_store():
    return TokenStore.from_records([[[1, 2, 3], [4]], [], [[5, 6], [], [7, 8, 9, 10]]])


def test_batch_against_a_loop():
    store = small_store()
    records = [4, -1, 0, 3, 1, 4]
    tokens, mask = store.batch(records, 3)
    assert tokens.dtype == np.int32 and mask.dtype == bool
    for row, record in enumerate(records):
        real = [] if record < 0 else tokens_of(store, record).tolist()[:3]
        assert tokens[row].tolist() == real + [0] * (3 - len(real))
        assert mask[row].tolist() == [True] * len(real) + [False] * (3 - len(real))
    empty, none = store.batch([], 3)
    assert empty.shape == none.shape == (0, 3)
    wide, _ = TokenStore.from_records([[[]], []]).batch([0, -1], 2)
    assert wide.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("record", "user"), [(5, 3), (-2, -2)])
def test_numbers_out_of_range_are_refused(record, user):
    store = small_store()
    for call in (
        lambda: store.batch([0, record], 2),
        lambda: store.records_of(user),
    ):
        with pytest.raises(UsageError, match=r"must (lie in|be at)"):
            call()
    with pytest.raises(UsageError, match="length"):
        store.batch([0], 0)
    with pytest.raises(UsageError, match="one-dimensional"):
        store.batch([[0]], 2)


def test_tokens_take_two_bytes_where_they_can():
    assert token_dtype(65536) == np.uint16 and token_dtype(65537) == np.uint32
    store = TokenStore.from_records([[[70000]]], vocab_size=70001)
    assert store.batch([0], 1)[0].tolist() == [[70000]]


@pytest.fixture
def on_disk(tmp_path):
    with TokenStoreBuilder(tmp_path, vocab_size=100) as builder:
        fill(builder, [("a", [1, 2], ""), ("b", [3], "")])
        builder.finish(tmp_path, FACTS)
    return tmp_path / "train"


def test_damage_is_found(on_disk, tmp_path):
    TokenStore.open(on_disk).verify()
    with pytest.raises(UsageError, match="not a token store"):
        TokenStore.open(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        open_parts(tmp_path / "nowhere")
    tokens = np.load(on_disk / "tokens.npy")
    for written, match in (
        (tokens[::-1], "content_digest"),
        (tokens + np.uint16(100), "below 100"),
    ):
        np.save(on_disk / "tokens.npy", written)
        with pytest.raises(UsageError, match=match):
            TokenStore.open(on_disk).verify()
    np.save(on_disk / "tokens.npy", tokens[:-1])
    with pytest.raises(UsageError, match="record_offsets"):
        TokenStore.open(on_disk)
    np.save(on_disk / "tokens.npy", tokens)
    np.save(on_disk / "record_offsets.npy", np.array([0, 5, 3]))
    with pytest.raises(UsageError, match="decrease"):
        TokenStore.open(on_disk).verify()
    false = TokenStore.open(on_disk)  # a digest that agrees says nothing of it
    false.metadata["content_digest"] = false.digest
    with pytest.raises(UsageError, match="decrease"):
        false.verify()
    (on_disk / "tokens.npy").unlink()
    with pytest.raises(UsageError, match="missing"):
        TokenStore.open(on_disk)
    facts = json.loads((on_disk / "metadata.json").read_text())
    (on_disk / "metadata.json").write_text(json.dumps(facts | {"format_version": 2}))
    with pytest.raises(UsageError, match="version 1"):
        TokenStore.open(on_disk)
    untyped = json.dumps(facts | {"vocab_size": "2"})
    for content in ("1", "[]", '"x"', "null", untyped, "[" * 10**5, "{"):
        (on_disk / "metadata.json").write_text(content)
        with pytest.raises(UsageError, match="unreadable"):
            TokenStore.open(on_disk)


def test_chunks_hold_every_token_once_and_none_alone():
    rng = np.random.default_rng(4)
    users = [
        [rng.integers(0, 50, n) for n in rng.integers(0, 40, rng.integers(0, 5))] for _ in range(40)
    ]
    store = TokenStore.from_records(users, vocab_size=50)
    for length in (2, 7, 40):
        chunks = store.in_chunks(length)
        assert chunks.num_users == store.num_users and chunks.digest == store.digest
        for user, records in enumerate(users):
            cut = [tokens_of(chunks, number) for number in chunks.records_of(user)]
            np.testing.assert_array_equal(
                *(np.concatenate([np.empty(0), *entry]) for entry in (records, cut))
            )
            assert len(cut) == sum(max(1, -(-len(record) // length)) for record in records)
        sizes = chunks.record_lengths()
        assert sizes.max() <= length
        if length > 2:  # three tokens in rows of two
            assert np.sum(sizes == 1) == np.sum(store.record_lengths() == 1)
    with pytest.raises(UsageError, match="length"):
        store.in_chunks(1)
