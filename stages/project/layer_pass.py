"""One pass over the layers: each is projected on what the carved layers before it give, and kept in the scratch."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from models.config import MoEShape
from models.experts import ExpertLoop, LayerExperts
from models.routing import GateKind, LinearRouter, rounded
from models.stream import LayerStream
from models.targets.base import gate_kind, gate_scale_of, is_power_of_two
from models.targets.choose import MOE_TARGETS
from stages.artifacts.partition import Partition
from stages.artifacts.routers import Routers
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.alignment import AlignmentTarget
from stages.calibration.batches import layer_seed, text_only
from stages.calibration.token_stream import TokenStream
from stages.project.config import ProjectConfig
from stages.project.layer import LayerCarve, Outcome, project_layer
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings
from stages.text.sequences import TokenBatch


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
        neurons_EN: Tensor,
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
        neurons_EN, always_S = neurons_EN.to(device), always_S.to(device)
        return ExpertLoop(experts, neurons_EN, always_S, self.router.to(device), top_k, width, act, gate)


@torch.no_grad()
def project_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    partition: Partition,
    routers: Routers,
    project: ProjectConfig,
    shape: MoEShape,
    scratch: Path,
    seed: int,
) -> list[tuple[LinearRouter, Outcome]]:
    """Layers in order, each on the inputs that the layers before it give once carved; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, batches), len(text_only(batches))
    target = AlignmentTarget(project.alignment_target, stream, batches)
    dtype: torch.dtype = getattr(torch, routers.dtype)
    gate_scale = gate_scale_of(MOE_TARGETS[routers.target], shape)
    found = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="project", unit="layer")):
        tokens.enter(layer)
        target.enter(layer, tokens)
        carve = LayerCarve(
            layer.ffn,
            partition.neurons[index].to(stream.device),
            partition.always_on[index].to(stream.device),
            routers.layer(index).to(stream.device),
            shape,
            refit_settings(routers, project, layer_seed(seed, index)),
            routers.logit_std,
            routers.biased,
            gate_of(routers, shape),
            text,
        )
        done = load_layer_checkpoint(scratch, index, ProjectedLayer)
        if done is None:
            loop, outcome = project_layer(carve, tokens.inputs, target, project, layer_seed(seed, index))
            done = ProjectedLayer.of(loop, outcome, dtype, gate_scale.down_scale)
            save_layer_checkpoint(scratch, index, done)
        # The layers to come see what the checkpoint will compute, rounded as it is there.
        loop = done.loop(
            carve.neurons_EN,
            carve.always_S,
            layer.ffn.act,
            top_k=shape.top_k,
            width=partition.width,
            gate=carve.gate,
            device=stream.device,
        )
        tokens.leave(map(loop, tokens.inputs))
        found.append((done.router, done.outcome))
    return found


def find_done(scratch: Path, layer: int) -> ProjectedLayer:
    """A layer that is done."""
    done = load_layer_checkpoint(scratch, layer, ProjectedLayer)
    assert done is not None, "every layer is kept"
    return done


def gate_of(routers: Routers, shape: MoEShape) -> GateKind:
    """How the target turns logits into gates."""
    return GateKind(gate_kind(MOE_TARGETS[routers.target], shape))


def refit_settings(routers: Routers, project: ProjectConfig, seed: int) -> RouterSettings:
    """How a layer's router is fitted anew: as it was made, with this stage's patience."""
    descent = DescentSettings(project.router_steps, project.router_rate, routers.balance, seed)
    return RouterSettings(
        routers.method,
        routers.ridge_penalty,
        descent,
        project.router_tokens,
        project.validation_share,
        routers.logit_std,
    )
