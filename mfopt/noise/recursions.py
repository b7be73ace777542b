"""Row-by-row recursions for C⁻¹z: numbers only, no framework.

A recursion is chosen once for a strategy (:func:`choose`) and then run by JAX, PyTorch or numpy.
With z_t the white draw of step t and w_t the noise, row t of C w = z or of w = C⁻¹ z becomes one of

- :class:`Ring`: ``w_t = a_0 z_t + Σ_k a_k w_{t-k}`` (banded C) or ``a_0 z_t + Σ_k a_k z_{t-k}``
  (C⁻¹, banded or not), from the outputs or draws that it stores;
- :class:`Modal`: ``w_t = a z_t - r·s_t``, ``s_{t+1} = λ s_t + μ w_t``, from d buffers (BLT, tree);
- :class:`Rows`: ``w_t = Σ_k C⁻¹[t, t-k] z_{t-k}``, from past draws that are regenerated.

Coefficients may depend on the step; ``coefficients(step)`` gives those of one step. They are
float64 here and cast to the noise's type where they are used. The memory and time of a mechanism
are computed from its recursion (``slots``, ``draws``) alone.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np

from mfopt._runtime._arrays import Array, Step


class Recursion(abc.ABC):
    """A way to stream C⁻¹z."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Buffers kept from step to step, each of the size of the parameters."""

    def draws(self, n: int) -> float:
        """White draws that one step makes, each of the size of the parameters: mean over n."""
        return 1.0

    @abc.abstractmethod
    def coefficients(self, step: Step) -> tuple[Array, ...]:
        """Coefficients of one step, which may be traced."""

    @abc.abstractmethod
    def scaled(self, inputs: np.ndarray, outputs: np.ndarray) -> Recursion:
        """The recursion of diag(outputs) C⁻¹ diag(inputs), both of shape (n,) and not 0.

        It keeps what this one keeps. For C' = diag(r) C diag(d) take 1/r and 1/d.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Ring(Recursion):
    """Recursion over stored values: banded C (``feedback``), or C⁻¹ by its bands, b̂ of them.

    Attributes:
      table: shape (1, b̂) for constant coefficients, (n, b̂) otherwise. ``table[t, 0]`` is the
        weight of z_t, ``table[t, k]`` that of the value of step t-k.
      feedback: whether the last b̂ - 1 outputs are kept (banded C) or as many draws (banded C⁻¹).
    """

    table: np.ndarray
    feedback: bool

    @property
    def slots(self) -> int:
        return self.table.shape[1] - 1

    def coefficients(self, step: Step) -> tuple[Array]:
        """(coefficients of step,), shape (b̂,)."""
        return (_row(self.table, step),)

    def scaled(self, inputs: np.ndarray, outputs: np.ndarray) -> Ring:
        n, bands = len(inputs), self.table.shape[1]
        step, lag = np.arange(n)[:, None], np.arange(1, bands)[None, :]
        earlier = np.maximum(step - lag, 0)
        past = 1 / outputs[earlier] if self.feedback else inputs[earlier]
        past = np.where(lag <= step, past, 0.0)
        table = np.broadcast_to(self.table, (n, bands)) if len(self.table) == 1 else self.table
        weights = np.concatenate([inputs[:, None], past], axis=1)
        return Ring(table[:n] * weights * outputs[:, None], self.feedback)


@dataclasses.dataclass(frozen=True, eq=False)
class Modal(Recursion):
    """State-space recursion: d exponentially decaying buffers.

    Attributes:
      gain: a, shape (1,) or (n,).
      read: r, shape (1, d) or (n, d).
      decay: λ, shape (1, d) or (n, d).
      feed: μ, shape (1, d) or (n, d).
    """

    gain: np.ndarray
    read: np.ndarray
    decay: np.ndarray
    feed: np.ndarray

    @property
    def slots(self) -> int:
        return self.read.shape[1]

    def coefficients(self, step: Step) -> tuple[Array, ...]:
        """(a, r, λ, μ) of step: shapes (), (d,), (d,), (d,)."""
        return tuple(_row(x, step) for x in (self.gain, self.read, self.decay, self.feed))

    def scaled(self, inputs: np.ndarray, outputs: np.ndarray) -> Modal:
        n = len(inputs)  # the buffers go on as before: what feeds them is the unscaled output
        return Modal(
            self.gain[:n] * inputs * outputs,
            self.read[:n] * outputs[:, None],
            self.decay,
            self.feed[:n] / outputs[:, None],
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(Recursion):
    """Rows of C⁻¹ against past draws, which are regenerated from their counters.

    Attributes:
      table: C⁻¹ by lag, shape (n, window): entry [t, k] is C⁻¹[t, t-k]; (1, window) where all rows
        are alike (Toeplitz).
      inputs, outputs: scales of the draws and of the noise, shape (n,) or None.
    """

    table: np.ndarray
    inputs: np.ndarray | None = None
    outputs: np.ndarray | None = None

    @property
    def slots(self) -> int:
        return 0

    @property
    def window(self) -> int:
        """Lag from which on entries of C⁻¹ are 0."""
        return self.table.shape[1]

    def draws(self, n: int) -> float:
        return 1.0 + float(np.mean(np.minimum(np.arange(n), self.window - 1)))

    def coefficients(self, step: Step) -> tuple[Array]:
        """(weights,) of step by lag: ``weights[k]`` belongs to z_{step-k}; shape (window,).

        The weights of lags beyond step mean nothing and must not be used.
        """
        weights = _row(self.table, step)
        if self.inputs is None or self.outputs is None:
            return (weights,)
        earlier = (step - np.arange(self.window)).clip(0)
        return (weights * _row(self.inputs, earlier) * _row(self.outputs, step),)

    def scaled(self, inputs: np.ndarray, outputs: np.ndarray) -> Rows:
        if self.inputs is not None and self.outputs is not None:
            inputs, outputs = inputs * self.inputs, outputs * self.outputs
        return dataclasses.replace(self, inputs=inputs, outputs=outputs)


def _row(table: np.ndarray, step: Step) -> Array:
    """``table[step]``, or the only row; a traced step past the end reads the last row."""
    if len(table) == 1:
        return table[0]
    if isinstance(step, int | np.integer | np.ndarray):
        return table[step]
    import jax.numpy as jnp

    return jnp.asarray(table)[step]
