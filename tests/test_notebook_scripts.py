"""The scripts: short, and as accurate as independent noise at the same ε, with the same batches."""

import functools
import gzip
import importlib.util

import pytest
from sources import ROOT

import mfopt
from mfopt.accounting import account
from mfopt.factorization import Factorization
from mfopt.mechanism import Mechanism
from mfopt.strategies import Identity

FILE = ROOT / "artifacts" / "factorizations" / "blt-4-8x32-eps8.npz"
SCRIPTS = {
    "digits_opacus": ["torch"],
    "digits_torch": ["torch"],
    "digits_nnx": ["flax"],
    "digits_jax_privacy": ["jax_privacy"],
    "digits_trainer": ["torch", "transformers", "accelerate"],
}


DATA = "system_text"


def test_every_script_is_listed_and_short():
    actual = {path.stem: path for path in (ROOT / "notebooks").glob("*.py")}
    assert set(actual) == {*SCRIPTS, DATA}
    for name, path in actual.items():
        text = path.read_text()
        if name == DATA:  # no training loop
            assert len(text.splitlines()) <= 72 and "from mfopt" in text
        else:
            assert len(text.splitlines()) <= 62 and "import mfopt" in text


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOG = """pack (1.{0}) unstable; urgency=low

  * Entry {0} of a log, with \u00fc.
    - More of it.

 -- Some One <One@example.org>  Mon, 02 Jan 2023 13:06:21 +0100

pack (1.{0}-0) unstable; urgency=low

  * Before entry {0}.

 -- Two <two@example.org>  Sun, 01 Jan 2023 13:06:21 +0100
"""
PAGE = r""".TH PAGE 8
.PP
The option \fB\-\-name\fR does one thing for a file, and
.I another
for a folder\&.
.SH TOO SHORT
Two words.
"""


def test_text_of_the_system_becomes_users_and_records(tmp_path, monkeypatch):
    script = loaded(DATA)
    files = {f"doc/p{i}/changelog.Debian.gz": LOG.format(min(i, 2)) for i in range(4)}
    files |= {"man/man8/page.8.gz": PAGE, "man/man1/other.1.gz": PAGE}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    entries = list(script.changelogs(tmp_path))
    # p3 carries the file of p2
    assert len(entries) == 6 and {user for user, _ in entries} == {
        "one@example.org",
        "two@example.org",
    }
    assert ("one@example.org", "* Entry 1 of a log, with \u00fc.\n    - More of it.") in entries
    assert ("two@example.org", "* Before entry 0.") in entries
    (page, words), *remaining = script.manpages(tmp_path)
    assert page == "page.8.gz" and not remaining
    assert words == ("The option --name does one thing for a file, and another for a folder.")
    (tmp_path / "lib").mkdir()
    for i in range(40):
        (tmp_path / f"lib/m{i}.py").write_text(f'"""Module number {i}, of its own."""\n')
    monkeypatch.setattr(script, "PUBLIC", tmp_path / "lib")
    report = script.main("changelogs", tmp_path / "corpus", tmp_path, 270)
    assert report["parts"]["public"]["users"] == 40
    assert sum(part["records"] for part in report["parts"].values()) == 46


@functools.cache
def factorizations():
    """(the optimized one, independent noise at its ε and δ under its sampling)."""
    optimized = mfopt.load(FILE)
    stated = account(Mechanism(optimized.sampling), epsilon=optimized.guarantee.epsilon, delta=1e-5)
    sigma = stated.noise_multiplier
    return optimized, Factorization(
        Identity(), sigma, optimized.sampling, optimized.workload, stated
    )


@pytest.fixture(params=SCRIPTS)
def accuracy(request, monkeypatch):
    """Function: what a script reaches with a factorization."""
    for package in (*SCRIPTS[request.param], "sklearn"):
        pytest.importorskip(package)
    module = loaded(request.param)

    def trained(factorization):
        monkeypatch.setattr(mfopt, "load", lambda path: factorization)
        return module.main("a file", seed=0)

    return trained


@pytest.mark.ci
@pytest.mark.parametrize(
    "accuracy", [name for name in SCRIPTS if "torch" in SCRIPTS[name]], indirect=True
)
@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_a_script_trains_and_tells_its_accuracy(accuracy):
    size = {"epochs": 1, "iterations_per_epoch": 2, "epsilon": 8, "strategy": "identity"}
    assert 0 < accuracy(mfopt.factorize(**size, sampling="balls-in-bins")) < 1


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_a_script_reaches_the_accuracy_of_independent_noise(accuracy):
    optimized, independent = factorizations()
    reached = accuracy(optimized)
    assert reached >= max(0.85, accuracy(independent)), reached
