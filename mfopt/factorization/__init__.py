"""Factorizations and their files."""

from mfopt.factorization.files import SCHEMA, check_output, keep, load
from mfopt.factorization.record import Factorization

__all__ = ["SCHEMA", "Factorization", "check_output", "keep", "load"]
