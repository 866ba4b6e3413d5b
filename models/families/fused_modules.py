"""FFNs of a loaded model whose gate and up are one Linear layer, made into FFNs that have both."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.errors import ConfigError


class SeparateFFN(nn.Module):
    """The same FFN: gate and up are views of the fused weight, so no memory is needed."""

    def __init__(self, fused: nn.Module) -> None:
        """Take over the weights of an FFN with gate_up_proj, down_proj and activation_fn."""
        super().__init__()
        gate_FD, up_FD = fused.get_parameter("gate_up_proj.weight").chunk(2)
        self.gate_proj, self.up_proj = _linear(gate_FD), _linear(up_FD)
        self.down_proj = fused.get_submodule("down_proj")
        self.act_fn = fused.get_submodule("activation_fn")

    def forward(self, x: Tensor) -> Tensor:
        """FFN(x)."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


def separate_fused(model: PreTrainedModel) -> None:
    """Replace every fused FFN by its equivalent; does nothing where there is none.

    Raises:
        ConfigError: the fused weight is quantised, or offloaded: it has no halves that are views.
    """
    for index, layer in enumerate(model.get_decoder().layers):
        if hasattr(layer.mlp, "gate_up_proj"):
            _check_plain(layer.mlp.gate_up_proj, index)
            layer.mlp = SeparateFFN(layer.mlp)


def _linear(weight_FD: Tensor) -> nn.Linear:
    width, hidden = weight_FD.shape
    linear = nn.Linear(hidden, width, bias=False, device="meta")
    linear.weight = nn.Parameter(weight_FD.detach(), requires_grad=weight_FD.requires_grad)
    return linear


def _check_plain(linear: nn.Module, layer: int) -> None:
    weight = linear.weight
    if type(linear) is nn.Linear and weight.device != torch.device("meta"):
        return
    raise ConfigError(
        "gate and up are one weight, which cannot be split where it is quantised or offloaded",
        where=f"layer {layer}, gate_up_proj",
        do="model.quantization=none model.device_map=none, or a source that keeps them apart",
    )
