"""``mfopt data``: build user data stores and describe them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from mfopt._runtime import _check
from mfopt_cli import display, options
from mfopt_cli.live import Live


@click.group(cls=options.Group)
def command() -> None:
    """User data: text grouped by user, as memory-mapped token stores."""


@command.command()
@click.argument("out", type=click.Path())
@options.option(
    "--data",
    "paths",
    multiple=True,
    required=True,
    help="Private data: files, one folder, or an embedded corpus, `stdlib` or `stdlib-code`. "
    "Repeatable.",
)
@options.option(
    "--format",
    "kind",
    type=click.Choice(["auto", "jsonl", "parquet", "csv", "huggingface", "folder", "enron"]),
    default="auto",
    show_default=True,
    help="auto: by file suffix (.gz too for jsonl); a folder as `datasets` saves it, or else one "
    "file or folder per user.",
)
@options.option(
    "--user-column", default="user", show_default=True, help="Column that names the privacy unit."
)
@options.option(
    "--text-column", default="text", show_default=True, help="Column with the text of a record."
)
@options.option(
    "--records",
    type=click.Choice(["file", "line", "paragraph"]),
    default="file",
    show_default=True,
    help="Unit of one record, for --format folder.",
)
@options.option(
    "--public",
    multiple=True,
    help="Public data in the same format: the part to pretrain and train a tokenizer on.",
)
@options.option(
    "--tokenizer", type=click.Path(), help="A tokenizer.json, or the folder holding it."
)
@options.option(
    "--end-of-text", default="<|endoftext|>", show_default=True, help="End-of-text token."
)
@options.option(
    "--vocab-size",
    type=options.COUNT,
    help="Train a byte-level BPE of this size on the public data. [stdlib: 2048]",
)
@options.option(
    "--on-bad",
    type=click.Choice(["skip", "fail"]),
    default="skip",
    show_default=True,
    help="Handling of a line that is not a valid record: count it, or stop.",
)
@options.option("--held-out-users", type=float, help="Share of users for evaluation only.")
@options.option(
    "--held-out-records", type=float, help="Share of the other users' records for evaluation only."
)
@options.seed("that of what is held out", default=0, show_default=True)
@options.option("--drop-duplicates", is_flag=True, help="Drop repeated texts of the same user.")
@options.option(
    "--public-overlap",
    default=0.1,
    show_default=True,
    help="Most of the public tokens that may stand in copies of private records.",
)
@options.option("--no-end", is_flag=True, help="Append no end-of-text token to records.")
@options.force
@options.option("--restart", is_flag=True, help="Discard an unfinished build of OUT.")
@options.output
def build(**given: Any) -> None:
    """Build the folder OUT of token stores from text with users.

    A stopped build resumes when the same command is given again.

    \b
    Examples:
      mfopt data build corpus --data stdlib
      mfopt data build mails --data maildir --format enron --tokenizer gpt2/
      mfopt data build chats --data a.jsonl --data b.jsonl --user-column author \\
          --tokenizer gpt2/tokenizer.json --held-out-users 0.1
    """
    from mfopt.training.data import EMBEDDED
    from mfopt.training.data.build import Options
    from mfopt.training.data.build import build as build_stores
    from mfopt.training.data.builder import HoldOut
    from mfopt.training.data.stdlib import build_stdlib
    from mfopt.training.tokenizers import END_OF_TEXT, Tokenizer

    paths = given["paths"]
    embedded = next((path for path in paths if path in EMBEDDED), None)
    shares = {
        name: given[f"held_out_{name}"]
        for name in ("users", "records")
        if given[f"held_out_{name}"] is not None
    }
    defaults = {"users": 0.1, "records": 0.05} if embedded else {}
    chosen = Options(
        on_bad=given["on_bad"],
        hold_out=HoldOut(**(defaults | shares), seed=given["seed"]),
        drop_duplicates=given["drop_duplicates"],
        end=not given["no_end"],
        public_overlap=given["public_overlap"],
    )
    if given["tokenizer"] is None and given["end_of_text"] != END_OF_TEXT:
        rule = "goes with `tokenizer` only: one that is trained here has its own end"
        raise _check.reject("end_of_text", given["end_of_text"], rule, "Leave it out.")
    if embedded:
        if given["public"] or given["tokenizer"] or len(paths) > 1:
            raise _check.reject(
                "data",
                list(paths),
                f"{embedded} brings its own public part and tokenizer",
                "Leave --public, --tokenizer and other --data out.",
            )
        size = 2048 if given["vocab_size"] is None else given["vocab_size"]
        make = functools.partial(
            build_stdlib, given["out"], public=EMBEDDED[embedded], vocab_size=size
        )
    else:
        if (given["tokenizer"] is None) == (given["vocab_size"] is None):
            raise _check.reject(
                "tokenizer",
                given["tokenizer"],
                "give either --tokenizer, or --vocab-size and --public to train one",
            )
        tokenizer = given["vocab_size"]
        if tokenizer is None:
            tokenizer = Tokenizer.load(given["tokenizer"], given["end_of_text"])
        public = _source(given["public"], given, "public") if given["public"] else None
        make = functools.partial(
            build_stores, _source(paths, given), given["out"], tokenizer=tokenizer, public=public
        )
    with Live(not given["quiet"] and not given["as_json"]) as live:
        report = make(options=chosen, force=given["force"], restart=given["restart"], progress=live)
    if given["as_json"]:
        display.json_object(report)
    elif not given["quiet"]:
        _print(report)


def _source(paths: tuple[str, ...], given: dict[str, Any], name: str = "data") -> Any:
    from mfopt.training.data import enron, sources

    kind = given["kind"]
    if kind == "auto":
        suffixes = {
            ".jsonl": "jsonl",
            ".ndjson": "jsonl",
            ".csv": "csv",
            ".parquet": "parquet",
            "/": "folder",
        }
        plain = [Path(path.lower().removesuffix(".gz")) for path in paths]
        both = zip(paths, plain, strict=True)
        found = {"/" if Path(path).is_dir() else name.suffix for path, name in both}
        kinds = {suffixes.get(suffix) for suffix in found}
        if len(kinds) != 1 or None in kinds:
            raise _check.reject(
                name, list(paths), "has no suffix that determines one format", "Give --format."
            )
        kind = kinds.pop()
        saved = ("state.json", "dataset_dict.json")
        if kind == "folder" and any((Path(paths[0]) / name).is_file() for name in saved):
            kind = "huggingface"
    if kind in ("folder", "enron"):
        _leave_default(
            given, f"has no effect with --format {kind}", user_column="user", text_column="text"
        )
    if kind != "folder":
        _leave_default(given, "has an effect only with --format folder", records="file")
    if kind in ("folder", "enron", "huggingface"):
        if len(paths) != 1:
            raise _check.reject(name, list(paths), f"must be one folder for --format {kind}")
        if kind == "enron":
            return enron.Enron(paths[0])
        if kind == "huggingface":
            return sources.HuggingFace(paths[0], given["user_column"], given["text_column"])
        return sources.Folder(paths[0], given["records"])
    source = {"jsonl": sources.JsonLines, "csv": sources.Csv, "parquet": sources.Parquet}[kind]
    return source(paths, given["user_column"], given["text_column"])


def _leave_default(given: dict[str, Any], rule: str, **defaults: str) -> None:
    for name, default in defaults.items():
        if given[name] != default:
            raise _check.reject(name, given[name], rule, "Leave it out.")


def _print(report: dict[str, Any]) -> None:
    display.columns(
        ["part", "users", "records", "tokens"],
        [
            [name, *(f"{part[count]:,}" for count in ("users", "records", "tokens"))]
            for name, part in report["parts"].items()
        ],
    )
    if "overlap" in report:
        found = report["overlap"]
        display.print_text(
            f"public: {found['exact']:,} exact and {found['near']:,} near copies of private "
            f"records among {found['records']:,}, {found['share']:.1%} of the tokens"
        )
    for name, counts in report["reading"].items():
        for kind, words in (("filtered", "left out by rule"), ("bad", "bad, skipped")):
            for reason, count in sorted(counts[kind].items()):
                display.print_text(f"{name}: {count:,} {words}: {reason}")
        if counts["duplicates"]:
            display.print_text(
                f"{name}: {counts['duplicates']:,} repeated texts of one user dropped"
            )
        for place in counts["examples"]:
            display.print_text(f"  {place}")


@command.command()
@click.argument("path", type=click.Path())
@options.option("--plot", type=click.Path(), help="Write histograms to this PNG, SVG or PDF.")
@options.option("--verify", is_flag=True, help="Read everything and check the content digests.")
@options.force_of("plot")
@options.json_flag
def stats(path: str, plot: str | None, verify: bool, force: bool, as_json: bool) -> None:
    """Records per user and tokens per record of the stores in PATH.

    These numbers come from the data without noise: no privacy guarantee covers them.

    \b
    Example:
      mfopt data stats corpus --plot corpus.png
    """
    from mfopt._runtime._files import check_output
    from mfopt.training.data import open_parts
    from mfopt.training.data import stats as statistics

    if plot is not None:
        check_output(plot, force=force, name="plot", suffixes=(".png", ".svg", ".pdf"))
    stores = open_parts(path)
    if verify:
        for store in stores.values():
            store.verify()
    found = {name: statistics.summary(store) for name, store in stores.items()}
    if as_json:
        display.json_object(found)
    else:
        for name, facts in found.items():
            _describe(name, facts)
    if plot is not None:
        statistics.plot(stores, plot, title=Path(path).name)


def _describe(name: str, facts: dict[str, Any]) -> None:
    display.print_text(
        f"{name}: {facts['users']:,} users, {facts['records']:,} records, "
        f"{facts['tokens']:,} tokens, vocabulary {facts['vocab_size']:,}"
    )
    kinds = {"min": ",", "p10": ",.0f", "median": ",.0f", "mean": ",.1f", "p90": ",.0f", "max": ","}
    rows = [
        [label.replace("_", " "), *(format(facts[label][key], kind) for key, kind in kinds.items())]
        for label in ("records_per_user", "tokens_per_record", "tokens_per_user")
        if facts[label]
    ]
    display.columns(["", *kinds], rows)
