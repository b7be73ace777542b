"""Optimize C for an error of (C, σ), with σ calibrated under amplification.

In a process of your own, ``OPENBLAS_THREAD_TIMEOUT=4`` in its environment, set before NumPy is
imported, saves a third of the CPU time: threads of NumPy's BLAS would wait awake for more work, on
the cores that compiled code is to use. The command line sets it.
"""

from mfopt.optimize.auto import least_error
from mfopt.optimize.objective import Loss, Objective, log_max_error, log_rmse
from mfopt.optimize.pipeline import factorize
from mfopt.optimize.question import Form, Question, Search, Target
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize

__all__ = [
    "Form",
    "InterruptedOptimization",
    "Loss",
    "Objective",
    "Optimized",
    "Question",
    "Search",
    "Target",
    "factorize",
    "least_error",
    "log_max_error",
    "log_rmse",
    "optimize",
]
