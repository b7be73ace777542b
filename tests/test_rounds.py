"""Rounds of a federated server: who may take part, what is released, and what a restart does."""

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
from statements import stated

import mfopt.noise.ledger as ledgers
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import BallsInBins, MinSeparation
from mfopt.strategies import BLT
from mfopt.training.rounds import PrivateRounds

SCHEME = MinSeparation(iterations=5, separation=2, max_participations=2)
PARAMS = {"w": np.zeros(3, np.float32)}
UPDATE = {"w": np.array([3.0, 0.0, 4.0], np.float32)}


def rounds(folder, scheme=SCHEME, **options):
    built = stated(
        BLT([0.3], [0.5]),
        scheme,
        1e-4,
        status="certified",
        adjacency="zero-out",
    )
    return PrivateRounds(folder, built, PARAMS, clip_norm=0.5, cohort=2.0, **options)


def test_devices_are_clipped_and_kept_apart(tmp_path):
    server = rounds(tmp_path / "state")
    means = [np.asarray(server.release({"a": UPDATE, "b": UPDATE})["w"])]
    np.testing.assert_allclose(means[0], [0.3, 0.0, 0.4], atol=1e-3)
    assert server.may_join("c") and not server.may_join("a")
    with pytest.raises(UsageError, match=r"updates = 'a': took part in rounds \[0\].*2 apart"):
        server.release({"c": UPDATE, "a": UPDATE})
    assert np.abs(server.release({})["w"]).max() < 1e-3  # nobody answered
    server.release({"a": UPDATE})
    server.release({"c": UPDATE})
    assert not server.may_join("a") and server.may_join("c") is False and server.may_join("b")
    server.release({"b": UPDATE})
    assert server.step == len(server) and not server.may_join("d")
    with pytest.raises(FailureError, match="covers 5 iterations"):
        server.release({})
    assert (tmp_path / "state" / "noise.npz").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state" / "devices.json").stat().st_mode & 0o777 == 0o600


def test_a_server_goes_on_after_the_last_round(work_folder):
    server = rounds("state")
    server.release({"a": UPDATE})
    with pytest.MonkeyPatch.context() as patched:  # killed once the noise is made
        patched.setattr("mfopt.noise.save_state", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            server.release({"b": UPDATE})
    with pytest.raises(UsageError, match=r"folder = .*are alive in this process"):
        rounds("state")
    del server
    gc.collect()  # what pytest keeps of the error
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ledgers, "_by_handle", {})
        with pytest.raises(UsageError, match="belongs to a run that is alive"):
            rounds("state")
    server = rounds("state")
    assert server.step == 2 and not server.may_join("b") and server.may_join("a")
    server.release({"a": UPDATE})
    del server
    assert rounds("state").step == 3


def test_an_older_copy_of_the_folder_is_refused(work_folder):
    server = rounds("state")
    server.release({"a": UPDATE})
    shutil.copytree("state", "older")
    server.release({"b": UPDATE})
    with pytest.raises(UsageError, match=r"in 1 rounds of 2 released.*older copy"):
        rounds("older")
    Path("older/devices.json").unlink()
    with pytest.raises(UsageError, match="in 0 rounds of 2 released"):
        rounds("older")
    shutil.copy("state/devices.json", "older")  # the noise alone may be older: it is skipped
    assert rounds("older").step == 2


def test_a_device_is_a_text(tmp_path):
    """A number would come back from the file as another name."""
    server = rounds(tmp_path / "state")
    with pytest.raises(UsageError, match="device"):
        server.may_join(7)
    with pytest.raises(UsageError, match="updates = 'int': must be of class str"):
        server.release({7: UPDATE})
    assert server.step == 0


def test_the_guarantee_so_far_grows_to_that_of_all(tmp_path):
    server = rounds(tmp_path / "state")
    assert server.spent() is None and server.guarantee == server.factorization.statement()
    spent = []
    for _ in range(len(server)):
        server.release({})
        spent.append(server.spent().epsilon)
    assert spent == sorted(spent) and spent[0] < spent[-1]
    pinned = rounds(tmp_path / "pinned", seed=1, allow_uncertified=True)
    assert pinned.guarantee == "none: seed pinned"


def test_other_schemes_are_refused(tmp_path):
    with pytest.raises(UsageError, match="other schemes draw their batches"):
        rounds(tmp_path, BallsInBins(bins=5, epochs=1))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        rounds(tmp_path / "file")
    with pytest.raises(UsageError, match="updates = 'list': must be of class Mapping"):
        rounds(tmp_path / "state").release([UPDATE])
    with pytest.raises(UsageError, match=r"factorization = 'str': must be a Factorization"):
        PrivateRounds(rounds, str(tmp_path), PARAMS, clip_norm=0.5, cohort=2.0)  # exchanged
