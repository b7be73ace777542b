"""The benchmark of schedules: gradients that are clipped by hand are those that JAX would clip."""

import bench_schedules as bench
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.release
def test_clipped_sums_are_those_of_each_image_s_own_gradient():
    rng = np.random.default_rng(0)
    size = sum(int(np.prod(shape)) for shape in bench.SHAPES.values())
    models = bench.cut(rng.normal(size=(2, size)) / 4)
    x, y = rng.uniform(size=(5, 64)).astype(np.float32), np.array([0, 3, 9, 3, 1])
    real = np.array([1, 1, 0, 1, 1], np.float32)  # the third place is empty

    def loss(params, x, y):
        each = jax.tree.map(lambda leaf: leaf[None], params)
        found = bench.logits(each, bench.hidden(each, x[None]))[0, 0]
        return -jax.nn.log_softmax(found)[y]

    got = bench.clipped(models, x, y, real)
    for number in range(2):
        one = jax.tree.map(lambda leaf, number=number: jnp.asarray(leaf[number]), models)
        total = jax.tree.map(jnp.zeros_like, one)
        norms = []
        for image, label, counts in zip(x, y, real, strict=True):
            gradient = jax.grad(loss)(one, image, label)
            norms.append(float(jnp.sqrt(sum(jnp.sum(g**2) for g in gradient.values()))))
            factor = counts / max(1.0, norms[-1])
            total = jax.tree.map(lambda t, g, f=factor: t + f * g, total, gradient)
        assert max(norms) > 1  # the bound is met
        for name in total:
            np.testing.assert_allclose(got[name][number], total[name], rtol=2e-4, atol=2e-5)


def test_a_schedule_stays_and_falls():
    cooldown = bench.schedule(bench.SHARES["cooldown"])
    np.testing.assert_array_equal(cooldown[: bench.N // 2], 1)
    assert cooldown[-1] == 2 / bench.N and np.all(np.diff(cooldown) <= 0)
    assert np.ptp(bench.schedule(0.0)) == 0 and bench.schedule(1.0)[-1] == 1 / bench.N
