"""mfopt plan: from a data set and a loader to a mechanism, its file and its training loop."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from mfopt import words
from mfopt._runtime import _check
from mfopt.errors import UsageError
from mfopt_cli import display, messages, options
from mfopt_cli.commands import optimize
from mfopt_cli.options import COUNT, Count, option

_LOOPS = Path(__file__).parent.parent / "loops"
_LINEAR = {"torch": "lambda step: 1 - step / n", "optax": "optax.linear_schedule(0.1, 0.0, n)"}
# learning-rate schedule -> what stands in a loop in place of a linear decay
_RATES = {
    "linear": _LINEAR,
    "cosine": {
        "torch": "lambda step: (1 + math.cos(math.pi * step / n)) / 2",
        "optax": "optax.cosine_decay_schedule(0.1, n)",
    },
    "constant": {"torch": "lambda step: 1.0", "optax": "optax.constant_schedule(0.1)"},
}
_WHY = {
    "own": "batches come from the file's sampler, which may draw in the way with the lowest error",
    "poisson": "each step draws every unit independently; only independent noise (DP-SGD) is "
    "accounted for. --loader own has less error",
    "shuffled": "the order is shuffled once, before, and kept in all epochs: nothing is amplified. "
    "--loader own has less error",
    "federated": "who takes part is decided by devices: any two rounds of one are at least "
    "--separation apart, and nothing is amplified",
}
_QUESTIONS = {
    "units": "Number of protected units (people, or examples)",
    "loader": "Where do batches come from",
    "records": "Records of one unit at most",
    "framework": "Framework",
    "epochs": "Passes over the data",
    "batch_size": "Expected batch size, in units",
    "memory": "Model-sized noise buffers that fit into memory",
    "schedule": "Learning-rate schedule",
    "epsilon": "Target ε (1: strong, 8: weak)",
}
_BATCH = 256  # default, where there are as many units
_NOT_FEDERATED = {"framework": "framework", "records": "records-per-unit"}


class LoaderPlan(NamedTuple):
    """What is to be made.

    Attributes:
      command: words of ``mfopt optimize`` that make the file.
      delta: δ, a power of ten and at most a tenth of 1/N.
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
@option("--framework", ("opacus", "pytorch", "jax"), "Framework of the loop.")
@option("--epochs", COUNT, "Passes over the data.", default=10)
@option(
    "--batch-size",
    _POSITIVE,
    f"Expected batch size, in units. [default: {_BATCH}, or all]",
)
@option(
    "--iters",
    COUNT,
    "Iterations per epoch, in place of --batch-size.",
    excludes=("batch_size",),
)
@option("--memory", COUNT, "Model-sized noise buffers that fit into memory.", default=4)
@option("--schedule", tuple(_RATES), "Learning-rate schedule.")
@options.eps(callback=lambda _, param, value: _check.optional(_check.positive, param.name, value))
@option(
    "--separation",
    COUNT,
    "Minimum number of rounds between two participations of a device [default: an epoch].",
    needs={"loader": "federated"},
)
@options.out("Factorization file; the loop is written beside it.", default=Path("mechanism.npz"))
@options.force
@option("--yes", bool, "Ask nothing: take defaults for what is not given, and search.")
@options.json_flag
def command(asked: Any) -> int:
    """Choose δ and a mechanism for a loader, find it, and write its file and training loop.

    On a terminal what is not given is asked for. The search takes from seconds (poisson, shuffled,
    federated) to minutes (own).

    \b
    Examples:
      mfopt plan
      mfopt plan --units 60000 --eps 2 --epochs 4 --batch-size 2000 --loader poisson --yes
    """
    _ask(asked)
    plan = _choose(asked)
    loop = asked.out.with_suffix(".py")
    from mfopt._runtime import _files

    _files.check_output(loop, force=asked.force, name="loop")
    line = shlex.join(["mfopt", "optimize", *plan.command])
    if not asked.as_json:
        rows = [
            ("loader", f"{asked.loader}: {plan.why}"),
            ("protects", f"one {plan.unit}, of {asked.units:,}"),
            ("δ", f"{words.delta(plan.delta)}, at most a tenth of 1/{asked.units:,}"),
            ("command", line),
        ]
        display.table("Plan", rows)
    if not (asked.yes or click.confirm("Search now?", default=True, err=True)):
        return 0
    quiet = ["--quiet"] if asked.as_json else []
    with optimize.command.make_context("mfopt optimize", [*plan.command, *quiet]) as context:
        code = optimize.command.invoke(context)
    if code:
        return int(code)
    _files.write(loop, plan.loop, force=asked.force)
    if asked.as_json:
        display.json_object(_described(asked, plan, line, loop))
    else:
        display.print_text(f"loop: {loop}\n\n{plan.loop}")
    return 0


def _ask(asked: Any) -> None:
    """Ask for what was not given, or refuse where it has no default and nobody can be asked."""
    if asked.yes:
        for name, typed in (("units", "--units"), ("epsilon", "--eps")):
            if getattr(asked, name) is None:
                raise click.UsageError(f"Missing option '{typed}'.")
        return
    if not sys.stdin.isatty():
        rule = "there is no terminal to ask on: give --units, --eps and --yes"
        raise click.UsageError(rule)
    context = click.get_current_context()
    params = {param.name: param for param in context.command.params}

    def value(param: click.Parameter, text: Any) -> Any:
        try:
            answer = param.process_value(context, text)
            if param.name == "batch_size":
                _check.integer("batch_size", answer, at_most=asked.units)
            return answer
        except UsageError as problem:
            raise click.UsageError(messages.of_usage(problem, context)) from None

    for name, question in _QUESTIONS.items():
        idle = (name == "batch_size" and asked.iters) or (
            name in _NOT_FEDERATED and asked.loader == "federated"
        )
        if not (idle or options.typed(name)):
            default = min(_BATCH, asked.units) if name == "batch_size" else getattr(asked, name)
            kind = params[name].type if isinstance(params[name].type, click.Choice) else None
            check = functools.partial(value, params[name])
            found = click.prompt(question, default=default, type=kind, value_proc=check, err=True)
            setattr(asked, name, found)


def _choose(asked: Any) -> LoaderPlan:
    units = _check.integer("units", asked.units)
    iters = asked.iters
    if iters is None:
        batch = asked.batch_size or min(_BATCH, units)
        iters = max(1, round(units / _check.integer("batch_size", batch, at_most=units)))
    federated = asked.loader == "federated"
    for name, option_name in _NOT_FEDERATED.items():
        if federated and options.typed(name):
            raise click.UsageError(
                f"--{option_name} has no effect with --loader federated; remove it"
            )
    delta = power_below(units)
    unit = "device" if federated else "example" if asked.records == 1 else "user"
    named = {
        "epochs": asked.epochs,
        "iters": iters,
        "eps": repr(asked.epsilon),
        "delta": f"{delta:g}",
        "sampling": _sampling(asked, iters),
        "schedule": asked.schedule,
        "unit": unit,
        **_form(asked, iters),
        "out": asked.out,
    }
    if asked.separation is not None:
        named["separation"] = asked.separation
    command = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    loop = _loop("server" if federated else asked.framework, asked.schedule, asked.out)
    if unit == "user":
        loop = "# one entry of the data set holds all records of one user\n" + loop
    command += ["--force"] if asked.force else []
    return LoaderPlan(command, delta, unit, _WHY[asked.loader], loop)


def power_below(units: int) -> float:
    """Largest power of ten that is at most a tenth of 1/``units``.

    >>> power_below(60_000), power_below(100_000)
    (1e-06, 1e-06)
    """
    return float(f"1e-{len(str(10 * units - 1))}")


def _sampling(asked: Any, iters: int) -> str:
    """Name of the scheme that the loader executes."""
    if asked.loader == "own":
        return "fresh-bins" if asked.epochs > 1 and iters > 1 else "balls-in-bins"
    return {"poisson": "poisson", "shuffled": "fixed-order"}.get(asked.loader, "min-separation")


def _form(asked: Any, iters: int) -> dict[str, Any]:
    """Options of the form of C within the memory."""
    if asked.loader == "poisson" or asked.memory == 0 or iters * asked.epochs == 1:
        return {"strategy": "identity"}
    # buffers of an epoch: a band as wide as that is the best there
    if asked.loader == "own" and asked.epochs > 1 and iters <= asked.memory + 1:
        return {"strategy": "banded-toeplitz", "bands": iters}
    return {"buffers": min(asked.memory, iters * asked.epochs)}


def _loop(framework: str, schedule: str, path: Path) -> str:
    """Text of the loop: one of those in the documentation, for this file and schedule."""
    text = (_LOOPS / f"{framework}.txt").read_text(encoding="utf-8")
    for library, linear in _LINEAR.items():
        text = text.replace(linear, _RATES[schedule][library])
    if "math." in text:
        text = f"import math\n\n{text}"
    return text.replace('"mechanism.npz"', repr(str(path)))


def _described(asked: Any, plan: LoaderPlan, line: str, loop: Path) -> dict[str, Any]:
    """JSON output: the plan, the guarantee, and errors beside those of DP-SGD."""
    import mfopt
    from mfopt.sampling import Poisson

    made = mfopt.load(asked.out)
    stated = made.guarantee
    poisson = Poisson(asked.epochs / made.iterations, made.iterations)
    dpsgd = mfopt.account(poisson, epsilon=stated.epsilon, delta=stated.delta)
    return {
        **stated.describe(),
        "final_model_error": made.final_model_error,
        "dpsgd_final_model_error": dpsgd.noise_multiplier,
        "sampling": made.sampling.describe(),
        "strategy": made.strategy.describe(),
        "why": plan.why,
        "optimize": line,
        "path": str(asked.out),
        "loop": plan.loop,
        "loop_path": str(loop),
    }
