"""A privacy report read by somebody else: what follows from it is computed, the rest is listed.

A report holds *inputs*, public facts of a run that nothing in the report can show (``told``: its
clip norm, its number of units, ...), and *results*, which this library's accountants compute from
the inputs again (``checks``; ``docs/training/reports.md``). Every field is one or the other.
``CLAIMS`` are about the run itself: they stay claims of whoever wrote the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mfopt import sampling, strategies
from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt._version import __version__
from mfopt.accounting import account as account_of
from mfopt.accounting import phases
from mfopt.accounting.analyses import BETA_SHARE
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization, proofs
from mfopt.factorization import load as load_factorization
from mfopt.guarantee import Guarantee
from mfopt.noise import NoiseStream
from mfopt.progress import Progress, Report, silent
from mfopt.training import privacy, validation
from mfopt.training.batching import Sampler
from mfopt.training.fedavg import clipping_of
from mfopt.training.loop import Execution
from mfopt.training.units import RULES, Units
from mfopt.words import round_up
from mfopt.workloads import PrefixSums

# numbers in the words of a warning, and how far two roundings to three digits may be apart
_NUMBER, _ROUNDED = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?"), 0.0101
# parts of a report that are not written by `privacy.report`
_OTHER_PARTS = ("learning_rate", "signature", "continues")
# compared one by one, or by the proof of the account
_VALIDATION: dict[str, tuple[type, ...]] = {
    "steps": (list,),
    "bound": (float,),
    "noise_multiplier": (float,),
    "users": (int,),
}
_COMPARED_APART = ("account", "guarantee", "warnings", "sampling", "noise_against_signal")
# fields that were written before version 0.3, and what they are where they say nothing
_FORMER = (
    ("sampling", "batch_size", None),
    ("sampling", "truncation", None),
    ("units", "median_epsilon", 0.0),
)
# Inputs: fields that no computation here can show, and their types. ("": at the top.)
_INPUTS: dict[str, dict[str, tuple[type, ...]]] = {
    "": {
        "mfopt": (str,),
        "normalizer": (float,),
        "parameters": (int,),
        "steps_done": (int,),
        "pinned": (bool,),
        "black_box": (bool,),
    },
    "sampling": {
        "population": (int,),
    },
    "learning_rate": {
        "value": (float,),
        "chosen": (str,),
        "noise_move": (float,),
        "optimizer": (str,),
        "momentum": (float,),
        "beta2": (float,),
    },
}
_CLIPPING: dict[str, tuple[type, ...]] = {
    "clip_norm": (float,),
    "per_layer": (bool,),
    "normalized": (bool,),
}
_FEDAVG: dict[str, tuple[type, ...]] = _CLIPPING | {
    "algorithm": (str,),
    "local_epochs": (int,),
    "local_batch": (int,),
    "local_rate": (float,),
    "weight_cap": (int,),
    "estimator": (str,),
    "sensitivity": (float,),
}
_UNIT: dict[str, tuple[type, ...]] = {
    "unit": (str,),
    "length": (int,),
    "selection": (str,),
}
_UNITS: dict[str, dict[str, tuple[type, ...]]] = {
    "user": _UNIT | {"records": (int,)},
    "record": _UNIT | {"group_size": (int,), "reserve": (bool,), "whole": (bool,)},
}
_GUARANTEE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("epsilon", "delta", "noise_multiplier", "failure_probability"), (float,)),
    **dict.fromkeys(("privacy_unit", "adjacency", "method", "status"), (str,)),
    "group_size": (int,),
    "details": (dict,),
}
CLAIMS = (
    "the run executed this mechanism, by an unchanged mfopt, on data with this many units",
    "its secret (sampling and noise keys, checkpoints) was random and is known to nobody else",
    "one unit holds all that one person contributed: a person with several is not seen here",
    "only what the report covers was released, and nothing was chosen by looking at private data",
    "the account's draws went as its details say (tests, samples, accountants without an answer)",
)
# the statement about a run alone, and what it was accounted by
Run = tuple[Guarantee, Factorization]


@dataclasses.dataclass(frozen=True)
class Check:
    """One result in the report: as ``stated``, and as ``found`` by computing it here."""

    name: str
    stated: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Verification:
    """Outcome: the results that were checked, the inputs (``told``), what is claimed.

    ``told``: name of each input, with dots between the levels of the report, and its value.
    """

    checks: tuple[Check, ...]
    told: dict[str, Any]
    claims: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if the report claims a guarantee, and every result is as computed here."""
        return all(check.holds for check in self.checks)

    def describe(self) -> JsonObject:
        """JSON-able."""
        return dataclasses.asdict(self) | {"holds": self.holds}


def read(path: str | Path) -> dict[str, Any]:
    """A privacy report from its file; refused if of a version that this mfopt does not read."""
    if Path(path).exists():
        _check.file("report", path)  # a device may have no end
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is not JSON"
        way_out = "Give the privacy report of a run; `mfopt certify` proves a factorization file."
        raise _check.reject("report", str(path), f"cannot be read ({why})", way_out) from None
    version = facts.get("format") if isinstance(facts, dict) else None
    if version != privacy.REPORT_FORMAT:
        rule = f"is of format {version}, and this mfopt reads {privacy.REPORT_FORMAT}"
        raise _check.reject("report", str(path), rule)
    if facts.get("command") == "train" and type(facts.get("schema")) is int:
        del facts["command"], facts["schema"]  # of `mfopt train --report-only --json`
    return facts


def verify(
    facts: JsonObject,
    *,
    factorization: str | Path | None = None,
    progress: Report = silent,
) -> Verification:
    """Compute again whatever follows from the public settings in a privacy report.

    Args:
        facts: the report.
        factorization: file with C, for a C that is too large for a report.
        progress: callback for the account, which takes longest.

    Raises:
        UsageError: the report is malformed, or C is missing.
    """
    try:
        facts = _without_former(facts)
        claims = _inputs(facts)
        stated, account, execution = _rebuilt(facts, factorization)
        progress(Progress("proving the account again"))
        checks = [_proved(account, progress), *_compared(facts, stated, account, execution)]
        if "continues" in facts:
            earlier = verify(facts["continues"], progress=progress)
            failed = ", ".join(check.name for check in earlier.checks if not check.holds)
            words = str(facts["continues"].get("statement"))
            checks.append(Check("earlier run", words, failed, earlier.holds))
            claims |= {f"continues.{name}": value for name, value in earlier.told.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        if isinstance(problem, UsageError):
            raise
        rule = f"is not a privacy report of mfopt ({problem})"
        raise _check.reject("report", type(problem).__name__, rule) from None
    return Verification(tuple(checks), claims, CLAIMS)


def _without_former(facts: JsonObject) -> dict[str, Any]:
    """A report without the fields of version 0.2, refused where they say something."""
    tables = {name: dict(facts[name]) for name in ("sampling", "units")}
    for table, name, empty in _FORMER:
        if name in tables[table] and (value := tables[table].pop(name)) != empty:
            rule = f"must be {empty}: other values are read by older versions only"
            raise _check.reject(f"report {table}.{name}", value, rule)
    return facts | tables


def _inputs(facts: JsonObject) -> dict[str, Any]:
    """Name and value of every input; UsageError where a field is unknown or of another type."""
    of_units, of_clipping = facts["units"], facts["clipping"]
    tables = dict(_INPUTS)
    if of_units.keys() == {"unit"}:  # of mfopt.training.receipts
        tables["units"] = {"unit": (str,)}
        tables.pop("learning_rate")
        _typed("learning_rate", facts.get("learning_rate"), (type(None),))
    else:
        tables["units"] = _UNITS.get(of_units["unit"], {})
    if "validation" in facts:
        tables["validation"] = _VALIDATION
    tables["clipping"] = _FEDAVG if "algorithm" in of_clipping else _CLIPPING
    claims = {}
    for table, types in tables.items():
        values = facts[table] if table else facts
        prefix = f"{table}." if table else ""
        for name, allowed in types.items():
            _typed(f"{prefix}{name}", values[name] if table else facts[name], allowed)
            claims[f"{prefix}{name}"] = values[name]
        if table:
            _only(table, values, [*types, "scheme"] if table == "sampling" else types)
    claims.pop("clipping.sensitivity", None)  # computed
    for name in ("account", "guarantee"):
        _only(name, facts[name], _GUARANTEE)
        for field, allowed in _GUARANTEE.items():
            _typed(f"{name}.{field}", facts[name][field], allowed)
    if "signature" in facts:  # of version 0.2
        claims["signature"] = facts["signature"]
    # of a group, the name of what it is a group of; and how the account was found
    for name in ("privacy_unit", "method"):
        claims[f"account.{name}"] = facts["account"][name]
    for name, value in facts["account"]["details"].items():
        claims[f"account.details.{name}"] = value
    return claims


def _typed(name: str, value: Any, allowed: tuple[type, ...]) -> None:
    if type(value) not in allowed:
        words = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise _check.reject(f"report {name}", value, f"must be {words}")


def _only(table: str, values: JsonObject, fields: Iterable[str]) -> None:
    """Refuse a table of the report with other fields than these."""
    if values.keys() != set(fields):
        rule = f"must have the fields {', '.join(sorted(fields))}, and no other"
        way_out = "Have the run's owner write the report again: `mfopt train --resume` does."
        raise _check.reject(f"report {table}", sorted(values), rule, way_out)


def runs_of(facts: JsonObject) -> list[Run]:
    """Statements about a verified report's run and the earlier ones alone, and their accounts."""
    if "validation" in facts:
        rule = "released losses of held-out users, who could be trained on by another run"
        raise _check.reject("continue_from", "validation", rule, "Begin a new run.")
    stated, account, execution = _rebuilt(facts, None)
    earlier = runs_of(facts["continues"]) if "continues" in facts else []
    return [*earlier, (_alone(facts, stated, account, execution), account)]


def _alone(
    facts: JsonObject, stated: Guarantee, account: Factorization, execution: Execution
) -> Guarantee:
    """The statement that follows for the run alone."""
    keywords: dict[str, Any] = {"black_box": bool(facts["black_box"])}
    statement = privacy.statement(account, execution, privacy_unit=stated.privacy_unit, **keywords)
    return privacy.with_grid(
        statement, execution, _check.integer("parameters", facts["parameters"])
    )


def _rebuilt(
    facts: JsonObject, factorization: str | Path | None
) -> tuple[Guarantee, Factorization, Execution]:
    """(the statement, the account, the execution) that the report describes."""
    accounted = Guarantee.from_description(facts["account"])
    plan, clip = facts["sampling"], facts["clipping"]
    scheme = sampling.from_description(plan["scheme"])
    if factorization is not None:
        strategy = load_factorization(factorization).strategy  # its digest is compared below
    elif (stored := facts["strategy_arrays"]) is None:
        rule = "is needed: this C is too large for a report, which has its digest"
        raise _check.reject("factorization", None, rule)
    else:
        arrays = {
            name: np.array(part["values"], np.dtype(part["type"])).reshape(part["shape"])
            for name, part in stored.items()
        }
        strategy = strategies.from_description(facts["strategy"], arrays)
    account = Factorization(strategy, accounted.noise_multiplier, scheme, PrefixSums(), accounted)
    units = Units(int(plan["population"]), facts["units"])
    sampler = Sampler(
        scheme,
        units.population,
        0,  # nothing is drawn
        microbatch=1,
    )
    clipping = clipping_of(clip)
    noise = NoiseStream(
        strategy,
        iterations=scheme.length,
        noise_multiplier=float(facts["noise_multiplier"]),
        clip_norm=clipping.sensitivity,
        sampling=scheme,
        secure="noise" in facts,
    )
    execution = Execution(units, sampler, clipping, noise, float(facts["normalizer"]))
    return Guarantee.from_description(facts["guarantee"]), account, execution


def _proved(account: Factorization, progress: Report) -> Check:
    stated = account.guarantee
    epsilon, delta = round_up(stated.epsilon, 6), round_up(stated.delta, 6)
    words = f"({epsilon}, {delta})-DP at σ = {round_up(stated.noise_multiplier, 6)}"
    if stated.status == "estimate":
        return Check("account", words, "an estimate, which proves nothing", False)
    mechanism, multiplier = account.mechanism, stated.noise_multiplier
    try:
        proof = proofs.prove(mechanism, multiplier, stated, progress=progress)
        if not _as_certain(stated, proof):  # another analysis may be
            proof = account_of(mechanism, noise_multiplier=multiplier, delta=stated.delta)
    except (FailureError, UsageError) as problem:
        return Check("account", words, f"not proved here: {problem}", False)
    if not (proof.epsilon <= stated.epsilon and _as_certain(stated, proof)):
        words = f"{words}, {stated.status}, wrong with chance {stated.failure_probability:g}"
        return Check("account", words, f"what can be proved here is {proof}", False)
    return Check("account", f"{words}, proved again by {proof.method}", "", True)


def _as_certain(stated: Guarantee, proof: Guarantee) -> bool:
    """True if ``proof`` is as certain and as tight as ``stated``."""
    if proof.status == "estimate" or (stated.status == "exact" and proof.status != "exact"):
        return False
    if stated.status != "certified":
        return proof.failure_probability == 0
    # that of its own draws, of as many tests as it took: no test errs less than this
    smallest = min(proof.failure_probability, BETA_SHARE * stated.delta)
    return stated.failure_probability >= smallest * (1 - 1e-9)


def _compared(
    facts: JsonObject, stated: Guarantee, account: Factorization, execution: Execution
) -> Iterator[Check]:
    """Checks of the report's fields against what follows from the account and the execution."""
    claim = f"{facts['holds']}, pinned: {facts['pinned']}"
    only = "only a run that says so, with a secret of its own, has one"
    honest = facts["holds"] is True and facts["pinned"] is False
    yield Check("claims a guarantee", claim, only, honest)
    try:
        statement = _alone(facts, stated, account, execution)
        if "continues" in facts:
            statement = composed([*runs_of(facts["continues"]), (statement, account)])
    except UsageError as problem:
        yield Check("statement", str(stated), str(problem), False)
        return
    for name, value in _plain(statement.describe()).items():
        mine = facts["guarantee"][name]
        if name in ("epsilon", "delta"):  # a statement may say less than what is proved
            # the same formula on another machine: the last bits may differ
            holds = math.isfinite(value) and value <= mine * (1 + 1e-9)
            yield Check(name, f"{mine:.8g}", f"{value:.8g}", holds)
        elif name == "details":
            yield _alike(name, mine, value)
        else:
            yield Check(name.replace("_", " "), f"{mine}", f"{value}", _equal(mine, value))
    public = {name: facts[name] for name in ("steps_done", "pinned", "black_box")}
    if (losses := facts.get("validation")) is not None:
        public["validation"] = losses
        spent = validation.proved(losses, stated, execution.iterations)
        words = f"{len(losses['steps'])} losses of {losses['users']} users"
        within = spent <= stated.epsilon * (1 + 1e-9)
        yield Check("held-out users", words, f"epsilon {spent:.8g}", within)
    expected = _plain(
        privacy.report(account, execution, stated, num_params=facts["parameters"], **public)
    )
    _only("noise_against_signal", facts["noise_against_signal"], expected["noise_against_signal"])
    for name, value in expected.pop("noise_against_signal").items():
        mine = facts["noise_against_signal"][name]
        yield _alike(name, mine, value if math.isfinite(value) else None)
    done, covered = facts["steps_done"], execution.iterations
    yield Check("steps done", f"{done}", f"at most {covered}", 0 <= done <= covered)
    if "learning_rate" in facts:
        yield _learning_rate(facts["learning_rate"], execution)
    surplus = sorted(facts.keys() - expected.keys() - {*_OTHER_PARTS, "noise_against_signal"})
    yield Check("fields", "those of a report", f"and {surplus}", not surplus)
    its, ours = (re.findall(r"\d+", version)[:3] for version in (facts["mfopt"], __version__))
    newer = [*map(int, its)] > [*map(int, ours)]
    yield Check("mfopt", facts["mfopt"], f"{__version__}, which is older", not newer)
    words, warnings = facts["warnings"], expected["warnings"]
    is_equal = isinstance(words, list) and len(words) == len(warnings)
    is_equal = is_equal and all(map(_same_warning, words, warnings))
    yield Check("warnings", f"{words}", f"{warnings}", is_equal)
    yield _alike("sampling scheme", facts["sampling"]["scheme"], expected["sampling"]["scheme"])
    if (rule := facts["units"].get("selection")) is not None:
        yield Check("rule of selection", rule, f"one of {RULES}", rule in RULES)
    arrays = facts["strategy_arrays"]
    if arrays is not None:  # every bit of C
        is_equal = arrays == expected["strategy_arrays"]
        yield Check(
            "strategy arrays", "as computed here" if is_equal else "C", "another C", is_equal
        )
    # inputs only, compared with themselves
    tables = ("sampling", "clipping", "units", "validation")
    rebuilt = {name: expected[name] for name in tables if name in expected}
    stray = [name for name, value in rebuilt.items() if not _equal(facts[name], value)]
    yield Check("inputs belong together", "units, sampling, clipping", f"not {stray}", not stray)
    inputs = {*_INPUTS[""], *rebuilt, "strategy_arrays"}
    for name, value in expected.items():
        if name not in inputs and name not in _COMPARED_APART:
            yield _alike(name, facts[name], value)


def _same_warning(stated: Any, computed: str) -> bool:
    """True if a warning has these words, and their numbers up to rounding on another machine."""
    if not isinstance(stated, str) or _NUMBER.sub("#", stated) != _NUMBER.sub("#", computed):
        return False
    pairs = zip(_NUMBER.findall(stated), _NUMBER.findall(computed), strict=True)
    numbers = [[float(text.rstrip(".")) for text in pair] for pair in pairs]
    return all(math.isclose(old, new, rel_tol=_ROUNDED) for old, new in numbers)


def _learning_rate(stated: dict[str, Any], execution: Execution) -> Check:
    """Check of the learning rate: computed where the noise decided, else an input."""
    chosen, value = stated["chosen"], stated["value"]
    if chosen not in privacy.CHOSEN.values():
        return Check("learning rate", f"chosen {chosen}", "is no way to choose one", False)
    if chosen != privacy.CHOSEN[""]:
        return Check("learning rate", f"{value:.6g}, chosen {chosen}", "", True)
    settings = {name: stated[name] for name in ("momentum", "beta2")}
    move = stated["noise_move"]
    rate = privacy.fitted_rate(execution, stated["optimizer"], move=move, **settings)
    return _alike("learning rate", value, rate)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _alike(name: str, stated: Any, computed: Any) -> Check:
    is_equal = _equal(stated, computed)
    shown_stated, shown_computed = (
        f"{x:.6g}" if type(x) is float else str(x) for x in (stated, computed)
    )
    if is_equal and isinstance(stated, dict | list):
        shown_stated = "as computed here"
    return Check(name.replace("_", " "), shown_stated, shown_computed, is_equal)


def _equal(stated: Any, computed: Any) -> bool:
    """Return True if two JSON values are equal up to the last bits of numbers."""
    if isinstance(stated, dict) and isinstance(computed, dict):
        is_equal = stated.keys() == computed.keys()
        return is_equal and all(_equal(stated[name], computed[name]) for name in computed)
    if isinstance(stated, list) and isinstance(computed, list):
        return len(stated) == len(computed) and all(map(_equal, stated, computed))
    if type(stated) is float and type(computed) is float:
        return stated == computed or math.isclose(stated, computed, rel_tol=1e-6)
    return type(stated) is type(computed) and bool(stated == computed)


def composed(runs: Sequence[Run]) -> Guarantee:
    """The statement about all ``runs`` together, the last of them the one that is described.

    A later run may depend in any way on what an earlier one released, and a user may be in the data
    of all of them: that their data has no user in common is never assumed. What was lost to a user
    is then at most the sum of all ε, at the sum of all δ; less where every run is a composition of
    independent rounds, which :mod:`mfopt.accounting.phases` adds up on one grid.
    Refused are runs that protect different units or adjacencies, and estimates.
    """
    newest = runs[-1][0]
    for run_guarantee, _ in runs:
        for name in ("privacy_unit", "adjacency"):
            if getattr(run_guarantee, name) != getattr(newest, name):
                rule = f"is {getattr(run_guarantee, name)!r} in an earlier run, "
                rule += f"{getattr(newest, name)!r} here"
                way_out = "Statements about different neighbours do not compose."
                raise _check.reject(name, getattr(newest, name), rule, way_out)
        if run_guarantee.status == "estimate":
            raise _check.reject(
                "account", str(run_guarantee), "is an estimate, which proves nothing"
            )
    delta = min(1.0, _up(math.fsum(run_guarantee.delta for run_guarantee, _ in runs)))
    epsilon, method = (
        _up(math.fsum(run_guarantee.epsilon for run_guarantee, _ in runs)),
        f"sum of {len(runs)} runs",
    )
    names = ("epsilon", "delta", "adjacency", "privacy_unit", "group_size")
    # no group or grid is in a statement that is the account's own
    if all(
        getattr(run_guarantee, x) == getattr(account.guarantee, x)
        for run_guarantee, account in runs
        for x in names
    ):
        with contextlib.suppress(UsageError, FailureError):  # the sum holds without
            parts = [
                phases.Phase(account.mechanism, account.noise_multiplier) for _, account in runs
            ]
            if all(part.rounds is not None for part in parts):
                composition = phases.compose(parts, delta=delta)
                if composition.status == "bound" and composition.epsilon < epsilon:
                    epsilon, method = composition.epsilon, f"composition of {len(runs)} runs"
    epsilons = [
        {"epsilon": run_guarantee.epsilon, "delta": run_guarantee.delta}
        for run_guarantee, _ in runs
    ]
    details = {name: value for name, value in newest.details.items() if name != "bracket"}
    return dataclasses.replace(
        newest,
        epsilon=epsilon,
        delta=delta,
        method=method,
        status="certified"
        if any(run_guarantee.status == "certified" for run_guarantee, _ in runs)
        else "bound",
        failure_probability=min(
            1.0, _up(math.fsum(run_guarantee.failure_probability for run_guarantee, _ in runs))
        ),
        details=details | {"runs": epsilons},
    )


def _up(total: float) -> float:
    return math.nextafter(total, math.inf) if total > 0 else 0.0
