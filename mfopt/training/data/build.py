"""Build of token stores from a source of text: read, tokenize, group by user, split.

The folder holds the tokenizer, ``report.json`` and one store per part of ``PARTS``. It appears
whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mfopt._runtime import _check, _files
from mfopt._runtime._types import JsonObject
from mfopt._version import __version__
from mfopt.errors import FailureError
from mfopt.progress import Progress, Report, silent
from mfopt.training.data import overlap
from mfopt.training.data.builder import HoldOut, TokenStoreBuilder
from mfopt.training.data.sources import CHAT, Item, Source
from mfopt.training.data.store import open_parts
from mfopt.training.tokenizers import FILE_NAME, Content, Tokenizer

REPORT = "report.json"
_BATCH_TEXTS = 256
_BATCH_CHARACTERS = 1 << 20
_EXAMPLES = 10
_FEW = 0.01  # of all lines


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of ``mfopt data build``.

    Args:
      skip_bad: skip any number of lines that are no record; up to a hundredth of all always are.
      hold_out, public_overlap: see :class:`HoldOut`; largest share of public tokens in copies of
        private records.
    """

    skip_bad: bool = False
    hold_out: HoldOut = dataclasses.field(default_factory=HoldOut)
    public_overlap: float = overlap.MOST

    def __post_init__(self) -> None:
        _check.probability("public_overlap", self.public_overlap, closed=True)


def build(
    source: Source,
    out: str | Path,
    *,
    tokenizer: Tokenizer | int,
    public: Source | None = None,
    options: Options | None = None,
    force: bool = False,
    reuse: bool = False,
    progress: Report = silent,
) -> JsonObject:
    """Build the stores of ``source`` (private) and ``public`` in the folder ``out``.

    Args:
        source, out: the private data, whose users are the privacy units, and the folder to make.
        tokenizer: a tokenizer, or the vocabulary size of a byte-level BPE to be trained on
            ``public``, with the tokens of ChatML where there are chats. It is never trained on
            ``source``.
        public, options: public text, which becomes the part ``public``; see :class:`Options`.
        force: replace ``out`` where it exists.
        reuse: keep an ``out`` of the same text, whatever the versions of mfopt and of the Python
            whose library it holds; refused is one of other text.
        progress: callback for what has been read and grouped.

    Returns:
        The report, as in ``report.json``: counts of records, of bad and left-out items by reason
        (with the places of the first ten bad ones), and sizes of the parts.

    Raises:
        UsageError: ``out`` exists; too many bad lines; public text that holds private records.
        FailureError: no record is left.
    """
    options = options or Options()
    target = _files.check_output(out, force=force or reuse, name="out", folder=True)
    if target.exists() and not (target / REPORT).is_file():
        raise _check.reject("out", str(out), "is not a built data folder, so it is not replaced")
    if public is None and not isinstance(tokenizer, Tokenizer):
        rule = "a tokenizer is part of the released model and is not trained on private data"
        way_out = "Give a tokenizer.json, or public text to train on."
        raise _check.reject("tokenizer", tokenizer, rule, way_out)
    plan: JsonObject = {
        "mfopt": __version__,
        "source": source.describe(),
        "public": public and public.describe(),
        "tokenizer": tokenizer.digest if isinstance(tokenizer, Tokenizer) else tokenizer,
        # what is skipped follows from the source
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "skip_bad"},
    }
    if reuse and target.exists():
        earlier = read_report(target)
        for name in ("source", "public"):
            if _text(earlier.get("plan", {}).get(name)) != _text(plan[name]):
                rule = f"was built from another {name} text than is given now"
                raise _check.reject("data", str(out), rule, "Resume with what it was made of.")
        return earlier
    with _files.new_folder(target) as folder:
        os.chmod(folder, 0o700)  # private text: its owner's alone
        if not isinstance(tokenizer, Tokenizer):
            assert public is not None
            chats = CHAT in (source.columns, public.columns)
            tokenizer = Tokenizer.train(_texts(public, progress), tokenizer, chats=chats)
        report = {"plan": plan, "tokenizer_digest": tokenizer.digest}
        texts = {"train": (source, options)}
        if public is not None:
            texts["public"] = (public, dataclasses.replace(options, hold_out=HoldOut()))
        report |= _written(folder, texts, tokenizer, plan, progress)
        tokenizer.save(folder / FILE_NAME)
        _files.write(folder / REPORT, report)
    return report


def _written(
    folder: Path,
    texts: Mapping[str, tuple[Source, Options]],
    tokenizer: Tokenizer,
    plan: JsonObject,
    progress: Report,
) -> JsonObject:
    """Write the stores of the texts, by part; what the report says of them."""
    reading = {}
    for name, (origin, chosen) in texts.items():
        with TokenStoreBuilder(folder, tokenizer.vocab_size, context=origin.context) as builder:
            counts = _fill(builder, origin, tokenizer, chosen, name, progress)
            if not counts["records"]:
                left_out = reasons(counts["bad"])
                why = f"no record can be used for the part {name} ({left_out or 'there is none'}); "
                why += "nothing written. Columns are `user` and `text`, or as "
                why += "`mfopt data build` is told by --user-column and --text-column."
                raise FailureError(why)
            metadata = {
                "mfopt": __version__,
                "source": plan["public" if name == "public" else "source"],
                "tokenizer_digest": tokenizer.digest,
                "end_of_text": tokenizer.end_of_text,
                "end_id": tokenizer.end_id,
                "hold_out": dataclasses.asdict(chosen.hold_out),
                "public": name == "public",
            }
            reading[name] = counts
            builder.finish(folder, metadata, name=name, hold_out=chosen.hold_out, progress=progress)
    stores = open_parts(folder)
    parts = {
        name: {
            "users": store.num_users,
            "records": store.num_records,
            "tokens": store.num_tokens,
            "content_digest": store.metadata["content_digest"],
        }
        for name, store in stores.items()
    }
    written: JsonObject = {"reading": reading, "parts": parts}
    if "public" in texts:
        private = [store for name, store in stores.items() if name != "public"]
        progress(Progress("comparing the public part with the private ones"))
        written["overlap"] = overlap.refuse_copies(
            stores["public"], private, texts["public"][1].public_overlap
        )
    return written


def read_report(folder: Path) -> JsonObject:
    """The report of a build; empty where there is none, or a damaged one."""
    try:
        report: JsonObject = json.loads((folder / REPORT).read_text("utf-8"))
        for counts in report["reading"].values():
            sum(counts["bad"].values(), counts["records"])
        for description in map(report["plan"].get, ("source", "public")):
            _text(description)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return report


def _text(description: JsonObject | None) -> object:
    """Return what tells a source's text from another, under any name and version of Python."""
    facts = description or {}
    files = facts.get("files")
    if isinstance(files, list):
        return [file.get("sha256") for file in files]
    return facts.get("part")


def _texts(public: Source, progress: Report) -> Iterator[str]:
    """The texts of the public part, for a tokenizer."""
    total = public.total()
    for item in public.read():
        progress(Progress("reading for the tokenizer", item.done, total, "B"))
        if item.text is not None:
            yield _joined(item.text)


def _fill(
    builder: TokenStoreBuilder,
    source: Source,
    tokenizer: Tokenizer,
    options: Options,
    name: str,
    progress: Report,
) -> JsonObject:
    """Read ``source`` into the builder; how many records came, and what is bad in the rest."""
    bad: dict[str, int] = {}
    examples: list[str] = []
    pending: list[Item] = []

    def add() -> None:
        texts = [item.text or "" for item in pending]
        builder.add([item.user or "" for item in pending], tokenizer.encode_batch(texts))
        pending.clear()

    characters = 0
    total = source.total()
    for item in source.read():
        progress(Progress(f"reading {name}", item.done, total, "B"))
        if item.reason is None:
            pending.append(item)
            characters += len(_joined(item.text or ""))
        else:
            bad[item.reason] = bad.get(item.reason, 0) + 1
            if len(examples) < _EXAMPLES:
                examples.append(f"{item.where}: {item.reason}")
        if len(pending) >= _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
            add()
            characters = 0
    add()
    skipped = sum(bad.values())
    records = builder.num_records
    if not options.skip_bad and records and skipped > _FEW * (records + skipped):
        sample = ", ".join(examples[:3])
        rule = f"{skipped:,} of {records + skipped:,} lines are no record: {reasons(bad)}; first "
        way_out = "Mend them, or skip them all: `skip_bad`."
        raise _check.reject("data", f"part {name}", f"{rule}{sample}", way_out)
    return {"bad": bad, "examples": examples, "records": records}


def _joined(content: Content) -> str:
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


def reasons(counts: Mapping[str, int]) -> str:
    """Counts by reason, in words."""
    return ", ".join(f"{count:,} × {reason}" for reason, count in sorted(counts.items()))
