"""The page of loops: each diff has as many lines as its table says, and both versions run."""

import re
from pathlib import Path

import pytest
from selection import before_release
from sources import ROOT

PAGE = (ROOT / "docs" / "howto" / "loops.md").read_text()
TABLE = {name: int(count) for name, count in re.findall(r"^\| ([^|]+) \| (\d+) \|$", PAGE, re.M)}
DIFFS = {
    part.split("\n", 1)[0]: re.search(r"^```diff\n(.*?)^```", part, re.S | re.M)[1]
    for part in PAGE.split("\n## ")[1:]
}
NEEDS = {
    "Opacus": ["opacus"],
    "accelerate": ["accelerate"],
    "Lightning": ["lightning.pytorch"],
    "transformers": ["transformers", "accelerate"],
    "NNX": ["flax.nnx"],
    "equinox": ["equinox"],
    "jax_privacy": ["jax_privacy"],
}
TORCH = list(DIFFS)[:6]


def changed(diff):
    """Lines changed: of each run of marked lines those added or removed, the more of them."""
    runs = re.findall(r"(?:^[+-].*\n)+", diff, re.M)
    return sum(max(len(re.findall(rf"^\{mark}.*\S", run, re.M)) for mark in "+-") for run in runs)


def version(diff, mark):
    """The loop with the lines of ``mark``, "+" or "-", and the unmarked ones."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", mark))


def test_the_table_counts_the_lines():
    assert list(TABLE) == list(DIFFS) and len(TABLE) == 10
    assert {name: changed(diff) for name, diff in DIFFS.items()} == TABLE
    assert max(TABLE.values()) <= 10
    assert changed(" a\n-b\n+c\n+d\n e\n-f\n") == 3  # a control


@pytest.fixture
def factorization(work_folder):
    """``factorization.npz`` in the folder of the test: one epoch of six steps."""
    import numpy as np

    import mfopt

    example = mfopt.factorize(epochs=1, iterations_per_epoch=6, epsilon=8.0, strategy="identity")
    example.save("factorization.npz")
    generator = np.random.default_rng(0)
    return generator.normal(size=(90, 4)).astype(np.float32), np.arange(90) % 3


def preamble(section):
    """The code that a group of loops begins with."""
    return re.search(rf"{section}.*?^```python\n(.*?)^```", PAGE, re.S | re.M)[1]


def names_for(name, x, y):
    """What the loop ``name`` begins with."""
    if name in TORCH:
        torch = pytest.importorskip("torch")
        names = {"model": torch.nn.Linear(4, 3)}
        names["optimizer"] = torch.optim.Adam(names["model"].parameters(), 1e-2)
        names["dataset"] = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        exec(preamble("PyTorch's loops"), names)
        if name == "Lightning":
            names["module"] = lightning_module(names["loss"])
        if name == "transformers":
            names["network"] = hugging_face_model()
            names["records"] = [{"x": a, "labels": b} for a, b in names["dataset"]]
        return names
    import jax
    import jax.numpy as jnp
    import optax

    names = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    names["params"] = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    exec(preamble("The loops in JAX"), names)

    def loss(model, example):
        return optax.softmax_cross_entropy_with_integer_labels(model(example[0]), example[1])

    if name == "NNX":
        from flax import nnx

        names |= {"model": nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "loss": loss}
    if name == "equinox":
        import equinox

        names |= {"model": equinox.nn.MLP(4, 3, 5, 1, key=jax.random.key(0)), "loss": loss}
    return names


def lightning_module(loss):
    import torch
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            return loss(self, batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    return Module()


def hugging_face_model():
    import torch

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x, labels):
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    return Network()


@pytest.mark.ci
@pytest.mark.filterwarnings("default")  # of other people's packages
@pytest.mark.parametrize("mark", before_release("-+", 1))
@pytest.mark.parametrize("name", DIFFS)
def test_both_versions_run(name, mark, factorization, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    if name == "PyTorch, several processes":
        import torch

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{Path.cwd()}/store", rank=0, world_size=1
        )
    try:
        names = names_for(name, *factorization)
        exec(compile(version(DIFFS[name], mark), f"{name} {mark}", "exec"), names)
    finally:
        if name == "PyTorch, several processes":
            torch.distributed.destroy_process_group()
    if mark == "-":
        return
    run = names.get("run") or getattr(names.get("trainer"), "run", None)
    if name in TORCH:
        assert (run or names["loader"].run).step == 6
    else:
        assert int(names["state"].noise.step) == 6
