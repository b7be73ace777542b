"""Cells of the studies: training runs, descents to a mean, and their data."""

SPECIAL = 3  # tokens behind the words of a dictionary: unknown, beginning, end
