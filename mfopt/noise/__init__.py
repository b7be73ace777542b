"""Streaming of correlated noise C⁻¹z: in JAX, and in the training code that users have."""

from mfopt.noise.state import NoiseState
from mfopt.noise.stream import NoiseExhaustedError, NoiseStream, from_factorization

__all__ = ["NoiseExhaustedError", "NoiseState", "NoiseStream", "from_factorization"]
