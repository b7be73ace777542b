"""The papers' tables and figures, sweeps, plots."""
