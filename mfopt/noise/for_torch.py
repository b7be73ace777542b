"""Correlated noise for a list of PyTorch parameters."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mfopt import _extras

try:
    import torch
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

from mfopt import _check
from mfopt.noise import _draws, _keys, files
from mfopt.noise.recursions import Modal, Ring, Rows
from mfopt.noise.stream import NoiseExhaustedError, NoiseStream

STATE = "mfopt_noise"  # where an optimizer's state_dict keeps the noise
_TYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


class TorchNoise:
    """The noise of a :class:`NoiseStream` for PyTorch parameters, each on its own device.

    ``next()`` gives a list of tensors shaped like the parameters, to be added to the *sums* of
    clipped gradients of one step. Unlike the JAX stream it keeps its state itself.

    For parameters on the CPU, the white draws are those of the JAX stream, element by element,
    handed over without a copy: with one pinned seed both give the same noise. PyTorch's CPU
    generator would not do: it keeps 32 bits of its seed, so that two of a run's steps, or two
    runs, could get the same draws. On other devices, PyTorch's own generator, seeded anew for
    each step and parameter with 64 bits of a SHA-256 of the key, makes 64 random bits for each
    element, and the same inversion as in JAX uses all of them: ``torch.randn`` stops at |z| = 6.7
    or before, and what is beyond shows a unit that is spread over many parameters.

    **Secret**, as the state of the stream: ``state_dict`` holds the key of the noise. Prefer
    :meth:`save`, which makes files that only their owner can read.

    Args:
      stream: strategy, scale and types.
      parameters: floating-point tensors (not distributed ones).
      seed: pins the noise, for experiments only; the default key is the operating system's.
      key: a secret key that the caller keeps, uint32 of shape (8,), never used before.
    """

    def __init__(
        self,
        stream: NoiseStream,
        parameters: Iterable[torch.Tensor],
        *,
        seed: int | None = None,
        key: Any = None,
    ) -> None:
        if stream.secure:
            raise _check.reject(
                "stream",
                "secure",
                "PyTorch would add its noise to sums that are not on its grid",
                "Make it without secure, or release the sums in JAX (stream.release).",
            )
        self.stream = stream
        self.pinned = seed is not None
        self.step = 0
        self._like = [_checked(i, p) for i, p in enumerate(parameters)]
        if not self._like:
            raise _check.reject("parameters", [], "must hold at least one tensor")
        self._shapes = tuple(shape for shape, _ in self._like)
        self._counters = _draws.allocate(self._shapes, stream.iterations)
        self._key = _keys.choose(seed, key)
        self._dtype = _TYPES[stream.dtype]
        buffer_dtype = getattr(torch, str(stream.buffer_dtype))
        slots = stream.recursion.slots
        self._buffers = [
            torch.zeros((slots, *shape), dtype=buffer_dtype, device=device) if slots else None
            for shape, device in self._like
        ]

    def __repr__(self) -> str:
        kind = "pinned, not private" if self.pinned else "secret"
        return f"TorchNoise({self.stream!r}, step={self.step}, key=<{kind}>)"

    @torch.no_grad()
    def next(self) -> list[torch.Tensor]:
        """The noise of this step, one tensor per parameter; goes on to the next step.

        Raises:
          NoiseExhaustedError: past the last step that the factorization covers.
        """
        if self.step >= self.stream.iterations:
            raise NoiseExhaustedError.after(self.stream.iterations)
        coefficients = tuple(np.asarray(c) for c in self.stream.recursion.at(self.step))
        noise = [self._advance(i, coefficients) for i in range(len(self._like))]
        self.step += 1
        return noise

    def _advance(self, leaf: int, coefficients: tuple[np.ndarray, ...]) -> torch.Tensor:
        recursion, step, buffer = self.stream.recursion, self.step, self._buffers[leaf]
        white = self._draw(leaf, step)
        if isinstance(recursion, Modal):
            return _modal(coefficients, white, buffer)
        weights = coefficients[0]
        if buffer is not None:
            feedback = isinstance(recursion, Ring) and recursion.feedback
            return _buffered(weights, white, step, buffer, feedback)
        noise = white.mul_(float(weights[0]))
        if isinstance(recursion, Rows):
            for lag in range(1, min(step, recursion.window - 1) + 1):
                noise.add_(self._draw(leaf, step - lag), alpha=float(weights[lag]))
        return noise

    def _draw(self, leaf: int, step: int) -> torch.Tensor:
        shape, device = self._like[leaf]
        if device.type == "cpu":
            return self._draw_by_counters(leaf, step)
        return self._draw_by_generator(shape, device, leaf, step)

    def _draw_by_counters(self, leaf: int, step: int) -> torch.Tensor:
        wide = self.stream.dtype == np.float64
        draw = _white(self._counters[leaf], self.stream.stddev, self.stream.dtype)
        with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(wide):
            return torch.utils.dlpack.from_dlpack(draw(self._key, np.int32(step), np.uint32(leaf)))

    def _draw_by_generator(
        self, shape: tuple[int, ...], device: torch.device, leaf: int, step: int
    ) -> torch.Tensor:
        text = f"mfopt torch noise {step} {leaf}".encode()
        digest = hashlib.sha256(self._key.tobytes() + text).digest()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(digest[:8], "little"))
        bits = torch.empty(shape, dtype=torch.int64, device=device)
        bits.random_(-(2**63), None, generator=generator)
        offset = (int.from_bytes(digest[8:12], "little") + 0.5) * 2.0**-32
        return _inverted(bits, offset, self._dtype).mul_(self.stream.stddev)

    def state_dict(self) -> dict[str, Any]:
        """**Secret.** Everything :meth:`load_state_dict` needs, for PyTorch checkpoints."""
        return {
            "key": torch.from_numpy(self._key.view(np.int32).copy()),
            "step": self.step,
            "pinned": self.pinned,
            "digest": self.stream.digest,
            "settings": self.stream.settings,
            "shapes": [list(shape) for shape in self._shapes],
            "buffers": [None if b is None else b.clone() for b in self._buffers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; nothing changes where it is refused.

        Raises:
          UsageError: the state belongs to another factorization, other settings or other
            parameters, or its step, key or buffers are not such as this object saves.
        """
        key, buffers = self.check_state_dict(state)
        for mine, theirs in zip(self._buffers, buffers, strict=True):
            if mine is not None:
                mine.copy_(theirs)
        self._key = key
        self.step, self.pinned = state["step"], state["pinned"]

    def check_state_dict(self, state: Any) -> tuple[np.ndarray, list[Any]]:
        """(key, buffers) of a state, or the errors of :meth:`load_state_dict`; changes nothing."""
        if not isinstance(state, dict):
            raise _check.reject("state", type(state).__name__, "must come from state_dict")
        files.refuse_other(state, self.stream)
        if state.get("silent"):
            raise _check.reject(
                "state",
                "of a process that adds no noise",
                "holds neither key nor buffers",
                "Save and load the optimizer of rank 0.",
            )
        if state.get("shapes") != [list(shape) for shape in self._shapes]:
            raise _check.reject("state", state.get("shapes"), "belongs to other parameters")
        key, buffers = _words(state.get("key")), state.get("buffers")
        if not isinstance(buffers, list) or len(buffers) != len(self._buffers):
            raise _check.reject("state: buffers", type(buffers).__name__, "must be one a parameter")
        arrays = {"key": key}
        for i, buffer in enumerate(buffers):
            if isinstance(buffer, torch.Tensor):
                arrays[f"buffer/{i}"] = _viewed(buffer)
        files.check_saved(state, arrays, self.stream, self._shapes)
        return key.copy(), buffers

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the state to a file that only its owner can read (see :mod:`mfopt.noise.files`)."""
        header = {k: v for k, v in self.state_dict().items() if k not in ("key", "buffers")}
        arrays = {"key": self._key}
        for i, buffer in enumerate(self._buffers):
            if buffer is not None:
                arrays[f"buffer/{i}"] = _viewed(buffer)
        files.write_secret(path, {"kind": "torch", **header}, arrays, force=force)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file of :meth:`save`; refused where it belongs to something else."""
        header, arrays = files.read_secret(path, "torch")
        files.refuse_other(header, self.stream)
        key = torch.from_numpy(arrays["key"].view(np.int32).copy()) if "key" in arrays else None
        buffers = [
            _tensor(arrays[f"buffer/{i}"]) if f"buffer/{i}" in arrays else None
            for i in range(len(self._buffers))
        ]
        self.load_state_dict({**header, "key": key, "buffers": buffers})


class SilentNoise:
    """The place of the noise in processes that add none: counts the steps, and keeps no buffers."""

    def __init__(self, stream: NoiseStream) -> None:
        self.stream, self.step = stream, 0

    def next(self) -> None:
        """One step more; raises as :meth:`TorchNoise.next` past the last one."""
        if self.step >= self.stream.iterations:
            raise NoiseExhaustedError.after(self.stream.iterations)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """The step, and what it belongs to."""
        stream = self.stream
        return {
            "silent": True,
            "step": self.step,
            "digest": stream.digest,
            "settings": stream.settings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of this class or of a :class:`TorchNoise`, whose secrets stay there.

        Raises:
          UsageError: the state is of another factorization, or its step none of this stream's.
        """
        self.check_state_dict(state)
        self.step = state["step"]

    def check_state_dict(self, state: Any) -> None:
        """Raise the errors of :meth:`load_state_dict`."""
        if not isinstance(state, dict):
            raise _check.reject("state", type(state).__name__, "must come from state_dict")
        files.refuse_other(state, self.stream)
        step = state.get("step")
        if type(step) is not int or not 0 <= step <= self.stream.iterations:
            raise _check.reject("state: step", step, f"must be from 0 to {self.stream.iterations}")


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """(an optimizer's own ``state_dict``, that of the noise in it).

    Raises:
      UsageError: there is none of the noise.
    """
    rest = dict(state)
    found = rest.pop(STATE, None)
    if found is None:
        raise _check.reject(
            "state_dict",
            sorted(rest),
            "holds no noise state: the noise would start again, with another key, on a run whose "
            "first steps are released",
            "Load what this optimizer saved after its noise was replaced, or start a new run.",
        )
    return rest, found


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The inverse of :func:`_viewed`."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _words(key: Any) -> np.ndarray:
    """The key of a state, as the words that it was made from."""
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int32:
        raise _check.reject("state: key", type(key).__name__, "must be a tensor of int32")
    return key.cpu().numpy().view(np.uint32)


def _viewed(buffer: torch.Tensor) -> np.ndarray:
    """A tensor as an array of its own type, bfloat16 included."""
    buffer = buffer.detach().cpu()
    if buffer.dtype == torch.bfloat16:
        return buffer.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return buffer.numpy()


def _checked(index: int, parameter: Any) -> tuple[tuple[int, ...], torch.device]:
    name = f"parameters[{index}]"
    if not isinstance(parameter, torch.Tensor):
        raise _check.reject(name, type(parameter).__name__, "must be a torch.Tensor")
    if not parameter.dtype.is_floating_point:
        raise _check.reject(name, str(parameter.dtype), "must be of a floating-point type")
    if hasattr(parameter, "full_tensor"):
        raise _check.reject(name, "DTensor", "distributed tensors are not supported")
    return tuple(parameter.shape), parameter.device


@functools.cache
def _white(counters: _draws.Counters, stddev: float, dtype: np.dtype) -> Any:
    """The compiled white draw of leaves of one shape: (key, step, leaf) -> array on the CPU."""

    def draw(key: Any, step: Any, leaf: Any) -> jax.Array:
        made = counters.draw(_draws.seeds(key, step, leaf[None]).of(0), dtype)
        return made * jax.numpy.asarray(stddev, dtype)

    return jax.jit(draw)


def _inverted(bits: torch.Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """N(0, 1) from 64 random bits each, as :func:`mfopt.noise._draws.standard_normal`."""
    negative = bits < 0
    tail = bits.bitwise_and_(2**63 - 1).to(dtype).add_(offset).mul_(2.0**-64)
    half = torch.special.ndtri(tail)
    return torch.where(negative, half, -half)


def _modal(
    coefficients: tuple[np.ndarray, ...], white: torch.Tensor, buffer: torch.Tensor | None
) -> torch.Tensor:
    """One step of :class:`~mfopt.noise.recursions.Modal`, in place."""
    gain, read, decay, feed = coefficients
    noise = white.mul_(float(gain))
    if buffer is not None:
        _add_products(noise, buffer, -read)
        factors = torch.as_tensor(decay, dtype=torch.float64).to(buffer.device, buffer.dtype)
        buffer.mul_(factors.view(-1, *[1] * noise.ndim))
        for k in np.flatnonzero(feed):
            buffer[k].add_(noise, alpha=float(feed[k]))
    return noise


def _buffered(
    weights: np.ndarray, white: torch.Tensor, step: int, buffer: torch.Tensor, feedback: bool
) -> torch.Tensor:
    """One step from the last outputs (``feedback``) or the last draws, in place."""
    slots = len(buffer)
    if feedback:
        lags = 1 + (step - 1 - np.arange(slots)) % slots
        noise = _add_products(white.mul_(float(weights[0])), buffer, weights[lags])
        buffer[step % slots].copy_(noise)
        return noise
    buffer[step % slots].copy_(white)
    lags = (step - np.arange(slots)) % slots
    return _add_products(white.zero_(), buffer, np.where(lags <= step, weights[lags], 0.0))


def _add_products(total: torch.Tensor, buffer: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
    """``total += Σ_k weights[k] buffer[k]``, in place."""
    if buffer.dtype == total.dtype:
        vector = torch.as_tensor(weights, dtype=total.dtype).to(total.device)
        total.view(-1).addmv_(buffer.view(len(buffer), -1).T, vector)
    else:
        for k in np.flatnonzero(weights):
            total.add_(buffer[k], alpha=float(weights[k]))
    return total
