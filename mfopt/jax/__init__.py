"""Batches, clipping and noise of a factorization in a JAX loop, under jit and scan."""

from mfopt.jax.batches import Batches, StepBatch
from mfopt.jax.run import PrivateRun, PrivateState

__all__ = ["Batches", "PrivateRun", "PrivateState", "StepBatch"]
