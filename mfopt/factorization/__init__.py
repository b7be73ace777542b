"""Factorizations and their files."""

from mfopt.factorization.factorization import SCHEMA, Factorization, check_output, keep, load

__all__ = ["SCHEMA", "Factorization", "check_output", "keep", "load"]
