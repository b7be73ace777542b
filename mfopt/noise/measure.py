"""Measured cost of a noise stream on this machine before a run: memory, and seconds per step."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from mfopt._runtime import _check, _sizes
from mfopt.noise.recursions import Rows
from mfopt.noise.state import NoiseState
from mfopt.noise.stream import NoiseStream

_PROBE = 8  # step at which strategies that use all past draws are timed a second time


@dataclasses.dataclass(frozen=True)
class Cost:
    """Measured cost of a stream for one array of ``parameters`` elements on one device.

    Attributes:
      device: kind of device.
      buffer_bytes: what the state keeps between steps.
      peak_bytes: the most that is alive inside a step: buffers, the noise, temporary arrays.
      compile_seconds: compiling, once per run.
      first_seconds, last_seconds: time of step 0 and of step n-1.
      run_seconds: noise of all n steps together.
      extrapolated: whether the last two were extrapolated from short measurements: time grows
        with the step where past draws are regenerated.
    """

    parameters: int
    device: str
    buffer_bytes: int
    peak_bytes: int
    compile_seconds: float
    first_seconds: float
    last_seconds: float
    run_seconds: float
    extrapolated: bool


def measure(stream: NoiseStream, parameters: int, *, repeats: int = 5) -> Cost:
    """Run a few steps with a pinned key and time them (median of ``repeats``).

    Raises:
      UsageError: fewer than 1 parameter or repeat.
      FailureError: the step would need more memory than is free (said before allocating it), or
        the device does not tell how much memory a compiled step uses.
    """
    parameters = _check.integer("parameters", parameters)
    repeats = _check.integer("repeats", repeats)
    shape = jax.ShapeDtypeStruct((parameters,), stream.dtype)
    refuse_too_large(stream, parameters)
    started = time.perf_counter()
    state = stream.init(shape, seed=0)  # its steps are repeated
    sums = jax.numpy.zeros(shape.shape, shape.dtype)

    def step_of(state: NoiseState) -> NoiseState:
        noise, state = stream.release(sums, state) if stream.secure else stream.next(state)
        jax.block_until_ready((noise, state.buffers))
        return state

    state = step_of(state)
    compile_seconds = time.perf_counter() - started
    memory = stream.compile_step(state).memory_analysis()
    if memory is None:
        raise _check.FailureError(f"{jax.devices()[0].platform} does not tell how much it uses")
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )

    def seconds_at(step: int) -> float:
        nonlocal state
        times = []
        for _ in range(repeats):
            state = dataclasses.replace(state, step=np.int32(step))
            started = time.perf_counter()
            state = step_of(state)
            times.append(time.perf_counter() - started)
        return float(np.median(times))

    first_seconds, recursion = seconds_at(0), stream.recursion
    lags, probe = np.arange(stream.iterations), 0
    seconds = np.full(len(lags), first_seconds)
    if isinstance(recursion, Rows) and (probe := min(_PROBE, len(lags) - 1)):
        per_draw = max(0.0, seconds_at(probe) - first_seconds) / probe
        seconds += per_draw * np.minimum(lags, recursion.window - 1)
    return Cost(
        parameters=parameters,
        device=jax.devices()[0].device_kind,
        buffer_bytes=stream.buffer_bytes(parameters),
        peak_bytes=int(peak),
        compile_seconds=max(0.0, compile_seconds - first_seconds),
        first_seconds=first_seconds,
        last_seconds=float(seconds[-1]),
        run_seconds=float(seconds.sum()),
        extrapolated=0 < probe < len(lags) - 1,
    )


def refuse_too_large(stream: NoiseStream, parameters: int) -> None:
    """Raise :class:`FailureError` if buffers and two copies of the parameters do not fit."""
    needed = stream.buffer_bytes(parameters) + 2 * parameters * stream.dtype.itemsize
    free = free_bytes()
    if free is not None and needed > free:
        rule = f"{parameters} parameters with {stream.recursion.slots} buffers need "
        rule += f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free. Use a narrower "
        rule += "buffer type, a strategy with fewer buffers, or more devices (the buffers are cut "
        rule += "like the parameters)."
        raise _check.FailureError(rule)


def free_bytes() -> int | None:
    """Free memory of the default device; None where it is unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _sizes.free_memory()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
