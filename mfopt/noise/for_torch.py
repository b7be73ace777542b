"""Correlated noise for a list of PyTorch parameters."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator

import numpy as np

from mfopt._runtime import _check, _extras

with _extras.required():
    import torch

from typing import NoReturn

from mfopt._runtime._arrays import Array
from mfopt._runtime._types import JsonObject
from mfopt.noise import _draws, _keys, _torch_parts, files
from mfopt.noise.packing import share
from mfopt.noise.recursions import Rows
from mfopt.noise.state import no_copy
from mfopt.noise.stream import TOO_NARROW, NoiseExhaustedError, NoiseStream

_STRIPE = 8192  # bytes
STATE = "mfopt_noise"  # where an optimizer's state_dict keeps the noise


class TorchNoise:
    """The noise of a :class:`NoiseStream` for PyTorch parameters, each on its own device.

    ``add_to(sums)`` adds the noise of one step to the *sums* of its clipped gradients, in place;
    ``next()`` gives it as a list of tensors, for those who add it themselves. Unlike the JAX stream
    it keeps its state itself.

    For parameters on the CPU, the step is that of the JAX stream, compiled once for all of them and
    handed over without a copy: with one pinned seed both give the same noise, up to rounding.
    PyTorch's CPU generator would not do: it keeps 32 bits of its seed, so that two of a run's
    steps, or two runs, could get the same draws. On other devices, PyTorch's own generator, seeded
    for each step with 64 bits of a SHA-256 of the key, makes 64 random bits for each element,
    and the same inversion as in JAX uses all of them: ``torch.randn`` stops at |z| = 6.7 or before,
    and what is beyond shows a unit that is spread over many parameters.

    **Secret**, as the state of the stream: ``state_dict`` holds the key of the noise. Save it
    inside :func:`mfopt.noise.owner_only`, which makes files that only their owner can read.

    With ``part=(k, m)``, in all m processes of ``torch.distributed`` at once, the k-th makes the
    noise of its share of each parameter and keeps the buffers of that: together they add what one
    adds. The key is the first process's.

    Args:
      stream: strategy, scale and types.
      parameters: floating-point tensors; distributed ones with a ``part`` only.
      seed: pins the noise, for experiments only; the default key is the operating system's.
      key: a secret key that the caller keeps, uint32 of shape (8,), never used before.
      part: number of this process and how many share the noise; all of it if left out.
    """

    def __init__(
        self,
        stream: NoiseStream,
        parameters: Iterable[torch.Tensor],
        *,
        seed: int | None = None,
        key: Array | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        _check.kind(
            "stream", stream, NoiseStream, "mfopt.noise.from_factorization makes that of a file."
        )
        if stream.secure:
            rule = "PyTorch would add its noise to sums that are not on its grid"
            way_out = "Make it without secure, or release the sums in JAX (stream.release)."
            raise _check.reject("stream", "secure", rule, way_out)
        self.stream = stream
        self.pinned = seed is not None
        self.step, self._sound = 0, True
        listed = list(enumerate(_listed("parameters", parameters)))
        like = [_checked(f"parameters[{i}]", p, whole=part is None) for i, p in listed]
        if not like:
            raise _check.reject("parameters", [], "must hold at least one tensor")
        self._like, self.part = like, part or (0, 1)
        self._whole = tuple(shape for shape, _ in like)
        self._spans = [share(math.prod(shape), self.part) for shape in self._whole]
        self._shapes = self._whole
        if self.part[1] > 1:
            self._shapes = tuple((stop - start,) for start, stop in self._spans)
        keys = [_keys.on_host(seed, key)]
        if part is not None:
            torch.distributed.broadcast_object_list(keys, src=0)
        self._key = keys[0]
        places: dict[torch.device, list[int]] = {}
        for i, (_, device) in enumerate(like):
            places.setdefault(device, []).append(i)
        self._parts = [
            _torch_parts.part_for(device)(
                stream, tuple(leaves), self._shapes, device, self._whole, self.part
            )
            for device, leaves in places.items()
        ]
        shapes = tuple(shape for part in self._parts for shape in part.slack_shapes)
        _draws.check_sizes(shapes, stream.iterations)

    def __repr__(self) -> str:
        kind = "pinned, not private" if self.pinned else "secret"
        return f"TorchNoise({self.stream!r}, step={self.step}, key=<{kind}>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self)

    @torch.no_grad()
    def next(self) -> list[torch.Tensor]:
        """Return the noise of this step, one tensor per parameter, and advance by one step.

        Raises:
          NoiseExhaustedError: past the last step that the factorization covers.
          FailureError: a step was broken off half-way, by Ctrl-C or for want of memory.
        """
        noise: dict[int, torch.Tensor] = {}
        with self._one_step():
            for part in self._parts:
                tensors = part.next(self._key, self.step)
                noise.update(zip(part.leaves, tensors, strict=True))
        return [noise[i] for i in range(len(self._shapes))]

    @torch.no_grad()
    def add_to(self, sums: Iterable[torch.Tensor]) -> None:
        """Add the noise of this step to ``sums``, in place, and advance by one step.

        As :meth:`next` and adding what it gives, in less time: the noise needs no fresh memory.
        Sums and noise are added in the wider of their types and cut to the type of the sum.

        Args:
          sums: of clipped gradients, one for each parameter, with its shape and on its device;
            float32 or wider, also where the parameters are not.

        Raises: as :meth:`next`, and
          UsageError: other tensors; nothing changes then.
        """
        self._refuse_past_end()
        sums = _listed("sums", sums)
        like = [_checked(f"sums[{i}]", total) for i, total in enumerate(sums)]
        if like != self._like:
            raise _check.reject("sums", like, f"must be as the parameters, {self._like}")
        refuse_narrow("sums", sums)
        for i, total in enumerate(sums):
            if any(
                n > 1 and not stride for n, stride in zip(total.shape, total.stride(), strict=True)
            ):
                rule = "its elements share memory"
                raise _check.reject(f"sums[{i}]", "expanded", rule, "Give a clone().")
        if self.part[1] > 1:
            spans = zip(sums, self._spans, strict=True)
            sums = [total.view(-1)[start:stop] for total, (start, stop) in spans]
        with self._one_step():
            for part in self._parts:
                part.add_to([sums[i] for i in part.leaves], self._key, self.step)

    def _refuse_past_end(self) -> None:
        if self.step >= self.stream.iterations:
            raise NoiseExhaustedError.past_end(self.stream.iterations)

    @contextlib.contextmanager
    def _one_step(self) -> Iterator[None]:
        """Guard of a step: after half an update the buffers would give noise other than C⁻¹z."""
        self._refuse_past_end()
        self._refuse_broken()
        self._sound = False
        yield
        self.step += 1
        self._sound = True

    def _refuse_broken(self) -> None:
        if not self._sound:
            raise _check.FailureError(
                f"step {self.step} of the noise was broken off half-way: the same draw would come "
                "again, on buffers that it may be in already. Load a state of this step, or begin "
                "a new run."
            )

    def state_dict(self) -> JsonObject:
        """**Secret.** Everything :meth:`load_state_dict` needs, for PyTorch checkpoints.

        Raises FailureError where a step was broken off half-way.
        """
        self._refuse_broken()
        return {
            "key": torch.from_numpy(self._key.view(np.int32).copy()),
            "step": self.step,
            "pinned": self.pinned,
            "digest": self.stream.digest,
            "settings": self.stream.settings,
            "shapes": [list(shape) for shape in self._shapes],
            "draws": [part.draws for part in self._parts],
            "buffers": self._buffers(),
            **({"part": list(self.part)} if self.part[1] > 1 else {}),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Resume from :meth:`state_dict`; nothing changes if it is refused.

        Raises:
          UsageError: the state belongs to another factorization, other settings or other
            parameters, its step, key or buffers are not such as this object saves, or it would
            take back steps of this object.
        """
        key, buffers = self.check_state_dict(state)
        self._sound = False
        for part in self._parts:
            part.load([b for i in part.leaves if (b := buffers[i]) is not None])
        self._key = key
        self.step, self.pinned = state["step"], state["pinned"]
        self._sound = True

    def check_state_dict(self, state: object) -> tuple[np.ndarray, list[torch.Tensor | None]]:
        """(key, buffers) of a state, or the errors of :meth:`load_state_dict`; changes nothing."""
        state = _checked_state(state, self.stream)
        if state.get("silent"):
            rule = "holds neither key nor buffers"
            way_out = "Save and load the optimizer of rank 0."
            raise _check.reject("state", "of a process that adds no noise", rule, way_out)
        if state.get("part", [0, 1]) != list(self.part):
            rule = f"is another process's share of the noise than this one's, {list(self.part)}"
            way_out = "Load what the process of this rank saved, with as many processes."
            raise _check.reject("state: part", state.get("part"), rule, way_out)
        if state.get("shapes") != [list(shape) for shape in self._shapes]:
            raise _check.reject("state", state.get("shapes"), "belongs to other parameters")
        recursion = self.stream.recursion
        draws = [part.draws for part in self._parts]
        if isinstance(recursion, Rows) and not recursion.store and state.get("draws") != draws:
            rule = f"past draws are regenerated here by {draws}, which gives different numbers"
            way_out = "Resume with the parameters on the same kinds of devices."
            raise _check.reject("state: draws", state.get("draws"), rule, way_out)
        key, buffers = _words(state.get("key")), state.get("buffers")
        if not isinstance(buffers, list) or len(buffers) != len(self._shapes):
            raise _check.reject("state: buffers", type(buffers).__name__, "must be one a parameter")
        arrays = {"key": key}
        for i, buffer in enumerate(buffers):
            if isinstance(buffer, torch.Tensor):
                arrays[f"buffer/{i}"] = _torch_parts.viewed(buffer)
        files.check_saved(state, arrays, self.stream, self._shapes)
        if np.array_equal(key, self._key) and state["step"] < self.step:
            rule = f"takes back noise that {self.step} steps were released with: others than "
            rule += "these, with the same noise, would show the data by their difference"
            way_out = "Make a new run for another try; both count against privacy."
            raise _check.reject("state", f"of step {state['step']}", rule, way_out)
        return key.copy(), buffers

    def _buffers(self) -> list[torch.Tensor | None]:
        """Copies of the buffers, one for each parameter."""
        buffers: list[torch.Tensor | None] = [None] * len(self._shapes)
        for part in self._parts:
            for i, buffer in zip(part.leaves, part.buffers() or (), strict=False):
                buffers[i] = buffer
        return buffers


class SilentNoise:
    """Placeholder in processes that add no noise: counts the steps and keeps no buffers."""

    def __init__(self, stream: NoiseStream) -> None:
        self.stream, self.step = stream, 0

    def add_to(self, sums: Iterable[torch.Tensor]) -> None:
        """Advance by one step; raises as :meth:`TorchNoise.add_to` past the last one."""
        if self.step >= self.stream.iterations:
            raise NoiseExhaustedError.past_end(self.stream.iterations)
        self.step += 1

    def state_dict(self) -> JsonObject:
        """The step, and the digest of the stream it belongs to."""
        stream = self.stream
        return {
            "silent": True,
            "step": self.step,
            "digest": stream.digest,
            "settings": stream.settings,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Resume from a state of this class or of a :class:`TorchNoise`, without its secrets.

        Refused is one of another factorization, or whose step is none of this stream's.
        """
        self.check_state_dict(state)
        self.step = state["step"]

    def check_state_dict(self, state: object) -> None:
        """Raise the errors of :meth:`load_state_dict`."""
        step = _checked_state(state, self.stream).get("step")
        if type(step) is not int or not 0 <= step <= self.stream.iterations:
            raise _check.reject("state: step", step, f"must be from 0 to {self.stream.iterations}")


def _checked_state(state: object, stream: NoiseStream) -> JsonObject:
    """``state``, or :class:`UsageError` unless it is one that noise of ``stream`` gave."""
    if not isinstance(state, dict):
        raise _check.reject("state", type(state).__name__, "must come from state_dict")
    stream.refuse_other("state file", state.get("digest"), state.get("settings"))
    return state


def split_state(state: JsonObject) -> tuple[JsonObject, object]:
    """(an optimizer's own ``state_dict``, that of the noise in it); refused where there is none."""
    optimizer_state = dict(state)
    noise_state = optimizer_state.pop(STATE, None)
    if noise_state is None:
        rule = "holds no noise state: the noise would start again, with another key, on a run "
        rule += "whose first steps are released"
        way_out = "Load what this optimizer saved after its noise was replaced, or start a new run."
        raise _check.reject("state_dict", sorted(optimizer_state), rule, way_out)
    return optimizer_state, noise_state


def refuse_narrow(name: str, sums: Iterable[torch.Tensor]) -> None:
    """Raise :class:`UsageError` for sums of gradients, or parameters that hold them, in 16 bits."""
    if narrow := [total.dtype for total in sums if total.dtype.itemsize < 4]:
        rule = TOO_NARROW
        way_out = "Keep sums and parameters in float32, and compute in 16 bits by torch.autocast."
        raise _check.reject(name, str(narrow[0]), rule, way_out)


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of the bits of ``tensors`` that tells mistakes, not forgery: 32 hexadecimal digits.

    Bits are added up in 1024 columns where the tensors lie, and only these sums are hashed.
    """
    digest = hashlib.sha256()
    for item in tensors:
        flat = item.detach().reshape(-1).view(torch.uint8)
        cut = flat.numel() // _STRIPE * _STRIPE
        columns = flat[:cut].view(torch.int64).view(-1, _STRIPE // 8).sum(0)
        digest.update(columns.cpu().numpy().tobytes() + flat[cut:].cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _listed(name: str, tensors: object) -> list[torch.Tensor]:
    if not isinstance(tensors, Iterable) or isinstance(tensors, torch.Tensor):
        rule = "must be a list of tensors, one for each parameter"
        way_out = "Of a module, list(module.parameters()) is one."
        raise _check.reject(name, type(tensors).__name__, rule, way_out)
    return list(tensors)


def _words(key: object) -> np.ndarray:
    """The key of a state, as the words that it was made from."""
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int32:
        raise _check.reject("state: key", type(key).__name__, "must be a tensor of int32")
    return key.cpu().numpy().view(np.uint32)


def _checked(
    name: str, parameter: object, *, whole: bool = True
) -> tuple[tuple[int, ...], torch.device]:
    if not isinstance(parameter, torch.Tensor):
        raise _check.reject(name, type(parameter).__name__, "must be a torch.Tensor")
    if not parameter.dtype.is_floating_point:
        raise _check.reject(name, str(parameter.dtype), "must be of a floating-point type")
    if whole and hasattr(parameter, "full_tensor"):
        rule = "is spread over processes: each would add noise of its own to all of it"
        way_out = "Attach its optimizer to a mfopt.torch.PrivateRun, which adds it once."
        raise _check.reject(name, "DTensor", rule, way_out)
    return tuple(parameter.shape), parameter.device
