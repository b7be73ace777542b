"""User data: a memory-mapped token store, its writer, sources of text, and statistics."""

from mfopt.training.data.builder import HoldOut, TokenStoreBuilder
from mfopt.training.data.store import TokenStore, open_parts, verify_all

# embedded corpora by name, and their public part
EMBEDDED = {"stdlib": "public", "stdlib-code": "prose"}

__all__ = ["EMBEDDED", "HoldOut", "TokenStore", "TokenStoreBuilder", "open_parts", "verify_all"]
