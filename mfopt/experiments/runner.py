"""Runs tasks side by side in processes; what is in the cache is not run again."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterable

from mfopt import _check
from mfopt.experiments.cache import Cache, Result, Task
from mfopt.progress import Progress, Report, silent


def run_all(
    tasks: Iterable[Task],
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Report = silent,
) -> dict[Task, Result]:
    """Results of all ``tasks``; what they need is run first.

    Args:
      tasks: what is wanted; repeats are run once.
      cache: where results are kept; every finished task is in it at once, so that an
        interrupted call resumes.
      jobs: processes; by default one per two cores, at least one. 1 runs in this process.
      progress: told of every finished task, counting only what was not in the cache.

    Raises:
      FailureError, UsageError: what a task raised; tasks that finished before it are kept.
    """
    wanted = list(dict.fromkeys(tasks))
    results: dict[Task, Result] = {}
    for task in wanted:
        if (found := cache.load(task)) is not None:
            results[task] = found
    missing: dict[Task, None] = {}
    for task in wanted:
        if task not in results:
            _collect(task, cache, missing)
    total, done = len(missing), 0
    progress(_cells(0, total))
    jobs = max(1, (os.cpu_count() or 2) // 2) if jobs is None else _check.integer("jobs", jobs)
    jobs = min(jobs, max(total, 1))
    if jobs == 1:
        for task in missing:  # already in an order in which needs come first
            _work(str(cache.folder), task)
            done += 1
            progress(_cells(done, total, task))
    else:
        done = _in_processes(list(missing), cache, jobs, progress)
    for task in wanted:
        if task not in results:
            found = cache.load(task)
            if found is None:
                raise _check.FailureError(f"the cache {cache.folder} lost the result of {task}")
            results[task] = found
    return results


def _cells(done: int, total: int, task: Task | None = None) -> Progress:
    return Progress("computing", done, total, "cells", note="" if task is None else str(task))


def _collect(task: Task, cache: Cache, missing: dict[Task, None]) -> None:
    if task in missing or cache.load(task) is not None:
        return
    for needed in task.needs:
        _collect(needed, cache, missing)
    missing[task] = None


def _work(folder: str, task: Task) -> None:
    """Compute one task in a worker. Imports JAX here, so the pool starts quickly."""
    from mfopt.experiments import tasks

    cache = Cache(folder)
    needed = []
    for source in task.needs:
        result = cache.load(source)
        if result is None:
            raise _check.FailureError(f"the cache {folder} lost the result of {source}")
        needed.append(result)
    cache.store(task, tasks.run(task, needed))


def _in_processes(missing: list[Task], cache: Cache, jobs: int, progress: Report) -> int:
    waiting, finished, done = list(missing), set[Task](), 0
    open_tasks = set(missing)
    # spawn: a forked JAX deadlocks
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running: dict[concurrent.futures.Future[None], Task] = {}
        try:
            while waiting or running:
                for task in list(waiting):
                    if len(running) >= jobs:
                        break
                    if all(need in finished or need not in open_tasks for need in task.needs):
                        waiting.remove(task)
                        running[pool.submit(_work, str(cache.folder), task)] = task
                ready, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in ready:
                    task = running.pop(future)
                    future.result()
                    finished.add(task)
                    done += 1
                    progress(_cells(done, len(missing), task))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done
