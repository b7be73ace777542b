"""mfopt account: (ε, δ) from σ, or σ from (ε, δ), for every mechanism with an accountant."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from mfopt._runtime import _check
from mfopt.errors import FailureError
from mfopt.progress import Progress
from mfopt.sampling import (
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    RandomPartition,
    Scheme,
    TruncatedPoisson,
)
from mfopt_cli import answers, options, sweeps
from mfopt_cli.answers import Row, answer
from mfopt_cli.live import of_command
from mfopt_cli.options import MOST_GROUP, MOST_POINTS, PATH, Count, apply, option

if TYPE_CHECKING:
    from mfopt.accounting.loss_distribution import Composition
    from mfopt.factorization import Factorization
    from mfopt.guarantee import Guarantee
    from mfopt.mechanism import Mechanism
    from mfopt.strategies import Strategy

_two_of_three = apply(
    sweeps.option(
        "--noise-multiplier",
        float,
        "Noise multiplier σ relative to the clip norm, for C as stored.",
        aliases=("--sigma",),
    ),
    sweeps.option("--eps", float, "ε: target, or where to evaluate δ."),
    sweeps.option("--delta", float, "δ of the guarantee."),
)
_separation = sweeps.option(
    "--separation",
    int,
    "Minimum number of iterations between two participations. [default: that of a FILE]",
)


def _length(epochs: str, iters: str) -> options.Decorator:
    """--epochs and --iters, with what their help says of a default."""
    return apply(
        sweeps.option("--epochs", int, f"Passes over the data, E. [default: {epochs}]"),
        sweeps.option("--iters", int, f"Iterations (rounds) per epoch, b. n = E·b.{iters}"),
    )


_of_file = _length("those of a FILE", " [default: those of a FILE]")
_lengths = apply(
    _length("1", ""),
    sweeps.option(
        "--iterations",
        int,
        "All iterations, n.",
        hidden=True,
        aliases=("--rounds", "--steps"),
        excludes=("epochs", "iters"),
    ),
)
_by_rate = apply(
    _two_of_three,
    sweeps.option(
        "--probability",
        float,
        "Sampling probability of a unit in each iteration. [default: 1/iters]",
        aliases=("--sample-rate",),
        excludes=("batch_size", "population"),
    ),
    sweeps.option(
        "--batch-size",
        float,
        "Expected batch size, with --population in place of --probability.",
        needs={"population": None},
    ),
    sweeps.option(
        "--population", int, "Number of units in the data set.", needs={"batch_size": None}
    ),
    _lengths,
)
_group_size = sweeps.option(
    "--group-size",
    int,
    "Size of the group of units that is protected together.",
    MOST_GROUP,
    default="1",
)
_adjacency = option(
    "--adjacency",
    ("add-remove", "zero-out", "replace"),
    "Adjacency: add or remove a unit, zero out its contributions, or replace it.",
)
_protects = apply(_group_size, _adjacency, options.unit)
_plot = apply(
    option("--plot", PATH, "Plot a sweep to this file."),
    options.force_of("plot"),
    options.output,
)
_results = apply(
    option(
        "--curve",
        bool,
        "Bounds of what an attacker can do: true positive rate at a false positive rate, advantage "
        "and μ, from statements at several ε at this σ. --plot draws them.",
    ),
    _plot,
)
_verified = apply(
    options.certify_samples_as("samples", aliases=("--samples",)),
    options.seed(),
    option("--estimate", bool, "Compute an estimate, which proves nothing, instead of a bound."),
)
_STRATEGIES = "identity, sqrt, banded-sqrt:BANDS"
_with_strategy = apply(
    _two_of_three,
    _protects,
    option("--strategy", str, f"{_STRATEGIES}, or a factorization FILE.", default="identity"),
    _results,
)
_binned = apply(_with_strategy, _of_file, _verified, options.certificate_kind)


@click.group(name="account", cls=options.Group)
def command() -> None:
    """(ε, δ) of a mechanism: give two of --noise-multiplier, --eps, --delta, get the third.

    Any one argument may be swept, for example --group-size 1:64 or --eps 1,2,4,8. Nothing is
    rounded towards less privacy. Unless said otherwise a statement is about adding or removing
    one unit, or --group-size of them.

    \b
    Example:
      mfopt account els --group-size 1:64:9 --noise-multiplier 1 --delta 1e-6 \\
          --probability 0.01 --iters 2000 --plot els.png
    """


@command.command("dpsgd")
@_by_rate
@sweeps.option(
    "--batch-limit",
    int,
    "Maximum batch size; larger batches are truncated at random. Needs --population.",
    needs={"population": None},
)
@_adjacency
@options.unit
@_results
def _dpsgd(**arguments: object) -> None:
    """DP-SGD: independent noise, Poisson sampling.

    \b
    Example:
      mfopt account dpsgd --probability 0.01 --iters 2000 --eps 2 --delta 1e-6
    """

    def scheme(row: Row) -> Scheme:
        limit = row["batch_limit"]
        if limit is None:
            return _poisson(row)
        return TruncatedPoisson(_probability(row), limit, row["population"], _iterations(row))

    answer(arguments, scheme, "DP-SGD")


@command.command("banded")
@click.argument("path", metavar="[FILE]", type=PATH, required=False)
@_by_rate
@sweeps.option("--bands", int, "Bands of C, and groups of the data. [default: those of FILE]")
@_protects
@_results
def _banded(path: Path | None, **arguments: object) -> None:
    """Banded C with cyclic Poisson sampling: the C of a FILE, or the banded square root.

    --probability is the chance within the group whose turn it is; a FILE of cyclic Poisson
    sampling has its own.

    \b
    Example:
      mfopt account banded --bands 4 --batch-size 500 --population 50000 \\
          --iters 2000 --eps 2 --delta 1e-6
    """
    from mfopt.factorization import load
    from mfopt.strategies import BandedSquareRoot

    file = None if path is None else load(path)
    strategy = (lambda scheme: BandedSquareRoot(scheme.bands)) if file is None else file.strategy
    title = f"{path or 'banded'}, cyclic Poisson"
    answer(arguments, lambda row: _cyclic(row, file), title, strategy)


@command.command("els")
@_by_rate
@sweeps.option(
    "--group-size", int, "Maximum number of examples of one user, K.", MOST_GROUP, required=True
)
@_adjacency
@_results
def _els(**arguments: object) -> None:
    """Example-level sampling for user-level privacy: DP-SGD with up to K examples of a user.

    \b
    Example:
      mfopt account els --group-size 183 --probability 0.001 --iters 10000 \\
          --eps 8 --delta 1e-6
    """

    def scheme(row: Row) -> Poisson:
        if row["population"] is not None and row["group_size"] > row["population"]:
            rule = f"--group-size {row['group_size']} is above --population {row['population']}: "
            rule += "a user's examples are among the population's"
            raise click.UsageError(rule)
        return _poisson(row)

    answer(arguments, scheme, "ELS")


@command.command("uls")
@_by_rate
@_adjacency
@_results
def _uls(**arguments: object) -> None:
    """User-level sampling: users are drawn, and one user's averaged gradient is clipped.

    --probability, --batch-size and --population count users.

    \b
    Example:
      mfopt account uls --batch-size 64 --population 10000 --iters 1000 \\
          --eps 8 --delta 1e-6
    """
    answer(arguments, _poisson, "ULS", privacy_unit="user")


@command.command("fixed-batch")
@_two_of_three
@sweeps.option("--batch-size", int, "Examples in every batch.", required=True)
@sweeps.option("--population", int, "Size of the (larger) data set.", required=True)
@_lengths
@_protects
@_results
def _fixed_batch(**arguments: object) -> None:
    """DP-SGD with batches of fixed size, drawn without replacement.

    \b
    Example:
      mfopt account fixed-batch --batch-size 500 --population 50000 --iters 2000 \\
          --group-size 8 --noise-multiplier 2 --delta 1e-6
    """
    _answer(FixedBatch, "fixed batches", arguments)


@command.command("fedavg")
@_by_rate
@option(
    "--conversion",
    ("moments", "pld"),
    "Accountant: moments as published, or privacy loss distribution (tightest).",
)
@_plot
def _fedavg(conversion: str, **arguments: object) -> None:
    """DP-FedAvg and DP-FedSGD: sampled users, moments accountant.

    --noise-multiplier is z, the noise on the average over its sensitivity S/(qW): clip norm S,
    sampling probability q, sum W of all users' weights.

    \b
    Example:
      mfopt account fedavg --batch-size 5000 --population 763430 --iters 5000 \\
          --noise-multiplier 1 --delta 1e-9
    """
    from mfopt.accounting.closed_form import moments

    # a sum of contributions of norm 1 with noise z: the same release, scaled
    def analyse(release: Any, row: Row) -> Guarantee:
        if conversion == "pld":
            return answers.analysed(release, row)
        scheme, question = release.sampling, answers.question(row)
        published = moments.fedavg(
            question["noise_multiplier"],
            scheme.probability,
            scheme.iterations,
            delta=question["delta"],
            epsilon_target=question["epsilon"],
        )
        # the account of the release itself says what some data sets attain
        with contextlib.suppress(FailureError):
            if low := answers.analysed(release, row).lower_bound:
                solved = next(name for name, value in question.items() if value is None)
                return published.with_lower_end(low, getattr(published, solved))
        return published

    title, unit = "DP-FedAvg", "× sensitivity of the average"
    answer(arguments, _poisson, title, analyse=analyse, noise_unit=unit, privacy_unit="user")


@command.command("balls-in-bins")
@_binned
@option(
    "--also",
    str,
    "Another mechanism on the same data, to compose with: pure:ε, approximate:ε:δ or "
    "gaussian:σ (sensitivity 1). Repeatable.",
    metavar="MECHANISM",
    multiple=True,
)
def _balls_in_bins(also: tuple[str, ...], **arguments: object) -> None:
    """Any C >= 0 with balls-in-bins batching; exact for C = I, certified by sampling otherwise.

    \b
    Example:
      mfopt account balls-in-bins --epochs 16 --iters 128 --eps 2 --delta 1e-5
    """
    analyse = answers.analysed
    if also:
        analyse = functools.partial(_composed, [_companion(text) for text in also])
    _answer(BallsInBins, "balls-in-bins", arguments, also, analyse=analyse)


@command.command("fresh-bins")
@_binned
@option(
    "--reassign-every",
    sweeps.Sweep(int),
    "Epochs between two assignments. [default: 1, or that of a FILE]",
    "rethrow",
    aliases=("--rethrow",),
)
def _fresh_bins(**arguments: object) -> None:
    """Units in a new random batch in each epoch; C >= 0 of at most --iters bands, certified.

    \b
    Example:
      mfopt account fresh-bins --epochs 16 --iters 128 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    _answer(FreshBins, "fresh-bins", arguments)


@command.command("b-min-sep")
@_binned
@_separation
def _b_min_sep(**arguments: object) -> None:
    """Units by chance, resting after each participation; C >= 0 of at most --separation bands.

    An available unit takes part with probability 1/(iters − separation + 1), so that each iteration
    has the expected batch of one in --iters bins. The start is stationary.

    \b
    Example:
      mfopt account b-min-sep --epochs 16 --iters 128 --separation 64 --strategy banded-sqrt:8 \\
          --noise-multiplier 3 --delta 1e-5
    """
    _answer(BMinSep, "b-min-sep", arguments)


@command.command("random-partition")
@_binned
@_separation
def _random_partition(**arguments: object) -> None:
    """Cyclic Poisson sampling, each unit in a random one of --separation groups; C >= 0, certified.

    Iteration t takes each unit of group t mod --separation with probability separation/iters. C has
    at most as many bands. Which unit is in which group must be random and secret: for any other
    partition see `mfopt account banded`.

    \b
    Example:
      mfopt account random-partition --epochs 16 --iters 128 --separation 16 \\
          --strategy banded-sqrt:16 --noise-multiplier 3 --delta 1e-5
    """
    _answer(RandomPartition, "random-partition", arguments)


@command.command("fixed-order")
@_with_strategy
@_of_file
def _fixed_order(**arguments: object) -> None:
    """Batches in an order fixed beforehand, the same in every epoch; any C, nothing amplified.

    \b
    Example:
      mfopt account fixed-order --epochs 4 --iters 256 --strategy sqrt --eps 2 --delta 1e-5
    """
    _answer(FixedOrder, "fixed order", arguments)


@command.command("min-separation")
@_with_strategy
@_lengths
@_separation
@sweeps.option(
    "--max-participations",
    int,
    "Maximum number of participations of a unit. [default: that of a FILE]",
)
def _min_separation(**arguments: object) -> None:
    """Any participation at least --separation iterations apart; any C, nothing amplified.

    \b
    Example:
      mfopt account min-separation --iters 2000 --separation 400 --max-participations 5 \\
          --strategy sqrt --eps 2 --delta 1e-6
    """
    _answer(MinSeparation, "min-separation", arguments)


@options.command("run")
@click.argument("phases", nargs=-1, required=True, metavar="PHASE...")
@options.eps("ε at which δ is evaluated, in place of --delta.", callback=None)
@options.delta("δ of every statement.")
@option(
    "--points",
    Count(MOST_POINTS),
    "Number of points at which to report ε; whole epochs where bins are kept.",
    default=10,
)
@option(
    "--group-size",
    Count(MOST_GROUP),
    "Size of the group of units that is protected together.",
    default=1,
)
@_adjacency
@options.unit
@_verified
@_plot
def _run(arguments: SimpleNamespace) -> None:
    """ε over a run: what has been spent after each part of it, by every scheme that has an account.

    A PHASE is a factorization FILE, or SCHEME:NAME=VALUE,...[/STRATEGY]@SIGMA, with C = I unless
    identity, sqrt, banded-sqrt:BANDS or a FILE is named. Phases follow each other on the same
    data, each with its own noise, batches and scheme; one of them may have a sampled account.

    \b
    Example:
      mfopt account run poisson:probability=0.02,iterations=500@1.1 \\
          poisson:probability=0.05,iterations=200@1.6 --delta 1e-6 --plot run.png
    """
    if (arguments.epsilon is None) == (arguments.delta is None):
        raise click.UsageError("give one of --eps, --delta: each phase has its noise multiplier")
    if arguments.plot is not None:
        answers.check_plot(arguments.plot, "phases", arguments.force)
    from mfopt.accounting.phases import Phase, over_training
    from mfopt.factorization import load

    effort = answers.pop_effort(vars(arguments))
    protected = {name: getattr(arguments, name) for name in ("group_size", *answers.STATEMENT)}
    files = {text: load(text) for text in arguments.phases if Path(text).is_file()}
    if not options.typed("privacy_unit"):
        protected["privacy_unit"] = _unit_of(files) or arguments.privacy_unit
    phases = [_phase(text, files.get(text), protected) for text in arguments.phases]
    question: Any = {
        name: getattr(arguments, name) for name in ("epsilon", "delta", "points")
    } | effort
    # one mechanism has its own account, for groups too
    accounted: Any = phases[0] if len(phases) == 1 else ([Phase(*phase) for phase in phases],)
    ends = [0]
    for mechanism, _ in phases:
        ends.append(ends[-1] + mechanism.iterations)
    rows: list[Row] = []
    with of_command(arguments) as live:
        live(Progress("run", 0, ends[-1], "iterations"))
        for iteration, guarantee in over_training(*accounted, **question):
            live(Progress("run", iteration, ends[-1], "iterations"))
            rows.append({"iterations": iteration, **guarantee.describe()})
    answers.say_unused(effort, answers.sampled(rows))
    if arguments.plot is not None:
        answers.draw_run(rows, ends, arguments.plot)
    show = functools.partial(answers.print_answers, rows, "iterations", "over the run")
    answers.tell({"results": rows}, show, arguments)


command.add_command(_run)


def _iterations(row: Row) -> int:
    """Number of iterations n of a row: epochs times iterations per epoch."""
    if row["iterations"] is not None:
        return _check.integer("iterations", row["iterations"])
    iters = _check.integer("iters", _required("iters", row["iters"]))
    return iters * _check.integer("epochs", 1 if row["epochs"] is None else row["epochs"])


def _probability(row: Row, groups: int = 1) -> float:
    """The sampling probability of a row: typed, from batch size and population, or 1/iters.

    ``groups`` take turns, so that the rate within the group whose turn it is is higher.
    """
    if row["probability"] is not None:
        return _check.probability("probability", row["probability"], closed=True)
    if row["batch_size"] is not None:
        batch = _check.positive("batch_size", row["batch_size"])
        rate, name = batch / _check.integer("population", row["population"]), "batch_size"
    elif row["iters"] is not None:
        rate, name = 1 / _check.integer("iters", row["iters"]), "iters"
        printed = click.get_current_context().meta
        if not printed.setdefault("mfopt.default_probability", False):  # once for a sweep
            printed["mfopt.default_probability"] = True
            click.echo(f"mfopt: --probability: 1/iters = {rate:g}, by default", err=True)
    else:
        raise click.UsageError("give --probability, or --batch-size and --population")
    if rate * groups > 1:
        way_out = f"Each of the {groups} groups holds one in {groups} of them."
        rule = "the batch must not exceed the units it is drawn from"
        raise _check.reject(name, row[name], rule, way_out if groups > 1 else "")
    return rate * groups


def _poisson(row: Row) -> Poisson:
    return Poisson(_probability(row), _iterations(row))


def _cyclic(row: Row, file: Any) -> Scheme:
    """The sampling of a row, what is left out being that of the file."""
    from mfopt.accounting import unamplified

    if file is None:
        bands = _check.integer("bands", _required("bands", row["bands"]))
        return CyclicPoisson(_probability(row, bands), bands, _iterations(row))
    scheme, bands, n = file.sampling, row["bands"], int(file.iterations)
    typed = any(row[name] is not None for name in ("iterations", "iters", "epochs"))
    _require_length(_iterations(row) if typed else n, file)
    cyclic = scheme.bands_are_groups
    if bands is None:
        bands = scheme.bands if cyclic else unamplified.bands(file.strategy, n)
    if any(row[name] is not None for name in ("probability", "batch_size")):
        return CyclicPoisson(_probability(row, bands), bands, n)
    if cyclic and bands == scheme.bands:
        return scheme
    raise click.UsageError("give --probability, or --batch-size and --population")


def _required(name: str, value: Any) -> Any:
    """``value``, refused where the option was not typed."""
    if value is None:
        raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.")
    return value


def _require_length(n: int, file: Factorization) -> None:
    if n != file.iterations:
        rule = f"C of the file has {file.iterations} iterations"
        raise _check.reject("iterations", n, rule, "Leave it out.")


# field of a scheme -> option that sets it, where that has another name
_OPTION_OF = {"bins": "iters"}
_DEFAULTS = {"rethrow": 1}


def _answer(
    kind: Any, title: str, arguments: Row, also: tuple[str, ...] = (), **statement: Any
) -> None:
    """Answer for a scheme whose fields are options, and C of ``--strategy`` or I.

    Args:
      kind: class of the scheme.
      title: of the answer.
      arguments: what was typed.
      also: mechanisms that it is composed with.
      statement: as for :func:`.answers.answer`.
    """
    text = arguments.pop("strategy", "")
    strategy, file = _matrix(text or "identity")
    fields = [field.name for field in dataclasses.fields(kind)]
    stated = {} if file is None else {**vars(file.sampling), "iterations": int(file.iterations)}
    if "bins" in fields and "bins" not in stated:
        stated = {}  # C for another kind of sampling

    def scheme(row: Row) -> Scheme:
        if "iterations" in row and (file is None or row["iters"] is not None):
            row = {**row, "iterations": _iterations(row)}
        sampling = kind(*(_field(row, name, stated.get(name)) for name in fields))
        if file is not None:
            _require_length(sampling.iterations, file)
        return sampling

    title = ", and ".join([f"{title}, {text}" if text else title, *also])
    answer(arguments, scheme, title, strategy, **statement)


def _field(row: Row, name: str, stated: Any) -> Any:
    """Number of a scheme, as typed, or else that of the file, which no other may contradict."""
    name = _OPTION_OF.get(name, name)
    typed = row[name]
    if stated is None:
        return _required(name, _DEFAULTS.get(name) if typed is None else typed)
    if typed is not None and typed != stated:
        rule = f"the mechanism of the file has {stated}"
        way_out = "Leave it out; `mfopt account run FILE` gives ε for the first part of a run."
        raise _check.reject(name, typed, rule, way_out)
    return stated


def _matrix(text: str) -> tuple[Strategy, Factorization | None]:
    """(C, the factorization it is from or None) of ``--strategy``: a name or a file."""
    from mfopt import strategies

    name, _, number = text.partition(":")
    if name == "banded-sqrt":
        if not number.isdecimal():
            raise _check.reject("strategy", text, "must be banded-sqrt:BANDS, as in banded-sqrt:8")
        return strategies.BandedSquareRoot(int(number)), None
    if text in ("identity", "sqrt"):
        return (strategies.Identity() if text == "identity" else strategies.SquareRoot()), None
    if not Path(text).is_file():
        rule = f"must be {_STRATEGIES} or a factorization file"
        raise _check.reject("strategy", text, rule)
    from mfopt.factorization import load

    file = load(text)
    return file.strategy, file


def _unit_of(files: dict[str, Factorization]) -> str:
    """The privacy unit of the files among the phases; empty where there is none."""
    units = {file.guarantee.privacy_unit for file in files.values()}
    if len(units) > 1:
        rule = f"its files protect units of different names: {', '.join(sorted(units))}"
        raise _check.reject("phases", " ".join(files), rule, "Name the unit: --unit.")
    return "".join(units)


def _phase(text: str, file: Factorization | None, protected: Row) -> tuple[Mechanism, float]:
    """(mechanism, σ) of a PHASE, which is a file or describes them."""
    from mfopt import sampling
    from mfopt.accounting import Mechanism

    if file is not None:
        return Mechanism(file.sampling, file.strategy, **protected), file.noise_multiplier
    described, _, sigma = text.rpartition("@")
    try:
        noise = float(sigma)
    except ValueError:
        noise = math.nan
    if not described or not noise > 0:
        rule = "must be a factorization file or SCHEME[/STRATEGY]@SIGMA"
        way_out = "For example poisson:probability=0.01,iterations=1000@1.1."
        raise _check.reject("phases", text, rule, way_out)
    scheme, _, name = described.partition("/")
    strategy, _ = _matrix(name or "identity")
    return Mechanism(sampling.parse(scheme), strategy, **protected), noise


def _companion(text: str) -> Composition:
    """The mechanism of ``--also``."""
    from mfopt.accounting.monte_carlo import composition

    kinds: dict[tuple[str, int], Callable[..., Composition]] = {
        ("pure", 1): composition.pure,
        ("approximate", 2): composition.approximate,
        ("gaussian", 1): composition.gaussian,
    }
    name, *numbers = text.split(":")
    try:
        return kinds[name, len(numbers)](*map(float, numbers))
    except (KeyError, ValueError) as problem:
        if isinstance(problem, _check.UsageError):
            raise
        rule = "must be pure:EPS, approximate:EPS:DELTA or gaussian:SIGMA"
        raise _check.reject("also", text, rule) from None


def _composed(
    companions: list[Composition], mechanism: Mechanism, row: Row, **effort: Any
) -> Guarantee:
    """Guarantee of a mechanism composed with the others on the same data."""
    from mfopt.accounting.loss_distribution import Composition
    from mfopt.accounting.monte_carlo import composition

    if "certificate" in effort:
        raise click.UsageError("--also has no deterministic certificate: remove one of the two")
    companions_together = Composition(
        tuple(part for companion in companions for part in companion.parts)
    )
    epsilon, delta, sigma = row["eps"], row["delta"], row["noise_multiplier"]
    if delta is not None:
        _require_reachable(companions_together, epsilon, delta)
    analysis = composition.analysis(mechanism, companions_together, **effort)
    if epsilon is None:
        return analysis.epsilon(sigma, delta)
    if delta is None:
        return analysis.delta(sigma, epsilon)
    return analysis.noise_multiplier(epsilon, delta)


def _require_reachable(companions: Composition, epsilon: float | None, delta: float) -> None:
    """Refuse a target that the other mechanisms alone exceed: no noise reaches it."""
    delta_alone, epsilon_words = companions.infinite, "any ε"
    if epsilon is not None:
        tilt = companions.tilt_for_epsilon(epsilon)
        delta_alone = math.exp(companions.convolve(tilt).log_delta_below(epsilon))
        epsilon_words = f"ε = {epsilon:g}"
    if delta_alone > delta:
        rule = f"what --also names is accounted for with δ = {delta_alone:.3g} at {epsilon_words} "
        rule += f"on its own, above {delta:g}: no noise reaches the target. "
        rule += "Ask for a larger ε or δ, or less."
        raise _check.FailureError(rule)
