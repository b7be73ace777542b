"""Buffered linear Toeplitz C: near-optimal error at the memory of a few model copies."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt.strategies import series
from mfopt.strategies.base import Strategy, ToeplitzStrategy
from mfopt.strategies.fields import Array, parameter


class Exponentials(Strategy):
    """C with exponentials ω_i λ_i^k, ω >= 0 and λ in [0, 1], below a diagonal g > 0."""

    scaled_by = "gain"
    shares: ClassVar[tuple[str, ...]] = ("decay",)  # parameters in [0, 1]

    if TYPE_CHECKING:  # parameters of the subclass, which has them in an order of its own

        @property
        def scale(self) -> Array: ...

        @property
        def decay(self) -> Array: ...

        @property
        def gain(self) -> Array: ...

    def check_parameters(self) -> None:
        if self.scale.shape != self.decay.shape:
            raise _check.reject(
                "scale, decay", (self.scale.shape, self.decay.shape), "must be equally long"
            )

    def check_entries(self, n: int) -> None:
        self.check_domain()
        super().check_entries(n)

    def check_domain(self) -> None:
        """Raise :class:`UsageError` unless g is finite and > 0, and λ and others in [0, 1]."""
        for name in self.shares:
            values = np.asarray(getattr(self, name))
            if not np.all((values >= 0) & (values <= 1)):
                raise _check.reject(name, values.tolist(), "must lie in [0, 1]")
        if not 0 < float(self.gain) < np.inf:
            raise _check.reject("gain", float(self.gain), "must be a finite number > 0")


class BLT(Exponentials, ToeplitzStrategy):
    """C with coefficients g·(1, Σ_i ω_i λ_i^(t-1) for t = 1, 2, …), for any n.

    The generating function is g (1 + Σ_i ω_i x / (1 - λ_i x)) (with g = 1 in Dvijotham, McMahan,
    Pillutla, Steinke, Thakurta 2024). Noise generation keeps one buffer per i. mfopt takes
    ω_i >= 0 and 0 <= λ_i <= 1, which makes every entry of C non-negative.

    Attributes:
      scale: ω, shape (buffers,).
      decay: λ, shape (buffers,).
      gain: g > 0, shape (): the diagonal of C.
    """

    scale: Array = parameter(dimensions=1)
    decay: Array = parameter(dimensions=1)
    gain: Array = parameter(dimensions=0, default=1.0)
    kind = "blt"
    described = ("buffers",)

    @property
    def buffers(self) -> int:
        """Number of buffers d."""
        return len(self.scale)

    def toeplitz_coefs(self, n: int) -> Array:
        return self.gain * series.exponentials(self.scale, self.decay, self.check_size(n))

    def inverse(self) -> tuple[Any, Any]:
        """(ω̂, λ̂) with C⁻¹ coefficients (1, Σ_i ω̂_i λ̂_i^(t-1))/g; every ω̂_i <= 0.

        In state space C/g is (diag λ, 1, ω, 1), so its inverse has the state matrix
        diag(λ) - 1 ωᵀ. Scaled by √ω that is the *symmetric* matrix diag(λ) - √ω √ωᵀ, whose
        orthonormal eigenvectors u_i give λ̂_i and ω̂_i = -(u_i·√ω)². No difference of nearly
        equal λ's is ever divided by, so coinciding λ's are no special case. Differentiable where
        no two λ̂ coincide; of numbers nothing is compiled.
        """
        numbers: ModuleType = jnp
        if self.of_numbers:
            numbers = np
            self.check_domain()
        root = numbers.sqrt(self.scale)
        symmetric = numbers.diag(numbers.asarray(self.decay)) - numbers.outer(root, root)
        decay, vectors = numbers.linalg.eigh(symmetric)
        return -((vectors.T @ root) ** 2), decay

    def inverse_coefs(self, n: int) -> Array:
        """First column of C⁻¹, shape (n,), by :meth:`inverse`."""
        if type(self).toeplitz_coefs is not BLT.toeplitz_coefs:  # a subclass of another C
            return super().inverse_coefs(n)
        return series.exponentials(*self.inverse(), self.check_size(n)) / self.gain

    def inverse_arrays(self, n: int) -> dict[str, np.ndarray]:
        if type(self) is not BLT:  # its C may be another one
            return super().inverse_arrays(n)
        scale, decay = self.inverse()
        gain = 1 / np.asarray(self.gain)
        return {
            **super().inverse_arrays(n),
            "blt_gain": gain,
            "blt_scale": gain * scale,
            "blt_decay": decay,
        }

    def check_domain(self) -> None:
        scale = np.asarray(self.scale)
        if not np.all(np.isfinite(scale)) or np.any(scale < 0):
            raise _check.reject("scale", scale.tolist(), "every ω must be a finite number >= 0")
        super().check_domain()
