"""User data: a memory-mapped token store, its writer, sources of text, and statistics."""

from mfopt.training.data.store import TokenStore, open_parts

__all__ = ["TokenStore", "open_parts"]
