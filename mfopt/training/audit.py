"""Audit of the loop that trains, as a run of its settings executes it (``docs/howto/audit.md``).

Every canary's gradient is its own coordinate axis at full clip norm: its coordinate of the released
sequence is a draw from the dominating pair of the account. Three bounds come out of the guesses:

* ``epsilon_lower`` assumes nothing about the trainer: guesses that are better than any (ε, δ)-DP
  algorithm allows refute (ε, δ)-DP (:func:`_refuted`).
* ``epsilon_curve`` is that of the account's mechanism at the largest noise multiplier whose
  (ε, δ) curve the guesses do not refute, by the same test: canaries need not be independent.
* ``epsilon_profile`` is that of the account's mechanism at the largest noise multiplier that is
  compatible with how many guesses were right. Canaries count as independent trials, which for
  separate axes and independent noise per coordinate they are.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from mfopt._runtime import _check, _sizes
from mfopt._runtime._float64 import pinned
from mfopt._runtime._types import PyTree
from mfopt.accounting import analysis
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
_STATEMENTS, _LARGEST_DELTA = 4, 0.1  # of a mechanism's (ε, δ) curve
_USELESS = 100.0  # ε that refutes nothing
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
    epsilon_curve: float
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


def _canary_model(canaries: int, loudness: float) -> Model:
    """loss = loudness · θ[first token]: canary i's gradient points along coordinate i.

    Token ``canaries`` is that of units that only fill the population: their gradient is 0.
    """

    def loss(params: PyTree, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        is_canary = mask[0] & (tokens[0] < canaries)
        row = params["axes"][jnp.minimum(tokens[:1], canaries - 1)]
        return jnp.where(is_canary, loudness * row.sum(), 0)

    return Model.of({"axes": jnp.zeros((canaries, 1))}, loss)


def _settings_of(account: Factorization) -> TrainConfig:
    """Settings of a run that executes ``account``, where no run's own are given."""
    group = account.guarantee.group_size
    algorithm = "els" if group > 1 or account.guarantee.privacy_unit == "record" else "uls"
    return TrainConfig(
        factorization="(an account)",
        algorithm=algorithm,
        records_per_user=group,
        microbatch=64,
        length=16,
        width=32,
    )


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
            :func:`_settings_of` the account.
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
    audited = dataclasses.replace(settings or _settings_of(account), **changes)
    # a canary's record is its number, twice: the settings' shortest record
    settings = dataclasses.replace(audited, length=2)
    steps = account.sampling.length
    bound_of = settings.microbatch or 64
    # per-canary gradients of a microbatch, the released sums of every step and their scores
    _sizes.require("canaries", canaries, lambda m: 8.0 * m * (4 * steps + bound_of + 64))
    secret = RunSecret.fresh() if seed is None else RunSecret.pinned(seed)
    present = np.random.default_rng(secret.seed("coins")).random(canaries) < 0.5
    store = _store(settings, present)
    mesh = meshes.make_mesh()
    wired = Wiring(settings, account, secret, mesh)
    units = wired.units(store)
    whole = wired.execution(units)
    claimed = wired.statement(whole)
    execution = alter(whole)
    assert claimed is not None
    # first: it may refuse, and is the shorter one
    of_model = recovered.findings(
        account, audited, secret, alter=alter, model=model, progress=progress
    )
    bound = execution.clipping.sensitivity
    # an update is as long as the gradients that it was made of, times the local rate
    loudness = _LOUDNESS / (settings.local_rate if settings.algorithm == "fedavg" else 1.0)
    trainer = Trainer(
        _canary_model(canaries, loudness), execution, optax.sgd(0.1), mesh=mesh, keep_release=True
    )
    releases = np.empty((steps, canaries), np.float32)
    ran = np.zeros((units.population, steps), bool)
    for result in trainer.run(trainer.init(secret.key("noise"))):
        releases[result.step] = np.asarray(result.release["axes"])[:, 0]
        ran[result.batch[result.batch >= 0], result.step] = True
        progress(Progress("training on canaries", result.step + 1, steps, "steps"))
    progress(Progress("attacking"))
    released = releases.astype(np.float64) * (execution.normalizer / bound)
    attacker = attack.attack_on(account.sampling, account.strategy, settings.group_size)
    # C y = C x + σ z
    white = np.asarray(account.strategy.multiply(released))
    scores = attacker(white, account.noise_multiplier)
    # the same execution under other secrets
    drawn = executed.participations_of(execution.sampler)
    twins = []
    for number in range(_TWINS):
        twin = dataclasses.replace(wired, secret=secret.twin(number))
        twins.append(executed.participations_of(alter(twin.execution(units)).sampler))
    findings = executed.compare(
        account.sampling,
        ran,
        twins,
        np.random.default_rng(secret.seed("simulated units")),
    )
    findings.append(executed.certain("units that were not drawn", not np.any(ran & ~drawn)))
    # an absent canary's coordinate holds noise alone, of all steps
    second_release = next(trainer.run(trainer.init(secret.twin().key("noise")), 1)).release
    absent = np.flatnonzero(~present)
    noise_alone = np.asarray(second_release["axes"], np.float64)[~present, 0]
    noise = white[:, absent] / account.noise_multiplier
    for finding in executed.compare_noise(noise, [slice(0, len(absent))], noise_alone):
        findings.append(dataclasses.replace(finding, name=f"{finding.name}, of canaries"))
    findings += of_model
    judged = _judge(scores, present, account, settings, claimed, confidence)
    findings = [*judged.sampling, *findings]
    assert len(findings) <= executed.OF_CANARIES
    return dataclasses.replace(judged, sampling=tuple(findings))


def _store(settings: TrainConfig, present: np.ndarray) -> TokenStore:
    """Store with a user per canary, without records if absent."""
    # a sampled user has several records too, which are to be clipped as one
    records = settings.records_per_user if settings.by_user else settings.group_size
    users = [
        [[unit] * 2] * records if is_present else []
        for unit, is_present in enumerate(present.tolist())
    ]
    return TokenStore.from_records(users, vocab_size=len(present) + 1)


def _judge(
    scores: np.ndarray,
    present: np.ndarray,
    account: Factorization,
    settings: TrainConfig,
    claimed: Guarantee,
    confidence: float,
) -> Audit:
    """Audit from the scores of all canaries: three bounds, at a third of the error chance each.

    ``scores``: log-likelihood ratios, (canaries,).
    """
    delta = claimed.delta
    m = len(scores)
    level = (1 - confidence) / 3
    rules = _rules(scores, present)
    lower, guesses, correct = max(
        (epsilon_from_guesses(m, *rule, delta, level / len(rules)), *rule) for rule in rules
    )
    hits = int(np.sum((scores >= 0) == present))
    lower_share = float(stats.beta.ppf(level, hits, m - hits + 1)) if hits else 0.0
    optimum = _Expected(account, settings.group_size)
    sigma = account.noise_multiplier
    # estimates where the account is sampled: the audit is a measurement, not a proof
    bound = analysis(account.mechanism, certify=False)
    factor = 1.0
    if settings.algorithm == "group":  # the account is for one of a canary's units
        factor = float(settings.records_per_user)

    def epsilon_at(noise_multiplier: float) -> float:
        """ε of the run's statement at that noise multiplier, at its own δ."""
        if not np.isfinite(noise_multiplier):
            return 0.0
        return factor * bound.epsilon(noise_multiplier, account.guarantee.delta).epsilon

    def too_many(noise_multiplier: float) -> bool:
        """True if the mechanism does not allow so many right guesses."""
        deltas = np.geomspace(account.guarantee.delta, _LARGEST_DELTA, _STATEMENTS).tolist()
        curve = [(bound.epsilon(noise_multiplier, x).epsilon, x) for x in deltas]
        return any(_refuted(curve, m, *rule, level / len(rules)) for rule in rules)

    highest = optimum.largest_noise_multiplier(lower_share, sigma)
    sigmas = (sigma * 2.0 ** np.arange(-3, 3, 2**-4)).tolist()
    allowed = [*sigmas, np.inf][bisect.bisect_left(sigmas, True, key=too_many)]
    chances_of_rules = [guesses_p_value(m, *rule, claimed.epsilon, delta) for rule in rules]
    expected, error = optimum.accuracy(sigma)
    below, above = np.clip([expected - _ERRORS * error, expected + _ERRORS * error], 0, 1)
    chances = [stats.binom.sf(hits - 1, m, above), stats.binom.cdf(hits, m, below)]
    findings = (
        executed.Finding(
            "guesses beyond the claim", executed.capped(len(rules) * min(chances_of_rules))
        ),
        executed.Finding("right guesses", executed.capped(2 * np.min(chances))),
    )
    return Audit(
        epsilon_lower=lower,
        epsilon_curve=lower if factor > 1 else max(lower, epsilon_at(allowed)),
        epsilon_profile=epsilon_at(highest),
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
        sampling=findings,
    )


def _rules(scores: np.ndarray, present: np.ndarray) -> list[tuple[int, int]]:
    """(guesses, correct) of "present" for the highest scores of a fixed share of the canaries, and
    of "present" for the highest and "absent" for the lowest.
    """
    m = len(scores)
    outcomes = []
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
        scheme = account.sampling
        strategy = account.strategy
        self.attack = attack.attack_on(scheme, strategy, group_size)
        rows, n = self.attack.rows.shape
        draws = max(1000, min(_DRAWS, _NUMBERS // rows))
        rng = np.random.default_rng(0)
        participations = attack.participations(scheme, draws * group_size, rng)
        if not scheme.public_order:
            participations = rng.permutation(participations)
        # the units of a canary have neighbouring numbers, as those of a user have in the loader
        taking_part = participations.reshape(draws, group_size, -1).sum(axis=1, dtype=np.float64).T
        signal, noise = np.empty((2, rows, draws), np.float32)
        for begin in range(0, draws, _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            counts = taking_part[:, part]
            signal[:, part] = self.attack.rows @ np.asarray(strategy.multiply(counts))
            noise[:, part] = self.attack.rows @ rng.normal(size=(n, counts.shape[1]))
        self.signal = signal
        self.noise = noise

    def accuracy(self, noise_multiplier: float) -> tuple[float, float]:
        """(accuracy, its standard error) of guessing by the sign of the log-likelihood ratio."""
        rights = []
        for present in (True, False):
            for begin in range(0, self.signal.shape[1], _AT_ONCE):
                part = slice(begin, begin + _AT_ONCE)
                statistics = self.signal[:, part] * present + noise_multiplier * self.noise[:, part]
                scores = self.attack.score(statistics.astype(np.float64), noise_multiplier, begin)
                rights.append((scores >= 0) == present)
        all_rights = np.concatenate(rights)
        return float(all_rights.mean()), float(all_rights.std() / np.sqrt(len(all_rights)))

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

    step = 2.0**-20
    steps = bisect.bisect_left(
        range(1 << 26),
        True,
        key=lambda k: not _refuted([(k * step, delta)], canaries, guesses, correct, level),
    )
    return max(0, steps - 1) * step


def guesses_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound on the chance of ``correct`` or more right guesses under (ε, δ)-DP; rounded up.

    Args:
      canaries, guesses, correct: canary users, guesses that were made, and those that were right.
      epsilon, delta: of the statement.
    """
    levels = (2.0 ** np.arange(-64, 0, 2**-6)).tolist()
    found = bisect.bisect_left(
        levels,
        True,
        key=lambda level: _refuted([(epsilon, delta)], canaries, guesses, correct, level),
    )
    return [*levels, 1.0][found]


def _refuted(
    statements: Sequence[tuple[float, float]],
    canaries: int,
    guesses: int,
    correct: int,
    level: float,
) -> bool:
    """True if ``correct`` or more right guesses have a chance below ``level``, under (ε, δ)-DP.

    Let C be right of g guesses about m fair coins, and p_i = P[C = i]. Whatever the other coins
    are, the chance of a right guess about coin i while the others have j right is at most F of the
    chance of a wrong one: F(x) is the largest power of a test of level x. As F is concave,

        Σ_{i >= a} i p_i / m  <=  F(Σ_{i >= a} (g - i + 1) p_{i-1} / m)      for each a.

    With P[C >= c] = τ the sums are smallest where all of it is at c; from there on down each sum
    forces the next. If what is forced exceeds g / m in all, the chance is below τ.

    Source: Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run".

    Args:
      statements: (ε, δ) of one mechanism, of which all hold.
      canaries, guesses, correct: m; g, fixed in advance; c.
      level: τ.
    """
    # the inverse of F is the largest of these lines (slope, value at 0), and of 0
    lines = []
    for epsilon, delta in statements:
        if epsilon < _USELESS:
            more = math.exp(epsilon)
            less = math.exp(-epsilon)
            lines += [(less, -delta * less), (more, 1 - delta - more)]
    right = level * correct / canaries
    wrong = level * (guesses - correct) / canaries
    for number in range(correct - 1, -1, -1):
        forced = max((slope * right + begin for slope, begin in lines), default=0.0)
        more = max(0.0, forced - wrong)
        right += more * number / (guesses - number)
        wrong += more
        if right + wrong > guesses / canaries:
            return True
    return False
