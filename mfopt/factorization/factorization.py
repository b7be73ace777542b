"""A factorization as training code sees it: the record, its file, and whether it was proved."""

from __future__ import annotations

from pathlib import Path

from mfopt.factorization import files, proofs
from mfopt.factorization.record import Record


class Factorization(Record):
    __doc__ = Record.__doc__

    @property
    def proved_here(self) -> bool:
        """True if the guarantee was proved on this machine; the text of a file alone proves
        nothing."""
        return proofs.is_known(self)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the ``.npz`` file atomically; see :mod:`mfopt.factorization.files`."""
        return files.save(self, path, force=force)


def load(path: str | Path) -> Factorization:
    """Read a file and check all of it that can be computed again. Nothing in it is executed.

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
