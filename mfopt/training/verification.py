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
from collections.abc import Iterator, Sequence
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
from mfopt.training.fedavg import clipping_of
from mfopt.training.folder import REPORT
from mfopt.training.loop import Execution
from mfopt.training.units import Units
from mfopt.words import round_up
from mfopt.workloads import PrefixSums

# Tables of a report and their fields. Inputs, which no computation here can show, are all of them
# but those of both guarantees and ``scheme``. ("": at the top.)
_GUARANTEE = (
    "epsilon delta noise_multiplier failure_probability privacy_unit adjacency method status "
    "group_size details"
)
_FIELDS = {
    "": "mfopt normalizer parameters steps_done pinned black_box",
    "sampling": "population scheme",
    "learning_rate": "value chosen noise_move optimizer momentum",
    "validation": "steps bound noise_multiplier users",
    "account": _GUARANTEE,
    "guarantee": _GUARANTEE,
}
_UNITS = {
    "user": "unit length records",
    "record": "unit length group_size reserve whole",
    "run": "unit run",
}
_TYPES = {
    str: "mfopt run chosen optimizer unit algorithm privacy_unit adjacency method status",
    int: "parameters steps_done population users length records group_size local_epochs "
    "local_batch weight_cap",
    float: "normalizer value noise_move momentum bound noise_multiplier clip_norm local_rate "
    "epsilon delta failure_probability",
    bool: "pinned black_box normalized reserve whole",
    list: "steps",
    dict: "scheme details",
}
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}
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
class _Check:
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

    checks: tuple[_Check, ...]
    told: JsonObject
    claims: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if the report claims a guarantee, and every result is as computed here."""
        return all(check.holds for check in self.checks)

    def describe(self) -> JsonObject:
        """JSON-able."""
        return dataclasses.asdict(self) | {"holds": self.holds}


def read(report: str | Path) -> JsonObject:
    """A privacy report from its file or a run's folder; refused if of a version not read here."""
    path = _check.path("report", report)
    way_out = "Give the privacy report of a run; `mfopt certify` proves a factorization file."
    # a device may have no end
    path = _check.file("report", path / REPORT if path.is_dir() else path)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is not JSON"
        raise _check.reject("report", str(path), f"cannot be read ({why})", way_out) from None
    version = facts.get("format") if isinstance(facts, dict) else None
    if version != privacy.REPORT_FORMAT:
        rule = "is no privacy report of a run"
        if version is not None:
            rule = f"is of format {version}, and this mfopt reads {privacy.REPORT_FORMAT}"
            way_out = "The version of mfopt that wrote it reads it."
        raise _check.reject("report", str(path), rule, way_out)
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
        claims = _inputs(facts)
        stated, account, execution = _rebuilt(facts, factorization)
        progress(Progress("proving the account again"))
        checks = [_proved(account, progress), *_compared(facts, stated, account, execution)]
        if "continues" in facts:
            earlier = verify(facts["continues"], progress=progress)
            failed = ", ".join(check.name for check in earlier.checks if not check.holds)
            words = str(facts["continues"].get("statement"))
            checks.append(_Check("earlier run", words, failed, earlier.holds))
            claims |= {f"continues.{name}": value for name, value in earlier.told.items()}
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as problem:
        if isinstance(problem, UsageError):
            raise
        rule = f"is not a privacy report of mfopt ({problem})"
        raise _check.reject("report", type(problem).__name__, rule) from None
    return Verification(tuple(checks), claims, CLAIMS)


def _inputs(facts: JsonObject) -> JsonObject:
    """Name and value of every input; UsageError where a field is unknown or of another type."""
    units = facts["units"]
    fields = {table: names.split() for table, names in _FIELDS.items()}
    fields["clipping"] = [*clipping_of(facts["clipping"]).describe()]
    fields["units"] = _UNITS["run" if "run" in units else units["unit"]].split()
    if "run" in units:  # of mfopt.training.receipts
        del fields["learning_rate"]
    if "validation" not in facts:
        del fields["validation"]
    claims = {}
    for table, names in fields.items():
        values = facts[table] if table else facts
        if table and values.keys() != {*names}:
            rule = f"must have the fields {', '.join(sorted(names))}, and no other"
            way_out = "Have the run's owner write the report again: `mfopt train --resume` does."
            raise _check.reject(f"report {table}", sorted(values), rule, way_out)
        for name in names:
            label = f"{table}.{name}" if table else name
            if type(values[name]) is not _TYPE_OF[name]:
                rule = f"must be {_TYPE_OF[name].__name__}"
                raise _check.reject(f"report {label}", values[name], rule)
            if _FIELDS.get(table) != _GUARANTEE and name != "scheme":
                claims[label] = values[name]
    if claims.get("learning_rate.chosen") == privacy.CHOSEN[""]:
        del claims["learning_rate.value"]  # computed
    # of a group, the name of what it is a group of; and how the account was found
    for name in ("privacy_unit", "method"):
        claims[f"account.{name}"] = facts["account"][name]
    for name, value in facts["account"]["details"].items():
        claims[f"account.details.{name}"] = value
    return claims


def runs_of(facts: JsonObject) -> list[Run]:
    """Statements about a verified report's run and the earlier ones alone, and their accounts."""
    if "validation" in facts:
        rule = "released losses of held-out users, who could be trained on by another run"
        raise _check.reject("model", "validation", rule, "Begin from another model.")
    stated, account, execution = _rebuilt(facts, None)
    earlier = runs_of(facts["continues"]) if "continues" in facts else []
    return [*earlier, (_alone(facts, stated, account, execution), account)]


def _alone(
    facts: JsonObject, stated: Guarantee, account: Factorization, execution: Execution
) -> Guarantee:
    """The statement that follows for the run alone."""
    statement = privacy.statement(
        account, execution, privacy_unit=stated.privacy_unit, black_box=facts["black_box"]
    )
    return privacy.with_grid(
        statement, execution, _check.integer("parameters", facts["parameters"])
    )


def _rebuilt(
    facts: JsonObject, factorization: str | Path | None
) -> tuple[Guarantee, Factorization, Execution]:
    """(the statement, the account, the execution) that the report describes."""
    accounted = Guarantee.from_description(facts["account"])
    plan = facts["sampling"]
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
    units = Units(plan["population"], facts["units"])
    sampler = sampling.UnitSampler(scheme, units.population, 0)  # nothing is drawn
    clipping = clipping_of(facts["clipping"])
    noise = NoiseStream(
        strategy,
        iterations=scheme.length,
        noise_multiplier=float(facts["noise_multiplier"]),
        clip_norm=clipping.sensitivity,
        sampling=scheme,
        secure="noise" in facts,
    )
    execution = Execution(units, sampler, clipping, noise, facts["normalizer"])
    return Guarantee.from_description(facts["guarantee"]), account, execution


def _proved(account: Factorization, progress: Report) -> _Check:
    stated = account.guarantee
    epsilon = round_up(stated.epsilon)
    words = f"({epsilon}, {round_up(stated.delta)})-DP at σ = {round_up(stated.noise_multiplier)}"
    if stated.status == "estimate":
        return _Check("account", words, "an estimate, which proves nothing", False)
    mechanism = account.mechanism
    multiplier = stated.noise_multiplier
    try:
        proof = proofs.prove(mechanism, multiplier, stated, progress=progress)
        if not _as_certain(stated, proof):  # another analysis may be
            proof = account_of(mechanism, noise_multiplier=multiplier, delta=stated.delta)
    except (FailureError, UsageError) as problem:
        return _Check("account", words, f"not proved here: {problem}", False)
    if not (proof.epsilon <= stated.epsilon and _as_certain(stated, proof)):
        words = f"{words}, {stated.status}, wrong with chance {stated.failure_probability:g}"
        return _Check("account", words, f"what can be proved here is {proof}", False)
    return _Check("account", f"{words}, proved again by {proof.method}", "", True)


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
) -> Iterator[_Check]:
    """Checks of the report's fields against what follows from the account and the execution."""
    claim = f"{facts['holds']}, pinned: {facts['pinned']}"
    only = "only a run that says so, with a secret of its own, has one"
    honest = facts["holds"] is True and facts["pinned"] is False
    yield _Check("claims a guarantee", claim, only, honest)
    try:
        statement = _alone(facts, stated, account, execution)
        if "continues" in facts:
            statement = composed([*runs_of(facts["continues"]), (statement, account)])
    except UsageError as problem:
        yield _Check("statement", str(stated), str(problem), False)
        return
    for name, value in _plain(statement.describe()).items():
        mine = facts["guarantee"][name]
        if name in ("epsilon", "delta"):  # a statement may say less than what is proved
            # the same formula on another machine: the last bits may differ
            holds = math.isfinite(value) and value <= mine * (1 + 1e-9)
            yield _Check(name, round_up(mine, 8), round_up(value, 8), holds)
        else:
            yield _alike(name, mine, value)
    public = {name: facts[name] for name in ("steps_done", "pinned", "black_box")}
    if (losses := facts.get("validation")) is not None:
        public["validation"] = losses
        spent = validation.proved(losses, stated, execution.iterations)
        words = f"{len(losses['steps'])} losses of {losses['users']} users"
        within = spent <= stated.epsilon * (1 + 1e-9)
        yield _Check("held-out users", words, f"epsilon {round_up(spent, 8)}", within)
    expected = _plain(
        privacy.report(account, execution, stated, num_params=facts["parameters"], **public)
    )
    done = facts["steps_done"]
    covered = execution.iterations
    yield _Check("steps done", f"{done}", f"at most {covered}", 0 <= done <= covered)
    parts = {*expected, "continues"}
    if "run" not in facts["units"]:
        yield _learning_rate(facts["learning_rate"], execution)
        parts.add("learning_rate")
    if facts["strategy_arrays"] is None:  # C is in a factorization file, and has the digest
        del expected["strategy_arrays"]
    surplus = sorted(facts.keys() - parts)
    yield _Check("fields", "those of a report", f"and {surplus}", not surplus)
    its, ours = (re.findall(r"\d+", version)[:3] for version in (facts["mfopt"], __version__))
    newer = [*map(int, its)] > [*map(int, ours)]
    yield _Check("mfopt", facts["mfopt"], f"{__version__}, which is older", not newer)
    said = facts["warnings"]
    if isinstance(said, list):
        said = [word for word in said if word != privacy.UNPROVED]  # it was, just now
    yield _alike("warnings", said, expected["warnings"])
    # inputs only, compared with themselves
    tables = {"sampling", "clipping", "units", "validation"} & expected.keys()
    stray = sorted(name for name in tables if not _equal(facts[name], expected[name]))
    yield _Check("inputs belong together", "units, sampling, clipping", f"not {stray}", not stray)
    for name, value in expected.items():
        if name not in {*tables, *_FIELDS[""].split(), "account", "guarantee", "warnings"}:
            yield _alike(name, facts[name], value)


def _learning_rate(stated: JsonObject, execution: Execution) -> _Check:
    """Check of the learning rate: computed where the noise decided, else an input."""
    chosen = stated["chosen"]
    value = stated["value"]
    if chosen not in privacy.CHOSEN.values():
        return _Check("learning rate", f"chosen {chosen}", "is no way to choose one", False)
    if chosen != privacy.CHOSEN[""]:
        return _Check("learning rate", f"{value:.6g}, chosen {chosen}", "", True)
    settings = {"move": stated["noise_move"], "momentum": stated["momentum"]}
    rate = privacy.fitted_rate(execution, stated["optimizer"], **settings)
    return _alike("learning rate", value, rate)


def _plain(value: object) -> Any:
    return json.loads(json.dumps(value))


def _alike(name: str, stated: object, computed: object) -> _Check:
    is_equal = _equal(stated, computed)
    shown_stated, shown_computed = (
        round_up(x) if type(x) is float else str(x) for x in (stated, computed)
    )
    if is_equal and isinstance(stated, dict | list):
        shown_stated = "as computed here"
    return _Check(name.replace("_", " "), shown_stated, shown_computed, is_equal)


def _equal(stated: object, computed: object) -> bool:
    """Return True if two JSON values are equal up to the last bits of numbers."""
    if isinstance(stated, dict) and isinstance(computed, dict):
        is_equal = stated.keys() == computed.keys()
        return is_equal and all(_equal(stated[name], computed[name]) for name in computed)
    if isinstance(stated, list) and isinstance(computed, list):
        return len(stated) == len(computed) and all(map(_equal, stated, computed))
    if type(computed) is float and not math.isfinite(computed):
        return stated is None or stated == computed  # JSON of the command line has no infinity
    if type(stated) is float and type(computed) is float:
        return math.isclose(stated, computed, rel_tol=1e-6)
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
    guarantees = [guarantee for guarantee, _ in runs]
    for guarantee in guarantees:
        for name in ("privacy_unit", "adjacency"):
            if getattr(guarantee, name) != getattr(newest, name):
                rule = f"is {getattr(guarantee, name)!r} in an earlier run, "
                rule += f"{getattr(newest, name)!r} here"
                way_out = "Statements about different neighbours do not compose."
                raise _check.reject(name, getattr(newest, name), rule, way_out)
        if guarantee.status == "estimate":
            raise _check.reject("account", str(guarantee), "is an estimate, which proves nothing")

    def total(name: str) -> float:
        exact = math.fsum(getattr(guarantee, name) for guarantee in guarantees)
        return math.nextafter(exact, math.inf) if exact > 0 else 0.0

    epsilon = total("epsilon")
    delta = min(1.0, total("delta"))
    method = f"sum of {len(runs)} runs"
    names = ("epsilon", "delta", "adjacency", "privacy_unit", "group_size")
    # no group or grid is in a statement that is the account's own
    if all(
        getattr(guarantee, name) == getattr(account.guarantee, name)
        for guarantee, account in runs
        for name in names
    ):
        with contextlib.suppress(UsageError, FailureError):  # the sum holds without
            parts = [
                phases.Phase(account.mechanism, account.noise_multiplier) for _, account in runs
            ]
            if all(part.rounds is not None for part in parts):
                composition = phases.compose(parts, delta=delta)
                if composition.status == "bound" and composition.epsilon < epsilon:
                    epsilon = composition.epsilon
                    method = f"composition of {len(runs)} runs"
    certified = any(guarantee.status == "certified" for guarantee in guarantees)
    epsilons = [{"epsilon": x.epsilon, "delta": x.delta} for x in guarantees]
    details = {name: value for name, value in newest.details.items() if name != "bracket"}
    return dataclasses.replace(
        newest,
        epsilon=epsilon,
        delta=delta,
        method=method,
        status="certified" if certified else "bound",
        failure_probability=min(1.0, total("failure_probability")),
        details=details | {"runs": epsilons},
    )
