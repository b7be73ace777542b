"""A factorization in a PyTorch loop, or in that of Opacus: sums, noise, batches."""

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
from lazy_torch import needs_torch, own_folder, torch  # noqa: F401
from processes import finish, start
from statements import stated

from mfopt import noise
from mfopt.errors import UsageError
from mfopt.noise import NoiseExhaustedError
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT

pytestmark = [
    # of a loader's workers, which use no JAX
    pytest.mark.filterwarnings("ignore:os.fork.. was called"),
]
RECORDS, CLIP, SEED = 12, 0.5, 20
SCHEME = BallsInBins(bins=5, epochs=2)  # with this seed one bin is empty and one has five records


def factorization(scheme=SCHEME):
    return stated(BLT([0.3, 0.1], [0.5, 0.9]), scheme, 2.0, status="certified")


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.arange(RECORDS) % 3)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def clipped_sum(model, units):
    """Σ clip(gradient), one example after the other."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for unit in units:
        x, y = data()[unit]
        gradient = torch.autograd.grad(loss_of(model, (x[None], y[None])), list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradient))
        for t, g in zip(total, gradient, strict=True):
            t += g * min(1.0, float(CLIP / norm))
    return total


@functools.cache
def expected_path(steps=SCHEME.iterations, scheme=SCHEME):
    """The parameters after each step, from the plain pieces: sampler, loop, JAX noise, division."""
    example = factorization(scheme)
    stream = noise.from_factorization(example, clip_norm=CLIP)
    sampler = example.sampler(RECORDS, seed=SEED)
    model, state, path = network(), None, []
    for t in range(steps):
        sums = clipped_sum(model, sampler[t])
        state = state or stream.init([p.detach().numpy() for p in model.parameters()], seed=SEED)
        drawn, state = stream.next(state)
        with torch.no_grad():
            for p, s, z in zip(model.parameters(), sums, drawn, strict=True):
                p -= (s + torch.from_numpy(np.array(z))) / sampler.expected_batch
        path.append([p.detach().clone() for p in model.parameters()])
    return path


def same(model, expected):
    for p, e in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(p.detach(), e, atol=3e-5)


def made_private(model=None, dataset=None, optimizer=None, **options):
    from mfopt.torch import make_private

    model = network() if model is None else model
    return make_private(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=1.0),
        data() if dataset is None else dataset,
        factorization(),
        CLIP,
        **{"seed": SEED, "allow_uncertified": True, **options},
    )


def private_run(**options):
    from mfopt.torch import PrivateRun

    options = {"seed": SEED, "allow_uncertified": True, **options}
    return PrivateRun(factorization(), RECORDS, CLIP, **options)


def plain(*arguments, **options):
    loop = Loop(*arguments, **options)
    return loop.run, loop.model, loop.optimizer


class Loop:
    """A private run of a tiny model, with the parts that a loop uses."""

    def __init__(self, model=None, attach=True, optimizer=None, **options):
        self.model = network() if model is None else model
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.run = private_run(**options)
        if attach:
            self.run.attach(self.optimizer)
        self.data = data()
        self.loader = self.run.loader(self.data)

    def backward(self, batch, loss=loss_of):
        self.run.backward(self.model, loss, batch)

    def steps(self, stop=5, zero=True, loss=loss_of):
        """The right loop."""
        for index, batch in enumerate(self.loader):
            self.backward(batch, loss)
            self.optimizer.step()
            if zero:
                self.optimizer.zero_grad()
            if index + 1 == stop:
                break

    def batch(self):
        """A batch of some examples; the first one of the pinned run is empty."""
        for _ in self.loader:
            self.optimizer.step()
            break
        return next(iter(self.loader))

    def plain(self, batch):
        from mfopt.torch.rows import plain

        loss_of(self.model, [plain(x) for x in batch]).backward()

    def is_right(self):
        """Whether the model is what the plain pieces give after these steps."""
        same(self.model, expected_path()[self.run.step - 1])


class LikeOpacus(Loop):
    """The same with ``make_private``."""

    def __init__(self, model=None, **options):
        self.model, self.optimizer, self.loader = made_private(model, **options)
        self.run, self.data = self.loader.run, data()

    def backward(self, batch, loss=loss_of):
        self.optimizer.zero_grad()
        loss(self.model, batch).backward()


def epoch(model, optimizer, loader, stop=None, skips=False):
    for index, (x, y) in enumerate(loader):
        if skips and not len(x):
            continue
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if stop is not None and index + 1 == stop:
            break


def test_the_loop_of_opacus_makes_the_steps_of_the_plain_pieces():
    path = expected_path()
    model, optimizer, loader = made_private()
    for e in range(2):
        epoch(model, optimizer, loader)
        same(model, path[5 * e + 4])
    with pytest.raises(NoiseExhaustedError):
        epoch(model, optimizer, loader)


def test_physical_batches_of_opacus_make_one_noised_step():
    pytest.importorskip("opacus")
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    path = expected_path()
    model, optimizer, loader = made_private()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for e in range(2):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as physical:
            if e == 0:  # a break inside a logical step: it comes again, whole
                epoch(model, optimizer, physical, stop=1)
            epoch(model, optimizer, physical)
        same(model, path[5 * e + 4])
        schedule.step()


@pytest.mark.parametrize(("microbatch", "workers"), [(None, 0), (2, 0), (None, 1)])
def test_steps_without_opacus_are_those_of_the_plain_pieces(microbatch, workers, monkeypatch):
    # as a worker sees those of the process that it was forked from
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    path = expected_path()
    run, model, optimizer = plain()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    step = 0
    loader = run.loader(data(), num_workers=workers)
    for _ in range(2):
        for batch in loader:
            run.backward(model, loss_of, batch, microbatch=microbatch)
            optimizer.step()
            schedule.step()
            same(model, path[step])
            optimizer.zero_grad()
            step += 1
    assert step == run.step == 10
    with pytest.raises(NoiseExhaustedError):
        optimizer.step()


def test_a_wrong_noise_would_be_seen():
    """Control: the path of another scheme, or of other noise, is far away."""
    path, other = expected_path(2), expected_path(2, BallsInBins(4, 3))
    assert max(float((a - b).abs().max()) for a, b in zip(path[1], other[1], strict=True)) > 0.01


@pytest.mark.parametrize("variant", [LikeOpacus, Loop])
def test_a_run_goes_on_from_the_state_of_its_optimizer(variant, tmp_path):
    first = variant(seed=None)
    first.steps(3)
    with noise.owner_only():
        torch.save([first.model.state_dict(), first.optimizer.state_dict()], tmp_path / "run.pt")
    first.steps()
    first.steps()
    ended = [p.detach().clone() for p in first.model.parameters()]
    del first  # of two that live the second is refused
    second = variant(seed=None)
    model, optimizer = torch.load(tmp_path / "run.pt", weights_only=True)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    assert len(second.loader) == 5 and second.run.step == 3  # two are left of this epoch
    second.steps()
    second.steps()
    for tensor, two in zip(ended, second.model.parameters(), strict=True):
        assert torch.equal(tensor, two)  # steps that were released are repeated exactly
    # the draws are new ones: not the pinned path
    assert not torch.allclose(ended[0], expected_path()[-1][0], atol=1e-2)


@pytest.mark.parametrize("variant", [LikeOpacus, Loop])
def test_states_that_are_not_of_this_run_are_refused(variant):
    def new():
        return variant().optimizer

    from mfopt.noise.sealed import KeyFile

    def with_noise(noise):
        return {**good, "mfopt_noise": noise}

    good, keys = new().state_dict(), KeyFile()
    header, arrays = keys.open(good["mfopt_noise"])
    sampler = header.pop("sampler")
    broken = {**header, "sampler": {**sampler, "population": 13}}
    for state, match in (
        ({k: v for k, v in good.items() if k != "mfopt_noise"}, "start again"),
        (with_noise(keys.seal((broken, arrays))), "other batches"),
        (with_noise(keys.seal((header, arrays))), "must come from state_dict"),
        (with_noise({"noise": {}, "sampler": sampler}), r"versions up to 0\.2\.0"),
    ):
        with pytest.raises(UsageError, match=match):
            new().load_state_dict(state)
    new().load_state_dict(good)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"poisson_sampling": True}, "poisson_sampling"),
        ({"clip_norm": 2.0}, "clip_norm = 2.0: the clip norm is `max_grad_norm`"),
        ({"clipping": "per_layer"}, "clipping"),
        ({"shuffle": True}, "shuffle = True: the batches are drawn by"),
        ({"normalizer": 0}, "normalizer"),
        ({"grad_sample_mode": "ghost"}, "grad_sample_mode = 'ghost': is no argument here"),
        ({"loss_reduction": "none"}, "loss_reduction"),
    ],
)
def test_options_that_contradict_the_factorization_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        made_private(**options)


def test_keywords_of_opacus_are_refused_by_name_where_arguments_are_missing():
    from mfopt.torch import make_private

    with pytest.raises(UsageError, match=r"noise_multiplier = 1.1: .*`factorization`, as mfopt"):
        make_private(noise_multiplier=1.1)


def test_sums_are_those_of_their_parameters_in_any_order_of_the_optimizer():
    def sums_of(order):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]  # equal shapes: none would tell
        groups = [{"params": list(layers[i].parameters())} for i in order]
        model, optimizer, loader = made_private(
            torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1]),
            optimizer=torch.optim.SGD(groups, lr=0.0),  # noise has the order of parameters
        )
        batches = iter(loader)
        next(batches)  # an empty one
        optimizer.step()
        x, y = next(batches)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        loader.run.collect()
        return [loader.run.sums[p].numpy() for p in model.parameters()]

    usual, changed = sums_of([0, 1]), sums_of([1, 0])
    assert not np.allclose(usual[0], usual[2])
    for expected, total in zip(usual, changed, strict=True):
        np.testing.assert_allclose(total, expected, atol=1e-6)


def test_loaders_and_data_sets_that_the_scheme_cannot_draw_from_are_refused():
    loaders = torch.utils.data

    class Endless(loaders.IterableDataset):
        def __iter__(self):
            return iter(())

    for arguments, match in (
        (loaders.DataLoader(data(), 4), "DataLoader.*numbered records.*give its `dataset`"),
        (Endless(), "numbered records"),
    ):
        with pytest.raises(UsageError, match=match):
            made_private(dataset=arguments)
        run, _, _ = plain()
        with pytest.raises(UsageError, match=match):
            run.loader(arguments)
    with pytest.raises(UsageError, match="population of 12"):
        run.loader(loaders.Subset(data(), range(5)))


def test_what_is_no_optimizer_or_is_taken_is_not_attached():
    from mfopt.torch import make_private

    def new():
        return private_run(seed=None)

    def other():
        return torch.optim.SGD(network().parameters(), lr=1.0)

    for arguments in (None, network(), network().parameters()):
        with pytest.raises(UsageError, match=r"optimizer = .*must be of class Optimizer"):
            new().attach(arguments)
    run, model, optimizer = plain()
    for participated in (run, new()):  # of two runs each step would carry both noises
        with pytest.raises(UsageError, match="made private already"):
            participated.attach(optimizer)
    with pytest.raises(UsageError, match="has an optimizer already"):
        run.attach(other())
    words = {"dataset": data(), "factorization": factorization(), "max_grad_norm": CLIP}
    for module, participated in ((model, optimizer), made_private()[:2]):
        with pytest.raises(UsageError, match="made private already"):
            make_private(module, participated, **words)
        with pytest.raises(UsageError, match="made private already"):
            new().attach(participated)
    for module, participated in ((None, other()), (model, None)):
        with pytest.raises(UsageError, match="must be of class"):
            make_private(module, participated, **words)


def test_a_second_one_that_would_draw_the_same_noise_cannot_be_made():
    import pickle

    run, _, optimizer = plain()
    for used_elsewhere in (run, run.noise, optimizer):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match=r"same noise.*private model .*\(AveragedModel\)"):
                make(used_elsewhere)
    copy.deepcopy(optimizer.state_dict())


def test_a_step_of_opacus_needs_exactly_one_batch_of_the_loader():
    model, optimizer, loader = made_private()

    def back(x, y):
        torch.nn.functional.cross_entropy(model(x), y).backward()

    # the user's own loader
    for x, y in torch.utils.data.DataLoader(data(), 4):
        with pytest.raises(UsageError, match="not of the loader"):
            back(x, y)
    # a batch that was left out
    batches = iter(loader)
    next(batches)
    back(*next(batches))
    with pytest.raises(UsageError, match="not of step 0"):
        optimizer.step()
    # a second step on one batch
    for x, y in loader:
        optimizer.zero_grad()
        back(x, y)
        optimizer.step()
        if len(x):
            break
    optimizer.zero_grad()
    back(x, y)
    with pytest.raises(UsageError, match="not of step 2"):
        optimizer.step()


@pytest.mark.parametrize("skips", [True, False])
def test_an_empty_batch_that_is_skipped_is_seen_where_batches_are_fetched_ahead(skips):
    """Opacus makes a loader of its own: all that its steps show is how many examples they had."""
    pytest.importorskip("opacus")
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    model, optimizer, loader = made_private(num_workers=1)

    def go():
        for _ in range(2):
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
            ) as physical:
                epoch(model, optimizer, physical, skips=skips)

    if skips:
        with pytest.raises(UsageError, match="not of step 0"):
            go()
    else:
        go()
        same(model, expected_path()[9])


@pytest.mark.parametrize("times", [2, 0], ids=["twice", "fewer"])
@pytest.mark.parametrize("variant", [Loop, LikeOpacus])
def test_a_batch_that_holds_a_record_twice_or_not_at_all_is_refused(variant, times):
    def collate(records):
        return torch.utils.data.default_collate(records * times or records[:1])

    loop = variant()
    loop.loader = loop.run.loader(loop.data, collate_fn=collate)
    with pytest.raises(UsageError, match=r"mixed by collate_fn, [16] rows of 3 units"):
        loop.steps()


@pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap")
def test_a_batch_is_summed_once_in_whole_or_in_parts():
    path = expected_path()
    run, model, optimizer = plain()
    batches = iter(run.loader(data()))
    assert not len(next(batches)[0])
    optimizer.step()  # no pass at all where there is nobody
    batch = next(batches)
    run.backward(model, loss_of, batch)
    with pytest.raises(UsageError, match="in its sum already"):
        run.backward(model, loss_of, batch)

    def broken(model, part):
        if torch.equal(part[0][0], batch[0][1]):
            raise RuntimeError("no memory")
        return loss_of(model, part)

    # what was left half-way, and is not forgotten, counts as well
    for forget in (None, False, True):
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="no memory"):
            run.backward(model, broken, batch, microbatch=1)
        if forget is not None:
            optimizer.zero_grad(set_to_none=forget)
        if forget is None:
            with pytest.raises(UsageError, match="zero_grad"):
                run.backward(model, loss_of, batch)
        else:
            run.backward(model, loss_of, batch)
    optimizer.step()
    same(model, path[1])
    for step, (x, y) in enumerate(batches, 2):  # parts by hand
        optimizer.zero_grad()
        for i in range(len(x)):
            run.backward(model, loss_of, (x[i : i + 1], y[i : i + 1]))
        optimizer.step()
        same(model, path[step])
    assert run.step == 5


def backward(model, loss, batch, bound):
    """The sum of a batch's clipped gradients in ``grad``, by nobody's run."""
    from mfopt.torch.clipping import add_clipped

    sums = {p: torch.zeros_like(p) for p in model.parameters()}
    add_clipped(model, loss, batch, bound, sums)
    for p, total in sums.items():
        p.grad = total


def test_gradients_that_are_not_finite_add_nothing():
    model = torch.nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 0.0], [float("inf"), 0.0], [0.0, 1e30], [0.1, 0.0]])
    backward(model, lambda m, b: m(b).sum(), x, 0.5)
    np.testing.assert_allclose(model.weight.grad, [[0.6, 0.0]], rtol=1e-5)
    for bad in (x[0, 0], [x, x[:2]], [x, "text"], []):
        with pytest.raises(UsageError, match="batch"):
            backward(model, lambda m, b: m(b).sum(), bad, 0.5)


@pytest.mark.parametrize("numbers", [1, 128, 300, 10**6])
def test_norms_of_long_gradients_do_not_drift(numbers):
    from mfopt.torch.per_example import norms

    rows = torch.full((2, numbers), 1 / 3)
    rows[1, ::2] = 0.7
    exact = rows.double().norm(dim=1)
    assert float((norms(rows) / exact - 1).abs().max()) < 2**-20
    if numbers == 10**6:  # one running sum, which PyTorch's own norm is nearly, drifts
        assert float((rows.norm(dim=1) / exact - 1).abs().max()) > 2**-18
        model = torch.nn.Linear(numbers, 1, bias=False)
        backward(model, lambda m, b: m(b).sum(), rows[:1], 0.5)
        assert 0.4999 < float(model.weight.grad.double().norm()) <= 0.5


def test_sums_in_16_bits_are_refused_where_they_would_be_made():
    batch = torch.randn(3, 64)
    run, model, optimizer = plain()
    model.to(torch.bfloat16)
    with pytest.raises(UsageError, match=r"sums = .*narrower than float32.*autocast"):
        optimizer.step()
    run = private_run(seed=None)
    with pytest.raises(UsageError, match="narrower than float32"):
        run.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UsageError, match="narrower than float32"):
        made_private(model=network().to(torch.bfloat16))
    # the way out: 16 bits inside, parameters and sums in 32
    model = torch.nn.Linear(64, 64, bias=False)

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return 100 * model(batch).sum()

    backward(model, loss, batch, 0.5)
    assert model.weight.grad.dtype == torch.float32
    assert 0 < float(model.weight.grad.norm()) <= 3 * 0.5


def contributions(build):
    """Largest norm that one example moves a sum by, of examples that nearly agree."""
    torch.manual_seed(0)
    x = torch.randn(1, 1024) + 0.3 * torch.randn(512, 1024)
    whole = build(x)
    without = [build(torch.cat([x[:i], x[i + 1 :]])) for i in range(8)]
    return max(float((whole - partial_sum).double().norm()) for partial_sum in without)


def test_one_example_moves_a_sum_by_its_clip_norm_under_autocast():
    def build(x):
        model = torch.nn.Linear(x.shape[1], 1, bias=False)
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, loss, x, 1.0)
        return model.weight.grad

    def loss(model, batch):
        value = model(batch)
        assert value.dtype == torch.bfloat16  # the user's autocast reaches the model
        return 1e3 * value.sum()

    assert contributions(build) <= 1.0 + 1e-4
    # control: the sum as a product, which autocast forms in 16 bits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = contributions(lambda x: 1 / x.norm(dim=1) @ x)
    assert rounded > 1.3


def labelled():
    """A model that computes its loss, as those of transformers do."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network, self.names = network(), ("loss", "scores")

        def forward(self, x, labels):
            scores = self.network(x)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            return {"loss": loss, "scores": scores, "kind": "classes"}

    return Model()


def test_a_module_that_gives_its_loss_takes_the_steps_of_the_loop():
    module, optimizer, loader = made_private(labelled())
    assert module.names == ("loss", "scores")
    for x, y in loader:
        optimizer.zero_grad()
        actual = module(x, labels=y)
        assert actual["scores"].shape == (len(x), 3) and actual["kind"] == "classes"
        module(x, labels=y)  # no gradients are asked for
        actual["loss"].backward()
        optimizer.step()
    same(module, expected_path()[4])
    module.eval()
    with torch.no_grad():
        assert module(*data()[:2])["loss"].ndim == 0


@pytest.mark.parametrize("period", [1, 2])
def test_poisson_batches_are_drawn_by_the_loader(period):
    from mfopt import sampling, strategies
    from mfopt.torch import PrivateRun

    scheme = sampling.Poisson(probability=0.3, iterations=6)
    if period > 1:
        scheme = sampling.CyclicPoisson(probability=0.5, bands=period, iterations=6)
    strategy = strategies.BandedToeplitz(np.array([1.0, 0.3])[:period])
    stated_file = stated(strategy, scheme, 2.0, status="certified")
    run, model = PrivateRun(stated_file, RECORDS, CLIP), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.attach(optimizer)
    for step in range(6):
        x, y = next(iter(run.loader(data())))
        units = run.sampler[step].tolist()
        assert torch.equal(x, data().tensors[0][units]) and len(y) == len(units)
        run.backward(model, loss_of, (x, y))
        optimizer.step()
    assert run.step == 6 and run.normalizer == pytest.approx(RECORDS * scheme.probability / period)


def test_batches_of_nobody_keep_the_structure_of_a_batch():
    from mfopt.torch.loader import Collator

    def collated(collate, dataset, records):
        return Collator(collate, dataset)((list(range(len(records))), records))

    records = [{"x": torch.ones(3), "names": "a", "pair": (1, 2.0)}]
    default_collate = torch.utils.data.default_collate
    empty, full = (collated(default_collate, records, entry) for entry in ([], records))
    assert full["x"].shape == (1, 3) and empty["x"].shape == (0, 3)
    assert full["names"] == ["a"] and empty["names"] == [""]
    assert [part.shape for part in empty["pair"]] == [(0,), (0,)]
    with pytest.raises(UsageError, match="collate_fn"):
        collated(lambda records: 3, records, [])


def test_a_probe_of_collate_fn_copies_records_and_not_all_that_they_are_views_of():
    from mfopt.torch.loader import Collator

    table, sizes = torch.zeros(100, 3), set()

    def collate(records):
        sizes.update(x.untyped_storage().nbytes() for x in records)
        return torch.stack(records)

    Collator(collate, table)((list(range(4)), list(table[:4])))
    assert sizes == {12, 1200}  # of a copied row; of the table, in the batch itself


@pytest.mark.release
def test_two_processes_make_the_step_of_one(tmp_path):
    child = Path(__file__).parent / "torch_two_processes.py"
    store = tmp_path / "store"
    finish(*(start(child, rank, store, tmp_path / f"out{rank}.pt") for rank in range(2)))
    path = expected_path(3)
    for rank in range(2):
        loaded = torch.load(tmp_path / f"out{rank}.pt", weights_only=True)
        for variant in ("loop of opacus", "plain", "zero", "sharded"):
            for p, e in zip(loaded[variant], path[2], strict=True):
                np.testing.assert_allclose(p, e, atol=3e-5, err_msg=f"{variant} {rank}")
        assert loaded["buffers"] == (rank == 0)
        torch.manual_seed(0)
        assert torch.equal(loaded["first"], torch.nn.Linear(4, 3).weight)  # rank 0's
        assert "which have steps [1, 2]" in loaded["steps"]
        assert "holds gradients that run.backward did not make" in loaded["gradients"]
