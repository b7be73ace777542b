"""One private run in JAX: pure functions of a state, under jit and scan or outside of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import noise
from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt._runtime._float64 import pinned
from mfopt._runtime._pytree import pytree
from mfopt._runtime._types import PyTree
from mfopt.factorization import Factorization
from mfopt.guarantee import require_guarantee
from mfopt.jax.batches import Batches, StepBatch, tag_of
from mfopt.jax.program import GradientProgram, Product
from mfopt.noise import NoiseState, uses
from mfopt.noise.state import set_once
from mfopt.sampling import UnitSampler
from mfopt.training.clipping import Clipping, sum_of_squares


@pytree
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrivateState:
    """State of a run; a pytree. **Secret**: it holds the key of noise and batches, and sums.

    Attributes:
      noise: of the stream; its ``step`` is the step of the run, and batches follow from its key.
      sums: of the clipped gradients of this step so far, as the parameters.
      part: microbatches in ``sums``, int32.
      parts: microbatches of this step, int32; 1 until the first is there.
    """

    noise: NoiseState
    sums: PyTree
    part: Array
    parts: Array

    def __repr__(self) -> str:
        return f"PrivateState({self.noise!r})"


class PrivateRun:
    """A factorization's mechanism in a JAX loop: batches, clipping, noise and division in one.

    ::

        run = PrivateRun(factorization, population=len(x), clip_norm=1.0)
        state = run.init(params)

        @jax.jit
        def step(params, state, batch):
            mean, state = run.gradient(jax.grad(loss), params, (x, y), batch, state)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, mean), state

        for batch in run.batches(state):  # a batch may be empty: then its step adds noise only
            params, state = step(params, state, batch)

    ``loss(params, example)`` is that of one example. :meth:`mean` takes gradients that the caller
    made, one for each slot of the batch, and :meth:`add` and :meth:`release` do so in parts. All
    are pure: the run holds public numbers, its state all secrets. What they give is an ordinary
    gradient for any optimizer, and all that follows is post-processing. Keep the state out of what
    takes steps back (``optax.apply_if_finite``): put that around the optimizer only.

    Formal guarantee: ``run.guarantee(state)``, where a unit is one example, if each gradient is
    that of the unit in its slot alone, as it is in :meth:`gradient`, which reads what is traced. A
    batch that is not the next step's, whole and as it was drawn, raises, or gives NaN inside jit,
    and so does a step past the last, and the second use of a state, of a copy or of an older file
    for another sum (:class:`~mfopt.noise.NoiseStream`).

    Args:
      factorization: C, σ and the sampling scheme.
      population: number of units in the data set.
      clip_norm: bound on the norm of one unit's gradient, over all parameters.
      microbatch: units whose gradients are held at once; a batch then has a leading axis of
        microbatches. The whole batch if left out.
      normalizer: what noised sums are divided by, a public number; the expected batch if left out.
      allow_uncertified: take pinned seeds, and a factorization that is an estimate: for experiments
        and tests, whose runs have no guarantee.
      options: of :class:`mfopt.noise.NoiseStream` (``secure``, ``buffer_dtype``, ``past``).

    >>> import mfopt
    >>> made = mfopt.factorize(epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity")
    >>> run = PrivateRun(made, population=12, clip_norm=1.0)
    >>> state = run.init({"w": np.zeros(3, np.float32)})
    >>> batch = run.batches(state)[0]
    >>> mean, state = run.mean({"w": np.ones((len(batch.units), 3))}, batch, state)
    >>> mean["w"].shape, int(state.noise.step)
    ((3,), 1)
    """

    __setattr__ = set_once

    def __init__(
        self,
        factorization: Factorization,
        population: int,
        clip_norm: float,
        *,
        microbatch: int | None = None,
        normalizer: float | None = None,
        allow_uncertified: bool = False,
        **options: Any,
    ) -> None:
        self.factorization, self.allow_uncertified = factorization, allow_uncertified
        self.stream = noise.from_factorization(
            factorization, clip_norm=clip_norm, allow_uncertified=allow_uncertified, **options
        )
        self.clipping = Clipping(self.stream.clip_norm)
        self.microbatch = None if microbatch is None else _check.integer("microbatch", microbatch)
        expected = factorization.sampler(population, 0).expected_batch
        self.population = int(population)
        self.normalizer = _check.positive(
            "normalizer", expected if normalizer is None else normalizer
        )

    def __repr__(self) -> str:
        return f"PrivateRun({self.stream!r}, population={self.population})"

    @pinned
    def init(self, params: PyTree, *, seed: int | None = None) -> PrivateState:
        """The state before step 0, with a new key from the operating system.

        Args:
          params: what is trained: floating-point arrays, or their shapes.
          seed: pins noise and batches: such a run protects nothing, and needs
            ``allow_uncertified``.

        Raises:
          UsageError: as :meth:`mfopt.noise.NoiseStream.init`.
        """
        require_guarantee(
            self.factorization.guarantee,
            pinned=seed is not None,
            allow_uncertified=self.allow_uncertified,
        )
        return self._between(self.stream.init(params, seed=seed))

    def guarantee(self, state: PrivateState) -> str:
        """Statement that a run may make of its privacy: the guarantee, or "none" and the reason."""
        return self.factorization.statement(pinned=state.noise.pinned)

    def batches(self, state: PrivateState) -> Batches:
        """The batches of the run, from the state's step on; outside of jit."""
        key = _key_of(state)
        return Batches(self.sampler(state), key, int(state.noise.step), self.microbatch)

    def sampler(self, state: PrivateState) -> UnitSampler:
        """The sampler of the batches, whose seed follows from the key of the noise.

        By a hash: who learns the batches does not learn the noise.
        """
        words = _key_of(state).astype("<u4").tobytes()
        seed = int.from_bytes(hashlib.sha256(b"mfopt batches" + words).digest(), "little")
        sampler = self.factorization.sampler(self.population, seed)
        sampler.pinned = state.noise.pinned
        return sampler

    def gradient(
        self,
        function: Callable[[PyTree, PyTree], PyTree],
        params: PyTree,
        data: PyTree,
        batch: StepBatch,
        state: PrivateState,
        *,
        public: PyTree = None,
    ) -> tuple[PyTree, PrivateState]:
        """(noised mean gradient of the batch, next state), microbatch by microbatch.

        Args:
          function: ``function(params, example)``, the gradient of one example; with ``public`` its
            third argument. Other arrays of numbers that it uses must be the same in all steps.
          params: first argument of it.
          data: arrays with one unit in each row; an example is a row of each.
          batch: the next one of :meth:`batches`.
          state: of the run.
          public: what changes from step to step and follows from public or released values alone.

        Raises:
          UsageError: ``data`` has not as many rows as there are units; ``function`` changes
            ``params``, as batch norm and dropout of NNX do, or calls the host; and as :meth:`mean`.
        """
        whole = {np.shape(leaf) for leaf in jax.tree.leaves(data)}
        if (sizes := {shape[:1] for shape in whole}) != {(self.population,)}:
            rule = f"must have {self.population} rows, the population of the run"
            raise _check.reject("data", sorted(sizes), rule)
        _check.kind("batch", batch, StepBatch, "run.batches(state) gives them.")

        data = jax.tree.map(jnp.asarray, data)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
        program = GradientProgram.of(
            function, params, shapes, *(() if public is None else (public,))
        )
        if whole & {np.shape(array) for array in program.program.consts}:
            rule = "uses an array as large as the data: each gradient would be of all examples"
            way_out = "Use the example that it is given, and no other."
            raise _check.reject("function", function, rule, way_out)
        of_units = jax.vmap(program, (None, 0, None))
        self.stream.check_state(state.noise)
        self.stream.leaves_like(state.noise, program.gradients, "gradients")

        def step_once(state: PrivateState, part: StepBatch) -> tuple[PrivateState, None]:
            examples = jax.tree.map(lambda leaf: leaf[part.units], data)
            return self._with(of_units(params, examples, public), part, state), None

        if np.ndim(batch.units) == 1:
            state, _ = step_once(state, batch)
        else:
            state, _ = jax.lax.scan(step_once, state, batch)
        return self._release(state, program.constants)

    def mean(
        self, gradients: PyTree, batch: StepBatch, state: PrivateState
    ) -> tuple[PyTree, PrivateState]:
        """(noised mean of clipped gradients, next state), for a batch in one part.

        Args:
          gradients: of the parameters' structure, each leaf (m, *shape): row i is the gradient of
            unit ``batch.units[i]`` and of no other; rows of empty slots do not count.
          batch: the next one of :meth:`batches`.
          state: of the run; it is used up.

        Raises:
          UsageError: gradients of another structure or shape (a sum, a mean), a batch of another
            step or that no run drew. Inside jit what depends on values gives NaN instead.
          NoiseExhaustedError: past the last step, outside of jit.
        """
        return self.release(self.add(gradients, batch, state))

    def add(self, gradients: PyTree, batch: StepBatch, state: PrivateState) -> PrivateState:
        """State with one more microbatch in its sum; raises as :meth:`mean`.

        Microbatches come in their order, for example as ``jax.lax.scan`` gives them.
        """
        _check.kind("batch", batch, StepBatch, "run.batches(state) gives them.")
        units = np.shape(batch.units)
        if len(units) != 1:
            rule = "must be one microbatch, of units (m,)"
            way_out = "Scan over the first axis of the batch, or use run.gradient."
            raise _check.reject("batch", f"units of shape {units}", rule, way_out)
        self.stream.check_state(state.noise)
        of_units = self.stream.leaves_like(state.noise, gradients, "gradients", units)
        return self._with(of_units, batch, state)

    @pinned
    def _with(self, of_units: list[Any], batch: StepBatch, state: PrivateState) -> PrivateState:
        """State with the microbatch of these gradients, arrays or products, in its sum."""
        sums, is_next = self._added(state, of_units, batch)
        _refuse(
            is_next,
            "batch",
            f"step {batch.step}, part {batch.part}",
            f"is not what the run drew for step {state.noise.step}, part {state.part}, "
            "or sums are not 0 before the first part",
            "Give each batch of run.batches(state) once and in order, an empty one too, with the "
            "state that init, load, release or gradient gave.",
        )
        return dataclasses.replace(
            state,
            sums=jax.tree.unflatten(jax.tree.structure(state.sums), sums),
            part=state.part + 1,
            parts=batch.parts,
        )

    @functools.cached_property
    def _added(self) -> Callable[..., PyTree]:
        """``(sums and the batch's, whether it is the next batch and sums begin at 0)``."""

        def added(
            state: PrivateState, of_units: list[Any], batch: StepBatch
        ) -> tuple[list[Array], Array]:
            totals = jax.tree.leaves(state.sums)
            is_next = (tag_of(batch, state.noise.key) == batch.tag).all()
            is_next &= (batch.step == state.noise.step) & (batch.part == state.part)
            is_next &= (state.part > 0) | (sum(map(jnp.count_nonzero, totals)) == 0)
            squares = [jax.vmap(_square)(leaf) for leaf in of_units]
            factors = self.clipping.factor(jnp.sqrt(sum(squares)))
            factors = jnp.where(batch.mask, factors, 0.0)

            def clipped_sum(total: Array, leaf: Any) -> Array:
                if isinstance(leaf, Product):
                    part = leaf.total(factors)
                else:
                    factor = factors.reshape(-1, *[1] * (leaf.ndim - 1))
                    # where, not a product alone: 0 times infinity is no number
                    part = jnp.where(factor > 0, leaf.astype(jnp.float32) * factor, 0.0).sum(0)
                return jnp.where(is_next, total + part.astype(total.dtype), jnp.nan)

            return list(map(clipped_sum, totals, of_units)), is_next

        return jax.jit(added)  # outside of jit too: not compiled operation by operation

    def release(self, state: PrivateState) -> tuple[PyTree, PrivateState]:
        """(noised mean of what was added since the last step, next state); raises as :meth:`mean`.

        Raises:
          UsageError: the batch of the step is not there, or not whole; inside jit that gives NaN.
        """
        return self._release(state, None)

    @pinned
    def _release(self, state: PrivateState, constants: PyTree) -> tuple[PyTree, PrivateState]:
        whole = state.part == state.parts
        _refuse(
            whole,
            "state",
            f"{state.part} of {state.parts} microbatches of step {state.noise.step}",
            "a step needs its whole batch",
            "Add every part of the step's batch before, an empty one too.",
        )
        sums = jax.tree.map(lambda leaf: jnp.where(whole, leaf, jnp.nan), state.sums)
        noised, following = self.stream.release(sums, state.noise, constants)
        return jax.tree.map(lambda leaf: leaf / self.normalizer, noised), self._between(following)

    def save(
        self, path: str | os.PathLike[str], state: PrivateState, *, force: bool = False
    ) -> None:
        """Write ``state`` to a file of mode 0600, as :func:`mfopt.noise.save_state`.

        Of a step that is half done the sums are left out: its batch comes again, whole.

        Raises:
          UsageError: the file is there and ``force`` is not set.
        """
        noise.save_state(path, self.stream, state.noise, force=force)

    def load(self, path: str | os.PathLike[str], params: PyTree) -> PrivateState:
        """The state in a file of :meth:`save`; raises as :func:`mfopt.noise.load_state`."""
        return self._between(noise.load_state(path, self.stream, params))

    def _between(self, state: NoiseState) -> PrivateState:
        """The state of a run between two steps."""
        layout = state.layout
        zeros = [
            jnp.zeros(shape, self.stream.dtype, device=where)
            for shape, where in zip(layout.shapes, layout.shardings, strict=True)
        ]
        sums = layout.treedef.unflatten(zeros)
        none, one_int = (np.array(x, np.int32) for x in (0, 1))
        return PrivateState(state, sums, none, one_int)


def _key_of(state: PrivateState) -> np.ndarray:
    """The key on the host; raises :class:`UsageError` inside jit."""
    if isinstance(state.noise.key, jax.core.Tracer):
        rule = "batches are drawn outside of jit"
        raise _check.reject("state", "traced", rule, "Pass them in: batches(state).stacked().")
    return uses.on_host(state.noise.key)


def _square(leaf: jax.Array) -> jax.Array:
    """Squared norm of one example's gradient of one leaf."""
    if isinstance(leaf, Product):
        return leaf.square()
    return sum_of_squares(leaf.astype(jnp.float32))


def _refuse(right: object, name: str, value: str, rule: str, way_out: str) -> None:
    """Raise :class:`UsageError` where ``right`` is known to be false; inside jit it is not."""
    if not isinstance(right, jax.core.Tracer) and not bool(right):
        raise _check.reject(name, value, rule, way_out)
