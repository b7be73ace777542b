"""Cells of the studies: training runs, descents to a mean, and their data."""
