"""Signatures of a privacy report by a key pair: made with the private key, checked by anyone.

Ed25519 (Bernstein et al. 2012; RFC 8032), by the ``cryptography`` package; a key pair is made as in
``docs/training/reports.md``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfopt._runtime import _check, _extras

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

_WAY_OUT = "Make one with `openssl genpkey -algorithm ed25519 -out key.pem`."


def load_private(path: str | Path) -> ed25519.Ed25519PrivateKey:
    """The private key in a PEM file without a password; refused is another kind of key."""
    return _key("sign_key", "private", path, _WAY_OUT, password=None)


def load_public(path: str | Path) -> ed25519.Ed25519PublicKey:
    """The public key in a PEM file; raises as :func:`load_private`."""
    return _key("public_key", "public", path)


def _key(name: str, kind: str, path: str | Path, way_out: str = "", **how: Any) -> Any:
    serialization, ed25519 = _libraries()
    try:
        key = getattr(serialization, f"load_pem_{kind}_key")(Path(path).read_bytes(), **how)
    except (OSError, ValueError, TypeError) as problem:
        raise _check.reject(name, str(path), f"cannot be read ({problem})", way_out) from None
    if not isinstance(key, getattr(ed25519, f"Ed25519{kind.title()}Key")):
        raise _check.reject(name, str(path), f"is not an Ed25519 {kind} key", way_out)
    return key


def sign(facts: dict[str, Any], key: ed25519.Ed25519PrivateKey) -> dict[str, Any]:
    """``facts`` with a signature over everything else in them."""
    signature = {
        "algorithm": "ed25519",
        "public_key": key.public_key().public_bytes_raw().hex(),
        "value": key.sign(_signed(facts)).hex(),
    }
    return {**facts, "signature": signature}


def signer(facts: dict[str, Any], public: ed25519.Ed25519PublicKey | None = None) -> str | None:
    """The fingerprint of the key that signed ``facts``; None where nobody did.

    A signature by the key that stands in the report shows that the report is whole, and nothing
    about whose key it is: compare the fingerprint, or give the ``public`` key that it must be.

    Raises:
        UsageError: the signature is not one of these facts, or by another key, or missing where
            ``public`` is given.
    """
    signature = facts.get("signature")
    if signature is None:
        if public is not None:
            raise _check.reject("signature", None, "is missing: the report is not signed")
        return None
    from cryptography.exceptions import InvalidSignature

    _, ed25519 = _libraries()
    try:
        if signature["algorithm"] != "ed25519":
            raise ValueError("unknown algorithm")
        raw = bytes.fromhex(signature["public_key"])
        key = ed25519.Ed25519PublicKey.from_public_bytes(raw)
        key.verify(bytes.fromhex(signature["value"]), _signed(facts))
    except (InvalidSignature, ValueError, KeyError, TypeError):
        rule = "is not one of this report: it was changed"
        raise _check.reject("signature", "(of the report)", rule) from None
    if public is not None and public.public_bytes_raw() != raw:
        raise _check.reject("public_key", fingerprint(raw), "is another key than the given one")
    return fingerprint(raw)


def fingerprint(raw: bytes) -> str:
    """SHA-256 of the 32 bytes of a public key, its first 16 bytes in hex."""
    return hashlib.sha256(raw).hexdigest()[:32]


def _signed(facts: dict[str, Any]) -> bytes:
    """The bytes that are signed: JSON with sorted keys, of all but the signature."""
    body = {name: value for name, value in facts.items() if name != "signature"}
    return json.dumps(body, sort_keys=True).encode()


def _libraries() -> tuple[Any, Any]:
    with _extras.required():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return serialization, ed25519
