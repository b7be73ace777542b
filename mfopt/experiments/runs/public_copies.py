"""A public part with copies of private records, or with those removed, and a model of it."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mfopt.experiments.cache import Cell, Result, packed
from mfopt.experiments.runs.training import CorpusCell, pretrained

if TYPE_CHECKING:
    from mfopt.training.data import TokenStore


@dataclasses.dataclass(frozen=True)
class PublicCopiesCell(Cell):
    """The corpus with copies in its public part, or with those removed, and a model of it.

    Attributes:
      base: cell of the corpus as built, whose model's sizes are taken.
      share: of the private training records that are copied.
      changed: share of a copy's tokens that are replaced.
      shortest: fewest tokens of the records among which copies are found and removed again; None
        removes none, and counts what the trainer would.
    """

    name = "study-public-copies"
    base: CorpusCell
    share: float
    changed: float
    shortest: int | None = None

    def run(self, *needed: Result) -> Result:
        from mfopt.training.data import open_parts
        from mfopt.training.data.overlap import SHORTEST, copies

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            needed[0].unpack(folder)
            parts = open_parts(folder / "corpus")
            old, train = parts["public"], parts["train"]
            private = [store for part, store in parts.items() if part != "public"]
            records = [old.record(r) for r in range(old.num_records)]
            own, records = len(records), [*records, *copied(train, self.share, self.changed)]
            public = _write(records, old, folder / "all")
            exact, near = copies(public, private, self.shortest or SHORTEST)
            kept = np.arange(len(records))
            if self.shortest is not None:
                kept = np.flatnonzero(~(exact | near))
                public = _write([records[r] for r in kept], old, folder / "left")
            counted = {
                "put": len(records) - own,
                "left": int(np.count_nonzero(kept >= own)),
                "exact": int(exact.sum()),
                "near": int(near.sum()),
            }
            target = folder / "corpus" / "public"
            shutil.rmtree(target)
            assert public.path is not None
            shutil.copytree(public.path, target)
            data = str(folder / "corpus")  # copies are what is studied: as many as there are
            prepared = pretrained(self.base, folder / "run", data=data, public_overlap=1.0)
            arrays = packed(folder / "corpus", "corpus")
            arrays |= packed(folder / "run" / "pretrained", "pretrained")
        record = {"users": needed[0].record["users"], "parameters": prepared.model.num_params}
        return Result(record | {"copies": counted}, arrays)


def copied(train: TokenStore, share: float, changed: float) -> list[np.ndarray]:
    """Records of ``train``, a ``share`` of them, with a share of their tokens replaced."""
    random = np.random.default_rng(0)
    chosen = random.permutation(train.num_records)[: round(share * train.num_records)]
    made = []
    for record in np.sort(chosen):
        tokens = np.array(train.record(int(record)))
        places = random.random(len(tokens)) < changed
        tokens[places] = random.integers(train.vocab_size, size=int(places.sum()))
        made.append(tokens)
    return made


def _write(records: list[np.ndarray], like: TokenStore, folder: Path) -> TokenStore:
    """A public part of these records, a user for each, with the facts of ``like``."""
    from mfopt.training.data import TokenStore, TokenStoreBuilder

    names = [str(number) for number in range(len(records))]
    with TokenStoreBuilder(folder / "spool", like.vocab_size) as builder:
        builder.add(names, records)
        builder.finish(folder, like.metadata, name="public")
    return TokenStore.open(folder / "public")
