"""Audit of the loop that trains, as a run of its settings executes it (``docs/howto/audit.md``).

Every canary's gradient is its own coordinate axis at full clip norm: its coordinate of the released
sequence is a draw from the dominating pair of the account. Two bounds come out of the guesses:

* ``epsilon_lower`` assumes nothing about the trainer: guesses that are better than any (ε, δ)-DP
  algorithm allows refute (ε, δ)-DP (Steinke, Nasr and Jagielski 2023, Theorem 5.2).
* ``epsilon_profile`` is that of the account's mechanism at the largest noise multiplier that is
  compatible with how many guesses were right. Canaries count as independent trials, which for
  separate axes and independent noise per coordinate they are.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from scipy import special, stats

from mfopt._runtime import _check, _sizes
from mfopt._runtime._float64 import pinned
from mfopt.accounting import account as account_of
from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.progress import Progress, Report, silent
from mfopt.training import attack, executed, recovered
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.secrets import RunSecret
from mfopt.training.wiring import Wiring

# Shares of the canaries about which a guess is made, the rest is passed over. Fixed in advance;
# the confidence is split evenly over them.
GUESSED = (0.005, 0.02, 0.05, 0.2)
_DRAWS = 40_000  # simulated canaries, for the accuracy to expect
_NUMBERS = 1 << 24  # of their statistics kept
_AT_ONCE = 2_000
_TWINS = 8  # runs of the sampler under other secrets
_ERRORS = 6.0  # standard errors that the expected accuracy may be off
_LOUDNESS = 100.0  # a canary's gradient norm before clipping, in clip norms


@dataclasses.dataclass(frozen=True)
class Audit:
    """Outcome of an audit; every statement holds with ``confidence`` over its own randomness.

    ``noise_multiplier_highest`` is the largest that the guesses are compatible with. ``guesses``,
    ``correct`` are of the rule that gave ``epsilon_lower``; ``accuracy_claimed`` is what the same
    attacker on the claimed mechanism can expect. ``sampling`` holds all tests, of guesses,
    participations, sums and noise.
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
    sampling: tuple[executed.Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """True if no test finds a fault."""
        return not any(finding.fault for finding in self.sampling)


def canary_model(canaries: int, loudness: float = _LOUDNESS) -> Model:
    """loss = loudness · θ[first token]: canary i's gradient points along coordinate i.

    θ is a table: on a CPU microbatches are clipped by the norms of :mod:`mfopt.training.ghost`.
    Token ``canaries`` is that of units that only fill the population: their gradient is 0.
    """

    def loss(params: Any, tokens: Any, mask: Any) -> Any:
        there = mask[0] & (tokens[0] < canaries)
        row = params["axes"][jnp.minimum(tokens[:1], canaries - 1)]
        return jnp.where(there, loudness * row.sum(), 0)

    return Model.of({"axes": jnp.zeros((canaries, 1))}, loss, name="canaries")


def settings_of(account: Factorization) -> TrainConfig:
    """Settings of a run that executes ``account``, where no run's own are given."""
    group = account.guarantee.group_size
    algorithm = "els" if group > 1 or account.guarantee.privacy_unit == "record" else "uls"
    sizes: dict[str, Any] = {"records_per_user": group, "microbatch": 64, "length": 16, "width": 32}
    return TrainConfig(factorization="(an account)", algorithm=algorithm, **sizes)


@pinned
def audit(
    account: Factorization,
    settings: TrainConfig | None = None,
    *,
    canaries: int = 4000,
    confidence: float = 0.95,
    seed: int | None = None,
    alter: Callable[[Execution], Execution] = lambda execution: execution,
    model: Model | None = None,
    progress: Report = silent,
    **changes: Any,
) -> Audit:
    """Run the loop of ``account`` on canaries and bound ε from below.

    Args:
        account: the mechanism and what was accounted for.
        settings: of the run; from them and the account follows the claim, (ε, δ) of the run. None:
            :func:`settings_of` the account.
        canaries: more give a tighter bound; time grows with canaries² / bins. At least 100.
        confidence: chance that the bound is true.
        seed: pins the audit's randomness; None: from the operating system.
        alter: exchanges the execution under test, the claim staying the same (how the audit is
            itself tested).
        model: the run's own; None: that of the settings.
        progress: callback for every step.
        **changes: of the settings.
    """
    canaries = _check.integer("canaries", canaries, at_least=100)
    _check.probability("confidence", confidence)
    own = dataclasses.replace(settings or settings_of(account), **changes)
    # a canary's record is its number, twice: the settings' shortest record
    settings = dataclasses.replace(own, length=2)
    steps, bound_of = account.sampling.length, settings.microbatch or 64
    # per-canary gradients of a microbatch, the released sums of every step and their scores
    _sizes.require("canaries", canaries, lambda m: 8.0 * m * (4 * steps + bound_of + 64))
    secret = RunSecret.fresh() if seed is None else RunSecret.pinned(seed)
    present = np.random.default_rng(secret.seed("coins")).random(canaries) < 0.5
    store = _store(settings, present)
    mesh = meshes.make_mesh()
    wired = Wiring(settings, account, secret, mesh)
    units = wired.units(store, "random")
    whole = wired.execution(units)
    claimed, execution = wired.statement(whole), alter(whole)
    assert claimed is not None
    # first: it may refuse, and is the shorter one
    of_model = recovered.findings(account, own, secret, alter=alter, model=model, progress=progress)
    bound = execution.clipping.sensitivity
    # an update is as long as the gradients that it was made of, times the local rate
    loudness = _LOUDNESS / (settings.local_rate if settings.algorithm == "fedavg" else 1.0)
    trainer = Trainer(
        canary_model(canaries, loudness), execution, optax.sgd(0.1), mesh=mesh, keep_release=True
    )
    releases = np.empty((steps, canaries), np.float32)
    ran = np.zeros((units.population, steps), bool)
    for result in trainer.run(trainer.init(secret.key("noise"))):
        assert result.release is not None
        releases[result.step] = np.asarray(result.release["axes"])[:, 0]
        ran[result.batch.units[result.batch.units >= 0], result.step] = True
        progress(Progress("training on canaries", result.step + 1, steps, "steps"))
    progress(Progress("attacking"))
    released = releases.astype(np.float64) * (execution.normalizer / bound)
    attacker = attack.attack_on(account.sampling, account.strategy, settings.group_size)
    # C y = C x + σ z
    white = np.asarray(account.strategy.multiply(released))
    scores = attacker(white, account.noise_multiplier)
    # the same execution under other secrets
    drawn, twins = executed.participations_of(execution.sampler), []
    for number in range(_TWINS):
        other = dataclasses.replace(wired, secret=secret.twin(number))
        twins.append(executed.participations_of(alter(other.execution(units)).sampler))
    findings = executed.compare(
        account.sampling,
        ran,
        twins,
        np.random.default_rng(secret.seed("simulated units")),
    )
    findings.append(executed.certain("units that were not drawn", not np.any(ran & ~drawn)))
    # an absent canary's coordinate holds noise alone, of all steps
    again = next(trainer.run(trainer.init(secret.twin().key("noise")), 1)).release
    assert again is not None
    absent, alone = np.flatnonzero(~present), np.asarray(again["axes"], np.float64)[~present, 0]
    noise = white[:, absent] / account.noise_multiplier
    for one in executed.compare_noise(noise, [slice(0, len(absent))], alone):
        findings.append(dataclasses.replace(one, name=f"{one.name}, of canaries"))
    findings += of_model
    return _judge(scores, present, account, settings, claimed, findings, confidence=confidence)


def _store(settings: TrainConfig, present: np.ndarray) -> TokenStore:
    """Store with a user per canary, without records if absent."""
    each = settings.group_size
    # a sampled user has several records too, which are to be clipped as one
    records = settings.records_per_user if settings.by_user else each
    users = [[[unit] * 2] * records if there else [] for unit, there in enumerate(present.tolist())]
    return TokenStore.from_records(users, vocab_size=len(present) + 1)


def _judge(
    scores: np.ndarray,
    present: np.ndarray,
    account: Factorization,
    settings: TrainConfig,
    claimed: Guarantee,
    findings: Sequence[executed.Finding] = (),
    *,
    confidence: float,
) -> Audit:
    """Audit from the scores of all canaries: two bounds, at half of the error probability each.

    ``scores``: log-likelihood ratios, (canaries,).
    """
    delta, m = claimed.delta, len(scores)
    level = (1 - confidence) / 2
    rules = _rules(scores, present)
    lower, guesses, correct = max(
        (epsilon_from_guesses(m, *rule, delta, level / len(rules)), *rule) for rule in rules
    )
    hits = int(np.sum((scores >= 0) == present))
    least = float(stats.beta.ppf(level, hits, m - hits + 1)) if hits else 0.0
    optimum = _Expected(account, settings.group_size)
    sigma = account.noise_multiplier
    highest = optimum.largest_noise_multiplier(least, sigma)
    profile = 0.0
    if np.isfinite(highest):  # ε of the run's statement at that noise multiplier, at its own δ
        # an estimate where the account is sampled: the audit is a measurement, not a proof
        at: dict[str, Any] = {"noise_multiplier": highest, "delta": account.guarantee.delta}
        profile = account_of(account.mechanism, certify=False, **at).epsilon
        profile *= settings.records_per_user if settings.algorithm == "group" else 1
    refuted = [guesses_p_value(m, *rule, claimed.epsilon, delta) for rule in rules]
    expected, error = optimum.accuracy(sigma)
    below, above = np.clip([expected - _ERRORS * error, expected + _ERRORS * error], 0, 1)
    chances = [stats.binom.sf(hits - 1, m, above), stats.binom.cdf(hits, m, below)]
    findings = [
        executed.Finding("guesses beyond the claim", executed.capped(len(rules) * np.min(refuted))),
        executed.Finding("right guesses", executed.capped(2 * np.min(chances))),
        *findings,
    ]
    assert len(findings) <= executed.MOST
    return Audit(
        epsilon_lower=lower,
        epsilon_profile=profile,
        noise_multiplier_highest=highest,
        epsilon_claimed=claimed.epsilon,
        delta=delta,
        noise_multiplier_claimed=sigma,
        confidence=confidence,
        canaries=m,
        guesses=guesses,
        correct=correct,
        accuracy=hits / m,
        accuracy_claimed=expected,
        sampling=tuple(findings),
    )


def _rules(scores: np.ndarray, present: np.ndarray) -> list[tuple[int, int]]:
    """(guesses, correct) of "present" for the highest scores of a fixed share of the canaries, and
    of "present" for the highest and "absent" for the lowest.
    """
    m, outcomes = len(scores), []
    order = np.argsort(-scores, kind="stable")
    for guesses in (max(1, round(share * m)) for share in GUESSED):
        for low in (0, guesses // 2):
            correct = int(np.sum(present[order[: guesses - low]]))
            correct += int(np.sum(~present[order[m - low :]])) if low else 0
            outcomes.append((guesses, correct))
    return outcomes


class _Expected:
    """The attacker's accuracy on the mechanism at any noise multiplier, by simulation.

    The same draws serve all noise multipliers, so that the accuracy is a smooth function of it.
    Only the attacker's linear statistics of them are kept: memory does not grow with the steps.
    """

    def __init__(self, account: Factorization, group_size: int) -> None:
        scheme, strategy = account.sampling, account.strategy
        self.attack = attack.attack_on(scheme, strategy, group_size)
        rows, n = self.attack.rows.shape
        draws = max(1000, min(_DRAWS, _NUMBERS // rows))
        rng = np.random.default_rng(0)
        each = attack.participations(scheme, draws * group_size, rng)
        if not scheme.public_order:
            each = rng.permutation(each)
        # the units of a canary have neighbouring numbers, as those of a user have in the loader
        taking_part = each.reshape(draws, group_size, -1).sum(axis=1, dtype=np.float64).T
        signal, noise = np.empty((2, rows, draws), np.float32)
        for begin in range(0, draws, _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            counts = taking_part[:, part]
            signal[:, part] = self.attack.rows @ np.asarray(strategy.multiply(counts))
            noise[:, part] = self.attack.rows @ rng.normal(size=(n, counts.shape[1]))
        self.signal, self.noise = signal, noise

    def accuracy(self, noise_multiplier: float) -> tuple[float, float]:
        """(accuracy, its standard error) of guessing by the sign of the log-likelihood ratio."""
        rights = []
        for present in (True, False):
            for begin in range(0, self.signal.shape[1], _AT_ONCE):
                part = slice(begin, begin + _AT_ONCE)
                seen = self.signal[:, part] * present + noise_multiplier * self.noise[:, part]
                scores = self.attack.score(seen.astype(np.float64), noise_multiplier, begin)
                rights.append((scores >= 0) == present)
        every = np.concatenate(rights)
        return float(every.mean()), float(every.std() / np.sqrt(len(every)))

    def largest_noise_multiplier(self, accuracy: float, start: float) -> float:
        """The largest σ at which that accuracy, or more, can be expected; infinite if all can."""
        sigmas = (start * 2.0 ** np.arange(-10, 14, 2**-12)).tolist()

        def missed(sigma: float) -> bool:
            mean, error = self.accuracy(sigma)
            return mean + 3 * error < accuracy

        return float([*sigmas, np.inf][bisect.bisect_left(sigmas, True, key=missed)])


def epsilon_from_guesses(
    canaries: int, guesses: int, correct: int, delta: float, level: float
) -> float:
    """Largest ε that so many correct guesses refute at significance ``level``; 0 if none.

    Args:
      canaries, guesses, correct, delta: as for :func:`guesses_p_value`.
      level: significance of the test.
    """

    def refuted(epsilon: float) -> bool:
        return guesses_p_value(canaries, guesses, correct, epsilon, delta) <= level

    step = 2.0**-40
    first = bisect.bisect_left(range(1 << 46), True, key=lambda k: not refuted(k * step))
    return max(0, first - 1) * step


def guesses_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Most probable chance of ``correct`` or more right guesses under (ε, δ)-DP.

    With W ~ Binomial(guesses, e^ε/(1+e^ε)) and f(v) = P[W >= v]:
    f(v) + 2 m δ max_i (f(v-i) - f(v))/i.

    Args:
      canaries, guesses, correct: canary users, guesses that were made, and those that were right.
      epsilon, delta: of the statement.
    """
    # fewer than none cannot be right, so the tail is only needed down to 0
    tail = stats.binom.sf(np.arange(-1, correct), guesses, special.expit(epsilon))  # f(0..correct)
    at = tail[-1]
    if correct == 0:
        return 1.0
    steps = np.arange(1, correct + 1)
    slope = np.max((tail[::-1][1:] - at) / steps)
    return float(min(1.0, at + 2 * canaries * delta * slope))
