"""Correlated noise C⁻¹z for pytrees of parameters, one training step at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from mfopt import words
from mfopt._runtime import _check
from mfopt._runtime._arrays import Array, Step
from mfopt._runtime._float64 import pinned
from mfopt._runtime._types import JsonObject, PyTree, T
from mfopt.guarantee import require_guarantee
from mfopt.mechanism import release_digest
from mfopt.noise import _draws, _kernels, _keys, ledger, secure, uses
from mfopt.noise._kernels import Buffer
from mfopt.noise.choice import Past, choose
from mfopt.noise.packing import LeafGroup, Packing, SingleLeaf, grouped
from mfopt.noise.state import (
    Layout,
    NoiseState,
    buffer_sharding,
    check_arrays,
    mark,
    parts_of,
    set_once,
)
from mfopt.sampling import Scheme, require
from mfopt.strategies import Strategy

# of a sum of gradients, before noise is added to it
TOO_NARROW = (
    "is narrower than float32: its rounding lets one unit move a sum by more than clip_norm"
)


class NoiseExhaustedError(_check.FailureError):
    """A step past the last one that the factorization, and so its guarantee, covers."""


class _Step(NamedTuple):
    """Values that all leaves of a step share: key, its number, scale of draws, coefficients."""

    key: Any
    number: Step
    scale: Any
    coefficients: tuple[Array, ...]


class NoiseStream:
    """Streams ``noise_multiplier · clip_norm · C⁻¹z``, to be added to *sums* of clipped gradients.

    ``init(params)`` gives a state, ``next(state)`` the noise of one step and the next state. Both
    are functional. ``next`` also works inside ``jax.jit`` and ``jax.lax.scan``.

    The noise has the shapes and the device layout of the parameters and the type ``dtype``. If
    the parameters are laid out by a ``NamedSharding``, so are the buffers; each device then makes
    its own part without communication, and the numbers are the same for every layout.

    **No silent reuse.** A step past ``iterations`` raises :class:`NoiseExhaustedError`, and so does
    (:class:`UsageError`) the second use of a state, or of a copy, for another sum; inside jit both
    give NaN, and the reason is logged (logger ``mfopt``). For that every step asks the host for
    the ledger of its key (:mod:`mfopt.noise.ledger`). Who gives a ``key`` keeps count without it.

    Formal guarantee: with z ~ N(0, I), the noise of steps 0..n-1 is
    N(0, (noise_multiplier · clip_norm)² (CᵀC)⁻¹), independent across parameters, up to the
    generator and floating point. Every draw has 64 bits and reaches |z| = 11.3; what the end of
    that range can add to δ stays below 2⁻⁴⁰ for all sizes that are allowed (:mod:`._draws` counts
    it). Arithmetic is rounded, and not proof against attacks on floating-point noise (Mironov
    2012). A ``buffer_dtype`` narrower than ``dtype`` rounds the buffers as well.

    Args:
      strategy: the strategy C.
      iterations: steps n that the guarantee covers.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      clip_norm: bound on the norm of what one unit adds to the sum of a step.
      sampling: the scheme of the account that the noise is for, if there is one: part of the
        digest by which states and accounts know their stream.
      past: for strategies that need all past draws (Toeplitz, dense, square root), "regenerate"
        makes them again (no memory, time grows with the step), "store" keeps them (memory of n
        copies of the parameters); for a banded inverse "auto" stores the last few. "dense" streams
        a strategy that has no recursion of its own by the rows of its dense C⁻¹.
      dtype: type of the noise, float32 (the default) or float64 (needs ``jax.enable_x64``).
      buffer_dtype: type of the buffers, ``dtype`` if left out.
      secure: draw with a cipher, on a grid, by a proven law, and round the sums to that grid
        before the noise is added: no property of floating-point numbers is left to attack. Float64
        (needs ``jax.enable_x64``); only :meth:`release` gives such noise. :mod:`mfopt.noise.secure`
        has the proof and :meth:`secure_cost` its price.

    >>> from mfopt.strategies import BLT
    >>> stream = NoiseStream(BLT(np.array([0.3]), np.array([0.9])), iterations=3,
    ...                      noise_multiplier=1.5, clip_norm=1.0)
    >>> state = stream.init({"w": np.zeros((2, 3), np.float32)})
    >>> noise, state = stream.next(state)
    >>> noise["w"].shape, int(state.step)
    ((2, 3), 1)
    """

    __setattr__ = set_once

    def __init__(
        self,
        strategy: Strategy,
        *,
        iterations: int,
        noise_multiplier: float,
        clip_norm: float,
        sampling: Scheme | None = None,
        past: Past = "auto",
        dtype: npt.DTypeLike | None = None,
        buffer_dtype: npt.DTypeLike | None = None,
        secure: bool = False,
    ) -> None:
        self.iterations = _check.integer("iterations", iterations)
        self.noise_multiplier = _check.positive("noise_multiplier", noise_multiplier)
        self.clip_norm = _check.positive("clip_norm", clip_norm)
        self.secure = bool(secure)
        default_type = np.float64 if secure else np.float32
        self.dtype = _dtype("dtype", default_type if dtype is None else dtype)
        if self.dtype not in (np.float32, np.float64):
            raise _check.reject("dtype", str(self.dtype), "noise is float32 or float64")
        narrow = self.dtype if buffer_dtype is None else buffer_dtype
        self.buffer_dtype = _dtype("buffer_dtype", narrow)
        if not jnp.issubdtype(self.buffer_dtype, jnp.floating):
            raise _check.reject("buffer_dtype", str(buffer_dtype), "must be a floating-point type")
        if self.secure and not self.dtype == self.buffer_dtype == np.float64:
            types = f"{self.dtype}, buffers {self.buffer_dtype}"
            rule = "secure noise is held in float64"
            raise _check.reject("dtype", types, rule, "Leave both out.")
        limits = np.finfo(self.dtype)
        if not limits.tiny / limits.eps <= self.stddev <= limits.max * limits.eps:
            factors = (self.noise_multiplier, self.clip_norm)
            rule = f"their product is out of range for noise in {self.dtype}"
            way_out = "Scale the loss, and the clip norm with it."
            raise _check.reject("noise_multiplier, clip_norm", factors, rule, way_out)
        self.strategy = strategy
        self.recursion = choose(strategy, self.iterations, past)
        if sampling is not None and require(sampling).length != self.iterations:
            rule = f"the sampling scheme has {sampling.length}"
            raise _check.reject("iterations", self.iterations, rule)
        self.sampling = sampling
        self.digest = release_digest(
            strategy, self.noise_multiplier, sampling, iterations=self.iterations
        )

    @functools.cached_property
    def _advance_jitted(self) -> Any:
        # not before the first step: asking the compiler for its options starts JAX's backends
        return jax.jit(
            self._advance,
            static_argnames="layout",
            donate_argnames=("key", "buffers"),
            compiler_options=_kernels.host_options(),
        )

    @property
    def stddev(self) -> float:
        """Standard deviation of the white draws z: noise multiplier times clip norm."""
        return self.noise_multiplier * self.clip_norm

    @property
    def settings(self) -> str:
        """Settings a state depends on besides the factorization, as one string."""
        method = type(self.recursion).__name__.lower()
        return (
            f"method={method}, slots={self.recursion.slots}, stddev={self.stddev!r}, "
            f"iterations={self.iterations}, dtype={self.dtype}, buffer_dtype={self.buffer_dtype}"
            f"{', secure' if self.secure else ''}"
        )

    def describe(self) -> JsonObject:
        """Public, JSON-compatible facts for a report."""
        return {
            "strategy": self.strategy.describe(),
            "digest": self.digest,
            "iterations": self.iterations,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
            "method": type(self.recursion).__name__.lower(),
            "buffers": self.recursion.slots,
            "dtype": str(self.dtype),
            "buffer_dtype": str(self.buffer_dtype),
            "secure": self.secure,
        }

    def __repr__(self) -> str:
        return f"NoiseStream({words.described(self.strategy.describe())}, {self.settings})"

    def buffer_bytes(self, parameters: int) -> int:
        """Memory of the buffers for so many parameters, over all devices, in bytes."""
        return self.recursion.slots * parameters * self.buffer_dtype.itemsize

    def secure_cost(self, parameters: int) -> secure.SecureCost:
        """Privacy cost that ``secure`` adds for this many parameters.

        Raises:
          UsageError: the stream is not secure, or the cost is not small: more than 0.02 in ε, or
            2⁻³⁶ in total variation.
        """
        if not self.secure:
            raise _check.reject("secure", False, "only secure streams have this cost")
        draws = _check.integer("parameters", parameters) * self.iterations
        cost = secure.SecureCost.of_draws(self._largest_shift, draws)
        if not (cost.epsilon <= 0.02 and cost.distance <= 2.0**-36):
            rule = f"rounding would add {cost.epsilon:.2g} to ε and {cost.distance:.2g} to δ"
            way_out = "Take fewer parameters or iterations, or a stream without secure."
            raise _check.reject("parameters", parameters, rule, way_out)
        return cost

    @functools.cached_property
    def _largest_shift(self) -> float:
        return secure.largest_shift(self.strategy, self.recursion, self.iterations)

    @pinned
    def init(
        self, params: PyTree, *, seed: int | None = None, key: Array | None = None
    ) -> NoiseState:
        """The state before step 0, for ``params``: arrays or ``jax.ShapeDtypeStruct``.

        The key comes from the operating system, so no two calls share a draw. Two exceptions, of
        which one may be given:

        Args:
          seed: pins the noise. For experiments and tests: anybody who knows the seed can remove
            the noise, and two runs with one seed use the same noise. The state says so.
          key: a secret key that the caller keeps, uint32 of shape (8,), never used before.

        Raises:
          UsageError: for parameters that are not floating point, and inside a jit without a seed
            or a key: the key would become a constant of the compiled function.
        """
        words = _keys.choose(seed, key)
        if self.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
            rule = "JAX is in 32-bit mode"
            raise _check.reject("dtype", "float64", rule, "Enable jax_enable_x64.")
        layout = Layout.of_params(params)
        _draws.check_sizes(layout.shapes, self.iterations)
        if self.secure:
            self.secure_cost(layout.size)
        buffers = tuple(map(self._zeros, grouped(layout.shapes, layout.shardings)))
        counted = seed is None and key is None
        if counted:
            ledger.begin(words)
        return self.state_of(layout, words, 0, buffers, pinned=seed is not None, counted=counted)

    def state_of(
        self,
        layout: Layout,
        key: np.ndarray,
        step: int,
        buffers: tuple[Buffer, ...],
        *,
        pinned: bool,
        counted: bool,
    ) -> NoiseState:
        """The state with these contents; for what makes states and reads them from files.

        Args:
          layout: of the parameters.
          key: uint32 (8,).
          step: steps done.
          buffers: as packed by :meth:`buffers_from_leaves`.
          pinned: whether the key follows from a seed.
          counted: whether its ledger is asked at each step.
        """
        return NoiseState(
            key=_on_devices_of(layout, key),
            step=np.asarray(step, np.int32),
            buffers=buffers,
            mark=mark(layout, self.digest, self.settings),
            layout=layout,
            digest=self.digest,
            settings=self.settings,
            pinned=pinned,
            counted=counted,
        )

    @pinned
    def next(self, state: NoiseState) -> tuple[PyTree, NoiseState]:
        """(noise of this step, next state); consumes ``state`` outside of jit.

        Raises:
          NoiseExhaustedError: past the last step (outside of jit; inside, the noise is NaN).
          UsageError: if the state belongs to another factorization or other settings, was used
            before, or is a constant of the function that is being compiled.
        """
        if self.secure:
            rule = "its noise protects sums on its grid only"
            way_out = "Use release(sums, state), which rounds them and adds it."
            raise _check.reject("stream", "secure", rule, way_out)
        self.check_state(state)
        return self._step(state, None, np.zeros(uses.WORDS, np.uint32))

    @pinned
    def release(
        self, sums: PyTree, state: NoiseState, constants: Array | None = None
    ) -> tuple[PyTree, NoiseState]:
        """(sums of clipped gradients plus the noise of this step, next state).

        The sum is formed in the wider of the types of noise and gradient and then cut to the type
        of the gradient. With ``secure`` it is formed on the grid, in float64. ``constants``, uint32
        (3,), is a digest of what must be the same in all steps (:mod:`mfopt.noise.uses`).

        Raises: as :meth:`next`, and
          UsageError: ``sums`` has another structure or other shapes than the parameters (noise that
            is broadcast would be the same for several numbers), or is not floating point, or
            narrower than float32: a sum that was rounded so before its noise moves by more than
            one unit adds to it (in bfloat16, of B units, by up to B/128 clip norms more).
        """
        self.check_state(state)
        if self.secure and jax.tree.structure(sums) != state.layout.treedef:
            raise _check.reject("sums", "of another class", f"must be as {state.layout.treedef}")
        leaves = self.leaves_like(state, sums)  # before a draw is used up
        if narrow := [str(t) for x in leaves if (t := jnp.result_type(x)).itemsize < 4]:
            raise _check.reject("sums", narrow[0], TOO_NARROW, "Add up g.astype(jnp.float32).")
        digest = None
        if state.counted:
            constants_digest = np.zeros(3, np.uint32) if constants is None else constants
            digest = jnp.concatenate([uses.fingerprint(leaves), constants_digest])
        if not self.secure:
            noise, state = self._step(state, None, digest)
            return jax.tree.map(_added, sums, noise), state
        noised, state = self._step(state, tuple(leaves), digest)
        return jax.tree.map(lambda s, m: m.astype(jnp.result_type(s)), sums, noised), state

    def skip(self, state: NoiseState, step: int) -> NoiseState:
        """The state of a later ``step``, at most the last: the noise until then is never used."""
        nothing = state.layout.treedef.unflatten(map(jnp.zeros, state.layout.shapes))
        skipped = dataclasses.replace(state, counted=False)
        for _ in range(int(state.step), min(step, self.iterations)):
            _, skipped = self.release(nothing, skipped)
        return dataclasses.replace(skipped, counted=state.counted)

    @staticmethod
    def leaves_like(
        state: NoiseState, tree: PyTree, name: str = "sums", leading: tuple[int, ...] = ()
    ) -> list[Array]:
        """Leaves of ``tree``; raises :class:`UsageError` unless they are as the parameters.

        Args:
          state: made for the parameters.
          tree: whose structure, shapes and kind of numbers are compared.
          name: of ``tree`` for the error.
          leading: axes that each leaf has before the parameter's own.
        """
        leaves, treedef = jax.tree.flatten(tree)
        expected = tuple((*leading, *shape) for shape in state.layout.shapes)
        if (shapes := tuple(map(np.shape, leaves))) != expected:
            raise _check.reject(name, shapes, f"must be as the parameters, {expected}")
        try:  # NNX wraps gradients otherwise than parameters: structures need not be equal
            jax.tree.map(lambda *_: 0, tree, state.layout.treedef.unflatten(range(len(leaves))))
        except (TypeError, ValueError):
            rule = f"must have the structure of the parameters, {state.layout.treedef}"
            raise _check.reject(name, treedef, rule) from None
        if any(not jnp.issubdtype(jnp.result_type(leaf), np.floating) for leaf in leaves):
            raise _check.reject(name, "of whole numbers", "must be of a floating-point type")
        return leaves

    def _step(
        self, state: NoiseState, sums: PyTree, digest: Array | None
    ) -> tuple[PyTree, NoiseState]:
        """One step inside or outside of jit: noise, or noised sums; of a state that was checked.

        ``digest``: of the sums that the noise is for, or zeros (:mod:`mfopt.noise.uses`).
        """
        if isinstance(state.step, jax.core.Tracer):
            traced = state.step
            # past the end, and with the buffers of another stream, all is NaN once and for all
            expected_mark = mark(state.layout, self.digest, self.settings)
            mine = jnp.all(jnp.asarray(state.mark) == expected_mark)
            valid = mine & (traced >= 0) & (traced < self.iterations)
            if state.counted:
                valid &= uses.permitted(state.key, traced, digest)
            noise, key, buffers = self._advance(
                *self._inputs(state, traced, valid), sums, layout=state.layout
            )
            return noise, dataclasses.replace(state, step=traced + 1, key=key, buffers=buffers)
        if _keys.tracing() or isinstance(digest, jax.core.Tracer):
            rule = "a state that the compiled or mapped function holds as a constant would give "
            rule += "the same noise for every sum"
            way_out = "Pass it as an argument, under vmap one for each sum, and return the new one."
            raise _check.reject("state", state, rule, way_out)
        step = int(state.step)
        self.refuse_past_end(step)
        if state.counted:
            uses.record(uses.on_host(state.key), step, np.asarray(digest))
        inputs = self._inputs(state, np.int32(step), np.bool_(True))
        noise, key, buffers = self._advance_jitted(*inputs, sums, layout=state.layout)
        following = np.asarray(step + 1, np.int32)
        return noise, dataclasses.replace(state, step=following, key=key, buffers=buffers)

    @pinned
    def compile_step(self, state: NoiseState) -> jax.stages.Compiled:
        """The compiled step outside of jit, to inspect its memory and its communication."""
        sums = tuple(map(jnp.zeros, state.layout.shapes)) if self.secure else None
        inputs = self._inputs(state, np.int32(0), np.bool_(True))
        return self._advance_jitted.lower(*inputs, sums, layout=state.layout).compile()

    def _inputs(
        self, state: NoiseState, step: Step, valid: np.bool_ | jax.Array
    ) -> tuple[Array, tuple[Buffer, ...], tuple[Step, np.bool_ | Array, tuple[Array, ...]]]:
        """First arguments of :meth:`_advance`."""
        return state.key, state.buffers, (step, valid, self.recursion.coefficients(step))

    def check_state(self, state: NoiseState) -> None:
        """Raise :class:`UsageError` unless ``state`` was made for this stream."""
        if not isinstance(state, NoiseState):
            raise _check.reject("state", type(state).__name__, "must come from init or next")
        self.refuse_other("state", state.digest, state.settings)
        blocks = grouped(state.layout.shapes, state.layout.shardings)
        expected: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
            "key": ((_draws.KEY_WORDS,), np.uint32),
            "step": ((), np.int32),
            "mark": ((8,), np.uint32),
            **self.buffer_arrays(tuple(block.shape for block in blocks)),
        }
        check_arrays(parts_of(state), expected)
        if isinstance(state.step, jax.core.Tracer):
            return  # inside jit the values are not known; there a wrong one gives NaN
        concrete = isinstance(state.key, jax.Array) and not isinstance(state.key, jax.core.Tracer)
        if concrete and state.key.is_deleted():
            rule = "was used already: the same noise twice cancels"
            way_out = "Continue from the state that the last call returned."
            raise _check.reject("state", f"state of step {int(state.step)}", rule, way_out)
        if not 0 <= int(state.step) <= self.iterations:
            rule = f"must be from 0 to {self.iterations}"
            raise _check.reject("state.step", int(state.step), rule)
        if not np.array_equal(state.mark, mark(state.layout, self.digest, self.settings)):
            rule = "belongs to another factorization, other settings or other parameters"
            way_out = "Restore the state that this stream made."
            raise _check.reject("state.mark", "of the buffers", rule, way_out)

    def refuse_past_end(self, step: int) -> None:
        """Raise :class:`NoiseExhaustedError` for a step after the last one."""
        if step >= self.iterations:
            raise NoiseExhaustedError(
                f"step {step} (counted from 0): the factorization covers {self.iterations} "
                "iterations, and its guarantee no further noise. Optimize one for more iterations."
            )

    def refuse_other(self, name: str, digest: object, settings: object) -> None:
        """Raise :class:`UsageError` unless the state ``name`` was made by this stream."""
        if digest != self.digest:
            rule = f"belongs to another factorization than this one ({self.digest[:12]})"
            way_out = "Its past noise was made by another matrix: start a new run."
            raise _check.reject(name, f"digest {str(digest)[:12]}", rule, way_out)
        if settings != self.settings:
            rule = f"was made with other settings than {self.settings}"
            raise _check.reject(name, settings, rule)

    def buffer_arrays(
        self, shapes: tuple[tuple[int, ...], ...]
    ) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """(shape, type) of every buffer of parameters of these shapes, by its name in a file."""
        slots = self.recursion.slots
        return {
            f"buffer/{i}": ((slots, *shape), self.buffer_dtype)
            for i, shape in enumerate(shapes)
            if slots
        }

    def buffers_by_leaf(self, state: NoiseState) -> dict[int, Array]:
        """The buffers of each parameter, (slots, *its shape), by its number; for files."""
        by_leaf: dict[int, Array] = {}
        if self.recursion.slots:
            blocks = grouped(state.layout.shapes, state.layout.shardings)
            for block, packed in zip(blocks, state.buffers, strict=True):
                by_leaf.update(zip(block.leaves, block.unpacked(packed), strict=True))
        return by_leaf

    def buffers_from_leaves(
        self, layout: Layout, by_leaf: dict[int, np.ndarray]
    ) -> tuple[Buffer, ...]:
        """The inverse of :meth:`buffers_by_leaf`, laid out over devices as ``layout`` says."""
        return tuple(
            block.packed([by_leaf[i] for i in block.leaves]) if by_leaf else None
            for block in grouped(layout.shapes, layout.shardings)
        )

    def _advance(
        self,
        key: Array,
        buffers: tuple[Buffer, ...],
        position: tuple[Step, np.bool_ | Array, tuple[Array, ...]],
        sums: PyTree,
        *,
        layout: Layout,
    ) -> tuple[PyTree, Array, tuple[Buffer, ...]]:
        """One step for every leaf; traced. ``position``: its number, is it one, coefficients."""
        step, valid, coefficients = position
        scale = jnp.where(valid, np.asarray(self.stddev, self.dtype), jnp.nan)
        _draws.check_sizes(layout.shapes, self.iterations)
        coefficients = tuple(jnp.asarray(c, self.dtype) for c in coefficients)
        shared = _Step(key, step, scale, coefficients)
        new: list[Any] = []
        noise: dict[int, Array] = {}
        blocks = grouped(layout.shapes, layout.shardings)
        for block, buffer in zip(blocks, buffers, strict=True):
            totals = None if sums is None else tuple(sums[i] for i in block.leaves)
            parts, kept = _spread(self._advance_block, block, buffer, totals)(
                shared, buffer, totals
            )
            noise.update(zip(block.leaves, parts, strict=True))
            new.append(kept)
        ordered = [noise[i] for i in range(len(noise))]
        if len(ordered) == 1 and new == [None]:
            # who hands in all parameters as one vector cuts it: XLA would draw inside every piece
            ordered = [_kernels.once(lambda: noise[0], step)]
        return jax.tree.unflatten(layout.treedef, ordered), key, tuple(new)

    @pinned
    def step_packed(
        self,
        key: np.ndarray,
        buffer: Buffer,
        step: Step,
        *,
        packing: Packing,
        row_starts: Array | None = None,
        scratch: Array | None = None,
    ) -> tuple[jax.Array, Buffer]:
        """(noise, new buffer) of packed leaves, shapes (rows, width) and (slots, rows, width).

        Outside of jit, for adapters that keep their own state.

        Args:
          key, step, row_starts: as for :meth:`Packing.draw`.
          buffer: what is kept between steps, (slots, rows, width); None where nothing is.
          packing: how the leaves lie in rows; static.
          scratch: noise of an earlier step that nobody needs any more, or None: the new noise is
            put into its memory. On the CPU fresh memory costs half as much as the draw.
        """
        coefficients = tuple(
            np.asarray(c, self.dtype) for c in self.recursion.coefficients(int(step))
        )
        shared = _Step(key, step, np.asarray(self.stddev, self.dtype), coefficients)
        return self._packed_jitted(packing, row_starts, shared, buffer, scratch)

    @functools.cached_property
    def _packed_jitted(self) -> Callable[..., tuple[jax.Array, Buffer]]:
        return jax.jit(  # late, as _advance_jitted
            self._noise_of,
            static_argnames="block",
            donate_argnames=("buffer", "scratch"),
            keep_unused=True,  # scratch: its memory is what is wanted of it
            compiler_options=_kernels.host_options(),
        )

    def _noise_of(
        self,
        block: Packing | SingleLeaf,
        begin: PyTree,
        step: _Step,
        buffer: Buffer,
        scratch: Array | None = None,
    ) -> tuple[jax.Array, Buffer]:
        """(noise, new buffer) of what lies together; traced.

        ``scratch``: as of :meth:`step_packed`.
        """
        dtype = self.dtype

        def draw(which: Step) -> jax.Array:
            return step.scale.astype(dtype) * block.draw(step.key, which, dtype, begin)

        def advance() -> tuple[jax.Array, Buffer]:
            drawing = step.coefficients, draw, step.number
            return _kernels.advance(self.recursion, *drawing, buffer, dtype)

        if buffer is None and len(block.leaves) > 1:
            # XLA would make the draw again inside every leaf that is cut out of it
            cut: jax.Array = _kernels.once(lambda: advance()[0], step.number)
            return cut, None
        return advance()

    def _advance_block(
        self,
        block: LeafGroup | SingleLeaf,
        step: _Step,
        buffer: Buffer,
        totals: tuple[Array, ...] | None,
    ) -> tuple[tuple[Array, ...], Array | None]:
        """The part of each leaf of a block that this device has, and the new buffer."""
        begin = block.begin()
        if not self.secure:
            noise, buffer = self._noise_of(block, begin, step, buffer)
            return tuple(block.parts(noise)), buffer
        elements = block.elements(begin)
        noise, width, kept = secure.advance(
            self.recursion,
            step.coefficients,
            lambda which: secure.integers(step.key, which, *elements),
            step.number,
            buffer,
            step.scale * secure.UNIT,
        )
        pairs = zip(totals or (), block.parts(noise), strict=True)
        return tuple(secure.release(total, part, width) for total, part in pairs), kept

    def _zeros(self, block: LeafGroup | SingleLeaf) -> Buffer:
        if not (slots := self.recursion.slots):
            return None
        layout = block.sharding and buffer_sharding(block.sharding)
        return jnp.zeros((slots, *block.shape), self.buffer_dtype, device=layout)


def from_factorization(
    factorization: Any,
    *,
    clip_norm: float,
    allow_uncertified: bool = False,
    **options: Any,
) -> NoiseStream:
    """The stream of a :class:`mfopt.factorization.Factorization`.

    ``clip_norm`` is the bound that the training code clips to: the standard deviation of z is
    the factorization's noise multiplier times it. ``options`` are those of :class:`NoiseStream`.
    An estimate, which proves nothing, is taken with ``allow_uncertified=True`` only.

    >>> import mfopt
    >>> made = mfopt.factorize(epochs=2, iterations_per_epoch=8, epsilon=2.0, strategy="identity")
    >>> stream = from_factorization(made, clip_norm=0.5)
    >>> stream.iterations, stream.stddev == 0.5 * made.noise_multiplier
    (16, True)

    Raises:
      UsageError: what is given is no factorization, or an estimate, and as :class:`NoiseStream`
        does.
    """
    if not all(hasattr(factorization, x) for x in ("strategy", "sampling", "guarantee")):
        rule = "must be a Factorization"
        way_out = "mfopt.load(path) gives that of a file."
        raise _check.reject("factorization", type(factorization).__name__, rule, way_out)
    require_guarantee(factorization.guarantee, pinned=False, allow_uncertified=allow_uncertified)
    return NoiseStream(
        factorization.strategy,
        iterations=factorization.sampling.length,
        noise_multiplier=factorization.noise_multiplier,
        clip_norm=clip_norm,
        sampling=factorization.sampling,
        **options,
    )


def _dtype(name: str, value: npt.DTypeLike) -> np.dtype:
    try:
        dtype: np.dtype = np.dtype(value)
    except TypeError:
        raise _check.reject(name, str(value), "is not a numeric type") from None
    return dtype


def _added(gradient: Array, noise: Array) -> Array:
    wide = jnp.promote_types(jnp.result_type(gradient), noise.dtype)
    return (gradient.astype(wide) + noise.astype(wide)).astype(gradient.dtype)


def _spread(
    function: Callable[..., T],
    block: LeafGroup | SingleLeaf,
    buffer: Buffer,
    totals: tuple[Array, ...] | None,
) -> Callable[..., T]:
    """``function(block, ...)``, run on each device for what it has of the leaves.

    Written with ``shard_map`` and not left to the compiler: the blocks' places in their leaves
    enter only through the counters, so no device needs anything from another.
    """
    function = functools.partial(function, block)
    if block.sharding is None:
        return function
    specs = tuple(sharding.spec for sharding in block.shardings if sharding is not None)
    rows = None if buffer is None else buffer_sharding(block.sharding).spec
    return jax.shard_map(
        function,
        mesh=block.sharding.mesh,
        in_specs=(PartitionSpec(), rows, None if totals is None else specs),
        out_specs=(specs, rows),
        check_vma=False,  # a constant branch counts as equal on all devices, the noise does not
    )


def _on_devices_of(layout: Layout, words: np.ndarray) -> jax.Array:
    """The key, on every device that holds the parameters."""
    sharding = next((s for s in layout.shardings if s is not None), None)
    if sharding is None:
        return jnp.array(words)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.make_array_from_callback(words.shape, everywhere, lambda index: words[index])
