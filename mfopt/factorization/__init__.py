"""Factorizations and their files."""

from mfopt.factorization.factorization import SCHEMA, Factorization, keep, load

__all__ = ["SCHEMA", "Factorization", "keep", "load"]
