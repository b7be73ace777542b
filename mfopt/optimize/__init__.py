"""Optimize C for an error of (C, σ), with σ calibrated under amplification."""

from mfopt.optimize.auto import least_error
from mfopt.optimize.objective import Loss, log_max_error, log_rmse
from mfopt.optimize.pipeline import factorize
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize

__all__ = [
    "InterruptedOptimization",
    "Loss",
    "Optimized",
    "factorize",
    "least_error",
    "log_max_error",
    "log_rmse",
    "optimize",
]
