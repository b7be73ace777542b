"""Mutants of accept rules and bounds: each changes one line so that a reported ε or σ could fall.

    mfopt bench mutants --out artifacts/bench-mutants.json

Every mutant is written into a copy of the package and the tests that should notice it are run
there, those alone: what they kill, the whole suite kills. A mutant that passes them survives, and
the exit code is their number. Lines are chosen by hand, where a wrong sign, bound or share would
show as too little noise.

One change that looks like a mutant is none: a ceiling instead of samples (``_ALONE`` in
``sampled.py``), more samples or another proposal, order or bet only change what a bound costs. And
what survives is listed here with the reason, under :data:`HARMLESS`; the script checks that it does
survive, so that the reasons are looked at again when it no longer does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import jax  # noqa: F401 (for the copies)
import pytest
import scipy.stats  # noqa: F401
from mfopt_cli.benchmarks import Parser, keep

ROOT = Path(__file__).resolve().parents[2]
ACCOUNTING = "mfopt/accounting"
VERIFY, MODEL = f"{ACCOUNTING}/verify.py", f"{ACCOUNTING}/model.py"
MONTE_CARLO = f"{ACCOUNTING}/monte_carlo"
TILTED, BETTING = f"{MONTE_CARLO}/tilted.py", f"{MONTE_CARLO}/betting.py"
EVIDENCE, PROPOSALS = f"{MONTE_CARLO}/evidence.py", f"{MONTE_CARLO}/proposals.py"
SAMPLED, PAIR = f"{MONTE_CARLO}/sampled.py", f"{MONTE_CARLO}/dominating_pair.py"
COUNTS, PATTERNS = f"{MONTE_CARLO}/count_mixture.py", f"{MONTE_CARLO}/pattern_tilts.py"
BLOCKS = f"{MONTE_CARLO}/pattern_blocks.py"
TABLE, FREE = f"{MONTE_CARLO}/composition.py", f"{MONTE_CARLO}/free.py"
LOSSES = f"{ACCOUNTING}/loss_distribution"
DISTRIBUTION, CONVOLUTION = f"{LOSSES}/distribution.py", f"{LOSSES}/convolution.py"
MIXTURE, POISSON, ROUNDS = f"{LOSSES}/mixture.py", f"{LOSSES}/poisson.py", f"{LOSSES}/rounds.py"
GAUSSIAN, GROUP = f"{ACCOUNTING}/closed_form/gaussian.py", f"{ACCOUNTING}/closed_form/group.py"
MOMENTS, UNAMPLIFIED = f"{ACCOUNTING}/closed_form/moments.py", f"{ACCOUNTING}/unamplified.py"
SECURE, DRAWS = "mfopt/noise/secure.py", "mfopt/noise/_draws.py"


class Mutant(NamedTuple):
    """A line as it is and as the mutant has it, and the tests that should fail."""

    path: str
    before: str
    after: str
    tests: str


def engine(names: str) -> str:
    return f"tests/test_verify.py -k '{names}'"


def common(test: str) -> str:
    """The tests of what modes have in common."""
    return f"tests/test_common_part.py -k '{test}'"


def sampling(names: str) -> str:
    return f"tests/test_montecarlo.py -k '{names}'"


def rounds(names: str) -> str:
    return f"tests/test_accounting_rounds.py -k '{names}'"


def groups(names: str) -> str:
    return f"tests/test_accounting_bins_group.py -k '{names}'"


def afresh(names: str) -> str:
    return f"tests/test_fresh_bins.py -k '{names}'"


CHARGES = engine("charges_its_failure or reported_delta or failure_probability_count")
SEQUENCE = engine("sequence_descends or refused_first")
UNBIASED = sampling("unbiased and not wherever")

MUTANTS: dict[str, Mutant] = {
    # accept rules
    "accept on remove alone": Mutant(
        VERIFY, "for bound in bounds)", "for bound in bounds[:1])", engine("looks_at_both")
    ),
    "accept on add alone": Mutant(
        VERIFY, "for bound in bounds)", "for bound in bounds[1:])", engine("looks_at_both")
    ),
    "accept if either is below": Mutant(
        VERIFY, "bool(bounds) and all(bound", "any(bound", engine("looks_at_both")
    ),
    "no bound is below": Mutant(VERIFY, "bool(bounds) and all", "all", engine("count")),
    "drop the spent β": Mutant(VERIFY, "bound + spent <= delta", "bound <= delta", CHARGES),
    "NaN is below": Mutant(
        VERIFY,
        "bound >= 0 and bound + spent <= delta",
        "not bound + spent > delta",
        engine("broken_bound or looks_at_both"),
    ),
    "negative is below": Mutant(VERIFY, "bound >= 0 and bound", "bound", engine("broken_bound")),
    "the first bound is the largest": Mutant(
        MODEL, "max(bounds) if fair", "bounds[0] if fair", engine("count or reported_delta")
    ),
    "an infinite bound is fair": Mutant(
        MODEL, "fair = bool(bounds) and all(", "fair = bool(bounds) or all(", engine("broken_bound")
    ),
    # the procedure
    "a round charges nothing": Mutant(
        VERIFY, "number * delta * BETA_SHARE", "0.0 * delta * BETA_SHARE", SEQUENCE
    ),
    "every round charges the same": Mutant(
        VERIFY, "number * delta * BETA_SHARE", "1 * delta * BETA_SHARE", SEQUENCE
    ),
    "δ reported without β": Mutant(
        VERIFY,
        "largest(found.both) + beta\n        if not total",
        "largest(found.both)\n        if not total",
        CHARGES,
    ),
    "certify charges nothing": Mutant(
        VERIFY,
        "accepts(found_bounds.both, beta, delta)",
        "accepts(found_bounds.both, 0.0, delta)",
        CHARGES,
    ),
    "go on after a refusal": Mutant(
        VERIFY,
        "else 0.0\n                break",
        "else 0.0\n                continue",
        SEQUENCE,
    ),
    "release what was refused": Mutant(
        VERIFY,
        "if not accepts(found.both, spent, delta):\n                bound",
        "if False:\n                bound",
        engine("looks_at_both or sequence_descends"),
    ),
    "release the next of the sequence": Mutant(
        VERIFY,
        "            sigma, epsilon = at(x)\n            accepted",
        "            sigma, epsilon = at(sequence[-1][1])\n            accepted",
        SEQUENCE,
    ),
    "one key for all tests": Mutant(VERIFY, "beta, number, place)", "beta, number, 0)", SEQUENCE),
    "one key for all rounds": Mutant(
        VERIFY,
        "beta, number, place)",
        "beta, 0, place)",
        engine("refused_first or fresh"),
    ),
    "test on the pilot's samples": Mutant(
        VERIFY,
        "self._trial(size, beta, number, place)",
        "Trial(size, beta, self._key(1, number, place))",
        engine("fresh"),
    ),
    "the wide pilot on the first test's samples": Mutant(
        VERIFY, "self._key(3, number)", "self._key(2, number, 0)", engine("fresh")
    ),
    "certify on the pilot's samples": Mutant(
        VERIFY,
        "found_bounds = self.model.bounds(sigma, epsilon, plan, self._trial(samples, beta))",
        "found_bounds = self.model.bounds("
        "sigma, epsilon, plan, Trial(samples, beta, self._key(1, 0)))",
        engine("fresh"),
    ),
    "bounds at ten times β": Mutant(
        VERIFY,
        "self._trial(size, beta, number",
        "self._trial(size, 10 * beta, number",
        engine("fresh"),
    ),
    "free bounds are believed": Mutant(
        VERIFY,
        "if not accepts(found.bounds.both, 0.0, delta):\n                continue",
        "if False:\n                continue",
        engine("free_bound_that_is_no_number"),
    ),
    "a deterministic bound is not looked at": Mutant(
        VERIFY,
        "if accepts(found.both, 0.0, delta):\n                sigma, epsilon = at(x)",
        "if accepts((found.remove,), 0.0, delta):\n                sigma, epsilon = at(x)",
        engine("deterministic"),
    ),
    "a deterministic δ is that of removing": Mutant(
        VERIFY,
        "total = min(largest(found.both), 1.0)",
        "total = min(found.remove, 1.0)",
        engine("deterministic"),
    ),
    # the confidence bound
    "bound without log 1/β": Mutant(BETTING, "math.log(beta)", "0.0", sampling("coin_flips")),
    "β counted twice as large": Mutant(
        BETTING, "math.log(beta)", "math.log(10 * beta)", sampling("coin_flips")
    ),
    "samples counted twice": Mutant(
        BETTING,
        "math.log(beta)) / samples",
        "math.log(beta)) / (2 * samples)",
        sampling("coin_flips"),
    ),
    "the mean for a bound": Mutant(
        EVIDENCE,
        "betting.upper_bound(float(sums.log_wealth[bet]), bet, samples, beta)",
        "float(sums.total) / samples",
        sampling("fail_no_more"),
    ),
    "values above 1 pass": Mutant(
        EVIDENCE, "value <= 1 + _ABOVE", "value <= jnp.inf", sampling("does_not_hold_leaves")
    ),
    # proposals and their ceilings
    "chain without normalizers": Mutant(
        TILTED,
        "return log_normalizers - order * point.epsilon",
        "return -order * point.epsilon",
        sampling("exceeds_the_range"),
    ),
    "mean for the largest normalizer": Mutant(
        TILTED,
        "jnp.max(orders[:, None] * top",
        "jnp.mean(orders[:, None] * top",
        sampling("exceeds_the_range"),
    ),
    "mean of a square of far overlaps for its largest": Mutant(
        TILTED,
        "largest = jnp.max(rows.reshape",
        "largest = jnp.mean(rows.reshape",
        "tests/test_clusters.py -k 'squares_far'",
    ),
    "shift's ceiling with half the norm": Mutant(
        TILTED,
        "order * (1 + order) * top / 2 -",
        "order * (1 + order) * top / 4 -",
        sampling("exceeds_the_range"),
    ),
    "mean's ceiling without its square": Mutant(
        TILTED,
        "order * (squared_norm / 2 - point.epsilon) + order**2 * square / 2",
        "order * (squared_norm / 2 - point.epsilon)",
        sampling("exceeds_the_range"),
    ),
    "no room for a factor in pieces": Mutant(
        PAIR,
        "+= room + spare",
        "+= room - spare",
        "tests/test_nested.py -k 'above_the_modes'",
    ),
    "square of the direction": Mutant(
        TILTED, "square + 2 * products[rows, chosen]", "square + products[rows, chosen]", UNBIASED
    ),
    "chain's weight without a normalizer": Mutant(
        TILTED, "log_normalizers + top + jnp.log(mass / bins)", "log_normalizers", UNBIASED
    ),
    "chain's weight with half the loss": Mutant(
        PROPOSALS, "- asked.order * loss\n", "- asked.order * loss - 0.05\n", UNBIASED
    ),
    "shift's density at the wrong place": Mutant(
        TILTED, "power * exponents - power**2 * half", "power * exponents - power * half", UNBIASED
    ),
    "mean's weight without its square": Mutant(
        PROPOSALS,
        "toward(exponents) + order**2 * drawn.square / 2",
        "toward(exponents)",
        UNBIASED,
    ),
    "points in the middle of their cells": Mutant(
        PROPOSALS,
        "(j + uniform) / points",
        "(j + 0.5 + 0 * uniform) / points",
        sampling("systematic or unbiased"),
    ),
    # what modes have in common
    "the common part counts for less": Mutant(
        f"{MONTE_CARLO}/hockey.py",
        "Hockey(shift / point.noise_multiplier)",
        "Hockey(0.97 * shift / point.noise_multiplier)",
        common("one_mean"),
    ),
    "more is taken out than is in common": Mutant(
        f"{MONTE_CARLO}/common_part.py",
        "left = np.asarray(gram) - squared",
        "left = np.asarray(gram) - 1.05 * squared",
        common("the_whole or one_mean"),
    ),
    "a Gaussian's hockey stick too low": Mutant(
        f"{MONTE_CARLO}/hockey.py",
        "ratio = t + jax",
        "ratio = 1.01 * t + jax",
        common("hockey_stick"),
    ),
    "its peak too low": Mutant(
        f"{MONTE_CARLO}/hockey.py",
        "- math.log1p(order)",
        "- 1.01 * math.log1p(order)",
        common("peak"),
    ),
    "a loss without the number of bins": Mutant(
        PAIR,
        "axis=-1) - jnp.log(bins)",
        "axis=-1) - 1.1 * jnp.log(bins)",
        sampling("quadrature or unbiased or known_noise or plain_estimator"),
    ),
    "a loss that is no number counts as 0": Mutant(
        PAIR, "jnp.where(jnp.isnan(excess), jnp.nan, -jnp.inf)", "-jnp.inf", engine("no_number")
    ),
    "a mode is left out of G": Mutant(
        PAIR,
        'factor = jnp.linalg.qr(modes / largest, mode="r").T',
        'factor = jnp.linalg.qr(modes / largest, mode="r").T.at[0].multiply(0.9)',
        sampling("gram_matrix_of_dense") + " tests/test_verify.py",
    ),
    "a pair that is none": Mutant(
        PAIR,
        "if not off <= dust or float(gram.min()) < -dust:",
        "if False:",
        engine("what_is_no_pair"),
    ),
    "orthogonal by a diagonal alone": Mutant(
        PAIR,
        "np.abs(gram).sum(axis=1).max()",
        "np.diagonal(gram).max()",
        "tests/test_calibration.py -k 'overlapping or orthogonal'",
    ),
    "an orthogonal norm rounded down": Mutant(
        PAIR,
        "return math.ceil(raised / unit) * unit",
        "return math.floor(raised / unit) * unit",
        "tests/test_calibration.py -k 'orthogonal' tests/test_accounting_balls_in_bins.py",
    ),
    "the proposal of another σ": Mutant(
        SAMPLED,
        "tilt = self.loss.at(chosen.pilot.tilt, point)",
        "tilt = chosen.pilot.tilt",
        "tests/test_calibration.py -k 'plan_made_elsewhere'",
    ),
    # groups
    "a group's split forgets what is long and short on each mode": Mutant(
        f"{MONTE_CARLO}/group.py",
        "np.max(positive) > nudge",
        "longest > nudge",
        groups("leaves_out"),
    ),
    "a group's rest counts for one unit": Mutant(
        f"{MONTE_CARLO}/group.py",
        "shift = group_size * math.sqrt",
        "shift = math.sqrt",
        groups("lies_above"),
    ),
    "what a group's samples leave out is free": Mutant(
        COUNTS,
        "value=result.value + pair.left_out + aside",
        "value=result.value",
        groups("two_bins"),
    ),
    "a group's ceiling with half the normalizer": Mutant(
        COUNTS,
        "log_total + max(-order",
        "0.5 * log_total + max(-order",
        groups("two_bins or any_order"),
    ),
    "a group's add direction without coincidences": Mutant(
        COUNTS, "(k * (1 - 1 / b) + k**2 / b)", "(k**2 / b)", groups("two_bins or counts_kept")
    ),
    "G below F's power": Mutant(
        COUNTS,
        "log_g = order * np.maximum.accumulate(ends) * (1 + 1e-12)",
        "log_g = 0.9 * order * np.maximum.accumulate(ends)",
        groups("two_bins or any_order"),
    ),
    # bins thrown afresh
    "overlaps of a bin with both neighbours": Mutant(
        f"{MONTE_CARLO}/pattern_ceilings.py",
        "largest[:-1, bins - reach :] += np.max(outer, axis=2)",
        "pass",
        afresh("both_neighbours"),
    ),
    "overlaps with the throw before are lost": Mutant(
        f"{MONTE_CARLO}/pattern_ceilings.py",
        "np.log(alone + before[g, i][:, None])",
        "np.log(alone)",
        afresh("likelihood"),
    ),
    "late bins without their overlaps": Mutant(
        BLOCKS,
        "u = (products - self.half).reshape(-1, *self.before.shape) - self.before",
        "u = (products - self.half).reshape(-1, *self.before.shape)",
        afresh("blocks_rests_on"),
    ),
    "candidates kept too often": Mutant(
        BLOCKS,
        "keep = jax.random.uniform(coin_key, chance.shape) < chance",
        "keep = jax.random.uniform(coin_key, chance.shape) < jnp.sqrt(chance)",
        afresh("plain_sampling"),
    ),
    "a normalizer too small": Mutant(
        BLOCKS,
        "log_normalizer = float(np.sum(log_parts))",
        "log_normalizer = 2 * float(np.sum(log_parts))",
        afresh("ceiling_too_small"),
    ),
    "half of what patterns share": Mutant(
        PATTERNS,
        "2 * entries(before.products, pattern)",
        "entries(before.products, pattern)",
        afresh("plain_sampling"),
    ),
    "patterns without a normalizer": Mutant(
        PATTERNS,
        "before.log_normalizers + jnp.sum(logs, axis=1)",
        "before.log_normalizers",
        afresh("plain_sampling"),
    ),
    "the shift's chain with plain transitions": Mutant(
        f"{MONTE_CARLO}/pattern_common.py",
        "corner = square * pattern.corners(at)",
        "corner = pattern.corners(at)",
        afresh("plain_sampling"),
    ),
    "throws that are not neighbours do not overlap beside a common part": Mutant(
        f"{MONTE_CARLO}/pattern_common.py",
        "passed + square * self.shift**2 / 2",
        "passed",
        "tests/test_pattern_common.py -k 'of_its_own_patterns'",
    ),
    "the longest pattern without overlaps": Mutant(
        f"{MONTE_CARLO}/patterns.py",
        "best[patterns.bins - reach :, None] + 2 * coupled",
        "best[patterns.bins - reach :, None]",
        afresh("likelihood"),
    ),
    # companions
    "a companion's constant is lost": Mutant(
        SAMPLED,
        'remove.value + self.companions["remove"].constant',
        "remove.value",
        "tests/test_accounting_balls_in_bins.py -k 'constant'",
    ),
    "a companion's constant is lost, add": Mutant(
        SAMPLED,
        'add.value + self.companions["add"].constant',
        "add.value",
        "tests/test_accounting_balls_in_bins.py -k 'constant'",
    ),
    "floor lost in the composed loss": Mutant(
        TABLE, "low * (1 - share) + high * share", "high", engine("table_of_a_companion")
    ),
    "revealing companions reveal nothing": Mutant(
        TABLE,
        "from_atoms(step, loss, mass, delta, delta)",
        "from_atoms(step, loss, mass, 0.0, 0)",
        "tests/test_accounting_balls_in_bins.py -k 'response or companion or revealed or constant'",
    ),
    # loss distributions
    "losses rounded down": Mutant(
        DISTRIBUTION,
        "total = np.bincount(at, np.concatenate([mass * (1 - share), mass * share]))",
        "total = np.bincount(at, np.concatenate([mass, 0 * share]))",
        rounds("closed_form or dominates or rounded_up"),
    ),
    "a truncated tail is lost": Mutant(
        MIXTURE,
        "result, infinite=result.infinite + mixture.missing)",
        "result, infinite=result.infinite)",
        rounds("lost_tail or left_out"),
    ),
    "an open end is lost": Mutant(
        DISTRIBUTION,
        "infinite = faint_p + (float(at_border[-1]) if np.isposinf(loss[-1]) else 0.0)",
        "infinite = faint_p",
        rounds("lost_tail or dominates"),
    ),
    "what the window loses is lost": Mutant(
        CONVOLUTION,
        "math.log(total + rounding), self.log_lost]",
        "math.log(total + rounding)]",
        rounds("window_loses"),
    ),
    "infinite losses are no part of δ": Mutant(
        CONVOLUTION,
        "terms.append(math.log(self.infinite))\n        return min(float(np",
        "pass\n        return min(float(np",
        rounds("lost_tail or infinite"),
    ),
    "ε below the window is believed": Mutant(
        CONVOLUTION, "if epsilon < self.low - 1e-9 * self.step:", "if False:", rounds("window_rej")
    ),
    "half the rounds": Mutant(
        CONVOLUTION,
        "_power(scipy.fft.rfft(wrapped, overwrite_x=True), count)",
        "_power(scipy.fft.rfft(wrapped, overwrite_x=True), max(count - 1, 1))",
        rounds("recorded_dp_accounting or probability_one"),
    ),
    "one direction decides": Mutant(
        ROUNDS,
        'found = max(found, self._log_delta(epsilon, "add")[0])',
        "pass",
        rounds("larger_direction"),
    ),
    "one direction decides ε": Mutant(
        ROUNDS,
        'found = max(found, min(self._epsilon(target, "add")[0], self._largest_added))',
        "pass",
        rounds("larger_direction"),
    ),
    "cyclic rounds at half the probability": Mutant(
        POISSON,
        "_drawn(1, scheme.probability, adjacency), scheme.rounds",
        "_drawn(1, scheme.probability / 2, adjacency), scheme.rounds",
        "tests/test_accounting_conformance.py",
    ),
    "overlapping participations are accounted": Mutant(
        POISSON,
        "if width > scheme.bands:",
        "if False:",
        "tests/test_accounting_unamplified.py -k 'believes or refusals'",
    ),
    "mean column norm": Mutant(
        POISSON,
        "largest = float(np.max(norms))",
        "largest = float(np.mean(norms))",
        "tests/test_accounting_unamplified.py -k 'scaled_by'",
    ),
    "fixed batches without doubling": Mutant(
        MIXTURE,
        "return cls._kept(2 * count, _log_weights(",
        "return cls._kept(count, _log_weights(",
        "tests/test_accounting_group.py -k 'jax_privacy' tests/test_accounting_conformance.py",
    ),
    # closed forms
    "a Gaussian's ε rounded down": Mutant(
        GAUSSIAN,
        "return _private_side(found, 1e-14, lambda e: log_delta(mu, e) <= target)",
        "return float(found) * (1 - 1e-9)",
        "tests/test_accounting_gaussian.py -k inverses",
    ),
    "groups without their factor": Mutant(
        GROUP,
        "self.epsilons[line] + log_delta, self.log_deltas[line]",
        "0.5 * self.epsilons[line] + log_delta, self.log_deltas[line]",
        "tests/test_accounting_group.py -k 'splits or whole_profile'",
    ),
    "the lemma without its factor": Mutant(
        GROUP,
        "target -= black_box_log_factor(one, group_size, form)",
        "pass",
        "tests/test_accounting_group.py -k 'lemma or every_method'",
    ),
    "moments without their sampling": Mutant(
        MOMENTS,
        "special.xlogy(k, q) +",
        "special.xlogy(k, q / 2) +",
        "tests/test_accounting_moments.py -k 'table or sampled_gaussian'",
    ),
    "separated participations half as often": Mutant(
        UNAMPLIFIED,
        "for start in range(0, k * b, b):",
        "for start in range(0, k * b, 2 * b):",
        "tests/test_accounting_unamplified.py -k 'pattern'",
    ),
    "negative entries cancel": Mutant(
        UNAMPLIFIED,
        "products = np.abs(_products(strategy, n))\n    worst",
        "products = _products(strategy, n)\n    worst",
        "tests/test_accounting_unamplified.py -k negative",
    ),
    "a free bound with half the norm": Mutant(
        FREE,
        "return self.sensitivity * (1 + _NUDGE)",
        "return self.sensitivity / 2",
        "tests/test_calibration.py -k 'absurd or one_bin'",
    ),
    # noise
    "secure noise below a grid step": Mutant(
        SECURE,
        "UNIT = (1 + 2.0**-50) / STEPS",
        "UNIT = (1 - 2.0**-50) / STEPS",
        "tests/test_noise_secure.py -k 'discrete_gaussians'",
    ),
    "rounding spends half": Mutant(
        SECURE,
        "return SecureCost(2 * epsilon,",
        "return SecureCost(epsilon,",
        "tests/test_noise_secure.py -k 'cost or three_steps'",
    ),
    "coefficients are believed": Mutant(
        SECURE,
        "shift += _LARGEST_DRAW * (_row_sum(np.tril(residual, -1)) + error)",
        "pass",
        "tests/test_noise_secure.py -k 'coefficients'",
    ),
    "a draw that ends at 5.4": Mutant(
        DRAWS,
        "lower = low.astype(dtype) + jnp.asarray(offset, dtype)",
        "lower = jnp.asarray(2.0**31, dtype) + 0 * low.astype(dtype)",
        "tests/test_noise_draws.py",
    ),
}

# name: (mutant, why no reported number falls)
HARMLESS: dict[str, tuple[Mutant, str]] = {
    "a sum that is no number passes": (
        Mutant(
            EVIDENCE,
            "if not (math.isfinite(float(sums.total)) and math.isfinite(scaled) and "
            "math.isfinite(beyond)):",
            "if False:",
            sampling("does_not_hold_leaves"),
        ),
        "a value that is no number is one in every wealth too, and min(nan, 1) is nan: the line "
        "says what holds anyway",
    ),
}


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether all its tests pass with this mutant, written into ``copy`` of the project."""
    source = copy / mutant.path
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    options = ["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    try:
        code, said = tried([*options, *shlex.split(mutant.tests)], copy)
    finally:
        source.write_text(text, encoding="utf-8")
    if code not in (0, 1):  # no tests, a bad option: no verdict
        raise SystemExit(f"{mutant.tests}: {said[-3000:]}")
    return code == 0


def tried(words: list[str], copy: Path) -> tuple[int, str]:
    """(exit code of pytest on the tests of ``copy``, what it said).

    In a copy of this process, so that JAX and the rest are imported once for all mutants; of the
    project nothing is kept.
    """
    log = copy / "log"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX: no device is in use, so no thread is lost
        pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
    code = 70
    try:
        with log.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("mfopt", "mfopt_cli"):
                del sys.modules[name]
        os.chdir(copy)
        parts = [str(copy), str(copy / "cli")]
        sys.path[:0], os.environ["PYTHONPATH"] = parts, os.pathsep.join(parts)
        code = int(pytest.main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def parser() -> Parser:
    """Its options."""
    words = Parser("mutants", __doc__)
    words.word(
        "--only",
        choices=[*MUTANTS, *HARMLESS],
        action="append",
        help="This mutant; may be given several times.",
    )
    words.out()
    return words


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen mutants; returns the number of survivors that should have been killed."""
    options = parser().parse_args(arguments)
    begun = time.perf_counter()
    left: list[str] = []
    names = options.only or [*MUTANTS, *HARMLESS]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        skipped = shutil.ignore_patterns("__pycache__")
        for part in ("mfopt", "tests", "cli"):
            shutil.copytree(ROOT / part, copy / part, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", copy)
        chosen = {name: MUTANTS.get(name) or HARMLESS[name][0] for name in names}
        for name, mutant in chosen.items():  # before the first is run
            count = (copy / mutant.path).read_text(encoding="utf-8").count(mutant.before)
            if count != 1:
                raise SystemExit(f"{name}: {mutant.before!r} stands {count} times in {mutant.path}")
        for name, mutant in chosen.items():
            alive = survives(mutant, copy)
            print(f"{'SURVIVES' if alive else 'killed':9} {name}", flush=True)
            left += [name] * (alive != (name in HARMLESS))
    facts = {
        "mutants": len(names),
        "killed": len(names) - len(left) - len(set(names) & set(HARMLESS)),
        "survivors": left,
        "harmless": {name: why for name, (_, why) in HARMLESS.items() if name in names},
    }
    keep(options.out, facts, how="mfopt bench mutants", begun=begun)
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
