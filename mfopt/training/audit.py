"""An empirical lower bound on ε from canary users in a run of the real loop.

A proof covers the mechanism on paper. The audit runs the loop that trains models (its sampler, its
clipping, its sums, its noise) on m canary users, each present with probability 1/2, and lets an
attacker who sees every noised mean guess who was present. It cannot prove that a trainer is right;
it catches one that is wrong.

The canaries are the worst case: every canary's gradient is its own coordinate axis at full clip
norm, so that one canary hides nothing of another, and its coordinate of the released sequence is
a draw from the dominating pair of the account. The attack is the likelihood ratio. Two bounds come
out of the same guesses:

* ``epsilon_lower`` assumes nothing about the trainer: guesses that are better than any (ε, δ)-DP
  algorithm allows refute (ε, δ)-DP (Steinke, Nasr and Jagielski 2023, Theorem 5.2). One run with
  m canaries says little about events rarer than 1/m, so this stays well below the ε claimed.
* ``epsilon_profile`` takes the account's mechanism with an unknown noise multiplier: the largest
  one that is compatible with how many guesses were right, and the ε that it has. Tight, and what
  catches noise that is too small; canaries count as independent trials, which for separate axes
  and independent noise per coordinate they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from scipy import special, stats

from mfopt import _check, _sizes
from mfopt.accounting import account as account_of
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.sampling import Scheme
from mfopt.strategies import Strategy
from mfopt.training import attack
from mfopt.training.batching import Sampler
from mfopt.training.clipping import Clipping
from mfopt.training.data import TokenStore
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.privacy import Account
from mfopt.training.secrets import RunSecret
from mfopt.training.units import UserUnits

# Shares of the canaries about which a guess is made, the rest is passed over. Fixed in advance;
# the confidence is split evenly over them.
GUESSED = (0.005, 0.02, 0.05, 0.2)
_LOUDNESS = 100.0  # a canary's gradient norm before clipping, in clip norms


@dataclasses.dataclass(frozen=True)
class Audit:
    """Outcome of an audit; every statement holds with ``confidence`` over its own randomness.

    Attributes:
        epsilon_lower: the run is not (ε, delta)-DP for any ε below this.
        epsilon_profile: the same, if the run is the account's mechanism at some noise multiplier.
        noise_multiplier_highest: the largest noise multiplier that the guesses are compatible with.
        epsilon_claimed, delta, noise_multiplier_claimed: the statement under test.
        canaries: m, how many there were.
        guesses, correct: of the rule that gave ``epsilon_lower``.
        accuracy, accuracy_claimed: share of right guesses about all canaries, and the most that
            any attacker on the claimed mechanism can expect.
    """

    epsilon_lower: float
    epsilon_profile: float
    noise_multiplier_highest: float
    epsilon_claimed: float
    delta: float
    noise_multiplier_claimed: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    accuracy: float
    accuracy_claimed: float

    @property
    def passed(self) -> bool:
        """Whether the guesses are compatible with the claim."""
        return (
            self.epsilon_lower <= self.epsilon_claimed
            and self.noise_multiplier_highest >= self.noise_multiplier_claimed
        )


def canary_model(canaries: int) -> Model:
    """loss = loudness · θ[first token]: canary i's gradient points along coordinate i."""

    def loss(params: Any, tokens: Any, mask: Any) -> Any:
        return jnp.where(mask[0], _LOUDNESS * params["axes"][tokens[0]], 0.0)

    return Model.of({"axes": jnp.zeros(canaries)}, loss, name="canaries")


def audit(
    account: Account,
    *,
    canaries: int = 4000,
    confidence: float = 0.95,
    seed: int | None = None,
    clip_norm: float = 1.0,
    normalized: bool = True,
    per_layer: bool = False,
    batch_size: int | None = None,
    truncation: Any = "charge",
    microbatch: int = 64,
    alter: Callable[[Execution], Execution] = lambda execution: execution,
) -> Audit:
    """Run the loop of ``account`` on canaries and bound ε from below.

    Args:
        account: the mechanism and the claim: (ε, δ) of ``account.guarantee``.
        canaries: more give a tighter bound; time and memory grow with canaries² / bins.
        confidence: chance that the bound is true.
        seed: pins the audit's randomness; None: from the operating system.
        clip_norm, normalized, per_layer, batch_size, truncation, microbatch: as in training.
        alter: exchanges the execution under test, the claim staying the same (how the audit is
            itself tested).

    Raises:
        UsageError: fewer than 100 canaries, or settings that do not fit the account.
    """
    canaries = _check.integer("canaries", canaries, at_least=100)
    _check.probability("confidence", confidence)
    if account.guarantee.group_size != 1:
        raise _check.reject(
            "group_size", account.guarantee.group_size, "the audit is for accounts of one unit"
        )
    # per-canary gradients of a microbatch, the released sums of every step and their scores
    steps = account.sampling.length
    _sizes.require("canaries", canaries, lambda m: 8.0 * m * (3 * steps + microbatch + 64))
    secret = RunSecret.fresh() if seed is None else RunSecret.pinned(seed)
    present = np.random.default_rng(secret.seed("coins")).random(canaries) < 0.5
    # zero-out: who is absent keeps the number and has no records
    store = TokenStore.from_records(
        [[[unit]] if there else [] for unit, there in enumerate(present.tolist())],
        vocab_size=canaries,
    )
    units = UserUnits(store, records=1, length=1)
    sampler = Sampler(
        account.sampling,
        canaries,
        secret.seed("sampling"),
        microbatch=microbatch,
        batch_size=batch_size,
        truncation=truncation,
    )
    clipping = Clipping(clip_norm, per_layer, normalized)
    bound = clipping.sensitivity * sampler.sensitivity_factor
    noise = NoiseStream(
        account.strategy,
        iterations=account.sampling.length,
        sampling=account.sampling,
        noise_multiplier=account.noise_multiplier,
        clip_norm=bound,
    )
    execution = alter(Execution(units, sampler, clipping, noise, max(1.0, sampler.expected_batch)))
    trainer = Trainer(canary_model(canaries), execution, optax.sgd(0.1), keep_release=True)
    releases = [
        np.asarray(result.release["axes"], np.float64) * execution.normalizer / bound
        for result in trainer.run(trainer.init(secret.key("noise")))
        if result.release is not None
    ]
    scores = log_likelihood_ratios(
        np.stack(releases), account.strategy, account.sampling, account.noise_multiplier
    )
    return judge(scores, present, account, confidence=confidence)


def log_likelihood_ratios(
    releases: np.ndarray, strategy: Strategy, scheme: Scheme, noise_multiplier: float
) -> np.ndarray:
    """log P(sequence | canary present) / P(sequence | absent) for each canary, up to a constant.

    Args:
        releases: (n, m) noised sums in units of the bound; column i belongs to canary i alone.
        strategy: C of the run's noise.
        scheme: how canaries were sampled.
        noise_multiplier: σ of the run, in units of the bound.

    Returns:
        (m,). Exact for balls-in-bins and fixed order; for schemes that draw afresh in each
        iteration, exact where the columns of C that one unit can use are orthogonal.
    """
    white = np.asarray(strategy.multiply(releases))  # C y = C x + σ z
    return attack.log_likelihood_ratio(scheme, strategy, white, noise_multiplier)


def judge(scores: np.ndarray, present: np.ndarray, account: Account, *, confidence: float) -> Audit:
    """Both bounds from the scores of all canaries; half of the error probability for each.

    Args:
      scores: log-likelihood ratio of each canary, shape (canaries,).
      present: whether each canary took part, shape (canaries,).
      account: the account that the run claims.
      confidence: of the bounds.
    """
    delta, m = account.guarantee.delta, len(scores)
    level = (1 - confidence) / 2
    lower, guesses, correct = _best_rule(scores, present, delta, level)
    hits = int(np.sum((scores >= 0) == present))
    least = float(stats.beta.ppf(level, hits, m - hits + 1)) if hits else 0.0
    optimum = _Optimum(account.strategy, account.sampling)
    sigma = account.noise_multiplier
    highest = optimum.largest_noise_multiplier(least, sigma)
    return Audit(
        epsilon_lower=lower,
        epsilon_profile=_epsilon(account, highest),
        noise_multiplier_highest=highest,
        epsilon_claimed=account.guarantee.epsilon,
        delta=delta,
        noise_multiplier_claimed=sigma,
        confidence=confidence,
        canaries=m,
        guesses=guesses,
        correct=correct,
        accuracy=hits / m,
        accuracy_claimed=optimum.accuracy(sigma)[0],
    )


def _best_rule(
    scores: np.ndarray, present: np.ndarray, delta: float, level: float
) -> tuple[float, int, int]:
    """(ε, guesses, correct) of the best of the fixed guessing rules, jointly true at ``level``.

    A rule guesses "present" for the highest scores, or "present" for the highest and "absent" for
    the lowest, of a fixed share of the canaries.
    """
    m = len(scores)
    order = np.argsort(-scores, kind="stable")
    rules = [(max(1, round(share * m)), both) for share in GUESSED for both in (False, True)]
    best = (0.0, 0, 0)
    for guesses, both in rules:
        low = guesses // 2 if both else 0
        correct = int(np.sum(present[order[: guesses - low]]))
        correct += int(np.sum(~present[order[m - low :]])) if low else 0
        lower = epsilon_from_guesses(m, guesses, correct, delta, level / len(rules))
        if lower > best[0]:
            best = (lower, guesses, correct)
    return best


class _Optimum:
    """The best attacker's accuracy on the mechanism at any noise multiplier, by simulation.

    The same draws serve all noise multipliers, so that the accuracy is a smooth function of it.
    """

    def __init__(self, strategy: Strategy, scheme: Scheme, draws: int = 40_000) -> None:
        rng = np.random.default_rng(0)
        n = scheme.length
        columns = np.asarray(strategy.materialize(n))
        self.strategy, self.scheme = strategy, scheme
        self.taking_part = attack.participations(scheme, draws, rng)
        self.signal = self.taking_part @ columns.T  # (draws, n): C x of a unit
        self.noise = rng.normal(size=(draws, n))

    def accuracy(self, noise_multiplier: float) -> tuple[float, float]:
        """(accuracy, its standard error) of guessing by the sign of the log-likelihood ratio."""
        rights = []
        for present in (True, False):
            white = self.signal * present + noise_multiplier * self.noise
            scores = attack.log_likelihood_ratio(
                self.scheme, self.strategy, white.T, noise_multiplier
            )
            rights.append((scores >= 0) == present)
        every = np.concatenate(rights)
        return float(every.mean()), float(every.std() / np.sqrt(len(every)))

    def largest_noise_multiplier(self, accuracy: float, start: float) -> float:
        """The largest σ at which that accuracy, or more, can be expected; infinite if all can."""

        def reached(sigma: float) -> bool:
            mean, error = self.accuracy(sigma)
            return mean + 3 * error >= accuracy

        low, high = start, start
        while reached(high):
            low, high = high, 2 * high
            if high > 1e4 * start:
                return float("inf")
        while not reached(low):
            low, high = low / 2, low
        for _ in range(12):
            middle = float(np.sqrt(low * high))
            low, high = (middle, high) if reached(middle) else (low, middle)
        return high


def _epsilon(account: Account, noise_multiplier: float) -> float:
    """ε of the account's mechanism at another noise multiplier, at its own δ."""
    if np.isinf(noise_multiplier):
        return 0.0
    one_unit = Mechanism(account.sampling, account.strategy)
    # an estimate where the account is sampled: the audit is a measurement, not a proof
    return account_of(
        one_unit, noise_multiplier=noise_multiplier, delta=account.guarantee.delta, certify=False
    ).epsilon


def epsilon_from_guesses(
    canaries: int, guesses: int, correct: int, delta: float, level: float
) -> float:
    """Largest ε that so many correct guesses refute at significance ``level``; 0 if none.

    Args:
      canaries: canary users.
      guesses: guesses that were made.
      correct: guesses that were right.
      delta: δ of the statement.
      level: significance of the test.
    """
    if guesses_p_value(canaries, guesses, correct, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, 1.0
    while guesses_p_value(canaries, guesses, correct, high, delta) <= level and high < 64:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        if guesses_p_value(canaries, guesses, correct, middle, delta) <= level:
            low = middle
        else:
            high = middle
    return low


def guesses_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Most probable chance of ``correct`` or more right guesses under (ε, δ)-DP.

    With W ~ Binomial(guesses, e^ε/(1+e^ε)) and f(v) = P[W >= v]:
    f(v) + 2 m δ max_i (f(v-i) - f(v))/i.

    Args:
      canaries: canary users.
      guesses: guesses that were made.
      correct: guesses that were right.
      epsilon: ε of the statement.
      delta: δ of the statement.
    """
    # fewer than none cannot be right, so the tail is only needed down to 0
    tail = stats.binom.sf(np.arange(-1, correct), guesses, special.expit(epsilon))  # f(0..correct)
    at = tail[-1]
    if correct == 0:
        return 1.0
    steps = np.arange(1, correct + 1)
    slope = np.max((tail[::-1][1:] - at) / steps)
    return float(min(1.0, at + 2 * canaries * delta * slope))
