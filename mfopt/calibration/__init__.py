"""The smallest safe noise multiplier for a target (ε, δ)."""

from mfopt.calibration.balls_in_bins import Calibration, calibrate
from mfopt.calibration.release import Certificate, certify, release, warm_up

__all__ = ["Calibration", "Certificate", "calibrate", "certify", "release", "warm_up"]
