"""Compute cells side by side in processes; what is in the cache is not computed again."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import graphlib
import importlib
import itertools
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from mfopt._runtime import _check, _signals
from mfopt.experiments.cache import Cache, Cell, Result
from mfopt.progress import Progress, Report, silent


def run_all(
    cells: Iterable[Cell],
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> dict[Cell, Result]:
    """Results of all ``cells``; what they need is computed first.

    Args:
      cells: what is wanted; repeats are computed once.
      cache: where results are kept; every finished cell is in it at once, so that an
        interrupted call resumes.
      jobs: processes; by default one per two cores, at least one. 1 works in this process.
      progress: callback for every finished cell, counting only what was not in the cache.

    Raises:
      FailureError, UsageError: what a cell raised; cells that finished before it are kept.
      KeyboardInterrupt: as it came; what was unfinished is not kept, and a note says what is.
    """
    distinct = list(dict.fromkeys(cells))
    cached = {cell: result for cell in distinct if (result := cache.load(cell)) is not None}
    missing = with_needs(distinct, lambda cell: cell in cached or cache.load(cell) is not None)
    total, told = len(missing), _counting(missing, _signals.heard(progress))
    jobs = usual_jobs() if jobs is None else _check.integer("jobs", jobs)
    jobs = min(jobs, max(total, 1))
    try:
        if jobs == 1:
            for cell in missing:  # needs come first
                _work(str(cache.folder), cell)
                told(cell)
        else:
            _in_processes(missing, cache, jobs, told)
    except KeyboardInterrupt as stop:
        kept = sum(cache.has(cell) for cell in missing)
        stop.add_note(f"{kept} of {total} cells are kept: the same command resumes")
        raise
    return {cell: cached[cell] if cell in cached else _kept(cache, cell) for cell in distinct}


def _kept(cache: Cache, cell: Cell) -> Result:
    """The result of a cell that was computed; FailureError where it is gone."""
    if (result := cache.load(cell)) is None:
        raise _check.FailureError(f"the cache {cache.folder} lost the result of {cell}")
    return result


def usual_jobs() -> int:
    """Processes where none are asked for: one for every two cores."""
    return max(1, (os.cpu_count() or 2) // 2)


def _counting(cells: list[Cell], progress: Report) -> Callable[[Cell], None]:
    """Return what reports each of the ``cells`` that is finished.

    No time left is told. By a cost for each kind of cell it was wrong by more than a factor of two
    at some time in five of six comparisons that the costs were not fitted on.
    """
    event, numbers = Progress("computing", 0, len(cells), "cells"), itertools.count(1)
    progress(event)
    return lambda cell: progress(dataclasses.replace(event, done=next(numbers), note=str(cell)))


def with_needs(
    cells: Iterable[Cell], but: Callable[[Cell], bool] = lambda cell: False
) -> list[Cell]:
    """The cells and all that they are made from, each once, needs first; ``but`` says which not."""
    ordered: dict[Cell, None] = {}

    def add(cell: Cell) -> None:
        if cell not in ordered and not but(cell):
            for needed in cell.needs:
                add(needed)
            ordered[cell] = None

    for cell in cells:
        add(cell)
    return list(ordered)


def _work(folder: str, cell: Cell) -> None:
    """Compute one cell in a worker and keep its result."""
    cache = Cache(folder)
    cache.store(cell, _compute(cell, [_kept(cache, source) for source in cell.needs]))


def _compute(cell: Cell, needed: list[Result]) -> Result:
    """One cell's result; its wall and processor time and its machine go on record."""
    begun, worked = time.perf_counter(), time.process_time()
    result = cell.run(*needed)
    record = {
        **result.record,
        "cell": {"name": cell.name, **cell.settings},
        "seconds": round(time.perf_counter() - begun, 3),
        "cpu_seconds": round(time.process_time() - worked, 3),  # of all threads
        "device": device(),
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    return Result(record, result.arrays)


def device() -> str:
    """Device that computed a result, without the machine's name."""
    import jax  # here, so that a call that finds everything in the cache does not wait for it

    cores = len(_places()) or os.cpu_count()
    name = "CPU" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    return f"{name}, {cores} cores ({platform.machine()})"


def _own_modules() -> list[str]:
    """Modules that define a user's own kinds: a worker knows a kind once it has imported them.

    What was typed in or run by ``exec`` has no module to import: cells of other kinds still run.
    """
    from mfopt.strategies import registered

    names = {cls.__module__ for cls in registered().values()}
    user_modules = {name for name in names if not name.startswith("mfopt.") and name != "__main__"}
    return sorted(name for name in user_modules if getattr(sys.modules.get(name), "__spec__", None))


@functools.cache
def _places() -> tuple[int, ...]:
    """Cores that this process may run on, as it began; none where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def _shares(jobs: int) -> list[tuple[int, ...]]:
    """Cores for each of so many workers: all of them shared out, or one each."""
    places = _places()
    return [places[i % len(places) :: jobs] if places else () for i in range(jobs)]


def _begin(modules: list[str], mine: multiprocessing.SimpleQueue[tuple[int, ...]]) -> None:
    """A worker's first call: its own kinds, its own cores, and no more threads than these.

    More threads, of JAX or of the BLAS, would wait for one another, in all workers at once, for
    longer than they work: a σ of 128 bins took five times as long.
    """
    import scipy.linalg  # noqa: F401  (what is not loaded yet cannot be limited)
    from threadpoolctl import threadpool_limits

    _places()  # while these are all; JAX counts those that are left when it first works
    cores = mine.get()
    if cores:
        os.sched_setaffinity(0, cores)
    threadpool_limits(max(len(cores), 1), user_api="blas")
    for name in modules:
        importlib.import_module(name)


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that each work on cores of their own; what is not begun ends with an exception.

    Raises:
      FailureError: one of them was killed from outside.
    """
    # spawn: a forked JAX deadlocks
    context = multiprocessing.get_context("spawn")
    core_shares = context.SimpleQueue()
    for share in _shares(jobs):
        core_shares.put(share)
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(_own_modules(), core_shares)
    ) as pool:
        try:
            yield pool
        except concurrent.futures.BrokenExecutor as problem:
            raise _check.FailureError(
                "a worker process was killed, as the system does where memory runs out. Finished "
                "cells are kept: the same command resumes (with `jobs=1` in the least "
                "memory)"
            ) from problem
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_processes(
    missing: list[Cell], cache: Cache, jobs: int, told: Callable[[Cell], None]
) -> None:
    absent = frozenset(missing)
    order = graphlib.TopologicalSorter({cell: absent & {*cell.needs} for cell in missing})
    order.prepare()
    ready: list[Cell] = []
    running: dict[concurrent.futures.Future[None], Cell] = {}
    with workers(jobs) as pool:
        while order.is_active():
            ready += order.get_ready()
            # no more than are at work: waiting takes a lock of each
            while ready and len(running) < jobs:
                cell = ready.pop(0)
                running[pool.submit(_work, str(cache.folder), cell)] = cell
            until_first = concurrent.futures.FIRST_COMPLETED
            for future in concurrent.futures.wait(running, return_when=until_first).done:
                cell = running.pop(future)
                future.result()
                order.done(cell)
                told(cell)
