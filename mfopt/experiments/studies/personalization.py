"""Personalizing ELS and ULS models to users that took no part: appendix G.2 of Charles et al. 2024.

Half of a held-out user's records fine-tune the model further by SGD, the other half judge it. This
happens at each user, on its own records and without noise: the guarantee is that of the model which
was trained before, and says nothing of a personalized one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.options import option
from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.runs.fine_tuning import Arm
from mfopt.experiments.runs.means import ELS, ULS, Z95
from mfopt.experiments.runs.personalization import PersonalizationCell, chosen
from mfopt.experiments.studies.engine import PRIVACY, Found, Row
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, FineTuning
from mfopt.experiments.studies.rows import curve, level, pick

BASE = "pretrained"


@dataclasses.dataclass(frozen=True)
class Personalization(FineTuning):
    """Mean loss of held-out users before and after they personalize, by algorithm and ε."""

    name = "personalization"
    summary = "Personalizing ELS and ULS models to users that took no part."
    source = "Charles et al. 2024, appendix G.2, Figure 18"
    default_size = "embedded corpus, ELS and ULS at 2 ε, 3 seeds, 12 runs, 5 local rates"
    time = "about 7 CPU-minutes"
    full = (
        f"{FineTuning.PAPER} epsilons=1,4,16,64 budget=1024 els_group=16 group=16 records=64 "
        "local_batch=8"
    )
    keeps = True
    full_size = "2,000 steps of GPT-2 small's shape, 4 ε, users of 64 records, 3 seeds, 4 rates"
    columns = (
        "epsilon=ε; algorithm; group=G; before; after=personalized; fall; fall_half95=± (95%); "
        "local_rate=local rate; users; privacy_unit=unit; sampling; noise_multiplier=σ"
    )
    title = (
        "Personalizing to held-out users, {0.budget} records a step, user-level DP, δ = {0.delta:g}"
    )

    epsilons: tuple[float, ...] = option((2.0, 16.0), "ε of the runs.", name="--eps")
    budget: int = option(64, "Records a step to expect.")
    els_group: int = option(4, "G of ELS.")
    group: int = option(4, "G of ULS.")
    records: int = option(
        16, "Most records of a user: half to personalize, half to judge.", name="--user-records"
    )
    local_epochs: int = option(4, "Passes over the first half.")
    local_batch: int = option(4, "Records of a local step.")
    local_rates: tuple[float, ...] = option(
        (0.03, 0.1, 0.3, 1.0, 3.0), "Local rates of SGD to choose from."
    )

    def check_together(self) -> None:
        if self.records % (2 * self.local_batch):
            rule = f"must be a multiple of twice `local_batch` = {self.local_batch}"
            raise _check.reject("records", self.records, rule)

    def arms(self) -> Iterator[Arm]:
        for epsilon in self.epsilons:
            yield Arm(ELS, self.els_group, float(self.budget), epsilon)
            yield Arm(ULS, self.group, self.budget / self.group, epsilon)

    def local(self, run: Cell | None) -> PersonalizationCell:
        """Cell in which the held-out users personalize the model of a run, or the pretrained
        one."""
        return PersonalizationCell.of(self, trained=run)

    def cells(self) -> Iterable[Cell]:
        runs = list(super().cells())
        return [*runs, self.local(None), *map(self.local, runs)]

    def more(self, found: Found) -> Iterable[Cell]:
        runs = list(super().more(found))
        return [*runs, *map(self.local, runs)]

    def rows(self, found: Found) -> list[Row]:
        first = {"algorithm": BASE, "group": None, "learning_rate": None, **dict.fromkeys(PRIVACY)}
        rows = [first | {"runs": 1, **self._local_row([found[self.local(None)]])}]
        for arm in self.arms():
            own, cells = self.row(found, arm), self.runs(arm, self.chosen(found, arm).rate)
            local = self._local_row([found[self.local(cell)] for cell in cells])
            rows.append({key: own[key] for key in (*first, "runs")} | local)
        return rows

    def _local_row(self, each: list[Result]) -> Row:
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

    def panels(self, rows: list[Row]) -> list[Panel]:
        curves: list[Curve] = []
        for name in (BASE, ELS, ULS):
            mine = pick(rows, algorithm=name)
            for when, label in (("before", name), ("after", f"{name}, personalized")):
                if name == BASE:
                    drawn = level(label, self.epsilons, mine[0][when])
                else:
                    drawn = curve(label, mine, "epsilon", when, None)
                curves.append(drawn._replace(like=None if when == "before" else name))
        label = LOSS_LABEL.replace("held-out users", "the second half\nof held-out users' records")
        axis = "user-level ε (log scale)"
        return [Panel(curves, "with and without personalization", axis, label)]

    def findings(self, rows: list[Row]) -> list[str]:
        base, *others = rows
        fell = "{fall:.4f} ± {fall_half95:.4f}".format_map
        said = [
            f"the pretrained model falls by {fell(base)} nats per token where {base['users']} "
            "users personalize it"
        ]
        for els, uls in zip(others[::2], others[1::2], strict=True):
            before, after = (uls[when] - els[when] for when in ("before", "after"))
            said.append(
                f"ε = {els['epsilon']:g}: personalizing lowers ELS by {fell(els)} and ULS by "
                f"{fell(uls)}; ULS less ELS is {before:+.4f} before and {after:+.4f} after"
            )
        return said
