"""Seconds that the noise of a step takes on this machine, for rows of a comparison.

Not part of a row's cell: a time belongs to the machine and the moment, so it is measured when it
is asked for and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from mfopt.experiments.cache import Cache
from mfopt.experiments.comparison import Comparison, Row, plan
from mfopt.experiments.mechanisms import strategy_of
from mfopt.noise.choice import choose
from mfopt.noise.measure import measure
from mfopt.noise.stream import NoiseStream
from mfopt.progress import Progress, Report, silent


def timed(
    setting: Comparison,
    rows: Sequence[Row],
    cache: Cache,
    parameters: int,
    *,
    progress: Report = silent,
) -> list[Row]:
    """The rows with ``noise_seconds``: of one step's noise, mean over the run.

    Each kind of recursion is timed once for each number of buffers and draws: what it multiplies
    by costs nothing.

    Args:
      setting: what was compared.
      rows: of it; their cells are in the cache.
      cache: where C is found.
      parameters: elements of the model.
      progress: callback for each row.

    Raises:
      FailureError: the noise of this many parameters does not fit into memory.
    """
    n = setting.bins * setting.epochs
    planned = plan(setting)
    seconds: dict[tuple[type, int, float], float] = {}
    found = []
    for done, row in enumerate(rows):
        stage = f"timing the noise of {parameters:,} parameters"
        progress(Progress(stage, done, len(rows), "mechanisms", note=row.family))
        sigma = dict(planned[row.family, row.epsilon])[row.size]
        held = cache.load(sigma.source)
        assert held is not None, "its σ was found from it"
        strategy = strategy_of(held)
        recursion = choose(strategy, n)
        key = (type(recursion), recursion.slots, recursion.draws(n))
        if key not in seconds:
            stream = NoiseStream(strategy, iterations=n, noise_multiplier=1.0, clip_norm=1.0)
            seconds[key] = measure(stream, parameters).run_seconds / n
        found.append(row._replace(noise_seconds=seconds[key]))
    return found
