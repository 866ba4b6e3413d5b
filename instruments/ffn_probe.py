"""Read every gated FFN of a running model: its activations, and its gradients in the backward pass.

Probes are identity autograd Functions put on the FFN's inner tensors by forward hooks. A Function's backward runs once
for every backward pass, also when gradient checkpointing runs the forward twice, so nothing is counted twice; and no
parameter needs `requires_grad`, so no weight gradient is ever allocated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instruments.gradients import column_squares, gram_matrix, prefer_gram, watch


class GatedFFN(Protocol):
    """What transformers calls an MLP in the supported families."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: Callable[[Tensor], Tensor]


@dataclass
class FFNGradients:
    """One layer's tensors of one batch, padding included: x and Δ (B, T, D), the others (B, T, F)."""

    x_BTD: Tensor  # FFN input
    h_BTF: Tensor  # act(gate) · up
    gate_grad_BTF: Tensor  # ∂loss/∂(gate pre-activation)
    up_grad_BTF: Tensor  # ∂loss/∂(up output)
    h_grad_BTF: Tensor  # ∂loss/∂h
    out_grad_BTD: Tensor  # Δ = ∂loss/∂(FFN output)


OnHidden = Callable[[int, Tensor], None]
OnGradients = Callable[[int, FFNGradients], None]


class _LayerProbe:
    """Collects one layer's tensors; complete when gate and up gradients have both arrived."""

    def __init__(self, layer: int, mlp: GatedFFN, on_gradients: OnGradients) -> None:
        self.layer, self.act, self.on_gradients = layer, mlp.act_fn, on_gradients
        self.parts: dict[str, Tensor] = {}

    def watch_gate(self, _module: nn.Module, args: tuple[Tensor, ...], gate: Tensor) -> Tensor:
        return watch(self._receive_gate, gate, gate, args[0])

    def watch_up(self, _module: nn.Module, _args: tuple[Tensor, ...], up: Tensor) -> Tensor:
        return watch(self._receive_up, up, up)

    def watch_hidden(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (watch(lambda grad: self.parts.update(h_grad=grad), args[0]), *args[1:])

    def watch_output(self, _module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return watch(lambda grad: self.parts.update(out_grad=grad), out)

    def _receive_gate(self, grad: Tensor, gate: Tensor, x: Tensor) -> None:
        self.parts.update(gate_grad=grad, gate=gate, x=x)
        self._finish()

    def _receive_up(self, grad: Tensor, up: Tensor) -> None:
        self.parts.update(up_grad=grad, up=up)
        self._finish()

    def _finish(self) -> None:
        if not {"gate", "up", "h_grad", "out_grad"} <= self.parts.keys():
            return
        parts, self.parts = self.parts, {}
        with torch.no_grad():
            # h is recomputed: keeping it from the forward pass would cost T·F more for every layer.
            hidden = self.act(parts["gate"]) * parts["up"]
            self.on_gradients(
                self.layer,
                FFNGradients(
                    parts["x"], hidden, parts["gate_grad"], parts["up_grad"], parts["h_grad"], parts["out_grad"]
                ),
            )


@contextmanager
def probe_gradients(mlps: Sequence[GatedFFN], on_gradients: OnGradients) -> Iterator[None]:
    """Call `on_gradients(layer, tensors)` once per layer and backward pass.

    Args:
        mlps: gated FFN modules with gate_proj, up_proj, down_proj and act_fn, in layer order.
        on_gradients: called under no_grad while the backward pass runs; must not keep the tensors.
    All hooks are removed when the context ends, after an error too.
    """
    handles: list[RemovableHandle] = []
    try:
        for layer, mlp in enumerate(mlps):
            probe = _LayerProbe(layer, mlp, on_gradients)
            handles += [
                mlp.gate_proj.register_forward_hook(probe.watch_gate),
                mlp.up_proj.register_forward_hook(probe.watch_up),
                mlp.down_proj.register_forward_pre_hook(probe.watch_hidden),
                mlp.down_proj.register_forward_hook(probe.watch_output),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def probe_hidden(mlps: Sequence[GatedFFN], on_hidden: OnHidden) -> Iterator[None]:
    """Call `on_hidden(layer, h_BTF)` once per layer and forward pass; for forward-only scans."""
    handles: list[RemovableHandle] = []
    try:
        for layer, mlp in enumerate(mlps):

            def watch(_module: nn.Module, args: tuple[Tensor, ...], layer: int = layer) -> None:
                on_hidden(layer, args[0].detach())

            handles.append(mlp.down_proj.register_forward_pre_hook(watch))
        yield
    finally:
        for handle in handles:
            handle.remove()


def neuron_norms(record: FFNGradients, product: str) -> dict[str, Float[Tensor, "B F"]]:
    """‖∇gate row‖, ‖∇up row‖ and ‖∇down column‖ for every sample and neuron.

    Column j of down sees input h_j and output gradient Δ: ‖∇W_{:,j}‖² = h_jᵀ(ΔΔᵀ)h_j. Row j of gate and up is the same
    with input and gradient exchanged: g_jᵀ(XXᵀ)g_j.

    Args:
        record: one layer's tensors of one batch.
        product: gram, direct, or auto for the cheaper one.
    """
    (_, length, hidden_size), width = record.x_BTD.shape, record.h_BTF.shape[-1]
    gram = neurons_prefer_gram(product, length, hidden_size, width)
    inputs_BTT = gram_matrix(record.x_BTD) if gram else None  # shared by gate and up
    squares = {
        "gate": column_squares(record.gate_grad_BTF, record.x_BTD, gram=gram, gram_BTT=inputs_BTT),
        "up": column_squares(record.up_grad_BTF, record.x_BTD, gram=gram, gram_BTT=inputs_BTT),
        "down": column_squares(record.h_BTF, record.out_grad_BTD, gram=gram),
    }
    return {name: squares_BF.sqrt_() for name, squares_BF in squares.items()}


def neurons_prefer_gram(product: str, length: int, hidden_size: int, width: int) -> bool:
    """Whether the neurons' norms go by Gram matrices: T×T ones of the narrow side, met by the wide side."""
    return prefer_gram(product, length, width, hidden_size, rows=False)
