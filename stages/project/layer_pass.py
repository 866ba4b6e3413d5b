"""One pass over the layers: each is projected on what the carved layers before it give, and kept in the scratch."""

from pathlib import Path

import torch
from tqdm import tqdm

from models.families.fold import gate_fold, gate_kind
from models.families.moe import MOE_TARGETS
from models.gating import GateKind
from models.routing import LinearRouter
from models.shape import Shape
from models.stream import LayerStream
from stages.calibration.batches import text_only
from stages.calibration.layer_seed import layer_seed
from stages.calibration.target import AlignmentTarget
from stages.calibration.token_stream import TokenStream
from stages.contracts.finished_layers import find_layer, keep_layer
from stages.contracts.partition import Partition
from stages.contracts.routers import Routers
from stages.data.batches import TokenBatch
from stages.project.config import ProjectConfig
from stages.project.layer import Outcome, project_layer
from stages.project.layer_carve import LayerCarve
from stages.project.projected_layer import ProjectedLayer
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings


@torch.no_grad()
def project_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    partition: Partition,
    routers: Routers,
    project: ProjectConfig,
    shape: Shape,
    scratch: Path,
    seed: int,
) -> list[tuple[LinearRouter, Outcome]]:
    """Layers in order, each on the inputs that the layers before it give once carved; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, batches), len(text_only(batches))
    target = AlignmentTarget(project.alignment_target, stream, batches)
    dtype: torch.dtype = getattr(torch, routers.dtype)
    fold = gate_fold(MOE_TARGETS[routers.target], shape)
    found = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="project", unit="layer")):
        tokens.enter(layer)
        target.enter(layer, tokens)
        carve = LayerCarve(
            layer.ffn,
            partition.units[index].to(stream.device),
            partition.always_on[index].to(stream.device),
            routers.layer(index).to(stream.device),
            shape,
            refit_settings(routers, project, layer_seed(seed, index)),
            routers.spread,
            routers.biased,
            gate_of(routers, shape),
            text,
        )
        done = find_layer(scratch, index, ProjectedLayer)
        if done is None:
            loop, outcome = project_layer(carve, tokens.inputs, target, project, layer_seed(seed, index))
            done = ProjectedLayer.of(loop, outcome, dtype, fold.down_scale)
            keep_layer(scratch, index, done)
        # The layers to come see what the checkpoint will compute, rounded as it is there.
        loop = done.loop(
            carve.units_EN,
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
    done = find_layer(scratch, layer, ProjectedLayer)
    assert done is not None, "every layer is kept"
    return done


def gate_of(routers: Routers, shape: Shape) -> GateKind:
    """How the target turns logits into gates."""
    return GateKind(gate_kind(MOE_TARGETS[routers.target], shape))


def refit_settings(routers: Routers, project: ProjectConfig, seed: int) -> RouterSettings:
    """How a layer's router is fitted anew: as it was made, with this stage's patience."""
    descent = DescentSettings(project.router_steps, project.router_rate, routers.balance, seed)
    return RouterSettings(
        routers.method, routers.ridge_penalty, descent, project.router_tokens, project.guard_share, routers.spread
    )
