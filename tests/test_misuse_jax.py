"""Right and wrong loops with ``PrivateRun`` in JAX: wrong ones are refused, NaN, or harmless."""

import contextlib
import copy
import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from statements import stated

from mfopt import noise
from mfopt.errors import UsageError
from mfopt.jax import PrivateRun
from mfopt.noise import NoiseExhaustedError, ledger
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT

RECORDS, CLIP, SEED = 12, 0.5, 43
SCHEME = BallsInBins(bins=5, epochs=2)  # with this seed of 0, 5, 4, 1 and 2 records
X = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype(np.float32)
Y = np.arange(RECORDS) % 3
PARAMS = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
REFUSED, NANS, HARMLESS = {}, {}, {}


def factorization(sigma=2.0):
    return stated(BLT([0.3, 0.1], [0.5, 0.9]), SCHEME, sigma, status="certified")


def loss(params, example):
    x, y = example
    return -jax.nn.log_softmax(x @ params["w"] + params["b"])[y]


def per_example(params, units):
    return jax.vmap(jax.grad(loss), (None, 0))(
        params, (jnp.asarray(X)[units], jnp.asarray(Y)[units])
    )


def released():
    """The noised mean of each step at ``PARAMS``, from the plain pieces."""
    stream = noise.from_factorization(factorization(), clip_norm=CLIP)
    state, sampler = stream.init(PARAMS, seed=SEED), RUN.sampler(RUN.init(PARAMS, seed=SEED))
    asarray = jax.tree.map(np.asarray, per_example(PARAMS, np.arange(RECORDS)))
    norms = np.sqrt(sum((g.reshape(RECORDS, -1) ** 2).sum(1) for g in asarray.values()))
    for units in sampler:
        drawn, state = stream.next(state)
        total = {
            name: sum((g[u] * min(1, CLIP / norms[u]) for u in units), np.zeros(g.shape[1:]))
            for name, g in asarray.items()
        }
        yield jax.tree.map(lambda s, z: (s + z) / sampler.expected_batch, total, drawn)


@pytest.fixture(scope="module")
def expected():
    return list(released())


RUN = PrivateRun(factorization(), RECORDS, CLIP, allow_uncertified=True)
PARTS = PrivateRun(factorization(), RECORDS, CLIP, microbatch=2, allow_uncertified=True)


@jax.jit
def step(state, batch, scale=1.0):  # 'scale': before the run sees the gradients
    entry = jax.tree.map(lambda g: scale * g, per_example(PARAMS, batch.units))
    return RUN.mean(entry, batch, state)


add = jax.jit(lambda state, part: PARTS.add(per_example(PARAMS, part.units), part, state))
release = jax.jit(PARTS.release)


class Loop:
    """A pinned run and its batches, some of which are taken."""

    def __init__(self, taken=1, run=RUN, seed=SEED):
        self.state = run.init(PARAMS, seed=seed)
        self.batches = run.batches(self.state)
        for t in range(taken):
            _, self.state = step(self.state, self.batches[t])

    def go(self, batches, **options):
        means = []
        for batch in batches:
            mean, self.state = step(self.state, batch, **options)
            means.append(mean)
        return means


def close(actual, required):
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, atol=2e-6), actual, dict(required))


def refused(match, error=UsageError):
    """A loop that must raise ``error`` with a text like ``match``."""
    return lambda loop: REFUSED.setdefault(loop.__name__, (loop, error, match))[0]


def nan(loop):
    """A loop that gives only means that are NaN."""
    return NANS.setdefault(loop.__name__, loop)


def harmless(loop):
    """A loop that gives the means of the right one, from step 1 on."""
    return HARMLESS.setdefault(loop.__name__, loop)


# --- batches that are not the step's ---------------------------------------------------------


@nan
def an_empty_batch_is_skipped():
    loop = Loop(taken=0)
    return loop.go([batch for batch in loop.batches if batch.mask.any()])


@nan
def a_batch_of_another_step():
    loop = Loop()
    return loop.go([loop.batches[2], loop.batches[3]])


@nan
def units_of_ones_own():
    loop = Loop()
    units = (loop.batches[1].units + 1) % RECORDS
    return loop.go([dataclasses.replace(loop.batches[1], units=units)])


@nan
def a_mask_of_ones_own():
    loop = Loop()
    return loop.go([dataclasses.replace(loop.batches[1], mask=loop.batches[1].mask | True)])


@nan
def a_batch_renamed_to_the_step():
    loop = Loop()
    return loop.go([dataclasses.replace(loop.batches[2], step=np.int32(1))])


@nan
def the_batches_of_another_run():
    return Loop().go([Loop(taken=0, seed=SEED + 1).batches[1]])


@nan
def a_step_past_the_last():
    loop = Loop(taken=10)
    final = jax.tree.map(lambda leaf: leaf + 0, loop.batches[9])
    return loop.go([dataclasses.replace(final, step=np.int32(10)), final])


@refused("batch = 'tuple'")
def a_tuple_as_a_batch():
    batch = Loop().batches[1]
    RUN.mean(per_example(PARAMS, batch.units), (batch.units, batch.mask), Loop(0).state)


@refused("batch = 'step 2, part 0'.*for step 0, part 0.*an empty one too")
def a_batch_of_another_step_outside_of_jit():
    loop = Loop(taken=0)
    batch = loop.batches[2]
    RUN.mean(per_example(PARAMS, batch.units), batch, loop.state)


@refused("its guarantee no further noise", NoiseExhaustedError)
def a_step_past_the_last_outside_of_jit():
    loop = Loop(taken=10)
    batch = dataclasses.replace(loop.batches[9], step=np.int32(10), tag=None)
    from mfopt.jax.batches import tag_of

    batch = dataclasses.replace(batch, tag=tag_of(batch, loop.state.noise.key))
    RUN.mean(per_example(PARAMS, batch.units), batch, loop.state)


@refused("steps = 10: .*at most 9")
def more_stacked_steps_than_there_are():
    RUN.batches(Loop().state).stacked(10)


@refused("step = 10: this scheme ends after 10")
def stacked_steps_after_the_last():
    RUN.batches(Loop(taken=10).state).stacked()


@refused("drawn outside of jit")
def batches_inside_jit():
    jax.jit(lambda state: RUN.batches(state).stacked(2).units)(Loop(0).state)


@nan
def sums_that_do_not_begin_at_zero():
    loop = Loop()
    loop.state = dataclasses.replace(loop.state, sums=jax.tree.map(jnp.ones_like, PARAMS))
    return loop.go([loop.batches[1]])


# --- microbatches ------------------------------------------------------------------------------


def parts_of(loop, t=0):
    """The microbatches of a step."""
    batch = loop.batches[t]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], batch) for i in range(len(batch.units))]


class InParts(Loop):
    """The same in microbatches, at the first step that has two."""

    def __init__(self):
        super().__init__(taken=0, run=PARTS)
        self.steps = [parts_of(self, t) for t in range(len(self.batches))]
        self.long = next(t for t, parts in enumerate(self.steps) if len(parts) > 1)
        for t in range(self.long):
            for part in self.steps[t]:
                self.state = add(self.state, part)
            _, self.state = release(self.state)
        self.parts = self.steps[self.long]

    def of(self, *parts):
        for part in parts:
            self.state = add(self.state, part)
        mean, self.state = release(self.state)
        return [mean]


@nan
def a_part_is_missing():
    loop = InParts()
    return loop.of(*loop.parts[:-1])


@nan
def a_part_of_the_next_step():
    loop = InParts()
    return loop.of(*loop.parts[:-1], loop.steps[loop.long + 1][-1])


@nan
def one_part_more():
    loop = InParts()
    return loop.of(*loop.parts, loop.steps[loop.long + 1][0])


@nan
def a_step_without_a_batch():
    return InParts().of()


@refused("state = '0 of 1 microbatches of step 0'.*whole batch")
def a_step_without_a_batch_outside_of_jit():
    PARTS.release(PARTS.init(PARAMS))


@refused("must be one microbatch.*Scan over")
def all_parts_at_once():
    loop = InParts()
    batch = loop.batches[loop.long]
    jax.jit(PARTS.mean)(per_example(PARAMS, batch.units[0]), batch, loop.state)


@harmless
def a_file_of_half_a_step():
    loop = InParts()
    PARTS.save("state.npz", add(loop.state, loop.parts[0]))
    loop.state = PARTS.load("state.npz", PARAMS)
    return loop.of(*loop.parts)


# --- gradients ---------------------------------------------------------------------------------


def step_of(change):
    loop = Loop(taken=0)
    RUN.mean(change(per_example(PARAMS, loop.batches[0].units)), loop.batches[0], loop.state)


@refused("gradients = .*must be as the parameters")
def a_sum_that_nobody_clipped():
    step_of(lambda gradients: jax.tree.map(lambda g: g.sum(0), gradients))


@refused("gradients = .*structure of the parameters")
def gradients_in_another_structure():
    step_of(lambda gradients: [gradients["b"], gradients["w"]])


@refused("gradients = 'of whole numbers'")
def gradients_of_whole_numbers():
    step_of(lambda gradients: jax.tree.map(lambda g: g.astype(int), gradients))


@refused(r"data = \[\(11,\), \(12,\)\]: must have 12 rows")
def data_of_another_length():
    loop = Loop(taken=0)
    RUN.gradient(jax.grad(loss), PARAMS, (X[1:], Y), loop.batches[0], loop.state)


@harmless
def rows_of_empty_slots_are_full():
    loop = Loop()
    batch = loop.batches[1]
    assert not batch.mask.all()
    rows = jax.tree.map(
        lambda g: jnp.where(batch.mask.reshape(-1, *[1] * (g.ndim - 1)), g, jnp.inf),
        per_example(PARAMS, batch.units),
    )
    return [RUN.mean(rows, batch, loop.state)[0]]


@refused("changes parameters, a module or a stream of keys")
def parameters_written_in_place():
    def gradient(params, example):
        gradients = jax.grad(loss)(params, example)
        params["b"] = params["b"] + gradients["b"]
        return gradients

    loop = Loop(taken=0)
    RUN.gradient(gradient, PARAMS, (X, Y), loop.batches[0], loop.state)


# --- states ------------------------------------------------------------------------------------


@refused("holds as a constant")
def a_state_that_is_compiled_in():
    loop = Loop(taken=0)
    entry = per_example(PARAMS, loop.batches[0].units)
    jax.jit(lambda batch: RUN.mean(entry, batch, loop.state))(loop.batches[0])


@nan
def a_state_that_an_outer_function_compiles_in():
    loop = Loop()
    kept = jax.jit(lambda batch: step(loop.state, batch)[0])
    return [kept(loop.batches[t]) for t in (2, 3)]


@refused("was used already")
def a_state_twice_outside_of_jit():
    loop = Loop(taken=0)
    batch = loop.batches[0]
    for _ in range(2):
        RUN.mean(per_example(PARAMS, batch.units), batch, loop.state)


class Counted(Loop):
    """A run of unpinned noise at its first batch of two or more, and gradients of other sums."""

    def __init__(self):
        self.state = RUN.init(PARAMS)
        batches = iter(RUN.batches(self.state))
        self.batch = next(batches)
        while self.batch.mask.sum() < 2:
            _, self.state = step(self.state, self.batch)
            self.batch = next(batches)

    def again(self, state, scale=-1.0):
        """The mean of the same batch by another state of the same step."""
        mean, _ = step(self.state, self.batch)
        assert np.isfinite(mean["w"]).all()
        return [step(state, self.batch, scale)[0]]


@nan
def a_state_twice_in_a_compiled_step():
    loop = Counted()
    return loop.again(loop.state)


@nan
def a_copy_of_the_arrays_of_a_state():
    loop = Counted()
    return loop.again(jax.tree.map(jnp.copy, loop.state))


@nan
def a_state_twice_in_one_program():
    loop = Counted()

    @jax.jit
    def pair(state, batch):
        return [step(state, batch, scale)[0] for scale in (1.0, -1.0)]

    means = pair(loop.state, loop.batch)
    right = [np.isfinite(mean["w"]).all() for mean in means]
    assert sum(right) == 1  # of the one that came first
    return [means[right.index(False)]]


@nan
def copies_of_a_state_under_vmap():
    loop = Counted()
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), loop.state)
    models = jax.vmap(lambda state, scale: step(state, loop.batch, scale)[0])
    means = models(states, jnp.array([1.0, -1.0]))
    assert np.isfinite(means["w"][0]).all()
    return [jax.tree.map(lambda leaf: leaf[1], means)]


@refused("state = 'not mapped': is one for 2 sums under vmap")
def models_under_vmap_with_one_state():
    loop = Counted()
    jax.vmap(lambda scale: step(loop.state, loop.batch, scale)[0])(jnp.array([1.0, -1.0]))


@refused("compiled or mapped function holds.*under vmap one for each sum")
def models_under_vmap_with_one_state_outside_of_jit():
    loop = Counted()
    models = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), PARAMS)
    jax.vmap(lambda p: RUN.gradient(jax.grad(loss), p, (X, Y), loop.batch, loop.state)[0])(models)


@refused("clip_norm = 0.1: is set already")
def settings_changed_in_a_run():
    for name in ("clipping", "normalizer", "population", "stream"):
        with contextlib.suppress(UsageError):
            setattr(RUN, name, getattr(RUN, name))
            return
    RUN.stream.clip_norm = 0.1


@nan
def a_run_from_an_older_file():
    loop = Counted()
    RUN.save("state.npz", loop.state)
    return loop.again(RUN.load("state.npz", PARAMS))


@refused("step 0.*was released already, with another sum")
def an_older_state_outside_of_jit():
    stream = noise.from_factorization(factorization(), clip_norm=CLIP)
    state = stream.init(PARAMS)
    noise.save_state("state.npz", stream, state)
    stream.release(PARAMS, state)
    stream.next(noise.load_state("state.npz", stream, PARAMS))


@pytest.mark.ci
def test_a_ledger_outlives_the_process(monkeypatch):
    loop = Counted()
    RUN.save("state.npz", loop.state)
    (path,) = Path("mfopt-keys").absolute().iterdir()
    assert path.stat().st_mode & 0o777 == 0o600

    def in_another_process(is_ended=True):
        if is_ended:  # the first one's lock is on the file that it opened
            shutil.copy(path, "copy")
            os.replace("copy", path)
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "_by_handle", {})
            state = RUN.load("state.npz", PARAMS)
            return np.isfinite(step(state, loop.batch, -1.0)[0]["w"]).all()

    with pytest.raises(UsageError, match="belongs to a run that is alive"):
        in_another_process(is_ended=False)
    step(loop.state, loop.batch)
    lines = map(str.split, path.read_text().splitlines())
    assert [int(x[0]) for x in lines if len(x) == 2] == list(range(loop.batch.step + 1))
    assert not in_another_process()
    path.unlink()
    with pytest.raises(UsageError, match="Copy that file from where the run was made"):
        in_another_process(is_ended=False)
    path.touch(mode=0o600)  # said to be the newest
    assert in_another_process()
    path.unlink()
    path.touch(mode=0o600)
    path.write_text("until 4 before\n")  # of which a power cut took the rest
    monkeypatch.setattr(ledger, "_by_handle", {})
    assert RUN.load("state.npz", PARAMS).noise.step == 4


@refused("belongs to another factorization")
def the_state_of_another_factorization():
    other = PrivateRun(factorization(3.0), RECORDS, CLIP)
    step(other.init(PARAMS), Loop(taken=0).batches[0])


@refused("the guarantee of such a run is none: seed pinned.*allow_uncertified=True")
def a_pinned_seed():
    PrivateRun(factorization(), RECORDS, CLIP).init(PARAMS, seed=SEED)


@refused("factorization = 'an estimate'.*none: not certified")
def an_estimate():
    PrivateRun(stated(factorization().strategy, SCHEME), RECORDS, CLIP)


@refused("NoiseState = 'a copy': .*show the key.*mode 0600")
def a_state_in_a_pickle():
    pickle.dumps({"params": PARAMS, "run": Loop().state})


@refused("both would add the same noise")
def a_copy_of_a_state():
    copy.deepcopy(Loop().state)


@refused("inside jit would compile one key")
def init_inside_jit():
    jax.jit(RUN.init)(PARAMS)


# -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_wrong_loop_is_refused(name):
    loop, error, match = REFUSED[name]
    with pytest.raises(error, match=f"(?s){match}"):
        loop()


@pytest.mark.parametrize("name", sorted(NANS))
def test_a_wrong_loop_gives_nan(name):
    means = NANS[name]()
    assert means and all(np.isnan(leaf).all() for leaf in jax.tree.leaves(means))


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_wrong_loop_is_harmless(name, expected):
    means = HARMLESS[name]()
    for actual, required in zip(means, expected[1:], strict=False):
        close(actual, required)


def test_the_right_loop_is_right(expected):
    """Control: the means of the plain pieces, and each is finite."""
    loop = Loop(taken=0)
    actual = loop.go(loop.batches)
    assert len(actual) == SCHEME.length and not loop.batches[0].mask.any()
    for mean, required in zip(actual, expected, strict=True):
        close(mean, required)
    with pytest.raises(AssertionError):
        close(actual[1], expected[2])


def test_gradients_count_for_the_clip_norm_at_most():
    """Scaled before the run sees them: one clip norm each, and nothing where that overflows."""
    moved, bound = [], None
    for scale in (0.0, 1e6, np.inf):
        loop = Loop()
        batch = loop.batches[1]
        bound = CLIP * int(batch.mask.sum()) / RUN.normalizer
        moved.append(np.concatenate(jax.tree.leaves(step(loop.state, batch, scale)[0]), None))
    nothing, much, infinite = moved
    assert 0.1 * bound < np.linalg.norm(much - nothing) <= bound * (1 + 1e-5)
    np.testing.assert_array_equal(infinite, nothing)


@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_scan_over_stacked_batches_is_the_loop(microbatch, expected):
    run = PARTS if microbatch else RUN
    state = run.init(PARAMS, seed=SEED)

    def scan_step(state, batch):
        mean, state = run.gradient(jax.grad(loss), PARAMS, (X, Y), batch, state)
        return state, mean

    state, means = jax.lax.scan(scan_step, state, run.batches(state).stacked(6))
    assert int(state.noise.step) == 6
    for t in range(6):
        close(jax.tree.map(lambda leaf, t=t: leaf[t], means), expected[t])


def test_a_saved_run_goes_on(expected):
    loop = Loop(taken=4)
    RUN.save("state.npz", loop.state)
    state = RUN.load("state.npz", PARAMS)
    batches = RUN.batches(state)
    for t, batch in enumerate(batches, 4):
        mean, state = step(state, batch)
        close(mean, expected[t])
    assert t == 9
    fresh = RUN.init(PARAMS)  # with secrets of its own
    units = np.concatenate([batch.units[batch.mask] for batch in RUN.batches(fresh)])
    custom = np.concatenate([batch.units[batch.mask] for batch in loop.batches])
    assert len(units) == 2 * RECORDS and not np.array_equal(units, custom)
    assert "secret" in repr(fresh) and not fresh.noise.pinned
    assert RUN.guarantee(fresh) == factorization().statement()
    assert RUN.guarantee(state) == "none: seed pinned"


@pytest.mark.ci
def test_grain_reads_the_batches(expected):
    grain = pytest.importorskip("grain")
    state = RUN.init(PARAMS, seed=SEED)
    source = grain.MapDataset.source(RUN.batches(state))
    for t, batch in enumerate(source.map(lambda batch: batch)):
        mean, state = step(state, batch)
        close(mean, expected[t])
    assert t == SCHEME.length - 1
