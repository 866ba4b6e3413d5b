"""Small scans to write: four weights, norms drawn from a seed."""

import torch

from instruments.parameter_scan.file_format import ScannedSequence, WatchedParameter
from instruments.parameter_scan.targets import ScanRecord

WIDTH = 4
PARAMETERS = [
    WatchedParameter("model.embed_tokens.weight", "embedding", 50, 10, WIDTH),
    WatchedParameter("model.layers.0.self_attn.q_proj.weight", "linear", 10, 7, WIDTH),
    WatchedParameter("model.layers.0.mlp.down_proj.weight", "linear", 23, 10, WIDTH),
    WatchedParameter("model.layers.1.self_attn.q_proj.weight", "linear", 10, 7, WIDTH),
]
P, INPUTS, OUTPUTS = 4, 3 + 6 + 3, 3 + 2 + 3 + 2
ARRAYS = {
    "activation": "activation_BP",
    "gradient": "gradient_BP",
    "in_activation": "in_activation_BI",
    "in_gradient": "in_gradient_BI",
    "out_gradient": "out_gradient_BO",
}


def sequences(numbers):
    return [ScannedSequence(f"text {number}", 2 + number % 3, "made") for number in numbers]


def record(numbers, *, decades=3.0):
    """A scan's record of these sequences; the norms of a sequence depend on its number alone."""
    widths = (P, P, INPUTS, INPUTS, OUTPUTS)
    drawn = [_norms(number, sum(widths), decades).split(widths) for number in numbers]
    arrays = [torch.stack(rows) for rows in zip(*drawn, strict=True)] or [torch.empty(0, width) for width in widths]
    return ScanRecord(sequences(numbers), *arrays)


def _norms(seed, count, decades):
    generator = torch.Generator().manual_seed(seed)
    return 10 ** (torch.rand(count, generator=generator) * decades - decades / 2)
