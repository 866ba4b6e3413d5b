"""Train an MoE: parameter groups, a record of its routers' decisions, and other ways to compute its experts."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from instruments.cpu import has_amx
from instruments.errors import CheckpointError, ConfigError
from instruments.tensors import is_sharded
from models.targets.config import MOE_TARGETS


class Part(StrEnum):
    """The part of the model that a parameter belongs to."""

    ROUTER = "router"
    EXPERTS = "experts"  # routed experts, shared experts and their gate
    REST = "rest"  # embeddings, attention, norms, head


# Names of modules in any of the targets, also around adapters of PEFT.
_MODULES = sorted({target.router_module for target in MOE_TARGETS.values()}, key=len, reverse=True)
_ROUTER = re.compile(rf".*\.(?:{'|'.join(map(re.escape, _MODULES))})(?=\.)")
_EXPERTS = re.compile(
    rf"(?:^|\.)(?:{'|'.join({name for target in MOE_TARGETS.values() for name in target.expert_modules})})\."
)


def part_of(name: str) -> Part:
    """The part that the parameter of this name belongs to."""
    if _ROUTER.match(name):
        return Part.ROUTER
    return Part.EXPERTS if _EXPERTS.search(name) else Part.REST


def parameter_groups(
    model: nn.Module,
    *,
    router_rate: float = 1e-3,
    expert_rate: float = 1e-4,
    rest_rate: float = 0.0,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer; a part whose rate is 0 is frozen and left out.

    Shared experts count as experts, adapters as the part that they adapt. Weight decay applies to matrices of experts
    and the rest, never to routers, norms and biases. What PEFT has frozen below its adapters stays frozen. Returns
    dicts of `params`, `lr`, `weight_decay` and `name`, which is a `Part`. Raises CheckpointError: there are no routers.
    """
    find_routers(model)  # raises where there are none
    rates = {Part.ROUTER: router_rate, Part.EXPERTS: expert_rate, Part.REST: rest_rate}
    groups: dict[tuple[Part, float], dict[str, Any]] = {}
    fixed = _fixed_names(model)
    adapted = any(hasattr(module, "peft_config") for module in model.modules())  # also below DistributedDataParallel
    for name, parameter in model.named_parameters():
        part = part_of(name)
        kept = vars(parameter).get("frozen_by_rate", False)  # by an earlier call, not by PEFT
        trainable = parameter.is_floating_point() and (parameter.requires_grad or kept or not adapted)
        parameter.requires_grad_(rates[part] > 0 and trainable and _adapted_name(name) not in fixed)
        vars(parameter)["frozen_by_rate"] = trainable and not parameter.requires_grad
        decay = weight_decay if part is not Part.ROUTER and parameter.ndim > 1 else 0.0
        if parameter.requires_grad:
            group = {"params": [], "lr": rates[part], "weight_decay": decay, "name": str(part)}
            groups.setdefault((part, decay), group)["params"].append(parameter)
    return list(groups.values())


def _fixed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that must keep their values; a vision tower may have layers of the same names."""
    target = MOE_TARGETS.get(getattr(_text_config(model), "model_type", ""))
    if target is None:
        return set()
    layers = {_adapted_name(name).removesuffix(target.router_module) for name in router_names(model)}
    return {layer + name for layer in layers for name in target.fixed}


def _adapted_name(name: str) -> str:
    """The name of the parameter that an adapter of PEFT changes; other names stay."""
    return re.sub(r"\.(?:base_layer|(?:modules_to_save|lora_\w+)\.[^.]+)(?=\.|$)", "", name)


def _text_config(model: nn.Module) -> PreTrainedConfig | None:
    """The configuration of the text part of a model, which may be wrapped."""
    configs = (vars(module).get("config") for module in model.modules())
    config = next((config for config in configs if isinstance(config, PreTrainedConfig)), None)
    return config.get_text_config(decoder=True) if config else None


@dataclass(frozen=True)
class Routing:
    """One layer's decisions about the T tokens of one forward pass."""

    logits_TE: Float[Tensor, "T E"]
    chosen_TK: Int[Tensor, "T K"]


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The router modules, in layer order; each has a `weight` of ``(E, D)``. Raises CheckpointError: there are none."""
    names = router_names(model)
    routers = [model.get_submodule(name) for name in names]
    for name, router in zip(names, routers, strict=True):
        # Not as an attribute, which would make the block a part of the router.
        vars(without_adapters(router))["block"] = model.get_submodule(name.rpartition(".")[0])
    return routers


def router_names(model: nn.Module) -> list[str]:
    """Names of the router modules, in layer order. Raises CheckpointError: there are none."""
    found = [_ROUTER.match(name) for name, _ in model.named_parameters()]
    names = list(dict.fromkeys(match[0] for match in found if match))  # once, also with adapters
    names = [name for name in names if f"{name}.proj" not in names]  # a Linear layer within the router
    if not names:
        what = "the model has no routers: it is not a Mixture-of-Experts, or one of an unknown architecture"
        do = "load the checkpoint of stage=assemble or stage=project"
        raise CheckpointError(what, where="names of its parameters", do=do)
    return names


def without_adapters(module: nn.Module) -> nn.Module:
    """The module that PEFT's adapters wrap, or the module itself."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def selection_bias(router: nn.Module) -> Tensor | None:
    """``(E,)`` bias that the router adds to its scores only to choose experts; None if its architecture has none."""
    router = without_adapters(router)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is None:  # LFM2 has it beside the router
        bias = getattr(vars(router).get("block"), "expert_bias", None)
    return bias if isinstance(bias, Tensor) else None


class RouterWatch:
    """Collects the routers' decisions.

    Hooks stay attached but record only inside `collect`: gradient checkpointing recomputes layers with their hooks,
    and these decisions must not be collected twice.
    """

    def __init__(self, model: nn.Module) -> None:
        """Attach to every router of `model`."""
        self.routers = find_routers(model)
        config = _text_config(model)
        top_k = getattr(config, "top_k_experts", None) or getattr(config, "num_experts_per_tok", None)
        self._top_k = top_k[0] if isinstance(top_k, list) else top_k  # a carve's layers choose as many
        self._seen: list[Routing] | None = None
        self._hooks = [router.register_forward_hook(self._note) for router in self.routers]

    @contextmanager
    def collect(self) -> Iterator[list[Routing]]:
        """Collect the decisions of the forward pass inside, in layer order."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, ...] | Tensor) -> None:  # noqa: ANN401
        if self._seen is None:
            return
        if isinstance(output, Tensor):  # of a Linear layer within a module, where the choice is made
            assert self._top_k is not None, "the model says how many experts it chooses"
            # Detached: a hook that saves tensors for the backward pass would save none when a layer is recomputed.
            self._seen.append(Routing(output, output.detach().topk(self._top_k).indices))
        else:
            self._seen.append(Routing(output[0], output[2]))


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the parameters have the values that a checkpoint in `dtype` holds; then exactly their own again.

    A checkpoint in bfloat16 lacks changes of less than 1/512 of a weight, which small learning rates make.
    """
    rounded = [parameter for parameter in model.parameters() if parameter.dtype != dtype]
    # In the host's memory: that of a GPU is full of gradients, moments and buckets. A process's own shards stay there.
    own = [one.detach().clone() if is_sharded(one) else one.detach().to("cpu", copy=True) for one in rounded]
    with torch.no_grad():
        for parameter in rounded:
            parameter.copy_(parameter.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(rounded, own, strict=True):
                parameter.copy_(values)


AUTOCAST_IMPLEMENTATION = "autocast_grouped_mm"  # as `from_pretrained` takes it for experts_implementation


class _CastExperts:
    """The attributes of `experts`, with weights in another number format."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute
        value = getattr(self._experts, name)
        # No test for nn.Parameter: adapters compute the weights, which then are plain tensors.
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def compute_grouped(
    self: nn.Module, x_TD: Float[Tensor, "T D"], chosen_TK: Int[Tensor, "T K"], gates_TK: Float[Tensor, "T K"]
) -> Float[Tensor, "T D"]:
    """As transformers' grouped_mm, which autocast does not cast: float32 weights would be multiplied in float32."""
    experts, device = self, x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        experts, x_TD = _CastExperts(self, dtype), x_TD.to(dtype)  # type: ignore[assignment]
    output_TD: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, x_TD, chosen_TK, gates_TK)
    return output_TD


ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_IMPLEMENTATION, compute_grouped)


def exempt_routers(model: nn.Module) -> None:
    """Exempt the routers from autocast, which would also round those that ask for float32: they choose otherwise.

    Routers loaded in half precision stay as they are.
    """
    for router in find_routers(model):
        if next(without_adapters(router).parameters()).dtype.itemsize < 4:
            continue
        router.forward = partial(_run_in_float32, router.forward)
        vars(router)["_replicate_for_data_parallel"] = partial(_replicate, router)


def _replicate(router: nn.Module) -> nn.Module:
    """A replica for nn.DataParallel, which copies attributes: its `forward` would use the weights of `router`."""
    replica: nn.Module = nn.Module._replicate_for_data_parallel(router)  # type: ignore[no-untyped-call]
    replica.forward = partial(_run_in_float32, partial(type(router).forward, replica))
    return replica


def _run_in_float32(forward: Callable[..., Any], x: Tensor, *bias: Tensor) -> Any:  # noqa: ANN401 - a router's outputs
    with torch.autocast(x.device.type, enabled=False):
        return forward(x.float() if x.dtype.itemsize < 4 else x, *bias)


STRAIGHT_THROUGH = "straight_through"  # as `from_pretrained` takes it for experts_implementation
TEMPERATURE = 0.5  # of the soft choice, relative to the standard deviation of a token's scores


def soft_choice(scores_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]) -> Float[Tensor, "T E"]:
    """Sigmoid of each score's distance from the border between the chosen experts and the others.

    The border is half-way between the lowest chosen score and the highest other one. Border and width have no gradient.
    If all experts are chosen or all scores are equal, there is no border, and the gradient is 0.
    """
    chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    with torch.no_grad():
        lowest_T1 = scores_TE.masked_fill(~chosen_TE, torch.inf).amin(1, keepdim=True)
        highest_T1 = scores_TE.masked_fill(chosen_TE, -torch.inf).amax(1, keepdim=True)
        spread_T1 = scores_TE.std(1, keepdim=True, correction=min(1, scores_TE.shape[1] - 1))
        divided_T1 = highest_T1.isfinite() & (spread_T1 > 0)
        border_T1 = torch.where(divided_T1, (lowest_T1 + highest_T1) / 2, 0)
        width_T1 = torch.where(divided_T1, TEMPERATURE * spread_T1, torch.inf)
    return torch.sigmoid((scores_TE - border_T1) / width_T1)


def compute_all(self: nn.Module, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Σ over the chosen experts of gate · expert(x), with a gradient for the choice itself.

    y = down · ((m + g·(P − stopgrad P)) ⊙ h) over the neurons h of all experts: m are the gates of the chosen experts
    and 0 elsewhere, P is `soft_choice`, g the token's mean gate. The value equals the checkpoint's. The gradient also
    reaches the router's rows of experts that were not chosen, but not the weights of those experts.
    Source: straight-through estimator, arXiv:1308.3432.

    Cost: E·N neurons per token; without copies of neurons, the dense FFN's cost.
    """
    gates_TE = _spread(self, chosen_TK, gates_TK)
    if torch.is_grad_enabled():
        soft_TE = soft_choice(self.router_scores, chosen_TK)  # type: ignore[arg-type]
        gates_TE = gates_TE + gates_TK.detach().mean(1, keepdim=True) * (soft_TE - soft_TE.detach())
    return _sum_all(self, x_TD, gates_TE)


def _spread(experts: nn.Module, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Gates (T, E), 0 for experts that are not chosen."""
    return gates_TK.new_zeros(len(gates_TK), len(experts.down_proj)).scatter(1, chosen_TK, gates_TK)  # type: ignore[arg-type]


def _sum_all(experts: nn.Module, x_TD: Tensor, gates_TE: Tensor) -> Tensor:
    """Σ over all experts of gate · expert(x), as one product with gate and up, and one with down."""
    gate_up_EMD: Tensor = experts.gate_up_proj  # type: ignore[assignment]
    down_EDN: Tensor = experts.down_proj  # type: ignore[assignment]
    gate_up_TEM = nn.functional.linear(x_TD, gate_up_EMD.flatten(0, 1)).view(-1, *gate_up_EMD.shape[:2])
    h_TEN = experts._apply_gate(gate_up_TEM)  # type: ignore[operator]
    gated_TEN = h_TEN * gates_TE[:, :, None].to(h_TEN.dtype)
    # (D, E·N) is copied in runs of N numbers, (E·N, D) one by one: up to three times as slow.
    output_TD = nn.functional.linear(gated_TEN.flatten(1), down_EDN.transpose(0, 1).flatten(1))
    return output_TD.to(x_TD.dtype)


ALL_EXPERTS_FUNCTIONS.register(STRAIGHT_THROUGH, compute_all)

LARGE_PRODUCTS = "large_products"  # as `from_pretrained` takes it for experts_implementation
# For each expert of a token, grouped_mm copies the token and the expert's output. On a CPU this takes as long as
# computing COPIES neurons (`tests/studies/expert_products.py`). With fewer than FEW tokens per expert, reading the
# weights takes longest, so only the chosen experts are read. Both in bfloat16 with AMX, and otherwise.
(AMX_COPIES, AMX_FEW), (COPIES, FEW) = (400, 2), (100, 16)


def compute_grouped_or_all(self: nn.Module, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """As transformers' grouped_mm; on a CPU from all experts at once, where that is faster."""
    if x_TD.device.type == "cpu" and _all_are_faster(self, x_TD.dtype, chosen_TK):
        return _sum_all(self, x_TD, _spread(self, chosen_TK, gates_TK))
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, x_TD, chosen_TK, gates_TK)  # type: ignore[no-any-return]


def _all_are_faster(experts: nn.Module, dtype: torch.dtype, chosen_TK: Tensor) -> bool:
    others = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")  # no target has such experts
    if not getattr(experts, "has_gate", True) or any(getattr(experts, name, False) for name in others):
        return False
    if dtype == torch.float16:  # an expert that was not chosen may overflow, and 0 · inf is NaN
        return False
    (count, _, n), k = experts.down_proj.shape, chosen_TK.shape[1]  # type: ignore[misc]
    copies, few = (AMX_COPIES, AMX_FEW) if dtype == torch.bfloat16 and has_amx() else (COPIES, FEW)
    return chosen_TK.numel() >= few * count and (count - k) * n <= copies * k


ALL_EXPERTS_FUNCTIONS.register(LARGE_PRODUCTS, compute_grouped_or_all)


def show_scores(model: nn.Module) -> list[RemovableHandle]:
    """Pass each router's scores to the experts of its layer, where `compute_all` reads them.

    The model must be loaded with experts_implementation=STRAIGHT_THROUGH, and every layer must have its own experts.
    Returns the hooks. Raises ConfigError: the experts are a pool.
    """
    handles = []
    for name in router_names(model):
        router = next(module for module in _MODULES if name.endswith(f".{module}"))
        ffn = model.get_submodule(name.removesuffix(f".{router}"))
        if not hasattr(ffn, "experts"):
            what = "straight-through routers compute all experts for every token, in a pool those of all layers"
            do = "load it with grouped_mm and without show_scores, or carve with topology=per_layer"
            raise ConfigError(what, where="topology=global_pool in config.json", do=do)
        # In every pass, because replicas of nn.DataParallel are other modules.
        handles.append(ffn.register_forward_pre_hook(partial(_connect, router)))
        handles.append(ffn.get_submodule(router).register_forward_hook(_show))
        _connect(router, ffn)
    return handles


def _connect(router: str, ffn: nn.Module, _inputs: Any = ()) -> None:  # noqa: ANN401
    module = ffn.get_submodule(router)
    vars(module)["shown_to"] = without_adapters(ffn.experts)  # type: ignore[arg-type]
    vars(without_adapters(module))["block"] = ffn


def _show(router: nn.Module, _inputs: Any, output: Sequence[Tensor] | Tensor) -> None:  # noqa: ANN401
    logits_TE = output if isinstance(output, Tensor) else output[0]
    experts, bias_E = vars(router)["shown_to"], selection_bias(router)
    if bias_E is None:
        experts.router_scores = logits_TE
    else:  # TinyONN adds the bias to the logits, other architectures to their sigmoid
        # No isinstance: remote code is another class.
        on_logits = getattr(without_adapters(router), "bias_on_logits", False)
        experts.router_scores = (logits_TE if on_logits else logits_TE.sigmoid()) + bias_E
