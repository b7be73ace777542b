"""Copies of private text in the public part, and what is left when they are removed.

Charles et al. 2024 (section 5, appendix D) remove near-duplicates of the private text from what is
pretrained on: left there, they hide what private fine-tuning gives. Here copies are put in, a few
of their tokens changed, and taken out again by :func:`mfopt.training.data.overlap.copies`, the
digests that the trainer itself compares the two parts by.

A model that was pretrained on copies of private records has no guarantee at all, and one whose
public part was cleaned by looking at them has its own given that part only; the rows say so.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.packing import packed, unpack
from mfopt.experiments.studies.base import Outcome, flag
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, Arm, FineTuning, alike
from mfopt.experiments.studies.image_cells import interval
from mfopt.experiments.studies.user_means import ULS

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel
    from mfopt.training.data import TokenStore

AS_BUILT, COPIED, CLEANED = "as built", "with copies", "copies removed"
PARTS = (AS_BUILT, COPIED, CLEANED)


@dataclasses.dataclass(frozen=True)
class PublicCopies(FineTuning):
    """Loss before and after private fine-tuning, by what the public part holds."""

    name = "public-copies"
    summary = "Copies of private text in the public part, left there and removed."
    source = "Charles et al. 2024, section 5 and appendix D"
    default_size = "embedded corpus, 3 public parts, 3 seeds, 9 runs of 32 steps"
    time = "about 2 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        **FineTuning.PAPER,
        "epsilons": (1.0, 4.0, 16.0, 64.0),
        "cohort": 256,
    }
    full_size = "2,000 steps of GPT-2 small's shape, 4 ε, 3 seeds, 4 rates"

    epsilons: tuple[float, ...] = flag((8.0,), "ε of the runs.", option="--eps")
    share: float = flag(0.5, "Share of the private training records that are copied.")
    changed: float = flag(0.03, "Share of a copy's tokens that are replaced by others.")
    shortest: int = flag(1, "Fewest tokens of a record that is looked at for removal.")
    cohort: int = flag(16, "Users a step to expect.")
    group: int = flag(4, "Records of a user in a step.", option="--k")
    part: str = AS_BUILT  # of this run; set by :meth:`at`

    def check(self) -> Self:
        super().check()
        self._check_numbers("epsilons")
        _check.probability("share", self.share)
        _check.probability("changed", self.changed, closed=True)
        _check.integer("pretrain_steps", self.pretrain_steps)
        for name in ("cohort", "group", "shortest"):
            _check.integer(name, getattr(self, name))
        return self

    def at(self, part: str) -> PublicCopies:
        """The same with this public part."""
        return dataclasses.replace(self, part=part)

    def base(self) -> Task:
        plain = super().base()
        if self.part == AS_BUILT:
            return plain
        names = ("length", "width", "layers", "pretrain_steps", "pretrain_rate")
        return Task.of(
            "study-public-copies",
            (plain,),
            **{name: plain.arguments[name] for name in names},
            share=self.share,
            changed=self.changed,
            shortest=self.shortest if self.part == CLEANED else None,
        )

    def arms(self) -> list[Arm]:
        """One for each ε."""
        units = float(self.cohort)
        return [Arm(ULS, self.group, units, float(epsilon)) for epsilon in self.epsilons]

    def cells(self) -> Iterable[Task]:
        return [
            task
            for part in PARTS
            for here in [self.at(part)]
            for task in (here.base(), *here.runs(self.arms()))
        ]

    def more(self, found: Mapping[Task, Result]) -> Iterable[Task]:
        return [task for part in PARTS for task in super(PublicCopies, self.at(part)).more(found)]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = []
        for part in PARTS:
            here = self.at(part)
            counted = found[here.base()].record.get("copies", {})
            for arm in self.arms():
                row = here.row(found, arm)
                if part == COPIED:  # what was pretrained on had no noise
                    row |= {"privacy_unit": None, "epsilon": None, "delta": None}
                if part == CLEANED:
                    row |= {"privacy_unit": f"{row['privacy_unit']}, given the public part"}
                rows.append(
                    {"public_part": part, "asked_epsilon": arm.epsilon, **row}
                    | {name: counted.get(name) for name in ("put", "left", "exact", "near")}
                    | {"fall": row["pretrained"] - row["loss"]}
                )
        return Outcome(
            rows,
            {
                "public_part": "public part",
                "put": "copies put in",
                "left": "left",
                "exact": "found exact",
                "near": "near",
                "asked_epsilon": "ε asked",
                "pretrained": "pretrained",
                "loss": "fine-tuned",
                "fall": "fall",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "epsilon": "ε held",
                "noise_multiplier": "σ",
            },
            self._panels(rows),
            f"Copies of private records in the public part; fine-tuning per user, "
            f"δ = {self.delta:g}",
            self._findings(found, rows),
        )

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        panels = []
        for epsilon in self.epsilons:
            curves = [
                Curve(row["public_part"], (0, self.steps), (row["pretrained"], row["loss"]))
                for row in rows
                if row["asked_epsilon"] == epsilon
            ]
            title = f"before and after fine-tuning, ε = {epsilon:g}"
            panels.append(Panel(curves, title, "steps", LOSS_LABEL, log_x=False))
        return alike(panels)

    def _findings(self, found: Mapping[Task, Result], rows: list[dict[str, Any]]) -> list[str]:
        said = []
        for arm in self.arms():
            epsilon = arm.epsilon
            falls = {}
            for part in PARTS:
                here = self.at(part)
                each = here.row(found, arm)["pretrained"] - here.losses(found, arm)
                about = f" ± {interval(each)[1]:.4f}" if len(each) > 1 else ""
                falls[part] = f"{each.mean():.4f}{about}"
            plain, copied, cleaned = (
                next(r for r in rows if (r["public_part"], r["asked_epsilon"]) == (part, epsilon))
                for part in PARTS
            )
            said.append(
                f"ε = {epsilon:g}: fine-tuning lowers the loss by {falls[AS_BUILT]} from a "
                f"public part as built, by {falls[COPIED]} where it holds copies of "
                f"{self.share:.0%} of the private records (the pretrained model is "
                f"{plain['pretrained'] - copied['pretrained']:.4f} lower there, without a "
                f"guarantee), and by {falls[CLEANED]} where they were removed: "
                f"{cleaned['exact']} exact and {cleaned['near']} near "
                f"copies were found, {cleaned['left']} of the {cleaned['put']} that were put in "
                f"are left ({self._runs_said()})"
            )
        return said


def run_public_copies(
    base: Result,
    *,
    length: int,
    width: int,
    layers: int,
    pretrain_steps: int,
    pretrain_rate: float,
    share: float,
    changed: float,
    shortest: int | None,
) -> Result:
    """The corpus with copies in its public part, or with those removed, and a model of it.

    Args:
      base: result that holds the corpus as built.
      length, width, layers, pretrain_steps, pretrain_rate: of the model and its pretraining.
      share: of the private training records that are copied.
      changed: share of a copy's tokens that are replaced.
      shortest: fewest tokens of the records among which copies are found and removed again; None
        removes none, and counts what the trainer would.
    """
    from mfopt.training.config import TrainConfig
    from mfopt.training.data import open_parts
    from mfopt.training.data.overlap import SHORTEST, copies
    from mfopt.training.prepare import prepare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(base, folder)
        parts = open_parts(folder / "corpus")
        private = [store for part, store in parts.items() if part != "public"]
        records = [parts["public"].record(r) for r in range(parts["public"].num_records)]
        own, records = len(records), [*records, *copied(parts["train"], share, changed)]
        public = _write(records, parts["public"], folder / "all")
        exact, near = copies(public, private, shortest or SHORTEST)
        kept = np.arange(len(records))
        if shortest is not None:
            kept = np.flatnonzero(~(exact | near))
            public = _write([records[r] for r in kept], parts["public"], folder / "left")
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
        prepared = prepare(
            TrainConfig(
                sampling="fixed-order:bins=1,epochs=1",
                algorithm="none",
                data=str(folder / "corpus"),
                public_overlap=1.0,  # copies are what is studied
                length=length,
                width=width,
                layers=layers,
                pretrain_steps=pretrain_steps,
                pretrain_rate=pretrain_rate,
                output=str(folder / "run"),
                seed=0,
            )
        )
        arrays = packed(folder / "corpus", "corpus")
        arrays |= packed(folder / "run" / "pretrained", "pretrained")
    record = {"users": base.record["users"], "parameters": prepared.model.num_params}
    return Result(record | {"copies": counted}, arrays)


def copied(train: TokenStore, share: float, changed: float) -> list[np.ndarray]:
    """Records of ``train``, a ``share`` of them, with a share of their tokens replaced.

    Args:
      train: private records.
      share: of the records.
      changed: chance of a token to become another, drawn uniformly.
    """
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
