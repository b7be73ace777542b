"""BLT with an oscillating term: a C that nearly vanishes after one epoch, at the memory of a BLT.

At a large ε the best C is cut at lag b, one epoch: two participations of a unit must not overlap. A
sum of exponentials falls too slowly for that, and a band costs b - 1 arrays. A damped wave that has
its trough at the end of an epoch costs three.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mfopt._runtime._float64 import compiled
from mfopt.strategies import series
from mfopt.strategies.base import ToeplitzStrategy
from mfopt.strategies.blt import Exponentials
from mfopt.strategies.fields import Array, parameter


class WaveBLT(Exponentials, ToeplitzStrategy):
    """C with coefficients g·(1, Σ_i ω_i λ_i^(t-1) + w ρ^(t-1) (1 + m cos(θ (t-1) + φ)), …), any n.

    The wave is the complex pair of decays ρ e^(±iθ) beside the real ρ, so written that no entry is
    negative. Noise generation keeps one array for each λ and three for the wave.

    Attributes:
      scale: ω >= 0, shape (exponentials,).
      decay: λ in [0, 1], shape (exponentials,).
      weight: w >= 0, shape ().
      damping: ρ in [0, 1], shape ().
      depth: m in [0, 1], shape ().
      frequency: θ, radians per iteration, any number, shape ().
      phase: φ, radians, any number, shape ().
      gain: g > 0, shape (): the diagonal of C.
    """

    scale: Array = parameter(dimensions=1)
    decay: Array = parameter(dimensions=1)
    weight: Array = parameter(dimensions=0)
    damping: Array = parameter(dimensions=0)
    depth: Array = parameter(dimensions=0)
    frequency: Array = parameter(dimensions=0)
    phase: Array = parameter(dimensions=0)
    gain: Array = parameter(dimensions=0, default=1.0)
    kind = "wave-blt"
    described = ("buffers",)
    shares = ("decay", "damping", "depth")

    @property
    def buffers(self) -> int:
        """Arrays that streaming its noise keeps."""
        return len(self.scale) + 3

    @compiled("n")
    def toeplitz_coefs(self, n: int) -> Array:
        n = self.check_size(n)
        lag = jnp.arange(n - 1)
        angle = jnp.asarray(self.frequency) * lag + self.phase
        wave = self.weight * jnp.asarray(self.damping) ** lag * (1 + self.depth * jnp.cos(angle))
        coefs = series.exponentials(jnp.asarray(self.scale), jnp.asarray(self.decay), n)
        return jnp.asarray(self.gain) * coefs.at[1:].add(wave)

    def tables(self, n: int) -> tuple[Array, Array, Array]:
        """(read, decay, feed) as :class:`Buffered` says. The cosine of a difference is split into
        products, so that no buffer depends on another."""
        exponentials = len(self.scale)
        angle = jnp.asarray(self.frequency) * jnp.arange(self.check_size(n))
        lagged = angle - self.frequency + self.phase
        swing = jnp.asarray(self.weight) * self.depth
        ones = jnp.ones_like(angle)
        read = [
            jnp.asarray(self.weight) * ones,
            swing * jnp.cos(lagged),
            swing * jnp.sin(lagged),
        ]
        feed = [ones, jnp.cos(angle), jnp.sin(angle)]
        decay = jnp.concatenate([jnp.asarray(self.decay), jnp.repeat(self.damping, 3)])

        def rows(exponential: Array, wave: list[jax.Array]) -> Array:
            columns = jnp.broadcast_to(jnp.asarray(exponential), (n, exponentials))
            return jnp.concatenate([columns, jnp.stack(wave, axis=1)], axis=1)

        return (
            rows(self.scale, read),
            jnp.broadcast_to(decay, (n, exponentials + 3)),
            rows(jnp.ones(exponentials), feed),
        )
