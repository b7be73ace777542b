"""Gradients of single examples from one backward pass over a batch, as products where possible.

The gradient of a linear layer's weight is Σ_t d_t ⊗ x_t over the layer's uses t: inputs x and the
gradients d of its outputs give its norm, and clipped sums over examples, without one matrix for
each example ("ghost" norms and book-keeping). So it is for embeddings. Every other use of a
parameter sees a copy for each example, which autograd gives that example's gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _functorch as functorch
from torch._functorch import pyfunctorch
from torch.func import vmap
from torch.nn import attention, functional

_BLOCK = 128  # numbers whose squares are added up one after the other
_AT_ONCE = 2**20  # numbers of scaled gradients held beside the gradients
_MATRIX = 2**24  # numbers of products of uses, or of gradients, held while norms are computed
_ROUNDING = 2.0**-22  # of float32 products, relative to the norms of what is multiplied

Gradients = dict[str, list["GradientRows | Products"]]
# from gradients of outputs, examples first, to those of each example, by parameter
Pullback = Callable[[Sequence[torch.Tensor | None]], Gradients]


class GradientRows:
    """A gradient for each example: (examples, numbers)."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self.values = gradients.reshape(len(gradients), -1)

    def dense(self, examples: int | None = None) -> torch.Tensor:
        """The gradients themselves, of the first ``examples``: (examples, numbers)."""
        return self.values[:examples]

    def add_to(self, total: torch.Tensor, factor: torch.Tensor) -> None:
        """Add Σ factor[i] gradient[i] to ``total``; a factor of 0 leaves an example out.

        Not by a matrix product, which need not round each row as its norm was.
        """
        factor = factor.to(total.dtype)
        for part, scale in _pieces(_AT_ONCE, self.values.shape[1], self.values, factor):
            total += (scale[:, None] * _without(part, scale)).sum(0).view_as(total)


class Products(NamedTuple):
    """Gradients Σ_t left[t] ⊗ right[t] of each example, of one weight of ``height`` rows.

    ``left``: (examples, t, height), or integers (examples, t) for rows of the identity matrix;
    ``right``: (examples, t, width).
    """

    left: torch.Tensor
    right: torch.Tensor
    height: int

    @property
    def is_indexed(self) -> bool:
        """True if ``left`` are rows of the identity."""
        return not self.left.is_floating_point()

    def lengths(self) -> torch.Tensor:
        """Σ_t |left[t]| |right[t]| for each example."""
        length = norms(self.right)
        return (length if self.is_indexed else length * norms(self.left)).sum(1)

    def overlaps(self, partner: Products) -> torch.Tensor:
        """⟨gradient, other's gradient⟩ of each example, from inner products of all pairs of t."""
        pieces = _pieces(
            _MATRIX, self.left.shape[1] * partner.left.shape[1], *self[:2], *partner[:2]
        )
        sums = [
            (_inner(a, b) * (right @ columns.mT)).sum((1, 2)) for a, right, b, columns in pieces
        ]
        return torch.cat(sums)

    def dense(self, examples: int | None = None) -> torch.Tensor:
        """The gradients themselves, of the first ``examples``: (examples, numbers)."""
        left, right = self.left[:examples], self.right[:examples]
        if not self.is_indexed:
            return (left.mT @ right).flatten(1)
        offsets = torch.arange(len(left), device=left.device)[:, None] * self.height
        return _scatter(left + offsets, right, len(left) * self.height).view(len(left), -1)

    def add_to(self, total: torch.Tensor, factor: torch.Tensor) -> None:
        """Add Σ factor[i] gradient[i] to ``total``; a factor of 0 leaves an example out."""
        right = _without(self.right, factor) * factor.to(total.dtype)[:, None, None]
        matrix = total.view(self.height, -1)
        if self.is_indexed:
            matrix += _scatter(self.left, right, self.height)
        else:
            matrix.addmm_(_without(self.left, factor).flatten(0, 1).mT, right.flatten(0, 1))


def merged(gradients: Sequence[Any]) -> Sequence[GradientRows | Products]:
    """Gradients of one parameter from its uses: rows, or at most one product of each kind."""
    if len(gradients) < 2:
        return gradients
    if any(isinstance(x, GradientRows) for x in gradients):
        return [GradientRows(sum(x.dense() for x in gradients))]
    joined = []
    for is_indexed in (False, True):
        if kind := [x[:2] for x in gradients if x.is_indexed == is_indexed]:
            left, right = (torch.cat(x, 1) for x in zip(*kind, strict=True))
            joined.append(Products(left, right, gradients[0].height))
    return joined


def norm_bounds(gradients: Sequence[GradientRows | Products]) -> torch.Tensor:
    """Norm of each example's gradient of one parameter, with what rounding may add to it later.

    By the cheaper of the inner products of all uses and the gradients themselves. The norm is
    rounded up: terms that cancel leave an error in proportion to what they were.

    Args:
      gradients: not empty, as from :func:`merged`.
    """
    if isinstance(gradients[0], GradientRows):
        return norms(gradients[0].values)
    products: Any = gradients
    lengths = sum(x.lengths() for x in products)
    uses = sum(x.left.shape[1] for x in products)
    if uses == 1:
        return lengths
    height, width = products[0].height, products[0].right.shape[2]
    is_dense = len(products) == 1 and not products[0].is_indexed
    if is_dense and uses * (height + width) > height * width:
        pieces = _pieces(_MATRIX, height * width, *products[0][:2])
        dense = torch.cat([norms(Products(a, right, height).dense()) for a, right in pieces])
        return dense + _ROUNDING * lengths
    pairs = [(a, b) for i, a in enumerate(products) for b in products[i:]]
    squares = sum(a.overlaps(b) * (1 if a is b else 2) for a, b in pairs)
    return (squares.clamp(min=0) + _ROUNDING * lengths.square()).sqrt() + _ROUNDING * lengths


def norms(rows: torch.Tensor) -> torch.Tensor:
    """Norm of each row, along the last axis, to 2⁻²⁰: block by block.

    PyTorch adds up a row's squares in a few running sums on a CPU, and is up to 0.6% off, to either
    side, for 10⁷ numbers and 3.5% for 5·10⁷.
    """
    cut = rows.shape[-1] // _BLOCK * _BLOCK
    result: torch.Tensor = rows[..., cut:].norm(dim=-1)
    if cut:
        blocks = torch.unflatten(rows[..., :cut], -1, (-1, _BLOCK)).norm(dim=-1)
        result = torch.hypot(norms(blocks), result)
    return result


def _pieces(
    budget: int, numbers: int, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """``tensors`` in pieces of ``budget`` numbers, where an example makes ``numbers``."""
    count = max(1, budget // max(1, numbers))
    return zip(*(torch.split(x, count) for x in tensors), strict=True)


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Inner products (examples, t, s) of ``a`` and ``b``, each a ``Products.left``."""
    if a.is_floating_point() and b.is_floating_point():
        return a @ b.mT
    if a.is_floating_point():
        return a.gather(2, b[:, None].expand(-1, a.shape[1], -1))
    return _inner(b, a).mT if b.is_floating_point() else a[:, :, None] == b[:, None]


def _scatter(indices: torch.Tensor, rows: torch.Tensor, height: int) -> torch.Tensor:
    """Sum of the ``rows`` of each index: (height, width), in an order that never changes."""
    return torch.ops.aten.embedding_dense_backward(
        rows.flatten(0, 1), indices.flatten(), height, -1, False
    )


def _without(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x`` with zeros for examples of factor 0: 0 times infinity would be no number."""
    if bool(factor.all()):
        return x
    return torch.where((factor != 0).view(-1, *[1] * (x.ndim - 1)), x, 0.0)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Without autocast and TF32, which would round norms and sums to 8 or 10 bits."""
    precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        torch.set_float32_matmul_precision("highest")
        stack.callback(torch.set_float32_matmul_precision, precision)
        yield


class _Layer:
    """A linear layer in a pass over examples: what it computes, and gradients of its weight."""

    axes = 1  # of the input of one use

    def __init__(
        self, layer: Any, values: Mapping[str, torch.Tensor], names: Mapping[str, str]
    ) -> None:
        self.layer, self.names, self.weight = layer, names, values[names["weight"]]
        self.bias = values.get(names.get("bias", ""), getattr(layer, "bias", None))

    def is_reparameterized(self, copies: Mapping[str, torch.Tensor]) -> bool:
        """True if a caller has put other tensors in place of the trained parameters for now.

        Args:
          copies: of one example, which gradients are of.
        """
        parameters = self.layer._parameters
        return any(
            parameters[key] is not copies[name] and not isinstance(parameters[key], nn.Parameter)
            for key, name in self.names.items()
        )

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs ``x``, examples first, with one axis for all uses."""
        return x.reshape(-1, *x.shape[x.ndim - self.axes :])

    def compute(self, flat: torch.Tensor) -> torch.Tensor:
        """Outputs for :meth:`flat` inputs; no view, which autograd would copy gradients of."""
        return functional.linear(flat, self.weight, self.bias)

    def factors(self, x: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients ``d`` of :meth:`compute` and inputs ``x`` as (examples, uses, numbers)."""
        return _uses(d, len(x)), _uses(x, len(x))

    def product(self, outputs: torch.Tensor, inputs: torch.Tensor) -> Products:
        """The gradient of the weight from :meth:`factors`."""
        return Products(outputs, inputs, len(self.weight))

    def gradients(
        self, x: torch.Tensor, d: torch.Tensor
    ) -> Iterator[tuple[str, GradientRows | Products]]:
        """Names and gradients of weight and bias; ``d``: gradients of outputs."""
        kind = self.weight.dtype
        outputs, inputs = (y.to(kind) if y.is_floating_point() else y for y in self.factors(x, d))
        yield self.names["weight"], self.product(outputs, inputs)
        if "bias" in self.names:
            yield self.names["bias"], GradientRows(outputs.sum(1))


class _Transposed(_Layer):
    """The linear layer of GPT-2 in transformers: a weight (inputs, outputs)."""

    def compute(self, flat: torch.Tensor) -> torch.Tensor:
        return functional.linear(flat, self.weight.T, self.bias)

    def product(self, outputs: torch.Tensor, inputs: torch.Tensor) -> Products:
        return Products(inputs, outputs, len(self.weight))


class _Embedding(_Transposed):
    axes = 0

    def compute(self, flat: torch.Tensor) -> torch.Tensor:
        return functional.embedding(flat, self.weight, self.layer.padding_idx)

    def factors(self, x: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layer.padding_idx is not None:
            d = d.masked_fill((self.flat(x) == self.layer.padding_idx)[:, None], 0.0)
        return _uses(d, len(x)), x.reshape(len(x), -1)


def _uses(x: torch.Tensor, examples: int) -> torch.Tensor:
    """``x`` as (examples, uses, numbers)."""
    return x.reshape(examples, -1, x.shape[-1])


_KINDS = {
    "torch.nn.modules.linear.Linear": _Layer,
    "torch.nn.modules.sparse.Embedding": _Embedding,
    "transformers.pytorch_utils.Conv1D": _Transposed,
}


def _layers(
    module: nn.Module, values: Mapping[str, torch.Tensor], names: Mapping[Any, str]
) -> Iterator[_Layer]:
    """Layers of ``module`` whose calls give products; ``values``: trained parameters."""
    for layer in module.modules():
        kind = _KINDS.get(f"{type(layer).__module__}.{type(layer).__name__}")
        # with these the gradient of the weight is no product
        is_rescaled = getattr(layer, "max_norm", None) or getattr(layer, "scale_grad_by_freq", 0)
        if kind and not is_rescaled and "forward" not in vars(layer):
            parameters = layer._parameters.items()
            trained = {key: names[p] for key, p in parameters if names.get(p) in values}
            if "weight" in trained:
                yield kind(layer, values, trained)


class _Calls(list[tuple[_Layer, torch.Tensor, torch.Tensor]]):
    """Layers that were called, inputs and gradients of outputs, once a backward pass has them."""

    examples: torch.Tensor  # one of theirs, inside of vmap
    copies: Mapping[str, torch.Tensor]  # of the trained parameters, as examples see

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.size = examples
        self.trigger = torch.zeros((), requires_grad=True)  # asks for gradients of outputs


class _Outputs(torch.autograd.Function):
    """Outputs as they are, of a layer whose call is recorded in the backward pass."""

    @staticmethod
    def forward(
        context: Any, y: torch.Tensor, x: torch.Tensor, trigger: Any, layer: _Layer, calls: _Calls
    ) -> torch.Tensor:
        context.mark_dirty(y)
        context.save_for_backward(x)  # which sees to it that x is not changed until then
        context.call = layer, calls
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, calls = context.call
        calls.append((layer, *context.saved_tensors, d))
        return d, None, None, None, None


def _call(layer: _Layer, calls: _Calls, *arguments: Any, **keywords: Any) -> Any:
    """A layer for the inputs of all examples at once, inside ``vmap``."""
    if layer.is_reparameterized(calls.copies):
        return type(layer.layer).forward(layer.layer, *arguments, **keywords)
    (x,) = (*arguments, *keywords.values())
    level = functorch.maybe_get_level(calls.examples)
    transformation = functorch.peek_interpreter_stack()
    if transformation is None or transformation.level() != level:
        raise RuntimeError("a layer was called in a transformation that has no rule for it")
    # what torch.autograd.Function does under vmap too, in ten times the time
    x, axis = functorch._unwrap_batched(x, level)
    with pyfunctorch.temporarily_pop_interpreter_stack():
        x = x.expand(calls.size, *x.shape) if axis is None else x.movedim(axis, 0)
        outputs = layer.compute(layer.flat(x))
        y: Any = _Outputs.apply(outputs, x, calls.trigger, layer, calls)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[: x.ndim - layer.axes], *y.shape[1:])
    return functorch._add_batch_dim(y, 0, level)


def forward(
    function: Callable[..., tuple[torch.Tensor, ...]],
    module: nn.Module,
    values: Mapping[str, torch.Tensor],
    names: Mapping[Any, str],
    batch: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], Pullback]:
    """(outputs of all examples, what gives gradients of each example from those of its outputs).

    Args:
      function: of (values by name, *tensors of one example), some tensors; calls ``module``.
      module: its linear layers and embeddings get another forward pass meanwhile.
      values: trained parameters by name, without gradients.
      names: of all parameters of ``module``.
      batch: tensors, examples along the first axis.
    """
    calls = _Calls(len(batch[0]))
    copies = {k: p.expand(calls.size, *p.shape).requires_grad_() for k, p in values.items()}

    def of_example(
        copy: dict[str, torch.Tensor], *example: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        calls.examples, calls.copies = example[0], copy
        return function(copy, *example)

    layers = list(_layers(module, values, names))
    # the fused attention of CPUs has no rule for vmap: it goes example by example
    rule = attention.sdpa_kernel(attention.SDPBackend.MATH)
    try:
        for layer in layers:
            layer.layer.forward = functools.partial(_call, layer, calls)
        with torch.enable_grad(), rule if batch[0].is_cpu else contextlib.nullcontext():
            outputs = vmap(of_example, randomness="different")(copies, *batch)
    finally:
        for layer in layers:
            del layer.layer.forward

    def gradients(cotangents: Sequence[torch.Tensor | None]) -> Gradients:
        calls.clear()  # of backward passes inside of the loss
        trained = [p for p, name in names.items() if name in values]
        inputs = [calls.trigger, *copies.values(), *trained]
        _, *rows = pulled_back(outputs, cotangents, inputs, allow_unused=True)
        if any(g is not None for g in rows[len(copies) :]):
            raise RuntimeError("the loss uses its parameters beside a call of it")
        result: Gradients = {
            k: [] if g is None else [GradientRows(g)] for k, g in zip(copies, rows, strict=False)
        }
        with full_precision(batch[0].device):
            for layer, x, d in calls:
                for name, gradient in layer.gradients(x, d):
                    result[name].append(gradient)
        return result

    return outputs, gradients


def pulled_back(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    **options: bool,
) -> Sequence[torch.Tensor]:
    """Gradients of ``inputs`` from those of the outputs that have one."""
    pairs = [
        (y, d)
        for y, d in zip(outputs, cotangents, strict=True)
        if d is not None and y.requires_grad
    ]
    return torch.autograd.grad([y for y, _ in pairs], inputs, [d for _, d in pairs], **options)
