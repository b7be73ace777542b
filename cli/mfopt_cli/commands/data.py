"""``mfopt data``: build user data stores and describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.group()
def command() -> None:
    """User data: text grouped by user, as memory-mapped token stores."""


@command.command()
@click.argument("out", type=click.Path())
@click.option(
    "--data",
    "paths",
    multiple=True,
    required=True,
    help="Private data: files, one folder, or `stdlib` for the embedded corpus. Repeatable.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["auto", "jsonl", "parquet", "csv", "folder", "enron"]),
    default="auto",
    show_default=True,
    help="auto: by file suffix; a folder is read as one file or folder per user.",
)
@click.option("--user-column", default="user", show_default=True, help="Names the privacy unit.")
@click.option("--text-column", default="text", show_default=True, help="Holds one record's text.")
@click.option(
    "--records",
    type=click.Choice(["file", "line", "paragraph"]),
    default="file",
    show_default=True,
    help="What one record is, for --format folder.",
)
@click.option(
    "--public",
    multiple=True,
    help="Public data in the same format: the part to pretrain and train a tokenizer on.",
)
@click.option("--tokenizer", type=click.Path(), help="A tokenizer.json, or the folder holding it.")
@click.option("--end-of-text", default="<|endoftext|>", show_default=True, help="The end token.")
@click.option(
    "--vocab-size",
    type=int,
    help="Train a byte-level BPE of this size on the public data. [stdlib: 2048]",
)
@click.option(
    "--on-bad",
    type=click.Choice(["skip", "fail"]),
    default="skip",
    show_default=True,
    help="What to do with a line that cannot be a record: count it, or stop.",
)
@click.option("--held-out-users", type=float, help="Share of users for evaluation only.")
@click.option(
    "--held-out-records", type=float, help="Share of the other users' records for evaluation only."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is held out.")
@click.option("--drop-duplicates", is_flag=True, help="Keep one of a user's equal texts.")
@click.option("--no-end", is_flag=True, help="Put no end token behind records.")
@click.option("--force", is_flag=True, help="Replace OUT.")
@click.option("--restart", is_flag=True, help="Forget an unfinished build of OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def build(**options: Any) -> None:
    """Build the folder OUT of token stores from text with users.

    A build that was stopped goes on when the same command is given again.

    \b
    Examples:
      mfopt data build corpus --data stdlib
      mfopt data build mails --data maildir --format enron --tokenizer gpt2/
      mfopt data build chats --data a.jsonl --data b.jsonl --user-column author \\
          --tokenizer gpt2/tokenizer.json --held-out-users 0.1
    """
    from mfopt import _check
    from mfopt.training.data.build import Options
    from mfopt.training.data.build import build as build_stores
    from mfopt.training.data.builder import HoldOut
    from mfopt.training.data.stdlib import build_stdlib
    from mfopt.training.tokenizers import Tokenizer

    paths, embedded = options["paths"], "stdlib" in options["paths"]
    shares = {
        name: options[f"held_out_{name}"]
        for name in ("users", "records")
        if options[f"held_out_{name}"] is not None
    }
    defaults = {"users": 0.1, "records": 0.05} if embedded else {}
    chosen = Options(
        on_bad=options["on_bad"],
        hold_out=HoldOut(**(defaults | shares), seed=options["seed"]),
        drop_duplicates=options["drop_duplicates"],
        end=not options["no_end"],
    )
    run = {name: options[name] for name in ("force", "restart")}
    run["show_progress"] = not options["quiet"]
    if embedded:
        if options["public"] or options["tokenizer"] or len(paths) > 1:
            raise _check.reject(
                "data",
                list(paths),
                "stdlib brings its own public part and tokenizer",
                "Leave --public, --tokenizer and other --data out.",
            )
        size = options["vocab_size"] or 2048
        report = build_stdlib(options["out"], vocab_size=size, options=chosen, **run)
    else:
        if bool(options["tokenizer"]) == bool(options["vocab_size"]):
            raise _check.reject(
                "tokenizer",
                options["tokenizer"],
                "give either --tokenizer, or --vocab-size and --public to train one",
            )
        tokenizer = options["vocab_size"] or Tokenizer.load(
            options["tokenizer"], options["end_of_text"]
        )
        public = _source(options["public"], options) if options["public"] else None
        report = build_stores(
            _source(paths, options),
            options["out"],
            tokenizer=tokenizer,
            public=public,
            options=chosen,
            **run,
        )
    click.echo(
        json.dumps(report, indent=2, sort_keys=True) if options["as_json"] else _text(report)
    )


def _source(paths: tuple[str, ...], options: dict[str, Any]) -> Any:
    from mfopt import _check
    from mfopt.training.data import enron, sources

    kind = options["kind"]
    if kind == "auto":
        suffixes = {
            ".jsonl": "jsonl",
            ".ndjson": "jsonl",
            ".csv": "csv",
            ".parquet": "parquet",
            "/": "folder",
        }
        found = {"/" if Path(path).is_dir() else Path(path).suffix.lower() for path in paths}
        kinds = {suffixes.get(suffix) for suffix in found}
        if len(kinds) != 1 or None in kinds:
            raise _check.reject(
                "data", list(paths), "tells no single format by its suffix", "Give --format."
            )
        kind = kinds.pop()
    if kind in ("folder", "enron"):
        if len(paths) != 1:
            raise _check.reject("data", list(paths), f"must be one folder for --format {kind}")
        if kind == "enron":
            return enron.Enron(paths[0])
        return sources.Folder(paths[0], options["records"])
    source = {"jsonl": sources.JsonLines, "csv": sources.Csv, "parquet": sources.Parquet}[kind]
    return source(paths, options["user_column"], options["text_column"])


def _text(report: dict[str, Any]) -> str:
    lines = [f"{'part':<18}{'users':>12}{'records':>14}{'tokens':>16}"]
    for name, part in report["parts"].items():
        lines.append(f"{name:<18}{part['users']:>12,}{part['records']:>14,}{part['tokens']:>16,}")
    for name, counts in report["reading"].items():
        for kind, words in (("filtered", "left out by rule"), ("bad", "bad, skipped")):
            for reason, count in sorted(counts[kind].items()):
                lines.append(f"{name}: {count:,} {words}: {reason}")
        if counts["duplicates"]:
            lines.append(f"{name}: {counts['duplicates']:,} repeated texts of one user dropped")
        lines += [f"  {place}" for place in counts["examples"]]
    return "\n".join(lines)


@command.command()
@click.argument("path", type=click.Path())
@click.option("--plot", type=click.Path(), help="Write histograms to this PNG or PDF.")
@click.option("--verify", is_flag=True, help="Read everything and check the content digests.")
@click.option("--force", is_flag=True, help="Replace the plot.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(path: str, plot: str | None, verify: bool, force: bool, as_json: bool) -> None:
    """Records per user and tokens per record of the stores in PATH.

    These numbers come from the data without noise: no privacy guarantee covers them.

    \b
    Example:
      mfopt data stats corpus --plot corpus.png
    """
    from mfopt._files import check_output
    from mfopt.training.data import open_parts
    from mfopt.training.data import stats as statistics

    if plot is not None:
        check_output(plot, force=force, name="plot")
    stores = open_parts(path)
    if verify:
        for store in stores.values():
            store.verify()
    found = {name: statistics.summary(store) for name, store in stores.items()}
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo("\n\n".join(_describe(name, facts) for name, facts in found.items()))
    if plot is not None:
        statistics.plot(stores, plot, title=Path(path).name)


def _describe(name: str, facts: dict[str, Any]) -> str:
    lines = [
        f"{name}: {facts['users']:,} users, {facts['records']:,} records, "
        f"{facts['tokens']:,} tokens, vocabulary {facts['vocab_size']:,}",
        f"{'':<20}{'min':>9}{'p10':>9}{'median':>9}{'mean':>11}{'p90':>9}{'max':>11}",
    ]
    for label in ("records_per_user", "tokens_per_record", "tokens_per_user"):
        spread = facts[label]
        if spread:
            lines.append(
                f"{label.replace('_', ' '):<20}{spread['min']:>9,}{spread['p10']:>9,.0f}"
                f"{spread['median']:>9,.0f}{spread['mean']:>11,.1f}{spread['p90']:>9,.0f}"
                f"{spread['max']:>11,}"
            )
    return "\n".join(lines)
