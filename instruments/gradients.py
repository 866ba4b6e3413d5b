"""Capture gradients inside the autograd graph; squared norms of a Linear's weight gradient."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from instruments.device import is_launch_bound, rounded_products
from instruments.shapes import Float

# Floats per temporary: small enough for a CPU's cache, large enough to use a GPU fully.
_CACHE_FLOATS, _DEVICE_FLOATS = 1 << 17, 1 << 26
_LEAST_ROWS = 256
# Since torch 2.8, Nvidia's tensor cores return products of half precision as they add them up, in fp32.
_WIDE_PRODUCTS = torch.version.cuda is not None and hasattr(torch.ops.aten.bmm, "dtype")
# Cost of squaring and summing one number, in multiply-adds.
_ELEMENTWISE = 64


def column_squares(
    x_BTI: Float[Tensor, "B T I"],
    grad_BTO: Float[Tensor, "B T O"],
    *,
    gram: bool,
    gram_BTT: Float[Tensor, "B T T"] | None = None,
) -> Float[Tensor, "B I"]:
    """‖∇W[:, i]‖² per sample and column (row, if the tensors are swapped). As `weight_squares`; `gram_BTT` is GGᵀ."""
    columns_BI = x_BTI.new_empty(x_BTI.shape[0], x_BTI.shape[2], dtype=torch.float32)
    for part in sample_parts(x_BTI, grad_BTO):
        x, grad = x_BTI[part], grad_BTO[part]
        if gram:
            # x_iᵀ H x_i of every column i.
            x = x.float()
            with rounded_products(use=_is_half(x_BTI, grad), on=["cuda"]):
                product = torch.matmul(gram_matrix(grad) if gram_BTT is None else gram_BTT[part], x)
            torch.sum(product.mul_(x), -2, out=columns_BI[part])
        else:
            columns_BI[part] = _product_column_squares(x, grad)
    return columns_BI.clamp_min_(0) if gram else columns_BI  # rounding makes some negative


def weight_squares(
    x_BTI: Float[Tensor, "B T I"],
    grad_BTO: Float[Tensor, "B T O"],
    *,
    gram: bool,
    gram_BTT: Float[Tensor, "B T T"] | None = None,
) -> tuple[Float[Tensor, "B I"], Float[Tensor, "B O"]]:
    """‖∇W[:, i]‖² and ‖∇W[o, :]‖² per sample, from a Linear's input and its output's gradient.

    With `gram` they come from Gram matrices, else from the gradient itself. `gram_BTT` is XXᵀ in fp32, if the caller
    has it.
    Numerics: fp32 products and sums; norms within 1e-5 of the true gradient's in fp32. Squares below 1e-38 (norms below
        1e-19) become 0.
    """
    if gram:
        rows_BO = column_squares(grad_BTO, x_BTI, gram=True, gram_BTT=gram_BTT)
        return column_squares(x_BTI, grad_BTO, gram=True), rows_BO
    columns_BI = x_BTI.new_empty(x_BTI.shape[0], x_BTI.shape[2], dtype=torch.float32)
    rows_BO = x_BTI.new_empty(x_BTI.shape[0], grad_BTO.shape[2], dtype=torch.float32)
    for part in sample_parts(x_BTI, grad_BTO):
        columns_BI[part], rows_BO[part] = _product_squares(x_BTI[part], grad_BTO[part])
    return columns_BI, rows_BO


def prefer_gram(product: str, length: int, inputs: int, outputs: int, *, rows: bool = True) -> bool:
    """Whether to use Gram matrices: requested by `product`, or cheaper.

    Gram costs 2T² multiply-adds per row and column, direct T per element of the weight; both add an elementwise cost
    per number of the products. Without `rows` only GGᵀ and its product with X are needed.
    """
    if product != "auto":
        return product == "gram"
    both = length * (2 * length + _ELEMENTWISE / 2) * (inputs + outputs)
    columns = length * length * outputs + length * (length + _ELEMENTWISE / 2) * inputs
    return (both if rows else columns) <= (length + _ELEMENTWISE) * inputs * outputs


def gram_matrix(x_TN: Float[Tensor, "*b T N"]) -> Float[Tensor, "*b T T"]:
    """X Xᵀ of every sample in fp32; where no product of half-precision input is in fp32, some columns are converted."""
    if x_TN.dtype == torch.float32:
        return x_TN @ x_TN.mT
    *samples, length, columns = x_TN.shape
    if x_TN.device.type == "cuda" and _WIDE_PRODUCTS and x_TN.dtype in {torch.bfloat16, torch.float16}:
        x_BTN = x_TN.reshape(-1, length, columns)
        return torch.bmm(x_BTN, x_BTN.mT, out_dtype=torch.float32).view(*samples, length, length)
    chunk = max(1, 4 * _budget(x_TN) // (math.prod(samples) * length))
    grams = (part @ part.mT for part in map(Tensor.float, x_TN.split(chunk, dim=-1)))
    return reduce(Tensor.add_, grams)


def sample_parts(x_BTI: Tensor, grad_BTO: Tensor) -> Iterator[int | slice]:
    """Indices of samples: groups whose temporaries fit the budget, or single samples."""
    samples, length, inputs = x_BTI.shape
    step = max(1, _budget(x_BTI) // (length * max(inputs, grad_BTO.shape[-1])))
    if step == 1:
        return iter(range(samples))
    return (slice(first, first + step) for first in range(0, samples, step))


def _product_squares(
    x_TI: Float[Tensor, "*b T I"], grad_TO: Float[Tensor, "*b T O"]
) -> tuple[Float[Tensor, "*b I"], Float[Tensor, "*b O"]]:
    """Column and row sums of (GᵀX)², computed in chunks of the longer side to save memory."""
    if x_TI.shape[-1] > grad_TO.shape[-1]:
        rows, columns = _product_squares(grad_TO, x_TI)
        return columns, rows
    *samples, _, inputs = x_TI.shape
    # With fewer rows per chunk the matrix product itself is slower.
    chunk = max(_LEAST_ROWS, _budget(x_TI) // (math.prod(samples) * inputs))
    x = x_TI.float()
    column_parts: list[Tensor] = []
    row_parts: list[Tensor] = []
    for grad in grad_TO.split(chunk, dim=-1):
        with rounded_products(use=_is_half(x_TI, grad), on=["cuda"]):
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
    with rounded_products(use=_is_half(x_TI, grad_TO), on=["cuda"]):
        products = (torch.matmul(x.mT, grad) for x in x_TI.float().split(chunk, dim=-1))
        return torch.cat([torch.mul(product, product, out=product).sum(-1) for product in products], dim=-1)


def _is_half(*tensors: Tensor) -> bool:
    """Whether rounding to TF32 keeps what these numbers hold; a Gram matrix of them loses less than they have lost."""
    return all(tensor.dtype.itemsize < 4 for tensor in tensors)


def _budget(tensor: Tensor) -> int:
    return _DEVICE_FLOATS if is_launch_bound(tensor.device) else _CACHE_FLOATS


@contextmanager
def in_full_precision(device: torch.device) -> Iterator[None]:
    """No gradients, and no autocast: a backward pass inside of its region would multiply in half precision."""
    full = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with torch.no_grad(), full:
        yield


class _Watch(torch.autograd.Function):
    """Identity; passes the gradient and the saved tensors to `receive`."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        receive: Callable[..., None],
        on_changed: Callable[[], None] | None,
        value: Tensor,
        *saved: Tensor,
    ) -> Tensor:
        ctx.receive, ctx.on_changed, ctx.count = receive, on_changed, len(saved)
        ctx.save_for_backward(*saved)
        return value.detach()  # autograd refuses in-place operations on a view that a Function returns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - autograd's context
        unchanged: tuple[Tensor | None, ...] = (None, None, grads[0], *([None] * ctx.count))
        try:
            saved = ctx.saved_tensors  # read once: a second access fails under gradient checkpointing
        except RuntimeError as error:
            if ctx.on_changed is None or "modified by an inplace operation" not in str(error):
                raise
            ctx.on_changed()
            return unchanged
        with in_full_precision(grads[0].device):
            ctx.receive(grads[0], *saved)
        return unchanged


def watch(
    receive: Callable[..., None], value: Tensor, *saved: Tensor, on_changed: Callable[[], None] | None = None
) -> Tensor:
    """Return `value`; its gradient is passed to `receive(gradient, *saved)` once per backward pass.

    The model may change the returned tensor in place. If it changes a `saved` one, `on_changed` is called instead;
    without it, autograd's error is raised. Under gradient checkpointing the forward pass runs twice, but a Function's
    backward once; `saved` is dropped and recomputed like all saved tensors.
    """
    watched: Tensor = _Watch.apply(receive, on_changed, value, *saved)
    return watched


# For narrower blocks the elementwise work on T x T matrices costs more than it saves.
_LEAST_WIDTH = 16
_LEAST_LENGTH = 64  # fewest tokens that are worth splitting in halves
# Cost per feature in units of T² multiply-adds: of the wider side, with its elementwise work; of the narrower.
_WIDE, _NARROW = 0.95, 1.5
_BLOCK_CACHE_FLOATS = 1 << 18


def split_blocks(x_N: Float[Tensor, "*b N"], width: int) -> list[Tensor]:
    """Views (*b, n, width) of the last dimension's blocks, and (*b, 1, rest) if the last one is narrower."""
    whole = x_N.shape[-1] // width * width
    parts = [x_N[..., :whole].unflatten(-1, (-1, width))] if whole else []
    return parts if whole == x_N.shape[-1] else [*parts, x_N[..., whole:].unsqueeze(-2)]


def sum_blocks(values_BN: Float[Tensor, "B N"], width: int) -> Float[Tensor, "B n"]:
    """Sums over blocks of `width` columns; the last block may be narrower."""
    rest = -values_BN.shape[1] % width
    padded = torch.nn.functional.pad(values_BN, (0, rest)) if rest else values_BN
    return padded.reshape(len(padded), -1, width).sum(-1)


def block_squares(
    x_BTI: Float[Tensor, "B T I"],
    grad_BTO: Float[Tensor, "B T O"],
    widths: tuple[int, int],
    *,
    product: str,
    gram: Callable[[], Tensor],
) -> tuple[Float[Tensor, "B i"], Float[Tensor, "B o"]]:
    """Squared norms of blocks of columns and of rows, `widths` wide, of each sample's weight gradient GᵀX.

    With X (T, I), G (T, O), K = XXᵀ and H = GGᵀ: ‖∇W[block, :]‖² = ⟨G_block G_blockᵀ, K⟩ for a block of rows,
    ‖∇W[:, block]‖² = ⟨X_block X_blockᵀ, H⟩ for a block of columns. The Gram matrices of the wider side's blocks give
    its norms and sum to its own Gram matrix: T² multiply-adds per feature, half of what single columns and rows need.
    They are symmetric, so with the tokens in two halves only three quarters are computed. A GPU rather starts few
    operators: single columns and rows of all samples at once.

    Training a Linear takes 3·T·I·O multiply-adds; its norms about T²·(¾·max + 1¾·min of I, O) for a sample of T tokens.
    For Qwen2.5-0.5B that is 10 % of a training step at 256 tokens and 5 % at 128, without elementwise operations.

    `product` is as in `prefer_gram`; `gram` returns XXᵀ (B, T, T) and is called only when needed.
    Numerics: fp32; norms within 1e-5 of the true gradient's; squares that rounding makes negative become 0.
    """
    length, inputs, outputs = x_BTI.shape[1], x_BTI.shape[2], grad_BTO.shape[2]
    wide = min(widths) >= _LEAST_WIDTH and _prefer_blocks(product, length, inputs, outputs)
    if is_launch_bound(x_BTI.device) or not wide:
        by_gram = prefer_gram(product, length, inputs, outputs)
        columns_BI, rows_BO = weight_squares(x_BTI, grad_BTO, gram=by_gram, gram_BTT=gram() if by_gram else None)
        return sum_blocks(columns_BI, widths[0]), sum_blocks(rows_BO, widths[1])
    pairs = []
    for number, (x, grad) in enumerate(zip(x_BTI, grad_BTO, strict=True)):
        x_TI, grad_TO = x.float(), grad.float()
        if inputs <= outputs:
            rows_o, gram_TT = _stream(grad_TO, gram()[number], widths[1])
            pairs.append((_narrow_blocks(x_TI, gram_TT, widths[0]), rows_o))
        else:
            columns_i, gram_TT = _stream(x_TI, _symmetric_gram(grad_TO), widths[0])
            pairs.append((columns_i, _narrow_blocks(grad_TO, gram_TT, widths[1])))
    columns, rows = zip(*pairs, strict=True)
    return torch.stack(columns), torch.stack(rows)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors along their first dimension; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def sample_grams(x_BTN: Float[Tensor, "B T N"]) -> Float[Tensor, "B T T"]:
    """X Xᵀ of every sample in fp32, by the faster way on its device."""
    if is_launch_bound(x_BTN.device):
        return gram_matrix(x_BTN)
    return torch.stack([_symmetric_gram(x_TN) for x_TN in x_BTN])


def _symmetric_gram(x_TN: Float[Tensor, "T N"]) -> Float[Tensor, "T T"]:
    """X Xᵀ in fp32; with two halves of the tokens, the upper block is copied from the lower one."""
    if x_TN.dtype != torch.float32:
        return gram_matrix(x_TN)
    gram_TT = torch.empty(len(x_TN), len(x_TN), device=x_TN.device)
    for rows, columns in _lower(len(x_TN)):
        gram_TT[rows, columns] = x_TN[rows] @ x_TN[columns].mT
        if rows != columns:
            gram_TT[columns, rows] = gram_TT[rows, columns].mT
    return gram_TT


def _prefer_blocks(product: str, length: int, inputs: int, outputs: int) -> bool:
    if product != "auto":
        return product == "gram"
    wide, narrow = max(inputs, outputs), min(inputs, outputs)
    blocks = length * (length * (_WIDE * wide + _NARROW * narrow) + _ELEMENTWISE / 2 * (inputs + outputs))
    return blocks <= (length + _ELEMENTWISE) * inputs * outputs


def _lower(length: int) -> list[tuple[slice, slice]]:
    """Pairs of halves of the tokens, on and below the diagonal."""
    if length < _LEAST_LENGTH:
        return [(slice(0, length), slice(0, length))]
    first, second = slice(0, length // 2), slice(length // 2, length)
    return [(first, first), (second, second), (second, first)]


def _stream(
    wide_TN: Float[Tensor, "T N"], other_TT: Float[Tensor, "T T"], width: int
) -> tuple[Float[Tensor, "n"], Float[Tensor, "T T"]]:
    """⟨W_block W_blockᵀ, other⟩ of every block, and the sum W Wᵀ of the blocks' Gram matrices."""
    parts = [part.transpose(0, 1) for part in split_blocks(wide_TN, width)]
    squares = [wide_TN.new_zeros(len(part), dtype=torch.float32) for part in parts]
    gram_TT = torch.zeros_like(other_TT)
    for rows, columns in _lower(len(wide_TN)):
        other, own_TT = other_TT[rows, columns].reshape(-1), gram_TT[rows, columns]
        chunk = max(1, _BLOCK_CACHE_FLOATS // own_TT.numel())
        for part_nTw, squares_n in zip(parts, squares, strict=True):
            for some_nTw, some_n in zip(part_nTw.split(chunk), squares_n.split(chunk), strict=True):
                grams_nTT = some_nTw[:, rows] @ some_nTw[:, columns].mT
                some_n.add_(grams_nTT.flatten(1) @ other, alpha=1 if rows == columns else 2)
                own_TT.add_(grams_nTT.sum(0))
        if rows != columns:
            gram_TT[columns, rows] = own_TT.mT
    return torch.cat(squares).clamp_min_(0), gram_TT


def _narrow_blocks(x_TN: Float[Tensor, "T N"], gram_TT: Float[Tensor, "T T"], width: int) -> Float[Tensor, "n"]:
    """Sums of x_jᵀ K x_j over blocks of columns."""
    return sum_blocks((gram_TT @ x_TN).mul_(x_TN).sum(0, keepdim=True).clamp_min_(0), width)[0]
