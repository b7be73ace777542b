"""Wrong loops in PyTorch, and that of Opacus: each is refused, or shown to be harmless."""

import contextlib
import copy
import os
from pathlib import Path

import numpy as np
import pytest
import test_torch_run as run_tests
from lazy_torch import functional, needs_torch, own_folder, torch  # noqa: F401
from test_torch_run import loss_of

from mfopt.errors import UsageError

RECORDS, CLIP, SEED = 12, 0.5, 20
REFUSED, HARMLESS = {}, {}


pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork.. was called"),
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate"),
]


def refused(match, error=UsageError):
    """A loop that must raise ``error`` with a text like ``match``."""

    def keep(loop):
        REFUSED[loop.__name__] = (loop, error, match)
        return loop

    return keep


def harmless(loop):
    """A loop that checks by itself that what it released is what a right loop releases."""
    HARMLESS[loop.__name__] = loop
    return loop


class Loop:
    """A private run of a tiny model, with the parts that a loop uses."""

    def __init__(self, model=None, attach=True, parameters=None, **options):
        from mfopt.torch import PrivateRun

        self.model = run_tests.network() if model is None else model
        parameters = list(self.model.parameters()) if parameters is None else parameters
        self.optimizer = torch.optim.SGD(parameters, lr=1.0)
        options = {"seed": SEED, "allow_uncertified": True, **options}
        self.run = PrivateRun(run_tests.factorization(), RECORDS, CLIP, **options)
        if attach:
            self.run.attach(self.optimizer)
        self.data = run_tests.data()
        self.loader = self.run.loader(self.data)

    def steps(self, stop=5, zero=True):
        """The right loop."""
        for place, batch in enumerate(self.loader):
            self.run.backward(self.model, loss_of, batch)
            self.optimizer.step()
            if zero:
                self.optimizer.zero_grad()
            if place + 1 == stop:
                break

    def batch(self):
        """A batch of some examples; the first one of the pinned run is empty."""
        if self.run.step == 0:
            self.steps(1)
        return next(iter(self.loader))

    def plain(self, batch):
        functional.cross_entropy(self.model(batch[0]), batch[1]).backward()

    def is_right(self):
        """Whether the model is what the plain pieces give after these steps."""
        run_tests.same(self.model, run_tests.expected_path()[self.run.step - 1])


class LikeOpacus(Loop):
    """The same with ``make_private``."""

    def __init__(self, model=None, **options):
        self.model, self.optimizer, self.loader = run_tests.made_private(model, **options)
        self.run, self.data = self.loader._run, run_tests.data()

    def steps(self, stop=5, loss=None):
        run_tests.epoch(self.model, self.optimizer, self.loader, loss, stop)

    def backward(self, batch):
        self.optimizer.zero_grad()
        self.plain(batch)


# --- gradients that backward did not make --------------------------------------------------


@refused(r"grad = .*run\.backward\(module, loss, batch\) in place of loss\.backward")
def plain_backward():
    loop = Loop()
    for batch in loop.loader:
        loop.plain(batch)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@refused("grad = 'not empty'")
def one_more_backward():
    loop = Loop()
    batch = loop.batch()
    loop.run.backward(loop.model, loss_of, batch)
    loop.plain(batch)
    loop.optimizer.step()


@refused("noise only.*no zero_grad")
def zero_grad_between():
    loop = Loop()
    loop.run.backward(loop.model, loss_of, loop.batch())
    loop.optimizer.zero_grad()
    loop.optimizer.step()


@refused(r"loss = '<lambda>': does not call the module")
def a_loss_that_ignores_its_argument():
    loop = Loop()
    loop.run.backward(loop.model, lambda _, b: loss_of(loop.model, b), loop.batch())


@refused("optimizer = 'stepped by a GradScaler'.*autocast")
def a_scaler():
    loop, scaler = Loop(), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))  # as for the batch before
    loop.run.backward(loop.model, lambda m, b: scaler.scale(loss_of(m, b)), loop.batch())
    scaler.step(loop.optimizer)


@refused("sums are the caller's")
def backward_beside_the_callers_clipping():
    loop = Loop(clipped_by_caller=True)
    loop.run.backward(loop.model, loss_of, loop.data[:2])


@refused("closure")
def a_closure():
    loop = Loop()
    batch = loop.batch()
    loop.optimizer.step(lambda: loop.run.backward(loop.model, loss_of, batch))


# --- several modules, parts that are not attached ------------------------------------------


@refused("not in the module: they would get noise only")
def two_modules_in_one_step():
    modules = torch.nn.ModuleList([run_tests.network(), run_tests.network()])
    loop = Loop(modules)
    loop.steps = lambda stop: [
        loop.optimizer.step() for _ in zip(range(stop), loop.loader, strict=False)
    ]
    batch = loop.batch()
    for module in modules:
        loop.run.backward(module, loss_of, batch)
    loop.optimizer.step()


@refused(r"module\.0\.weight = 'requires gradients'.*freeze it")
def a_partial_optimizer():
    model = run_tests.network()
    loop = Loop(model, parameters=list(model[2].parameters()))
    loop.run.backward(model, loss_of, loop.data[:2])


@refused("is not in the optimizer of the run")
def a_part_unfrozen_later():
    model = run_tests.network()
    model[0].requires_grad_(False)
    loop = Loop(model, parameters=[p for p in model.parameters() if p.requires_grad])
    model[0].requires_grad_(True)
    loop.run.backward(model, loss_of, loop.data[:2])


@refused("other parameters than when it was attached")
def a_group_added_later():
    loop = Loop()
    batch = loop.batch()
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    loop.run.backward(loop.model, loss_of, batch)
    loop.optimizer.step()


@refused("a second time, beside that run.*deepcopy")
def a_second_run_of_one_layer():
    loop = Loop()
    Loop(loop.model, parameters=list(loop.model[2].parameters()))


@refused("has a parameter twice")
def a_parameter_twice():
    model = run_tests.network()
    Loop(model, parameters=[*model.parameters(), model[0].weight])


# --- steps without noise -------------------------------------------------------------------


@refused(r"no optimizer yet.*attach")
def never_attached():
    loop = Loop(attach=False)
    for batch in loop.loader:
        loop.plain(batch)
        loop.optimizer.step()


@refused("was not released.*step")
def another_optimizer_steps():
    loop = Loop()
    other = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    start = [p.detach().clone() for p in loop.model.parameters()]
    try:
        for batch in loop.loader:
            loop.run.backward(loop.model, loss_of, batch)
            other.step()
            other.zero_grad()
    finally:
        run_tests.same(loop.model, start)


@harmless
def a_second_optimizer_beside():
    loop = Loop()
    other = torch.optim.SGD(loop.model[2].parameters(), lr=1.0)
    for batch in loop.loader:
        loop.run.backward(loop.model, loss_of, batch)
        other.step()  # finds nothing
        loop.optimizer.step()
        other.step()
    loop.is_right()


@refused("has gradients or a state")
def attached_after_the_first_step():
    loop = Loop(attach=False)
    loop.plain(loop.data[:2])
    loop.run.attach(loop.optimizer)


# --- batches -------------------------------------------------------------------------------


@refused("batch 0 was not released")
def empty_batches_skipped():
    loop = Loop()
    for batch in loop.loader:
        if len(batch[0]):
            loop.run.backward(loop.model, loss_of, batch)
            loop.optimizer.step()


@refused("accumulate nothing over batches")
def accumulation():
    loop = Loop()
    for place, batch in enumerate(loop.loader):
        loop.run.backward(loop.model, loss_of, batch)
        if place % 2:
            loop.optimizer.step()


@refused("was not released")
def batches_at_once_from_workers():
    loop = Loop()
    list(loop.run.loader(loop.data, num_workers=1))


@refused("exactly one batch")
def two_iterators_of_the_loader():
    loop = Loop()
    one, two = iter(loop.loader), iter(loop.loader)
    for place in range(3):
        batch = next(two if place == 1 else one)
        loop.run.backward(loop.model, loss_of, batch)
        loop.optimizer.step()


@harmless
def a_restart_of_the_loader():
    loop = Loop()
    batch = loop.batch()
    loop.run.backward(loop.model, loss_of, batch)  # dropped: the batch comes again
    loop.steps()
    loop.is_right()


# --- layers --------------------------------------------------------------------------------


def counting_layer():
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                self.seen += 1.0
            return x

    return Mean()


def remembering_layer(start, remember):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = start

        def forward(self, x):
            self.seen = remember(self.seen, x)
            return x / (1 + self.seen)

    return Layer()


def embedding(**options):
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 3, **options)

        def forward(self, x):
            return self.table((x[:, 0] > 0).long())

    return Bag()


def after_a_linear_one(layer):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), layer)


def moving_layer(kind):
    """A layer that follows the batches by what it keeps."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.code = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            self.array, self.count, self.rows = np.zeros(3), 0, []

        def forward(self, x):
            kept = x.detach().mean(0)
            if kind == "mean":
                self.mean.data = 0.9 * self.mean + kept
                return x - self.mean
            if kind == "code":
                self.code.data = 0.9 * self.code + kept
                return x - self.code
            if kind == "array":
                self.array += kept.numpy()
                return x - torch.from_numpy(self.array).float()
            if kind == "count":
                self.count += int((x > 0).sum())
                return x / (1 + self.count)
            self.rows.append(float(kept.sum()))
            return x / len(self.rows)

    return Layer()


# name -> (what is said, the error, what makes the model)
MODELS = {
    **{
        kind: (rf"module.*\.{kind}.*changed by a private pass", UsageError,
               lambda kind=kind: after_a_linear_one(moving_layer(kind)))
        for kind in ("mean", "code", "array", "count", "rows")
    },
    "batch_norm": (
        "changed by a private pass.*GroupNorm", UsageError,
        lambda: after_a_linear_one(torch.nn.Sequential(torch.nn.Unflatten(1, (3, 1)),
                                   torch.nn.Upsample(2), torch.nn.BatchNorm1d(3),
                                   torch.nn.AvgPool1d(2), torch.nn.Flatten())),
    ),
    "instance_norm_with_statistics": (
        "changed by a private pass", UsageError,
        lambda: after_a_linear_one(torch.nn.Sequential(torch.nn.Unflatten(1, (3, 1)),
                                   torch.nn.Upsample(2),
                                   torch.nn.InstanceNorm1d(3, track_running_stats=True),
                                   torch.nn.AvgPool1d(2), torch.nn.Flatten())),
    ),
    "a_buffer_that_batches_update": (
        "seen = 'state'.*changed by a private pass", UsageError,
        lambda: after_a_linear_one(counting_layer()),
    ),
    "a_running_mean_in_a_number": (
        "seen = 'state': was changed by a private pass", UsageError,
        lambda: after_a_linear_one(
            remembering_layer(0.0, lambda seen, x: 0.9 * seen + 0.1 * x.abs().mean().item())
        ),
    ),
    "a_memory_that_vmap_computes": (
        "seen = 'state'", UsageError,
        lambda: after_a_linear_one(
            remembering_layer(torch.zeros(()), lambda seen, x: x.detach().abs().mean())
        ),
    ),
    "an_embedding_that_rescales": (
        r"table\.weight = 'state'", UsageError, lambda: embedding(max_norm=0.1)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_mixes_or_keeps_examples_is_refused(name):
    match, error, make = MODELS[name]
    with pytest.raises(error, match=f"(?s){match}"):
        Loop(model := make()).run.backward(model, loss_of, run_tests.data()[:3])


@pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap")
@refused(r"loss\.centres = 'state'.*changed by a private pass")
def a_centre_loss_with_state_outside_of_the_module():
    class CentreLoss:
        centres = torch.zeros(3, 3)

        def __init__(self):
            self.centres = torch.zeros(3, 3)

        def __call__(self, model, batch):
            out, y = model(batch[0]), batch[1]
            self.centres[int(y[0])] = 0.5 * (self.centres[int(y[0])] + out[0].detach())
            return (out - self.centres[y]).square().sum()

    loop = Loop()
    loop.run.backward(loop.model, CentreLoss(), loop.data[:3])


@refused("contribution of an example = 'not its own'")
def a_memory_that_no_attribute_shows():
    memory = iter(range(1, 100))
    loop = Loop()
    loop.run.backward(loop.model, lambda m, b: next(memory) * 1e-3 * loss_of(m, b), loop.data[:3])


@refused("rows of several units")
def a_row_of_many_units():
    loop = Loop()
    x, y = loop.batch()
    loop.run.backward(loop.model, loss_of, (x.mean(0, keepdim=True), y[:1]))
    loop.optimizer.step()


@refused("rows of several units")
def mining_of_hard_examples():
    loop = Loop()
    x, y = loop.batch()
    hard = functional.cross_entropy(loop.model(x), y, reduction="none").topk(1).indices
    loop.run.backward(loop.model, loss_of, (x[hard], y[hard]))
    loop.optimizer.step()


@refused("a sum that was not clipped.*norm .*more than")
def a_sum_of_the_caller_that_is_not_clipped():
    loop = Loop(clipped_by_caller=True)
    for x, y in loop.loader:
        (1e4 * functional.cross_entropy(loop.model(x), y, reduction="sum")).backward()
        loop.optimizer.step()


@refused("examples = None|noise only")
def a_refused_sum_is_not_released():
    loop = Loop()
    batch = loop.batch()
    memory = iter(range(1, 100))
    with contextlib.suppress(UsageError):
        loop.run.backward(loop.model, lambda m, b: next(memory) * 1e-3 * loss_of(m, b), batch)
    loop.optimizer.step()


@refused("adds up gradients before they are clipped")
def a_data_parallel_wrapper():
    loop = Loop()
    wrapper = torch.nn.Module()
    wrapper.module = loop.model
    wrapper.__class__ = torch.nn.parallel.DistributedDataParallel
    loop.run.backward(wrapper, loss_of, loop.data[:2])


@harmless
def eval_mode():
    loop = Loop()
    loop.model.eval()
    loop.steps()
    loop.is_right()


@harmless
def tied_weights():
    """One example's gradient of a shared weight is clipped as a whole."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    loop = Loop(torch.nn.Sequential(layer, torch.nn.Tanh(), layer))
    loop.run.backward(loop.model, lambda m, b: 1e3 * loss_of(m, b), loop.data[:1])
    norm = sum(float(total.square().sum()) for total in loop.run._sums) ** 0.5
    assert norm <= CLIP
    assert all(p.requires_grad for p in loop.model.parameters())
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    other[2].weight = other[0].weight
    loop = Loop(other)
    loop.run.backward(other, loss_of, loop.data[:1])
    run_tests.backward(other, loss_of, tuple(part[:1] for part in loop.data.tensors), 1e3)
    found = [p.grad.clone() for p in other.parameters()]
    wanted = torch.autograd.grad(loss_of(other, loop.data[:1]), list(other.parameters()))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


@harmless
def clipping_again():
    loop = Loop()
    for batch in loop.loader:
        loop.run.backward(loop.model, loss_of, batch)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)  # finds nothing
        loop.optimizer.step()
    loop.is_right()


@harmless
def no_zero_grad():
    loop = Loop()
    loop.steps(zero=False)
    loop.is_right()


# --- secrets -------------------------------------------------------------------------------


@harmless
def a_readable_checkpoint():
    loop = Loop(seed=None)
    loop.steps(2)
    state = loop.optimizer.state_dict()
    torch.save(state, "optimizer.pt")
    found = Path("optimizer.pt").read_bytes()
    noise = loop.run.noise
    seed = bytes.fromhex(f"{loop.run.sampler._seed:064x}")
    for secret in (noise._key.tobytes(), seed, seed.hex().encode().lstrip(b"0")):
        assert secret not in found
    for buffer in noise._buffers():
        for row in buffer.reshape(-1, buffer.shape[-1]):
            assert row.numpy().tobytes() not in found
    for file in Path("mfopt-keys").iterdir():
        assert os.stat(file).st_mode & 0o777 == 0o600
    assert os.stat("mfopt-keys").st_mode & 0o777 == 0o700
    loop.steps(3)
    loop.optimizer.state_dict()
    assert {file.suffix for file in Path("mfopt-keys").iterdir()} == {".key", ".ledger"}


def saved_state():
    loop = Loop(seed=None)
    loop.steps(2)
    return loop.optimizer.state_dict()


@refused("takes back noise that 4 steps were released with.*both count against privacy")
def an_earlier_state_of_the_same_run():
    loop = Loop(seed=None)
    loop.steps(2)
    state = loop.optimizer.state_dict()
    loop.steps(2)
    loop.optimizer.load_state_dict(state)


@refused("state = 'step 3': was released already, with another sum: 4 steps.*newest state")
def an_older_checkpoint_at_another_rate():
    loop = Loop(seed=None)
    loop.steps(2)
    states = loop.model.state_dict(), loop.optimizer.state_dict()
    states = copy.deepcopy(states)
    loop.steps(2)
    loop = Loop(seed=None)
    loop.model.load_state_dict(states[0])
    loop.optimizer.load_state_dict(states[1])
    loop.optimizer.param_groups[0]["lr"] = 5.0
    loop.steps(2)


@refused("belongs to a run that is alive")
def two_live_runs_of_one_key():
    loop = Loop(seed=None)
    loop.steps(2)
    Loop(seed=None).optimizer.load_state_dict(loop.optimizer.state_dict())


@harmless
def an_older_checkpoint_repeated():
    loop = Loop(seed=None)
    loop.steps(2)
    states = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.steps(2)
    ended = [p.detach().clone() for p in loop.model.parameters()]
    loop = Loop(seed=None)
    loop.model.load_state_dict(states[0])
    (ledger,) = Path("mfopt-keys").glob("*.ledger")
    whole = ledger.read_text()
    ledger.write_text(whole[:-20])  # killed while it wrote
    loop.optimizer.load_state_dict(states[1])
    loop.steps(2)
    run_tests.same(loop.model, ended)
    assert ledger.read_text() == whole[:-20] + "\n" + whole.splitlines(keepends=True)[-1]
    assert [line.split()[0] for line in whole.splitlines()] == list("0123")


@refused("does not hold .*key_folder")
def a_checkpoint_without_its_key():
    state = saved_state()
    Loop(key_folder="elsewhere").optimizer.load_state_dict(state)


@refused("ledger .*is not there, which says what was released")
def a_checkpoint_without_the_ledger_of_its_key():
    state = saved_state()
    (ledger,) = Path("mfopt-keys").glob("*.ledger")
    ledger.unlink()
    Loop().optimizer.load_state_dict(state)


@refused("can be read by others")
def a_key_that_all_may_read():
    state = saved_state()
    (file,) = Path("mfopt-keys").glob("*.key")
    file.chmod(0o644)
    Loop().optimizer.load_state_dict(state)


@refused("damaged")
def a_changed_checkpoint():
    state = saved_state()
    state["mfopt_noise"]["sealed"][-1] ^= 1
    Loop().optimizer.load_state_dict(state)


# --- runs without a guarantee ---------------------------------------------------------------


@refused("the guarantee of such a run is none: seed pinned.*allow_uncertified=True")
def a_pinned_seed():
    Loop(allow_uncertified=False)


@refused("factorization = 'an estimate'.*none: not certified.*mfopt certify")
def an_estimate():
    from mfopt.torch import PrivateRun

    PrivateRun(
        run_tests.stated(run_tests.factorization().strategy, run_tests.SCHEME), RECORDS, CLIP
    )


@refused("none: seed pinned")
def opacus_a_pinned_seed():
    LikeOpacus(allow_uncertified=False)


@harmless
def what_a_run_says_of_its_privacy():
    assert Loop().run.guarantee == "none: seed pinned"
    assert Loop(seed=None).run.guarantee == str(run_tests.factorization().guarantee)


# --- the loop of Opacus --------------------------------------------------------------------


@refused("backward = 'of 2 passes'")
def opacus_one_more_backward():
    loop = LikeOpacus()
    batch = loop.batch()
    loop.backward(batch)
    loop.plain(batch)
    loop.optimizer.step()


@harmless
def opacus_other_optimizers():
    """Of a layer: before the step it finds nothing."""
    loop = LikeOpacus()
    other = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    for batch in loop.loader:
        loop.backward(batch)
        other.step()
        loop.optimizer.step()
    loop.is_right()


@refused("is not in the optimizer of the run")
def opacus_a_part_unfrozen_later():
    from mfopt.torch import make_private

    model = run_tests.network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    model, optimizer, loader = make_private(
        model, optimizer, run_tests.data(), run_tests.factorization(), CLIP
    )
    model._module[0].requires_grad_(True)
    run_tests.epoch(model, optimizer, loader)


@refused("stepped by a GradScaler")
def opacus_a_scaler():
    loop, scaler = LikeOpacus(), torch.amp.GradScaler("cpu")
    x, y = loop.batch()
    loop.optimizer.zero_grad()
    scaler.scale(functional.cross_entropy(loop.model(x), y)).backward()
    scaler.step(loop.optimizer)


@refused("seen = 'state'.*private pass")
def opacus_a_state_from_batch_to_batch():
    layer = remembering_layer(torch.zeros(()), lambda seen, x: x.detach().abs().mean() + seen)
    LikeOpacus(model=after_a_linear_one(layer)).steps()


@refused("more than 1 value per channel", ValueError)
def opacus_batch_norm_trained_later():
    layer = torch.nn.BatchNorm1d(3, affine=False).eval()
    loop = LikeOpacus(model=after_a_linear_one(layer))
    loop.model.train()
    loop.steps()


@refused("gradient 0 for every example")
def opacus_a_layer_that_centres_the_batch():
    class Centred(torch.nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    LikeOpacus(model=after_a_linear_one(Centred())).steps()


def opacus_steps_with(loss):
    LikeOpacus().steps(loss=loss)


@refused("the loss mixes examples")
def opacus_contrastive_loss():
    def contrast(features, labels):
        scores = functional.normalize(features) @ functional.normalize(features).T
        return functional.cross_entropy(scores, torch.arange(len(features)))

    opacus_steps_with(contrast)


@refused("the loss mixes examples")
def opacus_loss_of_centred_outputs():
    opacus_steps_with(lambda scores, labels: (scores - scores.mean(0)).square().mean())


@refused("the loss mixes examples")
def opacus_hardest_of_the_losses():
    def hardest(scores, labels):
        losses = functional.cross_entropy(scores, labels, reduction="none")
        return losses.topk(max(1, len(labels) // 2)).values.mean() if len(labels) else losses.sum()

    opacus_steps_with(hardest)


@refused("the loss mixes examples, or divides by what depends on them")
def opacus_weights_of_classes():
    weight = torch.tensor([1.0, 5.0, 25.0])
    opacus_steps_with(lambda scores, y: functional.cross_entropy(scores, y, weight=weight))


@refused("depends on earlier batches")
def opacus_loss_that_remembers():
    centres = [torch.zeros(3)]

    def loss(scores, labels):
        value = (scores - centres[0]).square().mean()
        if len(labels):
            centres[0] = 0.5 * centres[0] + scores.detach().mean(0)
        return value

    opacus_steps_with(loss)


@refused("trainable tensors beside the module")
def opacus_centres_that_are_trained():
    centres = torch.nn.Parameter(torch.zeros(3, 3))
    opacus_steps_with(lambda scores, labels: (scores - centres[labels]).square().mean())


@harmless
def opacus_losses_of_single_examples():
    average = [torch.zeros(())]

    def plain_mean(scores, labels):
        return functional.cross_entropy(scores, labels)

    def by_hand(scores, labels):
        losses = -scores.log_softmax(-1).gather(1, labels[:, None])
        return losses.sum() / max(1, len(labels))

    def logged(scores, labels):
        value = functional.nll_loss(scores.log_softmax(1), labels)
        if len(labels):
            average[0] = 0.9 * average[0] + 0.1 * value.detach()
        return value

    for loss in (plain_mean, by_hand, logged):
        loop = LikeOpacus()
        loop.steps(loss=loss)
        loop.is_right()


@refused("rows of several units")
def opacus_mining_of_hard_examples():
    loop = LikeOpacus()
    x, y = loop.batch()
    with torch.no_grad():
        hard = functional.cross_entropy(loop.model(x), y, reduction="none").topk(1).indices
    loop.backward((x[hard], y[hard]))
    loop.optimizer.step()


@refused("normalizer", AttributeError)
def another_normalizer():
    Loop().run.normalizer = 1.0


@refused("gradient 0 for every example")
def contrastive_loss():
    loop = Loop()

    def contrast(model, batch):
        features = model(batch[0])
        return functional.cross_entropy(features @ features.T, torch.arange(len(features)))

    for batch in loop.loader:
        if len(batch[0]):
            loop.run.backward(loop.model, contrast, batch)
        loop.optimizer.step()


@refused("not in the module: they would get noise only")
def tensor_of_the_optimizer_alone():
    model, scale = run_tests.network(), torch.nn.Parameter(torch.ones(()))
    run = run_tests.plain()[0].__class__(run_tests.factorization(), run_tests.RECORDS, CLIP)
    run.attach(torch.optim.SGD([*model.parameters(), scale], lr=1.0))
    run.backward(model, loss_of, tuple(x[:2] for x in run_tests.data().tensors))


@refused("was replaced: the run has another optimizer")
def step_of_a_replaced_optimizer():
    loop = Loop()
    loop.steps(2)
    loop.run.attach(torch.optim.SGD(loop.model.parameters(), lr=1.0))
    loop.optimizer.step()


@harmless
def optimizer_replaced_between_steps():
    loop = Loop()
    for batch in loop.loader:
        loop.run.backward(loop.model, loss_of, batch)
        loop.optimizer.step()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1.0)
        loop.run.attach(loop.optimizer)
    loop.is_right()


@harmless
def compiled_model():
    loop = Loop()
    compiled = torch.compile(loop.model, backend="eager")
    for batch in loop.loader:
        loop.run.backward(compiled, loss_of, batch)
        loop.optimizer.step()
    loop.is_right()


@refused("a fork would release the same noise")
def step_in_a_fork():
    loop = Loop()
    reader, writer = os.pipe()
    if not os.fork():
        try:
            loop.steps(1)
        except UsageError as problem:
            os.write(writer, str(problem).encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 10_000).decode()
    os.wait()
    if text:
        raise UsageError(text)


# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_wrong_loop_is_refused(name):
    loop, error, match = REFUSED[name]
    with pytest.raises(error, match=f"(?s){match}"):
        loop()


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_wrong_loop_is_harmless(name):
    HARMLESS[name]()


def test_the_callers_clipping_is_released_with_noise():
    loop = Loop(clipped_by_caller=True)
    for step, batch in enumerate(loop.loader):
        del batch
        sums = run_tests.clipped_sum(loop.model, loop.run.sampler[step].tolist())
        for p, total in zip(loop.model.parameters(), sums, strict=True):
            p.grad = total
        loop.optimizer.step()
    loop.is_right()
