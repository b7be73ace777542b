"""Wrong loops in PyTorch, and that of Opacus: each is refused, or shown to be harmless.

Half of those that keep something of a batch were written after the probe that refuses them. One
passes: an entry that the first pass adds and nothing changes.
"""

import contextlib
import copy
import functools
import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import test_torch_run as run_tests
from lazy_torch import functional, needs_torch, own_folder, torch  # noqa: F401
from test_torch_run import CLIP, RECORDS, LikeOpacus, Loop, loss_of

from mfopt.errors import UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork.. was called"),
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate"),
    pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


# --- one pass and one step -------------------------------------------------------------------


def made_twice(loop, batch):
    loop.backward(batch)
    loop.backward(batch)


def one_more_backward(loop, batch):
    loop.backward(batch)
    loop.plain(batch)


def zero_grad_between(loop, batch):
    loop.backward(batch)
    loop.optimizer.zero_grad()


def a_scaler(loop, batch):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))  # as for the batch before
    loop.backward(batch, lambda m, b: scaler.scale(loss_of(m, b)))
    scaler.step(loop.optimizer)


def a_group_added_later(loop, batch):
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    loop.backward(batch)


def an_optimizer_that_was_replaced(loop, batch):
    loop.run.attach(torch.optim.SGD(loop.model.parameters(), lr=1.0))


def a_data_parallel_wrapper(loop, batch):
    wrapper = torch.nn.Module()
    wrapper.module = loop.model
    wrapper.__class__ = torch.nn.parallel.DistributedDataParallel
    loop.run.backward(wrapper, loss_of, batch)


def a_part_frozen(loop, batch):
    loop.model[0].requires_grad_(False)
    loop.backward(batch)


def mining_of_hard_examples(loop, batch):
    losses = functional.cross_entropy(loop.model(batch[0]), batch[1], reduction="none")
    hard = losses.topk(1).indices
    loop.optimizer.zero_grad()
    loop.backward((batch[0][hard], batch[1][hard]))


def a_running_centre(loop, batch):
    """Its state comes with the first pass."""

    def centred(model, part):
        output = model(part[0])
        loop.centre = getattr(loop, "centre", 0.0) + output.detach().mean(0)
        return (output - loop.centre).square().sum()

    loop.backward(batch, centred)


def a_centre_loss(loop, batch):
    """State outside of the module."""
    centres = torch.zeros(3, 3)

    def centre_loss(model, part):
        output, label = model(part[0]), int(part[1][0])
        centres[label] = 0.5 * (centres[label] + output[0].detach())
        return (output - centres[label]).square().sum()

    loop.backward(batch, centre_loss)


def a_memory_that_no_attribute_shows(loop, batch):
    memory = iter(range(1, 100))
    loop.backward(batch, lambda m, b: next(memory) * 1e-3 * loss_of(m, b))


def a_refused_sum_released(loop, batch):
    with contextlib.suppress(UsageError):
        a_memory_that_no_attribute_shows(loop, batch)


def rows_mixed_up(loop, batch):
    x = 0.5 * batch[0] + 0.5 * batch[0].flip(0)
    loop.backward((torch.cat([x, batch[0]]), batch[1].repeat(2)))


def an_ascent_by_raw_gradients(loop, batch):
    """Of sharpness-aware minimization."""
    loss_of(loop.model, batch).backward()


def raw_gradients_of_parameters(loop, batch):
    torch.autograd.grad(loss_of(loop.model, batch), [*loop.model.parameters()])


def a_loss_of_the_whole_batch(loop, batch):
    loop.backward(batch, lambda m, b: loss_of(m, b) + loss_of(m, batch))


# what a pass does before a step -> what is said of it
PASSES = {
    made_twice: "in its sum already",
    one_more_backward: r"grad = 'not empty'.*run\.backward\(module, loss, batch\) in place of",
    Loop.plain: r"grad = 'not empty'.*in place of loss.backward",
    zero_grad_between: "were drawn for the step.*no zero_grad",
    lambda loop, batch: None: "units = 0: .*were drawn for the step",
    lambda loop, batch: loop.optimizer.step(lambda: loop.backward(batch)): "closure",
    a_scaler: "optimizer = 'stepped by a GradScaler'.*autocast",
    a_group_added_later: "other parameters than when it was attached",
    an_optimizer_that_was_replaced: "was replaced: the run has another optimizer",
    a_data_parallel_wrapper: "adds up gradients before they are clipped",
    a_part_frozen: "has other parameters than when it was attached",
    mining_of_hard_examples: "did not come from the run's loader",
    a_running_centre: r"loss.*centre = 'state'.*changed by a private pass",
    a_centre_loss: r"loss.*centres.* = 'state'.*changed by a private pass",
    a_memory_that_no_attribute_shows: "contribution of an example = 'not its own'",
    a_refused_sum_released: "units = 0",
    rows_mixed_up: "mixed by add",
    an_ascent_by_raw_gradients: "gradient = 'of parameters'.*nothing clips it",
    raw_gradients_of_parameters: "gradient = 'of parameters'.*nothing clips it",
    a_loss_of_the_whole_batch: "uses rows of the loader beside its example",
    lambda loop, batch: loop.backward((batch[0][:-1], batch[1][:-1])): "were drawn for the step",
    lambda loop, batch: loop.backward(batch[0].sum(0)): "mixed by a sum",
    lambda loop, batch: loop.backward(
        (torch.zeros(batch[0].shape).add_(batch[0].sum(0)), batch[1])
    ): "mixed by add_",
    lambda loop, batch: (
        kept := torch.zeros(batch[0].shape),
        kept.__setitem__(0, batch[0].sum(0)),
        loop.backward((kept, batch[1])),
    ): "mixed by a sum",
    lambda loop, batch: (
        next(loop.model.parameters()).data.fill_(batch[0].sum()),
        loop.backward(batch),
    ): ("fill_.*wrote rows of a private batch"),
    lambda loop, batch: (
        next(loop.model.parameters()).data.__setitem__(0, batch[0].sum()),
        loop.backward(batch),
    ): ("__setitem__.*wrote rows of a private batch"),
    lambda loop, batch: (
        next(loop.model.parameters()).data.view(-1)[:4].copy_(batch[0][0]),
        loop.backward(batch),
    ): ("copy_.*wrote rows of a private batch"),
    lambda loop, batch: (
        loop.model.register_buffer("center", batch[0].mean(0)),
        loop.backward(batch),
    ): ("a batch.*wrote rows of a private batch"),
    lambda loop, batch: loop.backward(batch, lambda _, b: loss_of(run_tests.network(), b)): (
        "loss = 'constant': has gradient 0 for every example"
    ),
    lambda loop, batch: loop.backward(batch, lambda m, b: m(b[0])): "must give a scalar",
}


@pytest.mark.parametrize("number", range(30))
def test_a_wrong_pass_is_refused(number):
    wrong, match = list(PASSES.items())[number]
    loop = Loop()
    batch = loop.batch()
    assert len(batch[0]) > 1
    with pytest.raises(UsageError, match=f"(?s){match}"):  # noqa: PT012
        wrong(loop, batch)
        loop.optimizer.step()
    assert loop.run.step == 1


def test_numbers_of_a_unit_set_by_index_are_its_own():
    loop = Loop()
    x, labels = loop.batch()
    classes, norms = torch.zeros(len(labels), dtype=torch.long), torch.zeros(len(x))
    for i in range(len(x)):
        classes[i], norms[i] = torch.tensor([2, 0, 1])[labels[i]], x[i].norm()
    loop.backward((x, classes, norms), lambda m, b: (loss_of(m, b[:2]) * b[2]).sum())
    loop.optimizer.step()
    assert loop.run.step == 2


# --- models that keep a batch ------------------------------------------------------------------


def model_that(remember, layers=None):
    """A model whose outputs are scaled by ``remember(model, inputs)``."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers or run_tests.network()
            self.register_buffer("mean", torch.zeros(3))
            self.code = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            self.array, self.count, self.rows, self.seen = np.zeros(3), 0, [], torch.zeros(())

        def forward(self, x):
            return self.layers(x) * (1 + remember(self, x.detach()))

    return Model()


def size(x):
    """A number of the data; inside vmap a pass goes one example at a time."""
    return float(x.abs().mean())


def moved_buffer(model, x):
    model.mean.data = 0.9 * model.mean + x.mean(0)[:3]
    return model.mean


def moved_frozen_parameter(model, x):
    model.code.data = 0.9 * model.code + x.mean(0)[:3]
    return model.code


def numpy_array(model, x):
    model.array += x.mean(0)[:3].numpy()
    return torch.from_numpy(model.array).float()


def tensor_of_vmap(model, x):
    original, model.seen = model.seen, x.abs().mean()
    return original


def weight_moved_in_the_pass(model, x):
    with torch.no_grad():
        model.layers[2].bias.data += size(x)
    return 0.0


def hook_that_remembers():
    model = run_tests.network()

    def remember(module, arguments, output):
        value = getattr(module, "last", 0.0)
        module.last = size(arguments[0].detach())
        return output + value

    model[0].register_forward_hook(remember)
    return model


def normalized(layer):
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Unflatten(1, (2, 2)), layer, torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    )  # fmt: skip


def rescaled_embedding():
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 3, max_norm=0.1)

        def forward(self, x):
            return self.table((x[:, 0] > 0).long())

    return Bag()


MODELS = {
    **{
        remember.__name__: (lambda remember=remember: model_that(remember), match)
        for remember, match in (
            (moved_buffer, r"module\.mean = 'state'"),
            (moved_frozen_parameter, r"module\.code = 'state'"),
            (numpy_array, r"module\.array = 'state'"),
            (tensor_of_vmap, r"module\.seen = 'state'"),
            (weight_moved_in_the_pass, r"layers\.2\.bias"),
        )
    },
    "weight of a hook": (
        lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(4, 3)),
        r"parametrizations, or parametrize with a mask, not by hooks \(prune",
    ),
    "hook": (hook_that_remembers, "last"),
    "embedding": (rescaled_embedding, r"table\.weight = 'state'"),
    "instance norm": (
        lambda: normalized(torch.nn.InstanceNorm1d(2, track_running_stats=True)),
        "changed by a private pass.*GroupNorm",
    ),
    "batch norm": (
        lambda: normalized(torch.nn.BatchNorm1d(2)), "normalizes each example by.*GroupNorm"
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", [Loop, LikeOpacus])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_keeps_a_batch_is_refused(name, variant):
    make, match = MODELS[name]
    loop = variant(model=make())
    batch = loop.batch()
    with pytest.raises(UsageError, match=f"(?s){match}"):
        loop.backward(batch)


@pytest.mark.parametrize("number", range(20))
def test_what_remembers_out_of_sight_or_decides_is_refused(number):
    from misuse_loops import WRONG, outcome

    kinds = "a model with", "another class", "JAX: sums of a state", "a loss by two means"
    name = [x for x in WRONG if x.startswith(kinds)][number]
    assert outcome(WRONG[name]).startswith("refused"), name


def test_random_numbers_are_those_before_where_a_probe_raises():
    from mfopt.torch.rows import seeded

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(IndexError), seeded():
        [][0]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def identity(of_rows, of_gradients):
    """The identity of one example, with a rule for vmap, and a gradient, of several."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(context, inputs, output):
            pass

        @staticmethod
        def backward(context, gradient):
            return of_gradients(gradient)

        @staticmethod
        def vmap(info, axes, x):
            return Identity.apply(of_rows(x.movedim(axes[0], 0))), 0

    class Layer(torch.nn.Module):
        def forward(self, x):
            return Identity.apply(x)

    return torch.nn.Sequential(torch.nn.Linear(4, 5), Layer(), torch.nn.Linear(5, 3))


def centred(rows):
    return rows - rows.mean(0, keepdim=True)


@pytest.mark.parametrize("variant", [Loop, LikeOpacus])
def test_a_rule_for_vmap_that_mixes_examples_is_refused(variant):
    def step(*changes):
        loop = variant(model=identity(*changes))
        loop.backward(loop.batch())

    step(torch.clone, torch.clone)
    for changes in ((centred, torch.clone), (torch.clone, centred)):
        with pytest.raises(UsageError, match=r"contribution of an example.*or mix examples"):
            step(*changes)


def test_what_the_probe_does_not_see():
    """What the first pass adds, as a table of positions would be."""
    memory = {}
    Loop(model=model_that(lambda model, x: memory.setdefault("first", size(x)))).steps(3)
    assert memory


# --- losses of the loop of Opacus ----------------------------------------------------------------


def contrast(scores, labels):
    features = functional.normalize(scores)
    return functional.cross_entropy(features @ features.T, torch.arange(len(features)))


def remembering_loss(scores, labels, centres=[0.0]):  # noqa: B006
    value = (scores - centres[0]).square().mean()
    if len(labels):
        centres[0] = 0.5 * centres[0] + scores.detach().mean(0)
    return value


def trained_centres(scores, labels, centres=[]):  # noqa: B006
    centres = centres or [torch.nn.Parameter(torch.zeros(3, 3))]
    return (scores - centres[0][labels]).square().mean()


def of_some_classes(scores, labels):
    return functional.cross_entropy(scores, labels, reduction="none")[labels > 0].mean()


LOSSES = {
    contrast: "mixes examples by",
    lambda scores, labels: (scores - scores.mean(0)).square().mean(): "mixes examples by",
    remembering_loss: "with sums or other rows",
    trained_centres: "with other trainable tensors",
    of_some_classes: "mixes examples by mean",
}


@pytest.mark.parametrize("number", range(5))
def test_a_loss_that_mixes_examples_is_refused(number):
    loss, match = list(LOSSES.items())[number]
    with pytest.raises(UsageError, match=match):
        LikeOpacus().steps(loss=lambda model, batch: loss(model(batch[0]), batch[1]))


def test_a_loss_that_mixes_examples_is_refused_by_other_ways_to_differentiate():
    loop = LikeOpacus()
    scores = loop.model(loop.batch()[0])
    with pytest.raises(UsageError, match="mixes examples by"):
        torch.autograd.backward(functional.softplus(scores[:, None] - scores[None]).mean())


def test_rows_that_are_given_by_keywords_are_those_of_their_units():
    from mfopt.torch.rows import UnitRows

    rows = UnitRows.of(torch.eye(4), range(4), is_probed=True)
    chosen = torch.index_select(input=rows, dim=0, index=torch.tensor([2, 0]))
    parts = chosen, *torch.split(tensor=rows, split_size_or_sections=3)
    assert [x.units for x in parts] == [(2, 0), (0, 1, 2), (3,)]
    sums = torch.zeros(4)
    torch.sum(input=rows, dim=0, out=sums)
    assert UnitRows.fault_of(sums) == "sum"
    made = torch.zeros(4, 3), torch.zeros(3, 3)
    torch.linalg.qr(UnitRows.of(torch.ones(4, 3), range(4)), out=made)
    assert [*map(UnitRows.fault_of, made)] == ["", "linalg_qr"]


def test_a_loss_of_an_output_among_numbers_is_seen():
    loop = LikeOpacus(run_tests.labelled())
    with pytest.raises(UsageError, match="mixes examples by"):
        loop.steps(loss=lambda model, batch: contrast(model(*batch)["scores"], batch[1]))


def by_hand(model, batch):
    losses = -model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])
    return losses.sum() / max(1, len(losses))


def logged(model, batch, average=[0.0]):  # noqa: B006
    value = functional.nll_loss(model(batch[0]).log_softmax(1), batch[1])
    average[0] = 0.9 * average[0] + 0.1 * value.detach()
    return value


@pytest.mark.parametrize("loss", [by_hand, logged])
def test_a_loss_of_single_examples_is_not_refused(loss):
    loop = LikeOpacus()
    loop.steps(loss=loss)
    loop.is_right()


@pytest.mark.parametrize("name", ["larger of two", "of two classes"])
def test_a_loss_of_parts_of_examples_is_not_refused(name):
    from misuse_loops import RIGHT_LOSSES

    LikeOpacus().steps(loss=lambda model, batch: RIGHT_LOSSES[name](model(batch[0]), batch[1]))


def crossed(scores, labels, **options):
    return functional.cross_entropy(scores, labels, **options)


def added(scores, labels):
    return crossed(scores, labels, reduction="sum")


def of_each(scores, labels):
    """A mean over an example's own entries, of each; the labels say how many there are."""
    return torch.stack([scores[i].square().mean() for i in range(len(labels))] or [scores.sum()])


def of_step(loss, steps=[0.0]):  # noqa: B006
    steps.append(steps[-1] + 0.37)
    return steps[-1] * loss


def in_parts(scores, labels, weight):
    """Σ weight(part) / batch of the means over parts of two rows; the last may have one."""
    parts = zip(torch.split(scores, 2), labels.split(2), strict=True)
    return sum(crossed(s, y) * weight(y) for s, y in parts) / max(1, len(labels))


REDUCED = {  # loss of scores and labels -> what it is; None where it depends on the batch's labels
    "a mean": (crossed, "mean"),
    "a sum": (added, "sum"),
    "a sum over a fixed number": (lambda s, y: added(s, y) / 2.5, "sum"),
    "a sum over the number of the first batch": (lambda s, y: added(s, y) / 3, "sum"),
    "a sum over the batch": (lambda s, y: added(s, y) / max(1, len(y)), "mean"),
    "a sum over a tensor": (lambda s, y: added(s, y) / torch.tensor(len(y)).clamp(1), "mean"),
    "its inverse": (lambda s, y: added(s, y) * (1 / max(1, len(y))), "mean"),
    "by keywords": (lambda s, y: torch.div(input=added(s, y), other=max(1, len(y))), "mean"),
    "over all entries": (lambda s, y: s.square().sum() / max(1, s.numel()), "mean"),
    "a mean and a sum over the batch": (
        lambda s, y: crossed(s, y) - added(s, y) / -max(1, len(y)),
        "mean",
    ),
    "two means": (lambda s, y: crossed(s, y) + s.square().mean(), "mean"),
    "numbers of examples": (lambda s, y: of_each(s, y).mean(), "mean"),
    "numbers over the batch": (lambda s, y: sum(of_each(s, y)) / max(1, len(y)), "mean"),
    "numbers that are added": (lambda s, y: of_each(s, y).sum(), "sum"),
    "weights by label": (lambda s, y: crossed(s, y, weight=torch.tensor([1.0, 2.0, 4.0])), None),
    "a mean over the batch": (lambda s, y: crossed(s, y) / max(1, len(y)), None),
    "a mean times the batch": (lambda s, y: crossed(s, y) * len(y), "sum"),
    "a sum over the batch in place": (lambda s, y: added(s, y).div_(max(1, len(y))), "mean"),
    "weighted means of parts": (lambda s, y: in_parts(s, y, len), "mean"),
    "means of parts": (lambda s, y: in_parts(s, y, lambda part: 2), None),
    "all rows but the last": (lambda s, y: crossed(s, y, reduction="none")[:-1].sum(), None),
    "a mean with weights of the step": (lambda s, y: of_step(crossed(s, y)), "mean"),
    "a sum with weights of the step": (lambda s, y: of_step(added(s, y)), "sum"),
    "numbers of iterated rows": (
        lambda s, y: torch.stack([x.square().sum() for x in s] or [s.sum()]).mean(),
        "mean",
    ),
}


@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("name", REDUCED)
def test_a_loss_is_what_it_was_declared_to_be(name, declared):
    """Else a gradient would grow with the number of examples before it is clipped."""
    loss, actual = REDUCED[name]
    loop = LikeOpacus(loss_reduction=declared)

    def steps():
        loop.steps(loss=lambda model, batch: loss(model(batch[0]), batch[1]))

    if actual == declared:
        steps()
        return
    said = f"loss_reduction.*it is a {actual} over examples"
    if actual is None:
        said = "loss_reduction.*their number enters each|mixes examples by"
    with pytest.raises(UsageError, match=said):
        steps()


# --- other wrong loops ---------------------------------------------------------------------------

REFUSED, HARMLESS = {}, {}


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


@refused("module = 'function': must be of class Module.*in this order")
def loss_before_module():
    loop = Loop()
    loop.run.backward(loss_of, loop.model, loop.batch())


@refused(r"loss = <lambda>: is called as loss\(module, batch\), and raised TypeError: .*not list")
def a_module_called_with_the_whole_batch():
    loop = Loop()
    loop.backward(loop.batch(), lambda model, batch: model(batch).sum())


@refused(r"raised AttributeError: .*no attribute 'parameters'\. .*the model by its own name")
def attributes_of_the_module_of_a_loss():
    loop = Loop()
    loop.backward(loop.batch(), lambda model, batch: sum(p.sum() for p in model.parameters()))


@refused("batch_size = 4: the batches are drawn")
def an_argument_of_a_loader():
    loop = Loop()
    assert len(loop.run.loader(loop.data, shuffle=False, drop_last=False)) == len(loop.loader)
    loop.run.loader(loop.data, batch_size=4)


@refused(r"batch = \[\(4, 3\), 'str'\]: must be tensors.*make numbers of labels that are texts")
def labels_that_are_texts():
    loop = Loop()
    loop.backward((torch.zeros(4, 3), ["a", "b", "a", "b"]))


@refused("optimizer = 'a parameter': .*not in both: no noise, or noise only")
def two_modules_in_one_step():
    modules = torch.nn.ModuleList([run_tests.network(), run_tests.network()])
    loop = Loop(modules)
    loop.run.backward(modules[0], loss_of, loop.batch())


@refused(r"module\.0\.weight = 'a parameter'.*freeze it")
def a_partial_optimizer():
    model = run_tests.network()
    loop = Loop(model, optimizer=torch.optim.SGD(model[2].parameters(), lr=1.0))
    loop.backward(loop.data[:2])


@refused("a second time, beside that run.*deepcopy")
def a_second_run_of_one_layer():
    loop = Loop()
    Loop(loop.model, optimizer=torch.optim.SGD(loop.model[2].parameters(), lr=1.0))


@refused("has a parameter twice")
def a_parameter_twice():
    model = run_tests.network()
    parameters = [*model.parameters(), model[0].weight]
    Loop(model, optimizer=torch.optim.SGD(parameters, lr=1.0))


@refused(r"no optimizer yet.*attach")
def never_attached():
    next(iter(Loop(attach=False).loader))


@refused("not of step 0")
def another_optimizer_steps():
    loop = Loop()
    other = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    start = [p.detach().clone() for p in loop.model.parameters()]
    try:
        for batch in loop.loader:
            loop.backward(batch)
            other.step()
            other.zero_grad()
    finally:
        run_tests.same(loop.model, start)


@refused("has a state from steps")
def attached_after_the_first_step():
    loop = Loop(attach=False)
    optimizer = torch.optim.Adam(loop.model.parameters())
    loop.plain(loop.data[:2])
    optimizer.step()
    loop.run.attach(optimizer)


@refused("not of step 0")
def empty_batches_skipped():
    loop = Loop()
    for batch in loop.loader:
        if len(batch[0]):
            loop.backward(batch)
            loop.optimizer.step()


@refused("not of step 0.*step before the next one")
def accumulation():
    loop = Loop()
    for index, batch in enumerate(loop.loader):
        loop.backward(batch)
        if index % 2:
            loop.optimizer.step()


@refused("clip_norm = 0.1: is set already, and batches, clipping and noise follow")
def settings_changed_in_a_run():
    run = Loop().run
    for name in ("factorization", "normalizer", "sampler", "stream"):
        with contextlib.suppress(UsageError):
            setattr(run, name, getattr(run, name))
            return
    run.stream.clip_norm = 0.1


@refused(r"module\.mean.*changed by a private pass")
def another_mode_within_a_step():
    loop = Loop(model_that(lambda model, x: 0 if model.training else moved_buffer(model, x)))
    x, y = loop.batch()
    loop.backward((x[:1], y[:1]))
    loop.model.eval()
    loop.backward((x[1:], y[1:]))


@refused("gradient 0 for every example")
def contrastive_loss():
    Loop().steps(loss=lambda model, batch: contrast(model(batch[0]), batch[1]))


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


# --- the loop of Opacus --------------------------------------------------------------------------


@refused("backward = 'of 2 passes'")
def opacus_one_more_backward():
    loop = LikeOpacus()
    batch = loop.batch()
    loop.backward(batch)
    loss_of(loop.model, batch).backward()
    loop.optimizer.step()


@refused("backward = 'of 2 passes'")
def opacus_a_loss_of_two_halves_of_a_batch():
    loop = LikeOpacus()
    halves = zip(*(x.tensor_split(2) for x in loop.batch()), strict=True)
    sum(loss_of(loop.model, part) for part in halves).backward()
    loop.optimizer.step()


@refused("gradient 0 for every example")
def opacus_a_layer_that_centres_the_batch():
    class Centred(torch.nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    LikeOpacus(torch.nn.Sequential(run_tests.network(), Centred())).steps()


@harmless
def other_optimizers():
    """Of a layer: before the step they find nothing."""
    for loop in (Loop(), LikeOpacus()):
        other = torch.optim.SGD(loop.model.parameters(), lr=1.0)
        for batch in loop.loader:
            loop.backward(batch)
            other.step()
            loop.optimizer.step()
            other.step()
        loop.is_right()


# --- harmless ------------------------------------------------------------------------------------


@harmless
def a_restart_of_the_loader():
    loop = Loop()
    loop.backward(loop.batch())  # dropped: the batch comes again
    loop.steps()
    loop.is_right()


@harmless
def eval_mode():
    loop = Loop()
    loop.model.eval()
    loop.steps()
    loop.is_right()


@harmless
def clipping_again():
    loop = Loop()
    for batch in loop.loader:
        loop.backward(batch)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)  # finds nothing
        loop.optimizer.step()
    loop.is_right()


@harmless
def no_zero_grad():
    loop = Loop()
    loop.steps(zero=False)
    loop.is_right()


@harmless
def optimizer_replaced_between_steps():
    loop = Loop()
    for batch in loop.loader:
        loop.backward(batch)
        loop.optimizer.step()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1.0)
        loop.run.attach(loop.optimizer)
    loop.is_right()


@harmless
def compiled_model():
    whole, inside, own = Loop(), run_tests.network(), run_tests.network()
    inside[0] = torch.compile(inside[0], backend="eager")
    own.compile(backend="eager")
    compiled = torch.compile(whole.model, backend="eager")
    loss, opacus = torch.compile(loss_of, backend="eager"), LikeOpacus()
    opacus.model = torch.compile(opacus.model, backend="eager")
    opacus.steps()
    opacus.is_right()
    for loop, model in ((whole, compiled), (Loop(inside), inside), (Loop(own), own)):
        for batch in loop.loader:
            loop.run.backward(model, loss, batch)
            loop.optimizer.step()
        loop.is_right()


@refused(r"loss.*seen.*was changed by a private pass")
def a_wrapper_of_a_compiled_loss_that_remembers():
    seen, compiled = [], torch.compile(loss_of, backend="eager")

    @functools.wraps(compiled)  # which copies what marks a compiled function
    def loss(model, batch):
        seen.append(batch[1])
        return compiled(model, batch)

    loop = Loop()
    loop.backward(loop.batch(), loss)


def spectrally_normalized():
    """A loop with spectral norm, and what its power iterations keep."""
    model = run_tests.network()
    torch.nn.utils.parametrizations.spectral_norm(model[0])
    loop = Loop(model)
    return loop, dict(model[0].parametrizations.weight[0].named_buffers())


@harmless
def spectral_norm():
    """Power iterations follow weights, one step for each of the run's, whatever the batch is."""
    loop, kept = spectrally_normalized()
    loop.steps()
    before = {k: x.clone() for k, x in kept.items()}
    loop.backward(next(iter(loop.loader)))
    assert all(torch.equal(before[k], x) for k, x in kept.items())
    loop.optimizer.step()
    assert not torch.equal(before["_u"], kept["_u"])


@refused(r"_u.* = 'state': was changed by a private pass")
def a_parametrization_that_examples_move():
    loop, kept = spectrally_normalized()

    def move(_, inputs):
        kept["_u"].data.add_(inputs[0].mean())

    loop.model[0].register_forward_pre_hook(move)
    loop.backward(loop.batch())


# --- secrets -------------------------------------------------------------------------------------


def unpinned(steps):
    loop = Loop(seed=None)
    loop.steps(steps)
    return loop


def saved(loop):
    return copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))


def resumed(states, **options):
    loop = Loop(seed=None, **options)
    loop.model.load_state_dict(states[0])
    loop.optimizer.load_state_dict(states[1])
    return loop


@harmless
def a_readable_checkpoint():
    loop = unpinned(2)
    torch.save(loop.optimizer.state_dict(), "optimizer.pt")
    written = Path("optimizer.pt").read_bytes()
    arrays = loop.run.noise.contents()[1]
    seed = bytes.fromhex(loop.run.sampler.state_dict()["seed"].zfill(64))
    for secret in (arrays.pop("key").tobytes(), seed, seed.hex().encode().lstrip(b"0")):
        assert secret not in written
    for buffer in arrays.values():
        for row in buffer.reshape(-1, buffer.shape[-1]):
            assert row.tobytes() not in written
    for file in Path("mfopt-keys").iterdir():
        assert os.stat(file).st_mode & 0o777 == 0o600
    assert os.stat("mfopt-keys").st_mode & 0o777 == 0o700
    assert {file.suffix for file in Path("mfopt-keys").iterdir()} == {".key", ".ledger"}


@refused("takes back noise that 4 steps were released with.*both count against privacy")
def an_earlier_state_of_the_same_run():
    loop = unpinned(2)
    state = loop.optimizer.state_dict()
    loop.steps(2)
    loop.optimizer.load_state_dict(state)


@refused("state = 'step [1234]': was released already, with another sum")
def an_older_checkpoint_with_other_records():
    loop = unpinned(1)
    states = saved(loop)
    loop.steps(4)
    del loop
    loop = resumed(states)
    inputs, labels = loop.data.tensors
    others = torch.cat([(labels[:3] + 1) % 3, labels[3:]])
    loop.loader = loop.run.loader(torch.utils.data.TensorDataset(inputs, others))
    loop.steps(4)


@refused("belongs to a run that is alive")
def two_live_runs_of_one_key():
    loop = unpinned(2)
    resumed(saved(loop))


@harmless
def an_older_checkpoint_repeated():
    loop = unpinned(2)
    states = saved(loop)
    loop.steps(2)
    ended = [p.detach().clone() for p in loop.model.parameters()]
    (ledger,) = Path("mfopt-keys").glob("*.ledger")
    whole = ledger.read_text()
    del loop
    gc.collect()  # closes it
    ledger.write_text(whole[: whole.index("\n3 ") + 20])  # killed while it wrote
    loop = resumed(states)
    loop.steps(2)
    run_tests.same(loop.model, ended)
    lines = [line.split() for line in ledger.read_text().splitlines()]
    assert [x[0] for x in lines if len(x) == 2 and len(x[1]) == 32] == list("0123")


@harmless
def a_power_cut():
    """Steps 3 to 5 were reserved, and may have been released: they are left out."""
    loop = unpinned(2)
    states = saved(loop)
    loop.steps(2)
    (path,) = Path("mfopt-keys").glob("*.ledger")
    text = path.read_text()
    del loop
    gc.collect()
    path.write_text(text[: text.index("\n3 ") + 1] + "until 6 before\n")
    for _ in range(2):  # the second time it is written down
        loop = resumed(states)
        assert loop.run.step == 6
        del loop
        gc.collect()
    loop = resumed(states)
    loop.steps(2)
    assert loop.run.step == 8


def changed(change):
    """Resume after ``change`` of the files, or of the sealed bytes."""
    states = saved(unpinned(2))
    change(states[1]["mfopt_noise"]["sealed"])
    resumed(states)


SECRETS = {
    r"does not hold .*key_folder": lambda _: os.rename("mfopt-keys", "elsewhere"),
    "ledger .*is not there, which says what was released": lambda _: [
        file.unlink() for file in Path("mfopt-keys").glob("*.ledger")
    ],
    "can be read by others": lambda _: [
        file.chmod(0o644) for file in Path("mfopt-keys").glob("*.key")
    ],
    "damaged": lambda sealed: sealed[-1:].bitwise_xor_(1),
}


@pytest.mark.parametrize("match", SECRETS)
def test_a_checkpoint_without_its_secrets_is_refused(match):
    with pytest.raises(UsageError, match=match):
        changed(SECRETS[match])


@refused("the guarantee of such a run is none: seed pinned.*allow_uncertified=True")
def a_pinned_seed():
    for variant in (LikeOpacus, Loop):
        with contextlib.suppress(UsageError):
            variant(allow_uncertified=False)
            return
    Loop(allow_uncertified=False)


@refused("factorization = 'an estimate'.*none: not certified.*mfopt certify")
def an_estimate():
    from mfopt.torch import PrivateRun

    PrivateRun(
        run_tests.stated(run_tests.factorization().strategy, run_tests.SCHEME), RECORDS, CLIP
    )


@harmless
def what_a_run_says_of_its_privacy():
    assert Loop().run.guarantee == "none: seed pinned"
    assert Loop(seed=None).run.guarantee == run_tests.factorization().statement()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_wrong_loop_is_refused(name):
    loop, error, match = REFUSED[name]
    with pytest.raises(error, match=f"(?s){match}"):
        loop()


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_wrong_loop_is_harmless(name):
    HARMLESS[name]()


# --- right models --------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("number", range(10))  # of each framework
def test_a_right_loop_is_not_refused(number):
    """Of the grid of bench_misuse.py."""
    from misuse_loops import GRID, outcome, right

    draws = random.Random(number)
    cell = {name: draws.choice(values) for name, values in GRID.items()}
    assert outcome(functools.partial(right, cell)) == "ended", cell
