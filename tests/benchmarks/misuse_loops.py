"""The loops of ``bench_misuse.py``: wrong ones by name, and a grid of right ones."""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import functools
import logging
import os
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
import jax
import jax.numpy as jnp
import optax
import test_jax_gradients as jax_tests
import test_misuse_jax as jax_misuse
import test_misuse_torch as torch_tests
import test_torch_frameworks as frameworks
import torch
from statements import stated
from torch import nn
from torch.nn import functional

from mfopt.errors import FailureError, UsageError
from mfopt.jax import PrivateRun as JaxRun
from mfopt.sampling import BallsInBins, CyclicPoisson, Poisson
from mfopt.strategies import BLT, BandedToeplitz, Identity
from mfopt.torch import PrivateRun, make_private

RECORDS, WIDTH, CLASSES = 24, 6, 3
SCHEMES = {
    "balls in bins": BallsInBins(bins=4, epochs=3),
    "poisson": Poisson(probability=0.25, iterations=12),
    "cyclic poisson": CyclicPoisson(0.5, 2, 12),
}

WRONG = {}


def factorization(scheme="balls in bins"):
    """A C that the scheme allows and σ = 2, whose guarantee nobody proves."""
    strategy = {
        "balls in bins": BLT([0.3, 0.1], [0.5, 0.9]),
        "poisson": Identity(),
        "cyclic poisson": BandedToeplitz([1.0, 0.5]),
    }[scheme]
    return stated(strategy, SCHEMES[scheme], 2.0, status="certified")


def records():
    """Numbers and classes, the same in every loop."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.arange(RECORDS) % CLASSES)


def network():
    """A small model of the records."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def by_run(
    model=None,
    change=lambda x, y: (x, y),
    loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    before=lambda *_: None,
    data=None,
    **options,
):
    """The loop of ``PrivateRun``; ``before(run, model, optimizer, batch, mean loss)`` a step."""
    model = model or network()
    run = PrivateRun(factorization(), RECORDS, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(optimizer)
    for _ in range(3):
        for x, y in run.loader(data or records(), **options):
            batch = change(x, y) if len(x) > 2 else (x, y)
            mean_loss = run.backward(model, loss, batch) if len(x) else 0.0
            if len(x) > 2:
                before(run, model, optimizer, (x, y), mean_loss)
            optimizer.step()


def by_opacus(
    loss=functional.cross_entropy,
    change=lambda x, y: (x, y),
    model=None,
    **options,
):
    """The loop of Opacus."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = make_private(
        model, optimizer, records(), factorization(), 1.0, **options
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            if len(x) > 2:
                x, y = change(x, y)
                loss(private(x), y).backward()
            elif len(x):
                functional.cross_entropy(private(x), y).backward()
            optimizer.step()


# --- batches ---------------------------------------------------------------------------------


def mixed_up(x, y):
    share = random.random()
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def cut_and_mixed(x, y):
    x = x.clone()
    x[:, :2] = x.flip(0)[:, :2]
    return x, y


def whitened(x, y):
    _, vectors = torch.linalg.eigh(x.T @ x)
    return x @ vectors, y


def set_by_index(x, y):
    mixed = torch.zeros(x.shape)
    for row in range(len(x)):
        mixed[row] = x[row] - x.mean(0)
    return mixed, y


def swapped_by_the_loop():
    old = []

    def change(x, y):
        old.append((x, y))
        return old[0]

    by_run(change=change)


def another_loader():
    other = iter(torch.utils.data.DataLoader(records(), 6, shuffle=True))
    by_run(change=lambda x, y: next(other))


BATCHES = {
    "MixUp in the loop": lambda: by_run(change=mixed_up),
    "CutMix in place": lambda: by_run(change=cut_and_mixed),
    "standardized by the batch": lambda: by_run(change=lambda x, y: ((x - x.mean(0)) / x.std(), y)),
    "ranks within the batch": lambda: by_run(
        change=lambda x, y: (x.argsort(0).argsort(0).float(), y)
    ),
    "centred rows set by index": lambda: by_run(change=set_by_index),
    "whitened by the batch": lambda: by_opacus(change=whitened),
    "negatives of the batch": lambda: by_run(
        change=lambda x, y: (x, y, x.roll(1, 0)),
        loss=lambda m, b: functional.cross_entropy(m(b[0]) - m((*b, 0 * b[0])[2]), b[1]),
    ),
    "labels of other rows": lambda: by_run(change=lambda x, y: (x, y[torch.randperm(len(y))])),
    "rows repeated to a fixed size": lambda: by_run(
        change=lambda x, y: (x.repeat(3, 1)[:8], y.repeat(3)[:8])
    ),
    "weights by the median of the batch": lambda: by_run(
        change=lambda x, y: (x, y, (x.norm(dim=1) > x.norm(dim=1).median()).float()),
        loss=lambda m, b: (
            functional.cross_entropy(m(b[0]), b[1], reduction="none") * (*b, 1.0)[2]
        ).mean(),
    ),
    "the first batch in every step": swapped_by_the_loop,
    "a loader of the user's": another_loader,
}

LOCAL = threading.local()

# --- models that remember --------------------------------------------------------------------


def remembering(name, make):
    def wrong():
        remember = make()
        by_run(torch_tests.model_that(lambda _, x: remember(torch_tests.size(x)), network()))

    WRONG[f"a model with {name}"] = wrong


def in_attribute_of(find):
    """Of what ``find()`` gives, which the model does not hold."""

    def make():
        def remember(size):
            kept = find()
            kept.size = getattr(kept, "size", 0.0) + size
            return float(kept.size)

        return remember

    return make


def in_context():
    kept = contextvars.ContextVar("kept", default=0.0)

    def remember(size):
        kept.set(kept.get() + size)
        return kept.get()

    return remember


def in_database():
    def remember(size):
        with contextlib.closing(sqlite3.connect("kept", isolation_level=None)) as base:
            base.execute("create table if not exists kept (size real)")
            base.execute("insert into kept values (?)", (size,))
            return float(base.execute("select sum(size) from kept").fetchone()[0])

    return remember


def in_queue():
    kept = queue.Queue()
    kept.put(0.0)

    def remember(size):
        before = kept.get()
        kept.put(size)
        return before

    return remember


def in_array():
    kept = array.array("d", [0.0])

    def remember(size):
        kept[0] += size
        return kept[0]

    return remember


def in_memory():
    kept = ctypes.c_double(0.0)

    def remember(size):
        kept.value += size
        return kept.value

    return remember


def in_environment():
    def remember(size):
        value = float(os.environ.get("MISUSE", "0")) + size
        os.environ["MISUSE"] = str(value)
        return value

    return remember


def in_generator():
    generator = torch.Generator().manual_seed(0)

    def remember(size):
        value = float(torch.rand(1, generator=generator))
        generator.manual_seed(int(1e6 * size))
        return value

    return remember


def in_frame():
    def sums():
        total = 0.0
        while True:
            total += yield total

    generator = sums()
    next(generator)
    return lambda size: float(generator.send(size))


def in_default():
    def remember(size, memory=[0.0]):  # noqa: B006
        memory.append(size)
        return memory[-2]

    return remember


for name, make in {
    "a value of the thread": in_attribute_of(lambda: LOCAL),
    "a context variable": in_context,
    "a database": in_database,
    "a queue": in_queue,
    "an array": in_array,
    "memory of C": in_memory,
    "an environment variable": in_environment,
    "an attribute of a logger": in_attribute_of(lambda: logging.getLogger("misuse")),
    "a generator that data seeds": in_generator,
    "a frame of a generator": in_frame,
    "a default argument": in_default,
    "an attribute of a class": in_attribute_of(lambda: Images),
    "a value in another module": in_attribute_of(lambda: sys.modules["statements"]),
}.items():
    remembering(name, make)

# --- losses of the loop of Opacus ------------------------------------------------------------


def ranking(scores, labels):
    return functional.softplus(scores[:, None] - scores[None]).mean()


def by_frequency(scores, labels):
    counts = torch.bincount(labels, minlength=CLASSES).float().clamp(min=1)
    return functional.cross_entropy(scores, labels, weight=1 / counts)


def to_means_of_classes(scores, labels):
    means = scores.new_zeros(CLASSES, CLASSES).index_add(0, labels, scores)
    return (scores - means[labels]).square().mean()


def covariance(scores, labels):
    centred = scores - scores.mean(0, keepdim=True)
    return functional.cross_entropy(scores, labels) + (centred.T @ centred).square().sum()


def trimmed(scores, labels):
    losses = functional.cross_entropy(scores, labels, reduction="none")
    return losses[losses <= losses.median()].sum() / len(losses)


def log_of_mean(scores, labels):
    losses = functional.cross_entropy(scores, labels, reduction="none")
    return losses.exp().mean().log()


def two(scores, labels):
    """Two losses, both means over examples."""
    return torch.stack((functional.cross_entropy(scores, labels), scores.square().mean() + 0.7))


def of_some_classes(scores, labels):
    return functional.cross_entropy(scores, labels, reduction="none")[labels > 0].mean()


LOSSES = {
    "two means: maximum": lambda s, y: torch.maximum(*two(s, y)),
    "two means: max": lambda s, y: two(s, y).max(),
    "two means: where": lambda s, y: torch.where(two(s, y)[0] > 1, *two(s, y)),
    "two means: argmax": lambda s, y: two(s, y)[two(s, y).argmax()],
    "two means: abs": lambda s, y: (two(s, y)[0] - 1.1).abs(),
    "examples of some classes": of_some_classes,
    "a ranking of pairs": ranking,
    "weights by frequency in the batch": by_frequency,
    "distance to means of classes": to_means_of_classes,
    "a penalty of the covariance": covariance,
    "losses below the median": trimmed,
    "the logarithm of a mean": log_of_mean,
}
WRONG |= {f"batches: {name}": wrong for name, wrong in BATCHES.items()}
WRONG |= {f"a loss by {name}": functools.partial(by_opacus, loss) for name, loss in LOSSES.items()}

# --- frameworks ------------------------------------------------------------------------------


def by_trainer(collate=None, compute_loss=None, callbacks=(), **arguments):
    """``PrivateTrainer`` of transformers."""
    trainer = frameworks.hugging_face(seed=None, logging_strategy="no", **arguments)
    trainer.data_collator = collate or trainer.data_collator
    for callback in callbacks:
        trainer.add_callback(callback)
    if compute_loss:
        trainer.compute_loss = types.MethodType(compute_loss, trainer)
    trainer.train()
    return trainer.model


def joined(batch):
    """Two records in each row, and as many rows as records."""
    x = torch.stack([one["x"] for one in batch])
    return {"x": (x + x.roll(1, 0)) / 2, "labels": torch.stack([one["labels"] for one in batch])}


def centred_by_trainer(trainer, model, inputs, *_, **__):
    scores = model(**inputs)["logits"]
    trainer.centre = 0.9 * getattr(trainer, "centre", 0.0) + 0.1 * scores.detach().mean(0)
    return (scores - trainer.centre).square().mean()


def raw_gradients():
    import transformers

    class Raw(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *arguments, model=None, **rest):
            x, y = frameworks.run_tests.data().tensors
            model(x, labels=y)["loss"].backward()

    by_trainer(callbacks=[Raw()])


def by_lightning(hook="", body=None):
    """``PrivateStrategy`` of Lightning; ``body`` takes the place of one of the module's hooks."""
    module, run = frameworks.lightning_module(), frameworks.private_run(seed=None)
    if hook:
        setattr(type(module), hook, body)
    trainer = frameworks.lightning_trainer(run)
    trainer.fit(module, run.loader(frameworks.run_tests.data()))
    return module


def mixed_by_hook(module, batch, *_):
    x, y = batch
    return (0.5 * x + 0.5 * x.flip(0), y) if len(x) > 2 else batch


def last_features(module, batch, number):
    features = module.layers[0](batch[0])
    loss = functional.cross_entropy(
        module.layers[2](features + getattr(module, "last", 0.0)), batch[1]
    )
    module.last = features.detach().mean()
    return loss


X, Y = (part.numpy() for part in records().tensors)
PARAMS = {"w": jnp.zeros((WIDTH, CLASSES)), "b": jnp.zeros(CLASSES)}


def jax_loss(params, example):
    scores = example[0] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, example[1])


def by_jax(step, microbatch=None, scheme="balls in bins"):
    """The loop of JAX; ``step(run, params, state, batch, t)`` gives the mean and the state."""
    run = JaxRun(factorization(scheme), RECORDS, 1.0, microbatch=microbatch)
    params, state = PARAMS, run.init(PARAMS)
    for t, batch in enumerate(run.batches(state)):
        mean, state = step(run, params, state, batch, t)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, mean)
    return params


def part_twice(run, params, state, batch, t):
    for _ in range(2):
        for i in range(len(batch.units)):
            part = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
            rows = X[part.units], Y[part.units]
            state = run.add(jax.vmap(jax.grad(jax_loss), (None, 0))(params, rows), part, state)
    return run.release(state)


def standardized(run, params, state, batch, t):
    rows = X[batch.units[batch.mask]]
    data = (X - rows.mean(0) if len(rows) else X), Y
    return run.gradient(jax.grad(jax_loss), params, data, batch, state)


class Reflected(nn.Module):
    """Looks at its numbers, which vmap has no rule for: examples go one by one, and call hooks."""

    def forward(self, x):
        return x if float(x.detach().sum()) < 1e9 else -x


def kept_by_a_backward_hook():
    model = nn.Sequential(Reflected(), *network())

    def after(module, inputs, outputs):
        module.last = float(outputs[0].abs().sum())

    model[1].register_full_backward_hook(after)
    scaled = lambda m, b: functional.cross_entropy(m(b[0]), b[1]) * getattr(model[1], "last", 1.0)  # noqa: E731
    by_run(model, loss=scaled)


WRONG |= {
    "transformers: a collator that joins records": lambda: by_trainer(joined),
    "transformers: a loss with a moving centre": lambda: by_trainer(
        compute_loss=centred_by_trainer
    ),
    "transformers: a callback that adds gradients": raw_gradients,
    "Lightning: MixUp in a hook": lambda: by_lightning("on_after_batch_transfer", mixed_by_hook),
    "Lightning: features of the step before": lambda: by_lightning("training_step", last_features),
    "JAX: a microbatch twice": lambda: by_jax(part_twice, microbatch=2),
    "JAX: data standardized by the batch": lambda: by_jax(standardized),
    "a copy of the optimizer": lambda: by_run(before=lambda *parts: copy.deepcopy(parts[:3])),
    "a backward hook that keeps a number": kept_by_a_backward_hook,
}


# --- further ones: mixing operations by name, what is declared, what leaves the tensors ----------


def mixing(name, x):
    """Rows plus what an operation makes of all of them."""
    return x + getattr(x, name)(dim=0)


OPERATIONS = ["amax", "amin", "cumsum", "logsumexp", "norm", "softmax", "std", "var"]
for name in OPERATIONS:
    of_rows = functools.partial(mixing, name)
    WRONG[f"{name} of a batch"] = functools.partial(
        by_run, change=lambda x, y, f=of_rows: (f(x), y)
    )
    WRONG[f"{name} in collate_fn"] = functools.partial(
        by_opacus,
        collate_fn=lambda batch, f=of_rows: (
            f(torch.stack([x for x, _ in batch])),
            torch.stack([y for _, y in batch]),
        ),
    )
    WRONG[f"{name} in a loss"] = functools.partial(
        by_opacus, lambda scores, labels, f=of_rows: functional.cross_entropy(f(scores), labels)
    )


class Records(torch.utils.data.Dataset[Any]):
    """Records that change from one to the next by ``change(number, what was kept, x)``."""

    def __init__(self, change):
        self.change, self.kept = change, torch.zeros(WIDTH)

    def __len__(self):
        return RECORDS

    def __getitem__(self, number):
        x, y = records()[number]
        changed, self.kept = self.change(self.kept, x)
        return changed, y


def ascended(run, model, optimizer, batch, mean_loss):
    """The first half of sharpness-aware minimization."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    for p, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
    ):
        p.data.add_(gradient, alpha=0.05)


def another_layer(run, model, *_):
    model[2] = nn.Linear(8, CLASSES)


def clipped_less(run, *_):
    run.stream.clip_norm = 100.0


def follow_loss(run, model, optimizer, batch, mean_loss):
    optimizer.param_groups[0]["lr"] = 0.1 * float(mean_loss)


def taken_back(run, model, optimizer, batch, mean_loss):
    """Weights of the pass before, where the loss is high."""
    if mean_loss > 1.1:
        model.load_state_dict(STATES[-1])
    STATES.append({name: p.clone() for name, p in model.state_dict().items()})


STATES = [network().state_dict()]
ALL, QUEUE = records().tensors[0], [torch.zeros(CLASSES)]


def by_queue(model, batch):
    """Negatives from a queue of past outputs."""
    scores = model(batch[0])
    QUEUE.append(scores.detach()[0])
    return functional.cross_entropy(scores, batch[1]) + (scores @ torch.stack(QUEUE).T).exp().mean()


def of_means(run, params, state, batch, t):
    """Gradients of examples less their mean, given as those of examples."""
    rows = X[batch.units], Y[batch.units]
    each = jax.vmap(jax.grad(jax_loss), (None, 0))(params, rows)
    return run.mean(jax.tree.map(lambda g: g - g.mean(0), each), batch, state)


def by_public_mean(run, params, state, batch, t):
    def shifted(params, example, mean):
        return jax_loss(params, (example[0] - mean, example[1]))

    mean = X[batch.units].mean(0)
    return run.gradient(jax.grad(shifted), params, (X, Y), batch, state, public=mean)


def sums_by_hand(run, params, state, batch, t):
    state = dataclasses.replace(state, sums=jax.tree.map(lambda s: s + X.sum(), state.sums))
    return run.gradient(jax.grad(jax_loss), params, (X, Y), batch, state)


def one_batch_in_a_scan(run, params, state, batch, t):
    def step(state, _):
        return run.gradient(jax.grad(jax_loss), params, (X, Y), batch, state)[::-1]

    state, means = jax.lax.scan(step, state, None, length=2)
    return jax.tree.map(lambda m: m.sum(0), means), state


WRONG |= {
    "an ascent by raw gradients": lambda: by_run(before=ascended),
    "another layer in a run": lambda: by_run(before=another_layer),
    "a clip norm set in a run": lambda: by_run(before=clipped_less),
    "two steps for a batch": lambda: by_run(before=lambda r, m, optimizer, *_: optimizer.step()),
    "a gradient for a batch twice": lambda: by_run(
        before=lambda run, model, o, batch, _: run.backward(model, torch_tests.loss_of, batch)
    ),
    "two rows of each batch": lambda: by_run(change=lambda x, y: (x[:2], y[:2])),
    "a rule for vmap that mixes": lambda: by_run(
        nn.Sequential(nn.Linear(WIDTH, 4), torch_tests.identity(torch_tests.centred, torch.clone))
    ),
    "a queue of past outputs": lambda: by_run(loss=by_queue),
    "each row twice": lambda: by_opacus(
        change=lambda x, y: (x.repeat_interleave(2, 0), y.repeat_interleave(2)),
    ),
    "transformers: sums of two batches": lambda: by_trainer(gradient_accumulation_steps=2),
    "Lightning: gradients of the user's": lambda: by_lightning(
        "on_train_batch_end", lambda m, o, batch, _: m.training_step(batch, 0).backward()
    ),
    "JAX: models under vmap with one state": (
        jax_misuse.models_under_vmap_with_one_state_outside_of_jit
    ),
    "JAX: one batch in a scan": lambda: by_jax(one_batch_in_a_scan),
    "JAX: sums of a state by hand": lambda: by_jax(sums_by_hand),
    "another class of a batch": lambda: by_run(
        change=lambda x, y: (x - x.detach().as_subclass(torch.Tensor).mean(0), y)
    ),
}
WRONG |= {f"JAX: {name}": wrong for name, (wrong, _) in jax_tests.WRONG.items()}
# what passes, as docs/sharp-edges.md says
DOCUMENTED = {
    "records standardized by all": lambda: by_run(
        data=torch.utils.data.TensorDataset((ALL - ALL.mean(0)) / ALL.std(0), records().tensors[1])
    ),
    "records less a running mean": lambda: by_run(
        data=Records(lambda kept, x: (x - kept, 0.9 * kept + 0.1 * x))
    ),
    "records mixed with the one before": lambda: by_run(
        data=Records(lambda kept, x: (x + kept, x))
    ),
    "a loss that looks up other records": lambda: by_run(
        loss=lambda m, b: functional.cross_entropy(m(b[0] - ALL[:4].mean(0)), b[1])
    ),
    "item() of a batch": lambda: by_run(change=lambda x, y: (x - x.mean().item(), y)),
    "tolist() of a batch": lambda: by_run(change=lambda x, y: (x - max(x[:, 0].tolist()), y)),
    "numpy() of a batch": lambda: by_run(change=lambda x, y: (x - float(x.numpy().mean()), y)),
    "a rate that follows the loss": lambda: by_run(before=follow_loss),
    "weights taken back where the loss is high": lambda: by_run(before=taken_back),
    "JAX: a batch's mean said to be public": lambda: by_jax(by_public_mean),
    "JAX: centred gradients given as rows": lambda: by_jax(of_means),
    "JAX: data standardized by the batch": WRONG.pop("JAX: data standardized by the batch"),
}


def is_finite(tree):
    """False where a number of what a loop ends with is none."""
    if isinstance(tree, nn.Module):
        return all(bool(p.isfinite().all()) for p in tree.parameters())
    return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


def outcome(loop):
    """What becomes of a loop: "ended", or what it is stopped by."""
    folder = Path.cwd()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty,
        warnings.catch_warnings(),
    ):
        os.chdir(empty)
        warnings.simplefilter("ignore")
        try:
            result = loop()
        except (UsageError, FailureError) as error:
            return f"refused: {str(error).splitlines()[0][:160]}"
        finally:
            os.chdir(folder)
    return "ended" if is_finite(result) else "NaN"


# --- right loops -----------------------------------------------------------------------------


class Images(nn.Module):
    """A convolution of rows as images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(),
            nn.Linear(8, CLASSES),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x.view(-1, 1, 2, 3))


class Words(nn.Module):
    """Attention over rows as words, with a table of positions kept from the first pass on."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(8, 8), None
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x):
        words = (x * 4).long().clamp(0, 7)
        if self.positions is None:
            self.positions = torch.linspace(0, 1, WIDTH)[:, None]
        return self.out(self.layer(self.table(words) + self.positions).mean(1))


class Recurrent(nn.Module):
    """A layer without a rule for vmap, after random numbers."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.GRU(1, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.out(self.layer(functional.dropout(x, 0.1)[..., None])[0][:, -1])


def tied():
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(WIDTH, CLASSES))


def parametrized():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8))
    return nn.Sequential(layer, nn.GELU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))


def frozen():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, CLASSES))
    model[0].requires_grad_(False)
    return model


def focal(scores, labels):
    logs = scores.log_softmax(1).gather(1, labels[:, None])
    return -((1 - logs.exp()).square() * logs).sum() / max(1, len(labels))


MODELS = {
    "mlp": network, "images": Images, "words": Words, "recurrent": Recurrent, "tied": tied,
    "parametrized": parametrized, "frozen": frozen,
}  # fmt: skip
RIGHT_LOSSES = {
    "cross entropy": functional.cross_entropy,
    "smoothed": functools.partial(functional.cross_entropy, label_smoothing=0.1),
    "by hand": lambda s, y: -s.log_softmax(1).gather(1, y[:, None]).sum() / max(1, len(y)),
    "focal": focal,
    "bits": lambda s, y: functional.binary_cross_entropy_with_logits(
        s, functional.one_hot(y, CLASSES).float()
    ),
    "squares": lambda s, y: (s - functional.one_hot(y, CLASSES)).square().mean(),
    "huber": lambda s, y: functional.smooth_l1_loss(s, functional.one_hot(y, CLASSES).float()),
    "flat": lambda s, y: functional.cross_entropy(s.reshape(-1, CLASSES), y.view(-1)),
    "two terms": lambda s, y: functional.cross_entropy(s, y) + 0.1 * s.square().mean(),
    "stacked": lambda s, y: torch.stack(
        [functional.cross_entropy(s, y), s.abs().mean()]
    ).sum(),
    "larger of two": lambda s, y: torch.stack([s.logsumexp(1), s.square().sum(1)]).amax(0).mean(),
    "of two classes": lambda s, y: functional.cross_entropy(s, y, reduction="none")[
        y > 0
    ].sum() / max(1, len(y)),
}  # fmt: skip


def pick(x, y, order):
    return x[order], y[order]


CHANGES = {
    "as they are": lambda x, y: (x, y),
    "normalized": lambda x, y: ((x - x.new_tensor([0.1] * WIDTH)) / 2.0, y),
    "by row": lambda x, y: ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), y),
    "mirrored": lambda x, y: (x.flip(1), y.clone()),
    "noisy": lambda x, y: (x + 0.1 * torch.randn_like(x), y),
    "masked": lambda x, y: (x.masked_fill(torch.rand(x.shape) < 0.2, 0.0), y),
    "moved": lambda x, y: (x.to("cpu", torch.float64).float(), y.long()),
    "reordered": lambda x, y: pick(x, y, torch.randperm(len(x))),
    "turned round": lambda x, y: (x.flip(0).flip(-1), y.flip(0)),
    "in place": lambda x, y: (x.mul_(0.5).clamp_(-1, 1), y),
}


def sorted_collate(batch):
    """Longest first, as packed sequences want them."""
    batch = sorted(batch, key=lambda one: -float(one[0].abs().sum()))
    return torch.utils.data.default_collate(batch)


def dropping_collate(batch):
    x, y = torch.utils.data.default_collate(batch)
    return functional.dropout(x, 0.1), y


COLLATES = {"default": None, "sorted": sorted_collate, "random": dropping_collate}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "decay": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
GRID = {
    "framework": ["run", "opacus", "run", "opacus", "run", "opacus", "jax", "trainer", "lightning"],
    "model": [*MODELS],
    "loss": [*RIGHT_LOSSES],
    "change": [*CHANGES],
    "collate": [*COLLATES],
    "optimizer": [*OPTIMIZERS],
    "scheme": [*SCHEMES],
    "parts": [1, 1, 2, 3],  # in which a batch is summed
    "is narrow": [False, False, True],  # 16 bits by autocast
    "resumes at": [0, 0, 5],
    "evaluates": [False, True],
    "workers": [0] * 30 + [1],
}


def right(cell):
    """What the loop of a cell of the grid ends with."""
    if cell["framework"] == "jax":
        return right_in_jax(cell)
    if cell["framework"] == "trainer":
        return by_trainer()
    if cell["framework"] == "lightning":
        return by_lightning()
    return right_in_torch(cell)


def right_in_torch(cell):
    loss, change = RIGHT_LOSSES[cell["loss"]], CHANGES[cell["change"]]
    kept = {}
    for stop in (cell["resumes at"], 12):
        model = MODELS[cell["model"]]()
        optimizer = OPTIMIZERS[cell["optimizer"]](
            [p for p in model.parameters() if p.requires_grad]
        )
        made = factorization(cell["scheme"])
        options = {"collate_fn": COLLATES[cell["collate"]], "num_workers": cell["workers"]}
        if cell["framework"] == "opacus":
            private, optimizer, loader = make_private(
                model, optimizer, records(), made, 1.0, **options
            )
            run = loader.run
        else:
            run = PrivateRun(made, RECORDS, 1.0)
            run.attach(optimizer)
            loader = run.loader(records(), **options)
        if kept:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        while run.step < stop:
            for x, y in loader:
                x, y = change(x, y) if len(x) else (x, y)
                with torch.autocast("cpu", torch.bfloat16, enabled=cell["is narrow"]):
                    if cell["framework"] == "opacus":
                        value = loss(private(x), y)
                    else:
                        for part in zip(
                            *(z.tensor_split(cell["parts"]) for z in (x, y)), strict=True
                        ):
                            run.backward(model, lambda m, b: loss(m(b[0]), b[1]), part)
                if cell["framework"] == "opacus":
                    assert f"{value:.3f}"
                    value.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step >= stop:
                    break
            if cell["evaluates"]:
                with torch.no_grad():
                    model.eval()(records().tensors[0])
                model.train()
        if stop:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        run = optimizer = loader = private = None  # two live runs of one key are refused
    return model


def right_in_jax(cell):
    temperature = cell["loss"] == "smoothed"
    keys = jax.random.split(jax.random.key(1), RECORDS)

    def step(run, params, state, batch, t):
        def loss(params, example, *public):
            x, y, key = example
            if cell["change"] == "masked":
                x = x * jax.random.bernoulli(jax.random.fold_in(key, t), 0.8, x.shape)
            scale = 1.0 / (1.0 + t) if temperature else 1.0
            value = scale * jax_loss(params, (x, y))
            return value + sum(jnp.vdot(p, p) for part in public for p in jax.tree.leaves(part))

        public = params if cell["evaluates"] else None
        return run.gradient(jax.grad(loss), params, (X, Y, keys), batch, state, public=public)

    compiled = jax.jit(step, static_argnums=0)
    is_plain = cell["optimizer"] == "sgd"
    microbatch = None if cell["parts"] == 1 else cell["parts"]
    return by_jax(step if is_plain else compiled, microbatch, cell["scheme"])
