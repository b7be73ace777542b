"""Streaming of correlated noise C⁻¹z: in JAX, and in the training code that users have.

Adapters are modules of their own, each importing its library: :mod:`mfopt.noise.for_optax` and
:mod:`mfopt.noise.for_torch`.
"""

from mfopt.noise.files import load_state, owner_only, save_state
from mfopt.noise.state import NoiseState
from mfopt.noise.stream import NoiseExhaustedError, NoiseStream, from_factorization

__all__ = [
    "NoiseExhaustedError",
    "NoiseState",
    "NoiseStream",
    "from_factorization",
    "load_state",
    "owner_only",
    "save_state",
]
