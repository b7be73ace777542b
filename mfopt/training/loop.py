"""The training loop: one for all algorithms, read top to bottom.

What differs between algorithms comes in as values: the units (users or records), the sampler, the
clipping, the noise, the optimizer. Nothing is switched inside. One step is

    units of the step  ->  Σ clip(gradient of unit)  ->  + noise  ->  / normalizer  ->  optimizer

and everything after the noise is post-processing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt._runtime._float64 import scope
from mfopt._runtime._pytree import pytree
from mfopt.noise import NoiseStream
from mfopt.sampling import UnitSampler
from mfopt.sampling.sampler import pad
from mfopt.training import mesh as meshes
from mfopt.training.clipping import Clipping, NoClipping
from mfopt.training.gradients import Statistics, Totals, microbatch_adder
from mfopt.training.models import Model, PyTree
from mfopt.training.secrets import RunSecret
from mfopt.training.units import Units

_EVEN = 64  # devices that share the noise evenly, and their divisors
_LEAST_TOKENS, _BLOCK_TOKENS = 2**14, 2**22  # of a block: up to 16 MiB of numbers and their mask


@dataclasses.dataclass(frozen=True)
class Execution:
    """Values that the privacy statement depends on.

    Args:
        units: what is sampled, and how a unit number becomes token rows.
        sampler: executes the accounted sampling spec over ``units.population`` units.
        clipping: bounds one unit's contribution.
        noise: stream of σ·bound·C⁻¹z, where bound is what one unit can move a sum by,
            ``clipping.sensitivity``. None: no noise and no guarantee (the baseline).
        normalizer: what each noised sum is divided by. Fixed and public: the expected number of
            units per step, never the number that came.
        microbatch: units whose gradients are held at once.

    Raises:
        UsageError: the parts do not belong together: another population, another number of steps,
            noise for another bound, clipping without noise.
    """

    units: Units
    sampler: UnitSampler
    clipping: Clipping | NoClipping
    noise: NoiseStream | None
    normalizer: float
    microbatch: int = 1

    def __post_init__(self) -> None:
        _check.positive("normalizer", self.normalizer)
        _check.integer("microbatch", self.microbatch)
        if self.sampler.population != self.units.population:
            rule = f"the sampler must cover the {self.units.population} units there are"
            raise _check.reject("population", self.sampler.population, rule)
        if (self.noise is None) != isinstance(self.clipping, NoClipping):
            rule = "needs clipping, and clipping without noise protects nothing"
            way_out = "Give both, or neither for the non-private baseline."
            raise _check.reject("noise", self.noise, rule, way_out)
        if self.noise is None:
            return
        bound = self.clipping.sensitivity
        if self.noise.clip_norm != bound:
            rule = f"one unit moves a sum by up to {bound}"
            way_out = "Make the noise stream with that clip_norm."
            raise _check.reject("noise.clip_norm", self.noise.clip_norm, rule, way_out)
        if self.noise.iterations != self.iterations:
            rule = f"the sampling scheme has {self.iterations}"
            raise _check.reject("noise.iterations", self.noise.iterations, rule)

    @property
    def iterations(self) -> int:
        """n, the steps that the account covers."""
        return int(self.sampler.scheme.length)


@pytree
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of a run, as checkpointed. ``noise`` is secret: with it the noise can be subtracted."""

    step: jax.Array
    params: PyTree
    optimizer: PyTree
    noise: PyTree


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One finished ``step`` t, who took part, and sums over them.

    ``batch``: units, int64 (microbatches, microbatch), at least one microbatch; -1: nobody.

    The buffers of ``state``, with ``state.step`` = t + 1, are reused by the next step: copy what is
    to be kept before. ``release``: the noised mean that the optimizer got, if asked for.
    """

    step: int
    state: TrainState
    statistics: Statistics
    batch: np.ndarray
    release: PyTree


class Trainer:
    """The compiled pieces of one run.

    Args:
        model, execution: initial parameters and their loss, and see :class:`Execution`.
        optimizer: any optax transformation; sees only noised means.
        mesh: where to run; None: one device of this process.
        keep_release: hand each noised mean out (costs one copy of the parameters).
    """

    def __init__(
        self,
        model: Model,
        execution: Execution,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh | None = None,
        keep_release: bool = False,
    ) -> None:
        self.model, self.execution, self.optimizer = model, execution, optimizer
        self._mesh = mesh or meshes.one_device()
        meshes.check_microbatch(self._mesh, execution.microbatch)
        self._where = meshes.spread(self._mesh, model.params)
        self._frozen = meshes.distribute(self._mesh, model.frozen)
        self._state_where: PyTree = None
        self._adder = microbatch_adder(model, execution.clipping)
        # its numbers are float64, those of the model and all programs here are what they are
        self._secure = execution.noise is not None and execution.noise.secure
        # microbatches of one compiled loop, from public numbers: those of nearly any step (small
        # ones share a program); one of more takes the loop again. Its rows are held as integers
        sampler = execution.sampler
        size = sampler.expected_batch + 4 * sampler.expected_batch**0.5
        tokens, _ = execution.units.fetch(np.full(1, -1), 0)
        block_size = execution.microbatch * tokens.size
        block = max(math.ceil(size / execution.microbatch), _LEAST_TOKENS // block_size)
        self._block = max(1, min(block, _BLOCK_TOKENS // block_size))
        self._zero = jax.jit(lambda params: self._pin_totals(Totals.zero(params)))
        self._add = jax.jit(self._added, donate_argnums=0)
        self._update = jax.jit(
            functools.partial(self._apply, keep_release=keep_release),
            donate_argnums=(0, 1) if keep_release else (0,),
        )

    def init(self, key: Any = None) -> TrainState:
        """The state before step 0.

        ``key``: secret noise key, uint32 (8,), never used before; drawn from the operating system
        if left out.
        """
        if (
            key is None
        ):  # given to the noise all the same: the run's secret keeps count of its steps
            key = RunSecret.fresh().key("noise")
        # a copy, as the loop reuses the state's buffers and the model must survive it; made by the
        # host, as no device need hold all of it
        params = meshes.place(jax.tree.map(np.array, self.model.params), self._where)
        # moments lie where their parameters do, which have the same shapes
        layout = meshes.spread(self._mesh, jax.eval_shape(self.optimizer.init, params))
        optimizer = jax.jit(self.optimizer.init, out_shardings=layout)(params)
        noise = self.execution.noise
        draws: PyTree = ()
        if noise is not None and not self._secure:
            draws = noise.init(_vector(params, self._mesh), key=key)
        state = TrainState(jnp.int32(0), params, optimizer, draws)
        self._state_where = meshes.layout_of(self._mesh, state)
        placed: TrainState = meshes.place(state, self._state_where)
        if noise is None or not self._secure:
            return placed
        with scope():
            return dataclasses.replace(placed, noise=noise.init(_vector(params), key=key))

    def run(self, state: TrainState, stop: int | None = None) -> Iterator[StepResult]:
        """Steps ``state.step`` .. ``stop`` - 1, one result after each.

        Every prefix is covered by the account; a step past ``execution.iterations`` is refused.
        ``state`` must come from :meth:`init` or from a checkpoint of this very run: then noise and
        batches go on where they were, and no draw of either meets different data.
        """
        execution = self.execution
        stop = execution.iterations if stop is None else _check.integer("stop", stop, at_least=0)
        if stop > execution.iterations:
            rule = f"the guarantee covers {execution.iterations} iterations"
            way_out = "A longer run needs a factorization of its own."
            raise _check.reject("stop", stop, rule, way_out)
        for step in range(int(state.step), stop):
            # padded, which is free, and never cut
            batch = pad(execution.sampler[step], execution.microbatch, fill=-1)
            totals = self.sum(state.params, batch, step)
            if execution.noise is not None and execution.noise.secure:
                # in float64: the sum with secure noise on its grid, the stream's next state
                vector, tree_of = jax.flatten_util.ravel_pytree(totals.gradient)
                with scope():
                    noised, noise = execution.noise.release(vector, state.noise)
                total = tree_of(noised)
                state, release = self._update(dataclasses.replace(state, noise=()), total)
                state = dataclasses.replace(state, noise=noise)
            else:
                state, release = self._update(state, totals.gradient)
            yield StepResult(step, state, totals.statistics, batch, release)

    def sum(self, params: PyTree, batch: np.ndarray, step: int) -> Totals:
        """Σ clip(gradient or update of unit) over a step's batch, before noise: sensitive."""
        totals: Totals = self._zero(params)
        for begin in range(0, len(batch), self._block):
            units = batch[begin : begin + self._block]
            tokens, mask = self.execution.units.fetch(units.reshape(-1), step)
            rows = [self._rows(x.reshape(*units.shape, *x.shape[1:])) for x in (tokens, mask)]
            totals = self._add(totals, (params, self._frozen), *rows, len(units))
        return totals

    def _added(
        self, totals: Totals, arrays: PyTree, tokens: jax.Array, mask: jax.Array, count: jax.Array
    ) -> Totals:
        """The sums with ``count`` more microbatches, of tokens (block, m, G, L), in one loop."""
        params, frozen = meshes.gathered(self._mesh, arrays)  # once for the block

        def add_block(i: jax.Array, totals: Totals) -> Totals:
            return self._pin_totals(self._adder(totals, params, frozen, tokens[i], mask[i]))

        # a count that is traced: batches of all sizes are served by one compilation
        return jax.lax.fori_loop(0, count, add_block, totals)

    def _apply(
        self, state: TrainState, total: PyTree, *, keep_release: bool
    ) -> tuple[TrainState, PyTree]:
        execution = self.execution
        noise_state = state.noise
        if execution.noise is not None and not self._secure:
            noise, noise_state = execution.noise.next(state.noise)
            total = jax.tree.map(jnp.add, total, self._tree_of(noise, total))
        release = jax.tree.map(lambda leaf: leaf / execution.normalizer, total)
        update, optimizer = self.optimizer.update(release, state.optimizer, state.params)
        params = optax.apply_updates(state.params, update)
        following = TrainState(state.step + 1, params, optimizer, noise_state)
        if self._state_where is not None:
            # the same layout after every step, so that one compilation serves all
            following = jax.lax.with_sharding_constraint(following, self._state_where)
        return following, (release if keep_release else None)

    def _tree_of(self, vector: jax.Array, like: PyTree) -> PyTree:
        """The tree of a vector of all parameters, on each device its share of either."""
        flat, tree_of = jax.flatten_util.ravel_pytree(like)
        # gathered once: cut from shares, every array would be pieced together from all neighbours
        tree = tree_of(meshes.gathered(self._mesh, vector)[: flat.size])
        return jax.lax.with_sharding_constraint(tree, self._where)

    def _rows(self, rows: np.ndarray) -> Array:
        """Microbatches (k, m, ...), with empty ones behind them that fill the block."""
        block = np.zeros((self._block, *rows.shape[1:]), rows.dtype)
        block[: len(rows)] = rows
        return meshes.place_rows(self._mesh, block, axis=1)

    def _pin_totals(self, totals: Totals) -> Totals:
        layouts = (self._where, meshes.replicated(self._mesh))
        return Totals(*jax.lax.with_sharding_constraint(tuple(totals), layouts))


def _vector(params: PyTree, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
    """Parameters as the noise sees them: one vector, long enough to be cut evenly.

    The draw of a vector is compiled once, that of a hundred arrays a hundred times, and its numbers
    are the same on every mesh. The layout is part of the state, so it is one for all meshes whose
    size divides ``_EVEN``: a run continues on another number of devices.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    if mesh is None:
        return jax.ShapeDtypeStruct((size,), jnp.float32)
    parts = math.lcm(mesh.size, _EVEN)
    shape = (-(-size // parts) * parts,)
    layout = meshes.spread(mesh, jax.ShapeDtypeStruct(shape, jnp.float32))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)
