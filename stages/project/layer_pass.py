"""One pass over the layers: each is projected on what the carved layers before it give, and kept in the scratch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from models.experts import ExpertLoop, LayerExperts
from models.routing import GateKind, LinearRouter, rounded
from models.stream import LayerStream
from models.targets.gate_scale import is_power_of_two
from stages.artifacts.experts import load_layer
from stages.artifacts.partition import Partition
from stages.artifacts.routers import Routers
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.batches import CalibrationContext
from stages.calibration.emission import CheckpointFormat
from stages.calibration.token_stream import LayerSample, TokenStream
from stages.project.config import ProjectConfig
from stages.project.layer import LayerCarve, Outcome, project_layer
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings


@dataclass(frozen=True)
class ProjectedLayer:
    """A layer on the CPU, in the checkpoint's number format or as exact quotients of it."""

    experts: LayerExperts
    router: LinearRouter
    outcome: Outcome

    @classmethod
    def of(cls, loop: ExpertLoop, outcome: Outcome, dtype: torch.dtype, down_scale: float = 1.0) -> "ProjectedLayer":
        """Round a layer to the number format of its checkpoint, which holds the experts' down times `down_scale`."""
        experts = loop.experts.to("cpu", dtype)
        if dtype != torch.float32 and not is_power_of_two(down_scale):
            # Rounded once, as a product; the format has no such number, so that the quotient is kept in fp32.
            product_EDN = (loop.experts.down_EDN.to("cpu", torch.float32) * down_scale).to(dtype)
            experts = replace(experts, down_EDN=product_EDN.float() / down_scale)
        return cls(experts, rounded(loop.router.to("cpu"), dtype), outcome)

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
        experts, router = self.experts.to(device, torch.float32), self.router.to(device)
        return ExpertLoop(experts, neurons_EN.to(device), always_S.to(device), router, top_k, width, act, gate)


@torch.no_grad()
def project_all(
    stream: LayerStream,
    context: CalibrationContext,
    checkpoint: CheckpointFormat,
    extracted: Path,
    partition: Partition,
    routers: Routers,
    project: ProjectConfig,
    scratch: Path,
) -> list[tuple[LinearRouter, Outcome]]:
    """Layers in order, each on the inputs that the layers before it give once carved; each is kept in `scratch`."""
    tokens, text, device = TokenStream(stream, context.batches), len(context.text), stream.device
    found = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="project", unit="layer")):
        tokens.enter(layer)
        start = ExpertLoop(
            load_layer(extracted, index).to(device, torch.float32),
            partition.neurons[index].to(device),
            partition.always_on[index].to(device),
            routers.layer(index).to(device),
            checkpoint.shape.top_k,
            partition.width,
            layer.ffn.act,
            checkpoint.gate,
        )
        done = load_layer_checkpoint(scratch, index, ProjectedLayer)
        if done is None:
            seed = context.layer_seed(index)
            refit = refit_settings(checkpoint, project, routers.logit_std, seed)
            carve = LayerCarve(layer.ffn, start, refit, checkpoint.biased, text)
            seen = LayerSample(tokens.inputs, [layer.ffn(x_TD) for x_TD in tokens.inputs], layer.ffn.act)
            loop, outcome = project_layer(carve, seen.inputs, seen.target, project, seed)
            done = ProjectedLayer.of(loop, outcome, checkpoint.dtype, checkpoint.down_scale)
            save_layer_checkpoint(scratch, index, done)
        # The layers to come see what the checkpoint will compute, rounded as it is there.
        rounded_loop = replace(start, experts=done.experts.to(device, torch.float32), router=done.router.to(device))
        tokens.leave(map(rounded_loop, tokens.inputs))
        found.append((done.router, done.outcome))
    return found


def find_done(scratch: Path, layer: int) -> ProjectedLayer:
    """A layer that is done."""
    done = load_layer_checkpoint(scratch, layer, ProjectedLayer)
    assert done is not None, "every layer is kept"
    return done


def refit_settings(checkpoint: CheckpointFormat, project: ProjectConfig, logit_std: float, seed: int) -> RouterSettings:
    """How a layer's router is fitted again: by its method, with this stage's steps and tokens."""
    descent = DescentSettings(project.router_steps, project.router_rate, checkpoint.load_price, seed)
    return RouterSettings(
        checkpoint.settings.router,
        checkpoint.settings.ridge_penalty,
        descent,
        project.router_tokens,
        project.validation_share,
        logit_std,
    )
