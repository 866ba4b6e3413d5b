"""Parameter groups for training an MoE, and a record of its routers' decisions."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from instruments.errors import CheckpointError


class Part(StrEnum):
    """The part of the model that a parameter belongs to."""

    ROUTER = "router"
    EXPERTS = "experts"  # routed experts, shared experts and their gate
    REST = "rest"  # embeddings, attention, norms, head


# For every architecture in models/targets, as transformers names its parameters in memory.
_ROUTER = re.compile(r"\.(?:gate|router)\.weight$")
_EXPERTS = re.compile(r"(?:^|\.)(?:experts|shared_experts?|shared_expert_gate|shared_mlp)\.")


def part_of(name: str) -> Part:
    """The part that the parameter of this name belongs to."""
    if _ROUTER.search(name):
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

    Shared experts count as experts. Weight decay applies to matrices of experts and the rest, never to routers, norms
    and biases. Returns dicts of `params`, `lr`, `weight_decay` and `name`, which is a `Part`. Raises CheckpointError:
    the model has no routers.
    """
    find_routers(model)  # raises where there are none
    rates = {Part.ROUTER: router_rate, Part.EXPERTS: expert_rate, Part.REST: rest_rate}
    groups: dict[tuple[Part, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        part = part_of(name)
        parameter.requires_grad_(rates[part] > 0 and parameter.is_floating_point())
        decay = weight_decay if part is not Part.ROUTER and parameter.ndim > 1 else 0.0
        if parameter.requires_grad:
            groups.setdefault((part, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": rates[part], "weight_decay": decay, "name": str(part)}
        for (part, decay), parameters in groups.items()
    ]


@dataclass(frozen=True)
class Routing:
    """One layer's decisions about the T tokens of one forward pass."""

    logits_TE: Float[Tensor, "T E"]
    chosen_TK: Int[Tensor, "T K"]


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The router modules, in layer order; each has a `weight` of ``(E, D)``. Raises CheckpointError: there are none."""
    return [model.get_submodule(name) for name in router_names(model)]


def router_names(model: nn.Module) -> list[str]:
    """Names of the router modules, in layer order. Raises CheckpointError: there are none."""
    names = [name for name, _ in model.named_parameters() if part_of(name) is Part.ROUTER]
    if not names:
        what = "the model has no routers: it is not a Mixture-of-Experts, or one of an unknown architecture"
        do = "load the checkpoint of stage=assemble or stage=project"
        raise CheckpointError(what, where="names of its parameters", do=do)
    return [name.removesuffix(".weight") for name in names]


def selection_bias(router: nn.Module) -> Tensor | None:
    """``(E,)`` bias that the router adds to its scores only to choose experts; None if its architecture has none."""
    bias = getattr(router, "e_score_correction_bias", None)
    return bias if isinstance(bias, Tensor) else None


class RouterWatch:
    """Collects the routers' decisions.

    Hooks stay attached but record only inside `collect`: gradient checkpointing recomputes layers with their hooks,
    and these decisions must not be collected twice.
    """

    def __init__(self, model: nn.Module) -> None:
        """Attach to every router of `model`."""
        self.routers = find_routers(model)
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

    def _note(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
        if self._seen is not None:
            logits_TE, _, chosen_TK = output
            self._seen.append(Routing(logits_TE, chosen_TK))
