"""The neurons of a dense gated FFN, and hooks on the inputs and outputs of FFNs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from instruments.ffn_probe import GatedFFN
from models.quantization import import_bitsandbytes
from models.targets.config import MOE_TARGETS


def ffn_modules(dense: PreTrainedModel) -> list[GatedFFN]:
    """The gated FFNs of a dense model in layer order."""
    return [layer.mlp for layer in dense.get_decoder().layers]


def ffn_weight_names(dense: PreTrainedModel) -> list[dict[str, str]]:
    """For every layer: gate, up and down → name of the weight in the checkpoint."""
    names = {id(module): name for name, module in dense.named_modules()}
    projections = ("gate", "up", "down")
    return [
        {part: f"{names[id(getattr(mlp, f'{part}_proj'))]}.weight" for part in projections}
        for mlp in ffn_modules(dense)
    ]


def dense_weight(module: nn.Module) -> Float[Tensor, "O I"]:
    """The weight of a Linear layer, dequantised if needed, on its device; it may be offloaded.

    An unquantised weight is not copied. 4 bits are decoded to the compute dtype, 8 bits to fp32.

    Numerics: the weight of bitsandbytes' backward pass; 4 bits exactly, int8 to 1 fp32 rounding.
    """
    layer: Any = module  # bitsandbytes' attributes are not typed
    with align_module_device(module):
        weight: Tensor = layer.weight.detach()
        if getattr(layer.weight, "quant_state", None) is not None:
            weight = import_bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif weight.dtype == torch.int8:
            # The first forward pass moves the scales from the weight to the layer's state.
            scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
            weight = import_bitsandbytes().functional.int8_vectorwise_dequant(layer.weight.data, scales)
    return weight


@dataclass(frozen=True)
class DenseFFN:
    """FFN(x) = Σ_j h_j(x)·d_j with h_j(x) = act(g_j·x)·(u_j·x); neuron j is row j of gate and up, column j of down."""

    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor
    act: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, module: GatedFFN, like: Tensor | None = None) -> "DenseFFN":
        """The weights of a module, which may be quantised or offloaded, dequantised.

        They have the device and number format of `like`, or of `dense_weight` if None. Unquantised weights that have
        them already are not copied.
        """
        gate_FD, up_FD, down_DF = map(dense_weight, (module.gate_proj, module.up_proj, module.down_proj))
        if like is not None:
            gate_FD, up_FD, down_DF = gate_FD.to(like), up_FD.to(like), down_DF.to(like)
        return cls(gate_FD, up_FD, down_DF, module.act_fn)

    @property
    def width(self) -> int:
        """F."""
        return len(self.gate_FD)

    def hidden(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """Neuron activations h."""
        hidden: Tensor = self.act(x_TD @ self.gate_FD.T) * (x_TD @ self.up_FD.T)
        return hidden

    def output(self, h_TF: Float[Tensor, "T F"]) -> Float[Tensor, "T D"]:
        """Σ_j h_j·d_j."""
        return h_TF @ self.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """FFN(x)."""
        return self.output(self.hidden(x_TD))


OnFFN = Callable[[int, Tensor, Tensor], None]


@contextmanager
def watch_ffns(model: PreTrainedModel, on_ffn: OnFFN) -> Iterator[None]:
    """Call `on_ffn(layer, inputs, outputs)` for every FFN of a forward pass; hooks are removed at the end."""
    handles: list[RemovableHandle] = []

    def watch(layer: int, parts: list[nn.Module]) -> None:
        outputs: list[Tensor] = []

        def note(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)
            if len(outputs) == len(parts):
                total = sum(outputs[1:], outputs[0])
                outputs.clear()
                on_ffn(layer, args[0], total)

        handles.extend(part.register_forward_hook(note) for part in parts)

    try:
        for layer, module in enumerate(model.get_decoder().layers):
            watch(layer, ffn_parts(module))
        yield
    finally:
        for handle in handles:
            handle.remove()


def ffn_parts(layer: nn.Module) -> list[nn.Module]:
    """The modules of a decoder layer whose outputs sum to its FFN's."""
    modules = dict(layer.named_children())
    names = next(target.ffn_modules for target in MOE_TARGETS.values() if target.ffn_modules[0] in modules)
    return [modules[name] for name in names if name in modules]
