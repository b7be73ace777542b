"""The planned ServerApp in Flower's round loop, with devices in this process."""

from pathlib import Path

import numpy as np
import pytest
from mfopt_cli.commands import plan

import mfopt
from mfopt import noise
from mfopt.training.rounds import PrivateRounds

flwr = pytest.importorskip("flwr")
pytestmark = pytest.mark.filterwarnings("default:'click.utils")  # by what Flower imports
ROUNDS, DEVICES, SIZE = 8, 6, 4000


def test_flower_rounds_clip_rest_and_are_noised(tmp_path, monkeypatch):
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):  # what a ServerApp's process is told
        setattr(TaskIdentity, name, 1)
    requests = {}

    class Devices(Grid):
        """Devices that send the model moved by far more than the clip norm; one has no answer."""

        run, set_run = None, lambda self, run: None
        create_message = push_messages = pull_messages = None

        def get_node_ids(self):
            return range(1, DEVICES + 1)

        def send_and_receive(self, messages, *, timeout=None):
            replies = []
            for message in messages:
                node = message.metadata.dst_node_id
                requests.setdefault(node, []).append(message.content["config"]["server-round"])
                arrays = message.content["arrays"].to_numpy_ndarrays()
                moved = [array + (np.nan if node == 1 else 9.0) for array in arrays]
                content = RecordDict({"arrays": ArrayRecord(numpy_ndarrays=moved)})
                replies.append(Message(content, reply_to=message))
            return replies

    remaining = {"sampling": "min-separation", "separation": 3, "max_participations": 2}
    factorization = mfopt.factorize(
        epochs=1, iterations_per_epoch=ROUNDS, epsilon=8.0, strategy="identity", **remaining
    )
    loop = (Path(plan.__file__).parents[1] / "loops" / "server-flower.txt").read_text()
    monkeypatch.chdir(tmp_path)
    factorization.save("mechanism.npz")
    module = {}
    exec(loop, module)
    module["rate"] = lambda step: 1.0
    initial = ArrayRecord(numpy_ndarrays=[np.zeros(SIZE, np.float32)])
    arrays = initial.to_numpy_ndarrays()
    rounds = PrivateRounds("all", factorization, arrays, clip_norm=1.0, cohort=1)
    strategy = module["PrivateAverage"](rounds)
    ended = strategy.start(Devices(), initial, num_rounds=ROUNDS).arrays.to_numpy_ndarrays()[0]
    assert all(request == [1, 4] for request in requests.values()) and len(requests) == DEVICES
    # five devices count, twice each, with norm 1; the noise is that of all rounds
    assert ended.mean() == pytest.approx(2 * (DEVICES - 1) / np.sqrt(SIZE), abs=0.3)
    deviation = factorization.noise_multiplier * np.sqrt(factorization.row_variances[-1])
    assert ended.std() == pytest.approx(deviation, rel=0.05)
    with pytest.raises(noise.NoiseExhaustedError, match="covers 8"):
        strategy.aggregate_train(ROUNDS + 1, [])
    requests.clear()
    module["main"](Devices(), None)  # the whole app, a quarter of the devices in each round
    assert all(len(request) <= 2 for request in requests.values())
    assert np.load("model.npz")["arr_0"].shape == (3,)
