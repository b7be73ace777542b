"""``mfopt data``: build user data stores."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import click

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt_cli import display, options
from mfopt_cli.live import of_command
from mfopt_cli.options import COUNT, option


@click.group(cls=options.Group)
def command() -> None:
    """User data: text grouped by user, as memory-mapped token stores."""


@options.command("build")
@click.argument("out", type=click.Path())
@option(
    "--data",
    str,
    "Private data: files, or an embedded corpus, `stdlib` or `stdlib-code`. Repeatable.",
    "paths",
    multiple=True,
    required=True,
)
@option(
    "--format",
    ("auto", "jsonl", "parquet", "csv"),
    "auto: by file suffix (.gz too for jsonl).",
    "kind",
)
@option("--user-column", str, "Column that names the privacy unit.", default="user")
@option("--text-column", str, "Column with the text of a record.", default="text")
@option(
    "--public",
    str,
    "Public data in the same format: the part to pretrain and train a tokenizer on.",
    multiple=True,
)
@option("--tokenizer", click.Path(), "A tokenizer.json, or the folder holding it.")
@option("--end-of-text", str, "End-of-text token. [that of the tokenizer or its model]")
@option(
    "--vocab-size", COUNT, "Train a byte-level BPE of this size on the public data. [stdlib: 2048]"
)
@option(
    "--skip-bad", bool, "Skip lines that are no record even if they are more than 1% of the file."
)
@option("--held-out-users", float, "Share of users for evaluation only.")
@option("--held-out-records", float, "Share of the other users' records for evaluation only.")
@options.seed("that of what is held out", default=0)
@option(
    "--public-overlap",
    float,
    "Most of the public tokens that may stand in copies of private records.",
    default=0.1,
)
@options.force
@options.output
def build(arguments: SimpleNamespace) -> None:
    """Build the folder OUT of token stores from text with users.

    \b
    Examples:
      mfopt data build corpus --data stdlib
      mfopt data build chats --data a.jsonl --data b.jsonl --user-column author \\
          --tokenizer gpt2/tokenizer.json --held-out-users 0.1
    """
    from mfopt.training.data import EMBEDDED
    from mfopt.training.data.build import Options
    from mfopt.training.data.build import build as build_stores
    from mfopt.training.data.builder import HoldOut
    from mfopt.training.data.stdlib import build_stdlib
    from mfopt.training.tokenizers import Tokenizer

    paths = arguments.paths
    embedded = next((path for path in paths if path in EMBEDDED), None)
    shares = {"users": 0.1, "records": 0.05} if embedded else {}
    for name in ("users", "records"):
        if (share := getattr(arguments, f"held_out_{name}")) is not None:
            shares[name] = share
    chosen = Options(
        skip_bad=arguments.skip_bad,
        hold_out=HoldOut(**shares, seed=arguments.seed),
        public_overlap=arguments.public_overlap,
    )
    if arguments.tokenizer is None and arguments.end_of_text is not None:
        rule = "goes with `tokenizer` only: one that is trained here has its own end"
        raise _check.reject("end_of_text", arguments.end_of_text, rule, "Leave it out.")
    if embedded:
        if arguments.public or arguments.tokenizer or len(paths) > 1:
            rule = f"{embedded} brings its own public part and tokenizer"
            way_out = "Leave --public, --tokenizer and other --data out."
            raise _check.reject("data", list(paths), rule, way_out)
        size = 2048 if arguments.vocab_size is None else arguments.vocab_size
        make = functools.partial(
            build_stdlib, arguments.out, public=EMBEDDED[embedded], tokenizer=size
        )
    else:
        if (arguments.tokenizer is None) == (arguments.vocab_size is None):
            rule = "give either --tokenizer, or --vocab-size and --public to train one"
            raise _check.reject("tokenizer", arguments.tokenizer, rule)
        tokenizer = arguments.vocab_size
        if tokenizer is None:
            tokenizer = Tokenizer.load(arguments.tokenizer, arguments.end_of_text)
        public = _source(arguments.public, arguments, "public") if arguments.public else None
        make = functools.partial(
            build_stores,
            _source(paths, arguments),
            arguments.out,
            tokenizer=tokenizer,
            public=public,
        )
    with of_command(arguments) as live:
        report = make(options=chosen, force=arguments.force, progress=live)
    if arguments.as_json:
        display.json_object(report)
    elif not arguments.quiet:
        _print(report)


command.add_command(build)


def _source(paths: tuple[str, ...], arguments: SimpleNamespace, name: str = "data") -> Any:
    from mfopt.training.data import sources

    for path in paths:
        if not os.path.isdir(path):  # of which the rule below says more
            _check.file(name, path)
    formats: list[Any] = [sources.JsonLines, sources.Csv, sources.Parquet]
    candidates: set[Any] = {source for source in formats if source.format == arguments.kind}
    if not candidates:
        candidates = {sources.format_of(path) for path in paths}
    if len(candidates) != 1 or None in candidates:
        rule = "has no suffix that determines one format"
        way_out = "Give --format; of a folder of texts make a file of JSON Lines first."
        raise _check.reject(name, ", ".join(paths), rule, way_out)
    (source,) = candidates
    return source(paths, arguments.user_column, arguments.text_column)


def _print(report: JsonObject) -> None:
    display.columns(
        ["part", "users", "records", "tokens"],
        [
            [name, *(f"{part[count]:,}" for count in ("users", "records", "tokens"))]
            for name, part in report["parts"].items()
        ],
    )
    if "overlap" in report:
        overlap = report["overlap"]
        display.print_text(
            f"public: {overlap['copies']:,} copies of private records among "
            f"{overlap['records']:,}, {overlap['share']:.1%} of the tokens"
        )
    for name, counts in report["reading"].items():
        for reason, count in sorted(counts["bad"].items()):
            display.print_text(f"{name}: {count:,} bad, skipped: {reason}")
        for example in counts["examples"]:
            display.print_text(f"  {example}")
