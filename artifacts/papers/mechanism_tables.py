"""Tables of mechanisms by size, and the factorizations that pages, notebooks and tests read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from common import Artifact, ProvenCell, Run, main, proven

from mfopt._version import __version__
from mfopt.experiments import comparison, plots, tables
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import strategy_of
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.workloads import PrefixSums

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SIZES = tuple((epochs, bins) for epochs in (8, 16, 32) for bins in (32, 64, 128))
DELTA, SEED = 1e-5, 0
# what changes with ε in between is in the tables of forms
GRID_KINDS, GRID_EPSILONS = ("blt-4", "toeplitz", "blt-4-scaled"), (0.5, 2.0, 8.0)
# the forms of C side by side, from the smallest memory to the reference optimum
FORMS = (
    *("blt-4", "toeplitz", "blt-2-scaled", "blt-4-scaled", "wave-blt-4-scaled"),
    *("toeplitz-scaled", "banded+amplified", "dense"),
)


class Place(NamedTuple):
    """One mechanism of the grid."""

    kind: str
    epochs: int
    bins: int
    epsilon: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.epochs}x{self.bins}-eps{self.epsilon:g}"

    def cell(self) -> ProvenCell:
        """Its certificate, which names the estimate of its σ, and that its C."""
        setting = Comparison(self.bins, self.epochs, (self.epsilon,), DELTA, seed=SEED)
        return proven(setting, self.kind, self.epsilon)


def factorization(run: Run, place: Place) -> list[Path]:
    """A certified factorization as a file."""
    cell = place.cell()
    (estimated,) = cell.sigmas
    results = run.results([cell, estimated, estimated.source])
    certified, estimate, source = (result.record for result in results.values())
    guarantee = Guarantee.from_description(certified["guarantee"])
    folder = run.folder / "factorizations"
    folder.mkdir(exist_ok=True)
    mechanism = Factorization(
        strategy_of(results[cell]),
        guarantee.noise_multiplier,
        cell.goal.bin_scheme(),
        PrefixSums(),
        guarantee,
        provenance={
            "version": __version__,
            "command": f"python artifacts/papers/mechanism_tables.py {place}",
            "seed": SEED,
            "device": certified["device"],
            "made": certified["made"],
            "estimated_noise_multiplier": estimate["noise_multiplier"],
            "estimate_relative_error": estimate["relative_error"],
            "optimizer_status": source["status"],
            "optimizer_seconds": source["seconds"],
        },
    )
    return [mechanism.save(folder / f"{place}.npz", force=True)]


def grid(run: Run) -> list[Path]:
    """σ and RMSE of BLT-4, plain and time-scaled, and of Toeplitz C, by size and ε."""
    places = [Place(k, *size, e) for size in SIZES for e in GRID_EPSILONS for k in GRID_KINDS]
    cells = {place: place.cell().sigmas[0] for place in places}
    results = run.results([each for cell in cells.values() for each in (cell.source, cell)])
    values = ("noise_multiplier", "rmse", "relative_error")
    rows = [
        (
            *(place.kind, place.epochs, place.bins, f"{place.epsilon:g}", f"{DELTA:g}"),
            *(results[cell].record[value] for value in values),
            results[cell.source].record["seconds"],
        )
        for place, cell in cells.items()
    ]
    header = "kind", "epochs", "bins", "epsilon", "delta", *values, "optimizer_seconds"
    return write_table(run, "grid", tables.csv_text(header, rows))


def strategies(run: Run, epochs: int, bins: int) -> list[Path]:
    """The forms of C at one size, each against plain Toeplitz: how much time-scaling gains."""
    setting = Comparison(bins, epochs, EPSILONS, DELTA, FORMS, (bins,), seed=SEED)
    text = comparison.csv_text(run.compare(setting), "toeplitz")
    return write_table(run, f"strategies-{epochs}x{bins}", text)


def write_table(run: Run, name: str, text: str) -> list[Path]:
    """A table as tables/NAME.csv."""
    return plots.write_files(run.folder / "tables" / name, {".csv": text}, {})


READ = (
    *(Place("blt-4", 8, 32, 2.0), Place("blt-4", 8, 32, 8.0), Place("blt-4", 16, 32, 2.0)),
    Place("toeplitz-scaled", 16, 32, 2.0),
    *(Place("blt-4-scaled", 8, 32, 2.0), Place("blt-4-scaled", 8, 32, 8.0)),
)
TABLES = {
    **{str(place): Artifact(lambda run, place=place: factorization(run, place)) for place in READ},
    "grid": Artifact(grid),
    "strategies-8x32": Artifact(lambda run: strategies(run, 8, 32)),
    "strategies-32x32": Artifact(lambda run: strategies(run, 32, 32)),
}

if __name__ == "__main__":
    main(__file__, __doc__, TABLES)
