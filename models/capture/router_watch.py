"""What the routers of an MoE decide while it trains: logits that gradients flow through, and the experts chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from models.parameter_groups import Part, part_of, require_routers


@dataclass(frozen=True)
class Routing:
    """One layer's decisions about the T tokens of one forward pass."""

    logits_TE: Float[Tensor, "T E"]
    chosen_TK: Int[Tensor, "T K"]


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The router modules, in layer order; each has a `weight` of ``(E, D)``. Raises CheckpointError: there are none."""
    names = [name for name, _ in model.named_parameters() if part_of(name) is Part.ROUTER]
    require_routers(names)
    return [model.get_submodule(name.removesuffix(".weight")) for name in names]


def selection_bias(router: nn.Module) -> Tensor | None:
    """``(E,)`` what the router adds to its scores to choose by, where its architecture has that."""
    bias = getattr(router, "e_score_correction_bias", None)
    return bias if isinstance(bias, Tensor) else None


class RouterWatch:
    """Collects what routers decide.

    Hooks stay in place between the passes and keep nothing then: gradient checkpointing recomputes a layer as it ran,
    hooks included, and what it recomputes is not collected twice.
    """

    def __init__(self, model: nn.Module) -> None:
        """Attach to every router of `model`."""
        self.routers = find_routers(model)
        self._seen: list[Routing] | None = None
        self._hooks = [router.register_forward_hook(self._note) for router in self.routers]

    @contextmanager
    def collect(self) -> Iterator[list[Routing]]:
        """Everything decided within, in layer order."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    def remove(self) -> None:
        """Detach."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
        if self._seen is not None:
            logits_TE, _, chosen_TK = output
            self._seen.append(Routing(logits_TE, chosen_TK))
