"""Plans: each loader gets a mechanism that it executes, its file and a loop that trains."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import documentation
import pytest
from click.testing import CliRunner
from commands import failure, invoked, printed
from mfopt_cli.commands import plan
from mfopt_cli.main import cli

import mfopt
from mfopt.guarantee import questionable_delta

LOOPS = Path(plan.__file__).parents[1] / "loops"
SMALL = ["--epochs", 2, "--batch-size", 25, "--eps", 2, "--memory", 1, "--yes"]


pytestmark = pytest.mark.usefixtures("work_folder")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("loader", "scheme"),
    [
        ("poisson", "poisson"),
        ("shuffled", "fixed-order"),
        ("federated", "min-separation"),
    ],
)
def test_a_loader_gets_what_it_executes(loader, scheme):
    framework = ["--framework", "jax"]
    built = printed("plan", "--units", 100, "--loader", loader, *framework, *SMALL)
    factorization = mfopt.load("mechanism.npz")
    assert built["sampling"]["kind"] == factorization.sampling.kind == scheme
    assert factorization.guarantee.status != "estimate" and factorization.iterations == 8
    assert built["epsilon"] == 2.0 and built["delta"] <= 1 / (10 * 100)
    errors = built["final_model_error"], built["dpsgd_final_model_error"]
    assert errors[0] == errors[1] if loader == "poisson" else errors[0] < errors[1]
    assert Path(built["loop_path"]).read_text() == built["loop"]
    assert "mechanism.npz" in built["loop"]
    # it trains, to the last step
    exec(compile(built["loop"], loader, "exec"), {"__file__": built["loop_path"]})
    words = shlex.split(built["optimize"])
    assert words[:2] == ["mfopt", "optimize"] and invoked(*words[1:], "--force").exit_code == 0


@pytest.mark.parametrize("units", [1, 9, 10, 99_999, 100_000, 123_456_789])
def test_delta_is_far_below_one_over_the_units(units):
    done = invoked("plan", "--units", units, "--batch-size", 1, "--eps", 1, "--loader", "poisson")
    assert done.exit_code == 2 and "terminal" in done.stderr  # nobody to ask, and no --yes
    delta = plan.power_below(units)
    assert 0.0999 / (10 * units) < delta <= 1.0000001 / (10 * units)
    assert questionable_delta(delta, units) in ("", questionable_delta(delta))


def test_own_batches_take_the_scheme_of_lowest_error(monkeypatch):
    requests = []

    def factorize(**options):
        requests.append(options)
        return factorization

    factorization = mfopt.factorize(
        epochs=1, iterations_per_epoch=4, epsilon=2.0, strategy="identity"
    )
    monkeypatch.setattr("mfopt.factorize", factorize)
    sizes = ["--iters", 4], ["--batch-size", 25]
    for epochs, memory in ((2, 1), (2, 9), (2, 0), (1, 3)):
        words = ["--epochs", epochs, *sizes[memory % 2], "--memory", memory, "--eps", 2]
        printed("plan", "--units", 100, *words, "--yes", "--force", "--records-per-unit", 3)
    chosen = [(o["sampling"], o["strategy"], o["buffers"], o["bands"]) for o in requests]
    assert chosen == [
        ("fresh-bins", None, 1, None),
        ("fresh-bins", "banded-toeplitz", None, 4),
        ("fresh-bins", "identity", None, None),
        ("balls-in-bins", None, 3, None),
    ]
    assert {o["iterations_per_epoch"] for o in requests} == {4}
    assert {o["privacy_unit"] for o in requests} == {"user"}
    assert {o["schedule"] for o in requests} == {"linear"}


def test_a_plan_that_is_interrupted_says_that_it_has_no_loop(monkeypatch, capsys):
    monkeypatch.setattr(plan.optimize.command, "invoke", lambda context: 130)
    words = ["--units", 100, "--loader", "shuffled", *SMALL]
    assert "no loop is written" in failure(capsys, "plan", *words, code=130)
    assert not list(Path().iterdir())


def test_delta_unit_and_participations_are_the_callers(capsys):
    sizes = ["--units", 1000, "--loader", "federated", "--epochs", 4, "--batch-size", 250]
    stated = ["--delta", 3e-5, "--unit", "phone", "--max-participations", 2, "--separation", 3]
    built = printed("plan", *sizes, *stated, "--eps", 2, "--yes")
    assert (built["delta"], built["privacy_unit"]) == (3e-5, "phone")
    assert built["sampling"]["max_participations"] == 2 and built["sampling"]["separation"] == 3
    assert "at most 2 rounds, any two at least 3 apart" in built["why"]
    Path("mechanism.npz").rename("phone.npz")
    refused = ["plan", *sizes, "--eps", 2, "--yes", "--force"]
    assert "--delta 2.0: must lie in (0, 1)" in failure(capsys, *refused, "--delta", 2)
    assert "not below 1/N" in invoked(*refused, "--delta", 0.01).stderr
    own = ["plan", "--units", 9, "--eps", 1, "--yes", "--max-participations", 2]
    assert "no effect without --loader federated" in failure(capsys, *own)
    phases = ["account", "run", "mechanism.npz", "--delta", 1e-5, "--points", 1]
    assert "per example" not in (shown := invoked(*phases).stdout) and "device" in shown
    both = failure(capsys, *phases, "phone.npz")
    assert "protect units of different names: device, phone" in both


def test_what_has_no_effect_or_no_default_is_refused(capsys):
    assert "--units" in failure(capsys, "plan", "--yes")
    federated = ["plan", "--units", 9, "--batch-size", 3, "--eps", 1, "--loader", "federated"]
    records = ["--yes", "--records-per-unit", 2]
    assert "--records-per-unit has no effect" in failure(capsys, *federated, *records)
    torch = "--framework pytorch: has no loop with --loader federated"
    assert torch in failure(capsys, *federated, "--yes", "--framework", "pytorch")
    batch = ["--batch-size", 10]
    assert "--batch-size 10" in failure(capsys, "plan", "--units", 9, "--eps", 1, "--yes", *batch)
    large = failure(capsys, "plan", "--units", 10**15, "--eps", 1, "--yes")
    assert "--units 1000000000000000: " in large and "--iters" not in large
    assert "--memory -1: must be" in failure(capsys, *federated, "--yes", "--memory", -1)
    for name in ("", "/", "plan.py", "jax.npz"):
        assert "--out" in failure(capsys, *federated, "--yes", "--out", name)
    Path("mechanism.py").touch()
    assert "mechanism.py: exists" in failure(capsys, *federated, "--yes")
    Path("mechanism.npz").touch()
    refusal = failure(capsys, *federated, "--yes")
    assert "mechanism.npz: exists" in refusal and "--init" not in refusal


def test_a_terminal_is_asked_again_until_an_answer_is_in_range(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True)
    faked = SimpleNamespace(stdin=terminal, stdlib_module_names=())
    monkeypatch.setattr(plan, "sys", faked)
    asked = ["abc", "0", "100", "fed", "federated", "", "3"]
    answers = [*asked, "101", "20", "4", "", "-1", "2", "n"]
    done = CliRunner().invoke(cli, ["plan"], input="\n".join(answers), prog_name="mfopt")
    assert done.exit_code == 0 and done.stderr.count("Error: ") == 5, done.output
    for refusal in ("--units 0: must be at least 1", "--batch-size 101", "--eps -1.0: must be gr"):
        assert refusal in done.stderr
    assert "--epochs 3 --iters 5 --eps 2 --delta 0.001 --sampling min-separation" in done.stdout
    assert not list(Path().iterdir())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("framework", "schedule"),
    [
        ("opacus", "linear"),
        ("pytorch", "cosine"),
        ("jax", "constant"),
        ("numpy", "cosine"),
        ("flower", "constant"),
    ],
)
def test_every_loop_trains_at_every_schedule(framework, schedule):
    modules = {"jax": "optax", "pytorch": "torch", "flower": "flwr"}
    pytest.importorskip(modules.get(framework, framework))
    words = ["--framework", framework, "--schedule", schedule, "--loader", "shuffled"]
    if framework in ("numpy", "flower"):
        words[-1] = "federated"
    loop = printed("plan", "--units", 100, *words, *SMALL)["loop"]
    names = {"linear": r"1 - step|linear_schedule", "cosine": r"math\.cos|cosine_decay"}
    assert re.search(names.get(schedule, r"1\.0|constant_schedule"), loop)
    if framework not in ("numpy", "flower"):  # theirs is a server's, relative to the devices'
        assert "\nLEARNING_RATE = 0.1\n" in loop and loop.count("0.1") == 1
        assert "costs privacy" in loop
    exec(compile(loop, framework, "exec"), {"__file__": "mechanism.py"})


def test_the_pages_show_these_loops():
    """One home: the blocks of the pages are the files, character by character."""
    for page, names in {
        "README.md": ("opacus", "jax"),
        "docs/howto/opacus.md": ("opacus",),
        "docs/howto/pytorch.md": ("pytorch",),
        "docs/howto/federated.md": ("server-numpy", "server-flower"),
    }.items():
        shown = [block.code for block in documentation.blocks(Path(page))]
        for name in names:
            assert (LOOPS / f"{name}.txt").read_text() in shown, (page, name)
