"""Noise inside PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release
from test_strategies import SOME_KINDS, every_strategy

from mfopt import strategies as S
from mfopt.errors import FailureError, UsageError
from mfopt.noise import NoiseExhaustedError, NoiseStream, load_state, save_state
from mfopt.noise.ledger import _by_handle

N = 11


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Not at import: seconds for each worker that collects, and one of them runs these tests."""
    global torch, TorchNoise
    torch = pytest.importorskip("torch")
    from mfopt.noise.for_torch import TorchNoise


pytestmark = pytest.mark.usefixtures("work_folder")


@pytest.fixture
def elsewhere(monkeypatch):
    """What devices without the counter-based draws use from now on, run here on the CPU."""
    from mfopt.noise import _torch_parts

    return lambda: monkeypatch.setattr(_torch_parts, "part_for", lambda _: _torch_parts.OnDevice)


def make(strategy, n=N, **options):
    settings = {"noise_multiplier": 2.0, "clip_norm": 0.5, **options}
    return NoiseStream(strategy, iterations=n, **settings)


# --- PyTorch -------------------------------------------------------------------------------


def tensors(dtype="float32"):
    kind = getattr(torch, dtype)
    return [torch.zeros(3, 4, dtype=kind), torch.zeros(5, dtype=kind), torch.zeros((), dtype=kind)]


ARRAYS = [np.zeros((3, 4), np.float32), np.zeros(5, np.float32), np.zeros((), np.float32)]


def test_what_is_no_stream_or_no_list_of_tensors_is_refused():
    from mfopt.noise.for_optax import add_noise

    stream = make(S.Identity())
    for bad in (None, 3, torch.nn.Linear(2, 1), torch.ones(3)):
        with pytest.raises(UsageError, match=r"parameters = .*list of tensors"):
            TorchNoise(stream, bad)
        with pytest.raises(UsageError, match=r"sums = .*list of tensors"):
            TorchNoise(stream, tensors()).add_to(bad)
    integers = [torch.zeros(2, dtype=torch.int32)]
    key = np.arange(8, dtype=np.uint32)
    for call, match in (
        (lambda: TorchNoise(None, tensors()), "stream = .*from_factorization"),
        (lambda: add_noise(None), "stream = .*from_factorization"),
        (lambda: TorchNoise(make(S.Identity(), secure=True), tensors()), "secure"),
        (lambda: TorchNoise(stream, []), "parameters"),
        (lambda: TorchNoise(stream, [1.0]), "parameters"),
        (lambda: TorchNoise(stream, integers), "parameters"),
        (lambda: TorchNoise(stream, tensors(), seed=1, key=key), "not both"),
    ):
        with pytest.raises(UsageError, match=match):
            call()


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("blt", "float32", 3e-6), ("toeplitz", "float32", 3e-6), ("banded-sqrt", "float64", 1e-13)],
)  # with buffers, and without
def test_torch_noise_is_that_of_the_jax_stream(kind, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        stream = make(every_strategy(N)[kind], dtype=np.dtype(dtype))
        noise = TorchNoise(stream, tensors(dtype), seed=3)
        state = stream.init(ARRAYS, seed=3)
        for _ in range(N):
            torch_noise = noise.next()
            expected, state = stream.next(state)
            for tensor, two in zip(torch_noise, expected, strict=True):
                assert (
                    tensor.is_contiguous()
                    and tensor.dtype == getattr(torch, dtype)
                    and tuple(tensor.shape) == two.shape
                )
                np.testing.assert_allclose(tensor.numpy(), two, atol=tolerance)
    with pytest.raises(NoiseExhaustedError, match=f"covers {N} iterations"):
        noise.next()


@pytest.mark.parametrize("past", before_release(["auto", "store"], 0))
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_torch_noise_from_the_generator_of_other_devices(kind, past, elsewhere):
    elsewhere()
    strategy = every_strategy(N)[kind]
    noise = TorchNoise(make(strategy, past=past), tensors(), seed=3)
    white = TorchNoise(make(S.Identity()), tensors(), seed=3)
    correlated, plain = (
        np.array([torch.cat([t.flatten() for t in source.next()]).numpy() for _ in range(N)])
        for source in (noise, white)
    )
    np.testing.assert_allclose(correlated, strategy.solve(plain), atol=1e-5)
    assert len(np.unique(plain)) == plain.size  # no draw of a step or parameter comes twice


@pytest.mark.parametrize("kind", ["blt", "sqrt"])
def test_torch_noise_of_other_devices_goes_on_from_its_state(kind, elsewhere):
    stream = make(every_strategy(N)[kind])
    counted = TorchNoise(stream, tensors(), seed=3)
    counted.next()
    elsewhere()
    noise = TorchNoise(stream, tensors(), seed=3)
    noise.next()
    saved = noise.contents()
    expected = noise.next()
    other = TorchNoise(stream, tensors())
    other.restore(saved)
    assert all(map(torch.equal, other.next(), expected))
    other = TorchNoise(stream, tensors())
    if kind == "blt":
        other.restore(counted.contents())  # its past is in the buffers
    else:
        with pytest.raises(UsageError, match="regenerated here"):
            other.restore(counted.contents())


def test_parameters_without_elements_have_noise_without_any():
    stream = make(S.BLT(np.array([0.3]), np.array([0.5])))
    noise = TorchNoise(stream, [torch.zeros(0, 3), torch.zeros(2)], seed=3)
    noise.next()
    repeated = TorchNoise(stream, [torch.zeros(0, 3), torch.zeros(2)])
    repeated.restore(noise.contents())
    assert all(map(torch.equal, repeated.next(), noise.next()))


@pytest.mark.parametrize("kind", ["blt", "toeplitz"])
def test_noise_is_added_in_place_as_out_of_place(kind):
    stream = make(every_strategy(N)[kind])
    parameters = [*tensors(), torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(7).double()]
    arguments, inside = (TorchNoise(stream, parameters, seed=3) for _ in "12")
    handed, kept = [], []
    for step in range(N):
        noise = arguments.next()
        wide = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        sums = [
            torch.full_like(p, 0.1 * step, dtype=dtype, requires_grad=True)
            for p, dtype in zip(parameters, wide, strict=True)
        ]
        expected = [(s + z).to(s.dtype).detach() for s, z in zip(sums, noise, strict=True)]
        if step == 5:  # stopped, and gone on with
            state = inside.contents()
            inside = TorchNoise(stream, parameters)
            inside.restore(state)
        if step % 3 == 2:  # both ways in one run
            sums = [(s + z).to(s.dtype) for s, z in zip(sums, inside.next(), strict=True)]
        else:
            assert inside.add_to(sums) is None
        assert all(map(torch.equal, sums, expected))
        handed.append((noise, [z.clone() for z in noise]))
        kept.append((sums, expected))
    for earlier, later in handed + kept:  # no later step writes into what was handed out
        assert all(map(torch.equal, earlier, later))
    with pytest.raises(NoiseExhaustedError):
        inside.add_to(sums)


@pytest.mark.parametrize("change", ["count", "shape", "integers", "narrow", "expanded", "none"])
def test_sums_that_are_not_the_parameters_are_refused_and_use_no_noise(change):
    noise = TorchNoise(make(S.BLT(np.array([0.3]), np.array([0.9]))), tensors(), seed=3)
    sums = tensors()
    if change == "count":
        sums.pop()
    else:
        sums[0] = {
            "shape": torch.zeros(4, 3),
            "integers": torch.zeros(3, 4, dtype=torch.int32),
            "narrow": torch.zeros(3, 4, dtype=torch.bfloat16),
            "expanded": torch.zeros(3, 1).expand(3, 4),
            "none": None,
        }[change]
    with pytest.raises(UsageError, match="sums"):
        noise.add_to(sums)
    assert noise.step == 0 and all(not torch.any(total) for total in sums[1:])
    repeated = TorchNoise(noise.stream, tensors(), seed=3)
    assert all(map(torch.equal, noise.next(), repeated.next()))


def test_a_step_that_was_broken_off_is_never_made_again(monkeypatch):
    noise = TorchNoise(make(every_strategy(N)["blt"]), tensors(), seed=3)
    noise.add_to(tensors())
    saved = noise.contents()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    # after the buffers went on, before the step was counted
    monkeypatch.setattr(noise._parts[0], "_unpacked", interrupted)
    for step in (lambda: noise.add_to(tensors()), noise.next):
        with pytest.raises((KeyboardInterrupt, FailureError)):
            step()
    monkeypatch.undo()
    for use in (noise.next, lambda: noise.add_to(tensors()), noise.contents):
        with pytest.raises(FailureError, match="broken off"):
            use()
    noise.restore(saved)
    unbroken = TorchNoise(noise.stream, tensors(), seed=3)
    unbroken.next()
    assert all(map(torch.equal, noise.next(), unbroken.next()))


def test_torch_noise_is_fresh_unless_pinned_and_hides_its_key():
    stream = make(S.Identity())
    first, second = (TorchNoise(stream, tensors()).next()[0] for _ in "12")
    assert not torch.any(first == second)
    secret = TorchNoise(stream, tensors(), key=np.array([123456789] * 8, np.uint32))
    assert "123456789" not in repr(secret) and "secret" in repr(secret)
    assert "not private" in repr(TorchNoise(stream, tensors(), seed=1))


@pytest.mark.parametrize("buffer_dtype", [None, jnp.bfloat16])
def test_torch_noise_goes_on_from_its_state(tmp_path, buffer_dtype):
    stream = make(S.BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9])), buffer_dtype=buffer_dtype)
    path = tmp_path / "noise.npz"
    noise = TorchNoise(stream, tensors(), seed=3)
    noise.next()
    noise.save(path)
    expected = noise.next()
    other = TorchNoise(stream, tensors())
    other.load(path)
    assert all(map(torch.equal, other.next(), expected))
    with pytest.raises(UsageError, match="takes back noise that 2 steps were released with"):
        noise.load(path)
    changed = TorchNoise(make(S.BLT(np.array([0.3, 0.2]), np.array([0.5, 0.9]))), tensors())
    with pytest.raises(UsageError, match="another factorization"):
        changed.load(path)
    with pytest.raises(UsageError, match="those that the state was made for"):
        TorchNoise(stream, tensors()[:2]).load(path)


@pytest.mark.parametrize("kind", ["blt", "toeplitz"])
def test_a_run_begins_in_one_library_and_ends_in_the_other(tmp_path, kind):
    stream, ones = make(every_strategy(N)[kind]), [x + 1 for x in ARRAYS]
    state = stream.init(ARRAYS)
    _, state = stream.release(ones, state)
    save_state(tmp_path / "jax.npz", stream, state)
    expected, state = stream.next(stream.init(ARRAYS, key=np.asarray(state.key)))
    expected = [stream.next(state)[0]]
    noise = TorchNoise(stream, tensors())
    with pytest.raises(UsageError, match="belongs to a run that is alive"):
        noise.load(tmp_path / "jax.npz")
    _by_handle.clear()  # as if it had ended
    noise.load(tmp_path / "jax.npz")
    noise.save(tmp_path / "torch.npz")
    sums = [torch.zeros_like(p) for p in tensors()]
    noise.add_to(sums)
    expected.append(sums)
    noise = TorchNoise(stream, tensors())
    noise.load(tmp_path / "torch.npz")
    with pytest.raises(UsageError, match="was released already, with another sum"):
        noise.add_to([p + 1 for p in tensors()])
    del noise
    state = load_state(tmp_path / "torch.npz", stream, ARRAYS)
    with pytest.raises(UsageError, match="was released already"):
        stream.next(state)
    with pytest.raises(UsageError, match="those that the state was made for"):
        load_state(tmp_path / "torch.npz", stream, dict(zip("abc", ARRAYS, strict=True)))
    for one, other in zip(*expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


@pytest.mark.parametrize(("size", "step"), [(126, 0), (126, 7), (5000, 1)])
def test_a_release_is_known_by_norms_and_by_a_part_of_each_sum(size, step):
    from mfopt.noise.for_torch import release_content

    norms, sums = [torch.rand(8)], [torch.randn(2, size // 2), torch.randn(())]
    usual, unseen = release_content(norms, sums, step), 0
    assert release_content([norms[0] * 1.001], sums, step) != usual
    for place in range(0, size, 7):
        changed = [sums[0].clone(), sums[1]]
        changed[0].view(-1)[place] += 1e-6
        unseen += release_content(norms, changed, step) == usual
    assert unseen == (0 if size == 126 else 706)  # of 715
    last = [sums[0].clone(), sums[1]]
    last[0].view(-1)[-79:] += 1e-6
    assert release_content(norms, last, step) != usual
    columns = sums[0].clone()
    columns[:, : size // 20] *= -1.0
    assert release_content(norms, [columns, sums[1]], step) != usual
    assert release_content(norms, [sums[0], sums[1] + 1], step) != usual


@pytest.mark.parametrize(
    "norms", [np.ones(10), np.arange(10) % 9 + 0.5, np.r_[:10.0, np.nan], np.arange(7.0)]
)
def test_where_norms_tell_little_all_sums_are_read(norms):
    """Of counts: the same number of examples in other places, of whole rows of 2048 numbers too."""
    from mfopt.noise.for_torch import release_content

    def digest(places):
        counts = torch.zeros(9000).index_add(0, torch.tensor(places), torch.ones(2))
        return release_content([torch.tensor(norms)], [counts.view(-1, 1)], 0)

    others = [5000, 5002], [2952, 5001], [5000, 7049], [5001, 5000]
    assert [digest(places) == digest([5000, 5001]) for places in others] == [False] * 3 + [True]


def test_the_same_sums_with_other_draws_are_another_release(elsewhere):
    """As on another device, whose noise would be a second answer to one question."""
    noise = TorchNoise(make(S.Identity()), tensors())
    noise.save("state.npz")
    noise.add_to(tensors())
    del noise
    again = TorchNoise(make(S.Identity()), tensors())
    again.load("state.npz")
    again.add_to(tensors())
    del again
    elsewhere()
    other = TorchNoise(make(S.Identity()), tensors())
    other.load("state.npz")
    with pytest.raises(UsageError, match="was released already"):
        other.add_to(tensors())


def test_a_state_that_is_refused_changes_nothing():
    """Which ones are is tested by files: ``test_noise_files.py``."""
    stream = make(S.BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9])))
    noise = TorchNoise(stream, tensors())
    noise.next()
    header, arrays = noise.contents()
    other, unchanged = (TorchNoise(stream, tensors(), seed=1) for _ in "12")
    for step, buffer in ((N + 1, arrays["buffer/1"]), (1, arrays["buffer/1"][:1])):
        with pytest.raises(UsageError, match="state"):
            other.restore((header | {"step": step}, arrays | {"buffer/1": buffer}))
    assert all(map(torch.equal, other.next(), unchanged.next()))
