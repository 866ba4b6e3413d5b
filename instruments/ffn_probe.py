"""Capture the activations of every gated FFN in a running model, and its gradients in the backward pass.

Forward hooks insert identity autograd Functions at the FFN's inner tensors. A Function's backward runs once per
backward pass, also when gradient checkpointing runs the forward pass twice, so nothing is counted twice. No parameter
needs `requires_grad`, so no weight gradient is allocated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from instruments.gradients import column_squares, gram_matrix, prefer_gram, watch
from instruments.shapes import Float


class GatedFFN(Protocol):
    """The MLP interface of transformers in the supported families."""

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
    """Collects one layer's tensors; complete when the gate and up gradients have both arrived."""

    def __init__(self, layer: int, mlp: GatedFFN, on_gradients: OnGradients) -> None:
        self.layer, self.act, self.on_gradients = layer, mlp.act_fn, on_gradients
        self.parts: dict[str, Tensor] = {}

    def watch_gate(self, _module: nn.Module, args: tuple[Tensor, ...], gate: Tensor) -> Tensor:
        return watch(lambda grad, gate, x: self._receive(gate_grad=grad, gate=gate, x=x), gate, gate, args[0])

    def watch_up(self, _module: nn.Module, _args: tuple[Tensor, ...], up: Tensor) -> Tensor:
        return watch(lambda grad, up: self._receive(up_grad=grad, up=up), up, up)

    def watch_hidden(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (watch(lambda grad: self._receive(h_grad=grad), args[0]), *args[1:])

    def watch_output(self, _module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return watch(lambda grad: self._receive(out_grad=grad), out)

    def _receive(self, **parts: Tensor) -> None:
        self.parts |= parts
        if not {"gate", "up", "h_grad", "out_grad"} <= self.parts.keys():
            return
        found, self.parts = self.parts, {}
        # h is recomputed: storing it in the forward pass would cost T·F per sample and layer.
        hidden = self.act(found["gate"]) * found["up"]
        names = ("gate_grad", "up_grad", "h_grad", "out_grad")
        self.on_gradients(self.layer, FFNGradients(found["x"], hidden, *(found[name] for name in names)))


@contextmanager
def probe_gradients(mlps: Sequence[GatedFFN], on_gradients: OnGradients) -> Iterator[None]:
    """Call `on_gradients(layer, tensors)` once per layer of `mlps` and backward pass, under no_grad.

    The callback must not change the tensors; those that it keeps stay in memory. All hooks are removed when the context
    ends, also after an error.
    """
    with ExitStack() as hooks:
        for layer, mlp in enumerate(mlps):
            probe = _LayerProbe(layer, mlp, on_gradients)
            hooks.callback(mlp.gate_proj.register_forward_hook(probe.watch_gate).remove)
            hooks.callback(mlp.up_proj.register_forward_hook(probe.watch_up).remove)
            hooks.callback(mlp.down_proj.register_forward_pre_hook(probe.watch_hidden).remove)
            hooks.callback(mlp.down_proj.register_forward_hook(probe.watch_output).remove)
        yield


@contextmanager
def probe_hidden(mlps: Sequence[GatedFFN], on_hidden: OnHidden) -> Iterator[None]:
    """Call `on_hidden(layer, h_BTF)` once per layer and forward pass; for forward-only scans."""

    def hook(layer: int, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        on_hidden(layer, args[0].detach())

    with ExitStack() as hooks:
        for layer, mlp in enumerate(mlps):
            hooks.callback(mlp.down_proj.register_forward_pre_hook(partial(hook, layer)).remove)
        yield


def neuron_norms(record: FFNGradients, product: str) -> dict[str, Float[Tensor, "B F"]]:
    """‖∇gate row‖, ‖∇up row‖ and ‖∇down column‖ per sample and neuron; `product` as in `prefer_gram`.

    Column j of down has input h_j and output gradient Δ: ‖∇W_{:,j}‖² = h_jᵀ(ΔΔᵀ)h_j. For row j of gate and up, input
    and gradient are exchanged: g_jᵀ(XXᵀ)g_j.
    """
    (_, length, hidden_size), width = record.x_BTD.shape, record.h_BTF.shape[-1]
    # From T×T Gram matrices of the narrow side, times the wide side?
    gram = prefer_gram(product, length, width, hidden_size, rows=False)
    inputs_BTT = gram_matrix(record.x_BTD) if gram else None  # shared by gate and up
    squares = {
        "gate": column_squares(record.gate_grad_BTF, record.x_BTD, gram=gram, gram_BTT=inputs_BTT),
        "up": column_squares(record.up_grad_BTF, record.x_BTD, gram=gram, gram_BTT=inputs_BTT),
        "down": column_squares(record.h_BTF, record.out_grad_BTD, gram=gram),
    }
    return {name: squares_BF.sqrt_() for name, squares_BF in squares.items()}
