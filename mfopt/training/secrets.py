"""One secret per run, and the independent random streams made from it.

Sampling and noise protect nothing once their keys are known. All come from 256 bits drawn by the
operating system, which live in the run's folder (owner-only files) and never in a report. Every
stream is a pure function of (secret, purpose, step): a resumed run draws what an unbroken one does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import numpy as np

from mfopt._runtime import _check

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


class RunSecret:
    """256 secret bits. ``repr`` shows none of them.

    >>> RunSecret(bytes(32)).seed("sampling") == RunSecret(bytes(32)).seed("sampling")
    True
    >>> RunSecret(bytes(32)).seed("sampling") == RunSecret(bytes(32)).seed("noise")
    False
    """

    def __init__(self, value: bytes) -> None:
        if len(value) != 32:
            raise _check.reject("secret", f"{len(value)} bytes", "must be 32 bytes")
        self._value = bytes(value)

    @classmethod
    def fresh(cls) -> RunSecret:
        """A new secret from the operating system."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def pinned(cls, seed: int) -> RunSecret:
        """The secret for a public ``seed``, for tests: whoever knows it can subtract the noise."""
        seed = _check.seed("seed", seed)
        return cls(hashlib.sha256(f"mfopt public seed {seed}".encode()).digest())

    def __repr__(self) -> str:
        return "RunSecret(...)"

    def to_bytes(self) -> bytes:
        """The secret itself and its checksum, 64 bytes, for a file of its owner."""
        return self._value + hashlib.sha256(self._value).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> RunSecret:
        """The inverse of :meth:`to_bytes`; refused is content that was not written by it."""
        secret = cls(content[:32])
        if secret.to_bytes() != content:
            raise _check.reject("secret", "(not shown)", "is damaged: its checksum does not hold")
        return secret

    def derive(self, purpose: str) -> bytes:
        """32 bytes for ``purpose``, from which neither the secret nor another purpose's follow."""
        return hmac.digest(self._value, purpose.encode(), "sha256")

    def twin(self, number: int = 0) -> RunSecret:
        """Another secret that follows from this one, for runs to compare with."""
        return RunSecret(self.derive(f"twin {number}"))

    def key(self, purpose: str) -> np.ndarray:
        """:meth:`derive` as the key of a noise stream, all 256 bits: uint32 (8,)."""
        return np.frombuffer(self.derive(purpose), dtype="<u4").astype(np.uint32)

    def seed(self, purpose: str) -> int:
        """:meth:`derive` as an integer seed."""
        return int.from_bytes(self.derive(purpose), "little")

    def seal(self, message: bytes) -> str:
        """HMAC-SHA256 of ``message`` under this run's sealing key, hex."""
        return hmac.digest(self.derive("seal"), message, "sha256").hex()


def uniform_hash(seed: int, step: int, *numbers: np.ndarray) -> np.ndarray:
    """A 64-bit pseudo-random number for each row of ``numbers``: uint64, the rows' shape.

    A function of (seed, step, the row) and of nothing else, so that one unit's draw never
    depends on which other units exist. SplitMix64's finalizer after every word (Steele, Lea and
    Flood 2014).
    """
    key = hashlib.sha256(f"{seed}:{step}".encode()).digest()
    low, high = np.frombuffer(key[:16], dtype="<u8").astype(np.uint64)
    shape = np.broadcast_shapes(*(np.shape(number) for number in numbers))
    state = np.full(shape, low, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            state = mix(state ^ np.asarray(number, dtype=np.int64).view(np.uint64))
            state += high
        return mix(state)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's next number from each uint64; to be called where overflow is ignored."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
