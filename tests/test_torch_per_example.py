"""Clipped sums from one pass over a batch, against gradients computed one example at a time."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from mfopt.torch import clipping, per_example  # noqa: E402


def clipped_sum(model, loss, batch, bound, **options):
    sums = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
    clipping.add_clipped(model, loss, batch, bound, sums, **options)
    return list(sums.values())


def one_by_one(model, loss, batch):
    """Gradients of each example, by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(pytree.tree_leaves(batch)[0])):
        value = loss(model, pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1], batch))
        rows.append(torch.autograd.grad(value, parameters, materialize_grads=True))
    return rows


def sums_are_right(model, loss, batch):
    """Whether sums of gradients that nothing clips are those of gradients one by one."""
    sums = clipped_sum(model, loss, batch, 1e3)
    assert any(total.abs().max() > 1e-3 for total in sums)
    gradients = zip(*one_by_one(model, loss, batch), strict=True)
    for total, parts in zip(sums, gradients, strict=True):
        torch.testing.assert_close(total, sum(parts), atol=1e-6, rtol=1e-4)


def norm_of(gradient):
    return float(torch.cat([g.flatten() for g in gradient]).double().norm())


class Tied(nn.Module):
    """A weight of two layers, a layer called twice, a parameter of no layer."""

    def __init__(self, as_function=False):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.last.weight = self.table.weight
        self.position, self.as_function = nn.Parameter(torch.randn(5, 6)), as_function

    def forward(self, tokens):
        x = self.middle(torch.tanh(self.middle(input=self.table(tokens) + self.position)))
        return functional.linear(x, self.table.weight) if self.as_function else self.last(x)


class Positions(nn.Module):
    """A layer whose inputs do not depend on the example."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.last = (
            nn.Embedding(11, 6),
            nn.Embedding(5, 6),
            nn.Linear(6, 11),
        )

    def forward(self, tokens):
        return self.last(self.tokens(tokens) * self.places(torch.arange(5)))


def frozen():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def padded():
    inner = (nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.LayerNorm(8))
    return nn.Sequential(*inner, nn.Linear(8, 3))


def images():
    first = nn.Conv2d(3, 4, 3, padding=1, stride=2, dilation=(1, 2))
    inner = (first, nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4))
    return nn.Sequential(*inner, nn.Flatten(), nn.Linear(48, 3))


def waves():
    first = nn.Conv1d(3, 4, 3, padding=1, stride=2, dilation=2)
    inner = (
        first,
        nn.Tanh(),
        nn.Conv1d(4, 4, 3, padding="same"),
        nn.Conv1d(4, 4, 1, padding_mode="circular"),
    )
    return nn.Sequential(*inner, nn.Flatten(), nn.Linear(20, 3))


class Scaled(nn.Module):
    """A layer that is called with another weight and bias in place of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8, 8))

    def forward(self, x):
        scaled = {"weight": self.layer.weight * self.scale, "bias": 2 * self.layer.bias}
        return self.layer(torch.func.functional_call(self.layer, scaled, (x,)))


def gpt2():
    layers = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(layers.Conv1D(6, 8), nn.GELU(), layers.Conv1D(3, 6))


def attention():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def squares(model, batch):
    return (model(batch) ** 2 * torch.arange(3.0, 4.0, 1 / model(batch).shape[-1])).sum()


def classes(model, batch):
    return functional.cross_entropy(model(batch).flatten(0, -2), torch.arange(len(batch)) % 3)


def next_tokens(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens():
    return torch.tensor([[1, 2, 2, 0, 0], [3, 3, 3, 3, 3], [10, 0, 4, 5, 1], [7, 1, 7, 1, 0]])


CASES = {
    "linear": (padded, lambda: torch.randn(6, 8), squares),
    "several uses": (padded, lambda: torch.randn(6, 4, 8), squares),
    "many uses": (padded, lambda: torch.randn(3, 4, 40, 8), squares),
    "frozen": (frozen, lambda: torch.randn(6, 8), squares),
    "images": (images, lambda: torch.randn(5, 3, 12, 12), squares),
    "waves": (waves, lambda: torch.randn(5, 3, 12), squares),
    "GPT-2": (gpt2, lambda: torch.randn(5, 4, 8), squares),
    "attention": (attention, lambda: torch.randn(4, 5, 8), squares),
    "tied": (Tied, tokens, next_tokens),
    "tied by a function": (lambda: Tied(True), tokens, next_tokens),
    "positions": (Positions, tokens, next_tokens),
    "scaled": (Scaled, lambda: torch.randn(6, 2, 8), squares),
    "double": (lambda: padded().double(), lambda: torch.randn(6, 2, 8).double(), squares),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_gradients_one_by_one(name):
    build, data, loss = CASES[name]
    torch.manual_seed(0)
    model, batch = build(), data()
    gradients = one_by_one(model, loss, batch)
    lengths = sorted(map(norm_of, gradients))
    for bound in (10 * lengths[-1], lengths[len(lengths) // 2], lengths[0] / 3):
        sums = [torch.zeros_like(p) for p in gradients[0]]
        for gradient in gradients:
            factor = min(1.0, bound / norm_of(gradient))
            sums = [total + factor * g for total, g in zip(sums, gradient, strict=True)]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*one example after the other")
            for block in (None, 2):
                computed = clipped_sum(model, loss, batch, bound, microbatch=block)
                for x, y in zip(computed, sums, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5 * float(y.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_the_norm_of_one_contribution_is_at_most_the_bound_and_no_less_than_rounding_takes(name):
    build, data, loss = CASES[name]
    torch.manual_seed(1)
    model, batch = build(), data()[:1]
    bound = norm_of(one_by_one(model, loss, batch)[0]) / 2
    assert bound * (1 - 1e-4) < norm_of(clipped_sum(model, loss, batch, bound)) <= bound


@pytest.mark.parametrize("uses", [8, 64])  # norms by inner products, and by gradients
def test_terms_that_cancel_do_not_hide_a_norm(uses):
    """Rounding of what is summed stays below the clip norm where the exact gradient is tiny."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32, bias=False), torch.randn(1, uses // 2, 32)
    batch = torch.cat([x, -x * (1 + 1e-6)], 1)
    weights = torch.randn(32)
    loss = lambda m, b: 1e4 * (m(b) * weights).sum()  # noqa: E731
    assert norm_of(clipped_sum(model, loss, batch, 0.5)) <= 0.5


def test_products_are_formed_in_full_precision():
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.manual_seed(0)
    linear = per_example.Products(torch.randn(3, 4, 8), torch.randn(3, 4, 5), 8)
    precisions = set()

    class Precision(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("mm", "bmm", "addmm_"):
                precisions.add(torch.get_float32_matmul_precision())
            return function(*args, **(kwargs or {}))

    torch.set_float32_matmul_precision("medium")
    try:
        with Precision(), per_example.full_precision(linear.left.device):
            per_example.norm_bounds([linear])
            linear.add_to(torch.zeros(8, 5), torch.ones(3))
        assert precisions == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap")
def test_a_loss_may_use_parameters_beside_a_call_of_the_module():
    model = nn.Linear(4, 1)
    decayed = lambda m, x: m(x).sum() + model.weight.square().sum()  # noqa: E731
    sums_are_right(model, decayed, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:.* has no rule for torch.vmap")
def test_second_derivatives_and_inputs_changed_in_place_are_not_taken_for_products():
    """A loss with a gradient in it goes one example at a time, and is right."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    sums_are_right(model, penalty, batch)
    inplace = nn.Linear(4, 4, bias=False)

    def overwritten(model, x):
        x = x * 1.0
        y = model(x)
        x.mul_(3.0)
        return y.sum()

    with pytest.raises(RuntimeError, match="inplace"):
        clipped_sum(inplace, overwritten, batch, 1e3)
