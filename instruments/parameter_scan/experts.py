"""Squared norms of fused experts: rows of a product belong to a token and an expert."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.linalg import vector_norm

from instruments.gradients import prefer_gram, weight_squares
from instruments.parameter_scan.block_squares import sum_blocks
from instruments.parameter_scan.inputs import token_block_squares
from instruments.parameter_scan.targets import Target


class Routes(NamedTuple):
    """What the rows of a product are about, of B samples of T positions."""

    token_R: Tensor  # number of the token, over all samples
    expert_R: Tensor
    samples: int
    length: int


def expert_squares(
    routes: Routes,
    x_RI: Float[Tensor, "R I"],
    grad_RO: Float[Tensor, "R O"] | None,
    mask_R: Bool[Tensor, "R"] | None,
    target: Target,
    product: str,
    per_token: bool,
) -> dict[str, Tensor]:
    """What the rows contribute to the squares of every expert, (B, E, blocks) or, by token, (B, E, T).

    Args:
        routes: of the rows; a token has at most one row of an expert.
        x_RI: inputs.
        grad_RO: gradients of the outputs; None in a forward pass alone.
        mask_R: False for rows of padding.
        target: any expert of the parameter.
        product: gram, direct or auto.
        per_token: also the squares of every token.
    """
    experts, parameter = target.experts, target.parameter
    shape = (routes.samples, experts)
    group_R = (routes.token_R // routes.length * experts + routes.expert_R).to(x_RI.device)
    squares_Ri = token_block_squares(x_RI.unsqueeze(0), parameter.in_width).squeeze(0)
    activation_Gi = squares_Ri.new_zeros(routes.samples * experts, parameter.in_blocks)
    seen_Ri = squares_Ri if mask_R is None else squares_Ri * mask_R.unsqueeze(1)
    found = {"activation": activation_Gi.index_add_(0, group_R, seen_Ri).unflatten(0, shape)}
    by_token = {"token_activation": squares_Ri.sum(1)}
    if grad_RO is not None:
        in_gradient_Gi = torch.zeros_like(activation_Gi)
        out_gradient_Go = squares_Ri.new_zeros(len(activation_Gi), parameter.out_blocks)
        for group in group_R.unique().tolist():
            rows = group_R == group
            x, grad = x_RI[rows].unsqueeze(0), grad_RO[rows].unsqueeze(0)
            gram = prefer_gram(product, x.shape[1], x.shape[2], grad.shape[2])
            columns_1I, rows_1O = weight_squares(x, grad, gram=gram)
            in_gradient_Gi[group] = sum_blocks(columns_1I, parameter.in_width)[0]
            out_gradient_Go[group] = sum_blocks(rows_1O, parameter.out_width)[0]
        found |= {
            "in_gradient": in_gradient_Gi.unflatten(0, shape), "out_gradient": out_gradient_Go.unflatten(0, shape)
        }  # fmt: skip
        norms_R = vector_norm(grad_RO, dim=-1, dtype=torch.float32)
        by_token["token_gradient"] = by_token["token_activation"] * norms_R.square()
    if per_token:
        position_R = (routes.token_R % routes.length).to(x_RI.device)
        for name, squares_R in by_token.items():
            table_GT = squares_R.new_zeros(routes.samples * experts, routes.length)
            table_GT[group_R, position_R] = squares_R
            found[name] = table_GT.unflatten(0, shape)
    return found
