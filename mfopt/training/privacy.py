"""Statement and report of one run, from the account of its mechanism.

An account was made before the run, for a sampling scheme, a strategy, a noise multiplier and a
number of units that change together. The run must execute exactly that; :func:`statement` refuses
everything else, and adds what only the run decides: the privacy unit.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mfopt import query_error
from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt._version import __version__
from mfopt.accounting import account as account_of
from mfopt.accounting.closed_form import group as lemma
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee, questionable_delta
from mfopt.mechanism import Mechanism
from mfopt.training.clipping import NoClipping
from mfopt.training.loop import Execution
from mfopt.training.optimizers import fitting_rate
from mfopt.training.units import Units
from mfopt.words import described, round_up
from mfopt.workloads import PrefixSums, ToeplitzWorkload

# Norm of the noise in the sum of all steps, in norms of the largest possible signal in it. Language
# models still learn at 1 (noise spreads over all directions, the signal over few).
HOPELESS = 10.0
REPORT_FORMAT = 3
_MOST_NUMBERS = 20_000  # of C in a report; a larger one is in its factorization file


def solved(mechanism: Mechanism, epsilon: float, delta: float) -> Factorization:
    """The smallest σ for (ε, δ). Where the accountant samples, σ differs from call to call."""
    guarantee = account_of(mechanism, epsilon=epsilon, delta=delta)
    sigma = guarantee.noise_multiplier
    return Factorization(mechanism.strategy, sigma, mechanism.sampling, PrefixSums(), guarantee)


def statement(
    account: Factorization,
    execution: Execution,
    *,
    privacy_unit: str = "user",
    black_box: bool = False,
) -> Guarantee:
    """The (ε, δ) statement about a run of ``execution``.

    Args:
        account: the mechanism and the statement to hold the run against.
        execution: what will run.
        black_box: derive the statement for a user of several units from an account for one unit,
            by :func:`~mfopt.accounting.closed_form.group.black_box_group` (Chua et al. 2024,
            Algorithm 1).
        privacy_unit: "user", or "record" for a statement about single records: of record units, and
            where every user's records are all kept.

    Raises:
        UsageError: the run is not what was accounted for (scheme, steps, σ, C, unit).
    """
    units = execution.units
    sampler = execution.sampler
    noise = execution.noise
    guarantee = account.guarantee
    if noise is None:
        raise _check.reject("noise", None, "a run without noise has no guarantee")
    if sampler.scheme != account.sampling:
        rule = f"the account is for {account.sampling}"
        way_out = "Train with the scheme of the file, or optimize a file for this scheme."
        raise _check.reject("sampling", sampler.scheme, rule, way_out)
    if noise.noise_multiplier != account.noise_multiplier:
        rule = f"the account is for σ = {account.noise_multiplier}"
        raise _check.reject("noise_multiplier", noise.noise_multiplier, rule)
    if noise.digest != account.digest:
        digest = account.digest[:12]
        rule = f"is made by another strategy or without the sampling of the account ({digest})"
        way_out = "Make the noise stream from the same file, or with sampling = the account's."
        raise _check.reject("noise", noise.digest[:12], rule, way_out)
    sampled = str(units.describe()["unit"])
    if guarantee.group_size == 1 and guarantee.privacy_unit not in (sampled, "example"):
        rule = f"is the unit of the account, and this algorithm samples one {sampled} at a time"
        way_out = f"Account for the unit {sampled}, or sample by the account's unit."
        raise _check.reject("privacy_unit", guarantee.privacy_unit, rule, way_out)
    group = _group_size(units, privacy_unit)
    if black_box and guarantee.group_size == 1:
        guarantee = lemma.black_box_group(guarantee, group)
    if guarantee.group_size < group:
        rule = f"a {privacy_unit} has up to {group} sampled units, and the account is for groups of"
        way_out = "Account for it, lower it, or use user-level sampling or black-box groups."
        raise _check.reject("group_size", group, f"{rule} {guarantee.group_size}", way_out)
    adjacency = sampler.scheme.executed_adjacency(guarantee.adjacency)
    details = {**guarantee.details, "sampled_unit": sampled}
    return dataclasses.replace(
        guarantee,
        privacy_unit=privacy_unit,
        group_size=1,
        adjacency=adjacency,
        details=details | {"accounted_group_size": guarantee.group_size},
    )


def with_grid(guarantee: Guarantee, execution: Execution, num_params: int) -> Guarantee:
    """``guarantee`` with the price of secure noise for so many parameters; of other noise as it is.

    Refused is a price that is not small (:meth:`~mfopt.noise.NoiseStream.secure_cost`).
    """
    if execution.noise is None or not execution.noise.secure:
        return guarantee
    epsilon, delta = execution.noise.secure_cost(num_params).total(
        guarantee.epsilon, guarantee.delta
    )
    without_grid = {"epsilon_before_grid": guarantee.epsilon, "delta_before_grid": guarantee.delta}
    return dataclasses.replace(
        guarantee,
        epsilon=epsilon,
        delta=min(1.0, delta),
        status="bound" if guarantee.status == "exact" else guarantee.status,
        details=guarantee.details | without_grid,
    )


def _group_size(units: Units, privacy_unit: str) -> int:
    """Number of sampled units of one privacy unit."""
    facts = units.describe()
    way_out = ""
    if privacy_unit == "user" or ("run" in facts and facts["unit"] == privacy_unit):
        return units.group_size
    if privacy_unit != "record":
        rule = "must be 'user' or 'record'"
    elif facts["unit"] != "record":
        rule = "user-level sampling clips users, so the unit is the user"
    elif not facts.get("whole"):
        rule = f"with one record less, others may be kept or held out: {units.group_size} are kept"
        way_out = "Raise `records_per_user` above all, hold no record out, or state it per user."
    else:
        return 1
    raise _check.reject("privacy_unit", str(privacy_unit), rule, way_out)


def noise_against_signal(execution: Execution, num_params: int) -> dict[str, float]:
    """Public sizes of noise and gradient in one step's noised mean; norms over all parameters.

    ``noise_norm``: root mean square, over steps, of the expected noise norm;
    ``largest_signal_norm``: what the sum of an expected batch of aligned, clipped
    units would give; ``noise_per_coordinate``: standard deviation, ``sum_noise_per_coordinate``
    that of the sums over all steps so far (what a model's parameters see), root mean squares over
    steps; ``noise_of_all_steps`` and ``largest_signal_of_all_steps``: norms of the last sum.
    """
    coordinate = noise_by_step(execution)
    sums = noise_by_step(execution, PrefixSums())
    expected = execution.sampler.expected_batch
    signal = execution.clipping.sensitivity * expected / execution.normalizer
    return {
        "noise_per_coordinate": float(np.sqrt(np.mean(coordinate**2))),
        "noise_norm": float(np.sqrt(np.mean(coordinate**2) * num_params)),
        "largest_signal_norm": float(signal),
        "sum_noise_per_coordinate": float(np.sqrt(np.mean(sums**2))),
        "noise_of_all_steps": float(sums[-1] * np.sqrt(num_params)),
        "largest_signal_of_all_steps": float(signal * execution.iterations),
    }


def noise_by_step(
    execution: Execution, workload: PrefixSums | ToeplitzWorkload | None = None
) -> np.ndarray:
    """Standard deviation of the noise in a coordinate of each released mean, shape (n,)."""
    noise = execution.noise
    n = execution.iterations
    assert noise is not None
    workload = workload or ToeplitzWorkload(np.eye(1, n)[0])
    rows = np.asarray(query_error.row_variances(workload, noise.strategy, n))
    return noise.stddev * np.sqrt(rows) / execution.normalizer


UNPROVED = (
    "the guarantee of the factorization was not proved on the machine that ran it; `mfopt verify` "
    "proves it again"
)


def _warnings_of(execution: Execution, sizes: dict[str, float], delta: float) -> list[str]:
    """Warnings from a run's public numbers: of a weak δ, and that little can be learned."""
    warnings = list(filter(None, [questionable_delta(delta, execution.units.population)]))
    noise = sizes["noise_of_all_steps"]
    signal = sizes["largest_signal_of_all_steps"]
    if not noise <= HOPELESS * signal:
        warnings.append(
            f"the noise in the sum of all steps has norm {noise:.3g}; if every unit pulled in one "
            f"direction, their sum would be {signal:.3g}: {noise / signal:.3g} times less. Little "
            "can be learned: take a larger epsilon, more units, more steps, or fewer parameters "
            "(adapters)"
        )
    expected = execution.sampler.expected_batch
    normalizer = execution.normalizer
    if not 0.1 <= normalizer / expected <= 10:
        warnings.append(
            f"each sum is divided by {normalizer:.4g}, and {expected:.4g} units are expected in a "
            "step: the learning rate is off by as much"
        )
    return warnings


def fitted_rate(execution: Execution, optimizer: str, **settings: float) -> float:
    """The learning rate that fits the noise of a run; ``settings`` of :func:`fitting_rate`."""
    sizes = noise_against_signal(execution, 1)
    noises = sizes["noise_per_coordinate"], sizes["sum_noise_per_coordinate"]
    return fitting_rate(optimizer, noises, steps=execution.iterations, **settings)


# how a learning rate was chosen, by the setting that decided
CHOSEN = {
    "": "by the noise, from public numbers",
    "learning_rate": "by the settings: how is not known, and not covered if private data decided",
}
SIGMA_UNIT = "relative to the clip norm, for C as stored"
PUBLIC = (
    "number of units (what sums are divided by tells it, unless `normalizer` is set)",
    "all settings",
)
NOT_COVERED = (
    "metrics, plots and evaluations on held-out users: computed without noise",
    "checkpoints: they hold the secret keys of noise and sampling; export the model instead",
    "choices made by looking at private data or at uncovered outputs: hyperparameters, when to "
    "stop, which of several runs to release",
    "running time and the number of microbatches, which follow the sizes of the batches",
    "attacks on floating-point rounding of noise and sums",
)
VALIDATION_NOT_COVERED = (
    "metrics, plots and evaluations on held-out records: computed without noise"
)
SECURE_NOT_COVERED = "the floating-point rounding of sums before noise is added to them on a grid"


def report(
    account: Factorization,
    execution: Execution,
    guarantee: Guarantee,
    *,
    num_params: int,
    steps_done: int,
    pinned: bool = False,
    black_box: bool = False,
    validation: JsonObject | None = None,
) -> JsonObject:
    """Privacy report: public numbers only, JSON-compatible.

    It holds all that :mod:`mfopt.training.verification` needs to compute every number in it again.

    Args:
      account, execution, guarantee: the account, what runs, and the statement about it.
      num_params, steps_done: trained parameters, and steps that were run: the statement is about
        all noised means, so it holds for every prefix.
      pinned, black_box: a seed was pinned; the statement is by :func:`black_box_group`.
      validation: public numbers of losses of held-out users that are released with noise.
    """
    sizes = noise_against_signal(execution, num_params)
    not_covered = NOT_COVERED
    grid = {}
    if execution.noise is not None and execution.noise.secure:
        cost = execution.noise.secure_cost(num_params)
        grid["noise"] = {"kind": "secure", **dataclasses.asdict(cost)}
        not_covered = (*NOT_COVERED[:-1], SECURE_NOT_COVERED)
    if validation is not None:
        grid["validation"] = validation
        not_covered = (VALIDATION_NOT_COVERED, *not_covered[1:])
    arrays = account.strategy.arrays()
    small = sum(array.size for array in arrays.values()) <= _MOST_NUMBERS
    stored = {
        name: {"shape": list(x.shape), "type": x.dtype.str, "values": x.reshape(-1).tolist()}
        for name, x in arrays.items()  # JSON keeps every bit of a float
        if small
    }
    clipping = execution.clipping
    assert not isinstance(clipping, NoClipping)
    return {
        "format": REPORT_FORMAT,
        "mfopt": __version__,
        "account": account.guarantee.describe(),
        "black_box": black_box,
        "guarantee": guarantee.describe(),
        "statement": str(guarantee),
        "holds": not pinned and guarantee.status != "estimate",
        "pinned": pinned,
        "mechanism_digest": account.digest,
        "strategy": account.strategy.describe(),
        "strategy_arrays": stored if small else None,
        "noise_multiplier": account.noise_multiplier,
        "noise_multiplier_unit": SIGMA_UNIT,
        "sampling": {
            "scheme": execution.sampler.scheme.describe(),
            "population": execution.sampler.population,
        },
        "units": execution.units.describe(),
        "clipping": clipping.describe(),
        "normalizer": execution.normalizer,
        "iterations_covered": execution.iterations,
        "steps_done": steps_done,
        "parameters": num_params,
        "noise_against_signal": sizes,
        "warnings": _warnings_of(execution, sizes, guarantee.delta),
        "treated_as_public": list(PUBLIC),
        "not_covered": list(not_covered),
        **grid,
    }


def report_text(facts: JsonObject) -> str:
    """The report for people: names and values, and what is not covered, a line each."""
    guarantee = facts["guarantee"]
    sizes = facts["noise_against_signal"]
    epsilon = round_up(guarantee["epsilon"])
    delta = round_up(guarantee["delta"])
    multiplier = f"{round_up(facts['noise_multiplier'])} ({facts['noise_multiplier_unit']})"
    # numbers that stand for another rule at 0, of DP-FedAvg
    at_zero = {"local_batch": "all records", "weight_cap": "none, equal weights"}
    clipping = {name: x or at_zero.get(name, x) for name, x in facts["clipping"].items()}
    in_a_step = f"norm {sizes['noise_norm']:.4g} over {facts['parameters']} parameters; largest "
    in_a_step += f"expected signal norm: {sizes['largest_signal_norm']:.4g}"
    rows = [
        ("privacy unit", f"{guarantee['privacy_unit']} ({guarantee['adjacency']} adjacency)"),
        ("epsilon, delta", f"{epsilon}, {delta}"),
        ("method", f"{guarantee['method']} ({guarantee['status']})"),
        ("noise multiplier", multiplier),
        ("strategy", described(facts["strategy"])),
        ("sampling", described(facts["sampling"]["scheme"])),
        ("contribution", described({"kind": "clipped", **clipping})),
        ("sampled units", f"{facts['sampling']['population']} x {facts['units']['unit']}"),
        ("steps", f"{facts['iterations_covered']} covered"),
        ("noise in a step", in_a_step),
    ]
    extra = guarantee["details"]
    if "runs" in extra:
        single = [f"({round_up(x['epsilon'])}, {round_up(x['delta'])})" for x in extra["runs"]]
        words = f"runs of {' and '.join(single)}, the last of them this one"
        rows.append(("composed of", f"{words}; a user may be in the data of all"))
    if "noise" in facts:
        price = f"adds {facts['noise']['epsilon']:.3g} to epsilon, for rounding to its grid"
        rows.append(("secure noise", f"from a cipher, by a proven law; {price}"))
    if "validation" in facts:
        held_out = facts["validation"]
        words = f"{len(held_out['steps'])} losses of {held_out['users']} users, with noise; each "
        words += f"user's bounded by {held_out['bound']:g}; the epsilon and delta are theirs too"
        rows.append(("held-out users", words))
    if facts["pinned"]:
        rows.append(("NO GUARANTEE", "the seed is pinned: whoever knows it can remove the noise"))
    if guarantee["status"] == "estimate":
        rows.append(("NO GUARANTEE", "the account is an estimate: certify the file first"))
    rows.append(("taken as public", "; ".join(facts["treated_as_public"])))
    rows += [("WARNING", text) for text in facts["warnings"]]
    lines = [f"{name:<17} {value}" for name, value in rows]
    return "\n".join([*lines, "not covered:", *(f"  - {text}" for text in facts["not_covered"])])
