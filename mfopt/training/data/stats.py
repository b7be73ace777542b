"""Statistics of a store: records per user and tokens per record, as numbers and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mfopt._runtime import _files
from mfopt.training.data.store import TokenStore

_QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}


def _spread(values: np.ndarray) -> dict[str, float]:
    """Minimum, quantiles, mean and maximum; empty where there are no values."""
    if not len(values):
        return {}
    levels = np.quantile(values, list(_QUANTILES.values()))
    return {
        "min": int(values.min()),
        **{name: float(level) for name, level in zip(_QUANTILES, levels, strict=True)},
        "mean": float(values.mean()),
        "max": int(values.max()),
    }


def summary(store: TokenStore) -> dict[str, Any]:
    """Sizes and spreads of ``store``, JSON-able: without noise, and as private as the data."""
    return {
        "users": store.num_users,
        "records": store.num_records,
        "tokens": store.num_tokens,
        "vocab_size": store.vocab_size,
        "records_per_user": _spread(store.records_per_user()),
        "tokens_per_record": _spread(store.record_lengths()),
        "tokens_per_user": _spread(np.diff(store.record_offsets[store.user_offsets])),
    }


def plot(stores: dict[str, TokenStore], path: str | Path, title: str = "") -> None:
    """Histograms of records per user and tokens per record, one colour per part, as PNG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels: dict[str, Any] = {
        "records per user": [store.records_per_user() for store in stores.values()],
        "tokens per record": [store.record_lengths() for store in stores.values()],
    }
    for axes, (label, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        everything = np.concatenate(values)
        if not len(everything):
            axes.set_visible(False)
            continue
        largest = int(everything.max())
        edges = np.arange(largest + 2)
        if largest > 30:  # logarithmic, each bin with at least one whole number; 0 has its place
            edges = np.append(0, np.unique(np.geomspace(1, largest + 1, 40).round()))
            axes.set_xscale("symlog", linthresh=1.0)
            axes.set_yscale("log")
        for name, counts in zip(stores, values, strict=True):
            found = f"median {np.median(counts):g}, max {counts.max():,}" if len(counts) else "none"
            axes.hist(counts, edges - 0.5, histtype="step", linewidth=1.5, label=f"{name}: {found}")
        axes.set(xlabel=label, ylabel=label.rpartition(" per ")[2] + "s")
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    suffix = Path(path).suffix.lstrip(".") or "png"
    _files.write(path, lambda stream: figure.savefig(stream, format=suffix, dpi=150))
