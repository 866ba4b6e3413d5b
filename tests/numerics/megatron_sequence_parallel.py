"""One process of a run of two layers, with sequence parallelism if there are two processes."""

import warnings

import torch
from megatron_on_cpu import megatron_group
from megatron_sizes import B, D, F, T

from instruments.tensor_dump.tensor_dump import TensorDump

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class Ffn(torch.nn.Module):
    """Two pairs of column- and row-parallel layers, so that Megatron reuses its gather buffer."""

    def __init__(self, world):
        super().__init__()
        config = ModelParallelConfig(
            tensor_model_parallel_size=world,
            sequence_parallel=world > 1,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        shared = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False, "skip_bias_add": True}
        layers = []
        for _ in range(2):
            layers += [ColumnParallelLinear(D, F, gather_output=False, **shared)]
            layers += [RowParallelLinear(F, D, input_is_parallel=True, **shared)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(torch.tanh(hidden))[0]
        return hidden


def run(folder, rank, world):
    with megatron_group(rank, world, folder / "store"):
        torch.manual_seed(0)
        model = Ffn(world)
        hidden = torch.randn(T, B, D, generator=torch.Generator().manual_seed(1))
        mine = hidden.chunk(world)[rank].clone().requires_grad_()
        with TensorDump(model, folder / "dump") as dumped:
            model(mine).square().sum().backward()
            dumped.step()
    assert dumped.manifest.missing == {}
