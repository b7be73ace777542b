"""Wrong loops that no check was written for: what a pass keeps, and what a sum holds, shows them.

Each keeps something of a batch, or mixes units, in a way of its own. Two pass: state outside of
Python is not seen, and an entry that the first pass adds may be a table of positions.
"""

import types
from pathlib import Path

import pytest
import test_torch_run as run_tests
from lazy_torch import functional, needs_torch, own_folder, torch  # noqa: F401
from test_misuse_torch import Loop
from test_torch_run import loss_of

from mfopt.errors import UsageError

pytestmark = [
    pytest.mark.usefixtures("needs_torch", "own_folder"),
    pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


def keeps(store):
    """A model that calls ``store(values of a pass, as numbers)`` and adds what it gives."""

    def build():
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.memory = run_tests.network(), store

            def forward(self, x):
                return self.layers(x) + self.memory(x.detach())

        return Model()

    return build


def mean_of(x):
    """A number of the data; inside vmap a pass goes one example at a time."""
    return float(x.abs().mean())


def first_entry():
    memory = {}
    return keeps(lambda x: memory.setdefault("first", mean_of(x)))


def counter_of_data():
    memory = {"sum": 0.0}

    def store(x):
        memory["sum"] += mean_of(x)
        return memory["sum"]

    return keeps(store)


def default_argument():
    def store(x, memory=[0.0]):  # noqa: B006
        memory.append(mean_of(x))
        return memory[-2]

    return keeps(store)


def function_attribute():
    def store(x):
        store.sum = getattr(store, "sum", 0.0) + mean_of(x)
        return store.sum

    return keeps(store)


def namespace():
    memory = types.SimpleNamespace(scale=1.0)

    def store(x):
        memory.scale = 0.9 * memory.scale + mean_of(x)
        return memory.scale

    return keeps(store)


def bytes_of_data():
    memory = bytearray(8)

    def store(x):
        memory[0] = int(10 * mean_of(x)) % 256
        return memory[0] / 256

    return keeps(store)


def generator():
    def running():
        total = 0.0
        while True:
            total += yield total

    memory = running()
    next(memory)
    return keeps(lambda x: memory.send(mean_of(x)))


def unprobed_file():
    path = Path("memory")

    def store(x):
        value = float(path.read_text()) if path.exists() else 0.0
        path.write_text(str(mean_of(x)))
        return value

    return keeps(store)


def frozen_weight():
    def build():
        model = run_tests.network()
        model.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        model.register_forward_hook(lambda m, a, y: m.scale.data.fill_(mean_of(a[0].detach())) + y)
        return model

    return build


def weight_moved_in_the_pass():
    def build():
        model = run_tests.network()

        def move(module, arguments):
            with torch.no_grad():
                module[2].bias.data += mean_of(arguments[0].detach())

        model.register_forward_pre_hook(move)
        return model

    return build


def attribute_of_a_hook():
    def build():
        model = run_tests.network()

        def after(module, arguments, output):
            value = getattr(module, "last", 0.0)
            module.last = mean_of(arguments[0].detach())
            return output + value

        model[0].register_forward_hook(after)
        return model

    return build


def batch_norm():
    return lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
    )


def instance_statistics():
    return lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 4),
        torch.nn.Unflatten(1, (2, 2)),
        torch.nn.InstanceNorm1d(2, track_running_stats=True),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    )


MODELS = [
    counter_of_data,
    default_argument,
    function_attribute,
    namespace,
    bytes_of_data,
    generator,
    frozen_weight,
    weight_moved_in_the_pass,
    attribute_of_a_hook,
    batch_norm,
    instance_statistics,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_model_that_keeps_a_batch_is_refused(model):
    loop = Loop(model=model()())
    with pytest.raises((UsageError, ValueError)):  # PyTorch's: one example has no variance
        loop.steps()
    assert loop.run.step <= 2


@pytest.mark.parametrize("model", [unprobed_file, first_entry], ids=lambda x: x.__name__)
def test_what_the_probe_does_not_see(model):
    """State in a file, and an entry that the first pass adds and nothing changes."""
    loop = Loop(model=model()())
    loop.steps(3)


def reweighted(run, model, batch):
    weights = torch.ones(len(batch[0]))

    def loss(model, part):
        value = loss_of(model, part)
        weights[0] += float(value.detach())
        return value * float(weights[0])

    return run.backward(model, loss, batch)


def mixed_up(run, model, batch):
    share = 0.5
    x = share * batch[0] + (1 - share) * batch[0].flip(0)
    return run.backward(model, loss_of, (torch.cat([x, batch[0]]), batch[1].repeat(2)))


def without_the_last(run, model, batch):
    return run.backward(model, loss_of, (batch[0][:-1], batch[1][:-1]))


def packed(run, model, batch):
    return run.backward(model, loss_of, (batch[0].mean(0, keepdim=True), batch[1][:1]))


def twice(run, model, batch):
    run.backward(model, loss_of, batch)
    return run.backward(model, loss_of, batch)


def half_by_hand(run, model, batch):
    run.backward(model, loss_of, (batch[0][:1], batch[1][:1]))
    return loss_of(model, batch).backward()


def gradient_added(run, model, batch):
    run.backward(model, loss_of, batch)
    model[0].weight.grad = torch.ones_like(model[0].weight)


def hidden_gradient(run, model, batch):
    run.backward(model, loss_of, batch)
    loss_of(model, batch).backward()


def another_model(run, model, batch):
    return run.backward(run_tests.network(), loss_of, batch)


def model_by_name(run, model, batch):
    return run.backward(model, lambda _, part: loss_of(model, part), batch)


def several_numbers(run, model, batch):
    return run.backward(model, lambda m, part: m(part[0]), batch)


def part_frozen(run, model, batch):
    model[0].weight.requires_grad_(False)
    return run.backward(model, loss_of, batch)


def nothing(run, model, batch):
    return None


PASSES = [
    reweighted,
    mixed_up,
    without_the_last,
    packed,
    twice,
    half_by_hand,
    gradient_added,
    hidden_gradient,
    another_model,
    model_by_name,
    several_numbers,
    nothing,
]


@pytest.mark.parametrize("wrong", PASSES, ids=lambda wrong: wrong.__name__)
def test_a_sum_of_other_rows_is_refused(wrong):
    loop = Loop()
    batches = iter(loop.loader)
    loop.run.backward(loop.model, loss_of, next(batches))
    loop.optimizer.step()
    batch = next(batches)
    assert len(batch[0]) > 1

    def go():
        wrong(loop.run, loop.model, batch)
        loop.optimizer.step()

    with pytest.raises((UsageError, RuntimeError)):
        go()
    assert loop.run.step == 1


RIGHT = {
    "dropout": lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 3)
    ),
    "layer norm": lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    ),
    "group norm": lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.GroupNorm(2, 8), torch.nn.Linear(8, 3)
    ),
    "weight norm": lambda: torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 8)), torch.nn.Linear(8, 3)
    ),
    "batch norm in evaluation": lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3, affine=False).eval()
    ),
    "in place": lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 3)
    ),
    "no bias": lambda: torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_is_not_refused(name):
    loop = Loop(model=RIGHT[name]())
    loop.steps()
    assert loop.run.step == 5


def test_losses_that_depend_on_one_example_are_not_refused():
    for loss in (
        lambda m, b: functional.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
        lambda m, b: loss_of(m, b) + 1e-3 * m(b[0]).square().mean(),
        lambda m, b: functional.kl_div(
            m(b[0]).log_softmax(1), m(b[0] * 0.9).softmax(1).detach(), reduction="batchmean"
        ),
    ):
        loop = Loop()
        for batch in loop.loader:
            loop.run.backward(loop.model, loss, batch)
            loop.optimizer.step()
        assert loop.run.step == 5
