"""User data: a memory-mapped token store, its writer, and sources of text."""

from mfopt.training.data.builder import HoldOut, TokenStoreBuilder
from mfopt.training.data.store import TokenStore, open_parts

# embedded corpora by name, and their public part
EMBEDDED = {"stdlib": "public", "stdlib-code": "prose"}

__all__ = ["EMBEDDED", "HoldOut", "TokenStore", "TokenStoreBuilder", "open_parts"]
