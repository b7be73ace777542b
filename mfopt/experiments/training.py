"""Optimized correlated noise against independent noise, in whole training runs.

Both mechanisms run at the same (ε, δ), from the same pretrained model, for as many steps of as many
records, with the same learning rates and seeds to choose from; under one sampling scheme a seed
throws the users into the same bins for both. Each mechanism then stands with the learning rate
that is best for *it* on held-out records of training users; what is reported is the loss on users
that took no part. Choosing learning rates in this way is not covered by the guarantee of a run.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from mfopt import _check, _files
from mfopt.experiments import plots
from mfopt.experiments.cache import Cache, Result, Task
from mfopt.experiments.families import FRESH_BANDS
from mfopt.experiments.mechanisms import BALLS, FRESH
from mfopt.experiments.packing import packed
from mfopt.experiments.runner import run_all
from mfopt.progress import Report, silent
from mfopt.sampling import BallsInBins, BinScheme, FreshBins
from mfopt.training.data import open_parts
from mfopt.training.data.embedded import EMBEDDED
from mfopt.training.optimizers import NOISE_MOVE

CHOSEN_ON, REPORTED = "held-out-records", "held-out-users"
LOSS = "loss on held-out users (nats per token)"
# kinds of C, with what they are run under where this is not balls-in-bins
LABELS = {
    "identity": "independent noise",
    "blt": "BLT noise",
    "toeplitz": "Toeplitz noise",
    f"identity+{FRESH}": "independent noise, fresh bins",
    f"banded-toeplitz+{FRESH}": "banded noise, fresh bins",
}
_SCHEMES: dict[str, type[BinScheme]] = {BALLS: BallsInBins, FRESH: FreshBins}


@dataclasses.dataclass(frozen=True)
class TrainingComparison:
    """What is compared; by default on the embedded corpus, as in the README.

    Attributes:
      data: an embedded corpus, or a folder of `mfopt data build` with a public and held-out parts.
      strategies: of :data:`LABELS`, or other kinds of C; the first is the one that the others are
        measured against.
      learning_rates, seeds: every mechanism runs with each pair of them.
      fitted: whether the rates are given by how far the noise alone moves a parameter
        (`--noise-move`), the same for every mechanism and optimizer.
      rest: as in `mfopt train`; evaluations are ``evaluations`` in number after the first.
    """

    data: str = "stdlib"
    bins: int = 8
    epochs: int = 8
    epsilon: float = 8.0
    delta: float = 1e-5
    strategies: tuple[str, ...] = ("identity", "blt")
    learning_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    seeds: tuple[int, ...] = (0, 1, 2)
    fitted: bool = False
    optimizer: str = "adam"
    schedule: str = "constant"
    records_per_user: int = 4
    length: int = 64
    width: int = 64
    layers: int = 2
    pretrain_steps: int = 300
    pretrain_rate: float = 3e-3
    evaluations: int = 4
    evaluate_records: int = 500

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.bins * self.epochs


class Run(NamedTuple):
    """One training run; ``losses`` is {part: [(step, nats per token), ...]}."""

    strategy: str
    learning_rate: float
    seed: int
    noise_multiplier: float
    losses: dict[str, list[tuple[int, float]]]

    def last(self, part: str) -> float:
        """Loss after the last step."""
        return self.losses[part][-1][1]


def base_task(setting: TrainingComparison) -> Task:
    """The corpus and the model pretrained on its public part."""
    named = setting.data in EMBEDDED
    # a folder may come to hold other data
    content: dict[str, Any] = {} if named else {"digest": _digest(setting.data)}
    return Task.of(
        "train-base",
        **content,
        data=setting.data,
        length=setting.length,
        width=setting.width,
        layers=setting.layers,
        pretrain_steps=setting.pretrain_steps,
        pretrain_rate=setting.pretrain_rate,
    )


def check_parts(data: str) -> None:
    """Refuse a folder that lacks what a run is pretrained on, trained on or judged by."""
    if data not in EMBEDDED:
        try:
            there = set(open_parts(data))
        except _check.UsageError:
            rule = f"is none of {', '.join(EMBEDDED)}, and no folder of `mfopt data build`"
            raise _check.reject("data", data, rule) from None
        missing = {"train", "public", CHOSEN_ON, REPORTED} - there
        if missing:
            way_out = "Build it with a public part and both held-out ones (`mfopt data build`)."
            raise _check.reject("data", data, f"has no part {', '.join(sorted(missing))}", way_out)


def mechanism_task(setting: TrainingComparison, strategy: str) -> Task:
    """A certified factorization for its scheme, per user."""
    sampling = sampling_of(strategy)
    thrown: dict[str, Any] = {} if sampling == BALLS else {"sampling": sampling}
    return Task.of(
        "train-mechanism",
        strategy=strategy.partition("+")[0],
        bins=setting.bins,
        epochs=setting.epochs,
        epsilon=setting.epsilon,
        delta=setting.delta,
        **thrown,
    )


def sampling_of(strategy: str) -> str:
    """The scheme that a mechanism is run under, by name.

    >>> sampling_of("blt"), sampling_of("banded-toeplitz+fresh-bins")
    ('balls-in-bins', 'fresh-bins')
    """
    return strategy.partition("+")[2] or BALLS


def run_task(setting: TrainingComparison, strategy: str, learning_rate: float, seed: int) -> Task:
    """One training run.

    Args:
      setting: what is compared, and where.
      strategy: kind of C.
      learning_rate: learning rate, or how far the noise alone moves a parameter.
      seed: pins the random choices.
    """
    return Task.of(
        "train-run",
        (base_task(setting), mechanism_task(setting, strategy)),
        **{"noise_move" if setting.fitted else "learning_rate": learning_rate},
        seed=seed,
        optimizer=setting.optimizer,
        schedule=setting.schedule,
        records_per_user=setting.records_per_user,
        length=setting.length,
        evaluate_every=max(1, setting.steps // setting.evaluations),
        evaluate_records=setting.evaluate_records,
    )


def run_base(
    *,
    data: str,
    length: int,
    width: int,
    layers: int,
    pretrain_steps: int,
    pretrain_rate: float,
    digest: str = "",
) -> Result:
    """Build the corpus, pretrain, and keep the files of both.

    Args:
      data: an embedded corpus, or a folder of token stores.
      length: tokens of a row.
      width: width of the model.
      layers: layers of the model.
      pretrain_steps: steps on public records.
      pretrain_rate: learning rate of those.
      digest: of the data in a folder.
    """
    from mfopt.training.config import TrainConfig
    from mfopt.training.prepare import prepare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = TrainConfig(
            sampling="fixed-order:bins=1,epochs=1",
            algorithm="none",
            data=data,
            length=length,
            width=width,
            layers=layers,
            pretrain_steps=pretrain_steps,
            pretrain_rate=pretrain_rate,
            output=str(folder),
            seed=0,
        )
        prepared = prepare(settings)
        if digest and digest != _digest(data):
            raise _check.reject("data", data, "has changed since the cells were named")
        corpus = folder / "corpus" if data in EMBEDDED else Path(data)
        arrays = packed(corpus, "corpus") | packed(folder / "pretrained", "pretrained")
        users, parameters = prepared.parts["train"].num_users, prepared.model.num_params
    return Result({"users": users, "parameters": parameters}, arrays)


def run_mechanism(
    *,
    strategy: str,
    bins: int,
    epochs: int,
    epsilon: float,
    delta: float,
    sampling: str = BALLS,
) -> Result:
    """Optimize and certify C; the file is kept as it is.

    Args:
      strategy: kind of C.
      bins: iterations of an epoch.
      epochs: passes over the data.
      epsilon: ε of the statement.
      delta: δ of the statement.
      sampling: scheme by name.
    """
    from mfopt.optimize import factorize

    found = factorize(
        _SCHEMES[sampling](bins, epochs),
        epsilon,
        delta,
        strategy=strategy,
        bands=min(bins, FRESH_BANDS),
        privacy_unit="user",
        seed=0,
    )
    if found.provenance["interrupted"]:
        raise KeyboardInterrupt  # what was kept is no result of this cell
    if found.guarantee.status != "certified":
        raise _check.FailureError(found.provenance["not_certified"][-1])
    with tempfile.TemporaryDirectory() as folder:
        found.save(Path(folder) / "mechanism.npz")
        arrays = packed(Path(folder), "mechanism")
    record = {"noise_multiplier": found.noise_multiplier, "rmse": found.rmse}
    return Result(record | {"guarantee": found.guarantee.describe()}, arrays)


def run_training(
    base: Result,
    mechanism: Result,
    *,
    seed: int,
    optimizer: str,
    schedule: str,
    records_per_user: int,
    length: int,
    evaluate_every: int,
    evaluate_records: int,
    learning_rate: float = 0.0,
    noise_move: float = NOISE_MOVE,
) -> Result:
    """Train with user-level sampling by the real trainer; the losses are on record.

    Args:
      base: result that holds corpus and pretrained model.
      mechanism: result that holds the factorization.
      seed: pins the random choices.
      optimizer: optimizer by name.
      schedule: of the learning rate, by name.
      records_per_user: records of a user in one participation.
      length: tokens of a row.
      evaluate_every: steps between evaluations.
      evaluate_records: records of an evaluation.
      learning_rate: learning rate; 0: by ``noise_move``.
      noise_move: how far the noise alone is to move a parameter.
    """
    from mfopt.experiments import repeated

    sources = {"data": base, "model": base, "factorization": mechanism}
    runs = repeated.runs_of(
        sources,
        optimizer=optimizer,
        schedule=schedule,
        records_per_user=records_per_user,
        length=length,
        seed=0,
        evaluate_records=evaluate_records,
    )
    trained = runs.run(
        rate=learning_rate,
        move=noise_move,
        seed=seed,
        selection="random",
        evaluate_every=evaluate_every,
    )
    return Result(
        {
            "losses": trained.losses,
            "steps": runs.prepared.steps,
            "tokens": trained.tokens,
            "noise_multiplier": mechanism.record["noise_multiplier"],
        }
    )


def compare(
    setting: TrainingComparison,
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> list[Run]:
    """All runs; those that are in the cache are not run again.

    Args:
      setting: what is compared, and where.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores.
      progress: told of each finished cell.
    """
    wanted = run_tasks(setting)
    return runs_of(setting, run_all(wanted.values(), cache, jobs=jobs, progress=progress))


def run_tasks(setting: TrainingComparison) -> dict[tuple[str, float, int], Task]:
    """{(strategy, learning rate, seed): training run}, one mechanism after the other.

    A process keeps the programs of the mechanism that it ran last.
    """
    return {
        (strategy, rate, seed): run_task(setting, strategy, rate, seed)
        for strategy in setting.strategies
        for seed in setting.seeds
        for rate in setting.learning_rates
    }


def runs_of(setting: TrainingComparison, found: Mapping[Task, Result]) -> list[Run]:
    """The runs, from the results of their tasks."""
    return [
        Run(strategy, rate, seed, record["noise_multiplier"], record["losses"])
        for (strategy, rate, seed), task in run_tasks(setting).items()
        for record in [found[task].record]
    ]


def _digest(folder: str) -> str:
    """Of all parts of a data set."""
    parts = open_parts(folder)
    return "-".join(f"{name}:{parts[name].digest[:16]}" for name in sorted(parts))


def best_rate(runs: Sequence[Run], strategy: str) -> float:
    """The learning rate with the least mean loss on held-out records, over the seeds."""
    rates = sorted({run.learning_rate for run in runs if run.strategy == strategy})
    return min(rates, key=lambda rate: mean(r.last(CHOSEN_ON) for r in _of(runs, strategy, rate)))


def summary(setting: TrainingComparison, runs: Sequence[Run]) -> dict[str, Any]:
    """The outcome, JSON-able: each mechanism at its best learning rate.

    ``gain`` is, for each seed, the loss of the first mechanism less that of this one.
    """
    yardstick = setting.strategies[0]
    at_best = {s: _of(runs, s, best_rate(runs, s)) for s in setting.strategies}
    return {
        "setting": dataclasses.asdict(setting),
        "unit": "nats per token on held-out users; learning rates chosen on held-out records",
        "pretrained": runs[0].losses[REPORTED][0][1],
        "mechanisms": {
            strategy: {
                "learning_rate": chosen[0].learning_rate,
                "noise_multiplier": chosen[0].noise_multiplier,
                "loss": [run.last(REPORTED) for run in chosen],
                "mean_loss": mean(run.last(REPORTED) for run in chosen),
                "gain": [
                    other.last(REPORTED) - run.last(REPORTED)
                    for run, other in zip(chosen, at_best[yardstick], strict=True)
                ],
            }
            for strategy, chosen in at_best.items()
        },
    }


def panels(setting: TrainingComparison, runs: Sequence[Run]) -> list[plots.Panel]:
    """Loss against learning rate, and against steps at the best learning rate."""
    start = runs[0].losses[REPORTED][0][1]
    rated, by_step = [], []
    for strategy in setting.strategies:
        label = LABELS.get(strategy, strategy)
        rated.append(by_rate(label, runs, strategy, setting.learning_rates))
        chosen = _of(runs, strategy, best_rate(runs, strategy))
        steps = [step for step, _ in chosen[0].losses[REPORTED]]
        curves = [[run.losses[REPORTED][i][1] for run in chosen] for i in range(len(steps))]
        by_step.append(_curve(label, steps, curves))
    label = "pretrained model, before private training"
    ends = (min(setting.learning_rates), max(setting.learning_rates))
    rated.append(plots.Curve(label, ends, (start, start)))
    by_step.append(plots.Curve(label, (0, setting.steps), (start, start)))
    return [
        plots.Panel(rated, "after the last step", "learning rate", LOSS),
        plots.Panel(by_step, "at the learning rate best for each", "steps", LOSS, log_x=False),
    ]


def by_rate(label: str, runs: Sequence[Run], strategy: str, rates: Sequence[float]) -> plots.Curve:
    """Last loss on held-out users against the rate, with its spread over seeds.

    Args:
      label: of the curve.
      runs: those of every rate, seed and mechanism.
      strategy: the mechanism that is drawn.
      rates: those that are drawn.
    """
    spread = [[run.last(REPORTED) for run in _of(runs, strategy, rate)] for rate in rates]
    return _curve(label, rates, spread)


def csv_text(runs: Sequence[Run]) -> str:
    """One row for each evaluation of each run."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["strategy", "learning_rate", "seed", "noise_multiplier", "part", "step", "loss"]
    )
    for run in runs:
        head = (run.strategy, f"{run.learning_rate:g}", run.seed, repr(run.noise_multiplier))
        for part, rows in run.losses.items():
            writer.writerows((*head, part, step, repr(loss)) for step, loss in rows)
    return buffer.getvalue()


def write(stem: Path, setting: TrainingComparison, runs: Sequence[Run]) -> list[Path]:
    """STEM.json, .csv, .png and .svg."""
    title = (
        f"User-level DP fine-tuning, ε = {setting.epsilon:g}, {setting.epochs} epochs × "
        f"{setting.bins} bins; bands: least to largest of {len(setting.seeds)} seeds"
    )
    figure = plots.draw(panels(setting, runs), title=title)
    text = json.dumps(summary(setting, runs), indent=2) + "\n"
    return [
        _files.write(stem.with_name(f"{stem.name}.json"), text),
        _files.write(stem.with_name(f"{stem.name}.csv"), csv_text(runs)),
        *plots.save(figure, stem),
    ]


def _of(runs: Sequence[Run], strategy: str, rate: float) -> list[Run]:
    return [run for run in runs if run.strategy == strategy and run.learning_rate == rate]


def _curve(label: str, x: Sequence[float], spread: Sequence[Sequence[float]]) -> plots.Curve:
    return plots.Curve(
        label, x, [mean(v) for v in spread], [min(v) for v in spread], [max(v) for v in spread]
    )
