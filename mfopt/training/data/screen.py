"""What a run reads of its data: whether it is there, and a few lines for its owner.

The numbers are computed from the data without noise, and as private as the data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mfopt._runtime import _check
from mfopt.training.config import TrainConfig
from mfopt.training.data import EMBEDDED
from mfopt.training.data.build import read_report, reasons
from mfopt.training.data.stdlib import lines_of
from mfopt.training.data.store import TokenStore, open_parts


def check(config: TrainConfig) -> None:
    """Refuse data that is not there, or without a part that the settings need; JAX stays out."""
    if config.data in EMBEDDED:  # a file of that name can be given as ./stdlib
        return
    if Path(config.data).is_file():
        lines_of(config.data)
        return
    parts = open_parts(config.data, "data")
    for name in ("pretrain_steps", "patience"):
        validated = name == "patience" and config.validation_bound
        if getattr(config, name) and "public" not in parts and not validated:
            way_out = "Build it with a public part, or pretrain elsewhere and give `model`."
            rule = "the data has no public part"
            raise _check.reject(name, getattr(config, name), rule, way_out)


def lines(parts: dict[str, TokenStore], folder: Path, config: TrainConfig) -> list[str]:
    """Lines kept and skipped of each text, and users, records and tokens of each part.

    Args:
        parts: the stores, with whole records.
        folder: where they are; what was skipped stands in its ``report.json``.
        config: settings that decide what is read.
    """
    shown = []
    for name, counts in read_report(folder).get("reading", {}).items():
        text = f"text of {name}: {counts['records']:,} lines or records kept"
        if bad := counts["bad"]:
            text += f"; {sum(bad.values()):,} skipped ({reasons(bad)})"
        shown.append(text)
    most_rows = config.records_per_user
    for name, store in parts.items():
        sizes = store.record_lengths()
        text = (
            f"{name}: {np.count_nonzero(store.records_per_user()):,} users, "
            f"{store.num_records:,} records, {store.num_tokens:,} tokens"
        )
        over = np.maximum(sizes - config.length, 0).sum()
        rows = store.in_chunks(config.length) if over and config.in_chunks else store
        count = np.count_nonzero(sizes > config.length)
        if not over:
            text += ", all read"
        elif config.in_chunks:
            text += f", all read in {rows.num_records:,} rows of at most {config.length}"
            text += f" ({count:,} records are cut into several)"
        else:
            text += f"; {over:,} ({over / store.num_tokens:.0%}) are never read: {count:,} records"
            text += f" have more than {config.length} tokens"
        if name != "train":
            if rows.num_records > config.evaluate_records:
                text += f"; an evaluation reads {config.evaluate_records:,} of these rows"
        elif rows.records_per_user().max(initial=0) > most_rows:
            drawn = "once, for all steps" if config.algorithm in ("els", "group") else "for a step"
            text += f"; of users with more than {most_rows} rows {most_rows} are drawn {drawn}"
        shown.append(text)
    return shown
