"""The smallest safe noise multiplier for a target (ε, δ)."""

from mfopt.accounting.monte_carlo.calibrate import calibrate
from mfopt.calibration.release import certify, guarantee_of, release

__all__ = ["calibrate", "certify", "guarantee_of", "release"]
