"""Sizes of a corpus's users, and what each rule of choosing records takes of them."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.runs.training import CHOSEN_ON, REPORTED, CorpusCell
from mfopt.training.selection import RULES, select_once

PARTS = ("train", REPORTED, CHOSEN_ON, "public")
RECORD_RULES = tuple(rule for rule in RULES if rule != "chunk")


@dataclasses.dataclass(frozen=True)
class CorpusSizesCell(Cell):
    """Records of a user in each part, and length and perplexity of ``group`` chosen of each.

    The perplexity of a record is that of the pretrained model of ``base`` on its first ``length``
    tokens, over its own tokens.
    """

    name = "train-sizes"
    base: CorpusCell
    group: int

    def run(self, *needed: Result) -> Result:
        import jax

        from mfopt.training.data import open_parts
        from mfopt.training.models.huggingface import load_pretrained

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            needed[0].unpack(folder)
            model = load_pretrained(str(folder / "pretrained"))
            parts = open_parts(folder / "corpus")
            train = parts["train"]
            rows = train.batch(np.arange(train.num_records), self.base.length)
            sizes = {part: store.records_per_user() for part, store in parts.items()}
            lengths = train.record_lengths()

            @jax.jit
            def losses_of(rows: Any) -> Any:
                one = lambda row: model.loss(model.params, model.frozen, *row)  # noqa: E731
                return jax.lax.map(one, rows, batch_size=128)

            losses = np.asarray(losses_of(rows), np.float64)
            chosen = {
                rule: select_once(train, self.group, rule, losses=losses) for rule in RECORD_RULES
            }
        said = {part: _sizes(each) for part, each in sizes.items()}
        for rule, records in chosen.items():
            of, perplexity = lengths[records], np.exp(losses[records])
            said[rule] = _sizes(np.minimum(sizes["train"], self.group)) | {
                "mean_tokens": float(of.mean()),
                "mean_perplexity": float(perplexity.mean()),
                "share_shorter": float((of < self.base.length).mean()),
            }
        return Result({"rows": said})


def _sizes(each: np.ndarray) -> dict[str, Any]:
    """Numbers of users and records, and of records of a user."""
    return {
        "users": len(each),
        "records": int(each.sum()),
        "least": int(each.min()),
        "median": float(np.median(each)),
        "mean": float(each.mean()),
        "largest": int(each.max()),
    }
