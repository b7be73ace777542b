"""The noise of the parameters of one device, in one array.

How draws are made is said at :class:`mfopt.noise.for_torch.TorchNoise`. On a device other than the
CPU coefficients are put there once, and a step copies nothing from the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch

from mfopt._runtime import _check, _float64
from mfopt.noise._kernels import Buffer
from mfopt.noise.packing import Packing, share
from mfopt.noise.recursions import Modal, Ring, Rows
from mfopt.noise.stream import NoiseStream

TYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
_BLOCK = 2**24  # elements that are drawn at once: their random bits are twice as wide


class _OnCPU:
    """Parameters on the CPU: those numbered ``leaves``, of the shapes ``whole``.

    ``shapes`` are those of what this process has of each; ``part`` is the number of this process
    and how many share the noise. ``draws`` says how the white draws are made, and for which
    parameters together; ``slack_shapes`` are of what shares an offset in :mod:`mfopt.noise._draws`.
    """

    def __init__(
        self,
        stream: NoiseStream,
        leaves: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        device: torch.device,
        whole: tuple[tuple[int, ...], ...],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if any(math.prod(whole[i]) > 2**32 for i in leaves):
            raise _check.reject("parameters", "one of them", "has more than 2**32 elements")
        self.stream, self.leaves, self._row_starts = stream, leaves, None
        self.packing = Packing(leaves, tuple(shapes[i] for i in leaves))
        if part[1] > 1:  # its shares are parts of the draws that all have
            self._row_starts = self.packing.row_starts(
                [share(math.prod(whole[i]), part)[0] for i in leaves]
            )
        self._buffer: Any = None
        self._scratch: Any = None
        self.draws = ["counters", *map(int, leaves)]
        self.slack_shapes = tuple(whole[i] for i in leaves)
        self.load([])

    def next(self, key: np.ndarray, step: int) -> list[torch.Tensor]:
        """The noise of step, one tensor for each parameter."""
        return self._unpacked(self._advance(key, step, None))

    def add_to(self, sums: list[torch.Tensor], key: np.ndarray, step: int) -> None:
        """Add the noise of step to one tensor for each parameter, in place."""
        noise = self._advance(key, step, self._scratch_memory())
        for total, part in zip(sums, self._unpacked(noise), strict=True):
            total.add_(part)
        self._scratch = noise  # nobody else has it: the next step may write into it

    def _advance(self, key: np.ndarray, step: int, scratch: Buffer) -> jax.Array:
        with _on_cpu(self.stream.dtype):
            noise, self._buffer = self.stream.step_packed(
                key,
                self._buffer,
                np.int32(step),
                packing=self.packing,
                row_starts=self._row_starts,
                scratch=scratch,
            )
        return noise

    def _scratch_memory(self) -> jax.Array:
        if self._scratch is None:
            with _on_cpu(self.stream.dtype):
                return jax.numpy.zeros(self.packing.shape, self.stream.dtype)
        scratch, self._scratch = self._scratch, None
        return scratch

    def _unpacked(self, noise: jax.Array) -> list[torch.Tensor]:
        packed: torch.Tensor = torch.utils.dlpack.from_dlpack(noise)
        return self.packing.unpacked(packed)

    def buffers(self) -> list[torch.Tensor] | None:
        """Copies of the buffers of each parameter, (slots, *shape); None without any."""
        if self._buffer is None:
            return None
        return [tensor(part.copy()) for part in self.packing.unpacked(np.asarray(self._buffer))]

    def load(self, buffers: list[torch.Tensor]) -> None:
        """Resume from the result of :meth:`buffers`; from 0 if empty."""
        slots, dtype = self.stream.recursion.slots, self.stream.buffer_dtype
        with _on_cpu(dtype):
            if not slots:
                self._buffer = None
            elif buffers:
                self._buffer = jax.numpy.array(self.packing.packed([viewed(b) for b in buffers]))
            else:
                self._buffer = jax.numpy.zeros((slots, *self.packing.shape), dtype)


class OnDevice:
    """Parameters on another device, laid end to end; arguments and methods as :class:`_OnCPU`."""

    def __init__(
        self,
        stream: NoiseStream,
        leaves: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        device: torch.device,
        whole: tuple[tuple[int, ...], ...],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.stream, self.leaves, self.device = stream, leaves, device
        self.shapes = tuple(shapes[i] for i in leaves)
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self._total = sum(self._sizes)
        self._dtype = TYPES[stream.dtype]
        recursion = stream.recursion
        tables: tuple[np.ndarray, ...] = ()
        if isinstance(recursion, Ring):
            tables = (recursion.table,)
        elif isinstance(recursion, Modal):
            tables = (recursion.read, recursion.decay, recursion.feed)
        # put on the device once: (n, k), or (1, k) where they are the same in all steps
        self._tables = [torch.as_tensor(t.copy(), dtype=self._dtype, device=device) for t in tables]
        # the processes that share the noise draw for themselves
        self._part = f" part {part[0]} of {part[1]}" if part[1] > 1 else ""
        shared = f" in {part[1]} parts" if part[1] > 1 else ""
        kind = device.type  # of graphics cards each kind has other draws
        if kind == "cuda":
            kind = f"{kind} {torch.cuda.get_device_name(device)}"
        self.draws = [kind + shared, *map(int, leaves)]
        self.slack_shapes = ((sum(math.prod(whole[i]) for i in leaves),),)
        self._buffer: torch.Tensor | None = None
        self.load([])

    def next(self, key: np.ndarray, step: int) -> list[torch.Tensor]:
        noise = self._advance(key, step)
        parts = torch.split(noise, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def add_to(self, sums: list[torch.Tensor], key: np.ndarray, step: int) -> None:
        for total, part in zip(sums, self.next(key, step), strict=True):
            total.add_(part)

    def buffers(self) -> list[torch.Tensor] | None:
        if self._buffer is None:
            return None
        parts = torch.split(self._buffer, self._sizes, dim=1)
        return [
            p.reshape(len(p), *shape).clone() for p, shape in zip(parts, self.shapes, strict=True)
        ]

    def load(self, buffers: list[torch.Tensor]) -> None:
        slots = self.stream.recursion.slots
        if not slots:
            return
        if buffers:
            flat = torch.cat([buffer.reshape(slots, -1) for buffer in buffers], dim=1)
            self._buffer = flat.to(self.device)
        else:
            dtype = getattr(torch, str(self.stream.buffer_dtype))
            self._buffer = torch.zeros((slots, self._total), dtype=dtype, device=self.device)

    def _advance(self, key: np.ndarray, step: int) -> torch.Tensor:
        recursion, white, buffer = self.stream.recursion, self._draw(key, step), self._buffer
        if isinstance(recursion, Modal):
            noise = white.mul_(float(recursion.coefficients(step)[0]))
            if buffer is None:
                return noise
            read, decay, feed = (_row(table, step) for table in self._tables)
            _add_products(noise, buffer, -read)
            if buffer.dtype == noise.dtype:
                buffer.mul_(decay[:, None]).addr_(feed, noise)
            else:
                for k in range(len(buffer)):
                    buffer[k].copy_(decay[k] * buffer[k] + feed[k] * noise)
            return noise
        if isinstance(recursion, Rows):
            weights = recursion.coefficients(step)[0]  # used as numbers of the host
            noise = white.mul_(float(weights[0]))
            for lag in range(1, min(step, recursion.window - 1) + 1):
                noise.add_(self._draw(key, step - lag), alpha=float(weights[lag]))
            return noise
        row = _row(self._tables[0], step)
        if buffer is None:
            return white.mul_(row[0])
        is_output = isinstance(recursion, Ring) and recursion.feedback
        drawn = white.to(buffer.dtype)
        noise = row[0] * (white if is_output else drawn.to(white.dtype))
        # slot k holds the output or draw of lag 1 + (step - 1 - k) % slots; 0 before the first
        _add_products(noise, buffer, row[1:].flip(0).roll(step))
        buffer[step % len(buffer)].copy_(noise if is_output else drawn)
        return noise

    def _draw(self, key: np.ndarray, step: int) -> torch.Tensor:
        """White noise: PyTorch's generator, seeded with 64 bits of a hash for each step."""
        text = f"mfopt torch noise {step} {self.leaves[0]}{self._part}".encode()
        digest = hashlib.sha256(key.tobytes() + text).digest()
        generator = torch.Generator(device=self.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little"))
        offset = (int.from_bytes(digest[8:12], "little") + 0.5) * 2.0**-32
        draws = torch.empty(self._total, dtype=self._dtype, device=self.device)
        for part in torch.split(draws, _BLOCK):
            bits = torch.empty(len(part), dtype=torch.int64, device=self.device)
            bits.random_(-(2**63), None, generator=generator)
            part.copy_(_inverted(bits, offset, self._dtype))
        return draws.mul_(self.stream.stddev)


def part_for(device: torch.device) -> type[_OnCPU] | type[OnDevice]:
    """Class that makes the noise for parameters on ``device``."""
    return _OnCPU if device.type == "cpu" else OnDevice


def _inverted(bits: torch.Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """N(0, 1) from 64 random bits each, as :func:`mfopt.noise._draws.standard_normal`."""
    negative = bits < 0
    tail = bits.bitwise_and_(2**63 - 1).to(dtype).add_(offset).mul_(2.0**-64)
    half = torch.special.ndtri(tail)
    return torch.where(negative, half, -half)


def _add_products(total: torch.Tensor, buffer: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``total += Σ_k weights[k] buffer[k]``, in place."""
    if buffer.dtype == total.dtype:
        return total.addmv_(buffer.T, weights)
    for k in range(len(buffer)):
        total.addcmul_(buffer[k].to(total.dtype), weights[k])
    return total


def tensor(array: np.ndarray) -> torch.Tensor:
    """The inverse of :func:`viewed`."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def viewed(buffer: torch.Tensor) -> np.ndarray:
    """A tensor as an array of its own type, bfloat16 included."""
    buffer = buffer.detach().cpu()
    if buffer.dtype == torch.bfloat16:
        return buffer.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return buffer.numpy()


def _row(table: torch.Tensor, step: int) -> torch.Tensor:
    return table[0] if len(table) == 1 else table[step]


@contextlib.contextmanager
def _on_cpu(dtype: np.dtype) -> Iterator[None]:
    """JAX on the CPU inside, in float64 where ``dtype`` is."""
    with jax.default_device(jax.devices("cpu")[0]), _float64.scope(dtype == np.float64):
        yield
