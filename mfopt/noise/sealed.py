"""Noise states inside PyTorch checkpoints: sealed, with the key in a file of its owner's.

A checkpoint is copied and shared as files of a model are. What would tell the noise in it (key,
buffers, the seed of the batches) is encrypted under a key that lies in ``<handle>.key``, mode 0600,
in a folder beside it: one small file for a run, however many checkpoints it writes. The cipher is
SHAKE-256 of key, nonce and position, added bit by bit; an HMAC refuses what was changed.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import re
import secrets
from pathlib import Path

import numpy as np
import torch

from mfopt._runtime import _check, _files
from mfopt._runtime._types import JsonObject
from mfopt.noise import files
from mfopt.noise.ledger import KEY_FOLDER

_FORMAT = "mfopt checkpoint key 1"
_NOTICE = (
    "SECRET. Whoever reads this file and a checkpoint of the run can remove its noise. "
    "Keep it as safe as the data itself; without it no checkpoint of the run can be resumed."
)
_BLOCK = 2**20


class KeyFile:
    """The key that seals the states of one run, in a file that its first state makes.

    Args:
      folder: of the file; made, for its owner only, where it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str] = KEY_FOLDER) -> None:
        self.folder = _check.path("key_folder", folder).absolute()
        self._handle, self._key = "", b""

    def seal(self, contents: files.Contents) -> JsonObject:
        """``contents`` as handle, nonce, bytes and digest; makes the file where there is none."""
        if not self._key:
            handle, key = secrets.token_hex(8), secrets.token_bytes(32)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = {"format": _FORMAT, "notice": _NOTICE, "key": key.hex()}
            _files.write(self._path(handle), json.dumps(text), force=False, private=True)
            self._handle, self._key = handle, key
        stream, nonce = io.BytesIO(), secrets.token_bytes(16)
        files.packed(contents)(stream)
        data = np.frombuffer(stream.getbuffer(), np.uint8).copy()
        _xor(data, self._key, nonce)
        return {
            "handle": self._handle,
            "nonce": nonce.hex(),
            "digest": _digest(data, self._key, nonce),
            "sealed": torch.from_numpy(data),
        }

    def open(self, state: object) -> files.Contents:
        """What was sealed.

        Raises:
          UsageError: it was not sealed; the file of the key is not there, is readable by others,
            or is another one; or the state was changed.
        """
        if not isinstance(state, dict) or "handle" not in state:
            rule = "is no sealed state of a PrivateRun; versions up to 0.2.0 wrote others"
            way_out = "End a run that such a version began with that version."
            raise _check.reject("state", type(state).__name__, rule, way_out)
        handle, sealed = state["handle"], state.get("sealed")
        if not isinstance(handle, str) or not re.fullmatch(r"[0-9a-f]{16}", handle):
            raise _check.reject("state: handle", handle, "must be 16 hexadecimal digits")
        key = self._key if handle == self._handle else self._read(handle)
        try:
            nonce = bytes.fromhex(state["nonce"])
            data = sealed.cpu().numpy().copy()  # type: ignore[union-attr]
            whole = data.dtype == np.uint8 and data.ndim == 1 and len(nonce) == 16
            whole = whole and hmac.compare_digest(_digest(data, key, nonce), state["digest"])
        except (AttributeError, KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            rule = "is damaged, or was sealed with another key"
            raise _check.reject("state", f"handle {handle}", rule)
        _xor(data, key, nonce)
        self._handle, self._key = handle, key
        return files.unpacked(io.BytesIO(data.data), "state", f"handle {handle}")

    def _path(self, handle: str) -> Path:
        return self.folder / f"{handle}.key"

    def _read(self, handle: str) -> bytes:
        path = self._path(handle)
        if not path.is_file():
            rule = f"does not hold {path.name}, with which this checkpoint is sealed"
            way_out = "Copy it there from where the run was made, "
            way_out += "or give its folder as `key_folder`."
            raise _check.reject("key_folder", str(self.folder), rule, way_out)
        _files.require_secret("key_folder", path, "It opens the noise of the run")
        try:
            content = json.loads(path.read_text())
            key = bytes.fromhex(content["key"])
            if content["format"] != _FORMAT or len(key) != 32:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise _check.reject("key_folder", str(path), "is not a key of a checkpoint") from None
        return key


def _xor(data: np.ndarray, key: bytes, nonce: bytes) -> None:
    """Encrypt or decrypt bytes in place."""
    for start in range(0, len(data), _BLOCK):
        part = data[start : start + _BLOCK]
        stream = hashlib.shake_256(b"seal" + key + nonce + start.to_bytes(8, "little"))
        part ^= np.frombuffer(stream.digest(len(part)), np.uint8)


def _digest(data: np.ndarray, key: bytes, nonce: bytes) -> str:
    digest_key = hashlib.sha256(b"digest" + key).digest()
    authenticator = hmac.new(digest_key, nonce, hashlib.sha256)
    authenticator.update(data.data)
    return authenticator.hexdigest()
