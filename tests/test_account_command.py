"""mfopt account: every subcommand both ways, sweeps, JSON, plots, and one line for bad input."""

import json

import click
import pytest
from commands import ended, failure, invoked, printed
from mfopt_cli.sweeps import Sweep
from statements import stated

from mfopt.accounting import Mechanism, account, phases
from mfopt.accounting.phases import Phase
from mfopt.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    TruncatedPoisson,
)
from mfopt.strategies import BandedSquareRoot, SquareRoot

RATE = ["--probability", "0.05", "--iterations", "40"]
BATCHES = ["--batch-size=20", "--population=400", "--iters=40"]
SIGMA, DELTA = 2.0, 1e-5
# (subcommand, its arguments, the same mechanism through the library)
CASES = [
    ("dpsgd", RATE, Mechanism(Poisson(0.05, 40))),
    (
        "banded",
        ["--bands", "2", "--batch-size", "50", "--population", "1000", "--iterations", "40"],
        Mechanism(CyclicPoisson(0.1, 2, 40), BandedSquareRoot(2)),
    ),
    ("balls-in-bins", ["--bins", "10", "--epochs", "2"], Mechanism(BallsInBins(10, 2))),
    ("els", [*RATE, "--group-size", "3"], Mechanism(Poisson(0.05, 40), group_size=3)),
    (
        "uls",
        ["--sample-rate", "0.05", "--steps", "40"],  # as other tools say
        Mechanism(Poisson(0.05, 40), privacy_unit="user"),
    ),
    (
        "fixed-batch",
        BATCHES,
        Mechanism(FixedBatch(20, 400, 40)),
    ),
    (
        "fedavg",
        ["--probability", "0.05", "--rounds", "40", "--conversion", "pld"],
        Mechanism(Poisson(0.05, 40), privacy_unit="user"),
    ),
    (
        "fixed-order",
        ["--epochs", "2", "--iters", "10", "--strategy", "sqrt"],
        Mechanism(FixedOrder(10, 2), SquareRoot()),
    ),
    (
        "min-separation",
        ["--iters", "40", "--separation", "8", "--max-participations", "3", "--strategy", "sqrt"],
        Mechanism(MinSeparation(40, 8, 3), SquareRoot()),
    ),
    *(
        (
            "fixed-batch",
            [*BATCHES, f"--adjacency={adjacency}"],
            Mechanism(FixedBatch(20, 400, 40), adjacency=adjacency),
        )
        for adjacency in ("zero-out", "replace")
    ),
    ("dpsgd", [*BATCHES, "--batch-limit=25"], Mechanism(TruncatedPoisson(0.05, 25, 400, 40))),
]


def first(*words):
    """The first answer of a kind of account."""
    parsed = printed("account", *words)
    return parsed["results"][0] if "results" in parsed else parsed


@pytest.mark.ci
@pytest.mark.parametrize(("name", "words", "mechanism"), CASES)
def test_epsilon_from_sigma_and_sigma_from_epsilon_are_the_librarys(name, words, mechanism):
    forward = first(name, *words, "--noise-multiplier", SIGMA, "--delta", DELTA)
    expected = account(mechanism, noise_multiplier=SIGMA, delta=DELTA)
    assert forward["epsilon"] == expected.epsilon and forward["status"] == expected.status
    assert forward["privacy_unit"] == mechanism.privacy_unit
    assert forward["adjacency"] == mechanism.adjacency
    epsilon = forward["epsilon"]
    back = first(name, *words, "--eps", epsilon, "--delta", DELTA)
    assert back["noise_multiplier"] == pytest.approx(SIGMA, rel=1e-4)
    assert back["epsilon"] == epsilon and back["delta"] == DELTA


@pytest.mark.parametrize(
    ("sweep", "swept", "values"),
    [
        (["--group-size", "1:5:2", "--sigma", "2"], "group_size", [1, 3, 5]),
        (["--group-size", "2", "--noise-multiplier", "1:2:0.5"], "noise_multiplier", [1, 1.5, 2]),
        (["--group-size", "2", "--eps", "1,2"], "eps", [1, 2]),
    ],
)
def test_sweeps_over_any_one_argument_with_a_plot(sweep, swept, values, tmp_path):
    plot = tmp_path / "sweep.png"
    shown = printed("account", "els", *RATE, "--delta", DELTA, *sweep, "--plot", plot)
    assert shown["swept"] == swept
    assert [row[swept] for row in shown["results"]] == values
    solved = [row["noise_multiplier" if swept == "eps" else "epsilon"] for row in shown["results"]]
    falling = swept != "group_size"
    assert solved == sorted(solved, reverse=falling) and len(set(solved)) == len(solved)
    assert plot.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [plot]


@pytest.mark.parametrize("sigma", ["1e300", "1e-200"])
@pytest.mark.parametrize("words", [["dpsgd", *RATE], ["balls-in-bins", "--epochs=2", "--iters=4"]])
def test_a_sigma_that_cannot_be_computed_with_is_refused(words, sigma, capsys):
    words = ["account", *words, "--delta", "1e-5", "--noise-multiplier", sigma]
    said = failure(capsys, *words).splitlines()[-1]
    assert "--noise-multiplier" in said and "must lie between" in said


GOOD = {
    "dpsgd": {"--probability": "0.05", "--iterations": "40"},
    "els": {"--probability": "0.05", "--iterations": "40", "--group-size": "2"},
    "uls": {"--probability": "0.05", "--iterations": "40"},
    "banded": {"--probability": "0.05", "--iterations": "40", "--bands": "2"},
    "balls-in-bins": {"--bins": "4", "--epochs": "2", "--strategy": "sqrt"},
    "fresh-bins": {"--bins": "4", "--epochs": "2", "--strategy": "banded-sqrt:2"},
    "b-min-sep": {"--iters": "4", "--epochs": "2", "--separation": "2"},
    "random-partition": {"--iters": "4", "--epochs": "2", "--separation": "2"},
    "fixed-batch": {"--batch-size": "5", "--population": "20", "--iterations": "4"},
    "fedavg": {"--probability": "0.05", "--rounds": "40"},
    "fixed-order": {"--epochs": "2", "--iters": "4"},
    "min-separation": {"--iters": "9", "--separation": "3", "--max-participations": "2"},
}
# subcommands: what of their options is refused
BAD = {
    "dpsgd fixed-order b-min-sep": "--noise-multiplier 0, --noise-multiplier -1, "
    "--noise-multiplier nan, --noise-multiplier inf, --noise-multiplier x, --delta 0, --delta 1, "
    "--delta -1e-5, --delta 2, --delta nan",
    "dpsgd els fedavg banded uls": "--probability -0.1, --probability 1.5, --probability nan, "
    "--probability inf",
    "els balls-in-bins fixed-batch": "--group-size 0, --group-size -2, --group-size nan, "
    "--group-size inf, --group-size 1.5",
    "dpsgd": "--iterations 0, --iterations inf, --eps 1, --adjacency edge, --batch-size 1:3, "
    "--population 30, --iters 4",
    "fedavg": "--rounds 0, --noise-multiplier 1e300, --conversion improved",
    "fixed-batch": "--group-size 21, --group-size 16, --batch-size 21",
    "banded": "--bands 0, --batch-size 3 --population 30",
    "balls-in-bins": "--samples 0, --bins 0, --strategy no-such-file, --seed -1, --also laplace:1, "
    "--also pure:x, --also gaussian:0, --also approximate:1:2, --adjacency replace, --samples 10, "
    "--estimate --samples 300, --estimate --seed 3, --strategy identity:3",
    "fresh-bins": "--strategy sqrt",
    "b-min-sep random-partition": "--separation 4, --separation 0, --strategy banded-sqrt:3, "
    "--strategy sqrt",
    "els": "--plot x.png, --group-size 5:1, --group-size 1:2 --plot x.unknown, "
    "--group-size 1,2 --iterations 2,3",
    "min-separation": "--separation 0",
    "fixed-order": "--strategy nothing",
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (name, bad)
        for names, entry in BAD.items()
        for name in names.split()
        for bad in entry.split(", ")
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(name, bad, capsys):
    option, _, value = bad.partition(" ")
    words = {**GOOD[name], "--noise-multiplier": "1", "--delta": "1e-5", option: value}
    typed = " ".join(f"{k} {v}" for k, v in words.items()).split()
    assert ended("account", name, *typed) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    *usage, message = shown.err.strip().splitlines()
    assert message.startswith(("mfopt: error: ", "Error: ")) and "Traceback" not in shown.err
    assert not usage or usage[0].startswith(("Usage", "["))


def test_ranges_have_both_ends_and_may_be_geometric():
    assert Sweep(int).convert("1:10:4", None, None) == (1, 5, 9, 10)
    assert Sweep(float).convert("0.5:2:0.5", None, None) == (0.5, 1.0, 1.5, 2.0)
    converted = Sweep(float).convert("1e-9:1e-5:x10", None, None)
    assert converted == pytest.approx([1e-9, 1e-8, 1e-7, 1e-6, 1e-5]) and converted[-1] == 1e-5
    for wrong in ("1e-9:1e-5", "3:1", "1:2:x1", "0:1:x2", "1:2:0"):
        with pytest.raises(click.BadParameter):
            Sweep(float).convert(wrong, None, None)


@pytest.fixture
def file(tmp_path):
    def save(sampling, strategy):
        path = tmp_path / f"{sampling.kind}.npz"
        return stated(strategy, sampling).save(path)

    return save


def refused(capsys, *words):
    assert ended("account", *words, "--json") == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]
    return shown.err


AT = ["--noise-multiplier", "3", "--delta", "1e-3"]


@pytest.mark.ci
def test_a_files_bins_are_its_own(file, capsys):
    path = file(BallsInBins(4, 3), BandedSquareRoot(2))
    words = ["--strategy", path, *AT, "--estimate"]
    actual = first("balls-in-bins", *words)
    assert actual["details"]["sampling"] == BallsInBins(4, 3).describe()
    for other in (["--iters", "8"], ["--epochs", "2,3"]):
        message = refused(capsys, "balls-in-bins", *words, *other)
        assert "the mechanism of the file has" in message and other[0] in message
    fresh = file(FreshBins(4, 4, 2), BandedSquareRoot(2))
    for other in (["--iters", "8"], ["--rethrow", "1"]):
        message = refused(capsys, "fresh-bins", "--strategy", fresh, *AT, "--estimate", *other)
        assert "the mechanism of the file has" in message and other[0] in message
    order = first("fixed-order", "--strategy", path, *AT)
    assert order["epsilon"] > actual["epsilon"]


def test_a_banded_file_is_accounted_as_it_is(file, capsys):
    scheme = CyclicPoisson(0.2, 3, 60)
    path = file(scheme, BandedSquareRoot(3))
    actual = first("banded", path, *AT)
    expected = account(
        Mechanism(scheme, BandedSquareRoot(3)), noise_multiplier=3.0, delta=1e-3
    ).epsilon
    assert actual["epsilon"] == expected
    other = first("banded", path, *AT, "--probability", "0.1", "--bands", "4")
    assert other["details"]["sampling"] == CyclicPoisson(0.1, 4, 60).describe()
    assert "--iters" in refused(capsys, "banded", path, *AT, "--iters", "50")
    refused(capsys, "banded", path, *AT, "--bands", "2", "--probability", "0.1")
    bins = file(BallsInBins(4, 3), BandedSquareRoot(2))
    assert "--probability" in refused(capsys, "banded", bins, *AT)
    assert "bands" in refused(capsys, "banded", *AT, "--probability", "0.1", "--iters", "9")
    # C for cyclic Poisson sampling has no bins: they are to be given, and to fit
    refused(capsys, "fixed-order", "--strategy", path, *AT)
    refused(capsys, "fixed-order", "--strategy", path, *AT, "--iters", "10", "--epochs", "5")
    fitting = first("fixed-order", "--strategy", path, *AT, "--iters", "10", "--epochs", "6")
    assert fitting["epsilon"]


@pytest.mark.parametrize(
    "words",
    [
        ["dpsgd", *RATE],
        ["fedavg", *RATE, "--conversion", "pld"],
        ["balls-in-bins", "--iters", "4", "--epochs", "2", "--strategy", "sqrt", "--estimate"],
        ["fixed-order", "--iters", "4", "--epochs", "2"],
    ],
    ids=" ".join,
)
def test_no_epsilon_is_a_place_to_ask_delta_at_and_no_target(words, capsys):
    position = [
        first(*words, "--noise-multiplier", "2", "--eps", eps)["delta"]
        for eps in ("0", "1e-6", "0.5")
    ]
    assert 1 > position[0] >= position[1] > position[2]
    assert "must be greater than 0" in refused(capsys, *words, "--eps", "0", "--delta", "1e-3")


def test_a_run_of_phases(file, tmp_path, capsys):
    plot = tmp_path / "run.png"
    words = ["poisson:probability=0.02,iterations=50@1.1"]
    words += ["cyclic-poisson:probability=0.2,bands=2,iterations=40/banded-sqrt:2@2.5"]
    sizes = ["--delta", DELTA, "--points", 3, "--plot", plot]
    shown = printed("account", "run", *words, *sizes)["results"]
    assert [row["iterations"] for row in shown] == [25, 50, 90]
    pair = [
        Phase(Mechanism(Poisson(0.02, 50)), 1.1),
        Phase(Mechanism(CyclicPoisson(0.2, 2, 40), BandedSquareRoot(2)), 2.5),
    ]
    assert shown[-1]["epsilon"] == phases.compose(pair, delta=DELTA).epsilon
    assert plot.read_bytes().startswith(b"\x89PNG")
    path = file(BallsInBins(4, 2), SquareRoot())
    table = invoked("account", "run", path, "--eps", 3, "--estimate").stdout
    assert "ESTIMATE" in table or "estimate" in table
    for wrong in (
        ["poisson:probability=0.02,iterations=50", "--delta", DELTA],
        ["poisson:probability=0.02,iterations=50@0", "--delta", DELTA],
        ["poisson:probability=0.02@1", "--delta", DELTA],
        [words[0]],
        [words[0], "--delta", DELTA, "--eps", 1],
        [words[0], "--delta", DELTA, "--points", 0],
        ["balls-in-bins:bins=4,epochs=2@2", "balls-in-bins:bins=4,epochs=2@2", "--delta", DELTA],
    ):
        refused(capsys, "run", *wrong)


CONFLICTS = {  # words of a command -> what is said
    "dpsgd --probability=0.1 --population=1000 --iters=40 --eps=1": (
        "--probability has no effect with --population; remove one"
    ),
    "dpsgd --batch-size=50 --batch-limit=60 --iters=40 --eps=1": (
        "--batch-size has no effect without --population"
    ),
    "dpsgd --probability=0.1 --batch-limit=60 --iters=40 --eps=1": (
        "--batch-limit has no effect without --population"
    ),
    "dpsgd --iterations=9 --iters=40 --eps=1": (
        "--iterations has no effect with --iters; remove one"
    ),
}
# companions that exceed the target alone: it was said that no σ up to 1e50 reaches it
EXCEEDING = (
    "--also=pure:2 --eps=1",
    "--also=approximate:0.5:1e-4 --noise-multiplier=1",
    "--also=gaussian:0.5 --eps=2",
    "--also=pure:0.8 --also=pure:0.8 --eps=1",
)
CONFLICTS |= {
    f"balls-in-bins --epochs=2 --iters=4 {words}": "what --also names is accounted for with δ = "
    for words in EXCEEDING
}


@pytest.mark.parametrize("words", CONFLICTS)
def test_a_conflict_of_options_or_with_a_companion_is_named(words, capsys):
    code = 1 if "--also" in words else 2
    said = failure(capsys, "account", *words.split(), "--delta=1e-5", code=code)
    assert CONFLICTS[words] in said


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_a_bound_is_shown_with_what_some_data_attain(adjacency):
    words = ["account", "fixed-batch", "--batch-size=50", "--population=1000", "--iters=40"]
    words += [f"--adjacency={adjacency}", "--noise-multiplier=1", "--delta=1e-5"]
    actual = printed(*words)
    below, above = actual["details"]["bracket"]
    assert actual["status"] == "bound" and above == actual["epsilon"] and 0.9 * above < below
    line = next(line for line in invoked(*words).stdout.splitlines() if "at least" in line)
    shown = float(line.split("ε = ")[1].split(",")[0])
    assert below * (1 - 1e-5) < shown <= below
