"""Programs that commands compile lower for GPUs and TPUs, although none is at hand here."""

import functools
import json
import sys

import pytest
from processes import python

PLATFORMS = ("cuda", "tpu")
CPU_ONLY = {}  # program -> why only a CPU runs it; there is none

OPTIMIZE = """
import mfopt
made = mfopt.factorize(epochs=2, iterations_per_epoch=4, epsilon=4.0, delta=1e-3, seed=0)
"""
CERTIFY = OPTIMIZE + "mfopt.certify(made, effort=mfopt.accounting.Effort(seed=1))\n"
NOISE = """
import jax, jax.numpy as jnp, numpy as np
from mfopt import strategies
from mfopt.noise import NoiseStream
params = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
coefs = np.array([1.0, 0.4, 0.2, 0.1])
for strategy, past in [
    (strategies.Identity(), "auto"),
    (strategies.BLT(np.array([0.3]), np.array([0.9])), "auto"),
    (strategies.BandedToeplitz(coefs[:2]), "auto"),
    (strategies.Toeplitz(coefs), "regenerate"),
    (strategies.Toeplitz(coefs), "store"),
    (strategies.Tree(), "auto"),
]:
    stream = NoiseStream(strategy, iterations=4, noise_multiplier=1.0, clip_norm=1.0, past=past)
    stream.next(stream.init(params))
"""
SECURE = """
import jax, jax.numpy as jnp, numpy as np
from mfopt import strategies
from mfopt.noise import NoiseStream
with jax.enable_x64(True):
    strategy = strategies.BLT(np.array([0.3]), np.array([0.9]))
    stream = NoiseStream(
        strategy, iterations=4, noise_multiplier=1.0, clip_norm=1.0, secure=True
    )
    params = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    stream.release(params, stream.init(params))
"""
RUN = """
import jax, jax.numpy as jnp
import mfopt
from mfopt.jax import PrivateRun
from mfopt.noise import uses
# a call to the host lowers only where its device is
uses.permitted = lambda key, step, digest: jnp.isfinite(digest[0])
made = mfopt.factorize(epochs=1, iterations_per_epoch=4, epsilon=8.0, strategy="identity")
run = PrivateRun(made, population=12, clip_norm=1.0, microbatch=2)
x, params = jnp.ones((12, 3)), {"w": jnp.zeros(3)}
state = run.init(params)
gradient = jax.grad(lambda params, x: (x @ params["w"] - 1) ** 2)
step = jax.jit(lambda state, batch: run.gradient(gradient, params, x, batch, state))
step(state, run.batches(state)[0])
"""
TRAIN = """
import pathlib, sys, tempfile
sys.path.insert(0, "tests")
from test_train_run import POISSON, SMALL
from train_fixtures import synthetic_store
from train_oracles import write_store
from mfopt.training.config import TrainConfig
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare
folder = pathlib.Path(tempfile.mkdtemp())
write_store(synthetic_store(num_users=20, empty_users=(3,)), folder / "data" / "train")
write_store(synthetic_store(num_users=5, seed=1), folder / "data" / "held-out-users")
write_store(synthetic_store(num_users=9, seed=2, public=True), folder / "data" / "public")
places = {"data": str(folder / "data"), "output": str(folder / "run")}
execute(prepare(TrainConfig(**{**SMALL, **POISSON, **places})))
"""
PROGRAMS = {
    "optimize and certify": CERTIFY,
    "train": TRAIN,
    "noise": NOISE,
    "secure": SECURE,
    "run": RUN,
}


def lowered(code):
    """name -> error, or "" where it lowers for all of :data:`PLATFORMS`, of what ``code`` runs."""
    import jax
    import jax.export

    plain, collected, recorded = jax.jit, {}, set()

    def note(built, args, keywords):
        leaves = jax.tree.leaves((args, keywords))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return  # a part of a program that is seen as a whole
        shapes = [
            (str(getattr(leaf, "dtype", leaf)), getattr(leaf, "shape", "")) for leaf in leaves
        ]
        key = (id(built), str(shapes))
        if key in recorded:
            return
        recorded.add(key)
        name = f"{built.__module__}.{built.__qualname__}"
        try:
            jax.export.export(built, platforms=PLATFORMS)(*args, **keywords)
            collected.setdefault(name, "")
        except Exception as error:
            collected[name] = f"{type(error).__name__}: {error}"

    def jit(function=None, **options):
        if function is None:
            return functools.partial(jit, **options)
        compiled = plain(function, **options)

        @functools.wraps(function)
        def call(*args, **keywords):
            note(compiled, args, keywords)
            return compiled(*args, **keywords)

        def lower(*args, **keywords):
            note(compiled, args, keywords)
            return compiled.lower(*args, **keywords)

        call.lower, call.trace, call.eval_shape = lower, compiled.trace, compiled.eval_shape
        call.clear_cache = compiled.clear_cache
        return call

    jax.jit = jit
    exec(compile(code, "program", "exec"), {"__name__": "program"})
    return collected


@pytest.mark.release
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_lowers_for_accelerators(name):
    parsed = json.loads(python(__file__, name).splitlines()[-1])
    assert len(parsed) >= 1
    faults = {program: error for program, error in parsed.items() if error}
    assert set(faults) <= CPU_ONLY.keys(), faults


if __name__ == "__main__":
    print(json.dumps(lowered(PROGRAMS[sys.argv[1]])))
