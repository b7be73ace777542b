"""A strategy as somebody outside mfopt would add it: this file, and no edit anywhere else.

C has a unit diagonal (times a gain) and below it scale · decay^(t-1-j) · exp(-fade · j): a buffer
whose intake fades, since what is added late is seen by few queries. It is not Toeplitz.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.noise import choice
from mfopt.noise.recursions import Modal
from mfopt.optimize import kinds
from mfopt.optimize.parameterization import Parameterization
from mfopt.strategies import Array, Strategy, parameter


class Fading(Strategy):
    """C[t, j] = gain · scale · decay^(t-1-j) · exp(-fade · j) below a diagonal of gain."""

    kind = "fading"
    scale: Array = parameter(dimensions=0)
    decay: Array = parameter(dimensions=0)
    fade: Array = parameter(dimensions=0)
    gain: Array = parameter(dimensions=0, default=1.0)

    def materialize(self, n: int) -> Array:
        step = jnp.arange(self.check_size(n))
        lag = step[:, None] - step[None, :]
        below = self.scale * self.decay ** jnp.maximum(lag - 1, 0) * jnp.exp(-self.fade * step)
        return self.gain * jnp.where(lag > 0, below, jnp.where(lag == 0, 1.0, 0.0))

    def column_bands(self, n: int) -> int:
        return n

    def rescaled(self, factor: float) -> Fading:
        return dataclasses.replace(self, gain=factor * self.gain)


@choice.recursion.register
def _one_buffer(strategy: Fading, n: int, past: choice.Past) -> Modal:
    """w_t = z_t/gain - scale·s_t, s_{t+1} = decay·s_t + exp(-fade·t)·w_t."""
    feed = np.exp(-float(strategy.fade) * np.arange(n))
    return Modal(
        gain=np.array([1 / float(strategy.gain)]),
        read=np.array([[float(strategy.scale)]]),
        decay=np.array([[float(strategy.decay)]]),
        feed=feed[:, None],
    )


def _build(x: jax.Array) -> Fading:
    return Fading(jnp.exp(x[0]), jax.nn.sigmoid(x[1]), jnp.exp(x[2]))


def _parameterize(strategy: Fading, n: int) -> Parameterization:
    scale, decay, fade = (float(x) for x in (strategy.scale, strategy.decay, strategy.fade))
    start = np.array([math.log(scale), math.log(decay / (1 - decay)), math.log(max(fade, 1e-12))])
    return Parameterization(start, _build)


kinds.register(
    kinds.Kind(
        "fading",
        starts=lambda size: [Fading(0.3, 1 - 1 / size.bins, 0.1 / size.n)],
        convert=lambda strategy, size: strategy if isinstance(strategy, Fading) else None,
        parameterize=_parameterize,
        parameters=lambda size: 3,
        samples=2**11,
        steps=60,
        tolerance=1e-4,
    )
)


class Plateau(Strategy):
    """1 on the diagonal and ``level`` below: nobody wrote a recursion for it."""

    kind = "plateau"
    level: Array = parameter(dimensions=0)

    def materialize(self, n: int) -> Array:
        return self.level * jnp.tril(jnp.ones((n, n)), -1) + jnp.eye(n)

    def column_bands(self, n: int) -> int:
        return n
