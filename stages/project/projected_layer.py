"""One layer as it will stand in the checkpoint, and what was found on the way there."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.experts import LayerExperts
from models.families.fold import is_power_of_two
from models.gating import GateKind
from models.routing import LinearRouter, rounded
from stages.project.layer import Outcome


@dataclass(frozen=True)
class ProjectedLayer:
    """Experts and router on the CPU, in the checkpoint's number format or as exact quotients of it."""

    gate_END: Tensor
    up_END: Tensor
    down_EDN: Tensor
    shared_gate_SD: Tensor
    shared_up_SD: Tensor
    shared_down_DS: Tensor
    rows_ED: Tensor
    bias_E: Tensor
    found: dict[str, Any]  # fields of the outcome

    @classmethod
    def of(cls, loop: ExpertLoop, outcome: Outcome, dtype: torch.dtype, down_scale: float = 1.0) -> "ProjectedLayer":
        """Round a layer to the number format of its checkpoint, which holds the experts' down times `down_scale`."""
        router = rounded(loop.router.to("cpu"), dtype)
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in vars(loop.experts).items()}
        if dtype != torch.float32 and not is_power_of_two(down_scale):
            # Rounded once, as a product; the format has no such number, so that the quotient is kept in fp32.
            product_EDN = (loop.experts.down_EDN.to("cpu", torch.float32) * down_scale).to(dtype)
            tensors["down_EDN"] = (product_EDN.float() / down_scale).contiguous()
        return cls(
            **tensors,
            rows_ED=router.rows_ED,
            bias_E=router.bias_E,
            found=asdict(outcome),
        )

    @property
    def experts(self) -> LayerExperts:
        """The experts."""
        return LayerExperts(**{spec.name: getattr(self, spec.name) for spec in fields(LayerExperts)})

    @property
    def router(self) -> LinearRouter:
        """The router."""
        return LinearRouter(self.rows_ED, self.bias_E)

    @property
    def outcome(self) -> Outcome:
        """What the steps of the projection came to."""
        return Outcome(**self.found)

    def loop(
        self,
        units_EN: Tensor,
        always_S: Tensor,
        act: Callable[[Tensor], Tensor],
        *,
        top_k: int,
        width: int,
        gate: GateKind,
        device: torch.device,
    ) -> ExpertLoop:
        """What the checkpoint will compute, in fp32."""
        experts = LayerExperts(**{name: tensor.to(device).float() for name, tensor in vars(self.experts).items()})
        units_EN, always_S = units_EN.to(device), always_S.to(device)
        return ExpertLoop(experts, units_EN, always_S, self.router.to(device), top_k, width, act, gate)
