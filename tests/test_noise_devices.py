"""The same noise on 1 and on 8 devices, in one and in two processes, without communication."""

import json
import textwrap

import pytest
from processes import finish, free_port, start, with_devices

COMMON = """
    import json, os, sys
    os.environ["JAX_PLATFORMS"] = "cpu"
    import warnings; warnings.simplefilter("error")
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from mfopt import strategies as S
    from mfopt.noise import NoiseStream, load_state, save_state

    N = 4
    # e has rows long enough to be packed, b has not
    SHAPES = {"a": (16, 3), "b": (8, 16), "c": (5,), "d": (), "e": (6, 4, 512)}
    STRATEGIES = [
        S.Identity(),
        S.BandedToeplitz(np.array([1, 0.5, 0.25, 0.1])),
        S.BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9])),
        S.SquareRoot(),
        S.BandedInverseSquareRoot(3),
        S.Tree(),
    ]

    def stream(strategy, past="auto"):
        return NoiseStream(strategy, iterations=N, noise_multiplier=1.0, clip_norm=1.0, past=past)

    def spread(mesh, specs):
        return {
            k: jax.make_array_from_callback(
                shape, NamedSharding(mesh, specs[k]),
                lambda index, shape=shape: np.zeros(shape, np.float32)[index])
            for k, shape in SHAPES.items()
        }

    def alone():
        return {k: jnp.zeros(shape) for k, shape in SHAPES.items()}

    def compare(noise, expected, params):
        for k, part in noise.items():
            assert part.sharding.is_equivalent_to(params[k].sharding, part.ndim), part.sharding
            for shard in part.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(expected[k])[shard.index])

    COLLECTIVES = ["all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"]

    def no_communication(made, state):
        text = made.compile_step(state).as_text()
        assert not [c for c in COLLECTIVES if c in text]
"""

EIGHT_DEVICES = """
    assert len(jax.devices()) == 8
    # control: the search for collectives finds one where there is one
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    moved = jax.jit(lambda v: v, out_shardings=NamedSharding(mesh, P()))
    split = jax.device_put(np.zeros(16), NamedSharding(mesh, P("x")))
    text = moved.lower(split).compile().as_text()
    assert any(c in text for c in COLLECTIVES)

    done = 0
    for grid, kind in [((8,), AxisType.Auto), ((2, 4), AxisType.Explicit)]:
        names = ("x", "y")[: len(grid)]
        mesh = jax.make_mesh(grid, names, axis_types=(kind,) * len(names))
        second = P(None, "x") if len(names) == 1 else P(*names)
        last = P(None, None, "x") if len(names) == 1 else P("x", "y")
        specs = {"a": P("x"), "b": second, "c": P(), "d": P(), "e": last}
        params = spread(mesh, specs)
        for strategy in STRATEGIES if kind == AxisType.Auto else STRATEGIES[1:4]:
            for past in ("auto", "store") if strategy.kind == "sqrt" else ("auto",):
                made = stream(strategy, past)
                one, many = made.init(alone(), seed=3), made.init(params, seed=3)
                for _ in range(N):
                    expected, one = made.next(one)
                    noise, many = made.next(many)
                    compare(noise, expected, params)
                whole = sum(b.size for b in many.buffers if b is not None)
                for buffer in many.buffers:
                    if buffer is not None:  # no device holds a part that it does not own
                        sizes = {s.data.size for s in buffer.addressable_shards}
                        assert sizes == {buffer.size // 8}, sizes
                assert whole <= 1.1 * made.recursion.slots * (16 * 3 + 8 * 16 + 6 * 4 * 512)
                no_communication(made, many)
                done += 1
    with jax.enable_x64():
        made = NoiseStream(STRATEGIES[2], iterations=N, noise_multiplier=1.0, clip_norm=1.0,
                           secure=True)
        one, many = made.init(alone(), seed=3), made.init(params, seed=3)
        whole, sums = [
            {k: p.astype(np.float64) + 0.25 for k, p in of.items()} for of in (alone(), params)
        ]
        for _ in range(N):
            expected, one = made.release(whole, one)
            noise, many = made.release(sums, many)
            compare(noise, expected, params)

    # a state saved on a grid goes on alone, and the other way round
    made = stream(STRATEGIES[1])
    state = made.next(made.init(params, seed=3))[1]
    save_state(sys.argv[1], made, state)
    expected, _ = made.next(state)
    noise, _ = made.next(load_state(sys.argv[1], made, alone()))
    for k in SHAPES:
        np.testing.assert_array_equal(noise[k], expected[k])
    noise, _ = made.next(load_state(sys.argv[1], made, params))
    compare(noise, expected, params)

    # Orbax saves each device's part, and restores it there
    import importlib.util
    if importlib.util.find_spec("orbax"):
        import orbax.checkpoint as orbax
        with orbax.StandardCheckpointer() as checkpointer:
            many = made.next(made.init(params, seed=3))[1]
            checkpointer.save(sys.argv[1] + ".orbax", many)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(sys.argv[1] + ".orbax", made.init(params, seed=4))
        for kept, before in zip(restored.buffers, many.buffers, strict=True):
            assert kept.sharding.is_equivalent_to(before.sharding, before.ndim)
        compare(made.next(restored)[0], expected, params)
    print(json.dumps({"done": done}))
"""

TWO_PROCESSES = """
    rank, port = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    assert jax.process_count() == 2 and len(jax.devices()) == 4
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    params = spread(mesh, {"a": P("x"), "b": P(None, "x"), "c": P(), "d": P(), "e": P(None, "x")})
    totals = []
    for strategy in STRATEGIES[1:4]:
        made = stream(strategy)
        with jax.default_device(jax.local_devices()[0]):
            one = made.init(alone(), seed=3)
        many = made.init(params, seed=3)
        for _ in range(N):
            expected, one = made.next(one)
            noise, many = made.next(many)
            compare(noise, expected, params)
        no_communication(made, many)
    # a key that is counted: the noise of a step is for one sum, and later steps go on
    state = made.init(params)
    ones = jax.tree.map(lambda x: x + 1, params)
    release = jax.jit(made.release)
    noised, after = release(params, state)
    uses = (params, state), (ones, state), (ones, after)
    again, other, later = (release(*use)[0] for use in uses)
    def local(tree):
        return np.concatenate([s.data.ravel() for x in tree.values() for s in x.addressable_shards])
    np.testing.assert_array_equal(local(again), local(noised))
    assert np.isnan(local(other)).all() and np.isfinite(local(later)).all()
    made.release(ones, after)
    # without a seed, both processes must get one key, and a new one in each run
    keys = [np.asarray(made.init(params).key.addressable_shards[0].data).tolist() for _ in "12"]
    assert keys[0] != keys[1]
    try:
        save_state(sys.argv[3], made, many)
    except ValueError as error:
        assert "several processes" in str(error)
    else:
        raise AssertionError("a state spread over processes was saved")
    import hashlib
    print(json.dumps({"keys": hashlib.sha256(str(keys).encode()).hexdigest()}))
    jax.distributed.shutdown()
"""


def begun(script, devices, *arguments):
    code = textwrap.dedent(COMMON) + textwrap.dedent(script)
    return start("-c", code, *arguments, env=with_devices(devices))


def results(*processes):
    return [json.loads(output.splitlines()[-1]) for output in finish(*processes)]


@pytest.mark.release
def test_eight_devices_make_the_noise_of_one_without_communication(tmp_path):
    assert results(begun(EIGHT_DEVICES, 8, tmp_path / "state.npz")) == [{"done": 7 + 4}]


@pytest.mark.release
def test_two_processes_make_the_noise_of_one(tmp_path):
    port = free_port()
    pair = [begun(TWO_PROCESSES, 2, rank, port, tmp_path / "state.npz") for rank in range(2)]
    first, second = results(*pair)
    assert first["keys"] == second["keys"]
