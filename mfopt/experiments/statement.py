"""Privacy statement: one page about a guarantee for a reader who knows no differential privacy.

Every number is a field of the guarantee, or follows from its ε and δ by
:mod:`mfopt.accounting.tradeoff`; bounds are rounded up. Where nothing is promised the
page says so first and states no bound.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from typing import NamedTuple

from mfopt import words
from mfopt._runtime import _check
from mfopt._runtime._page import section, text, whole
from mfopt._runtime._types import JsonObject
from mfopt._version import __version__
from mfopt.accounting.tradeoff import Tradeoff
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee, questionable_delta
from mfopt.sampling import Scheme, from_description

FALSE_POSITIVE_RATES = (1e-4, 1e-3, 1e-2, 0.1)
_ATTACKER = "What an attacker can do at most"
_NEIGHBOURS = {
    "add-remove": "the second one lacks the data of one {unit}",
    "zero-out": "in the second one, what one {unit} contributes is replaced by zeros: whether the "
    "{unit} took part at all is not protected",
    "replace": "in the second one, the data of one {unit} is replaced by any other data",
}
_ENTRIES = (
    " That is one entry of the data, not a person. Who has several is protected less: where 1% are "
    "wrongly named, who has two is rightly named {rate}."
)
_MAKER = " What counts as one is the word of whoever made the mechanism; no proof sees it."
_OF_A_FILE = "This page is about a mechanism, not about a release: nothing need have been run yet. "
_AS_STATED = "**Its ε and δ are as the file states them, and were not proved on this machine.** "
_SIGNATURE = (
    "not checked: this program checks none. Without one anybody can have written what this page is "
    "made from. One by its maker is checked with the maker's public key: "
    "`openssl pkeyutl -verify -rawin -pubin -inkey KEY -in FILE -sigfile SIGNATURE`"
)
_FAR_BELOW = 0.1  # from which on a number is not far below 1
_TRUSTED = (
    "**The program.** It executes what is described here, and nothing else.",
    "**Noise.** In every {step} noise of the stated size is added, also if nobody takes part, and "
    "what is divided by is a public number.",
    "**Clipping.** Before noise is added, what each {sampled} contributes is scaled down to a "
    "fixed size, the clip norm. If a whole batch is scaled instead, nothing here holds.",
    "**Participation.** Who takes part in which {step} is decided in exactly this way (for "
    "specialists): {sampling}. Another way is not covered.",
    "**Keys.** The random keys of the noise, and of the sampling if it is random, stay secret. Who "
    "knows them can subtract the noise.",
    "**The data.** A person is protected as stated only if one {unit} holds all that the person "
    "contributed.",
    "**Arithmetic.** The proof is about exact numbers, and a computer rounds. {rounding}",
)
_NOT_COVERED = (
    "General findings, such as that smokers fall ill more often: they may concern a person whether "
    "or not the data of that {unit} was used.",
    "Other releases from the same data (models, statistics, reports): the losses add up.",
    "Choices made by looking at the private data: settings, when to stop, which result to publish.",
    "The data itself, saved states that hold keys or data, and logs of values without noise: who "
    "can read them needs no attack.",
    "The exact number of {sampled}s, where it is told, and how long the computation took.",
    "The law: whether what is released counts as anonymous is decided by whoever answers for it.",
)

# a paragraph, or the items of a list
Part = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Statement:
    """One page.

    Attributes:
      title: heading of the page.
      holds: whether anything is promised.
      sections: heading -> paragraphs and lists, with ``**`` and backquotes as the only markup.
      rates: largest true positive rate of any attacker at each of ``FALSE_POSITIVE_RATES``; empty
        where nothing is promised.
      facts: JSON-able description: the numbers of the page.
    """

    title: str
    holds: bool
    sections: dict[str, tuple[Part, ...]]
    rates: list[float]
    facts: JsonObject

    def markdown(self) -> str:
        """The page as Markdown."""
        blocks = [f"# {self.title}"]
        for heading, parts in self.sections.items():
            blocks.append(f"## {heading}")
            for part in parts:
                blocks.append(part if isinstance(part, str) else "* " + "\n* ".join(part))
            if heading == _ATTACKER and self.rates:
                names, *rows = self._table()
                cells = [names, ("---", "---"), *rows]
                blocks.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
        return "\n\n".join(blocks) + "\n"

    def html(self) -> str:
        """The page as HTML, whole in itself."""
        sections = []
        for heading, parts in self.sections.items():
            body = "".join(
                f"<p>{_marked(part)}</p>"
                if isinstance(part, str)
                else f"<ul>{''.join(f'<li>{_marked(item)}</li>' for item in part)}</ul>"
                for part in parts
            )
            if heading == _ATTACKER and self.rates:
                rows = "".join(
                    f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
                    for row in self._table()
                )
                body += f"<table>{rows}</table>"
            sections.append(section(heading, body))
        return whole(self.title, sections)

    def _table(self) -> list[tuple[str, str]]:
        """Rows of the attacker's rates, names first."""
        pairs = zip(FALSE_POSITIVE_RATES, self.rates, strict=True)
        bounds = [(_percent(alpha), _at_most(rate)) for alpha, rate in pairs]
        return [("wrongly named, of those not used", "rightly named, of those used"), *bounds]


def of_factorization(factorization: Factorization, units: int | None = None) -> Statement:
    """Statement about a file: what a run of it protects.

    Args:
      factorization: C, σ, sampling and guarantee.
      units: number of units in the data, to hold δ against; None where it is not known.
    """
    _check.kind("factorization", factorization, Factorization)
    begins = _OF_A_FILE + _AS_STATED
    proof = "This machine proved nothing of it: `mfopt certify` does, for the file. As stated,"
    if factorization.proved_here:
        begins = _OF_A_FILE
        proof = (
            "mfopt proved it on the machine that wrote this page, by computation and without "
            "any of the data; no person or body did. It is"
        )
    steps = (
        f"The statement is about at most {factorization.iterations:,} "
        f"{factorization.sampling.step_name}s. A file does not tell whether any took place."
    )
    facts = {"digest": factorization.digest, "proved_here": factorization.proved_here}
    subject = _Subject(factorization.sampling, proof, steps, facts, begins=begins)
    return _statement(_without_details(factorization.guarantee), units, subject)


def of_report(report: JsonObject, units: int | None = None) -> Statement:
    """Statement about a run of the trainer.

    Args:
      report: privacy report, as :func:`mfopt.training.verification.read` gives it. Its numbers are
        not computed again here.
      units: number of protected units; by default the number of sampled units in the report.

    Raises:
      UsageError: a field is missing or of another type.
    """
    try:
        guarantee = Guarantee.from_description(report["guarantee"])
        sampled = _check.word("unit", report["units"]["unit"])
        population = _check.integer("population", report["sampling"]["population"])
        clip_norm = _check.positive("clip_norm", report["clipping"]["clip_norm"])
        done = _check.integer("steps_done", report["steps_done"], at_least=0)
        covered = _check.integer("iterations_covered", report["iterations_covered"])
        sampling = from_description(report["sampling"]["scheme"])
        executed = (
            f"Steps taken: {done:,}, of the {covered:,} that the statement covers.",
            f"Data: {population:,} {sampled}s, of which every step draws some.",
            f"Clip norm {clip_norm:g}; noise multiplier "
            f"{words.round_up(guarantee.noise_multiplier)}.",
            *(f"Warning: {_check.printable(str(warning))}." for warning in report["warnings"]),
        )
        facts = {"digest": str(report["mechanism_digest"]), "steps_done": done}
        pinned = report["pinned"] is not False
    except (KeyError, TypeError, AttributeError) as problem:
        rule = f"is not whole ({type(problem).__name__}: {problem})"
        raise _check.reject("report", "", rule, "Give one that `mfopt train` wrote.") from None
    proof = (
        "These numbers are those of the run's own report. `mfopt verify` computes them again. "
        "That the run did what its report says is the word of whoever ran it. As stated,"
    )
    return _statement(
        _without_details(guarantee, "epsilon_before_grid"),
        population if units is None else units,
        _Subject(sampling, proof, executed, facts, sampled, pinned),
    )


def _without_details(guarantee: Guarantee, *kept: str) -> Guarantee:
    """The guarantee by ε and δ: bounds could follow the other details, which a file says."""
    details = {name: value for name, value in guarantee.details.items() if name in kept}
    return dataclasses.replace(guarantee, details=details)


class _Subject(NamedTuple):
    """What a statement is about, in words.

    Attributes:
      sampling: how units take part.
      proof: who proved the guarantee; its status follows.
      executed: what took place.
      facts: numbers beside those of the guarantee.
      sampled: name of what is drawn into batches; the privacy unit where empty.
      pinned: whether the seed was public.
      begins: what the reader has to know first.
    """

    sampling: Scheme
    proof: str
    executed: Part
    facts: JsonObject
    sampled: str = ""
    pinned: bool = False
    begins: str = ""


def _statement(guarantee: Guarantee, units: int | None, subject: _Subject) -> Statement:
    unit, group = guarantee.privacy_unit, guarantee.group_size
    protected = unit if group == 1 else f"group of up to {group} {unit}s"
    refusal = ""
    if subject.pinned:
        refusal = (
            "The random numbers of the run were chosen beforehand (a pinned seed). Who knows them "
            "can subtract the noise."
        )
    elif guarantee.status == "estimate":
        refusal = "The numbers are an estimate, and an estimate proves nothing."
    elif not math.isfinite(guarantee.epsilon) or guarantee.delta >= 1:
        refusal = "An infinite ε, or a δ of 1, allows everything."
    rates: list[float] = []
    attacker: tuple[Part, ...] = (f"Anything. {refusal}",)
    entries = ""
    if not refusal:
        curve = Tradeoff([guarantee])
        rates = curve.true_positive_rate(FALSE_POSITIVE_RATES).tolist()
        attacker = _attacker(protected, curve.advantage)
        if protected in ("example", "record"):
            entries = _ENTRIES.format(rate=_of_two(guarantee))
    units = _check.optional(_check.integer, "units", units)
    doubt = questionable_delta(guarantee.delta, units)
    rounding = "A specialized attack could use that; it is not counted here."
    if "epsilon_before_grid" in guarantee.details:
        rounding = "Noise was drawn on a grid to close this; ε and δ include what that costs."
    names = {
        "unit": protected,
        "sampled": subject.sampled or unit,
        "sampling": subject.sampling.words(),
        "step": subject.sampling.step_name,
        "rounding": rounding,
    }
    failure = f"Failure probability of the proof: {guarantee.failure_probability:.2g}."
    title = "No privacy is promised" if refusal else f"Privacy statement for one {protected}"
    numbers = {
        **guarantee.describe(),
        **subject.facts,
        "issued": _date(),
        "signature": _SIGNATURE,
        "units": units,
        "warning": doubt or None,
        "false_positive_rates": FALSE_POSITIVE_RATES[: len(rates)],
        "true_positive_rates": rates,
        "holds": not refusal,
        "title": title,
    }
    sections: dict[str, tuple[Part, ...]] = {
        "In short": (
            subject.begins + _in_short(protected, refusal, rates),
            *((f"**Warning:** {doubt}.",) if doubt else ()),
        ),
        "Whom it protects": (
            f"One {protected}.{entries}{_MAKER}{subject.sampling.condition(unit)} Two data sets "
            "are compared: the real one, and a neighbour; "
            f"{_NEIGHBOURS[guarantee.adjacency].format(unit=protected)} "
            f"({guarantee.adjacency} adjacency). The promise limits how well anybody can tell from "
            "what is released which of the two is the real one.",
        ),
        "How strong it is": _strength(guarantee, unit, units),
        _ATTACKER: attacker,
        "What was proved": (
            f"{subject.proof} {guarantee.status}: {words.STATUS[guarantee.status]}. Method (for "
            f"specialists): {guarantee.method}. {failure}",
        ),
        "What was executed": (subject.executed,),
        "What is trusted": (tuple(item.format(**names) for item in _TRUSTED),),
        "What is not covered": (tuple(item.format(**names) for item in _NOT_COVERED),),
        "Record": (
            f"Mechanism {numbers['digest']}. Issued {numbers['issued']} (UTC) by mfopt "
            f"{__version__}.",
            f"Signature: {_SIGNATURE}.",
        ),
    }
    return Statement(title, not refusal, sections, rates, numbers)


def _date() -> str:
    """Today in UTC, or the day of SOURCE_DATE_EPOCH in the environment: for reproducible pages."""
    stamp = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(int(stamp) if stamp else None))
    except (ValueError, OverflowError, OSError):
        rule = "must be whole seconds since 1970"
        raise _check.reject("SOURCE_DATE_EPOCH", stamp, rule) from None


def _of_two(guarantee: Guarantee) -> str:
    """How many of two units together are rightly named, by group privacy of (ε, δ) alone."""
    epsilon = min(guarantee.epsilon, 350.0)  # no less is a limit in floats
    delta = min((1 + math.exp(epsilon)) * guarantee.delta, 1.0)
    both = dataclasses.replace(guarantee, epsilon=2 * epsilon, delta=delta, details={})
    return _at_most(float(Tradeoff([both]).true_positive_rate(0.01)))


def _in_short(protected: str, refusal: str, rates: list[float]) -> str:
    if refusal:
        return f"**Nothing is promised.** {refusal} Numbers below are no protection."
    rate = rates[FALSE_POSITIVE_RATES.index(0.01)]
    sentence = (
        f"From what is released an attacker tries to tell whether the data of one {protected} was "
        "used. One who wrongly names 1% of those whose data was not used rightly "
        f"names {_at_most(rate)} of those whose data was used. A blind guess names "
        "1% of either."
    )
    if rate < 0.5:
        return sentence
    return (
        f"{sentence} **That is a weak limit: it does not rule out that more than half are found.**"
    )


def _strength(guarantee: Guarantee, unit: str, units: int | None) -> tuple[Part, ...]:
    epsilon, delta = guarantee.epsilon, guarantee.delta
    factor = math.exp(min(epsilon, 700))
    published = f" The number of {unit}s was not stated (`--population`): whether it is, is open."
    if units is not None:
        published = f" With {units:,} {unit}s it is {delta * units:.2g}"
        published += ", which is not far below." if delta * units >= _FAR_BELOW else "."
    return (
        (
            f"ε = {words.round_up(epsilon)}: whatever is released is, but for a probability of "
            f"δ, at most {_times(factor)} times (e to the power ε) as likely with one of the two "
            "data sets as with the other, and the odds of what is suspected beforehand grow at "
            "most by that factor. 0 would be perfect; the smaller, the stronger. Ponomareva et al. "
            "(2023, How to DP-fy ML) call 1 or less strong, 10 or less reasonable, more weak: a "
            "convention of researchers, no judgement of law or ethics. The table below is what it "
            "allows.",
            f"δ = {words.round_up(delta)}: with this probability nothing is promised. A program "
            "that publishes the data of everybody with this probability is within it, and so is "
            f"one that publishes each {unit} with this probability, on average δ times their "
            f"number. That number must be far below 1.{published}",
        ),
    )


def _attacker(protected: str, advantage: float) -> tuple[Part, ...]:
    return (
        "An attacker sees everything that is released (all noised sums, and what is computed from "
        "these alone, such as a model), knows all settings and the data of everybody else, and "
        f"decides whether the data of one {protected} was used. If what is said to be proved and "
        "trusted below is true, no attack is better than the table, which includes δ; the same "
        "limits any other conclusion that depends on this data alone, such as a diagnosis. A blind "
        "guess names the same share of both. Where used and not used are equally likely "
        "beforehand, the attacker is right "
        f"{_at_most((1 + advantage) / 2)} of the time.",
    )


def _times(factor: float) -> str:
    return words.round_up(factor, 3) if factor < 100 else f"{math.ceil(min(factor, 1e15)):,}"


def _at_most(share: float) -> str:
    """A bound of a share, rounded up."""
    shown = _percent(share)
    return "up to 100% (no limit)" if shown == "100%" else f"at most {shown}"


def _percent(share: float) -> str:
    return f"{words.round_up(100 * share, 3)}%"


def _marked(paragraph: str) -> str:
    """HTML of a paragraph."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text(paragraph))
