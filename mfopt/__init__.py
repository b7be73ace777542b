"""mfopt: correlated-noise strategies for DP training, optimized and certified."""

from mfopt._version import __version__

__all__ = ["__version__"]
