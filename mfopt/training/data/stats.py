"""Statistics of a store: records per user and tokens per record."""

from __future__ import annotations

import numpy as np

from mfopt._runtime._types import JsonObject
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


def summary(store: TokenStore) -> JsonObject:
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
