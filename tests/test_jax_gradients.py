"""Gradients of one example in a private run of JAX: which functions are refused, and their sums."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_batching import custom_vmap
from statements import stated

from mfopt.errors import UsageError
from mfopt.jax import PrivateRun, program
from mfopt.noise import from_factorization, ledger, owner_only
from mfopt.noise.for_optax import add_noise
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT

RECORDS, CLIP, LENGTH, WIDTH = 12, 0.5, 3, 4
FACTORIZATION = stated(
    BLT([0.3, 0.1], [0.5, 0.9]),
    BallsInBins(bins=2, epochs=3),
    1.0,
    status="certified",
)
RUN = PrivateRun(FACTORIZATION, RECORDS, CLIP, allow_uncertified=True)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(RECORDS, LENGTH, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 3, RECORDS))
KEYS = jax.random.split(jax.random.key(1), RECORDS)
PARAMS = {
    "in": jnp.asarray(RNG.normal(size=(WIDTH, 8)), jnp.float32),
    "bias": jnp.zeros(8),
    "out": jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32),
}


def logits(params, x, scale=1.0):
    hidden = jax.nn.relu(scale * x @ params["in"] + params["bias"])
    return hidden.mean(0) @ params["out"]


def loss(params, example):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, example[0]), example[1])


# --- the sum of products is that of gradients ------------------------------------------------


def tied(params, example):
    hidden = example[0] @ params["in"]
    return jnp.sum(jnp.square(hidden @ params["in"].T - example[0]))


def attention(params, example):
    heads = jnp.einsum("td,dhk->htk", example[0], params["in"].reshape(WIDTH, 2, 4))
    weights = jax.nn.softmax(jnp.einsum("htk,hsk->hts", heads, heads))
    return jnp.sum(
        jnp.einsum("hts,hsk,hkd->td", weights, heads, params["out"].reshape(2, 4, 3)) ** 2
    )


def layers(params, example):
    def layer(x, _):
        return jnp.tanh(x @ params["in"] @ params["in"].T), None

    return jnp.sum(jax.lax.scan(layer, example[0], None, length=2)[0]) + loss(params, example)


def narrow(params, example):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return loss(params, (example[0].astype(jnp.bfloat16), example[1])).astype(jnp.float32)


def unlike(params, example):
    """Small activations with large gradients: squares of both are beyond float32."""
    return 1e11 * jnp.sum(1e11 * ((1e-22 * example[0][:1]) @ params["in"]))


FUNCTIONS = {
    "plain": jax.grad(loss),
    "compiled": jax.jit(jax.grad(loss)),
    "recomputed": jax.grad(jax.checkpoint(loss)),
    "one position": jax.grad(lambda p, e: loss(p, (e[0][:1], e[1]))),
    "tied": jax.grad(tied),
    "attention": jax.grad(attention),
    "layers": jax.grad(layers),
    "narrow": jax.grad(narrow),
    "unlike": jax.grad(unlike),
    "infinite": jax.grad(lambda p, e: jnp.where(e[1] == 0, jnp.inf, 1.0) * loss(p, e)),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_clipped_sum_is_that_of_gradients_one_by_one(name):
    function = FUNCTIONS[name]
    state = RUN.init(PARAMS, seed=3)
    batch = RUN.batches(state)[0]
    entry = jax.vmap(function, (None, 0))(PARAMS, (X[batch.units], Y[batch.units]))
    norms = np.sqrt(
        sum(np.square(np.float64(g)).reshape(len(g), -1).sum(1) for g in entry.values())
    )
    assert (norms[batch.mask] > CLIP).any()
    actual, _ = jax.jit(lambda s: RUN.gradient(function, PARAMS, (X, Y), batch, s))(state)
    expected, _ = RUN.mean(entry, batch, state)
    tolerance = 5e-2 if name == "narrow" else 1e-5
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, atol=tolerance), actual, expected)


def test_products_are_never_formed_for_each_example():
    """The largest array of the compiled step is smaller than the gradients of a batch."""
    wide = {"w": jnp.ones((300, 200))}
    x = jnp.ones((RECORDS, 300))
    state = RUN.init(wide, seed=3)
    batch = RUN.batches(state)[0]

    def step(function):
        return jax.jit(lambda s: RUN.gradient(function, wide, x, batch, s)[0]).lower(state)

    def dense(params, example):
        return jax.tree.map(lambda g: g + 0.0 * g, jax.grad(square)(params, example))

    def square(params, example):
        return jnp.sum(jnp.square(example @ params["w"]))

    formed = f"tensor<{len(batch.units)}x300x200xf32>"
    assert formed not in step(jax.grad(square)).as_text()
    assert formed in step(dense).as_text()  # control


# --- right loops ---------------------------------------------------------------------------------


def run_steps(step):
    """Means of three unpinned steps of ``step(params, state, batch, t)``, under jit."""
    state = RUN.init(PARAMS)
    means = []
    for t, batch in enumerate(list(RUN.batches(state))[:3]):
        mean, state = step(PARAMS, state, batch, t)
        means.append(mean)
    return means


def gradient(function, public=None, data=(X, Y)):
    """A step of :func:`run_steps` by ``function(t)`` of the step's number, and what is public."""

    @jax.jit
    def step(params, state, batch, t):
        arguments = None if public is None else public(t)
        return RUN.gradient(function(t), params, data, batch, state, public=arguments)

    return step


BASE = jnp.asarray(RNG.normal(size=(WIDTH, 8)), jnp.float32)
with_base = jax.grad(lambda p, e: loss({**p, "in": p["in"] + BASE}, e))
dropped = jax.grad(lambda p, e: loss(p, (e[0] * jax.random.bernoulli(e[2], 0.5, (WIDTH,)), e[1])))


def dropped_by_step(t):
    def item(params, example):
        mask = jax.random.bernoulli(jax.random.fold_in(example[2], t), 0.5, (WIDTH,))
        return loss(params, (example[0] * mask, example[1]))

    return jax.grad(item)


def nearby(params, example, teacher):
    x = example[0]
    return jnp.sum(jnp.square(logits(params, x) - logits(teacher, x)))


RIGHT = {
    "a frozen base": gradient(lambda t: with_base),
    "a mask for each example": gradient(lambda t: dropped, data=(X, Y, KEYS)),
    "masks that change by step": gradient(dropped_by_step, data=(X, Y, KEYS)),
    "a temperature that changes": gradient(
        lambda t: jax.grad(lambda p, e: jnp.sum(logits(p, e[0], 1.0 / (1.0 + t))))
    ),
    "a teacher that is public": gradient(
        lambda t: jax.grad(nearby), lambda t: jax.tree.map(lambda leaf: leaf * (1 + t), PARAMS)
    ),
    "prints for debugging": gradient(
        lambda t: jax.grad(lambda p, e: (jax.debug.callback(lambda _: None, e[1]), loss(p, e))[1])
    ),
    "no compilation": lambda p, s, b, t: RUN.gradient(jax.grad(loss), p, (X, Y), b, s),
    "a donated state": jax.jit(
        lambda p, s, b, t: RUN.gradient(jax.grad(loss), p, (X, Y), b, s), donate_argnums=1
    ),
    "gradients of ones own": jax.jit(
        lambda p, s, b, t: RUN.mean(
            jax.vmap(jax.grad(loss), (None, 0))(p, (X[b.units], Y[b.units])), b, s
        )
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_goes_on(name):
    for mean in run_steps(RIGHT[name]):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mean))


# --- wrong loops ---------------------------------------------------------------------------------

STREAM = from_factorization(FACTORIZATION, clip_norm=CLIP)
ONES = jax.tree.map(jnp.ones_like, PARAMS)
release = jax.jit(STREAM.release)


@custom_vmap
def centred(x):
    return x


centred.def_vmap(lambda size, batched, x: (x - x.mean(0), True))


def remembered(x):
    """A host function that adds what it saw before."""
    memory.append(np.asarray(x))
    return memory[-2] if len(memory) > 1 else memory[-1]


memory = []


def by_host(call):
    like = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32)

    def item(params, example):
        return loss(params, (call(remembered, like, example[0], vmap_method="sequential"), 0))

    return jax.grad(item)


def to_centres(t):
    centres = BASE[:3] + t  # as moved by the batches before
    return jax.grad(lambda p, e: loss(p, e) + jnp.sum(jnp.square(e[0].sum() - centres[e[1]])))


def with_labels_of_others(t):
    labels = (Y[:5] + t) % 3  # whole numbers, of another batch in each step
    return jax.grad(lambda p, e: loss(p, e) + sum(loss(p, (e[0], label)) for label in labels))


def labels_on_the_host(params, state, batch, t):
    return RUN.gradient(with_labels_of_others(np.int32(t)), params, (X, Y), batch, state)


def of_all_examples(t):
    total = jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0))(p, (X, Y))))
    return lambda params, example: total(params)


def nnx_model(layer, call, move=None):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.out = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))
            self.layer = layer(nnx)

    model = Model()
    state = RUN.init(nnx.state(model, nnx.Param))
    means = []
    for batch in list(RUN.batches(state))[:2]:
        function = nnx.grad(lambda m, e: jnp.sum(jnp.square(call(m, m.out(e[0])))))
        mean, state = RUN.gradient(function, model, (X, Y), batch, state)
        means.append(mean)
        if move:
            move(model)
    return means[1:]


def normed(nnx, trained=True):
    return nnx.BatchNorm(3, use_running_average=not trained, rngs=nnx.Rngs(2))


def statistics_moved_between_steps():
    def move(model):
        model.layer.mean[...] += 1.0

    nnx_model(lambda nnx: normed(nnx, False), lambda m, x: m.layer(x), move)


def a_stream_of_keys_from_outside():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(4)
    nnx_model(lambda nnx: nnx.Dropout(0.5), lambda m, x: m.layer(x, rngs=rngs))


def taken_back():
    """The noise of step 0 for a second sum."""
    state = STREAM.init(PARAMS)
    release(PARAMS, state)
    return [release(ONES, state)[0]]


def not_carried(state):
    """A scan whose steps share a state."""

    def item(scale, _):
        return scale + 1, STREAM.release(jax.tree.map(lambda x: scale * x, ONES), state)[0]

    noised = jax.lax.scan(item, 1.0, None, length=2)[1]
    return [jax.tree.map(lambda leaf: leaf[1], noised)]


def reset_by_a_condition():
    def step(state, scale):
        noised, next_state = STREAM.release(jax.tree.map(lambda x: scale * x, ONES), state)
        return jax.tree.map(lambda b, a: jnp.where(scale < 2, b, a), state, next_state), noised

    _, noised = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(3.0)))(STREAM.init(PARAMS))
    return [jax.tree.map(lambda leaf: leaf[1], noised)]


def a_key_in_two_optimizers():
    key = np.arange(8, dtype=np.uint32) + os.getpid()
    for sums in (PARAMS, ONES):
        optimizer = add_noise(STREAM, key=key)
        changes, _ = jax.jit(optimizer.update)(sums, optimizer.init(PARAMS))
    return [changes]


def written_by(save):
    def wrong():
        orbax = pytest.importorskip("orbax.checkpoint")
        save(orbax, Path("checkpoint").absolute())

    return wrong


def an_nnx_optimizer(orbax, path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, add_noise(STREAM), wrt=nnx.Param)
    orbax.StandardCheckpointer().save(path, nnx.state(optimizer))


def leaves_of_a_state(orbax, path):
    leaves = enumerate(jax.tree.leaves(STREAM.init(PARAMS)))
    orbax.StandardCheckpointer().save(path, {str(i): leaf for i, leaf in leaves})


def an_older_checkpoint():
    orbax = pytest.importorskip("orbax.checkpoint")
    state, path = STREAM.init(PARAMS), Path("older").absolute()
    with owner_only(), orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        release(PARAMS, state)
        return [release(ONES, checkpointer.restore(path, STREAM.init(PARAMS)))[0]]


def a_copy_of_the_process():
    kept = ledger.begin(np.arange(8, dtype=np.uint32) + 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UsageError, match="copy of the process"):
            kept.store(Path("copy.ledger"))
        kept.release(0, b"0")


WRONG = {
    "a host function that remembers": (
        lambda: run_steps(gradient(lambda t: by_host(jax.pure_callback))),
        "uses pure_callback",
    ),
    "a batching rule of its own": (
        lambda: run_steps(gradient(lambda t: jax.grad(lambda p, e: loss(p, (centred(e[0]), 0))))),
        "uses custom_vmap_call",
    ),
    "the gradient of all examples": (
        lambda: run_steps(gradient(of_all_examples)),
        "as large as the data",
    ),
    "labels of others": (lambda: run_steps(labels_on_the_host), "arrays beside parameters"),
    "centres in a compiled step": (lambda: run_steps(gradient(to_centres))[1:], None),
    "dropout": (
        lambda: nnx_model(
            lambda nnx: nnx.Dropout(0.5, rngs=nnx.Rngs(1)), lambda m, x: m.layer(x[None])
        ),
        "changes parameters.*a key for each example",
    ),
    "batch norm": (lambda: nnx_model(normed, lambda m, x: m.layer(x)), "changes parameters"),
    "statistics moved between steps": (statistics_moved_between_steps, "arrays beside parameters"),
    "keys from outside": (a_stream_of_keys_from_outside, "a stream of keys"),
    "a state taken back": (taken_back, None),
    "a state that a scan does not carry": (lambda: jax.jit(not_carried)(STREAM.init(PARAMS)), None),
    "a state that a condition resets": (reset_by_a_condition, None),
    "a key in two optimizers": (a_key_in_two_optimizers, None),
    "an older checkpoint of Orbax": (an_older_checkpoint, None),
    "an optimizer of NNX in an open file": (written_by(an_nnx_optimizer), "umask 0022"),
    "leaves of a state in an open file": (written_by(leaves_of_a_state), "umask 0022"),
    "a copy of the process": (a_copy_of_the_process, "copy of the process"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_refused(name, work_folder):
    loop, match = WRONG[name]
    if match is not None:
        with pytest.raises(UsageError, match=match):
            loop()
        return
    means = loop()
    assert means and all(np.isnan(leaf).all() for leaf in jax.tree.leaves(means))


def test_norms_of_products_are_not_too_small_where_terms_cancel(monkeypatch):
    # Σ uᵀv of large terms that nearly cancel: rounding of the double sum exceeds the sum itself
    rng = np.random.default_rng(0)
    u, v = (rng.normal(size=(200, 16, width)) for width in (24, 32))
    u, v = 1e2 * np.concatenate([u, -u], axis=1), np.concatenate([v, v], axis=1)
    v[:, 16:] += 1e-6 * rng.normal(size=(200, 16, 32))
    u, v = np.float32(u), np.float32(v)
    true = np.sum((np.float64(u).swapaxes(1, 2) @ np.float64(v)) ** 2, axis=(1, 2))

    def square(u, v):
        return program.Product(u, v, (), ()).square()

    def actual():
        return np.asarray(jax.vmap(square)(u, v), np.float64)

    assert np.all(actual() >= true)
    monkeypatch.setattr(program, "_SIGMAS", 0.0)
    assert np.sum(actual() < true) > 20  # without the allowance
