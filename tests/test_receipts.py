"""Receipts of runs in PyTorch and JAX: what the trainer writes, verified by the same command."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

import mfopt
from mfopt.errors import UsageError
from mfopt.training import receipts, verification

RECORDS = 12


@pytest.fixture(scope="module")
def factorization():
    sizes = {"epochs": 2, "iterations_per_epoch": 4, "epsilon": 2.0}
    return mfopt.factorize(**sizes, sampling="fixed-order", strategy="identity")


pytestmark = pytest.mark.usefixtures("work_folder")


def of_torch(factorization, **options):
    """(run, None) after two steps."""
    torch = pytest.importorskip("torch")
    from mfopt.torch import make_private

    data = torch.utils.data.TensorDataset(torch.randn(RECORDS, 3), torch.arange(RECORDS) % 2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, data, factorization, 0.5, **options)
    for _, (x, y) in zip(range(2), loader, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return loader.run, None


def of_jax(factorization, seed=None, **options):
    from mfopt.jax import PrivateRun

    run = PrivateRun(factorization, RECORDS, 0.5, **options)
    state = run.init(np.zeros(8, np.float32), seed=seed)
    for _, batch in zip(range(2), run.batches(state), strict=False):
        _, state = run.mean(np.ones((len(batch.units), 8)), batch, state)
    return run, state


@pytest.mark.parametrize("variant", [of_torch, of_jax])
def test_a_receipt_is_verified(factorization, variant):
    receipts.write_receipt("receipt.json", *variant(factorization))
    facts = verification.read("receipt.json")
    actual = verification.verify(facts)
    assert actual.holds, [check for check in actual.checks if not check.holds]
    assert (facts["steps_done"], facts["parameters"], facts["clipping"]["clip_norm"]) == (2, 8, 0.5)
    assert actual.told["units.unit"] == factorization.guarantee.privacy_unit
    # in a fixed order units have places: that of the file is for the account
    assert facts["statement"].startswith("(2, 1e-05)-DP per example, zero-out adjacency, exact")


def test_a_file_of_another_run_is_kept(factorization):
    mine, others = of_jax(factorization), of_jax(factorization)  # of another secret
    Path("receipt.json").write_text("[]")
    for run in (mine, mine, others):  # a later report of a run replaces its earlier one
        receipts.write_receipt("receipt.json", *run)
    assert verification.read("receipt.json") == receipts.receipt(*others)
    kept = sorted(Path().glob("receipt.*.json"), key=lambda path: path.stat().st_size)
    assert [json.loads(path.read_text()) for path in kept] == [[], receipts.receipt(*mine)]


def test_a_receipt_says_where_its_factorization_was_not_proved(factorization, monkeypatch):
    assert receipts.receipt(*of_jax(factorization))["warnings"] == []
    monkeypatch.setattr(type(factorization), "proved_here", False)
    receipts.write_receipt("receipt.json", *of_jax(factorization))
    facts = verification.read("receipt.json")
    assert ["not proved" in text for text in facts["warnings"]] == [True]
    assert verification.verify(facts).holds


@pytest.mark.parametrize(
    "change", [{"steps_done": 9}, {"parameters": 8.0}, {"learning_rate": {"value": 0.1}}]
)
def test_a_changed_receipt_is_not_verified(factorization, change):
    facts = json.loads(json.dumps(receipts.receipt(*of_jax(factorization)))) | change
    with contextlib.suppress(UsageError):  # of another type, or too many fields
        assert not verification.verify(facts).holds


@pytest.mark.parametrize("variant", [of_torch, of_jax])
def test_a_pinned_run_has_no_guarantee_in_its_receipt(factorization, variant):
    run, state = variant(factorization, seed=1, allow_uncertified=True)
    facts = receipts.receipt(run, state)
    assert facts["pinned"] and not facts["holds"]
    assert not verification.verify(json.loads(json.dumps(facts))).holds


def test_a_run_that_has_not_begun_has_none(factorization):
    from mfopt.jax import PrivateRun

    with pytest.raises(UsageError, match="that has begun"):
        receipts.receipt(PrivateRun(factorization, RECORDS, 0.5))
