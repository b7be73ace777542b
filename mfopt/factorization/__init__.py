"""Factorizations and their files."""

from mfopt.factorization.factorization import Factorization, load
from mfopt.factorization.files import SCHEMA, check_output, keep

__all__ = ["SCHEMA", "Factorization", "check_output", "keep", "load"]
