"""Gradients seen from inside the autograd graph, and squared norms of a Linear's weight gradient."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Floats of one temporary: on a CPU it stays in the cache, on a GPU it fills the device.
_CACHE_FLOATS, _DEVICE_FLOATS = 1 << 17, 1 << 26
_LEAST_ROWS = 256
# Multiply-adds that cost as much as one number's share of squaring and summing.
_ELEMENTWISE = 64


def column_squares(
    x_BTI: Float[Tensor, "B T I"],
    grad_BTO: Float[Tensor, "B T O"],
    *,
    gram: bool,
    gram_BTT: Float[Tensor, "B T T"] | None = None,
) -> Float[Tensor, "B I"]:
    """‖∇W[:, i]‖² for every sample and column; with the two tensors exchanged, for every row.

    As `weight_squares`, but `gram_BTT` is GGᵀ.
    """
    columns_BI = x_BTI.new_empty(x_BTI.shape[0], x_BTI.shape[2], dtype=torch.float32)
    for part in sample_parts(x_BTI, grad_BTO):
        x, grad = x_BTI[part].float(), grad_BTO[part]
        if gram:
            columns_BI[part] = _quadratic_forms(gram_matrix(grad) if gram_BTT is None else gram_BTT[part], x)
        else:
            columns_BI[part] = _product_column_squares(x, grad)
    return columns_BI


def weight_squares(
    x_BTI: Float[Tensor, "B T I"],
    grad_BTO: Float[Tensor, "B T O"],
    *,
    gram: bool,
    gram_BTT: Float[Tensor, "B T T"] | None = None,
) -> tuple[Float[Tensor, "B I"], Float[Tensor, "B O"]]:
    """‖∇W[:, i]‖² and ‖∇W[o, :]‖² for every sample, column and row, of a Linear's input and its output's gradient.

    With `gram` they follow from Gram matrices, otherwise from the gradient itself. `gram_BTT` is XXᵀ in fp32, where
    the caller already has it.
    Numerics: fp32 products and sums; norms within 1e-5 of the true gradient's in fp32. Squares below 1e-38, that is
        norms below 1e-19, vanish.
    """
    columns_BI = x_BTI.new_empty(x_BTI.shape[0], x_BTI.shape[2], dtype=torch.float32)
    rows_BO = x_BTI.new_empty(x_BTI.shape[0], grad_BTO.shape[2], dtype=torch.float32)
    for part in sample_parts(x_BTI, grad_BTO):
        x = x_BTI[part].float()
        if gram:
            grad = grad_BTO[part].float()
            columns_BI[part] = _quadratic_forms(gram_matrix(grad), x)
            rows_BO[part] = _quadratic_forms(gram_matrix(x) if gram_BTT is None else gram_BTT[part], grad)
        else:
            columns_BI[part], rows_BO[part] = _product_squares(x, grad_BTO[part])
    return columns_BI, rows_BO


def prefer_gram(product: str, length: int, inputs: int, outputs: int, *, rows: bool = True) -> bool:
    """Whether to go by Gram matrices: asked for, or cheaper.

    Gram costs 2T² multiply-adds for every row and column, direct T for every element of the weight; added to that is
    what is done to each number of the products. Without rows only GGᵀ and its product with X are needed.
    """
    if product != "auto":
        return product == "gram"
    both = length * (2 * length + _ELEMENTWISE / 2) * (inputs + outputs)
    columns = length * length * outputs + length * (length + _ELEMENTWISE / 2) * inputs
    return (both if rows else columns) <= (length + _ELEMENTWISE) * inputs * outputs


def gram_matrix(x_TN: Float[Tensor, "*b T N"]) -> Float[Tensor, "*b T T"]:
    """X Xᵀ of every sample in fp32; numbers of half precision are converted some columns at a time."""
    if x_TN.dtype == torch.float32:
        return x_TN @ x_TN.mT
    *samples, length, _columns = x_TN.shape
    chunk = max(1, 4 * _budget(x_TN) // (math.prod(samples) * length))
    gram_TT = torch.zeros(*samples, length, length, device=x_TN.device)
    for part in x_TN.split(chunk, dim=-1):
        gram_TT += part.float() @ part.float().mT
    return gram_TT


def sample_parts(x_BTI: Tensor, grad_BTO: Tensor) -> Iterator[int | slice]:
    """Indices of samples: groups whose temporaries fit the budget; one by one where a single sample fills it."""
    samples, length, inputs = x_BTI.shape
    step = max(1, _budget(x_BTI) // (length * max(inputs, grad_BTO.shape[-1])))
    if step == 1:
        return iter(range(samples))
    return (slice(first, first + step) for first in range(0, samples, step))


def _quadratic_forms(gram_TT: Float[Tensor, "*b T T"], x_TN: Float[Tensor, "*b T N"]) -> Float[Tensor, "*b N"]:
    """x_nᵀ K x_n for every column; rounding can leave one just below zero, which counts as zero."""
    return torch.matmul(gram_TT, x_TN).mul_(x_TN).sum(-2).clamp_min_(0)


def _product_squares(
    x_TI: Float[Tensor, "*b T I"], grad_TO: Float[Tensor, "*b T O"]
) -> tuple[Float[Tensor, "*b I"], Float[Tensor, "*b O"]]:
    """Column and row sums of (GᵀX)², which is never held whole: the longer side is done in chunks."""
    if x_TI.shape[-1] > grad_TO.shape[-1]:
        rows, columns = _product_squares(grad_TO, x_TI)
        return columns, rows
    *samples, _, inputs = x_TI.shape
    # Fewer rows at a time than these and the matrix product itself slows down.
    chunk = max(_LEAST_ROWS, _budget(x_TI) // (math.prod(samples) * inputs))
    x = x_TI.float()
    column_parts: list[Tensor] = []
    row_parts: list[Tensor] = []
    for grad in grad_TO.split(chunk, dim=-1):
        product = torch.matmul(grad.float().mT, x)
        squares = torch.mul(product, product, out=product)
        column_parts.append(squares.sum(-2))
        row_parts.append(squares.sum(-1))
    columns_I = torch.stack(column_parts).sum(0) if len(column_parts) > 1 else column_parts[0]
    return columns_I, torch.cat(row_parts, dim=-1)


def _product_column_squares(x_TI: Float[Tensor, "*b T I"], grad_TO: Float[Tensor, "*b T O"]) -> Float[Tensor, "*b I"]:
    """Column sums of (GᵀX)², some columns at a time; each product is read once."""
    grad = grad_TO.float()
    chunk = max(_LEAST_ROWS, _budget(x_TI) // (math.prod(grad.shape[:-2]) * grad.shape[-1]))
    products = (torch.matmul(x.mT, grad) for x in x_TI.split(chunk, dim=-1))
    return torch.cat([torch.mul(product, product, out=product).sum(-1) for product in products], dim=-1)


def _budget(tensor: Tensor) -> int:
    return _CACHE_FLOATS if tensor.device.type == "cpu" else _DEVICE_FLOATS


class _Watch(torch.autograd.Function):
    """Identity; hands the gradient, with what the forward pass saved, to `receive`."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., None], value: Tensor, *saved: Tensor) -> Tensor:  # noqa: ANN401 - autograd's context
        ctx.receive = receive
        ctx.save_for_backward(*saved)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - autograd's context
        saved = ctx.saved_tensors  # once: under gradient checkpointing a second look is an error
        device = grads[0].device.type
        # A backward pass called inside an autocast region would multiply in half precision.
        full = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
        with torch.no_grad(), full:
            ctx.receive(grads[0], *saved)
        return (None, grads[0], *([None] * len(saved)))


def watch(receive: Callable[..., None], value: Tensor, *saved: Tensor) -> Tensor:
    """`value` itself, whose gradient will go to `receive(gradient, *saved)`, once for every backward pass.

    Gradient checkpointing, which runs the forward pass twice, still runs a Function's backward once; what is saved here
    is dropped and recomputed as everything else is.
    """
    watched: Tensor = _Watch.apply(receive, value, *saved)
    return watched
