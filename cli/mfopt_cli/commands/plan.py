"""mfopt plan: from a data set and a loader to a mechanism, its file and its training loop."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import click

from mfopt import words
from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.errors import UsageError
from mfopt.guarantee import questionable_delta
from mfopt_cli import answers, display, mechanisms, messages, options
from mfopt_cli.commands import optimize
from mfopt_cli.options import COUNT, Count, option

_LOOPS = Path(__file__).parent.parent / "loops"
_LINEAR = {
    "torch": "lambda step: 1 - step / n",
    "optax": "optax.linear_schedule(LEARNING_RATE, 0.0, n)",
}
# learning-rate schedule -> what stands in a loop in place of a linear decay
_RATES = {
    "linear": _LINEAR,
    "cosine": {
        "torch": "lambda step: (1 + math.cos(math.pi * step / n)) / 2",
        "optax": "optax.cosine_decay_schedule(LEARNING_RATE, n)",
    },
    "constant": {
        "torch": "lambda step: 1.0",
        "optax": "optax.constant_schedule(LEARNING_RATE)",
    },
}
_WHY = {
    "own": "batches come from the file's sampler, which may draw in the way with the lowest error",
    "poisson": "each step draws every unit independently; only independent noise (DP-SGD) is "
    "accounted for. --loader own has less error",
    "shuffled": "the order is shuffled once, before, and kept in all epochs: nothing is amplified. "
    "--loader own has less error",
    "federated": "who takes part is decided by devices: one takes part in at most "
    "{max_participations} rounds, any two at least {separation} apart, and nothing is amplified",
}
_QUESTIONS = {
    "units": "Number of protected units (people, or examples)",
    "loader": "Where do batches come from (own: mfopt draws them, with the lowest error; poisson: "
    "each unit by chance in each step; shuffled: one order, kept in all epochs, not one that is "
    "shuffled anew; federated: devices)",
    "records": "Records of one unit at most",
    "framework": "Framework (of a federated server: numpy, flower or jax)",
    "epochs": "Passes over the data",
    "batch_size": "Expected batch size, in units",
    "memory": "Model-sized noise buffers that fit into memory",
    "schedule": "Learning-rate schedule",
    "epsilon": "Target ε (1: strong, 8: weak)",
}
_HEADING = """# Put your own in place of what stands in here: the data (one entry for each
# {unit}, with all that it contributed; {units:,} in all), the model, the loss and the
# learning rate. Leave the rest: the guarantee is about the batches of this file, whose sizes vary.
# The learning rate is a guess: at clip norm 1 the best one may lie far above. Tune it on public
# data: a run on the private data costs privacy, also if its model is not used
# (docs/sharp-edges.md, Tuning).
"""
_BATCH = 256  # default, where there are as many units


class _LoaderPlan(NamedTuple):
    """What is to be made.

    Attributes:
      command: words of ``mfopt optimize`` that make the file.
      delta: δ, by default a power of ten and at most a tenth of 1/N.
      unit: name of the privacy unit.
      why: sentence on the sampling.
      loop: Python code that trains with the file.
    """

    command: list[str]
    delta: float
    unit: str
    why: str
    loop: str


_POSITIVE = Count(rule=_check.integer)


@options.command("plan")
@option("--units", _POSITIVE, "Number of protected units in the data, N.")
@option(
    "--records-per-unit",
    _POSITIVE,
    "Most records of one unit; more than 1: a user.",
    "records",
    default=1,
)
@option(
    "--loader",
    tuple(_WHY),
    "Source of batches. own: the file's sampler; poisson: each unit independently in each step, as "
    "Opacus and jax-privacy draw; shuffled: a fixed order; federated: a server adds noise to sums "
    "of devices that come when they can.",
)
@options.delta("δ [default: a power of ten, at most a tenth of 1/N].")
@options.unit_or(None)
@option(
    "--framework",
    click.Choice(("opacus", "pytorch", "jax", "numpy", "flower")),
    "Framework of the loop; of a federated server numpy (for any framework of the devices), flower "
    "or jax. [default: opacus; numpy of a server]",
)
@option("--epochs", COUNT, "Passes over the data.", default=10)
@option(
    "--batch-size",
    _POSITIVE,
    f"Expected batch size, in units. [default: {_BATCH}, or all]",
)
@option(
    "--iters",
    _POSITIVE,
    "Iterations per epoch, in place of --batch-size.",
    excludes=("batch_size",),
)
@option("--memory", COUNT, "Model-sized noise buffers that fit into memory.", default=4)
@option("--schedule", tuple(_RATES), "Learning-rate schedule.")
@options.eps()
@option(
    "--max-participations",
    COUNT,
    "Maximum number of rounds of a device [default: --epochs].",
    needs={"loader": "federated"},
)
@option(
    "--separation",
    COUNT,
    "Minimum number of rounds between two participations of a device [default: an epoch].",
    needs={"loader": "federated"},
)
@options.output_path(
    "Factorization file; the loop is written beside it.", default=Path("mechanism.npz")
)
@options.force
@option("--yes", bool, "Ask nothing: take defaults for what is not given, and search.")
@options.json_flag
def command(arguments: SimpleNamespace) -> int:
    """Choose δ and a mechanism for a loader, find it, and write its file and training loop.

    On a terminal what is not given is asked for. The search takes from seconds (poisson, shuffled,
    federated) to minutes (own). By default the unit is an example, a user where --records-per-unit
    is more than 1, and a device with --loader federated.

    \b
    Examples:
      mfopt plan
      mfopt plan --units 60000 --eps 2 --epochs 4 --batch-size 2000 --loader poisson --yes
    """
    _ask(arguments)
    plan = _choose(arguments)
    answers.say_doubt([questionable_delta(plan.delta, arguments.units)])
    from mfopt._runtime import _files

    mechanisms.check_output(arguments.out, force=arguments.force)
    loop = arguments.out.with_suffix(".py")
    if loop.stem in {"flwr", "jax", "mfopt", "numpy", "optax", "torch", *sys.stdlib_module_names}:
        rule = f"its loop, {loop.name}, would hide the module of that name"
        raise _check.reject("out", str(arguments.out), rule, "Choose another name.")
    _files.check_output(loop, force=arguments.force, name="loop")
    line = shlex.join(["mfopt", "optimize", *plan.command])
    if not arguments.as_json:
        rows = [
            ("loader", f"{arguments.loader}: {plan.why}"),
            ("protects", f"one {plan.unit}, of {arguments.units:,}"),
            ("δ", f"{words.round_up(plan.delta)}; N·δ = {plan.delta * arguments.units:.2g}"),
            ("command", line),
            ("takes", "minutes" if arguments.loader == "own" else "seconds"),
        ]
        display.table("Plan", rows)
    if not (arguments.yes or click.confirm("Search now?", default=True, err=True)):
        return 0
    quiet = ["--quiet"] if arguments.as_json else []
    with optimize.command.make_context("mfopt optimize", [*plan.command, *quiet]) as context:
        code = optimize.command.invoke(context)
    if code:
        click.echo("mfopt: no loop is written, since `mfopt plan` did not end.", err=True)
        return int(code)
    _files.write(loop, plan.loop, force=arguments.force)
    if arguments.as_json:
        display.json_object(_described(arguments, plan, line, loop))
    else:
        display.print_text(f"loop: {loop}\n\n{plan.loop}")
    return 0


def _ask(arguments: SimpleNamespace) -> None:
    """Ask for what was not given, or refuse where it has no default and nobody can be asked."""
    if arguments.yes:
        for name, typed in (("units", "--units"), ("epsilon", "--eps")):
            if getattr(arguments, name) is None:
                raise click.UsageError(f"Missing option '{typed}'.")
        return
    if not sys.stdin.isatty():
        rule = "there is no terminal to ask on: give --units, --eps and --yes"
        raise click.UsageError(rule)
    context = click.get_current_context()
    params = {param.name: param for param in context.command.params}

    def value(param: click.Parameter, text: object) -> object:
        try:
            answer = param.process_value(context, text)
            if param.name == "batch_size":
                _check.integer("batch_size", answer, at_most=arguments.units)
            return answer
        except UsageError as problem:
            raise click.UsageError(messages.of_usage(problem, context)) from None

    for name, question in _QUESTIONS.items():
        idle = (name == "batch_size" and arguments.iters) or (
            name == "records" and arguments.loader == "federated"
        )
        if not (idle or options.typed(name)):
            answer = click.prompt(
                question,
                default=_usual(name, arguments),
                type=params[name].type,
                value_proc=functools.partial(value, params[name]),
                err=True,
            )
            setattr(arguments, name, answer)


def _usual(name: str, arguments: SimpleNamespace) -> object:
    """The value of an option, or what it is by default for what the other ones are."""
    defaults = {
        "batch_size": min(_BATCH, arguments.units or _BATCH),
        "framework": "numpy" if arguments.loader == "federated" else "opacus",
    }
    value: object = getattr(arguments, name)
    return defaults.get(name) if value is None else value


def _choose(arguments: SimpleNamespace) -> _LoaderPlan:
    from mfopt.sampling.base import MOST_ITERATIONS

    units = _check.integer("units", arguments.units)
    iters = arguments.iters
    if iters is None:
        batch = _usual("batch_size", arguments)
        iters = max(1, round(units / _check.integer("batch_size", batch, at_most=units)))
        if iters * arguments.epochs > MOST_ITERATIONS:
            rule = f"are {iters:,} batches of {batch} in an epoch, more than can be numbered"
            raise _check.reject("units", units, rule, "Give a larger `batch_size`.")
    _check.integer("memory", arguments.memory, at_least=0)
    federated = arguments.loader == "federated"
    if federated and options.typed("records"):
        rule = "--records-per-unit has no effect with --loader federated; remove it"
        raise click.UsageError(rule)
    delta = power_below(units) if arguments.delta is None else arguments.delta
    default_unit = "device" if federated else "example" if arguments.records == 1 else "user"
    unit = arguments.privacy_unit or default_unit
    options_by_name = {
        "epochs": arguments.epochs,
        "iters": iters,
        "eps": repr(arguments.epsilon).removesuffix(".0"),
        "delta": delta,
        "sampling": _sampling(arguments, iters),
        "schedule": arguments.schedule,
        "unit": unit,
        **_form(arguments, iters),
        "out": arguments.out,
        "separation": arguments.separation,
        "max-participations": arguments.max_participations,
    }
    command = [
        word
        for name, value in options_by_name.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    loop = _loop(arguments).replace("cohort=10", f"cohort={round(units / iters)}")
    begins = _HEADING.format(unit=unit, units=units)
    command += ["--force"] if arguments.force else []
    why = _WHY[arguments.loader].format(
        max_participations=arguments.max_participations or arguments.epochs,
        separation=arguments.separation or iters,
    )
    return _LoaderPlan(command, delta, unit, why, begins + loop)


def power_below(units: int) -> float:
    """Largest power of ten that is at most a tenth of 1/``units``.

    >>> power_below(60_000), power_below(100_000)
    (1e-06, 1e-06)
    """
    return float(f"1e-{len(str(10 * units - 1))}")


def _sampling(arguments: SimpleNamespace, iters: int) -> str:
    """Name of the scheme that the loader executes."""
    if arguments.loader == "own":
        return "fresh-bins" if arguments.epochs > 1 and iters > 1 else "balls-in-bins"
    return {"poisson": "poisson", "shuffled": "fixed-order"}.get(arguments.loader, "min-separation")


def _form(arguments: SimpleNamespace, iters: int) -> JsonObject:
    """Options of the form of C within the memory."""
    if arguments.loader == "poisson" or arguments.memory == 0 or iters * arguments.epochs == 1:
        return {"strategy": "identity"}
    # buffers of an epoch: a band as wide as that is the best there
    if arguments.loader == "own" and arguments.epochs > 1 and iters <= arguments.memory + 1:
        return {"strategy": "banded-toeplitz", "bands": iters}
    return {"buffers": min(arguments.memory, iters * arguments.epochs)}


def _loop(arguments: SimpleNamespace) -> str:
    """Text of the loop: one of those in the documentation, for this file, data and schedule."""
    begins = "server-" if arguments.loader == "federated" else ""
    path = _LOOPS / f"{begins}{_usual('framework', arguments)}.txt"
    if not path.is_file():
        rule = f"has no loop with `loader={arguments.loader}`; jax has"
        raise _check.reject("framework", arguments.framework, rule)
    text = path.read_text(encoding="utf-8")
    text = text.replace("(90,", f"({arguments.units},")  # entries of the data that stands in
    for library, linear in _LINEAR.items():
        text = text.replace(linear, _RATES[arguments.schedule][library])
    if "math." in text:
        text = f"import math\n\n{text}"
    text = f"from pathlib import Path\n\n{text}"
    return text.replace('"mechanism.npz"', f"Path(__file__).with_name({arguments.out.name!r})")


def _described(arguments: SimpleNamespace, plan: _LoaderPlan, line: str, loop: Path) -> JsonObject:
    """JSON output: the plan, the guarantee, and errors beside those of DP-SGD."""
    import mfopt

    factorization = mfopt.load(arguments.out)
    independent = mechanisms.without_correlation(factorization)
    return {
        **factorization.guarantee.describe(),
        "final_model_error": mechanisms.error_under(factorization, arguments.schedule),
        "dpsgd_final_model_error": independent[1]
        if independent
        else factorization.noise_multiplier,
        "sampling": factorization.sampling.describe(),
        "strategy": factorization.strategy.describe(),
        "why": plan.why,
        "optimize": line,
        "path": str(arguments.out),
        "loop": plan.loop,
        "loop_path": str(loop),
    }
