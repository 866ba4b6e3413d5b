"""The dense model's mean FFN weight gradients, ∇W = GᵀX summed over tokens, with every weight frozen."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from models.capture.ffn_probe import FFNGradients, probe_gradients
from models.ffn import GatedFFN
from stages.calibration.forward import forward_losses
from stages.data.batches import TokenBatch

GIB = 2**30
Gradients = Mapping[str, Tensor]


def layers_per_pass(mlp: GatedFFN, matrices: Sequence[str], memory: float) -> int:
    """How many layers' fp32 gradients fit into `memory` GiB; at least one."""
    elements = mlp.down_proj.in_features * mlp.down_proj.out_features
    return max(1, int(memory * GIB / (4 * elements * max(1, len(matrices)))))


def mean_gradients(
    model: nn.Module,
    mlps: Sequence[GatedFFN],
    batches: Sequence[TokenBatch],
    matrices: Sequence[str],
    *,
    memory: float,
) -> Iterator[Gradients]:
    """Gradients of every layer in order: matrix name → (F, D) for gate and up, (D, F) for down.

    Layers are taken in as many passes over the text as `memory` GiB needs. The gradient is that of the mean over
    samples of each sample's mean loss.
    """
    step = layers_per_pass(mlps[0], matrices, memory)
    for first in range(0, len(mlps), step):
        group = range(first, min(first + step, len(mlps)))
        yield from accumulate_gradients(model, mlps, batches, matrices, group)


def accumulate_gradients(
    model: nn.Module, mlps: Sequence[GatedFFN], batches: Sequence[TokenBatch], matrices: Sequence[str], group: range
) -> list[dict[str, Tensor]]:
    """One pass over the text for the layers of `group`."""
    sums: list[dict[str, Tensor]] = [{} for _ in group]

    def add(layer: int, record: FFNGradients) -> None:
        for name in matrices:
            outputs, inputs = operands(name, record)
            product = outputs.flatten(0, 1).float().T @ inputs.flatten(0, 1).float()
            total = sums[layer].get(name)
            sums[layer][name] = product if total is None else total.add_(product)

    with probe_gradients([mlps[index] for index in group], add), torch.enable_grad():
        for batch in tqdm(batches, desc=f"gradients of layers {group.start}-{group.stop - 1}", unit="batch"):
            forward_losses(model, batch, spend_logits=True).sum().backward()  # type: ignore[no-untyped-call]
    samples = sum(len(batch.names) for batch in batches)
    return [{name: total / samples for name, total in layer.items()} for layer in sums]


def operands(name: str, record: FFNGradients) -> tuple[Tensor, Tensor]:
    """G and X of one weight: gradient at its output, and its input."""
    if name == "down":
        return record.out_grad_BTD, record.h_BTF
    return (record.gate_grad_BTF if name == "gate" else record.up_grad_BTF), record.x_BTD
