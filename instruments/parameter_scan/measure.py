"""Turn what a probe has seen into the squares of its pass, on the device of the tensors, asking it nothing."""

import torch
from torch import Tensor

from instruments.gradient_norms import prefer_gram, weight_squares
from instruments.parameter_scan.inputs import (
    InputSquares,
    embedding_columns,
    embedding_token_squares,
    head_part,
    last_positions,
    split_samples,
    sum_blocks,
)
from instruments.parameter_scan.scan_pass import ScanPass


def read_input(scan_pass: ScanPass, name: str, source: Tensor, width: int, device: torch.device) -> InputSquares:
    """Norms of a module's input. Raises ConfigError: its samples cannot be told apart."""
    x_BTI = split_samples(source, scan_pass.facts.samples, scan_pass.facts.length, name).to(device)
    mask_BT = last_positions(scan_pass.facts.mask_BT, x_BTI.shape[1], x_BTI.device)
    return InputSquares(source, x_BTI, mask_BT, width)


def record_input(scan_pass: ScanPass, index: int, inputs: InputSquares) -> None:
    """‖X‖² by block and by token."""
    scan_pass.squares.activation[index] = inputs.block_squares_Bi
    if scan_pass.per_token:
        scan_pass.squares.token_activation[index] = inputs.token_squares_BT


def record_gradient(scan_pass: ScanPass, index: int, inputs: InputSquares, grad: Tensor, product: str) -> None:
    """‖∇W‖² of a Linear by block and by token."""
    x_BTI, width = inputs.x_BTI, scan_pass.layout.parameters[index].block_width
    grad_BTO = grad.reshape(*x_BTI.shape[:2], -1)
    gram = prefer_gram(product, x_BTI.shape[1], x_BTI.shape[2], grad_BTO.shape[2])
    columns_BI, rows_BO = weight_squares(x_BTI, grad_BTO, gram=gram, gram_BTT=inputs.gram() if gram else None)
    scan_pass.squares.in_gradient[index] = sum_blocks(columns_BI, width)
    scan_pass.squares.out_gradient[index] = sum_blocks(rows_BO, width)
    if scan_pass.per_token:
        norms_BT = torch.linalg.vector_norm(grad_BTO, dim=-1, dtype=torch.float32)
        scan_pass.squares.token_gradient[index] = inputs.token_squares_BT * norms_BT.square_()


def record_lookup(scan_pass: ScanPass, index: int, rows_BTD: Tensor) -> None:
    """‖rows looked up‖² of the embedding, not cut into blocks."""
    name = scan_pass.layout.parameters[index].name
    record_input(scan_pass, index, read_input(scan_pass, name, rows_BTD, rows_BTD.shape[-1], rows_BTD.device))


def record_head(scan_pass: ScanPass, name: str, source: Tensor, grad: Tensor, product: str) -> None:
    """What a tied output embedding contributes to the embedding's gradient."""
    if scan_pass.ids_BT is None:
        return
    x_BSD = split_samples(source, scan_pass.facts.samples, scan_pass.facts.length, name).to(grad.device)
    grad_BSV = grad.reshape(*x_BSD.shape[:2], -1)
    gram = prefer_gram(product, x_BSD.shape[1], x_BSD.shape[2], grad_BSV.shape[2], rows=False)
    ids_BT = scan_pass.ids_BT.to(grad.device)
    scan_pass.head = head_part(x_BSD, grad_BSV, ids_BT, gram=gram, per_token=scan_pass.per_token)


def record_embedding(scan_pass: ScanPass, index: int, delta_BTD: Tensor, padding_idx: int | None) -> None:
    """‖∇W‖² of the embedding; complete, for the backward pass reaches the look-up last."""
    ids_BT, head = scan_pass.ids_BT, scan_pass.head
    if ids_BT is None:
        return
    if padding_idx is not None:
        # nn.Embedding never trains this row, also where the token stands inside the text.
        delta_BTD = delta_BTD.masked_fill((ids_BT == padding_idx).unsqueeze(2), 0)
    if head is not None:
        head = head.to(delta_BTD.device)
    columns_BD = embedding_columns(ids_BT, delta_BTD, head)
    width = scan_pass.layout.parameters[index].block_width
    scan_pass.squares.out_gradient[index] = sum_blocks(columns_BD, width)
    if scan_pass.per_token:
        scan_pass.squares.token_gradient[index] = embedding_token_squares(delta_BTD, head)
    scan_pass.head = None
