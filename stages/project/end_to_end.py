"""Gradient projection of a whole carve: the dense model is loaded once more, the carved layers in its FFNs' place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from models.config import ModelConfig
from models.experts import ExpertLoop
from models.ffn import ffn_modules
from models.loading import execution_device, load_dense
from stages.artifacts.carve import Partition
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.batches import layer_seed
from stages.calibration.emission import CheckpointFormat
from stages.losses import save_memory
from stages.project.carved_model import CarvedModel
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import GradientRounds, ProjectionOutcome
from stages.project.layer_pass import ProjectedLayer, find_done
from stages.text.sequences import TokenBatch

SEED = 9_000  # in the place of a layer's number, beyond all layers

# The frozen dense model → its layers, carved.
MakeLoops = Callable[[PreTrainedModel], Sequence[ExpertLoop]]


def project_end_to_end(
    model: ModelConfig,
    folder: Path,
    text: Sequence[TokenBatch],
    make_loops: MakeLoops,
    project: ProjectConfig,
    seed: int,
) -> tuple[list[ExpertLoop], ProjectionOutcome]:
    """Rounds of gradient projection over all layers at once; an expert that layers share gets the sum of its gradients.

    Args:
        model: the source.
        folder: its checkpoint.
        text: calibration batches.
        make_loops: the carved layers, for the model that is loaded here.
        project: settings of the stage.
        seed: of the run.
    """
    # The experts are cut from the stored weights, whatever the scan computed with: so is the model that teaches them.
    dense = load_dense(replace(model, quantization="none"), folder)
    save_memory(dense, asked=False)
    carved = CarvedModel(dense, make_loops(dense))
    outcome = GradientRounds(carved, text, project, layer_seed(seed, SEED)).run()
    return carved.loops, outcome


def project_layers(
    model: ModelConfig,
    folder: Path,
    text: Sequence[TokenBatch],
    partition: Partition,
    checkpoint: CheckpointFormat,
    project: ProjectConfig,
    *,
    aligned: Path,
    kept: Path,
    seed: int,
) -> ProjectionOutcome:
    """The same for layers with experts of their own: read from the folder `aligned`, kept in the folder `kept`."""
    depth = partition.layers
    outcome = load_layer_checkpoint(kept, depth, ProjectionOutcome)
    if outcome and all(load_layer_checkpoint(kept, layer, ProjectedLayer) is not None for layer in range(depth)):
        return outcome
    layers = [find_done(aligned, layer) for layer in range(depth)]

    def make_loops(dense: PreTrainedModel) -> list[ExpertLoop]:
        return [
            layer.loop(
                partition.neurons[index],
                partition.always_on[index],
                mlp.act_fn,
                top_k=checkpoint.shape.top_k,
                width=partition.width,
                gate=checkpoint.gate,
                device=execution_device(mlp.gate_proj),
            )
            for index, (layer, mlp) in enumerate(zip(layers, ffn_modules(dense), strict=True))
        ]

    loops, outcome = project_end_to_end(model, folder, text, make_loops, project, seed)
    kept.mkdir(exist_ok=True)
    for index, (layer, loop) in enumerate(zip(layers, loops, strict=True)):
        rounded = ProjectedLayer.of(loop, layer.outcome, checkpoint.dtype, checkpoint.down_scale)
        save_layer_checkpoint(kept, index, rounded)
    save_layer_checkpoint(kept, depth, outcome)
    return outcome
