"""Turn what a probe has seen into numbers in the buffer of its pass, on the device, asking it nothing."""

import torch
from torch import Tensor

from models.capture.parameters.blocks import sum_blocks
from models.capture.parameters.embedding_norms import embedding_columns, embedding_token_squares, head_part
from models.capture.parameters.inputs import InputSquares, last_positions, split_samples
from models.capture.parameters.linear_norms import prefer_gram, weight_squares
from models.capture.parameters.scan_pass import ScanPass
from models.capture.records import WatchedParameter


def read_input(scan_pass: ScanPass, name: str, source: Tensor, width: int, device: torch.device) -> InputSquares:
    """Norms of a Linear's input. Raises ConfigError: its samples cannot be told apart."""
    x_BTI = split_samples(source, scan_pass.facts.samples, scan_pass.facts.length, name).to(device)
    mask_BT = last_positions(scan_pass.facts.mask_BT, x_BTI.shape[1], x_BTI.device)
    return InputSquares(source, x_BTI, mask_BT, width)


def record_input(scan_pass: ScanPass, index: int, inputs: InputSquares) -> None:
    """‖X‖² of a Linear, whole, by block and by token."""
    blocks_Bi = inputs.block_squares_Bi
    scan_pass.layout.write(scan_pass.sums_on(blocks_Bi.device), index, activation=(blocks_Bi.sum(1), blocks_Bi))
    scan_pass.write_tokens(index, inputs.token_squares_BT, None)


def record_gradient(scan_pass: ScanPass, index: int, inputs: InputSquares, grad: Tensor, product: str) -> None:
    """‖∇W‖² of a Linear, whole, by block and by token."""
    parameter = scan_pass.layout.parameters[index]
    x_BTI, width = inputs.x_BTI, parameter.block_width
    grad_BTO = grad.reshape(*x_BTI.shape[:2], -1)
    gram = prefer_gram(product, x_BTI.shape[1], *x_BTI.shape[2:], *grad_BTO.shape[2:])
    columns_BI, rows_BO = weight_squares(x_BTI, grad_BTO, gram=gram, gram_BTT=inputs.gram() if gram else None)
    rows_Bo = sum_blocks(rows_BO, width)
    _write_gradient(scan_pass, index, rows_Bo, sum_blocks(columns_BI, width))
    if scan_pass.per_token:
        norms_BT = torch.linalg.vector_norm(grad_BTO, dim=-1, dtype=torch.float32)
        scan_pass.write_tokens(index, None, inputs.token_squares_BT * norms_BT.square_())


def record_lookup(scan_pass: ScanPass, index: int, rows_BTD: Tensor) -> None:
    """‖rows looked up‖² of the embedding."""
    inputs = read_input(scan_pass, _name(scan_pass, index), rows_BTD, rows_BTD.shape[-1], rows_BTD.device)
    total_B = inputs.block_squares_Bi[:, 0]
    scan_pass.layout.write(scan_pass.sums_on(total_B.device), index, activation=(total_B, None))
    scan_pass.write_tokens(index, inputs.token_squares_BT, None)


def record_head(scan_pass: ScanPass, name: str, source: Tensor, grad: Tensor, product: str) -> None:
    """What a tied output embedding contributes to the embedding's gradient."""
    if scan_pass.ids_BT is None:
        return
    x_BSD = split_samples(source, scan_pass.facts.samples, scan_pass.facts.length, name).to(grad.device)
    grad_BSV = grad.reshape(*x_BSD.shape[:2], -1)
    gram = prefer_gram(product, x_BSD.shape[1], *x_BSD.shape[2:], *grad_BSV.shape[2:])
    scan_pass.buffers.head = head_part(
        x_BSD, grad_BSV, scan_pass.ids_BT.to(grad.device), gram=gram, per_token=scan_pass.per_token
    )


def record_embedding(scan_pass: ScanPass, index: int, delta_BTD: Tensor, padding_idx: int | None) -> None:
    """‖∇W‖² of the embedding; complete, for the backward pass reaches the look-up last."""
    ids_BT, head = scan_pass.ids_BT, scan_pass.buffers.head
    if ids_BT is None:
        return
    if padding_idx is not None:
        # nn.Embedding never trains this row, also where the token stands inside the text.
        delta_BTD = delta_BTD.masked_fill((ids_BT == padding_idx).unsqueeze(2), 0)
    if head is not None:
        head = head.to(delta_BTD.device)
    columns_BD = embedding_columns(ids_BT, delta_BTD, head)
    blocks_Bo = sum_blocks(columns_BD, _parameter(scan_pass, index).block_width)
    _write_gradient(scan_pass, index, blocks_Bo, None)
    if scan_pass.per_token:
        scan_pass.write_tokens(index, None, embedding_token_squares(delta_BTD, head))
    scan_pass.buffers.head = None


def _write_gradient(scan_pass: ScanPass, index: int, rows_Bo: Tensor, columns_Bi: Tensor | None) -> None:
    buffer_BW = scan_pass.sums_on(rows_Bo.device)
    scan_pass.layout.write(buffer_BW, index, gradient=(rows_Bo.sum(1), columns_Bi, rows_Bo))
    scan_pass.buffers.with_gradient.add(index)


def _parameter(scan_pass: ScanPass, index: int) -> WatchedParameter:
    return scan_pass.layout.parameters[index]


def _name(scan_pass: ScanPass, index: int) -> str:
    return _parameter(scan_pass, index).name.removesuffix(".weight")
