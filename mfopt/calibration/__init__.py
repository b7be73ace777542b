"""The smallest safe noise multiplier for a target (ε, δ)."""

from mfopt.accounting.monte_carlo.calibrate import Calibration, calibrate
from mfopt.calibration.release import Certificate, certify, release

__all__ = ["Calibration", "Certificate", "calibrate", "certify", "release"]
