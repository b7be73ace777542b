"""Factorization for training code: the record, its file, and whether it was proved here."""

from __future__ import annotations

from pathlib import Path

from mfopt.factorization import files, proofs
from mfopt.factorization.record import Record


class Factorization(Record):
    """A strategy matrix C with its noise multiplier and guarantee.

    The mechanism adds σ·clip_norm·(C⁻¹ z)_t, z standard normal, to the *sum* of clipped
    contributions of iteration t.

    Attributes:
      strategy: C.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      sampling: sampling scheme; the loader must execute exactly this one.
      workload: A, on which the error is measured.
      guarantee: the (ε, δ) statement; ``guarantee.status`` says whether it is certified.
      history: optimization history, rows (seconds, loss, σ), shape (evaluations, 3).
      provenance: version, command, seed policy, device, date.
    """

    @property
    def proved_here(self) -> bool:
        """True if the guarantee was proved on this machine; the text of a file alone proves
        nothing."""
        return proofs.is_known(self)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the ``.npz`` file atomically; see :mod:`mfopt.factorization.files`."""
        return files.save(self, path, force=force)


def load(path: str | Path) -> Factorization:
    """Read a file and check everything in it that can be recomputed. Nothing in it is executed.

    That the guarantee was ever proved is not among it: :attr:`Factorization.proved_here` says
    whether this machine did.

    Raises:
      UsageError: ``path`` is none, or the file is missing.
      FailureError: it is damaged, of a newer schema, inconsistent, or not such a file.

    >>> import tempfile
    >>> from mfopt import optimize, sampling
    >>> made = optimize.factorize(sampling.BallsInBins(bins=8, epochs=2), 2.0, strategy="identity")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read = load(made.save(f"{folder}/mechanism.npz"))
    >>> read.noise_multiplier == made.noise_multiplier, read.guarantee == made.guarantee
    (True, True)
    """
    return files.load(path, Factorization)
