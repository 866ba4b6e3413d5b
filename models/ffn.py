"""The neurons of a dense gated FFN, and hooks on the inputs and outputs of FFNs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from instruments.errors import ConfigError
from instruments.ffn_probe import GatedFFN
from models.decoder import PROJECTIONS, FFNPlan, Rows
from models.quantization import import_bitsandbytes
from models.structure import decoder_layers, ffn_plan
from models.targets.config import MOE_TARGETS
from models.tiny_onn.sparse_ffn import find_activation


def ffn_modules(dense: PreTrainedModel) -> list[GatedFFN]:
    """The gated FFNs of a dense model in layer order; `separate_ffns` has given them the names of a GatedFFN.

    A layer without an FFN has one of no neurons, which nothing calls.
    """
    plan = ffn_plan(dense)
    none = _no_neurons(dense.config.get_text_config(decoder=True).hidden_size)
    return [
        layer.get_submodule(plan.path) if _has_ffn(layer, plan) else none  # type: ignore[misc]
        for layer in decoder_layers(dense)[1]
    ]


def _has_ffn(layer: nn.Module, plan: FFNPlan) -> bool:
    names = {name for name, _ in layer.named_modules()}
    stored, separated = ({plan.rows(part).linear for part in PROJECTIONS}, {f"{part}_proj" for part in PROJECTIONS})
    return any(names.issuperset(f"{plan.path}.{name}" for name in own) for own in (stored, separated))


def _no_neurons(hidden: int) -> Any:  # noqa: ANN401 - a GatedFFN of modules that are no Linear
    none: Any = _Separated(nn.Identity())
    for part in PROJECTIONS:
        linear: Any = nn.Identity()  # nn.Linear warns of matrices without numbers
        linear.in_features, linear.weight = 0, torch.empty((hidden, 0) if part == "down" else (0, hidden))
        setattr(none, f"{part}_proj", linear)
    return none


def ffn_weight_names(dense: PreTrainedModel) -> list[dict[str, str]]:
    """For every layer: gate, up and down → name of the weight in a model whose FFNs are separated."""
    names = {id(module): name for name, module in dense.named_modules()}
    return [
        {
            part: f"{names.get(id(getattr(ffn, f'{part}_proj')), f'no FFN {layer} {part}')}.weight"
            for part in PROJECTIONS
        }
        for layer, ffn in enumerate(ffn_modules(dense))
    ]


class _Separated(nn.Module):
    """A gated FFN by the names of most families."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act_fn = act_fn

    def forward(self, x: Tensor, *_args: object, **_arguments: object) -> Tensor:
        """The FFN's output."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


def separate_ffns(model: PreTrainedModel) -> None:
    """Give every FFN the modules of a GatedFFN, which hold its weights; of a fused one, views. Raises ConfigError."""
    plan = ffn_plan(model)
    if (plan.gate, plan.up, plan.down, plan.act) == (Rows("gate_proj"), Rows("up_proj"), "down_proj", "act_fn"):
        return
    for index, layer in enumerate(decoder_layers(model)[1]):
        if not _has_ffn(layer, plan):
            continue
        ffn = layer.get_submodule(plan.path)
        if isinstance(ffn, _Separated):
            continue
        separated = _Separated(find_activation(plan.act, ffn))
        for part in PROJECTIONS:
            linear = ffn.get_submodule(plan.rows(part).linear)
            setattr(separated, f"{part}_proj", _rows_of(linear, plan, part, index))
        layer.set_submodule(plan.path, separated)


def _rows_of(linear: Any, plan: FFNPlan, part: str, layer: int) -> nn.Module:  # noqa: ANN401 - Linear, or quantised
    """The Linear layer of one projection; with views, or a scaled copy, of the weight where it must be."""
    rows, scale, whole_GD = plan.rows(part), plan.scale(part), linear.weight
    own_hooks = plan.is_gated or part != "up"  # without a gate, up is another module with the gate's weight
    if rows.part == "whole" and scale == 1.0 and own_hooks:
        return linear  # type: ignore[no-any-return]  # with its hooks
    plain = whole_GD.is_floating_point() and getattr(whole_GD, "quant_state", None) is None
    if not plain or whole_GD.device == torch.device("meta"):
        what = "gate and up are one weight, or scaled, which cannot be done where it is quantised or offloaded"
        do = "model.quantization=none model.device_map=none, or a source that keeps them apart"
        raise ConfigError(what, where=f"layer {layer}, {rows.linear}", do=do)
    weight = whole_GD.detach()[rows.of(len(whole_GD))]
    with torch.device("meta"):
        own = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    own.weight = nn.Parameter(weight if scale == 1.0 else weight * scale, requires_grad=whole_GD.requires_grad)
    return own


@contextmanager
def replaced_ffns(layers: Sequence[nn.Module], path: str, ffns: Sequence[nn.Module]) -> Iterator[None]:
    """Put other modules into the place of the layers' FFNs, and the FFNs back at the end."""
    own = [layer.get_submodule(path) for layer in layers]
    try:
        for layer, ffn in zip(layers, ffns, strict=True):
            layer.set_submodule(path, ffn)
        yield
    finally:
        for layer, ffn in zip(layers, own, strict=True):
            layer.set_submodule(path, ffn)


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


def gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """act(gate)·up; the product takes the memory of `up` where no gradient needs it."""
    return act(gate) * up if torch.is_grad_enabled() else up.mul_(act(gate))


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
        act = module.act_fn
        if (
            like is not None
            and isinstance(act, nn.Module)
            and any(one.device != like.device for one in act.parameters())
        ):
            act = deepcopy(act).to(like.device)  # one that learns
        return cls(gate_FD, up_FD, down_DF, act)

    @property
    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down."""
        return self.gate_FD, self.up_FD, self.down_DF

    @property
    def width(self) -> int:
        """F."""
        return len(self.gate_FD)

    def hidden(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """Neuron activations h."""
        return gated(self.act, x_TD @ self.gate_FD.T, x_TD @ self.up_FD.T)

    def output(self, h_TF: Float[Tensor, "T F"]) -> Float[Tensor, "T D"]:
        """Σ_j h_j·d_j."""
        return h_TF @ self.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """FFN(x)."""
        return self.output(self.hidden(x_TD))


OnFFN = Callable[[int, Tensor, Tensor], None]


@contextmanager
def watch_ffns(model: PreTrainedModel, on_ffn: OnFFN) -> Iterator[None]:
    """Call `on_ffn(layer, inputs, outputs)` for every FFN of a forward pass; hooks are removed at the end.

    Of a TinyONN, dense layers are left out: in their place some have no FFN, but attention.
    """
    left_out = model.config.dense_layers if model.config.model_type == "tiny_onn" else ()
    hooks = ExitStack()

    def watch(layer: int, parts: list[nn.Module]) -> None:
        calls: list[tuple[Tensor, Tensor]] = []  # inputs and outputs

        def note(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            calls.append((args[0], output[0] if isinstance(output, tuple) else output))
            if len(calls) == len(parts):
                read, total = calls[0][0], sum((output for _, output in calls[1:]), calls[0][1])
                calls.clear()
                on_ffn(layer, read, total)

        for part in parts:
            hooks.enter_context(part.register_forward_hook(note))

    with hooks:
        for layer, module in enumerate(decoder_layers(model)[1]):
            if layer not in left_out:
                watch(layer, ffn_parts(model, module))
        yield


def ffn_parts(model: PreTrainedModel, layer: nn.Module) -> list[nn.Module]:
    """The modules of a decoder layer, of a carve or a dense model, whose outputs sum to its FFN's.

    The first that runs reads what the FFN reads.
    """
    config, modules = model.config, dict(layer.named_children())
    if config.model_type == "tiny_onn":
        return [layer.get_submodule(config.ffn["module"])]
    target = MOE_TARGETS.get(config.get_text_config(decoder=True).model_type)
    if target is None:
        return [layer.get_submodule(ffn_plan(model).path)]
    return [modules[name] for name in target.ffn_modules if name in modules]
