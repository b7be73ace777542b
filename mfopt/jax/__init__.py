"""A factorization in a JAX loop: its batches, its clipping, its noise, under jit and scan."""

from mfopt.jax.batches import Batches, StepBatch
from mfopt.jax.run import PrivateRun, PrivateState

__all__ = ["Batches", "PrivateRun", "PrivateState", "StepBatch"]
