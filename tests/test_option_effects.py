"""Every option that is accepted does something.

Runs are generated from the tree of commands: each option, with some value, changes what is printed
or the files that are left, or is refused. What is heavy (a search, a proof, a run) is replaced by
one that prints its arguments.
"""

import dataclasses
import functools
import json
import random
import re

import click
import numpy as np
import pytest
from commands import invoked
from mfopt_cli import options
from mfopt_cli.main import main
from option_effects import name_of, replaced, run, values
from selection import before_release
from test_vocabulary import EVERY, of

import mfopt._api
from mfopt.accounting.model import Bounds
from mfopt.accounting.verify import Verified
from mfopt.experiments.cache import Result
from mfopt.experiments.comparison import Row
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.noise.measure import Cost
from mfopt.sampling import BallsInBins
from mfopt.strategies import SquareRoot
from mfopt.training.audit import Audit
from mfopt.training.verification import Verification
from mfopt.workloads import PrefixSums

FACTORIZE = mfopt._api.factorize
SIGMA = ["--noise-multiplier=2", "--delta=1e-5", "--json"]
DRAWN = ["--batch-size=50", "--population=1000", "--iters=40"]
BINS = ["--epochs=2", "--iters=4", "--noise-multiplier=2", "--delta=1e-3", "--json"]
# command -> words of a run that is quick, to which an option is added
BASE = {
    "account banded": ["--bands=2", *DRAWN, *SIGMA],
    "account dpsgd": [*DRAWN, *SIGMA],
    "account els": ["--group-size=3", *DRAWN, *SIGMA],
    "account fedavg": [*DRAWN, *SIGMA],
    "account fixed-batch": ["--group-size=3", *DRAWN, *SIGMA],
    "account fixed-order": ["--epochs=2", "--iters=10", "--strategy=sqrt", *SIGMA],
    "account min-separation": [
        *("--iters=40", "--separation=8", "--max-participations=3", "--strategy=sqrt"),
        *SIGMA,
    ],
    "account run": ["poisson:probability=0.05,iterations=40@1.1", "--delta=1e-5", "--json"],
    "account uls": [*DRAWN, *SIGMA],
    "data build": ["out", "--data=a.jsonl", "--public=b.jsonl", "--vocab-size=300", "--json"],
    "optimize": ["--epochs=2", "--iters=8", "--eps=2", "--seed=1", "--json"],
    "plan": ["--units=100", "--eps=2", "--epochs=2", "--batch-size=25", "--out=new.npz", "--yes"],
    "plot": ["sqrt.npz"],
    "report": ["sqrt.npz"],
    "show": ["sqrt.npz"],
    "statement": ["sqrt.npz"],
    "train": [
        "--sampling=balls-in-bins:bins=4,epochs=2",
        *("--eps=8", "--delta=1e-4", "--algorithm=fedavg", "--show-config"),
    ],
}
# ... and of one that takes seconds for each option
SLOW = {
    "audit": ["sqrt.npz"],
    "account balls-in-bins": BINS,
    "account fresh-bins": BINS,
    "account b-min-sep": [*BINS, "--separation=2"],
    "account random-partition": [*BINS, "--separation=2"],
    "calibrate": ["sqrt.npz", "--eps=1", "--seed=1", "--certify-samples=1024", "--json"],
    "certify": ["sqrt.npz", "--eps=4", "--seed=1", "--json"],
    "compare": ["--epochs=2", "--iters=4", "--eps=2", "--include=dpsgd,banded", "--samples=256"],
    "noise": ["sqrt.npz", "--params=1000", "--json"],
    "verify": ["sqrt.npz"],
}
ELSEWHERE = {
    "cache": "clears this user's folders: tests/test_first_minutes.py",
}
# values that no type tells
OWN = {
    "--also": ["--also=pure:0.5"],
    "--baseline": ["--baseline=dpsgd+poisson"],
    "--batch-limit": ["--batch-limit=60"],
    "--cache": ["--cache=cells"],
    "--certify-samples": ["--certify-samples=2048"],
    "--certificate": ["--certificate=deterministic"],
    "--config": ["--config=c.toml"],
    "--cooldown": ["--cooldown=2:5:0.5"],
    "--data": ["--data=c.jsonl"],
    "--delta": ["--delta=1e-4"],
    "--end-of-text": ["--end-of-text=a"],
    "--floor": ["--floor=1e-4"],
    "--held-out-records": ["--held-out-records=0.4"],
    "--held-out-users": ["--held-out-users=0.4"],
    "--include": ["--include=sqrt"],
    "--init": ["--init=sqrt.npz"],
    "--max-participations": ["--max-participations=2"],
    "--noise-multiplier": ["--noise-multiplier=1.5"],
    "--optimizer": ["--optimizer=sgd"],
    "--out": ["--out=made.npz", "--out=made", "--out=made.png", "--out=made.html"],
    "--params": ["--params=2000"],
    "--plot": ["--plot=made.png"],
    "--population": ["--population=2000"],
    "--probability": ["--probability=0.1"],
    "--public": ["--public=c.jsonl"],
    "--sampling": ["--sampling=fresh-bins", "--sampling=poisson:probability=0.1,iterations=8"],
    "--schedule": ["--schedule=linear"],
    "--seed": ["--seed=5"],
    "--strategy": ["--strategy=identity", "--strategy=banded-sqrt:2"],
    "--text-column": ["--text-column=other"],
    "--tokenizer": ["--tokenizer=store"],
    "--unit": ["--unit=user", "--unit=record"],
    "--user-column": ["--user-column=other"],
    "--vocab-size": ["--vocab-size=290"],
    "--workload": ["--workload=momentum"],
}
OWN_OF = {
    ("certify", "--eps"): ["--eps=3"],
    ("optimize", "--max-participations"): ["--max-participations=3"],
    ("compare", "--baseline"): ["--baseline=dpsgd+balls-in-bins"],
    ("train", "--delta"): ["--delta=1e-5"],
    ("train", "--lora-layers"): ["--lora-layers=mlp/c_fc"],
    ("train", "--model"): ["--model=here"],
}
# options -> words without which they say nothing
WITH = {
    ("account", "--eps"): ["!--noise-multiplier"],
    ("account run", "--eps"): ["!--delta"],
    ("account", "--probability"): ["!--batch-size", "!--population"],
    ("account", "--iterations"): ["!--iters"],
    ("", "--force"): ["--out=sqrt.npz"],
    ("", "--plot"): ["--noise-multiplier=1,2"],
    ("account", "--force"): ["--noise-multiplier=1,2", "--plot=taken.png"],
    ("account run", "--plot"): ["--json"],
    ("account run", "--force"): ["--plot=taken.png"],
    ("account balls-in-bins", "--certify-samples"): ["--strategy=banded-sqrt:2", "--seed=1"],
    ("account balls-in-bins", "--certificate"): ["--strategy=banded-sqrt:2"],
    ("account fresh-bins", "--certificate"): ["--strategy=banded-sqrt:2"],
    ("calibrate", "--certificate"): ["!--certify-samples"],
    ("optimize", "--certificate"): ["--strategy=blt", "!--certify-samples"],
    ("account balls-in-bins", "--estimate"): ["--strategy=banded-sqrt:2"],
    ("account fresh-bins", "--certify-samples"): ["--strategy=banded-sqrt:2", "--seed=1"],
    ("account fresh-bins", "--estimate"): ["--strategy=banded-sqrt:2"],
    ("account b-min-sep", "--certify-samples"): ["--strategy=banded-sqrt:2", "--seed=1"],
    ("account random-partition", "--certify-samples"): ["--strategy=banded-sqrt:2", "--seed=1"],
    ("data build", "--force"): ["!out", "store"],
    ("data build", "--format"): ["--data=plain", "--public=b.jsonl"],
    ("data build", "--tokenizer"): ["!--vocab-size"],
    ("data build", "--end-of-text"): ["!--vocab-size", "--tokenizer=store"],
    ("plan", "--separation"): ["--loader=federated"],
    ("plan", "--max-participations"): ["--loader=federated"],
    ("plan", "--iters"): ["!--batch-size"],
    ("statement", "--out"): ["--format=html"],
    ("statement", "--force"): ["--format=html", "--out=taken.html"],
    ("optimize", "--reassign-every"): ["--sampling=fresh-bins"],
    ("optimize", "--separation"): ["--sampling=b-min-sep", "--bands=1"],
    ("optimize", "--max-participations"): [
        *("--sampling=min-separation", "--separation=4", "!--samples"),
    ],
    ("optimize", "--bands"): ["--strategy=banded"],
    ("optimize", "--init"): ["--strategy=banded-toeplitz", "--bands=2"],
    ("optimize", "--momentum"): ["--workload=momentum"],
    ("optimize", "--certify-samples"): ["--strategy=blt"],
    ("plot", "--force"): ["--out=taken.png"],
    ("report", "--force"): ["--out=taken.html"],
    ("compare", "--force"): ["--out=made"],
}
# what an option is for that says nothing of what a run prints
QUIET_WORK = {
    ("", "--jobs"): "how many work side by side",
    ("plan", "--yes"): "asks nothing: tests/test_plan.py",
    ("data build", "--skip-bad"): "skips bad lines: tests/test_train_data_build.py",
    ("noise", "--repeats"): "steps that are timed",
    ("certify", "--certificate"): "the toy's bound takes no samples: tests/test_moment_bound.py",
    ("compare", "--force"): "nothing is in the way",
    ("compare", "--memory"): "what is recommended: tests/test_experiments_compare.py",
    **{
        ("train", name): "of a run: tests/test_train_run.py"
        for name in ("--resume", "--resume-from", "--report-only", "--json", "--quiet")
    },
    **{
        ("train", name): "of several processes: tests/test_train_mesh.py"
        for name in ("--coordinator", "--processes", "--process")
    },
    ("train", "--epochs"): "with --iters in place of --sampling",
    ("train", "--iters"): "with --epochs in place of --sampling",
    ("train", "--show-config"): "is what is asked for here",
}


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"]


def entry_for(table, path, name):
    """The entry of a table for an option of a command, of its group, or of any."""
    for index in (path, path.split()[0], ""):
        if (index, name) in table:
            return table[index, name]
    return None


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of small files of every kind."""
    folder = tmp_path_factory.mktemp("inputs")
    stated = Guarantee(2.0, 1e-3, 2.5, method="none", status="certified")  # a proof takes seconds
    shape = SquareRoot(), 2.5, BallsInBins(bins=4, epochs=2), PrefixSums()
    searched = {"optimizer_status": "none"}
    Factorization(*shape, stated, provenance=searched).save(folder / "sqrt.npz")
    rng = random.Random(0)
    for name, users in (("a", 9), ("b", 7), ("c", 8)):
        rows = [
            {
                "user": f"{name}{number % users}",
                "text": " ".join(rng.choices(WORDS, k=6)),
                "other": " ".join(rng.choices(WORDS, k=6)),
            }
            for number in range(60)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in [*rows, rows[-1]])
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "plain").write_bytes((folder / "a.jsonl").read_bytes())
    for name in ("taken.png", "taken.html"):
        (folder / name).write_text("mine")
    (folder / "c.toml").write_text("[model]\nwidth = 32\nheads = 2\n")
    np.save(folder / "w.npy", np.ones(8))
    (folder / "gpt2").mkdir()
    (folder / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    store = folder / "store"
    texts = [f"--data={folder / 'a.jsonl'}", f"--public={folder / 'b.jsonl'}"]
    main(["data", "build", str(store), *texts, "--vocab-size=300", "--quiet"])
    return folder


def said(x):
    described = hasattr(x, "describe") and not dataclasses.is_dataclass(x)
    return f"{x.describe()}" if described else repr(x)


def show(*arguments, **keywords):
    keywords = {
        name: value for name, value in keywords.items() if name not in ("progress", "command")
    }
    shown = [said(x) for x in arguments] + [f"{name}={said(x)}" for name, x in keywords.items()]
    click.echo(re.sub(r"0x[0-9a-f]+", "", "\n".join(shown)), err=True)


@pytest.fixture(scope="module", autouse=True)
def _light(inputs):
    """Print what heavy work was asked for, in place of doing it."""
    factorization = mfopt.load(inputs / "sqrt.npz")

    def search(*arguments, **keywords):
        show(*arguments, **keywords)
        return factorization

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mfopt.experiments.report.page", lambda *arguments: str(arguments))
        patch.setattr("mfopt.experiments.mechanism_plot.plot", lambda _, to, *__: to.write_text(""))
        patch.setattr("mfopt._api.factorize", search)
        yield


@pytest.fixture
def _stubbed(inputs, monkeypatch):
    """Print what an account, a certificate, a measurement or a cell was asked for, in its place."""
    guarantee = mfopt.load(inputs / "sqrt.npz").guarantee

    def stated(mechanism, **arguments):
        show(mechanism, **arguments)
        return dataclasses.replace(guarantee, status="certified", failure_probability=1e-9)

    class Composed:
        def __init__(self, mechanism, other, **effort):
            show(len(other.parts), [part.losses for part, _ in other.parts])
            self.epsilon = functools.partial(self._stated, mechanism, effort)
            self.delta = self.noise_multiplier = self.epsilon

        def _stated(self, mechanism, effort, *numbers):
            return stated(mechanism, numbers=numbers, **effort)

    def proved(pair, *arguments, effort, **_):
        show(*arguments, effort=effort)
        sigma = arguments[0] if len(arguments) == 3 else 3.0
        return Verified(sigma, 2.0, 1e-3, Bounds(1e-3, 1e-3, {"samples": 99}), 1e-6, 99, 1, "stub")

    def timed(stream, parameters, **_):
        show(stream.describe(), parameters)
        return Cost(parameters, "stub", 1, 1, 1.0, 1.0, 1.0, 1.0, False)

    def cells(wanted, cache, **_):
        show(*wanted, cache.folder.name)
        record = dict.fromkeys(Row._fields, 1.0) | {"status": "estimate", "memory": 1}
        return {cell: Result(record | {"rmse": n + 1.0}) for n, cell in enumerate(wanted)}

    def audited(_, settings, *, confidence, canaries, **arguments):
        show(settings, **arguments)
        return Audit(1.0, 1.0, 1.0, 3.0, 2.0, 1e-3, 2.5, confidence, canaries, 9, 9, 0.5, 0.5)

    def verified(facts, **arguments):
        show(**arguments)
        return Verification((), {}, ())

    for name, stub in {
        "training.audit.audit": audited,
        "training.verification.read": str,
        "training.verification.verify": verified,
        "training.wiring.account_of": lambda *_, **__: "an account",
        "accounting.account": stated,
        "accounting.monte_carlo.composition.analysis": Composed,
        "factorization.proofs.certify": proved,
        "factorization.proofs.release": proved,
        "noise.measure.measure": timed,
        "experiments.comparison.run_all": cells,
    }.items():
        monkeypatch.setattr(f"mfopt.{name}", stub)


class Toy:
    """One command with its base run; outcomes are kept, as the same words come again."""

    def __init__(self, path, base, inputs):
        self.path, self.base, self.inputs = path, [*path.split(), *base], inputs
        self.options = {
            name_of(param): param
            for param in of(tuple(path.split()))
            if isinstance(param, click.Option)
        }
        self.outcome = functools.cache(lambda *words: run(list(words), inputs))

    def tried(self, name, words):
        """(words, the run without them, the run with them) for each value of an option."""
        base = replaced(self.base, entry_for(WITH, self.path, name) or [])
        if name in ("--json", "--quiet", "--csv"):
            base = [word for word in base if word not in ("--json", "--quiet")]
        original = self.outcome(*base)
        for word in words:
            yield word, original, self.outcome(*replaced(base, [word]))

    def words(self, name):
        """Words that give an option some value."""
        param = self.options[name]
        listed_words = entry_for(OWN_OF, self.path, name)
        typed = values(param)
        reference = isinstance(param.type, click.Choice | options.StrategyName)
        return listed_words or (typed if reference or name not in OWN else OWN[name])

    @functools.cache  # noqa: B019 - toys are few
    def effective(self, name):
        """The first words that give the option an effect, None where none do."""
        for word, original, updated in self.tried(name, self.words(name)):
            if updated != original and updated.code == 0:
                return word
        return None


def check_alone(toy):
    """Every option has an effect with some value; no word of a choice ends in a traceback."""
    idle = [
        name
        for name in toy.options
        if entry_for(QUIET_WORK, toy.path, name) is None and toy.effective(name) is None
    ]
    assert not idle, f"{toy.path}: nothing changes with {', '.join(idle)}"
    for name, param in toy.options.items():
        # an exact answer is deterministic already
        exact = name == "--certificate" and toy.path.startswith("account ")
        if entry_for(WITH, toy.path, name) and name != "--force" and not exact:
            base_outcome = toy.outcome(*toy.base)
            actual = [toy.outcome(*replaced(toy.base, [word])) for word in toy.words(name)]
            recorded = [outcome.refused or outcome != base_outcome for outcome in actual]
            assert any(recorded), f"{toy.path}: {name} does nothing, and says nothing"
        if isinstance(param.type, click.Choice | options.StrategyName):
            for word, _, updated in toy.tried(name, toy.words(name)):
                assert updated.code in (0, 1) or updated.refused, (toy.path, word, updated)


# accounts whose options are those of others in the check: at a release
TWINS = ("account run", "account fixed-batch", "account els", "account banded")


def numbers_but(table, *paths):
    """Indices of the commands of a table but these, whose runs take long."""
    return (number for number, command in enumerate(table) if command not in paths)


def test_every_command_is_looked_at():
    assert {*BASE, *SLOW, *ELSEWHERE} == {" ".join(path) for path in EVERY}


@pytest.mark.ci
@pytest.mark.parametrize(
    "path",
    before_release(
        [*BASE],
        *numbers_but(BASE, *TWINS),
    ),
)
def test_every_option_does_something_or_is_refused(path, inputs):
    check_alone(Toy(path, BASE[path], inputs))


@pytest.mark.ci
@pytest.mark.parametrize("path", before_release([*SLOW], *numbers_but(SLOW, "calibrate")))
@pytest.mark.usefixtures("_stubbed")
def test_every_option_of_slow_commands_reaches_their_work(path, inputs):
    check_alone(Toy(path, SLOW[path], inputs))


def test_bands_of_a_comparison_without_any_are_refused():
    """They were taken, and changed nothing."""
    words = ["compare", "--epochs=2", "--iters=4", "--include=sqrt", "--bands=2"]
    result = invoked(*words)
    assert result.exit_code == 2 and "--bands has no effect with --include sqrt" in result.stderr


@pytest.mark.release
def test_every_option_of_a_search_changes_what_is_found(inputs, monkeypatch):
    """The search itself, of 8 bins: an argument that arrives may still be dropped there."""
    monkeypatch.setattr("mfopt._api.factorize", FACTORIZE)
    small = ["--samples=256", "--certify-samples=1024", "--steps=8", "--out=x.npz"]
    toy = Toy("optimize", [*BASE["optimize"], *small], inputs)
    for name in toy.options:
        if name not in ("--memory", "--force"):  # searches of many forms
            assert toy.effective(name), name
