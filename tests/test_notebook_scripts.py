"""The scripts: short, and as accurate as independent noise at the same ε, with the same batches."""

import functools
import importlib.util
from pathlib import Path

import pytest

import mfopt
from mfopt.accounting import account
from mfopt.factorization import Factorization
from mfopt.mechanism import Mechanism
from mfopt.strategies import Identity

ROOT = Path(__file__).parent.parent
FILE = ROOT / "artifacts" / "factorizations" / "blt-4-8x32-eps8.npz"
SCRIPTS = {
    "digits_opacus": ["opacus"],
    "digits_torch": ["torch"],
    "digits_nnx": ["flax"],
    "digits_jax_privacy": ["jax_privacy"],
    "digits_trainer": ["torch", "transformers", "accelerate"],
}


def test_every_script_is_listed_and_short():
    found = {path.stem: path for path in (ROOT / "notebooks").glob("*.py")}
    assert set(found) == set(SCRIPTS)
    for path in found.values():
        text = path.read_text()
        assert len(text.splitlines()) <= 60 and "import mfopt" in text


@functools.cache
def factorizations():
    """(the optimized one, independent noise at its ε and δ under its sampling)."""
    optimized = mfopt.load(FILE)
    stated = account(Mechanism(optimized.sampling), epsilon=optimized.guarantee.epsilon, delta=1e-5)
    sigma = stated.noise_multiplier
    return optimized, Factorization(
        Identity(), sigma, optimized.sampling, optimized.workload, stated
    )


@pytest.mark.release
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_a_script_reaches_the_accuracy_of_independent_noise(name, monkeypatch):
    for package in (*SCRIPTS[name], "sklearn"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    optimized, independent = factorizations()
    accuracy = []
    for factorization in (optimized, independent):
        monkeypatch.setattr(mfopt, "load", lambda path, found=factorization: found)
        accuracy.append(module.main("a file", seed=0))
    assert accuracy[0] >= max(0.85, accuracy[1]), accuracy
