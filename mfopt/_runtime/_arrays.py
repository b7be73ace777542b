"""Types of arrays."""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
"""A numpy array, or a JAX array (a tracer under differentiation)."""

Scalar: TypeAlias = float | jax.Array
"""A number, which may be traced."""

Step: TypeAlias = int | np.integer | Array
"""Number of an iteration, counted from 0, which may be traced."""
