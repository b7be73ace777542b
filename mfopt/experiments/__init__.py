"""Comparisons of mechanisms, the papers' tables and figures, and the artifacts made of them."""
