"""Personalizing ELS and ULS models to users that took no part: appendix G.2 of Charles et al. 2024.

Half of a held-out user's records fine-tune the model further by SGD, the other half judge it. This
happens at each user, on its own records and without noise: the guarantee is that of the model which
was trained before, and says nothing of a personalized one.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.packing import unpack
from mfopt.experiments.studies.base import Outcome, check_several, flag
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, Arm, FineTuning
from mfopt.experiments.studies.user_means import ELS, ULS, Z95
from mfopt.experiments.training import REPORTED

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

BASE = "pretrained"


@dataclasses.dataclass(frozen=True)
class Personalization(FineTuning):
    """Mean loss of held-out users before and after they personalize, by algorithm and ε."""

    name = "personalization"
    summary = "Personalizing ELS and ULS models to users that took no part."
    source = "Charles et al. 2024, appendix G.2, Figure 18"
    default_size = "embedded corpus, ELS and ULS at 2 ε, 3 seeds, 12 runs, 5 local rates"
    time = "about 7 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        **FineTuning.PAPER,
        "epsilons": (1.0, 4.0, 16.0, 64.0),
        "budget": 1024,
        "els_group": 16,
        "group": 16,
        "records": 64,
        "local_batch": 8,
    }
    keeps = True
    full_size = "2,000 steps of GPT-2 small's shape, 4 ε, users of 64 records, 3 seeds, 4 rates"

    epsilons: tuple[float, ...] = flag((2.0, 16.0), "ε of the runs.", option="--eps")
    budget: int = flag(64, "Records a step to expect.")
    els_group: int = flag(4, "G of ELS.")
    group: int = flag(4, "G of ULS.")
    records: int = flag(
        16,
        "Most records of a user: half to personalize, half to judge.",
        option="--user-records",
    )
    local_epochs: int = flag(4, "Passes over the first half.")
    local_batch: int = flag(4, "Records of a local step.")
    local_rates: tuple[float, ...] = flag(
        (0.03, 0.1, 0.3, 1.0, 3.0), "Local rates of SGD to choose from."
    )

    def check(self) -> Self:
        super().check()
        self._check_numbers("epsilons", "local_rates")
        for name in ("budget", "els_group", "group", "local_epochs", "local_batch"):
            _check.integer(name, getattr(self, name))
        if _check.integer("records", self.records) % (2 * self.local_batch):
            rule = f"must be a multiple of twice `local_batch` = {self.local_batch}"
            raise _check.reject("records", self.records, rule)
        check_several("local_rates", self.local_rates)
        return self

    def arms(self) -> Iterator[Arm]:
        """ELS and ULS at each ε."""
        for epsilon in self.epsilons:
            yield Arm(ELS, self.els_group, float(self.budget), float(epsilon))
            yield Arm(ULS, self.group, self.budget / self.group, float(epsilon))

    def local(self, run: Task | None) -> Task:
        """Every held-out user personalizes the model of a run, or the pretrained one."""
        return Task.of(
            "study-personalization",
            (self.base(),) if run is None else (self.base(), run),
            length=self.length,
            records=self.records,
            epochs=self.local_epochs,
            batch=self.local_batch,
            rates=self.local_rates,
        )

    def cells(self) -> Iterable[Task]:
        runs = list(self.runs(self.arms()))
        return [*runs, self.local(None), *map(self.local, runs)]

    def more(self, found: Mapping[Task, Result]) -> Iterable[Task]:
        runs = list(super().more(found))
        return [*runs, *map(self.local, runs)]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        base = found[self.local(None)]
        nobody = dict.fromkeys(("privacy_unit", "adjacency", "sampling", "epsilon", "delta"))
        rows = [
            {"algorithm": BASE, "group": None, "learning_rate": None}
            | nobody
            | {"noise_multiplier": None, "runs": 1, **self._local_row([base])}
        ]
        for arm in self.arms():
            rate, _ = self.best(found, arm)
            row = self.row(found, arm)
            each = [found[self.local(self.run(arm, rate, seed))] for seed in self.seeds]
            rows.append({key: row[key] for key in rows[0] if key in row} | self._local_row(each))
        return Outcome(
            rows,
            {
                "epsilon": "ε",
                "algorithm": "algorithm",
                "group": "G",
                "before": "before",
                "after": "personalized",
                "fall": "fall",
                "fall_half95": "± (95%)",
                "local_rate": "local rate",
                "users": "users",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "noise_multiplier": "σ",
            },
            [self._panel(rows)],
            f"Personalizing to held-out users, {self.budget} records a step, user-level DP, "
            f"δ = {self.delta:g}",
            self._findings(rows),
        )

    def _local_row(self, each: list[Result]) -> dict[str, Any]:
        # runs differ in their seed, users are the same: a user counts once
        before = np.mean([result.arrays["before"] for result in each], axis=0)
        after = np.mean([result.arrays["after"] for result in each], axis=0)
        judged, rates = chosen(after, self.local_rates)
        fall = before - judged
        return {
            "before": float(before.mean()),
            "after": float(judged.mean()),
            "fall": float(fall.mean()),
            "fall_half95": float(Z95 * fall.std(ddof=1) / np.sqrt(len(fall))),
            "local_rate": " or ".join(f"{rate:g}" for rate in dict.fromkeys(rates)),
            "users": len(before),
        }

    def _panel(self, rows: list[dict[str, Any]]) -> Panel:
        from mfopt.experiments.plots import Curve, Panel

        curves = []
        ends = (min(self.epsilons), max(self.epsilons))
        for name in (BASE, ELS, ULS):
            mine = [row for row in rows if row["algorithm"] == name]
            x = ends if name == BASE else [row["epsilon"] for row in mine]
            for when, label in (("before", name), ("after", f"{name}, personalized")):
                y = [row[when] for row in mine] * (2 if name == BASE else 1)
                curves.append(Curve(label, x, y, like=None if when == "before" else name))
        label = LOSS_LABEL.replace("held-out users", "the second half\nof held-out users' records")
        return Panel(curves, "with and without personalization", "user-level ε (log scale)", label)

    def _findings(self, rows: list[dict[str, Any]]) -> list[str]:
        base, *others = rows
        said = [
            f"the pretrained model falls by {base['fall']:.4f} ± {base['fall_half95']:.4f} nats "
            f"per token where {base['users']} users personalize it"
        ]
        for els, uls in zip(others[::2], others[1::2], strict=True):
            gap = {when: uls[when] - els[when] for when in ("before", "after")}
            said.append(
                f"ε = {els['epsilon']:g}: personalizing lowers ELS by {els['fall']:.4f} ± "
                f"{els['fall_half95']:.4f} and ULS by {uls['fall']:.4f} ± "
                f"{uls['fall_half95']:.4f}; ULS less ELS is {gap['before']:+.4f} before and "
                f"{gap['after']:+.4f} after"
            )
        return said


def chosen(after: np.ndarray, rates: tuple[float, ...]) -> tuple[np.ndarray, list[float]]:
    """(losses (users,), rates): each half of the users at the rate that is best for the other.

    Args:
      after: (rates, users); what is not finite is worst.
      rates: one for each row.
    """
    after = np.where(np.isfinite(after), after, np.inf)
    judged, taken = np.empty(after.shape[1]), []
    for half in (0, 1):
        best = int(np.argmin(after[:, 1 - half :: 2].mean(1)))
        judged[half::2] = after[best, half::2]
        taken.append(rates[best])
    if not np.isfinite(judged).all():
        raise _check.FailureError("every local rate diverges: add smaller ones")
    return judged, taken


def run_personalization(
    base: Result,
    trained: Result | None = None,
    *,
    length: int,
    records: int,
    epochs: int,
    batch: int,
    rates: list[float],
) -> Result:
    """Losses of held-out users on the second half of their records, (users,) and (rates, users).

    Args:
      base: result that holds the corpus and the pretrained model.
      trained: result that holds the model to personalize; the pretrained one if left out.
      length: tokens of a row.
      records: most records of a user, an even number; users with fewer than two are left out.
      epochs: passes over the first half.
      batch: records of a local step.
      rates: of SGD.
    """
    from mfopt.training.data import open_parts
    from mfopt.training.models.huggingface import load_pretrained

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(base, folder)
        if trained is not None:
            unpack(trained, folder)
        model = load_pretrained(str(folder / ("pretrained" if trained is None else "model")))
        store = open_parts(folder / "corpus")[REPORTED]
        halves = [split(store.records_of(user), records) for user in range(store.num_users)]
        places = np.array([half for half in halves if half is not None])  # (users, 2, records/2)
        if len(places) < 4:
            rule = "has fewer than 4 held-out users of two records: nothing to choose a rate by"
            raise _check.reject("data", store.num_users, rule, "Hold out more users.")
        tokens, mask = store.batch(places.reshape(-1), length)
    shape = (*places.shape, length)
    before, after = personalized(
        model, tokens.reshape(shape), mask.reshape(shape), rates, epochs=epochs, batch=batch
    )
    judged = np.isfinite(before)  # users whose second half has something to predict
    before, after = before[judged], after[:, judged]
    return Result({}, {"before": before, "after": after})


def split(mine: range, most: int) -> np.ndarray | None:
    """(2, most/2) records of a user, to personalize by and to judge by; -1 where there is none.

    >>> split(range(4, 9), 6).tolist()
    [[4, 6, 8], [5, 7, -1]]
    >>> split(range(1), 6)
    """
    if len(mine) < 2:
        return None
    places = np.full(most, -1)
    kept = list(mine)[:most]
    places[: len(kept)] = kept
    return np.stack([places[::2], places[1::2]])


def personalized(
    model: Any, tokens: np.ndarray, mask: np.ndarray, rates: list[float], *, epochs: int, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss per token of each user's second half: before, and after SGD on the first.

    Args:
      model: whose parameters every user begins with.
      tokens, mask: (users, 2, records, length).
      rates: of SGD.
      epochs: passes over the first half, in order.
      batch: records of a step; a step without a token changes nothing.

    Returns:
      ((users,), (rates, users)) float64; nan where the second half has nothing to predict.
    """
    import jax
    import jax.numpy as jnp

    from mfopt.training.models import num_targets

    def mean_loss(params: Any, frozen: Any, tokens: Any, mask: Any) -> Any:
        each = jax.vmap(model.loss, in_axes=(None, None, 0, 0))(params, frozen, tokens, mask)
        count = num_targets(mask)
        return jnp.sum(each * count) / jnp.maximum(jnp.sum(count), 1)

    def judged(params: Any, frozen: Any, tokens: Any, mask: Any) -> Any:
        loss = mean_loss(params, frozen, tokens, mask)
        return jnp.where(jnp.sum(num_targets(mask)) > 0, loss, jnp.nan)

    def users(params: Any, frozen: Any, rows: tuple[Any, Any]) -> Any:
        def user(mine: tuple[Any, Any]) -> tuple[Any, Any]:
            (first, other), (first_mask, other_mask) = mine
            steps = [leaf.reshape(-1, batch, leaf.shape[-1]) for leaf in (first, first_mask)]
            rows, masks = (jnp.tile(leaf, (epochs, 1, 1)) for leaf in steps)

            def at(rate: Any) -> Any:
                def step(local: Any, now: tuple[Any, Any]) -> tuple[Any, None]:
                    slope = jax.grad(mean_loss)(local, frozen, *now)
                    return jax.tree.map(lambda p, g: p - rate * g, local, slope), None

                local, _ = jax.lax.scan(step, params, (rows, masks))
                return judged(local, frozen, other, other_mask)

            return judged(params, frozen, other, other_mask), jax.lax.map(at, jnp.asarray(rates))

        return jax.lax.map(user, rows)

    before, after = jax.jit(users)(model.params, model.frozen, (tokens, mask))
    return np.asarray(before, np.float64), np.asarray(after, np.float64).T
