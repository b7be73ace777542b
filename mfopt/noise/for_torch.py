"""Correlated noise for a list of PyTorch parameters."""

from __future__ import annotations

import array
import contextlib
import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Iterator

import numpy as np

from mfopt._runtime import _check, _extras

with _extras.required():
    import torch

from typing import NoReturn

from mfopt._runtime._arrays import Array
from mfopt._runtime._types import JsonObject
from mfopt.noise import _draws, _keys, _torch_parts, files
from mfopt.noise import ledger as ledgers
from mfopt.noise.ledger import KEY_FOLDER
from mfopt.noise.packing import share
from mfopt.noise.state import no_copy
from mfopt.noise.stream import TOO_NARROW, NoiseStream

_STRIPE = 8192  # bytes
_PART = 2**6  # numbers of a sum that are read, about, or all of twice as many
_SPREAD = 8  # norms that differ in chance alone if no two of them are equal
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

    **Secret**, as the state of the stream. :meth:`save` writes the file of
    :func:`mfopt.noise.save_state`, so that a run may begin in JAX and end here, or the other way
    round: there its parameters are a list. Parameters on other devices than the CPU continue with
    other draws, and where past draws are regenerated such a file is refused. As in JAX a ledger
    counts the steps, unless a seed or key was given.

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
        like = [
            _checked(f"parameters[{i}]", p, whole=part is None)
            for i, p in enumerate(_listed("parameters", parameters))
        ]
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
        is_counted = seed is None and key is None and not self.part[0]
        self.ledger = ledgers.Ledger() if is_counted else None
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
        self._draws = [part.draws for part in self._parts]

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
          UsageError: the step was released already, for another sum.
        """
        noise: dict[int, torch.Tensor] = {}
        with self._one_step(secrets.token_bytes(16)):  # the sums are not known: it equals no other
            for part in self._parts:
                tensors = part.next(self._key, self.step)
                noise.update(zip(part.leaves, tensors, strict=True))
        return [noise[i] for i in range(len(self._shapes))]

    @torch.no_grad()
    def add_to(self, sums: Iterable[torch.Tensor], content: bytes = b"") -> None:
        """Add the noise of this step to ``sums``, in place, and advance by one step.

        As :meth:`next` and adding what it gives, in less time: the noise needs no fresh memory.
        Sums and noise are added in the wider of their types and cut to the type of the sum.

        Args:
          sums: of clipped gradients, one for each parameter, with its shape and on its device;
            float32 or wider, also where the parameters are not.
          content: of which the ledger notes a hash; :func:`fingerprint` of the sums if left out.

        Raises: as :meth:`next`, and
          UsageError: other tensors; nothing changes then.
        """
        self.stream.refuse_past_end(self.step)
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
        shares = sums
        if self.part[1] > 1:
            spans = zip(sums, self._spans, strict=True)
            shares = [total.view(-1)[start:stop] for total, (start, stop) in spans]
        if self.ledger is not None and not content:
            content = fingerprint(sums).encode()
        with self._one_step(content):
            for part in self._parts:
                part.add_to([shares[i] for i in part.leaves], self._key, self.step)

    @contextlib.contextmanager
    def _one_step(self, content: bytes) -> Iterator[None]:
        """Guard of a step: after half an update the buffers would give noise other than C⁻¹z.

        ``content``: by which the ledger knows the sums that the noise is for.
        """
        self.stream.refuse_past_end(self.step)
        self._refuse_broken()
        if self.ledger is not None:  # the same sum with other draws is another release
            draws = "\n".join(map(str, self._draws))
            self.ledger.release(self.step, b"%b\n%b" % (draws.encode(), content))
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

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the state to a file for its owner only, as :func:`mfopt.noise.save_state`.

        Raises FailureError where a step was broken off half-way.
        """
        files.write_secret(path, self.contents(), force=force)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Resume from a file of :meth:`save`, or of ``save_state`` for a list of such arrays.

        Raises as :meth:`restore`.
        """
        self.restore(files.read_secret(path))

    def contents(self, key_folder: str | os.PathLike[str] = KEY_FOLDER) -> files.Contents:
        """**Secret.** The state, of which a ledger counts the steps from now on.

        Raises FailureError where a step was broken off half-way.

        Args:
          key_folder: of the ledger.
        """
        self._refuse_broken()
        facts: JsonObject = {"pinned": self.pinned, "draws": self._draws}
        if self.part[1] > 1:
            facts["part"] = list(self.part)
        if self.ledger is not None:
            path = ledgers.path_of(self._key, folder=key_folder)
            facts["ledger"] = str(self.ledger.store(path))
        buffers = {
            i: _torch_parts.viewed(buffer)
            for part in self._parts
            for i, buffer in zip(part.leaves, part.buffers() or (), strict=False)
        }
        key = self._key.copy()
        return files.contents_of(self.stream, key, self.step, self._shapes, buffers, **facts)

    def restore(
        self, contents: files.Contents, key_folder: str | os.PathLike[str] = KEY_FOLDER
    ) -> None:
        """Resume from :meth:`contents`, after steps that a power cut may have taken.

        Raises:
          UsageError: the state belongs to another factorization, other settings or other
            parameters, its step, key or buffers are not such as this object saves, or it would
            take back steps of this object; nothing changes then. Its ledger is not in
            ``key_folder``, or a run that is alive has it.
        """
        buffers = self.check(contents)
        header, key = contents[0], contents[1]["key"].copy()
        counted = None
        if not (header["pinned"] or self.part[0]):
            counted = self.ledger or ledgers.Ledger()
            stored = header.get("ledger")
            path = ledgers.path_of(key, stored, key_folder)
            counted.resume(path, older=stored is None)
        self._sound = False
        for part in self._parts:
            part.load([_torch_parts.tensor(buffers[i]) for i in part.leaves if i in buffers])
        self._key, self.ledger = key, counted
        self.step, self.pinned = header["step"], header["pinned"]
        self._sound = True
        if counted is not None:
            self.skip(counted.first_free(self.step))

    def check(self, contents: files.Contents) -> dict[int, np.ndarray]:
        """The buffers of a state, or the errors of :meth:`restore`; changes nothing."""
        header, arrays = contents
        if header.get("silent"):
            rule = "holds neither key nor buffers"
            way_out = "Save and load the optimizer of rank 0."
            raise _check.reject("state", "of a process that adds no noise", rule, way_out)
        buffers = files.check_contents(
            contents, self.stream, self._shapes, draws=self._draws, part=self.part
        )
        if np.array_equal(arrays["key"], self._key) and header["step"] < self.step:
            rule = f"takes back noise that {self.step} steps were released with: others than "
            rule += "these, with the same noise, would show the data by their difference"
            way_out = "Make a new run for another try; both count against privacy."
            raise _check.reject("state", f"of step {header['step']}", rule, way_out)
        return buffers

    def skip(self, step: int) -> None:
        """Go on to a later ``step``, at most the last: the noise until then is never used."""
        while self.step < min(step, self.stream.iterations):
            for part in self._parts:
                part.next(self._key, self.step)
            self.step += 1


class SilentNoise:
    """Placeholder in processes that add no noise: counts the steps and keeps no buffers."""

    def __init__(self, stream: NoiseStream) -> None:
        self.stream, self.step = stream, 0

    def add_to(self, sums: Iterable[torch.Tensor], content: bytes = b"") -> None:
        """Advance by one step; raises as :meth:`TorchNoise.add_to` past the last one."""
        self.stream.refuse_past_end(self.step)
        self.step += 1

    def contents(self, key_folder: str | os.PathLike[str] = KEY_FOLDER) -> files.Contents:
        """The step, and the digest of the stream it belongs to."""
        stream = self.stream
        header = {"digest": stream.digest, "settings": stream.settings, "step": self.step}
        return {"silent": True, **header}, {}

    def restore(
        self, contents: files.Contents, key_folder: str | os.PathLike[str] = KEY_FOLDER
    ) -> None:
        """Resume from a state of this class or of a :class:`TorchNoise`, without its secrets.

        Refused is one of another factorization, or whose step is none of this stream's.
        """
        self.check(contents)
        self.step = contents[0]["step"]

    def check(self, contents: files.Contents) -> None:
        """Raise the errors of :meth:`restore`."""
        files.check_header(contents[0], self.stream)

    def skip(self, step: int) -> None:
        """Go on to a later ``step``, at most the last."""
        self.step = max(self.step, min(step, self.stream.iterations))


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

    Bits are added up in rows and in 1024 columns where the tensors lie, and only these sums are
    hashed.
    """
    digest = hashlib.sha256()
    for item in tensors:
        flat = item.detach().reshape(-1).view(torch.uint8)
        cut = flat.numel() // _STRIPE * _STRIPE
        table = flat[:cut].view(torch.int64).view(-1, _STRIPE // 8)
        for part in (table.sum(0), table.sum(1), flat[cut:]):
            digest.update(part.cpu().numpy().data)
    return digest.hexdigest()[:32]


def release_content(
    norms: Iterable[torch.Tensor], sums: Iterable[torch.Tensor], step: int
) -> bytes:
    """Numbers that tell clipped sums apart, without reading all of them.

    It is to tell two sums that one step would be released with, of which one follows from another
    model, rate, loss, dropout or other data: their difference, without noise, would show the data.
    Other sums come from other examples: of these ``norms`` tell, which are of all numbers, and
    numbers spread over each sum, others in each step: all of up to 2⁷. Norms of few examples, or
    such that two are equal (of counts, of gradients of one length), tell little: all sums are read.

    Args:
      norms: of the gradients that were clipped.
      sums: of the clipped gradients, one for each parameter, contiguous.
      step: that they are of.
    """
    # NumPy makes lists and slices sooner
    numbers = [x for norm in norms for x in norm.numpy(force=True).tolist()]
    if len({*numbers}) < max(len(numbers), _SPREAD) or not sum(numbers) < math.inf:
        return fingerprint(sums).encode()
    for total in sums:
        apart = total.numel() // _PART | 1  # odd: in a matrix, of all columns
        flat = (total.numpy() if total.is_cpu else total).ravel()
        numbers += flat[step % apart :: apart].tolist()
    return array.array("d", numbers).tobytes()


def _listed(name: str, tensors: object) -> list[torch.Tensor]:
    if not isinstance(tensors, Iterable) or isinstance(tensors, torch.Tensor):
        rule = "must be a list of tensors, one for each parameter"
        way_out = "Of a module, list(module.parameters()) is one."
        raise _check.reject(name, type(tensors).__name__, rule, way_out)
    return list(tensors)


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
