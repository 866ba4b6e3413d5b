"""What is evaluated of a global pool beside the dense model: its experts, its baselines."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.checkpoint.reader import ShardReader
from models.experts import LayerExperts
from models.loading import is_offloaded
from models.targets.base import MOE_TARGETS
from models.training import find_routers, selection_bias
from stages.calibration.batches import layer_seed
from stages.losses import MeanLoss, measure_loss
from stages.text.batches import TokenBatch


def read_pool(checkpoint: Path, device: torch.device) -> Callable[[int], LayerExperts]:
    """Read a pool's checkpoint: layer → all experts and the layer's always-on neurons, fp32, read when needed.

    Memory: the pool.
    """
    target = MOE_TARGETS["tiny_onn"]
    assert target.packed_pool is not None, "the one target that says a pool"
    gate_up, down = target.packed_pool
    with ShardReader(checkpoint) as reader:
        gate_END, up_END = reader.tensor(gate_up).to(device, torch.float32).chunk(2, dim=1)
        down_EDN = reader.tensor(down).to(device, torch.float32)

    def experts_of(layer: int) -> LayerExperts:
        with ShardReader(checkpoint) as reader:
            names = target.shared_ffn(layer)
            if names[0] in reader.names:
                shared = [reader.tensor(name).to(device, torch.float32) for name in names]
            else:
                none_SD = gate_END.new_empty(0, gate_END.shape[2])
                shared = [none_SD, none_SD, none_SD.T]
        return LayerExperts(gate_END, up_END, down_EDN, *shared)

    return experts_of


def run_pool_baselines(
    names: Sequence[str], assembled: PreTrainedModel, batches: Sequence[TokenBatch], seed: int
) -> dict[str, MeanLoss]:
    """Held-out loss of unaligned and random_router; masks and oracles choose among one layer's own neurons.

    Args:
        names: of baselines.
        assembled: the pool before projection; its routers do not survive.
        batches: held-out text.
        seed: of the run.
    """
    losses = {}
    if "unaligned" in names:
        losses["unaligned"] = measure_loss(assembled, batches, "unaligned")
    # What is offloaded lies where it cannot be written to.
    if "random_router" in names and not is_offloaded(assembled):
        draw_routers(assembled, seed)
        losses["random_router"] = measure_loss(assembled, batches, "randomly routed")
    return losses


@torch.no_grad()
def draw_routers(model: PreTrainedModel, seed: int) -> None:
    """Seeded normal rows of the size of those they replace, which keeps gates as constant as they were."""
    for layer, router in enumerate(find_routers(model)):
        weight: Tensor = router.weight  # type: ignore[assignment]
        # Away from the seeds of assembly, or a random router there would be drawn again.
        generator = torch.Generator().manual_seed(layer_seed(seed, 5_000 + layer))
        rows_ED = torch.randn(weight.shape, generator=generator).to(weight)
        weight.copy_(rows_ED * (weight.norm() / rows_ED.norm()))
        if (bias_E := selection_bias(router)) is not None:
            bias_E.zero_()
