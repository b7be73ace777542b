"""Bugs planted in the trainer are found, and a correct trainer is not called faulty."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit import with_noise
from selection import before_release
from test_cli import run
from train_fixtures import RANK, WIDTH, layered_model

from mfopt import sampling
from mfopt.errors import UsageError
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream, _draws
from mfopt.sampling.sampler import pad
from mfopt.strategies import BLT, Identity
from mfopt.training import clipping, executed, loop, recovered, units
from mfopt.training.clipping import Clipping
from mfopt.training.config import TrainConfig
from mfopt.training.fedavg import FedAvg
from mfopt.training.loop import Trainer
from mfopt.training.models.families import gpt2_config
from mfopt.training.models.huggingface import gpt2_model
from mfopt.training.privacy import solved
from mfopt.training.secrets import RunSecret
from mfopt.training.units import UserUnits

ORDERED = Mechanism(sampling.FixedOrder(4, 3), BLT([0.3], [0.7]), privacy_unit="user")
SAMPLED = Mechanism(sampling.Poisson(0.2, 12), Identity(), privacy_unit="user")
SETTINGS = TrainConfig(
    factorization="(an account)", algorithm="uls", records_per_user=3, length=8, microbatch=2
)


def findings(mechanism=ORDERED, alter=lambda execution: execution, seed=1, model=None, **changes):
    account = solved(mechanism, 3.0, 1e-6)
    settings = dataclasses.replace(SETTINGS, **changes)
    secret = RunSecret.pinned(seed)
    return recovered.findings(
        account, settings, secret, alter=alter, model=model or layered_model()
    )


def faults(actual):
    return {finding.name for finding in actual if finding.fault}


@pytest.mark.release
def test_a_model_of_few_tokens_is_tested_on_those():
    model = gpt2_model(gpt2_config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    assert not faults(findings(model=model))
    with pytest.raises(UsageError, match="takes at most 8 tokens"):
        findings(model=model, length=9)


# --- noise ---------------------------------------------------------------------------------


class Stale(NoiseStream):
    """Does not advance its state."""

    def next(self, state):
        return super().next(state)[0], state


class Known(NoiseStream):
    """Draws under a key of zeros, whatever the secret."""

    def init(self, like, key=None):
        return super().init(like, key=np.zeros(8, np.uint32))


class Shared(NoiseStream):
    """Adds one draw to every coordinate."""

    def next(self, state):
        noise, state = super().next(state)
        return jnp.broadcast_to(noise[:1], noise.shape), state


class Late(NoiseStream):
    """Adds the noise of the step before."""

    def init(self, like, key=None):
        return super().init(like, key=key), jnp.zeros(like.shape)

    def next(self, state):
        noise, next_state = super().next(state[0])
        return state[1], (next_state, noise)


class Independent(NoiseStream):
    """Adds noise of the right size that is not correlated."""

    def __init__(self, strategy, **options):
        super().__init__(Identity(), **options)


class Restarted(NoiseStream):
    """Forgets its buffers after every epoch of four steps."""

    def next(self, state):
        forget = state.step % 4 == 0
        buffers = tuple(jnp.where(forget, 0, buffer) for buffer in state.buffers)
        return super().next(dataclasses.replace(state, buffers=buffers))


class NotEverywhere(NoiseStream):
    """Adds none to the adapter."""

    def next(self, state):
        noise, state = super().next(state)
        return noise.at[: 2 * WIDTH * RANK].set(0), state


class Twice(NoiseStream):
    """Adds to one half of the adapter what it adds to the other."""

    def next(self, state):
        noise, state = super().next(state)
        half = WIDTH * RANK
        return noise.at[half : 2 * half].set(noise[:half]), state


class Uniform(NoiseStream):
    """Adds uniform noise of the right variance."""

    def next(self, state):
        noise, state = super().next(state)
        share = jax.scipy.stats.norm.cdf(noise / self.stddev)
        return self.stddev * np.sqrt(12) * (share - 0.5), state


def in_place_of(owner, name):
    """Decorator of what is to stand for ``owner.name``, which it gets as its first argument."""

    def planted(wrong):
        right = getattr(owner, name)
        return lambda patch: patch.setattr(
            owner, name, lambda *values, **options: wrong(right, *values, **options)
        )

    return planted


@in_place_of(Trainer, "_apply")
def added_after_the_optimizer(right, trainer, state, total, keep_release):
    next_state, release = right(trainer, state, total, keep_release=keep_release)
    clean = jax.tree.map(lambda leaf: leaf / trainer.execution.normalizer, total)
    update, _ = trainer.optimizer.update(clean, state.optimizer, state.params)
    params = jax.tree.map(
        lambda old, move, noised, mean: old + move + 1e-4 * (noised - mean),
        *(state.params, update, release, clean),
    )
    return dataclasses.replace(next_state, params=params), release


@in_place_of(Trainer, "run")
def normalized_by_the_batch_drawn(right, trainer, state, stop=None):
    for result in right(trainer, state, stop):
        factor = trainer.execution.normalizer / max(1, np.sum(result.batch >= 0))
        release = jax.tree.map(lambda leaf, factor=factor: leaf * factor, result.release)
        yield dataclasses.replace(result, release=release)


# --- clipping ------------------------------------------------------------------------------


@in_place_of(clipping, "sum_of_squares")
def norms_too_small(right, leaf):
    return 1e-4 * right(leaf)


def in_shape(shape):
    """Microbatches taken as others, of ``shape`` (units, records)."""

    @in_place_of(loop, "microbatch_adder")
    def plant(right, model, bound):
        add = right(model, bound)

        def added(totals, params, frozen, tokens, mask):
            rows = (x.reshape(*shape, x.shape[-1]) for x in (tokens, mask))
            return add(totals, params, frozen, *rows)

        return added

    return plant


def not_counted(name):
    """Norms without the part of one entry of the parameters."""

    @in_place_of(Clipping, "__call__")
    def plant(right, bound, gradient):
        actual = right(bound, gradient | {name: jax.tree.map(jnp.zeros_like, gradient[name])})
        factor = bound.sensitivity / jnp.maximum(actual.norm, bound.clip_norm)
        return actual._replace(gradient=jax.tree.map(lambda x: x * factor, gradient))

    return plant


def not_scaled(name):
    """Norms are right, and one entry of the parameters is added as it is."""

    @in_place_of(Clipping, "__call__")
    def plant(right, bound, gradient):
        actual = right(bound, gradient)
        return actual._replace(gradient=actual.gradient | {name: gradient[name]})

    return plant


@in_place_of(Clipping, "__call__")
def bound_too_large(right, bound, gradient):
    actual = right(bound, gradient)
    return actual._replace(gradient=jax.tree.map(lambda x: 1.01 * x, actual.gradient))


def rounding_forgotten(patch):
    patch.setattr(clipping, "_MARGIN", 1.0)


@in_place_of(_draws, "chacha20")
def another_cipher(right, key, counter):
    return jnp.roll(right(key, counter), 1, axis=0)


# --- batches -------------------------------------------------------------------------------


def kept(change):
    """Batches of other units than the scheme's."""

    @in_place_of(loop, "pad")
    def plant(right, drawn, *shape, **options):
        return right(change(drawn), *shape, **options)

    return plant


@in_place_of(UserUnits, "fetch")
def a_record_of_the_neighbour(right, units, numbers, step):
    tokens, mask = right(units, numbers, step)
    other, _ = right(units, np.where(numbers < 0, -1, (numbers + 1) % units.population), step)
    tokens[:, 0] = other[:, 0]
    return tokens, mask


class Bfloat16(NoiseStream):
    """Rounds the noise to bfloat16."""

    def next(self, state):
        noise, state = super().next(state)
        return noise.astype(jnp.bfloat16).astype(jnp.float32), state


class Coarse(NoiseStream):
    """Rounds the noise to multiples of σ / 1,000."""

    def next(self, state):
        noise, state = super().next(state)
        step = self.stddev / 1000
        return step * jnp.round(noise / step), state


@in_place_of(Trainer, "run")
def sums_divided_by_the_batch_drawn(right, trainer, state, stop=None):
    """And the noise by the batch expected."""
    stop = trainer.execution.iterations if stop is None else stop
    for step in range(int(state.step), stop):
        params, moments = (jax.tree.map(jnp.copy, x) for x in (state.params, state.optimizer))
        batch = pad(trainer.execution.sampler[step], trainer.execution.microbatch, fill=-1)
        total = trainer.sum(params, batch, step).gradient
        (result,) = right(trainer, state, step + 1)
        normalizer = 1 / max(1, np.sum(batch >= 0)) - 1 / trainer.execution.normalizer
        release = jax.tree.map(
            lambda mean, x, extra=normalizer: mean + extra * x, result.release, total
        )
        update, _ = trainer.optimizer.update(release, moments, params)
        moved = jax.tree.map(jnp.add, params, update)
        state = dataclasses.replace(result.state, params=moved)
        yield dataclasses.replace(result, state=state, release=release)


def a_record_more(patch):
    """Records of a user are kept one more than accounted."""
    right = units.select

    def select(store, users, group_size, *arguments, **options):
        return right(store, users, group_size + 1, *arguments, **options)

    patch.setattr(units, "select", select)


def unclipped_where(odd):
    """Units are not clipped where the sums so far and their mask (G, L) are ``odd``."""

    @in_place_of(loop, "microbatch_adder")
    def plant(right, model, bound):
        clipped, unclipped = (right(model, entry) for entry in (bound, Clipping(1e6)))

        def added(totals, params, frozen, tokens, mask):
            pair = (add(totals, params, frozen, tokens, mask) for add in (unclipped, clipped))
            return jax.tree.map(lambda a, b: jnp.where(odd(totals, mask), a, b), *pair)

        return added

    return plant


@in_place_of(Clipping, "__call__")
def what_is_not_finite_contributes(right, bound, gradient):
    actual = right(bound, gradient)
    is_finite = jnp.isfinite(actual.norm)
    kept = jax.tree.map(lambda x, g: jnp.where(is_finite, x, g), actual.gradient, gradient)
    return actual._replace(gradient=kept)


def altered(**changes):
    """Another clipping than that of the settings."""

    def alter(execution):
        clipping = dataclasses.replace(execution.clipping, **changes)
        return dataclasses.replace(execution, clipping=clipping)

    return alter


@in_place_of(FedAvg, "contribution")
def users_weighted_twice(right, *arguments):
    clipped, sums = right(*arguments)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, clipped.gradient)
    return clipped._replace(gradient=doubled), sums


@in_place_of(FedAvg, "__call__")
def updates_not_clipped(right, bound, update):
    return right(bound, update)._replace(gradient=update)


AVERAGED = {"algorithm": "fedavg", "local_epochs": 2, "weight_cap": 2, "normalizer": 2.0}
AVERAGED |= {"local_batch": 2, "local_rate": 0.01, "normalized": False}
ELS = {"mechanism": dataclasses.replace(SAMPLED, privacy_unit="record"), "algorithm": "els"}
CHANGE = "change of a release by one user"
NOISE = "size of the noise"
SUMS = "sums of clipped gradients"
UNITS = "units that were drawn, each once"
BOUND = "contributions within the bound"
# name -> (what to plant, or what to exchange, a test that finds it, settings)
PLANTED = {
    "noise state not advanced": (with_noise(kind=Stale), "noise of different steps", {}),
    "user's records clipped one by one": (in_shape((-1, 1)), SUMS, {}),
    "norms 100 times too small": (norms_too_small, SUMS, {}),
    "key of zeros": (with_noise(kind=Known), "noise under another secret", {}),
    "drawn batch as normalizer": (
        normalized_by_the_batch_drawn,
        "size of the noise over the steps",
        {"mechanism": SAMPLED},
    ),
    "one draw for all coordinates": (
        with_noise(kind=Shared), "noise of different coordinates", {}
    ),
    "noise of the step before": (with_noise(kind=Late), "size of the noise over the steps", {}),
    "noise divided by the normalizer twice": (
        lambda execution: with_noise(1 / execution.normalizer)(execution), NOISE, {}
    ),
    "C replaced by the identity": (with_noise(kind=Independent), NOISE, {}),
    "noise restarted after an epoch": (
        with_noise(kind=Restarted), "size of the noise over the steps", {}
    ),
    "noise multiplier 1% low": (with_noise(0.99), NOISE, {}),
    "noise multiplier 1% high": (with_noise(1.01), NOISE, {}),
    "noise multiplier 10% low": (with_noise(0.9), NOISE, {}),
    "uniform noise": (with_noise(kind=Uniform), "law of the noise", {"mechanism": SAMPLED}),
    "no noise in the adapter": (
        with_noise(kind=NotEverywhere), "size of the noise over the arrays", {}
    ),
    "one draw for two arrays": (with_noise(kind=Twice), "noise of different arrays", {}),
    "noise added after the optimizer": (
        added_after_the_optimizer, "parameters move by the release alone", {}
    ),
    "microbatch clipped as a whole": (in_shape((1, -1)), SUMS, {}),
    "first microbatch not clipped": (
        unclipped_where(lambda totals, mask: totals.statistics.units == 0), SUMS, {}
    ),
    "embedding left out of the norm": (not_counted("embedding"), SUMS, {}),
    "adapter left out of the norm": (not_counted("adapter"), SUMS, {}),
    "matrix not scaled": (not_scaled("matrix"), "sums in the noise", {}),
    "bound 1% too large": (bound_too_large, BOUND, {}),
    "margin for rounding left out": (rounding_forgotten, BOUND, {"microbatch": 1}),
    "another cipher": (another_cipher, "draws under a published key", {}),
    "a unit added twice": (kept(lambda drawn: np.append(drawn, drawn[:1])), UNITS, {}),
    "batch cut unsaid": (kept(lambda drawn: drawn[:-1]), UNITS, {}),
    "a record of the neighbour": (a_record_of_the_neighbour, SUMS, {}),
    "sums divided by the batch drawn": (
        sums_divided_by_the_batch_drawn, CHANGE, {"mechanism": SAMPLED}
    ),
    "G + 1 records kept": (a_record_more, "units of a user, at most as accounted", ELS),
    "users with few records not clipped": (
        unclipped_where(lambda _, mask: ~jnp.any(mask, axis=-1).all()), CHANGE, {"microbatch": 1}
    ),
    "users with padding not clipped": (
        unclipped_where(lambda _, mask: ~mask.all()), CHANGE, {"microbatch": 1}
    ),
    "what is not finite contributes": (what_is_not_finite_contributes, CHANGE, {}),
    "noise in bfloat16": (with_noise(kind=Bfloat16), "noise on a lattice", {}),
    "noise in thousandths of σ": (with_noise(kind=Coarse), "noise on a lattice", {}),
    "fewer local epochs": (altered(local_epochs=1), SUMS, AVERAGED),
    "users not weighted by their records": (altered(weight_cap=0), SUMS, AVERAGED),
    "users weighted twice": (users_weighted_twice, BOUND, AVERAGED),
    "updates not clipped": (updates_not_clipped, BOUND, AVERAGED),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("name", before_release(list(PLANTED), 0, 1))
def test_planted_bugs_are_found(name, monkeypatch):
    plant, finding, options = PLANTED[name]
    if plant.__code__.co_varnames[0] == "patch":
        plant(monkeypatch)
        actual = findings(**options)
    else:
        actual = findings(alter=plant, **options)
    assert finding in faults(actual)


RIGHT = [
    {"mechanism": SAMPLED},
    {"microbatch": 1, "clip_norm": 0.3, "normalized": False},
    {**ELS, "privacy_unit": "record"},
    AVERAGED,
]


@pytest.mark.parametrize("options", before_release(RIGHT, 0))
def test_a_correct_trainer_has_none(options):
    actual = findings(**options)
    assert not faults(actual) and len(actual) == 19


@pytest.mark.ci
def test_no_false_alarms():
    """No finding in 100 audits of participations and noise as they should be.

    Chances are those of at least as large a deviation, or bounds on them: uniform, or larger.
    """
    rng = np.random.default_rng(5)
    arrays, chances = [slice(0, 80), slice(80, 140), slice(140, 150)], []
    for audit in range(100):
        white, other = rng.normal(size=(8, 150)), rng.normal(size=150)
        signal = rng.normal(size=(8, 150)).cumsum(axis=0)
        comparison = executed.compare_noise(white, arrays, other)
        comparison.append(executed.compare_signal(white, signal, arrays))
        if audit % 20 == 0:
            first, *twins = (
                executed.participations_of(sampler(400, audit + number)) for number in range(3)
            )
            comparison += executed.compare(BINS, first, twins, rng)
        assert not faults(comparison)
        chances.append([finding.chance for finding in comparison[:9]])
    low = np.mean(np.array(chances) < 0.05, axis=0)
    assert np.all(low <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 100))
    assert np.mean(low) > 0.02  # control: not so large that nothing would be found


@pytest.mark.release
def test_the_command_fails_where_a_bug_is_found(tmp_path, monkeypatch):
    path = solved(ORDERED, 3.0, 1e-6).save(tmp_path / "one.npz")
    bound_too_large(monkeypatch)
    code, _, err = run("audit", path, "--canaries", 100, "--seed", 1, "--quiet")
    assert code == 1 and err.startswith("mfopt: audit failed")
    assert "contributions within the bound" in err


@pytest.mark.release
def test_no_false_alarms_of_whole_runs():
    """Nor in 400 runs of a trainer, each under its own secret: sums, clipping, batches and all."""
    for seed in range(400):
        assert not faults(findings(seed=seed, **RIGHT[seed % len(RIGHT)])), seed


def test_what_is_no_number_is_a_fault():
    rng = np.random.default_rng(6)
    white, other = rng.normal(size=(4, 30)), np.full(30, np.nan)
    assert "noise under another secret" in faults(
        executed.compare_noise(white, [slice(0, 30)], other)
    )
    lost = executed.compare_signal(white, np.full((4, 30), np.nan), [slice(0, 30)])
    assert faults([lost]) and not lost.deviation < 4


# --- who takes part ------------------------------------------------------------------------

BINS, FRESH = sampling.BallsInBins(bins=16, epochs=3), sampling.FreshBins(16, 3)


class Wrong(sampling.UnitSampler):
    """Draws by ``rule(sampler, seed, step)`` and says that it executes the scheme."""

    def __init__(self, right, rule, seed):
        super().__init__(right.scheme, right.population, seed)
        self._draw = lambda step: rule(right, seed, step)


def by_number(right, seed, step):
    return np.flatnonzero(np.arange(right.population) % 16 == step % 16)


def shifted(right, seed, step):
    return np.flatnonzero((np.arange(right.population) + seed) % 16 == step % 16)


def one_seed(right, seed, step):
    return right.scheme.sample(step, right.population, 5)


def in_rounds(limit):
    """Bins drawn by numpy, in every round of 16 steps, of ``most`` of them."""

    def rule(right, seed, step):
        rng = np.random.default_rng([seed % 2**32, step // 16])
        return np.flatnonzero(rng.integers(0, limit, right.population) == step % 16)

    return rule


def coins(right, seed, step):
    rng = np.random.default_rng([seed % 2**32, step])
    return np.flatnonzero(rng.random(right.population) < 1 / 16)


def some_stay(right, seed, step):
    stay = np.arange(right.population) % 20 == 7
    drawn = right.scheme.sample(step, right.population, seed)
    variants = drawn[~stay[drawn]]
    return np.union1d(variants, np.flatnonzero(stay)) if step % 16 == 0 else variants


def bins_stay(right, seed, step):
    return BINS.sample(step, right.population, seed)


def sampler(units, seed, scheme=BINS):
    return sampling.UnitSampler(scheme, units, seed)


def compared(scheme, rule=None, units=1600, first=1):
    """Faults of a run and eight twins, all drawn by the rule, or by the scheme."""
    right = {seed: sampler(units, seed, scheme) for seed in range(first, first + 9)}
    drawn = right.values() if rule is None else [Wrong(x, rule, k) for k, x in right.items()]
    participated = [executed.participations_of(entry) for entry in drawn]
    return faults(
        executed.compare(scheme, participated[0], participated[1:], np.random.default_rng(3))
    )


@pytest.mark.parametrize(
    ("scheme", "rule", "finding"),
    before_release(
        [
            (BINS, some_stay, "participations follow another secret"),
            (BINS, by_number, "participations follow another secret"),
            (BINS, shifted, "participations of neighbouring units"),
            (BINS, one_seed, "participations follow another secret"),
            (BINS, in_rounds(16), "gaps between participations"),
            (BINS, in_rounds(8), "batch sizes"),
            (BINS, coins, "number of participations"),
            (FRESH, bins_stay, "gaps between participations"),
        ],
        0,
    ),
)
def test_a_sampler_that_is_not_the_scheme_is_found(scheme, rule, finding):
    assert finding in compared(scheme, rule)


@pytest.mark.parametrize(
    "scheme",
    before_release(
        [
            sampling.Poisson(0.1, 30),
            sampling.CyclicPoisson(0.4, 4, 8),
            sampling.FixedOrder(8, 3),
            sampling.FreshBins(8, 6, 2),
            sampling.BMinSep(8, 3, 4),
            sampling.FixedBatch(50, 800, 20),
        ],
        2,
    ),
    ids=lambda scheme: scheme.kind,
)
def test_a_sampler_that_is_the_scheme_is_not(scheme):
    for first in (0, 100):
        assert not compared(scheme, units=800, first=first)
