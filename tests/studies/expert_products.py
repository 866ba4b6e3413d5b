"""Time the experts of one layer: transformers' grouped_mm, which computes the chosen ones, against all at once.

PYTHONPATH=.:tests python -m studies.expert_products
"""

from statistics import median
from time import perf_counter
from types import SimpleNamespace

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from models.tiny_onn.sparse_ffn import TinyONNExperts
from models.training import STRAIGHT_THROUGH

# Hidden size, experts, experts per token, neurons of an expert.
SHAPES = [
    (256, 16, 4, 64), (896, 80, 38, 32), (896, 116, 32, 32), (896, 58, 16, 64), (896, 71, 9, 64), (896, 29, 8, 128),
    (896, 15, 4, 256), (4096, 96, 32, 64), (4096, 48, 16, 128),
]  # fmt: skip


def milliseconds(implementation, *given):
    """Of a layer; the median of five runs after one."""
    times = []
    for _ in range(6):
        began = perf_counter()
        ALL_EXPERTS_FUNCTIONS[implementation](*given)
        times.append(1000 * (perf_counter() - began))
    return median(times[1:])


@torch.inference_mode()
def main():
    for dtype in (torch.float32, torch.bfloat16):
        for hidden, experts, k, n in SHAPES:
            sizes = {"num_experts": experts, "moe_intermediate_size": n, "hidden_size": hidden}
            layer = TinyONNExperts(SimpleNamespace(**sizes, _experts_implementation="eager"), nn.SiLU()).to(dtype)
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.02)
            for tokens in (1, 2, 4, 16, 33, 64, 512, 2048):
                chosen, gates = torch.rand(tokens, experts).topk(k).indices, torch.rand(tokens, k, dtype=dtype)
                given = layer, torch.randn(tokens, hidden, dtype=dtype), chosen, gates
                grouped, whole = (milliseconds(name, *given) for name in ("grouped_mm", STRAIGHT_THROUGH))
                shape = f"{k} of {experts} x {n}, {hidden}, {str(dtype).removeprefix('torch.')}, {tokens} tokens"
                print(f"{shape:50}{grouped:8.2f} ms, all {whole:8.2f} ms; {(experts / k - 1) * n:4.0f}")  # noqa: T201


if __name__ == "__main__":
    main()
