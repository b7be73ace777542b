"""PyTorch for tests, imported at its first use: seconds for each worker that collects them."""

import importlib

import pytest


class _Lazy:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(importlib.import_module(self._name), name)


torch, functional = _Lazy("torch"), _Lazy("torch.nn.functional")


@pytest.fixture(autouse=True, scope="module")
def needs_torch():
    pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the keys of states that tests make
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
