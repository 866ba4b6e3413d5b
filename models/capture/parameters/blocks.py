"""Sums of squares over blocks of columns."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm


def sum_blocks(values_BN: Float[Tensor, "B N"], width: int) -> Float[Tensor, "B n"]:
    """Sums over blocks of `width` columns; the last block may be narrower."""
    rest = -values_BN.shape[1] % width
    padded = torch.nn.functional.pad(values_BN, (0, rest)) if rest else values_BN
    return padded.reshape(len(padded), -1, width).sum(-1)


def token_block_squares(x_BTN: Float[Tensor, "B T N"], width: int) -> Float[Tensor, "B T n"]:
    """‖x_t[block]‖² in fp32 for every token and block of `width`; the last block may be narrower."""
    whole = x_BTN.shape[-1] // width * width
    parts = [x_BTN[..., :whole].unflatten(-1, (-1, width))] if whole else []
    if whole < x_BTN.shape[-1]:
        parts.append(x_BTN[..., whole:].unsqueeze(-2))
    norms = [vector_norm(part, dim=-1, dtype=torch.float32) for part in parts]
    squares: Tensor = (norms[0] if len(norms) == 1 else torch.cat(norms, dim=-1)).square_()
    return squares
