"""Questions to the optimizer in one line: statement, form of C, error and search by name."""

from mfopt.optimize import Form, Objective, Question, Search, Target, factorize, optimize
from mfopt.progress import silent
from mfopt.workloads import PrefixSums


def asked(
    epsilon,
    delta=1e-5,
    *,
    loss="robust",
    workload=None,
    strategy=None,
    bands=None,
    buffers=None,
    seed=None,
    certify_samples=None,
    **search,
):
    """A question; what is not named has its default."""
    target = Target(epsilon, delta, samples=certify_samples, seed=seed)
    if isinstance(loss, str):
        loss = Objective(loss, workload=workload or PrefixSums())
    return Question(target, Form(strategy, bands, buffers), loss, Search(**search))


def searched(scheme, epsilon, delta, *, loss="rmse", progress=silent, **options):
    """The C of lowest error under amplification."""
    return optimize(scheme, asked(epsilon, delta, loss=loss, **options), progress)


def factorized(scheme, epsilon, delta=1e-5, *, progress=silent, **options):
    """C with its certified σ."""
    return factorize(scheme, asked(epsilon, delta, **options), progress=progress)
