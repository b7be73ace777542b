"""What privacy costs in time: Table 12 and Figure 6 of Chua et al. 2024 in small.

Seconds of one step of the real trainer with exactly as many records, without privacy, with ELS
(Group Privacy) and with ULS (User-wise DP-SGD), on random tokens. The three take turns, step by
step, and what is reported are medians, of the ratios too: a machine that has other work to do slows
all three. Compilation is left out, sampling and noise are not.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import PRIVACY, Outcome, Study, check_several, flag
from mfopt.experiments.studies.fine_tuning import PLAIN, alike
from mfopt.experiments.studies.user_means import ELS, ULS

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

ORDER = (PLAIN, ELS, ULS)
_WARM = 2  # steps before the clock counts


class Place(NamedTuple):
    """Where steps are timed: width of the model, records a step, records of a user."""

    width: int
    batch: int
    group: int


@dataclasses.dataclass(frozen=True)
class StepTime(Study):
    """Seconds of a step by model, records a step, and records of a user."""

    name = "step-time"
    alone = True
    summary = "What privacy costs in time: seconds of a step of ELS, ULS and without privacy."
    source = "Chua et al. 2024, appendices C.4 and C.5, Table 12, Figure 6"
    default_size = "2 widths, 2 batches, 3 numbers of records of a user, 5 steps of each algorithm"
    time = "about 3 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        "widths": (768, 1024, 1280),
        "layers": 12,
        "batches": (256, 1024),
        "groups": (8, 1, 2, 16),
        "length": 128,
        "vocabulary": 50257,
        "steps": 100,
        "microbatch": 32,
    }
    full_size = "widths of GPT-2 small to large, 12 layers, 1,024 records a step, 100 steps"
    needs = "a GPU"

    widths: tuple[int, ...] = flag((64, 128), "Of the models; a head for every 64.")
    layers: int = flag(2, "Of the models.")
    batches: tuple[int, ...] = flag((16, 64), "Records a step, at the first k.")
    groups: tuple[int, ...] = flag((4, 1, 16), "Records of a user k; at the last batch.")
    length: int = flag(48, "Tokens of a record.")
    vocabulary: int = flag(2048, "Tokens that there are.")
    steps: int = flag(5, "Steps timed of each algorithm.")
    microbatch: int = flag(0, "Records of a gradient call; 0: 8, as `mfopt train` on a CPU.")

    def check(self) -> Self:
        for name in ("widths", "batches", "groups"):
            check_several(name, getattr(self, name))
            for value in getattr(self, name):
                _check.integer(name, value)
        for name in ("layers", "vocabulary", "steps"):
            _check.integer(name, getattr(self, name))
        _check.integer("length", self.length, at_least=2)
        _check.integer("microbatch", self.microbatch, at_least=0)
        for place in self.places():
            if place.batch % place.group:
                rule = f"must be a multiple of every k, and {place.group} is one"
                raise _check.reject("batches", place.batch, rule)
        return self

    def places(self) -> list[Place]:
        """Every batch at the first k, and every k at the last batch, of each model."""
        pairs = [(batch, self.groups[0]) for batch in self.batches]
        pairs += [(self.batches[-1], group) for group in self.groups]
        return [Place(width, *pair) for width in self.widths for pair in dict.fromkeys(pairs)]

    def task(self, place: Place) -> Task:
        """The seconds of all three."""
        names = ("layers", "length", "vocabulary", "steps", "microbatch")
        return Task.of(
            "study-step-time",
            **place._asdict(),
            **{name: getattr(self, name) for name in names},
        )

    def cells(self) -> Iterable[Task]:
        return [self.task(place) for place in self.places()]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = []
        for place in self.places():
            result = found[self.task(place)]
            seconds = result.arrays["seconds"]  # (algorithms, steps)
            for k, name in enumerate(ORDER):
                private = name != PLAIN
                rows.append(
                    dict.fromkeys(PRIVACY)
                    | {
                        "parameters": result.record["parameters"],
                        **place._asdict(),
                        "algorithm": name,
                        "seconds": float(np.median(seconds[k])),
                        "ratio": float(np.median(seconds[k] / seconds[0])),
                        "least_ratio": float((seconds[k] / seconds[0]).min()),
                        "largest_ratio": float((seconds[k] / seconds[0]).max()),
                        "steps": self.steps,
                        "device": result.record["device"],
                        "load": result.record["load"],
                        "privacy_unit": "none: random tokens" if private else None,
                        "sampling": "the same records in each step, timed only",
                        "noise_multiplier": 1.0 if private else None,
                    }
                )
        return Outcome(
            rows,
            {
                "parameters": "parameters",
                "batch": "records a step",
                "group": "k",
                "algorithm": "algorithm",
                "seconds": "s/step",
                "ratio": "ratio",
                "least_ratio": "least",
                "largest_ratio": "largest",
                "load": "load",
                "device": "device",
            },
            self._panels(rows),
            f"Time of a training step, {self.length} tokens a record",
            self._findings(rows),
            plot_columns=2,
        )

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        axes = {
            "batch": ("records a step (log scale)", "group", self.groups[0]),
            "group": ("records of a user k (log scale)", "batch", self.batches[-1]),
        }
        panels = []
        for width in self.widths:
            for x, (axis, fixed, value) in axes.items():
                curves = []
                for name in ORDER:
                    mine = [
                        row
                        for row in rows
                        if (row["width"], row[fixed], row["algorithm"]) == (width, value, name)
                    ]
                    mine = sorted(mine, key=operator.itemgetter(x))
                    low, high = ([r[f"{end}_ratio"] for r in mine] for end in ("least", "largest"))
                    y = [r["ratio"] for r in mine]
                    curves.append(Curve(name, [r[x] for r in mine], y, low, high))
                at = f"k = {value}" if fixed == "group" else f"{value} records a step"
                label = "times the step without privacy\n(bands: least to largest)"
                panels.append(Panel(curves, f"width {width}, {at}", axis, label))
        return alike(panels)

    def _findings(self, rows: list[dict[str, Any]]) -> list[str]:
        said = []
        for width in self.widths:
            mine = [row for row in rows if row["width"] == width]
            words = [
                f"{name} {min(ratios):.2f} to {max(ratios):.2f}"
                for name in ORDER[1:]
                for ratios in [[row["ratio"] for row in mine if row["algorithm"] == name]]
            ]
            said.append(
                f"width {width} ({mine[0]['parameters']:,} parameters): times the step without "
                f"privacy, {' and '.join(words)} (medians of {self.steps} steps in turns, load "
                f"{min(r['load'] for r in mine):.1f} to {max(r['load'] for r in mine):.1f})"
            )
        return said


def run_step_time(
    *,
    width: int,
    batch: int,
    group: int,
    layers: int,
    length: int,
    vocabulary: int,
    steps: int,
    microbatch: int,
) -> Result:
    """Seconds of each step, (algorithms, steps), in the order of ``ORDER``.

    Args:
      width, layers: of the model.
      batch: records a step.
      group: records of a user in it.
      length: tokens of a record.
      vocabulary: tokens that there are.
      steps: timed, of each algorithm.
      microbatch: records of a gradient call; 0: eight.
    """
    import os

    import jax

    from mfopt.training.data import TokenStore
    from mfopt.training.models.gpt2 import GPT2Config
    from mfopt.training.models.huggingface import gpt2_model

    made = np.random.default_rng(0).integers(vocabulary, size=(batch // group, group, length))
    store = TokenStore.from_records(list(map(list, made)), vocab_size=vocabulary)
    model = gpt2_model(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=max(1, width // 64),
        )
    )
    running = [
        trainer.run(trainer.init())
        for trainer in (
            _trainer(model, store, name, group, length, steps + _WARM, microbatch or 8)
            for name in ORDER
        )
    ]
    seconds = np.empty((len(ORDER), steps + _WARM))
    for step in range(steps + _WARM):
        for k, run in enumerate(running):
            begun = time.perf_counter()
            jax.block_until_ready(next(run).state.params)
            seconds[k, step] = time.perf_counter() - begun
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return Result(
        {"parameters": model.num_params, "load": round(load, 2)}, {"seconds": seconds[:, _WARM:]}
    )


def _trainer(
    model: Any, store: Any, algorithm: str, group: int, length: int, steps: int, microbatch: int
) -> Any:
    """A trainer that takes the whole store in every step.

    Args:
      model: the model.
      store: of users with ``group`` records each.
      algorithm: of ``ORDER``.
      group: records of a user.
      length: tokens of a record.
      steps: that it can make.
      microbatch: records of a gradient call.
    """
    from mfopt.noise.stream import NoiseStream
    from mfopt.sampling import FixedOrder
    from mfopt.strategies import Identity
    from mfopt.training.batching import Sampler
    from mfopt.training.clipping import Clipping, NoClipping
    from mfopt.training.loop import Execution, Trainer
    from mfopt.training.optimizers import make_optimizer, schedule
    from mfopt.training.units import RecordUnits, UserUnits

    units: Any
    if algorithm == ELS:
        units = RecordUnits(store, group_size=group, length=length)
    else:
        units = UserUnits(store, records=group, length=length)
    each = max(1, microbatch // units.records)
    scheme = FixedOrder(bins=1, epochs=steps)
    sampler = Sampler(scheme, units.population, 0, microbatch=each)
    optimizer = make_optimizer("adam", schedule("constant", 1e-4, steps, 0))
    if algorithm == PLAIN:
        execution = Execution(units, sampler, NoClipping(), None, sampler.expected_batch)
    else:
        clipping = Clipping(1.0)
        noise = NoiseStream(
            Identity(),
            iterations=steps,
            noise_multiplier=1.0,
            clip_norm=clipping.sensitivity,
            sampling=scheme,
        )
        execution = Execution(units, sampler, clipping, noise, sampler.expected_batch)
    return Trainer(model, execution, optimizer)
