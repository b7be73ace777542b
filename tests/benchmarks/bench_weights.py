"""Test losses with other weights in the default objective: what each gains, and where it loses.

    python tests/benchmarks/bench_weights.py --out artifacts/bench-weights.json

C minimizes the final-model error and that of prefix sums with other weights (``WEIGHTS``), in the
form that is searched by default, with σ from fresh samples. Models are trained as in
``accuracy_all.py``, each C at its best rate. Of each cell: mean test loss with today's weights, and
the change with others in percent of it with half a 95% interval, over paired seeds.
"""

import numpy as np
from accuracy_all import BINS, DELTA, EPOCHS, STEPS, _estimated, interval
from accuracy_runs import scores
from harness import Bench

from mfopt import final_model, optimize
from mfopt.final_model import DEFAULT_SCHEDULES, WORKLOAD_SHARE
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.workloads import PrefixSums

# largest curvature h·Σ η, share of the workload, schedules
WEIGHTS = {
    "today's": (5, WORKLOAD_SHARE, DEFAULT_SCHEDULES),
    "curvatures to 30": (30, WORKLOAD_SHARE, DEFAULT_SCHEDULES),
    "a quarter for the workload": (5, 0.25, DEFAULT_SCHEDULES),
    "twice the constant rate": (5, WORKLOAD_SHARE, ("constant", *DEFAULT_SCHEDULES)),
}
SCHEMES = {"balls-in-bins": (BallsInBins, "blt"), "fresh-bins": (FreshBins, "cleared-blt")}
READ = {
    "constant": ("constant", "last"),
    "averaged": ("constant", "averaged"),
    "linear": ("linear", "last"),
}

bench = Bench(
    __file__,
    __doc__,
    eps=([2.0, 0.5], "ε, a list."),
    tasks=(["mlp", "softmax"], "Models, a list."),
    seeds=(16, "Paired seeds."),
)


@bench.work
def measured(options):
    """Cell -> mean losses with today's weights, and changes with others."""
    report = {}
    for name, (scheme_class, kind) in SCHEMES.items():
        for epsilon in options.eps:
            losses = {}
            for weights, (largest, share, schedules) in WEIGHTS.items():
                final_model.CURVATURES = np.geomspace(0.1, largest, 10)
                question = optimize.Question(
                    optimize.Target(epsilon, DELTA, seed=1),
                    optimize.Form(kind, buffers=4),
                    final_model.MixedError(PrefixSums(), STEPS, schedules, share),
                    optimize.Search(time_scale=True),
                )
                scheme = scheme_class(BINS, EPOCHS)
                strategy = optimize.optimize(scheme, question).strategy
                mechanism = _estimated(weights, strategy, scheme, epsilon)
                for task in options.tasks:
                    trained = scores(mechanism, task, "sgd", ["constant", "linear"], options.seeds)
                    for reading, key in READ.items():
                        losses[f"{task}, {reading}", weights] = trained[key].losses
            cells = report[f"{name}, ε = {epsilon:g}"] = {}
            first, *others = WEIGHTS
            for cell in dict.fromkeys(cell for cell, _ in losses):
                mean = losses[cell, first].mean()
                cells[cell] = {first: float(f"{mean:.4f}")}
                for weights in others:
                    change = interval(losses[cell, weights] - losses[cell, first])
                    cells[cell][weights] = [float(f"{100 * x / mean:.2f}") for x in change]
            bench.keep(report)
    return report


if __name__ == "__main__":
    bench.main()
