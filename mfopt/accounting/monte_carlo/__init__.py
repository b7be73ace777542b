"""Privacy losses that are sampled: estimates that search, and bounds that hold.

A scheme's loss is found by dispatch (:mod:`mfopt.accounting.monte_carlo.protocol`).
"""
